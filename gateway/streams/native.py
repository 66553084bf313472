"""The native dialect: audio as binary messages, everything else as JSON objects with a ``type``.

Events: ``ready``, ``speech_started``, ``partial``, ``delta``, ``speech_stopped``, ``final``, ``finalized``, ``cleared``, ``pong``,
``done``, ``error``. Controls: ``finalize``, ``clear``, ``ping``, ``close``. Positions are seconds of the stream, durations
milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from gateway.files.form import resolve_model
from gateway.latency import stages_ms
from gateway.streams import query
from gateway.streams.dialect import Audio, Clear, Effect, EndUtterance, Finish, Hang, Open, Say, close_code
from shared.errors import BadRequest, NapscribeError
from shared.languages import parse_language
from shared.messages import RawAudio
from shared.pcm import seconds
from shared.streams import (
    AudioCleared,
    Endpointing,
    Partial,
    SpeechStarted,
    SpeechStopped,
    StreamDone,
    StreamEvent,
    StreamOptions,
    UtteranceDelta,
    UtteranceEnded,
    UtteranceFinal,
)

SUBPROTOCOL = "napscribe"
"""A browser that brings its key as a subprotocol needs one more that can be answered."""
ENCODINGS = ("s16le", "f32le", "mulaw", "alaw", "container")
ENDPOINTING = ("auto", "manual")
MAX_TEXT = 4096
"""Characters of a control message."""

_encode = msgspec.json.Encoder().encode


def dialect(fields: Mapping[str, str], subprotocols: Sequence[str], model: str) -> Native:
    """From the query of the handshake. Raises BadRequest with the field in ``param``, ModelNotFound."""
    served = resolve_model(fields.get("model", "").strip(), model)
    return Native(options(fields), served, SUBPROTOCOL if SUBPROTOCOL in subprotocols else None)


def options(fields: Mapping[str, str]) -> StreamOptions:
    """The stream that a query asks for. Unknown fields are ignored. Raises BadRequest."""
    encoding = query.choice(fields, "encoding", ENCODINGS)
    rate = 0 if encoding == "container" else query.sample_rate(fields, 8000 if encoding in ("mulaw", "alaw") else 16000)
    channels = 0 if encoding == "container" else query.whole(fields, "channels", 1, 1, 8)
    rules = Endpointing()
    return StreamOptions(
        audio=RawAudio(encoding, rate, channels),
        language=parse_language(fields.get("language", "")),
        prompt=query.text(fields, "prompt"),
        words=query.flag(fields, "words", default=False),
        partials=query.flag(fields, "interim", default=True),
        endpointing=Endpointing(
            automatic=query.choice(fields, "endpointing", ENDPOINTING) == "auto",
            threshold=query.number(fields, "threshold", rules.threshold, 0.05, 0.95),
            prefix_ms=query.whole(fields, "prefix_ms", rules.prefix_ms, 0, 2_000),
            silence_ms=query.whole(fields, "silence_ms", rules.silence_ms, 64, 10_000),
        ),
    )


class Native:
    """One connection of ``/v1/stream``."""

    hears_progress: ClassVar[bool] = False
    read_timeout: ClassVar[float] = 3600.0
    """A client may be silent for as long as it likes to sleep; a socket nobody has used for an hour is dead."""

    def __init__(
        self,
        options: StreamOptions,
        model: str,
        subprotocol: str | None = None,
        now: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """``now`` is CLOCK_MONOTONIC in nanoseconds."""
        self.subprotocol = subprotocol
        self._options = options
        self._model = model
        self._now = now
        self._closing = False
        self._over = False

    def begin(self) -> Sequence[Effect]:
        return [Open(self._options), self._say("ready", model=self._model, settings=_settings(self._options))]

    # ------------------------------------------------------------ what the client says

    def receive(self, message: str | bytes) -> Sequence[Effect]:
        if self._over:
            return []
        if isinstance(message, bytes):
            return [] if self._closing else [Audio(message)]
        try:
            return self._control(_control_type(message))
        except BadRequest as error:
            return [self._error(error)]

    def _control(self, kind: str) -> Sequence[Effect]:
        """Raises BadRequest."""
        if kind == "ping":
            return [self._say("pong")]
        if self._closing:
            raise BadRequest("The stream is closing.", hint="After 'close' only events come.", param="type")
        match kind:
            case "finalize":
                return [EndUtterance()]
            case "clear":
                return [Clear()]
            case "close":
                self._closing = True
                return [Finish()]
        raise BadRequest(
            f"There is no control {kind[:40]!r}.", hint="Send finalize, clear, ping or close.", param="type"
        )

    def silent(self) -> Sequence[Effect]:
        return [] if self._over else self._end(1001, "idle_timeout")

    def left(self) -> Sequence[Effect]:
        """Nobody is there to read it."""
        self._over = True
        return []

    # ------------------------------------------------------------ what the stream says

    def event(self, event: StreamEvent, track: int) -> Sequence[Effect]:
        if self._over:
            return []
        match event:
            case SpeechStarted(utterance=number, sample=sample):
                return [self._say("speech_started", utterance=number, start=_position(sample))]
            case SpeechStopped(utterance=number, sample=sample):
                return [self._say("speech_stopped", utterance=number, end=_position(sample))]
            case Partial(utterance=number, text=text, through_sample=through):
                if not self._options.partials:
                    return []
                return [self._say("partial", utterance=number, text=text, end=_position(through))]
            case UtteranceDelta(utterance=number, text=text):
                return [self._say("delta", utterance=number, text=text)]
            case UtteranceFinal():
                return [self._say("final", **self._final(event))]
            case UtteranceEnded(utterance=number):
                return [self._say("finalized", utterance=number if number >= 0 else None)]
            case AudioCleared(utterance=number):
                return [self._say("cleared", utterance=number if number >= 0 else None)]
            case StreamDone(through_sample=through):
                return [self._say("done", duration=_position(through)), *self._end(1000, "")]
        return []

    def failed(self, error: NapscribeError, track: int) -> Sequence[Effect]:
        if self._over:
            return []
        return [self._error(error), *self._end(close_code(error), error.code)]

    def _final(self, final: UtteranceFinal) -> dict[str, object]:
        body: dict[str, object] = {
            "utterance": final.utterance,
            "text": final.text,
            "start": _position(final.start_sample),
            "end": _position(final.end_sample),
            "language": final.language or None,
            "cause": final.cause,
            "finish_reason": final.finish_reason,
            "revised": round(final.revised, 3),
            "timings": stages_ms(final.timings, self._now()),
        }
        if self._options.words:
            body["words"] = [
                {"word": word.text, "start": round(word.start, 3), "end": round(word.end, 3)} for word in final.words
            ]
            if final.estimated:
                body["timing"] = "estimated"
        return body

    # ------------------------------------------------------------ saying

    @staticmethod
    def _say(kind: str, **fields: object) -> Say:
        return Say(_encode({"type": kind, **fields}).decode())

    def _error(self, error: NapscribeError) -> Say:
        return self._say("error", code=error.code, message=error.message, hint=error.hint, param=error.param)

    def _end(self, code: int, reason: str) -> Sequence[Effect]:
        self._over = True
        return [Hang(code, reason)]


def _control_type(message: str) -> str:
    """Raises BadRequest for what is not a JSON object with a ``type``."""
    if len(message) > MAX_TEXT:
        raise BadRequest(f"A control message has at most {MAX_TEXT} characters.", hint="Audio is sent as binary.")
    try:
        body = msgspec.json.decode(message)
    except (msgspec.DecodeError, RecursionError):
        raise BadRequest(
            "A text message is not JSON.", hint='Send {"type": "finalize"}; audio is sent as binary.'
        ) from None
    kind: Any = body.get("type") if isinstance(body, dict) else None
    if not isinstance(kind, str):
        raise BadRequest("A control is a JSON object with a type.", hint='Such as {"type": "finalize"}.', param="type")
    return kind


def _settings(options: StreamOptions) -> dict[str, object]:
    """What the stream was opened with, in the words of the query."""
    rules = options.endpointing
    return {
        "encoding": options.audio.encoding,
        "sample_rate": options.audio.sample_rate or None,
        "channels": options.audio.channels or None,
        "language": options.language or None,
        "prompt": options.prompt,
        "interim": options.partials,
        "words": options.words,
        "endpointing": "auto" if rules.automatic else "manual",
        "threshold": rules.threshold,
        "prefix_ms": rules.prefix_ms,
        "silence_ms": rules.silence_ms,
    }


def _position(sample: int) -> float:
    return round(seconds(sample), 3)
