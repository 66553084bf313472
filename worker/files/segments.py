"""Cuts a recording into segments: in silence, never in a word, each short enough for the engine.

**Resumable.** What becomes of a segment depends on the audio from the cut before it, and on nothing else: at every cut the
VAD begins anew and its frames are counted from there. So a run that starts at the ``end_sample`` of any segment gives the
same segments, bit for bit, as the run that was not interrupted. The price is that audio behind a cut is looked at twice.

**Where it cuts.** Pauses and speech alternate (hysteresis over Silero's probabilities). A segment takes in speech until

1. a pause of ``end_pause_s``, or of ``aim_pause_s`` once it is ``aim_s`` long: cut in the middle of the pause;
2. or its length reaches ``max_s``: cut in the middle of the longest pause of its last 70 % (pauses from ``good_pause_s`` on
   count as equal, the latest wins), or, where nobody pauses there, in the quietest 100 ms of its last 40 %.

Long silence makes no segment; it is dropped as it is known, so memory is bounded by ``max_s``.

**Why these numbers.** Word errors of Moonshine tiny-en behind this module with ``max_s`` 10, over 14 recordings made of the
clips in ``tests/data``: the clips alone, joined with 0.15 to 1.5 s of silence, and joined with every pause taken out (1012
words; 11 of the errors are one word that the engine misses in the untouched clip too, and a difference of two is noise):

====================================================  ======  ==================================
end pause 1.0 s, aim 6 s, pauses of the last 40 %         30  fragments: "As not." for "Ask not"
end pause 1.0 s, aim 6 s, pauses of the last 70 %         24
end pause 1.0 s, aim 4 s, pauses of the last 70 %         24
end pause 1.2 s, aim 8 s, last 70 % (**default**)         21  segments of 6.3 s in the mean
end pause 1.5 s, aim 8 s, last 70 %                       20
end pause 2.0 s, aim 8 s, last 70 %                       22
``SegmentPolicy.up_to(30)``                               22  segments of 15.8 s in the mean
====================================================  ======  ==================================

Cuts forced into natural speech (``max_s`` from 2.5 to 5.5 s, ten values, 700 words) cost 48 errors with a window of 100 ms, 58
with 50 ms and 59 with 200 ms; 51 where the last 50 % are searched instead of 40 %. Of snippets of human speech 250 ms long,
VAD hears less than 250 ms in 47 % and less than 160 ms in 8 %, so ``min_speech_s`` is 0.16 for the sake of "no" and "yes";
noise, hum, clicks and tones do not reach it (``tests/unit/test_segments.py``). VAD hears quiet speech (-40 dBFS) up to 130 ms
late, hence 300 ms before it. Below about -60 dBFS it misses whole phrases.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shared.pcm import SAMPLE_RATE, samples
from worker.audio.quiet import best_pause, quietest
from worker.audio.samples import Audio
from worker.audio.vad import FRAME, FRAME_S, SileroVad, VadState

BLOCK_FRAMES = 32
"""Frames that the VAD takes in one call, counted from the cut, so that a resumed run makes the same calls."""

QUIET_MARGIN_S = 0.3
"""The quietest place is not looked for so near to the limit: what is left over must not be a scrap of a word."""

NEAR_S = 0.6
"""A segment whose speech begins within this time of the cut begins at the cut. Begun anew in mid-speech, the VAD needs more than
0.3 s to notice in 6 % of 360 places, and 0.58 s at most."""

SILENCE_S = 10.0
"""Silence after which the point of resumption moves on without a segment."""


@dataclass(frozen=True, slots=True)
class SegmentPolicy:
    """See the module for what the numbers do and where they come from. All times in seconds."""

    max_s: float = 10.0
    """No segment is longer."""
    aim_s: float = 8.0
    """From this length on the next short pause ends the segment."""
    end_pause_s: float = 1.2
    aim_pause_s: float = 0.25
    min_pause_s: float = 0.1
    """What is shorter is no pause."""
    good_pause_s: float = 0.4
    min_speech_s: float = 0.16
    """A segment without an uninterrupted stretch of speech of this length is noise, and dropped."""
    pad_before_s: float = 0.3
    pad_after_s: float = 0.2
    threshold: float = 0.5
    """Probability at which speech begins."""
    negative_threshold: float = 0.35
    """Probability below which speech ends."""
    pause_search: float = 0.7
    """Share of ``max_s`` before the limit in which a pause is looked for."""
    quiet_search: float = 0.4
    """Share of ``max_s`` before the limit in which the quietest place is looked for."""

    def __post_init__(self) -> None:
        if self.max_s < 2.0 or not 0 < self.aim_s <= self.max_s:
            raise ValueError(f"A segment of at most {self.max_s} s (at least 2 s) cannot aim at {self.aim_s} s.")
        if not 0 < self.negative_threshold <= self.threshold < 1:
            raise ValueError("Thresholds must be probabilities, the lower one not above the other.")
        if not 0.2 <= self.quiet_search <= self.pause_search <= 0.8:
            raise ValueError("The places to cut are looked for in the last 20 % to 80 % of a segment.")

    @classmethod
    def up_to(cls, max_s: float) -> SegmentPolicy:
        """For an engine that takes ``max_s`` seconds at once: aims at 80 % of it, and bridges longer pauses where there is
        more room than ten seconds, up to 2 s."""
        return cls(max_s=max_s, aim_s=0.8 * max_s, end_pause_s=min(2.0, max(1.2, 0.08 * max_s)))


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of speech. Positions are samples at 16 kHz from the start of the recording."""

    index: int
    audio: Audio
    """From ``start_sample`` to ``speech_end_sample``, a copy."""
    start_sample: int
    speech_end_sample: int
    end_sample: int
    """The cut: the next segment starts here or later, and a run may be resumed here."""
    speech: tuple[tuple[int, int], ...]
    """Where in it somebody speaks, start and end, without padding; never empty."""


Region = tuple[int, int]
"""Speech from one frame up to another, counted from the cut."""


class _SpeechTracker:
    """Hysteresis: speech begins at a high probability and ends where it stays low for a while."""

    def __init__(self, policy: SegmentPolicy) -> None:
        self._high, self._low = policy.threshold, policy.negative_threshold
        self._min_pause = max(1, round(policy.min_pause_s / FRAME_S))
        self._begun: int | None = None
        self._regions: list[Region] = []
        self.frames = 0
        self.quiet = 0
        """Frames of low probability up to now, without one that is not."""

    def push(self, probability: float) -> None:
        self.frames += 1
        self.quiet = self.quiet + 1 if probability < self._low else 0
        if self._begun is None:
            if probability >= self._high:
                self._begun = self.frames - 1
        elif self.quiet >= self._min_pause:
            self._regions.append((self._begun, self.frames - self.quiet))
            self._begun = None

    @property
    def pausing(self) -> bool:
        return self._begun is None

    @property
    def first(self) -> int | None:
        """Frame where speech begins."""
        return self._regions[0][0] if self._regions else self._begun

    @property
    def last(self) -> int:
        """Frame where the last finished region ends."""
        return self._regions[-1][1]

    def regions(self) -> list[Region]:
        """All of them, the one that is still open up to its last frame that was not quiet."""
        if self._begun is None:
            return list(self._regions)
        return [*self._regions, (self._begun, self.frames - self.quiet)]


@dataclass(frozen=True, slots=True)
class _Cut:
    at: int
    """Samples from the last cut."""
    regions: list[Region]


class Segmenter:
    """Audio in, segments out. ``base_sample`` and ``next_index`` are where an earlier run stopped: the ``end_sample`` of its
    last segment and the index after it. Not thread-safe."""

    def __init__(self, vad: SileroVad, policy: SegmentPolicy, base_sample: int = 0, next_index: int = 0) -> None:
        self._vad = vad
        self._policy = policy
        self._index = next_index
        self._audio: Audio = np.zeros(0, np.float32)
        self._begin(base_sample, self._audio)

    @property
    def resume_sample(self) -> int:
        """Everything before it is in a segment, or silent. A new run may begin here."""
        return self._cut

    @property
    def buffered(self) -> int:
        """Samples held."""
        return len(self._audio)

    def push(self, audio: Audio) -> list[Segment]:
        """Take the next samples, any number; returns the segments that they complete."""
        self._audio = np.concatenate((self._audio, audio))
        return self._advance(final=False)

    def flush(self) -> list[Segment]:
        """The recording has ended: what is left. The end of the last segment is the end of the recording."""
        segments = self._advance(final=True)
        end = self._known + len(self._audio)
        segments += self._close(_Cut(end, self._speech.regions()))
        return segments

    # ------------------------------------------------------------ from cut to cut

    def _begin(self, cut: int, audio: Audio) -> None:
        self._cut = cut
        self._audio = audio
        self._known = 0
        """Samples behind the cut that were silent and are gone from ``_audio``."""
        self._state = VadState()
        self._speech = _SpeechTracker(self._policy)

    def _advance(self, *, final: bool) -> list[Segment]:
        segments: list[Segment] = []
        while (frames := self._frames(final)) is not None:
            cut = self._look(frames)
            if cut is None:
                self._forget()
            else:
                segments += self._close(cut)
        return segments

    def _frames(self, final: bool) -> Audio | None:
        """The next block, shape ``(≤ 32, 512)``; only the end of the recording is filled up with silence."""
        done = self._speech.frames * FRAME - self._known
        block = self._audio[done : done + BLOCK_FRAMES * FRAME]
        if not len(block) or (len(block) < BLOCK_FRAMES * FRAME and not final):
            return None
        if missing := -len(block) % FRAME:
            block = np.concatenate((block, np.zeros(missing, np.float32)))
        return block.reshape(-1, FRAME)

    def _look(self, frames: Audio) -> _Cut | None:
        for probability in self._vad.sequence(self._state, frames):
            self._speech.push(float(probability))
            cut = self._decide()
            if cut is not None:
                return cut
        return None

    def _close(self, cut: _Cut) -> list[Segment]:
        at = min(cut.at, self._known + len(self._audio))
        segment = self._segment(cut.regions, at)
        self._begin(self._cut + at, self._audio[at - self._known :].copy())
        return [] if segment is None else [segment]

    def _segment(self, regions: list[Region], at: int) -> Segment | None:
        policy = self._policy
        if max((end - begin for begin, end in regions), default=0) < round(policy.min_speech_s / FRAME_S):
            return None
        start = max(self._start(regions[0][0]), self._known)
        end = min(regions[-1][1] * FRAME + samples(policy.pad_after_s), at)
        segment = Segment(
            index=self._index,
            audio=self._audio[start - self._known : end - self._known].copy(),
            start_sample=self._cut + start,
            speech_end_sample=self._cut + end,
            end_sample=self._cut + at,
            speech=tuple((self._cut + first * FRAME, self._cut + min(last * FRAME, end)) for first, last in regions),
        )
        self._index += 1
        return segment

    def _forget(self) -> None:
        """Silence before speech is not kept, but for what may become padding."""
        if self._speech.first is None:
            keep = self._speech.frames * FRAME - SAMPLE_RATE
            if keep > self._known:
                self._audio = self._audio[keep - self._known :].copy()
                self._known = keep

    # ------------------------------------------------------------ where to cut

    def _start(self, first: int) -> int:
        """Sample at which a segment starts whose speech begins at frame ``first``."""
        begin = first * FRAME
        return 0 if begin < samples(NEAR_S) else begin - samples(self._policy.pad_before_s)

    def _decide(self) -> _Cut | None:
        """After every frame: is this the end of the segment? Looks at nothing behind the frame."""
        speech, policy = self._speech, self._policy
        now = speech.frames * FRAME
        if speech.first is None:
            silent = now >= samples(SILENCE_S) and speech.quiet * FRAME >= samples(NEAR_S)
            return _Cut(now - samples(NEAR_S), []) if silent else None
        start = self._start(speech.first)
        if speech.pausing:
            end = speech.last * FRAME
            enough = policy.end_pause_s if end - start < samples(policy.aim_s) else policy.aim_pause_s
            if now - end >= samples(enough):
                return _Cut((end + now) // 2, speech.regions())
        if now + FRAME - start > samples(policy.max_s):
            return self._forced(start, now)
        return None

    def _forced(self, start: int, now: int) -> _Cut:
        regions = self._speech.regions()
        limit = samples(self._policy.max_s)
        spoken = [(begin * FRAME, end * FRAME) for begin, end in regions]
        good = round(self._policy.good_pause_s / FRAME_S) * FRAME
        at = best_pause(spoken, now, start + round((1 - self._policy.pause_search) * limit), good)
        if at is None:
            at = self._quietest(start + round((1 - self._policy.quiet_search) * limit), now - samples(QUIET_MARGIN_S))
        return _Cut(at, [(begin, min(end, -(-at // FRAME))) for begin, end in regions if begin * FRAME < at])

    def _quietest(self, start: int, end: int) -> int:
        """Middle of the quietest place between two samples."""
        return start + quietest(self._audio[start - self._known : end - self._known])
