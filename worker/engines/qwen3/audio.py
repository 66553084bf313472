"""The samples of one sequence, kept on the host until their windows are closed, and the slices that mel frames need."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import numpy as np

from worker.audio.samples import Audio
from worker.engines.qwen3 import geometry


class SampleBuffer:
    """Samples in order of arrival. A file's segment comes in one piece and is not copied; live audio grows in place."""

    def __init__(self) -> None:
        self._store: Audio = np.zeros(0, np.float32)
        self.length = 0
        self.peak = 0.0
        """Largest absolute value so far."""

    def append(self, audio: Audio) -> None:
        """Add samples. What is not a number becomes silence: one bad sample would spoil every token of its window."""
        if not len(audio):
            return
        audio = audio.astype(np.float32, copy=False)
        highest, lowest = float(audio.max()), float(audio.min())
        if not isfinite(highest - lowest):  # it would be NaN or infinite, too
            audio = np.nan_to_num(audio, nan=0.0, posinf=0.0, neginf=0.0)
            highest, lowest = float(audio.max()), float(audio.min())
        self.peak = max(self.peak, highest, -lowest)
        if self.length == 0:
            self._store = audio
        else:
            self._grow(self.length + len(audio))
            self._store[self.length : self.length + len(audio)] = audio
        self.length += len(audio)

    def all(self) -> Audio:
        """Everything so far."""
        return self._store[: self.length]

    def _grow(self, needed: int) -> None:
        if needed > len(self._store) or not self._store.flags.owndata or not self._store.flags.writeable:
            larger = np.empty(max(needed, 2 * self.length), np.float32)
            larger[: self.length] = self._store[: self.length]
            self._store = larger

    def for_frames(self, first: int, last: int) -> Stretch:
        """Samples that the mel frames ``first`` to ``last`` (exclusive) see: 200 on each side of a frame's start."""
        half = geometry.FFT // 2
        return Stretch(self, first * geometry.HOP - half, (last - 1) * geometry.HOP + half)

    def write(self, start: int, stop: int, out: Audio) -> None:
        """The samples ``[start, stop)``, divided by the peak where that is above 1.

        Beyond the clip's ends the sound is mirrored, as torch.stft does with centred frames. Clips under 0.5 s are
        lengthened with silence first.
        """
        size = max(self.length, geometry.MIN_SAMPLES)
        inner = self._store[max(start, 0) : min(stop, self.length)]
        at = max(start, 0) - start
        out[at : at + len(inner)] = inner
        out[at + len(inner) :] = 0.0
        if start < 0:
            out[:-start] = self._mirrored(range(-start, 0, -1))
        if stop > size:
            out[size - start :] = self._mirrored(range(size - 2, size - 2 - (stop - size), -1))
        if self.peak > 1.0:
            out /= self.peak

    def _mirrored(self, places: range) -> Audio:
        out = np.zeros(len(places), np.float32)
        index = np.fromiter(places, np.int64, len(places))
        heard = index < self.length
        out[heard] = self._store[index[heard]]
        return out


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of a buffer. It is copied once, to where it is wanted: for a GPU that is memory which it reads itself."""

    buffer: SampleBuffer
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def write(self, out: Audio) -> None:
        """Fill ``out``, shape ``(len(self),)``."""
        self.buffer.write(self.start, self.stop, out)

    def array(self) -> Audio:
        """A copy."""
        out = np.empty(len(self), np.float32)
        self.write(out)
        return out
