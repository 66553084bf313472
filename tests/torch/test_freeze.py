"""Text that has been said of an open utterance stays, whatever the model thinks later."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from torch import Tensor

from shared.messages import Event, Lane
from shared.streams import Partial, StreamOptions, UtteranceDelta, UtteranceFinal
from shared.wire import RawAudio
from tests.torch.running import Reference, drive, finals, noise, read_audio, start, transcribe
from tests.torch.test_live import loud_start, update
from tests.torch.test_samples import WAVES, said
from worker.audio.samples import Audio
from worker.engines.base import EngineEvent, EngineSequence, Hypothesis
from worker.engines.qwen3.border import border
from worker.engines.qwen3.engine import Qwen3Engine
from worker.engines.qwen3.sequence import LIVE_HOP, Qwen3Sequence
from worker.live.endpointing import Begin, End, Speech
from worker.live.stream import LiveStream

pytestmark = pytest.mark.torch


# ---------------------------------------------------------------- where a text ends among tokens


@pytest.mark.parametrize(
    ("pieces", "text", "count", "missing"),
    [
        (["The", " cat", " sat"], "The cat", 2, ""),
        ([" The", " cat", " sat"], "The cat", 2, ""),
        (["The", " caterpillar"], "The cat", 1, " cat"),
        (["The", " caterpillar"], "Th", 0, "Th"),
        (["The", " dog"], "The cat", 1, " cat"),
        (["The"], "The cat sat", 1, " cat sat"),
        ([" cat", " sat"], " cat", 1, ""),
        ([" caterpillar"], " cat", 0, " cat"),
        (["The", "", " cat"], "The cat ", 3, ""),
        ([], "The", 0, "The"),
    ],
)
def test_border(pieces: list[str], text: str, count: int, missing: str) -> None:
    assert border([piece.encode() for piece in pieces], text) == (count, missing)


def test_border_never_cuts_a_character() -> None:
    raw = "東京です".encode()
    pieces = [raw[:2], raw[2:4], raw[4:6], raw[6:]]
    assert border(pieces, "東京") == (3, "")
    assert border(pieces, "東") == (0, "東")
    assert border([raw[:4], raw[4:]], "東京") == (0, "東京")
    assert border([raw[:3], raw[3:7], raw[7:]], "東京") == (1, "京")


# ---------------------------------------------------------------- in the engine


@pytest.mark.parametrize("language", ["en", ""])
def test_a_model_that_changes_its_mind_keeps_what_is_frozen(
    random_engine: Qwen3Engine, random_reference: Reference, language: str
) -> None:
    """The random model says something else at each update; after what is frozen it goes on as ``generate()`` would."""
    clip = loud_start(8.0)
    row = start(random_engine, None, lane=Lane.LIVE, partials=True, language=language)
    frozen, changes, own = "", 0, 0
    for end in range(LIVE_HOP * 4, len(clip), LIVE_HOP * 6):
        random_engine.feed(row, clip[row.samples.length : end])
        free = random_reference.tokens(clip[:end], language="English" if language else "", limit=12)
        texts = update(random_engine, row)
        changes += list(row._prompt.tail[-len(row._frozen) :] if row._frozen else ()) != free[: len(row._frozen)]
        assert texts
        assert all(text.startswith(frozen) for text in texts)
        frozen = texts[-1][: len(frozen) + 3].rstrip()
        before = len(row._frozen)
        random_engine.freeze(row, frozen)
        assert row.text.startswith(frozen)
        own += len(row._frozen) - before
    assert changes and own, "nothing was forced"
    random_engine.feed(row, clip[row.samples.length :])
    random_engine.finish(row)
    final = finals(drive(random_engine, [row]))["r"]
    assert final.text.startswith(frozen)
    tail = row._prompt.tail
    forced = tail[tail.index(random_engine._vocabulary.turn_start) :][1:]
    forced = forced[len(random_engine._vocabulary.encode("assistant\n")) :]
    expected = random_reference.tokens(clip, forced=forced, limit=row.budget)
    assert row.tokens == expected[: len(row.tokens)]


def test_freezing_in_mid_decode_and_in_a_suspended_slot(trained_engine: Qwen3Engine) -> None:
    wave = next(w for w in WAVES if w.stem == "flite-awb")
    row = start(trained_engine, read_audio(wave), partials=True)
    for steps in itertools.count():
        events = trained_engine.step([row], 0)
        shown = [event.text for event in events if isinstance(event, Hypothesis)]
        if row.closed:
            break
        if shown and steps % 2:
            trained_engine.freeze(row, shown[-1])
        if steps % 5 == 4:
            trained_engine.suspend(row)
    final = finals(events)["r"]
    assert final.text == said(wave)
    assert "".join(piece for piece, _ in final.logprobs).strip() == final.text
    assert final.avg_logprob == pytest.approx(np.mean([score for _, score in final.logprobs]))
    assert steps > 10


def test_a_text_that_ends_inside_a_token_is_decoded_on_from_there(trained_engine: Qwen3Engine) -> None:
    wave = next(w for w in WAVES if w.stem == "flite-awb")
    sound = read_audio(wave)
    row = start(trained_engine, None, lane=Lane.LIVE, partials=True, language="en")
    trained_engine.feed(row, sound)
    assert update(trained_engine, row)[-1] == said(wave)
    whole = next(n for n, piece in enumerate(row._pieces) if len(piece.strip()) > 3 and n)
    cut = len(b"".join(row._pieces[:whole]).decode().lstrip()) + 3
    trained_engine.freeze(row, said(wave)[:cut])
    assert not row.settled
    assert row.text == said(wave)[:cut]
    trained_engine.finish(row)
    assert finals(drive(trained_engine, [row]))["r"].text.startswith(said(wave)[:cut])


def test_what_was_said_cannot_be_changed(trained_engine: Qwen3Engine) -> None:
    row = start(trained_engine, None, lane=Lane.LIVE, partials=True, prefix="The cat", language="en")
    trained_engine.freeze(row, "The cat sat")
    with pytest.raises(ValueError, match="cannot be changed"):
        trained_engine.freeze(row, "The dog")
    trained_engine.cancel(row)


# ---------------------------------------------------------------- as a stream uses it


def talk(engine: Qwen3Engine, sound: Audio, language: str = "", hop: int = LIVE_HOP) -> list[Event]:
    """One utterance through a live stream, stepped as the scheduler does; all that is said of it."""
    options = StreamOptions(RawAudio("s16le", 16_000, 1), language=language, partials=True)
    stream = LiveStream("s", 0, 1, engine, True, options)
    events = stream.happen(Begin(0, 0, ""), None)

    def step() -> None:
        while rows := stream.rows():
            for event in engine.step([row for row, _ in rows], 0):
                assert not hasattr(event, "error"), event
                said = stream.hypothesis(0, event) if isinstance(event, Hypothesis) else stream.final(0, event)
                events.extend(said)

    for at in range(0, len(sound), hop):
        events += stream.happen(Speech(0, sound[at : at + hop]), None)
        step()
    events += stream.happen(_end(len(sound)), None)
    step()
    return events


def _end(samples: int) -> End:
    return End(utterance=0, end_sample=samples, speech=((0, samples),), cause="silence", spoken=True)


def check_stream(events: list[Event]) -> tuple[str, int]:
    """Deltas are the final, and each partial begins with the deltas so far; the final and the number of early deltas."""
    *before, last = events
    assert isinstance(last, UtteranceFinal)
    text, early = "", 0
    for event in before:
        if isinstance(event, UtteranceDelta):
            text += event.text
            early += 1
        elif isinstance(event, Partial):
            assert event.text.startswith(text)
    assert text == last.text
    return text, early


@pytest.mark.parametrize("wave", WAVES[:4], ids=lambda wave: wave.stem)
def test_deltas_of_a_call_are_its_final(trained_engine: Qwen3Engine, wave: object) -> None:
    text, early = check_stream(talk(trained_engine, read_audio(wave)))  # type: ignore[arg-type]
    assert early > 1
    # Early words of a small model may be wrong, and they stay; most are right.
    right = said(wave).split()  # type: ignore[arg-type]
    assert sum(word in right for word in text.split()) >= 0.6 * len(right)


@pytest.mark.parametrize("seed", range(3))
def test_deltas_are_the_final_of_sound_that_changes(trained_engine: Qwen3Engine, seed: int) -> None:
    """Pieces of several voices, cut in their words and put together: the model often takes back what it thought."""
    rng = np.random.default_rng(seed)
    sounds = [read_audio(wave) for wave in WAVES[:4]]
    cuts = [(s := sounds[rng.integers(4)])[(at := rng.integers(len(s) // 2)) : at + 9_000] for _ in range(9)]
    check_stream(talk(trained_engine, np.concatenate(cuts)))


def test_deltas_of_a_random_model_are_its_final(random_engine: Qwen3Engine) -> None:
    check_stream(talk(random_engine, noise(6.0, seed=3), language="en", hop=4 * LIVE_HOP))


def test_freezing_while_the_next_token_is_under_way(
    trained_engine: Qwen3Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ends inside the last token may be as many tokens as before: what a pass has chosen behind those does not hold."""
    wave = WAVES[1]
    sound = read_audio(wave)
    changed = 0
    for at in range(2, 30, 2):
        texts = []
        for goes_ahead in (False, True):
            monkeypatch.setattr(trained_engine._passes, "goes_ahead", goes_ahead)
            row = start(trained_engine, sound, language="en", partials=True)
            events: list[EngineEvent] = []
            while not row.closed:
                events += trained_engine.step([row], 0)
                if len(row.tokens) == at and not row._frozen and not row.closed and len(row._pieces[-1]) > 2:
                    trained_engine.freeze(row, b"".join(row._pieces).decode().lstrip()[:-1])
                    changed += 1
            texts.append(finals(events)["r"].text)
        assert texts[0] == texts[1]
    assert changed > 4


def test_a_prefix_of_white_space_is_none(trained_engine: Qwen3Engine) -> None:
    wave = WAVES[1]
    assert transcribe(trained_engine, read_audio(wave), prefix=" ").text == said(wave)


def speak_plainly(engine: Qwen3Engine, line: list[int], behind: list[int] | None = None) -> None:
    """The model names no language, and says ``line`` until a prefix is put in; behind that ``behind``, or what it likes."""

    def hook(logits: Tensor, sequences: Sequence[EngineSequence]) -> Tensor:
        changed = logits.clone()
        for n, sequence in enumerate(sequences):
            assert isinstance(sequence, Qwen3Sequence)
            forced = behind if sequence._language else line
            if forced is not None:
                changed[n, forced[len(sequence.tokens)]] = 1e4
        return changed

    engine.logits_hook = hook


@pytest.fixture
def hooked(trained_engine: Qwen3Engine) -> Iterator[Qwen3Engine]:
    yield trained_engine
    trained_engine.logits_hook = None


def test_a_prefix_stays_before_what_a_model_says_without_naming_a_language(hooked: Qwen3Engine) -> None:
    """It ignores the form and just speaks; then it speaks on behind the prefix."""
    v = hooked._vocabulary
    prefix, rest = "The old man", " and the sea went out again"
    speak_plainly(hooked, v.encode(prefix + rest), [*v.encode(rest), v.turn_end])
    final = transcribe(hooked, read_audio(WAVES[1]), prefix=prefix)
    assert (final.text, final.finish_reason) == (prefix + rest, "stop")


def test_a_prefix_that_is_put_in_late_leaves_nothing_of_what_stood_there(hooked: Qwen3Engine) -> None:
    """As if the slot had been lost, and everything were computed anew."""
    found = []
    for lost in (False, True):
        speak_plainly(hooked, hooked._vocabulary.encode("langoustine soup"))
        row = start(hooked, read_audio(WAVES[1]), prefix="He said that")
        events: list[EngineEvent] = []
        while not row.closed:
            events += hooked.step([row], 0)
            if lost and row._language and row.slot is not None:
                hooked._table.release(row)
        found.append(finals(events)["r"])
    assert found[0].text == found[1].text
    assert found[0].text.startswith("He said that")
    assert [score for _, score in found[0].logprobs] == pytest.approx([s for _, s in found[1].logprobs], abs=1e-3)
