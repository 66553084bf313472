"""One track of a call: numbered frames, put right where they come out of order, with silence where some never come.

Time is that of the sender's clock. A gap is filled so far that an utterance ends in it; the rest of a long one is left out
of the audio and kept as an offset, so that times stay those of the call.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

WINDOW = 10
"""Frames that wait for an earlier one (200 ms); then it counts as lost."""
TOLERANCE_MS = 100.0
"""How far the sender's time stamps may run ahead of its audio before that is a gap: they jitter by a frame or two."""
MAX_FILL_MS = 2_000.0
MAX_OFFSETS = 512
"""Long gaps that are remembered."""
SAMPLES_PER_MS = 16
_HALF_A_FRAME = 0.5
_ALIGNMENT = 4
"""Bytes of the largest sample of all channels, two of 16 bits."""

Frame = tuple[bytes, int | None, float | None]
"""Audio, number, milliseconds since the start of the stream."""


class FrameOrder:
    """``push`` takes frames as they come and returns the audio that is next; positions are milliseconds."""

    def __init__(self, bytes_per_ms: float, silence: int) -> None:
        """``silence``: the byte that means nothing is heard."""
        self._bytes_per_ms = bytes_per_ms
        self._silence = bytes([silence])
        self._next: int | None = None
        self._held: dict[int, Frame] = {}
        self._played = 0.0
        """Milliseconds of audio given out, filled silence included."""
        self._offsets: list[tuple[float, float]] = []
        """(position in the audio, the call's time minus that position), ascending."""
        self.lost = 0
        """Frames that came too late and were dropped."""

    @property
    def clock(self) -> float:
        """The sender's time of the next byte."""
        return self._played + (self._offsets[-1][1] if self._offsets else 0.0)

    def push(self, data: bytes, number: int | None, timestamp: float | None) -> bytes:
        """``number`` counts frames by one; either may be missing, and is believed only as far as the other agrees."""
        if not data:
            return b""
        frame = (data, number, timestamp)
        if number is None or self._next is None or number == self._next or self._follows(frame):
            return b"".join([*self._play(frame), *self._drain()])
        if number < self._next:
            return self._late(frame)
        self._held[number] = frame
        if len(self._held) <= WINDOW:
            return b""
        return b"".join([*self._play(self._held.pop(min(self._held))), *self._drain()])

    def flush(self) -> bytes:
        """Everything that still waits."""
        return b"".join(piece for number in sorted(self._held) for piece in self._play(self._held.pop(number)))

    def seconds(self, sample: int) -> float:
        """Call time of a sample at 16 kHz of the audio given out."""
        position = sample / SAMPLES_PER_MS
        index = bisect.bisect_right(self._offsets, position, key=lambda entry: entry[0]) - 1
        offset = self._offsets[max(0, index)][1] if self._offsets else 0.0
        return round((position + offset) / 1000, 3)

    # ------------------------------------------------------------ inside

    def _follows(self, frame: Frame) -> bool:
        """By its time it is next, whatever its number says: some senders number all tracks together, or not at all."""
        data, _, timestamp = frame
        if timestamp is None:
            return False
        ahead, length = timestamp - self.clock, len(data) / self._bytes_per_ms
        return -_HALF_A_FRAME * length < ahead < _HALF_A_FRAME * length

    def _late(self, frame: Frame) -> bytes:
        """Its place has passed; or the numbers began again, if its time has not."""
        timestamp = frame[2]
        if timestamp is not None and timestamp < self.clock:
            self.lost += 1
            return b""
        return b"".join([*self._play(frame), *self._drain()])

    def _drain(self) -> Iterator[bytes]:
        while self._next in self._held:
            yield from self._play(self._held.pop(self._next))

    def _play(self, frame: Frame) -> Iterator[bytes]:
        data, number, timestamp = frame
        length = len(data) / self._bytes_per_ms
        if not self._offsets:
            self._offsets.append((0.0, timestamp or 0.0))
        yield self._fill(self._gap(number, timestamp, length))
        if number is not None:
            self._next = number + 1
        self._played += length
        yield data

    def _gap(self, number: int | None, timestamp: float | None, length: float) -> float:
        """Milliseconds missing before a frame."""
        skipped = number is not None and self._next is not None and number > self._next
        if timestamp is not None:
            gap = timestamp - self.clock
            return gap if gap > TOLERANCE_MS or (skipped and gap > _HALF_A_FRAME * length) else 0.0
        return (number - self._next) * length if skipped and number is not None and self._next is not None else 0.0

    def _fill(self, gap: float) -> bytes:
        filled = min(gap, MAX_FILL_MS)
        size = round(filled * self._bytes_per_ms / _ALIGNMENT) * _ALIGNMENT
        self._played += size / self._bytes_per_ms
        if gap > filled:
            self._offsets.append((self._played, self._offsets[-1][1] + gap - filled))
            del self._offsets[1 : max(1, len(self._offsets) - MAX_OFFSETS)]
        return self._silence * size
