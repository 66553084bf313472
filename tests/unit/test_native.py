"""The native dialect: its query, its words, and that no order of anything upsets it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.streams import native
from gateway.streams.dialect import Audio, Clear, EndUtterance, Finish, Hang, Open
from gateway.streams.native import Native
from shared.errors import AudioOverrun, BadRequest, ModelNotFound, TooManyStreams, WorkerCrashed
from shared.streams import (
    AudioCleared,
    Endpointing,
    Partial,
    SpeechStarted,
    SpeechStopped,
    StreamDone,
    StreamProgress,
    UtteranceDelta,
    UtteranceEnded,
    UtteranceFinal,
    UtteranceTimings,
)
from shared.wire import RawAudio, Word
from tests.unit.dialects import Line, answered, check_any_order, messages, steps

CONTROLS: list[dict[str, Any]] = [{"type": kind} for kind in ("finalize", "clear", "ping", "close", "restart")]
NOW = 5_000_000_000


def line(**fields: str) -> Line:
    return Line(Native(native.options(fields), "some-model", now=lambda: NOW))


def final(**changes: Any) -> UtteranceFinal:
    values: dict[str, Any] = {
        "generation": 1,
        "request_id": "s",
        "utterance": 0,
        "start_sample": 8_000,
        "end_sample": 24_000,
        "through_sample": 24_000,
        "text": "Good morning.",
    }
    return UtteranceFinal(**{**values, **changes})


# ---------------------------------------------------------------- the query


def test_defaults_are_speech_at_16_khz() -> None:
    options = native.options({})
    assert options.audio == RawAudio("s16le", 16_000, 1)
    assert options.endpointing == Endpointing()
    assert options.partials
    assert not options.words


def test_everything_can_be_asked_for() -> None:
    options = native.options(
        {
            "sample_rate": "44100",
            "encoding": "F32LE",
            "channels": "2",
            "language": "de-DE",
            "prompt": "Dashwood",
            "interim": "off",
            "words": "1",
            "silence_ms": "350",
            "prefix_ms": "600",
            "threshold": "0.4",
            "endpointing": "manual",
            "unknown": "ignored",
        }
    )
    assert options.audio == RawAudio("f32le", 44_100, 2)
    assert (options.language, options.prompt, options.partials, options.words) == ("de", "Dashwood", False, True)
    assert options.endpointing == Endpointing(automatic=False, threshold=0.4, prefix_ms=600, silence_ms=350)


@pytest.mark.parametrize(("encoding", "rate"), [("mulaw", 8000), ("alaw", 8000), ("s16le", 16000), ("container", 0)])
def test_the_rate_left_out_is_the_usual_one(encoding: str, rate: int) -> None:
    assert native.options({"encoding": encoding}).audio.sample_rate == rate


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sample_rate", "0"),
        ("sample_rate", "16000.5"),
        ("sample_rate", "fast"),
        ("sample_rate", "nan"),
        ("sample_rate", "1e9"),
        ("encoding", "mp3"),
        ("channels", "0"),
        ("language", "klingon"),
        ("interim", "maybe"),
        ("words", "2"),
        ("silence_ms", "-1"),
        ("silence_ms", "inf"),
        ("prefix_ms", "99999"),
        ("threshold", "0"),
        ("threshold", "1"),
        ("endpointing", "sometimes"),
        ("prompt", "x" * 10_001),
    ],
)
def test_a_bad_value_names_its_field(field: str, value: str) -> None:
    with pytest.raises(BadRequest) as caught:
        native.options({field: value})
    assert caught.value.param == field


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["sample_rate", "encoding", "threshold", "silence_ms", "words"]), st.text(max_size=8)
    )
)
def test_any_query_is_taken_or_refused(fields: dict[str, str]) -> None:
    try:
        options = native.options(fields)
    except BadRequest as error:
        assert error.param in fields
    else:
        assert options.audio.encoding in native.ENCODINGS


def test_the_model_is_checked_and_the_subprotocol_answered() -> None:
    with pytest.raises(ModelNotFound):
        native.dialect({"model": "gpt-9"}, (), "some-model")
    assert native.dialect({"model": "whisper-1"}, (), "some-model").subprotocol is None
    offered = ("napscribe", "openai-insecure-api-key.secret")
    assert native.dialect({}, offered, "some-model").subprotocol == "napscribe"


# ---------------------------------------------------------------- what is said


def test_ready_comes_first_with_model_and_settings() -> None:
    talk = line(sample_rate="8000", language="en")
    assert isinstance(talk.effects[0], Open)
    assert talk.said[0]["type"] == "ready"
    assert talk.said[0]["model"] == "some-model"
    assert (talk.said[0]["settings"]["sample_rate"], talk.said[0]["settings"]["language"]) == (8000, "en")


def test_an_utterance_in_seconds() -> None:
    talk = line()
    for event in (
        SpeechStarted(1, "s", 0, 8_000),
        Partial(1, "s", 0, 16_000, "Good"),
        UtteranceDelta(1, "s", 0, 16_000, "Good"),
        SpeechStopped(1, "s", 0, 24_000),
        UtteranceDelta(1, "s", 0, 24_000, " morning."),
        final(language="en", cause="silence", revised=0.25, timings=UtteranceTimings(speech_end_ns=4_900_000_000)),
    ):
        talk.act(("event", event))
    assert [message["type"] for message in talk.said[1:]] == [
        "speech_started", "partial", "delta", "speech_stopped", "delta", "final",
    ]  # fmt: skip
    assert talk.of("speech_started")[0]["start"] == 0.5
    assert talk.of("speech_stopped")[0]["end"] == 1.5
    last = talk.of("final")[0]
    assert (last["text"], last["start"], last["end"]) == ("Good morning.", 0.5, 1.5)
    assert (last["language"], last["cause"], last["revised"]) == ("en", "silence", 0.25)
    assert last["timings"]["speech_end_to_final"] == 100.0
    assert "words" not in last
    assert "".join(delta["text"] for delta in talk.of("delta")) == last["text"]


def test_a_final_nobody_saw_the_speech_of_has_no_latency() -> None:
    talk = line()
    talk.act(("event", final()))
    assert talk.of("final")[0]["timings"]["speech_end_to_final"] is None


def test_words_where_they_were_asked_for() -> None:
    talk = line(words="true")
    talk.act(("event", final(words=(Word("Good", 0.5, 0.81234), Word("morning.", 0.9, 1.5)))))
    assert talk.of("final")[0]["words"] == [
        {"word": "Good", "start": 0.5, "end": 0.812},
        {"word": "morning.", "start": 0.9, "end": 1.5},
    ]


def test_no_partials_where_they_were_not() -> None:
    talk = line(interim="false")
    talk.act(("event", Partial(1, "s", 0, 16_000, "Good")))
    assert talk.of("partial") == []


def test_progress_is_not_the_clients_business() -> None:
    talk = line()
    assert talk.act(("event", StreamProgress(1, "s", 100, 100))) == []


# ---------------------------------------------------------------- what is asked


def test_controls_become_commands_and_their_answers_events() -> None:
    talk = line()
    assert talk.act(("receive", '{"type":"finalize"}')) == [EndUtterance()]
    assert talk.act(("receive", '{"type":"clear"}')) == [Clear()]
    assert talk.act(("receive", b"\0\0")) == [Audio(b"\0\0")]
    talk.act(("receive", '{"type":"ping"}'))
    talk.act(("event", UtteranceEnded(1, "s", 1, 3)))
    talk.act(("event", UtteranceEnded(1, "s", 2, -1)))
    talk.act(("event", AudioCleared(1, "s", -1, 0)))
    assert talk.said[1:] == [
        {"type": "pong"},
        {"type": "finalized", "utterance": 3},
        {"type": "finalized", "utterance": None},
        {"type": "cleared", "utterance": None},
    ]


def test_close_ends_with_done_and_a_clean_close() -> None:
    talk = line()
    assert talk.act(("receive", '{"type":"close"}')) == [Finish()]
    assert talk.act(("receive", b"late")) == []
    talk.act(("event", final()))
    talk.act(("event", StreamDone(1, "s", 32_000)))
    assert [message["type"] for message in talk.said[1:]] == ["final", "done"]
    assert talk.said[-1]["duration"] == 2.0
    assert talk.closed == Hang(1000, "")


@pytest.mark.parametrize(
    "text",
    ["", "hello", "{", "[1]", "3", '{"type": 3}', '{"kind": "close"}', "[" * 3000, '{"type":"ping"}' + " " * 5000],
)
def test_rubbish_is_a_typed_error_and_nothing_more(text: str) -> None:
    talk = line()
    talk.act(("receive", text))
    [error] = talk.of("error")
    assert error["code"] == "invalid_value"
    assert error["message"]
    assert talk.closed is None


def test_a_control_after_close_is_a_typed_error() -> None:
    talk = line()
    talk.act(("receive", '{"type":"close"}'))
    talk.act(("receive", '{"type":"finalize"}'))
    assert talk.of("error")[0]["param"] == "type"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (AudioOverrun("too fast", hint="slower"), 1008),
        (TooManyStreams("full"), 1013),
        (WorkerCrashed("twice"), 1011),
    ],
)
def test_a_failure_is_said_and_closes(error: Any, code: int) -> None:
    talk = line()
    talk.act(("failed", error))
    assert talk.said[-1] == {
        "type": "error", "code": error.code, "message": error.message, "hint": error.hint, "param": None,
    }  # fmt: skip
    assert talk.closed == Hang(code, error.code)


def test_an_hour_of_silence_closes() -> None:
    talk = line()
    talk.act(("silent", None))
    assert talk.closed == Hang(1001, "idle_timeout")


# ---------------------------------------------------------------- any order of anything


@settings(deadline=None)
@given(steps(CONTROLS))
def test_any_order_ends_in_typed_answers(sequence: list[tuple[str, Any]]) -> None:
    talk = check_any_order(Native(native.options({"words": "1"}), "some-model"), sequence)
    assert talk.said[0]["type"] == "ready"


@settings(deadline=None)
@given(st.lists(messages(CONTROLS), max_size=20))
def test_every_text_message_is_answered(sequence: list[str | bytes]) -> None:
    """By an event of its own, or by the answer of the stream to the command that it became."""
    talk = line()
    asked = 0
    for message in sequence:
        before = len(talk.said)
        still_open = talk.closed is None
        answered(talk, [("receive", message)])
        if isinstance(message, str) and still_open:
            asked += 1
            assert len(talk.said) == before + 1
    assert len(talk.said) == 1 + asked


@settings(deadline=None)
@given(st.text(max_size=60))
def test_text_survives_the_way_to_the_client(text: str) -> None:
    talk = line()
    talk.act(("event", final(text=text)))
    assert json.loads(json.dumps(talk.of("final")[0]["text"])) == text
