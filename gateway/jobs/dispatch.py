"""From a queued job to its end: hands jobs to the worker as credits allow, and takes over when a worker dies."""

from __future__ import annotations

import asyncio
import contextlib
import time

from gateway.jobs.admission import Job, Lanes
from gateway.jobs.file_job import FileJob
from gateway.life.channel import Channel
from gateway.life.supervisor import Supervisor
from gateway.life.vitals import Worker
from shared.errors import Busy, Cancelled, NapscribeError, QueueTimeout, WorkerCrashed, from_code
from shared.journal import log
from shared.messages import Cancel, Delta, Failed, FileDone, JobEvent, Lane, SegmentDone

MAX_CRASHES = 2
"""A job that ends the worker this many times without moving on is poison: it fails, the others go on."""
SWEEP_SECONDS = 1.0
DEFAULT_SERVICE_SECONDS = 5.0
"""Guess of a job's length before any has been seen; only for ``Retry-After``."""


class Dispatcher:
    """Listens to the supervisor and to the channel; all on the loop."""

    def __init__(self, channel: Channel, max_queue: int, queue_seconds: float) -> None:
        self._channel = channel
        self._queue_ns = int(queue_seconds * 1e9)
        self._lanes = Lanes(max_queue)
        self._jobs: dict[str, FileJob] = {}
        self._worker: Worker | None = None
        self._accepting = False
        """The worker takes new jobs; one that is being stopped still has its last words heard."""
        self._service_s = DEFAULT_SERVICE_SECONDS
        self._sweeper: asyncio.TimerHandle | None = None
        self.supervisor: Supervisor
        """Set once by the composition root: the two know each other."""

    def submit(self, job: FileJob) -> None:
        """Queue a job; the caller holds a lease. Raises QueueFull with ``retry_after``."""
        try:
            self._lanes.put(job)
        except Busy as error:
            error.retry_after = self._retry_after(job.lane)
            raise
        self._jobs[job.request_id] = job
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep)
        self._pump()

    def abandon(self, job: FileJob) -> None:
        """The caller has left: drop the job, or stop it in the worker at its next step. Harmless after its end."""
        if job.ended or job.abandoned:
            return
        job.abandoned = True
        job.fail(Cancelled("The caller left."))
        if self._lanes.remove(job):
            self._jobs.pop(job.request_id, None)
            self._pump()
        elif self._worker is not None:
            with contextlib.suppress(NapscribeError):
                self._channel.control(Cancel(self._worker.generation, job.request_id))

    def report(self) -> dict[str, dict[str, int]]:
        """Jobs that wait and run, by lane."""
        return {
            lane.name.lower(): {"waiting": self._lanes.waiting(lane), "running": self._lanes.running(lane)}
            for lane in Lane
        }

    # ------------------------------------------------------------ what the supervisor says

    def worker_ready(self, worker: Worker) -> None:
        self._worker, self._accepting = worker, True
        now = time.monotonic_ns()
        started = now - int(self.supervisor.spawn_seconds * 1e9)
        for job in self._waiting():
            job.spawn_ns += now - max(job.submitted_ns, started)
        self._pump()

    def worker_stopping(self) -> None:
        self._accepting = False

    def worker_lost(self, generation: int, *, crashed: bool, reason: str) -> None:
        self._worker, self._accepting = None, False
        in_hand = self.supervisor.suspects(generation)
        again: list[Job] = []
        for job in self._lanes.take_running():
            assert isinstance(job, FileJob)
            if job.abandoned or job.ended:
                self._jobs.pop(job.request_id, None)
                continue
            job.restarts += 1
            if job.request_id in in_hand:
                # More than one if the last words of the dead never arrived.
                job.redone_segments += max(0, in_hand[job.request_id] - len(job.segments) + 1)
                if crashed:
                    self._blame(job, reason)
            if job.error is None:
                again.append(job)
            else:
                self._jobs.pop(job.request_id, None)
        self._lanes.put_back(again)

    def refuse_all(self, error: NapscribeError) -> None:
        for job in list(self._jobs.values()):
            job.fail(error)
        for job in self._waiting():
            self._jobs.pop(job.request_id, None)
        self._lanes.take_waiting()

    # ------------------------------------------------------------ what the worker says

    def handle(self, event: JobEvent | Failed) -> None:
        """An event of a job; one of another generation or of a job that is no more is dropped."""
        worker = self._worker
        job = self._jobs.get(event.request_id)
        if worker is None or event.generation != worker.generation or job is None:
            return
        match event:
            case Failed():
                self._end(job)
                job.fail(from_code(event.code, event.message, hint=event.hint, param=event.param))
            case FileDone():
                self._observe(job)
                self._end(job)
                self.supervisor.settled(event.generation)
                job.take(event)
            case SegmentDone() | Delta():
                was_suspect = job.suspect
                job.take(event)
                if was_suspect or isinstance(event, SegmentDone):
                    self.supervisor.settled(event.generation)
                if was_suspect:
                    self._pump()

    # ------------------------------------------------------------ inside

    def _pump(self) -> None:
        worker = self._worker
        while worker is not None and self._accepting and (job := self._lanes.next(worker.credits)) is not None:
            assert isinstance(job, FileJob)
            now = time.monotonic_ns()
            if not job.dispatched_ns:
                job.queued_ns = now - job.submitted_ns - job.spawn_ns
            job.dispatched_ns = now
            try:
                self._channel.send(job.command(worker.generation))
            except Busy as error:
                # The worker is going or does not read; the supervisor will say so. The job keeps its place.
                log("not dispatched", level="warning", request_id=job.request_id, error=error.code)
                self._lanes.done(job)
                self._lanes.put_back([job])
                return

    def _end(self, job: FileJob) -> None:
        self._lanes.done(job)
        self._jobs.pop(job.request_id, None)
        asyncio.get_running_loop().call_soon(self._pump)

    def _blame(self, job: FileJob, reason: str) -> None:
        job.crashes += 1
        job.suspect = True
        log("suspect", level="warning", request_id=job.request_id, crashes=job.crashes, reason=reason)
        if job.crashes >= MAX_CRASHES:
            job.fail(
                WorkerCrashed(
                    f"This input ended the worker {job.crashes} times: {reason}.",
                    hint="The other requests went on. Please report the file if you can share it.",
                )
            )

    def _observe(self, job: FileJob) -> None:
        took = (time.monotonic_ns() - job.dispatched_ns) / 1e9
        self._service_s += 0.2 * (took - self._service_s)

    def _retry_after(self, lane: Lane) -> float:
        granted = self._worker.credits.get(lane, 1) if self._worker else 1
        return min(120.0, max(1.0, self._lanes.waiting(lane) * self._service_s / max(1, granted)))

    def _sweep(self) -> None:
        """Expire what has waited too long. Runs only while there are jobs."""
        self._sweeper = None
        now = time.monotonic_ns()
        for job in self._waiting():
            if not job.restarts and now - job.submitted_ns > self._queue_ns:
                self._lanes.remove(job)
                self._jobs.pop(job.request_id, None)
                error = QueueTimeout(
                    f"The request waited {self._queue_ns / 1e9:.0f} s for its turn.",
                    retry_after=self._retry_after(job.lane),
                )
                job.fail(error)
        if self._jobs:
            self._sweeper = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep)

    def _waiting(self) -> list[FileJob]:
        return [job for job in self._lanes if isinstance(job, FileJob)]
