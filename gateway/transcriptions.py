"""``POST /v1/audio/transcriptions`` and ``/translations``: parse, queue, wait, render; or stream as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway import sse
from gateway.dispatch import Dispatcher
from gateway.event_stream import EventStream, disconnected, settle
from gateway.file_job import FileJob
from gateway.form import TranscriptionRequest, parse_request, resolve_model
from gateway.model import ServedModel
from gateway.render import languages, rendered, token_logprobs, usage
from gateway.spool import Spool, SpoolFile
from gateway.supervisor import Lease, Supervisor
from gateway.transcript import TextStream, Transcript
from gateway.upload import receive_form
from shared.errors import Cancelled, Unsupported
from shared.messages import Delta, FileOptions, Lane
from shared.pcm import seconds

INTERACTIVE_BYTES = 1024 * 1024
"""An upload up to this size is short (33 s as 16 kHz WAV) and goes before batches."""


@dataclass(frozen=True)
class Limits:
    max_upload_bytes: int
    max_audio_seconds: float


@dataclass(frozen=True)
class _Visit:
    """One request and all that must be given back at its end."""

    request: TranscriptionRequest
    job: FileJob
    lease: Lease
    file: SpoolFile


class Transcriptions:
    """The OpenAI doors for files."""

    def __init__(
        self, supervisor: Supervisor, dispatcher: Dispatcher, spool: Spool, model: ServedModel, limits: Limits
    ) -> None:
        self._supervisor = supervisor
        self._dispatcher = dispatcher
        self._spool = spool
        self._model = model
        self._limits = limits

    def routes(self) -> list[Route]:
        return [
            Route("/v1/audio/transcriptions", self.transcribe, methods=["POST"]),
            Route("/v1/audio/transcriptions/stream", self.stream, methods=["POST"]),
            Route("/v1/audio/translations", self.translate, methods=["POST"]),
        ]

    async def transcribe(self, request: Request) -> Response:
        visit = await self._admit(request, stream=None)
        return self._stream(request, visit) if visit.request.stream else await self._whole(request, visit)

    async def stream(self, request: Request) -> Response:
        """The same with ``stream=true``, for clients that cannot set a field."""
        return self._stream(request, await self._admit(request, stream=True))

    async def translate(self, _request: Request) -> Response:
        """No engine of ours translates; saying so beats returning the original language as if it were English."""
        raise Unsupported(
            f"The model {self._model.id!r} does not translate.",
            hint="Use /v1/audio/transcriptions and translate the text.",
        )

    # ------------------------------------------------------------ in

    async def _admit(self, request: Request, stream: bool | None) -> _Visit:
        """Upload to spool, check every field, queue. Raises what is wrong, with nothing left behind."""
        form = await receive_form(request, self._spool, max_file_bytes=self._limits.max_upload_bytes)
        try:
            parsed = parse_request(form.fields, stream=stream)
            resolve_model(parsed.model, self._model.id)
            lane = Lane.INTERACTIVE if parsed.stream or form.file.size <= INTERACTIVE_BYTES else Lane.BATCH
            job = FileJob(request.state.request_id, lane, form.file.path, self._options(parsed))
            lease = self._supervisor.lease()
            try:
                self._dispatcher.submit(job)
            except BaseException:
                lease.release()
                raise
        except BaseException:
            form.file.discard()
            raise
        return _Visit(parsed, job, lease, form.file)

    def _options(self, parsed: TranscriptionRequest) -> FileOptions:
        options = parsed.file_options(max_seconds=self._limits.max_audio_seconds)
        return msgspec.structs.replace(options, deltas=parsed.stream)

    async def _leave(self, visit: _Visit) -> None:
        self._dispatcher.abandon(visit.job)
        visit.lease.release()
        visit.file.discard()

    # ------------------------------------------------------------ out

    async def _whole(self, request: Request, visit: _Visit) -> Response:
        """Everything at once, unless the caller leaves first."""
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
            await self._leave(visit)
        wanted = visit.request
        body, content_type = await rendered(
            self._transcript(job),
            wanted.response_format,
            granularities=wanted.granularities,
            logprobs=wanted.logprobs,
            temperature=wanted.temperature,
        )
        return Response(body, headers={"content-type": content_type, **restart_headers(job)})

    def _transcript(self, job: FileJob) -> Transcript:
        done = job.done
        assert done is not None
        return Transcript(
            segments=tuple(job.segments),
            duration=seconds(done.duration_samples),
            language=done.language,
            word_times=self._supervisor.word_times,
        )

    def _stream(self, request: Request, visit: _Visit) -> Response:
        timings: dict[str, float] = request.state.timings

        def begin() -> None:
            """The status line leaves before the work is done: what is known by then."""
            known = stage_times(visit.job)
            timings.update(queue=known["queue"], spawn=known["spawn"])

        async def leave() -> None:
            timings.update(stage_times(visit.job))
            await self._leave(visit)

        return EventStream(self._frames(visit), self._supervisor.starting, begin, leave)

    async def _frames(self, visit: _Visit) -> AsyncGenerator[bytes, None]:
        """The done text is what was sent, so that both are the same by construction."""
        job, stream = visit.job, TextStream()
        logprobs = visit.request.logprobs
        async for event in job.progress():
            if isinstance(event, Delta):
                piece, known = stream.delta(event), None
            else:
                piece, known = stream.segment(event), token_logprobs([event]) if logprobs else None
            if piece:
                yield sse.delta(piece, logprobs=known)
        transcript = self._transcript(job)
        yield sse.done(
            stream.text,
            usage=usage(transcript),
            languages=languages(transcript),
            logprobs=token_logprobs(job.segments) if logprobs else None,
        )
        yield sse.DONE


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
