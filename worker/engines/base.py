"""The contract between the scheduler and an engine.

One scheduler serves all engines, so that batching, preemption and cancellation are written once. An engine never blocks
for longer than one ``step``, never starts a thread that outlives ``close`` and never decides whose turn it is: it takes
the rows it is given, in that order, as many as it has room for.

A *sequence* is one stretch of speech with its own text: a segment of a file, or an utterance of a call. Its life::

    open -> feed* -> finish -> (step)* -> Final        a file's segment: all audio is fed at once
    open -> (feed | step -> Hypothesis)* -> finish -> (step)* -> Final      an utterance
    cancel at any time; suspend at any time (the slot is given up, the next step recomputes it)

After ``Final`` or ``SequenceFailed`` the sequence is closed and must not be used again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from shared.errors import NapscribeError
from shared.messages import Capabilities, Lane, Word
from worker.audio.samples import Audio

Report = Callable[[str, float], None]
"""``report(phase, fraction)``: a sign of life while loading; each call moves the stall deadline."""


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    id: str
    """Unique in this worker; appears in the flight recorder while a step works on it."""
    lane: Lane
    language: str = ""
    """ISO 639-1 code; empty for automatic."""
    prompt: str = ""
    keywords: tuple[str, ...] = ()
    temperature: float = 0.0
    prefix: str = ""
    """Text that was emitted already and stays; the engine goes on after it. Only where ``accepts_prefix``."""
    words: bool = False
    partials: bool = False
    """Somebody reads hypotheses before the final; an engine need not produce any otherwise."""
    base_sample: int = 0
    """Where the sequence's first sample stands in the recording or call."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """What the engine would say now; replaces the one before. ``text`` includes the prefix."""

    sequence: EngineSequence
    text: str


@dataclass(frozen=True, slots=True)
class Work:
    """What a sequence has cost, from engines that know. Times are of the passes that its last audio took, which may
    have been over before its end was certain, in ns; a pass that it shared with others counts in full: it waited for all of it."""

    encode_ns: int = 0
    prefill_ns: int = 0
    decode_ns: int = 0
    windows: int = 0
    """Windows that the encoder has computed for it, all its life."""
    windows_listening: int = 0
    """The same of the smaller model that listened before, where there are two."""


@dataclass(frozen=True, slots=True)
class Final:
    """The text of the whole sequence, prefix included."""

    sequence: EngineSequence
    text: str
    language: str = ""
    """ISO 639-1 code, empty if the engine does not know."""
    words: tuple[Word, ...] = ()
    """Places are seconds from the start of the sequence's audio. Only from an engine whose times are exact; others leave it to
    the caller, who knows where speech was."""
    avg_logprob: float | None = None
    logprobs: tuple[tuple[str, float], ...] = ()
    """Text and log probability of each token; together they spell what follows the prefix. Empty if the engine does not know."""
    finish_reason: str = "stop"
    """``stop``; ``repetition`` or ``length`` when the engine ended a run-away: then ``text`` is what was good."""
    work: Work = Work()


@dataclass(frozen=True, slots=True)
class SequenceFailed:
    """This row alone failed; its neighbours go on."""

    sequence: EngineSequence
    error: NapscribeError


EngineEvent = Hypothesis | Final | SequenceFailed


class EngineBroken(Exception):
    """The engine cannot go on, whatever it is given: the worker ends at once, and another begins where it was."""


class EngineSequence(Protocol):
    """An engine's handle of a sequence. Opaque but for these."""

    @property
    def request(self) -> SequenceRequest: ...

    @property
    def ready(self) -> bool:
        """Whether a step would do something for it now (new audio at its cadence, an unfinished decode)."""
        ...

    @property
    def windows_encoded(self) -> int:
        """Windows that an encoder has computed for it so far; 0 of an engine without one."""
        ...


class Engine(Protocol):
    """See the module. Every method is called from one thread, the scheduler's."""

    @property
    def device_memory(self) -> int:
        """Bytes held on an accelerator, 0 without one. Safe from any thread."""
        ...

    def load(self, report: Report) -> Capabilities:
        """Load and warm up. Raises ModelLoadFailed with a hint that a person can follow."""
        ...

    def open(self, request: SequenceRequest) -> EngineSequence:
        """A new sequence without audio. Costs nothing on the device."""
        ...

    def feed(self, sequence: EngineSequence, audio: Audio) -> None:
        """Append audio. The engine may keep the array; the caller does not write to it again."""
        ...

    def finish(self, sequence: EngineSequence) -> None:
        """No more audio follows; a later step produces the ``Final``."""
        ...

    def freeze(self, sequence: EngineSequence, text: str) -> None:
        """``text`` has been said of an open sequence and stays: every later hypothesis and the final begin with it.

        Only called where ``accepts_prefix``; ``text`` is a beginning of the last hypothesis.
        """
        ...

    def pause(self, sequence: EngineSequence) -> None:
        """Speech has paused, and perhaps ended: what has been fed may be all there is. A hint that hearing it now, before the
        end is certain, lets the final be said without a wait. More audio takes it back."""
        ...

    def suspend(self, sequence: EngineSequence) -> None:
        """Give up whatever the sequence holds on the device. Nothing already emitted changes."""
        ...

    def step(self, rows: Sequence[EngineSequence], deadline_ns: int) -> list[EngineEvent]:
        """One bounded piece of work (at most ``max_step_s``) for as many of ``rows``, in order, as there is room for.

        ``deadline_ns`` (CLOCK_MONOTONIC) is when the first row wants an answer: a hint, never a promise.
        """
        ...

    def cancel(self, sequence: EngineSequence) -> None:
        """Forget it; no event of it follows."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


@dataclass(slots=True, eq=False, repr=False)
class BufferedSequence:
    """Audio and flags that most engines need of a sequence."""

    request: SequenceRequest
    chunks: list[Audio] = field(default_factory=list)
    length: int = 0
    """Samples fed so far."""
    finished: bool = False
    decoded: int = 0
    """Samples that the last hypothesis has heard."""
    paused: bool = False
    """Speech has paused after what was fed."""

    @property
    def ready(self) -> bool:
        return self.finished

    @property
    def windows_encoded(self) -> int:
        return 0

    def append(self, audio: Audio) -> None:
        self.chunks.append(audio)
        self.length += len(audio)
        self.paused = False

    def audio(self) -> Audio:
        """All of it, as one array; joins the chunks once."""
        if len(self.chunks) != 1:
            self.chunks = [np.concatenate(self.chunks) if self.chunks else np.zeros(0, np.float32)]
        return self.chunks[0]
