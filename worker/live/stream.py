"""One live stream on the scheduler's thread: its utterances in the engine, and what is said of them, in order."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from shared.messages import Event, Lane, Word
from shared.pcm import seconds
from shared.streams import (
    AudioCleared,
    Partial,
    StreamDone,
    StreamOptions,
    UtteranceDelta,
    UtteranceEnded,
    UtteranceFinal,
    UtteranceTimings,
)
from worker.engines.base import Engine, EngineSequence, Final, Hypothesis, SequenceRequest
from worker.live.endpointing import Begin, End, Pause, Speech
from worker.live.happenings import Answer, Arrival, Cleared, Closed, Happening, Opened, Updated
from worker.pieces import Hearing, Piece
from worker.text.repetition import collapse_repetitions
from worker.text.stabilizer import Stabilizer
from worker.text.word_times import spread_words


@dataclass(slots=True)
class LiveUtterance:
    begin: Begin
    sequence: EngineSequence
    options: StreamOptions
    stabilizer: Stabilizer
    heard: int
    """End of the audio that the engine has been fed, samples of the stream."""
    hearing: Hearing
    end: End | None = None
    arrival: Arrival | None = None
    first_step_ns: int = 0
    engine_ns: int = 0
    """Of steps after the end."""
    final: Final | None = None
    shown: str = ""

    def working(self) -> Iterator[EngineSequence]:
        """Sequences whose final is still to come."""
        if self.final is None:
            yield from (piece.sequence for piece in self.hearing.working if piece.sequence is not None)


@dataclass(slots=True)
class LiveStream:
    """State of a stream. ``owed``: what must be said, in this order: finals by number, then answers."""

    id: str
    order: int
    generation: int
    engine: Engine
    accepts_prefix: bool
    options: StreamOptions
    open: dict[int, LiveUtterance] = field(default_factory=dict)
    owed: collections.deque[int | Answer | Closed] = field(default_factory=collections.deque)
    said: list[int] = field(default_factory=list)
    """Utterances whose final has been said since the last look."""
    over: bool = False

    @property
    def lane(self) -> Lane:
        return Lane.LIVE

    @property
    def priority(self) -> tuple[int, int, int]:
        """Live streams take turns: who was stepped longest ago goes first (``order`` is renewed by the scheduler)."""
        return (self.lane, 0, self.order)

    def rows(self) -> list[tuple[EngineSequence, int]]:
        """Sequences that want a step, finished utterances first: somebody waits for their final."""
        waiting = [(row, n) for n, u in self.open.items() for row in u.working() if row.ready]
        return sorted(waiting, key=lambda row: self.open[row[1]].end is None)

    # ------------------------------------------------------------ what the ears say

    def happen(self, happening: Happening, arrival: Arrival | None) -> list[Event]:
        match happening:
            case Begin():
                self._begin(happening)
            case Speech(utterance=number, audio=audio):
                utterance = self.open[number]
                utterance.heard += len(audio)
                utterance.hearing.pieces[0].chunks.append(audio)
                self.engine.feed(utterance.sequence, audio)
            case Pause(utterance=number):
                self.engine.pause(self.open[number].sequence)
            case End():
                self._end(happening, arrival)
            case Cleared():
                return self._clear(happening)
            case Updated(options=options) | Opened(options=options):
                self.options = options
            case Answer() | Closed():
                self.owed.append(happening)
        return self._pay()

    def _begin(self, begin: Begin) -> None:
        request = self._request(begin, self.options)
        sequence = self.engine.open(replace(request, prefix=begin.emitted if self.accepts_prefix else ""))
        hearing = Hearing([Piece([], sequence=sequence)])
        self.open[begin.utterance] = LiveUtterance(
            begin, sequence, self.options, Stabilizer(begin.emitted), begin.start_sample, hearing
        )
        self.owed.append(begin.utterance)

    def _request(self, begin: Begin, options: StreamOptions) -> SequenceRequest:
        return SequenceRequest(
            id=f"{self.id}#{begin.utterance}",
            lane=Lane.LIVE,
            language=options.language,
            prompt=options.prompt,
            keywords=options.keywords,
            temperature=options.temperature,
            words=options.words,
            partials=options.partials and (self.accepts_prefix or not options.only_certain),
            base_sample=begin.start_sample,
        )

    def _end(self, end: End, arrival: Arrival | None) -> None:
        utterance = self.open[end.utterance]
        utterance.end, utterance.arrival = end, arrival
        if end.spoken or utterance.stabilizer.said:
            self.engine.finish(utterance.sequence)
        else:
            self.engine.cancel(utterance.sequence)
            utterance.final = Final(utterance.sequence, "")

    def _clear(self, cleared: Cleared) -> list[Event]:
        utterance = self.open.pop(cleared.utterance, None)
        if utterance is not None:
            for sequence in utterance.working():
                self.engine.cancel(sequence)
            self.owed.remove(cleared.utterance)
            self.said.append(cleared.utterance)
        return [AudioCleared(self.generation, self.id, cleared.utterance, cleared.through_sample), *self._pay()]

    # ------------------------------------------------------------ what the engine says

    def stepped(self, index: int, began_ns: int, took_ns: int) -> None:
        """A step worked on this utterance."""
        utterance = self.open.get(index)
        if utterance is not None and utterance.end is not None:
            utterance.first_step_ns = utterance.first_step_ns or began_ns
            utterance.engine_ns += took_ns

    def hypothesis(self, index: int, event: Hypothesis) -> list[Event]:
        utterance = self.open[index]
        text = collapse_repetitions(event.text)
        if not text or text == utterance.shown or utterance.hearing.in_parts:
            return []
        utterance.shown = text
        certain = utterance.stabilizer.hypothesis(text)
        if certain and self.accepts_prefix:
            self.engine.freeze(utterance.sequence, utterance.stabilizer.said)
        events: list[Event] = [Partial(self.generation, self.id, index, utterance.heard, text)]
        if certain:
            events.insert(0, UtteranceDelta(self.generation, self.id, index, utterance.heard, certain))
        return events

    def final(self, index: int, event: Final) -> list[Event]:
        """What the engine ended as a run-away is cut in two and heard again, as in files: a final is all that was said."""
        utterance = self.open[index]
        for part in utterance.hearing.take(event):
            self._hear(utterance, part)
        if utterance.hearing.done:
            # What has been said is for good only where the engine goes on after it.
            utterance.final = utterance.hearing.joined(utterance.stabilizer.said if self.accepts_prefix else "")
        return self._pay()

    def _hear(self, utterance: LiveUtterance, part: Piece) -> None:
        request = self._request(utterance.begin, utterance.options)
        part.sequence = self.engine.open(
            replace(
                request,
                id=f"{request.id}+{part.offset}",
                base_sample=request.base_sample + part.offset,
                partials=False,
            )
        )
        self.engine.feed(part.sequence, part.audio)
        self.engine.finish(part.sequence)

    def cancel(self) -> None:
        """Forget everything in the engine."""
        for utterance in self.open.values():
            for sequence in utterance.working():
                self.engine.cancel(sequence)
        self.open.clear()
        self.owed.clear()

    # ------------------------------------------------------------ what is said

    def _pay(self) -> list[Event]:
        events: list[Event] = []
        while self.owed:
            head = self.owed[0]
            if isinstance(head, int):
                utterance = self.open[head]
                if utterance.final is None or utterance.end is None:
                    break
                events += self._final(utterance, utterance.final, utterance.end)
                del self.open[head]
                self.said.append(head)
            elif isinstance(head, Answer):
                events.append(UtteranceEnded(self.generation, self.id, head.token, head.utterance))
            else:
                events.append(StreamDone(self.generation, self.id, head.through_sample))
                self.over = True
            self.owed.popleft()
        return events

    def _final(self, utterance: LiveUtterance, final: Final, end: End) -> list[Event]:
        text = final.text
        events: list[Event] = []
        rest = utterance.stabilizer.final(text)
        if rest:
            events.append(UtteranceDelta(self.generation, self.id, end.utterance, end.end_sample, rest))
        through = max(end.end_sample, utterance.heard)
        events.append(
            UtteranceFinal(
                generation=self.generation,
                request_id=self.id,
                utterance=end.utterance,
                start_sample=utterance.begin.start_sample,
                end_sample=end.end_sample,
                through_sample=through,
                text=text,
                words=self._words(utterance, final, end, text) if utterance.options.words else (),
                estimated=utterance.options.words and bool(text) and not final.words,
                language=final.language,
                avg_logprob=final.avg_logprob,
                finish_reason=final.finish_reason,
                cause=end.cause,
                revised=utterance.stabilizer.revised(text),
                timings=self._timings(utterance, final),
                logprobs=final.logprobs if utterance.options.logprobs else (),
            )
        )
        return events

    @staticmethod
    def _words(utterance: LiveUtterance, final: Final, end: End, text: str) -> tuple[Word, ...]:
        if final.words:
            return tuple(word.later(seconds(utterance.begin.start_sample)) for word in final.words)
        regions = [(seconds(begin), seconds(stop)) for begin, stop in end.speech]
        return spread_words(text, regions)

    @staticmethod
    def _timings(utterance: LiveUtterance, final: Final) -> UtteranceTimings:
        arrival = utterance.arrival or Arrival(0, 0, 0, 0)
        queued = utterance.first_step_ns - arrival.decided_ns if utterance.first_step_ns and arrival.decided_ns else 0
        return UtteranceTimings(
            speech_end_ns=arrival.speech_end_ns,
            endpoint_ns=max(0, arrival.deciding_ns - arrival.speech_end_ns) if arrival.speech_end_ns else 0,
            buffered_ns=max(0, arrival.decided_ns - arrival.deciding_ns),
            queue_ns=max(0, queued),
            vad_ns=arrival.vad_ns,
            engine_ns=utterance.engine_ns,
            encode_ns=final.work.encode_ns,
            prefill_ns=final.work.prefill_ns,
            decode_ns=final.work.decode_ns,
            windows=final.work.windows,
            windows_listening=final.work.windows_listening,
        )
