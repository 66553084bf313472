"""Driving an engine from a test, and the reference that it must agree with: transformers' own ``generate()``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
import transformers

from shared.messages import Lane
from worker.audio.samples import Audio
from worker.engines.base import EngineEvent, Final, SequenceFailed, SequenceRequest
from worker.engines.qwen3.engine import Qwen3Engine
from worker.engines.qwen3.sequence import Qwen3Sequence

MAX_STEPS = 4000
hugging: Any = transformers


class Reference:
    """The checkpoint as transformers runs it: eager, one clip at a time, float32."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        hugging.utils.logging.disable_progress_bar()
        self.processor = hugging.AutoProcessor.from_pretrained(folder)
        self.model = hugging.AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def tokens(
        self, audio: Audio, *, language: str = "", prompt: str | None = None, forced: Sequence[int] = (), limit: int
    ) -> list[int]:
        """Greedy tokens after the prompt and the ``forced`` ones, at most ``limit``, the end token left out."""
        inputs = self.processor.apply_transcription_request(
            audio=[audio], language=language or None, prompt=prompt or None
        )
        if forced:
            inputs["input_ids"] = torch.cat([inputs["input_ids"], torch.tensor([list(forced)])], dim=1)
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        with torch.inference_mode():
            out = self.model.generate(**inputs, max_new_tokens=limit, do_sample=False)
        new = out[0, inputs["input_ids"].shape[1] :].tolist()
        ends = set(self.model.generation_config.eos_token_id)
        return [token for token in new if token not in ends]


def loaded(folder: Path, **options: Any) -> Qwen3Engine:
    """An engine on the CPU in float32. One thread: rows are small, and a second core that others use only makes them wait."""
    engine = Qwen3Engine(str(folder), device="cpu", dtype=torch.float32, **{"threads": 1, **options})
    engine.load(lambda phase, fraction: None)
    return engine


def start(
    engine: Qwen3Engine, audio: Audio | None, name: str = "r", lane: Lane = Lane.BATCH, **request: Any
) -> Qwen3Sequence:
    """Open a sequence; with ``audio`` it is fed and finished, as a file's segment is."""
    sequence = engine.open(SequenceRequest(name, lane, **request))
    if audio is not None:
        engine.feed(sequence, audio)
        engine.finish(sequence)
    return sequence


def drive(
    engine: Qwen3Engine,
    sequences: Iterable[Qwen3Sequence],
    *,
    before: Callable[[int], Iterable[Qwen3Sequence]] | None = None,
) -> list[EngineEvent]:
    """Step until every sequence is closed; ``before(n)`` acts before step n and may return sequences that join."""
    rows = list(sequences)
    events: list[EngineEvent] = []
    for n in range(MAX_STEPS):
        if before is not None:
            rows += before(n)
        open_rows = [row for row in rows if row.ready]
        if not open_rows and all(row.closed for row in rows):
            return events
        if not open_rows:
            time.sleep(0.005)  # they wait for an aligner that loads
            continue
        events += engine.step(sorted(open_rows, key=lambda row: row.request.lane), 0)
    raise AssertionError(f"still running after {MAX_STEPS} steps")


def finals(events: Iterable[EngineEvent]) -> dict[str, Final]:
    """Finals by request id. Any failure is an error of the test."""
    out = {}
    for event in events:
        assert not isinstance(event, SequenceFailed), event.error
        if isinstance(event, Final):
            assert event.sequence.request.id not in out, "a second final"
            out[event.sequence.request.id] = event
    return out


def transcribe(engine: Qwen3Engine, audio: Audio, **request: Any) -> Final:
    return finals(drive(engine, [start(engine, audio, **request)]))["r"]


def read_audio(path: Path) -> Audio:
    """A file as mono float32 at 16 kHz."""
    resampler = av.AudioResampler("flt", "mono", 16_000)
    with av.open(str(path)) as container:
        frames = [out for frame in container.decode(audio=0) for out in resampler.resample(frame)]
    frames += resampler.resample(None)
    return np.concatenate([frame.to_ndarray().reshape(-1) for frame in frames])


def noise(seconds: float, seed: int = 0, level: float = 0.1) -> Audio:
    """Noise whose loudness moves a few times a second, so that every second differs from the last."""
    rng = np.random.default_rng(seed)
    samples = int(seconds * 16_000)
    swell = np.repeat(rng.uniform(0.05, 1.0, samples // 2000 + 1), 2000)[:samples]
    return (level * swell * rng.standard_normal(samples)).astype(np.float32)
