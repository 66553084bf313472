"""Samples of every kind to mono floats: G.711, pieces of any size, channels."""

from __future__ import annotations

import io

import av
import numpy as np
import pytest

from shared.messages import RawAudio
from tests.speech import clip
from worker.audio.decode import PcmDecoder
from worker.audio.pcm import mono


@pytest.mark.parametrize("encoding", ["mulaw", "alaw"])
def test_all_codes_of_g711(encoding: str) -> None:
    """Against FFmpeg's decoder, which is not the one in use here."""
    codes = bytes(range(256))
    with av.open(io.BytesIO(codes), "r", format=encoding) as container:
        frames = [frame.to_ndarray() for frame in container.decode(audio=0)]
    assert np.array_equal(PcmDecoder(RawAudio(encoding, 8000)).decode(codes) * 32768, np.concatenate(frames, axis=1)[0])


def test_pieces_of_any_size_are_the_same_pcm() -> None:
    data = np.random.default_rng(5).bytes(6 * 1000 + 5)
    whole = PcmDecoder(RawAudio("s16le", 8000, 3)).decode(data)
    decoder = PcmDecoder(RawAudio("s16le", 8000, 3))
    pieces = [decoder.decode(data[start : start + 7]) for start in range(0, len(data), 7)]
    assert len(whole) == 1000
    assert np.array_equal(np.concatenate(pieces), whole)


# ---------------------------------------------------------------- channels that cancel each other


@pytest.mark.parametrize("kind", ["<i2", "<i4", "u1", "<f4", "<f8"])
def test_a_channel_that_was_wired_the_wrong_way_round_silences_nothing(kind: str) -> None:
    speech = clip("librivox-0880")[:16_000]
    scale = {"i": 2.0 ** (8 * np.dtype(kind).itemsize - 1) - 1, "u": 127.0, "f": 1.0}[np.dtype(kind).kind]
    offset = 128 if kind == "u1" else 0
    whole = speech * scale if kind.startswith("<f") else np.rint(speech * scale)
    left, right = (whole + offset).astype(kind), (offset - whole).astype(kind)
    assert np.abs(mono([left, right]) - mono([left])).max() < 0.02
    assert np.array_equal(mono([left, left]), mono([left]))


def test_channels_of_a_usual_recording_are_averaged() -> None:
    first, second = clip("librivox-0880")[:16_000], clip("librivox-0930")[:16_000]
    mixed = mono([first, second])
    assert np.allclose(mixed, (first + second) / 2, atol=1e-6)
    alone = mono([first, np.zeros_like(first)])
    assert np.allclose(alone, first / 2, atol=1e-6)
    assert np.isnan(mono([first, np.full_like(first, np.nan)])).all(), "cleaned later, as it was"
