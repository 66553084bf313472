"""Cues: what strict parsers read, what a reader can follow, and that no word is lost."""

from __future__ import annotations

import cProfile
import html
import json
import pstats
from pathlib import Path
from typing import Any
from unicodedata import category, east_asian_width

import pysrt
import webvtt
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.answers.subtitles import MAX_COLUMNS, MAX_LINES, MAX_MS, Cue, cues, srt, vtt
from gateway.answers.timed_text import break_word, estimated_words
from gateway.answers.transcript import Transcript
from shared.messages import SegmentDone, Word

SPEECH = Path(__file__).parents[1] / "data" / "transcripts.json"


def segment(index: int, start: float, end: float, text: str, words: tuple[Word, ...] = ()) -> SegmentDone:
    first, last = round(start * 16000), round(end * 16000)
    return SegmentDone(1, "r", index, first, last, last, text, words)


def transcript(*parts: tuple[float, float, str], duration: float | None = None) -> Transcript:
    segments = tuple(segment(index, *part) for index, part in enumerate(parts))
    return Transcript(segments, parts[-1][1] if duration is None else duration)


def width(line: str) -> int:
    """Columns, counted independently of the code under test."""
    return sum((east_asian_width(c) in "WF") + 1 for c in line if category(c) not in ("Mn", "Me", "Cf"))


def assert_readable(found: list[Cue]) -> None:
    clock = 0
    for cue in found:
        assert clock <= cue.start < cue.end <= cue.start + MAX_MS
        clock = cue.end
        assert 1 <= len(cue.lines) <= MAX_LINES
        for line in cue.lines:
            assert line.strip() and width(line) <= MAX_COLUMNS


def words_of(found: list[Cue]) -> list[str]:
    return " ".join(line for cue in found for line in cue.lines).split()


SENTENCE = "I think that the first thing we should do, before anything else, is to look at the budget of last year."


def parse_srt(text: str) -> Any:
    return pysrt.from_string(text, error_handling=pysrt.ERROR_RAISE)


def test_srt_is_what_a_strict_parser_reads() -> None:
    source = transcript((0.5, 7.0, SENTENCE), (3723.25, 3724.5, "Good <i>morning</i> & --> goodbye."))
    parsed = parse_srt(srt(source))
    assert [item.index for item in parsed] == list(range(1, len(parsed) + 1))
    assert [item.start.ordinal for item in parsed] == [cue.start for cue in cues(source)]
    assert [item.end.ordinal for item in parsed] == [cue.end for cue in cues(source)]
    assert parsed[-1].text == "Good <i>morning</i> & -> goodbye."
    assert "01:02:03,250 -->" in srt(source)


def test_vtt_is_what_a_strict_parser_reads() -> None:
    source = transcript((0.5, 7.0, SENTENCE), (3723.25, 3724.5, "Good <i>morning</i> & --> goodbye."))
    text = vtt(source)
    parsed = webvtt.from_string(text)
    assert text.startswith("WEBVTT\n\n00:00:00.500 --> ")
    assert [caption.start for caption in parsed.captions][-1] == "01:02:03.250"
    assert [html.unescape(caption.raw_text) for caption in parsed.captions] == [
        "\n".join(cue.lines) for cue in cues(source)
    ]
    assert "&lt;i&gt;morning&lt;/i&gt; &amp; -&gt;" in text


def test_a_long_sentence_becomes_readable_cues() -> None:
    found = cues(transcript((0.0, 6.0, SENTENCE)))
    assert_readable(found)
    assert words_of(found) == SENTENCE.split()
    assert [cue.lines for cue in found] == [
        ("I think that the first thing we", "should do, before anything else,"),
        ("is to look at the budget of last year.",),
    ]


def test_a_cue_ends_with_the_sentence_rather_than_with_the_room() -> None:
    found = cues(
        transcript(
            (0.0, 8.0, "We went to the old harbour in the evening. Then it rained and everybody ran home at once.")
        )
    )
    assert found[0].lines[-1].endswith("evening.")


def test_a_title_does_not_end_a_sentence() -> None:
    """As the embedded engine hears the first clip: 42 columns from "Mr." on fill a line."""
    text = "And Mr. John Dashwood had then leisure to consider how much there might be prudently in his power to do for them."
    found = cues(transcript((0.35, 6.88, text)))
    assert_readable(found)
    assert not any(cue.lines[-1].endswith("Mr.") for cue in found)
    for ending in ("J.", "3.", "Dr.", "St."):
        text = f"This was said a very long time ago by {ending} Miller who lived alone in the house at the end of our street"
        assert not any(cue.lines[-1].endswith(ending) for cue in cues(transcript((0.0, 8.0, text))))


def test_no_cue_is_gone_before_it_can_be_read() -> None:
    """A short sentence at the start is not worth a cue that the next one pushes away at once."""
    text = (
        "Oh no. We really have to go back to the old house at the end of the street before it gets dark again tonight."
    )
    found = cues(transcript((0.0, 7.0, text)))
    assert_readable(found)
    assert all(cue.end - cue.start >= 1000 for cue in found)


def test_no_word_is_left_alone() -> None:
    text = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
    for count in range(12, 18):
        found = cues(transcript((0.0, 6.0, " ".join(text.split()[:count]))))
        assert_readable(found)
        assert all(len(" ".join(cue.lines).split()) > 1 for cue in found)


def test_a_long_pause_ends_a_cue_and_a_short_one_does_not() -> None:
    apart = cues(transcript((0.0, 1.0, "Yes."), (5.0, 6.0, "I know.")))
    together = cues(transcript((0.0, 1.0, "Yes,"), (1.1, 2.0, "I know.")))
    assert [cue.lines for cue in apart] == [("Yes.",), ("I know.",)]
    assert [cue.lines for cue in together] == [("Yes, I know.",)]


def test_a_short_cue_stays_until_it_can_be_read_but_not_into_the_next() -> None:
    alone, before = cues(transcript((0.0, 0.3, "Yes."), (2.5, 2.6, "No."), duration=3.0))
    assert (alone.start, alone.end) == (0, 1000)
    assert before.end == 3000  # the recording ends


def test_slow_speech_never_holds_a_cue_longer_than_seven_seconds() -> None:
    words = tuple(Word(name, 3.0 * index, 3.0 * index + 3) for index, name in enumerate("abcdefgh"))
    found = cues(Transcript((segment(0, 0.0, 24.0, "a b c d e f g h", words),), 24.0))
    assert_readable(found)
    assert [(cue.start, cue.end, cue.lines) for cue in found] == [
        (start * 3000, start * 3000 + 6000, (line,)) for start, line in ((0, "a b"), (2, "c d"), (4, "e f"), (6, "g h"))
    ]
    endless = cues(transcript((0.0, 60.0, "Well")))
    assert [(cue.start, cue.end) for cue in endless] == [(0, MAX_MS)]


def test_a_word_longer_than_a_line_is_broken_and_nothing_else_is() -> None:
    long = "https://example.org/" + "a" * 80
    found = cues(transcript((0.0, 6.0, f"See {long} for more")))
    assert_readable(found)
    assert "".join(words_of(found)) == f"See{long}formore"
    assert {"See", "for", "more"} <= set(words_of(found))


def test_scripts_without_spaces_are_broken_between_characters() -> None:
    chinese = "今天天气很好，我们去公园散步吧。“好的！”他说。我们可以在那里野餐，然后回家看电影，晚上再一起吃饭。"
    found = cues(transcript((0.0, 9.0, chinese), (9.0, 10.0, "好。")))
    assert_readable(found)
    lines = [line for cue in found for line in cue.lines]
    assert "".join(lines) == chinese + "好。"
    assert not any(line[0] in "，。！”" for line in lines)
    assert any(line.endswith(("，", "。", "！”")) for line in lines)
    assert break_word("他说（笑）：“好的！”", MAX_COLUMNS) == ["他", "说", "（笑）：", "“好", "的！”"]


def test_thai_marks_stay_with_their_letters() -> None:
    thai = "สวัสดีครับผมชื่อจอห์นยินดีที่ได้รู้จักเราไปกินข้าวกันเถอะวันนี้อากาศดีมากเลยนะครับผมอยากไปทะเล"
    found = cues(transcript((0.0, 9.0, thai)))
    assert_readable(found)
    lines = [line for cue in found for line in cue.lines]
    assert "".join(lines) == thai
    assert not any(category(line[0]) == "Mn" or line[-1] in "เแโใไ" for line in lines)


def test_times_come_from_the_words_and_punctuation_from_the_text() -> None:
    words = (Word("hello", 1.0, 1.5), Word("world", 1.5, 2.0), Word("good", 6.0, 6.5), Word("bye", 6.5, 7.0))
    found = cues(Transcript((segment(0, 0.9, 7.1, "Hello, world! Good-bye.", words),), 7.2))
    assert [(cue.start, cue.lines) for cue in found] == [(1000, ("Hello, world!",)), (6000, ("Good-bye.",))]
    assert [cue.end for cue in found] == [2000, 7000]


def test_words_that_spell_something_else_only_say_when_speech_is() -> None:
    words = (Word("completely", 3.0, 3.5), Word("different", 3.5, 4.0))
    found = cues(Transcript((segment(0, 1.0, 9.0, "Hello world.", words),), 9.0))
    assert (found[0].start, found[0].lines) == (3000, ("Hello world.",))


def test_estimated_words_share_the_speech_by_length() -> None:
    words = estimated_words(segment(0, 1.0, 2.0, "a bbb cccc"))
    assert words == (Word("a", 1.0, 1.125), Word("bbb", 1.125, 1.5), Word("cccc", 1.5, 2.0))


def test_control_characters_and_blank_lines_do_not_break_the_file() -> None:
    source = transcript((0.0, 2.0, "one\n\ntwo\x00\x85\u2028three ---> \ufefffour\r\n"))
    parsed = parse_srt(srt(source))
    assert [item.text for item in parsed] == ["one two three -> four"]
    assert len(webvtt.from_string(vtt(source)).captions) == 1


def test_real_speech_is_readable() -> None:
    loaded: dict[str, Any] = json.loads(SPEECH.read_text())
    texts = [text for text in loaded.values() if isinstance(text, str)]
    assert texts
    source = transcript(*((index * 12.0, index * 12.0 + len(text) / 15, text) for index, text in enumerate(texts)))
    found = cues(source)
    assert_readable(found)
    assert words_of(found) == " ".join(texts).split()


@st.composite
def recordings(draw: st.DrawFn, alphabet: st.SearchStrategy[str]) -> Transcript:
    """Segments in order, some without text, some with words, words badly timed among them."""
    clock = 0.0
    segments = []
    for index in range(draw(st.integers(0, 5))):
        clock += draw(st.floats(0, 3))
        start, clock = clock, clock + draw(st.floats(0.0, 12))
        text = " ".join(draw(st.lists(st.text(alphabet, min_size=1, max_size=50), max_size=25)))
        words: tuple[Word, ...] = ()
        if draw(st.booleans()):
            moments = st.floats(max(0.0, start - 1), clock + 1)
            words = tuple(Word(word, draw(moments), draw(moments)) for word in text.split())
        segments.append(segment(index, start, clock, text, words))
    return Transcript(tuple(segments), clock)


@settings(max_examples=100, deadline=None)
@given(recordings(st.sampled_from("abcdefghij.,!?'é-")))
def test_every_word_once_and_in_order(source: Transcript) -> None:
    found = cues(source)
    assert_readable(found)
    expected = source.text.split()
    assert "".join(words_of(found)) == "".join(expected)
    if all(len(word) <= MAX_COLUMNS for word in expected):
        assert words_of(found) == expected


@settings(max_examples=100, deadline=None)
@given(
    recordings(
        st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\ufeff<>&")
        | st.sampled_from("今天。、「 ไก่\u0301")
    )
)
def test_any_text_is_a_valid_file(source: Transcript) -> None:
    found = cues(source)
    assert_readable(found)
    assert "".join(words_of(found)) == "".join(source.text.split())
    parsed = parse_srt(srt(source))
    assert [(item.start.ordinal, item.end.ordinal) for item in parsed] == [(cue.start, cue.end) for cue in found]
    assert len(webvtt.from_string(vtt(source)).captions) == len(found)


def test_the_work_grows_with_the_text_and_not_with_its_square() -> None:
    def calls(count: int) -> int:
        source = transcript(*((index * 10.0, index * 10.0 + 9.5, SENTENCE) for index in range(count)))
        profile = cProfile.Profile()
        profile.runcall(cues, source)
        return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]

    assert calls(200) < 6 * calls(40)
