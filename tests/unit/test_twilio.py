"""Twilio without socket or worker: frames put in order, signatures, the dialect."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.streams import twilio_signature
from gateway.streams.calls import Calls
from gateway.streams.dialect import Audio, Effect, Finish, Hang, Open, Say
from gateway.streams.frame_order import MAX_FILL_MS, WINDOW, FrameOrder
from gateway.streams.twilio import Twilio
from shared.errors import EngineFailed, NapscribeError, TooManyStreams
from shared.messages import RawAudio, Word
from shared.streams import Partial, SpeechStarted, StreamDone, UtteranceFinal
from tests.unit.dialects import Step, check_any_order, steps

FRAME = 160
"""Bytes of 20 ms of mu-law."""
SILENCE = 0xFF

# ---------------------------------------------------------------- order of frames


def frame(number: int) -> bytes:
    return bytes([number % 250]) * FRAME


def ordered(arrivals: Sequence[int], *, chunks: bool = True, times: bool = True) -> tuple[bytes, FrameOrder]:
    """What comes of frames that arrive in this order; the n-th frame has chunk n + 1 and time 20 n."""
    order = FrameOrder(8, SILENCE)
    out = [order.push(frame(n), n + 1 if chunks else None, 20.0 * n if times else None) for n in arrivals]
    return b"".join([*out, order.flush()]), order


def shuffled(data: st.DataObject, count: int) -> list[int]:
    """Every frame at most ``WINDOW`` places from its own."""
    keys = [n + data.draw(st.integers(0, WINDOW - 1)) for n in range(count)]
    return sorted(range(count), key=lambda n: (keys[n], n))


@given(st.data(), st.integers(1, 60), st.booleans())
@settings(max_examples=80, deadline=None)
def test_frames_out_of_order_are_put_right(data: st.DataObject, count: int, times: bool) -> None:
    arrivals = [0, *(n + 1 for n in shuffled(data, count - 1))]
    assert ordered(arrivals, times=times)[0] == b"".join(map(frame, range(count)))


@given(st.data(), st.integers(1, 60), st.booleans())
@settings(max_examples=80, deadline=None)
def test_silence_takes_the_place_of_lost_frames(data: st.DataObject, count: int, times: bool) -> None:
    lost = data.draw(st.sets(st.integers(1, max(1, count - 1)), max_size=count // 2))
    arrivals = [n for n in range(count) if n not in lost]
    last = max(arrivals)
    expected = b"".join(bytes([SILENCE]) * FRAME if n in lost else frame(n) for n in range(last + 1))
    out, order = ordered(arrivals, times=times)
    assert out == expected
    assert order.seconds(16_000) == 1.0


def test_a_duplicate_is_heard_once() -> None:
    assert ordered([0, 1, 1, 2])[0] == b"".join(map(frame, range(3)))


def test_a_long_gap_is_cut_short_and_the_clock_goes_on() -> None:
    order = FrameOrder(8, SILENCE)
    order.push(frame(1), 1, 0)
    out = order.push(frame(2), 2, 60_000)
    assert len(out) == MAX_FILL_MS * 8 + FRAME
    assert order.clock == 60_020
    behind_the_gap = 20 + int(MAX_FILL_MS)
    assert order.seconds(behind_the_gap * 16) == 60.0
    assert order.seconds(10 * 16) == 0.01


def test_a_track_that_begins_late_has_the_call_s_time() -> None:
    order = FrameOrder(8, SILENCE)
    assert order.push(frame(1), 1, 3_000) == frame(1)
    assert order.seconds(0) == 3.0


@pytest.mark.parametrize(("chunks", "times"), [(False, True), (True, False), (False, False)])
def test_half_or_no_numbering_is_enough_when_frames_come_in_order(chunks: bool, times: bool) -> None:
    assert ordered(range(30), chunks=chunks, times=times)[0] == b"".join(map(frame, range(30)))


@pytest.mark.parametrize("numbers", [[2 * n for n in range(30)], [1] * 30, [0] * 30])
def test_numbers_that_count_something_else_are_not_believed(numbers: list[int]) -> None:
    """Numbered over both tracks together, or not at all: the time stamps say that nothing is missing, so nothing waits."""
    order = FrameOrder(8, SILENCE)
    out = [order.push(frame(n), number, 20 * n + (n % 3)) for n, number in enumerate(numbers)]
    assert out == [frame(n) for n in range(30)]


@given(
    st.lists(
        st.tuples(st.binary(max_size=400), st.none() | st.integers(0, 10**14), st.none() | st.integers(0, 10**14)),
        max_size=60,
    )
)
@settings(max_examples=150, deadline=None)
def test_whatever_comes_the_audio_stays_in_bounds_and_time_goes_on(
    frames: list[tuple[bytes, int | None, int | None]],
) -> None:
    order = FrameOrder(8, SILENCE)
    out = 0
    for data, number, timestamp in frames:
        piece = order.push(data, number, timestamp)
        assert len(piece) <= (WINDOW + 1) * (MAX_FILL_MS * 8 + 400)
        out += len(piece)
    out += len(order.flush())
    times = [order.seconds(sample) for sample in range(0, out * 2 + 1, 40)]
    assert times == sorted(times)


# ---------------------------------------------------------------- signature


def test_the_signature_is_twilio_s() -> None:
    """The example of Twilio's documentation and of its libraries' tests: URL and parameters in a row."""
    text = (
        "https://mycompany.com/myapp.php?foo=1&bar=2CallSidCA1234567890ABCDECaller+14158675309Digits1234"
        "From+14158675309To+18005551212"
    )
    assert twilio_signature.sign("12345", text) == b"RSOYDt4T1cUTdK1PDd93/VVr8B8="


@pytest.mark.parametrize(
    ("signed", "forwarded"),
    [
        ("wss://voice.example.org/twilio", "voice.example.org"),
        ("wss://voice.example.org/twilio/", "voice.example.org"),
        ("wss://voice.example.org/twilio", "voice.example.org:443"),
        ("https://voice.example.org:8443/twilio", "voice.example.org:8443"),
    ],
)
def test_a_proxy_may_stand_between(signed: str, forwarded: str) -> None:
    signature = twilio_signature.sign("token", signed).decode()
    headers = {"host": "10.0.0.7:8000", "x-forwarded-host": forwarded, "x-twilio-signature": signature}
    assert twilio_signature.is_signed("token", headers, "/twilio")
    assert not twilio_signature.is_signed("another", headers, "/twilio")
    assert not twilio_signature.is_signed("token", headers, "/other")
    assert not twilio_signature.is_signed("token", {**headers, "x-twilio-signature": ""}, "/twilio")


# ---------------------------------------------------------------- the dialect


class Line:
    """A Twilio connection without a socket, and what its call has been told."""

    def __init__(self, is_key: Any = None) -> None:
        self.events: list[dict[str, Any]] = []
        self.calls = Calls(self.events.append)
        self.door = Twilio(self.calls, is_key)
        self.chunk = 0
        assert self.door.begin() == []

    def send(self, event: str, **fields: Any) -> list[Effect]:
        return list(self.door.receive(json.dumps({"event": event, **fields})))

    def start(self, *tracks: str, **start: Any) -> list[Effect]:
        body = {"callSid": "CA1", "streamSid": "MZ1", "tracks": list(tracks or ("inbound",)), **start}
        return self.send("start", sequenceNumber="1", start=body)

    def media(self, payload: str, track: str = "inbound") -> list[Effect]:
        self.chunk += 1
        media = {"track": track, "chunk": str(self.chunk), "timestamp": str(20 * self.chunk), "payload": payload}
        return self.send("media", media=media)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == kind]


PAYLOAD = base64.b64encode(frame(1)).decode()


async def test_each_track_is_a_stream() -> None:
    line = Line()
    assert line.send("connected", protocol="Call") == []
    opened = line.start("inbound", "outbound")
    assert [(type(effect), effect.track) for effect in opened if isinstance(effect, Open)] == [(Open, 0), (Open, 1)]
    assert isinstance(opened[0], Open)
    assert opened[0].options.audio == RawAudio("mulaw", 8_000)
    assert line.media(PAYLOAD) == [Audio(frame(1), 0)]
    assert line.media(PAYLOAD, "outbound") == [Audio(frame(1), 1)]
    assert line.of("started")[0]["tracks"] == ["inbound", "outbound"]


async def test_a_language_that_is_none_ends_the_stream_and_the_call_is_told() -> None:
    line = Line()
    assert line.start(customParameters={"language": "klingon"}) == [Hang(1008, "invalid_value")]
    assert line.of("error")[0]["code"] == "invalid_value"


async def test_a_final_has_call_track_and_the_time_of_the_call() -> None:
    line = Line()
    line.start(customParameters={"words": "true", "language": "en-GB"})
    line.media(PAYLOAD)
    line.door.event(SpeechStarted(1, "s", 0, 0), 0)
    words = (Word("Hello.", 0.5, 1.0),)
    line.door.event(UtteranceFinal(1, "s", 0, 8_000, 16_000, 16_000, "Hello.", words, language="en"), 0)
    (final,) = line.of("final")
    assert (final["call_sid"], final["stream_sid"], final["track"], final["text"]) == (
        "CA1",
        "MZ1",
        "inbound",
        "Hello.",
    )
    assert (final["start"], final["end"]) == (0.52, 1.02)
    assert final["words"] == [{"word": "Hello.", "start": 0.52, "end": 1.02}]


async def test_silence_makes_no_event() -> None:
    line = Line()
    line.start()
    line.door.event(UtteranceFinal(1, "s", 0, 0, 16_000, 16_000, ""), 0)
    assert not line.of("final")


async def test_stop_finishes_every_track_and_then_the_connection() -> None:
    line = Line()
    line.start("inbound", "outbound")
    line.media(PAYLOAD)
    assert line.send("stop", stop={"callSid": "CA1"}) == [Finish(0), Finish(1)]
    assert line.media(PAYLOAD) == []
    assert line.door.event(StreamDone(1, "s", 0), 0) == []
    assert line.door.event(StreamDone(1, "s", 0), 1) == [Hang(1000, "")]
    assert [event["type"] for event in line.events] == ["started", "ended"]
    line.door.close()
    assert len(line.of("ended")) == 1


async def test_what_twilio_does_not_wait_for_is_finished_without_it() -> None:
    line = Line()
    line.start()
    line.send("stop")
    assert line.door.left() == [Finish(0)]
    line.door.event(UtteranceFinal(1, "s", 0, 0, 16_000, 16_000, "Bye."), 0)
    assert line.door.event(StreamDone(1, "s", 0), 0) == []
    assert [event["type"] for event in line.events] == ["started", "final", "ended"]


async def test_a_call_that_breaks_off_is_finished_too() -> None:
    line = Line()
    line.start()
    for number in range(3):
        line.media(base64.b64encode(frame(number)).decode())
    line.send("media", media={"track": "inbound", "chunk": "6", "timestamp": "120", "payload": PAYLOAD})
    (audio, finish) = line.door.left()
    assert finish == Finish(0)
    assert audio == Audio(bytes([SILENCE]) * 2 * FRAME + frame(1), 0)


async def test_one_track_that_fails_leaves_the_other() -> None:
    line = Line()
    line.start("inbound", "outbound")
    assert line.door.failed(TooManyStreams("Full."), 1) == []
    assert line.of("error")[0]["code"] == "too_many_streams"
    assert line.media(PAYLOAD, "outbound") == []
    assert line.media(PAYLOAD) != []
    assert line.door.failed(EngineFailed("Broken."), 0) == [Hang(1011, "engine_failed")]
    assert line.of("ended")


async def test_marks_digits_and_nonsense_are_passed_over() -> None:
    line = Line()
    line.start()
    for message in ("mark", "dtmf", "clear", "whatever"):
        assert line.send(message, mark={"name": "x"}, dtmf={"digit": "1"}) == []
    assert line.door.receive("no JSON") == []
    assert line.door.receive(b"\xff") == []
    assert line.media("?not base64?") == []
    assert line.media(PAYLOAD) != []


async def test_the_token_of_the_start_is_checked_before_anything_is_opened() -> None:
    keys = {"secret"}
    for parameters in ({}, {"token": "wrong"}, {"token": ["secret"]}):
        line = Line(keys.__contains__)
        assert line.media(PAYLOAD) == []
        assert line.start(customParameters=parameters) == [Hang(1008, "invalid_api_key")]
        assert not line.events
    assert isinstance(Line(keys.__contains__).start(customParameters={"token": "secret"})[0], Open)


async def test_who_never_starts_is_sent_away() -> None:
    line = Line()
    answers = [line.send("connected") for _ in range(100)]
    assert [Hang(1008, "no_start")] in answers
    assert Line().door.silent() == [Hang(1001, "idle_timeout")]


@pytest.mark.parametrize(
    ("start", "reason"),
    [
        ({"callSid": "no such/sid"}, "invalid_value"),
        ({"callSid": None, "streamSid": ""}, "invalid_value"),
        ({"mediaFormat": {"encoding": "audio/opus"}}, "unsupported_audio"),
        ({"mediaFormat": {"encoding": "audio/x-mulaw", "sampleRate": 7}}, "invalid_value"),
    ],
)
async def test_a_start_that_cannot_be(start: dict[str, Any], reason: str) -> None:
    assert Line().start(**start) == [Hang(1008, reason)]


@pytest.mark.parametrize(
    ("format_", "expected"),
    [
        (None, RawAudio("mulaw", 8_000)),
        ({"encoding": "audio/x-mulaw", "sampleRate": 8000, "channels": 1}, RawAudio("mulaw", 8_000)),
        ({"encoding": "PCMA", "sampleRate": "8000"}, RawAudio("alaw", 8_000)),
        ({"encoding": "L16", "sampleRate": 16000}, RawAudio("s16le", 16_000)),
    ],
)
async def test_media_formats(format_: Any, expected: RawAudio) -> None:
    opened = Line().start(mediaFormat=format_)[0]
    assert isinstance(opened, Open)
    assert opened.options.audio == expected


_controls: list[dict[str, Any]] = [
    {"type": "x", "event": "connected"},
    {"type": "x", "event": "start", "start": {"callSid": "CA1", "streamSid": "MZ1", "tracks": ["inbound", "outbound"]}},
    {
        "type": "x",
        "event": "start",
        "start": {"callSid": 7, "tracks": "inbound", "mediaFormat": [], "customParameters": 1},
    },
    {"type": "x", "event": "media", "media": {"track": "inbound", "chunk": "2", "timestamp": "5", "payload": PAYLOAD}},
    {"type": "x", "event": "media", "media": {"track": 5, "chunk": "²", "timestamp": -1, "payload": PAYLOAD}},
    {"type": "x", "event": "media", "media": {"track": "third", "payload": PAYLOAD}},
    {"type": "x", "event": "media", "media": []},
    {"type": "x", "event": "stop"},
]


@given(steps(_controls))
@settings(max_examples=150, deadline=None)
def test_any_order_of_any_messages(sequence: list[Step]) -> None:
    async def act() -> None:
        events: list[dict[str, Any]] = []
        door = Twilio(Calls(events.append), None)
        # No stream fails before it is opened, and a failure of one of two tracks is none of the connection's.
        line = check_any_order(door, [step for step in sequence if step[0] != "failed"])
        for step in sequence:
            if step[0] == "failed" and isinstance(step[1], NapscribeError) and line.closed is None:
                line.take(door.failed(step[1], 0))
        door.close()
        assert not [effect for effect in line.effects if isinstance(effect, Say)]
        assert [event["type"] for event in events].count("started") == [e["type"] for e in events].count("ended")
        json.dumps(events)

    asyncio.run(act())


async def test_partials_of_an_utterance_replace_each_other_for_a_reader() -> None:
    line = Line()
    line.start()
    call = line.calls.join("CA1")
    reader = call.read_after(0)
    line.door.event(SpeechStarted(1, "s", 0, 16_000), 0)
    for text in ("He", "He was", "He was not"):
        line.door.event(Partial(1, "s", 0, 32_000, text), 0)
    last = json.loads(reader.frames[-1][1].removeprefix(b"data: "))
    assert (last["type"], last["text"], last["start"], last["end"]) == ("partial", "He was not", 1.0, 2.0)
    assert len(reader.frames) == 3
