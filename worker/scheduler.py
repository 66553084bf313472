"""Steps, lanes, cancellation: decides before every step of the engine whose turn it is.

One thread. Live goes before interactive goes before batch; inside a lane, who has had least goes first. A step is
bounded, so the longest that anybody waits for a better lane's turn is one step.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable

from shared.errors import Cancelled, EngineFailed, NapscribeError
from shared.journal import log
from shared.messages import Cancel, Capabilities, Command, Event, Failed, Lane, Stop, TranscribeFile
from shared.recorder import Recorder, Slot
from worker.engines.base import Engine, EngineEvent, EngineSequence, Final, Hypothesis, SequenceFailed
from worker.feeder import Feeder
from worker.file_job import FileJob, OpenSegment

EARLY_CANCELS = 1024
"""Cancels that came before their job (they travel on a socket of their own) and are remembered."""

Emit = Callable[[Event], None]


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
        self._owners: dict[int, tuple[FileJob, int]] = {}
        """id() of an open sequence to its job and segment index."""
        self._early_cancels: collections.OrderedDict[str, None] = collections.OrderedDict()
        self._arrivals = 0
        self._last: FileJob | None = None
        self._step_began_ns = 0
        self.steps = 0
        self.preemptions = 0
        self.stopped = False

    # ------------------------------------------------------------ for the socket thread

    def step_age_ns(self) -> int:
        """How long the running step has been running; 0 between steps. Safe from any thread."""
        began = self._step_began_ns
        return time.monotonic_ns() - began if began else 0

    def queued(self) -> dict[Lane, int]:
        """Jobs by lane. Safe from any thread."""
        return dict(collections.Counter(job.command.lane for job in list(self._jobs.values())))

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
        if command.request_id in self._early_cancels:
            del self._early_cancels[command.request_id]
            self._fail(command.request_id, Cancelled("The caller left."))
            return
        self._arrivals += 1
        job = FileJob(command, self._arrivals)
        self._jobs[job.id] = job
        self._feeder.add(job)

    def _cancel(self, request_id: str) -> None:
        job = self._jobs.get(request_id)
        if job is not None:
            self._end(job, Cancelled("The caller left."))
            return
        self._early_cancels[request_id] = None
        while len(self._early_cancels) > EARLY_CANCELS:
            self._early_cancels.popitem(last=False)

    # ------------------------------------------------------------ one turn

    def turn(self) -> bool:
        """Settle what the audio thread has brought, then at most one step of the engine. False if there is nothing to do."""
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
        taken = False
        while len(job.open) < self._capabilities.max_batch and (segment := job.next_segment()) is not None:
            taken = True
            sequence = self._engine.open(job.sequence_request(segment))
            self._engine.feed(sequence, segment.audio)
            self._engine.finish(sequence)
            job.opened(segment, sequence)
            self._owners[id(sequence)] = (job, segment.index)
        if taken:
            self._feeder.nudge()
        if job.error is None and job.finished:
            self._forget(job)
            self._emit(job.done())

    def _rows(self) -> list[EngineSequence]:
        """Everything that is ready, best first."""
        ordered = sorted(self._jobs.values(), key=lambda job: job.priority)
        return [e.sequence for job in ordered for e in job.open.values() if e.final is None and e.sequence.ready]

    def _step(self, rows: list[EngineSequence]) -> None:
        first, _ = self._owners[id(rows[0])]
        self._count_preemption(first)
        self._recorder.begin(Slot.ENGINE, self._work(rows))
        self._step_began_ns = time.monotonic_ns()
        try:
            events = self._engine.step(rows, self._step_began_ns)
        except NapscribeError as error:
            events = [SequenceFailed(row, error) for row in rows[: self._capabilities.max_batch]]
        except Exception as error:
            log("the engine failed", level="error", error=repr(error))
            failure = EngineFailed(f"The engine failed: {type(error).__name__}.")
            events = [SequenceFailed(row, failure) for row in rows[: self._capabilities.max_batch]]
        finally:
            took = time.monotonic_ns() - self._step_began_ns
            self._step_began_ns = 0
            self._recorder.end(Slot.ENGINE)
        self.steps += 1
        first.engine_ns += took
        for event in events:
            self._deliver(event)

    def _work(self, rows: list[EngineSequence]) -> list[tuple[str, int]]:
        owners = (self._owners[id(row)] for row in rows[: self._capabilities.max_batch])
        return [(job.id, index) for job, index in owners]

    def _count_preemption(self, first: FileJob) -> None:
        """A job that had the last step and is not finished gives way to a better lane."""
        last, self._last = self._last, first
        if last is not None and last is not first and last.id in self._jobs and first.lane < last.lane:
            self.preemptions += 1

    def _deliver(self, event: EngineEvent) -> None:
        owner = self._owners.get(id(event.sequence))
        if owner is None:
            return
        job, index = owner
        match event:
            case Hypothesis():
                self._emit_all(job.hypothesis(index, event))
            case Final():
                del self._owners[id(event.sequence)]
                self._emit_all(job.final(index, event))
            case SequenceFailed(error=error):
                del self._owners[id(event.sequence)]
                self._end(job, error)

    def _emit_all(self, events: list[Event]) -> None:
        for event in events:
            self._emit(event)

    # ------------------------------------------------------------ endings

    def _end(self, job: FileJob, error: NapscribeError) -> None:
        self._forget(job)
        self._fail(job.id, error)

    def _forget(self, job: FileJob) -> None:
        del self._jobs[job.id]
        self._feeder.drop(job)
        for entry in job.open.values():
            self._close(entry)
        job.open.clear()

    def _close(self, entry: OpenSegment) -> None:
        if self._owners.pop(id(entry.sequence), None) is not None and entry.final is None:
            self._engine.cancel(entry.sequence)

    def _fail(self, request_id: str, error: NapscribeError) -> None:
        self._emit(Failed(self._generation, request_id, error.code, error.message, error.hint, error.param))
