"""Words as sound, for tests: text becomes tones and comes back letter by letter, so that a test sees which audio arrived.

A word is a start tone, two tones for each byte of its UTF-8 (high half first) and for a checksum byte, and an end tone;
20 ms each, then a pause.
The 18 tones lie 150 Hz apart between 600 and 3150 Hz, inside the band of a telephone, and each fits 20 ms a whole number of
times. So words survive 16-bit files, resampling, mu-law and lossy codecs. A word that lost a part of its sound comes back
as ``TORN``, not as another word.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared.pcm import SAMPLE_RATE, samples
from worker.audio.samples import Audio

TORN = "\ufffd"
"""Sound that is not a whole word."""

_SYMBOL = samples(0.020)
_PAUSE = samples(0.040)
_START, _END = 16, 17
_TONES = 600.0 + 150.0 * np.arange(18)
_LEVEL = 0.25
_WINDOW = np.hanning(200)
"""What is looked at in the middle of a symbol: its edges may be off by 60 samples."""
_PROBES = np.exp(-2j * np.pi * np.outer(_TONES, np.arange(len(_WINDOW))) / SAMPLE_RATE) * _WINDOW
_BLOCK = 32
"""Samples over which loudness is measured: longer than a period of the lowest tone."""
_FAINT = 0.003
"""Loudness under which nothing is sound."""
_RELATIVE = 0.15
"""A block counts as sound above this part of the loudest one: what codecs smear over the edges is less."""
_PURE = 0.5
"""Part of the energy that one tone holds; noise and speech spread theirs."""


@dataclass(frozen=True, slots=True)
class Heard:
    """A word and its place, samples from the start of the audio."""

    text: str
    start: int
    end: int


def scripted_audio(words: str | Iterable[str]) -> Audio:
    """Sound of the words, float32 at 16 kHz. A string is split at white space. A word of n bytes takes (n + 3) × 40 ms."""
    texts = words.split() if isinstance(words, str) else list(words)
    pause = np.zeros(_PAUSE, np.float32)
    return np.concatenate([part for text in texts for part in (_sound(text), pause)] or [pause])


def hear(audio: Audio, *, finished: bool = True) -> list[Heard]:
    """The words in the sound, in order. Unless ``finished``, a word that touches the end may go on and is left out."""
    words: list[Heard] = []
    for start, end in _stretches(audio):
        if finished or len(audio) - end >= _PAUSE // 2:
            words += _read(audio, start, end)
    return words


def begins_with_tones(audio: Audio, *, finished: bool = True) -> bool | None:
    """Whether the first sound is a start tone. None while nothing, or too little, has been heard."""
    first = next(iter(_stretches(audio)), None)
    if first is None:
        return None
    if len(audio) - first[0] < _SYMBOL:
        return False if finished else None
    return _symbols(audio, first[0], 1)[0] == _START


def _sound(text: str) -> Audio:
    data = text.encode()
    halves = [half for byte in (*data, _checksum(data)) for half in (byte >> 4, byte & 15)]
    time = np.arange(_SYMBOL) / SAMPLE_RATE
    tones = np.sin(2 * np.pi * np.outer(_TONES[[_START, *halves, _END]], time))
    return (_LEVEL * tones).reshape(-1).astype(np.float32)


def _stretches(audio: Audio) -> list[tuple[int, int]]:
    """Sounds between pauses of at least 10 ms."""
    blocks = audio[: len(audio) // _BLOCK * _BLOCK].reshape(-1, _BLOCK)
    level = np.sqrt((blocks**2).mean(axis=1))
    loud = np.flatnonzero(level > max(_FAINT, _RELATIVE * level.max(initial=0)))
    if not loud.size:
        return []
    breaks = np.flatnonzero(np.diff(loud) > samples(0.010) // _BLOCK)
    firsts, lasts = np.append(0, breaks + 1), np.append(breaks, loud.size - 1)
    return [(int(loud[i]) * _BLOCK, (int(loud[j]) + 1) * _BLOCK) for i, j in zip(firsts, lasts, strict=True)]


def _read(audio: Audio, start: int, end: int) -> list[Heard]:
    """Words of a stretch; several if the pauses between them were lost."""
    count = max(1, round((end - start) / _SYMBOL))
    symbols = _symbols(audio, start, count)
    words: list[Heard] = []
    first = 0
    for place in [i for i, symbol in enumerate(symbols) if symbol == _END] or [count - 1]:
        text = _text(symbols[first : place + 1])
        words.append(Heard(text, start + first * _SYMBOL, start + (place + 1) * _SYMBOL))
        first = place + 1
    if first < count and words[-1].text != TORN:
        words.append(Heard(TORN, start + first * _SYMBOL, end))
    return words


def _symbols(audio: Audio, start: int, count: int) -> list[int]:
    """The tone of each symbol, -1 where there is none."""
    inset = (_SYMBOL - len(_WINDOW)) // 2
    found: list[int] = []
    for place in range(count):
        begin = start + place * _SYMBOL + inset
        piece: npt.NDArray[np.float64] = np.zeros(len(_WINDOW))
        part = audio[begin : begin + len(_WINDOW)]
        piece[: len(part)] = part
        power = np.abs(_PROBES @ piece) ** 2
        best = int(power.argmax())
        # A sine of amplitude a gives (a/2 · sum of the window)²; its energy under the window is a²/2 · sum of squares.
        whole = float((piece**2 * _WINDOW**2).sum()) / 2 * float(_WINDOW.sum()) ** 2 / float((_WINDOW**2).sum())
        found.append(best if whole > 0 and power[best] > _PURE * whole else -1)
    return found


def _text(symbols: list[int]) -> str:
    halves = symbols[1:-1]
    whole = len(symbols) >= 6 and symbols[0] == _START and symbols[-1] == _END and len(halves) % 2 == 0
    if not whole or not all(0 <= half < _START for half in halves):
        return TORN
    data = bytes(high << 4 | low for high, low in zip(halves[::2], halves[1::2], strict=True))
    try:
        return data[:-1].decode() if data[-1] == _checksum(data[:-1]) else TORN
    except UnicodeDecodeError:
        return TORN


def _checksum(data: bytes) -> int:
    return zlib.crc32(data) & 0xFF
