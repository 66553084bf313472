"""Two models as one engine: a small one for the partials of a call, the main one for every final and for files.

An utterance lives in the small model while somebody speaks. When it ends, all of its audio goes to the main model, with
what has been said as a prefix that stays. So each model hears each stretch of audio once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from shared.errors import ModelLoadFailed
from shared.messages import Capabilities, Lane
from worker.audio.samples import Audio
from worker.engines.base import (
    Engine,
    EngineEvent,
    EngineSequence,
    Final,
    Hypothesis,
    Report,
    SequenceFailed,
    SequenceRequest,
)


class PairSequence:
    """One sequence in one of the two models. ``inner`` changes once, at the end of an utterance."""

    def __init__(self, request: SequenceRequest, engine: Engine, inner: EngineSequence) -> None:
        self.request = request
        self.engine = engine
        self.inner = inner
        self.audio: list[Audio] = []
        """Kept for the main model while the small one listens."""
        self.frozen = request.prefix

        self.listened = 0
        """Windows that the small one has encoded."""

    @property
    def ready(self) -> bool:
        return self.inner.ready

    @property
    def windows_encoded(self) -> int:
        return self.listened + self.inner.windows_encoded


class PairEngine:
    """The contract over two engines that both keep a prefix."""

    def __init__(self, main: Engine, small: Engine) -> None:
        self._main = main
        self._small = small

    @property
    def device_memory(self) -> int:
        """Engines on one card report what the process holds there, so the larger word is the whole."""
        return max(self._main.device_memory, self._small.device_memory)

    def load(self, report: Report) -> Capabilities:
        """Raises ModelLoadFailed, also for a pair in which one could not go on where the other stopped."""
        main = self._main.load(lambda phase, fraction: report(phase, fraction / 2))
        small = self._small.load(lambda phase, fraction: report(phase, 0.5 + fraction / 2))
        if main.accepts_prefix != small.accepts_prefix:
            raise ModelLoadFailed(
                f"{small.model} cannot listen for {main.model}: only one of them keeps what was said.",
                hint="Set NAPSCRIBE_LIVE_MODEL to a smaller model of the same kind.",
            )
        languages = tuple(code for code in main.languages if code in small.languages)
        return msgspec.structs.replace(
            main,
            languages=languages,
            max_live=small.max_live,
            live_model=small.model,
            live_slots=small.slots,
            max_step_s=max(main.max_step_s, small.max_step_s),
            max_segment_s=min(main.max_segment_s, small.max_segment_s),
        )

    def open(self, request: SequenceRequest) -> PairSequence:
        engine = self._small if request.partials and request.lane is Lane.LIVE else self._main
        return PairSequence(request, engine, engine.open(request))

    def feed(self, sequence: EngineSequence, audio: Audio) -> None:
        row = _own(sequence)
        row.engine.feed(row.inner, audio)
        if row.engine is self._small:
            row.audio.append(audio)

    def finish(self, sequence: EngineSequence) -> None:
        row = _own(sequence)
        if row.engine is self._small:
            row.listened = row.inner.windows_encoded
            self._small.cancel(row.inner)
            request = replace(row.request, prefix=row.frozen)
            row.engine, row.inner = self._main, self._main.open(request)
            for audio in row.audio:
                self._main.feed(row.inner, audio)
            row.audio.clear()
        row.engine.finish(row.inner)

    def freeze(self, sequence: EngineSequence, text: str) -> None:
        row = _own(sequence)
        row.frozen = text
        row.engine.freeze(row.inner, text)

    def pause(self, sequence: EngineSequence) -> None:
        """Of use where the model that says the final is the one that listens."""
        row = _own(sequence)
        if row.engine is self._main:
            self._main.pause(row.inner)

    def suspend(self, sequence: EngineSequence) -> None:
        row = _own(sequence)
        row.engine.suspend(row.inner)

    def cancel(self, sequence: EngineSequence) -> None:
        row = _own(sequence)
        row.engine.cancel(row.inner)
        row.audio.clear()

    def step(self, rows: Sequence[EngineSequence], deadline_ns: int) -> list[EngineEvent]:
        """A step of the model that the first row is in; rows of the other wait for theirs."""
        ready = [row for row in map(_own, rows) if row.ready]
        if not ready:
            return []
        engine = ready[0].engine
        turn = {id(row.inner): row for row in ready if row.engine is engine}
        events = engine.step([row.inner for row in turn.values()], deadline_ns)
        return [_outer(event, turn[id(event.sequence)]) for event in events]

    def close(self) -> None:
        self._main.close()
        self._small.close()


def _own(sequence: EngineSequence) -> PairSequence:
    if not isinstance(sequence, PairSequence):
        raise TypeError(f"A sequence of another engine: {type(sequence).__name__}.")
    return sequence


def _outer(event: EngineEvent, row: PairSequence) -> EngineEvent:
    match event:
        case Final():
            return replace(event, sequence=row, work=replace(event.work, windows_listening=row.listened))
        case Hypothesis() | SequenceFailed():
            return replace(event, sequence=row)
