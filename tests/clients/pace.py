"""Audio as a microphone or a phone line gives it: frame by frame, in its own time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import numpy as np
import numpy.typing as npt

from tests.speech import RATE, Audio, resample

FRAME_SECONDS = 0.02


def s16(audio: Audio) -> bytes:
    """Float32 as 16-bit little endian."""
    return (audio.clip(-1, 1) * 32767).astype("<i2").tobytes()


def mulaw(audio: Audio) -> bytes:
    """16 kHz float32 as mu-law at 8 kHz, as a telephone line brings it (ITU-T G.711)."""
    pcm = np.round(resample(audio, 8_000).clip(-1, 1) * 32124).astype(np.int32)
    magnitude = np.minimum(np.abs(pcm), 32635) + 132
    exponent = np.floor(np.log2(magnitude)).astype(np.int32) - 7
    mantissa = (magnitude >> (exponent + 3)) & 15
    sign = np.where(pcm < 0, 0x80, 0)
    code: npt.NDArray[np.uint8] = (~(sign | exponent << 4 | mantissa) & 0xFF).astype(np.uint8)
    return code.tobytes()


def speech_only(audio: Audio, *, quiet: float = 0.05) -> Audio:
    """Up to the last loud 20 ms and nothing after: a client that stops with the last word."""
    frame = RATE // 50
    level = np.sqrt((audio[: len(audio) // frame * frame].reshape(-1, frame) ** 2).mean(axis=1))
    return audio[: (int(np.flatnonzero(level > quiet * level.max())[-1]) + 1) * frame]


async def at_real_time(
    send: Callable[[bytes], Awaitable[object]], data: bytes, bytes_per_second: int, frame: float = FRAME_SECONDS
) -> None:
    """Each frame when its last sample has been spoken."""
    size = round(frame * bytes_per_second)
    began = time.monotonic()
    for start in range(0, len(data), size):
        piece = data[start : start + size]
        due = began + (start + len(piece)) / bytes_per_second
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        await send(piece)
