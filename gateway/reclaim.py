"""Gives the gateway's memory back when nothing is going on.

Three steps, each measured to matter: collect garbage, let malloc return free pages, and page out the read-only file
mappings (interpreter and extension modules), which come back from the page cache in microseconds when next touched.
The last one silently does nothing on files that this user neither owns nor may write, so the image lets the user own them.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

_MADV_PAGEOUT = 21
"""Linux 5.4, include/uapi/asm-generic/mman-common.h."""
SETTLE_SECONDS = 0.5
"""Answers still on their way are let through first."""
QUIET_SECONDS = 20.0
"""After this long without a request the pages that it brought back are given back again."""


def reclaim() -> None:
    """All three steps, at once. A few milliseconds."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    madvise = libc.madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for start, length in _read_only_file_mappings(Path("/proc/self/maps").read_text()):
        madvise(start, length, _MADV_PAGEOUT)


def _read_only_file_mappings(maps: str) -> list[tuple[int, int]]:
    """Start and length in bytes of private mappings of files that nothing writes to."""
    found = []
    for line in maps.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) < 6 or not fields[5].startswith("/") or "w" in fields[1] or "s" in fields[1]:
            continue
        start, _, end = fields[0].partition("-")
        found.append((int(start, 16), int(end, 16) - int(start, 16)))
    return found


class Reclaimer:
    """Decides when: after the worker has gone, and when a quiet time follows requests at a sleeping gateway."""

    def __init__(self, asleep: Callable[[], bool]) -> None:
        """``asleep()``: there is no worker now."""
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._asleep = asleep

    def worker_gone(self) -> None:
        """The worker has gone or will not be there for a while."""
        self._arm(SETTLE_SECONDS)

    def request_seen(self) -> None:
        """Some request was served. A poller must not make us work all the time: one quiet time runs at a time."""
        if self._timer is None and self._asleep():
            self._arm(QUIET_SECONDS)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self._run)

    def _run(self) -> None:
        self._timer = None
        if self._asleep():
            reclaim()
