"""Estimated word times: inside the speech, in order, never across a pause, whatever the text and its script."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.speech import transcripts
from worker.text.word_times import split_words, spread_words

TEXTS = st.one_of(
    st.text(max_size=60),
    st.lists(
        st.sampled_from(["a", "the", "extraordinary", "2024", "—", "(yes)", "你好，", "スーパー", "ภาษาไทย", "…"]),
        max_size=40,
    ).map(" ".join),
)


@st.composite
def _regions(draw: st.DrawFn) -> list[tuple[float, float]]:
    """Stretches of 50 ms to 10 s with pauses, some of them empty."""
    clock = draw(st.floats(0, 7200))
    found = []
    for pause, length in draw(st.lists(st.tuples(st.floats(0, 3), st.floats(0.05, 10)), max_size=6)):
        clock += pause
        found.append((clock, clock + length))
        clock += length
    return found


@given(TEXTS, _regions())
@settings(max_examples=300, deadline=None)
def test_every_word_lies_in_speech_behind_the_one_before(text: str, regions: list[tuple[float, float]]) -> None:
    words = spread_words(text, regions)
    assert [word.text for word in words] == (split_words(text) if regions else [])
    assert all(word.start < word.end for word in words)
    assert all(before.end <= after.start for before, after in pairwise(words))
    assert all(any(start <= word.start and word.end <= end for start, end in regions) for word in words)


@given(TEXTS, st.tuples(st.floats(0, 100), st.floats(0.1, 30)))
@settings(max_examples=200, deadline=None)
def test_one_region_is_filled_from_edge_to_edge(text: str, region: tuple[float, float]) -> None:
    start, length = region
    words = spread_words(text, [(start, start + length)])
    if words:
        assert (words[0].start, words[-1].end) == (start, start + length)
        assert all(before.end == after.start for before, after in pairwise(words))


@given(TEXTS)
@settings(max_examples=300, deadline=None)
def test_nothing_but_white_space_is_lost(text: str) -> None:
    words = split_words(text)
    spoken = any(char.isalnum() for char in text)
    assert "".join(words) == ("".join(text.split()) if spoken else "")
    assert all(any(char.isalnum() for char in word) for word in words)


def test_longer_words_take_longer() -> None:
    short, long = spread_words("a considerably", [(0.0, 3.0)])
    assert short.end - short.start < (long.end - long.start) / 4
    word, number = spread_words("in 1984", [(0.0, 3.0)])
    assert (number.end - number.start) > 3 * (word.end - word.start)


def test_no_word_straddles_a_pause() -> None:
    """The sentence of the clip with a pause in the middle: the edge moves to a word's end, not the word to the edge."""
    words = spread_words("He was not an ill-disposed young man.", [(0.2, 1.0), (1.4, 2.8)])
    assert [word.text for word in words if word.end <= 1.0] == ["He", "was", "not", "an"]
    assert [word.text for word in words if word.start >= 1.4] == ["ill-disposed", "young", "man."]
    assert words[4].start == 1.4


def test_a_region_without_room_for_a_word_stays_empty() -> None:
    words = spread_words("one two", [(0.0, 1.0), (2.0, 2.05), (3.0, 4.0)])
    assert [(word.text, word.start, word.end) for word in words] == [("one", 0.0, 1.0), ("two", 3.0, 4.0)]
    (word,) = spread_words("one", [(0.0, 1.0), (2.0, 5.0)])
    assert (word.start, word.end) == (2.0, 5.0)


def test_each_of_two_sentences_gets_its_speech() -> None:
    first, second = transcripts()["librivox-0880"], transcripts()["librivox-0930"]
    words = spread_words(f"{first} {second}", [(0.3, 2.7), (4.0, 6.9)])
    assert " ".join(word.text for word in words if word.end <= 2.7) == first
    assert " ".join(word.text for word in words if word.start >= 4.0) == second


@pytest.mark.parametrize("regions", [[], [(1.0, 1.0)], [(2.0, 1.0)]])
def test_no_speech_no_words(regions: list[tuple[float, float]]) -> None:
    assert spread_words("Hello there", regions) == ()


@pytest.mark.parametrize("regions", [[(2.0, 3.0), (0.0, 1.0)], [(0.0, 2.0), (1.0, 3.0)]])
def test_regions_in_disorder_are_refused(regions: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match="order"):
        spread_words("Hello there", regions)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("… — ♪", []),
        ("Hello, world!", ["Hello,", "world!"]),
        ("yes — no", ["yes—", "no"]),
        ("— yes (no)", ["—yes", "(no)"]),
        ("a (", ["a("]),
        ("今天很好。", ["今", "天", "很", "好。"]),
        ("他说：「你好」，对吗？", ["他", "说：", "「你", "好」，", "对", "吗？"]),
        ("今天用 Python3 写", ["今", "天", "用", "Python3", "写"]),
        ("今天用Python写", ["今", "天", "用", "Python", "写"]),
        ("スーパーきょう", ["スー", "パー", "きょ", "う"]),
        ("が\u3099", ["が\u3099"]),
        ("ง่าย", ["ง่า", "ย"]),
        ("ไทย", ["ไท", "ย"]),
        ("नमस्ते दुनिया", ["नमस्ते", "दुनिया"]),
        ("안녕 하세요", ["안녕", "하세요"]),
        ("葛\U000e0100城", ["葛\U000e0100", "城"]),
    ],
)
def test_words_of_many_scripts(text: str, expected: list[str]) -> None:
    assert split_words(text) == expected
