"""What the ears tell the scheduler of a live stream: what endpointing found, and commands of the client in their place."""

from __future__ import annotations

import msgspec

from shared.errors import NapscribeError
from shared.streams import StreamOptions
from worker.live.endpointing import Action


class Answer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """``EndUtterance`` has been obeyed: to be said after the finals of everything before."""

    token: int
    utterance: int


class Cleared(msgspec.Struct, frozen=True, array_like=True, tag=True):
    utterance: int
    through_sample: int


class Closed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    through_sample: int


class Opened(msgspec.Struct, frozen=True, array_like=True, tag=True):
    options: StreamOptions


class Updated(msgspec.Struct, frozen=True, array_like=True, tag=True):
    options: StreamOptions


class Released(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Parked: the stream is no longer here."""


class Arrival(msgspec.Struct, frozen=True, array_like=True):
    """What the scheduler needs for the timings of an utterance that ended."""

    speech_end_ns: int
    deciding_ns: int
    """When the frame came that made the end certain; where the caller asked for the end, when that was obeyed."""
    decided_ns: int
    vad_ns: int


Happening = Action | Answer | Cleared | Closed | Opened | Updated | Released | NapscribeError
