"""The place of rows in operators: which dimensions of a result or an operand are the rows of a product.

A result *has the rows* if row i of it depends on row i of its operands and on nothing of the other rows. For
each class of operators, `result` derives where the result has the rows from where one operand has them, and
`operands` derives where each operand has the rows from where the result has them: None for an operand that
all rows read alike. Both raise `NotByRowsError`, with the reason, for any other operator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import torch
from torch import fx

from fusion_compiler.ir.chunks import Rows
from fusion_compiler.ops.table import Kind, spec_of

aten = torch.ops.aten


class NotByRowsError(Exception):
    """An operator's result does not have the rows; the message is the reason."""


class Over(StrEnum):
    """A reduction over all rows, to which each chunk adds its share."""

    SUM = "sum"
    PRODUCT = "product"


VIEWS = frozenset({
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.alias.default, aten.detach.default,
})  # fmt: skip
_TURNS = frozenset({aten.permute.default, aten.transpose.int, aten.t.default})
_ALONG = frozenset({aten.gather.default, aten.scatter.src, aten.scatter.value, aten.scatter_add.default})
PRODUCTS = frozenset({aten.mm.default, aten.addmm.default})

FILLED = {aten.ones_like.default: 1, aten.zeros_like.default: 0, aten.full_like.default: None}


def of_sizes(node: fx.Node) -> bool:
    """True for a call that reads only the shape of its operand, no element, if the shape is static."""
    sizes: tuple[Any, ...] = shape(node) if node.target in FILLED else ()
    return node.target in FILLED and all(isinstance(n, int) for n in sizes)


def shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def result(node: fx.Node, rows_of: Mapping[fx.Node, Rows]) -> Rows | Over:
    """Return where the result of `node` has the rows. rows_of: where some of its operands have them."""
    target, spec = node.target, spec_of(node.target)
    operand = next(n for n in node.all_input_nodes if n in rows_of)
    rows, rank = rows_of[operand], len(shape(operand))
    if target in PRODUCTS:
        return _of_product(node, rows_of)
    if target in VIEWS:
        return _same_elements(operand, rows, node)
    if target in _TURNS:
        return _turned(_order(node), rows)
    if target is aten.slice.Tensor or target is aten.constant_pad_nd.default or target in _ALONG:
        return rows  # `operands` refuses rows along which it cuts, pads or looks up
    if target is aten.select.int:
        return rows.moved(-1 if _selected(node) < rows.start else 0)
    if spec is not None and spec.kind is Kind.REDUCTION and spec.combine:
        return _reduced(node, rows, rank)
    if _is_pointwise(node):
        result_rows = rows.moved(len(shape(node)) - rank)
        if shape(node)[result_rows.start : result_rows.stop] != shape(operand)[rows.start : rows.stop]:
            raise NotByRowsError("its rows are read for others")
        return result_rows
    raise NotByRowsError("it is none of the operators that work row by row")


def operands(node: fx.Node, rows: Rows) -> dict[fx.Node, Rows | None]:
    """Return where the operands of `node`, whose result has the rows in `rows`, have them."""
    inputs, target = node.all_input_nodes, node.target
    if target in PRODUCTS:
        return _operands_of_product(node, rows)
    if target in VIEWS:
        return {n: _same_elements(node, rows, n) for n in inputs}
    if target in _TURNS:
        order = _order(node)
        return {n: _turned([order.index(d) for d in range(len(order))], rows) for n in inputs}
    if target is aten.slice.Tensor:
        _apart(_dim(node, 1, 0), rows)
        return dict.fromkeys(inputs, rows)
    if target is aten.constant_pad_nd.default:
        pads: Any = node.args[1]
        rank = len(shape(node))
        for position in range(0, len(pads), 2):
            if pads[position] or pads[position + 1]:
                _apart(rank - 1 - position // 2, rows)
        return dict.fromkeys(inputs, rows)
    if target in _ALONG:
        _apart(_dim(node, 1), rows)
        if any(shape(n)[rows.start : rows.stop] != shape(node)[rows.start : rows.stop] for n in inputs):
            raise NotByRowsError("it looks up in other rows")
        return dict.fromkeys(inputs, rows)
    if target is aten.select.int:
        place = rows.moved(1 if _selected(node) <= rows.start else 0)
        _apart(_selected(node), place)
        return dict.fromkeys(inputs, place)
    spec = spec_of(target)
    if spec is not None and spec.kind is Kind.REDUCTION and spec.combine:
        (operand,) = inputs
        return {operand: _before_reduction(node, operand, rows)}
    if target is aten.full.default or _is_pointwise(node):
        return {n: aligned(n, node, rows) for n in inputs}
    raise NotByRowsError("it is none of the operators that work row by row")


def aligned(operand: fx.Node, node: fx.Node, rows: Rows) -> Rows | None:
    """Return where an operand that is broadcast to `node` has the rows, or None if all rows read the same."""
    sizes, result_sizes = shape(operand), shape(node)
    operand_rows = rows.moved(len(sizes) - len(result_sizes))
    here = [sizes[d] if d >= 0 else 1 for d in range(operand_rows.start, operand_rows.stop)]
    if all(n == 1 for n in here):
        return None
    if operand_rows.start < 0 or here != list(result_sizes[rows.start : rows.stop]):
        raise NotByRowsError(f"{operand.name} is the same for some rows")
    return operand_rows


def _is_pointwise(node: fx.Node) -> bool:
    spec = spec_of(node.target)
    if node.target is aten.expand.default:
        return True
    return spec is not None and spec.kind is Kind.ELEMENTWISE and spec.expr is not None


def _same_elements(source: fx.Node, rows: Rows, view: fx.Node) -> Rows:
    """Return where a view, of the same elements in the same order, has the rows `rows` of `source`."""
    sizes = shape(source)
    before, count = math.prod(sizes[: rows.start]), math.prod(sizes[rows.start : rows.stop])
    view_sizes = shape(view)
    for start in range(len(view_sizes)):
        if math.prod(view_sizes[:start]) == before and view_sizes[start] > 1:
            for stop in range(start + 1, len(view_sizes) + 1):
                if math.prod(view_sizes[start:stop]) == count:
                    return Rows(start, stop)
    raise NotByRowsError("it cuts rows")


def _order(node: fx.Node) -> list[int]:
    """Return the dimensions of the operand in the order in which the result has them."""
    rank = len(shape(node))
    order = list(range(rank))
    if node.target is aten.permute.default:
        dims: Any = node.args[1]
        return [d % rank for d in dims]
    a, b = (0, rank - 1) if node.target is aten.t.default else (_dim(node, 1), _dim(node, 2))
    order[a], order[b] = order[b], order[a]
    return order


def _turned(order: list[int], rows: Rows) -> Rows:
    start = order.index(rows.start)
    if order[start : start + rows.stop - rows.start] != list(range(rows.start, rows.stop)):
        raise NotByRowsError("it takes the rows apart")
    return Rows(start, start + rows.stop - rows.start)


def _dim(node: fx.Node, position: int, default: int = 0) -> int:
    rank = max(len(shape(node)), 1)
    dim: Any = node.args[position] if len(node.args) > position else default
    return dim % rank


def _selected(node: fx.Node) -> int:
    """Return the dimension of its operand that a `select` takes one index of."""
    dim: Any = node.args[1]
    return dim % len(shape(node.all_input_nodes[0]))


def _apart(dim: int, rows: Rows) -> None:
    if rows.start <= dim < rows.stop:
        raise NotByRowsError("it goes along the rows")


def _dims(node: fx.Node, rank: int) -> frozenset[int]:
    """Return the dimensions that a reduction is over."""
    dims: Any = node.args[1] if len(node.args) > 1 else None
    if dims is None or dims == []:
        return frozenset(range(rank))
    return frozenset(d % rank for d in ([dims] if isinstance(dims, int) else dims))


def _reduced(node: fx.Node, rows: Rows, rank: int) -> Rows | Over:
    dims, row_dims = _dims(node, rank), set(range(rows.start, rows.stop))
    if not dims & row_dims:
        keeps = len(shape(node)) == rank
        return rows if keeps else rows.moved(-sum(d < rows.start for d in dims))
    spec = spec_of(node.target)
    if not row_dims <= dims or spec is None or spec.combine != "sum":
        raise NotByRowsError("it is no sum over all rows")
    return Over.SUM


def _before_reduction(node: fx.Node, operand: fx.Node, rows: Rows) -> Rows:
    rank = len(shape(operand))
    dims = _dims(node, rank)
    if len(shape(node)) == rank:
        return rows
    kept = [d for d in range(rank) if d not in dims]
    places = [kept[d] for d in range(rows.start, rows.stop)]
    if places != list(range(places[0], places[-1] + 1)):
        raise NotByRowsError("it takes the rows apart")
    return Rows(places[0], places[-1] + 1)


def factors(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return the two matrices of a product."""
    left, right = node.args[-2:]
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    return left, right


def _of_product(node: fx.Node, rows_of: Mapping[fx.Node, Rows]) -> Rows | Over:
    left, right = factors(node)
    over = rows_of.get(left) == Rows(1, 2) or rows_of.get(right) == Rows(0, 1)
    if over and node.target is aten.mm.default:
        return Over.PRODUCT
    if over or (left in rows_of and right in rows_of):
        raise NotByRowsError("it is a product of rows with rows")
    if left in rows_of:
        return Rows(0, 1)
    if right in rows_of:
        return Rows(1, 2)
    raise NotByRowsError("it adds rows to a product")


def _operands_of_product(node: fx.Node, rows: Rows) -> dict[fx.Node, Rows | None]:
    left, right = factors(node)
    rows_of: dict[fx.Node, Rows | None] = {}
    if node.target is aten.addmm.default:
        added: Any = node.args[0]
        rows_of[added] = aligned(added, node, rows)
    factor_rows: tuple[Rows | None, Rows | None] = (rows, None) if rows.start == 0 else (None, rows)
    for factor, held in zip((left, right), factor_rows, strict=True):
        if rows_of.setdefault(factor, held) != held:
            raise NotByRowsError("one tensor is read by its rows and whole")
    return rows_of
