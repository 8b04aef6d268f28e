"""Find patterns in an operator DAG: subgraph isomorphism, from a pattern's outputs to its inputs.

Ops are looked up by their operator, so that a pattern costs time only where the rarest of its operators
occurs. Operands of commutative operators are tried both ways. Dimensions count from the end and casts are
looked through, so that the pattern traced in float32 on [rows, columns] also names the bfloat16 code on
[batch, length, columns]. Sizes in a pattern are symbols, bound by the shapes that it meets.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy

from fusion_compiler.ir.dag import Op, OpDag, Ref
from fusion_compiler.ir.dims import Dim
from fusion_compiler.ir.graph_info import Origins
from fusion_compiler.passes.patterns.indexed import Indexed
from fusion_compiler.passes.patterns.origins import is_wanted
from fusion_compiler.passes.patterns.trace import Traced
from fusion_compiler.patterns import Pattern

COMMUTATIVE = frozenset({
    "add", "mul", "maximum", "minimum", "eq", "ne", "logical_and", "logical_or", "logical_xor",
    "bitwise_and", "bitwise_or", "bitwise_xor",
})  # fmt: skip
FEWEST = 4  # ops that make a gradient recognisable if forward saved most of it
NO_ORIGINS: Origins = {}
MOST_STEPS = 64  # per op of the pattern; a pattern that needs more matches itself in too many ways


@dataclass(frozen=True)
class Match:
    """A match says where a graph has a pattern.

    ops: the graph's ops in the pattern's order, without casts and views between them.
    inputs: the graph's op, or the number, for each parameter of the pattern (None: it does not matter); for a
        recorded pattern the op as a Ref, or the literal.
    outputs: the graph's ops that hold the results.
    casts: whether the graph converts dtypes where the pattern does not. refused: why `where=` said no.
    """

    name: str
    pattern: Pattern
    ops: tuple[str, ...]
    inputs: tuple[Any, ...]
    outputs: tuple[str, ...]
    casts: bool = False
    refused: str = ""

    @property
    def root(self) -> str:
        """Return the first output that is computed, not passed on."""
        return next((o for o in self.outputs if o in self.ops), self.ops[-1])


@dataclass(frozen=True)
class Lost:
    """A match is lost if `winner`, a match of an earlier pattern, has its op `op`."""

    match: Match
    winner: Match
    op: str


@dataclass(frozen=True)
class MatchResult:
    """A result holds all matches of some patterns in one graph.

    matches: matches of earlier patterns first; no op is in two. declined: matches to which `where=` said no.
    lost: overlaps in which a watched pattern is on either side. graph: the graph that was searched.
    """

    matches: tuple[Match, ...]
    declined: tuple[Match, ...]
    lost: tuple[Lost, ...]
    graph: Indexed


def find(patterns: Iterable[Traced], dag: OpDag, *, exact: bool = False) -> tuple[Match, ...]:
    """Return all matches. See `match_all`."""
    return match_all(patterns, dag, exact=exact).matches


def match_all(
    patterns: Iterable[Traced],
    dag: OpDag,
    *,
    exact: bool = False,
    origins: Origins = NO_ORIGINS,
    watched: Collection[Pattern] = frozenset(),
    accepts: Callable[[Match], bool] | None = None,
) -> MatchResult:
    """Match patterns in a graph. The result also has matches that `where=` or an overlap rules out.

    exact: tensors have the pattern's rank, without more leading dimensions, and are of floats if the example
    is. origins: what `where=` learns about the graph's inputs. watched: patterns whose overlaps are recorded,
    which takes a comparison each. accepts: a predicate that replaces `where=`. Recorded patterns must not be
    mixed with others.

    Raises PredicateError if a predicate raises.
    """
    patterns = tuple(patterns)
    graph = Indexed(dag, strict=any(traced.recorded for traced in patterns))
    search = _Search(graph, exact, watched)
    matches: list[Match] = []
    declined: list[Match] = []
    lost: list[Lost] = []
    for traced in patterns:
        for match, op in search.matches(traced):
            wanted = accepts(match) if accepts else is_wanted(traced.pattern, match.inputs, dag, origins)
            if isinstance(wanted, str):
                match, wanted = replace(match, refused=wanted), False
            if op is not None:
                lost += [Lost(match, search.owner[op], op)] if wanted else []
            elif wanted:
                search.owner.update(dict.fromkeys(match.ops, match))
                matches.append(match)
            else:
                declined.append(match)
    return MatchResult(tuple(matches), tuple(declined), tuple(lost), graph)


@dataclass(frozen=True)
class _Search:
    """A search finds patterns in one graph. owner: the match that has an op already, by the op."""

    graph: Indexed
    exact: bool
    watched: Collection[Pattern]
    owner: dict[str, Match] = field(default_factory=dict[str, Match])

    def matches(self, traced: Traced) -> Iterator[tuple[Match, str | None]]:
        """Yield the matches of a pattern, each with the first of its ops that has an owner.

        Matches that overlap with an owner are left out unless the overlap is recorded.
        """
        if not traced.saved and not traced.operators <= self.graph.at.keys():
            return
        for candidate in self.graph.at.get(traced.indexed.key[traced.root], ()):
            if candidate in self.owner and not self._is_watched(traced.pattern, candidate):
                continue
            if _reads_others(traced, traced.root, self.graph, candidate):
                continue
            match = _match_at(traced, self.graph, traced.root, candidate, self.exact)
            if match is None:
                continue
            op = next((op for op in match.ops if op in self.owner), None)
            if op is not None:
                is_other = self.owner[op].pattern is not traced.pattern
                if not (is_other and self._is_watched(traced.pattern, op)):
                    continue
            yield match, op

    def _is_watched(self, pattern: Pattern, op: str) -> bool:
        """True if overlaps of a pattern with the owner of an op are recorded."""
        return pattern in self.watched or self.owner[op].pattern in self.watched


def is_commutative(key: str, *calls: Mapping[str, object]) -> bool:
    """True if the first two operands of an operator may change places, and none of them is scaled."""
    return key in COMMUTATIVE and all(len(c) >= 2 and c.get("alpha", 1) == 1 for c in calls)


def _reads_others(traced: Traced, p: str, graph: Indexed, g: str) -> bool:
    """True if an operand of the pattern's op p can be no operand of the graph's op g: a look ahead."""
    read = graph.reads[g]
    missing = traced.indexed.reads[p] - read - {"placeholder"}
    return bool(missing) and not (traced.saved and "placeholder" in read)


def _match_at(traced: Traced, graph: Indexed, first: str, candidate: str, exact: bool) -> Match | None:
    unifier = Unifier(traced, graph, exact)
    start = State({}, {}, {})
    states: Iterator[State] = unifier.ops(first, candidate, start)
    for output in traced.dag.outputs:
        states = unifier.further(states, traced.indexed.bare[output])
    state = next(states, None)
    return None if state is None else unifier.match(state)


@dataclass(frozen=True)
class State:
    """A state holds what is bound so far: pattern op -> graph op, size symbol -> size, parameter -> number,
    and parameter of a recorded pattern -> literal."""

    ops: Mapping[str, str]
    sizes: Mapping[sympy.Symbol, Dim]
    numbers: Mapping[int, float]
    literals: Mapping[str, object] = field(default_factory=dict[str, object])


def of_one_kind(a: Op, b: Op) -> bool:
    """True if two tensors are both of floats, or neither is."""
    return [m.dtype.is_floating_point for m in a.outputs] == [m.dtype.is_floating_point for m in b.outputs]


def is_literal(value: object) -> bool:
    """True if an argument is neither the result of another op nor a size that is only known at run time."""
    if isinstance(value, tuple):
        return all(map(is_literal, value))
    return not isinstance(value, Ref | sympy.Expr)


class Unifier:
    """A unifier yields the states in which parts of a pattern are parts of a graph."""

    def __init__(self, traced: Traced, graph: Indexed, exact: bool) -> None:
        self.traced, self.pattern, self.graph, self.exact = traced, traced.indexed, graph, exact
        self.steps = 0
        self.open = frozenset(traced.tensors.values()) if traced.recorded else frozenset[str]()

    def further(self, states: Iterator[State], output: str) -> Iterator[State]:
        """Yield the states in which another output of the pattern is bound too."""
        for state in states:
            if self.pattern.bare[output] in state.ops:
                yield state
                continue
            for candidate in self.graph.at.get(self.pattern.key[output], ()):
                yield from self.ops(output, candidate, state)

    def ops(self, p: str, g: str, state: State) -> Iterator[State]:
        """Yield the states in which the pattern's op p is the graph's op g."""
        p, raw = self.pattern.bare[p], g
        g = self.graph.bare[g]
        if p in state.literals:
            return
        if p in state.ops:
            if self.graph.bare[state.ops[p]] == g:
                yield state
            return
        theirs, mine = self.graph.op[g], self.pattern.op[p]
        self.steps += 1
        if self.steps > MOST_STEPS * len(self.pattern.op):
            return
        # A parameter is bound to the op that its reader reads, casts included.
        parameter = mine.target == "placeholder"
        boundary = parameter or (self.traced.saved and theirs.target == "placeholder")
        if not boundary and (
            self.pattern.key[p] != self.graph.key[g] or _reads_others(self.traced, p, self.graph, g)
        ):
            return
        if self.traced.recorded and not boundary and mine.target is not theirs.target:
            return  # another overload
        read = self.graph.op[raw] if parameter else theirs
        if parameter and self.exact and not of_one_kind(mine, read):
            return
        sized = self.shapes(mine, read, state)
        if sized is None:
            return
        ops = {**sized.ops, p: raw if parameter else g}
        bound = State(ops, sized.sizes, sized.numbers, sized.literals)
        if boundary:
            yield bound
            return
        if self.pattern.arguments(p).keys() == self.graph.arguments(g).keys():
            for pairs in self.pairs(p, g):
                yield from self.values(pairs, bound)

    def pairs(self, p: str, g: str) -> list[list[tuple[object, object]]]:
        """Return the pairs of arguments of two ops of the same operator, both ways if it is commutative."""
        ours, other = self.pattern.arguments(p), self.graph.arguments(g)
        names = [n for n in ours if n in other]
        pairs = [(ours[n], other[n]) for n in names]
        if not is_commutative(self.pattern.key[p], ours, other):
            return [pairs]
        swapped = [(ours[names[0]], other[names[1]]), (ours[names[1]], other[names[0]])]
        return [pairs, [*swapped, *pairs[2:]]]

    def values(self, pairs: Sequence[tuple[object, object]], state: State) -> Iterator[State]:
        """Yield the states in which each pair of arguments is equal."""
        if not pairs:
            yield state
            return
        for after in self.value(*pairs[0], state):
            yield from self.values(pairs[1:], after)

    def value(self, mine: object, theirs: object, state: State) -> Iterator[State]:
        if isinstance(mine, Ref) and isinstance(theirs, Ref):
            yield from self.ops(mine.name, theirs.name, state)
        elif isinstance(mine, Ref) and mine.name in self.open:
            yield from self.literal(mine.name, theirs, state)
        elif isinstance(mine, tuple) and isinstance(theirs, tuple):
            if len(mine) == len(theirs):
                yield from self.values(list(zip(mine, theirs, strict=True)), state)
        elif isinstance(mine, float) and mine in self.traced.numbers:
            position = self.traced.numbers[mine]
            if isinstance(theirs, int | float) and state.numbers.get(position, theirs) == theirs:
                yield State(state.ops, state.sizes, {**state.numbers, position: theirs}, state.literals)
        elif isinstance(mine, sympy.Expr) or isinstance(theirs, sympy.Expr):
            after = self.size(mine, theirs, state)
            if after is not None:
                yield after
        elif mine == theirs:
            yield state

    def literal(self, parameter: str, theirs: object, state: State) -> Iterator[State]:
        """Yield the state in which a parameter of a recorded pattern is a literal of the graph."""
        if parameter in state.ops or not is_literal(theirs):
            return
        if parameter not in state.literals:
            literals = {**state.literals, parameter: theirs}
            yield State(state.ops, state.sizes, state.numbers, literals)
        elif state.literals[parameter] == theirs:
            yield state

    def size(self, mine: object, theirs: object, state: State) -> State | None:
        """Return the state in which a size of the pattern equals one of the graph; None if it cannot."""
        if isinstance(theirs, bool) or not isinstance(theirs, int | float | sympy.Expr):
            return None
        if isinstance(mine, sympy.Symbol) and mine not in state.sizes:
            sizes: Any = {**state.sizes, mine: theirs}
            return State(state.ops, sizes, state.numbers, state.literals)
        if not isinstance(mine, int | float | sympy.Expr):
            return None
        value = mine
        if isinstance(mine, sympy.Symbol):
            value = state.sizes[mine]
        elif isinstance(mine, sympy.Expr):
            value = mine.subs(dict(state.sizes))  # type: ignore[arg-type]
        if isinstance(value, int | float | sympy.Integer) and isinstance(theirs, int | float):
            return state if value == theirs else None
        return state if sympy.expand(sympy.sympify(value) - sympy.sympify(theirs)) == 0 else None

    def shapes(self, mine: Op, theirs: Op, state: State) -> State | None:
        """Return the state in which an op has the shape of the pattern's, perhaps with more dimensions in
        front; None if it cannot."""
        if self.traced.recorded:
            return state
        if len(mine.outputs) != len(theirs.outputs) or not mine.outputs:
            return state if not mine.outputs and not theirs.outputs else None
        current: State | None = state
        for ours, other in zip(mine.outputs, theirs.outputs, strict=True):
            more = len(other.shape) - len(ours.shape)
            if more < 0 or (more and self.exact):
                return None
            for a, b in zip(ours.shape, other.shape[more:], strict=True):
                broadcast = b == 1 and not self.exact and mine.target == "placeholder"
                plain = isinstance(a, int | sympy.Symbol) and not broadcast
                current = self.size(a, b, current) if current is not None and plain else current  # type: ignore[arg-type]
        return current

    def match(self, state: State) -> Match | None:
        """Return the finished match; None if it has too few ops of a gradient, as forward saved the rest."""
        placeholders = set(self.traced.tensors.values())
        saved = set(self.graph.dag.inputs) if self.traced.saved else set[str]()
        order = [n for n in self.pattern.op if n in state.ops and n not in placeholders]
        ops = tuple(dict.fromkeys(op for op in map(state.ops.__getitem__, order) if op not in saved))
        outputs = tuple(state.ops[self.pattern.bare[o]] for o in self.traced.dag.outputs)
        if self.traced.recorded:
            arguments = tuple(
                Ref(state.ops[p]) if p in state.ops else state.literals.get(p)
                for p in self.traced.tensors.values()
            )
            return Match(self.traced.name, self.traced.pattern, ops, arguments, outputs)
        inputs: list[str | float | int | None] = []
        for position, value in enumerate(self.traced.pattern.example):
            if position in self.traced.tensors:
                inputs.append(state.ops.get(self.traced.tensors[position]))
            else:
                inputs.append(state.numbers.get(position) if isinstance(value, float) else value)
        casts = any(i != self.graph.bare[i] for name in ops for i in self.graph.op[name].inputs)
        if self.traced.saved and len(ops) < FEWEST:
            return None
        return Match(self.traced.name, self.traced.pattern, ops, tuple(inputs), outputs, casts)
