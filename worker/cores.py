"""How many cores there are for us."""

from __future__ import annotations

import os
from pathlib import Path


def usable_cores() -> int:
    """Cores that this process may keep busy: its affinity, or its control group's quota (``docker --cpus``) if less."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(allowed, round(int(quota) / int(period))))
    except (OSError, ValueError):  # no control groups, or the quota is "max"
        return allowed
