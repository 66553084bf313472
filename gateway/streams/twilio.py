"""Twilio Media Streams: JSON with the audio of a call's tracks in base64. Nothing is ever said to Twilio.

Each track is a stream of its own. What is heard goes to the call (``calls``), where others read it.
"""

from __future__ import annotations

import binascii
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from gateway.streams.calls import Call, Calls
from gateway.streams.dialect import Audio, Effect, Finish, Hang, Open, close_code
from gateway.streams.frame_order import FrameOrder
from gateway.truth import truth
from shared.errors import BadRequest, NapscribeError, UnsupportedAudio
from shared.languages import parse_language
from shared.messages import RawAudio
from shared.streams import (
    Partial,
    SpeechStarted,
    SpeechStopped,
    StreamDone,
    StreamEvent,
    StreamOptions,
    UtteranceFinal,
)

MAX_TRACKS = 2
MAX_PAYLOAD = 64 * 1024
"""Characters of base64 in a frame; Twilio's has 216."""
MAX_EARLY = 32
"""Messages before ``start``; Twilio sends one."""
MAX_PROMPT = 10_000
MAX_NAME = 32

_ENCODINGS = {
    "audio/x-mulaw": ("mulaw", 0xFF),
    "audio/mulaw": ("mulaw", 0xFF),
    "mulaw": ("mulaw", 0xFF),
    "pcmu": ("mulaw", 0xFF),
    "audio/x-alaw": ("alaw", 0xD5),
    "audio/alaw": ("alaw", 0xD5),
    "alaw": ("alaw", 0xD5),
    "pcma": ("alaw", 0xD5),
    "audio/x-l16": ("s16le", 0),
    "audio/l16": ("s16le", 0),
    "l16": ("s16le", 0),
}
"""``mediaFormat.encoding``, in lower case, as Twilio and its cousins spell it: our name, and the byte of silence."""
_MIN_RATE, _MAX_RATE = 8_000, 48_000


class _Message(msgspec.Struct):
    event: Any = None
    start: Any = None
    media: Any = None


_decode = msgspec.json.Decoder(_Message).decode


@dataclass(slots=True)
class _Track:
    name: str
    order: FrameOrder
    done: bool = False
    shown: dict[int, float] = field(default_factory=dict)
    """Start of each utterance that has no final yet, seconds of the call."""


class Twilio:
    """One connection: one media stream of one call."""

    subprotocol: str | None = None
    hears_progress: ClassVar[bool] = False
    read_timeout: ClassVar[float] = 60.0
    """A call sends fifty frames a second, silence included."""

    def __init__(self, calls: Calls, is_key: Callable[[str], bool] | None) -> None:
        """``is_key`` judges the parameter ``token`` of the start; None: the handshake has settled it."""
        self._calls = calls
        self._is_key = is_key
        self._early = 0
        self._call: Call | None = None
        self._stream_sid = ""
        self._tracks: list[_Track] = []
        self._options: StreamOptions | None = None
        self._silence = 0
        self._stopping = False
        self._gone = False
        self._over = False

    def begin(self) -> Sequence[Effect]:
        """The stream is opened when Twilio says what it is."""
        return []

    # ------------------------------------------------------------ what Twilio says

    def receive(self, message: str | bytes) -> Sequence[Effect]:
        """What cannot be read is passed over: there is nobody to tell, and the call goes on."""
        if self._over or self._stopping:
            return []
        try:
            said = _decode(message)
        except (msgspec.DecodeError, RecursionError, UnicodeError, ValueError):
            said = _Message()
        if self._call is None:
            return self._greet(said)
        match said.event:
            case "media":
                return self._media(said.media)
            case "stop":
                return self._stop()
        return []  # connected, mark, dtmf, and what they may think of

    def _greet(self, said: _Message) -> Sequence[Effect]:
        if said.event == "start":
            try:
                return self._start(said.start if isinstance(said.start, dict) else {})
            except NapscribeError as error:
                return self._end(close_code(error), error.code)
        self._early += 1
        return self._end(1008, "no_start") if self._early > MAX_EARLY else []

    def _start(self, start: dict[str, Any]) -> Sequence[Effect]:
        """Raises BadRequest, UnsupportedAudio, TooManyStreams."""
        custom = start.get("customParameters")
        parameters: dict[str, Any] = custom if isinstance(custom, dict) else {}
        if self._is_key is not None and not self._is_key(str(parameters.get("token", ""))):
            return self._end(1008, "invalid_api_key")
        audio, self._silence = _media_format(start.get("mediaFormat"))
        self._stream_sid = str(start.get("streamSid") or "")[:64]
        tracks = _track_names(start.get("tracks"))
        wrong: NapscribeError | None = None
        language = ""
        try:
            language = parse_language(str(parameters.get("language", "")))
        except BadRequest as error:
            wrong = error
        prompt = str(parameters.get("prompt", ""))[:MAX_PROMPT]
        words = truth(str(parameters.get("words", ""))) is True
        self._options = StreamOptions(audio, language=language, prompt=prompt, words=words)
        self._call = self._calls.join(str(start.get("callSid") or self._stream_sid))
        self._call.publish(self._about("started", tracks=tracks))
        if wrong is not None:
            self._call.publish(self._about("error", code=wrong.code, message=str(wrong)))
            return self._end(close_code(wrong), wrong.code)
        for name in tracks:
            self._add(name)
        return [Open(self._options, track) for track in range(len(self._tracks))]

    def _add(self, name: str) -> None:
        assert self._options is not None
        if len(self._tracks) < MAX_TRACKS:
            audio = self._options.audio
            width = 2 if audio.encoding == "s16le" else 1
            order = FrameOrder(audio.sample_rate * width * audio.channels / 1000, self._silence)
            self._tracks.append(_Track(name, order))

    def _media(self, media: Any) -> Sequence[Effect]:
        if not isinstance(media, dict):
            return []
        (name,), payload = _track_names([media.get("track")]), media.get("payload")
        if not isinstance(payload, str) or len(payload) > MAX_PAYLOAD:
            return []
        try:
            data = binascii.a2b_base64(payload, strict_mode=True)
        except ValueError:
            return []  # a lost frame: silence fills its place
        opening: list[Effect] = []
        index = self._index(name)
        if index is None:
            self._add(name)
            index = self._index(name)
            if index is None or self._options is None:
                return []
            opening = [Open(self._options, index)]
        track = self._tracks[index]
        if track.done:
            return []
        ready = track.order.push(data, _count(media.get("chunk")), _count(media.get("timestamp")))
        return [*opening, Audio(ready, index)] if ready else opening

    def _index(self, name: str) -> int | None:
        return next((index for index, track in enumerate(self._tracks) if track.name == name), None)

    def _stop(self) -> Sequence[Effect]:
        """The finals of all tracks follow; then the connection ends."""
        self._stopping = True
        effects: list[Effect] = []
        for index, track in enumerate(self._tracks):
            if track.done:
                continue
            rest = track.order.flush()
            effects += [Audio(rest, index)] if rest else []
            effects.append(Finish(index))
        return effects or self._end(1000, "")

    def silent(self) -> Sequence[Effect]:
        if self._over:
            return []
        if self._call is None:
            return self._end(1001, "idle_timeout")
        return [] if self._stopping else self._stop()

    def left(self) -> Sequence[Effect]:
        """The call is over, with ``stop`` or without; what was said is finished."""
        self._gone = True
        if self._over or self._call is None:
            self._over = True
            return []
        if self._stopping:
            return [Finish(index) for index, track in enumerate(self._tracks) if not track.done]
        return self._stop()

    def close(self) -> None:
        """The connection is over, whatever the reason: the call loses this stream."""
        self._over = True
        call, self._call = self._call, None
        if call is not None:
            duration = max((track.order.clock for track in self._tracks), default=0.0)
            call.publish(self._about("ended", duration=round(duration / 1000, 3)))
            call.leave()

    # ------------------------------------------------------------ what the streams say

    def event(self, event: StreamEvent, track: int) -> Sequence[Effect]:
        call = self._call
        if self._over or call is None or track >= len(self._tracks):
            return []
        heard = self._tracks[track]
        at = heard.order.seconds
        match event:
            case SpeechStarted(utterance=number, sample=sample):
                heard.shown[number] = at(sample)
                self._mention(call, track, "speech_started", number, start=at(sample))
            case SpeechStopped(utterance=number, sample=sample):
                self._mention(call, track, "speech_stopped", number, end=at(sample))
            case Partial(utterance=number, text=text, through_sample=through):
                start = heard.shown.get(number, 0.0)
                self._mention(call, track, "partial", number, text=text, start=start, end=at(through))
            case UtteranceFinal():
                heard.shown.pop(event.utterance, None)
                if event.text:
                    call.publish(self._final(event, heard))
            case StreamDone():
                return self._done(track, 1000, "")
        return []

    def failed(self, error: NapscribeError, track: int) -> Sequence[Effect]:
        """One track's failure leaves the other."""
        if self._over or self._call is None or track >= len(self._tracks):
            return []
        name = self._tracks[track].name
        self._call.publish(self._about("error", track=name, code=error.code, message=str(error)))
        return self._done(track, close_code(error), error.code)

    def _done(self, track: int, code: int, reason: str) -> Sequence[Effect]:
        self._tracks[track].done = True
        return self._end(code, reason) if all(other.done for other in self._tracks) else []

    # ------------------------------------------------------------ saying

    def _about(self, kind: str, **fields: object) -> dict[str, Any]:
        return {"type": kind, "stream_sid": self._stream_sid, **fields}

    def _mention(self, call: Call, track: int, kind: str, number: int, **fields: object) -> None:
        event = self._about(kind, track=self._tracks[track].name, utterance=number, **fields)
        call.mention(event, (self._stream_sid, track, kind))

    def _final(self, final: UtteranceFinal, track: _Track) -> dict[str, Any]:
        at = track.order.seconds
        begin, end = at(final.start_sample), at(final.end_sample)
        shift = begin - final.start_sample / 16_000
        fields: dict[str, Any] = {"track": track.name, "utterance": final.utterance, "text": final.text}
        fields |= {"start": begin, "end": end, "language": final.language or None}
        if final.words:
            fields["words"] = [
                {"word": word.text, "start": round(word.start + shift, 3), "end": round(word.end + shift, 3)}
                for word in final.words
            ]
            if final.estimated:
                fields["timing"] = "estimated"
        if final.finish_reason != "stop":
            fields["finish_reason"] = final.finish_reason
        return self._about("final", **fields)

    def _end(self, code: int, reason: str) -> Sequence[Effect]:
        self.close()
        return [] if self._gone else [Hang(code, reason)]


def _media_format(value: Any) -> tuple[RawAudio, int]:
    """The encoding of all tracks, and its byte of silence. Raises UnsupportedAudio, BadRequest."""
    fields = value if isinstance(value, dict) else {}
    name = str(fields.get("encoding") or "audio/x-mulaw").lower()
    if name not in _ENCODINGS:
        raise UnsupportedAudio(
            f"Unknown encoding {name[:40]!r}.", hint="It is audio/x-mulaw, audio/x-alaw or audio/x-l16."
        )
    encoding, silence = _ENCODINGS[name]
    rate, channels = _count(fields.get("sampleRate", 8000)), _count(fields.get("channels", 1))
    if rate is None or not _MIN_RATE <= rate <= _MAX_RATE or channels not in (1, 2):
        raise BadRequest("The media format has an impossible rate or number of channels.", param="mediaFormat")
    return RawAudio(encoding, rate, channels), silence


def _track_names(value: Any) -> list[str]:
    """At most ``MAX_TRACKS`` names; ``inbound`` where none is said."""
    given = value[:MAX_TRACKS] if isinstance(value, list) else []
    names = [name.removesuffix("_track")[:MAX_NAME] for name in given if isinstance(name, str) and name]
    return list(dict.fromkeys(names)) or ["inbound"]


def _count(value: Any) -> int | None:
    """A number as Twilio sends it, which is as text."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 16:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**15 else None
