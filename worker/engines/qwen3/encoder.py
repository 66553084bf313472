"""The audio encoder's forward pass, in groups of windows of 8 s, so that memory is bounded.

A window's embeddings depend on that window's features alone. Its seconds pass the convolutions each by itself; then the tokens
of all windows of a group stand behind each other in one line without padding, and attend inside their own window. No length
is ever read back from the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from worker.engines.qwen3 import arithmetic, geometry, kernels
from worker.engines.qwen3.graphs import Recordings, bucket
from worker.engines.qwen3.layout import tiles_of, upload, upload_into

CHUNKS_AT_ONCE = {"cuda": 256, "cpu": 32}
"""Seconds in a group, unless told otherwise. Bounds memory: the convolutions of one need some 6 MB in fp32 at the published width."""

_GRAPH_CHUNKS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
"""Sizes of a group that are recorded on CUDA."""
_CHUNKS_A_WINDOW = geometry.WINDOW_FRAMES // geometry.CHUNK_FRAMES


class Encoder:
    """Audio tower and projector of a loaded model, ours or transformers'. ``encoded`` counts windows, for tests."""

    def __init__(self, model: Any, *, chunks_at_once: int | None = None) -> None:
        tower = model.model.audio_tower
        self._graphs: Recordings | None = None
        self._tower = tower
        self._projector = model.model.multi_modal_projector
        self._heads = tower.config.encoder_attention_heads
        self._width: int = tower.config.d_model
        self._device: torch.device = tower.conv_out.weight.device
        self.dtype: torch.dtype = tower.conv_out.weight.dtype
        self._positions: Tensor = tower.positional_embedding.positional_embedding.to(self.dtype)
        self._most = chunks_at_once or CHUNKS_AT_ONCE.get(self._device.type, 32)
        self._fused = kernels.available(self._device, self._width // self._heads)
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
        out: list[Tensor] = []
        for group in self._groups(frames):
            lengths = frames[group]
            out += torch.split(self._encode(features[group], lengths), [geometry.tokens_of(n) for n in lengths])
        self.encoded += len(frames)
        return out

    def _groups(self, frames: Sequence[int]) -> Iterator[slice]:
        """Neighbours that have not too many seconds together; at least one window each."""
        first = chunks = 0
        for at, count in enumerate(_chunks_of(frames).tolist()):
            if at > first and chunks + count > self._most:
                yield slice(first, at)
                first, chunks = at, 0
            chunks += count
        if frames:
            yield slice(first, len(frames))

    def record(self, pool: Any, report: Callable[[float], None]) -> None:
        """Record a graph for each size of a group, largest first; ``report`` gets the share that is done."""
        if not self._fused:
            return
        self._graphs = Recordings(pool)
        sizes = [size for size in reversed(_GRAPH_CHUNKS) if size <= self._most]
        for number, size in enumerate(sizes):
            report(number / len(sizes))
            chunks = torch.zeros(size, 1, geometry.MELS, geometry.CHUNK_FRAMES, device=self._device)
            flat = upload(_flat([], size), self._device)
            self._graphs.record((size,), (chunks, flat), self._encode_line)

    def _encode(self, features: Tensor, frames: Sequence[int]) -> Tensor:
        """``(tokens of all, hidden)``."""
        chunks = self._chunks(features, frames)
        count, tokens = len(chunks), sum(map(geometry.tokens_of, frames))
        size = bucket(_GRAPH_CHUNKS, count) if self._graphs else None
        if self._graphs is not None and size is not None:
            given, flat = self._graphs.inputs((size,))
            given[:count].copy_(chunks)
            upload_into(flat, _flat(frames, size))
            # Copied, because rows keep slices of it while the next replay overwrites the graph's own output.
            return self._graphs.replay((size,))[:tokens].clone()
        if self._fused:
            return self._encode_line(chunks, upload(_flat(frames, count), self._device))[:tokens]
        lengths = [geometry.tokens_of(n) for n in frames]
        line = torch.from_numpy(_line(frames)).to(self._device)
        return self._forward(chunks, line, lambda qkv: arithmetic.attend_windows(qkv, lengths))

    def _chunks(self, features: Tensor, frames: Sequence[int]) -> Tensor:
        """The seconds of all windows: ``(n, 1, 128, 100)``."""
        each = _chunks_of(frames)
        window = np.repeat(np.arange(len(frames)), each)
        within = np.arange(len(window)) - np.repeat(np.cumsum(each) - each, each)
        seconds = features.view(len(frames), geometry.MELS, _CHUNKS_A_WINDOW, geometry.CHUNK_FRAMES).transpose(1, 2)
        index = upload(np.stack([window, within]), self._device)
        return seconds[index[0], index[1]][:, None]

    def _encode_line(self, chunks: Tensor, flat: Tensor) -> Tensor:
        """As ``_encode``, with everything that depends on the windows' lengths in ``flat`` on the device."""
        size = len(chunks) * geometry.CHUNK_TOKENS
        tiles = flat[size:].view(-1, 4)
        out = torch.zeros(size, self._width, device=self._device, dtype=self.dtype)
        return self._forward(chunks, flat[:size], lambda qkv: kernels.attend_windows(qkv, tiles, out))

    def _forward(self, chunks: Tensor, line: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """``line``: which tokens of the seconds stand where."""
        x = self._convolve(chunks.to(self.dtype)).flatten(0, 1)[line]
        for layer, qkv in zip(self._tower.layers, self._qkv, strict=True):
            x = self._layer(x, layer, qkv, attend)
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

    def _layer(self, x: Tensor, layer: Any, qkv: tuple[Tensor, Tensor], attend: Callable[[Tensor], Tensor]) -> Tensor:
        h = F.linear(layer.self_attn_layer_norm(x), *qkv).view(len(x), 3, self._heads, -1)
        x = x + layer.self_attn.out_proj(attend(h))
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


def _chunks_of(frames: Sequence[int]) -> Any:
    return -(-np.array(frames, np.int64) // geometry.CHUNK_FRAMES)


def _line(frames: Sequence[int]) -> Any:
    """Of the tokens of all seconds, 13 each: those that are of sound. Only a window's last second can have fewer."""
    tokens = np.array([geometry.tokens_of(n) for n in frames], np.int64)
    before = _chunks_of(frames) * geometry.CHUNK_TOKENS
    return np.arange(tokens.sum()) + np.repeat(np.cumsum(before) - before - (np.cumsum(tokens) - tokens), tokens)


def _flat(frames: Sequence[int], chunks: int) -> Any:
    """What ``Encoder._encode_line`` reads, for a group of so many seconds: tokens and tiles, as if each second were a window."""
    tokens = np.array([geometry.tokens_of(n) for n in frames], np.int64)
    begins = np.cumsum(tokens) - tokens
    line = np.zeros(chunks * geometry.CHUNK_TOKENS, np.int64)
    line[: tokens.sum()] = _line(frames)
    cut = tiles_of(begins, tokens, kernels.WINDOW_TILE)
    owner = np.repeat(np.arange(len(tokens)), -(-tokens // kernels.WINDOW_TILE))
    tiles = np.zeros((chunks, 4), np.int64)
    tiles[: len(cut)] = np.concatenate([cut, begins[owner, None], tokens[owner, None]], axis=1)
    return np.concatenate([line, tiles.ravel()])
