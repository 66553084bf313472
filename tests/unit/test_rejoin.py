"""Text that was said, and the same sound heard again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.text.rejoin import continued

SENTENCE = st.lists(st.sampled_from(["the", "cat", "sat", "on", "a", "mat", "and"]), max_size=12).map(" ".join)


@pytest.mark.parametrize(
    ("said", "heard", "whole"),
    [
        ("", "The cat sat.", "The cat sat."),
        ("The cat", "The cat sat.", "The cat sat."),
        ("The cad", "The cat sat.", "The cad sat."),
        ("The cat sat okay okay", "The cat sat on the mat.", "The cat sat okay okay on the mat."),
        ("The, cat", "the cat sat", "The, cat sat"),
        ("The cat sat on", "The cat", "The cat sat on"),
        ("Something else", "", "Something else"),
        ("The colour – it", "The color it is", "The colour – it is"),
        ("twenty one", "21 people", "twenty one 21 people"),
        ("In winter", "In summer", "In winter summer"),
        ("the cat " * 6 + "sat", "The cat sat on the mat.", "the cat " * 6 + "sat on the mat."),
        ("今天天", "今天天气很好", "今天天气很好"),
        # It cannot be known whether 田 was 天; rather doubled than lost.
        ("今天田", "今天天气很好", "今天田天气很好"),
    ],
)
def test_continued(said: str, heard: str, whole: str) -> None:
    assert continued(said, heard) == whole


@given(SENTENCE, SENTENCE)
def test_what_was_said_stays_and_nothing_new_is_invented(said: str, heard: str) -> None:
    whole = continued(said, heard)
    assert whole.startswith(said)
    assert heard.endswith(whole[len(said) :].lstrip())


@given(SENTENCE, SENTENCE)
def test_a_continuation_is_taken_as_it_is(said: str, more: str) -> None:
    heard = f"{said} {more}".strip()
    assert continued(said, heard) == heard


def test_long_junk_holds_nobody_up() -> None:
    """A run-away that repeats nothing, heard again as other junk: the scheduler's thread joins them, and every call waits for it.
    Letter by letter, these two would take minutes."""

    def junk(seed: int, count: int) -> str:
        return " ".join(f"{(seed + number) * 2654435761 % 2**32:08x}" for number in range(count))

    assert continued(junk(0, 3_000), junk(7_000, 12_000)).startswith(junk(0, 3_000))
