"""The function in which every program computes replicated reductions of whole vectors
(`schedule/replicated.py`).

It is a separate function because its tile is the vector, and its names mean other tiles than the caller's.

    mean, rsqrt = norm_product_first(in0_ptr)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fusion_compiler.codegen.rows import RowEmitter
from fusion_compiler.codegen.tile import Return, Statement
from fusion_compiler.ir.loops import COLS, ROWS, LoopNest, Node, operands_of, renumber, with_operands
from fusion_compiler.ir.syntax import Expression, Var
from fusion_compiler.schedule.analysis import Analysis, waiting
from fusion_compiler.schedule.schedule import Cols, Schedule
from fusion_compiler.schedule.shapes import padded


@dataclass(frozen=True)
class Replicated:
    """The nest of replicated reductions.

    results: nodes of the caller's nest without axes.
    loops: the nest that computes them; its columns are the caller's rows.
    numbers: its nodes by the caller's.
    """

    results: tuple[int, ...]
    loops: LoopNest
    numbers: dict[int, int]

    def schedule(self, warps: int) -> Schedule:
        """Return a schedule with the whole vector in one tile."""
        return Schedule(1, padded(int(Analysis(self.loops).size(COLS))), Cols.WHOLE, num_warps=warps)


def replicated_of(a: Analysis) -> Replicated | None:
    """Return the nest of replicated reductions, or None if there are none."""
    if not a.replicated:
        return None
    loops = a.loops
    late = waiting(loops, a.replicated)
    used = {o for i, n in enumerate(loops.nodes) if a.groups[i] for o in operands_of(n)}
    results = tuple(i for i in sorted(late & used) if not a.groups[i])
    axes = tuple(replace(axis, group=COLS) for axis in a.axes[ROWS])
    numbers: dict[int, int] = {}
    nodes: list[Node] = []
    for number in sorted(with_operands(loops, results)):
        nodes.append(renumber(loops.nodes[number], numbers))
        numbers[number] = len(nodes) - 1
    names = tuple(loops.names[i] for i in sorted(numbers))
    return Replicated(results, LoopNest(axes, tuple(nodes), (), names), numbers)


def statements_of(inner: RowEmitter, caller: RowEmitter, copies: Replicated) -> list[Statement]:
    """Return the function's statements. inner: emits them."""
    inner.fp16 = frozenset(n for outer, n in copies.numbers.items() if outer in caller.fp16)
    results = [copies.numbers[n] for n in copies.results]
    inner.compute(sorted(inner.needed_by(results)))
    inner.compute(sorted(inner.needed_by(results)))  # values of a mean that was corrected since
    inner.add(Return(tuple(inner.tile(n).value for n in results)))
    return inner.scopes[0].body


def enter(caller: RowEmitter, copies: Replicated, inner: RowEmitter, call: Expression) -> None:
    """Let an emitter call the function when the first of its results is needed."""
    names = {n: inner.variable_of(inner.tile(copies.numbers[n])).base for n in copies.results}
    caller.replicated, caller.call = {n: Var(name) for n, name in names.items()}, call
