"""Headerless G.729 in the live decoder. No encoder is at hand, so frames are made up: their number says how long they sound."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.streams.live import PcmClock
from shared.wire import RawAudio
from tests.speech import Audio
from worker.live.decode import G729Decoder, live_decoder

AUDIO = RawAudio("g729", 8_000, 1)
FRAMES = np.random.default_rng(29).bytes(1000)
"""One second."""
SILENCE = bytes.fromhex("785280a000fac20007d6")
"""A frame of a quiet line, as telephone software sends it to fill a gap."""


def nothing() -> None:
    """Audio of this encoding comes with its bytes."""


def heard(pieces: list[bytes]) -> Audio:
    decoder = live_decoder(AUDIO, nothing)
    return np.concatenate([*(decoder.decode(piece) for piece in pieces), decoder.flush()])


@pytest.mark.parametrize("frames", [1, 7, 100])
def test_ten_bytes_are_ten_milliseconds(frames: int) -> None:
    audio = heard([FRAMES[: 10 * frames]])
    assert audio.dtype == np.float32
    assert len(audio) == frames * 160
    assert np.abs(audio).max() <= 1.5  # the resampler may ring


def test_silence_is_silent_and_the_rest_is_not() -> None:
    assert np.abs(G729Decoder().decode(SILENCE * 50)).max() < 0.001
    assert np.abs(G729Decoder().decode(FRAMES)).max() > 0.05


@given(st.lists(st.integers(1, 60), max_size=40))
def test_pieces_need_not_be_frames(sizes: list[int]) -> None:
    ends = [0, *np.cumsum(sizes).tolist(), len(FRAMES)]
    pieces = [FRAMES[start:end] for start, end in itertools.pairwise(ends)]
    assert np.array_equal(heard(pieces), heard([FRAMES]))


def test_a_frame_that_was_cut_off_is_left_out() -> None:
    assert len(heard([FRAMES[:25]])) == 2 * 160


@given(st.integers(0, 10**9))
def test_a_stream_is_entered_between_two_frames(sample: int) -> None:
    clock = PcmClock(AUDIO)
    byte = clock.byte_of(sample)
    assert clock.bytes_per_second == 1000
    assert byte % 10 == 0
    assert clock.sample_of(byte) == byte * 16
    assert 0 <= sample - clock.sample_of(byte) < 160
