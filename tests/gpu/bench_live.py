"""Live streams on the Qwen3-ASR engine at their real pace: how long a partial takes with 1 to 400 of them.

    python -m tests.gpu.bench_live --size 0.6B --out results.json

Weights are random, so the text is scripted: 3.5 tokens a second, and of the last hypothesis the first share ``acceptance``
holds at each update and the rest is decoded anew. Every pass is computed in full before its tokens are replaced. Streams
speak without a pause in utterances of 8 s. Words on which two hypotheses in a row agree are frozen, as a call does it
(``--no-freeze``: nothing is; the dearest case). ``--files``: so many segments of 30 s of files are always in work beside them. Audio comes every 320 ms, streams
spread over that time. A partial is late from the moment its audio was there until the hypothesis for it is complete.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import json
import pstats
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from shared.messages import Lane
from tests.gpu.bench_qwen3 import build, noise, release, scripted
from worker.engines.base import EngineEvent, Hypothesis, SequenceRequest
from worker.engines.qwen3.engine import Qwen3Engine
from worker.engines.qwen3.sampling import Chosen
from worker.engines.qwen3.sequence import LIVE_HOP, Qwen3Sequence
from worker.engines.qwen3.vocabulary import Vocabulary
from worker.text.stabilizer import Stabilizer

hugging: Any = transformers

STREAMS = (1, 50, 100, 300, 400)
ACCEPTANCE = (0.0, 0.5, 0.8)
TOKENS_PER_SECOND = 3.5
UTTERANCE_SAMPLES = 8 * 16_000
HOP_SECONDS = LIVE_HOP / 16_000
SOUND = noise(30.0)


class Script:
    """What each row says, as ``CatchUp.script`` wants it."""

    def __init__(self, acceptance: float, vocabulary: Vocabulary) -> None:
        self._acceptance = acceptance
        self._eos = vocabulary.turn_end
        self._plans: dict[int, tuple[int, list[int]]] = {}
        """By row: tokens that were frozen when the plan was made, and the tokens that follow."""
        self._random = random.Random(0)
        self._space, *self._letters = vocabulary.encode(" abcdefghijklmnopqrstuvwxyz")

    def __call__(self, row: Qwen3Sequence, count: int) -> Chosen:
        if row.draft or not row.tokens:
            self._plans[id(row)] = len(row._frozen), self._plan(row)
        said, plan = self._plans[id(row)]
        at = len(row._frozen) + len(row.tokens) - said
        ids = plan[at : at + count]
        return scripted([*ids, *[self._eos] * (count - len(ids))], self._eos)

    def _plan(self, row: Qwen3Sequence) -> list[int]:
        said = len(row._frozen)
        wanted = max(0, int(TOKENS_PER_SECOND * row.heard / 16_000) - said)
        kept = list(row.draft[: int(self._acceptance * len(row.draft))])
        while len(kept) < wanted:
            before = row.draft[len(kept)] if len(kept) < len(row.draft) else -1
            new = next(token for token in self._random.sample(self._letters, 2) if token != before)
            kept.append(self._space if (said + len(kept)) % 2 else new)
        return kept[:wanted]


@dataclass
class Stream:
    row: Qwen3Sequence
    due: float
    """When its next audio is there."""
    waiting: list[tuple[float, int]] = field(default_factory=list)
    """(when audio was there, samples with it) of partials that have not come."""
    stabilizer: Stabilizer = field(default_factory=Stabilizer)


@dataclass
class Load:
    engine: Qwen3Engine
    streams: int
    acceptance: float
    freeze: bool = True
    files: int = 0
    latencies: list[float] = field(default_factory=list)
    busy: float = 0.0
    steps: int = 0
    ending: list[Qwen3Sequence] = field(default_factory=list)
    segments: list[Qwen3Sequence] = field(default_factory=list)
    done: int = 0
    """Segments of files since the warming up."""
    numbers: Any = field(default_factory=itertools.count)

    def open(self, length: int) -> Qwen3Sequence:
        row = self.engine.open(SequenceRequest(f"live{next(self.numbers)}", Lane.LIVE, partials=True))
        self.engine.feed(row, SOUND[:length].copy())
        return row

    def run(self, seconds: float) -> dict[str, float]:
        self.engine._catch_up.script = Script(self.acceptance, self.engine._vocabulary)
        spread = [n * 0.618034 % 1 for n in range(self.streams)]
        ages = [LIVE_HOP * (2 + int(share * (UTTERANCE_SAMPLES / LIVE_HOP - 2))) for share in spread]
        streams = [Stream(self.open(age), 0.0) for age in ages]
        while ready := [s.row for s in streams if s.row.ready]:
            self.engine.step(ready, 0)
        begun = time.perf_counter()
        for n, stream in enumerate(streams):
            stream.due = begun + HOP_SECONDS * (n / self.streams)
        warm = begun + 1.5
        while (now := time.perf_counter()) < begun + 1.5 + seconds:
            self.hear(streams, now)
            self.read(now > warm)
            rows = self.rows(streams)
            if not rows:
                time.sleep(max(0.0, min(s.due for s in streams) - time.perf_counter()))
                continue
            began = time.perf_counter()
            events = self.engine.step(rows, 0)
            ended = time.perf_counter()
            self.settle(streams, events)
            if began > warm:
                self.busy += ended - began
                self.steps += 1
            self.collect(streams, ended, warm)
        # Partials that never came are as late as the end.
        self.latencies += [time.perf_counter() - due for s in streams for due, _ in s.waiting if due > warm]
        for row in (*self.ending, *(s.row for s in streams), *self.segments):
            self.engine.cancel(row)
        self.engine._catch_up.script = None
        ranked = sorted(self.latencies)
        return {
            "p50 ms": statistics.median(ranked) * 1e3,
            "p95 ms": ranked[int(0.95 * (len(ranked) - 1))] * 1e3,
            "busy": self.busy / seconds,
            "partials": len(ranked),
            "ms a step": self.busy / max(1, self.steps) * 1e3,
            "files, s per s": self.done * len(SOUND) / 16_000 / seconds,
        }

    def hear(self, streams: list[Stream], now: float) -> None:
        for stream in streams:
            while stream.due <= now:
                at = stream.row.samples.length
                if at + LIVE_HOP > UTTERANCE_SAMPLES and not stream.waiting:
                    self.engine.finish(stream.row)
                    self.ending.append(stream.row)
                    stream.row, at, stream.stabilizer = self.open(0), 0, Stabilizer()
                self.engine.feed(stream.row, SOUND[at : at + LIVE_HOP].copy())
                if at + LIVE_HOP >= 8_000:
                    stream.waiting.append((stream.due, at + LIVE_HOP))
                stream.due += HOP_SECONDS

    def read(self, count: bool) -> None:
        """A new segment for each that is finished."""
        running = [row for row in self.segments if not row.closed]
        self.done += count * (len(self.segments) - len(running))
        while len(running) < self.files:
            row = self.engine.open(SequenceRequest(f"file{next(self.numbers)}", Lane.BATCH))
            self.engine.feed(row, SOUND)
            self.engine.finish(row)
            running.append(row)
        self.segments = running

    def settle(self, streams: list[Stream], events: list[EngineEvent]) -> None:
        """As a call does it: what is certain is frozen."""
        if not self.freeze:
            return
        told = {id(event.sequence): event.text for event in events if isinstance(event, Hypothesis)}
        for stream in streams:
            if (text := told.get(id(stream.row))) and stream.stabilizer.hypothesis(text):
                self.engine.freeze(stream.row, stream.stabilizer.said)

    def rows(self, streams: list[Stream]) -> list[Qwen3Sequence]:
        live = sorted((s for s in streams if s.row.ready), key=lambda s: s.waiting[0][0] if s.waiting else 0.0)
        self.ending = [row for row in self.ending if not row.closed]
        return [*self.ending, *(s.row for s in live), *self.segments]

    def collect(self, streams: list[Stream], now: float, warm: float) -> None:
        for stream in streams:
            while stream.waiting and stream.row.settled and stream.row.heard >= stream.waiting[0][1]:
                due, _ = stream.waiting.pop(0)
                if due > warm:
                    self.latencies.append(now - due)


def kernels(load: Load, seconds: float) -> dict[str, float]:
    """Share of the time in which the GPU works, by kind of kernel, with the profiler on."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        begun = time.perf_counter()
        load.run(seconds)
        wall = time.perf_counter() - begun
    rows = sorted(trace.key_averages(), key=lambda row: -row.self_device_time_total)
    out = {"all": sum(row.self_device_time_total for row in rows) / 1e6 / wall}
    for row in rows:
        name = row.key[:60]
        out[name] = out.get(name, 0.0) + row.self_device_time_total / 1e6 / wall
    return {name: share for name, share in out.items() if share > 0.01}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="0.6B")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--streams", type=int, nargs="+", default=list(STREAMS))
    parser.add_argument("--acceptance", type=float, nargs="+", default=list(ACCEPTANCE))
    parser.add_argument("--files", type=int, nargs="+", default=[0])
    parser.add_argument("--no-freeze", action="store_true")
    parser.add_argument("--profile", action="store_true", help="which kernels the GPU runs, and what the host does")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cuda = options.device == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    results: dict[str, Any] = {"card": torch.cuda.get_device_name() if cuda else "CPU", "runs": []}
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder), options.size, options.device, dtype)
        release()
        begun = time.perf_counter()
        engine = Qwen3Engine(folder, device=options.device, dtype=dtype, max_slots=max(options.streams) + 32)
        results["slots"] = engine.load(lambda phase, fraction: None).slots
        results["load s"] = time.perf_counter() - begun
        print(results, f"torch {torch.__version__}, transformers {hugging.__version__}, {dtype}", flush=True)
        for acceptance, streams, files in itertools.product(options.acceptance, options.streams, options.files):
            found = Load(engine, streams, acceptance, not options.no_freeze, files).run(options.seconds)
            results["runs"].append({"streams": streams, "acceptance": acceptance, "files": files, **found})
            print(streams, acceptance, files, {k: round(v, 2) for k, v in found.items()}, flush=True)
        if options.profile:
            results["kernels"] = kernels(Load(engine, options.streams[-1], options.acceptance[-1]), 2.0)
            for name, share in results["kernels"].items():
                print(f"{share:.3f} {name}")
            with cProfile.Profile() as trace:
                Load(engine, options.streams[-1], options.acceptance[-1]).run(2.0)
            pstats.Stats(trace).sort_stats("tottime").print_stats(28)
        results["memory MB"] = engine.device_memory / 2**20
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
