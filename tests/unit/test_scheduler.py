"""The scheduler with its real audio threads and an engine, in one process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import msgspec
import pytest

from shared.messages import Event, Failed, FileDone, FileOptions, Lane, SegmentDone, TranscribeFile
from shared.recorder import Recorder
from tests.speech import DATA
from worker.audio.vad import load_vad
from worker.engines.scripted import ScriptedEngine
from worker.files.feeder import Feeder, read_ahead
from worker.files.reader import FileReaders
from worker.files.segments import SegmentPolicy
from worker.inbox import Bell
from worker.scheduler import Scheduler


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def bell() -> Bell:
    return Bell()


@pytest.fixture
def scheduler(events: list[Event], bell: Bell) -> Iterator[Scheduler]:
    """Of an engine that knows English only."""
    engine = ScriptedEngine()
    capabilities = msgspec.structs.replace(engine.load(lambda _phase, _fraction: None), languages=("en",))
    descriptor = Recorder.create()
    recorder = Recorder(descriptor)
    os.close(descriptor)
    readers = FileReaders(load_vad(), SegmentPolicy.up_to(capabilities.max_segment_s))
    feeder = Feeder(readers, read_ahead(capabilities.max_batch), bell, recorder)
    feeder.start()
    yield Scheduler(engine, capabilities, 1, events.append, feeder, recorder)
    engine.close()


def transcribe(
    scheduler: Scheduler, events: list[Event], bell: Bell, language: str, *, logprobs: bool = False
) -> Event:
    """The last event of a file."""
    path = str(DATA / "librivox-0880.wav")
    options = FileOptions(language=language, logprobs=logprobs)
    scheduler.handle(TranscribeFile(1, "file", Lane.BATCH, path, options))
    deadline = time.monotonic() + 30
    while not events or not isinstance(events[-1], Failed | FileDone):
        assert time.monotonic() < deadline
        if not scheduler.turn():
            bell.wait(1)
    return events[-1]


@pytest.mark.parametrize("language", ["en", ""])
def test_a_language_that_the_engine_knows(scheduler: Scheduler, events: list[Event], bell: Bell, language: str) -> None:
    assert isinstance(transcribe(scheduler, events, bell, language), FileDone)


@pytest.mark.parametrize("asked", [True, False])
def test_scores_come_only_where_they_were_asked_for(
    scheduler: Scheduler, events: list[Event], bell: Bell, asked: bool
) -> None:
    transcribe(scheduler, events, bell, "en", logprobs=asked)
    segments = [event for event in events if isinstance(event, SegmentDone)]
    assert segments
    for segment in segments:
        assert "".join(token for token, _ in segment.logprobs).strip() == (segment.text if asked else "")
        assert segment.avg_logprob is not None


def test_an_engine_that_cannot_begin_fails_that_file_alone(
    scheduler: Scheduler, events: list[Event], bell: Bell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_engine: ScriptedEngine, _request: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as broken:
        broken.setattr(ScriptedEngine, "open", fail)
        failed = transcribe(scheduler, events, bell, "en")
    assert isinstance(failed, Failed)
    assert failed.code == "engine_failed"
    assert isinstance(transcribe(scheduler, events.clear() or events, bell, "en"), FileDone)  # type: ignore[func-returns-value]


def test_a_language_that_the_engine_does_not_know(scheduler: Scheduler, events: list[Event], bell: Bell) -> None:
    """The gateway may not know the engine yet when a file comes, so the worker has the last word."""
    failed = transcribe(scheduler, events, bell, "de")
    assert isinstance(failed, Failed)
    assert (failed.code, failed.param) == ("invalid_value", "language")
    assert scheduler.steps == 0
    assert not any(scheduler.queued().values())
