"""Who waits and who goes: three lanes and the worker's credits. Pure bookkeeping, no clock, no loop.

Credits are jobs per lane, granted by the worker, independent of each other. Until a job is dispatched the gateway owns it
and may refuse, expire or drop it.

A *suspect* is a job that the worker was working on when it died. Suspects run alone among the files: if one kills the
worker again, it alone is to blame. It stops being one as soon as it has moved on.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Protocol

from shared.errors import QueueFull
from shared.messages import Lane


class Job(Protocol):
    """What admission needs to know of a job."""

    @property
    def lane(self) -> Lane: ...

    @property
    def suspect(self) -> bool: ...


class Lanes:
    """Waiting and running jobs, by lane."""

    def __init__(self, max_queue: int) -> None:
        self._max_queue = max_queue
        self._waiting: dict[Lane, collections.deque[Job]] = {lane: collections.deque() for lane in Lane}
        self._running: dict[Lane, list[Job]] = {lane: [] for lane in Lane}

    def put(self, job: Job) -> None:
        """Join the end of the job's lane. Raises QueueFull (without ``retry_after``, which the caller knows)."""
        if len(self._waiting[job.lane]) >= self._max_queue:
            raise QueueFull(f"{self._max_queue} requests wait already.", hint="Try again later.")
        self._waiting[job.lane].append(job)

    def put_back(self, jobs: list[Job]) -> None:
        """Return jobs that had been dispatched, in their order, to the front of their lanes. Never refused."""
        for job in reversed(jobs):
            self._waiting[job.lane].appendleft(job)

    def remove(self, job: Job) -> bool:
        """Leave the queue; False if the job does not wait."""
        try:
            self._waiting[job.lane].remove(job)
        except ValueError:
            return False
        return True

    def next(self, granted: dict[Lane, int]) -> Job | None:
        """The job to dispatch now, moved to running; None if nobody may go."""
        running = [job for jobs in self._running.values() for job in jobs]
        if any(job.suspect for job in running):
            return None
        suspects = [job for lane in Lane for job in self._waiting[lane] if job.suspect]
        if suspects:
            return None if running else self._dispatch(suspects[0])
        for lane in Lane:
            if self._waiting[lane] and len(self._running[lane]) < granted.get(lane, 0):
                return self._dispatch(self._waiting[lane][0])
        return None

    def done(self, job: Job) -> None:
        """A dispatched job ended; its credit is back."""
        if job in self._running[job.lane]:
            self._running[job.lane].remove(job)

    def take_running(self) -> list[Job]:
        """All dispatched jobs, which are no longer: the worker is gone."""
        taken = [job for lane in Lane for job in self._running[lane]]
        for jobs in self._running.values():
            jobs.clear()
        return taken

    def take_waiting(self) -> list[Job]:
        """All waiting jobs, which no longer wait."""
        taken = [job for lane in Lane for job in self._waiting[lane]]
        for jobs in self._waiting.values():
            jobs.clear()
        return taken

    def waiting(self, lane: Lane) -> int:
        return len(self._waiting[lane])

    def running(self, lane: Lane) -> int:
        return len(self._running[lane])

    def __iter__(self) -> Iterator[Job]:
        """Waiting jobs, best lane first."""
        return (job for lane in Lane for job in self._waiting[lane])

    def _dispatch(self, job: Job) -> Job:
        self._waiting[job.lane].remove(job)
        self._running[job.lane].append(job)
        return job
