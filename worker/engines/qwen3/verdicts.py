"""What the device itself says of a token that it chose: the text ends with it, or runs away in a pattern.

Beside keys and values, each slot holds the ids of its positions. So a pass can look back along a row's line without asking the
host, and the verdict travels with token and score in the one transfer of the pass. As with keys and values, ids below a row's
own position are valid, and nothing above is read.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from worker.engines.qwen3.guard import MAX_PERIOD, MIN_REPEATS, SINGLE_REPEATS, span_of_runaway

try:
    import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
except ImportError:
    triton = None

GOES_ON, ENDS = 0, -1
"""Verdicts; any other is the period of a run-away in tokens, the shortest there is."""
_PERIODS = range(1, MAX_PERIOD + 1)
_LOOK_BACK = max(span_of_runaway(period) - period for period in _PERIODS)
"""Tokens that must equal those one period before them, at the most."""


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _judge(  # type: ignore[no-untyped-def]
        line, ids, spots, ends, out, length,
        ENDINGS: tl.constexpr, MAX_PERIOD: tl.constexpr, MIN: tl.constexpr, SINGLE: tl.constexpr, BACK: tl.constexpr,  # noqa: N803
    ):  # fmt: skip
        row, rows = tl.program_id(0), tl.num_programs(0)
        new = tl.load(ids + row)
        begin = tl.load(spots + row).to(tl.int32)
        slot = tl.load(spots + rows + row)
        place = tl.load(spots + 2 * rows + row).to(tl.int32) + 1
        # How far the line reaches back, the new token included.
        reach = place + 1 - begin
        base = line + slot * length + place
        back = tl.arange(0, BACK)
        tail = tl.where(back == 0, new, tl.load(base - back, mask=(back > 0) & (back < reach), other=-1))
        verdict = 0
        for period in range(1, MAX_PERIOD + 1):
            earlier = tl.load(base - back - period, mask=back + period < reach, other=-2)
            matches = tl.min(tl.where(tail == earlier, BACK, back), axis=0)
            needed = period * (tl.maximum(MIN, (SINGLE + period - 1) // period) - 1)
            verdict = tl.where((verdict == 0) & (matches >= needed), period, verdict)
        for n in tl.static_range(ENDINGS):
            verdict = tl.where(new == tl.load(ends + n), -1, verdict)
        tl.store(out + row, verdict)


class Verdicts:
    """The ids in ``slots`` slots of ``length`` positions. ``ends``: ids that end a text. ``fused``: Triton runs here."""

    def __init__(self, *, slots: int, length: int, ends: Collection[int], device: torch.device, fused: bool) -> None:
        self._line = torch.zeros(slots, length, dtype=torch.int32, device=device)
        self._ends = torch.tensor(sorted(ends), dtype=torch.int32, device=device)
        self._needed = torch.tensor([span_of_runaway(period) - period for period in _PERIODS], device=device)
        self._fused = fused

    def remember(self, ids: Tensor, slots: Tensor, positions: Tensor) -> None:
        """Of a line of positions, each ``(n,)``; a pass does it before it judges."""
        self._line[slots, positions] = ids.int()

    def judge(self, packed: Tensor, spots: Tensor) -> Tensor:
        """``packed`` ``(2, n)`` of chosen tokens with a verdict on each: ``(3, n)``. Reads nothing back.

        ``spots``, ``(3, n)``: the position in which the text of the token's row begins, its slot, and the position before the token.
        """
        judge = self._judge_fused if self._fused else self._judge_plain
        return torch.cat([packed, judge(packed[0], spots.contiguous())[None]])

    def _judge_fused(self, ids: Tensor, spots: Tensor) -> Tensor:
        out = torch.empty_like(ids)
        kernel: Any = _judge
        kernel[(len(ids),)](
            self._line, ids, spots, self._ends, out, self._line.shape[1],
            ENDINGS=len(self._ends), MAX_PERIOD=MAX_PERIOD, MIN=MIN_REPEATS, SINGLE=SINGLE_REPEATS,
            BACK=triton.next_power_of_2(_LOOK_BACK), num_warps=1,
        )  # fmt: skip
        return out

    def _judge_plain(self, ids: Tensor, spots: Tensor) -> Tensor:
        """The reference."""
        begins, slots, positions = spots
        back = torch.arange(_LOOK_BACK + MAX_PERIOD, device=ids.device)
        places = positions[:, None] + 1 - back
        tail = self._line[slots[:, None], places.clamp(0, self._line.shape[1] - 1)]
        tail[:, 0] = ids
        # What lies before the line is unlike anything else.
        tail = torch.where(places >= begins[:, None], tail, -1 - back)
        equal = tail.unfold(1, _LOOK_BACK, 1)[:, 1:] == tail[:, None, :_LOOK_BACK]
        runs = (equal | (back[:_LOOK_BACK] >= self._needed[:, None])).all(dim=-1)
        periods = torch.where(runs.any(dim=1), runs.int().argmax(dim=1) + 1, GOES_ON)
        return torch.where(torch.isin(ids, self._ends), ENDS, periods).int()
