"""What stands between the matrix products of both models, in plain torch: for the CPU, and where Triton is missing.

``kernels`` has the same on CUDA, in a few launches. Attention goes row by row here, so what is computed for a row does not
depend on its neighbours.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from worker.engines.qwen3.layout import Layout


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Of the decoder layers' attention; ``eps`` of all norms."""

    heads: int
    kv_heads: int
    width: int
    eps: float

    @property
    def every(self) -> int:
        """Query, key and value heads."""
        return self.heads + 2 * self.kv_heads


Cache = tuple[Tensor, Tensor]
"""Keys and values, each ``(slots, kv heads, length, width)``."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; linear weights as ``(out, in)``."""

    before_attention: Tensor
    qkv: Tensor
    """Query, key and value projections, stacked."""
    qk_norm: Tensor
    """``(heads + kv heads, width)``: weights of the norms over each head."""
    out: Tensor
    before_mlp: Tensor
    gate_up: Tensor
    down: Tensor


class Arithmetic(ABC):
    """One pass over one line of positions, whose hidden states are ``(n, hidden)``."""

    def __init__(self, shape: HeadShape) -> None:
        self.shape = shape

    def layer(self, x: Tensor, more: Tensor | None, w: LayerWeights, cache: Cache) -> tuple[Tensor, Tensor | None]:
        """One decoder layer over ``x + more``; returns two parts again, because adding is one with the next norm."""
        x, h = self.add_norm(x, more, w.before_attention)
        heads = F.linear(h, w.qkv).view(-1, self.shape.every, self.shape.width)
        x, h = self.add_norm(x, F.linear(self.attend(heads, w.qk_norm, cache), w.out), w.before_mlp)
        return x, F.linear(self.gated(F.linear(h, w.gate_up)), w.down)

    @abstractmethod
    def add_norm(self, x: Tensor, more: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """``x + more``, and that normed (RMS)."""

    @abstractmethod
    def attend(self, heads: Tensor, weight: Tensor, cache: Cache) -> Tensor:
        """Norm and rotate ``heads`` ``(n, every, width)``, write keys and values to the cache, attend.

        ``weight``: ``(heads + kv heads, width)``. Returns ``(n, heads * width)``.
        """

    @abstractmethod
    def gated(self, both: Tensor) -> Tensor:
        """``silu`` of the first half of the last dimension, times the second half."""


class PlainArithmetic(Arithmetic):
    """``cos`` and ``sin``: tables over positions; the sine carries the sign of the half that it turns."""

    def __init__(self, shape: HeadShape, cos: Tensor, sin: Tensor, layout: Layout) -> None:
        super().__init__(shape)
        self._layout = layout
        self._cos, self._sin = cos[layout.positions][:, None], sin[layout.positions][:, None]

    def add_norm(self, x: Tensor, more: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        x = x if more is None else x + more
        return x, F.rms_norm(x, weight.shape, weight, self.shape.eps)

    def attend(self, heads: Tensor, weight: Tensor, cache: Cache) -> Tensor:
        shape, layout = self.shape, self._layout
        normed = shape.heads + shape.kv_heads
        qk = F.rms_norm(heads[:, :normed], (shape.width,), None, shape.eps) * weight
        qk = torch.addcmul(qk * self._cos, torch.roll(qk, shape.width // 2, dims=-1), self._sin)
        keys, values = cache
        keys[layout.slots, :, layout.positions] = qk[:, shape.heads :]
        values[layout.slots, :, layout.positions] = heads[:, normed:]
        parts, at = [], 0
        for piece, mask in zip(layout.pieces, layout.masks, strict=True):
            stop = piece.start + piece.count
            q = qk[at : at + piece.count, : shape.heads].transpose(0, 1)[None]
            k, v = keys[piece.slot, :, :stop][None], values[piece.slot, :, :stop][None]
            seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
            parts.append(seen[0].transpose(0, 1).flatten(1))
            at += piece.count
        return torch.cat(parts)

    def gated(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate) * up


def attend_windows(qkv: Tensor, lengths: Sequence[int]) -> Tensor:
    """Each window over itself. ``qkv``: ``(n, 3, heads, width)``, windows behind each other; returns ``(n, heads * width)``."""
    parts = []
    for window in torch.split(qkv, list(lengths)):
        q, k, v = window.permute(1, 2, 0, 3)[:, None]
        parts.append(F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1))
    return torch.cat(parts)
