"""A finished transcript, and the one rule by which the texts of its segments become one text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from shared.errors import ProtocolError
from shared.messages import Delta, SegmentDone
from shared.scripts import separator


class Transcript(msgspec.Struct, frozen=True):
    """Everything that the formats of a result are made of."""

    segments: tuple[SegmentDone, ...]
    """In order; a segment may be without text."""
    duration: float
    """Seconds of the recording."""
    language: str = ""
    """ISO 639-1 code; empty if nobody knows."""
    """``transcribe`` or ``translate``."""
    word_times: str = "none"
    """How the segments' word times came about: ``exact``, ``estimated`` or ``none``."""

    @property
    def text(self) -> str:
        """The whole text, joined at every call."""
        return join_text(self.segments)

    @property
    def finish_reason(self) -> str:
        """``stop``, or why the engine ended a segment before its sound did: ``repetition`` or ``length``."""
        return next((found.finish_reason for found in self.segments if found.finish_reason != "stop"), "stop")


class TextStream:
    """Append-only text out of the events of one file: every piece, concatenated, is ``join_text`` of its segments."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._open = ""

    @property
    def text(self) -> str:
        """All pieces so far, joined at every call."""
        return "".join(self._pieces)

    def delta(self, event: Delta) -> str:
        """The piece that goes out for words of a segment that is still open; may be empty."""
        return self._extend(event.text)

    def segment(self, event: SegmentDone) -> str:
        """The rest of a segment that is finished; empty if all of it went out as deltas.

        Raises ProtocolError if the segment does not start with what went out: that cannot be taken back.
        """
        if not event.text.startswith(self._open):
            raise ProtocolError(f"The text of segment {event.index} contradicts its deltas.")
        piece = self._extend(event.text[len(self._open) :])
        self._open = ""
        return piece

    def _extend(self, text: str) -> str:
        if not text:
            return ""
        piece = text if self._open or not self._pieces else separator(self._pieces[-1], text) + text
        self._open += text
        self._pieces.append(piece)
        return piece


def joined_scores(before: str, scores: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
    """Tokens of a text that stands behind ``before``, with what stands between the two at the first of them."""
    return [(separator(before, token) + token if n == 0 else token, score) for n, (token, score) in enumerate(scores)]


def join_text(segments: Iterable[SegmentDone]) -> str:
    """The texts of the segments as one text."""
    return "".join(joined_pieces(segments))


def joined_pieces(segments: Iterable[SegmentDone]) -> list[str]:
    """For every segment its text with the separator in front; concatenated, they are the whole text."""
    pieces: list[str] = []
    previous = ""
    for segment in segments:
        pieces.append(separator(previous, segment.text) + segment.text)
        previous = segment.text or previous
    return pieces
