"""The kernels give what the plain arithmetic gives, for lines of rows of every kind."""

from __future__ import annotations

import pytest

from tests.gpu.marks import NEEDS_CUDA, torch

pytestmark = NEEDS_CUDA

WIDTH, LENGTH, SLOTS = 128, 1280, 6
ERROR = {"float32": 1e-5, "bfloat16": 2e-2}
"""Relative to the norm of what the plain code gives in float32."""


def far(ours: object, exact: object) -> float:
    return float((ours.float() - exact).norm() / exact.norm())  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tile", [8, 32])
def test_attention_over_slots(dtype: str, tile: int) -> None:
    from worker.engines.qwen3.arithmetic import HeadShape, PlainArithmetic
    from worker.engines.qwen3.kernels import FusedArithmetic
    from worker.engines.qwen3.layout import Layout, Piece, flat_layout, upload

    torch.manual_seed(0)
    cuda, kind = torch.device("cuda"), getattr(torch, dtype)
    shape = HeadShape(heads=16, kv_heads=8, width=WIDTH, eps=1e-6)
    pieces = [Piece(3, 0, 416), Piece(1, 700, 1), Piece(0, 40, 33), Piece(4, LENGTH - 2, 1), Piece(5, 511, 70)]
    count = sum(piece.count for piece in pieces)
    size, padding = count + 50, LENGTH - 1
    heads = torch.randn(size, shape.every, WIDTH, device=cuda).to(kind)
    heads[count:] = torch.nan
    weight = torch.randn(24, WIDTH, device=cuda).to(kind)
    cos, sin = (torch.randn(LENGTH, WIDTH, device=cuda).to(kind) for _ in range(2))
    keys, values = (torch.randn(SLOTS, 8, LENGTH, WIDTH, device=cuda).to(kind) for _ in range(2))
    keys[:, :, 1200:] = values[:, :, 1200:] = torch.nan
    keys[4], values[4] = torch.randn(2, 8, LENGTH, WIDTH, device=cuda).to(kind)

    def layout(size: int) -> Layout:
        flat = flat_layout(pieces, size=size, tiles=size, tile=tile, scratch=padding)
        return Layout(upload(flat, cuda), size, pieces)

    cache = keys.clone(), values.clone()
    out = torch.full((size, 16 * WIDTH), 7.0, device=cuda, dtype=kind)
    ours = FusedArithmetic(shape, cos, sin, layout(size), tile=tile, out=out).attend(heads, weight, cache)
    wide = keys.float(), values.float()
    plain = PlainArithmetic(shape, cos.float(), sin.float(), layout(count))
    exact = plain.attend(heads[:count].float(), weight.float(), wide)
    assert far(ours[:count], exact) < ERROR[dtype]
    assert (ours[count:] == 7.0).all(), "padding writes nothing"
    for mine, theirs in zip(cache, wide, strict=True):
        assert far(mine[1:, :, :1200], theirs[1:, :, :1200]) < ERROR[dtype]
        assert far(mine[0, :, :1200], theirs[0, :, :1200]) < ERROR[dtype]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_inside_windows(dtype: str) -> None:
    from worker.engines.qwen3.arithmetic import attend_windows
    from worker.engines.qwen3.encoder import _flat
    from worker.engines.qwen3.kernels import attend_windows as fused
    from worker.engines.qwen3.layout import upload

    torch.manual_seed(0)
    cuda, kind = torch.device("cuda"), getattr(torch, dtype)
    frames, lengths = [800, 50, 500, 100, 3], [104, 7, 65, 13, 1]
    size = 20 * 13
    tiles = upload(_flat(frames, 20), cuda)[size:].view(-1, 4)
    qkv = torch.randn(size, 3, 14, 64, device=cuda).to(kind)
    ours = fused(qkv, tiles, torch.zeros(size, 14 * 64, device=cuda, dtype=kind))
    exact = attend_windows(qkv[: sum(lengths)].float(), lengths)
    assert far(ours[: sum(lengths)], exact) < ERROR[dtype]
    assert not ours[sum(lengths) :].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [48, 1024, 2048])
def test_norm_and_gate(dtype: str, width: int) -> None:
    from worker.engines.qwen3.arithmetic import HeadShape, PlainArithmetic
    from worker.engines.qwen3.kernels import FusedArithmetic
    from worker.engines.qwen3.layout import Layout

    torch.manual_seed(0)
    cuda, kind = torch.device("cuda"), getattr(torch, dtype)
    layout = Layout(torch.zeros(2, dtype=torch.long, device=cuda), 1)
    table = torch.zeros(1, 16, device=cuda)
    shape = HeadShape(1, 1, 16, 1e-6)
    plain = PlainArithmetic(shape, table, table, layout)
    ours = FusedArithmetic(shape, table, table, layout, tile=8, out=table)
    x, more = torch.randn(2, 9, width, device=cuda).to(kind)
    weight = torch.randn(width, device=cuda).to(kind)
    for added in (None, more):
        for mine, theirs in zip(ours.add_norm(x, added, weight), plain.add_norm(x, added, weight), strict=True):
            assert far(mine, theirs.float()) < ERROR[dtype]
    assert far(ours.gated(x), plain.gated(x).float()) < ERROR[dtype]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("hidden", [48, 1024, 2048])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_layer_for_few_rows(dtype: str, hidden: int, rows: int) -> None:
    from worker.engines.qwen3 import kernels
    from worker.engines.qwen3.arithmetic import HeadShape, LayerWeights, PlainArithmetic
    from worker.engines.qwen3.layout import Layout, Piece, flat_layout, upload

    torch.manual_seed(0)
    cuda, kind = torch.device("cuda"), getattr(torch, dtype)
    shape, inner = HeadShape(heads=4, kv_heads=2, width=64, eps=1e-6), 3 * hidden

    def draw(*size: int) -> object:
        return (torch.randn(*size, device=cuda) * size[-1] ** -0.5).to(kind)

    weights = [draw(hidden), draw(8 * 64, hidden), draw(6, 64), draw(hidden, 256)]
    weights += [draw(hidden), draw(2 * inner, hidden), draw(hidden, inner)]
    exact = LayerWeights(*[w.float() for w in weights])  # type: ignore[attr-defined]
    pieces = [Piece(2, 77, 1), Piece(0, 5, 1)][:rows]
    flat = upload(flat_layout(pieces, size=rows, tiles=rows, tile=kernels.DECODE_TILE, scratch=99), cuda)
    layout = Layout(flat, rows, pieces)
    cos, sin, cache = draw(100, 64), draw(100, 64), (draw(3, 2, 100, 64), draw(3, 2, 100, 64))
    x = draw(rows, hidden)
    assert kernels.few(rows, exact)
    out = torch.zeros(rows, 256, device=cuda, dtype=kind)
    few = kernels.FewRows(shape, cos, sin, layout, tile=kernels.DECODE_TILE, out=out)  # type: ignore[arg-type]
    plain = PlainArithmetic(shape, cos.float(), sin.float(), layout)  # type: ignore[attr-defined]
    wide = cache[0].float(), cache[1].float()  # type: ignore[attr-defined]
    ours, more = few.layer(x, None, LayerWeights(*weights), cache)  # type: ignore[arg-type]
    assert more is None
    theirs, rest = plain.layer(x.float(), None, exact, wide)  # type: ignore[attr-defined]
    assert rest is not None
    assert far(ours, theirs + rest) < ERROR[dtype]


@pytest.mark.parametrize("rows", [1, 5, 200])
def test_verdicts(rows: int) -> None:
    import random

    from worker.engines.qwen3.verdicts import Verdicts

    draw = random.Random(rows)
    cuda = torch.device("cuda")
    fused, plain = (
        Verdicts(slots=rows, length=LENGTH, ends=[9, 11], device=cuda, fused=fused) for fused in (True, False)
    )
    lines = torch.full((rows, LENGTH), 7, device=cuda)
    spots, ids = [], []
    for slot in range(rows):
        begin, repeats = draw.randrange(800), draw.choice([1, 5, 6, 7, 19, 20, 21])
        pattern = [draw.randrange(6) for _ in range(1 if slot % 3 == 0 else draw.randrange(1, 44))]
        tokens = [*range(100, 100 + draw.randrange(9)), *(pattern * repeats)[: LENGTH - begin - 20]]
        tokens = tokens[: max(1, len(tokens) - draw.randrange(2))]
        tokens[-1] = 9 if slot % 17 == 3 else tokens[-1]
        lines[slot, begin : begin + len(tokens)] = torch.tensor(tokens, device=cuda)
        spots.append((begin, slot, begin + len(tokens) - 2))
        ids.append(tokens[-1])
    everywhere = torch.arange(LENGTH, device=cuda)
    for slot in range(rows):
        for verdicts in (fused, plain):
            verdicts.remember(lines[slot], torch.full_like(everywhere, slot), everywhere)
    packed = torch.tensor([ids, ids], dtype=torch.int32, device=cuda)
    where = torch.tensor(spots, device=cuda).T
    ours, exact = (verdicts.judge(packed, where) for verdicts in (fused, plain))
    assert ours.tolist() == exact.tolist()
    if rows == 200:
        found = set(exact[2].tolist())
        assert {-1, 0, 1} < found, "every kind of verdict is there"
        assert max(found) > 20
