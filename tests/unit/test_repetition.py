"""Runs in text: the published thresholds, any script, linear time; run-aways of words; the online detector."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.speech import transcripts
from worker.text.repetition import (
    MAX_PERIOD,
    RUN_ITEMS,
    Run,
    RunDetector,
    collapse_repetitions,
    collapse_word_runs,
    repeats_of_runaway,
)

HANG_GUARD_S = 3.0
"""100,000 characters take 0.2 to 0.8 s on the machine that this was written on; quadratic code takes minutes."""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("a" * 20, "a" * 20),
        ("a" * 21, "a"),
        ("a" * 1000, "a"),
        ("ab" * 19, "ab" * 19),
        ("ab" * 20, "ab"),
        ("ab" * 20 + "a", "aba"),
        ("b" + "ab" * 20, "bab"),
        ("well " + "ha " * 25 + "yes", "well ha yes"),
        ("я" * 30, "я"),
        ("像" * 119, "像"),
        ("嗯，" * 40 + "好", "嗯，好"),
        ("مرحبا " * 20, "مرحبا "),
        ("नमस्ते " * 20, "नमस्ते "),
        ("👍🏽" * 20, "👍🏽"),
        ("abcdefghijklmnopqrst" * 20, "abcdefghijklmnopqrst"),
        ("abcdefghijklmnopqrstu" * 20, "abcdefghijklmnopqrstu" * 20),
        ("x" * 25 + "-" + "y" * 25, "x-y"),
        ("a\n" * 20, "a\n"),
        ("\n" * 21, "\n"),
        (("a" * 21 + "b") * 20, "ab"),
        (("ab" * 20 + "c") * 20, "abc"),
    ],
)
def test_published_thresholds(text: str, expected: str) -> None:
    assert collapse_repetitions(text) == expected


def test_a_threshold_of_one_would_cut_speech() -> None:
    with pytest.raises(ValueError, match="twice"):
        collapse_repetitions("no no", threshold=1)


def _runs() -> st.SearchStrategy[str]:
    """Text with runs of all kinds next to each other, overlapping and nested."""
    pattern = st.text("abc ä語", min_size=1, max_size=20)
    piece = st.builds(lambda text, times: text * times, pattern, st.sampled_from([1, 2, 3, 5, 6, 7, 19, 20, 21, 40]))
    return st.lists(piece, max_size=6).map("".join)


@given(_runs(), st.sampled_from([3, 5, 20]))
@settings(max_examples=150, deadline=None)
def test_a_second_time_changes_nothing(text: str, threshold: int) -> None:
    once = collapse_repetitions(text, threshold)
    assert collapse_repetitions(once, threshold) == once


@given(_runs(), st.sampled_from([3, 5, 20]))
@settings(max_examples=150, deadline=None)
def test_no_run_is_left(text: str, threshold: int) -> None:
    kept = collapse_repetitions(text, threshold)
    for period in range(1, MAX_PERIOD + 1):
        copies = threshold + (period == 1)
        for start in range(len(kept) - period * copies + 1):
            assert kept[start : start + period * copies] != kept[start : start + period] * copies


@given(_runs(), st.sampled_from([3, 5, 20]))
@settings(max_examples=150, deadline=None)
def test_text_without_runs_is_not_touched(text: str, threshold: int) -> None:
    runs = any(
        text[start : start + period * (threshold + (period == 1))]
        == text[start : start + period] * (threshold + (period == 1))
        for period in range(1, MAX_PERIOD + 1)
        for start in range(len(text) - period * threshold + 1)
    )
    assert (collapse_repetitions(text, threshold) == text) is not runs


@given(_runs(), st.sampled_from([3, 20]))
@settings(max_examples=100, deadline=None)
def test_only_whole_stretches_go(text: str, threshold: int) -> None:
    """What stays is a subsequence of the text, and begins as the text does."""
    kept = collapse_repetitions(text, threshold)
    rest = iter(text)
    assert all(char in rest for char in kept)
    assert kept[:1] == text[:1]


def test_speech_is_not_touched() -> None:
    for text in [
        *transcripts().values(),
        " ".join(transcripts().values()),
        "No, no, no, no, no. Ha ha ha ha! 000 000 000",
    ]:
        assert collapse_repetitions(text) == text
        assert collapse_word_runs(text) == text


@pytest.mark.parametrize(
    "text",
    [
        ("ab" * 19 + "c") * 2600,
        ("a" * 20 + "b") * 5000,
        "ab" * 50_000,
        (("ab" * 20 + "c") * 20 + "d") * 122,
        " ".join(transcripts().values()) * 240,
    ],
    ids=["almost", "almost one character", "run", "nested", "speech"],
)
def test_time_is_linear(text: str) -> None:
    assert len(text) >= 100_000
    began = time.perf_counter()
    collapse_repetitions(text)
    assert time.perf_counter() - began < HANG_GUARD_S


# ---------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("no " * 19 + "yes", "no " * 19 + "yes"),
        ("no " * 20 + "yes", "no yes"),
        ("No, no. NO! " * 7 + "yes", "No, yes"),
        ("Thank you. " * 10, "Thank you."),
        ("Well. The first is " + "the first is " * 20 + "the", "Well. The first is"),
        ("  the " * 30, "  the"),
        ("This is a little bit of a... " * 6 + "This", "This is a little bit of a..."),
        ("This is a little bit of a... " * 5 + "This", "This is a little bit of a... " * 5 + "This"),
        ("да " * 30 + "нет", "да нет"),
    ],
)
def test_runs_of_words(text: str, expected: str) -> None:
    assert collapse_word_runs(text) == expected


@given(
    st.lists(st.sampled_from(["the", "The,", "a", "first", "is", "-"]), max_size=60), st.sampled_from([" ", "  ", "\n"])
)
@settings(max_examples=150, deadline=None)
def test_runs_of_words_a_second_time(words: list[str], space: str) -> None:
    once = collapse_word_runs(space.join(words))
    assert collapse_word_runs(once) == once


# ---------------------------------------------------------------- online


@pytest.mark.parametrize(
    ("items", "run"),
    [
        ("", None),
        ("abc", None),
        ("aa", Run(period=1, repeats=2, length=2)),
        ("xabab", Run(period=2, repeats=2, length=4)),
        ("xbabab", Run(period=2, repeats=2, length=5)),
        ("aabaab", Run(period=3, repeats=2, length=6)),
        ("abcabcabcx", None),
        ("ab" * 10, Run(period=2, repeats=10, length=20)),
        ("abbb", Run(period=1, repeats=3, length=3)),
        ("aab" * 8 + "aa", Run(period=3, repeats=8, length=26)),
    ],
)
def test_tail_of_a_sequence(items: str, run: Run | None) -> None:
    assert RunDetector(items).tail == run


@pytest.mark.parametrize("period", [1, 2, 3, 5, 8, MAX_PERIOD])
def test_a_run_away_is_told_at_its_last_copy(period: int) -> None:
    detector = RunDetector(["before"])
    pattern = list(range(period))
    items = pattern * repeats_of_runaway(period)
    told = [bool((run := detector.push(item)) and run.runaway) for item in items]
    assert told == [False] * (len(items) - 1) + [True]
    assert detector.runaway is True
    assert detector.push("after") is None


def test_people_repeat_themselves() -> None:
    for said in ["no " * 12, "one two three four " * 4, "we want the cup " * 5, "ha ha ha ha oh " * 4]:
        detector = RunDetector()
        assert not any((run := detector.push(word)) and run.runaway for word in said.split())


@given(st.lists(st.integers(0, 2), max_size=80), st.integers(1, 5), st.integers(0, 30))
@settings(max_examples=200, deadline=None)
def test_tail_is_what_a_search_finds(before: list[int], period: int, length: int) -> None:
    items = before + [index % period for index in range(length)]
    found = [
        (p, n)
        for p in range(1, MAX_PERIOD + 1)
        if (n := next((i for i in range(len(items)) if i + p >= len(items) or items[-1 - i] != items[-1 - i - p]), 0))
        >= p
    ]
    tail = RunDetector(items).tail
    if not found:
        assert tail is None
        return
    runs = [Run(p, 1 + n // p, p + n) for p, n in found]
    assert tail == next((run for run in runs if run.runaway), runs[0])


def test_the_detector_keeps_nothing_but_the_last_items() -> None:
    detector = RunDetector(range(100_000))
    assert len(detector._recent) == MAX_PERIOD
    assert detector.tail is None


@given(st.lists(st.sampled_from(["a", "b"]), min_size=RUN_ITEMS, max_size=120))
@settings(max_examples=100, deadline=None)
def test_the_detector_and_the_collapser_agree(words: list[str]) -> None:
    detector = RunDetector()
    seen = any((run := detector.push(word)) and run.runaway for word in words)
    assert (collapse_word_runs(" ".join(words)) != " ".join(words)) is seen


# ---------------------------------------------------------------- the published code

NEIGHBOURS = st.builds(
    lambda text, times: text * times,
    st.text("abc ", min_size=1, max_size=20),
    st.sampled_from([1, 2, 5, 19, 21, 22, 40]),
)


def _published() -> Callable[[str], str]:
    from transformers.models.qwen3_asr import processing_qwen3_asr

    function: Callable[[str], str] = processing_qwen3_asr._detect_and_fix_repetitions
    return function


@pytest.mark.torch
@given(st.lists(NEIGHBOURS, max_size=5))
@settings(max_examples=150, deadline=None)
def test_same_as_the_published_code(pieces: list[str]) -> None:
    """Wherever runs stand apart (between marks that come once) and no single character comes exactly 20 times."""
    published = _published()

    text = "".join(f"{chr(0x2460 + index)}{piece}" for index, piece in enumerate(pieces)) + "。" * 20 + "0123456789" * 4
    if any(char * 20 in piece and char * 21 not in piece for piece in pieces for char in "abc "):
        return
    ours, theirs = collapse_repetitions(text), published(text)
    # "。" comes 20 times on purpose: it is the one difference below, and shows that the comparison sees differences.
    assert ours.replace("。" * 20, "。") == theirs


@pytest.mark.torch
def test_where_the_published_code_differs() -> None:
    published = _published()

    # One character 20 times: it keeps it, as its threshold says, but not with 20 more characters behind it.
    assert published("a" * 20) == "a" * 20 == collapse_repetitions("a" * 20)
    behind = "a" * 20 + "bcdefghijklmnopqrstu"
    assert published(behind) == "abcdefghijklmnopqrstu"
    assert collapse_repetitions(behind) == behind
    # Runs that only come together by a cut: it reads once, so a second time would find more.
    nested = ("ab" * 20 + "c") * 20
    assert published(nested) == "abc" * 20
    assert collapse_repetitions(nested) == "abc"
    # Runs that share characters: it begins the second one anew behind the first.
    touching = "cb" * 25 + " b" * 25 + " "
    assert published(touching) == "cb b "
    assert collapse_repetitions(touching) == "cb "
    # It calls itself once a run.
    many = "".join(f"{chr(0x4E00 + index)}{'ab' * 20}" for index in range(1500))
    with pytest.raises(RecursionError):
        published(many)
    assert len(collapse_repetitions(many)) == 3 * 1500
