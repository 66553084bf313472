"""Lists of cores, and a process that keeps to them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.cores import format_cores, parse_cores
from worker.cores import cores_near

PINNED_LATE = """
import os, threading
from worker.cores import pin
stop = threading.Event()
threads = [threading.Thread(target=stop.wait) for _ in range(3)]
for thread in threads: thread.start()
core = max(os.sched_getaffinity(0))
pin({core})
late = threading.Thread(target=stop.wait)
late.start()
tasks = os.listdir("/proc/self/task")
assert len(tasks) >= 5, tasks
assert all(os.sched_getaffinity(int(task)) == {core} for task in tasks)
stop.set()
"""


@pytest.mark.parametrize(
    ("text", "cores"),
    [("0", {0}), ("0-3,8", {0, 1, 2, 3, 8}), (" 1 , 0 - 1 ", {0, 1}), ("5-5\n", {5})],
)
def test_lists_as_linux_writes_them(text: str, cores: set[int]) -> None:
    assert parse_cores(text) == cores


@pytest.mark.parametrize("text", ["", ",", "1,", "-1", "1-", "3-2", "a", "0x1", "1.5", "0-99999999999", "²", "1-2-3"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no core|no range"):
        parse_cores(text)


@given(st.sets(st.integers(0, 300), min_size=1))
def test_what_is_written_is_read_again(cores: set[int]) -> None:
    written = format_cores(cores)
    assert parse_cores(written) == cores
    assert written.count(",") + 1 == sum(core - 1 not in cores for core in cores)


def test_threads_that_are_there_and_those_to_come_are_pinned() -> None:
    subprocess.run([sys.executable, "-c", PINNED_LATE], check=True, timeout=30)


def test_cores_near_a_device_are_the_kernels(tmp_path: Path) -> None:
    card = tmp_path / "0000:4e:00.0"
    card.mkdir()
    (card / "local_cpulist").write_text("48-95,144-191\n")
    assert cores_near(card.name, tmp_path) == {*range(48, 96), *range(144, 192)}
    (card / "local_cpulist").write_text("\n")
    assert cores_near(card.name, tmp_path) == set()
    assert cores_near("0000:00:00.0", tmp_path) == set()
