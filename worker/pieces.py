"""Sound that the engine could not finish as a whole: cut in two where it is quietest, and heard again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.pcm import SAMPLE_RATE
from shared.scripts import separator
from worker.engines.base import Audio, EngineSequence, Final
from worker.quiet import quiet_middle

SPLIT_SECONDS = 4.0
"""A run-away on less audio than this is kept as it is: there is little to lose and nothing to cut."""
MAX_DEPTH = 2
"""How often a segment is cut in two: four pieces at the most."""
SPLIT_SEARCH = 0.25
"""The cut is looked for in this share of the audio on either side of its middle, where it is quietest for 100 ms."""


@dataclass(slots=True)
class Piece:
    """A segment, or a part of one that the engine could not finish as a whole, with its sequence in the engine."""

    audio: Audio
    offset: int
    """Of its first sample in the segment's audio."""
    prefix: str = ""
    depth: int = 0
    sequence: EngineSequence | None = None
    final: Final | None = None

    def split(self) -> list[Piece]:
        """Two pieces, cut where it is quietest near the middle, to be heard from their start.

        Without a prefix: nobody knows how much of the sound it covers, and the first piece may be shorter than that.
        """
        cut = quiet_middle(self.audio, SPLIT_SEARCH)
        first = Piece(self.audio[:cut], self.offset, "", self.depth + 1)
        return [first, Piece(self.audio[cut:], self.offset + cut, "", self.depth + 1)]

    @property
    def worth_splitting(self) -> bool:
        return self.depth < MAX_DEPTH and len(self.audio) >= SPLIT_SECONDS * SAMPLE_RATE


def text_of(pieces: Sequence[Piece]) -> str:
    """Of all that are final."""
    text = ""
    for piece in pieces:
        part = piece.final.text if piece.final else ""
        text += separator(text, part) + part
    return text


def mean(values: Sequence[float | None]) -> float | None:
    """Of those that are known; None if none is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
