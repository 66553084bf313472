"""From logits to tokens, on the device: tokens, log probabilities and verdicts of all rows travel to the host in one copy."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_LEAST = torch.finfo(torch.float32).tiny
LogitsToTokens = Callable[[Tensor], Tensor]
"""``(rows, vocabulary)`` logits to packed tokens."""


def greedy(logits: Tensor) -> Tensor:
    """``(rows, vocabulary)`` to packed ``(2, rows)`` int32: token ids, and the bits of their float32 log probabilities."""
    scores = logits.float()
    best, ids = scores.max(dim=-1)
    return _pack(ids, best - scores.logsumexp(dim=-1))


def sampled(logits: Tensor, temperatures: Sequence[float], generator: torch.Generator) -> Tensor:
    """As ``greedy``, but rows with a temperature above 0 are drawn. Log probabilities are those at temperature 1.

    The largest of probabilities over exponential noise is a draw by the probabilities (the exponential race). ``multinomial`` would do,
    too, but one row whose numbers overflowed fails all of them there, and on CUDA the whole process.
    """
    scores = logits.float()
    heat = torch.tensor(temperatures, device=logits.device)[:, None]
    odds = (scores / heat.clamp(min=1e-3)).softmax(dim=-1)
    noise = torch.empty_like(odds).exponential_(generator=generator).clamp_(min=_LEAST)
    ids = torch.where(heat > 0, odds.div_(noise).argmax(dim=-1, keepdim=True), scores.argmax(dim=-1, keepdim=True))
    return _pack(ids[:, 0], (scores.gather(1, ids)[:, 0] - scores.logsumexp(dim=-1)))


def _pack(ids: Tensor, logprobs: Tensor) -> Tensor:
    return torch.stack([ids.to(torch.int32), logprobs.float().view(torch.int32)])


class Mark:
    """A moment in the device's work; where that is the CPU, now."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._now = 0
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._now = time.perf_counter_ns()

    def wait(self) -> None:
        """Return when the device has come here."""
        if self._event is not None:
            self._event.synchronize()

    def since(self, earlier: Mark) -> int:
        """Nanoseconds between two moments that have both passed."""
        if self._event is None or earlier._event is None:
            return self._now - earlier._now
        return int(earlier._event.elapsed_time(self._event) * 1e6)


class Chosen(NamedTuple):
    """Tokens in their order, with what is known of each."""

    ids: list[int]
    logprobs: list[float]
    verdicts: list[int]
    """See ``verdicts``."""

    def part(self, start: int, stop: int) -> Chosen:
        return Chosen(self.ids[start:stop], self.logprobs[start:stop], self.verdicts[start:stop])


class Landing:
    """Packed tokens and their verdicts, ``(3, n)``, on their way to the host, which may launch other work meanwhile."""

    def __init__(self, packed: Tensor) -> None:
        self._host = packed
        if packed.is_cuda:
            self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
        self.there = Mark(packed.device)

    def unpack(self) -> Chosen:
        """Wait for them."""
        self.there.wait()
        return Chosen(self._host[0].tolist(), self._host[1].view(torch.float32).tolist(), self._host[2].tolist())
