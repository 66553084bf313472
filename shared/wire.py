"""What every message is made of."""

from __future__ import annotations

import enum

import msgspec

PROTOCOL_VERSION = 2
"""Gateway and worker come from one installation; the number catches a half-finished upgrade."""


class Lane(enum.IntEnum):
    """Who goes first: a lower number is served before a higher one, at every step of the engine."""

    LIVE = 0
    INTERACTIVE = 1
    BATCH = 2


class Message(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    generation: int
    """Number of the worker process that sends or shall receive this; a late word of a dead one is dropped."""


class RawAudio(msgspec.Struct, frozen=True, array_like=True):
    """Headerless audio, as the caller declared it."""

    encoding: str
    """``s16le``, ``f32le``, ``mulaw``, ``alaw`` or ``g729``; live also ``container``: the bytes say themselves what they are."""
    sample_rate: int
    """Hz."""
    channels: int = 1


class Word(msgspec.Struct, frozen=True, array_like=True):
    """A word with its place in seconds: on the wire from the start of the recording, inside the worker of a sequence's audio."""

    text: str
    start: float
    end: float

    def later(self, by: float) -> Word:
        """The same word in audio that has ``by`` seconds before this."""
        return Word(self.text, self.start + by, self.end + by)
