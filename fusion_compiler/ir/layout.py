"""Define layout operators as access maps: the position in the operand of an element of the result.

`pull` defines them: it maps coordinates of the result to (operand, coordinates in the operand). These ops
move no data and never belong to a cluster; their readers absorb them.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch import fx
from torch._ops import OpOverload

from fusion_compiler.ir.dag import Op, OpDag, Ref
from fusion_compiler.ir.dims import Dim
from fusion_compiler.ir.index import ZERO, Extents, NotExpressible, combine, regroup, shifted
from fusion_compiler.ir.loops import Index
from fusion_compiler.ops import lookups, views
from fusion_compiler.ops.schema import bound
from fusion_compiler.ops.table import Form, form_of
from fusion_compiler.ops.views import Diagonal, Expanded, Part, Permuted, Reshaped, Selected


def is_view(op: Op) -> bool:
    """True if the op only reads its operand at other coordinates."""
    return views.is_view(op.target) or (op.target is operator.getitem and op.kind == "layout")


def is_view_node(node: fx.Node) -> bool:
    """True if an fx node only reads its operand at other coordinates."""
    part = node.target is operator.getitem
    return views.is_view(node.args[0].target if part else node.target)  # type: ignore[union-attr]


def view_of_node(node: fx.Node) -> views.View | None:
    """Return which elements of its operand the result of an fx node has; None for what is no view."""
    source = node.args[0] if node.args else None
    if not isinstance(node.target, OpOverload) or not isinstance(source, fx.Node):
        return None
    if not views.is_view(node.target):
        return None
    return views.view_of(node.target, source.meta["val"].shape, bound(node.target, node.args, node.kwargs))


def view_of(dag: OpDag, op: Op) -> tuple[str, views.View]:
    """Return the operand of a view, and which elements of it the view has (`ops/views.py`)."""
    part = op.args[1] if op.target is operator.getitem else None
    call = op if part is None else dag.op(op.first)
    assert isinstance(call.target, OpOverload) and (part is None or isinstance(part, int))
    shape = dag.op(call.first).outputs[0].shape
    view = views.view_of(call.target, shape, call.arguments, part)
    assert view is not None
    return call.first, view


def overlay_of(op: Op) -> views.View:
    """Return the part of its first operand that an overlay (`Form.OVERLAY`) replaces."""
    assert isinstance(op.target, OpOverload)
    view = views.view_of(op.target, op.outputs[0].shape, op.arguments)
    assert view is not None
    return view


def lookups_of(dag: OpDag, op: Op) -> lookups.Lookups | None:
    """Return what an op looks up by indices that are data, each a `Ref`; None for another op."""
    if not lookups.looks_up(op.target):
        return None
    return lookups.lookups_of(op.target, op.arguments, lambda a: len(dag.op(a.name).outputs[0].shape))


def lookups_of_node(node: fx.Node) -> lookups.Lookups | None:
    """Return what an fx node looks up by indices that are data, each a node; None for another node."""
    if not lookups.looks_up(node.target):
        return None
    named = bound(node.target, node.args, node.kwargs)
    return lookups.lookups_of(node.target, named, lambda a: a.meta["val"].dim())


def reversed_dims(op: Op) -> frozenset[int]:
    """Return the dimensions that an op counts from their ends: none unless it is a flip."""
    dims = op.arguments["dims"] if form_of(op.target) is Form.REVERSAL else ()
    return frozenset(views.wrap(d, len(op.outputs[0].shape)) for d in dims)


def pull(dag: OpDag, op: Op, coords: tuple[Index, ...], extents: Extents) -> tuple[str, tuple[Index, ...]]:
    """Return (operand, coordinates in it) of the element of a view at `coords`."""
    source, view = view_of(dag, op)
    shape = dag.op(source).outputs[0].shape
    match view:
        case Permuted(order):
            inner = tuple(coords[order.index(d)] for d in range(len(shape)))
        case Part(dim, start, step):
            moved = shifted(combine([(coords[dim], step)]), start)
            inner = (*coords[:dim], moved, *coords[dim + 1 :])
        case Selected(dim, index):
            if isinstance(index, Ref):
                raise NotExpressible("select at an index that is data")
            inner = (*coords[:dim], Index(index, ()), *coords[dim:])
        case Diagonal(first, second, offset):
            others = iter(coords[:-1])
            along = {first: shifted(coords[-1], max(-offset, 0)), second: shifted(coords[-1], max(offset, 0))}
            inner = tuple(along[d] if d in along else next(others) for d in range(len(shape)))
        case Expanded():
            lead = len(coords) - len(shape)
            inner = tuple(ZERO if s == 1 else c for s, c in zip(shape, coords[lead:], strict=True))
        case Reshaped():
            same = op.outputs[0].shape == shape
            inner = coords if same else regroup(coords, op.outputs[0].shape, shape, extents)
    return source, inner


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
    if not is_view(op) or not op.outputs:
        return None
    match view_of(dag, op):
        case source, Part(dim, start, 1):
            return Cut(source, dim, start, op.outputs[0].shape[dim], True)
        case source, Selected(dim, index) if not isinstance(index, Ref):
            return Cut(source, dim, index, 1, False)
        case _:
            return None
