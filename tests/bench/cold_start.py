"""From a stopped worker to the transcript of a clip of 3 s, embedded model: the median of five."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

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
        cpu = _cpu_of_dead_workers(server.pid) / STARTS
    yield Figure(
        "stopped worker to transcript of 3 s", statistics.median(walls), "s", MUST, AIM, median_stages(answers)
    )
    yield Figure("CPU time of that worker, start to end", cpu, "s", note="tells a slow start from a busy machine")


def _cpu_of_dead_workers(pid: int) -> float:
    """Seconds of CPU that the reaped children of a process have used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[13:15])) / os.sysconf("SC_CLK_TCK")
