"""The tile program of a loop nest whose axes a placement has placed (`schedule.placement`).

The structure of the program follows from the placement:

- A value stands in the innermost loop on whose axis it depends, and its tile has the axes in LANES on which
  it depends. A tile has one dimension for each axis in LANES; of an axis on which it does not depend, one
  element, which broadcasts. If only one axis is in LANES, a value that does not depend on it is a scalar.
- A reduction over a loop's axis is an accumulator before the loop, an update in it, and a value behind it. A
  reduction over lanes folds them behind the loops.
- For each element of an unrolled axis the statements are repeated. What they have in common is computed once:
  an expression is assigned to one variable in each block. Taps of a convolution that read the same element
  for neighbouring results share the load for that reason.
- Programs that share a reduced axis each reduce their part of it (`codegen.second_stages`).
- What is known for some elements of unrolled axes is not computed: of a convolution's gradient with strides,
  the taps that meet no element are left out.
- Lanes and loops that reach past the end of an axis are masked.
- A load through a descriptor has no mask: the hardware fills a box with zeros where it leaves the tensor. The
  descriptor describes the elements that the condition and the axes of the load allow, and no others.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import cast

import torch

from fusion_compiler.codegen import expression, monoids
from fusion_compiler.codegen.bits import floats_of, widened_byte
from fusion_compiler.codegen.expression import computed, convert
from fusion_compiler.codegen.second_stages import Partial, Split
from fusion_compiler.codegen.tile import (
    Assign,
    Check,
    Combine,
    For,
    Range,
    Statement,
    Value,
)
from fusion_compiler.codegen.tile import Store as StoreStatement
from fusion_compiler.codegen.values import PlacedNest, Scope, Tile
from fusion_compiler.ir.dims import Dim, product, quotient, strides_of
from fusion_compiler.ir.loops import (
    Checked,
    Compute,
    Constant,
    Coordinate,
    Index,
    InRange,
    Load,
    Random,
    Reduce,
    Store,
    arity_of,
    conjuncts_of,
    is_applied,
    operand_of,
    operands_of,
    store_operands,
    with_operands,
)
from fusion_compiler.ir.loops import Value as Operand
from fusion_compiler.ops.arithmetic import AND, CAST, DIV, FLOOR_DIVIDE, MUL, REMAINDER, WHERE
from fusion_compiler.ops.syntax import (
    Call,
    Expression,
    Items,
    Literal,
    Member,
    Name,
    Var,
    every,
    fm,
    lift,
    plus,
    times,
    tl,
)
from fusion_compiler.schedule.analysis import accumulator_dtype, ceil_div
from fusion_compiler.schedule.boxes import Box, box_of
from fusion_compiler.schedule.placed_axes import NOWHERE, PlacedAxes, placed
from fusion_compiler.schedule.placement import Leaf, Place

POSITIONS = (torch.int32, torch.int64)  # dtypes of indices


class Emitter:
    """Emits one nest. Raises ValueError where a load that the placement has through a descriptor has no
    box."""

    def __init__(self, nest: PlacedNest) -> None:
        self.a, self.loops, self.placement = nest.analysis, nest.analysis.loops, nest.placement
        self.pointers, self.dtypes, self.empty = nest.pointers, nest.dtypes, nest.empty
        analysis, placement, loops, dtypes = self.a, self.placement, self.loops, self.dtypes
        self.load_options, self.fp16 = nest.load_options, analysis.fp16_values(dtypes)
        self.wide = analysis.furthest < 0 or analysis.furthest >= 2**31
        leaves = placement.leaves(loops.axes)
        self.boxes: dict[Load, Box] = {}  # of loads through descriptors
        for node in loops.nodes:
            if isinstance(node, Load) and node.buffer in placement.descriptors:
                box = box_of(loops, node, leaves, dtypes[node.buffer].itemsize)
                if isinstance(box, str):
                    raise ValueError(box)
                self.boxes[node] = box
        self.where = PlacedAxes.of(loops, placement)
        self.all_lanes = self.where.lanes  # the dimensions of most tiles
        in_loops = (leaf for leaf in leaves if leaf.place is Place.LOOP)
        self.loop_variables = {leaf.name: self.variable_of_loop(leaf) for leaf in in_loops}
        self.node_axes = analysis.node_axes
        self.reduction = loops.reduction
        self.reductions = {n for n, node in enumerate(loops.nodes) if isinstance(node, Reduce)}
        unrolled = placed(leaves, Place.UNROLL)
        self.unrolled = [[leaf for leaf in unrolled if leaf in of_node] for of_node in self.depends]
        self.plain_maxima = frozenset[int]()  # which need not propagate NaN
        self.ends: dict[str, Dim | Expression] = {}  # of loops that do not go through all of their elements
        self.fixed_numbers: dict[str, Expression] = {}  # of loops, where it is not their variable
        self.scopes = [Scope([])]
        self.depth = 0  # of the block to which statements are added
        self.needed = set[int]()  # nodes that the program stores, or a part of them
        self.ready: Mapping[int, Var] = {}  # nodes that another function has computed
        self.at: dict[Leaf, int] = {}  # the elements of unrolled leaves that are emitted now
        self.other_lanes: object = None  # the dimensions of tiles emitted now, if they are special

    @property
    def lanes(self) -> tuple[Leaf, ...]:
        """Return the leaves that a tile's dimensions run over, in their order."""
        return self.where.lanes

    @property
    def depends(self) -> tuple[frozenset[Leaf], ...]:
        """Return, by node, the leaves on which its value depends."""
        return self.where.depends

    def program(self, number: Expression, split: Split) -> tuple[list[Statement], tuple[Dim, ...]]:
        """Return the statements of the program with this number, and the grid."""
        self.place_grid(number)
        wanted = [*split.kept, *(o for store in split.stores for o in store_operands(store))]
        self.needed = with_operands(self.loops, wanted, self.ready)
        self.load_first()
        stores = [(self.where.of_store(store), partial(self.store, store)) for store in split.stores]
        stores += [(self.depends[n], partial(self.store_partial, n, of)) for n, of in split.kept.items()]
        by_loops = dict[tuple[Leaf, ...], list[tuple[frozenset[Leaf], Callable[[], None]]]]()
        for leaves, store in stores:
            by_loops.setdefault(tuple(placed(leaves, Place.LOOP)), []).append((leaves, store))
        for around, inside in by_loops.items():
            with self.inside_loops(around):
                for leaves, store in inside:
                    for elements in self.variants(leaves):
                        with self.fixed(elements):
                            store()
        return self.scopes[0].body, (product(leaf.extent for leaf in self.where.grid),)

    def load_first(self) -> None:
        """Load what whole tiles are computed of before anything is reduced: compilers move no load over a
        reduction, for which threads wait. Programs with loops load as they go. What all programs read, such
        as a norm's weight, is in the cache and need not occupy registers until then."""
        lanes, leaves = frozenset(self.lanes), self.where.of_axes(self.where.leaves)
        if placed(leaves, Place.LOOP) or placed(leaves, Place.UNROLL):
            return
        for number in sorted(self.needed):
            node, depends = self.loops.nodes[number], self.depends[number]
            is_tile = len(depends & lanes) > 1 and not depends.isdisjoint(self.where.grid)
            if isinstance(node, Load) and not operands_of(node) and is_tile:
                self.load_whole(number)

    def load_whole(self, number: int) -> None:
        """Load a whole tile before it is read."""
        self.tile(number)

    # -- leaves ----------------------------------------------------------------------------------------

    def axes_of(self, index: Index) -> frozenset[int]:
        """Return the axes over which an index varies, including axes of nodes that are indices."""
        return _axes(index).union(*(self.node_axes[~key] for key, _ in index.terms if key < 0))

    def place_grid(self, number: Expression) -> None:
        """Assign each axis of the grid its element. The last axis varies fastest."""
        left = number.to(torch.int64) if self.wide else number
        grid = [leaf for leaf in self.where.grid if not self.where.is_single(leaf)]
        for leaf in reversed(grid):
            is_first = leaf is grid[0]
            value = left if is_first else left % lift(leaf.extent)
            if not isinstance(value, Name):
                value = self.let(_identifier(leaf.name), value)
            self.scopes[0].tiles[leaf.name] = Tile(value)
            left = left // lift(leaf.extent)

    def element(self, leaf: Leaf) -> Tile:
        """Return a leaf's own number: of the program, the iteration, or each lane."""
        if leaf.place is Place.LOOP:
            return Tile(self.fixed_numbers.get(leaf.name) or self.loop_variables[leaf.name])
        if leaf.place in (Place.GRID, Place.SHARED):
            return self.scopes[0].tiles.get(leaf.name, Tile(Literal(0)))  # the only one has no variable
        key = (leaf.name, self.lanes)
        if key not in self.scopes[0].tiles:
            lanes = tl.arange(0, leaf.lanes)
            if len(self.lanes) > 1:
                lanes = lanes[tuple(slice(None) if other is leaf else None for other in self.lanes)]
            with self.in_scope(0):
                variable = self.numbered(leaf, lanes)
            self.scopes[0].tiles[key] = Tile(variable, frozenset({leaf}), True)
        return self.scopes[0].tiles[key]

    def numbered(self, leaf: Leaf, lanes: Expression) -> Var:
        """Return the variable of the numbers of lanes."""
        return self.let(self.name_of(leaf), lanes)

    def number_of(self, leaves: Sequence[Leaf]) -> Expression:
        """Return the number of a program among those that differ in these leaves of the grid."""
        steps = strides_of(tuple(leaf.extent for leaf in leaves))
        return self.sum_of(list(zip(map(self.element, leaves), steps, strict=True)))

    def name_of(self, lanes: Leaf) -> str:
        """Return the name of the variable that numbers lanes."""
        return _identifier(lanes.name)

    def variable_of_loop(self, loop: Leaf) -> Name:
        """Return the variable of a loop: the first element of a block, if no other loop is over the axis."""
        if loop.name not in self.where.steps:
            return Name(_identifier(loop.name))
        step, name = self.where.turns.get(loop, loop).step, self.where.axes[loop.axis].name
        return Name(name if step == 1 else f"first_{name}")

    def coordinate(self, axis: int) -> tuple[Tile | None, int]:
        """Return an axis' element number as a tile, or None, and what unrolled leaves add to it."""
        if axis in self.where.fused:
            return self.coordinate_of_member(axis), 0
        leaves = self.where.leaves[axis]
        offset = sum(self.at[leaf] * leaf.step for leaf in leaves if leaf.place is Place.UNROLL)
        others = [leaf for leaf in leaves if leaf.place is not Place.UNROLL]
        return self.position(self.where.axes[axis].name, others), offset

    def position(self, name: str, leaves: Iterable[Leaf], unit: int = 1) -> Tile | None:
        """Return the sum of some leaves' numbers as a tile, or None if there are none. unit: the elements, a
        divisor of their steps, that count as one."""
        leaves = tuple(leaves)
        home, key = self.home(leaves), (name, leaves, unit, self.lanes)
        if (tile := self.scopes[home].tiles.get(key)) is not None:
            return tile
        parts = [self.part(leaf, unit) for leaf in self.where.moving(leaves)]
        if not parts:
            return None
        if len(parts) == 1 and parts[0][1] == 1:
            tile = parts[0][0]
        else:
            with self.in_scope(home):
                value = self.let(name, self.sum_of(parts))
            tile = self.joined(value, *(tile for tile, _ in parts))
        self.scopes[home].tiles[key] = tile
        return tile

    def part(self, leaf: Leaf, unit: int) -> tuple[Tile, int]:
        """Return a leaf's number and how many units lie between two that differ by one."""
        tile, step = self.element(leaf), self.where.step_of(leaf)
        if step % unit:  # the variable is a multiple of the unit
            return replace(tile, value=tile.value // unit), step
        return tile, step // unit

    def coordinate_of_member(self, axis: int) -> Tile | None:
        """Return the element number of an axis that others are fused with, or None if it is zero."""
        members, leaves = self.where.members[self.where.fused[axis]], self.where.leaves[axis]
        is_whole = set(leaves) == set(self.where.leaves[self.where.fused[axis]])
        name, inner = self.where.axes[self.where.fused[axis]].name, self.where.inner_size(axis)
        unit = self.where.unit_of(self.where.moving(leaves), inner)
        base = self.position(name if is_whole else f"first_{name}", leaves, unit)
        if base is None:
            return None
        rest = quotient(inner, unit)
        assert rest is not None  # the unit divides it
        value = base.value if rest == 1 else base.value // lift(rest)
        value = value if axis == members[0] else value % lift(self.where.axes[axis].size)
        if value is base.value:
            return base
        with self.in_scope(self.home(leaves)):
            return self.joined(self.let(self.where.axes[axis].name, value), base)

    def sum_of(self, parts: Sequence[tuple[Tile, Dim]], const: Dim = 0) -> Expression:
        """Return a sum of tiles times numbers; what has fewer dimensions comes first."""
        variable: list[tuple[Tile, Dim]] = []
        for tile, step in parts:
            if isinstance(tile.value, Literal) and isinstance(tile.value.value, int):
                const = const + tile.value.value * step
            else:
                variable.append((tile, step))
        ordered = sorted(variable, key=lambda part: (part[0].is_block, len(part[0].lanes)))
        terms = [times(tile.value) if c == 1 else times(tile.value, c) for tile, c in ordered]
        if isinstance(const, int):
            return plus(*terms, const) if const or not terms else plus(*terms)
        return plus(lift(const), *terms)

    def index(self, index: Index) -> Tile:
        """Return an element index."""
        const, parts = index.const, list[tuple[Tile, Dim]]()
        for key, step in self.where.merged(index).terms:
            base, offset = self.coordinate(key) if key >= 0 else (self.place(~key), 0)
            const = const + step * offset
            if base is not None:
                parts.append((base, step))
        return self.joined(self.sum_of(parts, const), *(tile for tile, _ in parts))

    def place(self, number: int) -> Tile:
        """Return a value that is used as an index, in 64 bits: times a stride it may leave 32."""
        tile = self.tile(number)
        if isinstance(tile.value, Literal):
            return tile
        return replace(tile, value=convert(tile.value, self.loops.nodes[number].dtype, torch.int64))

    def inside(self, axes: frozenset[int]) -> Tile | None:
        """Return whether elements lie within these axes, or None if all that the program visits do."""
        checks: list[Tile] = []
        outermost = {members[0]: axis for axis, members in self.where.members.items()}
        inner = self.where.fused.keys() - outermost.keys()  # whose numbers are remainders: within their sizes
        for axis in sorted(outermost.get(axis, axis) for axis in axes - inner):
            size, leaves = self.where.axes[axis].size, self.where.leaves[axis]
            several = len(leaves) > 1
            for leaf in leaves if several else ():
                if leaf.place is Place.LANES and leaf.lanes != leaf.extent:
                    checks.append(self.check(leaf.name, self.element(leaf), 0, leaf.extent))
            covered = product(leaf.extent for leaf in leaves)
            if turns := [self.where.turns[leaf] for leaf in leaves if leaf in self.where.turns]:
                covered = product((ceil_div(size, turns[0].step), turns[0].step))
            (leaf, *_) = leaves
            padded = not several and leaf.place is Place.LANES and leaf.lanes * leaf.step != size
            if not padded and quotient(size, covered) is not None and size != 0:
                continue
            base, offset = self.coordinate(axis)
            if base is not None:
                checks.append(self.check(self.where.axes[axis].name, base, offset, size))
        values = [check.value for check in checks]
        return self.joined(cast(Expression, every(*values)), *checks) if checks else None

    def check(self, name: str, base: Tile, offset: int, size: Dim | Name) -> Tile:
        condition = plus(base.value, offset or None) < lift(size)
        with self.in_scope(self.home_of(base)):
            return self.joined(self.let(f"{_identifier(name)}_inside", condition), base)

    # -- statements --------------------------------------------------------------------------------------

    def add(self, statement: Statement) -> None:
        self.scopes[self.depth].body.append(statement)

    def let(self, base: str, value: Value, node: int | None = None) -> Var:
        """Return the variable of a value, which is assigned unless an open block has it."""
        for scope in self.scopes[: self.depth + 1]:
            if value in scope.variables:
                return scope.variables[value]
        variable = self.state(base, value, node)
        self.scopes[self.depth].variables[value] = variable
        return variable

    def state(self, base: str, value: Value, node: int | None = None) -> Var:
        """Assign a value to a variable of its own, which may change."""
        variable = Var(base)
        self.add(Assign((variable,), value, node))
        return variable

    @contextmanager
    def in_scope(self, depth: int) -> Generator[None]:
        """Add statements to an outer block, before the one that is open in it."""
        scopes, before = self.scopes, self.depth
        self.scopes, self.depth = scopes[: depth + 1], depth
        yield
        self.scopes, self.depth = scopes, before

    @contextmanager
    def inside_loops(self, leaves: Iterable[Leaf]) -> Generator[None]:
        """Open loops. What is emitted for the blocks around them comes before them."""
        scopes, before = self.scopes, self.depth
        opened: list[tuple[Scope, Leaf, Scope]] = []
        self.scopes = scopes[: before + 1]
        for leaf in leaves:
            inner = Scope([], leaf)
            opened.append((self.scopes[-1], leaf, inner))
            self.scopes = [*self.scopes, inner]
        self.depth = len(self.scopes) - 1
        yield
        for outer, leaf, inner in reversed(opened):
            if inner.body:  # sums of nothing have none
                outer.body.append(For(self.loop_variables[leaf.name], self.values_of(leaf), inner.body))
        self.scopes, self.depth = scopes, before

    def values_of(self, loop: Leaf) -> Range:
        """Return the values of a loop's variable."""
        stages = self.placement.num_stages if self.placement.num_stages > 1 else None
        step, end = self.where.steps.get(loop.name, 1), self.ends.get(loop.name, loop.extent)
        if loop in self.where.turns:
            grid = self.where.turns[loop]
            end = product((ceil_div(self.where.axes[loop.axis].size, grid.step), grid.step))
            first = self.sum_of([(self.element(grid), grid.step)] if grid.extent != 1 else [])
            return Range(first, lift(end), cast(int, grid.extent) * grid.step, stages)
        last = end * step if isinstance(end, Expression) else lift(product((end, step)))
        return Range(lift(0), last, step if step != 1 else None, stages)

    @contextmanager
    def fixed(self, elements: Mapping[Leaf, int]) -> Generator[None]:
        before, self.at = self.at, self.at | dict(elements)
        yield
        self.at = before

    def variants(self, leaves: Iterable[Leaf]) -> list[dict[Leaf, int]]:
        """Return every element of the unrolled ones among some leaves."""
        unrolled = placed(leaves, Place.UNROLL)
        ranges = (range(cast(int, leaf.extent)) for leaf in unrolled)
        return [dict(zip(unrolled, elements, strict=True)) for elements in itertools.product(*ranges)]

    def home_of(self, tile: Tile) -> int:
        """Return the depth of the innermost open loop whose variable or block a tile's value is from."""
        for depth in range(self.depth, 0, -1):
            scope = self.scopes[depth]
            inner: set[Expression] = {*scope.variables.values()}
            if scope.loop is not None:
                inner.add(self.element(scope.loop).value)
            if any(name in inner for name in tile.value.names):
                return depth
        return 0

    def home(self, leaves: Collection[Leaf]) -> int:
        """Return the depth of the innermost open loop among some leaves."""
        for depth in range(self.depth, 0, -1):
            loop = self.scopes[depth].loop
            if loop is not None and any(leaf.name == loop.name for leaf in leaves):
                return depth
        return 0

    def block_of(self, number: int) -> int:
        """Return the depth of the outermost block that has all on which a node depends."""
        return self.home(self.depends[number])

    # -- values --------------------------------------------------------------------------------------------

    def joined(self, value: Expression, *tiles: Tile) -> Tile:
        """Return a value that is computed from some tiles."""
        lanes = NOWHERE.union(*(tile.lanes for tile in tiles))
        return Tile(value, lanes, any(tile.is_block for tile in tiles))

    def shape(self, lanes: frozenset[Leaf]) -> Items:
        return Items(tuple(Literal(leaf.lanes if leaf in lanes else 1) for leaf in self.lanes))

    @contextmanager
    def dimensions(self, lanes: tuple[Leaf, ...]) -> Generator[None]:
        """Emit tiles that have these dimensions."""
        before, other_lanes = self.where, self.other_lanes
        self.where = replace(before, lanes=lanes)
        self.other_lanes = None if lanes == self.all_lanes else lanes
        yield
        self.where, self.other_lanes = before, other_lanes

    def key(self, number: int) -> object:
        unrolled = self.unrolled[number]
        elements = tuple([(leaf, self.at[leaf]) for leaf in unrolled]) if unrolled else ()
        return number, elements, self.other_lanes

    def cached(self, number: int) -> Tile | None:
        key = self.key(number)
        for scope in self.scopes[: self.depth + 1]:
            if key in scope.tiles:
                return scope.tiles[key]
        return None

    def tile(self, number: int) -> Tile:
        """Return the tile of a node, emitted in the outermost block that has all on which it depends."""
        node = self.loops.nodes[number]
        if isinstance(node, Constant):
            return Tile(lift(cast(float, node.value)))
        tile = self.cached(number)
        if tile is None:
            with self.in_scope(self.block_of(number)):
                tile = self.reduced(number, node) if isinstance(node, Reduce) else self.emitted(number)
                self.scopes[self.depth].tiles[self.key(number)] = tile
        return tile

    def typed(self, number: int) -> Tile:
        """Return the tile of a node; that of a number has its dtype."""
        tile, dtype = self.tile(number), self.loops.nodes[number].dtype
        return Tile(tl.full([], tile.value, dtype)) if isinstance(tile.value, Literal) else tile

    def emitted(self, number: int) -> Tile:
        node = self.loops.nodes[number]
        match node:
            case Load():
                tile, base = self.loaded(node), self.called(node.buffer)
            case Coordinate():
                index = self.index(node.index)
                value = index.value.to(node.dtype) if index.is_block else tl.full([], index.value, node.dtype)
                tile, base = self.joined(value, index), "position"
            case InRange():
                index = self.index(node.index)
                value = (index.value >= node.low) & (index.value < node.high)
                tile, base = self.joined(value, index), "inside"
            case Random():
                tile, base = self.random(node), "word" if node.dtype is torch.uint32 else "uniform"
            case Checked():
                return self.checked(node)
            case Compute():
                tile = self.computed(number, node)
                base = expression.base_name(node)
            case _:
                raise TypeError(node)
        if isinstance(tile.value, Var):
            return tile
        return Tile(self.let(base, tile.value, number), tile.lanes, tile.is_block)

    def called(self, buffer: str) -> str:
        return self.pointers[buffer].base.removesuffix("_ptr")

    def loaded(self, node: Load, as_held: bool = False) -> Tile:
        """Return a load; elements outside of an axis, or where `within` is false, are zero. as_held: in the
        buffer's dtype."""
        if node in self.boxes:
            is_dead = node.within is not None and self.literal(node.within) is False
            if is_dead:
                return Tile(Literal(0))
            tile, held = self.boxed(node, self.boxes[node]), self.dtypes[node.buffer]
            return tile if as_held else replace(tile, value=convert(tile.value, held, node.dtype))
        within = [] if node.within is None else self.condition(node.within)
        if within is None:
            return Tile(Literal(0))
        if (length := self.run_length(node)) > 1:
            tile = self.repeated(replace(node, within=None), length)
            return self.zero_outside(within, tile, node) if within else tile
        index = self.place_of(node)
        if node.buffer in self.empty:
            return self.joined(tl.full(self.shape(index.lanes), 0, node.dtype), index)
        loose = self.axes_of(node.index) - self.guarded(node)
        needed = within if as_held or not self.is_shared_within(node) else []
        pointer, mask = self.access(node.buffer, index, loose, needed)
        value = self.load_at(node, pointer.value, None if mask is None else mask.value)
        value = value if as_held else convert(value, self.dtypes[node.buffer], node.dtype)
        tile = self.joined(value, pointer)
        return self.zero_outside(within, tile, node) if len(needed) < len(within) else tile

    def place_of(self, node: Load) -> Tile:
        """Return the element numbers of a load."""
        return self.index(node.index)

    def load_at(self, node: Load, pointer: Expression, mask: Expression | None) -> Expression:
        """Return the elements at some addresses, in the buffer's dtype, and zero outside of a mask."""
        held = self.dtypes[node.buffer]
        zero = 0.0 if held.is_floating_point and held.itemsize == 1 else 0  # no integer becomes a float8
        masked: dict[str, Expression] = {} if mask is None else {"mask": mask, "other": lift(zero)}
        return tl.load(pointer, **masked, **self.options(node))

    def zero_outside(self, within: Sequence[Tile], tile: Tile, node: Load) -> Tile:
        """Return a tile that was loaded without conditions, with zero where these do not hold."""
        condition = cast(Expression, every(*(tile.value for tile in within)))
        value = tl.where(condition, self.let(self.called(node.buffer), tile.value), 0)
        return self.joined(value, tile, *within)

    def options(self, node: Load) -> Mapping[str, Expression]:
        """Return the keyword arguments of a load."""
        return self.load_options

    def is_shared_within(self, node: Load) -> bool:
        """True if neighbours load the same element wherever a range, in which only some of them lie, holds:
        they may load it once, without the condition."""
        within = None if node.within is None else self.loops.nodes[node.within]
        if not isinstance(within, InRange) or node.dtype is torch.bool or not node.index.terms:
            return False
        direct = all(key >= 0 for key, _ in node.index.terms)
        moved, tested = self.where.of_index(node.index), self.where.of_index(within.index)
        return _is_nonempty(within) and direct and moved.isdisjoint(tested) and bool(tested & {*self.lanes})

    def run_length(self, node: Load) -> int:
        """Return how many neighbours among the innermost lanes have the same element of a load; a power of
        two. It is 1 where Triton sees that itself, which it does for integers that are used as indices."""
        axes, leaf = _axes(node.index), self.lanes[-1] if self.lanes else None
        members = self.where.members.get(leaf.axis, ()) if leaf is not None else ()
        last = max((k for k in members if k in axes), default=None)
        is_direct = all(key >= 0 for key, _ in node.index.terms)
        if leaf is None or leaf.step != 1 or last is None or not is_direct:
            return 1
        if node.within is not None and not self.is_over(node.within, {k for k in members if k > last}):
            return 1
        if self.dtypes[node.buffer] in POSITIONS or leaf not in self.where.of_index(node.index):
            return 1
        inner, length = product(self.where.axes[k].size for k in members if k > last), leaf.lanes // 2
        while length > 1 and quotient(inner, length) is None:
            length //= 2
        return max(1, length)

    def is_over(self, condition: int, axes: Set[int]) -> bool:
        """True if a condition is a range over some axes and no others."""
        within = self.loops.nodes[condition]
        if not isinstance(within, InRange) or not within.index.terms:
            return False
        return _is_nonempty(within) and all(key in axes for key, _ in within.index.terms)

    def repeated(self, node: Load, length: int, times: int | None = None) -> Tile:
        """Return a load of one element for each run of `length` innermost lanes. times: how often a tile has
        it, if that is not the length."""
        leaf, before = self.lanes[-1], self.where
        runs = leaf._replace(name=f"{leaf.name}_by_{length}", extent=leaf.lanes // length, step=length)
        self.where = before.with_leaves({leaf: runs})
        tile = self.loaded(node)
        self.where = before
        times = length if times is None else times
        value = fm.repeated(tile.value, times) if times > 1 else tile.value
        return Tile(value, tile.lanes - {runs} | {leaf}, True)

    def loaded_as_held(self, node: Load) -> Tile:
        tile = self.loaded(node, as_held=True)
        return replace(tile, value=self.let(self.called(node.buffer), tile.value))

    def boxed(self, load: Load, box: Box) -> Tile:
        """Return a load through a descriptor, which is made once in a program, in the buffer's dtype.

        Where lanes are several elements apart, the elements that they meet make up a tensor of their own: the
        descriptor begins at the first of them.
        """
        sides = box.sides
        offset, sizes, places = box.offset, list[int](), list[Expression]()
        for side in sides:
            terms, const = self.terms(side.index)
            first_place, rest = divmod(cast(int, const), side.apart)
            offset += rest * side.stride
            sizes.append(-(-(side.size - rest) // side.apart))
            scalars = [(leaf, c) for leaf, c in terms if isinstance(leaf, Leaf) and leaf != side.leaf]
            parts = [(self.element(leaf), cast(int, c) // side.apart) for leaf, c in scalars]
            place = self.sum_of(parts, first_place)
            places.append(place.to(torch.int32) if self.wide and scalars else place)
        strides, block = [side.stride * side.apart for side in sides], [side.lanes for side in sides]
        with self.in_scope(0):
            pointer = plus(self.pointers[load.buffer], offset or None)
            new_descriptor = tl.make_tensor_descriptor(pointer, sizes, strides, block)
            descriptor = self.let(f"{self.called(load.buffer)}_box", new_descriptor)
        value: Expression = Call(Member(descriptor, "load"), (Items(tuple(places)),))
        lanes = frozenset(side.leaf for side in sides if side.leaf is not None)
        in_tile = [-1 if side.leaf is None else self.lanes.index(side.leaf) for side in sides]
        order = sorted(range(len(sides)), key=in_tile.__getitem__)
        if order != sorted(order):
            value = tl.permute(value, order)
        if self.shape(lanes).items != tuple(Literal(sides[i].lanes) for i in order):
            value = value.reshape(self.shape(lanes))
        return Tile(value, lanes, True)

    def condition(self, number: int) -> list[Tile] | None:
        """Return the conditions that make up a node, without any that always hold; None if one never does."""
        value = self.literal(number)
        if value is not None:
            return [] if value else None
        return [self.tile(part) for part in self.parts(number)]

    def parts(self, condition: int) -> list[int]:
        """Return the nodes whose conjunction a condition is, without nodes that always hold."""
        return [part for part in conjuncts_of(self.loops.nodes, condition) if self.literal(part) is not True]

    def access(
        self, buffer: str, place: Tile, axes: frozenset[int], conditions: Iterable[Tile]
    ) -> tuple[Tile, Tile | None]:
        """Return the addresses and the mask of an access, which is made inside of some axes where conditions
        hold; addresses have the shape of their mask."""
        inside = self.inside(axes)
        masks = [*([] if inside is None else [inside]), *conditions]
        mask = self.joined(cast(Expression, every(*(m.value for m in masks))), *masks) if masks else None
        pointer = plus(self.pointers[buffer], None if place.value == Literal(0) else place.value)
        if mask is not None and (not mask.lanes <= place.lanes or mask.is_block > place.is_block):
            lanes = place.lanes | mask.lanes
            return Tile(plus(pointer, tl.zeros(self.shape(lanes), torch.int32)), lanes, True), mask
        return Tile(pointer, place.lanes, place.is_block), mask

    def guarded(self, load: Load) -> frozenset[int]:
        """Return the axes whose ends a load's condition keeps: those of an index that it holds in a range,
        where they move the address by nothing but this index; of a box, those of all sides that are not just
        one axis."""
        if load in self.boxes:
            by_index = {Index(0, ((n, 1),)): axis.size for n, axis in enumerate(self.loops.axes)}
            sides = (side for side in self.boxes[load].sides if by_index.get(side.index) != side.size)
            return frozenset[int]().union(*(_axes(side.index) for side in sides))
        steps = dict(load.index.terms)
        ranges = [] if load.within is None else self.ranges(load.within)
        counts = Counter(axis for index in ranges for axis in _axes(index))
        guarded = set[int]()
        for index in ranges:
            ratios = {quotient(steps.get(axis, 0), c) for axis, c in index.terms}
            if len(ratios) == 1 and None not in ratios and all(counts[axis] == 1 for axis in _axes(index)):
                guarded |= _axes(index)
        return frozenset(guarded)

    def ranges(self, condition: int) -> list[Index]:
        """Return the indices that lie in a range wherever a condition holds."""
        nodes = (self.loops.nodes[part] for part in conjuncts_of(self.loops.nodes, condition))
        return [node.index for node in nodes if isinstance(node, InRange)]

    def random(self, node: Random) -> Tile:
        """Return random numbers, with one Philox call for four neighbours where there are such."""
        words, seed = node.dtype is torch.uint32, self.tile(node.seed).value
        counter = self.counter_of_four(self.where.merged(node.index))
        if counter is None:
            index = self.index(node.index)
            place = index.value if node.index.terms else tl.full([], index.value, torch.int32)
            return self.joined((fm.words if words else fm.uniform)(seed, place, node.salt), index)
        value = (fm.words_block if words else fm.uniform_block)(seed, counter.value, node.salt)
        return replace(counter, value=value)

    def counter_of_four(self, index: Index) -> Tile | None:
        """Return a quarter of an index for every fourth of the innermost lanes, which are neighbours there;
        None if it is no integer or they are no neighbours."""
        innermost, const = self.lanes[-1] if self.lanes else None, index.const
        if innermost is None or innermost.lanes < 4 or len(self.lanes) > 2:
            return None
        neighbours, parts = False, list[tuple[Tile | None, Dim]]()
        for key, step in index.terms:
            if key < 0 or innermost not in self.where.leaves[key]:
                base, offset = self.coordinate(key) if key >= 0 else (self.tile(~key), 0)
                const = const + step * offset
                parts.append((base, step))
                continue
            if key in self.where.fused:  # neighbours of the fused axis are none of this one
                return None
            of_axis, rest = self.terms(Index(0, ((key, step),)))
            neighbours, const = (innermost, 1) in of_axis, const + rest
            parts += [(self.element(x), c) for x, c in of_axis if isinstance(x, Leaf) and x != innermost]
        quarters = [(tile, quotient(step, 4)) for tile, step in parts if tile is not None]
        by_four = [(tile, step) for tile, step in quarters if step is not None]
        first = quotient(const, 4)
        if not neighbours or first is None or len(by_four) < len(quarters):
            return None
        quarter = tl.arange(0, innermost.lanes // 4)
        lanes = Tile(quarter[None, :] if len(self.lanes) > 1 else quarter, frozenset({innermost}), True)
        return self.joined(self.sum_of([*by_four, (lanes, 1)], first), lanes, *(tile for tile, _ in by_four))

    def checked(self, node: Checked) -> Tile:
        index = self.typed(node.position)
        holds = node.within is None or self.literal(node.within) is True
        mask = None if holds or node.within is None else self.tile(node.within)
        lanes = index.lanes | (NOWHERE if mask is None else mask.lanes)
        zero = tl.full(self.shape(lanes) if index.is_block else [], 0, self.loops.nodes[node.position].dtype)
        condition = None if mask is None else mask.value
        self.add(Check(index.value, lift(node.low), lift(node.high), node.what, condition, zero))
        return self.tile(node.operand)

    def computed(self, number: int, node: Compute) -> Tile:
        """Return the result of an operator."""
        if (divided := self.divided(node)) is not None:
            return divided[0] or Tile(tl.full([], divided[1], node.dtype))
        source = self.chosen(node)
        if source is not None and self.loops.nodes[source].dtype is node.dtype:
            return self.typed(source)
        if (floats := floats_of(self.loops, number)) is not None:
            tiles = [self.typed(n) for n in floats.operands()]
            return self.joined(floats.value(lambda n: self.typed(n).value), *tiles)
        if (byte := widened_byte(self.loops, node)) is not None:
            tile = self.typed(byte)
            return replace(tile, value=fm.from_byte(tile.value))
        numbers = [a.node for _, a in node.operands if isinstance(a, Operand)]
        tiles = {n: self.tile(n) for n in numbers}
        literals = [n for n in numbers if isinstance(tiles[n].value, Literal)]
        if len(literals) == len(numbers) or (len(literals) > 1 and not is_applied(node, WHERE)):
            for n in literals:  # Triton's functions cannot infer a dtype from two numbers
                tiles[n] = Tile(self.let("constant", self.typed(n).value))
        dtypes = {n: self.loops.nodes[n].dtype for n in numbers}
        divisor = operand_of(node, "other") if is_applied(node, DIV) else None
        if divisor is not None and number in self.fp16 and self.is_repeated(divisor, number):
            (dividend,) = (n for n in numbers if n != divisor)
            per = self.reciprocal(divisor)
            value = convert(tiles[dividend].value, dtypes[dividend], torch.float32) * per.value
            return self.joined(value, tiles[dividend], per)
        value = computed(node, lambda n: (tiles[n].value, dtypes[n]), number in self.fp16)
        return self.joined(value, *tiles.values())

    def is_repeated(self, operand: int, number: int) -> bool:
        """True if several elements of a node that one program computes share an operand that is no number."""
        more = self.depends[number] - self.depends[operand]
        is_number = isinstance(self.loops.nodes[operand], Constant)
        return not is_number and any(leaf.place not in (Place.GRID, Place.SHARED) for leaf in more)

    def reciprocal(self, number: int) -> Tile:
        """Return 1 / a node, computed once for all elements that share it."""
        tile, dtype = self.tile(number), self.loops.nodes[number].dtype
        base = tile.value.base if isinstance(tile.value, Var) else "value"
        with self.in_scope(self.block_of(number)):
            value = self.let(f"per_{base}", 1.0 / convert(tile.value, dtype, torch.float32))
        return replace(tile, value=value)

    # -- what is known ---------------------------------------------------------------------------------

    def literal(self, number: int) -> float | bool | None:
        """Return a node's number for the unrolled elements that are emitted now; None if it is no number."""
        node = self.loops.nodes[number]
        match node:
            case Constant(value):
                return value
            case Coordinate(index):
                return self.constant_index(index)
            case InRange(index, low, high):
                place = self.constant_index(index)
                if place is None or not isinstance(low, int) or not isinstance(high, int):
                    return None
                return low <= place < high
            case Compute() if is_applied(node, AND):
                operands = [self.literal(part) for part in conjuncts_of(self.loops.nodes, number)]
                return False if False in operands else True if all(o is True for o in operands) else None
            case Compute() if (divided := self.divided(node)) is not None:
                return divided[1] if divided[0] is None else None
            case Compute(_, operands) if (compare := node.spec.compare) is not None:
                nodes, sides = self.loops.nodes, [a for _, a in operands[:2]]
                if any(isinstance(a, Operand) and nodes[a.node].dtype is torch.bool for a in sides):
                    return None
                left, right = (self.literal(a.node) if isinstance(a, Operand) else a for a in sides)
                are_numbers = isinstance(left, int | float) and isinstance(right, int | float)
                return compare(left, right) if are_numbers else None
            case _:
                return None

    def constant_index(self, index: Index) -> int | None:
        """Return an index that unrolled axes alone make up."""
        if any(key in self.where.fused for key, _ in index.terms):
            return None
        terms, const = self.terms(index)
        return const if not terms and isinstance(const, int) else None

    def terms(self, index: Index) -> tuple[list[tuple[Leaf | int, Dim]], Dim]:
        """Return an index as multiples of leaves that are not unrolled, and of nodes, and the rest."""
        terms, const = list[tuple[Leaf | int, Dim]](), index.const
        in_turns = {*self.where.turns.values()}
        for key, step in index.terms:
            for leaf in self.where.leaves[key] if key >= 0 else ():
                if leaf.place is Place.UNROLL:
                    const = const + step * leaf.step * self.at[leaf]
                elif leaf not in in_turns:
                    terms.append((leaf, step * self.where.step_of(leaf)))
            if key < 0:
                terms.append((~key, step))
        return terms, const

    def divided(self, node: Compute) -> tuple[Tile | None, int] | None:
        """Return a coordinate's quotient or remainder by a number that divides all of its steps but the
        constant one: a tile, None if it is a number, and that number; None of all else."""
        operands, is_rest = dict(node.operands), is_applied(node, REMAINDER)
        rounds_down = is_applied(node, FLOOR_DIVIDE) or operands.get("rounding_mode") == "floor"
        if not is_rest and not rounds_down:
            return None
        by, source = operands.get("other"), operand_of(node, "self")
        by = self.literal(by.node) if isinstance(by, Operand) else by
        of = None if source is None else self.loops.nodes[source]
        if not isinstance(by, int) or by < 1 or not isinstance(of, Coordinate):
            return None
        if any(key in self.where.fused for key, _ in of.index.terms):
            return None
        terms, const = self.terms(of.index)
        if not isinstance(const, int) or any(not isinstance(c, int) or c % by for _, c in terms):
            return None
        if is_rest:
            return None, const % by
        if not terms:
            return None, const // by
        parts = [(self.element(t) if isinstance(t, Leaf) else self.tile(t), int(c) // by) for t, c in terms]
        return self.joined(self.sum_of(parts, const // by), *(tile for tile, _ in parts)), 0

    def chosen(self, node: Compute) -> int | None:
        """Return the operand that a `where` takes for all elements, or None if it is not known to be one."""
        condition = operand_of(node, "condition") if is_applied(node, WHERE) else None
        value = None if condition is None else self.literal(condition)
        return None if value is None else operand_of(node, "self" if value else "other")

    def in_tile(self, number: int) -> list[int]:
        """Return a node and the nodes that it is computed from without a reduction, operands first."""
        return sorted(with_operands(self.loops, (number,), self.reductions))

    def is_dead(self, number: int) -> bool:
        """True if a node is zero because of an element that is not there."""
        dead = set[int]()
        for n in self.in_tile(number):
            node = self.loops.nodes[n]
            if isinstance(node, Load):
                is_dead = node.within is not None and self.literal(node.within) is False
            elif not isinstance(node, Compute):
                is_dead = isinstance(node, Constant) and node.value == 0
            elif is_applied(node, WHERE):
                is_dead = self.chosen(node) in dead
            elif is_applied(node, DIV):  # zero divided by zero is none
                is_dead = operand_of(node, "self") in dead and operand_of(node, "other") is None
            else:
                is_linear = is_applied(node, MUL) or is_applied(node, CAST)
                is_dead = is_linear and not dead.isdisjoint(operands_of(node))
            if is_dead:
                dead.add(n)
        return number in dead

    # -- reductions ----------------------------------------------------------------------------------------

    def reduced(self, number: int, node: Reduce) -> Tile:
        """Return a reduction, in loops that it shares with others over the same axes."""
        around = placed(self.where.reduced_by(node), Place.LOOP)
        if not around:
            state, variants = None, self.variants(self.where.reduced_by(node))
            for elements in variants:
                with self.fixed(elements):
                    term = self.term(number, node)
                if term is not None and state is None:
                    first = term.value if len(variants) == 1 else self.state(node.combine, term.value)
                    state = Tile(first, term.lanes, term.is_block)
                elif term is not None and state is not None:
                    self.add(monoids.step(node, cast(Var, state.value), term.value))
                    state = self.joined(state.value, state, term)
            if state is None:
                state = self.started(number)
            return self.folded(number, node, state, join_key=self.join_key(number))
        at = self.at
        numbers = self.sharing_loop(number, around)
        together = [(n, each) for n in numbers for each in self.variants(self.depends[n])]
        states: list[Tile] = []
        for n, elements in together:
            with self.fixed(elements):
                states.append(self.started(n))
        with self.inside_loops(around):
            for (n, elements), state in zip(together, states, strict=True):
                reduce = self.reduction(n)
                for inner in self.variants(self.where.reduced_by(reduce)):
                    with self.fixed(elements | inner):
                        self.add_terms(n, reduce, state)
        for (n, elements), state in zip(together, states, strict=True):
            reduce = self.reduction(n)
            with self.fixed(elements):
                tile = self.folded(n, reduce, state, join_key=self.join_key(n))
                self.scopes[self.depth].tiles[self.key(n)] = tile
        self.at = at
        tile = self.cached(number)
        assert tile is not None
        return tile

    def sharing_loop(self, number: int, around: list[Leaf]) -> list[int]:
        """Return the reductions that can share a loop: over the same loops, in the same block, and none reads
        another that is not there yet."""
        home, chosen = self.block_of(number), [number]
        for n, node in enumerate(self.loops.nodes):
            if n == number or not isinstance(node, Reduce) or n not in self.needed or n in self.ready:
                continue
            if self.cached(n) is not None:
                continue
            same = placed(self.where.reduced_by(node), Place.LOOP) == around
            if not same or self.block_of(n) != home or not self.is_open(self.depends[n]):
                continue
            read = with_operands(self.loops, operands_of(node), self.ready) - self.ready.keys()
            if not self.reductions.isdisjoint(read):
                continue
            chosen.append(n)
        return sorted(chosen)

    def is_open(self, leaves: Iterable[Leaf]) -> bool:
        loops = {scope.loop for scope in self.scopes[: self.depth + 1]}
        return all(leaf in loops for leaf in placed(leaves, Place.LOOP))

    def add_terms(self, number: int, node: Reduce, state: Tile) -> None:
        """Add a reduction's terms of the open block to its accumulator."""
        if (term := self.term(number, node)) is not None:
            self.add(monoids.step(node, cast(Var, state.value), term.value))

    def in_turn(self, number: int) -> Sequence[Leaf]:
        """Return the lanes over which each turn of a loop reduces."""
        return ()

    def join_key(self, number: int) -> object:
        """Return what sums have in common that threads exchange at once; None of others. While they do, a
        program's other values occupy registers, of which a single program has enough."""
        is_joined = not self.where.grid and self.a.is_sum(number)
        return self.reduction(number).axes if is_joined else None

    def started(self, number: int) -> Tile:
        """Return an accumulator with the neutral element, a lane for each of the operand's."""
        node = self.reduction(number)
        lanes = self.lanes_of_state(node).difference(self.in_turn(number))
        is_block = bool(lanes) or (len(self.lanes) > 1 and self.operand_is_block(node.operand))
        shape = self.shape(lanes) if is_block else []
        value = tl.full(shape, monoids.neutral(node), accumulator_dtype(node))
        return Tile(self.state(node.combine, value), lanes, is_block)

    def lanes_of_state(self, node: Reduce) -> frozenset[Leaf]:
        lanes = placed(self.depends[node.operand] | self.where.reduced_by(node), Place.LANES)
        return frozenset(lanes) & {*self.lanes}

    def operand_is_block(self, number: int) -> bool:
        """True if a node's tile has dimensions although it depends on no lanes: a fold left them."""
        return any(
            placed(self.depends[n], Place.LANES)
            or (isinstance(node, Reduce) and placed(self.where.reduced_by(node), Place.LANES))
            for n in with_operands(self.loops, (number,))
            for node in (self.loops.nodes[n],)
        )

    def term(self, number: int, node: Reduce) -> Tile | None:
        """Return a reduction's operand, neutral where no element is; None if it adds nothing."""
        if node.combine == "sum" and self.is_dead(node.operand):
            return None
        return self.masked(node, self.typed(node.operand))

    def masked(self, node: Reduce, tile: Tile) -> Tile:
        """Return a tile as a reduction's operand, neutral where no element is."""
        source = self.loops.nodes[node.operand]
        if monoids.is_logical(node):
            value = convert(tile.value, source.dtype, torch.bool).to(torch.int32)
        else:
            value = convert(tile.value, source.dtype, node.dtype)
        folds = frozenset(placed(self.where.reduced_by(node), Place.LANES))
        lanes = tile.lanes | folds
        if not folds <= tile.lanes:
            value = tl.broadcast_to(value, self.shape(lanes))
        zero = {a for a in node.axes if node.combine == "sum" and self.is_zero_outside(node.operand, a)}
        mask = self.inside(node.axes - zero)
        if mask is not None:
            value = tl.where(mask.value, value, monoids.neutral(node))
        return Tile(value, lanes | (mask.lanes if mask else NOWHERE), tile.is_block or bool(lanes))

    def is_zero_outside(self, number: int, axis: int) -> bool:
        """True if a node is zero outside of an axis: loads are, and products of such values."""
        zero, nodes = set[int](), self.loops.nodes
        for n in self.in_tile(number):
            match nodes[n]:
                case Load() as load:
                    is_zero = self.masks(load, axis)
                case Constant(value):
                    is_zero = value == 0
                case Compute() as node:
                    operands = operands_of(node)
                    if is_applied(node, MUL):  # zero times infinity is none
                        finite = (o in zero or isinstance(nodes[o], Constant) for o in operands)
                        is_zero = not zero.isdisjoint(operands) and all(finite)
                    else:
                        is_zero = node.spec.keeps_zero and len(operands) == arity_of(node) > 0
                        is_zero = is_zero and zero.issuperset(operands)
                case _:
                    is_zero = False
            if is_zero:
                zero.add(n)
        return number in zero

    def masks(self, load: Load, axis: int) -> bool:
        """True if a load is zero outside of an axis."""
        return axis in _axes(load.index) - self.guarded(load)

    def folded(
        self, number: int, node: Reduce, state: Tile, base: str | None = None, join_key: object = None
    ) -> Tile:
        """Return an accumulator whose reduced lanes are folded. base, join_key: of the variable, and of the
        fold."""
        several, folds = len(self.lanes) > 1, placed(self.where.reduced_by(node), Place.LANES)
        folds = [leaf for leaf in folds if leaf not in self.in_turn(number)]
        steps = [(self.lanes.index(leaf), frozenset({leaf})) for leaf in reversed(folds)]  # neighbours first
        if len(folds) > 1 and state.lanes == frozenset(folds) == frozenset(self.lanes):
            steps = [(None, state.lanes)]  # one exchange between threads in place of one for each dimension
        for axis, leaves in steps:
            key = None if join_key is None else (join_key, state.lanes)
            combined = Combine(node, (state.value,), axis, several, number in self.plain_maxima, key)
            value = self.let(base or node.combine, combined, number)
            state = Tile(value, state.lanes - leaves, several)
        return state

    # -- stores --------------------------------------------------------------------------------------------

    def store(self, store: Store) -> None:
        value, index = self.typed(store.value), self.index(store.index)
        conditions = [] if store.within is None else self.condition(store.within)
        if conditions is None:
            return
        conditions += self.by_one(self.where.of_store(store))
        self.put(value, store.buffer, index, self.axes_of(store.index), conditions, store.value)

    def by_one(self, leaves: frozenset[Leaf]) -> list[Tile]:
        """Return the condition that one of several programs with the same value stores it.

        leaves: the leaves on which the store depends.
        """
        shared = [leaf for leaf in self.where.grid if leaf.place is Place.SHARED and leaf not in leaves]
        return [Tile(self.element(leaf).value.eq(0)) for leaf in shared]

    def put(
        self,
        value: Tile,
        buffer: str,
        place: Tile,
        axes: frozenset[int],
        conditions: Iterable[Tile],
        number: int,
    ) -> None:
        """Store a node's tile inside of some axes, where conditions hold."""
        pointer, mask = self.access(buffer, place, axes, conditions)
        address = pointer.value
        if value.is_block and not pointer.is_block:
            address = plus(address, tl.zeros(self.shape(NOWHERE), torch.int32))
        self.add(StoreStatement(address, value.value, None if mask is None else mask.value, number))

    def store_partial(self, number: int, of: Partial) -> None:
        """Store what the program has reduced, for the kernel that reduces all programs' results."""
        sizes = tuple(self.loops.axes[k].size for k in of.axes)
        index = self.index(Index(0, tuple(zip(of.axes, strides_of(sizes), strict=True))))
        program, width = self.number_of(of.leaves), of.buffer.stride[0]
        rest = None if index.value == Literal(0) else index.value
        place = self.joined(plus(program if width == 1 else program * lift(width), rest), index)
        conditions = self.by_one(self.where.of_axes(of.axes) | frozenset(of.leaves))
        self.put(self.tile(number), of.buffer.name, place, frozenset(of.axes), conditions, number)


def _identifier(name: str) -> str:
    return name.replace(".", "_")


def _axes(index: Index) -> frozenset[int]:
    return frozenset(key for key, _ in index.terms if key >= 0)


def _is_nonempty(within: InRange) -> bool:
    return isinstance(within.low, int) and isinstance(within.high, int) and within.low < within.high
