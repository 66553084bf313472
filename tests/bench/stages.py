"""The stages that an answer's ``server-timing`` header tells."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import httpx


def stages(answer: httpx.Response) -> dict[str, float]:
    """Milliseconds by stage."""
    pairs = (stage.partition(";dur=") for stage in answer.headers["server-timing"].split(", "))
    return {name: float(ms) for name, _, ms in pairs}


def median_stages(answers: Sequence[httpx.Response]) -> str:
    """Each stage's median, in milliseconds, as a note."""
    rows = [stages(answer) for answer in answers]
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    return "ms: " + ", ".join(f"{name} {ms:.0f}" for name, ms in medians.items() if ms >= 0.5)
