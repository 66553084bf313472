"""Words are said once, whole, and never taken back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.text.stabilizer import Stabilizer, pieces


def test_agreed_words_are_said_but_for_the_last() -> None:
    s = Stabilizer()
    assert s.hypothesis("the cat") == ""
    assert s.hypothesis("the caterpillar sleeps") == "the"
    assert s.hypothesis("the caterpillar sleeps well") == " caterpillar sleeps"
    assert s.final("the caterpillar sleeps well.") == " well."


def test_a_word_that_grows_is_never_cut() -> None:
    s = Stabilizer()
    said = [
        s.hypothesis(text)
        for text in ("the cat", "the cat", "the caterpillar", "the caterpillar", "the caterpillar is")
    ]
    said.append(s.final("the caterpillar is here"))
    assert "".join(said) == "the caterpillar is here"
    assert not any(part.startswith("erpillar") for part in said)


def test_what_an_earlier_generation_said_is_not_said_again() -> None:
    s = Stabilizer("so my fellow")
    assert s.hypothesis("so my fellow Americans ask") == ""
    assert s.hypothesis("so my fellow Americans ask not") == " Americans ask"
    assert s.final("so my fellow Americans ask not what") == " not what"


def test_a_final_that_contradicts_says_nothing_more() -> None:
    s = Stabilizer()
    s.hypothesis("ice cream is good now")
    s.hypothesis("ice cream is good now")
    assert s.said == "ice cream is good"
    assert s.final("I scream") == ""


def test_characters_are_the_words_of_chinese() -> None:
    s = Stabilizer()
    s.hypothesis("你好世界")
    assert s.hypothesis("你好世界和平") == "你好世界"


def test_revised_share() -> None:
    s = Stabilizer()
    s.hypothesis("a b c d")
    assert s.revised("a b x d") == 0.25
    assert Stabilizer().revised("anything") == 0.0


WORDS = st.lists(st.sampled_from(["the", "cat", "caterpillar", "can't", "ä", "你好", "a,", "e\u0301"]), max_size=8)


@given(st.text())
def test_pieces_join_to_the_text_without_its_end_space(text: str) -> None:
    joined = "".join(pieces(text))
    assert text.startswith(joined)
    assert not text[len(joined) :].strip()


@given(st.lists(WORDS, min_size=1, max_size=6), st.booleans())
def test_deltas_are_append_only_whole_words(history: list[list[str]], prefix_engine: bool) -> None:
    """With an engine that keeps its prefix, the deltas join to the final; with any engine they are whole words."""
    s = Stabilizer()
    deltas: list[str] = []
    text = ""
    for words in history:
        text = " ".join(words)
        if prefix_engine and not text.startswith(s.said):
            text = s.said + " " + text
        delta = s.hypothesis(text)
        deltas.append(delta)
        assert not delta or delta[-1] != " "
        assert text.startswith(s.said) or not prefix_engine
    deltas.append(s.final(text))
    assert "".join(deltas) == s.said
    if prefix_engine:
        assert "".join(deltas).strip() == text.strip()


WORDS = st.lists(st.sampled_from("abcd"), max_size=24)


@given(WORDS.filter(bool), WORDS)
def test_what_is_kept_is_the_longest_common_subsequence(shown: list[str], final: list[str]) -> None:
    """Against the table of the textbook."""
    rows = [[0] * (len(final) + 1) for _ in range(len(shown) + 1)]
    for n, left in enumerate(shown):
        for m, right in enumerate(final):
            rows[n + 1][m + 1] = rows[n][m] + 1 if left == right else max(rows[n][m + 1], rows[n + 1][m])
    stabilizer = Stabilizer()
    stabilizer.hypothesis(" ".join(shown))
    assert stabilizer.revised(" ".join(final)) == pytest.approx(1 - rows[-1][-1] / len(shown))


def test_a_run_away_of_few_words_is_compared_at_once() -> None:
    """It happens on the thread that calls wait for. Matching blocks one by one would take minutes here."""
    stabilizer = Stabilizer()
    stabilizer.hypothesis("天地" * 6_000)
    assert stabilizer.revised("地天天" * 4_000) < 0.5
