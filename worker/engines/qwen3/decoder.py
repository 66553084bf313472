"""The text model's forward pass over our own key/value slots.

A *slot* is room for one sequence in tensors that never move. Rows of a batch are slots; positions are per row. One layer
function serves all layers, with weights and cache as arguments. Query heads that share a key/value head become further
query positions of that head, so the cache is read once and never expanded.

Invariant: in a slot, positions below a row's own are valid; whatever lies above is finite and masked. Rows that take no part
in a step write to the last position of their slot, which no sequence uses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from worker.engines.qwen3 import kernels


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; linear weights as ``(out, in)``."""

    before_attention: Tensor
    qkv: Tensor
    """Query, key and value projections, stacked."""
    qk_norm: Tensor
    """``(query heads + key heads, head_dim)``: weights of the norms over each head."""
    out: Tensor
    before_mlp: Tensor
    gate_up: Tensor
    down: Tensor


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
    def of(cls, config: Any) -> TextShape:
        """From transformers' ``Qwen3Config``."""
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            vocabulary=config.vocab_size,
            eps=config.rms_norm_eps,
            rope_theta=config.rope_parameters["rope_theta"],
        )

    def slot_bytes(self, length: int, dtype: torch.dtype) -> int:
        """Device bytes of one slot of ``length`` positions."""
        return 2 * self.layers * self.kv_heads * self.head_dim * length * dtype.itemsize


class Decoder:
    """Text model with ``slots`` slots of ``length`` positions; the last position of each is scratch.

    Takes the weights out of ``model`` (a transformers ``Qwen3Model``), which is of no use afterwards.
    """

    def __init__(self, model: Any, head: Tensor, *, slots: int, length: int) -> None:
        self.shape = TextShape.of(model.config)
        self.slots = slots
        self.length = length
        self._embedding: Tensor = model.embed_tokens.weight
        self._head = head
        self.device, self.dtype = head.device, head.dtype
        self._layers = [_take_weights(layer, self.shape) for layer in model.layers]
        self._final_norm: Tensor = model.norm.weight
        self._cos, self._sin = _rotary_tables(self.shape, length, self.device, self.dtype)
        self._fused = kernels.available(self.device, self.shape.head_dim)
        size = (slots, self.shape.kv_heads, length, self.shape.head_dim)
        # Zeroed, because a weight of zero times a stray NaN is still NaN.
        self._keys = [torch.zeros(size, device=self.device, dtype=self.dtype) for _ in self._layers]
        self._values = [torch.zeros(size, device=self.device, dtype=self.dtype) for _ in self._layers]

    @property
    def scratch(self) -> int:
        """The position that rows without work write to."""
        return self.length - 1

    def embed(self, tokens: Tensor) -> Tensor:
        """``(…)`` token ids to ``(…, hidden)``."""
        return F.embedding(tokens, self._embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        """``(…, hidden)`` to ``(…, vocabulary)``, in the model's dtype."""
        return F.linear(hidden, self._head)

    def clear(self, slot: int) -> None:
        """Wipe a slot whose numbers went wrong, so that its next sequence does not inherit them."""
        for cache in (*self._keys, *self._values):
            cache[slot].zero_()

    def prefill(self, embeddings: Tensor, slots: Tensor) -> Tensor:
        """Whole prompts from position 0. ``embeddings``: ``(rows, n, hidden)``, padded at the end; ``slots``: ``(rows,)``.

        Returns hidden states ``(rows, n, hidden)``. What padding writes lies above the row's own end.
        """
        rows, n, _ = embeddings.shape
        positions = torch.arange(n, device=self.device).expand(rows, n)

        def attend(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            if self._fused:
                k, v = keys[slots, :, :n], values[slots, :, :n]
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        return self._run(embeddings, slots[:, None], positions, attend)

    def extend(self, embeddings: Tensor, slots: Tensor, starts: Tensor, span: int) -> Tensor:
        """Go on in slots that hold ``starts`` valid positions each: ``(rows, n, hidden)`` more, causal among themselves.

        ``span``: no position at or above it is valid after the call; bounds what is read.
        """
        n = embeddings.shape[1]
        positions = starts[:, None] + torch.arange(n, device=self.device)
        # Once for all layers: as many copies as query heads share a key head.
        mask = self._mask(positions, span).repeat(1, 1, self.shape.heads // self.shape.kv_heads, 1)
        # Padding must not write beyond the slot.
        positions = positions.clamp(max=self.scratch)

        def attend(q: Tensor, _k: Tensor, _v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return _grouped(q, keys[slots, :, :span], values[slots, :, :span], mask)

        return self._run(embeddings, slots[:, None], positions, attend)

    def step(self, tokens: Tensor, positions: Tensor, span: int, slots: Tensor | None = None) -> Tensor:
        """One token a row. Row i is slot i, or ``slots[i]`` where those are given. Returns ``(rows, hidden)``.

        A row without work has the scratch position. Fixed shapes and no reads by the host: fit for a CUDA graph. With
        ``slots`` what is read of the cache is copied first, which pays where only a few of many slots take part.
        """
        if slots is not None:
            return self.extend(self.embed(tokens)[:, None], slots, positions, span)[:, 0]
        rows = tokens.shape[0]
        mask = self._mask(positions[:, None], span)

        def attend(q: Tensor, _k: Tensor, _v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return _grouped(q, keys[:rows, :, :span], values[:rows, :, :span], mask)

        every = torch.arange(rows, device=self.device)[:, None]
        return self._run(self.embed(tokens)[:, None], every, positions[:, None], attend)[:, 0]

    def _mask(self, positions: Tensor, span: int) -> Tensor:
        """Additive, ``(rows, 1, n, span)``: each position sees itself and what stands before it."""
        seen = torch.arange(span, device=self.device) <= positions[..., None]
        mask = torch.zeros(seen.shape, device=self.device, dtype=self.dtype).masked_fill_(~seen, -torch.inf)
        return mask[:, None]

    def _run(self, x: Tensor, slots: Tensor, positions: Tensor, attend: Any) -> Tensor:
        rotary = self._cos[positions][:, :, None], self._sin[positions][:, :, None]
        if self._fused:
            rotary = self._cos, self._sin
            positions, slots = positions.contiguous(), slots.expand_as(positions).contiguous()
        for weights, keys, values in zip(self._layers, self._keys, self._values, strict=True):
            split = _split_fused if self._fused else _split
            x = _layer(x, weights, (keys, values), slots, positions, rotary, attend, split, self.shape)
        return F.rms_norm(x, (self.shape.hidden,), self._final_norm, self.shape.eps)


def _layer(
    x: Tensor,
    w: LayerWeights,
    cache: tuple[Tensor, Tensor],
    slots: Tensor,
    positions: Tensor,
    rotary: tuple[Tensor, Tensor],
    attend: Any,
    split: Any,
    shape: TextShape,
) -> Tensor:
    """One decoder layer over ``x`` ``(rows, n, hidden)``; writes the cache at ``(slots, positions)``, then attends."""
    rows, n, _ = x.shape
    every = shape.heads + 2 * shape.kv_heads
    h = F.rms_norm(x, (shape.hidden,), w.before_attention, shape.eps)
    heads = F.linear(h, w.qkv).view(rows, n, every, shape.head_dim)
    q, k, v = split(heads, w.qk_norm, rotary, positions, slots, cache, shape)
    h = attend(q, k, v, *cache)
    x = x + F.linear(h.transpose(1, 2).reshape(rows, n, -1), w.out)
    h = F.rms_norm(x, (shape.hidden,), w.before_mlp, shape.eps)
    both = F.linear(h, w.gate_up)
    if split is _split_fused:
        return x + F.linear(kernels.gated(both), w.down)
    gate, up = both.chunk(2, dim=-1)
    return x + F.linear(F.silu(gate) * up, w.down)


def _split(
    heads: Tensor,
    weight: Tensor,
    rotary: tuple[Tensor, Tensor],
    positions: Tensor,
    slots: Tensor,
    cache: tuple[Tensor, Tensor],
    shape: TextShape,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, each ``(rows, heads, n, width)``, normed and rotated; keys and values are in the cache."""
    normed = shape.heads + shape.kv_heads
    qk, v = heads[:, :, :normed], heads[:, :, normed:]
    qk = _rotate(F.rms_norm(qk, (shape.head_dim,), None, shape.eps) * weight, *rotary)
    q, k = qk[:, :, : shape.heads], qk[:, :, shape.heads :]
    cache[0][slots, :, positions] = k
    cache[1][slots, :, positions] = v
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _split_fused(
    heads: Tensor,
    weight: Tensor,
    rotary: tuple[Tensor, Tensor],
    positions: Tensor,
    slots: Tensor,
    cache: tuple[Tensor, Tensor],
    shape: TextShape,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same in one launch."""
    q = kernels.split_heads(heads, weight, *rotary, positions, slots, cache, heads=shape.heads, eps=shape.eps)
    return q, q, q  # keys and values are read from the cache


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions; ``sin`` carries the sign of the half that it turns."""
    half = heads.shape[-1] // 2
    return torch.addcmul(heads * cos, torch.roll(heads, half, dims=-1), sin)


def _grouped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention of ``q`` ``(rows, heads, n, d)`` over fewer key heads ``(rows, kv_heads, span, d)``.

    ``mask``: ``(rows, 1, n or group * n, span)``; one row does for all where n is 1.
    """
    rows, heads, n, width = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    folded = q.reshape(rows, kv_heads, group * n, width)
    mask = mask.expand(rows, kv_heads, group * n, mask.shape[-1])
    return F.scaled_dot_product_attention(folded, k, v, attn_mask=mask).reshape(rows, heads, n, width)


def _rotary_tables(shape: TextShape, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``(length, head_dim)`` each; the sine's first half is negated, which is the rotation of two halves."""
    exponent = torch.arange(0, shape.head_dim, 2, dtype=torch.float) / shape.head_dim
    angle = torch.arange(length).float()[:, None] * (1.0 / shape.rope_theta**exponent)
    sin = angle.sin()
    cos = torch.cat([angle.cos()] * 2, dim=-1)
    return cos.to(device, dtype), torch.cat([-sin, sin], dim=-1).to(device, dtype)


def _take_weights(layer: Any, shape: TextShape) -> LayerWeights:
    """Move a transformers layer's weights into one of ours; what was fused is dropped there, so memory does not double."""
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
