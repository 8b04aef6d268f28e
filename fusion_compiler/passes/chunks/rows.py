"""The place of rows in operators: which dimensions of a result or an operand are the rows of a product.

A result *has the rows* if row i of it depends on row i of its operands and on nothing of the other rows.
`operands` derives where each operand has the rows from where the result has them: None for an operand that
all rows read alike. `result` is its inverse: it tries all places. Both raise `NotByRowsError`, with the
reason, for an operator that does not work by rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum

from torch import fx
from torch._ops import OpOverload

from fusion_compiler.capture.graphs import arguments
from fusion_compiler.ir.chunks import Rows
from fusion_compiler.ir.layout import view_of_node
from fusion_compiler.ops.dims import reduced_dims
from fusion_compiler.ops.facts import dims_along
from fusion_compiler.ops.products import factors_of
from fusion_compiler.ops.table import Kind, spec_of
from fusion_compiler.ops.views import Expanded, Part, Permuted, Reshaped, Selected


class NotByRowsError(Exception):
    """An operator's result does not have the rows; the message is the reason."""


class Over(StrEnum):
    """A reduction over all rows, to which each chunk adds its share."""

    SUM = "sum"
    PRODUCT = "product"


Place = Rows | Over


def shape(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of a node's value; () for a number and for a tuple."""
    return tuple(getattr(node.meta["val"], "shape", ()))


def is_product(node: fx.Node) -> bool:
    """True for a product of two matrices, to which something may be added."""
    row = factors_of(node.target)
    return row is not None and row.rank == 2


def factors(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return the two matrices of a product."""
    row, named = factors_of(node.target), arguments(node)
    assert row is not None
    return named[row.left], named[row.right]


def result(node: fx.Node, rows_of: Mapping[fx.Node, Rows]) -> Place:
    """Return where the result of `node` has the rows. rows_of: where some of its operands have them."""
    reads = {n: rows_of[n] for n in node.all_input_nodes if n in rows_of}
    spec, rank = spec_of(node.target), len(shape(node))
    places: list[Place] = [Rows(i, i + n) for n in range(1, rank + 1) for i in range(rank + 1 - n)]
    if is_product(node):
        if reads.keys().isdisjoint(factors(node)):
            raise NotByRowsError("it adds rows to a product")
        places.append(Over.PRODUCT)
    errors: list[NotByRowsError] = []
    for place in places:
        try:
            needed = operands(node, place)
        except NotByRowsError as error:
            errors.append(error)
            continue
        if all(needed[n] == rows for n, rows in reads.items()):
            return place
    if spec is not None and spec.kind is Kind.REDUCTION:
        ((operand, rows),) = reads.items()
        if spec.combine == "sum" and {*rows.dims} <= {*reduced_dims(arguments(node), len(shape(operand)))}:
            return Over.SUM
        raise NotByRowsError("it is no sum over all rows")
    raise errors[0] if errors else NotByRowsError("its operands have the rows in different places")


def operands(node: fx.Node, place: Place) -> dict[fx.Node, Rows | None]:
    """Return where the operands of `node`, whose result has the rows in `place`, have them. A product over
    the rows is a place as well; a sum over them is not, as it does not say where its operand has them."""
    inputs, spec, view = node.all_input_nodes, spec_of(node.target), view_of_node(node)
    if is_product(node):
        return _operands_of_product(node, place)
    assert isinstance(place, Rows)
    if isinstance(view, Reshaped):
        return {n: _same_elements(node, place, n) for n in inputs}
    if isinstance(view, Expanded) or (spec is not None and spec.kind is Kind.ELEMENTWISE and spec.expr):
        return {n: aligned(n, node, place) for n in inputs}
    order, along = _dims(node)
    first, last = order[place.start], order[place.stop - 1]
    if any(first <= d <= last for d in along):
        raise NotByRowsError("it goes along the rows")
    if order[place.start : place.stop] != list(range(first, last + 1)):
        raise NotByRowsError("it takes the rows apart")
    rows = Rows(first, last + 1)
    if any(rows.of(shape(n)) != place.of(shape(node)) for n in inputs):
        raise NotByRowsError("it looks up in other rows")
    return dict.fromkeys(inputs, rows)


def _dims(node: fx.Node) -> tuple[list[int], Sequence[int]]:
    """Return (the dimension of the operand that each dimension of the result is, those dimensions of the
    operand along which an element of the result is made of others than the one at its place)."""
    along: Sequence[int] | None
    match view_of_node(node):
        case Permuted(order):
            return list(order), ()
        case Part(dim) | Selected(dim):
            along = (dim,)
        case _ if isinstance(node.target, OpOverload) and node.all_input_nodes:
            along = dims_along(node.target, arguments(node), len(shape(node.all_input_nodes[0])))
        case _:
            along = None
    if along is None:
        raise NotByRowsError("it is none of the operators that work row by row")
    dims = range(len(shape(node.all_input_nodes[0])))
    keeps = len(shape(node)) == len(dims)
    return [d for d in dims if keeps or d not in along], along


def aligned(operand: fx.Node, node: fx.Node, rows: Rows) -> Rows | None:
    """Return where an operand that is broadcast to `node` has the rows, or None if all rows read the same."""
    sizes, result_sizes = shape(operand), shape(node)
    operand_rows = rows.moved(len(sizes) - len(result_sizes))
    here = tuple(sizes[d] if d >= 0 else 1 for d in operand_rows.dims)
    if all(n == 1 for n in here):
        return None
    if operand_rows.start < 0 or here != rows.of(result_sizes):
        raise NotByRowsError(f"{operand.name} is the same for some rows")
    return operand_rows


def _same_elements(source: fx.Node, rows: Rows, view: fx.Node) -> Rows:
    """Return where a view, of the same elements in the same order, has the rows `rows` of `source`."""
    before, count = math.prod(shape(source)[: rows.start]), math.prod(rows.of(shape(source)))
    sizes = shape(view)
    for start in range(len(sizes)):
        if math.prod(sizes[:start]) == before and sizes[start] > 1:
            for stop in range(start + 1, len(sizes) + 1):
                if math.prod(sizes[start:stop]) == count:
                    return Rows(start, stop)
    raise NotByRowsError("it cuts rows")


def _operands_of_product(node: fx.Node, place: Place) -> dict[fx.Node, Rows | None]:
    left, right = factors(node)
    row = factors_of(node.target)
    added = arguments(node)[row.added] if row is not None and row.added else None
    sides: dict[Place, tuple[Rows | None, Rows | None]] = {
        Rows(0, 1): (Rows(0, 1), None),
        Rows(1, 2): (None, Rows(1, 2)),
        Over.PRODUCT: (Rows(1, 2), Rows(0, 1)),
    }
    if place not in sides or (place is Over.PRODUCT and added is not None):
        raise NotByRowsError("it is a product of rows with rows")
    rows_of = {} if added is None or isinstance(place, Over) else {added: aligned(added, node, place)}
    for factor, held in zip((left, right), sides[place], strict=True):
        if rows_of.setdefault(factor, held) != held:
            raise NotByRowsError("one tensor is read both row by row and as a whole")
    return rows_of
