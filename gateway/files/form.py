"""What a caller asks of a recording, read from the fields of a form as real clients send them.

Names of lists come as ``name[]``, ``name`` or ``name[0]``, once, repeated, as a comma list or as a JSON list. Fields
that nobody here knows are ignored: every server has its own, and clients send them everywhere.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from gateway.truth import truth
from shared import errors
from shared.languages import parse_language
from shared.messages import FileOptions, RawAudio

Fields = Mapping[str, Sequence[str]]

RESPONSE_FORMATS = ("json", "text", "srt", "vtt", "verbose_json")
SUBTITLE_FORMATS = frozenset({"srt", "vtt"})
GRANULARITIES = ("word", "segment")
TASKS = ("transcribe", "translate")

MODEL_ALIASES = frozenset(
    {
        "whisper-1",
        "gpt-transcribe",
        "gpt-4o-transcribe",
        "gpt-4o-transcribe-diarize",
        "gpt-4o-mini-transcribe",
        "gpt-4o-mini-transcribe-2025-12-15",
        "gpt-live-transcribe",
        "gpt-realtime-whisper",
    }
)
"""Names under which OpenAI's SDKs and their users know a transcription model; all mean the one that is served."""

MAX_KEYWORDS = 1000

_UNSET = frozenset({"", "none", "null"})
_INDEXED = re.compile(r"\[\d*\]$")


class TranscriptionRequest(msgspec.Struct, frozen=True):
    """A request, checked. Everything has the value that leaving it out would give it."""

    model: str = ""
    """As the caller named it; ``resolve_model`` judges it."""
    language: str = ""
    """ISO 639-1 code, empty for automatic."""
    languages: tuple[str, ...] = ()
    """Codes the recording may be in; with exactly one and no ``language``, that is the language."""
    prompt: str = ""
    keywords: tuple[str, ...] = ()
    response_format: str = "json"
    temperature: float = 0.0
    """0 to 1."""
    granularities: frozenset[str] = frozenset({"segment"})
    logprobs: bool = False
    stream: bool = False

    @property
    def wants_words(self) -> bool:
        """Whether word times are worth their price: asked for, or needed to time subtitles."""
        if self.response_format in SUBTITLE_FORMATS:
            return True
        return self.response_format == "verbose_json" and "word" in self.granularities

    def file_options(self, *, max_seconds: float, raw: RawAudio | None = None) -> FileOptions:
        """The same for the worker; ``max_seconds`` bounds the decoded audio."""
        return FileOptions(
            language=self.language,
            prompt=self.prompt,
            keywords=self.keywords,
            temperature=self.temperature,
            words=self.wants_words,
            logprobs=self.logprobs,
            raw=raw,
            max_seconds=max_seconds,
        )


def parse_request(fields: Fields, *, stream: bool | None = None) -> TranscriptionRequest:
    """Read and check a form. ``stream`` overrides the field where the path says it.

    Raises BadRequest with the field in ``param``, Unsupported for speakers and translation.
    """
    language = parse_language(_last(fields, "language"))
    languages = tuple(filter(None, (parse_language(value, param="languages") for value in _list(fields, "languages"))))
    request = TranscriptionRequest(
        model=_last(fields, "model").strip(),
        language=language or (languages[0] if len(set(languages)) == 1 else ""),
        languages=languages,
        prompt=_last(fields, "prompt"),
        keywords=_keywords(fields),
        response_format=_response_format(_last(fields, "response_format")),
        temperature=_temperature(_last(fields, "temperature")),
        granularities=_granularities(fields),
        logprobs="logprobs" in {value.lower() for value in _list(fields, "include")},
        stream=_flag(fields, "stream") if stream is None else stream,
    )
    if _choice(_last(fields, "task") or "transcribe", TASKS, "task") != "transcribe":
        raise errors.Unsupported("The model does not translate.", hint="Use task=transcribe.", param="task")
    if request.stream and request.response_format in SUBTITLE_FORMATS:
        raise errors.BadRequest(
            f"Subtitles ({request.response_format}) cannot be streamed: a cue is cut when the text around it is known.",
            hint="Leave stream out, or ask for json.",
            param="stream",
        )
    return request


def resolve_model(requested: str, served_id: str) -> str:
    """The id of the served model, if ``requested`` means it: its id, an alias of OpenAI's, or nothing.

    Raises ModelNotFound for any other.
    """
    if requested in ("", served_id) or requested in MODEL_ALIASES:
        return served_id
    raise errors.ModelNotFound(
        f"The model {requested[:200]!r} is not served here.",
        hint=f"Use {served_id!r}, or leave the model out.",
        param="model",
    )


def _last(fields: Fields, name: str) -> str:
    """The value of a scalar; the last one counts if it was sent more than once."""
    values = fields.get(name)
    return values[-1] if values else ""


def _list(fields: Fields, name: str) -> list[str]:
    """The items of a list in any spelling of its name and value, stripped, without empty ones."""
    return [item for value in _values(fields, name) for item in _items(value)]


def _values(fields: Fields, name: str) -> Iterator[str]:
    for key, values in fields.items():
        if _INDEXED.sub("", key) == name:
            yield from values


def _items(value: str) -> list[str]:
    if value.lstrip().startswith("["):
        try:
            return [item.strip() for item in msgspec.json.decode(value, type=list[str]) if item.strip()]
        except (msgspec.DecodeError, RecursionError):
            pass
    return [item.strip() for item in value.split(",") if item.strip()]


def _keywords(fields: Fields) -> tuple[str, ...]:
    """``keywords`` and its other name ``hotwords``, each once. An item of ``keywords[]`` may hold a comma."""
    whole = [value.strip() for key in ("keywords[]", "hotwords[]") for value in fields.get(key, ())]
    named = {key: values for key, values in fields.items() if not key.endswith("[]")}
    found = tuple(dict.fromkeys(filter(None, [*whole, *_list(named, "keywords"), *_list(named, "hotwords")])))
    if len(found) > MAX_KEYWORDS:
        raise errors.BadRequest(f"There are more than {MAX_KEYWORDS} keywords.", param="keywords")
    return found


def _response_format(value: str) -> str:
    if value.strip().lower() == "diarized_json":
        raise errors.Unsupported(
            "Speakers are not told apart here.",
            hint="Ask for verbose_json: the same without speakers.",
            param="response_format",
        )
    return _choice(value.strip() or "json", RESPONSE_FORMATS, "response_format")


def _granularities(fields: Fields) -> frozenset[str]:
    values = _list(fields, "timestamp_granularities")
    return frozenset(_choice(value, GRANULARITIES, "timestamp_granularities") for value in values or ["segment"])


def _temperature(value: str) -> float:
    try:
        temperature = float(value.strip() or "0")
    except ValueError:
        temperature = math.nan
    if not 0.0 <= temperature <= 1.0:  # false for NaN
        raise errors.BadRequest(
            f"The temperature {value[:40]!r} is not a number from 0 to 1.",
            hint="Leave it out for 0.",
            param="temperature",
        )
    return temperature


def _flag(fields: Fields, name: str) -> bool:
    value = _last(fields, name).strip().lower()
    meant = False if value in _UNSET else truth(value)
    if meant is None:
        raise errors.BadRequest(f"{name} is neither true nor false: {value[:40]!r}.", param=name)
    return meant


def _choice(value: str, choices: Sequence[str], param: str) -> str:
    chosen = value.strip().lower()
    if chosen in choices:
        return chosen
    raise errors.BadRequest(
        f"{param} cannot be {value[:40]!r}.", hint=f"It is one of {', '.join(choices)}.", param=param
    )
