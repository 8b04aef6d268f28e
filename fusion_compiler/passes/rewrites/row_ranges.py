"""A plan for a range of rows, if the number of rows of products is only known at run time.

    linear(x, w), x of s0 rows, now 3   ->   the same, and a guard: no more than 4 rows

A product of few rows is a cluster, which takes as long as its matrix is read and is generated for a largest
number of rows; a product of many rows is a library's. The number of rows decides between the two, so that a
graph without gradients gets a guard for a range of rows, and a call outside it is captured again. Nothing is
rewritten.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import StrictMinMaxConstraint, guard_bool

from fusion_compiler.capture.graphs import arguments, is_trained
from fusion_compiler.ir.dag import FEW_ROWS, ROW_RANGES, most_of, size_hints
from fusion_compiler.ir.decision import Decisions
from fusion_compiler.ir.dims import Hints, hint
from fusion_compiler.ir.graph_pass import Pass, Refused
from fusion_compiler.ops.decompositions.tensors import hinted
from fusion_compiler.ops.products import factors_of
from fusion_compiler.passes.rewrites.engine import Site, decided

RULE = "row ranges"
# Bytes of the matrices that are multiplied by these rows: 4 us at the speed of a copy. With less, launches
# take most of a call, and a plan for a range is not worth a capture.
LEAST = 16 << 20


@dataclass
class Rows:
    """A number of rows that products share, the first of these products, and the bytes of their matrices."""

    count: torch.SymInt
    call: fx.Node
    matrices: int = 0


def guard_row_ranges(gm: fx.GraphModule) -> tuple[fx.GraphModule, Decisions]:
    """Add guards on the numbers of rows of `gm` (ATen above autograd), and return the same graph."""
    if is_trained(gm.graph.find_nodes(op="placeholder")):
        return gm, ()
    sizes = size_hints([node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")])
    by_count: dict[object, Rows] = {}
    for call, count, matrix in _products(gm.graph):
        rows = by_count.setdefault(count.node.expr, Rows(count, call))
        rows.matrices += matrix.numel() * matrix.element_size()
    sites = (Site(RULE, r.call.name, lambda _, r=r: _guarded(r, sizes)) for r in by_count.values())
    return gm, decided(sites, {})


def _products(graph: fx.Graph) -> Iterator[tuple[fx.Node, torch.SymInt, torch.Tensor]]:
    """Yield the products of a static matrix with rows whose number is only known at run time."""
    for call in graph.nodes:
        factors = factors_of(call.target)
        if factors is not None:
            named = arguments(call)
            x, matrix = (named[name].meta["val"] for name in (factors.left, factors.right))
            is_static = matrix.dim() == 2 and all(isinstance(n, int) for n in matrix.shape)
            rows = math.prod(x.shape[:-1])
            if is_static and isinstance(rows, torch.SymInt):
                yield call, rows, matrix


def _guarded(rows: Rows, sizes: Hints) -> str:
    """Guard a number of rows to a range, and return a note of it. Raises Refused."""
    now = hinted(rows.count)
    what = f"{rows.count} rows (now {now})"
    if not now:
        raise Refused(f"the number of {rows.count} depends on data")
    if rows.matrices < LEAST:
        raise Refused(f"{what} are multiplied by matrices of no more than {rows.matrices / 1e6:.1f} MB")
    if _is_bounded(rows.count):
        most = most_of(rows.count)
        if most is None:
            raise Refused(f"{what} stay within the caller's bounds, for which one plan suffices")
        return f"{what} are {most} at most, by the caller's bounds"
    low, high = (FEW_ROWS, None) if now > FEW_ROWS else _range(rows.count, now, sizes)
    guard_bool(rows.count > low)
    if high is not None:
        guard_bool(rows.count <= high)
    return f"{what}: a plan for {f'more than {low}' if high is None else f'{low + 1} to {high}'}"


def _range(count: torch.SymInt, now: int, sizes: Hints) -> tuple[int, int]:
    """Return the least range of rows, of several of ROW_RANGES if need be, that holds more than one number.

    A size that a guard keeps to one number would no longer be a symbol. Raises Refused.
    """
    ends, expr = (0, *ROW_RANGES), count.node.expr
    values = {s: sizes[s] for s in expr.free_symbols if s in sizes}
    near = [[hint(expr, values | {s: n + d}) for d in (-1, 1) if n + d > 1] for s, n in values.items()]
    for length in range(1, len(ends)):
        for low, high in zip(ends, ends[length:], strict=False):
            varies = all(any(low < n <= high for n in rows) for rows in near)
            if near and varies and low < now <= high:
                return low, high
    raise Refused(f"{count} rows (now {now}) grow in steps larger than any range")


def _is_bounded(count: torch.SymInt) -> bool:
    """True if the caller has set bounds of a dimension, which no guard may narrow."""
    for tracked in count.node.shape_env.tracked_fakes or ():
        constraints: Sequence[object] = getattr(tracked.symbolic_context, "constraint_sizes", None) or ()
        sizes = tracked.fake.shape if isinstance(tracked.fake, torch.Tensor) else ()
        for size, constraint in zip(sizes, constraints, strict=False):
            if isinstance(size, torch.SymInt) and isinstance(constraint, StrictMinMaxConstraint):
                if size.node.expr.free_symbols & count.node.expr.free_symbols:
                    return True
    return False


PLANS_FOR_RANGES = Pass(
    RULE,
    guard_row_ranges,
    does="Plan a graph without gradients for a range of rows, with a guard on their number.",
    when="the number of rows is only known at run time, and products have few of them",
    rounds_as_eager=False,
)
