"""The loop nest: one cluster over one iteration space, before a schedule is chosen.

    LoopNest := axes, nodes, stores
    axis     := name, size, group, bounds    group is "rows", "cols", "inner" or "ragged"
    index    := const + sum(coeff * axis) + sum(coeff * value)
    node     := Load(buffer, index, within) | Coordinate(index) | Constant(value)
              | InRange(index, low, high) | Random(seed, index, salt)
              | Checked(operand, position, low, high, within)
              | Compute(target, operands) | Reduce(combine, operand, axes, within)
              | Scan(combine, operand, reverse)
    store    := buffer, index, value, within    several stores to one buffer write disjoint elements

Nodes are in SSA order and refer to each other by position. The dtype of a node is that of its computation
(float32 for all floats but float64). The `groups` of a node are the axis groups that it varies over. A tile
holds it as [ROWS, COLS], [ROWS, 1], [1, COLS] or [1, 1].

A ragged axis comes last. Its length is data: as many elements as lie between the values of two nodes, its
bounds. Only a reduction over the axis may read values along it, and only where node `within` is true, since
a tile of several rows goes as far along the axis as its longest row.

Inner axes come behind all others, which are columns then. A nest has them for one of two reasons:
- its accesses move along windows, as those of a convolution do: reductions run over the taps, and what is
  stored does not vary along them (`schedule.windowed`);
- its reductions are over different axes. Inner are all that some reduction is over, or that some result
  lacks, and a tile holds them, so that reductions may feed each other; what is stored may vary along them
  (`schedule.tiles`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import sympy
import torch
from torch._ops import OpOverload

from fusion_compiler.ir.dims import Dim, quotient
from fusion_compiler.ops.arithmetic import AND, CAST
from fusion_compiler.ops.schema import default_numbers, defaults_of
from fusion_compiler.ops.table import BY_TARGET, OpSpec

ROWS, COLS = "rows", "cols"
GROUPS = (ROWS, COLS)  # the order of a nest's axes
INNER = "inner"  # not a group: axes after all others, of windows or of tiles
RAGGED = "ragged"  # not a group: axes whose length is data
TILE = frozenset({ROWS, COLS})
MOST_FEATURES = 256  # of a row in a chain of products, whose tiles have all of them
LARGEST_TILE = 1 << 15  # elements: 64 for each thread of 16 warps, of every tensor that it holds


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of the iteration space.

    bounds: the nodes (first, last) of a ragged axis, which has last - first elements at a point of the other
        axes, or none. Its size is 1, since no tile has room for it.
    most: an upper bound of a size that is known at run time only, if there is one.
    """

    name: str
    size: Dim
    group: str
    bounds: tuple[int, ...] = ()
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Index:
    """An affine element index. The keys of terms are axis numbers, or ~node where the value of a node is
    the index."""

    const: Dim
    terms: tuple[tuple[int, Dim], ...]


@dataclass(frozen=True, slots=True)
class Load:
    """A load is element `index` of `buffer` where node `within` is true, else 0. `within` is a bool; None
    means everywhere."""

    buffer: str
    index: Index
    within: int | None
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Coordinate:
    """The index itself as an integer value (arange, iota)."""

    index: Index
    dtype: torch.dtype


def exact(value: object) -> object:
    """Return a key of an argument: 1, 1.0 and True differ, as do 0.0 and -0.0, and a NaN equals itself."""
    if isinstance(value, list | tuple):
        return tuple(map(exact, value))
    if isinstance(value, dict):
        return tuple((k, exact(v)) for k, v in sorted(value.items()))
    return type(value), repr(value) if isinstance(value, float | slice) else value


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    value: bool | int | float
    dtype: torch.dtype

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> object:
        return exact(self.value), self.dtype


@dataclass(frozen=True, slots=True)
class InRange:
    """The condition low <= index < high, such as one side of a concatenation or the inside of a padding."""

    index: Index
    low: Dim
    high: Dim
    dtype: torch.dtype = torch.bool


@dataclass(frozen=True, slots=True)
class Random:
    """The value is uniform float32 in [0, 1): lane index % 4 of Philox(seed, index // 4), stream `salt`. If
    dtype is uint32: the random word, whose upper 24 bits give the float."""

    seed: int
    index: Index
    salt: Dim  # a kernel argument in canonical clusters, so that dropouts can share a kernel
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class Checked:
    """The value of `operand`. Raises an error unless low <= `position` < high wherever `within` is true.

    position: the node of the position to read, usually the operand itself.
    what: the name of the index in the error.
    """

    operand: int
    position: int
    low: Dim
    high: Dim
    within: int | None
    what: str
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Compute:
    """The value is `target` applied to operands: (schema name, node number or Python scalar).

    bf16: eager rounds the result to bfloat16, so the table's bf16 expression is accurate enough.
    reproducible: every kernel must compute the same number (ir/reproducible.py): with the table's first
        expression, and without fusing a product into a sum.
    single_producer: only this kernel computes the value, so any expression is allowed.
    """

    target: OpOverload
    operands: tuple[tuple[str, object], ...]  # ("self", Value(3)), ("alpha", 2)
    dtype: torch.dtype
    bf16: bool = False
    reproducible: bool = False
    single_producer: bool = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Compute) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> object:
        operands = tuple([(n, a if isinstance(a, Value) else exact(a)) for n, a in self.operands])
        return self.target, operands, self.dtype, self.bf16, self.reproducible, self.single_producer

    @property
    def spec(self) -> OpSpec:
        """Return the row of the operator table."""
        return BY_TARGET[self.target]


@dataclass(frozen=True, slots=True)
class Value:
    """An operand that is the value of another node."""

    node: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """Combine `operand` over some axes of rows and columns, over inner axes, or over a ragged axis. The
    result varies over the others.

    axes: axis numbers, including those of extent 1. A reduction over a group has all of its axes. One that
        keeps some axes of the two groups has all other axes of both. `reduced_groups` tells how tiles compute
        it.
    within: the node that says which elements of a ragged axis exist.
    """

    combine: str
    operand: int
    axes: frozenset[int]
    dtype: torch.dtype
    within: int | None = None


@dataclass(frozen=True, slots=True)
class Scan:
    """Combine `operand` along the columns up to and including each one, giving one value per column.

    combine: sum, prod, max, min or logsumexp.
    reverse: from the last column to the first.
    """

    combine: str
    operand: int
    reverse: bool
    dtype: torch.dtype


Node = Load | Coordinate | Constant | InRange | Random | Checked | Compute | Reduce | Scan


@dataclass(frozen=True, slots=True)
class Store:
    buffer: str
    index: Index
    value: int
    within: int | None = None


@dataclass(frozen=True)
class LoopNest:
    axes: tuple[Axis, ...]
    nodes: tuple[Node, ...]
    stores: tuple[Store, ...]
    names: tuple[str, ...]  # names of the values for printing, one per node

    @functools.cached_property
    def node_axes(self) -> tuple[frozenset[int], ...]:
        """Return the axes that each node varies over (see `axes_of`)."""
        return axes_of(self.nodes)

    def reduction(self, number: int) -> Reduce:
        node = self.nodes[number]
        assert isinstance(node, Reduce)
        return node


def operands_of(node: Node) -> tuple[int, ...]:
    """Return the numbers of the nodes that a node reads."""
    return _OPERANDS[type(node)](node)


def operand_of(node: Compute, name: str) -> int | None:
    """Return the number of the node that is an operand of an expression; None for a literal."""
    value = dict(node.operands).get(name)
    return value.node if isinstance(value, Value) else None


def arity_of(node: Compute) -> int:
    """Return how many operands an expression has, values and literals, if it has one or two."""
    return sum(name in ("self", "other") for name, _ in node.operands)


def number_of(nodes: Sequence[Node], node: Compute, name: str) -> float | None:
    """Return an operand that is a literal or a constant; None for a value that is computed."""
    operand = dict(node.operands).get(name)
    source = nodes[operand.node] if isinstance(operand, Value) else None
    number = source.value if isinstance(source, Constant) else operand
    return number if isinstance(number, int | float) else None


def applied(
    nodes: Sequence[Node],
    target: OpOverload,
    /,
    *operands: int,
    dtype: torch.dtype | None = None,
    **others: object,
) -> Compute:
    """Return an operator of the values of some nodes, in the order of its schema, and of `others` by name.

    dtype: unless the caller says it, bool for a condition, else the promoted dtype of the nodes.
    others: literals, or values.
    """
    if dtype is None and BY_TARGET[target].is_condition:
        dtype = torch.bool
    elif dtype is None:
        dtype = functools.reduce(torch.promote_types, (nodes[number].dtype for number in operands))
    named = dict(zip(defaults_of(target), map(Value, operands), strict=False)) | others
    rest = ((name, value) for name, value in default_numbers(target).items() if name not in named)
    return Compute(target, (*named.items(), *rest), dtype)


def is_applied(node: Node | None, operator: OpOverload) -> TypeGuard[Compute]:
    """True if a node is an operator of `ops/arithmetic.py`, in any of its overloads."""
    return isinstance(node, Compute) and node.spec.operator is operator


def pair_of(node: Node | None, operator: OpOverload) -> tuple[int, ...]:
    """Return the two values that an operator combines; () for another operator, and for one with a literal or
    an `alpha` that is not 1."""
    if not is_applied(node, operator) or dict(node.operands).get("alpha", 1) != 1:
        return ()
    operands = operands_of(node)
    return operands if len(operands) == 2 else ()


def cast_of(node: Node) -> int | None:
    """Return the node that another one converts without rounding it; None for all else."""
    is_cast = is_applied(node, CAST) and rounding_of(node) is None
    return operands_of(node)[0] if is_cast else None


def source_of(nodes: Sequence[Node], number: int) -> int:
    """Return the node whose number this one is, perhaps in another dtype."""
    while (source := cast_of(nodes[number])) is not None:
        number = source
    return number


def rounding_of(node: Node) -> object:
    """Return the dtype, as text, to which a node rounds within the kernel; None for all other nodes."""
    return dict(node.operands).get("rounding") if isinstance(node, Compute) else None


def _and_within(*operands: int, within: int | None) -> tuple[int, ...]:
    return operands if within is None else (*operands, within)


def _indirect(index: Index) -> tuple[int, ...]:
    return tuple([~key for key, _ in index.terms if key < 0])


_OPERANDS: Mapping[type, Callable[[Any], tuple[int, ...]]] = {
    Load: lambda n: (*_and_within(within=n.within), *_indirect(n.index)),
    Coordinate: lambda n: _indirect(n.index),
    Constant: lambda n: (),
    InRange: lambda n: _indirect(n.index),
    Random: lambda n: (n.seed, *_indirect(n.index)),
    Checked: lambda n: _and_within(n.operand, n.position, within=n.within),
    Compute: lambda n: tuple([a.node for _, a in n.operands if type(a) is Value]),
    Reduce: lambda n: _and_within(n.operand, within=n.within),
    Scan: lambda n: (n.operand,),
}


def conjuncts_of(nodes: Sequence[Node], condition: int) -> list[int]:
    """Return the nodes whose conjunction a condition is, each once."""
    visited, stack, conjuncts = set[int](), [condition], list[int]()
    while stack:
        number = stack.pop()
        if number not in visited and is_applied(nodes[number], AND):
            stack += reversed(operands_of(nodes[number]))
        elif number not in visited:
            conjuncts.append(number)
        visited.add(number)
    return conjuncts


def with_operands(loops: LoopNest, numbers: Iterable[int], ends: Collection[int] = ()) -> set[int]:
    """Return some nodes and all that they depend on, without following the operands of `ends`."""
    needed: set[int] = set()
    stack = list(numbers)
    while stack:
        if (number := stack.pop()) not in needed:
            needed.add(number)
            stack.extend(() if number in ends else operands_of(loops.nodes[number]))
    return needed


def with_readers(loops: LoopNest, numbers: Iterable[int]) -> frozenset[int]:
    """Return some nodes and all that depend on them."""
    late = set(numbers)
    for number, node in enumerate(loops.nodes if late else ()):
        if not late.isdisjoint(operands_of(node)):
            late.add(number)
    return frozenset(late)


def store_operands(store: Store) -> tuple[int, ...]:
    within = () if store.within is None else (store.within,)
    return (store.value, *within, *_indirect(store.index))


def right_neighbours(axes: Sequence[Axis], accesses: Iterable[tuple[int, Load | Store]]) -> dict[int, int]:
    """Pair accesses to even elements along the columns with those to the odd elements beside them. The pairs
    are aligned: 2 i -> 2 i + 1. Return the numbers, which the accesses come with, of both."""

    def shifted(index: Index) -> Index:
        return replace(index, const=index.const + 1)

    strided = {n: a for n, a in accesses if a.within is None and _by_twos(axes, a.index)}
    number_of = {(a.buffer, a.index): n for n, a in strided.items()}
    right = {n: number_of.get((a.buffer, shifted(a.index))) for n, a in strided.items()}
    return {n: other for n, other in right.items() if other is not None and strided[n].index.const % 2 == 0}


def _by_twos(axes: Sequence[Axis], index: Index) -> bool:
    """True if an index has step 2 along the innermost columns and even steps elsewhere."""
    last = max((k for k, axis in enumerate(axes) if axis.group != RAGGED), default=-1)
    innermost = dict(index.terms).get(last) == 2 and axes[last].group == COLS
    return (
        innermost
        and isinstance(index.const, int)
        and all(k >= 0 and quotient(c, 2) is not None for k, c in index.terms)
    )


def axes_in(axes: Sequence[Axis], groups: Collection[str]) -> frozenset[int]:
    """Return the numbers of the axes of some groups."""
    return frozenset(k for k, axis in enumerate(axes) if axis.group in groups)


def reduced_groups(axes: Sequence[Axis], reduce: Reduce) -> frozenset[str]:
    """Return the groups over which tiles are reduced: those of the axes, if these are whole groups.

    A reduction that keeps a part of a group is over both groups; no schedule runs it
    (`passes.fuse.legality.groups`). A reduction over inner axes or over a ragged axis is over these, and each
    element of the tile has its own.
    """
    if kept_axes(axes, reduce):
        return TILE
    groups = frozenset(axes[k].group for k in reduce.axes)
    # Nests leave out axes of extent 1: a reduction without axes is over the group that has none.
    return groups or frozenset({ROWS if axes_in(axes, (COLS,)) else COLS})


def kept_axes(axes: Sequence[Axis], reduce: Reduce) -> frozenset[int]:
    """Return the axes of rows and columns that a reduction keeps; none if it is over whole groups."""
    groups = {axes[k].group for k in reduce.axes}
    keeps_none = reduce.axes == axes_in(axes, groups) or not groups <= TILE
    return frozenset() if keeps_none else axes_in(axes, TILE) - reduce.axes


def groups_of(loops: LoopNest) -> tuple[frozenset[str], ...]:
    """Return the axis groups that each node varies over within a tile: rows, columns, both or none."""
    out: list[frozenset[str]] = []
    for node in loops.nodes:
        groups = {g for o in operands_of(node) for g in out[o]}
        if isinstance(node, Load | Coordinate | InRange | Random):
            groups |= {loops.axes[k].group for k, _ in node.index.terms if k >= 0} & TILE
        if isinstance(node, Reduce):
            groups -= reduced_groups(loops.axes, node)
        if isinstance(node, Scan):
            groups |= {COLS}
        out.append(frozenset(groups))
    return tuple(out)


def axes_of(nodes: Iterable[Node]) -> tuple[frozenset[int], ...]:
    """Return the axes that each node varies over, as loads and coordinates tell."""
    out: list[frozenset[int]] = []
    for node in nodes:
        axes = frozenset[int]().union(*(out[o] for o in operands_of(node)))
        if isinstance(node, Load | Coordinate | InRange | Random):
            axes |= {k for k, _ in node.index.terms if k >= 0}
        out.append(axes - node.axes if isinstance(node, Reduce) else axes)
    return tuple(out)


def is_only_stored_in_place(loops: LoopNest, load: int, buffer: str) -> bool:
    """True if a loaded element is used only for the value stored at the same index in `buffer`, and stored
    once.

    Each element must be computed alone. Then the program that stores an element has loaded it before,
    whichever programs load it. Along rows, as along columns, each program stores its own element, or all
    store one, which `passes.fuse.legality.fills` lets only one of them store.
    """
    reached = {load}
    for number, node in enumerate(loops.nodes):
        if not reached.isdisjoint(operands_of(node)):
            if not isinstance(node, Compute):
                return False
            reached.add(number)
    source = loops.nodes[load]
    assert isinstance(source, Load)
    stores = [s for s in loops.stores if not reached.isdisjoint(store_operands(s))]
    varying = {k for k, _ in source.index.terms}
    nontrivial = {k for k, axis in enumerate(loops.axes) if axis.size != 1}
    groups = {loops.axes[k].group for k in varying & nontrivial if k >= 0}
    if any(loops.axes[k].group in groups for k in nontrivial - varying):
        return False
    return all(
        s.buffer == buffer and s.index == source.index and not reached & {*store_operands(s)[1:]}
        for s in stores
    ) and all(k >= 0 for k, _ in source.index.terms)


def resized(loops: LoopNest, size: Callable[[Dim], Dim]) -> LoopNest:
    """Return a loop nest with `size` applied to each of its sizes. Salts are not sizes."""

    def index(i: Index) -> Index:
        return Index(size(i.const), tuple((key, size(step)) for key, step in i.terms))

    def node(n: Node) -> Node:
        match n:
            case InRange():
                return replace(n, index=index(n.index), low=size(n.low), high=size(n.high))
            case Checked():
                return replace(n, low=size(n.low), high=size(n.high))
            case Load() | Coordinate() | Random():
                return replace(n, index=index(n.index))
            case _:
                return n

    axes = tuple(replace(a, size=size(a.size)) for a in loops.axes)
    stores = tuple(replace(s, index=index(s.index)) for s in loops.stores)
    return replace(loops, axes=axes, nodes=tuple(map(node, loops.nodes)), stores=stores)


def symbols_of(nests: Iterable[LoopNest], tensors: Iterable[Sequence[Dim]]) -> tuple[sympy.Symbol, ...]:
    """Return a kernel's size arguments: the symbols in the sizes of its nests and tensors, by name."""
    dims = [dim for sizes in tensors for dim in sizes]
    for loops in nests:
        resized(loops, lambda dim: dims.append(dim) or dim)
    symbols = {s for dim in dims if not isinstance(dim, int) for s in dim.free_symbols}
    return tuple(sorted(symbols, key=lambda s: s.name))  # type: ignore[arg-type,union-attr]


def renumber(node: Node, numbers: Mapping[int, int], axes: Mapping[int, int] | None = None) -> Node:
    """Return a node with new numbers of its operands and axes. Reductions lose axes without a new number."""
    match node:
        case Load():
            within = None if node.within is None else numbers[node.within]
            return replace(node, index=renumber_index(node.index, numbers, axes), within=within)
        case Coordinate() | InRange():
            return replace(node, index=renumber_index(node.index, numbers, axes))
        case Random():
            return replace(node, seed=numbers[node.seed], index=renumber_index(node.index, numbers, axes))
        case Checked():
            operand, position = numbers[node.operand], numbers[node.position]
            within = None if node.within is None else numbers[node.within]
            return replace(node, operand=operand, position=position, within=within)
        case Compute():
            operands = ((n, Value(numbers[a.node]) if isinstance(a, Value) else a) for n, a in node.operands)
            return replace(node, operands=tuple(operands))
        case Reduce():
            reduced = node.axes if axes is None else frozenset(axes[k] for k in node.axes if k in axes)
            within = None if node.within is None else numbers[node.within]
            return replace(node, operand=numbers[node.operand], axes=reduced, within=within)
        case Scan():
            return replace(node, operand=numbers[node.operand])
        case _:
            return node


def renumber_axes(axes: Iterable[Axis], numbers: Mapping[int, int]) -> tuple[Axis, ...]:
    """Return axes with new numbers of their bounds. Only an axis along which nothing varies loses bounds."""
    return tuple(replace(a, bounds=tuple(numbers[n] for n in a.bounds if n in numbers)) for a in axes)


def renumber_index(index: Index, numbers: Mapping[int, int], axes: Mapping[int, int] | None = None) -> Index:
    terms = ((~numbers[~k] if k < 0 else k if axes is None else axes[k], c) for k, c in index.terms)
    return Index(index.const, tuple(sorted(terms)))


def renumber_store(store: Store, numbers: Mapping[int, int], axes: Mapping[int, int] | None = None) -> Store:
    within = None if store.within is None else numbers[store.within]
    index = renumber_index(store.index, numbers, axes)
    return replace(store, index=index, value=numbers[store.value], within=within)


def wrapped(value: int, dtype: torch.dtype) -> int:
    """Return a number wrapped around to an integer dtype: -1 is 255 in uint8."""
    info = torch.iinfo(dtype)
    return (value - info.min) % (1 << info.bits) + info.min
