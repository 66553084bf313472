"""What a handshake of Deepgram's ``/v1/listen`` asks for, read from its query as their clients send it."""

from __future__ import annotations

import msgspec
from starlette.datastructures import QueryParams

from gateway.streams import query
from shared.errors import BadRequest, MissingField, Unsupported
from shared.languages import parse_language
from shared.messages import RawAudio
from shared.streams import Endpointing, StreamOptions

PCM = {"linear16": "s16le", "linear32": "f32le", "mulaw": "mulaw", "alaw": "alaw"}
G729 = "g729"
G729_RATE = 8000
CONTAINERS = ("opus", "ogg-opus", "webm", "flac", "amr-nb", "amr-wb", "speex")
"""Encodings that say themselves what they are, with their headers."""
FAMILIES = ("nova", "enhanced", "base", "whisper", "general", "phonecall", "meeting", "video")
"""First words of the names of Deepgram's models: every client sends one, and means the one that is served."""
MIN_SILENCE_MS = 300
"""Their default is 10 ms, which there cuts results and not what the model hears. An utterance that ends at every
breath is heard badly."""
MAX_KEYTERMS = 1000
MAX_KEYTERM_CHARACTERS = 64 * 1024


class Request(msgspec.Struct, frozen=True):
    """A handshake, checked."""

    options: StreamOptions
    interim: bool
    vad_events: bool
    utterance_end_ms: int
    """0 for none."""
    multilingual: bool


def parse(fields: QueryParams) -> Request:
    """Unknown fields are ignored, and so are those that only change how text looks. Raises BadRequest, Unsupported."""
    _refuse_what_would_be_missed(fields)
    utterance_end = query.whole(fields, "utterance_end_ms", 0, 0, 10_000)
    if 0 < utterance_end < 1000:
        raise BadRequest("utterance_end_ms is 1000 or more.", param="utterance_end_ms")
    interim = query.flag(fields, "interim_results", default=False)
    language = fields.get("language", "")
    options = StreamOptions(
        audio=_audio(fields),
        language=parse_language(language),
        keywords=_keyterms(fields),
        words=True,
        partials=interim,
        endpointing=_endpointing(fields),
    )
    multilingual = language.strip().lower() in ("", "multi")
    return Request(options, interim, query.flag(fields, "vad_events", default=False), utterance_end, multilingual)


def _audio(fields: QueryParams) -> RawAudio:
    encoding = fields.get("encoding", "").strip().lower()
    if not encoding or encoding in CONTAINERS:
        return RawAudio("container", 0, 0)
    if encoding == G729:
        return _g729(fields)
    if encoding not in PCM:
        raise Unsupported(
            f"The encoding {encoding[:40]!r} cannot be decoded.",
            hint=f"Use {', '.join((*PCM, G729))}, or a container such as ogg-opus or webm.",
            param="encoding",
        )
    if encoding.startswith("linear") and not fields.get("sample_rate", "").strip():
        raise MissingField(f"{encoding} needs a sample_rate.", param="sample_rate")
    channels = query.whole(fields, "channels", 1, 1, 8)
    return RawAudio(PCM[encoding], query.sample_rate(fields, 8000), channels)


def _g729(fields: QueryParams) -> RawAudio:
    """It has one rate and one channel. Raises BadRequest for others."""
    for name, only in (("sample_rate", G729_RATE), ("channels", 1)):
        if query.whole(fields, name, only, 1, 192_000) != only:
            raise BadRequest(f"{name} of g729 is {only}.", param=name)
    return RawAudio(G729, G729_RATE, 1)


def _endpointing(fields: QueryParams) -> Endpointing:
    value = fields.get("endpointing", "").strip().lower()
    if value in ("false", "0"):
        return Endpointing(automatic=False)
    if value == "true":
        return Endpointing(silence_ms=MIN_SILENCE_MS)
    asked = query.whole(fields, "endpointing", MIN_SILENCE_MS, 0, 10_000)
    return Endpointing(silence_ms=max(MIN_SILENCE_MS, asked))


def _keyterms(fields: QueryParams) -> tuple[str, ...]:
    """``keyterm``, and ``keywords`` without their weights (``word:2``)."""
    weighted = [value.rpartition(":")[0] if ":" in value else value for value in fields.getlist("keywords")]
    terms = [term.strip() for term in (*fields.getlist("keyterm"), *weighted)]
    return bounded(tuple(dict.fromkeys(filter(None, terms))))


def bounded(terms: tuple[str, ...]) -> tuple[str, ...]:
    if len(terms) > MAX_KEYTERMS or sum(map(len, terms)) > MAX_KEYTERM_CHARACTERS:
        raise BadRequest(f"There are more than {MAX_KEYTERMS} key terms, or they are too long.", param="keyterm")
    return terms


def _refuse_what_would_be_missed(fields: QueryParams) -> None:
    """What changes the result and cannot be done is refused, not left out in silence."""
    for name, what in (
        ("diarize", "Speakers are not told apart here."),
        ("diarize_model", "Speakers are not told apart here."),
        ("redact", "Nothing is blacked out here."),
        ("callback", "Results go to this connection and nowhere else."),
    ):
        if fields.get(name, "").strip().lower() not in ("", "false"):
            raise Unsupported(what, hint=f"Leave {name} out.", param=name)
    if query.flag(fields, "multichannel", default=False) and query.whole(fields, "channels", 1, 1, 8) > 1:
        raise Unsupported(
            "Channels are mixed, not transcribed one by one.",
            hint="Open a stream for each channel, or leave multichannel out.",
            param="multichannel",
        )
