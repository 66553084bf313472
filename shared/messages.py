"""Every message between gateway and worker, as two tagged unions: ``Command`` goes down, ``Event`` comes up.

A message is a header (one of these structs, msgpack) and, for live audio only, a raw payload frame (``shared.codec``).
Positions are samples at 16 kHz from the start of the recording or call; times are CLOCK_MONOTONIC nanoseconds, which
both processes read from the same clock.
"""

from __future__ import annotations

import msgspec

from shared.streams import StreamCommand, StreamEvent
from shared.wire import PROTOCOL_VERSION, Lane, Message, RawAudio, Word

__all__ = ["PROTOCOL_VERSION", "Lane", "RawAudio", "Word"]


class FileOptions(msgspec.Struct, frozen=True, array_like=True):
    """What the caller asked of a file; the same for every generation that works on it."""

    language: str = ""
    """ISO 639-1 code, empty for automatic."""
    prompt: str = ""
    keywords: tuple[str, ...] = ()
    temperature: float = 0.0
    words: bool = False
    logprobs: bool = False
    deltas: bool = False
    """Somebody reads along: send the words of a segment while it is still being decoded, where the engine can."""
    raw: RawAudio | None = None
    max_seconds: float = 0.0
    """Bound on decoded audio, seconds; beyond it the file is refused."""
    clip_seconds: float = 0.0
    """Only the beginning of the recording, so many seconds; 0 is all of it."""


# ---------------------------------------------------------------- commands


class TranscribeFile(Message, frozen=True, tag="transcribe_file"):
    """Take a spooled file. The sender holds a credit of the lane; it comes back with ``FileDone`` or ``Failed``."""

    request_id: str
    lane: Lane
    path: str
    options: FileOptions
    base_sample: int = 0
    """Where to go on: everything before it is done and stays as it was sent."""
    next_index: int = 0
    prefix: str = ""
    """Text already emitted for the open segment; only ever set for an engine that accepts a prefix."""


class Cancel(Message, frozen=True, tag="cancel"):
    """Drop a request or stream at the next step. Answered by ``Failed`` with code ``cancelled``."""

    request_id: str


class Ping(Message, frozen=True, tag="ping"):
    sequence: int


class Stop(Message, frozen=True, tag="stop"):
    """Leave now; nothing is in flight, or nobody wants it any more."""


Command = TranscribeFile | StreamCommand | Cancel | Ping | Stop


# ---------------------------------------------------------------- events


class Hello(Message, frozen=True, tag="hello"):
    """First word of a worker."""

    protocol: int
    pid: int


class Progress(Message, frozen=True, tag="progress"):
    """A phase of the start; every one of them moves the stall deadline."""

    phase: str
    """``imported``, ``loading``, ``warming``."""
    fraction: float = 0.0


class Capabilities(msgspec.Struct, frozen=True, array_like=True):
    """What the loaded engine can do (worker.engines.base says it in full)."""

    engine: str
    model: str
    languages: tuple[str, ...]
    """ISO 639-1 codes."""
    max_live: int
    max_batch: int
    accepts_prefix: bool
    streams_natively: bool
    translates: bool
    word_times: str
    """``exact``, ``estimated`` or ``none``."""
    max_segment_s: float
    max_step_s: float
    """A step that runs longer than this is stuck."""
    device: str = "cpu"
    slots: int = 0
    """KV slots, where the engine has them; of the main model where there are two."""
    live_model: str = ""
    """The smaller one that hears calls, where there are two."""
    live_slots: int = 0


class Ready(Message, frozen=True, tag="ready"):
    capabilities: Capabilities
    credits: dict[Lane, int]
    """Jobs of each lane that the worker takes at once, independent of each other."""


class Fatal(Message, frozen=True, tag="fatal"):
    """The worker cannot serve and leaves; ``retry`` says whether a new start might help."""

    code: str
    message: str
    hint: str = ""
    retry: bool = False


class Delta(Message, frozen=True, tag="delta"):
    """Words of a segment that is still being decoded. Append-only: the segment's text starts with their concatenation."""

    request_id: str
    index: int
    text: str


class SegmentDone(Message, frozen=True, tag="segment_done"):
    """A stretch of the recording that is finished: kept by the gateway, never done again."""

    request_id: str
    index: int
    start_sample: int
    """Where speech begins."""
    speech_end_sample: int
    end_sample: int
    """Where the next generation goes on; speech ends at or before it."""
    text: str
    words: tuple[Word, ...] = ()
    language: str = ""
    avg_logprob: float | None = None
    finish_reason: str = "stop"
    """``stop``, ``repetition`` or ``length``: how the engine ended the segment."""
    logprobs: tuple[tuple[str, float], ...] = ()
    estimated: bool = False
    """The words' times are spread over the speech by length: the engine gave none, whatever it can do in general."""


class FileTimings(msgspec.Struct, frozen=True, array_like=True):
    """Nanoseconds of work spent on a file by one generation."""

    decode_ns: int = 0
    vad_ns: int = 0
    engine_ns: int = 0


class FileDone(Message, frozen=True, tag="file_done"):
    request_id: str
    duration_samples: int
    language: str
    timings: FileTimings


class Failed(Message, frozen=True, tag="failed"):
    """The request ended without its result; its credit is back."""

    request_id: str
    code: str
    message: str
    hint: str = ""
    param: str | None = None


class Pong(Message, frozen=True, tag="pong"):
    sequence: int
    step_age_ns: int
    """How long the running step of the engine has been running; 0 between steps."""
    audio_age_ns: int
    """The same of the threads that hear: the oldest piece of work in hand."""
    preemptions: int = 0
    steps: int = 0
    queued: dict[Lane, int] = msgspec.field(default_factory=dict)
    """Jobs in the worker by lane."""
    device_memory: int = 0
    """Bytes held on the accelerator."""


JobEvent = Delta | SegmentDone | FileDone
"""Events that belong to one file."""

Event = Hello | Progress | Ready | Fatal | JobEvent | StreamEvent | Failed | Pong
