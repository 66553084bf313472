"""The audio encoder's forward pass over transformers' weights, in windows of 8 s that are stacked and bounded.

A window's embeddings depend on that window's features alone. So equal windows are one batch without a mask, open windows
are a second batch with one, and no length is ever read back from the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from worker.engines.qwen3 import geometry
from worker.engines.qwen3.graphs import Recordings, bucket

WINDOWS_AT_ONCE = {"cuda": 32, "cpu": 4}
"""Bounds memory: the convolutions of a window need some 50 MB in fp32 at the published width."""


_GRAPH_WINDOWS = (1, 4, 16, 32)
_GRAPH_CHUNKS = (2, 4, 6, 8)
"""Sizes that are recorded on CUDA: windows, and seconds of the longest."""


class Encoder:
    """Audio tower and projector of a loaded model. ``encoded`` counts windows, for tests and for ``/api/ps``."""

    def __init__(self, model: Any, *, windows_at_once: int | None = None) -> None:
        tower = model.model.audio_tower
        self._graphs: Recordings | None = None
        self._tower = tower
        self._projector = model.model.multi_modal_projector
        self._heads = tower.config.encoder_attention_heads
        self._device: torch.device = tower.conv_out.weight.device
        self.dtype: torch.dtype = tower.conv_out.weight.dtype
        self._positions: Tensor = tower.positional_embedding.positional_embedding.to(self.dtype)
        self._group = windows_at_once or WINDOWS_AT_ONCE.get(self._device.type, 4)
        # One product instead of three: the tower's own projections are dropped for it.
        self._qkv = [_fused(layer.self_attn) for layer in tower.layers]
        if self._device.type == "cuda":
            for convolution in (tower.conv2d2, tower.conv2d3):
                convolution.to(memory_format=torch.channels_last)
        self.encoded = 0
        """Windows encoded since the start, open ones included."""

    def __call__(self, features: Tensor, frames: Sequence[int]) -> list[Tensor]:
        """Embeddings of windows, in order.

        ``features``: shape ``(windows, 128, 800)``, zero behind each window's end; ``frames``: valid frames of each, 1 to
        800. Returns one tensor of shape ``(tokens_of(frames), hidden size of the text model)`` a window.
        """
        out: list[Tensor] = [torch.empty(0)] * len(frames)
        order = sorted(range(len(frames)), key=lambda i: -frames[i])
        for at in range(0, len(order), self._group):
            group = order[at : at + self._group]
            index = torch.tensor(group).to(self._device, non_blocking=True)
            lengths = [frames[i] for i in group]
            embeddings = self._encode_one_group(features[index], lengths)
            for row, i in enumerate(group):
                out[i] = embeddings[row, : geometry.tokens_of(frames[i])]
        self.encoded += len(frames)
        return out

    def record(self, pool: Any, report: Callable[[float], None]) -> None:
        """Record a graph for each size of a group, largest first; ``report`` gets the share that is done."""
        self._graphs = Recordings(pool)
        shapes = [
            (n, chunks) for n in reversed(_GRAPH_WINDOWS) if n <= self._group for chunks in reversed(_GRAPH_CHUNKS)
        ]
        for number, (windows, chunks) in enumerate(shapes):
            report(number / len(shapes))
            size = windows, geometry.MELS, chunks * geometry.CHUNK_FRAMES
            features = torch.zeros(size, device=self._device)
            count = torch.full((windows,), chunks * geometry.CHUNK_TOKENS, device=self._device)
            self._graphs.record((windows, chunks), (features, count), self._encode_masked)

    def _encode_one_group(self, features: Tensor, frames: list[int]) -> Tensor:
        """``(windows, tokens, hidden)``; tokens behind a window's own mean nothing. Valid until the next group."""
        chunks = math.ceil(max(frames) / geometry.CHUNK_FRAMES)
        known = bucket(_GRAPH_WINDOWS, len(frames)) or 0, bucket(_GRAPH_CHUNKS, chunks) or 0
        if self._graphs is None or known not in self._graphs:
            return self._encode(features, frames)
        given, count = self._graphs.inputs(known)
        width = known[1] * geometry.CHUNK_FRAMES
        given[: len(frames)].copy_(features[:, :, :width])
        tokens = [geometry.tokens_of(n) for n in frames] + [1] * (known[0] - len(frames))
        count.copy_(torch.tensor(tokens), non_blocking=True)
        # Copied, because rows keep slices of it while the next replay overwrites the graph's own output.
        return self._graphs.replay(known)[: len(frames)].clone()

    def _encode(self, features: Tensor, frames: list[int]) -> Tensor:
        chunks = math.ceil(max(frames) / geometry.CHUNK_FRAMES)
        # Only the last second of a window can be short, and it is the tail; so valid tokens are always the first ones.
        tokens = [geometry.tokens_of(n) for n in frames]
        mask = None
        if min(tokens) != max(tokens):
            count = torch.tensor(tokens).to(self._device, non_blocking=True)
            mask = self._mask(max(tokens), count)
        return self._forward(features[:, :, : chunks * geometry.CHUNK_FRAMES], max(tokens), mask)

    def _encode_masked(self, features: Tensor, count: Tensor) -> Tensor:
        """As ``_encode``, with the number of tokens of each window on the device and no choice left to the host."""
        tokens = features.shape[-1] // geometry.CHUNK_FRAMES * geometry.CHUNK_TOKENS
        return self._forward(features, tokens, self._mask(tokens, count))

    def _mask(self, tokens: int, count: Tensor) -> Tensor:
        return (torch.arange(tokens, device=self._device) < count[:, None])[:, None, None]

    def _forward(self, features: Tensor, tokens: int, mask: Tensor | None) -> Tensor:
        windows, chunks = features.shape[0], features.shape[-1] // geometry.CHUNK_FRAMES
        x = features.to(self.dtype)
        x = x.reshape(windows, geometry.MELS, chunks, geometry.CHUNK_FRAMES).transpose(1, 2)
        x = self._convolve(x.flatten(0, 1).unsqueeze(1))
        x = x.reshape(windows, chunks * geometry.CHUNK_TOKENS, -1)[:, :tokens]
        for layer, qkv in zip(self._tower.layers, self._qkv, strict=True):
            x = self._layer(x, layer, qkv, mask)
        result: Tensor = self._projector(self._tower.ln_post(x))
        return result

    def _convolve(self, chunks: Tensor) -> Tensor:
        """Seconds of sound, each alone: ``(n, 1, 128, 100)`` to ``(n, 13, width)``, with positions from 0 to 12."""
        tower = self._tower
        x = F.gelu(self._first_convolution(chunks))
        x = F.gelu(tower.conv2d2(x))
        x = F.gelu(tower.conv2d3(x))
        x = tower.conv_out(x.permute(0, 3, 1, 2).flatten(2))
        positioned: Tensor = x + self._positions[: x.shape[1]]
        return positioned

    def _first_convolution(self, chunks: Tensor) -> Tensor:
        """On CUDA as a matrix product: libraries are four times slower at a single input channel. Channels come last then."""
        first = self._tower.conv2d1
        if chunks.device.type != "cuda":
            result: Tensor = first(chunks)
            return result
        count, width = chunks.shape[0], first.weight.shape[0]
        patches = F.unfold(chunks, first.kernel_size, padding=first.padding, stride=first.stride).transpose(1, 2)
        x = F.linear(patches, first.weight.view(width, -1), first.bias)
        return x.view(count, geometry.MELS // 2, geometry.CHUNK_FRAMES // 2, width).permute(0, 3, 1, 2)

    def _layer(self, x: Tensor, layer: Any, qkv: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        windows, tokens, width = x.shape
        h = F.linear(layer.self_attn_layer_norm(x), *qkv)
        q, k, v = h.view(windows, tokens, 3, self._heads, width // self._heads).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + layer.self_attn.out_proj(h.transpose(1, 2).reshape(windows, tokens, width))
        h = F.gelu(layer.fc1(layer.final_layer_norm(x)))
        x = x + layer.fc2(h)
        if x.dtype == torch.float16:
            limit = torch.finfo(torch.float16).max - 1000
            x = x.clamp(-limit, limit)
        return x


def _fused(attention: Any) -> tuple[Tensor, Tensor]:
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    fused = torch.cat([p.weight for p in parts]), torch.cat([p.bias for p in parts])
    attention.q_proj = attention.k_proj = attention.v_proj = None
    return fused
