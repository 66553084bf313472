"""An engine for tests: its text is a function of the audio, and it misbehaves when told to.

It hears in one of two ways. *Tones*: the words that ``scripted_audio`` put into the sound, letter by letter (a word that lost
sound is U+FFFD), for tests that see every sample. *Clock*: any other audio, real speech behind the VAD too, gives one word for
each multiple of ``word_ms`` in it, named after its place in the recording in milliseconds ("s000320"). Each such word
belongs to one sample (320 ms is sample 5120), so when a recording is cut into sequences, every word comes once: a word that is
missing or doubled is audio that is. Silence gives no text.

It works like the large engines: some words a step, several rows a step, a state that ``suspend`` drops, a prefix that it
goes on after, a guard in the loop that ends run-aways. Options stand in the model's name::

    NAPSCRIBE_MODEL=scripted:step_ms=20,batch=4,crash_at=3
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

from shared.errors import EngineFailed, ModelLoadFailed, NapscribeError, OutOfMemory
from shared.languages import NAMES
from shared.messages import Capabilities, Word
from shared.pcm import SAMPLE_RATE, samples, seconds
from worker.audio.samples import Audio
from worker.engines.base import (
    BufferedSequence,
    EngineBroken,
    EngineEvent,
    EngineSequence,
    Final,
    Hypothesis,
    Report,
    SequenceFailed,
    SequenceRequest,
)
from worker.engines.tones import Heard, begins_with_tones, hear, scripted_audio
from worker.text.repetition import RunDetector

__all__ = ["ScriptedEngine", "ScriptedOptions", "ScriptedSequence", "clock_word", "scripted_audio"]

_TOKEN_LOGPROB = -0.125
_KEPT_COPIES = 2
"""What is left of a run-away: a reader of hypotheses may have been shown two copies before the third looked like a run."""
_RUNAWAYS: dict[str, tuple[str, ...]] = {
    "char": ("a",),
    "word": (" the",),
    "pattern": (" thank", " you", " very", " much."),
}


@dataclass(frozen=True, slots=True)
class ScriptedOptions:
    """What the engine can do, what it costs, and how it misbehaves. Steps are counted from 1, over all rows; 0 is never."""

    batch: int = 4
    """Rows a step."""
    live: int = 100
    words: int = 4
    """Words that a row gains in a step."""
    word_ms: int = 320
    cadence_ms: int = 320
    """New audio between two hypotheses."""
    step_ms: float = 0.0
    """How long a step takes (the engine sleeps)."""
    load_s: float = 0.0
    prefix: bool = True
    """``accepts_prefix``"""
    streams: bool = False
    """``streams_natively``"""
    times: str = "exact"
    """``word_times``"""
    segment_s: float = 30.0
    max_step_s: float = 10.0
    device: str = "cpu"
    """Where it says it is: beside another device than the CPU, files and calls are heard in processes of their own."""
    unstable: int = 0
    """Words at the end of a hypothesis that come out wrong while more audio may follow ("s000320?"), as models revise theirs."""
    hears: str = "auto"
    """``tones``, ``clock``, or ``auto``: tones if the first sound is a start tone."""
    load_fails: bool = False
    load_breaks: bool = False
    """In a way that nobody has foreseen."""
    crash_at: int = 0
    """The process kills itself in this step, as a fault in native code would."""
    stall_at: int = 0
    """This step never ends."""
    fail_at: int = 0
    """This step raises EngineFailed."""
    oom_at: int = 0
    """This step raises OutOfMemory."""
    break_at: int = 0
    """This step raises EngineBroken."""
    poison: str = ""
    """A row whose prompt contains this crashes the process."""
    reject: str = ""
    """A row whose prompt contains this fails alone."""
    once: str = ""
    """Path of a file: misbehaviour creates it, and there is none while it exists. So only the first worker misbehaves."""
    runaway: str = ""
    """``char``, ``word``, ``pattern`` or ``junk``: what follows the words of every sequence until the guard or the budget."""
    budget: int = 400
    """Tokens of a run-away."""
    guard: bool = True
    """End run-aways that repeat themselves, as an engine shall; without it their text comes out."""

    def __post_init__(self) -> None:
        choices = {
            "hears": ("auto", "tones", "clock"),
            "times": ("exact", "none"),
            "runaway": ("", "junk", *_RUNAWAYS),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is one of {', '.join(filter(None, allowed))}.")
        if min(self.batch, self.live, self.words, self.word_ms, self.cadence_ms) < 1:
            raise ValueError("batch, live, words, word_ms and cadence_ms are at least 1.")

    @classmethod
    def parse(cls, spec: str) -> ScriptedOptions:
        """From ``name=value,name=value``; truth values are 1 and 0. Raises ValueError for what it does not know."""
        kinds = {name: type(value) for name, value in asdict(cls()).items()}
        values: dict[str, int | float | str | bool] = {}
        for part in filter(None, spec.split(",")):
            name, _, value = part.partition("=")
            if name not in kinds:
                raise ValueError(f"{name!r} is no option of the scripted engine; there are {', '.join(kinds)}.")
            kind = kinds[name]
            values[name] = bool(int(value)) if kind is bool else kind(value)
        return cls(**values)  # type: ignore[arg-type]  # each has the type of its default


@dataclass(slots=True)
class ScriptedSequence(BufferedSequence):
    options: ScriptedOptions = field(default_factory=ScriptedOptions)
    tokens: list[str] = field(default_factory=list)
    """What the audio up to ``decoded`` says: the state that a slot would hold."""
    places: list[tuple[int, int]] = field(default_factory=list)
    """Samples of each token that was heard."""
    complete: bool = False
    """Whether ``tokens`` are all there will be."""
    said: int = 0
    """Tokens that are part of the text by now."""
    frozen: str = ""
    """What was said and stays."""
    detector: RunDetector = field(default_factory=RunDetector)
    closed: bool = False

    @property
    def ready(self) -> bool:
        if self.closed or self.finished:
            return not self.closed
        new = self.length - self.decoded
        wanted = 1 if self.paused else samples(self.options.cadence_ms / 1000)
        return self.request.partials and (self.said < len(self.tokens) or new >= wanted)

    @property
    def prefix(self) -> str:
        return self.frozen or (self.request.prefix if self.options.prefix else "")

    @property
    def kept(self) -> int:
        """Tokens that the prefix stands for."""
        return len(self.prefix.split())

    @property
    def text(self) -> str:
        return self._behind_prefix(self.tokens[self.kept : self.said])

    @property
    def hypothesis(self) -> str:
        certain = self.said if self.finished else max(self.kept, self.said - self.options.unstable)
        guesses = [f"{token}?" for token in self.tokens[certain : self.said]]
        return self._behind_prefix([*self.tokens[self.kept : certain], *guesses])

    def _behind_prefix(self, tokens: Sequence[str]) -> str:
        new = "".join(tokens)
        return self.prefix + (new if self.prefix[-1:].strip() else new.lstrip(" "))

    def forget(self) -> None:
        """Give the slot back; the next step hears everything again."""
        self.tokens.clear()
        self.places.clear()
        self.said = self.decoded = 0
        self.complete = False
        self.detector = RunDetector()


class ScriptedEngine:
    """See the module."""

    def __init__(self, options: ScriptedOptions | None = None) -> None:
        self._options = options or ScriptedOptions()
        self._steps = 0

    @property
    def device_memory(self) -> int:
        return 0

    def load(self, report: Report) -> Capabilities:
        """Raises ModelLoadFailed if told to."""
        for tenth in range(10):
            report("loading", tenth / 10)
            time.sleep(self._options.load_s / 10)
        if self._options.load_breaks:
            raise ZeroDivisionError("told to break")
        if self._options.load_fails:
            raise ModelLoadFailed("The scripted engine was told not to load.", hint="Leave load_fails out.")
        report("warming", 1.0)
        return Capabilities(
            engine="scripted",
            model="scripted",
            languages=tuple(NAMES),
            max_live=self._options.live,
            max_batch=self._options.batch,
            accepts_prefix=self._options.prefix,
            streams_natively=self._options.streams,
            translates=False,
            word_times=self._options.times,
            max_segment_s=self._options.segment_s,
            max_step_s=self._options.max_step_s,
            device=self._options.device,
        )

    def open(self, request: SequenceRequest) -> ScriptedSequence:
        return ScriptedSequence(request, options=self._options)

    def feed(self, sequence: EngineSequence, audio: Audio) -> None:
        row = _own(sequence)
        if row.closed or row.finished:
            raise ValueError("Audio came after the end of its sequence.")
        row.append(audio)

    def finish(self, sequence: EngineSequence) -> None:
        _own(sequence).finished = True

    def freeze(self, sequence: EngineSequence, text: str) -> None:
        if self._options.prefix:
            _own(sequence).frozen = text

    def pause(self, sequence: EngineSequence) -> None:
        _own(sequence).paused = True

    def suspend(self, sequence: EngineSequence) -> None:
        _own(sequence).forget()

    def cancel(self, sequence: EngineSequence) -> None:
        _close(_own(sequence))

    def step(self, rows: Sequence[EngineSequence], deadline_ns: int) -> list[EngineEvent]:
        """A few words for each of the first ``batch`` rows that are ready. Raises what the options say."""
        taken = [row for row in map(_own, rows) if row.ready][: self._options.batch]
        if not taken:
            return []
        self._steps += 1
        time.sleep(self._options.step_ms / 1000)
        self._misbehave(taken)
        return [event for row in taken if (event := self._advance(row)) is not None]

    def close(self) -> None:
        """Nothing is held."""

    # ------------------------------------------------------------ bad behaviour

    def _misbehave(self, taken: Sequence[ScriptedSequence]) -> None:
        options, step = self._options, self._steps
        poisoned = options.poison and any(options.poison in row.request.prompt for row in taken)
        at = (options.crash_at, options.stall_at, options.fail_at, options.oom_at, options.break_at)
        if not poisoned and step not in at:
            return
        if options.once:
            try:
                Path(options.once).touch(exist_ok=False)
            except FileExistsError:
                return
        if poisoned or step == options.crash_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == options.stall_at:
            threading.Event().wait()
        if step == options.oom_at:
            raise OutOfMemory("The scripted engine was told to run out of memory.")
        if step == options.break_at:
            raise EngineBroken("The scripted engine was told to break.")
        raise EngineFailed("The scripted engine was told to fail.")

    # ------------------------------------------------------------ one row

    def _advance(self, row: ScriptedSequence) -> EngineEvent | None:
        if self._options.reject and self._options.reject in row.request.prompt:
            _close(row)
            return SequenceFailed(row, EngineFailed("The scripted engine was told to reject this prompt."))
        try:
            if row.decoded < row.length or row.finished > row.complete:
                _listen(row)
        except NapscribeError as error:
            _close(row)
            return SequenceFailed(row, error)
        reason = self._speak(row)
        if reason:
            final = _final(row, reason)
            _close(row)
            return final
        return Hypothesis(row, row.hypothesis) if row.request.partials else None

    def _speak(self, row: ScriptedSequence) -> str:
        """Say some more words; why the sequence is over, or nothing."""
        row.said = max(row.said, min(row.kept, len(row.tokens)))
        for token in row.tokens[row.said : row.said + self._options.words]:
            row.said += 1
            run = row.detector.push(token)
            if self._options.guard and run is not None and run.runaway:
                row.said = max(row.kept, row.said - run.length + _KEPT_COPIES * run.period)
                return "repetition"
        if not row.finished or row.said < len(row.tokens):
            return ""
        return "length" if self._options.runaway else "stop"


def clock_word(sample: int) -> str:
    """The word of a multiple of ``word_ms``, as a sample of the recording."""
    return f"s{sample * 1000 // SAMPLE_RATE:06d}"


def _listen(row: ScriptedSequence) -> None:
    """Tokens of all audio so far. What was heard before is heard again."""
    heard = _heard(row)
    row.tokens = [f" {word.text}" for word in heard]
    row.places = [(word.start, word.end) for word in heard]
    row.decoded, row.complete = row.length, row.finished
    if row.finished and heard:
        row.tokens += _runaway(row.options)


def _heard(row: ScriptedSequence) -> list[Heard]:
    audio, options = row.audio(), row.options
    tones = begins_with_tones(audio, finished=row.finished)
    if options.hears == "tones" or (options.hears == "auto" and tones):
        return hear(audio, finished=row.finished)
    if options.hears == "auto" and tones is None:  # nothing but silence yet
        return []
    return _clock(row.request.base_sample, row.length, samples(options.word_ms / 1000))


def _clock(base: int, length: int, grid: int) -> list[Heard]:
    """A word for each multiple of ``grid`` in ``length`` samples from ``base``; it lasts to the next, or to the end."""
    first = -(-base // grid) * grid
    points = [*range(first, base + length, grid), base + length]
    return [Heard(clock_word(point), point - base, after - base) for point, after in pairwise(points)]


def _runaway(options: ScriptedOptions) -> list[str]:
    if options.runaway == "junk":
        return [f" {number * 2654435761 % 2**32:08x}" for number in range(1, options.budget + 1)]
    pattern = _RUNAWAYS.get(options.runaway, ())
    return list(pattern * options.budget)[: options.budget]


def _final(row: ScriptedSequence, reason: str) -> Final:
    request, options = row.request, row.options
    exact = request.words and options.times == "exact"
    said = zip(row.tokens[: row.said], row.places, strict=False)
    words = tuple(Word(token.strip(), seconds(start), seconds(end)) for token, (start, end) in said)
    return Final(
        row,
        row.text,
        language=request.language or "en",
        words=words if exact else (),
        avg_logprob=_TOKEN_LOGPROB if row.said else None,
        logprobs=tuple((token, _TOKEN_LOGPROB) for token in row.tokens[: row.said]),
        finish_reason=reason,
    )


def _own(sequence: EngineSequence) -> ScriptedSequence:
    if not isinstance(sequence, ScriptedSequence):
        raise TypeError(f"A sequence of another engine: {type(sequence).__name__}.")
    return sequence


def _close(row: ScriptedSequence) -> None:
    row.forget()
    row.chunks.clear()
    row.closed = True
