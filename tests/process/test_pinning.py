"""``NAPSCRIBE_CPUS``: a worker, all of its threads, on the cores it was given, and a gateway that goes where it likes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.server import serving
from tests.speech import DATA

SHORT = DATA / "librivox-0880.wav"
CORES = os.sched_getaffinity(0)


def of_threads(pid: int) -> list[set[int]]:
    return [os.sched_getaffinity(int(task.name)) for task in Path(f"/proc/{pid}/task").iterdir()]


def test_the_worker_keeps_to_its_cores() -> None:
    core = max(CORES)
    with serving(cpus=core) as server:
        server.transcribe(SHORT).raise_for_status()
        of_worker = of_threads(server.worker_pid())
        assert len(of_worker) > 1
        assert all(cores == {core} for cores in of_worker)
        assert of_threads(server.process.pid)[0] == CORES


def test_without_a_gpu_there_is_nothing_to_be_near() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is one; see tests/gpu")
    from tests.process.test_qwen3 import TINY, WAVES

    with serving(model=TINY, cpus="gpu") as server:
        server.transcribe(WAVES[0]).raise_for_status()
        assert of_threads(server.worker_pid())[0] == CORES
