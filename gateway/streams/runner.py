"""Acts out a dialect on a WebSocket: one task reads the client, one reads each stream, and all say through one lock."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from starlette.types import Receive
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from gateway.answers.errors_http import response, unexpected
from gateway.context import new_request_id
from gateway.streams.dialect import Audio, Clear, Dialect, Effect, EndUtterance, Finish, Hang, Open, Say, Update
from gateway.streams.hub import Hub
from gateway.streams.live import LiveStream
from shared.errors import NapscribeError
from shared.journal import log

MAX_REASON_BYTES = 120
"""RFC 6455 allows 123 in a close frame."""
WRITE_SECONDS = 30.0
"""A client that has taken nothing for so long, with its socket full, is gone."""
CLOSE_SECONDS = 5.0
LAST_WORDS_SECONDS = 300.0
"""After the client has left, streams that still owe a final are waited for so long: a large model may only be loading."""


async def refuse(websocket: WebSocket, error: NapscribeError) -> None:
    """Answer the handshake with the error's HTTP status, or close where the server cannot do that."""
    if "websocket.http.response" in websocket.scope.get("extensions", {}):
        await websocket.send_denial_response(response(error))
    else:
        await websocket.close(1008, reason=error.code)


class Runner:
    """One connection from handshake to close."""

    def __init__(self, websocket: WebSocket, receive: Receive, dialect: Dialect, hub: Hub) -> None:
        """``receive`` is the server's own: after the handshake, starlette's would check once more for each frame what the server
        keeps to anyway."""
        self._websocket = websocket
        self._receive = receive
        self._dialect = dialect
        self._hub = hub
        self._id = new_request_id()
        self._streams: dict[int, LiveStream] = {}
        self._readers: dict[int, asyncio.Task[None]] = {}
        self._speaking = asyncio.Lock()
        self._over = asyncio.Event()
        self._accepted = False
        self._loop = asyncio.get_running_loop()
        self._heard = self._loop.time()
        self._acting = False
        """Something that the client has said is being done."""

    async def run(self) -> None:
        """Returns when the connection is over and everything of it is given back."""
        try:
            if not await self._handshake():
                return
            listening = asyncio.ensure_future(self._guarded(self._listen()))
            watching = asyncio.ensure_future(self._guarded(self._watch()))
            over = asyncio.ensure_future(self._over.wait())
            try:
                await asyncio.wait({listening, over}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (listening, watching, over):
                    task.cancel()
                await asyncio.gather(listening, watching, over, return_exceptions=True)
        finally:
            await self._close()

    async def _handshake(self) -> bool:
        effects = self._dialect.begin()
        try:
            for effect in effects:
                if isinstance(effect, Open):
                    self._open(effect)
        except NapscribeError as error:
            await refuse(self._websocket, error)
            return False
        await self._websocket.accept(self._dialect.subprotocol)
        self._accepted = True
        await self._act([effect for effect in effects if not isinstance(effect, Open)])
        return True

    async def _listen(self) -> None:
        while not self._over.is_set():
            message = await self._receive()
            self._heard = self._loop.time()
            if message["type"] == "websocket.disconnect":
                await self._last_words()
                return
            body = message.get("bytes")
            effects = self._dialect.receive(message.get("text") or "" if body is None else body)
            if len(effects) != 1 or not self._take_at_once(effects[0]):
                self._acting = True
                await self._act(effects)
                self._acting = False
                self._heard = self._loop.time()

    def _take_at_once(self, effect: Effect) -> bool:
        """The way of nearly every message: a frame of audio that nothing stands in the way of. Its price is counted
        (``make bench``): calls send fifty of them a second."""
        if type(effect) is not Audio:
            return False
        stream = self._streams.get(effect.track)
        return stream is not None and stream.take_at_once(effect.data)

    async def _watch(self) -> None:
        """Asks the dialect whenever the client has said nothing for its ``read_timeout``. A client whose words are held back until there
        is room for them is not silent."""
        while True:
            if self._acting:
                self._heard = self._loop.time()
            left = self._heard + self._dialect.read_timeout - self._loop.time()
            if left > 0:
                await asyncio.sleep(left)
                continue
            self._heard = self._loop.time()
            await self._act(self._dialect.silent())

    async def _last_words(self) -> None:
        """The client is gone; what the dialect still wants finished is finished."""
        self._accepted = False
        effects = self._dialect.left()
        await self._act(effects)
        readers = [self._readers[e.track] for e in effects if isinstance(e, Finish) and e.track in self._readers]
        if readers:
            await asyncio.wait(readers, timeout=LAST_WORDS_SECONDS)

    async def _follow(self, track: int, stream: LiveStream) -> None:
        try:
            async for event in stream.events():
                await self._act(self._dialect.event(event, track))
        except NapscribeError as error:
            await self._act(self._dialect.failed(error, track))

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """A mistake of ours is logged and ends this connection, instead of leaving it silent."""
        try:
            await work
        except Exception as error:
            answer = unexpected(error, self._websocket.url.path)
            await self._hang(1011, answer.code)

    # ------------------------------------------------------------ effects

    async def _act(self, effects: Sequence[Effect]) -> None:
        for saying, run in groupby(effects, lambda effect: isinstance(effect, Say)):
            if saying:
                await self._say([effect.text for effect in run if isinstance(effect, Say)])
            else:
                await self._act_each(run)

    async def _act_each(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if self._over.is_set():
                return
            try:
                with self._leaving():
                    await self._act_out(effect)
            except NapscribeError as error:
                track = getattr(effect, "track", 0)
                if not isinstance(effect, Open) and track in self._readers:
                    self._streams[track].fail(error)  # its reader tells the dialect, after what was said before
                else:
                    await self._act(self._dialect.failed(error, track))

    async def _act_out(self, effect: Effect) -> None:
        match effect:
            case Open():
                self._open(effect)
            case Hang(code=code, reason=reason):
                await self._hang(code, reason)
            case Audio(data=data, track=track):
                if track in self._streams:
                    await self._streams[track].send(data)
            case Update(options=options, track=track) if track in self._streams:
                self._streams[track].update(options)
            case EndUtterance(track=track) if track in self._streams:
                self._streams[track].end_utterance()
            case Clear(track=track) if track in self._streams:
                self._streams[track].clear()
            case Finish(track=track) if track in self._streams:
                self._streams[track].finish()

    def _open(self, effect: Open) -> None:
        """Raises TooManyStreams."""
        stream = self._hub.open(f"{self._id}.{effect.track}", effect.options)
        stream.tells_progress = self._dialect.hears_progress
        self._streams[effect.track] = stream
        reading = self._guarded(self._follow(effect.track, stream))
        self._readers[effect.track] = asyncio.ensure_future(reading)

    async def _say(self, texts: Sequence[str]) -> None:
        """One after the other, nothing of another task in between."""
        async with self._speaking:
            with self._leaving():
                for text in texts:
                    if self._accepted and not self._over.is_set():
                        async with asyncio.timeout(WRITE_SECONDS):
                            await self._websocket.send_text(text)

    @contextlib.contextmanager
    def _leaving(self) -> Iterator[None]:
        """A client that has gone, or no longer reads, ends the connection."""
        try:
            yield
        except TimeoutError:
            log("live client does not read", level="warning", request_id=self._id)
            self._accepted = False
            self._over.set()
        except (WebSocketDisconnect, RuntimeError):
            self._over.set()

    async def _hang(self, code: int, reason: str) -> None:
        """``_over`` is set last: it ends the tasks, and one of them may be here."""
        async with self._speaking:
            try:
                await self._close_socket(code, reason)
            finally:
                self._over.set()

    async def _close_socket(self, code: int, reason: str = "") -> None:
        if not self._accepted or self._websocket.application_state is not WebSocketState.CONNECTED:
            return
        self._accepted = False
        with contextlib.suppress(RuntimeError, WebSocketDisconnect, TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._websocket.close(code, reason.encode()[:MAX_REASON_BYTES].decode(errors="ignore"))

    async def _close(self) -> None:
        """Give everything back, whatever happened."""
        self._over.set()
        for reader in self._readers.values():
            reader.cancel()
        await asyncio.gather(*self._readers.values(), return_exceptions=True)
        for stream in self._streams.values():
            self._hub.close(stream)
        await self._close_socket(1001)
        log("live connection over", request_id=self._id, streams=len(self._streams))
