"""The text model's forward pass over our own key/value slots.

A *slot* is room for one sequence in tensors that never move. A pass computes a line of positions (``layout``), each of which
belongs to a slot: one of a row that needs its next token, hundreds of a new recording. Query heads that share a key/value head
read it together, so the cache is never expanded or copied.

Invariant: in a slot, positions below a row's own are valid, and nothing above is ever read. What pads a line writes to the
last position of a slot, which no sequence uses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from worker.engines.qwen3 import kernels
from worker.engines.qwen3.arithmetic import Arithmetic, HeadShape, LayerWeights, PlainArithmetic
from worker.engines.qwen3.config import TextConfig
from worker.engines.qwen3.layout import Layout
from worker.engines.qwen3.weights import TextModel


@dataclass(frozen=True, slots=True)
class TextShape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    eps: float
    rope_theta: float

    @classmethod
    def of(cls, config: TextConfig) -> TextShape:
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            vocabulary=config.vocab_size,
            eps=config.rms_norm_eps,
            rope_theta=config.rope_theta,
        )

    def slot_bytes(self, length: int, dtype: torch.dtype) -> int:
        """Device bytes of one slot of ``length`` positions."""
        return 2 * self.layers * self.kv_heads * self.head_dim * length * dtype.itemsize


class Decoder:
    """Text model with ``slots`` slots of ``length`` positions; the last position of each is scratch.

    Takes the weights out of ``model``, which is of no use afterwards.
    """

    def __init__(self, model: TextModel, head: Tensor, *, slots: int, length: int) -> None:
        self.shape = TextShape.of(model.config)
        self.slots = slots
        self.length = length
        self._embedding: Tensor = model.embed_tokens.weight
        self._head = head
        self.device, self.dtype = head.device, head.dtype
        self._layers = [_take_weights(layer, self.shape) for layer in model.layers]
        self._final_norm: Tensor = model.norm.weight
        self._cos, self._sin = _rotary_tables(self.shape, length, self.device, self.dtype)
        self.fused = kernels.available(self.device, self.shape.head_dim)
        """Whether the kernels do what stands between the products; only then can a pass be recorded."""
        size = (slots, self.shape.kv_heads, length, self.shape.head_dim)
        self._keys = [torch.zeros(size, device=self.device, dtype=self.dtype) for _ in self._layers]
        self._values = [torch.zeros(size, device=self.device, dtype=self.dtype) for _ in self._layers]

    @property
    def scratch(self) -> int:
        """The position that padding writes to."""
        return self.length - 1

    def embed(self, tokens: Tensor) -> Tensor:
        """``(…)`` token ids to ``(…, hidden)``."""
        return F.embedding(tokens, self._embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        """``(…, hidden)`` to ``(…, vocabulary)``, in the model's dtype."""
        return F.linear(hidden, self._head)

    def clear(self, slot: int) -> None:
        """Wipe a slot whose numbers went wrong."""
        for cache in (*self._keys, *self._values):
            cache[slot].zero_()

    def run(self, x: Tensor, layout: Layout, tile: int = kernels.TILE) -> Tensor:
        """Hidden states of a line of positions whose embeddings are ``x``, both ``(n, hidden)``; the slots hold them afterwards.

        ``tile``: of ``layout``. Reads nothing back: fit for a CUDA graph, where ``fused``.
        """
        arithmetic = self._arithmetic(layout, tile, x)
        more: Tensor | None = None
        for w, keys, values in zip(self._layers, self._keys, self._values, strict=True):
            x, more = arithmetic.layer(x, more, w, (keys, values))
        return arithmetic.add_norm(x, more, self._final_norm)[1]

    def _arithmetic(self, layout: Layout, tile: int, x: Tensor) -> Arithmetic:
        s = self.shape
        heads = HeadShape(s.heads, s.kv_heads, s.head_dim, s.eps)
        if not self.fused:
            return PlainArithmetic(heads, self._cos, self._sin, layout)
        out = torch.zeros(len(x), s.heads * s.head_dim, device=self.device, dtype=self.dtype)
        kind = kernels.FewRows if kernels.few(len(x), self._layers[0]) else kernels.FusedArithmetic
        return kind(heads, self._cos, self._sin, layout, tile=tile, out=out)


def _rotary_tables(shape: TextShape, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``(length, head_dim)`` each; the sine's first half is negated, which is the rotation of two halves."""
    exponent = torch.arange(0, shape.head_dim, 2, dtype=torch.float) / shape.head_dim
    angle = torch.arange(length).float()[:, None] * (1.0 / shape.rope_theta**exponent)
    sin = angle.sin()
    cos = torch.cat([angle.cos()] * 2, dim=-1)
    return cos.to(device, dtype), torch.cat([-sin, sin], dim=-1).to(device, dtype)


def _take_weights(layer: Any, shape: TextShape) -> LayerWeights:
    """Move a layer's weights into one of ours; what was fused is dropped there, so memory does not double."""
    attention, mlp = layer.self_attn, layer.mlp
    taken = LayerWeights(
        before_attention=layer.input_layernorm.weight,
        qkv=torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]),
        qk_norm=torch.cat(
            [attention.q_norm.weight.expand(shape.heads, -1), attention.k_norm.weight.expand(shape.kv_heads, -1)]
        ),
        out=attention.o_proj.weight,
        before_mlp=layer.post_attention_layernorm.weight,
        gate_up=torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
        down=mlp.down_proj.weight,
    )
    attention.q_proj = attention.k_proj = attention.v_proj = mlp.gate_proj = mlp.up_proj = None
    return taken
