"""Holds every verdict that rows are given against one made by the letter, on the host."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from shared.messages import Lane
from tests.torch.running import noise, start
from worker.engines.base import Hypothesis
from worker.engines.qwen3.engine import Qwen3Engine
from worker.engines.qwen3.guard import MAX_PERIOD, span_of_runaway
from worker.engines.qwen3.sequence import LIVE_HOP, Qwen3Sequence
from worker.engines.qwen3.verdicts import ENDS, GOES_ON


def period_of(tokens: Sequence[int]) -> int:
    """The shortest pattern of which the tokens end with enough copies."""
    for period in range(1, MAX_PERIOD + 1):
        span = span_of_runaway(period)
        tail = tokens[-span:]
        if len(tail) == span and all(tail[n] == tail[n - period] for n in range(period, span)):
            return period
    return GOES_ON


def watch_verdicts(monkeypatch: pytest.MonkeyPatch, engine: Qwen3Engine) -> Counter[int]:
    """From now on every token is checked as it is accepted. Returns how often which verdict has been seen."""
    accept, ends = Qwen3Sequence.accept, set(engine._forward.verdicts._ends.tolist())
    seen: Counter[int] = Counter()

    def checked(row: Qwen3Sequence, token: int, score: float, verdict: int, capacity: int) -> None:
        line = [*row._line(), token]
        assert verdict == (ENDS if token in ends else period_of(line)), line
        seen[verdict] += 1
        accept(row, token, score, verdict, capacity)

    monkeypatch.setattr(Qwen3Sequence, "accept", checked)
    return seen


def any_life(engine: Qwen3Engine, seed: int) -> None:
    """Files and calls at once; rows join late, lose their slots, are cancelled, and what calls have said is frozen."""
    chance = random.Random(seed)
    files = [
        start(engine, noise(chance.uniform(1.0, 12.0), 10 * seed + n), f"f{n}", language=chance.choice(["", "en"]))
        for n in range(8)
    ]
    calls = [
        start(engine, None, f"c{n}", Lane.LIVE, language=chance.choice(["", "en"]), partials=True) for n in range(3)
    ]
    sounds = {id(call): noise(chance.uniform(3.0, 6.0), 100 + 10 * seed + n) for n, call in enumerate(calls)}
    waiting = [*files, *calls]
    chance.shuffle(waiting)
    running: list[Qwen3Sequence] = []
    while waiting or running:
        if waiting and chance.random() < 0.3:
            running.append(waiting.pop())
        for call in calls:
            sound, at = sounds[id(call)], call.samples.length
            if not call.closed and not call.finished and chance.random() < 0.3:
                if at < len(sound):
                    engine.feed(call, sound[at : at + LIVE_HOP])
                else:
                    engine.finish(call)
        for event in engine.step([row for row in sorted(running, key=lambda row: row.lane) if row.ready], 0):
            if isinstance(event, Hypothesis) and chance.random() < 0.5:
                kept = len(event.sequence._kept)  # type: ignore[attr-defined]
                engine.freeze(event.sequence, event.text[: kept + chance.randrange(9)])
        running = [row for row in running if not row.closed]
        if running and chance.random() < 0.05:
            engine.suspend(chance.choice(running))
        if running and chance.random() < 0.01:
            engine.cancel(running.pop(chance.randrange(len(running))))
