"""Server-sent events of a streamed transcription, as the SDKs read them: one JSON object per ``data:`` line.

No ``event:`` lines: the type is in the object. Comments keep a connection alive and are invisible to every client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import msgspec

from gateway.answers.errors_http import envelope
from shared.errors import NapscribeError

CONTENT_TYPE = "text/event-stream; charset=utf-8"

HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""For the response: proxies must hand every event on at once."""

DONE = b"data: [DONE]\n\n"
"""The end of a stream."""

_encoder = msgspec.json.Encoder()


def delta(text: str, *, logprobs: Sequence[dict[str, Any]] | None = None) -> bytes:
    """Words that are new. All deltas of a stream, concatenated, are the text of its ``done``."""
    event: dict[str, Any] = {"type": "transcript.text.delta", "delta": text}
    if logprobs:
        event["logprobs"] = logprobs
    return _data(event)


def done(
    text: str,
    *,
    usage: dict[str, Any] | None = None,
    languages: Sequence[dict[str, str]] = (),
    logprobs: Sequence[dict[str, Any]] | None = None,
    finish_reason: str = "stop",
) -> bytes:
    """The whole text, and ``finish_reason`` where a segment of it ended as a run-away. A field that is not known is left out: a null in its place ends some clients."""
    event: dict[str, Any] = {"type": "transcript.text.done", "text": text}
    if logprobs:
        event["logprobs"] = logprobs
    if languages:
        event["languages"] = languages
    if finish_reason != "stop":
        event["finish_reason"] = finish_reason
    if usage:
        event["usage"] = usage
    return _data(event)


def error(failure: NapscribeError) -> bytes:
    """A failure after the status line has gone out; SDKs raise it."""
    return _data(envelope(failure))


def comment(text: str) -> bytes:
    """A sign of life, such as ``starting loading 37%``."""
    return f": {' '.join(text.split())}\n\n".encode("utf-8", "replace")


async def with_keepalive(
    frames: AsyncGenerator[bytes, None],
    *,
    seconds: float,
    text: Callable[[], str] = lambda: "keep-alive",
) -> AsyncGenerator[bytes, None]:
    """``frames`` as they come, and ``comment(text())`` whenever none came for ``seconds``.

    ``frames`` is closed when this ends, however it ends; errors of it come through.
    """
    pending: asyncio.Task[bytes] | None = None
    try:
        while True:
            pending = pending or asyncio.ensure_future(anext(frames))
            finished, _ = await asyncio.wait({pending}, timeout=seconds)
            if not finished:
                yield comment(text())
                continue
            task, pending = pending, None
            try:
                frame = task.result()
            except StopAsyncIteration:
                return
            yield frame
    finally:
        if pending is not None:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
        await frames.aclose()


def _data(event: dict[str, Any]) -> bytes:
    return b"data: " + _encoder.encode(event) + b"\n\n"
