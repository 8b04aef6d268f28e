"""The dimensions of reductions and scans, against the shapes and values that PyTorch returns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._ops import OpOverload

from fusion_compiler.ops.dims import dim_of, reduced_dims
from fusion_compiler.ops.facts import dims_along
from fusion_compiler.ops.schema import bound
from fusion_compiler.ops.table import OPS, Kind

aten = torch.ops.aten
REDUCTIONS = [spec.target for spec in OPS if spec.kind is Kind.REDUCTION]



def calls(target: OpOverload) -> Iterator[tuple[Any, ...]]:
    """Arguments of a reduction of three dimensions behind its operand."""
    dim = next((a for a in target._schema.arguments if a.name == "dim"), None)
    if dim is None or dim.has_default_value():
        yield ()
    if dim is not None:
        yield from ((d,) for d in ([[0], [-1, 0], [2, 1]] if "List" in str(dim.type) else [1, -1]))
        yield from [(None,)] if "Optional" in str(dim.type) else []


@pytest.mark.parametrize(("target", "arguments"), [(t, c) for t in REDUCTIONS for c in calls(t)], ids=str)
def test_the_other_dimensions_of_a_reduction_keep_their_sizes(target: OpOverload, arguments: Any) -> None:
    x = torch.rand(2, 3, 5)
    reduced = reduced_dims(bound(target, (x, *arguments), {}), x.ndim)
    result = target(x, *arguments)
    assert tuple(result.shape) == tuple(n for d, n in enumerate(x.shape) if d not in reduced)


@pytest.mark.parametrize("dim", [0, 1, -1, -3])
def test_the_dimension_of_a_scan_is_counted_from_the_front(dim: int) -> None:
    x = torch.rand(2, 3, 4)
    place = dim_of(bound(aten.cumsum.default, (x, dim), {}), 3)
    assert place is not None
    last = aten.cumsum.default(x, dim).select(place, x.shape[place] - 1)
    torch.testing.assert_close(last, x.sum(place))


def test_a_tensor_without_dimensions_is_reduced_along_none() -> None:
    x = torch.rand(())
    assert reduced_dims(bound(aten.amax.default, (x, [-1]), {}), 0) == ()
    assert dim_of(bound(aten.cumsum.default, (x, -1), {}), 0) is None


INDEX = torch.randint(3, (2, 3, 4))


X = torch.rand(2, 3, 4) + 0.5


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        (aten.cumsum.default, (X, 1)),
        (aten.cumprod.default, (X, -1)),
        (aten.gather.default, (X, 1, INDEX)),
        (aten.scatter.src, (torch.zeros(2, 3, 4), -2, INDEX, X)),
        (aten.scatter_add.default, (torch.zeros(2, 3, 4), 1, INDEX, X)),
        (aten.constant_pad_nd.default, (X, [1, -1])),
        (aten.constant_pad_nd.default, (X, [0, 0, 2, -2, 0, 0])),
        (aten.flip.default, (X, [0, -1])),
        (aten.sum.dim_IntList, (X, [0, 2], True)),
        (aten.argmax.default, (X, 1, True)),
    ],
    ids=lambda value: str(value) if isinstance(value, OpOverload) else "",
)
def test_an_element_depends_on_other_places_along_these_dimensions_alone(
    target: OpOverload, arguments: tuple[Any, ...]
) -> None:
    along = dims_along(target, bound(target, arguments, {}), X.ndim)
    assert along
    moved = False
    for place in torch.cartesian_prod(*map(torch.arange, X.shape)).tolist():
        other = X.clone()
        other[tuple(place)] += 10
        result = target(*(other if a is X else a for a in arguments))
        differs = (target(*arguments) != result).nonzero().tolist()
        moved = moved or any(at != place for at in differs)
        assert all(at[d] == place[d] for at in differs for d in range(X.ndim) if d not in along)
    assert moved


def test_of_other_operators_nothing_is_said() -> None:
    assert dims_along(aten.sort.default, {"self": 0, "dim": 0}, 2) is None
