"""The dialect of Deepgram's ``WS /v1/listen``: audio as binary messages, ``Results`` with interim and final transcripts.

Written against Deepgram's reference and the clients that talk it (their SDK, LiveKit, pipecat). An utterance of ours is one
span of theirs: its interims replace each other, its final has ``is_final`` and, if the speaker does not go on, ``speech_final``.
"""

from __future__ import annotations

import hashlib
import math
import string
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
from starlette.datastructures import QueryParams

from gateway.files.form import resolve_model
from gateway.streams.deepgram_query import FAMILIES, Request, bounded, parse
from gateway.streams.dialect import Audio, Effect, EndUtterance, Finish, Hang, Open, Say, Update
from gateway.streams.live import PcmClock
from shared.errors import BadRequest, Busy, NapscribeError, UnsupportedAudio, WorkerUnavailable
from shared.messages import Word
from shared.pcm import seconds
from shared.streams import (
    Partial,
    SpeechStarted,
    StreamDone,
    StreamEvent,
    StreamProgress,
    UtteranceEnded,
    UtteranceFinal,
)
from shared.version import __version__

MAX_TEXT = 64 * 1024
"""Characters of a control message; ``Configure`` may bring many key terms."""
PATIENCE = 30
"""Silences (of 10 s) after the end of the audio in which the last results are waited for: a large model may only be loading."""
NET_0001 = "NET-0001: no audio and no KeepAlive for 10 s"
DATA_0000 = "DATA-0000: the audio cannot be decoded"
CHANNEL = [0, 1]
"""The first of one."""

_encode = msgspec.json.Encoder().encode


def dialect(fields: QueryParams, subprotocols: Sequence[str], model: str, request_id: str, created: str) -> Deepgram:
    """From the handshake; ``created`` is its time, ISO 8601.

    Raises BadRequest with the field in ``param``, Unsupported, ModelNotFound.
    """
    requested = fields.get("model", "").strip()
    if requested.partition("-")[0] not in FAMILIES:
        resolve_model(requested, model)
    subprotocol = next((name for name in subprotocols if name.lower() in ("token", "bearer")), None)
    return Deepgram(parse(fields), model, request_id, created, subprotocol)


class Deepgram:
    """One connection of ``/v1/listen``."""

    hears_progress: ClassVar[bool] = True
    read_timeout: ClassVar[float] = 10.0
    """Theirs: without audio or a KeepAlive for so long, the connection ends with NET-0001."""

    def __init__(
        self, request: Request, model: str, request_id: str, created: str, subprotocol: str | None = None
    ) -> None:
        self.subprotocol = subprotocol
        self._request = request
        self._options = request.options
        self._model = model
        self._request_id = request_id
        self._created = created
        self._clock = PcmClock(request.options.audio)
        self._digest = hashlib.sha256()
        self._starts: dict[int, int] = {}
        """Utterances without a final, and their first sample."""
        self._position = 0.0
        """Seconds of the stream that have been listened to."""
        self._last_word_end: float | None = None
        """Until its ``UtteranceEnd`` has been said."""
        self._flushed = False
        """A result from ``Finalize`` has been sent and its ``UtteranceEnded`` has not come."""
        self._closing: Hang | None = None
        """How the connection ends once everything has been said."""
        self._silences = 0
        """Since then."""
        self._over = False

    def begin(self) -> Sequence[Effect]:
        return [Open(self._options)]

    # ------------------------------------------------------------ what the client says

    def receive(self, message: str | bytes) -> Sequence[Effect]:
        if self._over or self._closing is not None:
            return []
        if isinstance(message, str):
            return self._control(message)
        if not message:  # their first way to close a stream, still in use
            return self._close(Hang(1000))
        self._digest.update(message)
        return [Audio(message)]

    def _control(self, message: str) -> Sequence[Effect]:
        body = _object(message)
        kind = body.get("type")
        match kind:
            case "KeepAlive":
                return []
            case "Finalize":
                return [EndUtterance()]
            case "CloseStream":
                return self._close(Hang(1000))
            case "Configure":
                return self._configure(body)
        described = f"There is no message {kind[:40]!r}." if isinstance(kind, str) else "Not a JSON object with a type."
        hint = "Send KeepAlive, Finalize, Configure or CloseStream; audio is sent as binary."
        return [self._say("Error", variant="SchemaError", description=f"{described} {hint}", message=message[:200])]

    def _configure(self, body: dict[str, Any]) -> Sequence[Effect]:
        terms = body.get("keyterms")
        if terms is None:
            return [self._say("ConfigureSuccess", request_id=self._request_id)]
        try:
            if not isinstance(terms, list) or not all(isinstance(term, str) for term in terms):
                raise BadRequest("keyterms is a list of strings.", param="keyterms")
            keywords = bounded(tuple(filter(None, (term.strip() for term in terms))))
        except BadRequest as error:
            return [
                self._say(
                    "ConfigureFailure",
                    request_id=self._request_id,
                    code="CONFIGURE_KEYTERM_LIMIT_EXCEEDED" if isinstance(terms, list) else "CONFIGURE_INTERNAL_ERROR",
                    description=str(error),
                )
            ]
        self._options = msgspec.structs.replace(self._options, keywords=keywords)
        said = self._say("ConfigureSuccess", request_id=self._request_id, keyterms=list(keywords))
        return [Update(self._options), said]

    def _close(self, how: Hang) -> Sequence[Effect]:
        self._closing = how
        return [Finish()]

    def silent(self) -> Sequence[Effect]:
        """What was said before the silence is still finished; nobody has to say anything while it is."""
        if self._over:
            return []
        if self._closing is None:
            return self._close(Hang(1011, NET_0001))
        self._silences += 1
        if self._silences < PATIENCE:
            return []
        error = WorkerUnavailable(
            "The last results have not come.", hint="The server's log has the worker's last words."
        )
        return [*self._report(error), *self._end(Hang(1011, error.code))]

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
                self._starts[number] = sample
                if self._request.vad_events:
                    return [self._say("SpeechStarted", channel=CHANNEL, timestamp=_position(sample))]
            case Partial():
                return self._interim(event)
            case UtteranceFinal():
                return [self._final(event), *self._utterance_end(stalled=event.cause == "stall")]
            case UtteranceEnded():
                return self._finalized()
            case StreamProgress():
                self._position = max(self._position, self._listened_to(event))
                return self._utterance_end()
            case StreamDone(through_sample=through):
                return [self._metadata(through), *self._end(self._closing or Hang(1000))]
        return []

    def failed(self, error: NapscribeError, track: int) -> Sequence[Effect]:
        return [] if self._over else [*self._report(error), *self._end(_close_frame(error))]

    def _report(self, error: NapscribeError) -> Sequence[Effect]:
        return [self._say("Error", variant=error.code, description=str(error), message=error.message)]

    def _interim(self, partial: Partial) -> Sequence[Effect]:
        if not self._request.interim:
            return []
        start = self._starts.get(partial.utterance, partial.through_sample)
        return [self._results(start, partial.through_sample, partial.text, final=False)]

    def _final(self, final: UtteranceFinal) -> Say:
        self._starts.pop(final.utterance, None)
        if final.text:
            self._last_word_end = final.words[-1].end if final.words else seconds(final.end_sample)
        flushed = final.cause == "request"
        self._flushed = self._flushed or flushed
        return self._results(
            final.start_sample,
            final.end_sample,
            final.text,
            final=True,
            goes_on=final.cause == "length" and bool(self._starts),
            flushed=flushed,
            words=final.words,
            language=final.language,
            confidence=1.0 if final.avg_logprob is None else math.exp(min(0.0, final.avg_logprob)),
        )

    def _finalized(self) -> Sequence[Effect]:
        """Every ``Finalize`` is answered, if by an empty result: clients wait for it."""
        said, self._flushed = self._flushed, False
        here = round(self._position * 16_000)
        return [] if said else [self._results(here, here, "", final=True, flushed=True)]

    def _utterance_end(self, *, stalled: bool = False) -> Sequence[Effect]:
        """Once so much has been heard after the last word and nobody has begun to speak; or where nothing comes to be heard."""
        end, wait = self._last_word_end, self._request.utterance_end_ms / 1000
        if not wait or end is None or self._starts or (self._position - end < wait and not stalled):
            return []
        self._last_word_end = None
        return [self._say("UtteranceEnd", channel=CHANNEL, last_word_end=round(end, 3))]

    def _listened_to(self, progress: StreamProgress) -> float:
        """Seconds. In a container nobody knows what a byte is; the oldest sample still needed is a little earlier."""
        if self._clock.container:
            return seconds(progress.needed_sample)
        return seconds(self._clock.sample_of(progress.received_bytes))

    # ------------------------------------------------------------ saying

    def _results(
        self,
        start: int,
        end: int,
        text: str,
        *,
        final: bool,
        goes_on: bool = False,
        flushed: bool = False,
        words: Sequence[Word] = (),
        language: str = "",
        confidence: float = 1.0,
    ) -> Say:
        """``goes_on``: it was cut for its length, in speech. ``confidence`` is 1 where the engine has none: 0 would make clients throw
        the text away."""
        confidence = round(confidence, 4) if text else 0.0
        alternative: dict[str, object] = {
            "transcript": text,
            "confidence": confidence,
            "words": [_word(word, confidence) for word in words],
        }
        if language and self._request.multilingual:
            alternative["languages"] = [language]
        return self._say(
            "Results",
            channel_index=CHANNEL,
            duration=_position(max(0, end - start)),
            start=_position(start),
            is_final=final,
            speech_final=final and not goes_on,
            from_finalize=flushed,
            channel={"alternatives": [alternative]},
            metadata={
                "request_id": self._request_id,
                "model_info": {"name": self._model, "version": __version__, "arch": "napscribe"},
                "model_uuid": self._model,
            },
        )

    def _metadata(self, through: int) -> Say:
        return self._say(
            "Metadata",
            transaction_key="deprecated",
            request_id=self._request_id,
            sha256=self._digest.hexdigest(),
            created=self._created,
            duration=_position(through),
            channels=1,
        )

    @staticmethod
    def _say(kind: str, **fields: object) -> Say:
        return Say(_encode({"type": kind, **fields}).decode())

    def _end(self, how: Hang) -> Sequence[Effect]:
        self._over = True
        return [how]


def _object(message: str) -> dict[str, Any]:
    """Empty for what is not a JSON object, or too long to be one of ours."""
    try:
        body = msgspec.json.decode(message) if len(message) <= MAX_TEXT else None
    except (msgspec.DecodeError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def _word(word: Word, confidence: float) -> dict[str, object]:
    bare = word.text.strip(string.punctuation + "“”‘’«»…—–、。！？ ").lower()
    return {
        "word": bare or word.text,
        "start": round(word.start, 3),
        "end": round(word.end, 3),
        "confidence": confidence,
        "punctuated_word": word.text,
    }


def _position(sample: int) -> float:
    return round(seconds(sample), 3)


def _close_frame(error: NapscribeError) -> Hang:
    if isinstance(error, UnsupportedAudio):
        return Hang(1008, DATA_0000)
    if isinstance(error, BadRequest):
        return Hang(1008, error.code)
    return Hang(1013 if isinstance(error, Busy) else 1011, error.code)
