"""Rows that are looked up in the order of a sort have a gradient that is a lookup as well.

    n, p = sort(ids); y = x[p // k]; z = y[inverse(p)]   ->   y = permuted_rows(x, p, inverse(p), k)
                                                             z = permuted_rows(y, inverse(p), p, 1)

A mixture of experts sorts its rows by expert and puts them back. Autograd's gradient of x[p] adds up in a
scatter, as p may be any index; a permutation has each place once (`ops/own/permuted_rows.py`).
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass

import sympy
import torch
from torch import fx

from fusion_compiler.capture.graphs import (
    arguments,
    emit,
    erase_unused,
    fake_mode,
    mutated_nodes,
    replaced_by,
    size_of,
)
from fusion_compiler.ir.decision import Decisions
from fusion_compiler.ir.graph_pass import Pass
from fusion_compiler.ops.own.permuted_rows import permuted_rows
from fusion_compiler.passes.rewrites.engine import Nodes, Site, edited
from fusion_compiler.passes.rewrites.mask_algebra import expression

_aten = torch.ops.aten
RULE = "permuted rows"
_SORTS = (_aten.sort.default, _aten.sort.stable)
_ARGSORTS = (_aten.argsort.default, _aten.argsort.stable)


@dataclass(frozen=True)
class _Order:
    """The places that a sort returns, and the lookups of rows by them.

    taken: lookups by the places divided by an integer, and that integer. fill: the node that writes the
    inverse permutation into a new tensor, or None. restored: lookups by that inverse.
    """

    places: fx.Node
    taken: dict[fx.Node, int]
    fill: fx.Node | None
    restored: list[fx.Node]


def permute_rows(gm: fx.GraphModule) -> tuple[fx.GraphModule, Decisions]:
    """Name the lookups of `gm` (ATen above autograd) by the places of a sort, and those that undo it."""
    sorts = [node for node in gm.graph.nodes if _is_sorts(node)]
    written = mutated_nodes(gm.graph.nodes) if sorts else set()
    orders = [order for node in sorts if (order := _order_of(node, written)) is not None]
    return edited(gm, [Site(RULE, order.places.name, functools.partial(_name, order)) for order in orders])


def _order_of(places: fx.Node, written: set[fx.Node]) -> _Order | None:
    if places in written or places.meta["val"].dim() != 1:
        return None
    shares = {places: 1}
    for user in places.users:
        over = user.args[1] if user.target is _aten.floor_divide.default else None
        if isinstance(over, int) and over > 1 and user.args[0] is places and user not in written:
            shares[user] = over
    taken = {n: share for index, share in shares.items() for n in _lookups(index) if _all(n, places, share)}
    fill = next((user for user in places.users if _inverts(user, places)), None)
    restored: list[fx.Node] = []
    if fill is not None:
        looked = (*_lookups(fill), *_lookups(arguments(fill)["self"]))
        restored = [n for n in looked if n > fill and _all(n, places, 1)]
    return _Order(places, taken, fill, restored) if taken or restored else None


def _is_sorts(places: fx.Node) -> bool:
    if places.target is not operator.getitem:
        return places.target in _ARGSORTS
    return places.args[1] == 1 and places.args[0].target in _SORTS  # type: ignore[union-attr]


def _lookups(index: fx.Node) -> list[fx.Node]:
    """Return the lookups source[index] by `index`."""
    users = [user for user in index.users if user.target is _aten.index.Tensor]
    return [user for user in users if list(arguments(user)["indices"]) == [index]]


def _all(lookup: fx.Node, places: fx.Node, share: int) -> bool:
    """True if the source of a lookup has a row for each `share` places."""
    return _rows(arguments(lookup)["self"]) * share == _rows(places)


def _rows(node: fx.Node) -> sympy.Expr:
    return expression(node.meta["val"].shape[0])


def _inverts(node: fx.Node, places: fx.Node) -> bool:
    """True for empty[places] = 0, 1, 2, ..., if the filled tensor is only an index of lookups."""
    if node.target not in (_aten.index_put_.default, _aten.index_put.default):
        return False
    named = arguments(node)
    base, values = named["self"], named["values"]
    fresh = base.target in (_aten.empty_like.default, _aten.zeros_like.default)
    counted = values.target is _aten.arange.default and _rows(values) == _rows(places)
    if not fresh or not counted or named["accumulate"] or list(named["indices"]) != [places]:
        return False
    read = {*base.users, *node.users} - {node}
    return read == {*_lookups(base), *_lookups(node)}


def _name(order: _Order, nodes: Nodes) -> str:
    """Name the lookups in the copy of a graph, and return a note of how many they are."""
    places = nodes[order.places]
    value = places.meta["val"]
    with places.graph.inserting_before(places.next), fake_mode([value]):
        counted = emit(places, _aten.arange.default, size_of(places, places, 0), device=value.device)
        base = emit(places, _aten.empty_like.default, places)
        inverse = emit(places, _aten.index_put.default, base, [places], counted)
    for lookup, share in order.taken.items():
        _replace(nodes[lookup], places, inverse, share)
    for lookup in order.restored:
        _replace(nodes[lookup], inverse, places, 1)
    if order.fill is not None:
        fill = nodes[order.fill]
        base, values = (arguments(fill)[name] for name in ("self", "values"))
        if not fill.users and {*base.users} == {fill}:
            places.graph.erase_node(fill)
            erase_unused({base, values})
    return f"gradients of {len(order.taken) + len(order.restored)} lookups are lookups"


def _replace(lookup: fx.Node, order: fx.Node, inverse: fx.Node, share: int) -> None:
    with lookup.graph.inserting_before(lookup):
        rows = arguments(lookup)["self"]
        replaced_by(lookup, emit(lookup, permuted_rows, rows, order, inverse, share))


PERMUTED_ROWS = Pass(
    RULE,
    permute_rows,
    does="Give rows that are looked up in the order of a sort a gradient that is a lookup.",
    when="the index is the permutation of a sort, or its inverse",
    gains="a gradient without a scatter",
)
