"""Features and embeddings equal those of transformers; windows are encoded once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.torch.running import Reference, noise
from worker.audio.samples import Audio
from worker.engines.qwen3 import geometry
from worker.engines.qwen3.audio import SampleBuffer
from worker.engines.qwen3.checkpoint import open_checkpoint
from worker.engines.qwen3.encoder import Encoder
from worker.engines.qwen3.mel import LogMel
from worker.engines.qwen3.weights import load_recogniser

pytestmark = pytest.mark.torch

SECONDS = [0.01, 0.3, 0.4999, 0.5, 0.51, 0.99, 1.0, 1.01, 7.9999, 8.0, 8.0025, 9.5, 16.0, 21.37]


@pytest.fixture(scope="module")
def mel() -> LogMel:
    return LogMel(torch.device("cpu"))


@pytest.fixture(scope="module")
def encoder(trained: Path) -> Encoder:
    def silent(phase: str, fraction: float) -> None:
        return None

    with torch.inference_mode():
        checkpoint = open_checkpoint(str(trained), silent)
        return Encoder(load_recogniser(checkpoint, torch.device("cpu"), torch.float32, silent))


def buffer(clip: Audio) -> SampleBuffer:
    out = SampleBuffer()
    out.append(clip)
    return out


def reference_features(reference: Reference, clip: Audio) -> tuple[Tensor, Tensor]:
    out = reference.processor.feature_extractor(
        clip, sampling_rate=16_000, padding=True, return_attention_mask=True, truncation=False
    )
    return out["input_features"][0], out["attention_mask"][0]


@pytest.mark.parametrize("seconds", SECONDS)
def test_mel_of_one_clip(mel: LogMel, trained_reference: Reference, seconds: float) -> None:
    clip = noise(seconds, seed=3)
    theirs, mask = reference_features(trained_reference, clip)
    frames = geometry.frames_of(len(clip))
    assert int(mask.sum()) == frames
    ours = mel([buffer(clip).for_frames(0, frames)], [frames], [None]).features[0]
    assert (ours[:, : theirs.shape[1]] - theirs).abs().max() <= 1e-5
    assert not ours[:, frames:].any()


def test_mel_of_a_batch_is_that_of_each_clip(mel: LogMel) -> None:
    clips = [noise(seconds, seed) for seed, seconds in enumerate(SECONDS)]
    frames = [geometry.frames_of(len(clip)) for clip in clips]
    cut = [buffer(clip).for_frames(0, n) for clip, n in zip(clips, frames, strict=True)]
    together = mel(cut, frames, [None] * len(clips))
    for n, clip in enumerate(cut):
        alone = mel([clip], [frames[n]], [None])
        width = alone.features.shape[-1]
        assert (together.features[n, :, :width] - alone.features[0]).abs().max() <= 1e-5
        assert together.loudest[n] == alone.loudest[0]


def test_what_lies_behind_a_clip_does_not_matter(mel: LogMel, monkeypatch: pytest.MonkeyPatch) -> None:
    clips = [noise(seconds, seed) for seed, seconds in enumerate((0.7, 3.0))]
    frames = [geometry.frames_of(len(clip)) for clip in clips]
    cut = [buffer(clip).for_frames(0, n) for clip, n in zip(clips, frames, strict=True)]
    clean = mel(cut, frames, [None, None])
    monkeypatch.setattr("torch.empty", lambda *size, **_: torch.full(size, torch.nan))
    dirty = mel(cut, frames, [None, None])
    assert torch.equal(clean.features, dirty.features)
    assert torch.equal(clean.loudest, dirty.loudest)


def test_mel_of_a_later_window_is_that_of_the_whole(mel: LogMel) -> None:
    """From the third window on, with two frames of context on the left and 40 samples on the right."""
    sound = buffer(noise(24.0, seed=5))
    whole = mel([sound.for_frames(0, 2400)], [2400], [None])
    first, last = 1600, 2400
    part = mel([sound.for_frames(first, last)], [last - first], [whole.loudest[0]])
    assert (part.features[0, :, :800] - whole.features[0, :, first:last]).abs().max() <= 1e-5


def test_closed_windows_need_forty_samples_more() -> None:
    boundary = geometry.WINDOW_SAMPLES
    sound = noise(9.0, seed=1)
    kept = buffer(sound[: boundary + geometry.LOOKAHEAD]).for_frames(0, 800).array()
    assert np.array_equal(kept, buffer(sound).for_frames(0, 800).array())
    assert not np.array_equal(buffer(sound[: boundary + 39]).for_frames(0, 800).array(), kept)
    assert geometry.closed_windows(boundary + 40, finished=False) == 1
    assert geometry.closed_windows(boundary + 39, finished=False) == 0
    assert geometry.closed_windows(boundary, finished=True) == 1


def test_growing_buffer_is_the_joined_sound() -> None:
    sound = noise(3.0)
    grown = SampleBuffer()
    for at in range(0, len(sound), 777):
        grown.append(sound[at : at + 777])
    assert np.array_equal(grown.for_frames(0, 300).array(), buffer(sound).for_frames(0, 300).array())


def test_loud_sound_is_divided_by_its_peak_and_bad_samples_are_silence() -> None:
    sound = noise(1.0)
    assert np.allclose(
        buffer(sound * np.float32(4 / np.abs(sound).max())).for_frames(0, 100).array(),
        buffer(sound / np.abs(sound).max()).for_frames(0, 100).array(),
        atol=1e-6,
    )
    bad = sound.copy()
    bad[100:110] = np.nan
    bad[200] = np.inf
    assert np.isfinite(buffer(bad).for_frames(0, 100).array()).all()


def test_frames_and_tokens() -> None:
    expected = {1: 1, 8: 1, 9: 2, 50: 7, 99: 13, 100: 13, 101: 14, 150: 20, 800: 104, 1000: 130, 3000: 390}
    assert {frames: geometry.tokens_of(frames) for frames in expected} == expected


@pytest.mark.parametrize("group", [1, 3, 32])
def test_encoder_equals_one_shot(encoder: Encoder, trained_reference: Reference, group: int) -> None:
    """Windows of many clips in one call, in groups, against each clip whole through transformers."""
    encoder._most = 8 * group
    clips = [noise(seconds, seed) for seed, seconds in enumerate(SECONDS)]
    windows, frames, theirs = [], [], []
    for clip in clips:
        features, mask = reference_features(trained_reference, clip)
        with torch.inference_mode():
            theirs.append(trained_reference.model.get_audio_features(features[None], mask[None]).pooler_output)
        for start in range(0, int(mask.sum()), 800):
            frames.append(min(800, int(mask.sum()) - start))
            piece = features[:, start : start + frames[-1]]
            windows.append(torch.nn.functional.pad(piece, (0, 800 - frames[-1])))
    before = encoder.encoded
    with torch.inference_mode():
        ours = torch.cat(encoder(torch.stack(windows), frames))
    assert ours.shape == torch.cat(theirs).shape
    # Of the largest value: on some processors single sums are 1.1e-5 apart, and both are further from those in double precision.
    assert (ours - torch.cat(theirs)).abs().max() <= 1e-5 * torch.cat(theirs).abs().max()
    assert encoder.encoded - before == len(windows)


@pytest.mark.parametrize(("most", "groups"), [(32, [4, 4, 4, 3]), (8, [1] * 15), (1, [1] * 15), (1_000, [15])])
def test_a_long_recording_is_encoded_in_groups(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch, most: int, groups: list[int]
) -> None:
    """Memory is that of a group: two minutes here, and twenty would be as much."""
    sizes, encode = [], Encoder._encode

    def counted(self: Encoder, features: Tensor, frames: Sequence[int]) -> Tensor:
        sizes.append(len(frames))
        return encode(self, features, frames)

    monkeypatch.setattr(Encoder, "_encode", counted)
    monkeypatch.setattr(encoder, "_most", most)
    with torch.inference_mode():
        encoder(torch.zeros(15, 128, 800), [800] * 15)
    assert sizes == groups
