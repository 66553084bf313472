"""One decode step for many rows: on CUDA a recorded graph per number of rows and span, on the CPU the same code run plainly.

A step of eager launches costs the same 35 ms for one row as for a hundred, all of it on the host; a graph is one launch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worker.engines.qwen3.decoder import Decoder
from worker.engines.qwen3.graphs import Recordings
from worker.engines.qwen3.sampling import greedy

_SPANS = (256, 512, 1024)
_CPU_SPAN = 64
"""On the CPU the span is rounded up to this; nothing is recorded there."""

_SPARSE_ROWS = (8, 16, 32, 64, 128)
_SPARSE_SPANS = (256, 512)
_DENSE = 0.22
"""From this share of rows with work on, all slots up to the last are computed in place, without copying any."""

LogitsToTokens = Callable[[Tensor], Tensor]
"""``(rows, vocabulary)`` logits to packed tokens, see ``sampling``."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a decode step: ``token`` is written at ``position`` of ``slot``."""

    slot: int
    token: int
    position: int


class Stepper:
    """Runs decode steps.

    A *dense* batch is all slots up to the last one with work; rows in between write to scratch. A *sparse* one is the rows
    with work alone, wherever they sit: a few of hundreds of calls.
    """

    def __init__(self, decoder: Decoder, *, graphs: bool) -> None:
        self._decoder = decoder
        self._graphs: Recordings | None = None
        self._use_graphs = graphs
        cuda = decoder.device.type == "cuda"
        # Tokens, positions, and slots of a sparse batch.
        self._host = torch.zeros(3, decoder.slots, dtype=torch.long, pin_memory=cuda)
        self._inputs = torch.zeros(3, decoder.slots, dtype=torch.long, device=decoder.device)
        self.buckets = _doubling(decoder.slots)
        self.spans = [s for s in _SPANS if s < decoder.length] + [decoder.length]

    def record(self, pool: Any, report: Callable[[float], None]) -> None:
        """Record every graph; ``report`` gets the share that is done."""
        if not self._use_graphs:
            return
        self._graphs = Recordings(pool)
        wanted = [(rows, span, 0) for rows in reversed(self.buckets) for span in reversed(self.spans)]
        sparse = [rows for rows in reversed(_SPARSE_ROWS) if rows < self._decoder.slots]
        wanted += [
            (rows, span, 1) for rows in sparse for span in reversed(_SPARSE_SPANS) if span < self._decoder.length
        ]
        self._inputs[1].fill_(self._decoder.scratch)
        for number, shape in enumerate(wanted):
            report(number / len(wanted))
            rows, span, by_slot = shape
            inputs = tuple(self._inputs[:3, :rows]) if by_slot else tuple(self._inputs[:2, :rows])
            self._graphs.record(shape, inputs, lambda *given, span=span: greedy(self._logits(*given, span=span)))

    def run(self, rows: list[Row], choose: LogitsToTokens | None = None) -> Tensor:
        """Packed tokens of ``rows``, in their order, on the device. ``choose``: greedy unless given (then never a graph)."""
        if (shape := self._sparse(rows)) is not None and choose is None and self._graphs is not None:
            return self._run_sparse(rows, shape)
        size, span = self._size(rows)
        tokens, positions = self._host[0], self._host[1]
        tokens[:size] = 0
        positions[:size] = self._decoder.scratch
        slots = [row.slot for row in rows]
        tokens[slots] = torch.tensor([row.token for row in rows])
        positions[slots] = torch.tensor([row.position for row in rows])
        self._inputs[:2, :size].copy_(self._host[:2, :size], non_blocking=True)
        index = torch.tensor(slots).to(self._decoder.device, non_blocking=True)
        if choose is not None:
            return choose(self._logits(self._inputs[0, :size], self._inputs[1, :size], span=span)[index])
        if self._graphs is None:
            return greedy(self._logits(self._inputs[0, :size], self._inputs[1, :size], span=span))[:, index]
        return self._graphs.replay((size, span, 0))[:, index]

    def _sparse(self, rows: list[Row]) -> tuple[int, int, int] | None:
        """Shape of the sparse graph that would do for these rows, if it is worth it."""
        size = max(row.slot for row in rows) + 1
        count = next((n for n in _SPARSE_ROWS if n >= len(rows)), None)
        span = next((s for s in _SPARSE_SPANS if s > max(row.position for row in rows)), None)
        if count is None or span is None or count > _DENSE * size:
            return None
        shape = count, span, 1
        return shape if self._graphs is not None and shape in self._graphs else None

    def _run_sparse(self, rows: list[Row], shape: tuple[int, int, int]) -> Tensor:
        assert self._graphs is not None
        size, count = shape[0], len(rows)
        filler = [(0, self._decoder.scratch, rows[0].slot)] * (size - count)
        lines = [(row.token, row.position, row.slot) for row in rows]
        self._host[:, :size] = torch.tensor([*lines, *filler]).T
        self._inputs[:, :size].copy_(self._host[:, :size], non_blocking=True)
        return self._graphs.replay(shape)[:, :count]

    def _size(self, rows: list[Row]) -> tuple[int, int]:
        size = max(row.slot for row in rows) + 1
        reach = max(row.position for row in rows) + 1
        if not self._use_graphs:
            return size, min(-(-reach // _CPU_SPAN) * _CPU_SPAN, self._decoder.length)
        return next(b for b in self.buckets if b >= size), next(s for s in self.spans if s >= reach)

    def _logits(self, tokens: Tensor, positions: Tensor, slots: Tensor | None = None, *, span: int) -> Tensor:
        return self._decoder.logits(self._decoder.step(tokens, positions, span, slots))


def _doubling(most: int) -> list[int]:
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(2 * sizes[-1], most))
    return sizes
