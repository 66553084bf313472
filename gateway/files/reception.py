"""What every door for files does: take an upload in, queue it, wait for it, and give everything back in the end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request

from gateway.answers.event_stream import disconnected, settle
from gateway.answers.transcript import Transcript
from gateway.context import new_request_id
from gateway.files.spool import Spool, SpoolFile
from gateway.files.upload import Form, receive_form
from gateway.jobs.dispatch import Dispatcher
from gateway.jobs.file_job import FileJob
from gateway.life.supervisor import Lease, Supervisor
from shared.errors import Cancelled
from shared.languages import require_spoken
from shared.messages import FileOptions, Lane
from shared.pcm import seconds

INTERACTIVE_BYTES = 1024 * 1024
"""An upload up to this size is short (33 s as 16 kHz WAV) and goes before batches."""


@dataclass(frozen=True)
class Limits:
    max_upload_bytes: int
    max_audio_seconds: float


@dataclass(frozen=True)
class Visit:
    """One request in the house: its job, and what must be given back."""

    job: FileJob
    lease: Lease
    file: SpoolFile


class Reception:
    def __init__(self, supervisor: Supervisor, dispatcher: Dispatcher, spool: Spool, limits: Limits) -> None:
        self._supervisor = supervisor
        self._dispatcher = dispatcher
        self._spool = spool
        self.limits = limits

    async def receive(self, request: Request, file_fields: Sequence[str] = ("file",)) -> Form:
        """The form, its file in the spool. Raises what ``receive_form`` does; whoever gets it admits or discards the file."""
        max_bytes = self.limits.max_upload_bytes
        return await receive_form(request, self._spool, max_file_bytes=max_bytes, file_fields=file_fields)

    def admit(self, request: Request, form: Form, options: FileOptions, *, reads_along: bool = False) -> Visit:
        """Queue the file. Raises BadRequest for a language that the model does not know, QueueFull.

        An id that the caller chose need not be unique, so the job has one of its own.
        """
        require_spoken(options.language, self.languages)
        short = reads_along or form.file.size <= INTERACTIVE_BYTES
        name = f"{request.state.request_id}.{new_request_id()[4:12]}"
        job = FileJob(name, Lane.INTERACTIVE if short else Lane.BATCH, form.file.path, options)
        lease = self._supervisor.lease()
        try:
            self._dispatcher.submit(job)
        except BaseException:
            lease.release()
            raise
        return Visit(job, lease, form.file)

    async def finish(self, request: Request, visit: Visit) -> Transcript:
        """Wait for the whole transcript; everything of the visit is given back. Raises the job's error, or Cancelled if the
        caller leaves first."""
        job = visit.job
        work = asyncio.ensure_future(job.result())
        gone = asyncio.ensure_future(disconnected(request.receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise Cancelled("The caller left.")
            await work
        finally:
            await settle(work, gone)
            request.state.timings.update(stage_times(job))
            self.leave(visit)
        return self.transcript(job)

    def leave(self, visit: Visit) -> None:
        """Stop what still runs, and give back lease and file. Twice is once."""
        self._dispatcher.abandon(visit.job)
        visit.lease.release()
        visit.file.discard()

    def transcript(self, job: FileJob) -> Transcript:
        """Of a job that is done."""
        done = job.done
        assert done is not None
        spread = any(segment.estimated for segment in job.segments)
        return Transcript(
            segments=tuple(job.segments),
            duration=seconds(done.duration_samples),
            language=done.language,
            word_times="estimated" if spread else self._supervisor.word_times,
        )

    @property
    def languages(self) -> tuple[str, ...]:
        """Of the model; empty while nobody knows."""
        return self._supervisor.languages

    def waiting_for(self) -> str:
        """What a reader waits for, in a few words."""
        return self._supervisor.starting()


def stage_times(job: FileJob) -> dict[str, float]:
    """Milliseconds by stage, for ``server-timing``."""
    stages = {
        "queue": job.queued_ns,
        "spawn": job.spawn_ns,
        "decode": job.timings.decode_ns,
        "vad": job.timings.vad_ns,
        "engine": job.timings.engine_ns,
    }
    return {name: ns / 1e6 for name, ns in stages.items()}


def restart_headers(job: FileJob) -> dict[str, str]:
    """How often the worker had to be replaced under this request, and how many segments were done twice; absent for none."""
    if not job.restarts:
        return {}
    return {"x-worker-restarts": str(job.restarts), "x-redone-segments": str(job.redone_segments)}
