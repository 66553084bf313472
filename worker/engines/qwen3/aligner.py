"""Word times from ``Qwen3-ForcedAligner``: a classifier that says, for two marks behind each word, when it starts and ends.

Input, without chat turns (with them, times come some 90 ms late)::

    <|audio_start|>{audio}<|audio_end|>w1<timestamp><timestamp>w2<timestamp><timestamp>...

The class at a mark times 80 ms is the time. Single marks can be wrong, so what breaks the order is repaired.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shared.errors import AudioTooLong, ModelLoadFailed
from shared.messages import Word
from shared.pcm import SAMPLE_RATE
from worker.audio.samples import Audio
from worker.engines.base import Report
from worker.engines.qwen3 import geometry
from worker.engines.qwen3.audio import SampleBuffer
from worker.engines.qwen3.checkpoint import load_aligner, open_checkpoint
from worker.engines.qwen3.device import Device
from worker.engines.qwen3.encoder import Encoder
from worker.engines.qwen3.hub import ALIGNER
from worker.engines.qwen3.mel import LogMel
from worker.engines.qwen3.vocabulary import load_vocabulary
from worker.engines.qwen3.words import AlignedText, split_words

LANGUAGES = frozenset({"zh", "en", "yue", "fr", "de", "it", "ja", "ko", "pt", "ru", "es"})
"""Those the published aligner knows. Japanese needs the ``aligner`` extra (``words.prepare``)."""
MAX_SECONDS = 180
CLASS_SECONDS = 0.08
MIN_WORD_SECONDS = 0.04
_PUBLISHED_BYTES = 1_836_000_000
"""918 million parameters in bf16."""
_ACTIVATIONS = 256 * 1024**2
_SNAPPED = 2
"""Wrong marks in a row that take the nearest good time; more are spread evenly between their neighbours."""


def aligner_bytes(name: str) -> int:
    """Device bytes that an aligner needs, activations included: known of a folder, else those of the published one."""
    files = Path(name).expanduser().glob("*.safetensors")
    return (sum(file.stat().st_size for file in files) or _PUBLISHED_BYTES) + _ACTIVATIONS


class ForcedAligner:
    """Loads at construction. Raises ModelLoadFailed."""

    def __init__(self, name: str, device: Device, report: Report) -> None:
        checkpoint = open_checkpoint(name, report, ALIGNER)
        with torch.inference_mode():
            model = load_aligner(checkpoint, device.dtype).to(device.where)
            self._vocabulary = load_vocabulary(checkpoint)
            if self._vocabulary.timestamp is None:
                raise ModelLoadFailed(
                    f"The tokenizer of {name} has no <timestamp>.", hint="Use the aligner's own files."
                )
            self._encoder = Encoder(model)
            self._text_model = model.model.language_model
            self._score = model.score
            self._mel = LogMel(device.where)
        self._device = device.where

    def align(self, audio: Audio, text: str, language: str) -> tuple[Word, ...]:
        """Times of the words of ``text`` in ``audio`` (at most MAX_SECONDS), in order, each longer than nothing, all inside.

        ``language`` (one of LANGUAGES) says how words are split. Raises AudioTooLong, and Unsupported without the analyser
        that the language needs.
        """
        if len(audio) > MAX_SECONDS * SAMPLE_RATE:
            raise AudioTooLong(f"The aligner hears at most {MAX_SECONDS} s at once.", hint="Align shorter segments.")
        words = split_words(text, language)
        if not words or not len(audio):
            return ()
        units = [unit for word in words for unit in word.units]
        times = repair([k * CLASS_SECONDS for k in self.classes(audio, units)])
        return place(words, times, len(audio) / SAMPLE_RATE)

    @torch.inference_mode()
    def classes(self, audio: Audio, units: Sequence[str]) -> list[int]:
        """The model's own choice at each mark, two a unit, unrepaired."""
        v = self._vocabulary
        mark = v.timestamp if v.timestamp is not None else -1
        sound = self._encode(audio)
        ids = [v.audio_start, *[v.audio_pad] * len(sound), v.audio_end]
        for unit in units:
            ids += [*v.encode(unit), mark, mark]
        line = torch.tensor([ids]).to(self._device)
        embeddings = self._text_model.embed_tokens(line)
        embeddings[0, 1 : 1 + len(sound)] = sound
        hidden = self._text_model(inputs_embeds=embeddings, use_cache=False).last_hidden_state
        chosen: list[int] = self._score(hidden[line == mark]).argmax(dim=-1).tolist()
        return chosen

    def _encode(self, audio: Audio) -> Tensor:
        samples = SampleBuffer()
        samples.append(audio)
        count = geometry.frames_of(samples.length)
        features = self._mel([samples.for_frames(0, count)], [count], [None]).features[0]
        windows = features.reshape(geometry.MELS, -1, geometry.WINDOW_FRAMES).transpose(0, 1)
        whole, rest = divmod(count, geometry.WINDOW_FRAMES)
        frames = [geometry.WINDOW_FRAMES] * whole + [rest] * (rest > 0)
        return torch.cat(self._encoder(windows[: len(frames)], frames))


def repair(times: Sequence[float]) -> list[float]:
    """The same number of times, never falling. O(n log n).

    The longest run of times that do not fall (not necessarily adjacent) is trusted; what stands between is replaced.
    """
    good = _longest_rising(times)
    out = list(times)
    if not good:
        return out
    edges = [-1, *good, len(times)]
    for left, right in pairwise(edges):
        before = out[left] if left >= 0 else out[right]
        after = out[right] if right < len(times) else before
        missing = right - left - 1
        for k in range(1, missing + 1):
            if missing <= _SNAPPED:
                out[left + k] = before if k <= missing / 2 else after
            else:
                out[left + k] = before + (after - before) * k / (missing + 1)
    return out


def _longest_rising(values: Sequence[float]) -> list[int]:
    """Indices of a longest non-decreasing subsequence, by patience sorting (Fredman 1975)."""
    tails: list[float] = []
    at: list[int] = []
    before = [-1] * len(values)
    for n, value in enumerate(values):
        pile = bisect_right(tails, value)
        before[n] = at[pile - 1] if pile else -1
        if pile == len(tails):
            tails.append(value)
            at.append(n)
        else:
            tails[pile], at[pile] = value, n
    chain: list[int] = []
    n = at[-1] if at else -1
    while n >= 0:
        chain.append(n)
        n = before[n]
    return chain[::-1]


def place(words: Sequence[AlignedText], times: Sequence[float], duration: float) -> tuple[Word, ...]:
    """Words at the times of their units (start and end of each unit, never falling), each word given some length, none beyond
    ``duration`` (s): a word lasts from its first unit to its last."""
    shortest = min(MIN_WORD_SECONDS, duration / len(words))
    behind = list(accumulate(len(word.units) for word in words))
    starts = np.array([times[2 * n] for n in [0, *behind[:-1]]], np.float64)
    ends = np.array([times[2 * n - 1] for n in behind], np.float64)
    reached = 0.0
    for n in range(len(words)):
        starts[n] = max(starts[n], reached)
        ends[n] = reached = max(ends[n], starts[n] + shortest)
    limit = duration
    for n in reversed(range(len(words))):
        ends[n] = min(ends[n], limit)
        starts[n] = limit = max(0.0, min(starts[n], ends[n] - shortest))
    return tuple(
        Word(word.shown, float(start), float(end)) for word, start, end in zip(words, starts, ends, strict=True)
    )
