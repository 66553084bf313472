"""Speed of the Qwen3-ASR engine at the published shapes, with random weights: how long a pass takes does not depend on them.

    python -m tests.gpu.bench_qwen3 --size 0.6B 1.7B --out results.json

Prints a table in Markdown and names the card. ``generate()`` of transformers on the same folder runs beside it. ``--size tiny
--device cpu`` runs everything on a small model, to see that the script works.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from shared.messages import Lane
from tests.torch.checkpoints import byte_tokenizer, save
from worker.audio.samples import Audio
from worker.engines.base import SequenceRequest
from worker.engines.qwen3.engine import Qwen3Engine
from worker.engines.qwen3.layout import Piece
from worker.engines.qwen3.sampling import Chosen, Landing
from worker.engines.qwen3.sequence import LIVE_HOP, Qwen3Sequence
from worker.engines.qwen3.verdicts import ENDS, GOES_ON

hugging: Any = transformers

# (encoder width, layers, heads, mlp), (text width, mlp, layers, heads, kv heads, head width): the published configurations.
SIZES = {
    "0.6B": ((896, 18, 14, 3584, 480), (1024, 3072, 28, 16, 8, 128), 151_936),
    "1.7B": ((1024, 24, 16, 4096, 480), (2048, 6144, 28, 16, 8, 128), 151_936),
    "tiny": ((64, 2, 2, 128, 16), (64, 128, 3, 4, 2, 32), 1_024),
}
ROWS = (1, 8, 32, 128)
TOKENS = 20
FILE_TOKENS = 90
"""Of a segment of 30 s: 3 tokens a second."""

Figures = dict[str, float | str]


def published_config(size: str) -> dict[str, Any]:
    """Arguments of ``Qwen3ASRConfig``, with the ids of the tests' tokenizer."""
    audio, text, vocabulary = SIZES[size]
    ids = byte_tokenizer().convert_tokens_to_ids
    audio_fields = (
        "d_model",
        "encoder_layers",
        "encoder_attention_heads",
        "encoder_ffn_dim",
        "downsample_hidden_size",
    )
    text_fields = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )
    return {
        "audio_config": dict(zip(audio_fields, audio, strict=True), model_type="qwen3_asr_encoder", output_dim=text[0]),
        "text_config": dict(
            zip(text_fields, text, strict=True),
            model_type="qwen3",
            vocab_size=vocabulary,
            max_position_embeddings=65_536,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            pad_token_id=ids("<|endoftext|>"),
            eos_token_id=ids("<|im_end|>"),
            bos_token_id=None,
        ),
        "audio_token_id": ids("<|audio_pad|>"),
        "timestamp_token_id": ids("<timestamp>"),
        "pad_token_id": ids("<|endoftext|>"),
        "eos_token_id": [ids("<|endoftext|>"), ids("<|im_end|>")],
        "tie_word_embeddings": True,
    }


def build(folder: Path, size: str, device: str, dtype: torch.dtype) -> None:
    config = hugging.Qwen3ASRConfig(**published_config(size))
    torch.manual_seed(0)
    with torch.device(device):
        torch.set_default_dtype(dtype)
        model = hugging.Qwen3ASRForConditionalGeneration(config)
        torch.set_default_dtype(torch.float32)
    save(model, byte_tokenizer(), folder)


def scripted(ids: list[int], end: int = -1) -> Chosen:
    """What a script gives for the model's choice; ``end`` ends a text."""
    return Chosen(ids, [0.0] * len(ids), [ENDS if token == end else GOES_ON for token in ids])


def unlike_each_other(row: Qwen3Sequence, count: int) -> Chosen:
    return scripted([32 + (len(row.tokens) + n) * 7919 % 97 for n in range(count)])


@functools.cache
def noise(seconds: float, seed: int = 0) -> Audio:
    return (0.05 * np.random.default_rng(seed).standard_normal(int(seconds * 16_000))).astype(np.float32)


class Bench:
    def __init__(self, folder: Path, device: str, dtype: torch.dtype, rounds: int) -> None:
        self.folder, self.device, self.dtype, self.rounds = folder, device, dtype, rounds
        begun = time.perf_counter()
        self.engine = Qwen3Engine(str(folder), device=device, dtype=dtype)
        self.capabilities = self.engine.load(lambda phase, fraction: None)
        self.load_s = time.perf_counter() - begun

    def sync(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def median_ms(self, work: Callable[[], object], rounds: int = 0) -> float:
        times = []
        for n in range((rounds or self.rounds) + 2):
            self.sync()
            begun = time.perf_counter()
            work()
            self.sync()
            if n >= 2:
                times.append((time.perf_counter() - begun) * 1e3)
        return statistics.median(times)

    def open(self, seconds: float, seed: int = 0, lane: Lane = Lane.BATCH) -> Qwen3Sequence:
        row = self.engine.open(SequenceRequest(f"{seconds}-{seed}", lane, language="en"))
        self.engine.feed(row, noise(seconds, seed))
        self.engine.finish(row)
        return row

    def utterance(self, seconds: float = 4.0, tokens: int = TOKENS) -> None:
        row = self.open(seconds)
        while not row.closed and len(row.tokens) < tokens:
            self.engine.step([row], 0)
        self.engine.cancel(row)

    def decode(self, count: int) -> tuple[float, float]:
        """A whole step of the engine among others like it, and the recorded pass alone, for ``count`` rows of 30 s."""
        rows = [self.open(30.0, seed) for seed in range(count)]
        # A random model soon repeats itself, which would end its rows.
        self.engine._catch_up.script = unlike_each_other
        while any(row.behind for row in rows):
            self.engine.step(rows, 0)
        whole = self.median_ms(lambda: [self.engine.step(rows, 0) for _ in range(16)], rounds=5) / 16
        assert not any(row.settled for row in rows)
        self.engine._catch_up.script = None
        pieces = [Piece(row.slot, row.kv, 1) for row in rows if row.slot is not None]
        alone = self.median_ms(lambda: Landing(self.engine._forward.next_tokens([5] * count, pieces)).unpack())
        for row in rows:
            self.engine.cancel(row)
        return whole, alone

    def encode(self, windows: int) -> float:
        features = torch.randn(windows, 128, 800, device=self.device)

        return self.median_ms(lambda: self.engine.encoder(features, [800] * windows))

    def catch_up(self, count: int, seconds: float) -> float:
        """Mel, encoder, prefill and first token of ``count`` new rows in one step or more."""

        def work() -> None:
            rows = [self.open(seconds, seed) for seed in range(count)]
            while any(row.behind for row in rows):
                self.engine.step(rows, 0)
            for row in rows:
                self.engine.cancel(row)

        return self.median_ms(work, rounds=5)

    def files(self, segments: int) -> float:
        """Seconds of sound per second, segments of 30 s with FILE_TOKENS tokens each, as many at once as there are slots."""
        waiting = [self.open(30.0, seed % 7) for seed in range(segments)]
        running: list[Qwen3Sequence] = []
        self.sync()
        begun = time.perf_counter()
        while waiting or running:
            while waiting and len(running) < self.capabilities.slots:
                running.append(waiting.pop())
            self.engine.step(running, 0)
            for row in [row for row in running if row.closed or len(row.tokens) >= FILE_TOKENS]:
                self.engine.cancel(row)
                running.remove(row)
        return segments * 30.0 / (time.perf_counter() - begun)

    def live(self, streams: int, updates: int = 12) -> float:
        """Median time to bring ``streams`` open utterances up to date with 320 ms more each."""
        rows = []
        for seed in range(min(streams, self.capabilities.slots)):
            row = self.engine.open(SequenceRequest(f"live{seed}", Lane.LIVE, language="en", partials=True))
            self.engine.feed(row, noise(9.0, seed))
            rows.append(row)
        times = []
        for _ in range(updates):
            begun = time.perf_counter()
            while ready := [row for row in rows if row.ready]:
                self.engine.step(ready, 0)
                for row in ready:
                    # A random model never ends its text; a real hypothesis of this sound would have some 30 tokens.
                    row.settled = row.settled or len(row.tokens) >= 30
            times.append((time.perf_counter() - begun) * 1e3)
            for row in rows:
                self.engine.feed(row, noise(LIVE_HOP / 16_000, len(times)))
        for row in rows:
            self.engine.cancel(row)
        return statistics.median(times[2:])

    @torch.inference_mode()
    def run(self, decoding_only: bool = False) -> Figures:
        rows = [count for count in ROWS if count <= self.capabilities.slots]
        out: Figures = {"load s": self.load_s, "slots": self.capabilities.slots}
        out["4 s -> 20 tokens, ms"] = self.median_ms(self.utterance)
        for count in rows:
            whole, alone = self.decode(count)
            out[f"decode step, {count} rows, ms"] = whole
            out[f"decode pass alone, {count} rows, ms"] = alone
        if decoding_only:
            return out
        for windows in (1, 32):
            out[f"encode {windows} x 8 s, ms"] = self.encode(windows)
        out["first token of 1 x 4 s, ms"] = self.catch_up(1, 4.0)
        out["first token of 1 x 30 s, ms"] = self.catch_up(1, 30.0)
        out[f"first token of {rows[-1]} x 30 s, ms"] = self.catch_up(rows[-1], 30.0)
        for streams in rows:
            out[f"live update of {streams} streams, ms"] = self.live(streams)
        out["files, audio s per s"] = self.files(2 * self.capabilities.slots)
        out["memory MB"] = self.engine.device_memory / 2**20
        return out


def eager_generate(folder: Path, device: str, dtype: torch.dtype, rounds: int) -> float:
    """Median ms of transformers' own loop for 4 s of sound and TOKENS tokens, features included."""
    processor = hugging.AutoProcessor.from_pretrained(folder)
    model = hugging.AutoModelForMultimodalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    clip = noise(4.0)
    times = []
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        inputs = processor.apply_transcription_request(audio=[clip], language="English").to(device, dtype)
        with torch.inference_mode():
            model.generate(**inputs, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)
        times.append((time.perf_counter() - begun) * 1e3)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", default=["0.6B"], choices=list(SIZES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--decoding-only", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    card = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    results: dict[str, Figures] = {}
    for size in options.size:
        with tempfile.TemporaryDirectory() as folder:
            build(Path(folder), size, options.device, dtype)
            release()
            bench = Bench(Path(folder), options.device, dtype, options.rounds)
            results[size] = bench.run(options.decoding_only)
            bench.engine.close()
            del bench
            release()
            if options.decoding_only:
                continue
            results[size]["generate(): 4 s -> 20 tokens, ms"] = eager_generate(
                Path(folder), options.device, dtype, min(options.rounds, 5)
            )
            release()
    print(f"{card}, torch {torch.__version__}, transformers {hugging.__version__}, {dtype}, random weights\n")
    print(table(results))
    if options.out:
        options.out.write_text(json.dumps({"card": card, "results": results}, indent=1))


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def table(results: dict[str, Figures]) -> str:
    names = list(dict.fromkeys(name for figures in results.values() for name in figures))
    lines = ["| | " + " | ".join(results) + " |", "|---|" + "---|" * len(results)]
    for name in names:
        cells = [results[size].get(name, "") for size in results]
        shown = [f"{cell:,.1f}" if isinstance(cell, float) else str(cell) for cell in cells]
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
