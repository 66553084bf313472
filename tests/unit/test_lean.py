"""Postponed imports: not run while the gateway starts, whole when somebody looks. Each case in an interpreter of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gateway import lean
from tests.server import ROOT


def run(code: str) -> str:
    """Output of a fresh interpreter that says ``postpone()`` first, as ``napscribe serve`` does."""
    code = f"import sys\nfrom gateway import lean\nlean.postpone()\n{code}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    # -S: a .pth file of some other package may import half of the standard library before us.
    paths = f"import sys; sys.path += {sys.path!r}\n"
    done = subprocess.run(
        [sys.executable, "-S", "-c", paths + code], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_gateway_starts_without_looking_into_any_of_them() -> None:
    looked = (
        "import gateway.cli, gateway.app\n"
        "print(*(n for n in sorted(lean.POSTPONED) if type(sys.modules.get(n)) not in (type(None), lean.PostponedModule)))"
    )
    assert run(looked) == ""


def test_it_saves_what_it_promises() -> None:
    """Private memory of a started gateway, with and without."""
    measured = (
        "import gateway.cli, gateway.app\n"
        "lines = open('/proc/self/smaps_rollup').read().splitlines()\n"
        "print(sum(int(line.split()[1]) for line in lines if line.startswith('Anonymous')))"
    )
    plain = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path += {[str(ROOT), *sys.path]!r}\n{measured}"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert int(run(measured)) < int(plain) - 2000


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        ("import html; print(html.escape('<'))", "&lt;"),
        ("import http.client; print(http.client.responses[404])", "Not Found"),
        ("from http.client import responses; print(responses[404])", "Not Found"),
        ("import asyncio, ssl; print(ssl.create_default_context().check_hostname)", "True"),
        ("import logging.config; print(callable(logging.config.dictConfig))", "True"),
        ("import tempfile; print(tempfile.TemporaryDirectory().__exit__(None, None, None))", "None"),
        ("import hashlib; print(hashlib.sha256(b'').hexdigest()[:8])", "e3b0c442"),
        ("import httpx; print(httpx.Client().is_closed)", "False"),
        ("import difflib; print(difflib.missing)", "AttributeError"),
        ("import difflib; print(hasattr(difflib, '__path__'), type(difflib).__name__)", "False PostponedModule"),
    ],
)
def test_a_postponed_module_is_whole_when_looked_into(use: str, expected: str) -> None:
    code = f"try:\n    {use}\nexcept AttributeError as error:\n    print(type(error).__name__)"
    assert run(code) == expected


def test_threads_that_look_at_once_see_the_same_whole_module() -> None:
    code = (
        "import threading, html\n"
        "barrier, seen = threading.Barrier(8), []\n"
        "def look():\n    barrier.wait(); seen.append(html.unescape('&eacute;'))\n"
        "threads = [threading.Thread(target=look) for _ in range(8)]\n"
        "[thread.start() for thread in threads]; [thread.join() for thread in threads]\n"
        "print(set(seen), len(seen))"
    )
    assert run(code) == "{'é'} 8"


def test_what_is_imported_already_stays() -> None:
    assert all(not isinstance(sys.modules.get(name), lean.PostponedModule) for name in lean.POSTPONED)
