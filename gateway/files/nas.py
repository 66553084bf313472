"""``POST /asr`` and ``POST /detect-language`` as whisper-asr-webservice answers them, for Bazarr, subgen, n8n and the like.

Options come in the query, the recording as the multipart field ``audio_file``. With ``encode=false`` it is headerless
s16le, mono, 16 kHz.
"""

from __future__ import annotations

import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.answers.render import rendered
from gateway.answers.transcript import Transcript
from gateway.files.reception import Reception, restart_headers
from gateway.files.upload import Form
from gateway.truth import truth
from shared.errors import BadRequest, Unsupported
from shared.languages import language_name, parse_language
from shared.messages import FileOptions, RawAudio
from shared.pcm import SAMPLE_RATE, seconds

OUTPUTS = ("txt", "vtt", "srt", "tsv", "json")
DETECT_SECONDS = 30.0
"""Audio that a language is told from, as Whisper does."""
_TEXT = "text/plain; charset=utf-8"
_HEADERLESS = RawAudio("s16le", SAMPLE_RATE)


class Nas:
    """The doors that media servers know."""

    def __init__(self, reception: Reception) -> None:
        self._reception = reception

    def routes(self) -> list[Route]:
        return [
            Route("/asr", self.asr, methods=["POST"]),
            Route("/detect-language", self.detect_language, methods=["POST"]),
        ]

    async def asr(self, request: Request) -> Response:
        """Raises BadRequest for an unknown output or language, Unsupported for translation."""
        query = request.query_params
        output = query.get("output", "txt").strip().lower() or "txt"
        if output not in OUTPUTS:
            hint = f"It is one of {', '.join(OUTPUTS)}."
            raise BadRequest(f"output cannot be {output[:40]!r}.", hint=hint, param="output")
        if query.get("task", "transcribe").strip().lower() == "translate":
            raise Unsupported("The model does not translate.", hint="Use task=transcribe.", param="task")
        options = FileOptions(
            language=parse_language(query.get("language", "")),
            prompt=query.get("initial_prompt", ""),
            words=_flag(query, "word_timestamps") or output in {"srt", "vtt"},
            raw=_raw(query),
            max_seconds=self._reception.limits.max_audio_seconds,
        )
        transcript, headers = await self._transcribe(request, options)
        body, content_type = await _render(transcript, output, _flag(query, "word_timestamps"))
        return Response(body, headers={"content-type": content_type, "asr-engine": "napscribe", **headers})

    async def detect_language(self, request: Request) -> Response:
        """The language of the first half minute. ``confidence`` is 0 where the engine knows one language only and so did
        not choose."""
        options = FileOptions(raw=_raw(request.query_params), clip_seconds=DETECT_SECONDS)
        transcript, headers = await self._transcribe(request, options)
        spoken = [segment for segment in transcript.segments if segment.text]
        agreeing = sum(segment.language == transcript.language for segment in spoken)
        chosen = len(self._reception.languages) > 1
        answer = {
            "detected_language": language_name(transcript.language) or "unknown",
            "language_code": transcript.language,
            "confidence": round(agreeing / len(spoken), 3) if chosen and spoken else 0.0,
        }
        return Response(msgspec.json.encode(answer), headers=headers, media_type="application/json")

    async def _transcribe(self, request: Request, options: FileOptions) -> tuple[Transcript, dict[str, str]]:
        form: Form = await self._reception.receive(request, ("audio_file", "file"))
        try:
            visit = self._reception.admit(request, form, options)
        except BaseException:
            form.file.discard()
            raise
        return await self._reception.finish(request, visit), restart_headers(visit.job)


async def _render(transcript: Transcript, output: str, words: bool) -> tuple[bytes, str]:
    match output:
        case "txt":
            lines = [segment.text.strip() for segment in transcript.segments if segment.text.strip()]
            return "".join(f"{line}\n" for line in lines).encode(), _TEXT
        case "tsv":
            return _tsv(transcript).encode(), _TEXT
        case "json":
            granularities = ("segment", "word") if words else ("segment",)
            body, content_type = await rendered(transcript, "verbose_json", granularities=granularities)
            answer = msgspec.json.decode(body)
            answer["language"] = transcript.language
            return msgspec.json.encode(answer), content_type
        case _:
            body, _ = await rendered(transcript, output)
            return body, _TEXT


def _tsv(transcript: Transcript) -> str:
    """Milliseconds and text, as Whisper's writer does."""
    rows = [
        (round(seconds(s.start_sample) * 1000), round(seconds(s.speech_end_sample) * 1000), " ".join(s.text.split()))
        for s in transcript.segments
        if s.text.strip()
    ]
    return "start\tend\ttext\n" + "".join(f"{start}\t{end}\t{text}\n" for start, end, text in rows)


def _raw(query: QueryParams) -> RawAudio | None:
    encode = query.get("encode", "").strip()
    return None if not encode or truth(encode) else _HEADERLESS


def _flag(query: QueryParams, name: str) -> bool:
    return truth(query.get(name, "")) is True
