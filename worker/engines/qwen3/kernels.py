"""What stands between the matrix products of both models, on CUDA, in Triton.

As plain launches these are a dozen passes over memory a layer, and take more time than the products. Values are rounded
where the plain code rounds them. Attention reads keys and values where they lie in their slots, row after row of a line
(the online softmax of FlashAttention, Dao et al. 2022). Where Triton (or the C compiler that it needs) is missing, ``available``
says so, and the plain code runs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from worker.engines.qwen3.arithmetic import Arithmetic, Cache, HeadShape, LayerWeights
from worker.engines.qwen3.layout import Layout

try:
    import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
except ImportError:
    triton = None

DECODE_TILE = 8
"""Positions of a row that a tile of attention has at most where rows need one token each; enough for the matrix units."""
TILE = 32
"""The same where rows catch up."""
WINDOW_TILE = 64
"""The same in the encoder, whose windows have up to 104."""


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _split_heads(  # type: ignore[no-untyped-def]
        qkv, weight, cos, sin, positions, slots, queries, keys, values, length, eps,
        HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
    ):  # fmt: skip
        # A block of heads is of one kind, because its size divides the number of each.
        token = tl.program_id(0).to(tl.int64)
        block = tl.program_id(1) * BLOCK
        head = block + tl.arange(0, BLOCK)[:, None]
        lane = tl.arange(0, WIDTH)[None, :]
        other = (lane + WIDTH // 2) % WIDTH
        base = qkv + (token * (HEADS + 2 * KV_HEADS) + head) * WIDTH
        x = tl.load(base + lane)
        position = tl.load(positions + token)
        slot = tl.load(slots + token)
        if block < HEADS + KV_HEADS:
            kind = x.dtype
            wide = x.to(tl.float32)
            scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / WIDTH + eps)[:, None]
            turned = tl.load(base + other).to(tl.float32) * scale
            own = (wide * scale).to(kind) * tl.load(weight + head * WIDTH + lane)
            turned = turned.to(kind) * tl.load(weight + head * WIDTH + other)
            c = tl.load(cos + position * WIDTH + lane)
            s = tl.load(sin + position * WIDTH + lane)
            x = ((own * c).to(tl.float32) + turned.to(tl.float32) * s.to(tl.float32)).to(kind)
        if block < HEADS:
            tl.store(queries + (token * HEADS + head) * WIDTH + lane, x)
        elif block < HEADS + KV_HEADS:
            tl.store(keys + ((slot * KV_HEADS + head - HEADS) * length + position) * WIDTH + lane, x)
        else:
            tl.store(values + ((slot * KV_HEADS + head - HEADS - KV_HEADS) * length + position) * WIDTH + lane, x)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _attend_slots(  # type: ignore[no-untyped-def]
        queries, keys, values, slots, positions, tiles, out, length, scale,
        HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr,  # noqa: N803
        LINES: tl.constexpr, SPAN: tl.constexpr,  # noqa: N803
    ):  # fmt: skip
        # Query heads that share a key head are further lines of the same tile, so the cache is read once for all of them.
        first = tl.load(tiles + 2 * tl.program_id(0))
        count = tl.load(tiles + 2 * tl.program_id(0) + 1).to(tl.int32)
        kv_head = tl.program_id(1)
        if count > 0:
            slot = tl.load(slots + first)
            start = tl.load(positions + first).to(tl.int32)
            line = tl.arange(0, LINES)
            lane = tl.arange(0, WIDTH)
            token = line // (HEADS // KV_HEADS)
            head = kv_head * (HEADS // KV_HEADS) + line % (HEADS // KV_HEADS)
            where = ((first + token) * HEADS + head)[:, None] * WIDTH + lane[None, :]
            inside = (token < count)[:, None]
            q = tl.load(queries + where, mask=inside, other=0.0)
            base = (slot * KV_HEADS + kv_head) * length * WIDTH
            peak = tl.full((LINES,), float("-inf"), tl.float32)
            total = tl.zeros((LINES,), tl.float32)
            sum_ = tl.zeros((LINES, WIDTH), tl.float32)
            end = start + count
            for at in range(0, end, SPAN):
                place = at + tl.arange(0, SPAN)
                there = place < end
                k = tl.load(keys + base + place[None, :] * WIDTH + lane[:, None], mask=there[None, :], other=0.0)
                score = tl.dot(q, k, input_precision="ieee") * scale
                score = tl.where(place[None, :] <= start + token[:, None], score, float("-inf"))
                higher = tl.maximum(peak, tl.max(score, axis=1))
                shrink = tl.exp2(peak - higher)
                p = tl.exp2(score - higher[:, None])
                total = total * shrink + tl.sum(p, axis=1)
                v = tl.load(values + base + place[:, None] * WIDTH + lane[None, :], mask=there[:, None], other=0.0)
                sum_ = sum_ * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
                peak = higher
            tl.store(out + where, (sum_ / total[:, None]).to(q.dtype), mask=inside)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _attend_windows(  # type: ignore[no-untyped-def]
        qkv, tiles, out, scale,
        HEADS: tl.constexpr, WIDTH: tl.constexpr, LINES: tl.constexpr, SPAN: tl.constexpr,  # noqa: N803
    ):  # fmt: skip
        first = tl.load(tiles + 4 * tl.program_id(0))
        count = tl.load(tiles + 4 * tl.program_id(0) + 1).to(tl.int32)
        begin = tl.load(tiles + 4 * tl.program_id(0) + 2)
        length = tl.load(tiles + 4 * tl.program_id(0) + 3).to(tl.int32)
        head = tl.program_id(1)
        if count > 0:
            line = tl.arange(0, LINES)
            lane = tl.arange(0, WIDTH)
            inside = (line < count)[:, None]
            q = tl.load(
                qkv + ((first + line) * 3 * HEADS + head)[:, None] * WIDTH + lane[None, :], mask=inside, other=0.0
            )
            peak = tl.full((LINES,), float("-inf"), tl.float32)
            total = tl.zeros((LINES,), tl.float32)
            sum_ = tl.zeros((LINES, WIDTH), tl.float32)
            for at in range(0, length, SPAN):
                place = at + tl.arange(0, SPAN)
                there = place < length
                key = (begin + place) * 3 * HEADS + HEADS + head
                k = tl.load(qkv + key[None, :] * WIDTH + lane[:, None], mask=there[None, :], other=0.0)
                score = tl.dot(q, k, input_precision="ieee") * scale
                score = tl.where(there[None, :], score, float("-inf"))
                higher = tl.maximum(peak, tl.max(score, axis=1))
                shrink = tl.exp2(peak - higher)
                p = tl.exp2(score - higher[:, None])
                total = total * shrink + tl.sum(p, axis=1)
                v = tl.load(qkv + (key + HEADS)[:, None] * WIDTH + lane[None, :], mask=there[:, None], other=0.0)
                sum_ = sum_ * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
                peak = higher
            where = ((first + line) * HEADS + head)[:, None] * WIDTH + lane[None, :]
            tl.store(out + where, (sum_ / total[:, None]).to(q.dtype), mask=inside)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _few_rows(  # type: ignore[no-untyped-def]
        x, norm, weight, add, out, eps,
        ROWS: tl.constexpr, DEPTH: tl.constexpr, WIDE: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
        NORM: tl.constexpr, ADD: tl.constexpr, GATE: tl.constexpr,  # noqa: N803
    ):  # fmt: skip
        n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        line = n[:, None].to(tl.int64) * DEPTH
        kind = x.dtype.element_ty
        for row in tl.static_range(ROWS):
            scale = 1.0
            if NORM:
                squares = tl.zeros((STEP,), tl.float32)
                for at in tl.static_range(0, DEPTH, STEP):
                    value = tl.load(x + row * DEPTH + at + tl.arange(0, STEP)).to(tl.float32)
                    squares += value * value
                scale = tl.rsqrt(tl.sum(squares, axis=0) / DEPTH + eps)
            total = tl.zeros((BLOCK, STEP), tl.float32)
            second = tl.zeros((BLOCK, STEP), tl.float32)
            for at in tl.static_range(0, DEPTH, STEP):
                k = at + tl.arange(0, STEP)
                value = tl.load(x + row * DEPTH + k).to(tl.float32)
                if NORM:
                    value = (value * scale * tl.load(norm + k).to(tl.float32)).to(kind).to(tl.float32)
                total += tl.load(weight + line + k[None, :]).to(tl.float32) * value[None, :]
                if GATE:
                    second += tl.load(weight + line + WIDE * DEPTH + k[None, :]).to(tl.float32) * value[None, :]
            y = tl.sum(total, axis=1).to(kind)
            if GATE:
                wide = y.to(tl.float32)
                y = (wide * tl.sigmoid(wide)).to(kind) * tl.sum(second, axis=1).to(kind)
            if ADD:
                y += tl.load(add + row * WIDE + n)
            tl.store(out + row * WIDE + n, y)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _add_norm(x, more, weight, sum_, out, width, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
        token = tl.program_id(0).to(tl.int64)
        lane = tl.arange(0, BLOCK)
        inside = lane < width
        value = tl.load(x + token * width + lane, mask=inside, other=0.0)
        if ADD:
            value = value + tl.load(more + token * width + lane, mask=inside, other=0.0)
            tl.store(sum_ + token * width + lane, value, mask=inside)
        wide = value.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
        w = tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + token * width + lane, (wide * scale * w).to(value.dtype), mask=inside)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _gated(both, out, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
        token = tl.program_id(0).to(tl.int64)
        lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = lane < width
        gate = tl.load(both + token * 2 * width + lane, mask=inside)
        up = tl.load(both + token * 2 * width + width + lane, mask=inside)
        wide = gate.to(tl.float32)
        tl.store(out + token * width + lane, (wide * tl.sigmoid(wide)).to(gate.dtype) * up, mask=inside)


_LOG2_E = 1.4426950408889634
_HEADS_AT_ONCE = 4
_FEW_ROWS = 2


def available(device: torch.device, *widths: int) -> bool:
    """Whether the kernels run here for heads of these widths; tries one, because a missing compiler shows only then."""
    if triton is None or device.type != "cuda" or any(width < 16 or width & (width - 1) for width in widths):
        return False
    try:
        gated(torch.zeros(1, 32, device=device))
    except Exception:
        return False
    return True


class FusedArithmetic(Arithmetic):
    """See ``Arithmetic``. ``tile``: of ``layout``. ``out``: room for what attention gives, ``(n, heads * width)``, zero at first.

    What tiles do not cover stays as it is there: numbers of an earlier pass, or zero.
    """

    def __init__(self, shape: HeadShape, cos: Tensor, sin: Tensor, layout: Layout, *, tile: int, out: Tensor) -> None:
        super().__init__(shape)
        self._cos, self._sin = cos, sin
        self._layout, self._tile, self._out = layout, tile, out

    def add_norm(self, x: Tensor, more: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        count, width = x.shape
        total, out = x if more is None else torch.empty_like(x), torch.empty_like(x)
        kernel: Any = _add_norm
        block = triton.next_power_of_2(width)
        kernel[(count,)](
            x, x if more is None else more, weight, total, out, width, self.shape.eps,
            ADD=more is not None, BLOCK=block, num_warps=4 if block <= 2048 else 8,
        )  # fmt: skip
        return total, out

    def attend(self, heads: Tensor, weight: Tensor, cache: Cache) -> Tensor:
        shape, layout, (keys, values) = self.shape, self._layout, cache
        count, length = heads.shape[0], keys.shape[2]
        queries = torch.empty(count, shape.heads, shape.width, device=heads.device, dtype=heads.dtype)
        split: Any = _split_heads
        block = math.gcd(shape.heads, shape.kv_heads, _HEADS_AT_ONCE)
        split[(count, shape.every // block)](
            heads, weight, self._cos, self._sin, layout.positions, layout.slots, queries, keys, values, length, shape.eps,
            HEADS=shape.heads, KV_HEADS=shape.kv_heads, WIDTH=shape.width, BLOCK=block, num_warps=1,
        )  # fmt: skip
        lines = max(16, triton.next_power_of_2(self._tile * (shape.heads // shape.kv_heads)))
        # The fastest of 27 choices on an H100 at the published shape, among those that fit smaller cards.
        span, stages = (64, 2) if self._tile == DECODE_TILE else (32, 3)
        if heads.dtype == torch.float32:
            span, stages = 32, 2
        attend: Any = _attend_slots
        attend[(len(layout.tiles), shape.kv_heads)](
            queries, keys, values, layout.slots, layout.positions, layout.tiles, self._out, length,
            shape.width**-0.5 * _LOG2_E, HEADS=shape.heads, KV_HEADS=shape.kv_heads, WIDTH=shape.width,
            LINES=lines, SPAN=span, num_warps=4, num_stages=stages,
        )  # fmt: skip
        return self._out

    def gated(self, both: Tensor) -> Tensor:
        return gated(both)


def few(rows: int, w: LayerWeights) -> bool:
    """Whether ``FewRows`` is for a line so short, and fits the weights."""
    return rows <= _FEW_ROWS and all(depth % 16 == 0 for depth in (w.qkv.shape[1], w.out.shape[1], w.down.shape[1]))


class FewRows(FusedArithmetic):
    """For one row or two: the time goes to reading weights and to launches, so each product takes in what stands around it."""

    def layer(self, x: Tensor, more: Tensor | None, w: LayerWeights, cache: Cache) -> tuple[Tensor, Tensor | None]:
        assert more is None
        heads = self._product(x, w.qkv, norm=w.before_attention, block=4, warps=2)
        attended = self.attend(heads.view(-1, self.shape.every, self.shape.width), w.qk_norm, cache)
        x = self._product(attended, w.out, add=x, block=1, warps=4)
        gated = self._product(x, w.gate_up, norm=w.before_mlp, gate=True, block=2, warps=2)
        return self._product(gated, w.down, add=x, block=1, warps=8), None

    def _product(
        self, x: Tensor, weight: Tensor, *, norm: Tensor | None = None, add: Tensor | None = None, gate: bool = False,
        block: int, warps: int,
    ) -> Tensor:  # fmt: skip
        """``x`` normed (``norm``), times the weight; gated or added to ``add``. ``block``: outputs of a program."""
        rows, depth = x.shape
        wide = weight.shape[0] // 2 if gate else weight.shape[0]
        out = torch.empty(rows, wide, device=x.device, dtype=x.dtype)
        kernel: Any = _few_rows
        block = math.gcd(block, wide)
        kernel[(wide // block,)](
            x, x if norm is None else norm, weight, x if add is None else add, out, self.shape.eps,
            ROWS=rows, DEPTH=depth, WIDE=wide, STEP=math.gcd(depth, 1024), BLOCK=block,
            NORM=norm is not None, ADD=add is not None, GATE=gate, num_warps=warps,
        )  # fmt: skip
        return out


def attend_windows(qkv: Tensor, tiles: Tensor, out: Tensor) -> Tensor:
    """Each window over itself. ``qkv``: ``(n, 3, heads, width)``; ``tiles``: ``(tiles, 4)``: first position, how many, where the window
    begins and how long it is; ``out``: ``(n, heads * width)``, returned."""
    _, _, heads, width = qkv.shape
    exact = qkv.dtype == torch.float32
    kernel: Any = _attend_windows
    kernel[(len(tiles), heads)](
        qkv, tiles, out, width**-0.5 * _LOG2_E,
        HEADS=heads, WIDTH=width, LINES=WINDOW_TILE, SPAN=32 if exact else 64, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


def gated(both: Tensor) -> Tensor:
    """``silu`` of the first half of the last dimension, times the second half."""
    width = both.shape[-1] // 2
    out = torch.empty(*both.shape[:-1], width, device=both.device, dtype=both.dtype)
    block = min(1024, triton.next_power_of_2(width))
    kernel: Any = _gated
    kernel[(out.numel() // width, triton.cdiv(width, block))](both, out, width, BLOCK=block)
    return out
