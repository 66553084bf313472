"""Where to cut speech: in its best pause, or where it has none, in the quietest tenth of a second, as Qwen3-ASR's own
long-audio splitter does."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from shared.pcm import samples
from worker.audio.samples import Audio

WINDOW_S = 0.1
"""Length of the window that is compared, seconds."""


def best_pause(regions: Sequence[tuple[int, int]], now: int, earliest: int, good: int) -> int | None:
    """Middle of the longest pause that does not lie before ``earliest``; all in samples.

    ``regions`` of speech in order, disjoint; the audio ends at ``now``. Pauses of at least ``good`` samples count as equal. Of equal
    ones it is the latest. None: there is no pause.
    """
    best, at = 0, None
    for (_, end), (begin, _) in pairwise([*regions, (now, now)]):
        middle, length = (end + begin) // 2, min(begin - end, good)
        if middle >= earliest and length >= max(best, 1):
            best, at = length, middle
    return at


def quietest(audio: Audio) -> int:
    """Middle of the window of ``WINDOW_S`` with the least energy, in samples; the middle of all where there is no such window."""
    width = samples(WINDOW_S)
    if len(audio) <= width:
        return len(audio) // 2
    total = np.concatenate(([0.0], np.cumsum(np.square(audio, dtype=np.float64))))
    return int(np.argmin(total[width:] - total[:-width])) + width // 2


def quiet_middle(audio: Audio, share: float) -> int:
    """Where to cut in two: the quietest place within ``share`` of the audio on either side of its middle, in samples."""
    begin = int(len(audio) * (0.5 - share))
    return begin + quietest(audio[begin : len(audio) - begin])
