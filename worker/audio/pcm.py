"""Samples of every format to mono float32 within [-1, 1]: headerless PCM, and what a decoder gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.errors import BadRequest, UnsupportedAudio
from shared.messages import RawAudio
from worker.audio.samples import Audio

MIN_RATE, MAX_RATE = 1_000, 768_000
"""Hz. A header may claim any rate; below, a small file would become days of sound."""

MAX_CHANNELS = 64

LOUDEST = 2.0**31
"""Some programs write floats on the scale of whole numbers; beyond that it is rubbish that would overflow a filter."""

CANCELLED = 1e-3
"""Share of a channel's energy (30 dB less) that is left where two cancel each other. What is mixed on purpose keeps far more."""
_LOOK_AT_ONE_IN = 16
"""Samples: looking at all of them would cost more than averaging them."""

_ENCODINGS = {"s16le": "<i2", "f32le": "<f4", "mulaw": "u1", "alaw": "u1"}


class PcmDecoder:
    """Headerless PCM in pieces of any size to mono float32 at its own rate.

    Raises UnsupportedAudio for an unknown encoding, BadRequest for an impossible rate or number of channels.
    """

    def __init__(self, raw: RawAudio) -> None:
        if raw.encoding not in _ENCODINGS:
            known = ", ".join(sorted(_ENCODINGS))
            raise UnsupportedAudio(f"Unknown encoding {raw.encoding!r}.", hint=f"Use one of: {known}.")
        if not MIN_RATE <= raw.sample_rate <= MAX_RATE:
            raise BadRequest(
                f"A sample rate of {raw.sample_rate} Hz is out of range.",
                hint=f"Rates from {MIN_RATE} to {MAX_RATE} Hz work.",
                param="sample_rate",
            )
        if not 1 <= raw.channels <= MAX_CHANNELS:
            raise BadRequest(
                f"{raw.channels} channels are out of range.", hint=f"1 to {MAX_CHANNELS} work.", param="channels"
            )
        self.rate = raw.sample_rate
        self._dtype = np.dtype(_ENCODINGS[raw.encoding])
        self._table = _table(raw.encoding)
        self._channels = raw.channels
        self._frame_bytes = self._dtype.itemsize * raw.channels
        self._rest = b""

    def decode(self, data: bytes) -> Audio:
        """Shape ``(frames,)``. Bytes of an unfinished frame wait for the next piece; at the end they are dropped."""
        data = self._rest + data if self._rest else data
        whole = len(data) - len(data) % self._frame_bytes
        self._rest = data[whole:]
        samples: npt.NDArray[Any] = np.frombuffer(data, self._dtype, whole // self._dtype.itemsize)
        if self._table is not None:
            samples = self._table[samples]
        mixed = mono([samples[channel :: self._channels] for channel in range(self._channels)])
        return clean(mixed) if self._dtype.kind == "f" else mixed


def mono(channels: Sequence[npt.NDArray[Any]]) -> Audio:
    """Mean of the channels; whole numbers are scaled to [-1, 1). Of two that cancel each other (one was wired the wrong way round) the
    louder one. The result never aliases what it was made of."""
    mixed = _mean(channels)
    if len(channels) != 2:
        return mixed
    left, right = (_energy(_mean([channel[::_LOOK_AT_ONE_IN]])) for channel in channels)
    if not _energy(mixed[::_LOOK_AT_ONE_IN]) < CANCELLED * max(left, right):
        return mixed
    return _mean(channels[:1] if left >= right else channels[1:])


def _energy(audio: Audio) -> float:
    return float(np.dot(audio, audio))


def _mean(channels: Sequence[npt.NDArray[Any]]) -> Audio:
    kind = channels[0].dtype
    mixed: Any = channels[0].astype(np.float32 if kind.itemsize <= 2 or kind == np.float32 else np.float64)
    for channel in channels[1:]:
        mixed += channel
    if len(channels) > 1:
        mixed /= len(channels)
    if kind.kind != "f":
        scale = 2.0 ** (8 * kind.itemsize - 1)
        if kind.kind == "u":
            mixed -= scale
        mixed /= scale
    if mixed.dtype == np.float32:
        return np.asarray(mixed)
    with np.errstate(over="ignore"):
        return np.asarray(mixed, np.float32)


def clean(audio: Audio) -> Audio:
    """What is not a finite number becomes 0 and rubbish is clipped, in place."""
    if not np.isfinite(audio).all():
        np.nan_to_num(audio, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
    return audio.clip(-LOUDEST, LOUDEST, out=audio)


def _table(encoding: str) -> Audio | None:
    """The 256 values of a G.711 code as floats: ITU-T G.711 (11/88), tables 1 and 2, on a scale of 16 bits."""
    if encoding not in ("mulaw", "alaw"):
        return None
    code = np.arange(256) ^ (0xFF if encoding == "mulaw" else 0x55)
    exponent, mantissa = (code >> 4) & 7, code & 15
    if encoding == "mulaw":
        magnitude = ((2 * mantissa + 33) << exponent) * 4 - 132
        sign = np.where(code & 0x80, -1, 1)
    else:
        magnitude = np.where(exponent, ((2 * mantissa + 33) << exponent) * 4, (2 * mantissa + 1) * 8)
        sign = np.where(code & 0x80, 1, -1)
    table: Audio = (sign * magnitude / 32768).astype(np.float32)
    return table
