"""Find the part of a graph that is closest to a pattern without a match, and where the two first differ.

The two graphs are compared from an op of each down to their inputs, past differences: each op of the
pattern stands beside one of the graph, and is like it or not. Only users' patterns without a match are
looked for in this way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sympy
import torch

from fusion_compiler.ir.dag import Op, OpDag, Ref
from fusion_compiler.ir.pattern_text import parameter_names
from fusion_compiler.ir.sources import source_of
from fusion_compiler.passes.patterns.indexed import Indexed, computes, key_of
from fusion_compiler.passes.patterns.match import State, Unifier, of_one_kind
from fusion_compiler.passes.patterns.trace import Traced

MOST_COMPARISONS = 2000  # comparisons of ops, for one pattern in one graph
ANY = "…"  # stands for another op's value


@dataclass(frozen=True)
class Attempt:
    """An attempt says how far a pattern is like the graph around one op.

    paired: op of the pattern -> op of the graph. alike: ops of the pattern that are as in the graph.
    differences: texts on ops that differ, from the results to the inputs.
    """

    anchor: str
    paired: Mapping[str, str]
    alike: frozenset[str]
    differences: tuple[str, ...]


def closest(traced: Traced, graph: Indexed, *, exact: bool = False) -> str:
    """Return a sentence on a pattern without a match: what is missing, or what came closest and differs
    first."""
    missing = sorted(traced.operators - graph.at.keys())
    attempt = _best(traced, graph, exact)
    near = "" if attempt is None else _sentence(attempt, traced, graph.dag)
    if not missing:
        return near or "its operators occur, but not one beside another"
    absent = "no op " + ", ".join(f"aten.{name}" for name in missing[:4]) + " in the graph"
    worth = attempt is not None and len(attempt.alike) > 1
    return f"{absent}; {near}" if worth else absent


def place(dag: OpDag, name: str) -> str:
    """Return an op's source line, as "model.py:12", or its name."""
    nodes = (node for node in dag.module.graph.nodes if node.name == name)
    source = dag.op(name).source or next(map(source_of, nodes), None)
    return f"{Path(source.file).name}:{source.line}" if source is not None and source.file else f"op {name}"


def _sentence(attempt: Attempt, traced: Traced, dag: OpDag) -> str:
    total = len(_computing(traced))
    head = f"closest at {place(dag, attempt.anchor)}: {len(attempt.alike)} of {total} ops"
    if not attempt.differences:
        return f"{head}, which match in too many ways to try"
    return f"{head}, then {attempt.differences[0]}"


def _computing(traced: Traced) -> list[str]:
    """Return the ops of the pattern, its results first, without its inputs and casts."""
    return [n for n in reversed(traced.dag.order) if computes(traced.indexed.op[n], traced.dag)]


def _best(traced: Traced, graph: Indexed, exact: bool) -> Attempt | None:
    """Return the attempt with most ops alike; of equal attempts the one with the rarer operators."""

    def worth(attempt: Attempt) -> tuple[int, float]:
        rarity = sum(1 / len(graph.at[traced.indexed.key[p]]) for p in attempt.alike)
        return len(attempt.alike), rarity

    steps = iter(range(MOST_COMPARISONS))
    best: Attempt | None = None
    for anchor in dict.fromkeys([traced.root, *_computing(traced)]):
        for candidate in graph.at.get(traced.indexed.key[anchor], ()):
            attempt = _Comparison(traced, graph, exact, steps).attempt(anchor, candidate)
            if attempt is None:
                return best
            if best is None or worth(attempt) > worth(best):
                best = attempt
    return best


@dataclass
class _Walk:
    """A walk holds what an attempt has gathered so far."""

    paired: dict[str, str] = field(default_factory=dict[str, str])
    alike: set[str] = field(default_factory=set[str])
    differences: list[str] = field(default_factory=list[str])
    state: State = field(default_factory=lambda: State({}, {}, {}))

    def copy(self) -> _Walk:
        return _Walk(dict(self.paired), set(self.alike), list(self.differences), self.state)


class _OutOfSteps(Exception):
    pass


class _Comparison:
    def __init__(self, traced: Traced, graph: Indexed, exact: bool, steps: Iterator[int]) -> None:
        self.traced, self.pattern, self.graph, self.steps = traced, traced.indexed, graph, steps
        self.exact, self.unifier = exact, Unifier(traced, graph, exact)

    def attempt(self, anchor: str, candidate: str) -> Attempt | None:
        """Compare the pattern with the graph, its op `anchor` at `candidate`; None if no steps are left."""
        first, outputs = self.traced.root, [self.pattern.bare[o] for o in self.traced.dag.outputs]
        try:
            walk = self.ops(anchor, candidate, _Walk())
            if anchor != first:
                walk.differences.insert(0, self.readers(anchor, candidate, first))
            for output in outputs if anchor == first else ():
                walk = self.further(output, walk)
        except _OutOfSteps:
            return None
        return Attempt(candidate, walk.paired, frozenset(walk.alike), tuple(walk.differences))

    def readers(self, anchor: str, candidate: str, first: str) -> str:
        """Return how the readers of the two ops differ if the walk began below the pattern's first result."""
        ours, theirs = _reader(self.pattern, anchor), _reader(self.graph, candidate)
        actual = "a result of the graph" if theirs is None else self.shown(self.graph.op[theirs])
        return self.other(actual, self.wanted(first if ours is None else ours))

    def further(self, output: str, walk: _Walk) -> _Walk:
        """Return the walk with another result of the pattern at the place where it is most alike."""
        if output in walk.paired:
            return walk
        tries = [self.ops(output, c, walk.copy()) for c in self.graph.at.get(self.pattern.key[output], ())]
        if not tries:
            walk.differences.append(f"nothing where the pattern has {self.wanted(output)}")
            return walk
        return max(tries, key=_likeness)

    def ops(self, p: str, g: str, walk: _Walk) -> _Walk:
        """Compare the pattern's op p with the graph's op g, and then their operands."""
        if next(self.steps, None) is None:
            raise _OutOfSteps
        p, raw = self.pattern.bare[p], g
        g = self.graph.bare[g]
        mine, theirs = self.pattern.op[p], self.graph.op[g]
        if p in walk.paired:
            if self.graph.bare[walk.paired[p]] != g:
                again = f"{self.wanted(p)} again"
                walk.differences.append(f"{self.shown(theirs)} where the pattern reads {again}")
            return walk
        parameter = mine.target == "placeholder"
        boundary = parameter or (self.traced.saved and theirs.target == "placeholder")
        if not boundary and self.pattern.key[p] != self.graph.key[g]:
            walk.differences.append(self.other(self.shown(theirs), self.wanted(p)))
            return self.past(mine, theirs, walk)
        walk.paired[p] = raw if parameter else g
        read = self.graph.op[raw] if parameter else theirs
        if parameter and self.exact and not of_one_kind(mine, read):
            ours, other = (op.outputs[0].dtype if op.outputs else "no tensor" for op in (mine, read))
            walk.differences.append(f"{self.shown(read)} of {other} where the pattern has {ours}")
            return walk
        sized = self.unifier.shapes(mine, read, walk.state)
        if sized is None:
            walk.differences.append(self.shape_difference(mine, read))
            return walk
        walk.state = sized
        if boundary:
            return walk
        orders = self.unifier.pairs(p, g)
        return max((self.pairs(p, g, order, walk.copy()) for order in orders), key=_likeness)

    def past(self, mine: Op, theirs: Op, walk: _Walk) -> _Walk:
        """Compare the operands of two different operators; keep the result if some ops are alike again."""
        if len(mine.inputs) != len(theirs.inputs):
            return walk
        below = walk.copy()
        for a, b in zip(mine.inputs, theirs.inputs, strict=True):
            below = self.ops(a, b, below)
        return below if len(below.alike) > len(walk.alike) else walk

    def pairs(self, p: str, g: str, order: list[tuple[object, object]], walk: _Walk) -> _Walk:
        """Compare pairs of arguments: ops are alike if their constants are; tensors are compared in turn."""
        flat = [pair for a, b in order for pair in _flat(a, b)]
        tensors = [(a.name, b.name) for a, b in flat if isinstance(a, Ref) and isinstance(b, Ref)]
        for a, b in flat:
            if isinstance(a, Ref) and isinstance(b, Ref):
                continue
            state = next(self.unifier.value(a, b, walk.state), None)
            if state is None:
                walk.differences.append(self.other(self.shown(self.graph.op[g]), self.wanted(p)))
                break
            walk.state = state
        else:
            walk.alike.add(p)
        for mine, theirs in tensors:
            walk = self.ops(mine, theirs, walk)
        return walk

    def shape_difference(self, mine: Op, theirs: Op) -> str:
        ours, other = (o.outputs[0].shape if o.outputs else () for o in (mine, theirs))
        what = self.shown(theirs)
        if len(ours) != len(other) and (self.exact or len(other) < len(ours)):
            return f"{what} of {len(other)} dimensions where the pattern has {len(ours)}"
        return f"{what} of shape {_shape(other)} where the pattern has {_shape(ours)}"

    def other(self, actual: str, wanted: str) -> str:
        same = " on other values" if actual == wanted else ""
        return f"{actual}{same} where the pattern has {wanted}"

    def wanted(self, p: str) -> str:
        return _call(self.pattern.op[p], self.traced)

    def shown(self, op: Op) -> str:
        return _call(op, None)


def _likeness(walk: _Walk) -> tuple[int, int]:
    return len(walk.alike), -len(walk.differences)


def _reader(graph: Indexed, name: str) -> str | None:
    """Return the first op that reads another, casts looked through."""
    readers = (n for n, op in graph.op.items() if name in map(graph.bare.get, op.inputs))
    return next((n for n in readers if computes(graph.op[n], graph.dag)), None)


def _flat(a: Any, b: Any) -> list[tuple[object, object]]:
    """Return the pairs of elements of two lists, or the pair itself."""
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return list(zip(a, b, strict=True))
    return [(a, b)]


def _shape(shape: tuple[object, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _call(op: Op, traced: Traced | None) -> str:
    """Return an op as a call, other ops' values as dots: "mul(…, 0.5)"; open numbers are "any number"."""
    if op.target in ("placeholder", "get_attr"):
        return f"the input {op.name}" if traced is None else _argument_name(op, traced)
    numbers = {} if traced is None else traced.numbers

    def text(value: object) -> str:
        if isinstance(value, Ref):
            return ANY
        if isinstance(value, tuple):
            return "[" + ", ".join(map(text, value)) + "]"
        if isinstance(value, float) and value in numbers:
            return "any number"
        return str(value) if isinstance(value, sympy.Expr | torch.dtype) else repr(value)

    positional = [text(v) for v in op.args if not (isinstance(v, int) and v >= 2**62)]  # slices to the end
    named = [f"{k}={text(v)}" for k, v in op.kwargs if v is not None]
    return f"{key_of(op)}({', '.join([*positional, *named])})"


def _argument_name(op: Op, traced: Traced) -> str:
    position = next((i for i, name in traced.tensors.items() if name == op.name), len(traced.pattern.example))
    names = parameter_names(traced.pattern.code, len(traced.pattern.example))
    return f"its argument {names[position]}" if position < len(names) else "a gradient"
