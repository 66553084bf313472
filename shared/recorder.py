"""A flight recorder that survives SIGKILL: which requests the worker was working on when it died.

A message could not say it: what a process writes to a socket in the last microseconds before a crash is lost with it.
Shared memory is not. The gateway makes a small anonymous mapping for each generation and passes its descriptor on; the
worker writes into it, the gateway reads its own mapping when the worker is gone, and only requests named there are
suspects.
"""

from __future__ import annotations

import enum
import mmap
import os
import struct
from collections.abc import Iterable

AUDIO_THREADS = 8
"""Threads that may decode files at once, each with a slot of its own."""


class Slot(enum.IntEnum):
    """Who is at work; each is written by one thread only."""

    ENGINE = 0
    LIVE = 1
    """Decoding and voice activity detection of live streams: poisonous audio may end the process there too."""
    AUDIO = 2
    """The same for files. This slot is the first thread's; the one with number ``n`` has ``Slot.AUDIO + n``."""


_SLOTS = Slot.AUDIO + AUDIO_THREADS
_SLOT_BYTES = 16 * 1024
_SIZE = _SLOTS * _SLOT_BYTES
_LENGTH = struct.Struct("<I")


class Recorder:
    """One mapping, seen by both processes."""

    def __init__(self, descriptor: int) -> None:
        """Map the memory behind a descriptor of ``Recorder.create``. Raises OSError or ValueError if it is none."""
        self._map = mmap.mmap(descriptor, _SIZE)

    @staticmethod
    def create() -> int:
        """A descriptor of new, empty memory; the caller closes it."""
        descriptor = os.memfd_create("napscribe-recorder", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _SIZE)
        return descriptor

    def begin(self, slot: int, work: Iterable[tuple[str, int]]) -> None:
        """Work on these ``(request id, segment index)`` begins now. The length is written last: a torn record reads as none."""
        self.end(slot)
        body = "\n".join(f"{request_id} {index}" for request_id, index in work).encode()[: _SLOT_BYTES - _LENGTH.size]
        start = slot * _SLOT_BYTES + _LENGTH.size
        self._map[start : start + len(body)] = body
        _LENGTH.pack_into(self._map, slot * _SLOT_BYTES, len(body))

    def end(self, slot: int) -> None:
        _LENGTH.pack_into(self._map, slot * _SLOT_BYTES, 0)

    def close(self) -> None:
        self._map.close()

    def read(self) -> dict[str, int]:
        """Requests that are being worked on, each with the highest segment index in hand; the engine's goes before those of the
        audio threads, which are ahead of it."""
        found: dict[str, int] = {}
        for slot in range(_SLOTS):
            here: dict[str, int] = {}
            start = slot * _SLOT_BYTES
            (length,) = _LENGTH.unpack_from(self._map, start)
            body = self._map[start + _LENGTH.size : start + _LENGTH.size + min(length, _SLOT_BYTES - _LENGTH.size)]
            for line in body.decode(errors="replace").split("\n"):
                request_id, _, index = line.partition(" ")
                if request_id and index.isdigit():
                    here[request_id] = max(int(index), here.get(request_id, 0))
            found = here | found
        return found
