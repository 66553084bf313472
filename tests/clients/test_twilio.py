"""A phone call as Twilio sends it: JSON with 20 ms of mu-law each, both tracks on one socket; the transcript on the side channel."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
import math
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import zip_longest
from typing import Any

import httpx
import numpy as np
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from gateway.streams.twilio_signature import sign
from tests.server import Server, serving
from tests.speech import DATA, NAMES, clip, encode, silence, transcripts, word_errors

KEY, AUTH_TOKEN, SECRET = "a-key-of-the-operator", "twilio-auth-token", "webhook-secret"
FRAME = 160
SHORT = "librivox-0880"


class Receiver:
    """A local HTTP server that takes the webhook; the first POST of every kind of event is answered with 500."""

    def __init__(self) -> None:
        self.tries: list[tuple[dict[str, str], bytes]] = []
        self.taken: list[dict[str, Any]] = []
        self._failed: set[str] = set()
        self._news = threading.Condition()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                self.send_response(receiver.take({k.lower(): v for k, v in self.headers.items()}, body))
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                """Not on stderr."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/calls"

    def take(self, headers: dict[str, str], body: bytes) -> int:
        event = json.loads(body)
        with self._news:
            self.tries.append((headers, body))
            fails = event["type"] not in self._failed
            self._failed.add(event["type"])
            if not fails:
                self.taken.append(event)
                self._news.notify_all()
        return 500 if fails else 204

    def of_call(self, sid: str) -> list[dict[str, Any]]:
        """All events of a call, once its end has come."""

        def events() -> list[dict[str, Any]]:
            return [event for event in self.taken if event["call_sid"] == sid]

        with self._news:
            assert self._news.wait_for(lambda: any(event["type"] == "ended" for event in events()), 30), self.taken
            return events()


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    thread = threading.Thread(target=receiver.http.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield receiver
    receiver.http.shutdown()
    receiver.http.server_close()
    thread.join()


@pytest.fixture(scope="module")
def phone(receiver: Receiver) -> Iterator[Server]:
    """With keys, a Twilio account and a webhook."""
    with serving(
        api_keys=KEY, twilio_auth_token=AUTH_TOKEN, call_webhook=receiver.url, call_webhook_secret=SECRET
    ) as running:
        running.http.headers["authorization"] = f"Bearer {KEY}"
        yield running


@cache
def frames(name: str, before: float = 0.0, after: float = 0.8) -> tuple[bytes, ...]:
    """A clip as a phone hears it, with silence around."""
    audio = np.concatenate([silence(before), clip(name), silence(after)])
    data = encode(audio, "mulaw", "pcm_mulaw", rate=8_000)
    return tuple(data[at : at + FRAME].ljust(FRAME, b"\xff") for at in range(0, len(data), FRAME))


@cache
def heard_by_file(server: Server, name: str) -> int:
    return word_errors(transcripts()[name], server.transcribe(DATA / f"{name}.wav").json()["text"])


class Call:
    """Twilio's side of a media stream."""

    def __init__(self, websocket: ClientConnection, sid: str, tracks: Sequence[str]) -> None:
        self.websocket = websocket
        self.sid = sid
        self.tracks = tracks
        self._sequence = 0
        self._chunks = dict.fromkeys(tracks, 0)

    async def send(self, event: str, **fields: Any) -> None:
        self._sequence += 1
        message = {"event": event, "sequenceNumber": str(self._sequence), "streamSid": f"MZ{self.sid}", **fields}
        await self.websocket.send(json.dumps(message))

    async def start(self, **custom: str) -> None:
        await self.websocket.send(json.dumps({"event": "connected", "protocol": "Call", "version": "1.0.0"}))
        start = {
            "accountSid": "AC1",
            "callSid": self.sid,
            "streamSid": f"MZ{self.sid}",
            "tracks": list(self.tracks),
            "mediaFormat": {"encoding": "audio/x-mulaw", "sampleRate": 8000, "channels": 1},
            "customParameters": custom,
        }
        await self.send("start", start=start)

    def media(self, track: str, data: bytes) -> dict[str, Any]:
        self._chunks[track] += 1
        number = self._chunks[track]
        payload = base64.b64encode(data).decode()
        return {"track": track, "chunk": str(number), "timestamp": str(20 * number - 15), "payload": payload}

    async def talk(self, *by_track: Sequence[bytes], pace: float = math.inf) -> None:
        """Both sides at once, frame by frame; ``pace`` 1 is that of speech."""
        for moment in zip_longest(*by_track):
            for track, data in zip(self.tracks, moment, strict=True):
                if data is not None:
                    await self.send("media", media=self.media(track, data))
            if pace < math.inf:
                await asyncio.sleep(0.02 / pace)

    async def stop(self) -> None:
        """And wait until the server has hung up: everything is said then."""
        await self.send("stop", stop={"accountSid": "AC1", "callSid": self.sid})
        with contextlib.suppress(ConnectionClosed):
            while True:
                raise AssertionError(f"something was said to Twilio: {await self.websocket.recv()!r}")
        assert self.websocket.close_code == 1000


@contextlib.asynccontextmanager
async def calling(server: Server, sid: str, *tracks: str, **headers: str) -> AsyncIterator[Call]:
    url = f"ws://127.0.0.1:{server.port}/twilio"
    async with connect(url, additional_headers=headers, proxy=None) as websocket:
        yield Call(websocket, sid, tracks or ("inbound",))


async def listen(server: Server, sid: str, there: asyncio.Event | None = None, key: str = "") -> list[dict[str, Any]]:
    """All events of a call, until they end."""
    events: list[dict[str, Any]] = []
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=60, headers=headers) as client,
        client.stream("GET", f"/v1/calls/{sid}/events") as answer,
    ):
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if there is not None:
                there.set()
            if line.startswith("data: {"):
                events.append(json.loads(line.removeprefix("data: ")))
    return events


def finals(events: Sequence[dict[str, Any]], track: str) -> list[dict[str, Any]]:
    return [event for event in events if event["type"] == "final" and event["track"] == track]


def said(events: Sequence[dict[str, Any]], track: str) -> str:
    return " ".join(event["text"] for event in finals(events, track))


# ---------------------------------------------------------------- words


@pytest.mark.parametrize("name", [SHORT, *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES)])
async def test_a_call_at_the_pace_of_speech(server: Server, name: str) -> None:
    sid = f"CA-paced-{name}"
    there = asyncio.Event()
    reading = asyncio.ensure_future(listen(server, sid, there))
    await there.wait()
    async with calling(server, sid) as call:
        await call.start()
        await call.talk(frames(name), pace=1)
        await call.stop()
    events = await reading
    kinds = [event["type"] for event in events]
    assert kinds[0] == "started"
    assert kinds[-1] == "ended"
    assert {"speech_started", "partial", "speech_stopped", "final"} <= set(kinds)
    assert word_errors(transcripts()[name], said(events, "inbound")) <= heard_by_file(server, name) + 2
    assert events[-1]["duration"] == pytest.approx(0.02 * len(frames(name)), abs=0.05)


async def test_words_of_a_phone_line_are_nearly_those_of_the_file(server: Server) -> None:
    """All clips, two at a time, both tracks of a call interleaved; five points of word errors are what 8 kHz may cost."""
    errors = by_file = 0
    for number, (inbound, outbound) in enumerate(zip(NAMES[::2], NAMES[1::2], strict=True)):
        sid = f"CA-both-{number}"
        async with calling(server, sid, "inbound", "outbound") as call:
            await call.start()
            await call.talk(frames(inbound, before=0.3), frames(outbound))
            await call.stop()
        events = await listen(server, sid)  # the call is over
        for name, track in ((inbound, "inbound"), (outbound, "outbound")):
            errors += word_errors(transcripts()[name], said(events, track))
            by_file += heard_by_file(server, name)
            clock = 0.0
            for final in finals(events, track):
                assert clock <= final["start"] < final["end"] <= 0.02 * len(frames(name, before=0.3))
                clock = final["end"]
    words = sum(len(transcripts()[name].split()) for name in NAMES)
    assert errors <= by_file + 0.05 * words, (errors, by_file, words)


async def test_frames_out_of_order_and_lost_and_a_line_that_breaks(server: Server) -> None:
    """Marks, digits, a swap of every tenth frame, one frame in fifty lost, and no stop in the end."""
    sid = "CA-rough"
    async with calling(server, sid) as call:
        await call.start(language="en")
        media = [call.media("inbound", data) for data in frames("librivox-0890")]
        for at in range(5, len(media) - 10, 10):
            media[at], media[at + 1] = media[at + 1], media[at]
        for number, part in enumerate(media):
            if number % 50 != 49:
                await call.send("media", media=part)
            if number % 40 == 0:
                await call.send("mark", mark={"name": "x"})
                await call.send("dtmf", dtmf={"track": "inbound_track", "digit": "1"})
    events = await listen(server, sid)
    assert (
        word_errors(transcripts()["librivox-0890"], said(events, "inbound"))
        <= heard_by_file(server, "librivox-0890") + 2
    )
    assert events[-1]["type"] == "ended"
    assert events[-1]["duration"] == pytest.approx(0.02 * len(media), abs=0.1)


async def test_two_readers_read_the_same_and_neither_holds_up_the_call(server: Server) -> None:
    sid = "CA-two-readers"
    there = [asyncio.Event(), asyncio.Event()]
    readers = [asyncio.ensure_future(listen(server, sid, event)) for event in there]
    for event in there:
        await event.wait()
    async with calling(server, sid) as call:
        await call.start()
        await call.talk(frames(SHORT))
        await call.stop()
    first, second = await asyncio.gather(*readers)
    kept = [[event for event in events if "id" in event] for events in (first, second)]
    assert kept[0] == kept[1]
    assert [event["id"] for event in kept[0]] == list(range(1, len(kept[0]) + 1))


# ---------------------------------------------------------------- keys and webhook


async def test_the_webhook_gets_what_was_said_although_it_fails_at_first(phone: Server, receiver: Receiver) -> None:
    sid = "CA-webhook"
    async with calling(phone, sid, "inbound", "outbound") as call:
        await call.start(token=KEY)
        await call.talk(frames(SHORT), frames("librivox-0930"), pace=8)
        await call.stop()
    events = await asyncio.to_thread(receiver.of_call, sid)
    assert events[0]["type"] == "started"
    assert [event["id"] for event in events] == list(range(1, len(events) + 1)), "in order, none twice"
    by_reader = await listen(phone, sid, key=KEY)
    assert events == by_reader
    for name, track in ((SHORT, "inbound"), ("librivox-0930", "outbound")):
        assert word_errors(transcripts()[name], said(events, track)) <= heard_by_file(phone, name) + 2
    for headers, body in receiver.tries:
        digest = hmac.new(SECRET.encode(), body, hashlib.sha256).hexdigest()
        assert headers["x-napscribe-signature"] == f"sha256={digest}"
    assert len(receiver.tries) == len(receiver.taken) + 3, "started, final and ended were sent again"
    assert KEY not in phone.log()
    assert SECRET not in phone.log()


async def test_a_signed_handshake_needs_no_token(phone: Server) -> None:
    signature = sign(AUTH_TOKEN, "wss://voice.example.org/twilio").decode()
    headers = {"x-forwarded-host": "voice.example.org", "x-twilio-signature": signature}
    async with calling(phone, "CA-signed", **headers) as call:
        await call.start()
        await call.stop()
    assert [event["type"] for event in await listen(phone, "CA-signed", key=KEY)] == ["started", "ended"]


async def test_a_wrong_signature_is_refused_at_the_handshake(phone: Server) -> None:
    with pytest.raises(InvalidStatus) as refused:
        async with calling(phone, "CA-forged", **{"x-twilio-signature": sign("guessed", "wss://x/twilio").decode()}):
            pass
    assert refused.value.response.status_code == 401


async def test_a_wrong_token_is_hung_up_on(phone: Server) -> None:
    async with calling(phone, "CA-wrong") as call:
        await call.start(token="wrong")
        with pytest.raises(ConnectionClosed):
            await call.websocket.recv()
        assert (call.websocket.close_code, call.websocket.close_reason) == (1008, "invalid_api_key")


def test_readers_need_a_key_too(phone: Server) -> None:
    answer = httpx.get(f"{phone.url}/v1/calls/CA-any/events")
    assert answer.status_code == 401
