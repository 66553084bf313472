"""Wyoming over TCP: acts the dialect out on a port of its own. A task reads the peer, and one reads its utterance."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from gateway.answers.errors_http import unexpected
from gateway.context import new_request_id
from gateway.model import ServedModel
from gateway.streams.dialect import Audio, Finish, Open
from gateway.streams.hub import Hub
from gateway.streams.live import LiveStream
from gateway.streams.wyoming import Drop, Effect, Wyoming
from gateway.streams.wyoming_wire import MAX_LINE_BYTES, WyomingEvent, encode, info, read_event
from shared.errors import NapscribeError, ProtocolError
from shared.journal import log
from shared.languages import NAMES

WRITE_SECONDS = 30.0
"""A peer that has taken nothing for so long, with its socket full, is gone."""
CLOSE_SECONDS = 5.0
READ_SECONDS = 60.0
"""A peer that says nothing for so long is gone; audio comes every few milliseconds."""
MAX_CONNECTIONS = 64


class WyomingServer:
    """Listens on a port of its own."""

    def __init__(self, hub: Hub, model: ServedModel) -> None:
        self._hub = hub
        self._model = model
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> None:
        """Raises OSError if the address is taken."""
        self._server = await asyncio.start_server(self._accept, host, port, limit=MAX_LINE_BYTES)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= MAX_CONNECTIONS:
            writer.close()
            return
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        description = info(self._model.id, self._hub.languages or tuple(NAMES))
        connection = _Connection(self._hub, Wyoming(description), writer)
        try:
            await connection.run(reader)
        except OSError:  # the peer is gone, or silent for too long
            pass
        except ProtocolError as error:
            log("wyoming", level="warning", error=error.message)
            with contextlib.suppress(OSError):
                await connection.fail(error)
        except Exception as error:
            with contextlib.suppress(OSError):
                await connection.fail(unexpected(error, "wyoming"))
        finally:
            connection.close()
            await _close(writer)


class _Connection:
    """One peer. Effects of one happening leave without anything of another in between: only audio waits, and it is the last."""

    def __init__(self, hub: Hub, dialect: Wyoming, writer: asyncio.StreamWriter) -> None:
        self._hub = hub
        self._dialect = dialect
        self._writer = writer
        self._track = 0
        self._stream: LiveStream | None = None
        self._following: asyncio.Task[None] | None = None

    async def run(self, reader: asyncio.StreamReader) -> None:
        """Until the peer has nothing more to say. Raises ProtocolError, TimeoutError and ConnectionError."""
        while True:
            async with asyncio.timeout(READ_SECONDS):
                event = await read_event(reader)
            if event is None:
                return
            await self._act(self._dialect.receive(event))
            if self._dialect.answering and self._following is not None:
                await self._following  # what is sent behind an utterance waits for its transcript

    async def fail(self, error: NapscribeError) -> None:
        await self._act(self._dialect.refuse(error))

    def close(self) -> None:
        """Give the stream back, finished or not."""
        if self._following is not None and self._following is not asyncio.current_task():
            self._following.cancel()
        if self._stream is not None:
            self._hub.close(self._stream)
        self._stream = self._following = None

    async def _follow(self, stream: LiveStream, track: int) -> None:
        with contextlib.suppress(OSError):  # TimeoutError is one; the reader meets it, too
            try:
                async for event in stream.events():
                    await self._act(self._dialect.event(event, track))
            except NapscribeError as error:
                await self._act(self._dialect.failed(error, track))
            except OSError:
                raise
            except Exception as error:
                await self._act(self._dialect.failed(unexpected(error, "wyoming"), track))

    async def _act(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            try:
                await self._act_out(effect)
            except NapscribeError as error:
                await self._act(self._dialect.failed(error, self._track))
                return
        if any(isinstance(effect, WyomingEvent) for effect in effects):
            async with asyncio.timeout(WRITE_SECONDS):
                await self._writer.drain()

    async def _act_out(self, effect: Effect) -> None:
        """Raises the stream's error, or TooManyStreams and BadRequest for one that is refused."""
        match effect:
            case WyomingEvent():
                self._writer.write(encode(effect))
            case Open(options=options, track=track):
                self._track = track
                self._stream = self._hub.open(new_request_id(), options)
                self._following = asyncio.ensure_future(self._follow(self._stream, track))
            case Audio(data=data):
                if self._stream is not None:
                    await self._stream.send(data)
            case Finish():
                if self._stream is not None:
                    self._stream.finish()
            case Drop():
                self.close()


async def _close(writer: asyncio.StreamWriter) -> None:
    """What was said still goes out, if the peer takes it soon."""
    writer.close()
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            await writer.wait_closed()
    except OSError:
        writer.transport.abort()
