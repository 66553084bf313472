"""The flight recorder: what a dead process leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from shared.recorder import AUDIO_THREADS, Recorder, Slot


@pytest.fixture
def descriptor() -> Iterator[int]:
    descriptor = Recorder.create()
    yield descriptor
    os.close(descriptor)


def test_both_slots_are_read_through_another_mapping(descriptor: int) -> None:
    recorder = Recorder(descriptor)
    recorder.begin(Slot.ENGINE, [("a", 3), ("b", 0)])
    recorder.begin(Slot.AUDIO, [("c", 1)])
    assert Recorder(descriptor).read() == {"a": 3, "b": 0, "c": 1}


def test_the_highest_segment_that_the_engine_has_in_hand_counts(descriptor: int) -> None:
    """All segments up to it that are not done will be done again; those that only the audio thread has were not begun."""
    recorder = Recorder(descriptor)
    recorder.begin(Slot.ENGINE, [("a", 5), ("a", 4)])
    recorder.begin(Slot.AUDIO, [("a", 7)])
    assert recorder.read() == {"a": 5}


def test_each_audio_thread_has_a_slot(descriptor: int) -> None:
    recorder = Recorder(descriptor)
    for number in range(AUDIO_THREADS):
        recorder.begin(Slot.AUDIO + number, [(f"file-{number}", number)])
    recorder.begin(Slot.LIVE, [("call", 0)])
    recorder.end(Slot.AUDIO + 1)
    left = {f"file-{number}": number for number in range(AUDIO_THREADS) if number != 1}
    assert Recorder(descriptor).read() == {"call": 0, **left}


def test_ended_work_leaves_nothing(descriptor: int) -> None:
    recorder = Recorder(descriptor)
    recorder.begin(Slot.ENGINE, [("a", 3)])
    recorder.end(Slot.ENGINE)
    assert recorder.read() == {}


def test_shorter_work_after_longer_work_leaves_no_rest(descriptor: int) -> None:
    recorder = Recorder(descriptor)
    recorder.begin(Slot.ENGINE, [("a-long-name", 3), ("another", 4)])
    recorder.begin(Slot.ENGINE, [("b", 1)])
    assert recorder.read() == {"b": 1}


def test_more_than_fits_is_cut_not_lost(descriptor: int) -> None:
    recorder = Recorder(descriptor)
    recorder.begin(Slot.ENGINE, [(f"request-{number:06d}", number) for number in range(5000)])
    found = recorder.read()
    assert len(found) > 500
    assert found["request-000007"] == 7


def test_it_survives_sigkill(descriptor: int) -> None:
    code = (
        "import os, signal, sys; from shared.recorder import Recorder, Slot\n"
        "recorder = Recorder(int(sys.argv[1])); recorder.begin(Slot.ENGINE, [('last', 9)])\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(descriptor)], check=False, pass_fds=[descriptor])
    assert done.returncode == -signal.SIGKILL
    assert Recorder(descriptor).read() == {"last": 9}
