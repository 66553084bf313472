"""Frames of the Wyoming protocol: a JSON line, then its data and payload by the lengths that the line names. Bounded."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from shared.errors import ProtocolError
from shared.version import __version__

VERSION = "1.8.0"
"""Version of the protocol that we speak, as its own library writes it."""
MAX_LINE_BYTES = 64 * 1024
MAX_DATA_BYTES = 1024 * 1024
MAX_PAYLOAD_BYTES = 8 * 1024 * 1024


class WyomingEvent(msgspec.Struct, frozen=True):
    type: str
    data: dict[str, Any] = {}
    payload: bytes = b""


class _Header(msgspec.Struct):
    type: str
    data: dict[str, Any] | None = None
    data_length: int | None = None
    payload_length: int | None = None


_encoder = msgspec.json.Encoder()
_headers = msgspec.json.Decoder(_Header)
_objects = msgspec.json.Decoder(dict[str, Any])


async def read_event(reader: asyncio.StreamReader) -> WyomingEvent | None:
    """The next event, None at the end of the connection. Raises ProtocolError for anything that is not one."""
    try:
        line = await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        if error.partial.strip():
            raise ProtocolError("The connection ended in the middle of a line.") from None
        return None
    except asyncio.LimitOverrunError:
        raise ProtocolError(f"A line has more than {MAX_LINE_BYTES} bytes.") from None
    try:
        header = _headers.decode(line)
        data = dict(header.data or {})
        more = await _exactly(reader, header.data_length, MAX_DATA_BYTES)
        data.update(_objects.decode(more) if more else {})
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"Not an event: {error}") from None
    return WyomingEvent(header.type, data, await _exactly(reader, header.payload_length, MAX_PAYLOAD_BYTES))


async def _exactly(reader: asyncio.StreamReader, length: int | None, most: int) -> bytes:
    if not length:
        return b""
    if not 0 < length <= most:
        raise ProtocolError(f"A length of {length} bytes is out of range; at most {most}.")
    try:
        return await reader.readexactly(length)
    except asyncio.IncompleteReadError:
        raise ProtocolError("The connection ended in the middle of an event.") from None


def encode(event: WyomingEvent) -> bytes:
    data = _encoder.encode(event.data) if event.data else b""
    header: dict[str, Any] = {"type": event.type, "version": VERSION}
    if data:
        header["data_length"] = len(data)
    if event.payload:
        header["payload_length"] = len(event.payload)
    return b"".join((_encoder.encode(header), b"\n", data, event.payload))


def info(model_id: str, languages: tuple[str, ...]) -> WyomingEvent:
    """The answer to ``describe``. Home Assistant offers the engine for the languages named here."""
    attribution = {"name": "Napscribe", "url": ""}
    common = {"attribution": attribution, "installed": True, "version": __version__}
    model = {**common, "name": model_id, "description": model_id, "languages": list(languages)}
    program = {
        **common,
        "name": "napscribe",
        "description": "Speech to text that sleeps",
        "models": [model],
        "supports_transcript_streaming": True,
    }
    empty: dict[str, Any] = {name: [] for name in ("tts", "handle", "intent", "wake", "mic", "snd")}
    return WyomingEvent("info", {"asr": [program], **empty})
