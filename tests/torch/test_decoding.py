"""Tokens are those of ``generate()``, whatever happens around a sequence."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from shared.messages import Lane
from tests.torch.running import Reference, drive, finals, noise, start
from worker.audio.samples import Audio
from worker.engines.base import EngineEvent, Final
from worker.engines.qwen3.engine import Qwen3Engine
from worker.engines.qwen3.sequence import Qwen3Sequence
from worker.engines.qwen3.slots import SlotTable

pytestmark = pytest.mark.torch

SECONDS = (0.2, 0.5, 1.0, 1.37, 3.0, 4.0, 7.995, 8.0, 8.01, 10.6)


@pytest.fixture(autouse=True, params=[False, True], ids=["in step", "ahead"])
def ahead(request: pytest.FixtureRequest, random_engine: Qwen3Engine) -> Iterator[bool]:
    """With and without passes that are launched before the tokens are known that they go on from."""
    random_engine._passes.goes_ahead = request.param
    yield request.param
    random_engine._passes.goes_ahead = False


@pytest.fixture(scope="module")
def clips() -> list[Audio]:
    return [noise(seconds, seed) for seed, seconds in enumerate(SECONDS)]


@pytest.fixture(scope="module")
def expected(clips: list[Audio], random_reference: Reference) -> list[list[int]]:
    return [random_reference.tokens(clip, language="English", limit=budget(clip)) for clip in clips]


def budget(clip: Audio) -> int:
    return 24 + int(12 * len(clip) / 16_000)


def check(row: Qwen3Sequence, expected: list[int], events: list[EngineEvent]) -> None:
    """Equal to the end; where our guard ended a loop of the random model, equal up to there."""
    final = next(e for e in events if isinstance(e, Final) and e.sequence is row)
    if final.finish_reason == "repetition":
        assert row.tokens == expected[: len(row.tokens)]
    else:
        assert row.tokens == expected
    assert final.finish_reason == ("length" if len(expected) == row.budget else "stop") or row.tokens != expected


def test_reference_is_worth_comparing_with(clips: list[Audio], expected: list[list[int]]) -> None:
    """The random model says many things, differently for each clip, and ends some of them itself."""
    assert max(len(set(tokens)) for tokens in expected) >= 20
    assert sum(len(set(tokens)) >= 20 for tokens in expected) >= 3
    assert len({tuple(tokens[:8]) for tokens in expected}) == len(expected)
    ended = [len(tokens) < budget(clip) for clip, tokens in zip(clips, expected, strict=True)]
    assert 2 <= sum(ended) < len(ended)


@pytest.mark.parametrize("index", range(len(SECONDS)))
def test_single(random_engine: Qwen3Engine, clips: list[Audio], expected: list[list[int]], index: int) -> None:
    row = start(random_engine, clips[index], language="en")
    check(row, expected[index], drive(random_engine, [row]))


def test_batched_with_more_rows_than_slots(
    random_engine: Qwen3Engine, clips: list[Audio], expected: list[list[int]]
) -> None:
    rows = [start(random_engine, clip, str(n), language="en") for n, clip in enumerate(clips)]
    events = drive(random_engine, rows)
    assert len(finals(events)) == len(rows)
    for row, tokens in zip(rows, expected, strict=True):
        check(row, tokens, events)


def test_joining_in_mid_flight(random_engine: Qwen3Engine, clips: list[Audio], expected: list[list[int]]) -> None:
    rows = [start(random_engine, clip, str(n), language="en") for n, clip in enumerate(clips)]
    order = iter(rows)
    events = drive(random_engine, [], before=lambda n: [r for r in [next(order, None)] if r] if n % 7 == 0 else [])
    for row, tokens in zip(rows, expected, strict=True):
        check(row, tokens, events)


def test_live_rows_evict_batch_rows_which_are_computed_again(
    random_engine: Qwen3Engine, clips: list[Audio], expected: list[list[int]]
) -> None:
    batch = [start(random_engine, clip, f"b{n}", language="en") for n, clip in enumerate(clips)]
    live = [start(random_engine, clip, f"l{n}", Lane.LIVE, language="en") for n, clip in enumerate(clips)]
    evictions, encoded = random_engine.evictions, random_engine.encoder.encoded
    waiting = iter(live)
    events = drive(random_engine, batch, before=lambda n: [r for r in [next(waiting, None)] if r] if n % 9 == 5 else [])
    assert random_engine.evictions > evictions + 3
    for row, tokens in zip(batch + live, expected + expected, strict=True):
        check(row, tokens, events)
    assert random_engine.encoder.encoded - encoded == 2 * sum(_windows(clip) for clip in clips)


def _windows(clip: Audio) -> int:
    return -(-(max(len(clip), 8000) // 160) // 800)


def test_cancelled_neighbours_leave_no_trace(
    random_engine: Qwen3Engine, clips: list[Audio], expected: list[list[int]]
) -> None:
    kept = [start(random_engine, clip, f"k{n}", language="en") for n, clip in enumerate(clips)]
    doomed = [start(random_engine, noise(2.0, 90 + n), f"d{n}", language="en") for n in range(6)]

    def cancel_one(step: int) -> list[Qwen3Sequence]:
        if step % 5 == 3 and doomed:
            random_engine.cancel(doomed.pop())
        return []

    mixed = [row for pair in zip(kept, [*doomed, *([None] * len(kept))], strict=False) for row in pair if row]
    events = drive(random_engine, mixed, before=cancel_one)
    assert {e.sequence.request.id for e in events if isinstance(e, Final)} >= {k.request.id for k in kept}
    for row, tokens in zip(kept, expected, strict=True):
        check(row, tokens, events)


def test_suspended_rows_go_on_where_they_were(
    random_engine: Qwen3Engine, clips: list[Audio], expected: list[list[int]]
) -> None:
    rows = [start(random_engine, clip, str(n), language="en") for n, clip in enumerate(clips[:6])]
    encoded = random_engine.encoder.encoded

    def suspend(step: int) -> list[Qwen3Sequence]:
        row = rows[step % len(rows)]
        if step % 3 == 2 and not row.closed:
            random_engine.suspend(row)
        return []

    events = drive(random_engine, rows, before=suspend)
    assert random_engine.encoder.encoded - encoded == sum(_windows(clip) for clip in clips[:6])
    for row, tokens in zip(rows, expected, strict=False):
        check(row, tokens, events)


def test_context_and_automatic_language(random_engine: Qwen3Engine, random_reference: Reference) -> None:
    clip = noise(2.0, 5)
    context = "Dactylopiidae, Lumière\nund Übung 東京"
    row = start(random_engine, clip, prompt=context)
    events = drive(random_engine, [row])
    check(row, random_reference.tokens(clip, prompt=context, limit=row.budget), events)
    plain = random_reference.tokens(clip, limit=row.budget)
    assert row.tokens[:8] != plain[:8], "the context must change something"


def test_scores_are_those_of_the_model(random_engine: Qwen3Engine, random_reference: Reference) -> None:
    clip = noise(3.0, 4)
    row = start(random_engine, clip, language="en")
    drive(random_engine, [row])
    inputs = random_reference.processor.apply_transcription_request(audio=[clip], language="English")
    with torch.inference_mode():
        out = random_reference.model.generate(
            **inputs, max_new_tokens=row.budget, output_scores=True, return_dict_in_generate=True
        )
    logprobs = torch.stack(out.scores)[:, 0].log_softmax(-1).max(-1).values[: len(row.scores)]
    assert torch.allclose(torch.tensor(row.scores), logprobs, atol=1e-3)


def test_the_youngest_of_the_lowest_lane_is_evicted(random_engine: Qwen3Engine) -> None:
    table = SlotTable(3)
    lanes = (Lane.BATCH, Lane.BATCH, Lane.INTERACTIVE)
    old, young, interactive = (start(random_engine, None, str(n), lane) for n, lane in enumerate(lanes))
    assert all(table.seat(row) for row in (old, young, interactive))
    calls = [start(random_engine, None, f"call{n}", Lane.LIVE) for n in range(4)]
    gone = []
    for call in calls:
        seated = table.seat(call)
        gone.append([row.request.id for row in (old, young, interactive) if row.slot is None])
        assert seated == (call is not calls[3]), "a call never takes another call's slot"
    assert gone == [["1"], ["0", "1"], ["0", "1", "2"], ["0", "1", "2"]]
    assert not table.seat(old)
    table.release(calls[0])
    assert table.seat(old)


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_between_steps(
    random_engine: Qwen3Engine, clips: list[Audio], expected: list[list[int]], seed: int
) -> None:
    """Rows join late, sit out, lose their slots, are cancelled, and calls go first; each kept row says what it would say alone."""
    chance = random.Random(seed)
    rows = [
        start(random_engine, clip, f"{n}", chance.choice([*Lane, Lane.BATCH]), language="en")
        for n, clip in enumerate(clips)
    ]
    doomed = [start(random_engine, noise(2.0, 90 + n), f"d{n}", language="en") for n in range(4)]
    waiting = [*rows, *doomed]
    chance.shuffle(waiting)
    running: list[Qwen3Sequence] = []
    events: list[EngineEvent] = []
    for _ in range(3_000):
        if waiting and chance.random() < 0.2:
            running.append(waiting.pop())
        running = [row for row in running if not row.closed]
        if not running and not waiting:
            break
        stepping = sorted((row for row in running if chance.random() < 0.9), key=lambda row: row.lane)
        told = random_engine.step(stepping, 0)
        assert {id(event.sequence) for event in told} <= set(map(id, stepping)), "only rows of the step are spoken of"
        events += told
        if running and chance.random() < 0.08:
            random_engine.suspend(chance.choice(running))
        for row in doomed:
            if row.kv and chance.random() < 0.1:
                random_engine.cancel(row)
    assert not running
    for row, tokens in zip(rows, expected, strict=True):
        check(row, tokens, events)


def test_a_pass_ahead_is_used(
    random_engine: Qwen3Engine, clips: list[Audio], ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pass a token, and at most one more at the end."""
    passes = 0
    forward = random_engine._forward
    next_tokens = forward.next_tokens

    def counted(*args: object, **more: object) -> torch.Tensor:
        nonlocal passes
        passes += 1
        return next_tokens(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(forward, "next_tokens", counted)
    row = start(random_engine, clips[4], language="en")
    drive(random_engine, [row])
    assert 0 <= passes - len(row.tokens) + 1 <= ahead + 1


def test_no_memory_for_a_pass_costs_no_words(
    random_engine: Qwen3Engine, clips: list[Audio], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = random_engine._forward
    next_tokens, calls = forward.next_tokens, 0

    def poor(*args: object, **more: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise torch.OutOfMemoryError("scripted")
        return next_tokens(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(forward, "next_tokens", poor)
    rows = [start(random_engine, clip, str(n), language="en") for n, clip in enumerate(clips[4:7])]
    events = drive(random_engine, rows)
    for row, tokens in zip(rows, expected[4:7], strict=True):
        check(row, tokens, events)


def test_a_pass_ahead_that_fails_costs_no_words(
    random_engine: Qwen3Engine, clips: list[Audio], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of whatever: the pass before it lands, and the rows get their tokens in the next step."""
    next_tokens, failed = random_engine._forward.next_tokens, 0

    def poor(*args: object, after: object = None) -> torch.Tensor:
        nonlocal failed
        if after is not None and failed < 5:
            failed += 1
            raise RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")
        return next_tokens(*args, after=after)  # type: ignore[arg-type, misc]

    monkeypatch.setattr(random_engine._forward, "next_tokens", poor)
    rows = [start(random_engine, clip, str(n), language="en") for n, clip in enumerate(clips[4:7])]
    events = drive(random_engine, rows)
    assert failed == (5 if random_engine._passes.goes_ahead else 0)
    for row, tokens in zip(rows, expected[4:7], strict=True):
        check(row, tokens, events)
