"""Define layout operators as access maps: the position in the operand of an element of the result.

`pull` defines them: it maps coordinates of the result to (operand, coordinates in the operand). These ops
move no data and never belong to a cluster; their readers absorb them.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from fusion_compiler.ir.dag import Op, OpDag, Ref
from fusion_compiler.ir.dims import Dim
from fusion_compiler.ir.index import ZERO, Extents, NotExpressible, combine, regroup, shifted
from fusion_compiler.ir.loops import Index

aten = torch.ops.aten

VIEWS = frozenset({
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default, aten.permute.default,
    aten.transpose.int, aten.t.default, aten.slice.Tensor, aten.select.int, aten.alias.default,
    aten.detach.default, aten.split_with_sizes.default, aten.split.Tensor, aten.unbind.int,
    aten.lift_fresh_copy.default, aten.diagonal.default,
})  # fmt: skip


# Views that are ranges of their operand -> the position of their `dim` argument.
PARTS: dict[object, int] = {
    aten.slice.Tensor: 1, aten.select.int: 1, aten.unbind.int: 1, aten.split.Tensor: 2,
    aten.split_with_sizes.default: 2,
}  # fmt: skip


def is_view(op: Op) -> bool:
    """True if the op only reads its operand at other coordinates."""
    return op.target in VIEWS or (op.target is operator.getitem and op.kind == "layout")


def is_view_node(node: fx.Node) -> bool:
    """True if an fx node only reads its operand at other coordinates."""
    part = node.target is operator.getitem
    return (node.args[0].target if part else node.target) in VIEWS  # type: ignore[union-attr]


def argument(op: Op, position: int, name: str, default: object = None) -> object:
    """Return an argument of an ATen call, positional or by keyword."""
    if position < len(op.args):
        return op.args[position]
    return dict(op.kwargs).get(name, default)


def wrap(dim: int, rank: int) -> int:
    return dim + rank if dim < 0 else dim


def pull(dag: OpDag, op: Op, coords: tuple[Index, ...], extents: Extents) -> tuple[str, tuple[Index, ...]]:
    """Return (operand, coordinates in it) of the element of a view at `coords`."""
    target = op.target
    if target is operator.getitem:
        return _pull_part(dag, op, coords)
    source = op.first
    shape = dag.op(source).outputs[0].shape
    out_shape = op.outputs[0].shape
    rank = len(shape)
    if target is aten.permute.default:
        order = [wrap(d, rank) for d in op.args[1]]  # type: ignore[union-attr]
        inner = [ZERO] * rank
        for position, dim in enumerate(order):
            inner[dim] = coords[position]
        return source, tuple(inner)
    if target in (aten.transpose.int, aten.t.default):
        a, b = (0, 1) if target is aten.t.default else (wrap(d, rank) for d in op.args[1:3])  # type: ignore[arg-type]
        inner = list(coords)
        if rank > 1:
            inner[a], inner[b] = inner[b], inner[a]
        return source, tuple(inner)
    if target is aten.slice.Tensor:
        dim = _dim_of_part(op, rank)
        start = argument(op, 2, "start") or 0
        step = argument(op, 4, "step", 1)
        if isinstance(start, int) and start < 0:
            start = start + shape[dim]
        if isinstance(start, int) and isinstance(shape[dim], int):
            start = min(max(start, 0), shape[dim])
        moved = shifted(combine([(coords[dim], step)]), start)  # type: ignore[list-item, arg-type]
        return source, (*coords[:dim], moved, *coords[dim + 1 :])
    if target is aten.select.int:
        dim = _dim_of_part(op, rank)
        index = op.args[2]
        if isinstance(index, int) and index < 0:
            index = index + shape[dim]
        if isinstance(index, Ref):
            raise NotExpressible("select at an index that is data")
        return source, (*coords[:dim], Index(index, ()), *coords[dim:])  # type: ignore[arg-type]
    if target is aten.diagonal.default:
        offset = argument(op, 1, "offset", 0)
        first, second = (wrap(argument(op, i, f"dim{i - 1}", i - 2), rank) for i in (2, 3))  # type: ignore[arg-type]
        assert isinstance(offset, int)
        others = iter(coords[:-1])
        diagonal = {first: shifted(coords[-1], max(-offset, 0)), second: shifted(coords[-1], max(offset, 0))}
        return source, tuple(diagonal[d] if d in diagonal else next(others) for d in range(rank))
    if target is aten.expand.default:
        lead = len(out_shape) - rank
        return source, tuple(ZERO if s == 1 else c for s, c in zip(shape, coords[lead:], strict=True))
    if target in (aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default):
        return source, coords
    return source, regroup(coords, out_shape, shape, extents)


@dataclass(frozen=True)
class Cut:
    """A cut is a view of `length` elements of `source` along `dim`, from `start` on. keeps: False if the view
    drops `dim`, which has one element then."""

    source: str
    dim: int
    start: Dim
    length: Dim
    keeps: bool


def cut_of(dag: OpDag, op: Op) -> Cut | None:
    """Return the range of its operand that a view reads; None for other views, and if the range is data."""
    part = op.target is operator.getitem
    view = dag.op(op.first) if part else op
    if view.target not in PARTS or not op.outputs:
        return None
    source, shape = view.first, op.outputs[0].shape
    rank = len(dag.op(source).outputs[0].shape)
    if argument(op, 4, "step", 1) != 1 and not part:
        return None
    try:
        _, first = pull(dag, op, (ZERO,) * len(shape), Extents(()))
    except NotExpressible:
        return None
    dim, keeps = _dim_of_part(view, rank), len(shape) == rank
    return Cut(source, dim, first[dim].const, shape[dim] if keeps else 1, keeps)


def _dim_of_part(op: Op, rank: int) -> int:
    """Return the dimension along which a view is a range."""
    return wrap(argument(op, PARTS[op.target], "dim", 0), rank)  # type: ignore[arg-type]


def _pull_part(dag: OpDag, op: Op, coords: tuple[Index, ...]) -> tuple[str, tuple[Index, ...]]:
    """Return (operand, coordinates in it) of an element of one result of split, chunk or unbind."""
    parent = dag.op(op.first)
    source = parent.first
    rank = len(dag.op(source).outputs[0].shape)
    part = op.args[1]
    assert isinstance(part, int)
    dim = _dim_of_part(parent, rank)
    if parent.target is aten.unbind.int:
        return source, (*coords[:dim], Index(part, ()), *coords[dim:])
    start = sum((parent.outputs[i].shape[dim] for i in range(part)), 0)
    return source, (*coords[:dim], shifted(coords[dim], start), *coords[dim + 1 :])
