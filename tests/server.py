"""A real ``napscribe serve`` in a process of its own, for tests and for the demo and benchmark programs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[1]
START_SECONDS = 20.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """A started server. ``url`` is its root; ``log()`` what it has said on stderr."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, folder: Path) -> None:
        self.process = process
        self.pid = process.pid
        self.url = f"http://127.0.0.1:{port}"
        self.port = port
        self.folder = folder
        self.spool = folder / "spool"
        self.http = httpx.Client(base_url=self.url, timeout=120)

    def log(self) -> str:
        return (self.folder / "stderr").read_text(errors="replace")

    def ps(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.http.get("/api/ps").json()
        return answer

    @property
    def worker(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.ps()["worker"]
        return answer

    def worker_pid(self) -> int:
        """Pid of the worker. Raises AssertionError if there is none."""
        pid = self.worker["pid"]
        assert isinstance(pid, int), self.worker
        return pid

    def transcribe(self, path: Path, **fields: str) -> httpx.Response:
        with path.open("rb") as recording:
            return self.http.post("/v1/audio/transcriptions", files={"file": (path.name, recording)}, data=fields)

    def until(self, condition: Callable[[], bool], what: str, seconds: float = 30) -> None:
        """Poll the outside world, bounded."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}\n{self.log()[-3000:]}"
            time.sleep(0.02)

    def stop(self) -> int:
        """SIGTERM and the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)


@contextlib.contextmanager
def serving(cwd: Path | None = None, *, script: bool = False, **settings: object) -> Iterator[Server]:
    """``with serving(idle_seconds=2) as server``: settings without their prefix; stopped and reaped in the end.

    ``script`` starts the console script as people do (where nothing is installed, its module); otherwise the same runs with
    the blocking-call detector on.
    """
    console = Path(sys.executable).parent / "napscribe"
    plain = [str(console)] if console.exists() else [sys.executable, "-P", "-m", "gateway"]
    command = [*(plain if script else [sys.executable, "-P", "-m", "tests.blocking"]), "serve"]
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="napscribe-test-") as name:
        folder = Path(name)
        environment = {key: value for key, value in os.environ.items() if not key.startswith("NAPSCRIBE_")}
        chosen = {"port": port, "model": "embedded", "spool_dir": folder / "spool", "runtime_dir": folder, **settings}
        environment.update({f"NAPSCRIBE_{key.upper()}": str(value) for key, value in chosen.items()})
        with (folder / "stderr").open("wb") as stderr:
            process = subprocess.Popen(
                command,
                cwd=cwd or ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )
        server = Server(process, port, folder)
        try:
            _wait_until_serving(server)
            yield server
        finally:
            server.http.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.stop()
            if process.poll() is None:
                process.kill()
                process.wait()


def _wait_until_serving(server: Server) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert server.process.poll() is None, f"the server ended: {server.log()}"
        with contextlib.suppress(httpx.TransportError):
            if server.http.get("/health").status_code == 200:
                return
        time.sleep(0.02)
    raise AssertionError(f"the server does not answer: {server.log()}")


def events_of(body: str) -> list[dict[str, Any]]:
    """The JSON objects of an SSE body, in order."""
    lines = (line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: {"))
    return [json.loads(line) for line in lines]
