"""The function in which every program makes reductions of whole vectors by itself, before its part of a
product (`combine(r, EACH)`).

    mean = sum(x, {k}) / 1024;  y[n] = sum((x[k] - mean) * w[k, n], {k})
    split(k, 128); place(k.o, GRID); ...; combine(mean, EACH); combine(y, LAST)

A kernel cannot wait for a sum that its programs share, which is complete only when all of them are. But a
vector has a few kilobytes next to the matrix: a program reads all of it while its part of the matrix is in
flight. It is a separate function because its tile is the vector, and its names mean other tiles than the
caller's.

    mean, rsqrt = norm_product_first(in0_ptr)
"""

from __future__ import annotations

from dataclasses import dataclass

from fusion_compiler.codegen.products import ProductEmitter
from fusion_compiler.codegen.rows import RowEmitter
from fusion_compiler.codegen.tile import Return, Statement
from fusion_compiler.ir.loops import (
    COLS,
    Axis,
    LoopNest,
    Node,
    Reduce,
    dependent,
    operands_of,
    renumber,
    with_operands,
)
from fusion_compiler.ops.syntax import Expression, Var
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.placement import Placement, Stage
from fusion_compiler.schedule.row_tiles import Cols, RowTile, placement_of
from fusion_compiler.schedule.shapes import padded


@dataclass(frozen=True)
class Replicated:
    """The nest of such reductions.

    results: nodes of the caller's nest that vary over nothing.
    loops: the nest that computes them; its columns are the vector.
    numbers: its nodes by the caller's.
    """

    results: tuple[int, ...]
    loops: LoopNest
    numbers: dict[int, int]

    @classmethod
    def of(cls, a: Analysis, placement: Placement) -> Replicated | None:
        """Return the nest of the reductions that a placement replicates, or None if there are none."""
        loops, of_each = a.loops, placement.combined(Stage.EACH)
        reductions = {n: node for n, node in enumerate(loops.nodes) if isinstance(node, Reduce)}
        copies = {n: node for n, node in reductions.items() if loops.names[n] in of_each}
        if not copies:
            return None
        terms = sorted(frozenset[int]().union(*(node.axes for node in copies.values())))
        users = (n for axes, n in zip(a.node_axes, loops.nodes, strict=True) if not axes.isdisjoint(terms))
        used = {o for node in users for o in operands_of(node)}
        results = tuple(n for n in sorted(dependent(loops, copies) & used) if not a.node_axes[n])
        moved, numbers, nodes = {k: i for i, k in enumerate(terms)}, dict[int, int](), list[Node]()
        for number in sorted(with_operands(loops, results)):
            nodes.append(renumber(loops.nodes[number], numbers, moved))
            numbers[number] = len(nodes) - 1
        axes = tuple(Axis(loops.axes[k].name, loops.axes[k].size, COLS) for k in terms)
        names = tuple(loops.names[n] for n in sorted(numbers))
        return cls(results, LoopNest(axes, tuple(nodes), (), names), numbers)

    def placement(self, warps: int) -> Placement:
        """Return a placement with the whole vector in one tile."""
        a = Analysis(self.loops)
        return placement_of(a, RowTile(1, padded(int(a.size(COLS))), Cols.WHOLE, num_warps=warps))

    def statements(self, inner: RowEmitter, caller: ProductEmitter) -> list[Statement]:
        """Return the function's statements. inner: emits them."""
        inner.fp16 = frozenset(n for outer, n in self.numbers.items() if outer in caller.fp16)
        results = [self.numbers[n] for n in self.results]
        inner.compute(sorted(inner.needed_by(results)))
        inner.compute(sorted(inner.needed_by(results)))  # values of a mean that was corrected since
        inner.add(Return(tuple(inner.tile(n).value for n in results)))
        return inner.scopes[0].body

    def enter(self, caller: ProductEmitter, inner: RowEmitter, call: Expression) -> None:
        """Let an emitter call the function behind its first loads."""
        names = {n: inner.variable_of(inner.tile(self.numbers[n])).base for n in self.results}
        caller.ready, caller.call = {n: Var(name) for n, name in names.items()}, call
