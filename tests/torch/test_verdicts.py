"""The device knows by itself that a text ends or runs away in a pattern."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.torch.checkpoints import build_random
from tests.torch.running import loaded
from tests.torch.watching import any_life, period_of, watch_verdicts
from worker.engines.qwen3.engine import Qwen3Engine
from worker.engines.qwen3.guard import MAX_PERIOD
from worker.engines.qwen3.verdicts import ENDS, GOES_ON, Verdicts

pytestmark = pytest.mark.torch

SLOTS, LENGTH, END = 3, 700, 9
Line = tuple[int, list[int]]
"""Where a row's text begins in its slot, and its tokens; the last one was just chosen."""


def judged(lines: list[Line], *, before: int = 7) -> list[int]:
    """Verdicts on the last token of each line, one line a slot. ``before``: what fills the slots otherwise."""
    verdicts = Verdicts(slots=SLOTS, length=LENGTH, ends=[END, 11], device=torch.device("cpu"), fused=False)
    everywhere = torch.arange(LENGTH)
    for slot, (begin, tokens) in enumerate(lines):
        verdicts.remember(torch.full((LENGTH,), before), torch.full((LENGTH,), slot), everywhere)
        known = torch.tensor(tokens[:-1], dtype=torch.long)
        verdicts.remember(known, torch.full_like(known, slot), begin + torch.arange(len(known)))
    spots = torch.tensor([[begin, slot, begin + len(tokens) - 2] for slot, (begin, tokens) in enumerate(lines)]).T
    chosen = torch.tensor([[tokens[-1] for _, tokens in lines], [5] * len(lines)], dtype=torch.int32)
    packed = verdicts.judge(chosen, spots)
    assert packed[:2].equal(chosen)
    return packed[2].tolist()


PATTERNS = st.lists(st.integers(0, 4), min_size=1, max_size=MAX_PERIOD + 4)


@given(st.lists(st.integers(0, 4), max_size=30), PATTERNS, st.integers(0, 290), st.integers(1, 90))
@example([1, 2], [3], 18, 1).via("a single token, nineteen of twenty times")
@example([1, 2], [3], 19, 1).via("and twenty")
@example([], list(range(MAX_PERIOD)), 6 * MAX_PERIOD - 1, 1).via("the longest pattern")
@settings(deadline=None)
def test_a_run_is_told_at_the_token_that_makes_it_one(
    good: list[int], pattern: list[int], more: int, begin: int
) -> None:
    tokens = good + [pattern[n % len(pattern)] for n in range(more + 1)]
    assert judged([(begin, tokens)]) == [period_of(tokens)]


def test_what_stands_before_the_text_does_not_count() -> None:
    """Sound and prompt are runs, too."""
    nineteen = [7] * 19
    assert judged([(300, nineteen)]) == [GOES_ON]
    assert judged([(300, [*nineteen, 7])]) == [1]
    assert judged([(0, nineteen)]) == [GOES_ON], "nor does what would be the end of another slot"


def test_rows_are_judged_for_themselves() -> None:
    lines = [(4, [1, 2, 3, END]), (90, [1, 2] * 20), (1, [5, 6, 7])]
    assert judged(lines) == [ENDS, 2, GOES_ON]
    assert judged(lines[::-1]) == [GOES_ON, 2, ENDS]


def test_an_end_goes_before_a_run() -> None:
    assert judged([(3, [END] * 40), (3, [11])]) == [ENDS, ENDS]


@pytest.fixture(scope="module")
def looping_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Qwen3Engine]:
    engine = loaded(build_random(tmp_path_factory.mktemp("looping"), gain=1.9), max_slots=4)
    yield engine
    engine.close()


@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "ahead"])
def test_every_verdict_is_right_whatever_happens_to_a_row(
    looping_engine: Qwen3Engine, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    looping_engine._passes.goes_ahead = ahead
    seen = watch_verdicts(monkeypatch, looping_engine)
    for seed in range(3):
        any_life(looping_engine, seed)
    assert seen[ENDS] > 5
    assert sum(count for verdict, count in seen.items() if verdict > 0) > 5
    assert seen[GOES_ON] > 200
