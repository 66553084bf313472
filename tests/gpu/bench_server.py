"""The whole server beside a GPU: how long a sleeping one takes to answer, and how fast it reads files.

    python -m tests.gpu.bench_server --out results.json

Cold starts are of checkpoints in the published shapes with random weights, which load like trained ones, and of the small
trained one. Files are read with the small trained one: its engine is never the limit, so the figure is that of everything
in front of the engine, on the cores that are there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from tests.gpu.bench_qwen3 import build
from tests.process.test_qwen3 import TINY, WAVES
from tests.server import Server, serving
from tests.speech import RATE, silence, wav
from tests.torch.running import read_audio
from worker.cores import usable_cores

FILES = (1, 4, 16)
FILE_SECONDS = 600
STARTS = 3


def start_seconds(server: Server, model: str) -> float:
    """From a request to a worker that is ready; it is stopped before and after."""
    began = time.perf_counter()
    server.http.post(f"/api/ps/{model}").raise_for_status()
    took = time.perf_counter() - began
    server.http.delete(f"/api/ps/{model}").raise_for_status()
    server.until(lambda: server.worker["state"] == "stopped", "the worker leaves")
    return took


def cold(folder: Path) -> list[float]:
    with serving(model=folder, start_stall_seconds=120) as server:
        server.http.timeout = 300
        return [start_seconds(server, folder.name) for _ in range(STARTS)]


def cold_transcript() -> list[float]:
    clip = min(WAVES, key=lambda path: path.stat().st_size)
    walls = []
    with serving(model=TINY, idle_seconds=0) as server:
        server.http.timeout = 300
        for _ in range(STARTS):
            began = time.perf_counter()
            server.transcribe(clip).raise_for_status()
            walls.append(time.perf_counter() - began)
            server.until(lambda: server.worker["state"] == "stopped", "the worker leaves")
    return walls


def files(count: int, path: Path, seconds: float) -> float:
    """Seconds of sound per second, ``count`` uploads of the same file side by side."""
    with serving(model=TINY, idle_seconds=600) as server:
        server.http.timeout = 300
        server.transcribe(WAVES[0]).raise_for_status()
        began = time.perf_counter()
        with ThreadPoolExecutor(count) as pool:
            answers = list(pool.map(lambda _n: server.transcribe(path, language="en"), range(count)))
        took = time.perf_counter() - began
    texts = [answer.raise_for_status().json()["text"].split() for answer in answers]
    lengths = sorted(map(len, texts))
    assert lengths[-1] - lengths[0] <= 0.02 * lengths[-1], f"words are lost: {lengths}"  # bf16: single words may differ
    return count * seconds / took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="*", default=["0.6B", "1.7B"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{card}, {usable_cores()} cores, torch {torch.__version__}")
    results: dict[str, object] = {"card": card, "cores": usable_cores()}

    def tell(name: str, value: object) -> None:
        results[name] = value
        print(name, value, flush=True)
        if options.out:
            options.out.write_text(json.dumps(results, indent=1))

    walls = cold_transcript()
    tell("small model: stopped worker to transcript, s", [round(wall, 2) for wall in walls])
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "long.wav"
        sound = np.concatenate([np.concatenate([read_audio(wave), silence(0.8)]) for wave in WAVES])
        sound = np.tile(sound, max(1, round(FILE_SECONDS * RATE / len(sound))))
        path.write_bytes(wav(sound))
        for count in FILES:
            rates = [files(count, path, len(sound) / RATE) for _ in range(2)]
            tell(f"{count} files of {len(sound) / RATE:.0f} s, s/s", round(statistics.mean(rates)))
    for size in options.size:
        with tempfile.TemporaryDirectory() as name:
            build(Path(name), size, "cuda", torch.bfloat16)
            torch.cuda.empty_cache()
            tell(f"{size}: stopped worker to ready, s", [round(wall, 2) for wall in cold(Path(name))])


if __name__ == "__main__":
    main()
