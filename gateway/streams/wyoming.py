"""Wyoming over TCP, as Home Assistant speaks it: a connection an utterance, and a ``transcript`` in the end, always.

Home Assistant decides where speech ends, so an utterance here is everything between ``audio-start`` and ``audio-stop``.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from gateway.context import new_request_id
from gateway.model import ServedModel
from gateway.streams.hub import Hub
from gateway.streams.live import LiveStream
from gateway.streams.wyoming_wire import MAX_LINE_BYTES, WyomingEvent, encode, info, read_event
from shared.errors import BadRequest, NapscribeError, ProtocolError
from shared.journal import log
from shared.languages import NAMES, parse_language
from shared.scripts import separator
from shared.streams import Endpointing, StreamOptions, UtteranceFinal
from shared.wire import RawAudio

READ_SECONDS = 60.0
"""A peer that says nothing for so long is gone; audio comes every few milliseconds."""
MAX_CONNECTIONS = 64
_WIDTHS = {2: "s16le"}


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
        connection = _Connection(self._hub, description, writer)
        try:
            while True:
                async with asyncio.timeout(READ_SECONDS):
                    event = await read_event(reader)
                if event is None:
                    break
                try:
                    await connection.receive(event)
                except NapscribeError as error:
                    await connection.fail(error)
        except (TimeoutError, ConnectionError):
            pass
        except ProtocolError as error:
            log("wyoming", level="warning", error=error.message)
            with contextlib.suppress(ConnectionError):
                await connection.fail(error)
        finally:
            connection.close()
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


class _Connection:
    """One peer; one utterance at a time."""

    def __init__(self, hub: Hub, description: WyomingEvent, writer: asyncio.StreamWriter) -> None:
        self._hub = hub
        self._description = description
        self._writer = writer
        self._wish: dict[str, Any] = {}
        self._stream: LiveStream | None = None
        self._reading: asyncio.Task[str] | None = None
        self._refused = False
        """The utterance has had its error and its transcript; the rest of its audio is not heard."""

    async def receive(self, event: WyomingEvent) -> None:
        """Raises NapscribeError for what ends the utterance; events that are not for us are ignored."""
        match event.type:
            case "describe":
                await self._send(self._description)
            case "ping":
                await self._send(WyomingEvent("pong", {"text": event.data.get("text")}))
            case "transcribe":
                self._wish = event.data
            case "audio-start":
                self.close()
                self._refused = False
                self._open(event.data)
            case "audio-chunk":
                await self._hear(event)
            case "audio-stop":
                await self._finish()

    def _open(self, form: dict[str, Any]) -> LiveStream:
        stream = self._hub.open(new_request_id(), _options(form, self._wish))
        self._stream = stream
        self._reading = asyncio.ensure_future(self._read(stream))
        return stream

    async def _hear(self, event: WyomingEvent) -> None:
        if not self._refused:
            stream = self._stream or self._open(event.data)
            await stream.send(event.payload)

    async def _read(self, stream: LiveStream) -> str:
        """The text of the utterance, however many pieces the engine makes of it; each is sent on as it is certain."""
        text = ""
        async for event in stream.events():
            if isinstance(event, UtteranceFinal) and event.text:
                piece = separator(text, event.text) + event.text
                if not text:
                    await self._send(WyomingEvent("transcript-start", _language(event.language)))
                text += piece
                await self._send(WyomingEvent("transcript-chunk", {"text": piece}))
        return text

    async def _finish(self) -> None:
        """Audio is over: the transcript, empty if nothing was said."""
        if self._refused:
            self._refused = False
            return
        text = ""
        if self._stream is not None and self._reading is not None:
            self._stream.finish()
            text = await self._reading
        self.close()
        await self._send(WyomingEvent("transcript", {"text": text}))
        if text:
            await self._send(WyomingEvent("transcript-stop"))

    async def fail(self, error: NapscribeError) -> None:
        """Say what is wrong, and the transcript that Home Assistant waits for in any case."""
        self.close()
        self._refused = True
        await self._send(WyomingEvent("error", {"text": str(error), "code": error.code}))
        await self._send(WyomingEvent("transcript", {"text": ""}))

    def close(self) -> None:
        """Give the stream back, finished or not."""
        if self._reading is not None:
            self._reading.cancel()
        if self._stream is not None:
            self._hub.close(self._stream)
        self._stream = self._reading = None

    async def _send(self, event: WyomingEvent) -> None:
        self._writer.write(encode(event))
        await self._writer.drain()


def _options(form: dict[str, Any], wish: dict[str, Any]) -> StreamOptions:
    """Raises BadRequest for audio that cannot be, or a language that nobody knows."""
    try:
        rate, width, channels = int(form.get("rate", 16_000)), int(form.get("width", 2)), int(form.get("channels", 1))
    except (TypeError, ValueError):
        raise BadRequest("rate, width and channels are whole numbers.") from None
    if width not in _WIDTHS or not 1 <= channels <= 8 or not 4_000 <= rate <= 192_000:
        raise BadRequest(f"Audio of {rate} Hz, {width} bytes and {channels} channels is not taken.")
    return StreamOptions(
        audio=RawAudio(_WIDTHS[width], rate, channels),
        language=parse_language(str(wish.get("language") or "")),
        prompt=str(wish.get("context") or "") if not isinstance(wish.get("context"), dict) else "",
        partials=False,
        endpointing=Endpointing(automatic=False),
    )


def _language(code: str) -> dict[str, Any]:
    return {"language": code} if code else {}
