"""Linearity and new tensors as the operator table has them, against what PyTorch returns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map_only

from fusion_compiler.ops.facts import _SCATTERS, filled_with, linear_in
from fusion_compiler.ops.schema import bound
from fusion_compiler.ops.table import OPS, Form
from fusion_compiler.ops.views import VIEWS

aten, prims = torch.ops.aten, torch.ops.prims


def x(*sizes: int) -> Tensor:
    return torch.rand(sizes, dtype=torch.float64) + 0.5


INDEX, MASK = torch.tensor([[0, 2, 1, 1]]), torch.rand(3, 4) > 0.5
SIZES = {
    "size": [3, 4], "shape": [3, 4], "dims": [1, 0], "dim": 0, "index": 1, "dim0": 0, "dim1": 1, "dim2": 0,
}  # fmt: skip
# Arguments of calls of all operators that are linear in some; views have theirs from SIZES.
CALLS: dict[OpOverload, tuple[Any, ...]] = {
    **dict.fromkeys((aten.neg.default, aten.clone.default, aten._to_copy.default), (x(3, 4),)),
    aten.lift_fresh_copy.default: (x(3, 4),),
    prims.convert_element_type.default: (x(3, 4), torch.float64),
    **{getattr(aten, name).Tensor: (x(3, 4), x(4)) for name in ("add", "sub", "rsub", "mul", "div")},
    **{getattr(aten, name).Scalar: (x(3, 4), 1.7) for name in ("add", "sub", "rsub", "mul", "div")},
    aten.lerp.Scalar: (x(3, 4), x(4), 0.3),
    aten.lerp.Tensor: (x(3, 4), x(3, 4), x(4)),
    aten.addcmul.default: (x(3, 4), x(4), x(3, 1)),
    aten.addcdiv.default: (x(3, 4), x(4), x(3, 1)),
    aten.where.self: (MASK, x(3, 4), x(4)),
    aten.masked_fill.Scalar: (x(3, 4), MASK, 1.7),
    aten.masked_fill.Tensor: (x(3, 4), MASK, x()),
    aten.copy.default: (x(3, 4), x(4)),
    aten.embedding.default: (x(3, 4), INDEX),
    aten.gather.default: (x(3, 4), 0, INDEX),
    aten.index_select.default: (x(3, 4), 0, INDEX[0]),
    **dict.fromkeys((aten.index.Tensor, aten._unsafe_index.Tensor), (x(3, 4), [None, INDEX])),
    aten.sum.default: (x(3, 4),),
    **dict.fromkeys((aten.sum.dim_IntList, aten.flip.default), (x(3, 4), [1])),
    aten.cumsum.default: (x(3, 4), 1),
    **dict.fromkeys((aten.cat.default, aten.stack.default), ([x(3, 4), x(3, 4)],)),
    aten.constant_pad_nd.default: (x(3, 4), [1, 2], 1.7),
    aten.slice_scatter.default: (x(3, 4), x(1, 4), 0, 1, 2),
    aten.select_scatter.default: (x(3, 4), x(4), 0, 1),
    **dict.fromkeys((aten.scatter.src, aten.scatter_add.default), (x(3, 4), 0, INDEX, x(3, 4))),
    aten.scatter.value: (x(3, 4), 0, INDEX, 1.7),
    aten.mm.default: (x(3, 4), x(4, 2)),
    aten.addmm.default: (x(2), x(3, 4), x(4, 2)),
    aten.bmm.default: (x(2, 3, 4), x(2, 4, 2)),
    aten.baddbmm.default: (x(2), x(2, 3, 4), x(2, 4, 2)),
}
NEW = [
    spec.target
    for spec in OPS
    if spec.form is Form.FILL and spec.expr is not None and spec.target is not aten.fill.Tensor
]
LINEAR = [*dict.fromkeys(spec.target for spec in OPS if spec.linear), *_SCATTERS]


def arguments(target: OpOverload) -> dict[str, Any]:
    if target in CALLS or target not in VIEWS:
        return bound(target, CALLS[target], {})
    names = [a.name for a in target._schema.arguments if a.name in SIZES]
    options = {n: [0] if target is aten.squeeze.dims else SIZES[n] for n in names}
    return bound(target, (x(1, 4) if "squeeze" in str(target) else x(3, 4),), options)


def changed(group: Any, numbers: Iterator[float]) -> Any:
    """Return other values for the arguments of a group: tensors of the same shapes, and other numbers."""
    return tree_map_only(float, lambda _: next(numbers), tree_map_only(Tensor, torch.randn_like, group))


def combined(one: Any, two: Any) -> Any:
    """Return 2 * one - 3 * two, for tensors, numbers and lists of them."""
    if isinstance(one, list):
        return [combined(*pair) for pair in zip(one, two, strict=True)]
    return 2 * one - 3 * two


@pytest.mark.parametrize("target", dict.fromkeys([*LINEAR, *CALLS]), ids=str)
def test_a_result_is_linear_in_each_group(target: OpOverload) -> None:
    named = arguments(target)
    assert linear_in(target)
    for group in linear_in(target):
        one = {n: named[n] for n in group}
        two = changed(one, iter((0.4, -2.3)))
        both = {n: combined(one[n], two[n]) for n in group}
        results = [target(**{**named, **values}) for values in (one, two, both)]
        torch.testing.assert_close(results[2], combined(*results[:2]))
        assert any(result.any() for result in tree_leaves(results))


@pytest.mark.parametrize("target", [aten.exp.default, aten.relu.default, aten._addmm_activation.default])
def test_other_operators_are_linear_in_nothing(target: OpOverload) -> None:
    assert not linear_in(target)


@pytest.mark.parametrize("target", NEW, ids=str)
def test_a_new_tensor_holds_the_number_that_the_table_says(target: OpOverload) -> None:
    values = {"size": [2, 3], "self": torch.rand(2, 3), "fill_value": 2.5, "s": -1.5, "value": 0.5}
    named = {a.name: values[a.name] for a in target._schema.arguments if a.name in values}
    number, result = filled_with(target, bound(target, (), named)), target(**named)
    assert number is not None
    torch.testing.assert_close(result, torch.full(result.shape, number, dtype=result.dtype))


def test_a_number_that_is_computed_is_not_known() -> None:
    assert filled_with(aten.full.default, {"size": [2], "fill_value": object()}) is None
    assert filled_with(aten.add.Tensor, {"self": 1, "other": 2}) is None
