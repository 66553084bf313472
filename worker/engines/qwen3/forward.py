"""Passes of the text model: on CUDA recorded by size, elsewhere the same code run plainly.

Eager launches cost the host 35 ms a pass, whatever is in it; a graph is one launch. There are two kinds. *Tokens*: each row needs
its next token, which the pass chooses greedily; embedding and choice are in the graph. *Lines*: rows that catch up, and others
beside them; what is chosen from which position differs from pass to pass and is left to the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from worker.engines.qwen3 import kernels
from worker.engines.qwen3.decoder import Decoder
from worker.engines.qwen3.graphs import Recordings, bucket
from worker.engines.qwen3.layout import Layout, Piece, flat_layout, spots_of, upload, upload_into
from worker.engines.qwen3.sampling import greedy
from worker.engines.qwen3.verdicts import Verdicts

LINES = (16, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096)
"""Positions of a line that is recorded; the last takes some 12 ms for the 0.6B model on an H100."""


class Forward:
    """Runs passes over ``decoder``. Nothing is recorded unless ``record`` is called."""

    def __init__(self, decoder: Decoder, verdicts: Verdicts) -> None:
        self._decoder = decoder
        self.verdicts = verdicts
        self._tokens: Recordings | None = None
        self._lines: Recordings | None = None
        self._token_sizes = _doubling(decoder.slots)

    @property
    def recorded(self) -> bool:
        return self._lines is not None

    def record(self, pool: Any, report: Callable[[float], None]) -> None:
        """Record every size, largest first; does nothing where passes cannot be recorded. ``report`` gets the share that is done."""
        decoder = self._decoder
        if not decoder.fused:
            return
        self._tokens, self._lines = Recordings(pool), Recordings(pool)
        total = len(LINES) + len(self._token_sizes)
        for number, size in enumerate(reversed(LINES)):
            report(number / total)
            ids = torch.zeros(size, device=decoder.device, dtype=torch.int64)
            embeddings = torch.zeros(size, decoder.shape.hidden, device=decoder.device, dtype=decoder.dtype)
            flat = upload(self._flat([], size, kernels.TILE), decoder.device)
            self._lines.record((size,), (ids, embeddings, flat), self._line)
        for number, size in enumerate(reversed(self._token_sizes)):
            report((len(LINES) + number) / total)
            flat = upload(self._flat_tokens([], [], size), decoder.device)
            self._tokens.record((size,), (flat,), self._next)

    # ------------------------------------------------------------ next tokens

    def next_tokens(
        self, ids: Sequence[int], pieces: Sequence[Piece], after: tuple[Tensor, Sequence[tuple[int, int]]] | None = None
    ) -> Tensor:
        """Packed tokens that follow ``ids``, greedily, judged; each is the one position of its piece. Valid until the next pass.

        ``after``: packed tokens of the pass before, and for pairs ``(n, m)`` that ``ids[n]`` is its token ``m``.
        """
        if self._tokens is None:
            decoder = self._decoder
            line = upload(np.array(ids, np.int64), decoder.device)
            _chain(line, after)
            packed = greedy(decoder.logits(self.hidden(line, decoder.embed(line), pieces)))
            return self.verdicts.judge(packed, upload(spots_of(pieces), decoder.device))
        size = next(size for size in self._token_sizes if size >= len(ids))
        (flat,) = self._tokens.inputs((size,))
        upload_into(flat, self._flat_tokens(ids, pieces, size))
        _chain(flat, after)
        return self._tokens.replay((size,))[:, : len(ids)]

    def _flat_tokens(self, ids: Sequence[int], pieces: Sequence[Piece], size: int) -> Any:
        own = np.zeros((2, size), np.int64)
        own[0, : len(ids)] = ids
        own[1, : len(ids)] = [piece.said_from for piece in pieces]
        return np.concatenate([own.ravel(), self._flat(pieces, size, kernels.DECODE_TILE, tiles=size)])

    def _next(self, flat: Tensor) -> Tensor:
        """``flat``: ids, where the text of each begins, and layout; as many tiles as ids.

        Beginnings, slots and positions, as they stand there, are what ``judge`` wants.
        """
        size = len(flat) // 6
        ids, spots, layout = flat[:size], flat[size : 4 * size].view(3, size), Layout(flat[2 * size :], size)
        self.verdicts.remember(ids, layout.slots, layout.positions)
        hidden = self._decoder.run(self._decoder.embed(ids), layout, kernels.DECODE_TILE)
        return self.verdicts.judge(greedy(self._decoder.logits(hidden)), spots)

    # ------------------------------------------------------------ lines

    def hidden(self, ids: Tensor, embeddings: Tensor, pieces: Sequence[Piece]) -> Tensor:
        """Hidden states ``(n, hidden)`` of a line; ``pieces`` say where its positions belong. Valid until the next pass."""
        count = len(embeddings)
        size = bucket(LINES, count) if self._lines else None
        if self._lines is None or size is None:
            # An odd size would move the second half of the layout off the alignment that the kernels were compiled for.
            even = count + count % 2 if self._decoder.fused else count
            layout = Layout(upload(self._flat(pieces, even, kernels.TILE), embeddings.device), even, pieces)
            self.verdicts.remember(ids, layout.slots[:count], layout.positions[:count])
            return self._decoder.run(embeddings, layout)
        given_ids, given, flat_there = self._lines.inputs((size,))
        given_ids[:count].copy_(ids)
        given[:count].copy_(embeddings)
        upload_into(flat_there, self._flat(pieces, size, kernels.TILE))
        return self._lines.replay((size,))[:count]

    def _line(self, ids: Tensor, embeddings: Tensor, flat: Tensor) -> Tensor:
        layout = Layout(flat, len(ids))
        self.verdicts.remember(ids, layout.slots, layout.positions)
        return self._decoder.run(embeddings, layout)

    def _flat(self, pieces: Sequence[Piece], size: int, tile: int, tiles: int = 0) -> Any:
        """With room for the tiles of any rows that such a line can have."""
        room = tiles or size // tile + min(size, self._decoder.slots)
        return flat_layout(pieces, size=size, tiles=room, tile=tile, scratch=self._decoder.scratch)


def _chain(ids: Tensor, after: tuple[Tensor, Sequence[tuple[int, int]]] | None) -> None:
    if after is not None and after[1]:
        packed, pairs = after
        places = upload(np.array(pairs, np.int64).T.copy(), ids.device)
        ids.index_copy_(0, places[0], packed[0][places[1]].long())


def _doubling(most: int) -> list[int]:
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(2 * sizes[-1], most))
    return sizes
