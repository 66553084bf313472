"""What the runner does with a socket that is slow, gone or refused, and with a dialect that makes a mistake."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import pytest
from starlette.websockets import WebSocket

from gateway.streams import runner
from gateway.streams.dialect import Audio, Effect, Finish, Hang, Open, Say
from gateway.streams.hub import Hub
from gateway.streams.live import LiveStream
from gateway.streams.runner import Runner
from shared.errors import NapscribeError, TooManyStreams
from shared.streams import StreamDone, StreamEvent, StreamOptions, UtteranceFinal
from shared.wire import RawAudio

OPTIONS = StreamOptions(RawAudio("s16le", 16_000, 1))


async def others() -> None:
    """Let every other task come as far as it can, as a real socket does while it writes."""
    for _ in range(30):
        await asyncio.sleep(0)


class Line:
    """The ASGI side of a WebSocket. ``sent`` is what has gone out; ``stuck`` keeps it from going out."""

    def __init__(self, *, answers: bool = True) -> None:
        self.incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.incoming.put_nowait({"type": "websocket.connect"})
        self.sent: list[dict[str, Any]] = []
        self.stuck = False
        extensions: dict[str, Any] = {"websocket.http.response": {}} if answers else {}
        scope = {
            "type": "websocket", "path": "/v1/x", "headers": [], "query_string": b"", "scheme": "ws",
            "server": ("127.0.0.1", 80), "extensions": extensions,
        }  # fmt: skip
        self.socket = WebSocket(scope, self.receive, self._send)

    async def receive(self) -> Any:
        return await self.incoming.get()

    async def _send(self, message: Any) -> None:
        if self.stuck and message["type"] != "websocket.accept":
            await asyncio.Event().wait()
        await others()
        self.sent.append(message)

    def say(self, text: str) -> None:
        self.incoming.put_nowait({"type": "websocket.receive", "text": text})

    def leave(self) -> None:
        self.incoming.put_nowait({"type": "websocket.disconnect", "code": 1005})

    @property
    def texts(self) -> list[str]:
        return [message["text"] for message in self.sent if message["type"] == "websocket.send"]

    @property
    def closed(self) -> list[tuple[int, str]]:
        return [(m["code"], m["reason"]) for m in self.sent if m["type"] == "websocket.close"]


class Rooms:
    """Streams without workers."""

    def __init__(self, refusal: NapscribeError | None = None) -> None:
        self.refusal = refusal
        self.streams: list[LiveStream] = []
        self.given_back: list[LiveStream] = []

    def open(self, stream_id: str, options: StreamOptions) -> LiveStream:
        if self.refusal is not None:
            raise self.refusal
        self.streams.append(LiveStream(stream_id, options, lambda _: None, lambda *_frame: None))
        return self.streams[-1]

    def close(self, stream: LiveStream) -> None:
        self.given_back.append(stream)


class Echo:
    """Opens a stream and says what it is told; a few words mean more."""

    subprotocol: str | None = "echo"
    hears_progress: ClassVar[bool] = True
    read_timeout: ClassVar[float] = 60.0

    def begin(self) -> Sequence[Effect]:
        return [Open(OPTIONS), Say("hello")]

    def receive(self, message: str | bytes) -> Sequence[Effect]:
        match message:
            case "bye":
                return [Say("bye"), Hang(1000, "r" * 200), Say("never")]
            case "mistake":
                raise ZeroDivisionError("secret words")
            case bytes():
                return [Audio(message)]
        return [Say(f"you said {message}")]

    def event(self, event: StreamEvent, track: int) -> Sequence[Effect]:
        return [Say(type(event).__name__)]

    def failed(self, error: NapscribeError, track: int) -> Sequence[Effect]:
        return [Say(error.code), Hang(1011)]

    def silent(self) -> Sequence[Effect]:
        return [Hang(1001)]

    def left(self) -> Sequence[Effect]:
        return [Finish()]


def run(line: Line, rooms: Rooms, dialect: Echo | None = None) -> asyncio.Task[None]:
    return asyncio.ensure_future(Runner(line.socket, line.receive, dialect or Echo(), cast(Hub, rooms)).run())


async def until_said(line: Line, count: int) -> None:
    async with asyncio.timeout(5):
        while len(line.texts) < count:
            await asyncio.sleep(0)


async def test_the_close_frame_goes_out_whole_and_last() -> None:
    line, rooms = Line(), Rooms()
    line.say("something")
    line.say("bye")
    await asyncio.wait_for(run(line, rooms), 5)
    assert line.texts == ["hello", "you said something", "bye"]
    assert line.sent[-1]["type"] == "websocket.close"
    assert line.closed == [(1000, "r" * 120)]
    assert rooms.given_back == rooms.streams


async def test_a_hang_by_the_reader_of_a_stream_is_not_cut_off_by_its_own_end() -> None:
    """The task that closes the socket is one of those that end with it."""
    line, rooms = Line(), Rooms()
    running = run(line, rooms)
    await until_said(line, 1)
    rooms.streams[0].fail(TooManyStreams("full"))
    await asyncio.wait_for(running, 5)
    assert line.texts == ["hello", "too_many_streams"]
    assert line.closed == [(1011, "")]


async def test_a_client_that_no_longer_reads_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "WRITE_SECONDS", 0.02)
    monkeypatch.setattr(runner, "CLOSE_SECONDS", 0.02)
    line, rooms = Line(), Rooms()
    running = run(line, rooms)
    await until_said(line, 1)
    line.stuck = True
    line.say("something")
    await asyncio.wait_for(running, 5)
    assert rooms.given_back == rooms.streams


async def test_a_client_that_is_held_back_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its audio waits for a worker that starts; what it says after that is not read before there is room."""
    monkeypatch.setattr(Echo, "read_timeout", 0.05)
    line, rooms = Line(), Rooms()
    running = run(line, rooms)
    await until_said(line, 1)
    line.incoming.put_nowait({"type": "websocket.receive", "bytes": bytes(32_000 * 20)})
    await asyncio.sleep(0.4)
    assert not line.closed
    rooms.streams[0].fail(TooManyStreams("full"))
    await asyncio.wait_for(running, 5)
    assert line.closed == [(1011, "")]


async def test_a_client_that_says_nothing_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Echo, "read_timeout", 0.05)
    line = Line()
    await asyncio.wait_for(run(line, Rooms()), 5)
    assert line.closed == [(1001, "")]


async def test_a_mistake_of_a_dialect_ends_its_connection_and_tells_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    line, rooms = Line(), Rooms()
    line.say("mistake")
    await asyncio.wait_for(run(line, rooms), 5)
    assert line.closed == [(1011, "internal_error")]
    assert rooms.given_back == rooms.streams
    logged = capsys.readouterr().err
    assert "ZeroDivisionError" in logged
    assert "secret words" not in logged


@pytest.mark.parametrize("answers", [True, False])
async def test_a_stream_refused_at_the_handshake_is_a_refused_handshake(answers: bool) -> None:
    line = Line(answers=answers)
    await asyncio.wait_for(run(line, Rooms(TooManyStreams("full"))), 5)
    if answers:
        assert line.sent[0]["type"] == "websocket.http.response.start"
        assert line.sent[0]["status"] == 429
    else:
        assert line.closed == [(1008, "too_many_streams")]


async def test_what_a_client_left_behind_is_finished_before_the_end() -> None:
    line, rooms = Line(), Rooms()
    running = run(line, rooms)
    await until_said(line, 1)
    line.leave()
    stream = rooms.streams[0]
    async with asyncio.timeout(5):
        while not stream.closing:
            await asyncio.sleep(0)
    await others()
    assert not running.done()
    stream.take(UtteranceFinal(1, stream.id, 0, 0, 1, 1, "last words"))
    stream.take(StreamDone(1, stream.id, 1))
    await asyncio.wait_for(running, 5)
    assert line.texts == ["hello"], "nobody is there to be told"
    assert rooms.given_back == [stream]
