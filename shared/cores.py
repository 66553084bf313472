"""Lists of cores as Linux writes them: ``0-3,8``."""

from __future__ import annotations

from collections.abc import Iterable

NEAR_GPU = "gpu"
"""Instead of a list: the cores on the NUMA node of the card."""


def parse_cores(text: str) -> frozenset[int]:
    """The cores of a list, e.g. ``0-3,8``; spaces around the numbers do no harm. Raises ValueError for anything else."""
    cores: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        low = _number(first)
        high = _number(last) if dash else low
        if not low <= high < MOST_CORES:
            raise ValueError(f"{part!r} is no range of cores")
        cores.update(range(low, high + 1))
    return frozenset(cores)


def format_cores(cores: Iterable[int]) -> str:
    """The list of them, in order, ranges put together; ``parse_cores`` reads it."""
    ranges: list[list[int]] = []
    for core in sorted(set(cores)):
        if ranges and core == ranges[-1][1] + 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    return ",".join(f"{low}-{high}" if high > low else str(low) for low, high in ranges)


MOST_CORES = 8192
"""Linux's own bound (``CONFIG_NR_CPUS``)."""


def _number(text: str) -> int:
    digits = text.strip()
    if not (digits.isascii() and digits.isdigit()):
        raise ValueError(f"{text!r} is no core")
    return int(digits)
