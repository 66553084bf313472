"""Scores and words of a text that was put together and shortened are those of what is left."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from shared.messages import Word
from worker.text.repetition import collapse_repetitions, collapse_word_runs, places_without_word_runs
from worker.text.spelling import Part, Scored, Spelling


def cut(text: str, sizes: list[int]) -> list[Scored]:
    """``text`` as tokens of so many characters, each with its number for a score."""
    found: list[Scored] = []
    while text:
        size = sizes[len(found) % len(sizes)]
        found.append((text[:size], -float(len(found))))
        text = text[size:]
    return found


def timed(text: str) -> list[Word]:
    return [Word(word, n / 10, (n + 1) / 10) for n, word in enumerate(text.split())]


def left_of(text: str) -> tuple[str, tuple[Word, ...]]:
    """What is left of a text, and of its words."""
    places = places_without_word_runs(text, range(len(text)))
    return "".join(text[place] for place in places), Spelling([Part(text, words=timed(text))]).words(places)


SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=6)
TEXTS = st.tuples(st.text("ab c", max_size=20), st.text("ab ", min_size=1, max_size=30), st.integers(1, 40)).map(
    lambda drawn: f"{drawn[0]}{drawn[1] * drawn[2]} end"
)


@given(TEXTS)
def test_places_are_those_of_what_stays(text: str) -> None:
    left = "".join(text[place] for place in places_without_word_runs(text, range(len(text))))
    assert left == collapse_word_runs(collapse_repetitions(text)).strip()


@given(TEXTS, SIZES)
def test_tokens_keep_their_own_characters(text: str, sizes: list[int]) -> None:
    tokens = cut(text, sizes)
    owner = [n for n, (token, _) in enumerate(tokens) for _ in token]
    places = places_without_word_runs(text, range(len(text)))
    expected = [
        ("".join(text[place] for place in mine), -float(n)) for n, mine in itertools.groupby(places, owner.__getitem__)
    ]
    assert Spelling([Part(text.strip(), tokens)]).text == text.strip()
    lead = len(text) - len(text.lstrip())
    inner = [place - lead for place in places]
    assert Spelling([Part(text.strip(), tokens)]).tokens(inner) == tuple(expected)


def test_a_space_between_two_parts_belongs_to_the_second() -> None:
    spelling = Spelling([Part("It was", [("It", -1.0), (" was", -2.0)]), Part("twice", [(" tw", -3.0), ("ice", -4.0)])])
    found = spelling.tokens(range(len(spelling.text)))
    assert spelling.text == "It was twice"
    assert found == (("It", -1.0), (" was", -2.0), (" tw", -3.0), ("ice", -4.0))
    spelling = Spelling([Part("It was", [("It was", -1.0)]), Part("twice", [("twice", -3.0)])])
    assert spelling.tokens(range(len(spelling.text))) == (("It was", -1.0), (" twice", -3.0))


def test_tokens_of_another_text_are_none() -> None:
    assert Spelling([Part("colder", [("cold", -1.0)])]).tokens(range(6)) == ()


def test_words_after_a_run_keep_their_times() -> None:
    text = "Deep down " + "in the valley " * 8 + "interesting things grow"
    left, words = left_of(text)
    assert left == "Deep down in the valley interesting things grow"
    assert words == (*timed(text)[:5], *timed(text)[-3:])


def test_a_partial_copy_at_the_end_of_a_run_is_the_last_one() -> None:
    text = "red green blue " * 8 + "red green white"
    left, words = left_of(text)
    assert left == "red green blue red green white"
    assert words == (*timed(text)[:3], *timed(text)[-3:])


def test_words_that_are_cut_in_the_middle_are_none() -> None:
    left, words = left_of("so " + "abab" * 20 + "c fine")
    assert left == "so abc fine"
    assert words == ()


def test_words_of_which_nobody_knows_all_are_none() -> None:
    spelling = Spelling([Part("It was", words=timed("It was")), Part("twice")])
    assert spelling.words(range(len(spelling.text))) == ()
