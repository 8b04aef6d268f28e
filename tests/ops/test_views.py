"""The geometry of every view, against the elements that the view itself returns."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import pytest
import torch
from torch._ops import OpOverload

from fusion_compiler.ops.schema import bound
from fusion_compiler.ops.views import (
    COMPOSITES,
    SPLITS,
    VIEWS,
    Diagonal,
    Expanded,
    Part,
    Permuted,
    Reshaped,
    Selected,
    View,
    view_of,
)

EVERY = {**VIEWS, **SPLITS, **COMPOSITES}


def element(view: View, shape: Sequence[int], result: Sequence[int], at: Sequence[int]) -> int:
    """Number, in row-major order, of the operand's element that is the result's at `at`."""
    place = list(at)
    match view:
        case Permuted(order):
            place = [at[order.index(d)] for d in range(len(shape))]
        case Part(dim, start, step):
            place[dim] = start + at[dim] * step
        case Selected(dim, index):
            place.insert(dim, index)
        case Diagonal(first, second, offset):
            *rest, last = at
            along = {first: last + max(-offset, 0), second: last + max(offset, 0)}
            others = iter(rest)
            place = [along[d] if d in along else next(others) for d in range(len(shape))]
        case Expanded():
            behind = place[len(place) - len(shape) :]
            place = [0 if n == 1 else i for i, n in zip(behind, shape, strict=True)]
        case Reshaped():
            return number(at, result)
    return number(place, shape)


def number(place: Sequence[int], shape: Sequence[int]) -> int:
    total = 0
    for index, size in zip(place, shape, strict=True):
        assert 0 <= index < size
        total = total * size + index
    return total


def shape_for(target: OpOverload, draw: random.Random) -> list[int]:
    low, high = {"t": (0, 2), "mT": (2, 4)}.get(target._opname, (1, 4))
    return [draw.choice((1, 2, 3, 4)) for _ in range(draw.randint(low, high))]


def calls(target: OpOverload, draw: random.Random) -> Iterator[tuple[list[int], tuple[Any, ...]]]:
    """Shapes of operands, and arguments that the operator takes for each of them."""
    for _ in range(60):
        shape = shape_for(target, draw)
        rank, dim = len(shape), draw.randrange(-len(shape), len(shape)) if shape else 0
        size = shape[dim] if shape else 0
        order = draw.sample(range(rank), rank)
        signed = [d - rank * draw.randint(0, 1) for d in order]
        match target._opname:
            case "view" | "_unsafe_view" | "reshape":
                sizes = [*draw.sample(shape, rank), 1]
                yield shape, (sizes,)
            case "permute":
                yield shape, (signed,)
            case "transpose" | "swapaxes" | "swapdims":
                yield shape, (dim, draw.randrange(-rank, rank))
            case "movedim" if target is torch.ops.aten.movedim.int:
                yield shape, (dim, draw.randrange(-rank, rank))
            case "movedim":
                count = draw.randint(0, rank)
                yield shape, (signed[:count], draw.sample(range(rank), count))
            case "slice":
                ends = [draw.choice((None, *range(-size - 1, size + 2))) for _ in range(2)]
                yield shape, (dim, *ends, draw.randint(1, 3))
            case "select":
                yield shape, (dim, draw.randrange(-size, size))
            case "diagonal" if rank > 1:
                yield shape, (draw.randint(-2, 2), *signed[:2])
            case "expand":
                sizes = [n if n > 1 else draw.choice((1, 5, -1)) for n in shape]
                yield shape, ([2, *sizes] if draw.randint(0, 1) else sizes,)
            case "unsqueeze" | "unbind":
                yield shape, (dim,)
            case "squeeze" if target is not torch.ops.aten.squeeze.default:
                yield shape, (dim,) if target is torch.ops.aten.squeeze.dim else ([dim],)
            case "split":
                yield shape, (draw.randint(1, size), dim)
            case "split_with_sizes":
                first = draw.randint(0, size)
                yield shape, ([first, size - first], dim)
            case "flatten":
                yield shape, tuple(sorted((dim % rank, draw.randrange(rank))))
            case "unflatten":
                yield shape, (dim, [1, size])
            case "diagonal":
                continue
            case _:
                yield shape, ()


@pytest.mark.parametrize("target", EVERY, ids=str)
def test_a_views_geometry_names_the_elements_that_it_returns(target: OpOverload) -> None:
    tried = 0
    for shape, arguments in calls(target, random.Random(str(target))):
        operand = torch.arange(prod(shape)).reshape(shape)
        results = target(operand, *arguments)
        parts: list[tuple[int | None, torch.Tensor]] = (
            list(enumerate(results)) if target in SPLITS else [(None, results)]
        )
        for part, result in parts:
            view = view_of(target, shape, bound(target, (operand, *arguments), {}), part)
            assert view is not None
            for at in itertools.product(*map(range, result.shape)):
                assert element(view, shape, result.shape, at) == result[at], (shape, arguments, at)
            tried += 1
    assert tried >= 10


def test_what_is_no_view_has_no_geometry() -> None:
    assert view_of(torch.ops.aten.flip.default, (2, 3), {"dims": [0]}) is None
    assert view_of(torch.ops.aten.split.Tensor, (2, 3), {"split_size": 1}) is None
    assert view_of(torch.ops.aten.view.default, (2, 3), {"size": [6]}, part=0) is None
