"""The ears in a process of their own: they tell what those of this process tell, and their death is the worker's."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from shared.codec import Buffer, decode_event
from shared.errors import BadRequest, NapscribeError, UnsupportedAudio
from shared.messages import Capabilities, Command, Event, RawAudio
from shared.recorder import Recorder
from shared.streams import (
    AudioBatch,
    ClearAudio,
    CloseStream,
    Endpointing,
    EndUtterance,
    OpenStream,
    SpeechStarted,
    SpeechStopped,
    StreamOptions,
    StreamProgress,
)
from tests.clients.pace import s16
from tests.speech import clip, silence
from worker.audio.vad import load_vad
from worker.child import NoChild
from worker.live.audio import LiveAudio
from worker.live.ears_process import MOST_ITEMS, EarsProcess
from worker.live.endpointing import Begin, End, Speech
from worker.live.happenings import Answer, Arrival, Cleared, Closed, Happening, Opened

CAPABILITIES = Capabilities("e", "m", ("en",), 8, 8, True, False, False, "none", 30.0, 60.0)
CORES = tuple(os.sched_getaffinity(0))
SPEECH = StreamOptions(RawAudio("s16le", 16_000, 1))
FRAME = 640
PATIENCE_SECONDS = 20.0

Give = Callable[[Command, Buffer], None]


class Told:
    """What ears tell, by stream: happenings and events in order."""

    def __init__(self) -> None:
        self._news: queue.SimpleQueue[tuple[str, object]] = queue.SimpleQueue()
        self.streams: dict[str, list[object]] = {}

    def tell(self, request_id: str, happening: Happening, arrival: Arrival | None) -> None:
        assert (arrival is not None) == isinstance(happening, End)
        self._news.put((request_id, happening))

    def emit(self, event: Event) -> None:
        self._news.put((getattr(event, "request_id", ""), event))

    def emit_encoded(self, header: bytes) -> None:
        self.emit(decode_event([header])[0])

    def until(self, name: str, kind: type) -> Any:
        """The next of this kind of a stream. Raises queue.Empty."""
        while True:
            request_id, news = self._news.get(timeout=PATIENCE_SECONDS)
            self.streams.setdefault(request_id, []).append(news)
            if request_id == name and isinstance(news, kind):
                return news

    def story(self, name: str) -> list[object]:
        """Of a stream, audio aside, and without how far it was at what moment."""
        return [news for news in self.streams[name] if not isinstance(news, Speech | StreamProgress)]

    def sound(self, name: str) -> np.ndarray:
        return np.concatenate([news.audio for news in self.streams[name] if isinstance(news, Speech)])


class Ears(Told):
    """In a process, unless told otherwise."""

    def __init__(self, *, cores: tuple[int, ...] = CORES) -> None:
        super().__init__()
        self.descriptor = Recorder.create()
        self.recorder = Recorder(self.descriptor)
        self.died, self.rung = threading.Event(), threading.Event()
        self.process = EarsProcess(self.descriptor, died=self.died.set)
        self.process.connect(1, CAPABILITIES, cores, self.emit_encoded, self.tell, self.rung.set)


@pytest.fixture
def ears() -> Iterator[Ears]:
    made = Ears()
    yield made
    made.process.close()


@pytest.fixture
def here() -> tuple[Told, LiveAudio]:
    told = Told()
    thread = LiveAudio(1, told.emit, told.tell, load_vad(), CAPABILITIES, Recorder(Recorder.create()))
    thread.start()
    return told, thread


def play(give: Give, sounds: dict[str, bytes]) -> None:
    """All streams side by side, 20 ms of each in a message; then each is closed."""
    for name in sounds:
        give(OpenStream(1, name, SPEECH), b"")
    for begin in range(0, max(map(len, sounds.values())), FRAME):
        parts = {name: sound[begin : begin + FRAME] for name, sound in sounds.items() if begin < len(sound)}
        frames = tuple((name, time.monotonic_ns(), len(part)) for name, part in parts.items())
        give(AudioBatch(1, frames), b"".join(parts.values()))
    for name in sounds:
        give(EndUtterance(1, name, 7), b"")
        give(CloseStream(1, name), b"")


def test_they_tell_what_those_of_this_process_tell(ears: Ears, here: tuple[Told, LiveAudio]) -> None:
    told, thread = here
    pauses = [clip("librivox-0880"), silence(1.0), clip("librivox-0930"), silence(0.4)]
    sounds = {
        "two": s16(np.concatenate(pauses)),
        "one": s16(np.concatenate((silence(0.7), clip("jfk")))),
        "none": s16(silence(3.0)),
    }
    play(ears.process.give, sounds)
    play(thread.give, sounds)
    for name in sounds:
        if name not in told.streams or not any(isinstance(news, Closed) for news in told.streams[name]):
            told.until(name, Closed)
        if name not in ears.streams or not any(isinstance(news, Closed) for news in ears.streams[name]):
            ears.until(name, Closed)
    for name in sounds:
        assert ears.story(name) == told.story(name)
    for name in ("two", "one"):
        kinds = [type(news) for news in ears.story(name)]
        assert kinds[:3] == [Opened, SpeechStarted, Begin]
        assert kinds[-2:] == [Answer, Closed]
        assert kinds.count(End) == kinds.count(SpeechStopped) >= (2 if name == "two" else 1)
        assert np.array_equal(ears.sound(name), told.sound(name))
        assert all(news.audio.base is None for news in ears.streams[name] if isinstance(news, Speech)), "it keeps more"
    assert ears.rung.is_set()


def test_errors_keep_what_they_say(ears: Ears) -> None:
    ears.process.give(OpenStream(1, "a", StreamOptions(RawAudio("opus", 16_000))), b"")
    failure = ears.until("a", NapscribeError)
    assert isinstance(failure, UnsupportedAudio)
    assert "s16le" in failure.hint
    ears.process.give(OpenStream(1, "b", StreamOptions(RawAudio("s16le", 5))), b"")
    failure = ears.until("b", NapscribeError)
    assert isinstance(failure, BadRequest)
    assert failure.param == "sample_rate"
    wrong = StreamOptions(RawAudio("s16le", 16_000), endpointing=Endpointing(threshold=2.0))
    ears.process.give(OpenStream(1, "c", wrong), b"")
    assert ears.until("c", NapscribeError).param == "threshold"


def test_a_stream_that_the_scheduler_has_ended_is_forgotten(ears: Ears) -> None:
    ears.process.give(OpenStream(1, "s", SPEECH), b"")
    ears.until("s", Opened)
    ears.process.final_said("s", -1)
    ears.process.give(ClearAudio(1, "s"), b"")
    ears.process.give(OpenStream(1, "next", SPEECH), b"")
    ears.until("next", Opened)
    assert not any(isinstance(news, Cleared) for news in ears.streams["s"])


def test_a_child_that_stands_still_is_seen(ears: Ears) -> None:
    ears.process.give(OpenStream(1, "s", SPEECH), b"")
    ears.until("s", Opened)
    wait_until(lambda: not ears.process.age_ns())
    os.kill(ears.process.pid, signal.SIGSTOP)
    try:
        ears.process.give(ClearAudio(1, "s"), b"")
        wait_until(lambda: ears.process.age_ns() > 100_000_000)
    finally:
        os.kill(ears.process.pid, signal.SIGCONT)
    ears.until("s", Cleared)
    wait_until(lambda: not ears.process.age_ns())


def test_whose_audio_is_in_hand_is_on_record_in_the_child(ears: Ears) -> None:
    """Ten seconds of it take a while."""
    ears.process.give(OpenStream(1, "s", SPEECH), b"")
    ears.until("s", Opened)
    seen = False
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not seen and time.monotonic() < deadline:
        ears.process.give(AudioBatch(1, (("s", 1, 320_000),)), bytes(320_000))
        seen = any(ears.recorder.read() == {"s": 0} for _ in range(1_000))
    assert seen


DEAF = """
import sys
if "worker.live.ears_process" in sys.orig_argv:
    from worker.live.audio import LiveAudio
    LiveAudio._listen = lambda ears: 1 / 0
"""
"""Python runs a module of this name at every start."""


def test_the_death_of_its_thread_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake that no stream is to blame for. Without the thread nobody would listen, and nobody would know."""
    (tmp_path / "sitecustomize.py").write_text(DEAF)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    ears = Ears()
    ears.process.give(OpenStream(1, "s", SPEECH), b"")
    assert ears.died.wait(PATIENCE_SECONDS)


def test_a_long_turn_is_told_in_parts(ears: Ears, monkeypatch: pytest.MonkeyPatch) -> None:
    """Much has waited: the engine begins with the first of it before the last is heard."""
    sizes: list[int] = []
    hear = ears.process._hear

    def counted(turn: Any) -> None:
        sizes.append(len(turn.items))
        hear(turn)

    monkeypatch.setattr(ears.process, "_hear", counted)
    ears.process.give(OpenStream(1, "s", SPEECH), b"")
    ears.until("s", Opened)
    sound = s16(np.concatenate([clip("jfk")] * 3))
    ears.process.give(AudioBatch(1, (("s", time.monotonic_ns(), len(sound)),)), sound)
    ears.process.give(CloseStream(1, "s"), b"")
    ears.until("s", Closed)
    assert sum(sizes) > 2 * MOST_ITEMS
    assert max(sizes) == MOST_ITEMS


def test_its_death_is_told(ears: Ears) -> None:
    os.kill(ears.process.pid, signal.SIGKILL)
    assert ears.died.wait(PATIENCE_SECONDS)


def test_who_is_not_needed_leaves_and_nobody_dies() -> None:
    died = threading.Event()
    process = EarsProcess(Recorder.create(), died.set)
    wait_until(lambda: process.pid != 0)
    process.close()
    assert not alive(process.pid)
    assert not died.is_set()


def test_a_child_keeps_to_the_cores_of_its_worker() -> None:
    one = min(CORES)
    ears = Ears(cores=(one,))
    ears.process.give(OpenStream(1, "s", SPEECH), b"")
    ears.until("s", Opened)
    tasks = [int(task.name) for task in Path(f"/proc/{ears.process.pid}/task").iterdir()]
    assert len(tasks) > 1
    assert all(os.sched_getaffinity(task) == {one} for task in tasks)
    ears.process.close()


def test_where_there_can_be_no_child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "none"
    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", str(program))
        process = EarsProcess(Recorder.create(), lambda: None)
        with pytest.raises(NoChild, match="start"):
            process.connect(1, CAPABILITIES, CORES, lambda _: None, lambda *_: None, lambda: None)
    process.close()


def test_a_child_that_went_before_it_was_needed() -> None:
    process = EarsProcess(Recorder.create(), lambda: None)
    wait_until(lambda: process.pid != 0)
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: not alive(process.pid))
    with pytest.raises(NoChild, match="gone"):
        process.connect(1, CAPABILITIES, CORES, lambda _: None, lambda *_: None, lambda: None)


def test_a_child_ends_with_its_worker() -> None:
    code = (
        "import time\nfrom shared.recorder import Recorder\nfrom worker.live.ears_process import EarsProcess\n"
        "ears = EarsProcess(Recorder.create(), lambda: None)\n"
        "while not ears.pid: time.sleep(0.01)\n"
        "print(ears.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        child = int(worker.stdout.readline())
        worker.kill()
    wait_until(lambda: not alive(child))


def alive(pid: int) -> bool:
    """Its sockets are closed when its last thread has gone, which need not be the first one."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
