"""``POST /v1/audio/transcriptions`` and ``/translations``: parse, queue, wait, render; or stream as it comes."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.answers import sse
from gateway.answers.event_stream import EventStream
from gateway.answers.render import languages, last_tokens, rendered, token_logprobs, usage
from gateway.answers.transcript import TextStream
from gateway.files.form import TranscriptionRequest, parse_request, resolve_model
from gateway.files.reception import Reception, Visit, restart_headers, stage_times
from gateway.model import ServedModel
from shared.errors import Unsupported
from shared.languages import require_one_spoken
from shared.messages import Delta, FileOptions


@dataclass(frozen=True)
class _Order:
    """What was asked, and the visit that works on it."""

    request: TranscriptionRequest
    visit: Visit


class Transcriptions:
    """The OpenAI doors for files."""

    def __init__(self, reception: Reception, model: ServedModel) -> None:
        self._reception = reception
        self._model = model

    def routes(self) -> list[Route]:
        return [
            Route("/v1/audio/transcriptions", self.transcribe, methods=["POST"]),
            Route("/v1/audio/transcriptions/stream", self.stream, methods=["POST"]),
            Route("/v1/audio/translations", self.translate, methods=["POST"]),
        ]

    async def transcribe(self, request: Request) -> Response:
        order = await self._admit(request, stream=None)
        return self._stream(request, order) if order.request.stream else await self._whole(request, order)

    async def stream(self, request: Request) -> Response:
        """The same with ``stream=true``, for clients that cannot set a field."""
        return self._stream(request, await self._admit(request, stream=True))

    async def translate(self, _request: Request) -> Response:
        """No engine of ours translates; saying so beats returning the original language as if it were English."""
        raise Unsupported(
            f"The model {self._model.id!r} does not translate.",
            hint="Use /v1/audio/transcriptions and translate the text.",
        )

    async def _admit(self, request: Request, stream: bool | None) -> _Order:
        """Upload to spool, check every field, queue. Raises what is wrong, with nothing left behind."""
        form = await self._reception.receive(request)
        try:
            parsed = parse_request(form.fields, stream=stream)
            resolve_model(parsed.model, self._model.id)
            require_one_spoken(parsed.languages, self._reception.languages)
            visit = self._reception.admit(request, form, self._options(parsed), reads_along=parsed.stream)
        except BaseException:
            form.file.discard()
            raise
        return _Order(parsed, visit)

    def _options(self, parsed: TranscriptionRequest) -> FileOptions:
        options = parsed.file_options(max_seconds=self._reception.limits.max_audio_seconds)
        return msgspec.structs.replace(options, deltas=parsed.stream)

    async def _whole(self, request: Request, order: _Order) -> Response:
        """Everything at once, unless the caller leaves first."""
        wanted = order.request
        body, content_type = await rendered(
            await self._reception.finish(request, order.visit),
            wanted.response_format,
            granularities=wanted.granularities,
            logprobs=wanted.logprobs,
            temperature=wanted.temperature,
        )
        return Response(body, headers={"content-type": content_type, **restart_headers(order.visit.job)})

    def _stream(self, request: Request, order: _Order) -> Response:
        job = order.visit.job
        timings: dict[str, float] = request.state.timings

        def begin() -> None:
            """The status line leaves before the work is done: what is known by then."""
            known = stage_times(job)
            timings.update(queue=known["queue"], spawn=known["spawn"])

        async def leave() -> None:
            timings.update(stage_times(job))
            self._reception.leave(order.visit)

        return EventStream(self._frames(order), self._reception.waiting_for, begin, leave)

    async def _frames(self, order: _Order) -> AsyncGenerator[bytes, None]:
        """The done text is what was sent, so that both are the same by construction."""
        job, stream, finished = order.visit.job, TextStream(), ""
        logprobs = order.request.logprobs
        async for event in job.progress():
            if isinstance(event, Delta):
                piece, known = stream.delta(event), None
            else:
                piece = stream.segment(event)
                known = last_tokens(token_logprobs([event], finished), piece) if logprobs else None
                finished = stream.text
            if piece:
                yield sse.delta(piece, logprobs=known)
        transcript = self._reception.transcript(job)
        yield sse.done(
            stream.text,
            usage=usage(transcript),
            languages=languages(transcript),
            logprobs=token_logprobs(job.segments) if logprobs else None,
            finish_reason=transcript.finish_reason,
        )
        yield sse.DONE
