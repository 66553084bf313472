"""Bodies of every format, held against the types of the openai SDK."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.audio import Transcription, TranscriptionVerbose

from gateway.answers.render import last_tokens, render, rendered, token_logprobs, usage
from gateway.answers.transcript import TextStream, Transcript, join_text
from gateway.files.form import RESPONSE_FORMATS
from shared.errors import BadRequest, ProtocolError
from shared.messages import Delta, SegmentDone, Word
from shared.scripts import separator


def segment(index: int, start: float, end: float, text: str, **extra: Any) -> SegmentDone:
    """A segment whose speech lies between two moments, seconds."""
    first, last = round(start * 16000), round(end * 16000)
    return SegmentDone(1, "r", index, first, last, last, text, **extra)


WORDS = (Word("Good", 0.5, 0.9), Word("morning.", 0.9, 1.4))
TWO = Transcript(
    (
        segment(
            0, 0.5, 1.5, "Good morning.", words=WORDS, language="en", avg_logprob=-0.25, logprobs=(("Good", -0.5),)
        ),
        segment(
            1, 2.0, 3.25, "How are you?", words=(Word("How", 2.0, 2.2), Word("are", 2.2, 2.2), Word("you?", 2.1, 3.0))
        ),
    ),
    duration=4.2004,
    language="en",
    word_times="exact",
)
EMPTY = Transcript((), duration=10.0)
SILENT = Transcript((segment(0, 1.0, 2.0, ""),), duration=10.0)


def body(transcript: Transcript, response_format: str, **options: Any) -> dict[str, Any]:
    raw, content_type = render(transcript, response_format, **options)
    assert content_type == "application/json"
    loaded: dict[str, Any] = json.loads(raw)
    return loaded


def test_json() -> None:
    plain = body(TWO, "json")
    assert plain == {
        "text": "Good morning. How are you?",
        "languages": [{"code": "en"}],
        "usage": {"type": "duration", "seconds": 5},
    }
    Transcription.model_validate(plain, strict=True)


def test_json_with_logprobs() -> None:
    plain = body(Transcript((segment(0, 0, 1, "é", logprobs=(("é", -0.5),)),), 1.0), "json", logprobs=True)
    assert plain["logprobs"] == [{"token": "é", "logprob": -0.5, "bytes": [0xC3, 0xA9]}]
    Transcription.model_validate(plain)


def test_logprobs_of_several_segments_spell_the_text() -> None:
    parts = (
        segment(0, 0, 1, "To the hotel.", logprobs=(("To", -0.5), (" the hotel.", -1.0))),
        segment(1, 1, 2, "A bed.", logprobs=(("A", -0.5), (" bed.", -1.0))),
        segment(2, 2, 3, ""),
        segment(3, 3, 4, "好。", logprobs=(("好", -0.5), ("。", -1.0))),
        segment(4, 4, 5, "的", logprobs=(("的", -0.5),)),
    )
    plain = body(Transcript(parts, 5.0), "json", logprobs=True)
    assert "".join(token["token"] for token in plain["logprobs"]) == plain["text"] == "To the hotel. A bed. 好。的"
    assert [token["token"] for token in token_logprobs(parts[1:2], "To the hotel.")] == [" A", " bed."]


@pytest.mark.parametrize(
    ("text", "spelled"),
    [
        (" hotel.", [" hotel", "."]),
        ("To the hotel.", ["To", " the", " hotel", "."]),
        ("tel.", []),
        ("", []),
        ("else", []),
    ],
)
def test_the_last_tokens_are_those_that_spell_what_is_sent_last(text: str, spelled: list[str]) -> None:
    tokens = [{"token": token, "logprob": -1.0} for token in ("To", " the", " hotel", ".")]
    assert [token["token"] for token in last_tokens(tokens, text)] == spelled


def test_text_ends_its_line() -> None:
    assert render(TWO, "text") == (b"Good morning. How are you?\n", "text/plain; charset=utf-8")


def test_verbose_json_by_default() -> None:
    verbose = body(TWO, "verbose_json", temperature=0.2)
    parsed = TranscriptionVerbose.model_validate(verbose)
    assert (verbose["task"], verbose["language"], verbose["duration"]) == ("transcribe", "english", 4.2)
    assert type(verbose["duration"]) is float
    assert parsed.words is None and "timing" not in verbose
    assert parsed.segments and [(part.id, part.seek, part.start, part.end) for part in parsed.segments] == [
        (0, 50, 0.5, 1.5),
        (1, 200, 2.0, 3.25),
    ]
    assert "".join(part.text for part in parsed.segments) == parsed.text
    first, second = verbose["segments"]
    assert (first["avg_logprob"], second["avg_logprob"]) == (-0.25, 0.0)
    assert (first["tokens"], first["temperature"], first["no_speech_prob"]) == ([], 0.2, 0.0)


def test_words_stand_at_top_level_and_never_overlap() -> None:
    verbose = body(TWO, "verbose_json", granularities=["word"])
    parsed = TranscriptionVerbose.model_validate(verbose)
    assert "segments" not in verbose and "timing" not in verbose
    assert parsed.words and [word.word for word in parsed.words] == ["Good", "morning.", "How", "are", "you?"]
    assert all(word.start < word.end for word in parsed.words)
    assert all(a.end <= b.start for a, b in zip(parsed.words, parsed.words[1:], strict=False))


def test_words_and_segments_together() -> None:
    assert {"words", "segments"} <= body(TWO, "verbose_json", granularities={"word", "segment"}).keys()


@pytest.mark.parametrize("kind", ["estimated", "none"])
def test_estimated_times_say_so(kind: str) -> None:
    words = WORDS if kind == "estimated" else ()
    transcript = Transcript((segment(0, 0.5, 1.5, "Good morning.", words=words),), 2.0, word_times=kind)
    verbose = body(transcript, "verbose_json", granularities=["word"])
    assert verbose["timing"] == "estimated"
    assert [word["word"] for word in verbose["words"]] == ["Good", "morning."]
    assert verbose["words"][0]["start"] >= 0.5 and verbose["words"][-1]["end"] <= 1.5
    TranscriptionVerbose.model_validate(verbose)


def test_compression_shows_repetition() -> None:
    looped = body(Transcript((segment(0, 0, 9, "I think. " * 50),), 9.0), "verbose_json")["segments"][0]
    normal = body(TWO, "verbose_json")["segments"][0]
    assert looped["compression_ratio"] > 2.4 > normal["compression_ratio"]


@pytest.mark.parametrize("transcript", [EMPTY, SILENT], ids=["no segments", "no text"])
def test_silence_is_a_valid_document_in_every_format(transcript: Transcript) -> None:
    assert render(transcript, "text")[0] == b""
    assert render(transcript, "srt")[0] == b""
    assert render(transcript, "vtt")[0] == b"WEBVTT\n\n"
    assert body(transcript, "json")["text"] == ""
    verbose = TranscriptionVerbose.model_validate(body(transcript, "verbose_json", granularities=["word", "segment"]))
    assert (verbose.text, verbose.segments, verbose.words, verbose.duration) == ("", [], [], 10.0)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(BadRequest):
        render(TWO, "xml")


async def test_a_long_transcript_is_made_elsewhere_and_is_the_same() -> None:
    long = Transcript(tuple(segment(i, i * 10, i * 10 + 9, f"Sentence number {i}.") for i in range(200)), 2000.0)
    for name in RESPONSE_FORMATS:
        assert await rendered(long, name) == render(long, name)
        assert await rendered(TWO, name) == render(TWO, name)


@pytest.mark.parametrize(("duration", "billed"), [(0.0, 0), (0.1, 1), (3.0, 3), (3.0000001, 3), (3.01, 4)])
def test_usage_is_whole_seconds(duration: float, billed: int) -> None:
    assert usage(Transcript((), duration)) == {"type": "duration", "seconds": billed}


# ---------------------------------------------------------------- one text out of many


@pytest.mark.parametrize(
    ("before", "after", "between"),
    [
        ("Hello.", "World", " "),
        ("你好。", "世界", ""),
        ("ラーメン", "です", ""),
        ("สวัสดี", "ครับ", ""),
        ("你好", "Hello", " "),
        ("안녕", "세상", " "),
        ("Hello ", "World", ""),
        ("", "World", ""),
        ("Hello", "", ""),
    ],
)
def test_what_stands_between_two_texts(before: str, after: str, between: str) -> None:
    assert separator(before, after) == between


TEXTS = st.lists(st.text(alphabet="ab. 你。ไ\n", max_size=8), max_size=8)


@given(TEXTS, st.data())
def test_deltas_concatenated_are_the_text(texts: list[str], data: st.DataObject) -> None:
    """However the segments were cut into deltas, with and without deltas."""
    stream = TextStream()
    sent = []
    for index, text in enumerate(texts):
        position = 0
        for cut in sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=3))):
            sent.append(stream.delta(Delta(1, "r", index, text[position:cut])))
            position = cut
        sent.append(stream.segment(segment(index, index, index + 1, text)))
    whole = join_text(segment(index, 0, 1, text) for index, text in enumerate(texts))
    assert "".join(sent) == stream.text == whole
    words = "".join(texts).split() if len(texts) < 2 else None
    assert words is None or whole.split() == words


def test_what_went_out_cannot_be_taken_back() -> None:
    stream = TextStream()
    assert stream.delta(Delta(1, "r", 0, "the cat")) == "the cat"
    with pytest.raises(ProtocolError):
        stream.segment(segment(0, 0, 1, "the dog"))


@pytest.mark.parametrize("samples", range(223_000, 223_400, 8))
def test_no_word_ends_after_its_recording(samples: int) -> None:
    """Half milliseconds are rounded one way."""
    end = samples / 16_000
    found = segment(0, 0.0, end, "Good morning.", words=(Word("Good morning.", 0.2, end),))
    verbose = body(Transcript((found,), end, word_times="exact"), "verbose_json", granularities=["word", "segment"])
    assert verbose["words"][-1]["end"] <= verbose["duration"]
    assert verbose["segments"][-1]["end"] <= verbose["duration"]
