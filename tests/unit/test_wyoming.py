"""The Wyoming dialect: chunks that add up to the transcript, one transcript an utterance, and that no order of anything upsets it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.model import ServedModel
from gateway.streams import wyoming_server
from gateway.streams.dialect import Audio, Finish, Open
from gateway.streams.wyoming import Drop, Effect, Wyoming
from gateway.streams.wyoming_server import WyomingServer
from gateway.streams.wyoming_wire import WyomingEvent, encode
from shared.errors import BY_CODE, TooManyStreams, WorkerCrashed
from shared.streams import StreamDone, UtteranceDelta, UtteranceFinal
from shared.wire import RawAudio
from tests.server import free_port
from tests.unit.dialects import errors, events, objects

INFO = WyomingEvent("info", {"asr": []})
TYPES = ("describe", "ping", "transcribe", "audio-start", "audio-chunk", "audio-stop", "synthesize")


class Peer:
    """A connection without a socket; every answer is checked as it comes. ``open`` is the track that has a stream."""

    def __init__(self) -> None:
        self.dialect = Wyoming(INFO)
        self.said: list[WyomingEvent] = []
        self.open: int | None = None
        self.chunks: str | None = None
        """Since ``transcript-start``; None outside of a streamed transcript."""

    def take(self, effects: Any) -> list[Effect]:
        taken = list(effects)
        for effect in taken:
            match effect:
                case Open(track=track):
                    assert self.open is None, "one stream at a time"
                    self.open = track
                case Audio(track=track) | Finish(track=track):
                    assert track == self.open
                case Drop(track=track):
                    assert track == self.open
                    self.open = None
                case WyomingEvent():
                    encode(effect)
                    self.said.append(effect)
                    self._check(effect)
        return taken

    def _check(self, said: WyomingEvent) -> None:
        match said.type:
            case "transcript-start":
                assert self.chunks is None
                self.chunks = ""
            case "transcript-chunk":
                assert self.chunks is not None
                assert said.data["text"]
                self.chunks += said.data["text"]
            case "transcript":
                failed = len(self.said) > 1 and self.said[-2].type == "error"
                assert said.data["text"] == ("" if failed else self.chunks or "")
            case "transcript-stop":
                assert self.chunks
                self.chunks = None
            case "error":
                assert said.data["code"] in BY_CODE
            case kind:
                assert kind in ("info", "pong")

    def say(self, kind: str, payload: bytes = b"", **data: Any) -> list[Effect]:
        return self.take(self.dialect.receive(WyomingEvent(kind, data, payload)))

    def happen(self, *happened: Any) -> None:
        for event in happened:
            self.take(self.dialect.event(event, self.open or 0))

    def fail(self, error: Any) -> None:
        self.take(self.dialect.failed(error, self.open or 0))

    def texts(self, kind: str) -> list[str]:
        return [event.data["text"] for event in self.said if event.type == kind]


def delta(number: int, text: str) -> UtteranceDelta:
    return UtteranceDelta(1, "s", number, 0, text)


def final(number: int, text: str, language: str = "") -> UtteranceFinal:
    return UtteranceFinal(1, "s", number, 0, 0, 0, text, language=language)


DONE = StreamDone(1, "s", 0)


def speaking(**wish: Any) -> Peer:
    peer = Peer()
    peer.say("transcribe", **wish)
    peer.say("audio-start", rate=16_000, width=2, channels=1)
    return peer


# ---------------------------------------------------------------- an utterance


def test_the_stream_is_what_was_asked_for() -> None:
    peer = Peer()
    peer.say("transcribe", language="de-DE", context="Dashwood")
    opened, *_ = peer.say("audio-start", rate=8_000, width=2, channels=2)
    assert isinstance(opened, Open)
    options = opened.options
    assert (options.audio, options.language, options.prompt) == (RawAudio("s16le", 8_000, 2), "de", "Dashwood")
    assert options.only_certain
    assert not options.endpointing.automatic


def test_chunks_come_before_the_end_of_the_audio() -> None:
    peer = speaking()
    peer.happen(delta(0, "Good"), delta(0, " morn"))
    assert [event.type for event in peer.said] == ["transcript-start", "transcript-chunk", "transcript-chunk"]
    assert peer.say("audio-stop") == [Finish(1)]
    assert peer.dialect.answering
    peer.happen(delta(0, "ing."), final(0, "Good morning.", "en"), DONE)
    assert peer.texts("transcript-chunk") == ["Good", " morn", "ing."]
    assert [event.type for event in peer.said][-2:] == ["transcript", "transcript-stop"]
    assert peer.said[-2].data == {"text": "Good morning.", "language": "en"}
    assert not peer.dialect.answering


def test_pieces_stand_in_their_order_with_a_space_between_them() -> None:
    """An engine may be certain of words of the second piece before it is done with the first."""
    peer = speaking()
    peer.happen(delta(0, "One"), delta(1, "Three"), delta(2, "Five"), final(0, "One two."))
    assert peer.texts("transcript-chunk") == ["One", " two. Three"]
    peer.say("audio-stop")
    peer.happen(final(1, "Three four."), final(2, "Five."), DONE)
    assert peer.texts("transcript") == ["One two. Three four. Five."]


def test_scripts_without_spaces_get_none() -> None:
    peer = speaking()
    peer.happen(final(0, "你好。"), final(1, "再见。"))
    assert peer.texts("transcript-chunk") == ["你好。", "再见。"]


def test_a_final_that_takes_words_back_cannot() -> None:
    peer = speaking()
    peer.happen(delta(0, "Good"), final(0, "God"), final(1, "morning."))
    peer.say("audio-stop")
    peer.happen(DONE)
    assert peer.texts("transcript") == ["Good morning."]


def test_nothing_said_is_an_empty_transcript_alone() -> None:
    peer = speaking()
    peer.say("audio-stop")
    peer.happen(final(0, "", "en"), DONE)
    peer.say("audio-stop")
    assert peer.said == [WyomingEvent("transcript", {"text": ""})] * 2


# ---------------------------------------------------------------- what goes wrong


def test_a_failure_is_said_once_and_half_a_command_is_none() -> None:
    peer = speaking()
    peer.happen(delta(0, "Good"))
    peer.fail(WorkerCrashed("thrice"))
    assert [event.type for event in peer.said][2:] == ["error", "transcript", "transcript-stop"]
    assert peer.texts("transcript") == [""]
    assert peer.say("audio-chunk", b"\0\0") == []
    assert peer.say("audio-stop") == []
    assert isinstance(peer.say("audio-chunk", b"\0\0")[0], Open)


def test_a_failure_after_the_end_of_the_audio_answers_it() -> None:
    peer = speaking()
    peer.say("audio-stop")
    peer.fail(TooManyStreams("full"))
    assert [event.type for event in peer.said] == ["error", "transcript"]
    peer.say("audio-stop")
    assert peer.texts("transcript") == ["", ""]


@pytest.mark.parametrize(
    "form", [{"rate": "fast"}, {"rate": float("inf")}, {"width": 3}, {"channels": 0}, {"channels": []}]
)
def test_audio_that_cannot_be_is_refused(form: dict[str, Any]) -> None:
    peer = speaking()
    peer.happen(delta(0, "Good"))
    peer.say("audio-start", **form)
    assert [event.type for event in peer.said][2:] == ["transcript-stop", "error", "transcript"]
    assert peer.texts("transcript") == [""]
    assert peer.open is None


def test_a_context_without_end_is_refused() -> None:
    peer = speaking(context="names " * 2_000)
    assert [event.type for event in peer.said] == ["error", "transcript"]


async def test_a_peer_that_takes_nothing_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks again and again what there is, and reads no answer."""
    monkeypatch.setattr(wyoming_server, "WRITE_SECONDS", 0.3)
    monkeypatch.setattr(wyoming_server, "CLOSE_SECONDS", 0.3)
    hub: Any = SimpleNamespace(languages=("en",))
    server, port = WyomingServer(hub, ServedModel("scripted", "scripted")), free_port()
    await server.start("127.0.0.1", port)
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        with pytest.raises(ConnectionError):
            async with asyncio.timeout(20):
                while True:
                    writer.write(b'{"type": "describe"}\n' * 1_000)
                    await writer.drain()
        writer.close()
    finally:
        await server.stop()


def test_beginning_anew_forgets_what_was_not_ended() -> None:
    peer = speaking()
    peer.happen(delta(0, "Good"))
    effects = peer.say("audio-start")
    assert effects[:2] == [Drop(1), WyomingEvent("transcript-stop")]
    peer.take(peer.dialect.event(delta(0, " evening"), 1))
    peer.take(peer.dialect.failed(WorkerCrashed("late"), 1))
    peer.say("audio-stop")
    peer.happen(DONE)
    assert peer.texts("transcript") == [""]


# ---------------------------------------------------------------- any order of anything

_forms = st.fixed_dictionaries(
    {},
    optional={
        "rate": st.sampled_from([16_000, 8_000, 0, "fast", None, float("inf")]),
        "width": st.sampled_from([2, 2, 3]),
        "channels": st.sampled_from([1, 2, 99]),
        "language": st.sampled_from(["en", "de-DE", "klingon", 7, None, []]),
        "context": st.sampled_from(["", "names", {}, [1]]),
        "text": st.text(max_size=5),
    },
)
_received = st.builds(
    WyomingEvent, st.sampled_from(TYPES) | st.text(max_size=5), _forms | objects, st.binary(max_size=6)
)
_tracks = st.sampled_from(["now", "before", "never"])
_steps = st.lists(
    st.one_of(
        _received.map(lambda event: ("receive", event, "")),
        st.sampled_from(TYPES[3:6]).map(lambda kind: ("receive", WyomingEvent(kind), "")),
        st.tuples(st.just("event"), events, _tracks),
        st.tuples(st.just("failed"), errors, _tracks),
        errors.map(lambda error: ("refuse", error, "")),
    ),
    max_size=30,
)


@given(_steps)
def test_any_order_ends_in_typed_answers(sequence: list[tuple[str, Any, str]]) -> None:
    """``Peer`` checks every answer. An ``audio-stop`` is answered by one transcript, unless an error has been."""
    peer = Peer()
    refused = False
    for kind, what, which in sequence:
        transcripts, owed = len(peer.texts("transcript")), peer.dialect.answering
        failures = len(peer.texts("error"))
        track = {"now": peer.open or 0, "before": (peer.open or 0) - 1}.get(which, 99)
        match kind:
            case "receive":
                effects = peer.take(peer.dialect.receive(what))
            case "event":
                effects = peer.take(peer.dialect.event(what, track))
            case "failed":
                effects = peer.take(peer.dialect.failed(what, track))
            case _:
                effects = peer.take(peer.dialect.refuse(what))
                assert effects
        new = len(peer.texts("transcript")) - transcripts
        stopped = kind == "receive" and what.type == "audio-stop"
        if stopped and not owed:
            assert new + peer.dialect.answering == (0 if refused else 1)
        elif owed and not peer.dialect.answering:
            assert new >= 1
        elif not owed:
            assert new <= (len(peer.texts("error")) > failures) + (kind == "event")
        begun = kind == "receive" and what.type == "audio-start"
        if len(peer.texts("error")) > failures:
            refused = refused or begun or not owed
        elif stopped or begun:
            refused = False
    end_of(peer)


def end_of(peer: Peer) -> None:
    """Whatever state it is in, an utterance that ends is answered once."""
    if peer.dialect.answering:
        peer.happen(DONE)
    peer.say("audio-stop")
    before = len(peer.texts("transcript"))
    if peer.dialect.answering:
        peer.happen(DONE)
        assert len(peer.texts("transcript")) == before + 1
    assert not peer.dialect.answering
    assert peer.chunks is None


@given(st.lists(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=4), max_size=4), st.data())
def test_chunks_are_the_transcript_however_pieces_overlap(pieces: list[list[str]], data: st.DataObject) -> None:
    """Deltas of each piece in their order, finals in theirs, everything else as it likes."""
    peer = speaking()
    waiting: list[list[Any]] = [[delta(n, text) for text in texts] for n, texts in enumerate(pieces)]
    over = 0
    while over < len(pieces):
        some = [n for n in range(over, len(pieces)) if waiting[n]]
        chosen = data.draw(st.sampled_from([*some, over]))
        if waiting[chosen]:
            peer.happen(waiting[chosen].pop(0))
        else:
            peer.happen(final(over, "".join(pieces[over])))
            over += 1
    peer.say("audio-stop")
    peer.happen(DONE)
    [text] = peer.texts("transcript")
    assert text.replace(" ", "") == "".join("".join(texts) for texts in pieces).replace(" ", "")
