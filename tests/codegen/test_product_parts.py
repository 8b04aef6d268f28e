"""Computations on parts of a product's rows in the product's kernel: rotations, gates, and queries, keys and
values that are stored where they belong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fusion_compiler as fc
from fusion_compiler.codegen import emit
from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.loops import LoopNest
from fusion_compiler.schedule.few_rows import Tile, placed_tile
from fusion_compiler.schedule.placement import Place, Placement
from fusion_compiler.schedule.products import Products
from fusion_compiler.schedule.space import schedules
from tests.exactness import not_as_close

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


pytestmark = pytest.mark.usefixtures("small_matrices")


def kernels_of(f: Callable[..., Any], draw: Callable[[bool], list[Tensor]], noise: float = 0.0) -> int:
    """Return how many kernels run `f`. Its results, and its arguments after the call, must be as close to
    float64 as eager's. draw: return the same arguments each time, in float64 if asked."""
    fast = fc.compile(f, backend="interpret", strict=True)
    runs = [draw(False), draw(False), draw(True)]
    with torch.no_grad():
        results = [g(*x) for g, x in zip((fast, f, f), runs, strict=True)]
    left = [[*r, *x] if isinstance(r, tuple) else [r, *x] for r, x in zip(results, runs, strict=True)]
    for ours, eager, exact in zip(*left, strict=True):
        assert not_as_close(ours, eager, exact, noise) is None
    (plan,) = fast.plan
    assert not plan.leftovers, str(plan)
    return len(plan.clusters)


def arguments(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, place: int | None = None) -> Any:
    """Random tensors for `kernels_of`, and one that holds a place."""
    seed = torch.seed() % 2**31

    def make(wide: bool) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        drawn = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        places = [] if place is None else [torch.tensor([place])]
        return [*(x.double() if wide else x for x in drawn), *places]

    return make


def in_halves(x: Tensor) -> Tensor:
    """As Llama turns the halves of a head."""
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def in_pairs(x: Tensor) -> Tensor:
    """As GPT-J turns neighbours."""
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def in_part(x: Tensor) -> Tensor:
    """The first half of a head alone, as GPT-NeoX does: pieces of a quarter."""
    a, b, rest = x[..., :8], x[..., 8:16], x[..., 16:]
    return torch.cat((-b, a, rest), -1)


@pytest.mark.sample(12)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("turned", [in_halves, in_pairs, in_part])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_rotation_behind_it(
    rows: int, turned: Callable[[Tensor], Tensor], bias: bool, dtype: torch.dtype
) -> None:
    """Each row of the kernel makes the elements that are turned into each other, of one row or two."""

    def rotated(x: Tensor, w: Tensor, b: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = F.linear(x, w, b if bias else None).view(rows, 3, 32)
        return y * cos + turned(y) * sin

    tensors = arguments((rows, 160), (96, 160), (96,), (32,), (32,), dtype=dtype)
    assert kernels_of(rotated, tensors) == (1 if rows < 3 else 2)


@pytest.mark.parametrize("rows", [1, 2])
def test_rotations_of_parts_of_one_product(rows: int) -> None:
    """As Phi-3 has them: a program has both halves of a head, and stores what is of keys where these lie."""

    def rotated(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (part.unflatten(-1, (-1, 32)) for part in F.linear(x, w).split((128, 64, 64), -1))
        return q * cos + in_halves(q) * sin, k * cos + in_halves(k) * sin, v * 2

    assert kernels_of(rotated, arguments((rows, 160), (256, 160), (32,), (32,))) == 1


def thirds(y: Tensor) -> tuple[Tensor, ...]:
    """As GPT-2 has queries, keys and values side by side."""
    return tuple(part.unflatten(-1, (-1, 32)) for part in y.split(y.shape[-1] // 3, -1))


def named(y: Tensor) -> tuple[Tensor, ...]:
    """The same by a dimension of its own."""
    return y.unflatten(-1, (3, -1, 32)).unbind(-3)


def of_each_head(y: Tensor) -> tuple[Tensor, ...]:
    """As GPT-NeoX has them, head by head."""
    return y.unflatten(-1, (-1, 96)).chunk(3, -1)


def of_few_heads(y: Tensor) -> tuple[Tensor, ...]:
    """Four heads of queries for one of keys and of values, as Phi-3 has them."""
    size = y.shape[-1] // 6
    return tuple(part.unflatten(-1, (-1, 32)) for part in y.split((4 * size, size, size), -1))


@pytest.mark.sample(12)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("parts", [thirds, named, of_each_head, of_few_heads])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_parts_of_one_product_are_stored_where_they_belong(
    rows: int, parts: Callable[[Tensor], tuple[Tensor, ...]], transposed: bool, turned: bool
) -> None:
    """The parts that belong to a cache are stored in it, whatever rows and columns the kernel has."""

    def projected(x: Tensor, w: Tensor, b: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Tensor:
        y = torch.addmm(b, x, w if transposed else w.t())
        query, key, value = (part[:, None].transpose(1, 2) for part in parts(y))
        keys.index_copy_(2, at, key * 2 if turned else key)
        values.index_copy_(2, at, value)
        return query * 3 if turned else query

    cache = (rows, 1 if parts is of_few_heads else 2, 9, 32)
    matrix = (80, 192) if transposed else (192, 80)
    assert kernels_of(projected, arguments((rows, 80), matrix, (192,), cache, cache, place=4)) == 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_every_schedule(rows: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where programs share the rows of a matrix, and the last of a block of columns stores the parts."""

    def projected(x: Tensor, w: Tensor, b: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Tensor:
        query, key, value = (part[:, None].transpose(1, 2) for part in thirds(torch.addmm(b, x, w)))
        keys.index_copy_(2, at, key)
        values.index_copy_(2, at, value)
        return query * 2

    def looked(loops: LoopNest, name: str, device: DeviceSpec) -> tuple[Placement, ...]:
        products = Products.of(loops, {})
        assert products is not None
        tiles = (Tile(tall, 8, 4, stages=3, part=104) for tall in (32, 64, 128))
        shared = (placed_tile(loops, products, tile, Place.UNROLL, (), device) for tile in tiles)
        placements = (*schedules(loops, device), *shared)
        seen.append(len(placements))
        return (placements[number],)

    cache, number, seen = (rows, 2, 9, 32), 0, [1]
    tensors = arguments((rows, 300), (300, 192), (192,), cache, cache, place=4)
    noise = noise_of(lambda x, *rest: (x, projected(x, *rest)), tensors, 0)
    monkeypatch.setattr(emit, "schedules_of", looked)
    while number < seen[-1]:
        monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path / str(number)))  # plans keep kernels
        torch._dynamo.reset()
        assert kernels_of(projected, tensors, noise) == 1
        number += 1
    assert number > 5


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_a_gate_and_what_it_gates_of_one_product(rows: int) -> None:
    """As Phi-3 has them: of one row or two each program makes both."""

    def gated(x: Tensor, w: Tensor) -> Tensor:
        gate, up = F.linear(x, w).chunk(2, -1)
        return F.silu(gate) * up

    assert kernels_of(gated, arguments((rows, 80), (192, 80))) == (1 if rows < 3 else 2)


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("normed", [False, True])
def test_projections_rotated_into_a_cache(normed: bool, rows: int) -> None:
    """All that attention of a decoding step is given, in one kernel."""

    def projected(
        x: Tensor, weight: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor,
        keys: Tensor, values: Tensor, at: Tensor,
    ) -> Tensor:  # fmt: skip
        x = F.rms_norm(x, weight.shape, weight) if normed else x
        query, key, value = (F.linear(x, w).view(rows, 1, -1, 32).transpose(1, 2) for w in (q, k, v))
        keys.index_copy_(2, at, key * cos + in_halves(key) * sin)
        values.index_copy_(2, at, value)
        return query

    matrices = ((256, 160), (64, 160), (64, 160))
    caches = ((rows, 2, 9, 32),) * 2
    tensors = arguments((rows, 160), (160,), *matrices, (32,), (32,), *caches, place=4)
    assert kernels_of(projected, tensors) == (1 if rows < 3 else 2)


def drawn(rng: Random) -> tuple[Callable[..., tuple[Tensor, ...]], list[tuple[int, ...]], int]:
    """A product of few rows, of whose parts something is computed, the shapes of its arguments, and the
    matrix's dimension that is added up."""
    rows, k, heads, size = rng.choice((1, 1, 2, 3)), rng.choice((16, 33)), rng.choice((1, 2, 3)), 8
    form = rng.choice(("side by side", "named", "of each head", "uneven"))
    count = rng.choice((3, 6) if form == "uneven" else (2, 3, 6))
    transposed, bias = rng.random() < 0.4, rng.random() < 0.5
    kinds = [rng.choice((*USES, "put")) for _ in range(rng.choice((1, 2, 3)))]

    def parts(y: Tensor) -> list[Tensor]:
        match form:
            case "side by side":
                return [part.view(rows, heads, size) for part in y.chunk(count, -1)]
            case "named":
                return list(y.view(rows, count, heads, size).unbind(1))
            case "of each head":
                return list(y.view(rows, heads, count * size).chunk(count, -1))
            case _:
                few = heads * size
                return [p.unflatten(-1, (-1, size)) for p in (y[:, :few], y[:, few : 2 * few], y[:, few:])]

    def program(
        x: Tensor, w: Tensor, b: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, at: Tensor
    ) -> tuple[Tensor, ...]:
        w = w if transposed else w.t()
        pieces, results = parts(torch.addmm(b, x, w) if bias else x @ w), [x + 1]
        for i, kind in enumerate(kinds):
            part = pieces[i % len(pieces)]
            if kind == "put" and part.shape[1] == heads:
                cache[i].index_copy_(2, at, (part * cos + in_halves(part) * sin)[:, :, None])
            else:
                results.append(USES.get(kind, USES["turned"])(part, pieces[0], pieces[-1], cos, sin))
        return tuple(results)

    n = count * heads * size
    matrix = (k, n) if transposed else (n, k)
    shapes = [(rows, k), matrix, (n,), (size,), (size,), (3, rows, heads, 7, size)]
    return program, shapes, 0 if transposed else 1


USES: dict[str, Callable[..., Tensor]] = {
    "turned": lambda part, first, last, cos, sin: part * cos + in_halves(part) * sin,
    "in pairs": lambda part, first, last, cos, sin: part * cos + in_pairs(part) * sin,
    "alone": lambda part, first, last, cos, sin: part * 2 + 1,
    "as it is": lambda part, first, last, cos, sin: part.transpose(0, 1) + 0,
    "gated": lambda part, first, last, cos, sin: F.silu(first) * last if first.shape == last.shape else -part,
    "rolled": lambda part, first, last, cos, sin: part.roll(1, -1) * cos,
    "ends": lambda part, first, last, cos, sin: part[:, 0] * 2 - part[:, -1],
}


@pytest.mark.parametrize("number", range(4))
def test_fresh_programs(number: int) -> None:
    seed = torch.seed() % 2**31
    for each in range(seed, seed + 8):
        torch._dynamo.reset()
        program, shapes, summed = drawn(Random(each))
        print(f"drawn from {each}")
        tensors = arguments(*shapes, place=5)
        # of three rows, what is computed of parts may have kernels of its own: x + 1, the product, and three
        most = 4 if shapes[0][0] < 3 else 5
        assert kernels_of(program, tensors, noise_of(program, tensors, summed)) <= most


def noise_of(
    program: Callable[..., tuple[Tensor, ...]], tensors: Callable[[bool], list[Tensor]], summed: int
) -> float:
    """Twice eager's largest error where it adds up the product in other orders: of few results that of one
    order may be luck. summed: the matrix's dimension."""
    exact, worst = program(*tensors(True)), 0.0
    for _ in range(8):
        x, w, *rest = tensors(False)
        order = torch.randperm(x.shape[1])
        results = program(x[:, order], w.index_select(summed, order), *rest)
        errors = (r.double() - e for r, e in zip(results[1:], exact[1:], strict=True))  # the first is x
        worst = max(worst, *(error.abs().max().item() for error in errors), 0.0)
    return 2 * worst
