"""From logits to tokens, on the device: the host reads token and log probability of all rows in one copy."""

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


def unpack(packed: Tensor) -> tuple[list[int], list[float]]:
    """The one synchronisation of a step: copy to the host, then ids and log probabilities as lists."""
    host = packed.cpu()
    return host[0].tolist(), host[1].view(torch.float32).tolist()
