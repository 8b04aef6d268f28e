"""How tiles make reductions, which are over axes that are named by number, and how nests hold operators."""

from __future__ import annotations

import pytest
import sympy
import torch
from torch._ops import OpOverload

from fusion_compiler.ir.dims import Dim
from fusion_compiler.ir.loops import (
    COLS,
    ROWS,
    TILE,
    Axis,
    Compute,
    Constant,
    Node,
    Reduce,
    Value,
    applied,
    axes_in,
    cast_of,
    is_applied,
    kept_axes,
    pair_of,
    reduced_groups,
    source_of,
)

aten = torch.ops.aten
NAMES = {"r": ROWS, "c": COLS}
PARTIAL = TILE
ANY = sympy.Symbol("s0", integer=True, positive=True)


def axes_of(text: str) -> tuple[Axis, ...]:
    """Return the axes of a text such as "r4 c8": a group's first letter and a size each; s is any size."""
    sizes: list[Dim] = [ANY if word[1:] == "s" else int(word[1:]) for word in text.split()]
    return tuple(Axis(f"a{i}", sizes[i], NAMES[word[0]]) for i, word in enumerate(text.split()))


@pytest.mark.parametrize(
    ("axes", "reduced", "over"),
    [
        ("r4 c8", {1}, {COLS}),
        ("r4 c8", {0}, {ROWS}),
        ("r4 c8", {0, 1}, TILE),
        ("r4 c1", {1}, {COLS}),  # axes of one element are axes
        ("r1 c8", {0}, {ROWS}),
        ("r1 c8", {1}, {COLS}),
        ("r1 c8", {0, 1}, TILE),
        ("r4", {}, {COLS}),  # where they are left out, the group that has none is reduced
        ("c4", {}, {ROWS}),
        ("", {}, {COLS}),
        ("c0 c8", {0, 1}, {COLS}),
        ("rs cs c8", {1, 2}, {COLS}),
        ("r4 c8 c16", {2}, PARTIAL),
        ("r4 c8 c2 c16", {2, 3}, PARTIAL),
        ("rs cs c16", {2}, PARTIAL),
        ("r1 c8 c1 c16 c1", {0, 2, 3, 4}, PARTIAL),
        ("c0 c8", {1}, PARTIAL),
        ("r4 c8 c16", {1}, PARTIAL),  # inner columns are kept
        ("r4 c8 c17", {2}, PARTIAL),
        ("r4 c8 cs", {2}, PARTIAL),
        ("r4 r4 c8 c16", {1, 3}, PARTIAL),
        ("r4 r4 c8 c16", {0, 2, 3}, PARTIAL),
        ("r8 r8 c8", {1}, PARTIAL),
    ],
)
def test_what_tiles_are_reduced_over(axes: str, reduced: set[int], over: frozenset[str]) -> None:
    tile, reduce = axes_of(axes), Reduce("sum", 0, frozenset(reduced), torch.float32)
    assert reduced_groups(tile, reduce) == over
    total = reduce.axes == axes_in(tile, over)
    assert kept_axes(tile, reduce) == (frozenset() if total else axes_in(tile, TILE) - reduce.axes)


NODES: list[Node] = [
    Constant(1.5, torch.float32), Constant(2, torch.int64), Constant(2, torch.int32),
    Constant(True, torch.bool),
]  # fmt: skip


def test_an_operator_has_the_names_and_defaults_of_its_schema() -> None:
    node = applied(NODES, aten.add.Tensor, 0, other=2.5)
    assert node == Compute(
        aten.add.Tensor, (("self", Value(0)), ("other", 2.5), ("alpha", 1)), torch.float32
    )
    assert applied(NODES, aten.sub.Tensor, 0, 0, alpha=2).operands[2:] == (("alpha", 2),)
    assert applied(NODES, aten._to_copy.default, 1, dtype=torch.float32).operands == (("self", Value(1)),)


@pytest.mark.parametrize(
    ("operator", "operands", "dtype"),
    [
        (aten.mul.Tensor, (1, 2), torch.int64),
        (aten.mul.Tensor, (1, 0), torch.float32),
        (aten.where.self, (3, 2, 2), torch.int32),
        (aten.lt.Tensor, (1, 2), torch.bool),
        (aten.isnan.default, (0,), torch.bool),
        (aten.logical_and.default, (3, 3), torch.bool),
    ],
)
def test_an_operator_has_the_dtype_that_its_operands_promote_to(
    operator: OpOverload, operands: tuple[int, ...], dtype: torch.dtype
) -> None:
    assert applied(NODES, operator, *operands).dtype is dtype


def test_an_operator_is_recognised_in_any_overload() -> None:
    scalar = applied(NODES, aten.mul.Scalar, 0, other=2.0)
    assert is_applied(scalar, aten.mul.Tensor) and not is_applied(scalar, aten.add.Tensor)
    assert not is_applied(NODES[0], aten.mul.Tensor) and not is_applied(None, aten.mul.Tensor)
    assert pair_of(scalar, aten.mul.Tensor) == ()
    assert pair_of(applied(NODES, aten.sub.Tensor, 0, 1), aten.sub.Tensor) == (0, 1)
    assert pair_of(applied(NODES, aten.sub.Tensor, 0, 1, alpha=2), aten.sub.Tensor) == ()


def test_casts_are_followed_until_one_rounds() -> None:
    cast, rounding = aten._to_copy.default, str(torch.bfloat16)
    nodes = [*NODES, applied(NODES, cast, 0, dtype=torch.float32, rounding=rounding)]
    nodes.append(applied(nodes, cast, 4, dtype=torch.float64))
    nodes.append(applied(nodes, torch.ops.prims.convert_element_type.default, 5, dtype=torch.float32))
    assert source_of(nodes, 6) == 4 and cast_of(nodes[4]) is None
