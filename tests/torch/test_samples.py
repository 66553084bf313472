"""Real words through the whole engine, with the trained fixture (its README says what it can and cannot do)."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from shared.messages import Lane
from tests.torch.conftest import TRAINED
from tests.torch.running import Reference, drive, finals, noise, read_audio, start, transcribe
from worker.audio.samples import Audio
from worker.engines.base import Hypothesis
from worker.engines.qwen3.engine import Qwen3Engine
from worker.engines.qwen3.sampling import sampled
from worker.engines.qwen3.sequence import Qwen3Sequence

pytestmark = pytest.mark.torch

WAVES = sorted((TRAINED / "samples").glob("*.wav"))


def said(wave: Path) -> str:
    return wave.with_suffix(".txt").read_text("utf-8").strip()


@pytest.fixture(scope="module")
def sounds() -> dict[str, Audio]:
    return {wave.stem: read_audio(wave) for wave in WAVES}


def test_there_are_nine() -> None:
    assert len(WAVES) == 9


@pytest.mark.parametrize("language", ["en", ""])
def test_exact_transcripts_in_one_batch(trained_engine: Qwen3Engine, sounds: dict[str, Audio], language: str) -> None:
    rows = [start(trained_engine, sounds[w.stem], w.stem, language=language) for w in WAVES]
    done = finals(drive(trained_engine, rows))
    for wave in WAVES:
        final = done[wave.stem]
        assert (final.text, final.language, final.finish_reason) == (said(wave), "en", "stop")
        assert final.avg_logprob is not None
        assert -0.5 < final.avg_logprob < 0


def test_tokens_equal_generate(
    trained_engine: Qwen3Engine, trained_reference: Reference, sounds: dict[str, Audio]
) -> None:
    for name in ("pico-en-gb", "flite-slt"):
        row = start(trained_engine, sounds[name])
        drive(trained_engine, [row])
        assert row.tokens == trained_reference.tokens(sounds[name], limit=row.budget)


@pytest.mark.parametrize("language", ["en", ""])
def test_prefix_is_kept_and_continued(trained_engine: Qwen3Engine, sounds: dict[str, Audio], language: str) -> None:
    wave = next(w for w in WAVES if w.stem == "long-espeak-en-us-mulaw-8k")
    words = said(wave).split(" ")
    for count in (1, 9, 30, len(words)):
        for end in ("", " "):
            prefix = " ".join(words[:count]) + end
            final = transcribe(trained_engine, sounds[wave.stem], language=language, prefix=prefix)
            assert final.text.startswith(prefix)
            assert final.text.strip() == said(wave)
            assert final.language == "en"


def test_partials_grow_into_the_final(trained_engine: Qwen3Engine, sounds: dict[str, Audio]) -> None:
    row = start(trained_engine, sounds["pico-en-us"], language="", partials=True)
    events = drive(trained_engine, [row])
    texts = [event.text for event in events if isinstance(event, Hypothesis)]
    final = finals(events)["r"]
    assert len(texts) >= 10
    assert all(final.text.startswith(text) for text in texts)
    assert texts == sorted(texts, key=len)


def test_logprobs_spell_the_text(trained_engine: Qwen3Engine, sounds: dict[str, Audio]) -> None:
    final = transcribe(trained_engine, sounds["hibari-plain"])
    assert "".join(text for text, _ in final.logprobs) == final.text
    assert final.avg_logprob == pytest.approx(sum(score for _, score in final.logprobs) / len(final.logprobs))


@pytest.mark.parametrize("level", [0.0, 0.003, 0.03])
def test_no_speech_is_empty(trained_engine: Qwen3Engine, level: float) -> None:
    final = transcribe(trained_engine, noise(3.0, seed=7, level=level))
    assert (final.text, final.language) == ("", "")


def test_nothing_was_said_at_all(trained_engine: Qwen3Engine) -> None:
    final = transcribe(trained_engine, np.zeros(0, np.float32))
    assert (final.text, final.finish_reason) == ("", "stop")


def test_sampling_differs_and_greedy_neighbours_do_not(trained_engine: Qwen3Engine, sounds: dict[str, Audio]) -> None:
    wave = next(w for w in WAVES if w.stem == "flite-rms")
    hot = [start(trained_engine, sounds[wave.stem], f"hot{n}", temperature=2.0, language="en") for n in range(3)]
    cold = start(trained_engine, sounds[wave.stem], "cold", language="en")
    done = finals(drive(trained_engine, [cold, *hot]))
    assert done["cold"].text == said(wave)
    assert {done[f"hot{n}"].text for n in range(3)} != {said(wave)}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_what_the_language_is_called_is_not_left_to_chance(
    trained_engine: Qwen3Engine, sounds: dict[str, Audio], temperature: float
) -> None:
    rows = [
        start(trained_engine, sounds[wave.stem], f"{wave.stem} {n}", temperature=temperature)
        for wave in WAVES[:4]
        for n in range(3)
    ]
    for final in finals(drive(trained_engine, rows)).values():
        assert final.language == "en"
        assert not final.text.lower().startswith("language")


def test_draws_are_by_the_probabilities() -> None:
    """The share of each token in 40,000 draws."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, float("-inf")])
    for heat in (0.5, 1.0, 2.0):
        packed = sampled(logits.expand(40_000, -1), [heat] * 40_000, generator)
        shares = torch.bincount(packed[0], minlength=5) / 40_000
        assert torch.allclose(shares, (logits / heat).softmax(dim=0), atol=0.01)
    assert sampled(logits[None], [0.0], generator)[0].tolist() == [0]
    spoiled = torch.stack([torch.full_like(logits, torch.nan), logits])
    assert sampled(spoiled, [1.0, 0.0], generator)[0, 1] == 0, "a row whose numbers overflowed harms no other"


def test_lanes_are_served_in_order(trained_engine: Qwen3Engine, sounds: dict[str, Audio]) -> None:
    """With all slots taken by files, a call's final comes as fast as alone, but for one catching-up step of a file."""
    sound = sounds["pico-en-us"]
    alone = _steps_until_final(trained_engine, sound, [])
    files = [start(trained_engine, sounds["espeak-en-us"], f"f{n}", language="en") for n in range(6)]
    for _ in range(4):
        trained_engine.step(files, 0)
    assert _steps_until_final(trained_engine, sound, files) <= alone * 1.1 + 2
    assert set(finals(drive(trained_engine, files))) <= {row.request.id for row in files}


def _steps_until_final(engine: Qwen3Engine, sound: Audio, others: list[Qwen3Sequence]) -> int:
    call = start(engine, sound, "call", Lane.LIVE, language="en")
    for steps in range(1, 200):
        rows = [call, *(row for row in others if row.ready)]
        if any(event.sequence is call for event in engine.step(rows, 0)):
            return steps
    raise AssertionError("no final")


def _progress(engine: Qwen3Engine, sounds: dict[str, Audio], lane: Lane) -> tuple[list[int], list[Qwen3Sequence]]:
    """Tokens that a row of ``lane`` gets in each of eight steps in which three files would like to join, and the files."""
    first = start(engine, sounds["pico-en-us"], "first", lane, language="en")
    engine.step([first], 0)
    files = [start(engine, sounds["flite-awb"], f"f{n}", language="en") for n in range(3)]
    progress = []
    for _ in range(8):
        before = len(first.tokens)
        engine.step([first, *files], 0)
        progress.append(len(first.tokens) - before)
    engine.cancel(first)
    return progress, files


def test_joining_files_take_at_most_every_second_step_from_a_better_lane(
    trained_engine: Qwen3Engine, sounds: dict[str, Audio], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.engines.qwen3.turns.GROUP_POSITIONS", {"cpu": 1})
    progress, files = _progress(trained_engine, sounds, Lane.INTERACTIVE)
    assert sum(row.kv > 0 for row in files) == 3
    assert all(sum(pair) >= 1 for pair in pairwise(progress)), progress
    for row in files:
        trained_engine.cancel(row)


def test_joining_files_take_no_step_from_a_call(trained_engine: Qwen3Engine, sounds: dict[str, Audio]) -> None:
    progress, files = _progress(trained_engine, sounds, Lane.LIVE)
    assert min(progress) >= 1, progress
    assert not any(row.heard for row in files)
    done = finals(drive(trained_engine, files))
    assert {event.text for event in done.values()} == {said(next(w for w in WAVES if w.stem == "flite-awb"))}


def test_beside_an_idle_call_files_are_heard_and_filled_in_steps_of_their_own(
    trained_engine: Qwen3Engine, sounds: dict[str, Audio]
) -> None:
    """So that a call which speaks again waits for one half only."""
    call = start(trained_engine, None, "call", Lane.LIVE, partials=True, language="en")
    trained_engine.feed(call, sounds["pico-en-us"][:16_000])
    while call.ready:
        trained_engine.step([call], 0)
    file = start(trained_engine, sounds["flite-awb"], "file", language="en")
    trained_engine.step([file], 0)
    assert file.heard == len(sounds["flite-awb"])
    assert file.kv == 0
    trained_engine.step([file], 0)
    assert file.kv > 0
    final = finals(drive(trained_engine, [file]))["file"]
    assert final.text == said(next(w for w in WAVES if w.stem == "flite-awb"))
    assert final.work is not None
    assert min(final.work.encode_ns, final.work.prefill_ns, final.work.decode_ns) > 0
    trained_engine.cancel(call)


def test_files_move_on_under_calls_without_end(
    trained_engine: Qwen3Engine, sounds: dict[str, Audio], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.engines.qwen3.turns.PATIENCE", 5)
    wave = next(w for w in WAVES if w.stem == "flite-awb")
    file = start(trained_engine, sounds[wave.stem], "file", language="en")
    call = start(trained_engine, sounds["pico-en-us"], "call", Lane.LIVE, language="en")
    taken, told = [], []
    for n in range(600):
        if not call.ready:
            trained_engine.cancel(call)
            call = start(trained_engine, sounds["pico-en-us"], f"call{n}", Lane.LIVE, language="en")
        kv, heard = file.kv, file.heard
        told += trained_engine.step([call, file], 0)
        if file.closed:
            break
        if (file.kv > kv + 1) or file.heard > heard:
            taken.append(n)
    assert finals([event for event in told if event.sequence is file])["file"].text == said(wave)
    assert taken == [5, 11], "encoding and filling, each after five steps of calls"
    trained_engine.cancel(call)


def test_exact_times_of_files_wait_for_calls(
    trained_engine: Qwen3Engine, sounds: dict[str, Audio], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Aligning is a pass of its own; calls with work go before it, up to a limit."""
    monkeypatch.setattr(trained_engine._exact_times, "_name", "none that is asked")
    monkeypatch.setattr(trained_engine._exact_times, "decided", lambda _row: True)
    monkeypatch.setattr(trained_engine._exact_times, "of", lambda _row, _text: ())
    monkeypatch.setattr("worker.engines.qwen3.turns.PATIENCE", 3)
    file = start(trained_engine, sounds["flite-awb"], "file", language="en", words=True)
    while not file.done:
        trained_engine.step([file], 0)
    call = start(trained_engine, sounds["pico-en-us"], "call", Lane.LIVE, language="en")
    closed = []
    for _ in range(4):
        trained_engine.step([call, file], 0)
        closed.append(file.closed)
    assert closed == [False, False, False, True]
    trained_engine.cancel(call)


def test_some_files_go_on_beside_calls(
    trained_engine: Qwen3Engine, sounds: dict[str, Audio], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.engines.qwen3.turns.RIDERS_BESIDE_CALLS", 2)
    files = [start(trained_engine, sounds["flite-awb"], f"f{n}", language="en") for n in range(3)]
    while any(row.behind for row in files):
        trained_engine.step(files, 0)
    call = start(trained_engine, sounds["pico-en-us"], "call", Lane.LIVE, language="en")
    before = [len(row.tokens) for row in files]
    trained_engine.step([call, *files], 0)
    trained_engine.step([call, *files], 0)
    assert [len(row.tokens) - n for row, n in zip(files, before, strict=True)] == [2, 2, 0]
    assert len(call.tokens) == 2
    for row in (call, *files):
        trained_engine.cancel(row)
