"""One file in the worker: from its command to its last event.

An audio thread fills ``pending`` with segments; the scheduler opens sequences for them and hands their results back.
Results may come in any order (an engine decodes several segments of a file at once); events leave in the order of the
recording, so that the gateway can resume at the end of what it has.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from shared.errors import NapscribeError
from shared.messages import Delta, Event, FileDone, FileTimings, Lane, SegmentDone, TranscribeFile, Word
from shared.pcm import seconds
from worker.engines.base import Engine, EngineSequence, Final, Hypothesis, SequenceRequest
from worker.files.segments import Segment
from worker.pieces import Hearing, Piece
from worker.text.repetition import collapse_repetitions
from worker.text.stabilizer import pieces as words_of
from worker.text.word_times import spread_words

DEMOTE_SECONDS = 60.0
"""An interactive file that has had this much audio recognised is a batch: a two-hour upload that streams its answer must
not stand in the way of short ones."""


@dataclass(slots=True)
class OpenSegment:
    """A segment in the engine."""

    segment: Segment
    hearing: Hearing
    emitted: str
    """What has left as deltas, prefix of an earlier generation included."""


@dataclass(slots=True)
class FileJob:
    """State shared by two threads at a time: ``pending``, ``exhausted`` and ``error`` are for the audio thread that has the file in
    hand to write, under ``lock``."""

    command: TranscribeFile
    order: int
    """Arrival in this worker."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    pending: collections.deque[Segment] = field(default_factory=collections.deque)
    exhausted: bool = False
    error: NapscribeError | None = None
    duration_samples: int = 0
    decode_ns: int = 0
    vad_ns: int = 0
    engine_ns: int = 0
    attained: int = 0
    """Samples recognised so far in this worker."""
    open: collections.OrderedDict[int, OpenSegment] = field(default_factory=collections.OrderedDict)
    cancelled: bool = False
    languages: collections.Counter[str] = field(default_factory=collections.Counter)

    @property
    def id(self) -> str:
        return self.command.request_id

    @property
    def lane(self) -> Lane:
        if self.command.lane is Lane.INTERACTIVE and seconds(self.attained) >= DEMOTE_SECONDS:
            return Lane.BATCH
        return self.command.lane

    @property
    def priority(self) -> tuple[int, int, int]:
        """Sort key: lane, then who has had least, then who came first."""
        return (self.lane, self.attained, self.order)

    @property
    def finished(self) -> bool:
        with self.lock:
            return self.exhausted and not self.pending and not self.open

    @property
    def held(self) -> int:
        """Segments whose audio is in memory: they wait, or are in the engine. Safe from any thread."""
        return len(self.pending) + len(self.open)

    def rows(self) -> list[tuple[EngineSequence, int]]:
        """Sequences that want a step, in the order of the recording."""
        return [(piece.sequence, index) for index, piece in self._working() if piece.sequence and piece.sequence.ready]

    def _working(self) -> Iterator[tuple[int, Piece]]:
        return ((index, piece) for index, entry in self.open.items() for piece in entry.hearing.working)

    @property
    def sequences(self) -> int:
        """In the engine now."""
        return sum(piece.sequence is not None for _, piece in self._working())

    def unopened(self) -> tuple[int, Piece] | None:
        """The first piece that has no sequence yet, taking the next segment if all have one."""
        waiting = next(((index, piece) for index, piece in self._working() if piece.sequence is None), None)
        if waiting is not None:
            return waiting
        with self.lock:
            if not self.pending:
                return None
            segment = self.pending.popleft()
        said = self.command.prefix if segment.index == self.command.next_index else ""
        # Nobody has scores of what an earlier worker said: where they are asked for, it is heard again.
        piece = Piece([segment.audio], prefix="" if self.command.options.logprobs else said)
        self.open[segment.index] = OpenSegment(segment, Hearing([piece]), said)
        return segment.index, piece

    def cancel(self, engine: Engine) -> None:
        """Forget everything in the engine."""
        for _, piece in self._working():
            if piece.sequence is not None:
                engine.cancel(piece.sequence)
        self.open.clear()

    def stepped(self, _index: int, _began_ns: int, took_ns: int) -> None:
        """A step worked on a segment of it."""
        self.engine_ns += took_ns

    def request(self, index: int, piece: Piece) -> SequenceRequest:
        options = self.command.options
        return SequenceRequest(
            id=f"{self.id}#{index}+{piece.offset}",
            lane=self.lane,
            language=options.language,
            prompt=options.prompt,
            keywords=options.keywords,
            temperature=options.temperature,
            prefix=piece.prefix,
            words=options.words,
            partials=options.deltas,
            base_sample=self.open[index].segment.start_sample + piece.offset,
        )

    def hypothesis(self, index: int, event: Hypothesis) -> list[Event]:
        """New words of the oldest open segment; those of later ones wait for it, and so does a piece behind another.

        The last word waits too: it may still grow.
        """
        if not self.command.options.deltas or index != next(iter(self.open)):
            return []
        entry = self.open[index]
        if event.sequence is not entry.hearing.pieces[0].sequence:
            return []
        text = collapse_repetitions(event.text)
        if not text.startswith(entry.emitted):
            return []
        text = "".join(words_of(text[len(entry.emitted) :])[:-1])
        if not text:
            return []
        entry.emitted += text
        return [Delta(self.command.generation, self.id, index, text)]

    def final(self, index: int, event: Final) -> list[Event]:
        """Every segment that is done now, in order."""
        hearing = self.open[index].hearing
        hearing.take(event)
        if hearing.done:
            self.attained += sum(piece.length for piece in hearing.pieces)
        done: list[Event] = []
        while self.open and next(iter(self.open.values())).hearing.done:
            _, entry = self.open.popitem(last=False)
            done.append(self._segment_done(entry))
        return done

    def _segment_done(self, entry: OpenSegment) -> SegmentDone:
        segment = entry.segment
        final = entry.hearing.joined(entry.emitted)
        if final.language:
            self.languages[final.language] += 1
        words, estimated = self._words(segment, final) if self.command.options.words else ((), False)
        return SegmentDone(
            generation=self.command.generation,
            request_id=self.id,
            index=segment.index,
            start_sample=segment.start_sample,
            speech_end_sample=segment.speech_end_sample,
            end_sample=segment.end_sample,
            text=final.text,
            words=words,
            estimated=estimated,
            language=final.language,
            avg_logprob=final.avg_logprob,
            finish_reason=final.finish_reason,
            logprobs=final.logprobs if self.command.options.logprobs else (),
        )

    @staticmethod
    def _words(segment: Segment, final: Final) -> tuple[tuple[Word, ...], bool]:
        """Places in the recording: the engine's own, or spread over the speech that VAD found; whether they were spread."""
        if final.words:
            return tuple(word.later(seconds(segment.start_sample)) for word in final.words), False
        regions = [(seconds(start), seconds(end)) for start, end in segment.speech]
        spread = spread_words(final.text, regions)
        return spread, bool(spread)

    def done(self) -> FileDone:
        language = self.command.options.language
        if not language and self.languages:
            language = self.languages.most_common(1)[0][0]
        timings = FileTimings(self.decode_ns, self.vad_ns, self.engine_ns)
        return FileDone(self.command.generation, self.id, self.duration_samples, language, timings)
