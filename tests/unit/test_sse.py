"""Event streams, read by the openai SDK from a real socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

import openai
import pytest
from openai.types.audio import TranscriptionTextDeltaEvent, TranscriptionTextDoneEvent
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from gateway.answers import sse
from shared import errors
from tests.serving import serving

USAGE = {"type": "duration", "seconds": 3}
LOGPROBS = [{"token": "Hello", "logprob": -0.5, "bytes": [72, 101, 108, 108, 111]}]


def event(frame: bytes) -> dict[str, Any]:
    """The object of one frame, after checking the frame itself."""
    assert frame.startswith(b"data: ") and frame.endswith(b"\n\n") and frame.count(b"\n") == 2
    loaded: dict[str, Any] = json.loads(frame[6:])
    return loaded


def test_events_are_those_of_the_sdk() -> None:
    delta = event(sse.delta("Hello", logprobs=LOGPROBS))
    done = event(sse.done("Hello\nworld", languages=[{"code": "en"}], logprobs=LOGPROBS))
    TranscriptionTextDeltaEvent.model_validate(delta, strict=True)
    assert TranscriptionTextDoneEvent.model_validate(done, strict=True).text == "Hello\nworld"
    assert event(sse.done("", usage=USAGE)) == {"type": "transcript.text.done", "text": "", "usage": USAGE}


def test_what_is_unknown_is_left_out() -> None:
    assert event(sse.done("x")).keys() == {"type", "text"}
    assert event(sse.delta("x")).keys() == {"type", "delta"}


def test_a_comment_is_one_line() -> None:
    assert sse.comment("starting\n\ndata: loading 37%") == b": starting data: loading 37%\n\n"


def app(*frames: bytes) -> Starlette:
    async def stream() -> AsyncGenerator[bytes, None]:
        for frame in frames:
            yield frame

    async def door(request: Request) -> StreamingResponse:
        await request.body()  # a server that closes on unread bytes resets the connection
        return StreamingResponse(stream(), media_type=sse.CONTENT_TYPE, headers=sse.HEADERS)

    return Starlette(routes=[Route("/v1/audio/transcriptions", door, methods=["POST"])])


async def read(*frames: bytes) -> list[Any]:
    """What the SDK makes of the frames."""
    async with serving(app(*frames)) as url, openai.AsyncOpenAI(api_key="k", base_url=f"{url}/v1") as client:
        stream = await client.audio.transcriptions.create(model="whisper-1", file=("a.wav", b"x"), stream=True)
        return [event async for event in stream]


async def test_the_sdk_reads_the_stream() -> None:
    events = await read(
        sse.comment("starting loading 37%"),
        sse.delta("Hello"),
        sse.delta(" wörld"),
        sse.done("Hello wörld", usage=USAGE),
        sse.DONE,
    )
    assert [type(event).__name__ for event in events] == [
        "TranscriptionTextDeltaEvent",
        "TranscriptionTextDeltaEvent",
        "TranscriptionTextDoneEvent",
    ]
    assert "".join(event.delta for event in events[:2]) == events[2].text == "Hello wörld"
    assert events[2].usage.seconds == 3


async def test_an_error_in_mid_stream_is_raised_by_the_sdk() -> None:
    failure = errors.WorkerCrashed("This recording ended the worker twice.", hint="Try another.")
    with pytest.raises(openai.APIError) as caught:
        await read(sse.delta("Hello"), sse.error(failure))
    assert caught.value.code == "worker_crashed" and caught.value.type == "server_error"
    assert "twice" in caught.value.message


class Frames:
    """A source of frames that a test drives, and that knows whether it was closed."""

    def __init__(self) -> None:
        self.ready: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self.closed = False

    async def run(self) -> AsyncGenerator[bytes, None]:
        try:
            while (frame := await self.ready.get()) is not None:
                if isinstance(frame, Exception):
                    raise frame
                yield frame
        finally:
            self.closed = True


def others() -> set[asyncio.Task[Any]]:
    """Tasks that are left beside the test's own."""
    return asyncio.all_tasks() - {asyncio.current_task()}


async def test_comments_fill_the_silence_and_no_frame_is_lost() -> None:
    source = Frames()
    phases: Iterator[str] = iter(f"loading {percent}%" for percent in range(1000))
    stream = sse.with_keepalive(source.run(), seconds=0.001, text=lambda: next(phases))
    assert [await anext(stream) for _ in range(3)] == [b": loading 0%\n\n", b": loading 1%\n\n", b": loading 2%\n\n"]
    for frame in (b"one", b"two", None):
        source.ready.put_nowait(frame)
    rest = [frame async for frame in stream if not frame.startswith(b":")]
    assert rest == [b"one", b"two"]
    assert source.closed and not others()


async def test_without_silence_there_is_no_comment() -> None:
    source = Frames()
    for frame in (b"one", b"two", None):
        source.ready.put_nowait(frame)
    assert [frame async for frame in sse.with_keepalive(source.run(), seconds=10)] == [b"one", b"two"]


async def test_errors_of_the_source_come_through() -> None:
    source = Frames()
    source.ready.put_nowait(errors.EngineFailed("broken"))
    with pytest.raises(errors.EngineFailed):
        await anext(sse.with_keepalive(source.run(), seconds=10))
    assert source.closed and not others()


async def test_a_reader_that_stops_leaves_nothing_running() -> None:
    source = Frames()
    async with aclosing(sse.with_keepalive(source.run(), seconds=0.001)) as stream:
        assert await anext(stream) == b": keep-alive\n\n"
        assert others()  # somebody waits for the next frame
    assert source.closed and not others()


async def test_a_reader_that_stops_between_two_frames_closes_the_source() -> None:
    source = Frames()
    source.ready.put_nowait(b"one")
    frames = source.run()
    async with aclosing(sse.with_keepalive(frames, seconds=10)) as stream:
        assert await anext(stream) == b"one"
    assert source.closed and not others()


async def test_a_cancelled_reader_leaves_nothing_running() -> None:
    source = Frames()
    stream = sse.with_keepalive(source.run(), seconds=100)
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert source.closed and not others()
