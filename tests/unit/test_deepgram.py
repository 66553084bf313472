"""Deepgram's dialect: its query, its results, its ways to end, and that no order of anything upsets it."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from deepgram.listen.v1.types import (
    ListenV1ConfigureSuccess,
    ListenV1Error,
    ListenV1Metadata,
    ListenV1Results,
    ListenV1SpeechStarted,
    ListenV1UtteranceEnd,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.datastructures import QueryParams

from gateway.streams import deepgram, deepgram_query
from gateway.streams.deepgram import PATIENCE, Deepgram
from gateway.streams.dialect import Audio, EndUtterance, Finish, Hang, Open, Update
from shared.errors import BadRequest, ModelNotFound, TooManyStreams, Unsupported, UnsupportedAudio, WorkerCrashed
from shared.streams import (
    Endpointing,
    Partial,
    SpeechStarted,
    StreamDone,
    StreamProgress,
    UtteranceEnded,
    UtteranceFinal,
)
from shared.wire import RawAudio, Word
from tests.unit.dialects import Line, answered, check_any_order, messages, steps

CONTROLS: list[dict[str, Any]] = [
    {"type": "KeepAlive"},
    {"type": "Finalize"},
    {"type": "CloseStream"},
    {"type": "Configure", "keyterms": ["Dashwood"]},
    {"type": "Configure", "keyterms": 3},
    {"type": "Configure", "features": {"numerals": True}},
    {"type": "Speak"},
]
PCM = "encoding=linear16&sample_rate=16000"
SDK: dict[str, Any] = {
    "Results": ListenV1Results,
    "Metadata": ListenV1Metadata,
    "SpeechStarted": ListenV1SpeechStarted,
    "UtteranceEnd": ListenV1UtteranceEnd,
    "Error": ListenV1Error,
    "ConfigureSuccess": ListenV1ConfigureSuccess,
}


def line(query: str = PCM) -> Line:
    request = deepgram_query.parse(QueryParams(query))
    return Line(Deepgram(request, "some-model", "req_1", "2026-01-01T00:00:00+00:00"))


def final(**changes: Any) -> UtteranceFinal:
    values: dict[str, Any] = {
        "generation": 1,
        "request_id": "s",
        "utterance": 0,
        "start_sample": 8_000,
        "end_sample": 24_000,
        "through_sample": 24_000,
        "text": "Good morning.",
        "words": (Word("Good", 0.6, 0.9), Word("morning.", 0.9, 1.45)),
    }
    return UtteranceFinal(**{**values, **changes})


def heard(seconds: float) -> StreamProgress:
    """So much 16-bit audio at 16 kHz has been listened to."""
    return StreamProgress(1, "s", round(seconds * 32_000), round(seconds * 16_000))


# ---------------------------------------------------------------- the query


def test_what_livekit_asks_for() -> None:
    request = deepgram_query.parse(
        QueryParams(
            "model=nova-3&punctuate=true&smart_format=false&no_delay=true&interim_results=true&encoding=linear16"
            "&vad_events=true&sample_rate=16000&channels=1&endpointing=25&filler_words=true&profanity_filter=false"
            "&numerals=false&mip_opt_out=false&language=en-US&keyterm=Dashwood&keyterm=Norland%20Park"
        )
    )
    assert request.options.audio == RawAudio("s16le", 16_000, 1)
    assert request.options.language == "en"
    assert request.options.keywords == ("Dashwood", "Norland Park")
    assert (request.interim, request.vad_events, request.utterance_end_ms) == (True, True, 0)
    assert request.options.endpointing.silence_ms == deepgram_query.MIN_SILENCE_MS


def test_what_pipecat_asks_for() -> None:
    request = deepgram_query.parse(
        QueryParams(
            "model=nova-3-general&language=en&detect_entities=false&diarize=false&dictation=false&interim_results=true"
            "&numerals=false&punctuate=true&smart_format=false&encoding=linear16&channels=1&multichannel=false"
            "&sample_rate=16000"
        )
    )
    assert request.options.audio == RawAudio("s16le", 16_000, 1)


@pytest.mark.parametrize(
    ("query", "audio"),
    [
        ("encoding=linear16&sample_rate=44100&channels=2", RawAudio("s16le", 44_100, 2)),
        ("encoding=linear32&sample_rate=48000", RawAudio("f32le", 48_000, 1)),
        ("encoding=mulaw", RawAudio("mulaw", 8_000, 1)),
        ("encoding=alaw&sample_rate=16000", RawAudio("alaw", 16_000, 1)),
        ("", RawAudio("container", 0, 0)),
        ("encoding=opus&sample_rate=48000", RawAudio("container", 0, 0)),
        ("encoding=ogg-opus", RawAudio("container", 0, 0)),
    ],
)
def test_encodings(query: str, audio: RawAudio) -> None:
    assert deepgram_query.parse(QueryParams(query)).options.audio == audio


@pytest.mark.parametrize(
    ("asked", "rules"),
    [
        ("", Endpointing(silence_ms=300)),
        ("endpointing=10", Endpointing(silence_ms=300)),
        ("endpointing=800", Endpointing(silence_ms=800)),
        ("endpointing=true", Endpointing(silence_ms=300)),
        ("endpointing=false", Endpointing(automatic=False)),
        ("endpointing=0", Endpointing(automatic=False)),
    ],
)
def test_endpointing(asked: str, rules: Endpointing) -> None:
    assert deepgram_query.parse(QueryParams(f"{PCM}&{asked}")).options.endpointing == rules


@pytest.mark.parametrize(
    ("query", "kind", "param"),
    [
        ("encoding=linear16", BadRequest, "sample_rate"),
        ("encoding=mp4a&sample_rate=8000", Unsupported, "encoding"),
        ("encoding=g729&sample_rate=16000", BadRequest, "sample_rate"),
        ("encoding=g729&channels=2", BadRequest, "channels"),
        ("encoding=mulaw&sample_rate=0", BadRequest, "sample_rate"),
        (f"{PCM}&utterance_end_ms=999", BadRequest, "utterance_end_ms"),
        (f"{PCM}&endpointing=soon", BadRequest, "endpointing"),
        (f"{PCM}&language=klingon", BadRequest, "language"),
        (f"{PCM}&multichannel=true&channels=2", Unsupported, "multichannel"),
        (f"{PCM}&diarize=true", Unsupported, "diarize"),
        (f"{PCM}&diarize_model=latest", Unsupported, "diarize_model"),
        (f"{PCM}&redact=pci", Unsupported, "redact"),
        (f"{PCM}&callback=https://example.org", Unsupported, "callback"),
        (PCM + "".join(f"&keyterm={n}" for n in range(1001)), BadRequest, "keyterm"),
    ],
)
def test_what_cannot_be_done_is_refused(query: str, kind: type[BadRequest], param: str) -> None:
    with pytest.raises(kind) as caught:
        deepgram_query.parse(QueryParams(query))
    assert caught.value.param == param


@pytest.mark.parametrize("asked", ["encoding=g729", "encoding=G729&sample_rate=8000&channels=1"])
def test_g729_has_one_rate(asked: str) -> None:
    assert deepgram_query.parse(QueryParams(asked)).options.audio == RawAudio("g729", 8_000, 1)


def test_one_channel_may_be_called_many() -> None:
    assert deepgram_query.parse(QueryParams(f"{PCM}&multichannel=true&channels=1")).options.audio.channels == 1


@pytest.mark.parametrize(
    "model", ["", "nova-3", "nova-2-phonecall", "whisper-large", "some-model", "whisper-1", "base"]
)
def test_their_models_mean_ours(model: str) -> None:
    query = QueryParams(f"{PCM}&model={model}")
    assert deepgram.dialect(query, ("token", "secret"), "some-model", "r", "now").subprotocol == "token"


def test_other_models_are_not_served() -> None:
    with pytest.raises(ModelNotFound):
        deepgram.dialect(QueryParams(f"{PCM}&model=novel"), (), "some-model", "r", "now")


# ---------------------------------------------------------------- results


def test_interims_replace_each_other_until_the_final() -> None:
    talk = line(f"{PCM}&interim_results=true&vad_events=true")
    assert isinstance(talk.effects[0], Open)
    for event in (
        SpeechStarted(1, "s", 0, 8_000),
        Partial(1, "s", 0, 16_000, "Good"),
        Partial(1, "s", 0, 20_000, "Good mourning"),
        final(),
    ):
        talk.act(("event", event))
    assert talk.said[0] == {"type": "SpeechStarted", "channel": [0, 1], "timestamp": 0.5}
    results = talk.of("Results")
    assert [(r["start"], r["is_final"], r["speech_final"]) for r in results] == [
        (0.5, False, False), (0.5, False, False), (0.5, True, True),
    ]  # fmt: skip
    assert [r["duration"] for r in results] == [0.5, 0.75, 1.0]
    last = results[-1]["channel"]["alternatives"][0]
    assert last["transcript"] == "Good morning."
    assert last["words"][1] == {
        "word": "morning", "start": 0.9, "end": 1.45, "confidence": 1.0, "punctuated_word": "morning.",
    }  # fmt: skip
    assert not results[-1]["from_finalize"]


@pytest.mark.parametrize(
    ("cause", "goes_on", "endpoint"), [("length", True, False), ("length", False, True), ("silence", True, True)]
)
def test_a_cut_in_speech_is_no_endpoint(cause: str, goes_on: bool, endpoint: bool) -> None:
    """Agents answer to ``speech_final``: not somebody who is still talking."""
    talk = line()
    talk.act(("event", SpeechStarted(1, "s", 0, 8_000)))
    if goes_on:
        talk.act(("event", SpeechStarted(1, "s", 1, 24_000)))
    talk.act(("event", final(cause=cause)))
    assert [(r["is_final"], r["speech_final"]) for r in talk.of("Results")] == [(True, endpoint)]
    talk.act(("event", final(utterance=1, start_sample=24_000, end_sample=30_000)))
    assert talk.of("Results")[-1]["speech_final"]


def test_only_finals_and_no_speech_started_unless_asked_for() -> None:
    talk = line()
    for event in (SpeechStarted(1, "s", 0, 8_000), Partial(1, "s", 0, 16_000, "Good"), final()):
        talk.act(("event", event))
    assert [message["type"] for message in talk.said] == ["Results"]


def test_confidence_is_what_the_engine_says_and_0_for_no_text() -> None:
    talk = line()
    talk.act(("event", final(avg_logprob=-0.25)))
    talk.act(("event", final(text="", words=())))
    confidences = [r["channel"]["alternatives"][0]["confidence"] for r in talk.of("Results")]
    assert confidences == [0.7788, 0.0]


@pytest.mark.parametrize(("language", "told"), [("multi", ["fr"]), ("", ["fr"]), ("fr", None)])
def test_the_language_is_told_where_it_was_open(language: str, told: list[str] | None) -> None:
    talk = line(f"{PCM}&language={language}")
    talk.act(("event", final(language="fr")))
    assert talk.of("Results")[0]["channel"]["alternatives"][0].get("languages") == told


def test_words_that_are_only_signs_stay() -> None:
    talk = line()
    talk.act(("event", final(text="…", words=(Word("…", 1.0, 1.1),))))
    assert talk.of("Results")[0]["channel"]["alternatives"][0]["words"][0]["word"] == "…"


# ---------------------------------------------------------------- finalize


def test_a_final_that_was_asked_for_says_so_once() -> None:
    talk = line()
    assert talk.act(("receive", '{"type":"Finalize"}')) == [EndUtterance()]
    talk.act(("event", final(cause="request")))
    talk.act(("event", UtteranceEnded(1, "s", 1, 0)))
    assert [r["from_finalize"] for r in talk.of("Results")] == [True]


def test_a_finalize_with_nothing_open_is_answered_by_an_empty_result() -> None:
    talk = line()
    talk.act(("event", heard(2.5)))
    talk.act(("receive", '{"type":"Finalize"}'))
    talk.act(("event", final(cause="silence")))
    talk.act(("event", UtteranceEnded(1, "s", 1, -1)))
    first, second = talk.of("Results")
    assert not first["from_finalize"]
    assert second["from_finalize"]
    assert second["channel"]["alternatives"][0]["transcript"] == ""
    assert second["start"] == 2.5


@settings(deadline=None)
@given(st.lists(st.sampled_from([*map(str, range(3)), "finalize"]), max_size=30))
def test_every_finalize_is_answered_exactly_once(happenings: list[str]) -> None:
    """Whether or not an utterance was open when it came."""
    talk = line()
    asked = 0
    for number, happening in enumerate(happenings):
        if happening == "finalize":
            asked += 1
            talk.act(("receive", '{"type":"Finalize"}'))
            ended = -1
            if number and happenings[number - 1] == "0":  # an utterance was open
                ended = number
                talk.act(("event", final(utterance=number, cause="request")))
            talk.act(("event", UtteranceEnded(1, "s", asked, ended)))
        else:
            talk.act(("event", SpeechStarted(1, "s", number, 0)))
    assert sum(r["from_finalize"] for r in talk.of("Results")) == asked


# ---------------------------------------------------------------- end of an utterance, in the time of the audio


def test_utterance_end_comes_after_so_much_audio_without_speech() -> None:
    talk = line(f"{PCM}&interim_results=true&utterance_end_ms=1000")
    talk.act(("event", SpeechStarted(1, "s", 0, 8_000)))
    talk.act(("event", heard(3.0)))  # far ahead, but the utterance is still open
    assert talk.of("UtteranceEnd") == []
    talk = line(f"{PCM}&interim_results=true&utterance_end_ms=1000")
    talk.act(("event", SpeechStarted(1, "s", 0, 8_000)))
    talk.act(("event", heard(2.0)))
    talk.act(("event", final()))
    talk.act(("event", heard(2.4)))
    assert talk.of("UtteranceEnd") == []
    talk.act(("event", heard(2.5)))
    talk.act(("event", heard(9.0)))
    assert talk.of("UtteranceEnd") == [{"type": "UtteranceEnd", "channel": [0, 1], "last_word_end": 1.45}]


def test_utterance_end_of_a_gated_microphone_waits_for_no_audio() -> None:
    talk = line(f"{PCM}&utterance_end_ms=1000")
    talk.act(("event", SpeechStarted(1, "s", 0, 8_000)))
    talk.act(("event", heard(1.5)))
    talk.act(("event", final(cause="stall")))
    assert talk.of("UtteranceEnd") == [{"type": "UtteranceEnd", "channel": [0, 1], "last_word_end": 1.45}]
    talk = line()
    talk.act(("event", final(cause="stall")))
    assert talk.of("UtteranceEnd") == [], "nobody asked for it"


def test_no_utterance_end_while_somebody_speaks_again() -> None:
    talk = line(f"{PCM}&utterance_end_ms=1000")
    talk.act(("event", final()))
    talk.act(("event", SpeechStarted(1, "s", 1, 30_000)))
    talk.act(("event", heard(9.0)))
    assert talk.of("UtteranceEnd") == []
    talk.act(("event", final(utterance=1, words=(Word("now", 8.0, 8.5),))))
    talk.act(("event", heard(9.5)))
    assert talk.of("UtteranceEnd") == [{"type": "UtteranceEnd", "channel": [0, 1], "last_word_end": 8.5}]


def test_no_utterance_end_for_an_utterance_without_words() -> None:
    talk = line(f"{PCM}&utterance_end_ms=1000")
    talk.act(("event", final(text="", words=())))
    talk.act(("event", heard(9.0)))
    assert talk.of("UtteranceEnd") == []


def test_in_a_container_time_is_what_is_still_needed() -> None:
    talk = line("utterance_end_ms=1000")
    talk.act(("event", final()))
    talk.act(("event", StreamProgress(1, "s", 10_000_000, 16_000)))
    assert talk.of("UtteranceEnd") == []
    talk.act(("event", StreamProgress(1, "s", 10_000_000, 40_000)))
    assert len(talk.of("UtteranceEnd")) == 1


# ---------------------------------------------------------------- ends


def test_close_stream_flushes_and_tells_what_was_heard() -> None:
    talk = line()
    assert talk.act(("receive", b"abcd")) == [Audio(b"abcd")]
    assert talk.act(("receive", '{"type":"CloseStream"}')) == [Finish()]
    assert talk.act(("receive", b"late")) == []
    talk.act(("event", final()))
    talk.act(("event", StreamDone(1, "s", 40_000)))
    assert [message["type"] for message in talk.said] == ["Results", "Metadata"]
    metadata = talk.said[-1]
    assert metadata["sha256"] == hashlib.sha256(b"abcd").hexdigest()
    assert (metadata["duration"], metadata["request_id"], metadata["channels"]) == (2.5, "req_1", 1)
    assert talk.closed == Hang(1000, "")


def test_an_empty_message_is_their_old_close() -> None:
    talk = line()
    assert talk.act(("receive", b"")) == [Finish()]


def test_silence_of_the_line_ends_it_after_what_was_said() -> None:
    talk = line()
    assert talk.act(("silent", None)) == [Finish()]
    talk.act(("event", final()))
    talk.act(("event", StreamDone(1, "s", 40_000)))
    assert [message["type"] for message in talk.said] == ["Results", "Metadata"]
    assert talk.closed is not None
    assert talk.closed.code == 1011
    assert talk.closed.reason.startswith("NET-0001")


@pytest.mark.parametrize("closing", [("receive", '{"type": "CloseStream"}'), ("silent", None)])
def test_who_has_said_all_may_be_silent_while_the_worker_starts(closing: tuple[str, Any]) -> None:
    talk = line()
    talk.act(closing)
    for _ in range(PATIENCE - 1):
        talk.act(("silent", None))
    assert talk.closed is None
    talk.act(("event", final()))
    talk.act(("event", StreamDone(1, "s", 40_000)))
    assert [message["type"] for message in talk.said] == ["Results", "Metadata"]


def test_results_that_never_come_are_not_waited_for_for_ever() -> None:
    talk = line()
    talk.act(("receive", '{"type": "CloseStream"}'))
    for _ in range(PATIENCE):
        talk.act(("silent", None))
    assert [message["type"] for message in talk.said] == ["Error"]
    assert talk.closed is not None
    assert (talk.closed.code, talk.closed.reason) == (1011, "worker_unavailable")


def test_keep_alive_is_taken_in_silence() -> None:
    talk = line()
    assert talk.act(("receive", '{"type":"KeepAlive"}')) == []
    assert Deepgram.read_timeout == 10.0


def test_other_key_terms_from_here_on() -> None:
    talk = line()
    update, _said = talk.act(("receive", '{"type":"Configure","keyterms":["Norland "," "]}'))
    assert isinstance(update, Update)
    assert update.options.keywords == ("Norland",)
    assert talk.said == [{"type": "ConfigureSuccess", "request_id": "req_1", "keyterms": ["Norland"]}]
    talk.act(("receive", '{"type":"Configure","keyterms":"Norland"}'))
    assert talk.said[-1]["type"] == "ConfigureFailure"


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (UnsupportedAudio("not audio"), 1008, "DATA-0000"),
        (BadRequest("no"), 1008, "invalid_value"),
        (TooManyStreams("full"), 1013, "too_many_streams"),
        (WorkerCrashed("twice"), 1011, "worker_crashed"),
    ],
)
def test_a_failure_is_said_and_closes(error: Any, code: int, reason: str) -> None:
    talk = line()
    talk.act(("failed", error))
    assert talk.said[-1]["type"] == "Error"
    assert talk.said[-1]["variant"] == error.code
    assert talk.closed is not None
    assert talk.closed.code == code
    assert talk.closed.reason.startswith(reason)


# ---------------------------------------------------------------- any order of anything


@settings(deadline=None)
@given(st.sampled_from([PCM, f"{PCM}&interim_results=true&vad_events=true&utterance_end_ms=1000", ""]), steps(CONTROLS))
def test_any_order_ends_in_messages_of_their_sdk(query: str, sequence: list[tuple[str, Any]]) -> None:
    talk = check_any_order(line(query).dialect, sequence)
    for message in talk.said:
        if message["type"] in SDK:
            SDK[message["type"]].model_validate(message)
        else:
            assert message["type"] == "ConfigureFailure"
        assert message.get("duration", 0) >= 0


@settings(deadline=None)
@given(st.lists(messages(CONTROLS), max_size=20))
def test_text_is_answered_but_for_keep_alive(sequence: list[str | bytes]) -> None:
    talk = line()
    for message in sequence:
        before = len(talk.said)
        still_open = talk.closed is None
        answered(talk, [("receive", message)])
        if isinstance(message, str) and still_open and "KeepAlive" not in message:
            assert len(talk.said) == before + 1
