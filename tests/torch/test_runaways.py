"""A model that will not stop is stopped, within its budget, with a reason, and alone."""

from __future__ import annotations

import collections
import itertools
import random
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shared.errors import AudioTooLong, EngineFailed, OutOfMemory
from shared.messages import Lane
from tests.torch.running import drive, finals, noise, read_audio, start
from tests.torch.test_samples import WAVES, said
from tests.torch.watching import period_of
from worker.engines.base import EngineEvent, EngineSequence, Final, SequenceFailed
from worker.engines.qwen3.encoder import Encoder
from worker.engines.qwen3.engine import Qwen3Engine
from worker.engines.qwen3.guard import kept_of_dense, kept_of_run, visible
from worker.engines.qwen3.sequence import Qwen3Sequence
from worker.engines.qwen3.vocabulary import Vocabulary

pytestmark = pytest.mark.torch

GOOD = "She opened the window"


@pytest.fixture
def script(trained_engine: Qwen3Engine) -> Iterator[Callable[[str, list[int]], None]]:
    """``script(request id, tokens)`` makes that request say these tokens, and nothing else."""
    lines: dict[str, list[int]] = {}

    def hook(logits: Tensor, sequences: Sequence[EngineSequence]) -> Tensor:
        changed = logits.clone()
        for n, sequence in enumerate(sequences):
            assert isinstance(sequence, Qwen3Sequence)
            if line := lines.get(sequence.request.id):
                changed[n, line[len(sequence.tokens)]] = 1e4
        return changed

    trained_engine.logits_hook = hook
    yield lines.__setitem__
    trained_engine.logits_hook = None


def loops(vocabulary: Vocabulary) -> dict[str, tuple[list[int], str]]:
    rng = random.Random(1)
    junk = [rng.choice([" yes", " no"]) for _ in range(600)]
    return {
        "character": (vocabulary.encode("a") * 600, "repetition"),
        "word": (vocabulary.encode(" okay") * 600, "repetition"),
        "pattern": (vocabulary.encode(" the old man and sea") * 600, "repetition"),
        "alternating": ([i for word in junk for i in vocabulary.encode(word)], "repetition"),
        "never ends": ([rng.randrange(300, 900) for _ in range(600)], "length"),
    }


@pytest.mark.parametrize("name", ["character", "word", "pattern", "alternating", "never ends"])
def test_runaway_ends_with_its_reason(
    trained_engine: Qwen3Engine, script: Callable[[str, list[int]], None], name: str
) -> None:
    vocabulary = trained_engine._vocabulary
    loop, reason = loops(vocabulary)[name]
    wave = WAVES[0]
    sound = read_audio(wave)
    quiet_steps = _count_steps(trained_engine, [start(trained_engine, sound, "n", language="en")])
    script("wild", [*vocabulary.encode(GOOD), *loop])
    wild = start(trained_engine, noise(12.0), "wild", language="en")
    neighbour = start(trained_engine, sound, "n", language="en")
    steps = 0

    def count(step: int) -> list[Qwen3Sequence]:
        nonlocal steps
        steps += not neighbour.closed
        return []

    done = finals(drive(trained_engine, [wild, neighbour], before=count))
    assert done["n"].text == said(wave)
    assert steps <= quiet_steps * 1.1 + 1
    assert done["wild"].finish_reason == reason
    assert done["wild"].text.startswith(GOOD)
    assert len(wild.tokens) <= wild.budget
    if name in ("character", "word", "pattern"):
        # What is left is the good text and at most two rounds of the loop.
        assert len(wild.tokens) <= len(vocabulary.encode(GOOD)) + 2 * len(loop) // 600


def _count_steps(engine: Qwen3Engine, rows: list[Qwen3Sequence]) -> int:
    for step in itertools.count():
        if all(row.closed for row in rows):
            return step
        engine.step(rows, 0)
    raise AssertionError


@pytest.mark.parametrize(
    "speech",
    [
        "No, no, no, no, no, no! I said no.",
        "My number is five five five five five two two two zero zero zero zero zero.",
        "Row, row, row your boat, gently down the stream. Row, row, row your boat. Merrily, merrily, merrily.",
        "Ha ha ha ha ha ha ha. Very funny, very, very, very funny.",
    ],
)
def test_people_repeat_themselves_too(trained_engine: Qwen3Engine, speech: str) -> None:
    ids = trained_engine._vocabulary.encode(speech)
    pieces = [trained_engine._vocabulary.bytes_of(i) for i in ids]
    for n in range(1, len(ids) + 1):
        assert not period_of(ids[:n])
        assert kept_of_dense(ids[:n], pieces[:n]) is None


@given(
    st.lists(st.integers(0, 3), max_size=20), st.lists(st.integers(0, 9), min_size=1, max_size=20), st.integers(1, 30)
)
@settings(max_examples=60, deadline=None)
def test_what_was_shown_of_a_run_is_never_taken_back(good: list[int], pattern: list[int], repeats: int) -> None:
    line = good + pattern * repeats
    shown = 0
    for length in range(1, len(line) + 1):
        if period := period_of(line[:length]):
            assert shown <= kept_of_run(line[:length], period)
            return
        shown = max(shown, visible(line[:length]))
    assert shown <= len(line)


def test_a_third_repeat_waits_until_the_run_breaks() -> None:
    line = [1, 2, 3, 4, 3, 4, 3, 4, 3, 9]
    assert [visible(line[:n]) for n in range(1, len(line) + 1)] == [1, 2, 3, 4, 5, 6, 6, 6, 6, 10]


def test_too_long_for_the_slot_fails_alone(trained_engine: Qwen3Engine) -> None:
    long = start(trained_engine, noise(100.0), "long", language="en")
    wave = WAVES[1]
    fine = start(trained_engine, read_audio(wave), "fine", language="en")
    events = drive(trained_engine, [long, fine])
    failed = [event for event in events if isinstance(event, SequenceFailed)]
    assert [event.sequence for event in failed] == [long]
    assert isinstance(failed[0].error, AudioTooLong)
    assert [event.text for event in events if isinstance(event, Final)] == [said(wave)]


@pytest.mark.parametrize(("rows", "fit"), [(4, 2), (8, 1)])
def test_out_of_memory_shrinks_the_group_until_it_fits(
    trained_engine: Qwen3Engine, monkeypatch: pytest.MonkeyPatch, rows: int, fit: int
) -> None:
    real, seen = Encoder.__call__, []

    def hungry(self: Encoder, features: Tensor, frames: Sequence[int]) -> list[Tensor]:
        seen.append(len(frames))
        if len(frames) > fit:
            raise torch.OutOfMemoryError("scripted")
        return real(self, features, frames)

    monkeypatch.setattr(Encoder, "__call__", hungry)
    _clips_are_right(trained_engine, rows)
    assert seen[0] >= 2 * fit


def test_what_fails_after_running_out_of_memory_fails_its_row(
    trained_engine: Qwen3Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries that want memory for themselves have errors of their own."""
    real, seen = Encoder.__call__, []

    def hungry(self: Encoder, features: Tensor, frames: Sequence[int]) -> list[Tensor]:
        seen.append(len(frames))
        if len(seen) == 1:
            raise torch.OutOfMemoryError("scripted")
        if len(seen) == 2:
            raise RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")
        return real(self, features, frames)

    monkeypatch.setattr(Encoder, "__call__", hungry)
    _clips_are_right(trained_engine, 4)


def _clips_are_right(engine: Qwen3Engine, count: int) -> None:
    waves = [wave for wave in WAVES if not wave.stem.startswith("long")][:count]
    rows = [start(engine, read_audio(wave), wave.stem, language="en") for wave in waves]
    done = finals(drive(engine, rows))
    assert [done[wave.stem].text for wave in waves] == [said(wave) for wave in waves]


def test_out_of_memory_for_one_row_fails_that_row(trained_engine: Qwen3Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Encoder.__call__

    def hungry(self: Encoder, features: Tensor, frames: Sequence[int]) -> list[Tensor]:
        if len(frames) > 1:
            raise torch.OutOfMemoryError("scripted")
        return real(self, features, frames)

    monkeypatch.setattr(Encoder, "__call__", hungry)
    wave = WAVES[1]
    rows = [start(trained_engine, noise(20.0), "big", language="en")]
    rows.append(start(trained_engine, read_audio(wave), "small", language="en"))
    events = drive(trained_engine, rows)
    errors = {e.sequence.request.id: e.error for e in events if isinstance(e, SequenceFailed)}
    assert list(errors) == ["big"]
    assert isinstance(errors["big"], OutOfMemory)
    assert [e.text for e in events if isinstance(e, Final)] == [said(wave)]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_numbers_that_overflow_fail_alone_and_do_not_stay_in_the_slot(
    trained_engine: Qwen3Engine, temperature: float
) -> None:
    def hook(logits: Tensor, sequences: Sequence[EngineSequence]) -> Tensor:
        bad = torch.tensor([[s.request.id == "bad"] for s in sequences])
        for sequence in sequences:
            assert isinstance(sequence, Qwen3Sequence)
            if sequence.request.id == "bad":
                trained_engine.decoder._values[1][sequence.slot] = torch.nan
        return torch.where(bad, torch.nan, logits)

    wave = WAVES[1]
    trained_engine.logits_hook = hook
    try:
        bad = start(trained_engine, read_audio(wave), "bad", language="en", temperature=temperature)
        events = drive(trained_engine, [bad, start(trained_engine, read_audio(wave), "good", language="en")])
    finally:
        trained_engine.logits_hook = None
    assert [type(e.error) for e in events if isinstance(e, SequenceFailed)] == [EngineFailed]
    assert [e.text for e in events if isinstance(e, Final)] == [said(wave)]
    rows = [start(trained_engine, read_audio(wave), str(n), language="en") for n in range(4)]
    assert {final.text for final in finals(drive(trained_engine, rows)).values()} == {said(wave)}


def test_threads_are_taken_back(trained_engine: Qwen3Engine) -> None:
    """The fixture's engine works on one thread; whoever changes that for its own sake does not change it for us."""
    torch.set_num_threads(2)
    trained_engine.step([start(trained_engine, noise(0.5), language="en")], 0)
    assert torch.get_num_threads() == 1


def test_a_pass_that_fails_for_one_row_fails_that_row(trained_engine: Qwen3Engine) -> None:
    """Errors of libraries that nobody has typed, too."""

    def hook(logits: Tensor, sequences: Sequence[EngineSequence]) -> Tensor:
        if any(sequence.request.id == "bad" for sequence in sequences):
            raise RuntimeError("CUDNN_STATUS_NOT_SUPPORTED")
        return logits

    wave = WAVES[1]
    trained_engine.logits_hook = hook
    try:
        rows = [start(trained_engine, read_audio(wave), name, language="en") for name in ("good", "bad", "fine")]
        events = drive(trained_engine, rows)
    finally:
        trained_engine.logits_hook = None
    failed = {event.sequence.request.id: event.error for event in events if isinstance(event, SequenceFailed)}
    assert {name: type(error) for name, error in failed.items()} == {"bad": EngineFailed}
    assert {event.sequence.request.id: event.text for event in events if isinstance(event, Final)} == {
        "good": said(wave),
        "fine": said(wave),
    }


@pytest.mark.parametrize("reason", ["repetition", "length"])
def test_what_was_frozen_counts(
    trained_engine: Qwen3Engine, script: Callable[[str, list[int]], None], reason: str
) -> None:
    """A run-away in a call is the same one whether or not its beginning has been frozen meanwhile."""
    vocabulary = trained_engine._vocabulary
    loop, _ = loops(vocabulary)["word" if reason == "repetition" else "never ends"]
    line = [*vocabulary.encode(GOOD), *loop]
    finals_of = {}
    for frozen in (False, True):
        wild = start(trained_engine, noise(6.0), "wild", Lane.LIVE, language="en", partials=True)
        events: list[EngineEvent] = []
        while not wild.closed:
            done = len(wild._frozen)
            script("wild", line[done:])
            events += trained_engine.step([wild], 0)
            if frozen and not wild._frozen and len(wild.tokens) == 6:
                text = b"".join(wild._pieces).decode().lstrip()
                trained_engine.freeze(wild, text)
        finals_of[frozen] = finals(events)["wild"]
        assert finals_of[frozen].finish_reason == reason
        assert len(wild._frozen) + len(wild.tokens) <= wild.budget
    assert finals_of[True].text == finals_of[False].text


def test_a_draft_is_judged_token_by_token(trained_engine: Qwen3Engine) -> None:
    """Nineteen times the same is no run-away yet, also where all of it is verified in one pass."""
    vocabulary = trained_engine._vocabulary
    (letter,) = vocabulary.encode("a")
    line = [*vocabulary.encode(GOOD), *[letter] * 19, vocabulary.turn_end]

    def hook(logits: Tensor, sequences: Sequence[EngineSequence]) -> Tensor:
        changed, seen = logits.clone(), collections.Counter[int]()
        for n, sequence in enumerate(sequences):
            assert isinstance(sequence, Qwen3Sequence)
            changed[n, line[len(sequence.tokens) + seen[id(sequence)]]] = 1e4
            seen[id(sequence)] += 1
        return changed

    sound = noise(6.0)
    row = start(trained_engine, None, lane=Lane.LIVE, language="en", partials=True)
    trained_engine.logits_hook = hook
    verified = 0
    try:
        for at in range(0, len(sound), 16_000):
            trained_engine.feed(row, sound[at : at + 16_000])
            while row.ready:
                trained_engine.step([row], 0)
                verified += len(row.tokens) == len(line) - 1
        trained_engine.finish(row)
        final = finals(drive(trained_engine, [row]))["r"]
    finally:
        trained_engine.logits_hook = None
    assert verified > 3
    assert (final.finish_reason, final.text) == ("stop", GOOD + "a" * 19)


def test_a_text_that_is_cut_in_a_language_line_ends_before_it(
    trained_engine: Qwen3Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = trained_engine._vocabulary.encode("Hello there. language Chinese")

    def hook(logits: Tensor, sequences: Sequence[EngineSequence]) -> Tensor:
        (sequence,) = sequences
        assert isinstance(sequence, Qwen3Sequence)
        logits[0, line[len(sequence.tokens)]] = 1e4
        return logits

    monkeypatch.setattr(trained_engine, "logits_hook", hook)
    monkeypatch.setattr(Qwen3Sequence, "budget", len(line))
    done = finals(drive(trained_engine, [start(trained_engine, read_audio(WAVES[1]), "cut", language="en")]))["cut"]
    assert (done.text, done.finish_reason) == ("Hello there.", "length")
    assert "".join(characters for characters, _ in done.logprobs) == done.text
