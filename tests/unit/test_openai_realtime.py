"""The OpenAI Realtime dialect without socket or worker: merging, order of events, commits, secrets."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.streams.client_secrets import ClientSecrets
from gateway.streams.dialect import Audio, Clear, Effect, EndUtterance, Hang, Open, Say, Update
from gateway.streams.openai_realtime import OpenAIRealtime, dialect
from gateway.streams.openai_session import LOGPROBS, Session
from shared.errors import BadRequest, EngineFailed, ModelNotFound, NapscribeError, TooManyStreams
from shared.messages import RawAudio
from shared.streams import (
    AudioCleared,
    Endpointing,
    Partial,
    SpeechStarted,
    SpeechStopped,
    StreamEvent,
    StreamOptions,
    UtteranceDelta,
    UtteranceEnded,
    UtteranceFinal,
)

MODEL = "moonshine-tiny-en"
COMPLETED = "conversation.item.input_audio_transcription.completed"
DELTA = "conversation.item.input_audio_transcription.delta"
FAILED = "conversation.item.input_audio_transcription.failed"


class Client:
    """Both sides of a dialect: what the client says goes in, what it is told and what is done for it comes out."""

    def __init__(self, door: OpenAIRealtime | None = None, **kind: Any) -> None:
        self.door = door or OpenAIRealtime(Session(MODEL), **kind)
        self.heard: list[dict[str, Any]] = []
        self.done: list[Effect] = []
        self._take(self.door.begin())

    def _take(self, effects: Sequence[Effect]) -> list[dict[str, Any]]:
        news = [json.loads(effect.text) for effect in effects if isinstance(effect, Say)]
        self.heard += news
        self.done += [effect for effect in effects if not isinstance(effect, Say)]
        return news

    def send(self, kind: str, **fields: Any) -> list[dict[str, Any]]:
        return self._take(self.door.receive(json.dumps({"type": kind, **fields})))

    def raw(self, message: str | bytes) -> list[dict[str, Any]]:
        return self._take(self.door.receive(message))

    def append(self, data: bytes) -> list[dict[str, Any]]:
        return self.send("input_audio_buffer.append", audio=base64.b64encode(data).decode())

    def commit(self) -> list[dict[str, Any]]:
        return self.send("input_audio_buffer.commit")

    def update(self, **audio_input: Any) -> list[dict[str, Any]]:
        return self.send("session.update", session={"type": "transcription", "audio": {"input": audio_input}})

    def event(self, event: StreamEvent) -> list[dict[str, Any]]:
        return self._take(self.door.event(event, 0))

    def fail(self, error: NapscribeError) -> list[dict[str, Any]]:
        return self._take(self.door.failed(error, 0))

    @property
    def options(self) -> StreamOptions:
        """Of the stream, as last opened or updated."""
        return next(effect.options for effect in reversed(self.done) if isinstance(effect, Open | Update))


def final(number: int, text: str, start: int = 0, end: int = 16_000, **fields: Any) -> UtteranceFinal:
    return UtteranceFinal(1, "s", number, start, end, end, text, **fields)


def kinds(messages: Sequence[dict[str, Any]]) -> list[str]:
    return [message["type"].removeprefix("conversation.item.input_audio_transcription.") for message in messages]


def manual() -> Client:
    client = Client()
    client.update(turn_detection=None)
    return client


# ---------------------------------------------------------------- greeting and handshake


def greeting(query: dict[str, str], headers: dict[str, str], *subprotocols: str) -> str:
    kind: str = Client(dialect(query, headers, subprotocols, MODEL)).heard[0]["type"]
    return kind


def test_greets_first_as_the_client_expects_it() -> None:
    beta = {"openai-beta": "realtime=v1"}
    assert greeting({}, {}) == "session.created"
    assert greeting({"intent": "transcription"}, {}) == "session.created"
    assert greeting({"intent": "transcription"}, beta) == "transcription_session.created"
    assert greeting({}, {}, "realtime", "openai-beta.realtime-v1") == "transcription_session.created"
    assert greeting({"model": "gpt-4o-realtime-preview"}, beta) == "session.created"
    assert greeting({"model": MODEL, "intent": "transcription"}, beta) == "transcription_session.created"


def test_opens_the_stream_at_the_handshake_with_openai_s_defaults() -> None:
    opened = Client().done[0]
    assert isinstance(opened, Open)
    assert opened.options.audio == RawAudio("s16le", 24_000)
    assert opened.options.endpointing == Endpointing(True, 0.5, 300, 500)


def test_never_echoes_a_key_as_subprotocol() -> None:
    offered = ("realtime", "openai-insecure-api-key.SECRET", "openai-beta.realtime-v1")
    assert dialect({}, {}, offered, MODEL).subprotocol == "realtime"
    assert dialect({}, {}, offered[1:], MODEL).subprotocol == "openai-beta.realtime-v1"
    assert dialect({}, {}, offered[1:2], MODEL).subprotocol is None


@pytest.mark.parametrize("model", ["", MODEL, "gpt-4o-transcribe", "gpt-realtime", "gpt-4o-mini-realtime-preview"])
def test_lets_in_whoever_means_us(model: str) -> None:
    dialect({"model": model}, {}, (), MODEL)


def test_refuses_another_model_at_the_handshake() -> None:
    with pytest.raises(ModelNotFound):
        dialect({"model": "somebody/else"}, {}, (), MODEL)


# ---------------------------------------------------------------- session updates


def test_a_partial_update_changes_only_what_it_names() -> None:
    client = Client()
    client.update(turn_detection={"type": "server_vad", "threshold": 0.7, "prefix_padding_ms": 600})
    client.update(transcription={"language": "en-US", "prompt": "Norland"})
    client.update(turn_detection={"silence_duration_ms": 350})
    client.send("session.update", session={"audio": {"input": {"format": {"type": "audio/pcm", "rate": 16000}}}})
    assert client.options == StreamOptions(
        RawAudio("s16le", 16_000), "en", "Norland", endpointing=Endpointing(True, 0.7, 600, 350)
    )
    shown = client.heard[-1]["session"]["audio"]["input"]
    assert shown["turn_detection"] == {
        "type": "server_vad",
        "threshold": 0.7,
        "prefix_padding_ms": 600,
        "silence_duration_ms": 350,
    }
    assert shown["transcription"] == {"model": MODEL, "language": "en", "prompt": "Norland"}


def test_null_turns_off_turn_detection_and_an_object_turns_it_on_again() -> None:
    client = Client()
    shown = client.update(turn_detection=None)
    assert shown[0]["session"]["audio"]["input"]["turn_detection"] is None
    assert not client.options.endpointing.automatic
    client.update(transcription={"keywords": ["Dashwood", " "]})
    assert not client.options.endpointing.automatic
    assert client.options.keywords == ("Dashwood",)
    client.update(turn_detection={"type": "server_vad"})
    assert client.options.endpointing == Endpointing()


def test_beta_s_flat_names_are_understood_under_either_event() -> None:
    fields = {
        "input_audio_format": "g711_ulaw",
        "input_audio_transcription": {"model": "whisper-1", "language": "en"},
        "turn_detection": None,
        "include": [LOGPROBS],
    }
    for kind in ("transcription_session.update", "session.update"):
        client = Client()
        (answer,) = client.send(kind, session=fields)
        assert answer["type"] == kind.replace("update", "updated")
        assert answer["session"]["input_audio_format"] == "g711_ulaw"
        assert answer["session"]["turn_detection"] is None
        assert client.options.audio == RawAudio("mulaw", 8_000)
        assert client.options.logprobs
        assert not client.options.endpointing.automatic
        client.append(b"\xff")
        assert kinds(client.commit()) == ["input_audio_buffer.committed", "conversation.item.created"]


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ({"type": "audio/pcmu"}, RawAudio("mulaw", 8_000)),
        ({"type": "audio/pcma"}, RawAudio("alaw", 8_000)),
        ({"type": "audio/pcm"}, RawAudio("s16le", 24_000)),
        ({"type": "audio/pcm", "rate": 48_000}, RawAudio("s16le", 48_000)),
        ({"rate": 8_000}, RawAudio("s16le", 8_000)),
        ("pcm16", RawAudio("s16le", 24_000)),
        (None, RawAudio("s16le", 24_000)),
    ],
)
def test_audio_formats(given_: Any, expected: RawAudio) -> None:
    client = Client()
    assert kinds(client.update(format=given_)) == ["session.updated"]
    assert client.options.audio == expected


def test_semantic_vad_becomes_a_silence() -> None:
    client = Client()
    silences = []
    for eagerness in ("high", "auto", "low"):
        client.update(turn_detection={"type": "semantic_vad", "eagerness": eagerness})
        silences.append(client.options.endpointing.silence_ms)
    assert silences == sorted(set(silences))
    assert client.heard[-1]["session"]["audio"]["input"]["turn_detection"] == {
        "type": "semantic_vad",
        "eagerness": "low",
    }


def test_a_threshold_of_one_hears_hardly_anything_but_is_no_error() -> None:
    client = Client()
    client.update(turn_detection={"threshold": 1})
    assert 0.5 < client.options.endpointing.threshold < 1


@pytest.mark.parametrize(
    ("audio_input", "param"),
    [
        ({"format": "mp3"}, "session.audio.input.format"),
        ({"format": {"type": "audio/pcm", "rate": 96_000}}, "session.audio.input.format.rate"),
        ({"transcription": {"language": "klingon"}}, "session.audio.input.transcription.language"),
        ({"transcription": {"model": "somebody/else"}}, "model"),
        ({"transcription": {"prompt": 7}}, "session.audio.input.transcription.prompt"),
        ({"turn_detection": {"type": "telepathy"}}, "session.audio.input.turn_detection.type"),
        ({"turn_detection": {"threshold": 2}}, "session.audio.input.turn_detection.threshold"),
        ({"turn_detection": {"threshold": True}}, "session.audio.input.turn_detection.threshold"),
        ({"turn_detection": "server_vad"}, "session.audio.input.turn_detection"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_it_and_changes_nothing(audio_input: dict[str, Any], param: str) -> None:
    client = Client()
    before = client.options
    (answer,) = client.send("session.update", session={"audio": {"input": audio_input}}, event_id="mine")
    assert answer["type"] == "error"
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["param"] == param
    assert answer["error"]["event_id"] == "mine"
    assert client.options == before


def test_the_format_is_settled_by_the_first_audio() -> None:
    client = Client()
    client.append(b"\0\0")
    assert client.update(format={"type": "audio/pcmu"})[0]["error"]["param"] == "session.audio.input.format"
    assert kinds(client.update(format={"type": "audio/pcm", "rate": 24_000})) == ["session.updated"]


# ---------------------------------------------------------------- turns that the server decides


def test_the_order_of_a_turn() -> None:
    client = Client()
    client.event(SpeechStarted(1, "s", 0, 800))
    client.event(Partial(1, "s", 0, 4_000, "He was"))
    client.event(UtteranceDelta(1, "s", 0, 8_000, "He"))
    client.event(SpeechStopped(1, "s", 0, 40_000))
    client.event(UtteranceDelta(1, "s", 0, 40_000, " was not."))
    client.event(final(0, "He was not.", 800, 40_000, language="en", logprobs=(("He", -0.1),)))
    heard = client.heard[1:]
    assert kinds(heard) == [
        "input_audio_buffer.speech_started",
        "delta",
        "input_audio_buffer.speech_stopped",
        "input_audio_buffer.committed",
        "conversation.item.added",
        "conversation.item.done",
        "delta",
        "completed",
    ]
    started, stopped, completed = heard[0], heard[2], heard[-1]
    assert (started["audio_start_ms"], stopped["audio_end_ms"]) == (50, 2500)
    assert {m.get("item_id") or m["item"]["id"] for m in heard} == {completed["item_id"]}
    assert completed["transcript"] == "He was not."
    assert completed["usage"] == {"type": "duration", "seconds": 2.45}
    assert completed["languages"] == [{"code": "en"}]
    assert completed["logprobs"] == [{"token": "He", "logprob": -0.1, "bytes": [72, 101]}]


def test_items_name_the_one_before() -> None:
    client = Client()
    for number in range(2):
        client.event(SpeechStarted(1, "s", number, number))
        client.event(SpeechStopped(1, "s", number, number + 1))
    first, second = [m for m in client.heard if m["type"] == "input_audio_buffer.committed"]
    assert first["previous_item_id"] is None
    assert second["previous_item_id"] == first["item_id"]


def test_a_commit_after_the_server_has_closed_the_turn_is_an_empty_item() -> None:
    """LiveKit ends at any error; a client that waits for the answer to its commit gets one."""
    client = Client()
    client.append(b"\0\0")
    client.event(SpeechStarted(1, "s", 0, 0))
    client.event(SpeechStopped(1, "s", 0, 16_000))
    assert client.commit() == []
    client.event(final(0, "Yes."))
    answer = client.event(UtteranceEnded(1, "s", 1, -1))
    assert kinds(answer)[0] == "input_audio_buffer.committed"
    assert answer[-1]["type"] == COMPLETED
    assert answer[-1]["transcript"] == ""
    assert answer[-1]["usage"]["seconds"] == 0


def test_a_commit_in_the_middle_of_a_turn_makes_no_second_item() -> None:
    client = Client()
    client.event(SpeechStarted(1, "s", 0, 0))
    client.commit()
    client.event(SpeechStopped(1, "s", 0, 16_000))
    client.event(final(0, "Yes.", cause="request"))
    assert client.event(UtteranceEnded(1, "s", 1, 0)) == []
    assert kinds(client.heard).count("completed") == 1


# ---------------------------------------------------------------- turns that the client commits


def test_a_commit_joins_everything_since_the_last_one() -> None:
    client = manual()
    client.append(b"\0\0")
    client.event(SpeechStarted(1, "s", 0, 0))
    client.event(UtteranceDelta(1, "s", 0, 1, "He was"))
    client.event(SpeechStopped(1, "s", 0, 2))
    client.event(final(0, "He was not an", logprobs=(("He was", -0.5), (" not an", -1.0))))
    client.event(SpeechStarted(1, "s", 1, 16_000))
    client.event(UtteranceDelta(1, "s", 1, 3, "ill-disposed"))
    assert kinds(client.commit()) == [
        "input_audio_buffer.committed",
        "conversation.item.added",
        "conversation.item.done",
    ]
    scores = (("ill-disposed", -0.5), (" young man.", -1.0))
    client.event(final(1, "ill-disposed young man.", 16_000, 32_000, logprobs=scores))
    (completed,) = client.event(UtteranceEnded(1, "s", 1, 1))
    assert completed["transcript"] == "He was not an ill-disposed young man."
    assert "".join(token["token"] for token in completed["logprobs"]) == completed["transcript"]
    assert completed["usage"]["seconds"] == 2
    said = [m for m in client.heard if m["type"] == DELTA]
    assert [m["delta"] for m in said] == ["He was", " ill-disposed"]
    committed = next(m for m in client.heard if m["type"] == "input_audio_buffer.committed")
    assert {m["item_id"] for m in said} == {committed["item_id"]} == {completed["item_id"]}
    assert not {"input_audio_buffer.speech_started", "input_audio_buffer.speech_stopped"} & set(kinds(client.heard))


def test_commits_without_speech_are_answered_with_empty_items() -> None:
    client = manual()
    for token in (1, 2):
        assert kinds(client.commit())[0] == "input_audio_buffer.committed"
        (completed,) = client.event(UtteranceEnded(1, "s", token, -1))
        assert (completed["type"], completed["transcript"]) == (COMPLETED, "")
    items = [m["item_id"] for m in client.heard if m["type"] == COMPLETED]
    assert len(set(items)) == 2


def test_words_after_a_commit_wait_until_it_is_answered() -> None:
    """The ears run ahead of the engine: the next utterance may be heard of before the last one's final."""
    client = manual()
    client.event(SpeechStarted(1, "s", 0, 0))
    client.commit()
    client.event(SpeechStarted(1, "s", 1, 20_000))
    assert client.event(UtteranceDelta(1, "s", 1, 24_000, "Two")) == []
    client.event(final(0, "One."))
    answer = client.event(UtteranceEnded(1, "s", 1, 0))
    assert [(m["type"], m.get("transcript", m.get("delta"))) for m in answer] == [(COMPLETED, "One."), (DELTA, "Two")]
    assert answer[0]["item_id"] != answer[1]["item_id"]


def test_a_clear_forgets_what_was_not_committed() -> None:
    client = manual()
    client.append(b"\0\0")
    client.event(SpeechStarted(1, "s", 0, 0))
    client.event(UtteranceDelta(1, "s", 0, 1, "Wrong"))
    assert client.send("input_audio_buffer.clear") == []
    assert isinstance(client.done[-1], Clear)
    assert kinds(client.event(AudioCleared(1, "s", 0, 30_000))) == ["input_audio_buffer.cleared"]
    client.event(SpeechStarted(1, "s", 1, 30_000))
    client.commit()
    client.event(final(1, "Right.", 30_000, 46_000))
    (completed,) = client.event(UtteranceEnded(1, "s", 1, 1))
    assert completed["transcript"] == "Right."


def test_a_clear_of_nothing_is_answered_at_once() -> None:
    client = Client()
    assert kinds(client.send("input_audio_buffer.clear")) == ["input_audio_buffer.cleared"]
    assert not any(isinstance(effect, Clear) for effect in client.done)


def test_a_switch_to_server_turns_commits_what_was_said() -> None:
    client = manual()
    client.event(SpeechStarted(1, "s", 0, 0))
    answer = client.update(turn_detection={"type": "server_vad"})
    assert kinds(answer)[0] == "input_audio_buffer.committed"
    assert [type(effect) for effect in client.done[-2:]] == [EndUtterance, Update]
    client.event(SpeechStopped(1, "s", 0, 16_000))
    client.event(final(0, "Kept."))
    (completed,) = client.event(UtteranceEnded(1, "s", 1, 0))
    assert completed["transcript"] == "Kept."


def test_a_switch_to_manual_leaves_the_turn_that_a_commit_is_ending() -> None:
    client = Client()
    (started,) = client.event(SpeechStarted(1, "s", 0, 0))
    client.event(UtteranceDelta(1, "s", 0, 0, "Mine"))
    client.commit()
    client.update(turn_detection=None)
    client.event(SpeechStopped(1, "s", 0, 16_000))
    completed = client.event(final(0, "Mine"))[-1]
    assert (completed["item_id"], completed["transcript"]) == (started["item_id"], "Mine")
    assert client.event(UtteranceEnded(1, "s", 1, 0)) == []


def test_a_switch_to_manual_keeps_nothing_of_a_turn_that_is_being_cleared() -> None:
    client = Client()
    client.append(b"\0\0")
    (cleared,) = client.event(SpeechStarted(1, "s", 0, 0))
    client.event(UtteranceDelta(1, "s", 0, 1, "Wrong"))
    client.send("input_audio_buffer.clear")
    client.update(turn_detection=None)
    committed = client.commit()[0]
    client.event(AudioCleared(1, "s", 0, 30_000))
    client.event(SpeechStarted(1, "s", 1, 30_000))
    client.event(final(1, "Right.", 30_000, 46_000))
    (completed,) = client.event(UtteranceEnded(1, "s", 1, 1))
    assert completed["item_id"] == committed["item_id"] != cleared["item_id"]
    assert completed["transcript"] == "Right."


def test_a_switch_with_nothing_said_makes_no_item() -> None:
    client = manual()
    assert kinds(client.update(turn_detection={"type": "server_vad"})) == ["session.updated"]
    assert not any(isinstance(effect, EndUtterance) for effect in client.done)


def test_a_switch_to_manual_keeps_the_id_of_the_open_turn() -> None:
    client = Client()
    (started,) = client.event(SpeechStarted(1, "s", 0, 0))
    client.update(turn_detection=None)
    committed = client.commit()[0]
    assert committed["item_id"] == started["item_id"]
    client.event(final(0, "Whole."))
    (completed,) = client.event(UtteranceEnded(1, "s", 1, 0))
    assert (completed["item_id"], completed["transcript"]) == (started["item_id"], "Whole.")


# ---------------------------------------------------------------- mistakes and ends


@pytest.mark.parametrize(
    ("message", "code", "param"),
    [
        ("no JSON", "invalid_value", None),
        ("[]", "invalid_value", None),
        (b"\xff\xfe", "invalid_value", None),
        ("{}", "invalid_value", "type"),
        ('{"type": 7}', "invalid_value", "type"),
        ('{"type": "session.upgrade"}', "invalid_value", "type"),
        ('{"type": "response.create"}', "unsupported", "type"),
        ('{"type": "conversation.item.create", "item": {}}', "unsupported", "type"),
        ('{"type": "input_audio_buffer.append"}', "missing_field", "audio"),
        ('{"type": "input_audio_buffer.append", "audio": "AAA"}', "invalid_value", "audio"),
        ('{"type": "input_audio_buffer.append", "audio": "?!==" }', "invalid_value", "audio"),
        ('{"type": "session.update", "session": 5}', "invalid_value", "session"),
        ("[" * 100_000, "invalid_value", None),
    ],
)
def test_mistakes_are_typed_errors_and_the_session_goes_on(message: str | bytes, code: str, param: str | None) -> None:
    client = Client()
    (answer,) = client.raw(message)
    assert (answer["type"], answer["error"]["code"], answer["error"]["param"]) == ("error", code, param)
    client.append(b"\1\0")
    assert client.done[-1] == Audio(b"\1\0")


def test_json_in_a_binary_message_is_read_all_the_same() -> None:
    assert kinds(Client().raw(b'{"type": "session.update", "session": {}}')) == ["session.updated"]


def test_a_failure_ends_every_committed_item_and_the_session() -> None:
    client = manual()
    client.commit()
    answer = client.fail(EngineFailed("It broke.", hint="Try again."))
    assert [m["type"] for m in answer] == [FAILED, "error"]
    assert answer[0]["error"]["code"] == answer[1]["error"]["code"] == "engine_failed"
    assert client.done[-1] == Hang(1011, "engine_failed")
    assert client.raw("anything") == []


def test_what_another_session_may_mend_is_a_close_and_no_error() -> None:
    client = Client()
    assert client.fail(TooManyStreams("Full.", retry_after=5)) == []
    assert client.done[-1] == Hang(1013, "too_many_streams")


# ---------------------------------------------------------------- client secrets


def test_a_secret_brings_its_session_until_it_expires() -> None:
    now = [1_000.0]
    secrets = ClientSecrets(MODEL, now=lambda: now[0])
    session = Session(MODEL).merged(
        {"audio": {"input": {"turn_detection": None, "transcription": {"prompt": "Größe"}}}}
    )
    value, expires_at = secrets.issue(session, 60)
    assert (expires_at, secrets.session(value)) == (1_060, session)
    assert set(value) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.")
    now[0] = 1_060.0
    assert secrets.session(value) is None


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_changed_secret_opens_nothing(data: st.DataObject) -> None:
    secrets = ClientSecrets(MODEL)
    value, _ = secrets.issue(Session(MODEL), 60)
    place = data.draw(st.integers(0, len(value) - 1))
    letter = data.draw(st.sampled_from("AZaz09-_.é="))
    changed = value[:place] + letter + value[place + 1 :]
    # The last letter of each part has bits that belong to no byte; what it decodes to is what is signed.
    assert changed == value or secrets.session(changed) in (None, Session(MODEL))
    assert ClientSecrets(MODEL).session(value) is None
    assert secrets.session(changed[:place]) is None


def test_a_session_that_no_header_can_carry_is_refused() -> None:
    with pytest.raises(BadRequest, match="does not fit"):
        ClientSecrets(MODEL).issue(Session(MODEL, prompt="x" * 5_000), 60)
