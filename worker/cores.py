"""Which cores are for us."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from shared.cores import parse_cores

_TASKS = Path("/proc/self/task")
_PCI = Path("/sys/bus/pci/devices")


def usable_cores() -> int:
    """Cores that this process may keep busy: its affinity, or its control group's quota (``docker --cpus``) if less."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(allowed, round(int(quota) / int(period))))
    except (OSError, ValueError):  # no control groups, or the quota is "max"
        return allowed


def pin(cores: Iterable[int]) -> None:
    """Keep every thread of this process to these cores, and so whatever they start. Raises OSError if it may use none of them."""
    wanted = set(cores)
    os.sched_setaffinity(0, wanted)
    for task in _TASKS.iterdir():
        with suppress(ProcessLookupError):  # a thread that has just ended
            os.sched_setaffinity(int(task.name), wanted)


def cores_near(address: str, pci: Path = _PCI) -> frozenset[int]:
    """Cores on the NUMA node of the PCI device, e.g. ``0000:4e:00.0``; empty where the kernel does not tell."""
    try:
        return parse_cores((pci / address / "local_cpulist").read_text()) if address else frozenset()
    except (OSError, ValueError):
        return frozenset()
