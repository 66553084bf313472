"""OpenAI Realtime, transcription sessions, beta and GA: JSON messages, audio in them as base64.

Some clients end their work at any ``error`` event. So there is none for what a client cannot know, such as a commit of a turn
that the server has just closed: that is answered by an empty item.
"""

from __future__ import annotations

import binascii
import itertools
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from gateway.answers.errors_http import error_type
from gateway.streams.dialect import Audio, Clear, Effect, EndUtterance, Hang, Open, Say, Update, close_code
from gateway.streams.openai_session import Session, served_name
from gateway.streams.openai_turns import Message, Turns
from shared.errors import BadRequest, MissingField, NapscribeError, Unsupported
from shared.languages import parse_language, require_spoken
from shared.streams import (
    AudioCleared,
    SpeechStarted,
    SpeechStopped,
    StreamDone,
    StreamEvent,
    UtteranceDelta,
    UtteranceEnded,
    UtteranceFinal,
)

SUBPROTOCOL = "realtime"
BETA_SUBPROTOCOL = "openai-beta.realtime-v1"
BETA_HEADER = "realtime=v1"
MAX_AUDIO_BYTES = 15 * 1024 * 1024
"""Decoded, of one append: OpenAI's own bound."""
_MAX_AUDIO_CHARS = MAX_AUDIO_BYTES * 4 // 3 + 4
_CONVERSATION = ("response.", "conversation.", "output_audio_buffer.")
_FLAT = ("input_audio_format", "input_audio_transcription", "turn_detection")


class _ClientMessage(msgspec.Struct):
    type: Any = None
    event_id: Any = None
    audio: Any = None
    session: Any = None


_decode = msgspec.json.Decoder(_ClientMessage).decode
_encode = msgspec.json.Encoder().encode


def dialect(
    query: Mapping[str, str],
    headers: Mapping[str, str],
    subprotocols: Sequence[str],
    model: str,
    prepared: Session | None = None,
    spoken: Collection[str] = (),
) -> OpenAIRealtime:
    """From a handshake. ``prepared``: the session of its client secret; ``spoken``: the languages that the model
    knows, empty while nobody knows. Raises ModelNotFound, BadRequest."""
    session = prepared or Session(model)
    requested = query.get("model", "").strip()
    served_name(requested, model)
    if query.get("language"):
        session = msgspec.structs.replace(session, language=parse_language(query["language"]))
    beta = BETA_HEADER in headers.get("openai-beta", "") or BETA_SUBPROTOCOL in subprotocols
    conversation = bool(requested) and query.get("intent") != "transcription"
    chosen = next((name for name in (SUBPROTOCOL, BETA_SUBPROTOCOL) if name in subprotocols), None)
    return OpenAIRealtime(session, beta=beta, conversation=conversation, subprotocol=chosen, spoken=spoken)


class OpenAIRealtime:
    """One session."""

    hears_progress: ClassVar[bool] = False
    read_timeout: ClassVar[float] = 3600.0
    """OpenAI ends every session after an hour; here only one in which nobody has said anything for so long."""

    def __init__(
        self,
        session: Session,
        *,
        beta: bool = False,
        conversation: bool = False,
        subprotocol: str | None = None,
        spoken: Collection[str] = (),
    ) -> None:
        """``conversation``: a beta client asked for a model, not for transcription, and waits for ``session.created``."""
        self.subprotocol = subprotocol
        self._session = session
        self._spoken = spoken
        self._nonce = secrets.token_hex(8)
        self._count = itertools.count(1)
        self._id = f"sess_{self._nonce}"
        self._greeting = "transcription_session.created" if beta and not conversation else "session.created"
        self._turns = Turns(session.turns is not None, beta, self._new_id)
        self._heard = False
        """Audio has come: its encoding is settled."""
        self._over = False

    def begin(self) -> Sequence[Effect]:
        return [Open(self._session.options()), *self._say([self._shown(self._greeting)])]

    # ------------------------------------------------------------ what the client says

    def receive(self, message: str | bytes) -> Sequence[Effect]:
        if self._over:
            return []
        try:
            said = _decode(message)
        except (msgspec.DecodeError, RecursionError, UnicodeError, ValueError):
            return [self._error(BadRequest("A message is a JSON object with a type."), None)]
        try:
            return self._obey(said)
        except NapscribeError as error:
            return [self._error(error, said.event_id)]

    def _obey(self, said: _ClientMessage) -> Sequence[Effect]:
        """Raises BadRequest, MissingField, ModelNotFound, Unsupported."""
        match said.type:
            case "input_audio_buffer.append":
                return self._append(said.audio)
            case "input_audio_buffer.commit":
                return self._commit()
            case "input_audio_buffer.clear":
                return self._clear()
            case "session.update" | "transcription_session.update":
                return self._update(said.type, said.session)
            case str(kind) if kind.startswith(_CONVERSATION):
                raise Unsupported(
                    f"{kind[:80]!r} is for conversations.",
                    hint="This server transcribes and does not answer.",
                    param="type",
                )
        raise BadRequest(
            f"There is no event of type {str(said.type)[:80]!r}.",
            hint="Send session.update, input_audio_buffer.append, .commit or .clear.",
            param="type",
        )

    def _append(self, audio: Any) -> Sequence[Effect]:
        if not isinstance(audio, str):
            raise MissingField("An append has audio, as base64 text.", param="audio")
        if len(audio) > _MAX_AUDIO_CHARS:
            raise BadRequest(f"An append has at most {MAX_AUDIO_BYTES // 1024 // 1024} MiB of audio.", param="audio")
        try:
            data = binascii.a2b_base64(audio, strict_mode=True)
        except ValueError:
            raise BadRequest("The audio is not base64.", hint="RFC 4648, with padding.", param="audio") from None
        self._heard = self._heard or bool(data)
        return [Audio(data)] if data else []

    def _commit(self) -> Sequence[Effect]:
        return [EndUtterance(), *self._say(self._turns.commit())]

    def _clear(self) -> Sequence[Effect]:
        if not self._heard:
            return self._say([{"type": "input_audio_buffer.cleared"}])
        self._turns.clear()
        return [Clear()]

    def _update(self, kind: str, fields: Any) -> Sequence[Effect]:
        session = self._session.merged(fields)
        require_spoken(session.language, self._spoken, param="session.audio.input.transcription.language")
        if self._heard and session.audio != self._session.audio:
            raise BadRequest(
                "The audio format cannot change after audio has come.",
                hint="Open another session for audio of another format.",
                param="session.audio.input.format",
            )
        if kind == "transcription_session.update" or _is_flat(fields):
            self._turns.beta = True
        automatic = session.turns is not None
        effects: list[Effect] = []
        if automatic and self._session.turns is None and self._turns.uncommitted:
            effects += self._commit()
        self._turns.decide(automatic)
        if session != self._session:
            effects.append(Update(session.options()))
        self._session = session
        return [*effects, *self._say([self._shown(kind.replace("update", "updated"))])]

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
                return self._say(self._turns.speech_started(number, sample))
            case SpeechStopped(utterance=number, sample=sample):
                return self._say(self._turns.speech_stopped(number, sample))
            case UtteranceDelta(utterance=number, text=text):
                return self._say(self._turns.delta(number, text))
            case UtteranceFinal():
                return self._say(self._turns.final(event))
            case UtteranceEnded(utterance=number):
                return self._say(self._turns.ended(number))
            case AudioCleared(utterance=number, through_sample=through):
                return self._say(self._turns.audio_cleared(number, through))
            case StreamDone():
                return self._end(1000, "")
        return []

    def failed(self, error: NapscribeError, track: int) -> Sequence[Effect]:
        """No ``error`` event where another session may fare better: clients that give up at one do reconnect after a close."""
        if self._over:
            return []
        said = self._say(self._turns.fail(error))
        if not error.retryable:
            said = [*said, self._error(error, None)]
        return [*said, *self._end(close_code(error), error.code)]

    # ------------------------------------------------------------ saying

    def _new_id(self, kind: str) -> str:
        return f"{kind}_{self._nonce}{next(self._count):06d}"

    def _shown(self, kind: str) -> Message:
        return {"type": kind, "session": self._session.shown(self._id, beta=self._turns.beta)}

    def _say(self, messages: Iterable[Message]) -> Sequence[Effect]:
        return [Say(_encode({"event_id": self._new_id("event"), **message}).decode()) for message in messages]

    def _error(self, error: NapscribeError, event_id: Any) -> Say:
        body = {
            "type": error_type(error),
            "code": error.code,
            "message": str(error),
            "param": error.param,
            "event_id": event_id if isinstance(event_id, str) else None,
        }
        (said,) = self._say([{"type": "error", "error": body}])
        assert isinstance(said, Say)
        return said

    def _end(self, code: int, reason: str) -> Sequence[Effect]:
        self._over = True
        return [Hang(code, reason)]


def _is_flat(fields: Any) -> bool:
    """Beta's names under GA's event."""
    return isinstance(fields, dict) and "audio" not in fields and any(name in fields for name in _FLAT)
