"""From a stopped worker to the transcript of a clip of 3 s, embedded model: the median of five."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

from tests.bench.figures import Figure
from tests.bench.stages import median_stages
from tests.server import ROOT, serving

MUST, AIM = 2.0, 1.2
STARTS = 5
CLIP = ROOT / "tests" / "data" / "librivox-0880.wav"


def measure() -> Iterator[Figure]:
    walls, answers = [], []
    with serving(script=True, idle_seconds=0) as server:
        for start in range(STARTS):
            began = time.perf_counter()
            answer = server.transcribe(CLIP).raise_for_status()
            walls.append(time.perf_counter() - began)
            answers.append(answer)
            server.until(lambda: server.worker["state"] == "stopped", f"the worker leaves after start {start}")
    yield Figure(
        "stopped worker to transcript of 3 s", statistics.median(walls), "s", MUST, AIM, median_stages(answers)
    )
