"""Scores and words of a text that was shortened are those of what is left."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.messages import Word
from worker.text.repetition import collapse_repetitions
from worker.text.spelling import spelling, words_of


def cut(text: str, sizes: list[int]) -> list[tuple[str, float]]:
    """``text`` as tokens of so many characters, each with its number for a score."""
    found: list[tuple[str, float]] = []
    while text:
        size = sizes[len(found) % len(sizes)]
        found.append((text[:size], -float(len(found))))
        text = text[size:]
    return found


SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=6)


@given(st.text("ab c", max_size=20), st.text("ab ", min_size=1, max_size=4), st.integers(1, 40), SIZES)
def test_the_tokens_of_a_collapsed_text_spell_it(good: str, pattern: str, copies: int, sizes: list[int]) -> None:
    whole = good + pattern * copies + " end"
    text = collapse_repetitions(whole).strip()
    tokens = cut(whole, sizes)
    found = spelling(tokens, text)
    assert "".join(token for token, _ in found) == text
    scores = [score for _, score in found]
    assert scores == sorted(set(scores), reverse=True)
    assert set(scores) <= {score for _, score in tokens}


@given(st.text("ab c", min_size=1), SIZES)
def test_a_text_that_was_not_shortened_keeps_its_tokens(text: str, sizes: list[int]) -> None:
    assert spelling(cut(text, sizes), text) == tuple(cut(text, sizes))


def test_a_space_between_two_parts_belongs_to_the_second() -> None:
    assert spelling([("It was", -1.0), ("twice", -2.0)], "It was twice") == (("It was", -1.0), (" twice", -2.0))


def test_another_text_has_no_tokens() -> None:
    assert spelling([("cold", -1.0)], "colder") == ()
    assert spelling([("cold", -1.0)], "warm") == ()


def test_words_that_are_gone_go() -> None:
    words = [Word(text, float(n), n + 1.0) for n, text in enumerate(["no,", "no,", "no,", "no,", "that's", "it."])]
    assert words_of(words, "no, that's it.") == (words[0], *words[4:])
    assert words_of(words, "no, that is it.") == ()
