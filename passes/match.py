"""Find patterns in an operator DAG: subgraph isomorphism, from a pattern's outputs to its inputs.

Ops are looked up by their operator, so that a pattern costs time only where the rarest of its operators
occurs. Operands of commutative operators are tried both ways. Dimensions count from the end and casts are
looked through, so that the pattern traced in float32 on [rows, columns] also names the bfloat16 code on
[batch, length, columns]. Sizes in a pattern are symbols, bound by the shapes that it meets.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx
from torch._guards import tracing
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import make_fx

from fusion_compiler.dag import Op, OpDag, Ref, build
from fusion_compiler.decompositions import decomposition_table
from fusion_compiler.dims import Dim
from fusion_compiler.errors import InvalidPatternError
from fusion_compiler.patterns import ClusterHint, Pattern

aten = torch.ops.aten
COMMUTATIVE = frozenset({
    "add", "mul", "maximum", "minimum", "eq", "ne", "logical_and", "logical_or", "logical_xor",
    "bitwise_and", "bitwise_or", "bitwise_xor",
})  # fmt: skip
CASTS = frozenset({"_to_copy", "to", "convert_element_type"})
# Arguments that do not matter: dtypes and devices, and the shapes of results, which are compared as such.
UNCOMPARED = frozenset({
    "device", "layout", "pin_memory", "memory_format", "dtype", "non_blocking", "copy", "size", "shape",
    "salt",
})  # fmt: skip
DIMENSIONS = frozenset({"dim", "dims", "dim0", "dim1"})
WILDCARD = 0.73105857863  # floats among a pattern's arguments are traced as this plus their position
FEWEST = 4  # ops that make a gradient recognisable where most of it was saved by forward
MOST_STEPS = 64  # per op of the pattern; one that needs more matches itself in too many ways


@dataclass(frozen=True)
class Traced:
    """A pattern as an operator DAG. tensors, numbers: parameter position -> placeholder or float."""

    name: str
    pattern: Pattern
    dag: OpDag
    tensors: Mapping[int, str]
    numbers: Mapping[float, int]
    saved: bool  # whether inputs of the graph may stand for values that the pattern computes

    @functools.cached_property
    def operators(self) -> frozenset[str]:
        return frozenset(key_of(op) for op in map(self.dag.op, self.dag.order) if _computes(op))


@dataclass(frozen=True)
class Match:
    """Where a pattern was found.

    ops: of the graph, in the pattern's order, casts and views between them aside.
    inputs: the graph's op, or the number, for each parameter of the pattern (None: it does not matter).
    outputs: the graph's ops that hold the results.
    casts: whether the graph converts dtypes where the pattern does not.
    """

    name: str
    pattern: Pattern
    ops: tuple[str, ...]
    inputs: tuple[str | float | int | None, ...]
    outputs: tuple[str, ...]
    casts: bool = False


@contextlib.contextmanager
def apart() -> Generator[None]:
    """As if no capture were under way: patterns are traced, and run, whenever they are first needed."""
    with (
        unset_fake_temporarily(),
        tracing(None),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.device("cpu"),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
    ):
        yield


def traced_hints(hints: tuple[ClusterHint, ...]) -> tuple[Traced, ...]:
    """Hints by our decompositions, each with its gradient before it where that is asked for.

    Raises InvalidPatternError.
    """
    if not hints:
        return ()
    with apart():
        table = _table()
        return tuple(traced for hint in hints for traced in _traced_hint(hint, table))


@dataclass(frozen=True, eq=False)
class Decompositions:
    """A table that stands for itself: making one takes as long as tracing ten patterns."""

    table: Mapping[Any, Callable[..., Any]]


@functools.cache
def _table() -> Decompositions:
    return Decompositions(decomposition_table())


@functools.cache
def _traced_hint(pattern: ClusterHint, decompositions: Decompositions) -> tuple[Traced, ...]:
    table = decompositions.table
    forward = trace(pattern, pattern.code, pattern.name, table)
    if not pattern.backward:
        return (forward,)

    def gradient(*arguments: Any) -> torch.Tensor:
        *given, tangent = arguments
        first = given[0].detach().requires_grad_()
        return torch.autograd.grad(pattern.code(first, *given[1:]), first, tangent)[0]

    example = (*pattern.example, torch.ones_like(pattern.code(*pattern.example)))
    name = f"{pattern.name}_backward"
    return (trace(pattern, gradient, name, table, example, saved=True), forward)


@functools.cache
def traced_whole(pattern: Pattern) -> Traced:
    """A rewrite or user's kernel as ATen above autograd, composite operators whole.

    Raises InvalidPatternError.
    """
    with apart():
        return trace(pattern, pattern.code, pattern.name, {}, pre_dispatch=True)


def trace(
    pattern: Pattern,
    code: Callable[..., Any],
    name: str,
    table: Mapping[Any, Any],
    example: tuple[Any, ...] | None = None,
    *,
    saved: bool = False,
    pre_dispatch: bool = False,
) -> Traced:
    """`code` on sizes that stand for any, or, where it takes no others, on those of the example.

    Raises InvalidPatternError for what cannot be traced.
    """
    example = pattern.example if example is None else example
    tensors = [i for i, v in enumerate(example) if isinstance(v, torch.Tensor)]
    fixed = [WILDCARD + i if isinstance(v, float) else v for i, v in enumerate(example)]

    def run(*given: torch.Tensor) -> Any:
        arguments = list(fixed)
        for position, value in zip(tensors, given, strict=True):
            arguments[position] = value
        return code(*arguments)

    sizes = sorted({s for i in tensors for s in example[i].shape if s > 1})
    large = {size: 12 * prime for size, prime in zip(sizes, _PRIMES, strict=False)}
    try:
        try:
            gm, symbols = _traced(run, [example[i] for i in tensors], large, table, pre_dispatch), large
        except RuntimeError:  # a view to literal sizes, for instance
            gm, symbols = _traced(run, [example[i] for i in tensors], {}, table, pre_dispatch), {}
    except Exception as error:
        raise InvalidPatternError(pattern=name, detail=f"{type(error).__name__}: {error}") from error
    dag = _symbolic(build(gm), {value: sympy.Symbol(f"n{size}", positive=True, integer=True)
                                for size, value in symbols.items()})  # fmt: skip
    if not dag.outputs or all(bare(dag, o) in dag.inputs for o in dag.outputs):
        raise InvalidPatternError(pattern=name, detail="its code computes nothing from its arguments")
    places = [n.name for n in gm.graph.find_nodes(op="placeholder")]
    numbers = {WILDCARD + i: i for i, v in enumerate(example) if isinstance(v, float)}
    return Traced(name, pattern, dag, dict(zip(tensors, places, strict=True)), numbers, saved)


# A size is traced as twelve times a prime: halves, thirds and quarters of it are recognised as such.
_PRIMES = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049, 1051, 1061, 1063, 1069)


def _traced(
    run: Callable[..., Any],
    values: Sequence[torch.Tensor],
    sizes: Mapping[int, int],
    table: Mapping[Any, Any],
    pre_dispatch: bool,
) -> fx.GraphModule:
    with FakeTensorMode():
        shapes = [[sizes.get(s, s) for s in v.shape] for v in values]
        fakes = [torch.empty(s, dtype=v.dtype, device="cpu") for s, v in zip(shapes, values, strict=True)]
        gm = make_fx(run, dict(table), pre_dispatch=pre_dispatch)(*fakes)
    gm.graph.eliminate_dead_code()
    return gm


def _symbolic(dag: OpDag, symbols: Mapping[int, sympy.Symbol]) -> OpDag:
    """The same with symbols for the sizes that stand for any."""

    def of(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(of(v) for v in value)
        if (
            not isinstance(value, int)
            or isinstance(value, bool)
            or abs(value) < 3 * min(symbols, default=0) // 12
        ):
            return value
        for size, symbol in symbols.items():
            if value % (size // 12) == 0:
                return sympy.expand(symbol * sympy.Rational(value, size))
        return value

    graph = dag.graph.copy()
    for name in dag.order:
        op = dag.op(name)
        metas = tuple(replace(m, shape=of(m.shape), stride=of(m.stride)) for m in op.outputs)
        graph.nodes[name]["op"] = replace(op, args=of(op.args), outputs=metas)
    return replace(dag, graph=graph)


def bare(dag: OpDag, name: str) -> str:
    """The op behind casts and aliases."""
    op = dag.op(name)
    while op.inputs and is_cast_or_alias(op.target):
        op = dag.op(op.inputs[0])
    return op.name


def is_cast_or_alias(target: object) -> bool:
    return isinstance(target, OpOverload) and (
        target._opname in CASTS or target._opname in ("alias", "detach")
    )


def key_of(op: Op) -> str:
    return op.target._opname if isinstance(op.target, OpOverload) else str(op.target)


Index = Mapping[str, Sequence[str]]


def index_of(dag: OpDag) -> Index:
    """Ops by operator."""
    found: dict[str, list[str]] = {}
    for name in dag.order:
        found.setdefault(key_of(dag.op(name)), []).append(name)
    return found


def find(patterns: Iterable[Traced], dag: OpDag, *, exact: bool = False) -> tuple[Match, ...]:
    """All matches, those of earlier patterns first; no op is in two.

    exact: tensors have the pattern's rank, not leading dimensions besides.
    """
    index = index_of(dag)
    claimed: set[str] = set()
    matches: list[Match] = []
    for traced in patterns:
        if not traced.saved and not traced.operators <= index.keys():
            continue
        first = bare(traced.dag, traced.dag.outputs[0])
        for candidate in index.get(key_of(traced.dag.op(first)), ()):
            if candidate in claimed:
                continue
            match = _match_at(traced, dag, index, first, candidate, exact)
            if match is not None and not claimed & set(match.ops) and _wanted(match, dag):
                claimed |= set(match.ops)
                matches.append(match)
    return tuple(matches)


def _computes(op: Op) -> bool:
    return isinstance(op.target, OpOverload) and bool(op.outputs) and not is_cast_or_alias(op)


def _wanted(match: Match, dag: OpDag) -> bool:
    """The pattern's own predicate."""
    if match.pattern.where is None:
        return True
    given = [dag.op(i).outputs[0] if isinstance(i, str) else i for i in match.inputs]
    return bool(match.pattern.where(*given[: len(match.pattern.example)]))


def _match_at(
    traced: Traced, dag: OpDag, index: Index, first: str, candidate: str, exact: bool
) -> Match | None:
    unifier = _Unifier(traced, dag, exact)
    start = _State({}, {}, {})
    states: Iterator[_State] = unifier.ops(first, candidate, start)
    for output in traced.dag.outputs[1:]:
        states = unifier.further(states, bare(traced.dag, output), index)
    state = next(states, None)
    return None if state is None else unifier.match(state)


@dataclass(frozen=True)
class _State:
    """What is bound so far: pattern op -> graph op, size symbol -> size, parameter -> number."""

    ops: Mapping[str, str]
    sizes: Mapping[sympy.Symbol, Dim]
    numbers: Mapping[int, float]


class _Unifier:
    def __init__(self, traced: Traced, dag: OpDag, exact: bool) -> None:
        self.traced, self.pattern, self.dag, self.exact = traced, traced.dag, dag, exact
        self.steps = 0

    def further(self, states: Iterator[_State], output: str, index: Index) -> Iterator[_State]:
        """The same states with another output of the pattern found."""
        for state in states:
            for candidate in index.get(key_of(self.pattern.op(output)), ()):
                yield from self.ops(output, candidate, state)

    def ops(self, p: str, g: str, state: _State) -> Iterator[_State]:
        """States in which the pattern's op p is the graph's op g."""
        p, raw = bare(self.pattern, p), g
        g = bare(self.dag, g)
        theirs, mine = self.dag.op(g), self.pattern.op(p)
        if p in state.ops:
            if bare(self.dag, state.ops[p]) == g:
                yield state
            return
        self.steps += 1
        if self.steps > MOST_STEPS * len(self.pattern.order):
            return
        # A parameter is what reads it sees: with its cast, where there is one.
        parameter = mine.target == "placeholder"
        boundary = parameter or (self.traced.saved and theirs.target == "placeholder")
        if not boundary and key_of(mine) != key_of(theirs):
            return
        sized = self.shapes(mine, self.dag.op(raw) if parameter else theirs, state)
        if sized is None:
            return
        bound = _State({**sized.ops, p: raw if parameter else g}, sized.sizes, sized.numbers)
        if boundary:
            yield bound
            return
        ours, other = arguments(mine, self.pattern), arguments(theirs, self.dag)
        if ours.keys() != other.keys():
            return
        names = list(ours)
        yield from self.values([(ours[n], other[n]) for n in names], bound)
        if key_of(mine) in COMMUTATIVE and len(names) >= 2:
            swapped = [(ours[names[0]], other[names[1]]), (ours[names[1]], other[names[0]])]
            yield from self.values([*swapped, *((ours[n], other[n]) for n in names[2:])], bound)

    def values(self, pairs: Sequence[tuple[object, object]], state: _State) -> Iterator[_State]:
        """States in which each pair of arguments is equal."""
        if not pairs:
            yield state
            return
        for after in self.value(*pairs[0], state):
            yield from self.values(pairs[1:], after)

    def value(self, mine: object, theirs: object, state: _State) -> Iterator[_State]:
        if isinstance(mine, Ref) and isinstance(theirs, Ref):
            yield from self.ops(mine.name, theirs.name, state)
        elif isinstance(mine, tuple) and isinstance(theirs, tuple):
            if len(mine) == len(theirs):
                yield from self.values(list(zip(mine, theirs, strict=True)), state)
        elif isinstance(mine, float) and mine in self.traced.numbers:
            position = self.traced.numbers[mine]
            if isinstance(theirs, int | float) and state.numbers.get(position, theirs) == theirs:
                yield _State(state.ops, state.sizes, {**state.numbers, position: theirs})
        elif isinstance(mine, sympy.Expr) or isinstance(theirs, sympy.Expr):
            after = self.size(mine, theirs, state)
            if after is not None:
                yield after
        elif mine == theirs:
            yield state

    def size(self, mine: object, theirs: object, state: _State) -> _State | None:
        """The state in which a size of the pattern equals one of the graph."""
        if isinstance(theirs, bool) or not isinstance(theirs, int | float | sympy.Expr):
            return None
        if isinstance(mine, sympy.Symbol) and mine not in state.sizes:
            return _State(state.ops, {**state.sizes, mine: theirs}, state.numbers)  # type: ignore[dict-item]
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

    def shapes(self, mine: Op, theirs: Op, state: _State) -> _State | None:
        """The state in which an op has the shape of the pattern's, perhaps with more dimensions in front."""
        if len(mine.outputs) != len(theirs.outputs) or not mine.outputs:
            return state if not mine.outputs and not theirs.outputs else None
        current: _State | None = state
        for ours, other in zip(mine.outputs, theirs.outputs, strict=True):
            more = len(other.shape) - len(ours.shape)
            if more < 0 or (more and self.exact):
                return None
            for a, b in zip(ours.shape, other.shape[more:], strict=True):
                broadcast = b == 1 and not self.exact and mine.target == "placeholder"
                plain = isinstance(a, int | sympy.Symbol) and not broadcast
                current = self.size(a, b, current) if current is not None and plain else current  # type: ignore[arg-type]
        return current

    def match(self, state: _State) -> Match | None:
        """The finished match; None where what forward saved leaves too little of a gradient."""
        placeholders = set(self.traced.tensors.values())
        given = set(self.dag.inputs)
        order = [n for n in self.pattern.order if n in state.ops and n not in placeholders]
        ops = tuple(
            dict.fromkeys(state.ops[n] for n in order if not (self.traced.saved and state.ops[n] in given))
        )
        inputs: list[str | float | int | None] = []
        for position, value in enumerate(self.traced.pattern.example):
            if position in self.traced.tensors:
                inputs.append(state.ops.get(self.traced.tensors[position]))
            else:
                inputs.append(state.numbers.get(position) if isinstance(value, float) else value)
        outputs = tuple(state.ops[bare(self.pattern, o)] for o in self.pattern.outputs)
        casts = any(_casts_between(self.dag, name, set(ops)) for name in ops)
        if self.traced.saved and len(ops) < FEWEST:
            return None
        return Match(self.traced.name, self.traced.pattern, ops, tuple(inputs), outputs, casts)


def _casts_between(dag: OpDag, name: str, inside: set[str]) -> bool:
    """Whether an op of a match reads a value through a cast."""
    return any(i != bare(dag, i) for i in dag.op(name).inputs)


def arguments(op: Op, dag: OpDag) -> dict[str, object]:
    """Arguments by schema name, defaults filled in, dimensions from the end, without dtypes and devices."""
    target = op.target
    assert isinstance(target, OpOverload)
    given = dict(op.kwargs)
    shape = dag.op(op.inputs[0]).outputs[0].shape if op.inputs and dag.op(op.inputs[0]).outputs else ()
    rank = len(shape) + (target._opname == "unsqueeze")
    named: dict[str, object] = {}
    for position, argument in enumerate(target._schema.arguments):
        if argument.name in UNCOMPARED:
            continue
        value = (
            op.args[position] if position < len(op.args) else given.get(argument.name, argument.default_value)
        )
        if argument.name in DIMENSIONS and value is not None:
            value = _from_end(value, rank)
        named[argument.name] = value
    if target is aten.slice.Tensor:
        named |= _slice_bounds(named, shape)
    return named


def _from_end(dims: object, rank: int) -> object:
    if isinstance(dims, tuple | list):
        return tuple(_from_end(d, rank) for d in dims)
    return dims - rank if isinstance(dims, int) and dims >= 0 else dims


def _slice_bounds(named: Mapping[str, object], shape: tuple[Dim, ...]) -> dict[str, object]:
    """start and end as sizes: what is left out, or reaches beyond the end, is the size itself."""
    size = shape[named["dim"]]  # type: ignore[index]
    start, end = named["start"], named["end"]
    if end is None or (isinstance(end, int) and (end >= 2**62 or (isinstance(size, int) and end > size))):
        end = size
    return {"start": 0 if start is None else start, "end": end}
