"""The loop nest: one cluster over one iteration space, before a schedule is chosen.

    LoopNest := axes, nodes, stores
    axis     := name, size, group            group is "batch", "rows", "cols" or "inner"
    index    := const + sum(coeff * axis) + sum(coeff * value)
    node     := Load(buffer, index, within) | Coordinate(index) | Constant(value)
              | InRange(index, low, high) | Random(seed, index, salt)
              | Checked(operand, position, low, high, within)
              | Compute(target, operands) | Reduce(combine, operand, axes)
              | Scan(combine, operand, reverse) | Counter(first, last) | Total(combine, operand, counter)
    store    := buffer, index, value, within    several to one buffer have elements of their own each

Nodes are in SSA order and name each other by position. Every node has a dtype: that in which
it is computed (float32 for all floats but float64). A node's `groups` are the axis groups it
varies over; a tile holds it as [ROWS, COLS], [ROWS, 1], [1, COLS] or [1, 1].

What depends on a Counter has a value for each of its turns, and is read by nothing but a Total of it: how
many turns there are is data.

A nest with batch axes is one of matrices, one for each of their points: a tile holds all rows of one, so that
reductions over its rows and along them may feed each other. Other nests have no batch axes.

Inner axes come behind all others. Only reductions run over them, as those of a convolution do over its taps:
what is stored does not vary along them, and all other axes of such a nest are columns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy
import torch
from torch._ops import OpOverload

from fusion_compiler.ir.dims import Dim, product, quotient, strides_of

BATCH, ROWS, COLS = "batch", "rows", "cols"
GROUPS = (BATCH, ROWS, COLS)  # the order of a nest's axes
INNER = "inner"  # no group: axes behind all others, over which nothing but reductions of some values run
TILE = frozenset({ROWS, COLS})
SEGMENTS = (8, 16, 32, 64, 128)  # columns: every block of columns has whole ones
IN_SEGMENTS = ("sum", "max", "min")  # what tiles make of each segment


@dataclass(frozen=True, slots=True)
class Axis:
    name: str
    size: Dim
    group: str


@dataclass(frozen=True, slots=True)
class Index:
    """An affine element index. Keys of terms: axis number, or ~node for an indirect one."""

    const: Dim
    terms: tuple[tuple[int, Dim], ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Element `index` of `buffer` where node `within` (a bool, or None for everywhere) holds, else 0."""

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
    """A key for an argument: 1, 1.0 and True are different, as are 0.0 and -0.0, and a NaN equals itself."""
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
    """low <= index < high; the side of a concatenation, the inside of a padding."""

    index: Index
    low: Dim
    high: Dim
    dtype: torch.dtype = torch.bool


@dataclass(frozen=True, slots=True)
class Random:
    """Uniform float32 in [0, 1): lane index % 4 of Philox(seed, index // 4), stream `salt`.

    Of dtype uint32: the word itself, of which that would be the upper 24 bits.
    """

    seed: int
    index: Index
    salt: Dim  # an argument of the kernel once clusters are compared: dropouts differ in it alone
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class Checked:
    """`operand`, and an error unless low <= `position` < high wherever `within` holds.

    position: a node whose value says where to read, mostly the operand itself. what: whose index it is.
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
    """`target` applied to operands: (schema name, node number or Python scalar).

    coarse: eager rounds the result to bfloat16, so that the table's coarse expression serves as well.
    pinned: made in several kernels it has to be the same number in each (pinned.py): by the table's first
        expression, and by no product fused into a sum. alone: this kernel alone makes it, so that any
        expression will do.
    """

    target: OpOverload
    operands: tuple[tuple[str, object], ...]  # ("self", Value(3)), ("alpha", 2)
    dtype: torch.dtype
    coarse: bool = False
    pinned: bool = False
    alone: bool = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Compute) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> object:
        operands = tuple([(n, a if isinstance(a, Value) else exact(a)) for n, a in self.operands])
        return self.target, operands, self.dtype, self.coarse, self.pinned, self.alone


@dataclass(frozen=True, slots=True)
class Value:
    """An operand that is another node's value, by its number."""

    node: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """Combine `operand` over some axes of rows and columns, or over inner ones: the result varies over the
    others alone.

    axes: by number. Those of one element belong to them: a reduction over a group has all of its axes, and
    one that keeps some axes of the two groups has all others. `over_of` says how tiles make it.
    """

    combine: str
    operand: int
    axes: frozenset[int]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Scan:
    """Combine `operand` along the columns up to each of them, itself included: one value a column.

    combine: sum, prod, max, min or logsumexp. reverse: from the last column back to the first.
    """

    combine: str
    operand: int
    reverse: bool
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Counter:
    """An integer that goes from the value of `first` up to that of `last`, which it does not reach."""

    first: int
    last: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Total:
    """What `operand` comes to over the turns of a Counter, in their order: "sum", "max" or "min"."""

    combine: str
    operand: int
    counter: int
    dtype: torch.dtype


Node = (
    Load | Coordinate | Constant | InRange | Random | Checked | Compute | Reduce | Scan | Counter | Total
)


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
    names: tuple[str, ...]  # of the values, for printing: one per node


def operands_of(node: Node) -> tuple[int, ...]:
    """Numbers of the nodes that a node reads."""
    match node:
        case Load(_, index, within, _):
            own = () if within is None else (within,)
            return (*own, *_indirect(index))
        case Coordinate(index, _) | InRange(index, _, _, _):
            return _indirect(index)
        case Random(seed, index, _, _):
            return (seed, *_indirect(index))
        case Checked(operand, position, _, _, within):
            return (operand, position) if within is None else (operand, position, within)
        case Compute(_, operands):
            return tuple(a.node for _, a in operands if isinstance(a, Value))
        case Reduce() | Scan():
            return (node.operand,)
        case Counter(first, last):
            return (first, last)
        case Total(_, operand, counter):
            return (operand, counter)
        case _:
            return ()


def before_turns(loops: LoopNest, total: Total) -> tuple[int, ...]:
    """What the turns of a total's counter read that is the same in each, and the counter's ends."""
    in_turns = {total.counter}
    for number in range(total.counter + 1, total.operand + 1):
        node = loops.nodes[number]
        if not isinstance(node, Total) and not in_turns.isdisjoint(operands_of(node)):
            in_turns.add(number)
    found: dict[int, None] = {}
    seen, stack = set[int](), [total.operand, total.counter]
    while stack:
        number = stack.pop()
        if number not in in_turns:
            found[number] = None
        elif number not in seen:
            seen.add(number)
            stack.extend(operands_of(loops.nodes[number]))
    return tuple(found)


def _indirect(index: Index) -> tuple[int, ...]:
    return tuple(~key for key, _ in index.terms if key < 0)


def store_operands(store: Store) -> tuple[int, ...]:
    within = () if store.within is None else (store.within,)
    return (store.value, *within, *_indirect(store.index))


def right_neighbours(axes: Sequence[Axis], accesses: Iterable[tuple[int, Load | Store]]) -> dict[int, int]:
    """Of accesses to every other element along the columns, those with the ones between them.

    2 i -> 2 i + 1, by the numbers that the accesses come with: each is one half of aligned pairs.
    """
    wide = {n: a for n, a in accesses if a.within is None and _by_twos(axes, a.index)}
    at = {(a.buffer, a.index): n for n, a in wide.items()}
    right = {n: at.get((a.buffer, replace(a.index, const=a.index.const + 1))) for n, a in wide.items()}
    return {n: other for n, other in right.items() if other is not None and wide[n].index.const % 2 == 0}


def _by_twos(axes: Sequence[Axis], index: Index) -> bool:
    """Whether an index goes along the innermost columns in steps of two, and elsewhere in even ones."""
    last = len(axes) - 1
    innermost = dict(index.terms).get(last) == 2 and axes[last].group == COLS
    return (
        innermost
        and isinstance(index.const, int)
        and all(k >= 0 and quotient(c, 2) is not None for k, c in index.terms)
    )


def axes_in(axes: Sequence[Axis], groups: Collection[str]) -> frozenset[int]:
    """Return the numbers of the axes of some groups."""
    return frozenset(k for k, axis in enumerate(axes) if axis.group in groups)


def over_of(axes: Sequence[Axis], reduce: Reduce) -> frozenset[str]:
    """Return the groups over which tiles are reduced: those of the axes, where these are whole groups.

    A reduction that keeps a part of a group is over both groups: what it keeps is neither a row nor a column
    of a tile, and its values are only stored. But one over segments, whole ones of which each tile has, is
    over no group: each element of the tile has the value of the segment in which it lies. One over inner axes
    is over these, and each element of the tile has its own.
    """
    if is_inner(axes, reduce):
        return frozenset({INNER})
    if kept_of(axes, reduce):
        return frozenset() if _is_over_segments(axes, reduce) else TILE
    groups = frozenset(axes[k].group for k in reduce.axes)
    # Axes of one element are left out of nests: a reduction without axes is over the group that has none.
    return groups or frozenset({ROWS if axes_in(axes, (COLS,)) else COLS})


def is_inner(axes: Sequence[Axis], reduce: Reduce) -> bool:
    """True if a reduction is over inner axes."""
    return any(axes[k].group == INNER for k in reduce.axes)


def kept_of(axes: Sequence[Axis], reduce: Reduce) -> frozenset[int]:
    """Return the axes of rows and columns that a reduction keeps; none where it is over whole groups."""
    whole = axes_in(axes, {axes[k].group for k in reduce.axes})
    keeps_none = reduce.axes == whole or is_inner(axes, reduce)
    return frozenset() if keeps_none else axes_in(axes, TILE) - reduce.axes


def _is_over_segments(axes: Sequence[Axis], reduce: Reduce) -> bool:
    """True if a reduction is over inner columns alone, and over so many of them that tiles make it."""
    cols = [k for k, axis in enumerate(axes) if axis.group == COLS and axis.size != 1]
    inner = [k for k in sorted(reduce.axes) if axes[k].size != 1]
    is_inner = 0 < len(inner) < len(cols) and inner == cols[-len(inner) :]
    return is_inner and reduce.combine in IN_SEGMENTS and product(axes[k].size for k in inner) in SEGMENTS


def groups_of(loops: LoopNest) -> tuple[frozenset[str], ...]:
    """The axis groups that each node varies over within a tile: rows, columns, both or none."""
    out: list[frozenset[str]] = []
    for node in loops.nodes:
        groups = {g for o in operands_of(node) for g in out[o]}
        if isinstance(node, Load | Coordinate | InRange | Random):
            groups |= {loops.axes[k].group for k, _ in node.index.terms if k >= 0} & TILE
        if isinstance(node, Reduce):
            groups -= over_of(loops.axes, node)
        if isinstance(node, Scan):
            groups |= {COLS}
        out.append(frozenset(groups))
    return tuple(out)


def axes_of(loops: LoopNest) -> tuple[frozenset[int], ...]:
    """The axes that each node varies over, as far as loads and coordinates tell."""
    out: list[frozenset[int]] = []
    for node in loops.nodes:
        found = frozenset[int]().union(*(out[o] for o in operands_of(node)))
        if isinstance(node, Load | Coordinate | InRange | Random):
            found |= {k for k, _ in node.index.terms if k >= 0}
        out.append(found - node.axes if isinstance(node, Reduce) else found)
    return tuple(out)


def stays_in_place(loops: LoopNest, load: int, buffer: str) -> bool:
    """Whether a loaded element is used for nothing but what is stored in `buffer` in its very place, each
    element computed alone, and stored once: then whatever program loads it, that which stores it has loaded
    it before. Of the rows, as of the columns, each stores an element of its own, or all store one, which
    `passes.fuse.legality.fills` has stored once."""
    reached = {load}
    for number, node in enumerate(loops.nodes):
        if not reached.isdisjoint(operands_of(node)):
            if not isinstance(node, Compute):
                return False
            reached.add(number)
    place = loops.nodes[load]
    assert isinstance(place, Load)
    stores = [s for s in loops.stores if not reached.isdisjoint(store_operands(s))]
    along = {k for k, _ in place.index.terms}
    wide = {k for k, axis in enumerate(loops.axes) if axis.size != 1}
    groups = {loops.axes[k].group for k in along & wide if k >= 0}
    if any(loops.axes[k].group in groups for k in wide - along):
        return False
    return all(
        s.buffer == buffer and s.index == place.index and not reached & {*store_operands(s)[1:]}
        for s in stores
    ) and all(k >= 0 for k, _ in place.index.terms)


def resized(loops: LoopNest, size: Callable[[Dim], Dim]) -> LoopNest:
    """A loop nest with `size` of each of its sizes in that one's place; salts are none."""

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
    """The symbols in the sizes of some loop nests, and of their tensors in shapes and strides, by name:
    what a kernel takes as arguments."""
    dims = [dim for sizes in tensors for dim in sizes]
    for loops in nests:
        resized(loops, lambda dim: dims.append(dim) or dim)
    found = {s for dim in dims if not isinstance(dim, int) for s in dim.free_symbols}
    return tuple(sorted(found, key=lambda s: s.name))  # type: ignore[arg-type,union-attr]


def row_major(axes: Sequence[Axis], first: int) -> tuple[tuple[int, Dim], ...]:
    """Terms of the row-major element number over consecutive axes that start at number `first`."""
    steps = strides_of(tuple(a.size for a in axes))
    return tuple((first + i, step) for i, step in enumerate(steps))


def segment_of(loops: LoopNest, kept: frozenset[int]) -> int | None:
    """The columns that a reduction which keeps these axes combines in each row to one value, of the outer
    columns that it keeps; None where it keeps no columns, and a row is one segment."""
    cols = [k for k, a in enumerate(loops.axes) if a.group == COLS]
    if not kept & set(cols):
        return None
    segment = product(loops.axes[k].size for k in cols if k not in kept)
    assert isinstance(segment, int), "segments have a known size"
    return segment


def longest_piece(segment: int) -> int:
    """The largest power of two of columns that a segment consists of: no block of them crosses its end."""
    return segment & -segment


def renumber(node: Node, numbers: Mapping[int, int], axes: Mapping[int, int] | None = None) -> Node:
    """A node whose operands, and axes where given, go by new numbers; reductions lose axes without one."""
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
            given = ((n, Value(numbers[a.node]) if isinstance(a, Value) else a) for n, a in node.operands)
            return replace(node, operands=tuple(given))
        case Reduce():
            reduced = node.axes if axes is None else frozenset(axes[k] for k in node.axes if k in axes)
            return replace(node, operand=numbers[node.operand], axes=reduced)
        case Scan():
            return replace(node, operand=numbers[node.operand])
        case Counter():
            return replace(node, first=numbers[node.first], last=numbers[node.last])
        case Total():
            return replace(node, operand=numbers[node.operand], counter=numbers[node.counter])
        case _:
            return node


def renumber_index(index: Index, numbers: Mapping[int, int], axes: Mapping[int, int] | None = None) -> Index:
    moved = ((~numbers[~k] if k < 0 else k if axes is None else axes[k], c) for k, c in index.terms)
    return Index(index.const, tuple(sorted(moved)))


def renumber_store(store: Store, numbers: Mapping[int, int], axes: Mapping[int, int] | None = None) -> Store:
    within = None if store.within is None else numbers[store.within]
    index = renumber_index(store.index, numbers, axes)
    return replace(store, index=index, value=numbers[store.value], within=within)


def wrapped(value: int, dtype: torch.dtype) -> int:
    """What a dtype of integers makes of a number: -1 is 255 in uint8."""
    info = torch.iinfo(dtype)
    return (value - info.min) % (1 << info.bits) + info.min
