"""The parts of a loop that a program goes through: none for blocks that masks leave out, and one of its own
for the blocks in which no element is masked.

    for first_j in tl.range(0, i_o * 128, 64): ...                     j <= i holds everywhere
    for first_j in tl.range(i_o * 128, i_o * 128 + 128, 64): ...       and here somewhere

Other masks, such as those of documents, are read before the loop, many elements at once: it begins at the
first element that some row of the program may see, and ends behind the last one. If all rows see all elements
between the two, a loop without any mask goes through these, and another one through the rest.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

from fusion_compiler.codegen.chains import ChainEmitter
from fusion_compiler.codegen.placed import Emitter
from fusion_compiler.codegen.tile import Assign, Range
from fusion_compiler.codegen.values import Tile
from fusion_compiler.ir.loops import Compute, Reduce, Value, with_operands
from fusion_compiler.ops.syntax import Expression, Global, Literal, Var, lift, tl
from fusion_compiler.schedule.live_blocks import LOWEST, OPPOSITES, Bound
from fusion_compiler.schedule.placed_axes import PlacedAxes
from fusion_compiler.schedule.placement import Leaf, Place, Placement, Split
from fusion_compiler.schedule.shapes import padded

LEAST_FULL = 0.5  # of the blocks: with fewer that need no mask, one loop has the mask in all of them
SCANNED = 1024  # elements of which a program reads a mask at once, before a loop
PROGRAM = (Place.GRID, Place.SHARED)  # where all lanes of a program have one number


@dataclass(frozen=True)
class Edge:
    """A place along a loop's axis: const + the sum of coefficients times program numbers, within [0, most],
    rounded down to a multiple of `block`."""

    parts: tuple[tuple[Leaf, int], ...]
    const: int
    block: int
    most: int

    @property
    def is_multiple(self) -> bool:
        return all(c % self.block == 0 for _, c in self.parts)

    def at(self, share: float) -> int:
        """Return the place for a program in some part of the grid."""
        numbers = [(int(share * (cast(int, leaf.extent) - 1)), c) for leaf, c in self.parts]
        place = self.const + sum(n * c for n, c in numbers)
        return min(self.most, max(0, place) // self.block * self.block)

    def expression(self, e: Emitter) -> Expression:
        last = [c * (cast(int, leaf.extent) - 1) for leaf, c in self.parts]
        const = self.const // self.block * self.block if self.is_multiple else self.const
        low, high = (const + sum(c for c in last if c * sign > 0) for sign in (-1, 1))
        if not self.parts or low >= self.most or high <= 0:
            return lift(self.at(0.0))
        value = e.sum_of([(e.element(leaf), c) for leaf, c in self.parts], const)
        value = value if low >= 0 else tl.maximum(value, 0)
        value = value if self.is_multiple else value // self.block * self.block
        return value if high <= self.most else tl.minimum(value, self.most)


@dataclass(frozen=True)
class Edges:
    """The largest of several places, or the smallest."""

    edges: tuple[Edge, ...]
    choose: Global

    def at(self, share: float) -> int:
        places = [edge.at(share) for edge in self.edges]
        return max(places) if self.choose == tl.maximum else min(places)

    def expression(self, e: Emitter) -> Expression:
        values = [edge.expression(e) for edge in self.edges]
        places = [value.value for value in values if isinstance(value, Literal)]
        moving = [value for value in values if not isinstance(value, Literal)]
        if len(places) == len(values):
            return lift(self.at(0.0))
        value = moving[0]
        for other in moving[1:]:
            value = self.choose(value, other)
        return value


@dataclass(frozen=True)
class Span:
    """A part of a loop.

    is_full: no mask of places leaves out an element of its blocks. is_seen: nor does one that was read.
    hole: where the part has a hole, and the size of that; `end` is less by the size.
    """

    start: Expression
    end: Expression
    is_full: bool
    is_seen: bool = False
    hole: tuple[Expression, Expression] | None = None

    def within(self, start: Expression | None, *ends: Expression) -> Span:
        """Return the part of a span behind a start and before some ends."""
        if start is None or self.start == lift(0):
            first = self.start if start is None else start
        else:
            first = tl.maximum(self.start, start)
        return replace(self, start=first, end=functools.reduce(tl.minimum, ends, self.end))


class SpanEmitter(ChainEmitter):
    """Emits loops in parts. span: the loop and the part of it that is emitted."""

    span: tuple[Leaf, Span] | None = None

    def values_of(self, loop: Leaf) -> Range:
        values = super().values_of(loop)
        if self.span is None or self.span[0] != loop:
            return values
        return replace(values, start=self.span[1].start, end=self.span[1].end)

    @contextmanager
    def inside_loops(self, leaves: Iterable[Leaf]) -> Generator[None]:
        leaves = tuple(leaves)
        with super().inside_loops(leaves):
            if self.span is None or self.span[0] not in leaves or self.span[1].hole is None:
                yield
                return
            loop, (first, size) = self.span[0], self.span[1].hole
            turn, name = self.loop_variables[loop.name], f"block_{self.where.axes[loop.axis].name}"
            place = tl.multiple_of(turn + tl.where(turn < first, 0, size), loop.step)
            self.fixed_numbers[loop.name] = self.let(name, place)
            yield
            del self.fixed_numbers[loop.name]

    def inside(self, axes: frozenset[int]) -> Tile | None:
        is_full = self.span is not None and self.span[1].is_full
        return super().inside(axes - {self.span[0].axis} if self.span is not None and is_full else axes)


def spans_of(e: Emitter, loop: Leaf, bounds: Iterable[Bound]) -> list[Span]:
    """Return the parts of a loop; none where it goes through all of its axis, and all blocks have masks or
    none has. bounds: what holds wherever a block is live."""
    size, block = e.where.axes[loop.axis].size, loop.step
    in_lanes = [leaf.lanes for leaf in e.where.leaves[loop.axis] if leaf is not loop]
    if not isinstance(size, int) or loop.name not in e.where.steps or in_lanes != [block] or size < block:
        return []
    blocks_end = size // block * block
    edge = Edge((), 0, block, blocks_end)
    starts, full_starts, full_ends = [edge], [edge], [replace(edge, const=size)]
    ends = [replace(edge, const=size, block=1, most=size)]
    for bound in bounds:
        side = bound.coefficient(loop.axis)
        most, least = (_extreme(e, loop, bound, sign) for sign in (1, -1))
        if abs(side) != 1 or most is None or least is None:
            continue
        if side < 0:
            ends.append(Edge(most[0], most[1] + 1, 1, size))
            full_ends.append(Edge(least[0], least[1] + 1, block, blocks_end))
        else:
            starts.append(Edge(_negative(most[0]), -most[1], block, blocks_end))
            full_starts.append(Edge(_negative(least[0]), -least[1] + block - 1, block, blocks_end))
    first, last = Edges(tuple(starts), tl.maximum), Edges(tuple(ends), tl.minimum)
    full_first, full_last = Edges(tuple(full_starts), tl.maximum), Edges(tuple(full_ends), tl.minimum)
    is_bounded = len(starts) + len(ends) > 2
    if not is_bounded and size % block == 0:
        return []
    start, end = first.expression(e), last.expression(e)
    if full_last.at(0.5) - full_first.at(0.5) < LEAST_FULL * (last.at(0.5) - first.at(0.5)):
        return [Span(start, end, False)]
    full_start, full_end = full_first.expression(e), full_last.expression(e)
    spans = [Span(full_start, full_end, True)]
    if len(starts) > 1:
        spans.insert(0, Span(start, tl.minimum(full_start, end) if len(ends) > 1 else full_start, False))
    if full_end == end:
        return spans
    return [*spans, Span(tl.maximum(full_start, full_end) if len(starts) > 1 else full_end, end, False)]


Parts = tuple[tuple[Leaf, int], ...]


def _negative(parts: Parts) -> Parts:
    return tuple((leaf, -c) for leaf, c in parts)


def _extreme(e: Emitter, loop: Leaf, bound: Bound, sign: int) -> tuple[Parts, int] | None:
    """Return the largest value (the smallest for sign -1) that the other axes of a bound give it in a
    program; None if that is not known."""
    parts, const = list[tuple[Leaf, int]](), bound.const
    for axis, c in bound.terms:
        for leaf in e.where.leaves[axis] if axis != loop.axis else ():
            if leaf.place is Place.LANES:
                const += c * (leaf.lanes - 1) * leaf.step if c * sign > 0 else 0
            elif leaf.place in PROGRAM and isinstance(leaf.extent, int):
                parts.append((leaf, c * leaf.step))
            else:
                return None
        if axis in e.where.fused:
            return None
    return tuple(part for part in parts if part[0].extent != 1), const


# -- masks that are read -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Test:
    """A test of a loop's element. It fails if no row of the program sees the element.

    column: a node that varies with the element. compare, row: the test compares it so with a node that varies
    with the row, of which it takes the smallest and the largest number. Without them `column` is a condition,
    and the test is whether it is `value`.
    """

    column: int
    value: bool = True
    compare: Callable[[Any, Any], Any] | None = None
    row: int = 0

    def expression(self, e: Emitter, least: Expression | None, most: Expression | None) -> Expression:
        """Return the condition for the elements that are emitted. least, most: of `row`. If they are
        exchanged, the condition is that all rows of the program see an element."""
        column = e.tile(self.column).value
        if self.compare is None or least is None or most is None:
            return column if self.value else column.eq(lift(False))
        if self.compare is operator.eq:
            return (column >= least) & (column <= most)
        return self.compare(column, most if self.compare in (operator.lt, operator.le) else least)


_MIRRORED: Mapping[object, Callable[[Any, Any], Any]] = {  # by a comparison, that with its operands exchanged
    operator.eq: operator.eq,
    operator.lt: operator.gt,
    operator.le: operator.ge,
    operator.gt: operator.lt,
    operator.ge: operator.le,
}


@dataclass(frozen=True)
class Seen:
    """The part of a loop's axis that masks in memory show.

    start, end: the block begins there with the first element that some row may see, and behind the last one.
    full_start, full_end: blocks in which all rows see all elements; none if the end is not behind the start.
    conditions: by the node of a condition that holds in these blocks, its value there.
    """

    start: Expression
    end: Expression
    full_start: Expression
    full_end: Expression
    conditions: Mapping[int, bool]


def read_range(
    e: SpanEmitter, loop: Leaf, spans: Sequence[Span], conditions: Mapping[int, bool]
) -> Seen | None:
    """Emit the reading of masks before a loop. Return what they show; None if no condition tells that.

    spans: the parts of the loop, in order. conditions: by the node of a condition, the value that it has
    wherever a row sees an element.
    """
    size, leaves = e.where.axes[loop.axis].size, e.where.leaves[loop.axis]
    lanes = [leaf for leaf in leaves if leaf.place is Place.LANES]
    if not isinstance(size, int) or len(leaves) != 2 or len(lanes) != 1 or loop.name not in e.where.steps:
        return None
    tests = {n: t for n, value in conditions.items() if (t := _test_of(e, lanes[0], n, value))}
    if not tests:
        return None
    extremes = [_extremes_of_rows(e, test) for test in tests.values()]
    name, block = e.where.axes[loop.axis].name, loop.step
    with _scanning(e, loop, spans) as (scan, lane):
        first = e.state("first_seen", tl.full((lane.lanes,), size, tl.int32))
        end = e.state("end_seen", tl.full((lane.lanes,), 0, tl.int32))
        count = e.state("seen_by_all", tl.full((lane.lanes,), 0, tl.int32))
        with e.inside_loops([scan]), e.dimensions((lane,)):
            inside = e.inside(frozenset({loop.axis}))
            bounds = [] if inside is None else [inside.value]
            by_some = [t.expression(e, *of) for t, of in zip(tests.values(), extremes, strict=True)]
            by_all = [t.expression(e, *reversed(of)) for t, of in zip(tests.values(), extremes, strict=True)]
            seen = e.let("seen", functools.reduce(operator.and_, [*by_some, *bounds]))
            is_full = functools.reduce(operator.and_, [*by_all, *bounds])
            tile, _ = e.coordinate(loop.axis)
            assert tile is not None
            place = tile.value.to(tl.int32) if e.wide else tile.value
            e.add(Assign((first,), tl.minimum(first, tl.where(seen, place, size))))
            e.add(Assign((end,), tl.maximum(end, tl.where(seen, place + 1, 0))))
            e.add(Assign((count,), count + tl.where(is_full, 1, 0)))
    first, end = e.let(f"seen_start_{name}", tl.min(first)), e.let(f"seen_end_{name}", tl.max(end))
    count = e.let(f"seen_count_{name}", tl.sum(count))
    full_end = tl.where(count.eq(end - first), end // block * block, 0)
    return Seen(
        e.let(f"start_{name}", first // block * block),
        end,
        e.let(f"full_start_{name}", (first + (block - 1)) // block * block),
        e.let(f"full_end_{name}", full_end),
        {number: conditions[number] for number in tests},
    )


def around_seen(
    e: Emitter, loop: Leaf, spans: Sequence[Span], seen: Seen, visited: Span, ends: Iterable[Expression]
) -> list[Span]:
    """Return the parts of a loop, within what masks in memory show: the blocks without any mask are one, and
    all others are another one. visited: both as one. ends: further places at which the loop may end."""
    size = lift(e.where.axes[loop.axis].size)
    is_all = len(spans) == 1 and (spans[0].start, spans[0].end) == (lift(0), size)
    inner = next((span for span in spans if span.is_full or is_all), None)
    if inner is None:
        return [span.within(seen.start, seen.end, *ends) for span in spans]
    name, full = e.where.axes[loop.axis].name, inner.within(seen.full_start, seen.full_end, *ends)
    start = full.start if isinstance(full.start, Var) else e.let(f"bare_start_{name}", full.start)
    end = e.let(f"bare_end_{name}", tl.maximum(start, full.end))
    bare = e.let(f"bare_{name}", end - start)
    return [
        Span(start, end, full.is_full, is_seen=True),
        replace(visited, end=visited.end - bare, hole=(start, bare)),
    ]


def behind_guards(e: Emitter, loop: Leaf, visited: Span, guards: Iterable[Expression]) -> Span:
    """Return the blocks that are left out: a part of a loop that has no turns if the smallest numbers of all
    guards are larger than LOWEST, since masks of the lowest finite number hide nothing but these blocks."""
    name, size, block = e.where.axes[loop.axis].name, lift(e.where.axes[loop.axis].size), loop.step
    blocks = tl.maximum(visited.end - visited.start + (block - 1), 0) // block * block
    hole = e.let(f"visited_{name}", blocks)
    least = functools.reduce(tl.minimum, guards)
    return Span(lift(0), tl.where(least <= LOWEST, size - hole, 0), False, hole=(visited.start, hole))


def least_of_rows(e: SpanEmitter, number: int) -> Expression:
    """Emit the smallest number of a node of rows."""
    with e.dimensions(tuple(e.depends[number] & frozenset(e.all_lanes))):
        return e.let("least", tl.min(e.tile(number).value))


def least_of_loop(e: SpanEmitter, loop: Leaf, numbers: Iterable[int]) -> Expression:
    """Emit the smallest number of nodes of a loop's elements, all of which are read."""
    with _scanning(e, loop, ()) as (scan, lane):
        least = e.state("least", tl.full((lane.lanes,), math.inf, tl.float32))
        with e.inside_loops([scan]), e.dimensions((lane,)):
            values = [e.tile(number).value for number in numbers]
            e.add(Assign((least,), functools.reduce(tl.minimum, values, least)))
    return e.let("least", tl.min(least))


def read_end(e: Emitter, loop: Leaf, conditions: Mapping[int, bool]) -> Expression | None:
    """Emit the reading of masks that are the same for all elements of a loop. Return where the loop ends,
    which is 0 if no row of the program sees anything; None if there are no such masks, or if each of several
    programs has a part of the axis.

    conditions: as for `read_range`.
    """
    size, ends = e.where.axes[loop.axis].size, list[Expression]()
    of_loop = frozenset(e.where.leaves[loop.axis])
    if len(of_loop) != 2:  # the loop, and the lanes of a block
        return None
    for number, value in conditions.items():
        lanes = e.depends[number] & frozenset(e.all_lanes)
        if len(lanes) == 1 and of_loop.isdisjoint(e.depends[number]) and not waits(e, number):
            with e.dimensions(tuple(lanes)):
                shown = Test(number, value).expression(e, None, None)
                ends.append(e.let("end_of_rows", tl.max(tl.where(shown, size, 0))))
    return functools.reduce(tl.minimum, ends) if ends else None


def waits(e: Emitter, number: int) -> bool:
    """True of a node for which a reduction is needed."""
    return any(isinstance(e.loops.nodes[n], Reduce) for n in with_operands(e.loops, (number,)))


def _test_of(e: Emitter, lane: Leaf, number: int, value: bool) -> Test | None:
    """Return the test of a loop's elements that a condition makes, or None if it makes none."""
    node, lanes = e.loops.nodes[number], frozenset(e.all_lanes)
    if waits(e, number):
        return None
    if e.depends[number] & lanes == frozenset({lane}):
        return Test(number, value)
    if not isinstance(node, Compute) or node.spec.compare is None:
        return None
    compare = node.spec.compare if value else OPPOSITES.get(node.spec.compare)
    mirrored = _MIRRORED.get(compare)
    sides = [side.node for _, side in node.operands[:2] if isinstance(side, Value)]
    if len(sides) != 2 or mirrored is None:
        return None
    if any(e.loops.nodes[side].dtype.is_floating_point for side in sides):  # NaN is not between two numbers
        return None
    (row, column), compare = sides, mirrored
    if e.depends[row] & lanes == frozenset({lane}):
        (column, row), compare = sides, _MIRRORED[mirrored]
    is_apart = e.depends[column] & lanes == frozenset({lane}) and len(e.depends[row] & lanes - {lane}) == 1
    return Test(column, True, compare, row) if is_apart and lane not in e.depends[row] else None


def _extremes_of_rows(e: Emitter, test: Test) -> tuple[Expression | None, Expression | None]:
    """Return the smallest and the largest number of a program's rows; of rows beyond the last one, zero."""
    if test.compare is None:
        return None, None
    (lane,) = e.depends[test.row] & frozenset(e.all_lanes)
    with e.dimensions((lane,)):
        value = e.tile(test.row).value
        return e.let("least", tl.min(value)), e.let("most", tl.max(value))


@contextmanager
def _scanning(e: SpanEmitter, loop: Leaf, spans: Sequence[Span]) -> Generator[tuple[Leaf, Leaf]]:
    """Place a loop's axis in larger blocks. Yield the leaf of the loop over them, and that of their lanes."""
    before, axis = e.where, e.where.axes[loop.axis]
    block = min(SCANNED, padded(cast(int, axis.size)))
    directives = (
        Split(axis.name, block) if isinstance(d, Split) and d.axis == axis.name else d
        for d in e.placement.directives
    )
    e.where = PlacedAxes.of(e.loops, Placement(tuple(directives)))
    scan, lane = sorted(e.where.leaves[loop.axis], key=lambda leaf: leaf.place is Place.LANES)
    if spans:
        start = spans[0].start
        e.span = scan, Span(start if start == lift(0) else start // block * block, spans[-1].end, False)
    yield scan, lane
    e.where, e.span = before, None
