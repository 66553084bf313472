"""Messages to frames and back. A wire message is ``[header]`` or ``[header, payload]``; payloads are live audio, raw.

The payload is never copied here: callers hand over and get back any buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from shared.errors import ProtocolError
from shared.messages import Command, Event

MAX_HEADER_BYTES = 16 * 1024 * 1024
"""A header longer than this is not one of ours: the longest is a segment with its words and log probabilities."""

Buffer = bytes | bytearray | memoryview

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(Command)
_events = msgspec.msgpack.Decoder(Event)


def encode(message: Command | Event) -> bytes:
    """One header frame."""
    return _encoder.encode(message)


def decode_command(frames: Sequence[Buffer]) -> tuple[Command, Buffer]:
    """Header and payload (empty where there is none). Raises ProtocolError on anything that is not a command."""
    return _decode(_commands, frames)


def decode_event(frames: Sequence[Buffer]) -> tuple[Event, Buffer]:
    """Header and payload (empty where there is none). Raises ProtocolError on anything that is not an event."""
    return _decode(_events, frames)


def _decode(decoder: msgspec.msgpack.Decoder[T], frames: Sequence[Buffer]) -> tuple[T, Buffer]:
    if not 1 <= len(frames) <= 2:
        raise ProtocolError(f"A message has one or two frames, not {len(frames)}.")
    if len(frames[0]) > MAX_HEADER_BYTES:
        raise ProtocolError(f"The header has {len(frames[0])} bytes.")
    try:
        header = decoder.decode(frames[0])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"Not a message: {error}") from error
    return header, frames[1] if len(frames) == 2 else b""
