"""What sound is inside the worker."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Audio = npt.NDArray[np.float32]
"""Mono at 16 kHz, shape ``(samples,)``, nominally within [-1, 1]."""
