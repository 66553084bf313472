"""What a live dialect is: a two-sided state machine that turns messages of a client and events of a stream into effects.

It has no socket, no clock and no loop, so that any order of anything can be tried on it. ``runner`` acts the effects out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import msgspec

from shared.errors import BadRequest, Busy, NapscribeError
from shared.streams import StreamEvent, StreamOptions


@dataclass(frozen=True, slots=True)
class Open:
    """Begin a stream. ``track`` names it inside this connection; most dialects have one, 0."""

    options: StreamOptions
    track: int = 0


class Audio(msgspec.Struct, frozen=True, gc=False):
    """The one effect whose price counts: calls have fifty of them a second."""

    data: bytes
    track: int = 0


@dataclass(frozen=True, slots=True)
class Update:
    options: StreamOptions
    track: int = 0


@dataclass(frozen=True, slots=True)
class EndUtterance:
    """Finish what has been said. The ``UtteranceEnded`` that answers the n-th of a track has token n, from 1."""

    track: int = 0


@dataclass(frozen=True, slots=True)
class Clear:
    track: int = 0


@dataclass(frozen=True, slots=True)
class Finish:
    """No more audio on this track; its ``StreamDone`` follows."""

    track: int = 0


@dataclass(frozen=True, slots=True)
class Say:
    """A text message for the client."""

    text: str


@dataclass(frozen=True, slots=True)
class Hang:
    """Close the connection. Nothing after it is acted on."""

    code: int = 1000
    reason: str = ""


Effect = Open | Audio | Update | EndUtterance | Clear | Finish | Say | Hang


class Dialect(Protocol):
    """One connection."""

    subprotocol: str | None
    """Chosen at the handshake, if the client offered any."""
    read_timeout: ClassVar[float]
    """Seconds without any message from the client after which ``silent`` is asked; a dead peer is found by it."""

    hears_progress: ClassVar[bool]
    """Whether ``event`` is told of every ``StreamProgress``."""

    def begin(self) -> Sequence[Effect]:
        """At the handshake. An ``Open`` here is refused at the handshake if it is refused."""
        ...

    def receive(self, message: str | bytes) -> Sequence[Effect]:
        """A message of the client. Never raises: what is wrong becomes what the dialect says to errors."""
        ...

    def event(self, event: StreamEvent, track: int) -> Sequence[Effect]:
        """Something happened on a stream."""
        ...

    def failed(self, error: NapscribeError, track: int) -> Sequence[Effect]:
        """A stream ended with an error, or could not be opened after the handshake."""
        ...

    def silent(self) -> Sequence[Effect]:
        """No message for ``read_timeout``."""
        ...

    def left(self) -> Sequence[Effect]:
        """The client closed the connection: nothing can be said any more, but a transcript may still be worth finishing."""
        ...


def close_code(error: NapscribeError) -> int:
    """Of a connection that ends with this error. RFC 6455 and its registry: 1008 for what the client did, 1013 for "later",
    1011 for what happened to us."""
    if isinstance(error, BadRequest):
        return 1008
    return 1013 if isinstance(error, Busy) else 1011
