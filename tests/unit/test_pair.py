"""Two models as one engine: who hears what, and that nothing said is taken back."""

from __future__ import annotations

import numpy as np
import pytest

from shared.errors import ModelLoadFailed
from shared.messages import Lane
from worker.engines.base import Final, Hypothesis, SequenceRequest
from worker.engines.pair import PairEngine
from worker.engines.scripted import ScriptedEngine, ScriptedOptions

SECOND = np.full(16_000, 0.1, np.float32)


class Counting(ScriptedEngine):
    """Counts the samples that it is fed."""

    def __init__(self, options: str) -> None:
        super().__init__(ScriptedOptions.parse(options))
        self.fed = 0

    def feed(self, sequence, audio) -> None:  # type: ignore[no-untyped-def]
        self.fed += len(audio)
        super().feed(sequence, audio)


@pytest.fixture
def pair() -> tuple[PairEngine, Counting, Counting]:
    main, small = Counting("batch=4,words=100"), Counting("batch=2,words=100,live=7")
    engine = PairEngine(main, small)
    capabilities = engine.load(lambda _phase, _fraction: None)
    assert (capabilities.max_batch, capabilities.max_live) == (4, 7)
    return engine, main, small


def test_a_file_is_the_main_models_alone(pair: tuple[PairEngine, Counting, Counting]) -> None:
    engine, main, small = pair
    row = engine.open(SequenceRequest("f", Lane.BATCH, partials=True))
    engine.feed(row, SECOND)
    engine.finish(row)
    (event,) = engine.step([row], 0)
    assert isinstance(event, Final)
    assert event.sequence is row
    assert (main.fed, small.fed) == (16_000, 0)


def test_partials_come_from_the_small_one_and_the_final_from_the_main_one(
    pair: tuple[PairEngine, Counting, Counting],
) -> None:
    engine, main, small = pair
    row = engine.open(SequenceRequest("c", Lane.LIVE, partials=True))
    engine.feed(row, SECOND)
    (partial,) = engine.step([row], 0)
    assert isinstance(partial, Hypothesis)
    assert (main.fed, small.fed) == (0, 16_000)
    engine.feed(row, SECOND)
    engine.finish(row)
    (final,) = engine.step([row], 0)
    assert isinstance(final, Final)
    assert main.fed == small.fed == 32_000, "each model hears each sample once"


def test_what_was_said_stays(pair: tuple[PairEngine, Counting, Counting]) -> None:
    engine, _, _ = pair
    row = engine.open(SequenceRequest("c", Lane.LIVE, partials=True))
    engine.feed(row, SECOND)
    (partial,) = engine.step([row], 0)
    assert isinstance(partial, Hypothesis)
    said = partial.text.split()[0]
    engine.freeze(row, said)
    engine.feed(row, SECOND)
    engine.finish(row)
    (final,) = engine.step([row], 0)
    assert isinstance(final, Final)
    assert final.text.startswith(said)


def test_a_step_is_one_models_in_the_order_of_the_rows(pair: tuple[PairEngine, Counting, Counting]) -> None:
    engine, _, _ = pair
    call = engine.open(SequenceRequest("c", Lane.LIVE, partials=True))
    file = engine.open(SequenceRequest("f", Lane.BATCH))
    for row in (call, file):
        engine.feed(row, SECOND)
    engine.finish(file)
    first = engine.step([call, file], 0)
    assert [event.sequence for event in first] == [call]
    second = engine.step([file, call], 0)
    assert [event.sequence for event in second] == [file]


def test_a_cancelled_call_gives_nothing(pair: tuple[PairEngine, Counting, Counting]) -> None:
    engine, _, _ = pair
    row = engine.open(SequenceRequest("c", Lane.LIVE, partials=True))
    engine.feed(row, SECOND)
    engine.cancel(row)
    assert engine.step([row], 0) == []


def test_models_that_do_not_fit_are_refused() -> None:
    engine = PairEngine(Counting("prefix=1"), Counting("prefix=0"))
    with pytest.raises(ModelLoadFailed, match="only one of them"):
        engine.load(lambda _phase, _fraction: None)
