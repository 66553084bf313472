"""Speech in the engine, heard as a whole; what the engine ends as a run-away is cut in two where it is quietest, and heard again."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from shared.pcm import SAMPLE_RATE, seconds
from worker.audio.quiet import quiet_middle
from worker.audio.samples import Audio
from worker.engines.base import EngineSequence, Final, Work
from worker.text.rejoin import continued
from worker.text.repetition import places_without_repetitions, places_without_word_runs
from worker.text.spelling import Part, Scored, Spelling

SPLIT_SECONDS = 4.0
"""A run-away on less audio than this is kept as it is: there is little to lose and nothing to cut."""
MAX_DEPTH = 2
"""How often speech is cut in two: four pieces at the most."""
SPLIT_SEARCH = 0.25
"""The cut is looked for in this share of the audio on either side of its middle, where it is quietest for 100 ms."""


@dataclass(slots=True)
class Piece:
    """A segment or an utterance, or a part of one, with its sequence in the engine."""

    chunks: list[Audio]
    """Its sound; that of a call grows."""
    offset: int = 0
    """Of its first sample in the whole."""
    prefix: str = ""
    depth: int = 0
    sequence: EngineSequence | None = None
    final: Final | None = None

    @property
    def audio(self) -> Audio:
        return self.chunks[0] if len(self.chunks) == 1 else np.concatenate(self.chunks)

    @property
    def length(self) -> int:
        """Samples."""
        return sum(map(len, self.chunks))

    def split(self) -> list[Piece]:
        """Two pieces, cut where it is quietest near the middle, to be heard from their start.

        Without a prefix: nobody knows how much of the sound it covers, and the first piece may be shorter than that.
        """
        audio = self.audio
        cut = quiet_middle(audio, SPLIT_SEARCH)
        first = Piece([audio[:cut]], self.offset, depth=self.depth + 1)
        return [first, Piece([audio[cut:]], self.offset + cut, depth=self.depth + 1)]

    @property
    def worth_splitting(self) -> bool:
        return self.depth < MAX_DEPTH and self.length >= SPLIT_SECONDS * SAMPLE_RATE


@dataclass(slots=True)
class Hearing:
    """A segment or an utterance in the engine: one piece, or the parts of what ran away, in their order."""

    pieces: list[Piece]
    ran_away: str = ""
    """Why the engine ended a piece before its sound did; the first that happened."""

    @property
    def working(self) -> Iterator[Piece]:
        """Pieces whose final is still to come."""
        return (piece for piece in self.pieces if piece.final is None)

    @property
    def done(self) -> bool:
        return not any(self.working)

    @property
    def in_parts(self) -> bool:
        return len(self.pieces) > 1

    def take(self, final: Final) -> list[Piece]:
        """The final of a piece. If that ran away and is worth cutting, its parts stand in its place and must be heard: they are returned."""
        place = next(n for n, piece in enumerate(self.pieces) if piece.sequence is final.sequence)
        piece = self.pieces[place]
        if final.finish_reason != "stop":
            self.ran_away = self.ran_away or final.finish_reason
            if piece.worth_splitting:
                self.pieces[place : place + 1] = parts = piece.split()
                return parts
        piece.final = final
        return []

    def joined(self, said: str) -> Final:
        """All pieces, which are done, as one final. ``said``: text that has been sent already; the result begins with it."""
        done = [(piece, piece.final) for piece in self.pieces if piece.final is not None]
        finals = [final for _, final in done]
        spelling = Spelling(
            [
                Part(final.text, final.logprobs, [word.later(seconds(piece.offset)) for word in final.words])
                for piece, final in done
            ]
        )
        text = spelling.text
        score = finals[0].avg_logprob
        words = tuple(word for part in spelling.parts for word in part.words)
        logprobs: Sequence[Scored] = ()
        said = said.strip() and said
        places = _kept(spelling, finals)
        if text.startswith(said):
            places = [*range(len(said)), *places[bisect_left(places, len(said)) :]]
        left = "".join(text[place] for place in places)
        whole, text = text, continued(said, left)
        if text != left:  # begins otherwise than what is heard
            words, score = (), _mean([final.avg_logprob for final in finals])
        else:
            logprobs = spelling.tokens(places)
            if self.in_parts or text != whole:
                words = spelling.words(places)
                score = _mean([score for _, score in logprobs] or [final.avg_logprob for final in finals])
        works = [final.work for final in finals]
        return replace(
            finals[0],
            text=text,
            language=next((final.language for final in finals if final.language), ""),
            words=words,
            avg_logprob=score,
            logprobs=tuple(logprobs),
            finish_reason=self.ran_away or "stop",
            work=Work(
                sum(work.encode_ns for work in works),
                sum(work.prefill_ns for work in works),
                sum(work.decode_ns for work in works),
                sum(work.windows for work in works),
                max(work.windows_listening for work in works),
            ),
        )


def _kept(spelling: Spelling, finals: Sequence[Final]) -> Sequence[int]:
    """Places of what is kept of the parts: what ran away loses all its runs. What ended by itself may be a chant, or a lesson: it
    loses but what is no speech by the published thresholds."""
    places: list[int] = []
    end = 0
    for wild, group in groupby(zip(spelling.spans, finals, strict=True), lambda part: part[1].finish_reason != "stop"):
        spans = [span for span, _ in group]
        begin, stop = spans[0][0], spans[-1][1]
        places += range(end, begin)
        places += places_without_word_runs(spelling.text, range(begin, stop)) if wild else range(begin, stop)
        end = stop
    return places_without_repetitions(spelling.text, places)


def _mean(values: Sequence[float | None]) -> float | None:
    """Of those that are known; None if none is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
