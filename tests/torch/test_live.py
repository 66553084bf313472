"""An open utterance: each update says what a fresh transcription would, at a cost that does not grow."""

from __future__ import annotations

import numpy as np
import pytest

from shared.messages import Lane
from tests.torch.running import Reference, drive, finals, noise, read_audio, start
from tests.torch.test_samples import WAVES, said
from worker.audio.samples import Audio
from worker.engines.base import EngineEvent, Hypothesis
from worker.engines.qwen3 import geometry
from worker.engines.qwen3.engine import Qwen3Engine
from worker.engines.qwen3.sequence import LIVE_HOP, Qwen3Sequence

pytestmark = pytest.mark.torch


def update(engine: Qwen3Engine, row: Qwen3Sequence) -> list[str]:
    """Step until the hypothesis for what was fed is complete; the hypotheses on the way."""
    texts = []
    while row.ready:
        texts += [event.text for event in engine.step([row], 0) if isinstance(event, Hypothesis)]
    return texts


def loud_start(seconds: float) -> Audio:
    """The loudest moment comes first, so that the mel floor of closed windows is final when they close."""
    clip = noise(seconds, seed=11, level=0.02)
    clip[:3200] *= 6
    return clip


@pytest.mark.parametrize("language", ["en", ""])
def test_every_update_equals_a_fresh_transcription(
    random_engine: Qwen3Engine, random_reference: Reference, language: str
) -> None:
    clip = loud_start(10.0)
    row = start(random_engine, None, lane=Lane.LIVE, partials=True, language=language)
    name = "English" if language else ""
    for end in range(LIVE_HOP * 5, len(clip), LIVE_HOP * 5):
        random_engine.feed(row, clip[row.samples.length : end])
        update(random_engine, row)
        expected = random_reference.tokens(clip[:end], language=name, limit=row.budget)
        assert row.settled
        assert row.tokens == expected[: len(row.tokens)]
        assert len(row.tokens) == len(expected) or row.finish_reason == "repetition"
    random_engine.feed(row, clip[row.samples.length :])
    random_engine.finish(row)
    drive(random_engine, [row])
    assert row.tokens == random_reference.tokens(clip, language=name, limit=row.budget)[: len(row.tokens)]


@pytest.mark.parametrize("wave", WAVES, ids=lambda wave: wave.stem)
def test_final_of_a_call_is_that_of_a_file(trained_engine: Qwen3Engine, wave: object) -> None:
    sound = read_audio(wave)  # type: ignore[arg-type]
    row = start(trained_engine, None, lane=Lane.LIVE, partials=True)
    for at in range(0, len(sound), LIVE_HOP):
        trained_engine.feed(row, sound[at : at + LIVE_HOP])
        update(trained_engine, row)
    trained_engine.finish(row)
    assert finals(drive(trained_engine, [row]))["r"].text == said(wave)  # type: ignore[arg-type]


@pytest.mark.parametrize("halves", [0, 2], ids=["whole", "halved"])
def test_calls_side_by_side_say_what_each_says_alone(trained_engine: Qwen3Engine, halves: int) -> None:
    """Their decode steps go along with passes of others, and passes are launched before the one before has landed."""
    engine, before = trained_engine, trained_engine._passes.rows_in_halves
    engine._passes.rows_in_halves = halves
    waves = WAVES[: engine.decoder.slots - 1]
    sounds = [read_audio(wave) for wave in waves]
    calls = [start(engine, None, wave.stem, Lane.LIVE, partials=True) for wave in waves]
    file = start(engine, sounds[0], "file")
    events: list[EngineEvent] = []
    together = 0
    for at in range(0, max(map(len, sounds)) + LIVE_HOP, LIVE_HOP):
        for call, sound in zip(calls, sounds, strict=True):
            if at < len(sound):
                engine.feed(call, sound[at : at + LIVE_HOP])
            elif not call.finished:
                engine.finish(call)
        rows = [row for row in (*calls, file) if row.ready]
        together += {row.behind for row in rows if row.slot is not None} == {True, False}
        events += engine.step(rows, 0)
    events += drive(engine, [*calls, file])
    engine._passes.rows_in_halves = before
    assert together >= 3
    texts = {name: final.text for name, final in finals(events).items()}
    assert texts == {wave.stem: said(wave) for wave in waves} | {"file": said(waves[0])}


def test_an_update_costs_the_open_window_alone(trained_engine: Qwen3Engine) -> None:
    """Windows: one for each update, and one more where one closes. Positions: the open window, the turn's end, the draft."""
    sound = read_audio(next(w for w in WAVES if w.stem.startswith("long")))
    row = start(trained_engine, None, lane=Lane.LIVE, partials=True, language="en", prompt="a long talk " * 20)
    passes = []
    for at in range(0, len(sound), LIVE_HOP):
        trained_engine.feed(row, sound[at : at + LIVE_HOP])
        windows, positions = trained_engine.encoder.encoded, trained_engine.positions
        closed, drafted = len(row.windows), len(row.tokens)
        steps = 0
        while row.ready:
            trained_engine.step([row], 0)
            steps += 1
        if not steps:
            continue
        assert trained_engine.encoder.encoded - windows == 1 + len(row.windows) - closed
        if at > LIVE_HOP * 2:
            assert trained_engine.positions - positions <= 2 * 104 + 24 + drafted
        passes.append(steps)
    assert len(row.windows) == 2
    # The draft saves most of the passes: decoding from the start each time would take one for every token.
    assert sum(passes) < len(passes) * 8
    trained_engine.cancel(row)


def test_hypotheses_never_shrink_within_an_update(trained_engine: Qwen3Engine) -> None:
    sound = read_audio(next(w for w in WAVES if w.stem == "pico-en-us"))
    row = start(trained_engine, None, lane=Lane.LIVE, partials=True, language="en")
    shown = ""
    for at in range(0, len(sound), LIVE_HOP):
        trained_engine.feed(row, sound[at : at + LIVE_HOP])
        texts = update(trained_engine, row)
        for text in texts[:-1]:
            assert len(text) > len(shown)
            shown = text
        shown = texts[-1] if texts else shown
    trained_engine.cancel(row)


def test_a_call_suspended_between_updates_goes_on(trained_engine: Qwen3Engine) -> None:
    wave = next(w for w in WAVES if w.stem.startswith("long"))
    sound = read_audio(wave)
    row = start(trained_engine, None, lane=Lane.LIVE, partials=True, language="en")
    for n, at in enumerate(range(0, len(sound), 4 * LIVE_HOP)):
        trained_engine.feed(row, sound[at : at + 4 * LIVE_HOP])
        update(trained_engine, row)
        if n % 2:
            trained_engine.suspend(row)
            assert row.slot is None
    trained_engine.finish(row)
    assert finals(drive(trained_engine, [row]))["r"].text == said(wave)


def test_finish_in_mid_decode_hears_the_rest(trained_engine: Qwen3Engine) -> None:
    wave = next(w for w in WAVES if w.stem == "flite-awb")
    sound = read_audio(wave)
    row = start(trained_engine, None, lane=Lane.LIVE, partials=True, language="en")
    cut = len(sound) * 2 // 3
    trained_engine.feed(row, sound[:cut])
    trained_engine.step([row], 0)
    trained_engine.step([row], 0)
    assert row.decoding
    trained_engine.feed(row, sound[cut:])
    trained_engine.finish(row)
    assert finals(drive(trained_engine, [row]))["r"].text == said(wave)


def test_a_settled_call_that_hears_nothing_new_needs_no_pass_to_end(trained_engine: Qwen3Engine) -> None:
    wave = WAVES[1]
    row = start(trained_engine, None, lane=Lane.LIVE, partials=True, language="en")
    trained_engine.feed(row, read_audio(wave))
    update(trained_engine, row)
    windows, positions = trained_engine.encoder.encoded, trained_engine.positions
    trained_engine.feed(row, np.zeros(0, np.float32))
    trained_engine.finish(row)
    events = trained_engine.step([row], 0)
    assert finals(events)["r"].text == said(wave)
    assert (trained_engine.encoder.encoded, trained_engine.positions) == (windows, positions)


def test_what_was_heard_in_a_pause_needs_no_pass_to_end(trained_engine: Qwen3Engine) -> None:
    wave = WAVES[1]
    sound = read_audio(wave)
    row = start(trained_engine, None, lane=Lane.LIVE, partials=True, language="en")
    trained_engine.feed(row, sound[: -LIVE_HOP // 2])
    update(trained_engine, row)
    trained_engine.feed(row, sound[-LIVE_HOP // 2 :])
    assert not row.ready, "too little for an update"
    trained_engine.pause(row)
    update(trained_engine, row)
    windows, positions = trained_engine.encoder.encoded, trained_engine.positions
    trained_engine.finish(row)
    assert finals(trained_engine.step([row], 0))["r"].text == said(wave)
    assert (trained_engine.encoder.encoded, trained_engine.positions) == (windows, positions)


def test_files_that_decode_between_updates_do_not_touch_an_idle_call(trained_engine: Qwen3Engine) -> None:
    wave, other = (next(w for w in WAVES if w.stem == name) for name in ("pico-en-us", "flite-slt"))
    sound = read_audio(wave)
    alone, call = (start(trained_engine, None, lane=Lane.LIVE, partials=True, language="en") for _ in range(2))
    trained_engine.feed(alone, sound[: len(sound) // 2])
    update(trained_engine, alone)
    trained_engine.feed(alone, sound[len(sound) // 2 :])
    trained_engine.finish(alone)
    drive(trained_engine, [alone])
    trained_engine.feed(call, sound[: len(sound) // 2])
    update(trained_engine, call)
    file = start(trained_engine, read_audio(other), "file", language="en")
    assert call.slot == 0, "the idle row must lie inside the batch"
    assert finals(drive_only(trained_engine, file))["file"].text == said(other)
    trained_engine.feed(call, sound[len(sound) // 2 :])
    positions, drafted = trained_engine.positions, len(call.tokens)
    turn_end = call.known_length - len(call.head) - call.audio_length - drafted
    trained_engine.finish(call)
    assert finals(drive(trained_engine, [call]))["r"].text == said(wave)
    assert call.scores == pytest.approx(alone.scores, abs=1e-5)
    # The system turn was still in the slot, and right.
    heard = geometry.tokens_of(geometry.frames_of(len(sound)))
    assert trained_engine.positions - positions == heard + turn_end + drafted


def drive_only(engine: Qwen3Engine, row: Qwen3Sequence) -> list[EngineEvent]:
    events: list[EngineEvent] = []
    while not row.closed:
        events += engine.step([row], 0)
    return events


@pytest.mark.parametrize("more", [1, 60, 119])
def test_an_end_less_than_a_frame_behind_a_window(trained_engine: Qwen3Engine, more: int) -> None:
    """The window is closed and heard, and what comes after it has no frame of its own."""
    call = start(trained_engine, None, "call", Lane.LIVE, partials=True, language="en")
    file = start(trained_engine, read_audio(WAVES[0]), "file", language="en")
    sound = noise(9.0)
    heard = geometry.WINDOW_SAMPLES + geometry.LOOKAHEAD
    trained_engine.feed(call, sound[:heard])
    update(trained_engine, call)
    assert len(call.windows) == 1
    trained_engine.feed(call, sound[heard : heard + more])
    trained_engine.finish(call)
    done = finals(drive(trained_engine, [call, file]))
    assert done["file"].text == said(WAVES[0])
    assert "call" in done
