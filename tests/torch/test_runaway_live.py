"""Run-aways in calls: the utterance is heard again in two, what was said stays, and the final says what happened."""

from __future__ import annotations

from collections.abc import Iterator

import jiwer
import pytest

from shared.messages import Event
from shared.streams import StreamOptions, UtteranceDelta, UtteranceFinal
from shared.wire import RawAudio
from tests.torch.running import read_audio
from tests.torch.test_runaway_files import LONG, SHORT, lose_itself
from tests.torch.test_runaways import loops
from tests.torch.test_samples import said
from worker.audio.samples import Audio
from worker.engines.base import Hypothesis, SequenceFailed
from worker.engines.qwen3.engine import Qwen3Engine
from worker.live.endpointing import Begin, End, Speech
from worker.live.stream import LiveStream

pytestmark = pytest.mark.torch

UPDATE = 32_000


@pytest.fixture
def engine(trained_engine: Qwen3Engine) -> Iterator[Qwen3Engine]:
    yield trained_engine
    trained_engine.logits_hook = None


def talk(engine: Qwen3Engine, sound: Audio, *, partials: bool) -> list[Event]:
    """One utterance of a call, in updates of 2 s, and everything that is said of it."""
    options = StreamOptions(RawAudio("s16le", 16_000, 1), language="en", partials=partials, words=True)
    stream = LiveStream("call", 0, 1, engine, accepts_prefix=True, options=options)
    events = stream.happen(Begin(0, 0), None)

    def work() -> None:
        for _ in range(4_000):
            rows = dict(stream.rows())
            if not rows:
                return
            for event in engine.step(list(rows), 0):
                assert not isinstance(event, SequenceFailed), event.error
                events.extend(stream.hypothesis(0, event) if isinstance(event, Hypothesis) else stream.final(0, event))
        raise AssertionError("it does not end")

    for start in range(0, len(sound), UPDATE):
        events += stream.happen(Speech(0, sound[start : start + UPDATE]), None)
        work()
    events += stream.happen(End(0, len(sound), "silence", ((0, len(sound)),), spoken=True), None)
    work()
    assert not stream.open
    assert not stream.owed
    return events


def final_of(events: list[Event]) -> UtteranceFinal:
    (final,) = [event for event in events if isinstance(event, UtteranceFinal)]
    assert "".join(event.text for event in events if isinstance(event, UtteranceDelta)) == final.text
    return final


@pytest.mark.parametrize("partials", [False, True], ids=["final alone", "with partials"])
@pytest.mark.parametrize("name", ["word", "never ends"])
def test_an_utterance_that_ran_away_is_heard_again_in_two(engine: Qwen3Engine, name: str, partials: bool) -> None:
    line, reason = loops(engine._vocabulary)[name]
    sound = read_audio(LONG)
    begun = lose_itself(engine, line, lambda sequence: sequence.samples.length == len(sound))
    final = final_of(talk(engine, sound, partials=partials))
    assert begun
    assert final.finish_reason == reason
    wrong = jiwer.process_words(said(LONG), final.text)
    assert wrong.deletions + wrong.substitutions <= 4, final.text
    assert wrong.insertions <= 6
    assert final.estimated
    assert [word.text.strip() for word in final.words] == final.text.split()
    assert final.timings.windows >= 3


def test_an_utterance_that_always_runs_away_ends(engine: Qwen3Engine) -> None:
    line, reason = loops(engine._vocabulary)["word"]
    lose_itself(engine, line, lambda sequence: sequence.finished)
    final = final_of(talk(engine, read_audio(LONG), partials=False))
    assert final.finish_reason == reason
    assert len(final.text.split()) < 60


def test_a_short_one_is_kept_and_says_so(engine: Qwen3Engine) -> None:
    line, reason = loops(engine._vocabulary)["word"]
    lose_itself(engine, line, lambda sequence: sequence.finished)
    final = final_of(talk(engine, read_audio(SHORT)[: 3 * 16_000], partials=False))
    assert final.finish_reason == reason
    assert 0 < len(final.text.split()) < 20


def test_a_call_that_does_not_run_away(engine: Qwen3Engine) -> None:
    final = final_of(talk(engine, read_audio(SHORT), partials=False))
    assert (final.text, final.finish_reason) == (said(SHORT), "stop")


def test_whoever_hangs_up_meanwhile_leaves_nothing(engine: Qwen3Engine) -> None:
    line, _ = loops(engine._vocabulary)["word"]
    sound = read_audio(LONG)
    begun = lose_itself(engine, line, lambda sequence: sequence.samples.length == len(sound))
    options = StreamOptions(RawAudio("s16le", 16_000, 1), language="en", partials=False)
    stream = LiveStream("call", 0, 1, engine, accepts_prefix=True, options=options)
    for happening in (Begin(0, 0), Speech(0, sound), End(0, len(sound), "silence", ((0, len(sound)),), spoken=True)):
        stream.happen(happening, None)
    while not stream.open[0].hearing.in_parts:
        for event in engine.step([row for row, _ in stream.rows()], 0):
            if not isinstance(event, Hypothesis | SequenceFailed):
                stream.final(0, event)
    assert begun
    engine.step([row for row, _ in stream.rows()], 0)
    parts = [piece.sequence for piece in stream.open[0].hearing.pieces]
    stream.cancel()
    assert all(part is not None and not part.ready for part in parts)
    assert not engine._table.calls
