"""Text that was said, and the same sound heard again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.rejoin import continued

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
    assert heard.endswith(whole[len(said) :])


@given(SENTENCE, SENTENCE)
def test_a_continuation_is_taken_as_it_is(said: str, more: str) -> None:
    heard = f"{said} {more}".strip()
    assert continued(said, heard) == heard
