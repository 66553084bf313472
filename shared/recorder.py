"""A flight recorder that survives SIGKILL: which requests the worker was working on when it died.

A message could not say it: what a process writes to a socket in the last microseconds before a crash is lost with it.
Shared memory is not. The worker writes into a small mapped file in the private folder; the gateway reads it when the
worker is gone, and only requests named there are suspects.
"""

from __future__ import annotations

import enum
import mmap
import struct
from collections.abc import Iterable
from pathlib import Path

_SLOT_BYTES = 16 * 1024
_LENGTH = struct.Struct("<I")


class Slot(enum.IntEnum):
    """Who is at work; each is written by one thread only."""

    ENGINE = 0
    AUDIO = 1
    """Decoding and voice activity detection: a poisonous file may end the process there too."""


class Recorder:
    """The worker's side."""

    def __init__(self, path: Path) -> None:
        """Creates the file. Raises OSError."""
        size = _SLOT_BYTES * len(Slot)
        with path.open("wb") as file:
            file.truncate(size)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)

    def begin(self, slot: Slot, work: Iterable[tuple[str, int]]) -> None:
        """Work on these ``(request id, segment index)`` begins now. The length is written last: a torn record reads as none."""
        self.end(slot)
        body = "\n".join(f"{request_id} {index}" for request_id, index in work).encode()[: _SLOT_BYTES - _LENGTH.size]
        start = slot * _SLOT_BYTES + _LENGTH.size
        self._map[start : start + len(body)] = body
        _LENGTH.pack_into(self._map, slot * _SLOT_BYTES, len(body))

    def end(self, slot: Slot) -> None:
        _LENGTH.pack_into(self._map, slot * _SLOT_BYTES, 0)

    def close(self) -> None:
        self._map.close()


def read(path: Path) -> dict[str, int]:
    """Requests that were being worked on, each with the lowest segment index in hand; empty if there is no record."""
    try:
        data = path.read_bytes()
    except OSError:
        return {}
    found: dict[str, int] = {}
    for slot in Slot:
        start = slot * _SLOT_BYTES
        if len(data) < start + _LENGTH.size:
            break
        (length,) = _LENGTH.unpack_from(data, start)
        body = data[start + _LENGTH.size : start + _LENGTH.size + length]
        for line in body.decode(errors="replace").split("\n"):
            request_id, _, index = line.partition(" ")
            if request_id and index.isdigit():
                found[request_id] = min(int(index), found.get(request_id, int(index)))
    return found
