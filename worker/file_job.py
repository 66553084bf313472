"""One file in the worker: from its command to its last event.

The audio thread fills ``pending`` with segments; the scheduler opens sequences for them and hands their results back.
Results may come in any order (an engine decodes several segments of a file at once); events leave in the order of the
recording, so that the gateway can resume at the end of what it has.
"""

from __future__ import annotations

import collections
import threading
from dataclasses import dataclass, field

from shared.errors import NapscribeError
from shared.messages import Delta, Event, FileDone, FileTimings, Lane, SegmentDone, TranscribeFile, Word
from shared.pcm import seconds
from worker.engines.base import EngineSequence, Final, Hypothesis, SequenceRequest
from worker.repetition import collapse_repetitions, collapse_word_runs
from worker.segments import Segment
from worker.word_times import spread_words

DEMOTE_SECONDS = 60.0
"""An interactive file that has had this much audio recognised is a batch: a two-hour upload that streams its answer must
not stand in the way of short ones."""


@dataclass(slots=True)
class OpenSegment:
    """A segment with its sequence in the engine."""

    segment: Segment
    sequence: EngineSequence
    emitted: str
    """What has left as deltas, prefix of an earlier generation included."""
    final: Final | None = None


@dataclass(slots=True)
class FileJob:
    """State shared by two threads: ``pending``, ``exhausted`` and ``error`` are the audio thread's to write, under ``lock``."""

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

    def next_segment(self) -> Segment | None:
        with self.lock:
            return self.pending.popleft() if self.pending else None

    def rows(self) -> list[tuple[EngineSequence, int]]:
        """Sequences that want a step, in the order of the recording."""
        return [(e.sequence, index) for index, e in self.open.items() if e.final is None and e.sequence.ready]

    def stepped(self, _index: int, _began_ns: int, took_ns: int) -> None:
        """A step worked on a segment of it."""
        self.engine_ns += took_ns

    def sequence_request(self, segment: Segment) -> SequenceRequest:
        options = self.command.options
        return SequenceRequest(
            id=f"{self.id}#{segment.index}",
            lane=self.lane,
            language=options.language,
            prompt=options.prompt,
            keywords=options.keywords,
            temperature=options.temperature,
            prefix=self._prefix(segment),
            words=options.words,
            logprobs=options.logprobs,
            partials=options.deltas,
            base_sample=segment.start_sample,
        )

    def opened(self, segment: Segment, sequence: EngineSequence) -> None:
        self.open[segment.index] = OpenSegment(segment, sequence, self._prefix(segment))

    def _prefix(self, segment: Segment) -> str:
        return self.command.prefix if segment.index == self.command.next_index else ""

    def hypothesis(self, index: int, event: Hypothesis) -> list[Event]:
        """New words of the oldest open segment; those of later ones wait for it."""
        if not self.command.options.deltas or index != next(iter(self.open)):
            return []
        entry = self.open[index]
        if not event.text.startswith(entry.emitted) or event.text == entry.emitted:
            return []
        text, entry.emitted = event.text[len(entry.emitted) :], event.text
        return [Delta(self.command.generation, self.id, index, text)]

    def final(self, index: int, event: Final) -> list[Event]:
        """Every segment that is done now, in order."""
        self.open[index].final = event
        self.attained += len(self.open[index].segment.audio)
        done: list[Event] = []
        while self.open:
            index, entry = next(iter(self.open.items()))
            if entry.final is None:
                break
            del self.open[index]
            done.append(self._segment_done(entry, entry.final))
        return done

    def _segment_done(self, entry: OpenSegment, final: Final) -> SegmentDone:
        segment = entry.segment
        text = final.text
        if not entry.emitted:
            text = collapse_word_runs(collapse_repetitions(text)).strip()
        if final.language:
            self.languages[final.language] += 1
        return SegmentDone(
            generation=self.command.generation,
            request_id=self.id,
            index=segment.index,
            start_sample=segment.start_sample,
            speech_end_sample=segment.speech_end_sample,
            end_sample=segment.end_sample,
            text=text,
            words=self._words(segment, final, text) if self.command.options.words else (),
            language=final.language,
            avg_logprob=final.avg_logprob,
            finish_reason=final.finish_reason,
            logprobs=final.logprobs,
        )

    @staticmethod
    def _words(segment: Segment, final: Final, text: str) -> tuple[Word, ...]:
        """Places in the recording: the engine's own, or spread over the speech that VAD found."""
        if final.words:
            base = seconds(segment.start_sample)
            return tuple(Word(w.text, base + w.start, base + w.end) for w in final.words)
        regions = [(seconds(start), seconds(end)) for start, end in segment.speech]
        return tuple(Word(w.text, w.start, w.end) for w in spread_words(text, regions))

    def done(self) -> FileDone:
        language = self.command.options.language
        if not language and self.languages:
            language = self.languages.most_common(1)[0][0]
        timings = FileTimings(self.decode_ns, self.vad_ns, self.engine_ns)
        return FileDone(self.command.generation, self.id, self.duration_samples, language, timings)
