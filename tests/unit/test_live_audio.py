"""The ears of the worker: one stream that fails is one stream that fails."""

from __future__ import annotations

import queue
import subprocess
import sys
import time

import pytest

from shared.errors import AudioOverrun, UnsupportedAudio
from shared.messages import Capabilities, RawAudio
from shared.recorder import Recorder
from shared.streams import ClearAudio, OpenStream, OpenUtterance, StreamAudio, StreamOptions
from tests.clients.pace import s16
from tests.speech import clip
from worker.audio.vad import load_vad
from worker.live import audio as live_audio
from worker.live.audio import LiveAudio
from worker.live.ear import MAX_PENDING_SAMPLES
from worker.live.endpointing import Begin, End
from worker.live.happenings import Arrival, Cleared, Happening
from worker.live.playout import Playout

CAPABILITIES = Capabilities("e", "m", ("en",), 8, 8, False, False, False, "none", 30.0, 60.0)
SPEECH = StreamOptions(RawAudio("s16le", 16_000, 1))
PATIENCE_SECONDS = 20.0


class Ears:
    """The thread, and what it has told."""

    def __init__(self) -> None:
        self._told: queue.SimpleQueue[tuple[str, Happening]] = queue.SimpleQueue()
        recorder = Recorder(Recorder.create())
        self.thread = LiveAudio(1, lambda _event: None, self._tell, load_vad(), CAPABILITIES, recorder)
        self.thread.start()

    def _tell(self, request_id: str, happening: Happening, _arrival: Arrival | None) -> None:
        self._told.put((request_id, happening))

    def open(self, name: str) -> None:
        self.thread.give(OpenStream(1, name, SPEECH), b"")

    def say(self, name: str, data: bytes) -> None:
        self.thread.give(StreamAudio(1, name, time.monotonic_ns()), data)

    def until(self, name: str, kind: type[Happening]) -> Happening:
        """The next of this kind that is told of a stream. Raises queue.Empty."""
        while True:
            request_id, happening = self._told.get(timeout=PATIENCE_SECONDS)
            if (request_id, type(happening)) == (name, kind):
                return happening

    def so_far(self) -> list[type[Happening]]:
        """What has been told and not been looked at."""
        found = []
        while not self._told.empty():
            found.append(type(self._told.get()[1]))
        return found


def test_a_decoder_that_fails_when_its_stream_stalls_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been busy for so long that its failure is first seen then."""
    monkeypatch.setattr("worker.live.playout.STALL_NS", 100_000_000)
    monkeypatch.setattr("worker.live.playout.LEAD_NS", 0)
    ears, sound = Ears(), s16(clip("librivox-0880"))
    ears.open("bad")
    ears.open("good")

    def settle(_decoder: object) -> None:
        raise UnsupportedAudio("It cannot be decoded.")

    with monkeypatch.context() as broken:
        broken.setattr("worker.live.decode.PcmStream.settle", settle)
        ears.say("bad", sound[:64_000])
        assert isinstance(ears.until("bad", UnsupportedAudio), UnsupportedAudio)
    ears.say("good", sound[:64_000])
    ended = ears.until("good", End)
    assert isinstance(ended, End)
    assert ended.cause == "stall"


def test_what_was_ended_in_mid_frame_has_ended_before_what_was_asked_for_next() -> None:
    """After the worker's death the same bytes fall into other frames: the end that was announced lies in one that is not full."""
    sound, end = s16(clip("librivox-0880"))[: 2 * 30_300], 30_250
    known = OpenUtterance(0, 0, "", end, end, "request")
    ears = Ears()
    ears.thread.give(OpenStream(1, "s", SPEECH, next_utterance=1, resumed=(known,)), b"")
    ears.say("s", sound)
    ears.thread.give(ClearAudio(1, "s"), b"")
    ended = ears.until("s", End)
    assert isinstance(ended, End)
    assert (ended.utterance, ended.cause, ended.through_sample) == (0, "request", end)
    cleared = ears.until("s", Cleared)
    assert isinstance(cleared, Cleared)
    assert (cleared.utterance, cleared.through_sample) == (-1, 30_300)


def test_a_thread_that_dies_takes_the_worker_with_it() -> None:
    """Another one is started then; without the thread everybody would wait."""
    program = (
        "import threading, time\n"
        "from worker.guard import die_with_any_thread\n"
        "die_with_any_thread()\n"
        "threading.Thread(target=lambda: 1 / 0, daemon=True).start()\n"
        "time.sleep(60)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


def test_more_audio_at_once_than_anybody_listens_to_is_refused() -> None:
    ears = Ears()
    ears.open("s")
    ears.say("s", bytes(2 * MAX_PENDING_SAMPLES + 2))
    assert isinstance(ears.until("s", AudioOverrun), AudioOverrun)


def test_who_sees_a_stall_too_late_waits_for_what_may_be_in_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread stands still for as long as the client may, and a second more."""
    monkeypatch.setattr("worker.live.playout.STALL_NS", 200_000_000)
    monkeypatch.setattr("worker.live.playout.LEAD_NS", 0)
    monkeypatch.setattr(live_audio, "GRACE_NS", 10_000_000_000)
    add = Playout.add

    def long_ago(playout: Playout, samples: int, now_ns: int) -> None:
        add(playout, samples, now_ns - 1_000_000_000)

    monkeypatch.setattr(Playout, "add", long_ago)
    ears = Ears()
    ears.open("s")
    ears.say("s", s16(clip("librivox-0880"))[:64_000])
    ears.until("s", Begin)
    time.sleep(0.5)
    assert End not in ears.so_far()
