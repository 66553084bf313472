"""Lines of rows of different lengths: where each position belongs, and how attention cuts them into tiles."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from worker.engines.qwen3.layout import Layout, Piece, flat_layout, tiles_of

pytestmark = pytest.mark.torch

SCRATCH = 999
pieces_of = st.lists(st.builds(Piece, st.integers(0, 7), st.integers(0, 500), st.integers(1, 90)), max_size=12)


def layout(pieces: list[Piece], size: int, tiles: int, tile: int) -> Layout:
    flat = flat_layout(pieces, size=size, tiles=tiles, tile=tile, scratch=SCRATCH)
    return Layout(torch.from_numpy(flat), size, pieces)


@given(pieces_of, st.integers(0, 20), st.sampled_from([8, 32]))
def test_every_position_has_its_place(pieces: list[Piece], padding: int, tile: int) -> None:
    used = sum(piece.count for piece in pieces)
    size = used + padding
    tiles = size // tile + min(size, 12)
    found = layout(pieces, size, tiles, tile)
    expected = [(piece.slot, piece.start + n) for piece in pieces for n in range(piece.count)]
    expected += [(0, SCRATCH)] * padding
    assert list(zip(found.slots.tolist(), found.positions.tolist(), strict=True)) == expected


@given(pieces_of, st.sampled_from([1, 8, 32, 64]))
def test_tiles_cover_each_piece_in_order_and_nothing_else(pieces: list[Piece], tile: int) -> None:
    used = sum(piece.count for piece in pieces)
    found = layout(pieces, used + 5, used // tile + len(pieces), tile).tiles.tolist()
    owner = [n for n, piece in enumerate(pieces) for _ in range(piece.count)]
    covered: list[int] = []
    for first, count in found:
        assert 0 <= count <= tile
        assert len({owner[at] for at in range(first, first + count)}) <= 1, "a tile is of one row"
        covered += range(first, first + count)
    assert covered == list(range(used))


def test_too_few_tiles_are_an_error() -> None:
    with pytest.raises(ValueError, match="3 tiles are needed, and there are 2"):
        flat_layout([Piece(0, 0, 65)], size=80, tiles=2, tile=32, scratch=SCRATCH)


def test_masks_are_causal_and_see_what_is_in_the_slot() -> None:
    single, more = layout([Piece(0, 7, 1), Piece(1, 2, 3)], 4, 4, 8).masks
    assert single is None, "one position sees all of its row"
    assert more is not None
    assert more.int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


def test_stretches_may_lie_anywhere() -> None:
    cut = tiles_of(np.array([100, 7]), np.array([5, 3]), 4)
    assert cut.tolist() == [[100, 4], [104, 1], [7, 3]]
