"""The samples of one sequence, kept on the host until their windows are closed, and the slices that mel frames need."""

from __future__ import annotations

import numpy as np

from worker.engines.base import Audio
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
        if audio.dtype != np.float32 or not np.isfinite(audio).all():
            audio = np.nan_to_num(audio.astype(np.float32), nan=0.0, posinf=0.0, neginf=0.0)
        if not len(audio):
            return
        self.peak = max(self.peak, float(audio.max()), -float(audio.min()))
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

    def for_frames(self, first: int, last: int) -> Audio:
        """Samples that the mel frames ``first`` to ``last`` (exclusive) see: 200 on each side of a frame's start.

        Beyond the clip's ends the sound is mirrored, as torch.stft does with centred frames. Clips under 0.5 s are
        lengthened with silence first. The result is a new array, divided by the peak where that is above 1.
        """
        size = max(self.length, geometry.MIN_SAMPLES)
        half = geometry.FFT // 2
        start, stop = first * geometry.HOP - half, (last - 1) * geometry.HOP + half
        inner = self._store[max(start, 0) : min(stop, self.length)]
        out = np.empty(stop - start, np.float32)
        at = max(start, 0) - start
        out[at : at + len(inner)] = inner
        out[at + len(inner) :] = 0.0
        if start < 0:
            out[:-start] = self._mirrored(range(-start, 0, -1))
        if stop > size:
            out[size - start :] = self._mirrored(range(size - 2, size - 2 - (stop - size), -1))
        if self.peak > 1.0:
            out /= self.peak
        return out

    def _mirrored(self, places: range) -> Audio:
        out = np.zeros(len(places), np.float32)
        index = np.fromiter(places, np.int64, len(places))
        heard = index < self.length
        out[heard] = self._store[index[heard]]
        return out
