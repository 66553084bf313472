"""What the ears tell the scheduler of a live stream: what endpointing found, and commands of the client in their place."""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import NapscribeError
from shared.streams import StreamOptions
from worker.live.endpointing import Action


@dataclass(frozen=True, slots=True)
class Answer:
    """``EndUtterance`` has been obeyed: to be said after the finals of everything before."""

    token: int
    utterance: int


@dataclass(frozen=True, slots=True)
class Cleared:
    utterance: int
    through_sample: int


@dataclass(frozen=True, slots=True)
class Closed:
    through_sample: int


@dataclass(frozen=True, slots=True)
class Opened:
    options: StreamOptions


@dataclass(frozen=True, slots=True)
class Updated:
    options: StreamOptions


@dataclass(frozen=True, slots=True)
class Released:
    """Parked: the stream is no longer here."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """What the scheduler needs for the timings of an utterance that ended."""

    speech_end_ns: int
    deciding_ns: int
    """When the frame came that made the end certain; where the caller asked for the end, when that was obeyed."""
    decided_ns: int
    vad_ns: int


Happening = Action | Answer | Cleared | Closed | Opened | Updated | Released | NapscribeError
