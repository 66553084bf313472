"""Run-aways in files, through the real scheduler: heard again in pieces, nothing said is taken back, nobody else waits."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import jiwer
import numpy as np
import pytest
from torch import Tensor

from shared.messages import Delta, Event, Failed, FileDone, FileOptions, Lane, SegmentDone, TranscribeFile
from shared.recorder import Recorder
from tests.torch.running import read_audio
from tests.torch.test_runaways import loops
from tests.torch.test_samples import WAVES, said
from worker.audio.samples import Audio
from worker.engines.base import EngineSequence
from worker.engines.qwen3.engine import Qwen3Engine
from worker.engines.qwen3.sequence import Qwen3Sequence
from worker.files.feeder import Feeder
from worker.files.file_job import FileJob
from worker.files.segments import Segment
from worker.scheduler import Scheduler

pytestmark = pytest.mark.torch

LONG = next(wave for wave in WAVES if wave.stem.startswith("long"))
SHORT = next(wave for wave in WAVES if wave.stem == "flite-awb")
SPOKEN = 9
"""Tokens of its own that the model says before it loses itself."""
LOOPS = ("character", "word", "pattern", "alternating", "never ends")


class Given:
    """In place of the audio thread: all segments are there at once, so that steps can be counted."""

    def __init__(self) -> None:
        self.recordings: dict[str, list[Audio]] = {}

    def add(self, job: FileJob) -> None:
        at = 0
        for index, audio in enumerate(self.recordings[job.id]):
            end = at + len(audio)
            job.pending.append(Segment(index, audio, at, end, end, ((at, end),)))
            at = end
        job.exhausted = True

    def drop(self, job: FileJob) -> None: ...

    def nudge(self) -> None: ...


@dataclass
class Bench:
    """A scheduler of its own over a shared engine."""

    engine: Qwen3Engine
    events: list[Event] = field(default_factory=list)
    given: Given = field(default_factory=Given)

    def __post_init__(self) -> None:
        descriptor = Recorder.create()
        self.scheduler = Scheduler(
            self.engine,
            self.engine._capabilities(),
            1,
            self.events.append,
            cast(Feeder, self.given),
            Recorder(descriptor),
        )
        os.close(descriptor)

    def send(self, name: str, recordings: list[Audio], lane: Lane = Lane.BATCH, **options: Any) -> None:
        self.given.recordings[name] = recordings
        self.scheduler.handle(TranscribeFile(1, name, lane, "", FileOptions(**options)))

    def run(self) -> dict[str, int]:
        """To the end of every job; after how many steps each was done."""
        ends: dict[str, int] = {}
        working = True
        while working:
            working = self.scheduler.turn()
            assert self.scheduler.steps < 3000
            for event in self.events:
                assert not isinstance(event, Failed), event
                if isinstance(event, FileDone):
                    ends.setdefault(event.request_id, self.scheduler.steps)
        return ends

    def segments(self, name: str) -> list[SegmentDone]:
        return [e for e in self.events if isinstance(e, SegmentDone) and e.request_id == name]

    def streamed(self, name: str) -> str:
        """Deltas of the first segment."""
        return "".join(e.text for e in self.events if isinstance(e, Delta) and e.request_id == name and e.index == 0)


@pytest.fixture
def bench(trained_engine: Qwen3Engine) -> Iterator[Bench]:
    yield Bench(trained_engine)
    trained_engine.logits_hook = None


Runs = Callable[[Qwen3Sequence], bool]


def lose_itself(engine: Qwen3Engine, line: list[int], runs: Runs) -> list[str]:
    """The model says SPOKEN tokens of its own, then ``line``, in every sequence that ``runs``. Returns whose tokens they were."""
    begun: list[str] = []

    def hook(logits: Tensor, sequences: Sequence[EngineSequence]) -> Tensor:
        changed = logits.clone()
        for n, sequence in enumerate(sequences):
            assert isinstance(sequence, Qwen3Sequence)
            at = len(sequence._frozen) + len(sequence.tokens) - SPOKEN
            if at >= 0 and runs(sequence):
                begun.append(sequence.request.id)
                changed[n, line[at]] = 1e4
        return changed

    engine.logits_hook = hook
    return begun


@pytest.mark.parametrize("deltas", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["streamed", "whole"])
@pytest.mark.parametrize("name", LOOPS)
def test_a_segment_that_ran_away_is_heard_again_in_two(bench: Bench, name: str, deltas: bool) -> None:
    line, reason = loops(bench.engine._vocabulary)[name]
    sound = read_audio(LONG)
    begun = lose_itself(bench.engine, line, lambda sequence: sequence.samples.length == len(sound))
    bench.send("wild", [sound, read_audio(SHORT)], language="en", deltas=deltas)
    bench.run()
    first, second = bench.segments("wild")
    assert begun
    assert first.finish_reason == reason
    assert (second.text, second.finish_reason) == (said(SHORT), "stop")
    streamed = bench.streamed("wild")
    assert first.text.startswith(streamed)
    assert bool(streamed) == deltas
    # Streamed junk stays (it was shown before it could be known for junk); otherwise all words are there, once.
    wrong = jiwer.process_words(said(LONG), first.text)
    assert wrong.deletions + wrong.substitutions <= 4
    assert wrong.insertions <= 1 + len(streamed.split())
    assert streamed.count(" okay") <= 2
    assert streamed.count(" the old man and sea") <= 2


@pytest.mark.parametrize(
    "name", [name if name in ("word", "never ends") else pytest.param(name, marks=pytest.mark.slow) for name in LOOPS]
)
def test_a_model_that_always_runs_away_ends_and_nobody_waits(bench: Bench, name: str) -> None:
    line, reason = loops(bench.engine._vocabulary)[name]
    long, short = read_audio(LONG), read_audio(SHORT)
    bench.send("alone", [short], language="en")
    alone = bench.run()["alone"]
    lose_itself(bench.engine, line, lambda sequence: sequence.request.id.startswith("wild"))
    before = bench.scheduler.steps
    bench.send("wild", [long], language="en", deltas=True)
    bench.send("other", [short], language="en")
    ends = bench.run()
    assert ends["other"] - before <= alone * 1.1 + 1
    # The segment, its two halves together, and their four quarters together: three budgets at the most.
    assert ends["wild"] - before <= 3 * (24 + 12 * len(long) / 16_000) + 8
    (segment,) = bench.segments("wild")
    assert segment.finish_reason == reason
    assert segment.text.startswith(bench.streamed("wild"))
    if name in ("character", "word", "pattern"):
        assert len(line) > 100 > len(segment.text.split())


@pytest.mark.parametrize("deltas", [True, False], ids=["streamed", "whole"])
def test_what_was_really_said_six_times_is_there_six_times(bench: Bench, deltas: bool) -> None:
    """A chant looks like a run-away; its halves, heard again, end by themselves."""
    bench.send("chant", [np.concatenate([read_audio(SHORT)] * 6)], language="en", deltas=deltas)
    bench.run()
    (segment,) = bench.segments("chant")
    assert segment.text.split() == said(SHORT).split() * 6
    assert segment.finish_reason == "repetition"
    assert segment.text.startswith(bench.streamed("chant"))
    assert bool(bench.streamed("chant")) == deltas


def test_a_neighbour_of_the_same_lane_does_not_wait_for_pieces(bench: Bench) -> None:
    """Files that come while another's pieces are heard again."""
    line, _ = loops(bench.engine._vocabulary)["word"]
    short = read_audio(SHORT)
    bench.send("alone", [short], language="en")
    alone = bench.run()["alone"]
    lose_itself(bench.engine, line, lambda sequence: sequence.request.id.startswith("wild"))
    bench.send("wild", [read_audio(LONG)], language="en")
    for _ in range(random.Random(5).randrange(20, 60)):
        bench.scheduler.turn()
    before = bench.scheduler.steps
    bench.send("other", [short], Lane.INTERACTIVE, language="en")
    assert bench.run()["other"] - before <= alone * 1.1 + 1
