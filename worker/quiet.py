"""Where to cut speech that has no pause: the quietest tenth of a second, as Qwen3-ASR's own long-audio splitter does."""

from __future__ import annotations

import numpy as np

from shared.pcm import samples
from worker.engines.base import Audio

WINDOW_S = 0.1
"""Length of the window that is compared, seconds."""


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
