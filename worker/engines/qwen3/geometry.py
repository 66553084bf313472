"""Lengths in samples, mel frames and tokens. One place, because every layer below the text counts in another unit.

A mel frame is 160 samples (10 ms). 100 frames (1 s) pass the convolutions alone and give 13 tokens; 800 frames (8 s, 104
tokens) attend to each other and to nothing else. So a closed window of 8 s never changes.
"""

from __future__ import annotations

HOP = 160
"""Samples per mel frame."""
FFT = 400
"""Samples that one mel frame sees, centred on its first."""
MELS = 128
CHUNK_FRAMES = 100
CHUNK_TOKENS = 13
WINDOW_FRAMES = 800
WINDOW_SAMPLES = WINDOW_FRAMES * HOP
WINDOW_TOKENS = WINDOW_FRAMES // CHUNK_FRAMES * CHUNK_TOKENS
LOOKAHEAD = FFT // 2 - HOP
"""Samples behind a window's end that its last frame still sees (40, 2.5 ms)."""
MIN_SAMPLES = 8000
"""Shorter clips are padded with zeros to this, unmasked, as the model was trained (0.5 s)."""


def frames_of(samples: int) -> int:
    """Mel frames of a clip of ``samples``."""
    return max(samples, MIN_SAMPLES) // HOP


def tokens_of(frames: int) -> int:
    """Tokens that the encoder makes of ``frames``: three convolutions of stride 2, each second alone."""
    whole, rest = divmod(frames, CHUNK_FRAMES)
    for _ in range(3):
        rest = (rest + 1) // 2
    return whole * CHUNK_TOKENS + rest


def closed_windows(samples: int, *, finished: bool) -> int:
    """Windows of a clip that no later sample can change.

    A finished clip has no later sample, so its last window counts as closed only where it is full.
    """
    if finished:
        return frames_of(samples) // WINDOW_FRAMES
    return max(0, samples - LOOKAHEAD) // WINDOW_SAMPLES
