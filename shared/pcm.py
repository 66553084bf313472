"""Units of sound. Inside Napscribe audio is mono at 16 kHz; positions are samples, durations seconds."""

from __future__ import annotations

SAMPLE_RATE = 16_000
"""Hz of everything behind the decoder."""


def seconds(samples: int) -> float:
    """Samples at 16 kHz as seconds."""
    return samples / SAMPLE_RATE


def samples(duration: float) -> int:
    """Seconds as whole samples at 16 kHz, rounded to the nearest."""
    return round(duration * SAMPLE_RATE)
