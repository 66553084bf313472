"""Whose turn it is: which rows work in a step.

Calls wait for no work of files but the step that runs, and while there are calls, such a step is small. New rows join as early
as they can. Under calls without end files still move on, one small step after many. Pure bookkeeping: nothing here computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.messages import Lane
from worker.engines.qwen3.forward import LINES
from worker.engines.qwen3.sequence import Qwen3Sequence

GROUP_POSITIONS = {"cuda": 8192, "cpu": 1024}
"""Positions of rows that one step catches up at most (but always one row)."""
GROUP_POSITIONS_OF_CALLS = {"cuda": LINES[-1], "cpu": 1024}
"""The same for calls: what is recorded."""
GROUP_POSITIONS_BESIDE_CALLS = {"cuda": 512, "cpu": 512}
"""The same for files while there are calls, which may have to wait for it: a segment or two, some 5 ms on an H100."""
PATIENCE = 64
"""Steps of calls in a row, after which files that wait get half of a small one: under calls without end, they still move on."""
RIDERS_BESIDE_CALLS = 8
"""Rows of files that get their next token in a step of calls: they cost it next to nothing."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The rows of a step."""

    group: list[Qwen3Sequence]
    """Those that catch up."""
    riders: list[Qwen3Sequence]
    """Those that get their next token in the same pass."""
    files_beside_calls: bool = False
    """The group is of files, and there are calls: they should not have to wait for more than half of it."""


class Turns:
    """Remembers what came before, so that nobody waits for ever."""

    def __init__(self, device: str) -> None:
        """``device``: ``cuda`` or ``cpu``."""
        self._device = device
        self._last_was_catch_up = False
        self._passed_over = 0
        """Steps in a row in which files waited for calls."""

    def calls_first(self, ready: Sequence[Qwen3Sequence]) -> bool:
        """Whether files wait in this step for calls that have work. Asked once a step."""
        calls = any(row.lane is Lane.LIVE and not row.done for row in ready)
        first = calls and self._passed_over < PATIENCE
        waiting = any(row.lane is not Lane.LIVE and not row.closed and (row.done or row.behind) for row in ready)
        self._passed_over = self._passed_over + 1 if first and waiting else 0
        return first

    def next(
        self, behind: list[Qwen3Sequence], current: list[Qwen3Sequence], *, calls_first: bool, calls_seated: bool
    ) -> Turn:
        """``behind``: rows that must catch up; ``current``: those that need one token; both best lane first, not both empty.
        ``calls_seated``: a call has a slot, though it may have no work now."""
        if not calls_first:
            behind = [row for row in behind if row.lane is not Lane.LIVE] or behind
        self._last_was_catch_up = bool(behind) and self._catch_up(behind, current, calls_first)
        if not self._last_was_catch_up:
            return Turn([], _riders(current, current[0].lane))
        lane = behind[0].lane
        riders = _riders(current, lane)
        group = self._group(behind, len(riders), beside_calls=calls_seated)
        return Turn(group, riders, files_beside_calls=calls_seated and lane is not Lane.LIVE)

    def _catch_up(self, behind: list[Qwen3Sequence], current: list[Qwen3Sequence], calls_first: bool) -> bool:
        """A row of a lower lane takes at most every second step from a higher, and one of many from calls."""
        if not current or behind[0].lane <= current[0].lane:
            return True
        if current[0].lane is Lane.LIVE:
            return not calls_first
        return not self._last_was_catch_up

    def _group(self, behind: list[Qwen3Sequence], riders: int, *, beside_calls: bool) -> list[Qwen3Sequence]:
        """Rows that are computed together with the first, in order: calls among themselves, and not too much in all."""
        live = behind[0].lane is Lane.LIVE
        beside = GROUP_POSITIONS_BESIDE_CALLS if beside_calls else GROUP_POSITIONS
        bound = (GROUP_POSITIONS_OF_CALLS if live else beside)[self._device]
        group: list[Qwen3Sequence] = []
        total = riders
        for row in behind:
            total += row.cost()
            if group and ((row.lane is Lane.LIVE) != live or total > bound):
                break
            group.append(row)
        return group


def _riders(current: list[Qwen3Sequence], lane: Lane) -> list[Qwen3Sequence]:
    """Of the rows that need one token, those that are in a step of this lane: not so many that they would delay calls."""
    if lane is not Lane.LIVE:
        return current
    calls = [row for row in current if row.lane is Lane.LIVE]
    return calls + [row for row in current if row.lane is not Lane.LIVE][:RIDERS_BESIDE_CALLS]
