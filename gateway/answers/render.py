"""A transcript as a response body, in every format of OpenAI's transcription door.

Shapes are those of whisper-1 as clients know them: durations and times are numbers, ``words`` stands at top level under
the key ``word`` and only if it was asked for, numbers that only Whisper has get harmless placeholders.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import msgspec

from gateway.answers.subtitles import srt, vtt
from gateway.answers.timed_text import estimated_words
from gateway.answers.transcript import Transcript, joined_pieces, joined_scores
from shared.errors import BadRequest
from shared.languages import language_name
from shared.messages import SegmentDone, Word
from shared.pcm import seconds

JSON = "application/json"
TEXT = "text/plain; charset=utf-8"

_LONG = 60
"""Segments from which a body is made outside the event loop: the subtitles of two hours take a good part of a second."""

_SEEK_HZ = 100
"""Whisper counts ``seek`` in frames of 10 ms."""

_encoder = msgspec.json.Encoder()


async def rendered(
    transcript: Transcript,
    response_format: str = "json",
    *,
    granularities: Collection[str] = ("segment",),
    logprobs: bool = False,
    temperature: float = 0.0,
) -> tuple[bytes, str]:
    """``render``, in a thread if the transcript is so long that the event loop would feel it."""

    def work() -> tuple[bytes, str]:
        return render(
            transcript, response_format, granularities=granularities, logprobs=logprobs, temperature=temperature
        )

    return await asyncio.to_thread(work) if len(transcript.segments) >= _LONG else work()


def render(
    transcript: Transcript,
    response_format: str = "json",
    *,
    granularities: Collection[str] = ("segment",),
    logprobs: bool = False,
    temperature: float = 0.0,
) -> tuple[bytes, str]:
    """Body and content type. A transcript without a word is a valid document in each format.

    ``granularities`` (``word``, ``segment``) and ``temperature`` (what the request asked) matter to ``verbose_json``,
    ``logprobs`` to ``json``. Raises BadRequest for an unknown format.
    """
    match response_format:
        case "json":
            return _encoder.encode(_plain(transcript, logprobs)), JSON
        case "verbose_json":
            return _encoder.encode(_verbose(transcript, granularities, temperature)), JSON
        case "text":
            text = transcript.text
            return _utf8(f"{text}\n" if text else ""), TEXT
        case "srt":
            return _utf8(srt(transcript)), TEXT
        case "vtt":
            return _utf8(vtt(transcript)), TEXT
        case _:
            raise BadRequest(f"Unknown response format {response_format!r}.", param="response_format")


def usage(transcript: Transcript) -> dict[str, Any]:
    """What was worked on: whole seconds of audio, rounded up, as OpenAI bills whisper-1."""
    return {"type": "duration", "seconds": math.ceil(round(transcript.duration, 3))}


def languages(transcript: Transcript) -> list[dict[str, str]]:
    """Languages that were heard, as codes, in the order of their first segment; the file's own where no segment says."""
    heard = dict.fromkeys(segment.language for segment in transcript.segments if segment.language and segment.text)
    return [{"code": code} for code in heard or filter(None, [transcript.language])]


def incomplete(transcript: Transcript) -> dict[str, str]:
    """``finish_reason``, where a segment ended as a run-away: its text may lack something. Nothing otherwise."""
    return {} if transcript.finish_reason == "stop" else {"finish_reason": transcript.finish_reason}


def token_logprobs(segments: Iterable[SegmentDone], before: str = "") -> list[dict[str, Any]]:
    """Log probabilities of the tokens in OpenAI's shape; ``bytes`` are those of the token in UTF-8. They spell the text: what stands
    between two segments, or behind the text ``before`` them, belongs to the token that follows."""
    found: list[dict[str, Any]] = []
    for segment in segments:
        for token, value in joined_scores(before, segment.logprobs):
            found.append({"token": token, "logprob": value, "bytes": list(_utf8(token))})
        before = segment.text or before
    return found


def last_tokens(tokens: Sequence[dict[str, Any]], text: str) -> Sequence[dict[str, Any]]:
    """Those at the end that spell ``text``; none where it begins inside a token."""
    length = 0
    for count, token in enumerate(reversed(tokens), start=1):
        length += len(token["token"])
        if length >= len(text):
            last = tokens[-count:]
            return last if "".join(token["token"] for token in last) == text else []
    return []


def _plain(transcript: Transcript, logprobs: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"text": transcript.text}
    if found := languages(transcript):
        body["languages"] = found
    if logprobs:
        body["logprobs"] = token_logprobs(transcript.segments)
    body |= incomplete(transcript)
    body["usage"] = usage(transcript)
    return body


def _verbose(transcript: Transcript, granularities: Collection[str], temperature: float) -> dict[str, Any]:
    heard = languages(transcript)
    spoken = language_name(transcript.language or (heard[0]["code"] if heard else ""))
    body: dict[str, Any] = {
        "task": "transcribe",
        "language": spoken or "unknown",
        "duration": _ms(transcript.duration) / 1000,
        "text": transcript.text,
    }
    if "segment" in granularities or "word" not in granularities:
        body["segments"] = _segments(transcript.segments, temperature)
    if "word" in granularities:
        body["words"], estimated = _words(transcript)
        if estimated:
            body["timing"] = "estimated"
    body |= incomplete(transcript)
    body["usage"] = usage(transcript)
    return body


def _segments(segments: Sequence[SegmentDone], temperature: float) -> list[dict[str, Any]]:
    """Segments with text, numbered from 0; their texts, concatenated, are the whole text."""
    found: list[dict[str, Any]] = []
    for segment, text in zip(segments, joined_pieces(segments), strict=True):
        if not text:
            continue
        start, end = _span(seconds(segment.start_sample), seconds(segment.speech_end_sample))
        found.append(
            {
                "id": len(found),
                "seek": int(start * _SEEK_HZ),
                "start": start,
                "end": end,
                "text": text,
                "tokens": [],
                "temperature": temperature,
                "avg_logprob": _avg_logprob(segment),
                "compression_ratio": _compression_ratio(text),
                "no_speech_prob": 0.0,
                "finish_reason": segment.finish_reason,
            }
        )
    return found


def _words(transcript: Transcript) -> tuple[list[dict[str, Any]], bool]:
    """Words of all segments, in order and never overlapping, and whether any time among them is an estimate."""
    found: list[dict[str, Any]] = []
    estimated = transcript.word_times != "exact"
    clock = 0.0
    for segment in transcript.segments:
        words: Sequence[Word] = segment.words
        if not words and segment.text:
            words, estimated = estimated_words(segment), True
        for word in words:
            start, clock = _span(max(word.start, clock), word.end)
            found.append({"word": word.text, "start": start, "end": clock})
    return found, estimated and bool(found)


def _span(start: float, end: float) -> tuple[float, float]:
    """Both in whole milliseconds, at least one apart: clients divide by the difference."""
    first = _ms(start)
    return first / 1000, max(first + 1, _ms(end)) / 1000


def _ms(at: float) -> int:
    """One rounding for all times, or a word could end after its recording."""
    return round(at * 1000)


def _avg_logprob(segment: SegmentDone) -> float:
    if segment.avg_logprob is not None:
        return segment.avg_logprob
    values = [value for _, value in segment.logprobs]
    return sum(values) / len(values) if values else 0.0


def _compression_ratio(text: str) -> float:
    """How well the text packs, as Whisper measures repetition: bytes before against bytes after zlib."""
    raw = _utf8(text)
    return round(len(raw) / len(zlib.compress(raw)), 4)


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "replace")
