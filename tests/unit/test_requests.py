"""Between a job and the engine: what was asked for reaches it, and what it guesses leaves word by word."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from shared.messages import Delta, FileOptions, Lane, RawAudio, TranscribeFile
from shared.streams import Partial, StreamOptions, UtteranceDelta, UtteranceFinal
from worker.audio.samples import Audio
from worker.engines.base import EngineSequence, Final, Hypothesis, SequenceRequest
from worker.engines.scripted import ScriptedEngine, ScriptedOptions
from worker.files.file_job import FileJob
from worker.files.segments import Segment
from worker.live.endpointing import Begin, End, Speech
from worker.live.stream import LiveStream

SOUND: Audio = np.full(32_000, 0.125, np.float32)
ASKED = {"language": "de", "prompt": "Names", "keywords": ("Ahrens", "Bü"), "temperature": 0.7, "words": True}


@dataclass(eq=False)
class Row:
    """A sequence that nobody steps."""

    request: SequenceRequest
    ready: bool = True
    windows_encoded: int = 0


@dataclass
class Listening(ScriptedEngine):
    """Takes down what it is asked to do."""

    opened: list[SequenceRequest] = field(default_factory=list)
    finished: list[EngineSequence] = field(default_factory=list)
    cancelled: list[EngineSequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(ScriptedOptions.parse("hears=clock"))

    def open(self, request: SequenceRequest) -> Row:  # type: ignore[override]
        self.opened.append(request)
        return Row(request)

    def feed(self, sequence: EngineSequence, audio: Audio) -> None: ...

    def freeze(self, sequence: EngineSequence, text: str) -> None: ...

    def finish(self, sequence: EngineSequence) -> None:
        self.finished.append(sequence)

    def cancel(self, sequence: EngineSequence) -> None:
        self.cancelled.append(sequence)


def job(**options: object) -> tuple[FileJob, Row]:
    """A file with a segment that the engine has."""
    made = FileJob(TranscribeFile(1, "f", Lane.INTERACTIVE, "", FileOptions(**options)), 1)  # type: ignore[arg-type]
    made.pending.append(Segment(0, SOUND, 16_000, 48_000, 48_000, ((16_000, 48_000),)))
    made.exhausted = True
    found = made.unopened()
    assert found is not None
    row = Row(made.request(*found))
    found[1].sequence = row
    return made, row


def call(**options: object) -> tuple[LiveStream, Listening]:
    engine = Listening()
    asked = StreamOptions(RawAudio("s16le", 16_000), **options)  # type: ignore[arg-type]
    return LiveStream("s", 1, 1, engine, accepts_prefix=True, options=asked), engine


def test_an_engine_hears_of_everything_that_was_asked_of_a_file() -> None:
    _, row = job(**ASKED, deltas=True)
    request = row.request
    assert {name: getattr(request, name) for name in ASKED} == ASKED
    assert (request.lane, request.partials, request.base_sample) == (Lane.INTERACTIVE, True, 16_000)


def test_an_engine_hears_of_everything_that_was_asked_of_a_call() -> None:
    stream, engine = call(**ASKED)
    stream.happen(Begin(3, 800, "He said"), None)
    (request,) = engine.opened
    assert {name: getattr(request, name) for name in ASKED} == ASKED
    assert (request.lane, request.partials, request.prefix, request.base_sample) == (Lane.LIVE, True, "He said", 800)


def test_the_last_word_of_a_guess_does_not_leave_yet() -> None:
    made, row = job(deltas=True)
    said = []
    for guess in ("The", "The ca", "The caterpillar sa", "The caterpillar sat down"):
        for event in made.hypothesis(0, Hypothesis(row, guess)):
            assert isinstance(event, Delta)
            said.append(event.text)
    assert "".join(said) == "The caterpillar sat"
    assert not any(text.strip() in ("The ca", "ca", "sa") for text in said)


def test_a_repetition_is_shortened_in_what_is_read_along() -> None:
    made, row = job(deltas=True)
    (event,) = made.hypothesis(0, Hypothesis(row, "It went " + "o" * 30 + "ut again"))
    assert isinstance(event, Delta)
    assert event.text == "It went out"
    stream, _ = call()
    stream.happen(Begin(0, 0), None)
    sequence = stream.open[0].sequence
    guess = Hypothesis(sequence, "It went " + "o" * 30 + "ut again and")
    (partial,) = (event for event in stream.hypothesis(0, guess) if isinstance(event, Partial))
    assert partial.text == "It went out again and"


@pytest.mark.parametrize("spoken", [True, False])
def test_an_utterance_in_which_nobody_spoke_long_enough_is_not_decoded(spoken: bool) -> None:
    stream, engine = call()
    stream.happen(Begin(0, 0), None)
    sequence = stream.open[0].sequence
    stream.happen(Speech(0, SOUND), None)
    events = stream.happen(End(0, 32_000, "silence", ((0, 1_000),), spoken=spoken), None)
    assert (engine.finished, engine.cancelled) == (([sequence], []) if spoken else ([], [sequence]))
    if not spoken:
        (final,) = events
        assert isinstance(final, UtteranceFinal)
        assert final.text == ""
        return
    events = stream.final(0, Final(sequence, "Yes."))
    assert [type(event) for event in events] == [UtteranceDelta, UtteranceFinal]
