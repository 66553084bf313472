"""CUDA graphs by shape: work that is a thousand launches for the host becomes one.

Graphs of one ``Recordings`` share one pool of memory, so what a replay returns is valid until the next replay, and work is
recorded largest first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, ...]


class Recordings:
    """``work(*inputs)`` over static inputs of a bucket's shape; the caller copies into them and replays."""

    def __init__(self, pool: Any) -> None:
        """``pool``: from ``torch.cuda.graph_pool_handle()``."""
        self._pool = pool
        self._recorded: dict[Shape, tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Tensor]] = {}

    def __bool__(self) -> bool:
        return bool(self._recorded)

    def __contains__(self, shape: Shape) -> bool:
        return shape in self._recorded

    def record(self, shape: Shape, inputs: tuple[Tensor, ...], work: Callable[..., Tensor]) -> None:
        """Run once for what is set up lazily, then record. ``work`` must not read anything back to the host.

        ``torch.cuda.graph`` gives cached memory back before each recording, at the start and never later. Recording without it was
        tried: it takes as long, and 2.4 GB more stay reserved.
        """
        stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work(*inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = work(*inputs)
        self._recorded[shape] = graph, inputs, output

    def inputs(self, shape: Shape) -> tuple[Tensor, ...]:
        return self._recorded[shape][1]

    def replay(self, shape: Shape) -> Tensor:
        graph, _, output = self._recorded[shape]
        graph.replay()
        return output


def bucket(buckets: Sequence[int], wanted: int) -> int | None:
    """The smallest that is large enough, if any is."""
    return next((size for size in buckets if size >= wanted), None)
