"""Transcripts of phone calls on their side channel: any number of readers per call, before, during and shortly after it.

The phone company takes no text back, so whoever wants it reads ``GET /v1/calls/{call}/events``: first what there is, then what
comes. What has been said is kept in bounds and for a while; partials only go to those who read at that moment.
"""

from __future__ import annotations

import asyncio
import collections
import re
from collections.abc import AsyncGenerator, Callable, Hashable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from gateway.answers import sse
from gateway.answers.event_stream import EventStream
from shared.errors import BadRequest, SlowReader, TooManyStreams

MAX_CALLS = 2_048
"""Calls that are remembered, waited for ones included."""
MAX_READERS = 1_024
MAX_HISTORY_BYTES = 256 * 1024
"""Of one call: about a thousand finals. The oldest are forgotten first."""
MAX_UNREAD = 2_000
"""Events that wait for one reader."""
MAX_UNREAD_MENTIONS = 64
"""With so much unread, a reader gets nothing of the moment any more."""
KEEP_SECONDS = 300.0
"""A call can still be read so long after its end."""
WAIT_SECONDS = 900.0
"""A reader may be there so long before its call."""
RETRY = b"retry: 2000\n\n"
"""First words of every stream: a browser that loses it comes back after two seconds."""

_SID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_encode = msgspec.json.Encoder().encode

Event = dict[str, Any]
"""With a ``type``; JSON."""


class _Reader:
    """Frames for one reader. A partial takes the place of the one before it that has not been read."""

    def __init__(self) -> None:
        self.frames: collections.deque[tuple[Hashable, bytes]] = collections.deque()
        self.news = asyncio.Event()
        self.lost = False

    def put(self, frame: bytes, replaces: Hashable = None) -> None:
        """``replaces`` marks something of the moment."""
        if replaces is not None:
            if len(self.frames) > MAX_UNREAD_MENTIONS:
                return
            for index in range(len(self.frames) - 1, -1, -1):
                if self.frames[index][0] == replaces:
                    del self.frames[index]
                    break
        if len(self.frames) >= MAX_UNREAD:
            self.lost = True
        else:
            self.frames.append((replaces, frame))
        self.news.set()


class Call:
    """One call, by its sid. Made by ``Calls``."""

    def __init__(self, sid: str, ended: Callable[[Call], None], watch: Callable[[Event], None]) -> None:
        self.sid = sid
        self.streams = 0
        """Media streams that are open now."""
        self.begun = False
        self.readers: set[_Reader] = set()
        self.expiry: asyncio.TimerHandle | None = None
        self._ended = ended
        self._watch = watch
        self._history: collections.deque[tuple[int, bytes]] = collections.deque()
        self._bytes = 0
        self._last_id = 0

    @property
    def over(self) -> bool:
        return self.begun and not self.streams

    def publish(self, event: Event) -> None:
        """Something to be kept: to all readers, present and future, and to the webhook."""
        self._last_id += 1
        event = {**event, "call_sid": self.sid, "id": self._last_id}
        frame = b"id: %d\ndata: %s\n\n" % (self._last_id, _encode(event))
        self._history.append((self._last_id, frame))
        self._bytes += len(frame)
        while self._bytes > MAX_HISTORY_BYTES:
            self._bytes -= len(self._history.popleft()[1])
        for reader in self.readers:
            reader.put(frame)
        self._watch(event)

    def mention(self, event: Event, replaces: Hashable) -> None:
        """Something of the moment, for present readers only. An unread one with the same ``replaces`` is dropped."""
        if self.readers:
            frame = b"data: %s\n\n" % _encode({**event, "call_sid": self.sid})
            for reader in self.readers:
                reader.put(frame, replaces)

    def leave(self) -> None:
        """One media stream is over."""
        self.streams -= 1
        if self.over:
            self.wake()
            self._ended(self)

    def wake(self) -> None:
        for reader in self.readers:
            reader.news.set()

    def read_after(self, event_id: int) -> _Reader:
        """A reader that has what is kept after an event (0: everything) before it."""
        reader = _Reader()
        for number, frame in self._history:
            if number > event_id:
                reader.put(frame)
        self.readers.add(reader)
        return reader

    def has_read_all(self, event_id: int) -> bool:
        return self.over and event_id >= self._last_id


class Calls:
    """All calls. Everything runs on the loop."""

    def __init__(self, watch: Callable[[Event], None] = lambda _event: None) -> None:
        """``watch`` gets every event that is kept; it must not wait."""
        self._watch = watch
        self._calls: dict[str, Call] = {}

    def routes(self) -> list[BaseRoute]:
        return [Route("/v1/calls/{sid}/events", self.events, methods=["GET"])]

    def join(self, sid: str) -> Call:
        """A media stream of this call begins; ``leave`` ends it. Raises BadRequest, TooManyStreams."""
        call = self._call(sid)
        call.begun = True
        call.streams += 1
        if call.expiry is not None:
            call.expiry.cancel()
            call.expiry = None
        return call

    async def events(self, request: Request) -> Response:
        """Server-sent events from the beginning, or after ``Last-Event-ID``. Raises BadRequest, TooManyStreams."""
        last = request.headers.get("last-event-id", "")
        after = int(last) if last.isascii() and last.isdigit() and len(last) < 19 else 0
        call = self._call(request.path_params["sid"])
        if call.has_read_all(after):
            return Response(status_code=204)  # a browser asks again and again until it is told this
        if sum(len(other.readers) for other in self._calls.values()) >= MAX_READERS:
            self._forget_unused(call)
            raise TooManyStreams(f"{MAX_READERS} readers of calls are here.", retry_after=5)
        reader = call.read_after(after)

        async def leave() -> None:
            call.readers.discard(reader)
            self._forget_unused(call)

        return EventStream(_frames(call, reader), lambda: "keep-alive", lambda: None, leave)

    # ------------------------------------------------------------ inside

    def _call(self, sid: str) -> Call:
        if not _SID.fullmatch(sid):
            raise BadRequest("A call sid has 1 to 64 letters, digits, _ and -.", param="call_sid")
        call = self._calls.get(sid)
        if call is None:
            self._make_room()
            call = self._calls[sid] = Call(sid, self._ended, self._watch)
        return call

    def _make_room(self) -> None:
        if len(self._calls) < MAX_CALLS:
            return
        over = next((call for call in self._calls.values() if call.over), None)
        if over is None:
            raise TooManyStreams(f"{MAX_CALLS} calls are here.", retry_after=5)
        self._forget(over)

    def _ended(self, call: Call) -> None:
        call.expiry = asyncio.get_running_loop().call_later(KEEP_SECONDS, self._forget, call)

    def _forget(self, call: Call) -> None:
        if call.expiry is not None:
            call.expiry.cancel()
        if self._calls.get(call.sid) is call:
            del self._calls[call.sid]

    def _forget_unused(self, call: Call) -> None:
        """Nobody waits any more for a call that has not come."""
        if not call.begun and not call.readers:
            self._forget(call)


async def _frames(call: Call, reader: _Reader) -> AsyncGenerator[bytes, None]:
    """Raises SlowReader."""
    yield RETRY
    deadline = asyncio.get_running_loop().time() + WAIT_SECONDS
    while True:
        while reader.frames:
            yield reader.frames.popleft()[1]
        if reader.lost:
            raise SlowReader(f"{MAX_UNREAD} events wait to be read.", hint="Come back with Last-Event-ID.")
        if call.over:
            yield sse.DONE
            return
        reader.news.clear()
        try:
            async with asyncio.timeout_at(None if call.begun else deadline):
                await reader.news.wait()
        except TimeoutError:
            if not call.begun:
                return
