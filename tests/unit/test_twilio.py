"""Twilio without socket or worker: frames put in order, signatures, the dialect, readers of a call, its webhook."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette

from gateway.answers.errors_http import HANDLERS
from gateway.streams import call_webhook, calls, twilio_signature
from gateway.streams.call_webhook import CallWebhook
from gateway.streams.calls import Call, Calls
from gateway.streams.dialect import Audio, Effect, Finish, Hang, Open, Say
from gateway.streams.frame_order import MAX_FILL_MS, WINDOW, FrameOrder
from gateway.streams.twilio import Twilio
from shared.errors import BadRequest, EngineFailed, NapscribeError, TooManyStreams
from shared.messages import RawAudio, Word
from shared.streams import Partial, SpeechStarted, StreamDone, UtteranceFinal
from tests.serving import serving
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


# ---------------------------------------------------------------- readers of a call


@contextlib.asynccontextmanager
async def reading(all_calls: Calls) -> AsyncIterator[httpx.AsyncClient]:
    app = Starlette(routes=all_calls.routes(), exception_handlers=HANDLERS)
    async with serving(app) as url, httpx.AsyncClient(base_url=url, timeout=10) as client:
        yield client


async def read(client: httpx.AsyncClient, sid: str, begun: asyncio.Event | None = None, last: str = "") -> list[Any]:
    """All events until the stream ends."""
    events: list[Any] = []
    async with client.stream("GET", f"/v1/calls/{sid}/events", headers={"last-event-id": last}) as answer:
        if answer.status_code != 200:
            return [answer.status_code]
        async for line in answer.aiter_lines():
            if begun is not None:
                begun.set()
            if line.startswith("data: {"):
                events.append(json.loads(line.removeprefix("data: ")))
    return events


def say(call: Call, *texts: str) -> None:
    for text in texts:
        call.publish({"type": "final", "text": text})


def texts(events: list[Any]) -> list[str]:
    return [event["text"] for event in events if event["type"] == "final"]


async def test_readers_before_during_and_after_a_call_read_the_same() -> None:
    all_calls = Calls()
    async with reading(all_calls) as client:
        waiting = asyncio.Event()
        before = asyncio.ensure_future(read(client, "CA1", waiting))
        await waiting.wait()
        call = all_calls.join("CA1")
        say(call, "one")
        joined = asyncio.Event()
        during = asyncio.ensure_future(read(client, "CA1", joined))
        await joined.wait()
        call.mention({"type": "partial", "text": "tw"}, "partial")
        say(call, "two")
        call.leave()
        after = await read(client, "CA1")
        assert texts(await before) == texts(await during) == texts(after) == ["one", "two"]
        assert [event["type"] for event in await before] == ["final", "partial", "final"]
        assert [event["type"] for event in after] == ["final", "final"]
        assert {event["call_sid"] for event in after} == {"CA1"}


async def test_a_browser_goes_on_where_it_was_and_is_told_when_that_was_all() -> None:
    all_calls = Calls()
    async with reading(all_calls) as client:
        call = all_calls.join("CA1")
        say(call, "one", "two", "three")
        call.leave()
        assert texts(await read(client, "CA1", last="1")) == ["two", "three"]
        assert await read(client, "CA1", last="3") == [204]
        assert texts(await read(client, "CA1", last="x")) == ["one", "two", "three"]


async def test_calls_do_not_mix_and_sids_are_checked() -> None:
    all_calls = Calls()
    async with reading(all_calls) as client:
        first, second = all_calls.join("CA1"), all_calls.join("CA2")
        say(first, "one")
        say(second, "two")
        first.leave()
        second.leave()
        assert texts(await read(client, "CA2")) == ["two"]
        assert await read(client, "a" * 65) == [400]


async def test_a_second_stream_of_a_call_keeps_it_going() -> None:
    call = Calls().join("CA1")
    call.streams += 1
    call.leave()
    assert not call.over
    call.leave()
    assert call.over


async def test_a_finished_call_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "KEEP_SECONDS", 0.0)
    all_calls = Calls()
    call = all_calls.join("CA1")
    say(call, "one")
    call.leave()
    while "CA1" in all_calls._calls:
        await asyncio.sleep(0)
    assert all_calls.join("CA1") is not call


async def test_calls_readers_and_history_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_CALLS", 3)
    monkeypatch.setattr(calls, "MAX_HISTORY_BYTES", 1_000)
    all_calls = Calls()
    old = all_calls.join("CA0")
    say(old, *(f"{number:0100}" for number in range(50)))
    assert 3 <= len(old._history) <= 8
    assert texts([json.loads(data.split(b"data: ")[1]) for _, data in old.read_after(0).frames])[-1] == f"{49:0100}"
    all_calls.join("CA1")
    all_calls.join("CA2")
    with pytest.raises(TooManyStreams):
        all_calls.join("CA3")
    old.leave()
    all_calls.join("CA3")
    assert list(all_calls._calls) == ["CA1", "CA2", "CA3"]
    with pytest.raises(BadRequest):
        all_calls.join("../etc")


async def test_a_reader_that_does_not_read_loses_what_is_of_the_moment_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_UNREAD", 20)
    call = Calls().join("CA1")
    reader = call.read_after(0)
    for number in range(50):
        call.mention({"type": "partial", "text": str(number)}, "partial")
    assert len(reader.frames) == 1
    say(call, *map(str, range(19)))
    assert not reader.lost
    say(call, "too much")
    assert reader.lost


# ---------------------------------------------------------------- webhook


class Receiver:
    """A real HTTP server that answers with the statuses it is given, then with 204."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.news = asyncio.Condition()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        more = True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        status = self.statuses.pop(0) if self.statuses else 204
        self.got.append(({k.decode(): v.decode() for k, v in scope["headers"]}, body))
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})
        async with self.news:
            self.news.notify_all()

    async def until(self, count: int) -> list[Any]:
        """The first ``count`` bodies."""
        async with self.news:
            await self.news.wait_for(lambda: len(self.got) >= count)
        return [json.loads(body) for _, body in self.got[:count]]


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_webhook, "FIRST_PAUSE_SECONDS", 0.01)


async def test_events_arrive_in_order_and_a_failure_is_repeated() -> None:
    receiver = Receiver(500, 503, 429)
    async with serving(receiver) as url:
        webhook = CallWebhook(f"{url}/hook", "shared secret")
        for number in range(3):
            webhook.post({"type": "final", "call_sid": "CA1", "id": number, "text": f"№ {number}"})
        bodies = await receiver.until(6)
        assert [body["id"] for body in bodies] == [0, 0, 0, 0, 1, 2]
        headers, body = receiver.got[-1]
        assert (
            headers["x-napscribe-signature"] == "sha256=" + hmac.new(b"shared secret", body, hashlib.sha256).hexdigest()
        )
        assert headers["x-napscribe-delivery"] == "CA1:2"
        await webhook.aclose()
        assert webhook.dropped == 0


async def test_what_the_receiver_refuses_is_dropped_and_the_next_goes_on() -> None:
    receiver = Receiver(404, *[500] * call_webhook.ATTEMPTS)
    async with serving(receiver) as url:
        webhook = CallWebhook(url)
        for number in range(3):
            webhook.post({"type": "final", "id": number})
        bodies = await receiver.until(2 + call_webhook.ATTEMPTS)
        assert [body["id"] for body in bodies] == [0, *[1] * call_webhook.ATTEMPTS, 2]
        await webhook.aclose()
        assert webhook.dropped == 2


async def test_a_sender_that_cannot_be_made_is_tried_again_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_webhook, "MAX_PAUSE_SECONDS", 0.2)
    make, tries = call_webhook._client, []

    def fail() -> None:
        tries.append(time.monotonic())
        raise FileNotFoundError("certificates")

    monkeypatch.setattr(call_webhook, "_client", fail)
    async with serving(receiver := Receiver()) as url:
        webhook = CallWebhook(url)
        webhook.post({"type": "final", "id": 1})
        async with asyncio.timeout(20):
            while len(tries) < 3:
                await asyncio.sleep(0.01)
        assert all(after - before >= 0.19 for before, after in pairwise(tries))
        monkeypatch.setattr(call_webhook, "_client", make)
        assert [body["id"] for body in await receiver.until(1)] == [1]
        await webhook.aclose()
        assert webhook.dropped == 0


async def test_nobody_there_is_no_harm() -> None:
    webhook = CallWebhook("http://127.0.0.1:9/")
    webhook.post({"type": "final", "id": 1})
    assert webhook._sender is not None
    await asyncio.wait_for(asyncio.shield(_dropped(webhook)), 20)
    await webhook.aclose()


async def _dropped(webhook: CallWebhook) -> None:
    while not webhook.dropped:
        await asyncio.sleep(0.005)


async def test_a_sender_that_left_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_webhook, "LINGER_SECONDS", 0.0)
    receiver = Receiver()
    async with serving(receiver) as url:
        webhook = CallWebhook(url)
        for number in range(3):
            webhook.post({"type": "final", "id": number})
            await receiver.until(number + 1)
            sender = webhook._sender
            assert sender is not None
            await sender
        await webhook.aclose()


class _SlowToClose(httpx.AsyncClient):
    """Closes when it is told to."""

    closing = asyncio.Event()
    may_close = asyncio.Event()

    async def aclose(self) -> None:
        self.closing.set()
        await self.may_close.wait()
        await super().aclose()


async def test_an_event_that_comes_while_the_sender_leaves_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_webhook, "LINGER_SECONDS", 0.0)
    monkeypatch.setattr(call_webhook, "_client", _SlowToClose)
    receiver = Receiver()
    async with serving(receiver) as url:
        webhook = CallWebhook(url)
        webhook.post({"type": "final", "id": 1})
        await _SlowToClose.closing.wait()
        webhook.post({"type": "final", "id": 2})
        _SlowToClose.may_close.set()
        assert [body["id"] for body in await receiver.until(2)] == [1, 2]
        await webhook.aclose()


async def test_events_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_webhook, "MAX_WAITING", 3)
    webhook = CallWebhook("http://127.0.0.1:9/")
    for number in range(5):
        webhook.post({"type": "final", "id": number})
    assert [event["id"] for _, event in webhook._waiting] == [2, 3, 4]
    assert webhook.dropped == 2
    monkeypatch.setattr(call_webhook, "CLOSE_SECONDS", 0.0)
    await webhook.aclose()


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
