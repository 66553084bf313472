"""A copy of interpreter, libraries and Napscribe that one user owns and nobody else runs, as in a container of its own.

Two things make it necessary. Memory can be given back only for files that the user owns, which a checkout of root's is not.
And pages of a file that other processes have mapped, too, count as shared and are never given back: on a busy machine
the figure would depend on the neighbours.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
from packaging.requirements import Requirement

from tests.server import ROOT, START_SECONDS, Server, free_port

PACKAGES = ("gateway", "shared", "worker")
_SKIPPED = ("site-packages", "test", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "config-*")
_PROBE = """
import gateway.app, re
found = re.findall(r"/\\S+[.]so[.0-9]*$", open("/proc/self/maps").read(), re.MULTILINE)
print(*sorted(set(found)), sep="\\n")
"""


class Installation:
    """``with private_installation() as installation``: where it lies, and who owns it now."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.site_packages = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
        self.owner = os.getuid()

    @property
    def environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if key in {"PATH", "LANG", "LC_ALL", "TZ"}}
        return {**kept, "LD_LIBRARY_PATH": str(self.folder / "lib"), "HOME": str(self.folder)}

    def give_to(self, uid: int) -> None:
        """Change the owner of every file. Raises PermissionError for anybody but root."""
        for path in [self.folder, *self.folder.rglob("*")]:
            os.chown(path, uid, uid, follow_symlinks=False)
        self.owner = uid

    @contextlib.contextmanager
    def serving(self, **settings: object) -> Iterator[Server]:
        """A server run by the owner; settings without their prefix."""
        port, root = free_port(), os.getuid() == 0
        with tempfile.TemporaryDirectory(prefix="napscribe-bench-") as name:
            folder = Path(name)
            os.chown(folder, self.owner, self.owner)
            chosen = {
                "port": port,
                "model": "embedded",
                "spool_dir": folder / "spool",
                "runtime_dir": folder,
                **settings,
            }
            variables = {f"NAPSCRIBE_{key.upper()}": str(value) for key, value in chosen.items()}
            with (folder / "stderr").open("wb") as stderr:
                process = subprocess.Popen(
                    [str(self.python), "-P", "-m", "gateway", "serve"],
                    cwd="/",
                    env={**self.environment, **variables},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    user=self.owner if root else None,
                    group=self.owner if root else None,
                    extra_groups=[] if root else None,
                )
            server = Server(process, port, folder)
            try:
                server.until(lambda: _answers(server), "the server answers", START_SECONDS)
                yield server
            finally:
                server.http.close()
                server.stop()


def _answers(server: Server) -> bool:
    assert server.process.poll() is None, server.log()
    with contextlib.suppress(httpx.TransportError):
        return server.http.get("/health").is_success
    return False


@contextlib.contextmanager
def private_installation() -> Iterator[Installation]:
    """Copy what ``pip install 'napscribe[embedded]'`` brings, the interpreter, and the libraries that both need."""
    with tempfile.TemporaryDirectory(prefix="napscribe-bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        installation = Installation(folder)
        _copy_interpreter(installation)
        _copy_packages(installation.site_packages)
        _run(installation, "-m", "compileall", "-q", str(installation.site_packages))
        for library in map(Path, _run(installation, "-c", _PROBE).split()):
            if folder not in library.parents and not library.name.startswith("ld-"):
                shutil.copy2(library, folder / "lib" / library.name)
        os.sync()  # a page that waits to be written to disk cannot be given back
        yield installation


def _run(installation: Installation, *arguments: str) -> str:
    """Run its interpreter; what it prints."""
    command = [str(installation.python), "-P", *arguments]
    done = subprocess.run(command, env=installation.environment, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def _copy_interpreter(installation: Installation) -> None:
    installation.python.parent.mkdir(parents=True)
    shutil.copy2(Path(sys.executable).resolve(), installation.python)
    library = sysconfig.get_config_var("INSTSONAME") or ""
    shared = Path(sysconfig.get_config_var("LIBDIR") or "", library)
    stdlib = installation.site_packages.parent
    shutil.copytree(sysconfig.get_path("stdlib"), stdlib, ignore=shutil.ignore_patterns(*_SKIPPED))
    if ".so" in library and shared.is_file():
        shutil.copy2(shared, installation.folder / "lib" / library)


def _copy_packages(site_packages: Path) -> None:
    for name in sorted(_requirements("napscribe", {"embedded"})):
        distribution = importlib.metadata.distribution(name)
        for file in distribution.files or ():
            source = Path(str(distribution.locate_file(file)))
            if ".." not in file.parts and "__pycache__" not in file.parts and source.is_file():
                target = site_packages / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, site_packages / package, ignore=shutil.ignore_patterns("__pycache__"))


def _requirements(name: str, extras: set[str]) -> set[str]:
    """Names of all distributions that ``name[extras]`` needs here, itself left out."""
    found: set[str] = set()
    waiting = [(name, extras)]
    while waiting:
        wanted, wanted_extras = waiting.pop()
        for line in importlib.metadata.requires(wanted) or ():
            requirement = Requirement(line)
            contexts = [{"extra": extra} for extra in wanted_extras | {""}]
            if requirement.marker is not None and not any(map(requirement.marker.evaluate, contexts)):
                continue
            canonical = re.sub(r"[-_.]+", "-", requirement.name).lower()
            if canonical not in found:
                found.add(canonical)
                waiting.append((canonical, set(requirement.extras)))
    return found
