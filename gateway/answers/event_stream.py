"""A response of server-sent events that notices when its reader leaves, and answers with a plain error while it still can."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.answers import sse
from shared.errors import NapscribeError

PEEK_SECONDS = 1.0
"""How long a stream waits for its first event before it commits to status 200: a bad file gets its 4xx."""
KEEP_ALIVE_SECONDS = 5.0
"""Of silence before a comment; proxies cut a silent connection after 30 to 100."""


class EventStream(Response):
    """Sends ``frames`` as they come, comments in between; ``leave`` is awaited at the end, whatever the end is."""

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        waiting: Callable[[], str],
        begin: Callable[[], None],
        leave: Callable[[], Awaitable[None]],
    ) -> None:
        """``waiting()``: what the reader waits for, said in the comments. ``begin()`` is called just before the status line."""
        super().__init__(headers={"content-type": sse.CONTENT_TYPE, **sse.HEADERS})
        del self.headers["content-length"]
        self._frames = frames
        self._waiting = waiting
        self._begin = begin
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises the NapscribeError of the first frame, before anything is sent."""
        sender = asyncio.ensure_future(self._send_all(send))
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait({sender, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                await sender
        finally:
            await settle(sender, gone)
            await self._leave()

    async def _send_all(self, send: Send) -> None:
        first = asyncio.ensure_future(_next(self._frames))
        try:
            await asyncio.wait({first}, timeout=PEEK_SECONDS)
            if first.done():
                first.result()
            self._begin()
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            kept_alive = sse.with_keepalive(_chain(first, self._frames), seconds=KEEP_ALIVE_SECONDS, text=self._waiting)
            async with contextlib.aclosing(kept_alive) as frames:
                async for frame in frames:
                    await send({"type": "http.response.body", "body": frame, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await settle(first)


async def _next(frames: AsyncGenerator[bytes, None]) -> bytes | None:
    return await anext(frames, None)


async def _chain(first: asyncio.Future[bytes | None], rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """All frames; an error in their midst becomes the last one."""
    try:
        head = await first
        if head is None:
            return
        yield head
        async for frame in rest:
            yield frame
    except NapscribeError as error:
        yield sse.error(error)


async def disconnected(receive: Receive) -> None:
    """Return when the peer has gone. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def settle(*tasks: asyncio.Future[Any]) -> None:
    """Cancel what still runs and wait for it; its outcome is of no interest any more."""
    for task in tasks:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task
