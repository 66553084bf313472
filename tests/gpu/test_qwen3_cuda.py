"""The engine on CUDA: the same words as on the CPU, graphs equal to plain launches, bf16 honest about its flips."""

from __future__ import annotations

import subprocess
import sys
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.messages import Lane
from tests.gpu.marks import NEEDS_CUDA, torch
from worker.audio.samples import Audio
from worker.engines.base import Final, SequenceRequest

pytestmark = [*NEEDS_CUDA, pytest.mark.timeout(300)]

FOLDER = Path(__file__).parents[1] / "data" / "qwen3-asr-tiny"
CLIPS = [path for path in sorted((FOLDER / "samples").glob("*.wav")) if "mulaw" not in path.name]
MARGIN = 0.05
"""Of two logits: closer ones may change places in bf16."""


def read(path: Path) -> Audio:
    with wave.open(str(path)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / np.float32(32768)


def said(path: Path) -> str:
    return path.with_suffix(".txt").read_text("utf-8").strip()


def load(dtype: Any, **options: Any) -> Any:
    from worker.engines.qwen3.engine import Qwen3Engine

    engine = Qwen3Engine(str(FOLDER), device="cuda", dtype=dtype, **{"max_slots": 16, **options})
    engine.load(lambda phase, fraction: None)
    return engine


def texts(engine: Any) -> list[str]:
    rows = []
    for path in CLIPS:
        row = engine.open(SequenceRequest(path.stem, Lane.BATCH, language="en"))
        engine.feed(row, read(path))
        engine.finish(row)
        rows.append(row)
    done = {}
    while not all(row.closed for row in rows):
        for event in engine.step([row for row in rows if row.ready], 0):
            assert isinstance(event, Final)
            done[event.sequence.request.id] = event.text
    return [done[path.stem] for path in CLIPS]


@pytest.fixture(scope="module")
def exact() -> Iterator[Any]:
    engine = load(torch.float32)
    yield engine
    engine.close()


def test_float32_gives_the_exact_transcripts(exact: Any) -> None:
    assert texts(exact) == [said(path) for path in CLIPS]


def test_calls_side_by_side_give_the_exact_transcripts(exact: Any) -> None:
    """Passes are launched before those before have landed; nothing may be overwritten on its way."""
    exact._passes.rows_in_halves = 4
    hop = 5_120
    sounds = {path.stem: read(path) for path in CLIPS}
    for _ in range(3):
        calls = {
            f"{name} {n}": exact.open(SequenceRequest(f"{name} {n}", Lane.LIVE, partials=True))
            for name in sounds
            for n in range(2)
        }
        done: dict[str, str] = {}
        at = 0
        while len(done) < len(calls):
            for name, call in calls.items():
                sound = sounds[name.split()[0]]
                if at < len(sound):
                    exact.feed(call, sound[at : at + hop])
                elif not call.finished:
                    exact.finish(call)
            for event in exact.step([row for row in calls.values() if row.ready], 0):
                if isinstance(event, Final):
                    done[event.sequence.request.id] = event.text
            at += hop
        assert done == {name: said(FOLDER / "samples" / f"{name.split()[0]}.txt") for name in calls}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_equal_plain_launches(dtype: str) -> None:
    recorded = load(getattr(torch, dtype))
    plain = load(getattr(torch, dtype), graphs=False)
    assert recorded._forward.recorded
    assert recorded.encoder._graphs
    assert not plain._forward.recorded
    assert not plain.encoder._graphs
    assert texts(recorded) == texts(plain)
    recorded.close()
    plain.close()


@pytest.mark.parametrize("graphs", [True, False])
def test_every_verdict_is_right_whatever_happens_to_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graphs: bool
) -> None:
    """Passes that are launched ahead, recorded lines and drafts all leave the ids behind that the next one looks back at."""
    from tests.torch.checkpoints import build_random
    from tests.torch.watching import any_life, watch_verdicts
    from worker.engines.qwen3.engine import Qwen3Engine

    engine = Qwen3Engine(
        str(build_random(tmp_path, gain=1.9)), device="cuda", dtype=torch.float32, max_slots=4, graphs=graphs
    )
    engine.load(lambda phase, fraction: None)
    assert engine.decoder.fused
    assert engine._forward.recorded == graphs
    seen = watch_verdicts(monkeypatch, engine)
    for seed in range(3):
        any_life(engine, seed)
    engine.close()
    assert sum(count for verdict, count in seen.items() if verdict > 0) > 5
    assert seen[-1] > 5
    assert seen[0] > 200


def test_bf16_agrees_wherever_the_margin_is_clear(capsys: pytest.CaptureFixture[str]) -> None:
    """Teacher-forced on the tokens of ``generate()``: the same argmax wherever the reference's margin is clear."""
    import transformers

    hugging: Any = transformers
    processor = hugging.AutoProcessor.from_pretrained(FOLDER)
    model = hugging.AutoModelForMultimodalLM.from_pretrained(FOLDER, dtype=torch.bfloat16).to("cuda").eval()
    engine = load(torch.bfloat16)
    flips = total = 0
    for path in CLIPS:
        inputs = processor.apply_transcription_request(audio=[read(path)], language="English").to(
            "cuda", torch.bfloat16
        )
        start = inputs["input_ids"].shape[1]
        with torch.inference_mode():
            ids = model.generate(**inputs, max_new_tokens=100, do_sample=False)
            mask = torch.ones_like(ids)
            features = {name: inputs[name] for name in ("input_features", "input_features_mask")}
            theirs = model(input_ids=ids, attention_mask=mask, **features).logits[0, start - 1 : -1].float()
            ours = _forced(engine, path, ids[0, start:].tolist())
        top = theirs.topk(2).values
        differs = theirs.argmax(-1) != ours.argmax(-1)
        assert not (differs & (top[:, 0] - top[:, 1] > MARGIN)).any(), path.stem
        flips, total = flips + int(differs.sum()), total + len(differs)
    with capsys.disabled():
        print(f"\nbf16: {flips} of {total} tokens flip, all within a margin of {MARGIN}")
    engine.close()


def _forced(engine: Any, path: Path, tokens: list[int]) -> Any:
    """Our logits after each of ``tokens``' predecessors."""
    from worker.engines.qwen3.layout import Piece

    row = engine.open(SequenceRequest("forced", Lane.BATCH, language="en"))
    engine.feed(row, read(path))
    engine.finish(row)
    engine._table.seat(row)
    engine._catch_up.listen([row])
    row.draft = tuple(tokens)
    line = row.ids_after(0)
    hidden = engine._catch_up._fill([row], [line], [Piece(row.slot, 0, len(line))])[-len(tokens) - 1 : -1]
    logits = engine.decoder.logits(hidden).float()
    engine.cancel(row)
    return logits


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_a_step_waits_for_the_device_once(exact: Any) -> None:
    """For its tokens, with an event. Whatever else would wait (a copy to or from plain memory, a size that must be known) raises."""
    sounds = [read(path) for path in CLIPS]
    rows = [exact.open(SequenceRequest(f"f{n}", Lane.BATCH, language="en")) for n in range(len(sounds))]
    calls = [exact.open(SequenceRequest(f"c{n}", Lane.LIVE, partials=True)) for n in range(3)]
    for row, sound in zip(rows, sounds, strict=True):
        exact.feed(row, sound)
        exact.finish(row)
    torch.cuda.set_sync_debug_mode("error")
    try:
        at = 0
        while not all(row.closed for row in (*calls, *rows)):
            for call, sound in zip(calls, sounds, strict=False):
                if at < len(sound):
                    exact.feed(call, sound[at : at + 5_120])
                elif not call.finished:
                    exact.finish(call)
            exact.step([row for row in (*calls, *rows) if row.ready], 0)
            at += 5_120
    finally:
        torch.cuda.set_sync_debug_mode("default")


BREAKS = """
import sys
import torch
from shared.messages import Lane
from tests.gpu.test_qwen3_cuda import CLIPS, load, read
from worker.engines.base import EngineBroken, SequenceRequest

def hook(logits, sequences):
    if steps > 2:
        torch.zeros(1, device="cuda")[torch.tensor([7], device="cuda")]
    return logits

engine, steps = load(torch.float32, graphs=False), 0
engine.logits_hook = hook
row = engine.open(SequenceRequest("r", Lane.BATCH, language="en"))
engine.feed(row, read(CLIPS[0]))
engine.finish(row)
try:
    while not row.closed:
        engine.step([row], 0)
        steps += 1
except EngineBroken as error:
    print("broken at", steps, error)
"""


def test_a_card_that_takes_no_work_any_more_breaks_the_engine() -> None:
    """In a process of its own, because nothing on CUDA works there afterwards."""
    done = subprocess.run([sys.executable, "-c", BREAKS], capture_output=True, text=True, timeout=200)
    assert done.stdout.startswith("broken at 3 cuda"), done.stdout + done.stderr


BOUNDED = """
import sys
from pathlib import Path

import numpy as np
import torch

from shared.messages import Lane
from tests.gpu.bench_qwen3 import build
from worker.engines.base import Final, SequenceRequest
from worker.engines.qwen3.engine import Qwen3Engine

folder, bound_mb = Path(sys.argv[1]), int(sys.argv[2])
build(folder, "0.6B", "cuda", torch.bfloat16)
torch.cuda.empty_cache()
torch.cuda.reset_peak_memory_stats()
engine = Qwen3Engine(str(folder), gpu_memory_mb=bound_mb)
slots = engine.load(lambda *_: None).slots
rng = np.random.default_rng(0)
rows = []
for number in range(3 * slots):
    row = engine.open(SequenceRequest(str(number), Lane.BATCH, language="en"))
    engine.feed(row, (0.1 * rng.standard_normal(30 * 16_000)).astype(np.float32))
    engine.finish(row)
    rows.append(row)
events = []
for _ in range(2_000):
    events += engine.step([row for row in rows if not row.closed], 0)
    if len(events) >= 2 * slots:
        break
assert events and all(isinstance(event, Final) for event in events), events
print(slots, torch.cuda.max_memory_reserved() // 2**20)
"""


@pytest.mark.parametrize("bound_mb", [5_000, 9_000])
def test_a_bound_on_memory_holds(tmp_path: Path, bound_mb: int) -> None:
    """With the published shape, full slots and segments of 30 s. In a process of its own: the bound is the process's."""
    command = [sys.executable, "-c", BOUNDED, str(tmp_path / "model"), str(bound_mb)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    slots, used = map(int, done.stdout.split())
    assert slots >= (5 if bound_mb == 5_000 else 30)
    assert used <= bound_mb
