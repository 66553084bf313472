"""Rows of different lengths as one line of positions, without padding between them.

A row that needs its next token has one position in the line, a new recording four hundred. So products are over exactly what
is to be computed, and one pass serves both kinds of rows. Attention works on *tiles*: some positions of one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Piece:
    """Positions ``start`` to ``start + count`` (exclusive) of a slot; those below ``start`` are in the slot already."""

    slot: int
    start: int
    count: int
    said_from: int = 0
    """Position of the first token that the row has said; before it are the prompt and the sound."""


class Layout:
    """Where each position of a line belongs, on the device.

    ``flat`` holds, behind each other, ``size`` slots, ``size`` positions and ``(tiles, 2)`` of the tiles: the first position in the
    line, and how many (0: the tile is not used). ``pieces`` say the same on the host.
    """

    def __init__(self, flat: Tensor, size: int, pieces: Sequence[Piece] = ()) -> None:
        self.slots, self.positions, tiles = flat[:size], flat[size : 2 * size], flat[2 * size :]
        self.tiles = tiles.view(-1, 2)
        self.pieces = pieces

    @cached_property
    def masks(self) -> list[Tensor | None]:
        """For each piece: which positions of its slot each of its own sees, ``(count, start + count)``; None: all of them."""
        return [_mask(piece, self.slots.device) for piece in self.pieces]


def flat_layout(pieces: Sequence[Piece], *, size: int, tiles: int, tile: int, scratch: int) -> Integers:
    """What ``Layout`` reads, for a line of ``size`` positions and so many tiles of at most ``tile``.

    Positions behind the pieces go to ``scratch`` of slot 0, where nobody reads. Raises ValueError where there are too few tiles.
    """
    slots, starts, counts = np.array([(p.slot, p.start, p.count) for p in pieces], np.int64).reshape(-1, 3).T
    used = int(counts.sum())
    out = np.zeros(2 * size + 2 * tiles, np.int64)
    out[:used] = np.repeat(slots, counts)
    firsts = np.cumsum(counts) - counts
    out[size : size + used] = np.arange(used) + np.repeat(starts - firsts, counts)
    out[size + used : 2 * size] = scratch
    cut = tiles_of(firsts, counts, tile)
    if len(cut) > tiles:
        raise ValueError(f"{len(cut)} tiles are needed, and there are {tiles}")
    out[2 * size : 2 * size + cut.size] = cut.ravel()
    return out


def tiles_of(firsts: Integers, counts: Integers, tile: int) -> Integers:
    """Stretches that begin at ``firsts`` cut into tiles: ``(tiles, 2)``, first and count."""
    each = -(-counts // tile)
    owner = np.repeat(np.arange(len(counts)), each)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(each) - each, each)
    first = firsts[owner] + within * tile
    return np.stack([first, np.minimum(tile, counts[owner] - within * tile)], axis=1)


def spots_of(pieces: Sequence[Piece]) -> Integers:
    """For each piece, ``(3, pieces)``: where its row's text begins, the slot, and the last position; see ``verdicts``."""
    spots = [(piece.said_from, piece.slot, piece.start + piece.count - 1) for piece in pieces]
    return np.array(spots, np.int64).reshape(-1, 3).T.copy()


def upload(numbers: Integers, device: torch.device) -> Tensor:
    """A copy on the device, that is not waited for."""
    host = torch.from_numpy(numbers)
    if device.type != "cuda":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def upload_into(target: Tensor, numbers: Integers) -> None:
    """The same, into a tensor that is there."""
    target.copy_(torch.from_numpy(numbers).pin_memory(), non_blocking=True)


def _mask(piece: Piece, device: torch.device) -> Tensor | None:
    if piece.count == 1:
        return None
    every = torch.ones(piece.count, piece.start + piece.count, dtype=torch.bool, device=device)
    return every.tril(piece.start)
