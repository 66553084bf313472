"""One decode step for many rows: on CUDA a recorded graph per number of rows and span, on the CPU the same code run plainly.

A step of eager launches costs the same 35 ms for one row as for a hundred, all of it on the host; a graph is one launch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.engines.qwen3.decoder import Decoder
from worker.engines.qwen3.sampling import greedy

_SPANS = (256, 512, 1024)
_CPU_SPAN = 64
"""On the CPU the span is rounded up to this; nothing is recorded there."""

LogitsToTokens = Callable[[Tensor], Tensor]
"""``(rows, vocabulary)`` logits to packed tokens, see ``sampling``."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a decode step: ``token`` is written at ``position`` of ``slot``."""

    slot: int
    token: int
    position: int


class Stepper:
    """Runs decode steps. Row i of every batch is slot i; rows in between that take no part write to scratch."""

    def __init__(self, decoder: Decoder, *, graphs: bool) -> None:
        self._decoder = decoder
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._use_graphs = graphs
        self._host = torch.zeros(2, decoder.slots, dtype=torch.long, pin_memory=decoder.device.type == "cuda")
        self._inputs = torch.zeros(2, decoder.slots, dtype=torch.long, device=decoder.device)
        self.buckets = _doubling(decoder.slots)
        self.spans = [s for s in _SPANS if s < decoder.length] + [decoder.length]

    def record(self, report: Callable[[float], None]) -> None:
        """Record every graph; ``report`` gets the share that is done. Largest first, so that all share one pool."""
        if not self._use_graphs:
            return
        pool = torch.cuda.graph_pool_handle()
        wanted = [(rows, span) for rows in reversed(self.buckets) for span in reversed(self.spans)]
        self._inputs[1].fill_(self._decoder.scratch)
        for number, (rows, span) in enumerate(wanted):
            report(number / len(wanted))
            stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._compute(rows, span, greedy)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                packed = self._compute(rows, span, greedy)
            self._graphs[rows, span] = graph, packed

    def run(self, rows: list[Row], choose: LogitsToTokens | None = None) -> Tensor:
        """Packed tokens of ``rows``, in their order, on the device. ``choose``: greedy unless given (then never a graph)."""
        size, span = self._size(rows)
        tokens, positions = self._host[0], self._host[1]
        tokens[:size] = 0
        positions[:size] = self._decoder.scratch
        slots = [row.slot for row in rows]
        tokens[slots] = torch.tensor([row.token for row in rows])
        positions[slots] = torch.tensor([row.position for row in rows])
        self._inputs[:, :size].copy_(self._host[:, :size], non_blocking=True)
        index = torch.tensor(slots).to(self._decoder.device, non_blocking=True)
        if choose is not None:
            return choose(self._logits(size, span)[index])
        recorded = self._graphs.get((size, span))
        if recorded is None:
            return self._compute(size, span, greedy)[:, index]
        graph, packed = recorded
        graph.replay()
        return packed[:, index]

    def _size(self, rows: list[Row]) -> tuple[int, int]:
        size = max(row.slot for row in rows) + 1
        reach = max(row.position for row in rows) + 1
        if not self._use_graphs:
            return size, min(-(-reach // _CPU_SPAN) * _CPU_SPAN, self._decoder.length)
        return next(b for b in self.buckets if b >= size), next(s for s in self.spans if s >= reach)

    def _compute(self, rows: int, span: int, choose: LogitsToTokens) -> Tensor:
        return choose(self._logits(rows, span))

    def _logits(self, rows: int, span: int) -> Tensor:
        hidden = self._decoder.step(self._inputs[0, :rows], self._inputs[1, :rows], span)
        return self._decoder.logits(hidden)


def _doubling(most: int) -> list[int]:
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(2 * sizes[-1], most))
    return sizes
