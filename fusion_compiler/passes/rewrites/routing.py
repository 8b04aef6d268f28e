"""Rows that are sorted by expert, multiplied, and put back are computed without sorting them.

    n, p = sort(ids); y = f(x[p], n); z = y[inverse(p)]    ->    z = f(x, ids)

where f is made of operators that treat every row by itself, products with the matrix of a row's expert among
them. A library's grouped product wants rows in order; a cluster of few rows does not. What this saves are
launches: sorting a handful of numbers, counting them and the sums of these counts.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_compiler.capture.graphs import aliases, arguments, emit, fake_mode, size_of
from fusion_compiler.ir.graph_pass import Refused
from fusion_compiler.ops.schema import draws

_aten = torch.ops.aten
Size = int | torch.SymInt
GROUPED = _aten._grouped_mm.default
_CONVERSIONS = frozenset({_aten.to.dtype, _aten._to_copy.default})
_VIEWS = frozenset({_aten.view.default, _aten.reshape.default, _aten.flatten.using_ints})
# These are pointwise, though their tags do not say so.
_POINTWISE = _CONVERSIONS | {
    _aten.floor_divide.default, _aten.masked_fill_.Scalar, _aten.clone.default, _aten.detach.default,
}  # fmt: skip
# These work along dimensions that an argument names.
_ALONG = frozenset({
    _aten.chunk.default, _aten.split.Tensor, _aten.split.sizes, _aten.split_with_sizes.default,
    _aten.select.int, _aten.unsqueeze.default, _aten.sum.dim_IntList, _aten.mean.dim,
})  # fmt: skip


@dataclass
class Routing:
    """A sort of rows by expert, of `matrices` experts.

    sorted_rows: nodes whose row r belongs to sorted row r. inverses: nodes of the inverse permutation.
    shares: nodes that are the order of the rows divided by an integer -> that integer. taken: lookups by
    these. restored: lookups that undo the order.
    """

    sort: fx.Node
    offsets: fx.Node
    matrices: int
    sorted_rows: set[fx.Node] = field(default_factory=set)
    inverses: set[fx.Node] = field(default_factory=set)
    shares: dict[fx.Node, int] = field(default_factory=dict)
    taken: dict[fx.Node, int] = field(default_factory=dict)
    restored: list[fx.Node] = field(default_factory=list)

    @property
    def ids(self) -> fx.Node:
        return self.sort.all_input_nodes[0]

    def result(self, number: int) -> list[fx.Node]:
        """Return the readers of result 0, the sorted numbers, or 1, their places before the sort."""
        return [user for user in self.sort.users if user.args[1] == number]


def routing_of(offsets: fx.Node, matrices: int, written: set[fx.Node]) -> Routing:
    """Return the sort whose groups end at `offsets`, of ids of `matrices` experts.

    written: nodes whose memory is written in place. Raises Refused if a node depends on the order of the
    rows.
    """
    routing = Routing(_sort_of(offsets, matrices), offsets, matrices)
    rows = routing.ids.meta["val"].shape[0]
    for node in routing.sort.graph.nodes:
        if node.target is operator.getitem and node.args[0] is routing.sort:
            routing.sorted_rows.add(node)
            if node.args[1] == 1:
                routing.shares[node] = 1
        elif not routing.sorted_rows.isdisjoint(node.all_input_nodes) or _undoes(routing, node):
            _follow(routing, node, rows, written)
    return routing


def _sort_of(offsets: fx.Node, matrices: int) -> fx.Node:
    """Return the sort in offsets = cumsum(histc(sort(ids)[0])), one bin a number. Raises Refused."""
    total = _through(offsets, _CONVERSIONS)
    if total.target is not _aten.cumsum.default:
        raise Refused("its offsets are not running sums of counts")
    counts = _through(total.args[0], _CONVERSIONS)
    named = arguments(counts) if counts.target is _aten.histc.default else {}
    if (named.get("bins"), named.get("min"), named.get("max")) != (matrices, 0, matrices - 1):
        raise Refused("its offsets are not running sums of counts")
    numbers = _through(counts.args[0], _CONVERSIONS)
    sort = numbers.args[0] if numbers.target is operator.getitem and numbers.args[1] == 0 else None
    rising = isinstance(sort, fx.Node) and sort.target is _aten.sort.default
    if not isinstance(sort, fx.Node) or not rising or arguments(sort)["descending"]:
        raise Refused("its offsets count rows that are not sorted")
    ids = sort.all_input_nodes[0]
    place = _through(ids, _VIEWS | _CONVERSIONS)
    source = place.args[0] if place.target is operator.getitem and place.args[1] == 1 else None
    if ids.meta["val"].dim() != 1 or getattr(source, "target", None) is not _aten.topk.default:
        raise Refused("its experts are not the best ones of a list")
    return sort


def _through(node: object, targets: frozenset[OpOverload]) -> fx.Node:
    assert isinstance(node, fx.Node)
    while node.target in targets:
        node = node.all_input_nodes[0]
    return node


def _undoes(routing: Routing, node: fx.Node) -> bool:
    return not routing.inverses.isdisjoint(node.all_input_nodes)


def _follow(routing: Routing, node: fx.Node, rows: Size, written: set[fx.Node]) -> None:
    """Enter a node that reads sorted rows, or their inverse, in `routing`. Raises Refused."""
    inside, target = routing.sorted_rows, node.target
    if target in (_aten.histc.default, _aten.empty_like.default):  # the same in any order
        return
    if target in (_aten.index_put_.default, _aten.index_put.default) and _inverts(routing, node, rows):
        routing.inverses |= {node, node.all_input_nodes[0]}
        return
    if target is _aten.index.Tensor:
        source, indices = node.args[:2]
        if isinstance(indices, list | tuple) and len(indices) == 1:
            (index,) = indices
            if source in inside and index in routing.inverses and node not in written:
                routing.restored.append(node)
                return
            if source not in inside and index in inside and index.meta["val"].dim() == 1:  # type: ignore[union-attr]
                inside.add(node)
                if index in routing.shares:
                    routing.taken[node] = routing.shares[index]  # type: ignore[index]
                return
    if _undoes(routing, node) or not _is_by_row(routing, node, rows):
        raise Refused(f"{node.name} depends on the order of rows")
    if _changes_the_sort(routing, node):
        raise Refused(f"{node.name} writes into the sorted rows")
    inside.add(node)
    over = node.args[1] if target is _aten.floor_divide.default else None
    if isinstance(over, int) and (share := routing.shares.get(node.all_input_nodes[0])):
        routing.shares[node] = share * over


def _changes_the_sort(routing: Routing, node: fx.Node) -> bool:
    """True if a node writes into results of the sort, other than clamping missing experts to the last one."""
    target = node.target
    if not isinstance(target, OpOverload) or not target._schema.is_mutable:
        return False
    results = aliases(node.args[0]) & {*routing.sort.users}
    named = arguments(node)
    clamps = target is _aten.clamp_.default and named["min"] is None and isinstance(named["max"], int)
    return bool(results) and not (
        clamps and results <= {*routing.result(0)} and named["max"] >= routing.matrices - 1
    )


def _same(size: Size, other: Size) -> bool:
    """True if sizes are equal for all values of the symbols, without a guard."""
    return statically_known_true(size == other)


def _inverts(routing: Routing, node: fx.Node, rows: Size) -> bool:
    """True for inverse[order] = 0, 1, 2, ... with the order of the sort."""
    base, indices, values = node.args[:3]
    if arguments(node)["accumulate"]:
        return False
    fresh = isinstance(base, fx.Node) and base.target is _aten.empty_like.default
    counted = isinstance(values, fx.Node) and values.target is _aten.arange.default
    covers = counted and _same(values.meta["val"].shape[0], rows)  # type: ignore[union-attr]
    return fresh and covers and list(indices) == routing.result(1)  # type: ignore[arg-type]


def _is_by_row(routing: Routing, node: fx.Node, rows: Size) -> bool:
    """True if row r of a node's results depends only on row r of sorted operands, and on operands that are
    the same for all rows."""
    inside, target = routing.sorted_rows, node.target
    if target is operator.getitem:
        return True
    if not isinstance(target, OpOverload):
        return False
    named = arguments(node)
    if target is GROUPED:
        return named["self"] in inside and named["mat2"] not in inside and named["offs"] is routing.offsets
    operands = [n.meta["val"] for n in node.all_input_nodes]
    first, rank = operands[0], operands[0].dim()
    if target in _ALONG:
        dims = named["dim"] if isinstance(named["dim"], list | tuple) else [named["dim"]]
        wrapped = rank + (target is _aten.unsqueeze.default)
        return bool(dims) and all(dim is not None and dim % wrapped for dim in dims)
    out = node.meta["val"]
    if target in _VIEWS or target is _aten.slice.Tensor:  # it keeps all rows
        return out.dim() > 0 and _same(out.shape[0], rows) and _same(first.shape[0], rows)
    tags = set(target.tags)
    pointwise = torch.Tag.pointwise in tags or target in _POINTWISE
    if not pointwise or draws(target):
        return False
    if target._schema.is_mutable and node.args[0] not in inside:
        return False
    tensors = [n for n in node.all_input_nodes if isinstance(n.meta["val"], torch.Tensor)]  # others are sizes
    sorted_ones = [n.meta["val"].shape for n in tensors if n in inside]
    others = [n.meta["val"].shape for n in tensors if n not in inside]
    aligned = all(len(s) == out.dim() and _same(s[0], rows) for s in sorted_ones)
    return aligned and all(len(s) < out.dim() or _same(s[0], 1) for s in others)


def unsort(routing: Routing, nodes: dict[fx.Node, fx.Node], written: set[fx.Node]) -> fx.Node:
    """Take a sort out of the copy of a graph and return the rows' experts. nodes: original -> copy."""
    sort, ids = nodes[routing.sort], nodes[routing.ids]
    rows = routing.ids.meta["val"].shape[0]
    with sort.graph.inserting_before(sort), fake_mode([ids.meta["val"]]):
        must_copy = written & {*routing.result(0), *aliases(routing.ids)}
        numbers = emit(sort, _aten.clone.default, ids) if must_copy else ids
        order = emit(sort, _aten.arange.default, size_of(sort, ids, 0), device=ids.meta["val"].device)
    for number, instead in enumerate((numbers, order)):
        for result in routing.result(number):
            nodes[result].replace_all_uses_with(instead)
    for lookup, share in routing.taken.items():
        source = lookup.all_input_nodes[0]
        if _same(source.meta["val"].shape[0] * share, rows):
            shared = written.isdisjoint({lookup, *aliases(source)})
            nodes[lookup].replace_all_uses_with(_repeated(nodes[lookup], nodes[source], share, shared))
    for lookup in routing.restored:
        source = lookup.all_input_nodes[0]
        shared = written.isdisjoint(aliases(source))
        nodes[lookup].replace_all_uses_with(_repeated(nodes[lookup], nodes[source], 1, shared))
    return numbers


def _repeated(lookup: fx.Node, source: fx.Node, times: int, shared: bool) -> fx.Node:
    """Emit each row of a tensor `times` times, in the place of a lookup. shared: the result may be the tensor
    itself."""
    rest = [-1] * (source.meta["val"].dim() - 1)
    with lookup.graph.inserting_before(lookup):
        if times > 1:
            wide = emit(lookup, _aten.unsqueeze.default, source, 1)
            wide = emit(lookup, _aten.expand.default, wide, [-1, times, *rest])
            source = emit(lookup, _aten.flatten.using_ints, wide, 0, 1)
        return source if shared else emit(lookup, _aten.clone.default, source)
