"""Imports that the gateway never uses are put off until somebody uses them: 3 MiB less in a process that is always there.

The libraries below us import whole modules for one function on a rare path: starlette takes ``http.client`` for a table
of phrases, granian takes ``ssl`` and ``logging.config`` for options that are off here. Each such module becomes an empty
one that fills itself the first time anything is looked up in it; the code that imported it cannot tell the difference.

Two modules are hidden instead while the standard library that can do without them is imported: asyncio then leaves TLS
out, and hashlib takes its own C functions instead of OpenSSL's. Both can be imported afterwards as usual (httpx does), but
asyncio's own ``ssl=`` arguments do not work in this process.
"""

from __future__ import annotations

import sys
import threading
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.abc import Loader  # it would import some of what we want to postpone

POSTPONED = frozenset(
    {
        "argparse",
        "difflib",
        "granian",
        "granian.server",
        "html",
        "http.client",
        "http.cookies",
        "locale",
        "logging.config",
        "multiprocessing",
        "shutil",
        "ssl",
    }
)
"""Modules that nobody looks into while the gateway starts and serves."""

HIDDEN = frozenset({"ssl", "_hashlib"})
"""Modules without which ``asyncio``, ``hashlib`` and ``hmac`` are whole enough for us."""

_LOADER = "_postponed_loader"
_locks: dict[str, threading.RLock] = {}
"""One a module, so that two modules can be filled at once, each by a thread of its own; an import may need the other."""


class PostponedModule(ModuleType):
    """A module whose code has not run yet."""

    def __getattr__(self, name: str) -> Any:
        """Called for what is not there, so at most for the first look into the module. Raises what its code raises."""
        if name.startswith("__"):  # the import system asks for __path__ and the like; only the code defines the rest
            raise AttributeError(name)
        with _locks[self.__name__]:
            loader: Loader | None = self.__dict__.pop(_LOADER, None)
            if loader is not None:
                loader.exec_module(self)
                self.__class__ = ModuleType  # type: ignore[assignment]
        return ModuleType.__getattribute__(self, name)


class _PostponingLoader:
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return PostponedModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        module.__dict__[_LOADER] = self._loader
        _locks[module.__name__] = threading.RLock()


class _Finder:
    """First in ``sys.meta_path``."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in POSTPONED:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _PostponingLoader(spec.loader)  # type: ignore[assignment]
        return spec


def postpone() -> None:
    """Once, before anything else is imported. What is imported already stays as it is."""
    sys.meta_path.insert(0, _Finder)
    hidden = [name for name in HIDDEN if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        import asyncio  # noqa: F401
        import hashlib  # noqa: F401
        import hmac  # noqa: F401
    finally:
        for name in hidden:
            if sys.modules.get(name, name) is None:
                del sys.modules[name]
