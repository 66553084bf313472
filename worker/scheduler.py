"""Steps, lanes, cancellation: decides before every step of the engine whose turn it is.

One thread. Live goes before interactive goes before batch; inside a lane, who has had least goes first. A step is
bounded, so the longest that anybody waits for a better lane's turn is one step.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable

from shared.errors import BadRequest, Cancelled, EngineFailed, NapscribeError
from shared.journal import log
from shared.languages import require_spoken
from shared.messages import Cancel, Capabilities, Command, Event, Failed, Lane, Stop, TranscribeFile
from shared.recorder import Recorder, Slot
from shared.streams import StreamDone
from worker.engines.base import Engine, EngineBroken, EngineEvent, EngineSequence, Hypothesis, SequenceFailed
from worker.files.feeder import Feeder
from worker.files.file_job import FileJob
from worker.live.happenings import Arrival, Happening, Opened, Released
from worker.live.stream import LiveStream
from worker.pieces import Piece

EARLY_CANCELS = 1024
"""Cancels that came before their job (they travel on a socket of their own) and are remembered."""

Emit = Callable[[Event], None]
FinalSaid = Callable[[str, int], None]
"""Tells the ears that an utterance's audio is needed no more; -1: the whole stream is over."""

Owner = FileJob | LiveStream


class Scheduler:
    """Owns the engine and all jobs of this worker."""

    def __init__(
        self,
        engine: Engine,
        capabilities: Capabilities,
        generation: int,
        emit: Emit,
        feeder: Feeder,
        recorder: Recorder,
    ) -> None:
        self._engine = engine
        self._capabilities = capabilities
        self._generation = generation
        self._emit = emit
        self._feeder = feeder
        self._recorder = recorder
        self._jobs: dict[str, FileJob] = {}
        self._streams: dict[str, LiveStream] = {}
        self._happenings: collections.deque[tuple[str, Happening, Arrival | None]] = collections.deque()
        self._final_said: FinalSaid = lambda _stream, _utterance: None
        self._owners: dict[int, tuple[Owner, int]] = {}
        """id() of a sequence in the rows at hand to its owner and its segment or utterance."""
        self._early_cancels: collections.OrderedDict[str, None] = collections.OrderedDict()
        self._arrivals = 0
        self._expected: dict[str, FileJob] = {}
        """Files that the audio threads have, and whose command has not been handled yet."""
        self._last: Owner | None = None
        self._step_began_ns = 0
        self.steps = 0
        self.preemptions = 0
        self.stopped = False
        self.log_steps = False
        """A line of the journal for each step: for finding out where time goes."""

    # ------------------------------------------------------------ for other threads

    def connect(self, final_said: FinalSaid) -> None:
        """Once, before the first stream."""
        self._final_said = final_said

    def expect(self, command: TranscribeFile) -> None:
        """A file has come. An audio thread begins with it at once, so that its first segment is ready when the running step
        ends: else a short file would wait for that step and a whole one more. Called by the socket thread, before ``handle``."""
        self._arrivals += 1
        job = FileJob(command, self._arrivals)
        self._expected[job.id] = job
        self._feeder.add(job)

    def tell(self, request_id: str, happening: Happening, arrival: Arrival | None) -> None:
        """Something happened on a live stream. Called by the ears; the caller rings the bell."""
        self._happenings.append((request_id, happening, arrival))

    def step_age_ns(self) -> int:
        """How long the running step has been running; 0 between steps. Safe from any thread."""
        began = self._step_began_ns
        return time.monotonic_ns() - began if began else 0

    def queued(self) -> dict[Lane, int]:
        """Jobs and streams by lane. Safe from any thread."""
        files = collections.Counter(job.command.lane for job in list(self._jobs.values()))
        return {**files, Lane.LIVE: len(self._streams)}

    # ------------------------------------------------------------ commands

    def handle(self, command: Command) -> None:
        match command:
            case TranscribeFile():
                self._accept(command)
            case Cancel(request_id=request_id):
                self._cancel(request_id)
            case Stop():
                self.stopped = True

    def _accept(self, command: TranscribeFile) -> None:
        if command.request_id not in self._expected:
            self.expect(command)
        job = self._expected.pop(command.request_id)
        if job.id in self._early_cancels:
            del self._early_cancels[job.id]
            self._feeder.drop(job)
            self._fail(job.id, Cancelled("The caller left."))
            return
        try:
            require_spoken(command.options.language, self._capabilities.languages)
        except BadRequest as error:
            self._feeder.drop(job)
            self._fail(job.id, error)
            return
        self._jobs[job.id] = job

    def _cancel(self, request_id: str) -> None:
        job, stream = self._jobs.get(request_id), self._streams.get(request_id)
        if job is not None:
            self._end(job, Cancelled("The caller left."))
            return
        if stream is not None:
            self._end_stream(stream, Cancelled("The caller left."))
            return
        self._early_cancels[request_id] = None
        while len(self._early_cancels) > EARLY_CANCELS:
            self._early_cancels.popitem(last=False)

    # ------------------------------------------------------------ live streams

    def _hear(self) -> None:
        """Everything that the ears have told, in order."""
        while self._happenings:
            request_id, happening, arrival = self._happenings.popleft()
            stream = self._streams.get(request_id)
            if stream is None:
                self._meet(request_id, happening)
                continue
            if isinstance(happening, NapscribeError):
                self._end_stream(stream, happening)
            elif isinstance(happening, Released):
                del self._streams[request_id]
            else:
                self._let_happen(stream, happening, arrival)

    def _let_happen(self, stream: LiveStream, happening: Happening, arrival: Arrival | None) -> None:
        try:
            events = stream.happen(happening, arrival)
        except Exception as error:
            self._end_stream(stream, _failure(error))
            return
        self._say(stream, events)

    def _meet(self, request_id: str, happening: Happening) -> None:
        if isinstance(happening, NapscribeError):
            self._fail(request_id, happening)
        elif isinstance(happening, Opened) and request_id in self._early_cancels:
            del self._early_cancels[request_id]
            self._final_said(request_id, -1)
        elif isinstance(happening, Opened):
            self._arrivals += 1
            self._streams[request_id] = LiveStream(
                request_id,
                self._arrivals,
                self._generation,
                self._engine,
                self._capabilities.accepts_prefix,
                happening.options,
            )

    def _say(self, stream: LiveStream, events: list[Event]) -> None:
        self._emit_all(events)
        for utterance in stream.said:
            self._final_said(stream.id, utterance)
        stream.said.clear()
        if any(isinstance(event, StreamDone) for event in events):
            self._streams.pop(stream.id, None)

    def _end_stream(self, stream: LiveStream, error: NapscribeError) -> None:
        self._streams.pop(stream.id, None)
        stream.cancel()
        self._final_said(stream.id, -1)
        self._fail(stream.id, error)

    # ------------------------------------------------------------ one turn

    def turn(self) -> bool:
        """Settle what the audio threads have brought, then at most one step of the engine. False if there is nothing to do."""
        self._hear()
        for job in sorted(self._jobs.values(), key=lambda job: job.priority):
            self._settle(job)
        rows = self._rows()
        if not rows:
            return False
        self._step(rows)
        return True

    def _settle(self, job: FileJob) -> None:
        """Open what waits, end what is finished or failed."""
        if job.error is not None and not job.open and not job.pending:
            self._end(job, job.error)
            return
        before = len(job.pending)
        while job.sequences < self._capabilities.max_batch and (found := job.unopened()) is not None:
            try:
                self._open(job, *found)
            except Exception as error:
                self._end(job, _failure(error))
                return
        if len(job.pending) < before:
            self._feeder.nudge()
        if job.error is None and job.finished:
            self._forget(job)
            self._emit(job.done())

    def _open(self, job: FileJob, index: int, piece: Piece) -> None:
        piece.sequence = self._engine.open(job.request(index, piece))
        self._engine.feed(piece.sequence, piece.audio)
        self._engine.finish(piece.sequence)

    def _rows(self) -> list[EngineSequence]:
        """Everything that is ready, best first."""
        owners: list[Owner] = [*self._streams.values(), *self._jobs.values()]
        self._owners.clear()
        rows: list[EngineSequence] = []
        for owner in sorted(owners, key=lambda owner: owner.priority):
            for sequence, index in owner.rows():
                self._owners[id(sequence)] = (owner, index)
                rows.append(sequence)
        return rows

    def _step(self, rows: list[EngineSequence]) -> None:
        first, _ = self._owners[id(rows[0])]
        self._count_preemption(first)
        self._recorder.begin(Slot.ENGINE, self._work(rows))
        self._step_began_ns = began = time.monotonic_ns()
        try:
            events = self._engine.step(rows, began)
        except Exception as error:
            failure = _failure(error)  # or raises, and what it was working on stays on record
            events = [SequenceFailed(row, failure) for row in rows[: self._capabilities.max_batch]]
        self._step_began_ns = 0
        self._recorder.end(Slot.ENGINE)
        self.steps += 1
        took = time.monotonic_ns() - began
        self._account(rows, began, took)
        if self.log_steps:
            lanes = collections.Counter(row.request.lane.name.lower() for row in rows)
            kinds = collections.Counter(type(event).__name__ for event in events)
            log("step", number=self.steps, ms=round(took / 1e6, 2), ready=lanes, gave=kinds)
        for event in events:
            self._deliver(event)

    def _work(self, rows: list[EngineSequence]) -> list[tuple[str, int]]:
        owners = (self._owners[id(row)] for row in rows[: self._capabilities.max_batch])
        return [(owner.id, index) for owner, index in owners]

    def _account(self, rows: list[EngineSequence], began_ns: int, took_ns: int) -> None:
        """Time goes to everybody who may have been in the step; live streams that had a turn go behind the others."""
        for row in rows[: self._capabilities.max_batch]:
            owner, index = self._owners[id(row)]
            owner.stepped(index, began_ns, took_ns)
            if isinstance(owner, LiveStream):
                self._arrivals += 1
                owner.order = self._arrivals

    def _count_preemption(self, first: Owner) -> None:
        """A job that had the last step and is not finished gives way to a better lane."""
        last, self._last = self._last, first
        if last is not None and last is not first and last.id in self._jobs and first.lane < last.lane:
            self.preemptions += 1

    def _deliver(self, event: EngineEvent) -> None:
        found = self._owners.get(id(event.sequence))
        if found is None:
            return
        owner, index = found
        if isinstance(event, SequenceFailed):
            self._end_owner(owner, event.error)
            return
        if owner.id not in self._jobs and owner.id not in self._streams:
            return
        events = owner.hypothesis(index, event) if isinstance(event, Hypothesis) else owner.final(index, event)
        if isinstance(owner, LiveStream):
            self._say(owner, events)
        else:
            self._emit_all(events)
            if events:
                self._feeder.nudge()  # a segment less in memory

    def _emit_all(self, events: list[Event]) -> None:
        for event in events:
            self._emit(event)

    # ------------------------------------------------------------ endings

    def _end_owner(self, owner: Owner, error: NapscribeError) -> None:
        if owner.id in self._streams and isinstance(owner, LiveStream):
            self._end_stream(owner, error)
        elif owner.id in self._jobs and isinstance(owner, FileJob):
            self._end(owner, error)

    def _end(self, job: FileJob, error: NapscribeError) -> None:
        self._forget(job)
        self._fail(job.id, error)

    def _forget(self, job: FileJob) -> None:
        del self._jobs[job.id]
        self._feeder.drop(job)
        job.cancel(self._engine)

    def _fail(self, request_id: str, error: NapscribeError) -> None:
        self._emit(Failed(self._generation, request_id, error.code, error.message, error.hint, error.param))


def _failure(error: Exception) -> NapscribeError:
    """What the caller is told of it. An engine that is broken for good ends the worker: raises ``error``."""
    if isinstance(error, EngineBroken):
        raise error
    if isinstance(error, NapscribeError):
        return error
    log("the engine failed", level="error", error=repr(error))
    return EngineFailed(f"The engine failed: {type(error).__name__}.")
