"""The Wyoming dialect, as Home Assistant speaks it: a connection an utterance, and a ``transcript`` in the end, always.

Home Assistant decides where speech ends, so an utterance here is everything between ``audio-start`` and ``audio-stop``, however
many pieces the engine makes of it. What is certain is sent while audio still comes (``transcript-start``, ``transcript-chunk``);
together the chunks are the text of the ``transcript``, unless there has been an error. Home Assistant passes over them, as the protocol wants it: nobody asks for
them, the server says that it has them.

Like the other dialects this is a state machine without socket, clock or loop; ``wyoming_server`` acts it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.streams.dialect import Audio, Finish, Open
from gateway.streams.query import MAX_TEXT
from gateway.streams.wyoming_wire import WyomingEvent
from shared.errors import BadRequest, NapscribeError
from shared.languages import parse_language
from shared.scripts import separator
from shared.streams import Endpointing, StreamDone, StreamEvent, StreamOptions, UtteranceDelta, UtteranceFinal
from shared.wire import RawAudio

_WIDTHS = {2: "s16le"}


@dataclass(frozen=True, slots=True)
class Drop:
    """Give a stream back, finished or not; nothing of it is wanted any more."""

    track: int


Effect = Open | Audio | Finish | Drop | WyomingEvent
"""A ``WyomingEvent`` is said to the peer."""


@dataclass(slots=True)
class _Text:
    """The text of a stream as it grows, over all its pieces: what has been sent stays, and pieces stand in their order."""

    sent: str = ""
    piece: int = 0
    """The one that is being sent: the engine may be sure of words of the next before this one is over."""
    _so_far: dict[int, str] = field(default_factory=dict)
    """Of each piece that is not over."""
    _begun: str = ""
    """How much of ``piece`` has been sent."""

    def delta(self, number: int, text: str) -> str:
        """Words of a piece that are certain; returns what can be sent."""
        if number < self.piece:
            return ""
        self._so_far[number] = self._so_far.get(number, "") + text
        return self._send(self._so_far[number]) if number == self.piece else ""

    def final(self, number: int, text: str) -> str:
        """The whole text of a piece; finals come in order. If it does not begin with what was sent, that stays."""
        if number < self.piece:
            return ""
        if number > self.piece:
            self._go_to(number)
        new = self._send(text)
        self._go_to(number + 1)
        return new + self._send(self._so_far.get(self.piece, ""))

    def _go_to(self, number: int) -> None:
        self.piece, self._begun = number, ""
        self._so_far = {other: text for other, text in self._so_far.items() if other >= number}

    def _send(self, text: str) -> str:
        if not text.startswith(self._begun):
            return ""
        rest = text[len(self._begun) :]
        new = rest if self._begun else separator(self.sent, rest) + rest
        self.sent += new
        self._begun = text
        return new


class Wyoming:
    """One peer, one utterance at a time: each has a track of its own."""

    def __init__(self, description: WyomingEvent) -> None:
        self._description = description
        self._wish: dict[str, Any] = {}
        self._track = 0
        self._open = False
        self._answering = False
        """Audio is over, the transcript is owed."""
        self._refused = False
        """The utterance has had its error and its transcript; the rest of its audio is not heard."""
        self._started = False
        self._text = _Text()
        self._language = ""

    @property
    def answering(self) -> bool:
        """Whether a transcript is owed. Nothing more need be read before it has been said."""
        return self._answering

    # ------------------------------------------------------------ what the peer says

    def receive(self, event: WyomingEvent) -> Sequence[Effect]:
        """Events that are not for us are passed over, as the protocol wants it."""
        match event.type:
            case "describe":
                return [self._description]
            case "ping":
                return [WyomingEvent("pong", {"text": event.data.get("text")})]
            case "transcribe":
                self._wish = event.data
            case "audio-start":
                return [*self._leave(), *self._begin(event.data)]
            case "audio-chunk":
                return self._hear(event)
            case "audio-stop":
                return self._stop()
        return []

    def _begin(self, form: dict[str, Any]) -> Sequence[Effect]:
        self._track += 1
        self._refused = False
        try:
            options = _options(form, self._wish)
        except BadRequest as error:
            return self.refuse(error)
        self._open, self._language = True, options.language
        return [Open(options, self._track)]

    def _hear(self, event: WyomingEvent) -> Sequence[Effect]:
        if self._refused or self._answering:
            return []
        opening = [] if self._open else self._begin(event.data)
        return [*opening, Audio(event.payload, self._track)] if self._open else opening

    def _stop(self) -> Sequence[Effect]:
        """Audio is over: the transcript follows when everything has been heard, and at once where nothing was sent."""
        if self._refused:
            self._refused = False
            return []
        if self._answering:
            return []
        if not self._open:
            return [_transcript("", "")]
        self._answering = True
        return [Finish(self._track)]

    def _leave(self) -> Sequence[Effect]:
        """Another utterance begins. Whoever begins anew in the middle of one does not wait for its transcript."""
        if not self._open:
            return []
        if self._answering:
            return self._answer(self._text.sent)
        effects: list[Effect] = [Drop(self._track)]
        if self._started:
            effects.append(WyomingEvent("transcript-stop"))
        self._rest()
        return effects

    # ------------------------------------------------------------ what the stream says

    def event(self, event: StreamEvent, track: int) -> Sequence[Effect]:
        if not self._open or track != self._track:
            return []
        match event:
            case UtteranceDelta(utterance=number, text=text):
                return self._send(self._text.delta(number, text))
            case UtteranceFinal(utterance=number, text=text, language=language):
                self._language = language or self._language
                return self._send(self._text.final(number, text))
            case StreamDone():
                return self._answer(self._text.sent)
        return []

    def failed(self, error: NapscribeError, track: int) -> Sequence[Effect]:
        """A stream that is no longer wanted has nobody to tell."""
        return self.refuse(error) if self._open and track == self._track else []

    def refuse(self, error: NapscribeError) -> Sequence[Effect]:
        """Say what is wrong, and the transcript that Home Assistant waits for in any case. It is empty: half of a command, which
        nobody has finished, must not be obeyed.

        Audio that is still on its way, up to ``audio-stop``, is not heard.
        """
        said = WyomingEvent("error", {"text": str(error), "code": error.code})
        if self._refused:
            return [said]
        self._refused = not self._answering
        return [said, *self._answer("")]

    # ------------------------------------------------------------ saying

    def _send(self, text: str) -> Sequence[Effect]:
        if not text:
            return []
        chunk = WyomingEvent("transcript-chunk", {"text": text})
        if self._started:
            return [chunk]
        self._started = True
        return [WyomingEvent("transcript-start", _language(self._language)), chunk]

    def _answer(self, text: str) -> Sequence[Effect]:
        effects: list[Effect] = [Drop(self._track)] if self._open else []
        effects.append(_transcript(text, self._language))
        if self._started:
            effects.append(WyomingEvent("transcript-stop"))
        self._rest()
        return effects

    def _rest(self) -> None:
        self._open = self._answering = self._started = False
        self._text, self._language = _Text(), ""


def _transcript(text: str, language: str) -> WyomingEvent:
    return WyomingEvent("transcript", {"text": text, **(_language(language) if text else {})})


def _language(code: str) -> dict[str, Any]:
    return {"language": code} if code else {}


def _options(form: dict[str, Any], wish: dict[str, Any]) -> StreamOptions:
    """Raises BadRequest for audio that cannot be, or a language that nobody knows."""
    try:
        rate, width, channels = int(form.get("rate", 16_000)), int(form.get("width", 2)), int(form.get("channels", 1))
    except (TypeError, ValueError, OverflowError):
        raise BadRequest("rate, width and channels are whole numbers.") from None
    if width not in _WIDTHS or not 1 <= channels <= 8 or not 4_000 <= rate <= 192_000:
        raise BadRequest(f"Audio of {rate} Hz, {width} bytes and {channels} channels is not taken.")
    context = wish.get("context")
    prompt = str(context or "") if not isinstance(context, dict) else ""
    if len(prompt) > MAX_TEXT:
        raise BadRequest(f"context has more than {MAX_TEXT} characters.", param="context")
    return StreamOptions(
        audio=RawAudio(_WIDTHS[width], rate, channels),
        language=parse_language(str(wish.get("language") or "")),
        prompt=prompt,
        only_certain=True,
        endpointing=Endpointing(automatic=False),
    )
