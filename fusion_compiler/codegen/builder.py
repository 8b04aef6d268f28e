"""Build tile programs: `Builder` has the open block, its variables, and the place of the tile.

`Builder` knows no operator, no window and no reduction's state: `nodes.py`, `accesses.py` and
`online_reductions.py` do.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

import torch

from fusion_compiler.codegen.bits import floats_of
from fusion_compiler.codegen.expression import convert, decompose, index_of
from fusion_compiler.codegen.monoids import fold
from fusion_compiler.codegen.names import Own, own
from fusion_compiler.codegen.tile import Assign, Combine, Do, For, If, Range, Statement, Value
from fusion_compiler.ir.loops import (
    COLS,
    ROWS,
    Constant,
    Index,
    Load,
    Reduce,
    Store,
    operands_of,
)
from fusion_compiler.ir.syntax import (
    Expression,
    Items,
    Literal,
    Name,
    Operand,
    Var,
    Variable,
    every,
    lift,
    plus,
    tl,
)
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.contractions import Contraction
from fusion_compiler.schedule.schedule import Cols, Schedule

BASES = {ROWS: own("row"), COLS: own("col")}  # the number of a group's element
ALONG = frozenset({COLS})
NO_OPTIONS: Mapping[str, Expression] = {}


@dataclass(frozen=True)
class Tile:
    """A tile lies at some rows and columns of the nest.

    flat: the tile is a vector over the columns of one row, rather than [rows, cols].
    lanes: the number of columns. start: the first column, or None if the tile has all columns.
    first_row: the first of several adjacent rows.
    row_mask, col_mask: the variables that tell which rows and columns exist, or None if all do.
    last_pass: no later pass reads the elements of these rows again.
    """

    flat: bool
    lanes: int
    start: Expression | None = None
    first_row: Expression | None = None
    row_mask: Name | None = None
    col_mask: Name | None = None
    last_pass: bool = True


@dataclass(frozen=True)
class Packed:
    """A tile has several pieces (`pieces.py`) along `axis`, or one value for all pieces if `axis` is None."""

    variable: Variable
    axis: int | None


class Builder:
    """Build the tile program of one nest under a schedule, and record which variable holds which node.

    pointers: the parameter of each buffer. dtypes: the dtype of each buffer.
    load_options: keyword arguments of every load.
    empty: buffers without elements, which have no address to load from.
    """

    def __init__(
        self,
        analysis: Analysis,
        schedule: Schedule,
        pointers: Mapping[str, Name],
        dtypes: Mapping[str, torch.dtype],
        load_options: Mapping[str, Expression] = NO_OPTIONS,
        empty: frozenset[str] = frozenset(),
    ) -> None:
        self.a, self.s, self.loops = analysis, schedule, analysis.loops
        self.pointers, self.dtypes, self.load_options, self.empty = pointers, dtypes, load_options, empty
        self.rough = analysis.rough(dtypes)
        self.means = {mean: total for total, mean in analysis.moments.values()}
        self.scaled: dict[int, float] = {}  # sum -> the number that its terms were multiplied by
        beyond = 2 * schedule.block_cols  # the last block goes beyond the row, by twos for pairs
        self.wide = analysis.furthest < 0 or analysis.furthest + beyond >= 2**31
        self.body: list[Statement] = []
        self.env: dict[int, Variable] = {}  # node -> variable
        self.kept: dict[int, Variable] = {}  # load -> its tile in the dtype of the buffer
        self.named: dict[tuple[str, int], Variable] = {}  # (kind, number) -> what a block defines once
        self.tile = Tile(schedule.block_rows == 1, schedule.block_cols)
        self.contracted: dict[int, Contraction] = {}  # sum -> the tensor units' contraction
        self.as_loaded = frozenset[int]()  # loads that only tensor units read, in the buffer's dtype
        self.tiles: dict[tuple[int, ...], Callable[[], None]] = {}  # pieces -> how to build their tile
        self.made: dict[int, Callable[[], None]] = {}  # node -> how to build it, if not by `nodes.py`
        self.packs: dict[tuple[int, ...], Packed] = {}  # pieces -> their tile
        self.packed_sums: dict[int, tuple[int, ...]] = {}  # sum along the row -> its pieces
        self.ahead: frozenset[int] = frozenset()  # results of the function of `codegen/ahead.py`
        self.likeness: dict[tuple[int, ...], bool] = {}

    # -- statements --------------------------------------------------------------------------------

    def add(self, statement: Statement) -> None:
        self.body.append(statement)

    def let(self, base: str, value: Value, node: int | None = None) -> Var:
        """Assign a value to a new variable and return the variable."""
        variable = Var(base)
        self.add(Assign((variable,), value, node))
        return variable

    def set(self, variable: Variable, value: Value) -> None:
        self.add(Assign((variable,), value))

    def define(self, name: Own, value: Operand) -> Name:
        self.set(own(name), lift(value))
        return own(name)

    def do(self, value: Expression) -> None:
        self.add(Do(value))

    def once(self, key: tuple[str, int], name: str, value: Expression) -> Variable:
        """Return a variable of the open blocks; it is defined where they first need it."""
        if key not in self.named:
            self.named[key] = self.let(name, value)
        return self.named[key]

    @contextmanager
    def inside(self, block: For | If | None, lanes: int | None = None) -> Generator[None]:
        """Build the body of a block, or of a part of the open block; its variables end with it.

        lanes: the number of columns of its tiles, if it is not the schedule's.
        """
        before, env, named, tile = self.body, dict(self.env), dict(self.named), self.tile
        packs = dict(self.packs)
        if block is not None:
            self.add(block)
            self.body = block.body
        if lanes is not None:
            self.tile = replace(tile, lanes=lanes)
        yield
        self.body, self.env, self.named, self.tile, self.packs = before, env, named, tile, packs

    @contextmanager
    def one_row(self) -> Generator[None]:
        """Build as if the block had one row, where values of a row are scalars."""
        tile, self.tile = self.tile, replace(self.tile, flat=True)
        yield
        self.tile = tile

    def set_last_pass(self, last: bool) -> None:
        self.tile = replace(self.tile, last_pass=last)

    def loop(self, name: Own, start: Operand, end: Operand, step: int) -> For:
        """Return a loop with the kernel's number of stages."""
        stages = self.s.num_stages if self.s.num_stages > 1 else None
        return For(own(name), Range(lift(start), lift(end), step, stages))

    # -- values ------------------------------------------------------------------------------------

    def variable(self, number: int) -> Variable:
        """Return the variable of a node that is built; a constant is built now."""
        node = self.loops.nodes[number]
        if number not in self.env and isinstance(node, Constant):
            self.env[number] = self.let("constant", self.full(node.value, node.dtype), number)
        return self.env[number]

    def need(self, numbers: Iterable[int]) -> list[int]:
        """Return, in order, the nodes among these and their operands that no open block holds yet."""
        needed: set[int] = set()
        stack = list(numbers)
        while stack:
            number = stack.pop()
            if number not in needed and number not in self.env:
                needed.add(number)
                stack.extend(self.operands(number))
        return sorted(needed)

    def operands(self, number: int) -> tuple[int, ...]:
        """Return the nodes that a node reads: for the sums of a contraction, the matrix and all vectors.

        There are none if the node is a piece of a tile that exists, or a replicated reduction.
        """
        contraction = self.contracted.get(number)
        sums = self.packed_sums.get(number) if contraction is None else contraction.sums
        if sums in self.packs or number in self.ahead:
            return ()
        if contraction is not None:
            return (contraction.matrix, *contraction.vectors)
        if (floats := floats_of(self.loops, number)) is not None:
            return floats.operands()
        return operands_of(self.loops.nodes[number])

    def reduction(self, number: int) -> Reduce:
        reduce = self.loops.nodes[number]
        assert isinstance(reduce, Reduce)
        return reduce

    def called(self, buffer: str) -> str:
        """Return the beginning of the names of values that are loaded from a buffer."""
        return self.pointers[buffer].base.removesuffix("_ptr")

    def full(self, value: object, dtype: torch.dtype) -> Expression:
        """Return a tile of one element, which broadcasts to any other."""
        return tl.full([] if self.tile.flat else [1, 1], cast(Operand, value), dtype)

    def lanes(self, count: int) -> Expression:
        """Return the numbers from zero to `count`, along the columns of a tile."""
        return tl.arange(0, count) if self.tile.flat else tl.arange(0, count)[None, :]

    def shape(self, groups: frozenset[str]) -> Items:
        rows = self.s.block_rows if ROWS in groups else 1
        cols = self.tile.lanes if COLS in groups else 1
        sizes = ([cols] if COLS in groups else []) if self.tile.flat else [rows, cols]
        return Items(tuple(map(Literal, sizes)))

    # -- indices -----------------------------------------------------------------------------------

    def axis(self, number: int) -> Variable:
        """Return the variable of one axis, computed from its group's element number on first use."""
        axis = self.loops.axes[number]
        base = BASES[axis.group]
        axes = self.a.axes[axis.group]
        if len(axes) == 1:
            return base
        key = (axis.group, number)
        if key not in self.named:
            self.named[key] = Name(axis.name)
            self.set(self.named[key], decompose(axes, number - self.a.first[axis.group], base))
        return self.named[key]

    def index(self, index: Index, axis: Callable[[int], Expression] | None = None) -> Expression:
        """Return an element index. axis: returns the value of one axis, if that is not `self.axis`."""
        merged, merged_axes = self.a.merged(index)
        of = axis or self.axis
        return index_of(merged, lambda k: BASES[merged_axes[k]] if k in merged_axes else of(k), self.place)

    def address(self, buffer: str, index: Index) -> Expression:
        return plus(self.pointers[buffer], self.index(index))

    def place(self, number: int) -> Expression:
        """Return a value that is used as an index, in 64 bits: its product with a stride may exceed 32."""
        return convert(self.variable(number), self.loops.nodes[number].dtype, torch.int64)

    def index_groups(self, index: Index) -> frozenset[str]:
        """Return the groups of axes over which an index varies within a tile."""
        groups: set[str] = set()
        for key, _ in index.terms:
            groups |= {self.loops.axes[key].group} if key >= 0 else self.a.groups[~key]
        return frozenset(groups)

    def mask(self, groups: frozenset[str], within: int | None) -> Expression | None:
        """Return the mask of the lanes of an access that exist, or None if all do."""
        masks = ((ROWS, self.tile.row_mask), (COLS, self.tile.col_mask))
        parts: list[Expression | None] = [mask for group, mask in masks if group in groups]
        if within is not None:
            parts.append(self.variable(within))
        return every(*parts)

    def by_one(self, groups: frozenset[str], mask: Expression | None) -> Expression | None:
        """Return the mask with which one of several programs that hold the same value stores it."""
        if COLS in groups or self.s.splits == 1:
            return mask
        return every(mask, own("part").eq(0))

    def loaded(self, load: Load, pointer: Expression, mask: Expression | None) -> Expression:
        """Return a load from some addresses, in the dtype of the buffer."""
        dtype = self.dtypes[load.buffer]
        zero = 0.0 if dtype.is_floating_point and dtype.itemsize == 1 else 0  # no integer becomes a float8
        full_size = self.index_groups(load.index) | self.within_groups(load.within) == frozenset({ROWS, COLS})
        evict: dict[str, Expression] = {}
        if self.s.cols is Cols.LOOP and full_size:
            evict["eviction_policy"] = Literal("evict_first" if self.tile.last_pass else "evict_last")
        return self.load_from(pointer, mask, zero, evict)

    def load_from(
        self,
        pointer: Expression,
        mask: Expression | None,
        zero: float = 0,
        options: Mapping[str, Expression] = NO_OPTIONS,
    ) -> Expression:
        masked: dict[str, Operand] = {} if mask is None else {"mask": mask, "other": zero}
        return tl.load(pointer, **masked, **self.load_options, **options)

    def within_groups(self, within: int | None) -> frozenset[str]:
        return frozenset() if within is None else self.a.groups[within]

    # -- folds -------------------------------------------------------------------------------------

    @property
    def col_axis(self) -> int:
        """Return the dimension of a tile that lies along its columns."""
        return 0 if self.tile.flat else 1

    def along(self, function: Callable[..., Expression], value: Expression) -> Expression:
        """Apply a reduction along the row; tiles of several rows keep the dimension."""
        return function(value, axis=0) if self.tile.flat else function(value, axis=1, keep_dims=True)

    def fold_cols(self, reduce: Reduce, tile: Expression) -> Expression:
        return fold(reduce, tile, self.col_axis, keep=not self.tile.flat)

    def folded(
        self, number: int, tile: Expression, axis: int, keep: bool, join_key: object = None
    ) -> Combine:
        """Return the reduction of a tile of a node's elements along an axis."""
        plain = number in self.a.nan_safe_max
        return Combine(self.reduction(number), (tile,), axis, keep, plain, join_key)

    def folded_along(self, number: int, tile: Expression, join_key: object = None) -> Combine:
        """Return the reduction of a tile along the row; tiles of several rows keep the dimension."""
        return self.folded(number, tile, self.col_axis, not self.tile.flat, join_key)

    def base_of(self, number: int) -> str:
        """Return the beginning of the name of a reduction."""
        return f"{'row' if COLS in self.a.over(number) else 'col'}_{self.reduction(number).combine}"

    # -- stores and accumulators -----------------------------------------------------------------------

    def stores_of(self, stage: str) -> tuple[Store, ...]:
        """Return the stores of a stage.

        "main": stores that wait for no reduction over rows or segments. "finish": those that wait for one
        over rows.
        """
        if stage == "finish":
            return tuple(s for s in self.loops.stores if s.value in self.a.after_rows)
        return tuple(s for s in self.loops.stores if s.value not in self.a.finish)

    def accumulated(self) -> list[int]:
        """Return what reductions over rows or segments accumulate: operands, or matrices of contractions."""
        numbers = (*self.a.across_rows, *self.a.segmented)
        matrices = {self.contracted[i].matrix for i in numbers if i in self.contracted}
        others = (i for i in numbers if i not in self.contracted)
        return [*sorted(matrices), *(o for i in others for o in self.operands(i))]
