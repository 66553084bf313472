"""A measured figure with what was promised of it, and how a list of them is shown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """Smaller is better where there is a bound; without one the figure is only told."""

    what: str
    value: float
    unit: str
    must: float | None = None
    aim: float | None = None
    note: str = ""

    @property
    def missed(self) -> bool:
        return self.must is not None and self.value > self.must

    @property
    def verdict(self) -> str:
        if self.must is None:
            return ""
        if self.missed:
            return "MISSED"
        return "aim reached" if self.aim is not None and self.value <= self.aim else "kept"


def table(figures: Sequence[Figure]) -> str:
    """As Markdown that is readable as it is."""
    rows = [("what", "measured", "must", "aim", "verdict", "note")]
    rows += [
        (figure.what, _amount(figure.value, figure.unit), *_bounds(figure), figure.verdict, figure.note)
        for figure in figures
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def percentile(values: Sequence[float], percent: int) -> float:
    """By linear interpolation; of at least two values."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def _bounds(figure: Figure) -> tuple[str, str]:
    must, aim = ("" if bound is None else _amount(bound, figure.unit) for bound in (figure.must, figure.aim))
    return must, aim


def _amount(value: float, unit: str) -> str:
    digits = 0 if isinstance(value, int) or abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f} {unit}".strip()
