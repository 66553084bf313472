"""From logits to tokens, on the device: token and log probability of all rows travel to the host in one copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def greedy(logits: Tensor) -> Tensor:
    """``(rows, vocabulary)`` to packed ``(2, rows)`` int32: token ids, and the bits of their float32 log probabilities."""
    scores = logits.float()
    best, ids = scores.max(dim=-1)
    return _pack(ids, best - scores.logsumexp(dim=-1))


def sampled(logits: Tensor, temperatures: Sequence[float], generator: torch.Generator) -> Tensor:
    """As ``greedy``, but rows with a temperature above 0 are drawn. Log probabilities are those at temperature 1."""
    scores = logits.float()
    heat = torch.tensor(temperatures, device=logits.device)[:, None]
    drawn = torch.multinomial((scores / heat.clamp(min=1e-3)).softmax(dim=-1), 1, generator=generator)
    ids = torch.where(heat > 0, drawn, scores.argmax(dim=-1, keepdim=True))
    return _pack(ids[:, 0], (scores.gather(1, ids)[:, 0] - scores.logsumexp(dim=-1)))


def _pack(ids: Tensor, logprobs: Tensor) -> Tensor:
    return torch.stack([ids.to(torch.int32), logprobs.float().view(torch.int32)])


class Landing:
    """Packed tokens on their way to the host, which may launch other work meanwhile."""

    def __init__(self, packed: Tensor) -> None:
        self._host = packed
        self._there: torch.cuda.Event | None = None
        if packed.is_cuda:
            self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
            self._there = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._there.record()

    def unpack(self) -> tuple[list[int], list[float]]:
        """Wait for them: ids and log probabilities as lists."""
        if self._there is not None:
            self._there.synchronize()
        return self._host[0].tolist(), self._host[1].view(torch.float32).tolist()


def unpack(packed: Tensor) -> tuple[list[int], list[float]]:
    """At once."""
    return Landing(packed).unpack()
