"""What every engine promises the scheduler (``worker.engines.base``). A new engine joins by a line in ``FACTORIES``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from itertools import count, pairwise

import numpy as np
import pytest

from shared.languages import NAMES
from shared.messages import Capabilities, Lane
from tests.speech import DATA, clip, silence
from worker.audio.samples import Audio
from worker.engines.base import Engine, EngineEvent, EngineSequence, Final, Hypothesis, SequenceFailed, SequenceRequest

MAX_STEPS = 2000
"""Far above what a clip of three seconds needs."""


def _embedded(threads: int) -> Callable[[], Engine]:
    def make() -> Engine:
        from worker.engines.embedded import EmbeddedEngine

        return EmbeddedEngine(threads=threads)

    return make


def _scripted(options: str) -> Callable[[], Engine]:
    def make() -> Engine:
        from worker.engines.scripted import ScriptedEngine, ScriptedOptions

        return ScriptedEngine(ScriptedOptions.parse(options))

    return make


def _qwen3() -> Engine:
    """The trained checkpoint is of no use on human speech, but speaks like a model: words, and an end."""
    from worker.engines.qwen3.engine import Qwen3Engine

    return Qwen3Engine(str(DATA / "qwen3-asr-tiny"), device="cpu", threads=1, max_slots=4)


@dataclass(frozen=True)
class Factory:
    name: str
    make: Callable[[], Engine]
    understands: bool = True
    """Whether its text depends on what is said; a model with random weights says anything, to silence too."""


FACTORIES = [
    Factory("scripted", _scripted("batch=3,words=2")),
    Factory("scripted-plain", _scripted("batch=2,prefix=0,times=none")),
    Factory("embedded", _embedded(1)),
    Factory("embedded-two-decoders", _embedded(2)),
]
WITH_MARKS = [
    *FACTORIES,
    pytest.param(
        Factory("qwen3-tiny", _qwen3, understands=False),
        marks=[
            pytest.mark.torch,
            pytest.mark.skipif(
                find_spec("torch") is None or find_spec("transformers") is None, reason="needs the `qwen` extra"
            ),
        ],
    ),
]


@dataclass
class Loaded:
    """An engine and what the tests do with it."""

    engine: Engine
    capabilities: Capabilities
    understands: bool
    numbers: Iterator[int] = field(default_factory=count)

    def open(self, request: SequenceRequest | None = None) -> EngineSequence:
        request = request or SequenceRequest("", Lane.BATCH)
        return self.engine.open(replace(request, id=request.id or f"request-{next(self.numbers)}"))

    def segment(self, audio: Audio, request: SequenceRequest | None = None) -> EngineSequence:
        """A sequence with all its audio."""
        sequence = self.open(request)
        self.engine.feed(sequence, audio)
        self.engine.finish(sequence)
        return sequence

    def step(self, rows: Sequence[EngineSequence]) -> list[EngineEvent]:
        began = time.monotonic()
        events = self.engine.step(rows, time.monotonic_ns())
        assert time.monotonic() - began < self.capabilities.max_step_s
        return events

    def run(self, rows: Sequence[EngineSequence]) -> list[EngineEvent]:
        """Step as the scheduler does, rows in their order, until none is ready."""
        events: list[EngineEvent] = []
        for _ in range(MAX_STEPS):
            ready = [row for row in rows if row.ready]
            if not ready:
                return events
            events += self.step(ready)
        raise AssertionError(f"Not done after {MAX_STEPS} steps.")

    def final(self, sequence: EngineSequence) -> Final:
        return _final(self.run([sequence]), sequence)

    def text(self, audio: Audio) -> str:
        return self.final(self.segment(audio)).text

    @cached_property
    def alone(self) -> list[str]:
        """Text of each of ``clips()``, decoded by itself."""
        return [self.text(audio) for audio in clips()]


def clips() -> list[Audio]:
    """Three short stretches of speech, different in length, speaker and text."""
    return [clip("librivox-0880"), clip("jfk")[:35_000], clip("librivox-0930")[:40_000]]


def pieces(audio: Audio, size: int) -> list[Audio]:
    return [audio[start : start + size] for start in range(0, len(audio), size)]


def ready(sequence: EngineSequence) -> bool:
    return sequence.ready


def _final(events: Sequence[EngineEvent], sequence: EngineSequence) -> Final:
    """The one Final of a sequence, after which nothing of it comes."""
    mine = [event for event in events if event.sequence is sequence]
    assert [type(event) for event in mine].count(Final) == 1
    final = mine[-1]
    assert isinstance(final, Final)
    assert not ready(sequence)
    return final


def _nothing(phase: str, fraction: float) -> None: ...


@pytest.fixture(scope="module", params=WITH_MARKS, ids=lambda factory: factory.name)
def loaded(request: pytest.FixtureRequest) -> Iterator[Loaded]:
    factory: Factory = request.param
    engine = factory.make()
    yield Loaded(engine, engine.load(_nothing), factory.understands)
    engine.close()


@pytest.fixture(params=WITH_MARKS, ids=lambda factory: factory.name)
def factory(request: pytest.FixtureRequest) -> Factory:
    found: Factory = request.param
    return found


PARTIALS = SequenceRequest("", Lane.LIVE, partials=True)


# ---------------------------------------------------------------- one sequence


def test_capabilities_are_sane(loaded: Loaded) -> None:
    capabilities = loaded.capabilities
    assert capabilities.engine
    assert capabilities.model
    assert capabilities.languages
    assert set(capabilities.languages) <= set(NAMES)
    assert capabilities.max_live >= 1
    assert capabilities.max_batch >= 1
    assert capabilities.word_times in ("exact", "estimated", "none")
    assert capabilities.max_segment_s >= 5
    assert capabilities.max_step_s > 0
    assert capabilities.slots >= 0


def test_a_segment_gives_one_final(loaded: Loaded) -> None:
    sequence = loaded.segment(clips()[0])
    final = loaded.final(sequence)
    assert final.text == final.text.strip()
    assert final.finish_reason in ("stop", "repetition", "length")
    assert final.language in ("", *NAMES)
    if loaded.understands:
        assert final.text
        assert final.finish_reason == "stop"
    assert loaded.step([sequence]) == []


def test_the_same_audio_gives_the_same_text(loaded: Loaded) -> None:
    assert loaded.text(clips()[0]) == loaded.alone[0]


@pytest.mark.parametrize("size", [320, 7001])
def test_feeding_in_pieces_changes_nothing(loaded: Loaded, size: int) -> None:
    sequence = loaded.open()
    for piece in pieces(clips()[0], size):
        loaded.engine.feed(sequence, piece)
        assert not ready(sequence)
    loaded.engine.finish(sequence)
    assert loaded.final(sequence).text == loaded.alone[0]


def test_the_audio_is_not_written_to(loaded: Loaded) -> None:
    audio = (clips()[0] * 4).copy()
    before = audio.copy()
    loaded.text(audio)
    assert np.array_equal(audio, before)


def test_without_audio_the_final_is_empty(loaded: Loaded) -> None:
    sequence = loaded.open()
    loaded.engine.finish(sequence)
    assert loaded.final(sequence).text == ""


@pytest.mark.parametrize("samples", [1, 160, 511, 1023, 1600, 4800])
def test_audio_may_be_short(loaded: Loaded, samples: int) -> None:
    assert isinstance(loaded.final(loaded.segment(clips()[1][8000 : 8000 + samples])).text, str)


def test_digital_silence_has_no_text(loaded: Loaded) -> None:
    if not loaded.understands:
        pytest.skip("knows no silence")
    assert loaded.text(silence(2.0)) == ""


def test_words_lie_in_the_audio(loaded: Loaded) -> None:
    final = loaded.final(loaded.segment(clips()[0], SequenceRequest("", Lane.BATCH, words=True)))
    if loaded.capabilities.word_times != "exact":
        assert final.words == ()  # they are spread over the speech that VAD found, which the engine does not know
        return
    assert "".join(word.text for word in final.words).split() == "".join(final.text.split()).split()
    assert all(0 <= word.start <= word.end <= len(clips()[0]) / 16_000 for word in final.words)
    assert all(before.start <= after.start for before, after in pairwise(final.words))


def test_every_field_of_a_request_is_taken(loaded: Loaded) -> None:
    request = SequenceRequest(
        "",
        Lane.INTERACTIVE,
        language=loaded.capabilities.languages[0],
        prompt="A reading.",
        keywords=("Dashwood",),
        temperature=0.5,
        words=True,
        base_sample=123_456,
    )
    final = loaded.final(loaded.segment(clips()[0], request))
    assert final.text or not loaded.understands
    assert final.avg_logprob is None or final.avg_logprob <= 0
    assert all(logprob <= 0 for _, logprob in final.logprobs)


# ---------------------------------------------------------------- readiness


def test_without_partials_only_the_end_makes_ready(loaded: Loaded) -> None:
    sequence = loaded.open()
    assert not ready(sequence)
    loaded.engine.feed(sequence, clips()[0])
    assert not ready(sequence)
    assert loaded.step([sequence]) == []
    loaded.engine.finish(sequence)
    assert ready(sequence)
    loaded.final(sequence)


def test_with_partials_new_audio_makes_ready(loaded: Loaded) -> None:
    sequence = loaded.open(PARTIALS)
    audio = clips()[0]
    loaded.engine.feed(sequence, audio[:320])
    assert not ready(sequence)
    loaded.engine.feed(sequence, audio[320:32_000])
    assert ready(sequence)
    events = loaded.run([sequence])
    assert events
    assert all(isinstance(event, Hypothesis) and event.sequence is sequence for event in events)
    assert not ready(sequence)
    loaded.engine.finish(sequence)
    loaded.final(sequence)


def test_nothing_ready_is_no_work(loaded: Loaded) -> None:
    assert loaded.step([]) == []
    assert loaded.step([loaded.open(), loaded.open(PARTIALS)]) == []


# ---------------------------------------------------------------- live


def test_an_utterance_ends_as_if_it_had_come_at_once(loaded: Loaded) -> None:
    sequence = loaded.open(PARTIALS)
    events: list[EngineEvent] = []
    for piece in pieces(clips()[0], 8000):
        loaded.engine.feed(sequence, piece)
        events += loaded.run([sequence])
    assert events
    assert all(isinstance(event, Hypothesis) for event in events)
    loaded.engine.finish(sequence)
    assert loaded.final(sequence).text == loaded.alone[0]


def test_after_the_end_of_the_audio_text_only_grows(loaded: Loaded) -> None:
    """What a reader of a file's stream has seen stays: each hypothesis begins with the one before, and so does the final."""
    if not loaded.capabilities.accepts_prefix:
        pytest.skip("an engine without prefixes sends nothing before the final")
    sequence = loaded.segment(clips()[0], replace(PARTIALS, lane=Lane.INTERACTIVE))
    texts = [event.text for event in loaded.run([sequence]) if isinstance(event, Hypothesis | Final)]
    assert len(texts) > 2
    assert all(after.startswith(before) for before, after in pairwise(texts))
    assert texts[-1] == loaded.alone[0]


def test_a_prefix_stays(loaded: Loaded) -> None:
    if not loaded.capabilities.accepts_prefix:
        pytest.skip("takes no prefix")
    words = loaded.alone[0].split()
    for kept in (1, len(words) // 2, len(words)):
        prefix = " ".join(words[:kept])
        sequence = loaded.segment(clips()[0], replace(PARTIALS, prefix=prefix))
        events = loaded.run([sequence])
        texts = [event.text for event in events if isinstance(event, Hypothesis | Final)]
        assert all(text.startswith(prefix) for text in texts)
        assert _final(events, sequence).text == loaded.alone[0]


def test_what_is_frozen_stays(loaded: Loaded) -> None:
    if not loaded.capabilities.accepts_prefix:
        pytest.skip("takes no prefix")
    sequence = loaded.open(PARTIALS)
    frozen, texts = "", [""]
    for piece in pieces(clips()[0], 12_000):
        loaded.engine.feed(sequence, piece)
        for event in loaded.run([sequence]):
            assert isinstance(event, Hypothesis)
            assert event.text.startswith(frozen)
            texts.append(event.text)
        frozen = " ".join(texts[-1].split()[:-1])
        loaded.engine.freeze(sequence, frozen)
        loaded.engine.suspend(sequence)
    assert frozen
    loaded.engine.finish(sequence)
    assert loaded.final(sequence).text.startswith(frozen)


@pytest.mark.parametrize("partials", [True, False], ids=["read-along", "final-only"])
def test_a_pause_is_heard_early_and_changes_nothing(loaded: Loaded, partials: bool) -> None:
    sequence = loaded.open(PARTIALS if partials else None)
    for piece in pieces(clips()[0], 9_000):
        loaded.engine.feed(sequence, piece)
        loaded.engine.pause(sequence)
        events = loaded.run([sequence])
        assert partials or not events
        assert not ready(sequence), "once a pause"
    loaded.engine.feed(sequence, np.zeros(1_600, np.float32))
    assert not ready(sequence), "more audio takes it back"
    loaded.engine.finish(sequence)
    assert loaded.final(sequence).text == loaded.alone[0]


# ---------------------------------------------------------------- suspend and cancel


def test_suspending_between_steps_changes_nothing(loaded: Loaded) -> None:
    sequence = loaded.open(PARTIALS)
    for piece in pieces(clips()[0], 12_000):
        loaded.engine.feed(sequence, piece)
        loaded.engine.suspend(sequence)
        if ready(sequence):
            loaded.step([sequence])
        loaded.engine.suspend(sequence)
    loaded.engine.finish(sequence)
    loaded.engine.suspend(sequence)
    assert loaded.final(sequence).text == loaded.alone[0]


def test_suspending_in_the_middle_of_a_decode_changes_nothing(loaded: Loaded) -> None:
    sequence = loaded.segment(clips()[0])
    events = loaded.step([sequence])
    if not events:
        loaded.engine.suspend(sequence)
        events = loaded.run([sequence])
    assert _final(events, sequence).text == loaded.alone[0]


@pytest.mark.parametrize("finished", [False, True])
def test_nothing_follows_a_cancel(loaded: Loaded, finished: bool) -> None:
    dropped, kept = loaded.open(PARTIALS), loaded.segment(clips()[1])
    loaded.engine.feed(dropped, clips()[0])
    if finished:
        loaded.engine.finish(dropped)
    assert ready(dropped)
    loaded.engine.cancel(dropped)
    assert not ready(dropped)
    events = loaded.step([dropped, kept]) + loaded.run([dropped, kept])
    assert all(event.sequence is kept for event in events)
    assert _final(events, kept).text == loaded.alone[1]


def test_cancel_in_the_middle_of_a_decode(loaded: Loaded) -> None:
    dropped, kept = loaded.segment(clips()[0]), loaded.segment(clips()[1])
    events = loaded.step([dropped, kept])
    loaded.engine.cancel(dropped)
    rest = loaded.run([dropped, kept])
    assert all(event.sequence is kept for event in rest)
    assert _final(events + rest, kept).text == loaded.alone[1]


def test_cancel_twice_and_after_the_final(loaded: Loaded) -> None:
    sequence = loaded.segment(clips()[1])
    loaded.final(sequence)
    loaded.engine.cancel(sequence)
    loaded.engine.cancel(sequence)
    assert not ready(sequence)


# ---------------------------------------------------------------- several rows


def test_neighbours_do_not_change_each_other(loaded: Loaded) -> None:
    rows = [loaded.segment(audio) for audio in clips()]
    events = loaded.run(rows)
    assert [_final(events, row).text for row in rows] == loaded.alone


def test_rows_that_come_and_go_do_not_change_each_other(loaded: Loaded) -> None:
    """A row that joins in the middle of another's decode, as in continuous batching."""
    first = loaded.segment(clips()[0])
    events = loaded.step([first])
    second = loaded.segment(clips()[1])
    events += loaded.step([row for row in (first, second) if row.ready])
    third = loaded.segment(clips()[2])
    events += loaded.run([second, first, third])
    assert [_final(events, row).text for row in (first, second, third)] == loaded.alone


def test_the_first_rows_are_served_first(loaded: Loaded) -> None:
    batch = loaded.capabilities.max_batch
    audio = clips()[1]
    rows = [loaded.segment(audio) for _ in range(batch + 1)]
    events: list[EngineEvent] = []
    while not events:
        events = loaded.step(rows)
    assert {id(event.sequence) for event in events} == {id(row) for row in rows[:batch]}
    events += loaded.run(rows)
    finals = [event.sequence for event in events if isinstance(event, Final)]
    assert finals[-1] is rows[-1]
    assert len(finals) == batch + 1


def test_a_better_lane_in_front_is_served_in_this_step(loaded: Loaded) -> None:
    """Its first hypothesis takes hardly more steps than alone: a tenth, and one, for others that join."""
    waiting = [loaded.segment(clips()[1]) for _ in range(loaded.capabilities.max_batch)]
    alone = _steps_to_speak(loaded, [])
    assert _steps_to_speak(loaded, waiting) <= 1.1 * alone + 1
    loaded.run(waiting)


def _steps_to_speak(loaded: Loaded, others: list[EngineSequence]) -> int:
    """Steps until a live sequence in front of ``others`` has its first hypothesis."""
    live = loaded.open(PARTIALS)
    loaded.engine.feed(live, clips()[0])
    for steps in range(1, MAX_STEPS):
        if any(event.sequence is live for event in loaded.step([live, *(row for row in others if row.ready)])):
            loaded.engine.cancel(live)
            return steps
    raise AssertionError("it never spoke")


def test_rows_that_are_not_given_get_nothing(loaded: Loaded) -> None:
    given, other = loaded.segment(clips()[1]), loaded.segment(clips()[2])
    events = loaded.run([given])
    assert all(event.sequence is given for event in events)
    assert ready(other)
    assert loaded.final(other).text == loaded.alone[2]


def test_a_row_that_fails_fails_alone(loaded: Loaded) -> None:
    """Audio that is no numbers: the engine may make of it what it likes, but for itself."""
    good = loaded.segment(clips()[1])
    bad = loaded.segment(np.full(32_000, np.nan, np.float32))
    events = loaded.run([bad, good])
    ends = [event for event in events if event.sequence is bad and isinstance(event, Final | SequenceFailed)]
    assert len(ends) == 1
    assert not ready(bad)
    assert _final(events, good).text == loaded.alone[1]


# ---------------------------------------------------------------- life of an engine


def test_loading_reports_and_closing_gives_back(factory: Factory) -> None:
    threads = threading.active_count()
    phases: list[tuple[str, float]] = []
    engine = factory.make()
    capabilities = engine.load(lambda phase, fraction: phases.append((phase, fraction)))
    assert phases
    assert all(phase and 0 <= fraction <= 1 for phase, fraction in phases)
    loaded = Loaded(engine, capabilities, factory.understands)
    rows = [loaded.segment(clips()[1]) for _ in range(2)]
    loaded.run(rows)
    engine.close()
    engine.close()
    assert threading.active_count() == threads


def test_closing_what_was_not_loaded(factory: Factory) -> None:
    factory.make().close()
