"""The configuration of an OpenAI Realtime transcription session: merging what clients send, and showing it to them.

Two spellings: GA nests everything in ``audio.input``; beta has flat names. Both are understood wherever either may come,
and both can be shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from gateway.files.form import MAX_KEYWORDS, resolve_model
from shared.errors import BadRequest
from shared.languages import parse_language
from shared.messages import RawAudio
from shared.streams import Endpointing, StreamOptions

LOGPROBS = "item.input_audio_transcription.logprobs"
DEFAULT_RATE = 24_000
"""Hz of ``audio/pcm`` where nobody says otherwise, as at OpenAI."""
MIN_RATE, MAX_RATE = 8_000, 48_000
G711_RATE = 8_000
MAX_PROMPT = 10_000
MAX_NAME = 200
"""Characters of a prompt; of a model, language or keyword."""
MAX_PADDING_MS, MAX_SILENCE_MS = 5_000, 30_000
QUIETEST, LOUDEST = 0.01, 0.99
"""Thresholds of 0 and 1 are legal and would hear everything or nothing; the voice activity model gets these instead."""

_ENCODINGS = {
    "audio/pcm": "s16le",
    "pcm16": "s16le",
    "pcm": "s16le",
    "audio/pcmu": "mulaw",
    "g711_ulaw": "mulaw",
    "audio/pcma": "alaw",
    "g711_alaw": "alaw",
}
_GA_NAMES = {"s16le": "audio/pcm", "mulaw": "audio/pcmu", "alaw": "audio/pcma"}
_BETA_NAMES = {"s16le": "pcm16", "mulaw": "g711_ulaw", "alaw": "g711_alaw"}

EAGERNESS = {"low": 1_200, "medium": 800, "auto": 800, "high": 400}
"""``semantic_vad`` waits until a sentence sounds finished. We have no model of that and translate its eagerness into
milliseconds of silence."""

_FLAT = {
    "input_audio_format": "format",
    "input_audio_transcription": "transcription",
    "turn_detection": "turn_detection",
}
"""Beta's names on the left, GA's inside ``audio.input`` on the right."""


class TurnDetection(msgspec.Struct, frozen=True, array_like=True):
    """How turns end when the server decides."""

    kind: str = "server_vad"
    threshold: float = 0.5
    prefix_ms: int = 300
    silence_ms: int = 500
    eagerness: str = "auto"

    def endpointing(self) -> Endpointing:
        threshold = min(LOUDEST, max(QUIETEST, self.threshold))
        silence_ms = EAGERNESS[self.eagerness] if self.kind == "semantic_vad" else self.silence_ms
        return Endpointing(True, threshold, self.prefix_ms, silence_ms)

    def shown(self) -> dict[str, Any]:
        if self.kind == "semantic_vad":
            return {"type": self.kind, "eagerness": self.eagerness}
        return {
            "type": self.kind,
            "threshold": self.threshold,
            "prefix_padding_ms": self.prefix_ms,
            "silence_duration_ms": self.silence_ms,
        }


class Session(msgspec.Struct, frozen=True, array_like=True):
    """What a session is set to."""

    model: str
    """The id of the served model."""
    audio: RawAudio = RawAudio("s16le", DEFAULT_RATE)
    language: str = ""
    prompt: str = ""
    keywords: tuple[str, ...] = ()
    turns: TurnDetection | None = TurnDetection()
    """None: the client commits."""
    logprobs: bool = False

    def options(self) -> StreamOptions:
        return StreamOptions(
            audio=self.audio,
            language=self.language,
            prompt=self.prompt,
            keywords=self.keywords,
            endpointing=self.turns.endpointing() if self.turns else Endpointing(automatic=False),
            logprobs=self.logprobs,
        )

    # ------------------------------------------------------------ merging

    def merged(self, update: Any) -> Session:
        """With the fields that an update names; all others stay. Raises BadRequest (``param`` is the path), ModelNotFound."""
        changes = _object(update, "session")
        session = self
        if "model" in changes:
            session = _replace(session, model=_model(changes["model"], "session.model", self.model))
        if "include" in changes:
            session = _replace(session, logprobs=LOGPROBS in (_strings(changes["include"], "session.include") or ()))
        for flat, name in _FLAT.items():
            if flat in changes:
                session = session._with(name, changes[flat], f"session.{flat}")
        audio = _object(changes.get("audio"), "session.audio")
        for name, value in _object(audio.get("input"), "session.audio.input").items():
            session = session._with(name, value, f"session.audio.input.{name}")
        return session

    def _with(self, name: str, value: Any, path: str) -> Session:
        match name:
            case "format":
                return _replace(self, audio=_audio(value, self.audio, path))
            case "transcription":
                return self._with_transcription(value, path)
            case "turn_detection":
                return _replace(self, turns=_turns(value, self.turns, path))
        return self  # noise_reduction and whatever comes next: nothing here depends on it

    def _with_transcription(self, value: Any, path: str) -> Session:
        if value is None:
            return _replace(self, language="", prompt="", keywords=())
        fields = _object(value, path)
        session = self
        if "model" in fields:
            session = _replace(session, model=_model(fields["model"], f"{path}.model", self.model))
        if "languages" in fields:
            several = _strings(fields["languages"], f"{path}.languages")
            codes = [_language(value, path) for value in several]
            session = _replace(session, language=codes[0] if len(codes) == 1 else "")
        if "language" in fields:
            session = _replace(session, language=_language(fields["language"], path))
        if "prompt" in fields:
            session = _replace(session, prompt=_text(fields["prompt"], f"{path}.prompt", MAX_PROMPT))
        if "keywords" in fields:
            keywords = _strings(fields["keywords"], f"{path}.keywords")
            session = _replace(session, keywords=tuple(filter(str.strip, keywords)))
        return session

    # ------------------------------------------------------------ showing

    def shown(self, session_id: str, *, beta: bool) -> dict[str, Any]:
        """The whole, in the words of GA or beta. What does nothing here (noise reduction) is shown as off."""
        head = {"id": session_id, "object": "realtime.transcription_session"}
        include = [LOGPROBS] if self.logprobs else None
        turns = self.turns.shown() if self.turns else None
        if beta:
            return {
                **head,
                "input_audio_format": _BETA_NAMES[self.audio.encoding],
                "input_audio_transcription": self._transcription(),
                "input_audio_noise_reduction": None,
                "turn_detection": turns,
                "include": include,
            }
        audio = {
            "format": self._format(),
            "transcription": self._transcription(),
            "noise_reduction": None,
            "turn_detection": turns,
        }
        return {"type": "transcription", **head, "include": include, "audio": {"input": audio}}

    def _format(self) -> dict[str, Any]:
        kind = {"type": _GA_NAMES[self.audio.encoding]}
        return {**kind, "rate": self.audio.sample_rate} if self.audio.encoding == "s16le" else kind

    def _transcription(self) -> dict[str, Any]:
        known: dict[str, Any] = {"model": self.model, "language": self.language or None, "prompt": self.prompt}
        return {**known, "keywords": list(self.keywords)} if self.keywords else known


def served_name(requested: str, served_id: str) -> str:
    """As ``resolve_model``, and OpenAI's conversation models are us, too: their clients name one to be let in.

    Raises ModelNotFound.
    """
    return (
        served_id if "realtime" in requested and requested.startswith("gpt-") else resolve_model(requested, served_id)
    )


_replace: Callable[..., Session] = msgspec.structs.replace


def _object(value: Any, path: str) -> Mapping[str, Any]:
    """Null is an object in which nothing is said."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRequest(f"{path} is an object.", param=path)
    return value


def _audio(value: Any, now: RawAudio, path: str) -> RawAudio:
    if value is None:
        return RawAudio("s16le", DEFAULT_RATE)
    fields = {"type": value} if isinstance(value, str) else _object(value, path)
    kind = fields.get("type", _GA_NAMES[now.encoding])
    encoding = _ENCODINGS.get(kind) if isinstance(kind, str) else None
    if encoding is None:
        raise BadRequest(
            f"The audio format {str(kind)[:40]!r} is not known.",
            hint="It is audio/pcm (pcm16), audio/pcmu (g711_ulaw) or audio/pcma (g711_alaw).",
            param=path,
        )
    rate = now.sample_rate if encoding == now.encoding else DEFAULT_RATE if encoding == "s16le" else G711_RATE
    if fields.get("rate") is not None:
        rate = int(_number(fields["rate"], f"{path}.rate", MIN_RATE, MAX_RATE))
    return RawAudio(encoding, rate)


def _turns(value: Any, now: TurnDetection | None, path: str) -> TurnDetection | None:
    if value is None:
        return None
    fields = _object(value, path)
    turns = now or TurnDetection()
    changes: dict[str, Any] = {}
    if fields.get("type") is not None:
        changes["kind"] = _choice(fields["type"], f"{path}.type", ("server_vad", "semantic_vad"))
    if fields.get("eagerness") is not None:
        changes["eagerness"] = _choice(fields["eagerness"], f"{path}.eagerness", tuple(EAGERNESS))
    if fields.get("threshold") is not None:
        changes["threshold"] = _number(fields["threshold"], f"{path}.threshold", 0, 1)
    if fields.get("prefix_padding_ms") is not None:
        changes["prefix_ms"] = int(_number(fields["prefix_padding_ms"], f"{path}.prefix_padding_ms", 0, MAX_PADDING_MS))
    if fields.get("silence_duration_ms") is not None:
        silence = _number(fields["silence_duration_ms"], f"{path}.silence_duration_ms", 0, MAX_SILENCE_MS)
        changes["silence_ms"] = int(silence)
    return msgspec.structs.replace(turns, **changes)


def _model(value: Any, path: str, served_id: str) -> str:
    return served_name(_text(value, path, MAX_NAME), served_id)


def _language(value: Any, path: str) -> str:
    return parse_language(_text(value, f"{path}.language", MAX_NAME), param=f"{path}.language")


def _choice(value: Any, path: str, choices: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise BadRequest(
            f"{path} cannot be {str(value)[:40]!r}.", hint=f"It is one of {', '.join(choices)}.", param=path
        )
    return value


def _number(value: Any, path: str, low: float, high: float) -> float:
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not low <= number <= high:  # false for NaN
        raise BadRequest(
            f"{path} cannot be {str(value)[:40]!r}.", hint=f"It is a number from {low:g} to {high:g}.", param=path
        )
    return number


def _text(value: Any, path: str, limit: int) -> str:
    """Null is empty."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise BadRequest(f"{path} is text.", param=path)
    if len(value) > limit:
        raise BadRequest(f"{path} has more than {limit} characters.", param=path)
    return value


def _strings(value: Any, path: str) -> tuple[str, ...]:
    """Null is an empty list."""
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MAX_KEYWORDS:
        raise BadRequest(f"{path} is a list of at most {MAX_KEYWORDS} texts.", param=path)
    return tuple(_text(item, path, MAX_NAME) for item in value)
