"""Two fused kernels for CUDA, in Triton: what stands between the matrix products of a decoder layer.

As plain launches these are a dozen passes over memory a layer, and take more time than the products. Values are rounded
where the plain code rounds them. Where Triton (or the C compiler that it needs) is missing, ``available`` says so, and the
plain code runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    import triton  # type: ignore[import-not-found, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
except ImportError:
    triton = None


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _split_heads(  # type: ignore[no-untyped-def]
        qkv, weight, cos, sin, positions, slots, queries, keys, values, n, length, eps,
        HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr,  # noqa: N803
    ):  # fmt: skip
        token = tl.program_id(0).to(tl.int64)
        head = tl.program_id(1)
        lane = tl.arange(0, WIDTH)
        other = (lane + WIDTH // 2) % WIDTH
        base = qkv + (token * (HEADS + 2 * KV_HEADS) + head) * WIDTH
        x = tl.load(base + lane)
        position = tl.load(positions + token)
        slot = tl.load(slots + token)
        if head < HEADS + KV_HEADS:
            kind = x.dtype
            wide = x.to(tl.float32)
            scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps)
            turned = tl.load(base + other).to(tl.float32) * scale
            own = (wide * scale).to(kind) * tl.load(weight + head * WIDTH + lane)
            turned = turned.to(kind) * tl.load(weight + head * WIDTH + other)
            c = tl.load(cos + position * WIDTH + lane)
            s = tl.load(sin + position * WIDTH + lane)
            x = ((own * c).to(tl.float32) + turned.to(tl.float32) * s.to(tl.float32)).to(kind)
        if head < HEADS:
            row = token // n
            tl.store(queries + ((row * HEADS + head) * n + token % n) * WIDTH + lane, x)
        elif head < HEADS + KV_HEADS:
            tl.store(keys + ((slot * KV_HEADS + head - HEADS) * length + position) * WIDTH + lane, x)
        else:
            tl.store(values + ((slot * KV_HEADS + head - HEADS - KV_HEADS) * length + position) * WIDTH + lane, x)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _gated(both, out, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
        token = tl.program_id(0).to(tl.int64)
        lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = lane < width
        gate = tl.load(both + token * 2 * width + lane, mask=inside)
        up = tl.load(both + token * 2 * width + width + lane, mask=inside)
        wide = gate.to(tl.float32)
        tl.store(out + token * width + lane, (wide * tl.sigmoid(wide)).to(gate.dtype) * up, mask=inside)


def available(device: torch.device, head_width: int) -> bool:
    """Whether the kernels run here; tries one, because a missing compiler shows only then."""
    if triton is None or device.type != "cuda" or head_width & (head_width - 1):
        return False
    try:
        gated(torch.zeros(1, 2 * head_width, device=device))
    except Exception:
        return False
    return True


def split_heads(
    qkv: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, slots: Tensor, cache: tuple[Tensor, Tensor],
    *, heads: int, eps: float,
) -> Tensor:  # fmt: skip
    """Norm and rotate queries and keys; keys and values go to their slots. Returns queries ``(rows, heads, n, width)``.

    ``qkv``: ``(rows, n, heads + 2 kv heads, width)``; ``positions`` and ``slots``: ``(rows, n)``, contiguous; ``cos`` and ``sin``:
    tables over positions; ``cache``: keys and values, each ``(slots, kv heads, length, width)``.
    """
    keys, values = cache
    rows, n, every, width = qkv.shape
    queries = torch.empty(rows, heads, n, width, device=qkv.device, dtype=qkv.dtype)
    kernel: Any = _split_heads
    kernel[(rows * n, every)](
        qkv, weight, cos, sin, positions, slots, queries, keys, values, n, keys.shape[2], eps,
        HEADS=heads, KV_HEADS=keys.shape[1], WIDTH=width, num_warps=1,
    )  # fmt: skip
    return queries


def gated(both: Tensor) -> Tensor:
    """``silu`` of the first half of the last dimension, times the second half."""
    width = both.shape[-1] // 2
    out = torch.empty(*both.shape[:-1], width, device=both.device, dtype=both.dtype)
    block = min(1024, triton.next_power_of_2(width))
    kernel: Any = _gated
    kernel[(out.numel() // width, triton.cdiv(width, block))](both, out, width, BLOCK=block)
    return out
