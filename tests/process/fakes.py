"""A real server with the fake worker (tests/fakes/worker.py), and the recordings that it takes."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.server import Server

FAKE = f"{sys.executable} -m tests.fakes.worker"
"""For ``serving(worker=f"{FAKE} --flags")``."""
SEGMENT_BYTES = 1000
"""Bytes of an upload that the fake worker takes for one segment."""
GUARD = 3
"""Times a stated figure: tests run on busy machines and only guard against hangs; ``make bench`` holds the figure itself."""


def recording(folder: Path, segments: int) -> Path:
    """A file of so many segments."""
    path = folder / f"recording-{segments}"
    path.write_bytes(bytes(SEGMENT_BYTES * segments))
    return path


def segments_text(segments: int) -> str:
    """What the fake worker says to ``recording(segments)``."""
    return " ".join(f"w{index}" for index in range(segments))


def uploads(spool: Path) -> list[Path]:
    """Files that lie in the spool, whichever gateway they belong to."""
    return [path for path in spool.rglob("*") if path.is_file() and path.name != "lock"]


def running(server: Server) -> int:
    """Files that the worker has."""
    return _files(server, "running")


def waiting(server: Server) -> int:
    """Files that the worker has not been given yet."""
    return _files(server, "waiting")


def _files(server: Server, what: str) -> int:
    lanes: dict[str, dict[str, int]] = server.ps()["queue"]
    return lanes["interactive"][what] + lanes["batch"][what]
