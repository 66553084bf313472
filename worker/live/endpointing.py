"""Where utterances begin and end in a live stream: a state machine over frames of 32 ms and their speech probability.

Hysteresis keeps a dip inside a word from ending anything; a pre-roll keeps the soft beginning of the first word; held-back
silence keeps the engine from hearing what nobody said. An utterance that grows long ends in ever shorter pauses; where there is
none up to its limit, it is cut at the best place of its last second, which is held back until then.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from shared.pcm import SAMPLE_RATE
from shared.streams import Endpointing, OpenUtterance
from worker.audio.quiet import best_pause, quietest
from worker.audio.samples import Audio
from worker.audio.vad import FRAME

HYSTERESIS = 0.15
"""Speech goes on until the probability falls this far below the threshold (Silero's own default)."""
START_FRAMES = 3
"""Frames of speech among the last ``START_WINDOW`` that begin an utterance (96 ms): a click is one or two."""
START_WINDOW = 8
MIN_SPEECH_FRAMES = 5
"""An utterance with less speech (160 ms) than that says nothing."""
TAIL_SAMPLES = int(0.2 * SAMPLE_RATE)
"""Kept after the last speech frame: the soft end of a word."""
LATE_PAUSES = ((0.8, 0.1), (0.6, 0.2))
"""(share of the longest utterance, seconds of silence): from that age on such a pause ends it. What was said before it cannot be
taken back, so a call does not wait for a better one."""
HELD_SHARE, HELD_SAMPLES = 0.1, SAMPLE_RATE
"""The last tenth of the longest utterance, at most a second: not handed out before it is known where to cut. Nobody has been told
a word of it, so the best place in it can still be chosen."""
MARGIN_SHARE = 0.3
"""Of what is held back, the end in which the quietest place is not looked for: the next utterance must not begin with a scrap."""


class Begin(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An utterance begins; its audio follows as ``Speech``."""

    utterance: int
    start_sample: int
    emitted: str = ""
    announced: bool = False
    """An earlier generation has told the client."""


@dataclass(frozen=True, slots=True)
class Speech:
    """Audio of the open utterance, float32 mono at 16 kHz, following what came before without a gap."""

    utterance: int
    audio: Audio


class Pause(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """All audio of the utterance has been handed out, should its speech have ended. ``Speech`` may follow."""

    utterance: int


class End(msgspec.Struct, frozen=True, array_like=True, tag=True):
    utterance: int
    end_sample: int
    """Where speech ended."""
    cause: str
    speech: tuple[tuple[int, int], ...]
    """Regions of speech, samples of the stream."""
    spoken: bool
    """Enough speech to be worth a decode."""
    announced: bool = False
    through_sample: int = -1
    """Where the audio ends that was handed out of it."""


Action = Begin | Speech | Pause | End


@dataclass(slots=True)
class _Utterance:
    number: int
    start: int
    fed: int
    """Everything before this sample has been handed out."""
    last_speech: int
    """End of the last speech frame."""
    announced_end: int = -1
    announced_through: int = -1
    """Its audio, tail included, was handed out up to here; what follows may be the next one's."""
    announced_cause: str = ""
    frames: int = 0
    """Frames of speech."""
    paused: bool = False
    """The pause that it is in has been told."""
    regions: list[list[int]] = field(default_factory=list)
    speech_due: int = 0
    """Of a resumed one: its speech has begun by this sample; what comes before it is pre-roll and no silence that ends it."""


class Endpointer:
    """One stream. ``push`` takes frames in order; positions are samples of the stream at 16 kHz."""

    def __init__(
        self,
        rules: Endpointing,
        max_utterance_s: float,
        base_sample: int = 0,
        next_utterance: int = 0,
        resumed: Iterable[OpenUtterance] = (),
        floor_sample: int = 0,
    ) -> None:
        self.rules = rules
        self.position = base_sample
        """End of the last frame pushed."""
        self._max = int(max_utterance_s * SAMPLE_RATE)
        self._held = min(int(HELD_SHARE * self._max), HELD_SAMPLES)
        self._next = next_utterance
        self._resumed = collections.deque(resumed)
        self._kept: collections.deque[Audio] = collections.deque()
        self._kept_start = base_sample
        self._floor = max(base_sample, floor_sample)
        """No utterance begins before this sample: it belongs to an earlier one, or has been cleared."""
        self._window: collections.deque[tuple[int, bool]] = collections.deque(maxlen=START_WINDOW)
        self._open: _Utterance | None = None

    @property
    def open(self) -> bool:
        return self._open is not None

    @property
    def unfinished(self) -> bool:
        """An utterance is open, or one that was when an earlier generation died has not been gone on with."""
        return self._open is not None or bool(self._resumed)

    @property
    def awaited_sample(self) -> int:
        """Where the audio ends of an utterance whose end an earlier generation has announced; -1 if there is none."""
        if self._open is not None:
            end = self._open.announced_end
            return self._tail(self._open, end) if end >= 0 else -1
        if self._resumed and (known := self._resumed[0]).end_sample >= 0:
            return max(known.end_sample, known.through_sample)
        return -1

    @property
    def needed_sample(self) -> int:
        """The oldest sample that a resume would need, open utterance and pre-roll included."""
        return self._open.start if self._open else max(min(self._floor, self.position), self._kept_start)

    def push(self, frame: Audio, probability: float, *, last: bool = False) -> list[Action]:
        """One frame, shape ``(512,)``, and what follows from it. ``last``: ``finish`` follows, and the frame may be shorter; so
        it ends nothing that was not announced."""
        self._kept.append(frame)
        self.position += len(frame)
        actions = self._resume()
        if self._open is None:
            return actions + self._wait_for_speech(probability)
        return actions + self._listen(self._open, probability, last)

    def finish(self, cause: str) -> list[Action]:
        """End here what is open: the caller asked for it, or the stream is over."""
        actions = self._resume()
        utterance = self._open
        if utterance is None:
            return actions
        if utterance.announced_end >= 0:
            return actions + self._close(utterance, utterance.announced_end, utterance.announced_cause)
        return actions + self._close(utterance, utterance.last_speech, cause)

    def clear(self) -> int:
        """Forget the open utterance and all audio so far; returns the utterance's number, -1 if there was none."""
        number = self._open.number if self._open else -1
        self._open = None
        self._resumed.clear()
        self._window.clear()
        self._kept.clear()
        self._floor = self._kept_start = self.position
        return number

    # ------------------------------------------------------------ between utterances

    def _resume(self) -> list[Action]:
        """Go on with an utterance of an earlier generation, unannounced."""
        if self._open is not None or not self._resumed:
            return []
        known = self._resumed.popleft()
        start = max(known.start_sample, self._kept_start)
        self._open = _Utterance(known.utterance, start, start, start, known.end_sample)
        self._open.announced_through, self._open.announced_cause = known.through_sample, known.cause
        self._open.regions.append([start, start])
        self._open.speech_due = start + self._preroll + START_WINDOW * FRAME
        self._next = max(self._next, known.utterance + 1)
        return [Begin(known.utterance, start, known.emitted, announced=True)]

    def _wait_for_speech(self, probability: float) -> list[Action]:
        speech = probability >= self.rules.threshold and self.position > self._floor
        self._window.append((self.position - FRAME, speech))
        spoken = [start for start, is_speech in self._window if is_speech]
        if not speech or len(spoken) < START_FRAMES:
            self._trim(self.position - self._preroll - START_WINDOW * FRAME)
            return []
        start = max(self._floor, self._kept_start, spoken[0] - self._preroll)
        self._open = utterance = _Utterance(self._next, start, start, self.position, frames=len(spoken))
        utterance.regions.append([spoken[0], self.position])
        self._next += 1
        self._window.clear()
        return [Begin(utterance.number, start), *self._feed(utterance, self.position)]

    @property
    def _preroll(self) -> int:
        return self.rules.prefix_ms * SAMPLE_RATE // 1000

    # ------------------------------------------------------------ in an utterance

    def _listen(self, utterance: _Utterance, probability: float, last: bool) -> list[Action]:
        if utterance.announced_end >= 0:
            return self._towards_announced_end(utterance)
        in_speech = utterance.last_speech >= self.position - FRAME
        low = self.rules.threshold - HYSTERESIS
        if probability >= self.rules.threshold or (in_speech and probability >= low):
            self._speech(utterance)
            actions: list[Action] = self._feed(utterance, min(self.position, self._held_from(utterance)))
        else:
            tail = utterance.last_speech + TAIL_SAMPLES
            # Not frame by frame: an engine that began to hear half of the tail would be busy when the pause is told, and the
            # final would wait for both.
            actions = self._feed(utterance, min(tail, self._held_from(utterance))) if self.position >= tail else []
            if self.position >= tail and not utterance.paused and utterance.frames >= MIN_SPEECH_FRAMES:
                utterance.paused = True
                actions.append(Pause(utterance.number))
        return actions if last else actions + self._decide(utterance)

    def _decide(self, utterance: _Utterance) -> list[Action]:
        """Whether it ends here."""
        silence = self.position - (utterance.last_speech if utterance.frames else utterance.speech_due)
        if self.rules.automatic and silence >= max(1, self.rules.silence_ms * SAMPLE_RATE // 1000):
            return self._close(utterance, utterance.last_speech, "silence")
        if silence >= self._pause_enough(utterance):
            return self._close(utterance, utterance.last_speech, "length")
        if self.position - utterance.start >= self._max:
            return self._cut(utterance)
        return []

    def _held_from(self, utterance: _Utterance) -> int:
        return utterance.start + self._max - self._held

    def _speech(self, utterance: _Utterance) -> None:
        utterance.frames += 1
        utterance.paused = False
        begin = self.position - FRAME
        if utterance.regions and utterance.regions[-1][1] >= begin:
            utterance.regions[-1][1] = self.position
        else:
            utterance.regions.append([begin, self.position])
        utterance.last_speech = self.position

    def _towards_announced_end(self, utterance: _Utterance) -> list[Action]:
        """The client knows where it ended; all of its audio is awaited, then it ends there."""
        end = utterance.announced_end
        utterance.frames = MIN_SPEECH_FRAMES
        utterance.regions[0][1] = end
        tail = self._tail(utterance, end)
        actions: list[Action] = self._feed(utterance, min(self.position, tail))
        if self.position >= tail:
            actions += self._close(utterance, end, utterance.announced_cause)
        return actions

    @staticmethod
    def _tail(utterance: _Utterance, end: int) -> int:
        return max(end, utterance.announced_through) if utterance.announced_through >= 0 else end + TAIL_SAMPLES

    def _pause_enough(self, utterance: _Utterance) -> int:
        """Samples of silence that end the utterance at its present age: the older, the shorter a pause will do."""
        age = (self.position - utterance.start) / self._max
        for share, pause_s in LATE_PAUSES:
            if age >= share:
                return int(pause_s * SAMPLE_RATE)
        return self._max

    def _feed(self, utterance: _Utterance, until: int) -> list[Action]:
        """Audio up to a position, as far as it has not been handed out."""
        if until <= utterance.fed:
            return []
        audio = self._slice(utterance.fed, until)
        utterance.fed = until
        return [Speech(utterance.number, audio)]

    def _cut(self, utterance: _Utterance) -> list[Action]:
        """At the limit: end it in the best pause of what is held back, or where that is quietest; the next one takes the rest."""
        earliest = max(utterance.fed, self._held_from(utterance))
        spoken = [(begin, end) for begin, end in utterance.regions]
        at = best_pause(spoken, self.position, earliest, self._held)
        if at is None:
            at = earliest + quietest(self._slice(earliest, self.position - int(MARGIN_SHARE * self._held)))
        before = max((min(end, at) for begin, end in spoken if begin < at), default=at)
        rest = [[max(begin, at), end] for begin, end in spoken if end > at]
        return self._close(utterance, before, "length", through=at) + (self._go_on(at, rest) if rest else [])

    def _go_on(self, start: int, regions: list[list[int]]) -> list[Action]:
        """Behind a cut in speech the next utterance has begun already, whatever comes now."""
        frames = START_FRAMES + sum(end - begin for begin, end in regions) // FRAME
        self._open = utterance = _Utterance(self._next, start, start, regions[-1][1], frames=frames, regions=regions)
        self._next += 1
        return [Begin(utterance.number, start), *self._feed(utterance, utterance.last_speech)]

    def _close(self, utterance: _Utterance, end: int, cause: str, through: int = -1) -> list[Action]:
        """``through``: where its audio ends, if not a little behind its speech."""
        tail = min(self.position, max(utterance.fed, through if through >= 0 else self._tail(utterance, end)))
        actions: list[Action] = list(self._feed(utterance, tail))
        regions = tuple((begin, min(stop, end)) for begin, stop in utterance.regions if begin < min(stop, end))
        spoken = utterance.frames >= MIN_SPEECH_FRAMES
        announced = utterance.announced_end >= 0
        actions.append(End(utterance.number, end, cause, regions, spoken, announced, max(end, utterance.fed)))
        self._open = None
        self._window.clear()
        self._floor = max(self._floor, end, utterance.fed)
        self._trim(self._floor)
        return actions

    # ------------------------------------------------------------ kept audio

    def _trim(self, keep_from: int) -> None:
        while self._kept and self._kept_start + len(self._kept[0]) <= keep_from:
            self._kept_start += len(self._kept.popleft())

    def _slice(self, start: int, end: int) -> Audio:
        """Samples [start, end) of the kept audio, copied. Looked for from the end: it is mostly what has just come."""
        parts: list[Audio] = []
        at = self.position
        for chunk in reversed(self._kept):
            at -= len(chunk)
            if at < end:
                parts.append(chunk[max(0, start - at) : end - at])
            if at <= start:
                break
        return np.concatenate(parts[::-1]) if parts else np.zeros(0, np.float32)
