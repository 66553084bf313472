"""What ran away is cut in two, heard again, and becomes one final, in the order of the sound."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.messages import Lane, Word
from worker.engines.base import Final, SequenceRequest, Work
from worker.pieces import MAX_DEPTH, Hearing, Piece

RATE = 16_000


@dataclass(eq=False)
class Row:
    """A sequence that nobody steps."""

    request: SequenceRequest
    ready: bool = True
    windows_encoded: int = 0


def heard(seconds: float) -> Hearing:
    rng = np.random.default_rng(0)
    sound = rng.standard_normal(int(seconds * RATE)).astype(np.float32)
    chunks = [sound[at : at + 3000] for at in range(0, len(sound), 3000)]
    return Hearing([Piece(chunks, sequence=row("whole"))])


def row(name: str) -> Row:
    return Row(SequenceRequest(name, Lane.BATCH))


def take(hearing: Hearing, piece: Piece, text: str, reason: str = "stop", **more: object) -> list[Piece]:
    assert piece.sequence is not None
    parts = hearing.take(Final(piece.sequence, text, finish_reason=reason, **more))  # type: ignore[arg-type]
    for part in parts:
        part.sequence = row(str(part.offset))
    return parts


@given(st.lists(st.booleans(), min_size=8, max_size=8), st.randoms(use_true_random=False))
def test_parts_stay_in_the_order_of_the_sound(runs_away: list[bool], chance: object) -> None:
    hearing = heard(17.0)
    whole = hearing.pieces[0].audio
    wild = iter(runs_away)
    while not hearing.done:
        waiting = list(hearing.working)
        piece = chance.choice(waiting)  # type: ignore[attr-defined]
        take(hearing, piece, f"from {piece.offset}", "repetition" if next(wild, False) else "stop")
    assert np.array_equal(np.concatenate([piece.audio for piece in hearing.pieces]), whole)
    offsets = [piece.offset for piece in hearing.pieces]
    assert offsets == np.cumsum([0, *(piece.length for piece in hearing.pieces)])[:-1].tolist()
    assert all(piece.depth <= MAX_DEPTH for piece in hearing.pieces)
    assert hearing.joined("").text == " ".join(f"from {offset}" for offset in offsets)


def test_a_final_of_parts_tells_all_of_them() -> None:
    hearing = heard(8.0)
    first, second = take(hearing, hearing.pieces[0], "junk junk", "length")
    assert hearing.in_parts
    assert not hearing.done
    one, two = Work(1, 2, 3, 4, 5), Work(10, 20, 30, 40, 50)
    words: tuple[Word, ...] = (Word("twice", 0.5, 1.0),)
    # The second part comes first; it runs away again and is too short to be cut.
    assert second.length < 6 * RATE
    late = (("twice", -3.0),)
    take(hearing, second, "twice", words=words, avg_logprob=-3.0, language="de", logprobs=late, work=two)
    assert not hearing.done
    words = (Word("It", 0.0, 0.1), Word("was", 0.2, 0.3))
    early = (("It", -1.0), (" was", -1.5))
    take(hearing, first, "It was", words=words, avg_logprob=-1.0, logprobs=early, work=one)
    final = hearing.joined("")
    assert (final.text, final.language, final.finish_reason) == ("It was twice", "de", "length")
    assert final.words == (*words, Word("twice", 0.5 + second.offset / RATE, 1.0 + second.offset / RATE))
    assert final.avg_logprob == pytest.approx((-1.0 - 1.5 - 3.0) / 3)
    assert final.logprobs == (*early, (" twice", -3.0))
    assert final.work == Work(11, 22, 33, 44, 50)


def test_the_first_reason_is_told() -> None:
    hearing = heard(30.0)
    first, second = take(hearing, hearing.pieces[0], "a", "repetition")
    for part in take(hearing, first, "b", "length"):
        take(hearing, part, "c")
    take(hearing, second, "d")
    assert hearing.joined("").finish_reason == "repetition"


def test_what_is_short_is_kept_as_it_is() -> None:
    hearing = heard(3.9)
    assert not take(hearing, hearing.pieces[0], "Good and then", "repetition")
    assert hearing.done
    assert hearing.joined("").text == "Good and then"
    assert hearing.joined("").finish_reason == "repetition"


@pytest.mark.parametrize("said", ["", "She opened the"])
def test_what_was_said_stays(said: str) -> None:
    hearing = heard(6.0)
    first, second = take(hearing, hearing.pieces[0], "She opened the the the", "repetition")
    take(hearing, first, "She opened a")
    take(hearing, second, "window")
    assert hearing.joined(said).text == (f"{said} a window" if said else "She opened a window")


def test_what_is_collapsed_takes_its_scores_and_words_along() -> None:
    hearing = heard(3.0)
    spoken = ["Well", *[" no"] * 30, " thanks"]
    scores = tuple((token, -float(n)) for n, token in enumerate(spoken))
    words = tuple(Word(token.strip(), n / 10, (n + 1) / 10) for n, token in enumerate(spoken))
    take(hearing, hearing.pieces[0], "".join(spoken), "length", avg_logprob=-15.5, logprobs=scores, words=words)
    final = hearing.joined("")
    assert final.text == "Well no thanks"
    assert final.logprobs == (scores[0], scores[1], scores[-1])
    assert final.avg_logprob == (-0.0 - 1.0 - 31.0) / 3
    assert final.words == (words[0], words[1], words[-1])


LINE = "Lord have mercy upon us."


@pytest.mark.parametrize("said", ["", "Lord have mercy upon us. Lord"])
def test_a_chant_that_the_engine_took_for_a_run_away_keeps_all_its_lines(said: str) -> None:
    """Its halves, heard again, ended by themselves: it was spoken."""
    hearing = heard(20.0)
    halves = take(hearing, hearing.pieces[0], f"{LINE} {LINE}", "repetition")
    for half in halves:
        take(hearing, half, " ".join([LINE] * 4))
    assert hearing.joined(said).text == " ".join([LINE] * 8)


def test_what_ended_by_itself_is_no_run_away() -> None:
    hearing = heard(30.0)
    take(hearing, hearing.pieces[0], " ".join([LINE] * 9))
    assert hearing.joined("").text == " ".join([LINE] * 9)


def test_of_what_ran_away_to_the_last_piece_no_run_is_left() -> None:
    hearing = heard(30.0)
    waiting = [hearing.pieces[0]]
    while waiting:
        waiting += take(hearing, waiting.pop(), " ".join([LINE] * 2), "repetition")
    assert len(hearing.pieces) == 4
    assert hearing.joined("").text == LINE


@pytest.mark.parametrize("said", ["", "and went", "and went out"])
def test_a_repetition_that_the_engine_missed_is_shortened_behind_what_was_said_too(said: str) -> None:
    hearing = heard(6.0)
    tokens = (("and", -1.0), (" went", -1.0), (" out", -1.0), *[("ll", -2.0)] * 11)
    take(hearing, hearing.pieces[0], "and went out" + "l" * 22, logprobs=tokens, avg_logprob=-1.8)
    final = hearing.joined(said)
    assert final.text == "and went outl"
    assert "".join(token for token, _ in final.logprobs) == final.text


def test_what_was_said_of_a_run_stays() -> None:
    hearing = heard(3.0)
    spoken = ["Well", *[" no"] * 30, " thanks"]
    take(hearing, hearing.pieces[0], "".join(spoken), "length", logprobs=tuple((token, -1.0) for token in spoken))
    final = hearing.joined("Well no no no")
    assert final.text == "Well no no no thanks" == "".join(token for token, _ in final.logprobs)


def test_scores_that_do_not_spell_the_text_are_none() -> None:
    """An engine that went on behind a prefix knows nothing of how sure it was of that."""
    hearing = heard(3.0)
    take(hearing, hearing.pieces[0], "He was not here.", logprobs=((" here", -1.0), (".", -2.0)), avg_logprob=-1.5)
    final = hearing.joined("He was not")
    assert (final.logprobs, final.avg_logprob) == ((), -1.5)
