"""Print a tile program as one Triton kernel under a schedule.

    rows      := one block of rows a program, or a loop over blocks by a fixed number of programs
    cols      := the whole row in the tile, a grid over column blocks, or a loop over them; the last by
                 one program, or, as the first, by several that share the row

With one row a block, tiles are vectors over the columns and row values are scalars; with several,
tiles are [rows, cols]. Looped columns take one pass over the row for each level of reductions that
feed each other; row values live between the passes. Reductions over rows accumulate in the tile
and end in one partial result a program.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from fusion_compiler.codegen import misaligned_tiles, moments
from fusion_compiler.codegen.expression import (
    TRITON_TYPES,
    compute_text,
    convert,
    convert_literal,
    decompose,
    dim_text,
    index_text,
    literal,
    scalar_text,
)
from fusion_compiler.codegen.names import RESERVED, Own
from fusion_compiler.codegen.pairs import load_with_neighbour, pairs_last, store_all
from fusion_compiler.ir.dims import Dim, product, quotient
from fusion_compiler.ir.loops import (
    COLS,
    ROWS,
    Axis,
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
    Value,
    operands_of,
    right_neighbours,
    store_operands,
)
from fusion_compiler.ir.ops import spec_of
from fusion_compiler.schedule.analysis import (
    Analysis,
    Cols,
    Schedule,
    accumulated_groups,
    accumulator_dtype,
    operand_of,
    rounding_of,
)

aten = torch.ops.aten
NEUTRAL = {"sum": 0, "prod": 1, "max": float("-inf"), "min": float("inf"), "any": False, "all": True}
BASES = {ROWS: "row", COLS: "col"}  # the variable with a group's element number


class Printer:
    """Prints nodes into lines; knows which variable holds which node in the scopes now open."""

    def __init__(
        self,
        analysis: Analysis,
        schedule: Schedule,
        pointers: dict[str, str],
        dtypes: dict[str, torch.dtype],
        taken: set[str],
        load_options: str = "",
        empty: frozenset[str] = frozenset(),
    ) -> None:
        self.a, self.s = analysis, schedule
        self.loops = analysis.loops
        self.pointers = pointers  # buffer -> parameter
        self.dtypes = dtypes  # of the buffers
        self.load_options = load_options
        self.empty = empty  # buffers without an element, which have no address to load from
        self.rough = analysis.rough(dtypes)
        self.means = {mean for _, mean in analysis.moments.values()}
        self.lines: list[str] = []
        self.depth = 1
        self.outermost: int | None = None  # the line of the header of the outermost loop that is open
        self.checks: list[str] = []  # of indices, for the end
        self.env: dict[int, str] = {}
        self.kept: dict[int, str] = {}  # tiles as they were loaded
        self.pending: dict[int, str] = {}  # sums over rows that the block at hand is not yet added to
        self.index_env: dict[tuple[str, int], str] = {}
        self.taken = taken | RESERVED | {axis.name for axis in self.loops.axes}
        self.flat = schedule.block_rows == 1  # tiles are vectors
        self.row_mask: str | None = None
        self.col_mask: str | None = None
        beyond = 2 * schedule.block_cols  # the last block counts on, by twos where it is of pairs
        self.wide = analysis.furthest < 0 or analysis.furthest + beyond >= 2**31
        self.last_pass = True
        self.program = "tl.program_id(0)"
        self.col_start: str | None = None  # where the block of columns begins

    # -- text ------------------------------------------------------------------------------------

    def line(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)

    def define(self, name: Own, text: str) -> None:
        self.line(f"{name} = {text}")

    def each(self, name: Own, values: str) -> str:
        """The header of a loop."""
        return f"for {name} in {values}:"

    @contextmanager
    def scope(self, header: str | None, cols: int | None = None) -> Generator[None]:
        """A block whose variables end with it; without a header it is not indented.

        cols: how many columns its tiles have, where that is not the schedule's number.
        """
        outermost = self.outermost
        if header is not None:
            self.outermost = len(self.lines) if outermost is None else outermost
            self.line(header)
        env, index_env, masks = dict(self.env), dict(self.index_env), (self.row_mask, self.col_mask)
        schedule = self.s
        if cols is not None:
            self.s = replace(schedule, block_cols=cols)
        self.depth += header is not None
        yield
        self.s = schedule
        self.depth -= header is not None
        self.outermost = None if outermost is None else self.outermost
        self.env, self.index_env = env, index_env
        self.row_mask, self.col_mask = masks

    @contextmanager
    def one_row(self) -> Generator[None]:
        """As if the block had one row: values of a row are numbers."""
        flat, self.flat = self.flat, True
        yield
        self.flat = flat

    def fresh(self, base: str) -> str:
        name, i = base, 0
        while name in self.taken:
            i += 1
            name = f"{base}_{i}"
        self.taken.add(name)
        return name

    # -- where a tile is ---------------------------------------------------------------------------

    def rows_at(self, start: str) -> None:
        """Define `row` for the block that starts at row `start`."""
        size = self.a.size(ROWS)
        if self.flat:
            if start != "row":
                self.define("row", start)
            if self.s.skewed:
                misaligned_tiles.row_begins(self)
            return
        if self.s.splits > 1 and start != "first_row":  # which the exchange asks for
            self.define("first_row", start)
            start = "first_row"
        rows, apart = self.s.block_rows, self.s.rows_apart
        self.define("row", f"{start} + tl.arange(0, {rows})[:, None]{f' * {apart}' if apart > 1 else ''}")
        if size == 0 or quotient(size, rows * apart) is None:
            self.define("row_inside", f"row < {dim_text(size)}")
            self.row_mask = "row_inside"
        if self.s.skewed:
            misaligned_tiles.row_begins(self)

    def cols_at(self, start: str | None, inside: bool = False) -> None:
        """Define `col` for the block of columns that starts at `start` (None: the only one).

        inside: the whole block is known to lie within the row.
        """
        self.col_start = start
        lanes = f"tl.arange(0, {self.s.block_cols})" + ("" if self.flat else "[None, :]")
        if self.s.skewed:
            misaligned_tiles.cols_at(self, start, lanes, inside)
            return
        lanes = lanes if start is None else f"{start} + {lanes}"
        self.define("col", lanes)
        size = self.a.size(COLS)
        covered = self.s.block_cols * (self.s.splits if self.s.cols is Cols.WHOLE else 1)
        if not inside and (size == 0 or quotient(size, covered) is None):
            self.define("col_inside", f"col < {dim_text(size)}")
            self.col_mask = "col_inside"

    def axis(self, number: int) -> str:
        """The variable of one axis, taken out of its group's element number on first use."""
        axis = self.loops.axes[number]
        base = BASES[axis.group]
        axes = self.a.axes[axis.group]
        if len(axes) == 1:
            return base
        key = (axis.group, number)
        if key not in self.index_env:
            self.line(f"{axis.name} = {decompose(axes, number - self.a.first[axis.group], base)}")
            self.index_env[key] = axis.name
        return self.index_env[key]

    def index(self, index: Index) -> str:
        """Element index as text."""
        merged, whole = self.a.merged(index)
        return index_text(merged, lambda k: BASES[whole[k]] if k in whole else self.axis(k), self.place)

    def place(self, number: int) -> str:
        """A value that says where to read: times a stride it may leave 32 bits."""
        return convert(self.variable(number), self.loops.nodes[number].dtype, torch.int64)

    def mask(
        self, groups: frozenset[str], within: int | None, value_groups: frozenset[str] = frozenset()
    ) -> str | None:
        """Which lanes of an access exist."""
        parts = [
            m for g, m in ((ROWS, self.row_mask), (COLS, self.col_mask)) if m and g in groups | value_groups
        ]
        if within is not None:
            parts.append(self.variable(within))
        return " & ".join(parts) or None

    def once(self, groups: frozenset[str], mask: str | None) -> str | None:
        """Where a value belongs to the row, one of the programs that share the row stores it."""
        if self.s.splits == 1 or COLS in groups:
            return mask
        return f"{mask} & (part == 0)" if mask else "part == 0"

    # -- nodes -------------------------------------------------------------------------------------

    def variable(self, number: int) -> str:
        if number not in self.env:
            self.node(number)
        return self.env[number]

    def need(self, numbers: Iterable[int]) -> list[int]:
        """Those nodes and all that they read, in order, that no open scope holds yet."""
        found: set[int] = set()
        stack = list(numbers)
        while stack:
            number = stack.pop()
            if number not in found and number not in self.env:
                found.add(number)
                stack.extend(operands_of(self.loops.nodes[number]))
        return sorted(found)

    def operand(self, number: int) -> tuple[str | None, object, torch.dtype]:
        node = self.loops.nodes[number]
        if isinstance(node, Constant):
            return None, node.value, node.dtype
        return self.variable(number), None, node.dtype

    def node(self, number: int) -> None:
        """Print one node; its operands print themselves where they are missing."""
        node = self.loops.nodes[number]
        if isinstance(node, Load) and load_with_neighbour(self, number):
            return
        match node:
            case Load():
                text, base = self.load(number, node), self.pointers[node.buffer].removesuffix("_ptr")
                if self.can_be_kept(number):
                    self.kept[number] = loaded = self.fresh(f"{base}_loaded")
                    self.line(f"{loaded} = {text}")
                    text = convert(loaded, self.dtypes[node.buffer], node.dtype)
            case Coordinate() if not node.index.terms:  # a size: no tile whose type could be changed
                text, base = self.full(dim_text(node.index.const), node.dtype), "position"
            case Coordinate():
                text, base = f"({self.index(node.index)}).to({TRITON_TYPES[node.dtype]})", "position"
            case Constant():
                text, base = self.full(literal(node.value), node.dtype), "constant"
            case InRange():
                index = self.index(node.index)
                text, base = (
                    f"({index} >= {dim_text(node.low)}) & ({index} < {dim_text(node.high)})",
                    "inside",
                )
            case Random():
                text, base = self.random(node), "word" if node.dtype is torch.uint32 else "uniform"
            case Checked():
                self.check(node)
                text, base = self.variable(node.operand), "same"
                if self.a.groups[node.operand] != self.a.groups[number]:  # of a table of one element
                    text = f"tl.broadcast_to({text}, {self.shape(self.a.groups[number])})"
            case Compute():
                text, base = self.compute(number, node), self.base_name(node)
            case Reduce():
                self.reduce(number)
                return
        if text.isidentifier():  # a cast within the compute dtype, an operand that passes through
            self.env[number] = text
            return
        self.env[number] = name = self.fresh(base)
        self.line(f"{name} = {text}")

    def check(self, node: Checked) -> None:
        """Note an index that must not lie outside. The program ends in an error when all else is done, so
        that nothing waits for it; what is wrong in a loop is kept until then."""
        index, groups = self.variable(node.position), self.a.groups[node.position]
        mask = self.mask(groups, node.within)
        bounds = f"{dim_text(node.low)}, {dim_text(node.high)}"
        if self.outermost is not None:
            more = frozenset[str]() if node.within is None else self.a.groups[node.within]
            seen, index = index if mask is None else f"tl.where({mask}, {index}, 0)", self.fresh("wrong")
            dtype = TRITON_TYPES[self.loops.nodes[node.position].dtype]
            start = f"    {index} = tl.full({self.shape(groups | more)}, 0, {dtype})"
            self.lines.insert(self.outermost, start)
            self.outermost += 1
            self.line(f"{index} = fm.last_wrong({index}, {seen}, {bounds})")
            mask = None
        self.checks.append(f'fm.check_index({index}, {bounds}, "{node.what}"{f", {mask}" if mask else ""})')

    def print_checks(self) -> None:
        """Print what ends the program in an error; each check once."""
        for text in dict.fromkeys(self.checks):
            self.line(text)

    def full(self, value: str, dtype: torch.dtype) -> str:
        """A tile of one element that broadcasts to any other."""
        return f"tl.full({'[]' if self.flat else '[1, 1]'}, {value}, {TRITON_TYPES[dtype]})"

    def base_name(self, node: Compute) -> str:
        if dict(node.operands).get("rounding"):
            return "rounded"
        return str(node.target._opname).lstrip("_")

    def compute(self, number: int, node: Compute) -> str:
        refs = [a.node for _, a in node.operands if isinstance(a, Value)]
        numbers = sum(isinstance(self.loops.nodes[n], Constant) for n in refs)
        if numbers == len(refs) or (numbers > 1 and node.target is not aten.where.self):
            for n in refs:  # two numbers have no type in Triton's functions
                self.variable(n)
            return compute_text(node, lambda n: (self.variable(n), None, self.loops.nodes[n].dtype))
        rough = number in self.rough and number not in self.means
        if rough and node.target is aten.div.Tensor:
            divisor = operand_of(node, "other")
            dividend = operand_of(node, "self")
            if divisor is not None and dividend is not None and self.is_narrower(divisor, number):
                return f"{self.operand_text(dividend)} * {self.reciprocal(divisor)}"
        return compute_text(node, self.operand, rough)

    def is_narrower(self, operand: int, number: int) -> bool:
        """Whether a value serves a whole row or column of a result."""
        variable = not isinstance(self.loops.nodes[operand], Constant)
        return variable and self.a.groups[operand] < self.a.groups[number]

    def operand_text(self, number: int) -> str:
        node = self.loops.nodes[number]
        if isinstance(node, Constant):
            return scalar_text(convert_literal(node.value, torch.float32), torch.float32)
        return convert(self.variable(number), node.dtype, torch.float32)

    def reciprocal(self, number: int) -> str:
        """1 / a row's value, once a row."""
        if ~number not in self.env:
            value = self.operand_text(number)
            self.env[~number] = name = self.fresh(f"per_{self.variable(number)}")
            self.line(f"{name} = 1.0 / {value}")
        return self.env[~number]

    def load(self, number: int, node: Load) -> str:
        groups = self.a.groups[number]
        if node.buffer in self.empty:  # nothing is made of it but what an empty reduction gives
            return f"tl.full({self.shape(groups)}, 0, {TRITON_TYPES[node.dtype]})"
        if self.same_in_block(node):
            return f"tl.broadcast_to({self.loaded_once(number, node)}, {self.shape(groups)})"
        pointer = f"{self.pointers[node.buffer]} + {self.index(node.index)}"
        if not node.index.terms and node.index.const == 0:
            pointer = self.pointers[node.buffer]
        own = self.index_groups(node.index)
        if node.within is not None and (
            more := self.a.groups[node.within] - own
        ):  # a block needs a mask's shape
            pointer += f" + tl.zeros({self.shape(own | more)}, tl.int32)"
        mask = self.mask(own, node.within)
        if misaligned_tiles.is_behind(self, node):
            return convert(misaligned_tiles.load_behind(self, node), self.dtypes[node.buffer], node.dtype)
        if misaligned_tiles.in_words(self, node.index, node.within):
            pointer = misaligned_tiles.address(self, node.buffer, node.index)
            mask = misaligned_tiles.mask(self, "in_words")
        text = self.loaded(node, pointer, mask, groups)
        return text if self.can_be_kept(number) else convert(text, self.dtypes[node.buffer], node.dtype)

    def loaded(self, node: Load, pointer: str, mask: str | None, groups: frozenset[str]) -> str:
        """A load from some addresses, in the dtype of the buffer."""
        held = self.dtypes[node.buffer]
        zero = "0.0" if held.is_floating_point and held.itemsize == 1 else "0"  # no integer becomes a float8
        options = (f", mask={mask}, other={zero}" if mask else "") + self.load_options
        if self.s.cols is Cols.LOOP and groups == frozenset({ROWS, COLS}):
            options += f', eviction_policy="{"evict_first" if self.last_pass else "evict_last"}"'
        return f"tl.load({pointer}{options})"

    def can_be_kept(self, number: int) -> bool:
        """Whether a tile stays in registers as it was loaded, while programs wait for each other.

        What is computed from it is computed again after that, for which more programs have room.
        """
        node = self.loops.nodes[number]
        if self.s.splits == 1 or self.s.cols is Cols.LOOP or not isinstance(node, Load):
            return False
        held = self.dtypes[node.buffer]
        whole = self.a.groups[number] == frozenset({ROWS, COLS})
        return (
            whole and held in (torch.float16, torch.bfloat16, torch.float32) and node.buffer not in self.empty
        )

    def forget(self, wanted: Iterable[int]) -> None:
        """Before `wanted` is printed: tiles are computed again from what was loaded, but for those which it
        reads that took special functions."""
        read = {o for n in self.need(wanted) for o in operands_of(self.loops.nodes[n])}
        for number in sorted(self.env):
            node = self.loops.nodes[number] if number >= 0 else None
            if number in self.kept:
                assert isinstance(node, Load)
                loaded = f"fm.again({self.kept[number]})"
                self.env[number] = name = self.fresh(self.env[number])
                self.line(f"{name} = {convert(loaded, self.dtypes[node.buffer], node.dtype)}")
            elif isinstance(node, Compute) and self.a.groups[number] == frozenset({ROWS, COLS}):
                if number not in read or not self.takes_long(number):
                    del self.env[number]

    def takes_long(self, number: int) -> bool:
        """Whether a tile takes special functions to compute from what was loaded."""
        node = self.loops.nodes[number]
        if not isinstance(node, Compute) or self.a.groups[number] != frozenset({ROWS, COLS}):
            return False
        spec = spec_of(node.target)
        return spec is None or spec.special > 0 or any(self.takes_long(o) for o in operands_of(node))

    def same_in_block(self, node: Load) -> bool:
        """Whether a load moves with outer columns alone, of which all lanes of the block have the same."""
        axes, first = self.a.axes[COLS], self.a.first[COLS]
        cols = [key for key, _ in node.index.terms if key >= first]
        inner = product(a.size for a in axes[max(cols, default=first) - first + 1 :])
        alone = node.within is None and not self.s.skewed and self.col_start is not None
        direct = all(key >= 0 for key, _ in node.index.terms)
        return bool(cols) and alone and direct and quotient(inner, self.s.block_cols) is not None

    def loaded_once(self, number: int, node: Load) -> str:
        """The variable of the one element that each row of the block has: for each lane it were a load."""
        key, held = ("once", number), self.dtypes[node.buffer]
        if key in self.index_env:
            return self.index_env[key]
        pointer = f"{self.pointers[node.buffer]} + {index_text(node.index, self.block_axis, self.variable)}"
        masks = [self.row_mask] if self.row_mask and ROWS in self.a.groups[number] else []
        masks += [f"({self.col_start} < {dim_text(self.a.size(COLS))})"] if self.col_mask else []
        options = (f", mask={' & '.join(masks)}, other=0" if masks else "") + self.load_options
        self.index_env[key] = name = self.fresh(f"block_{self.pointers[node.buffer].removesuffix('_ptr')}")
        self.line(f"{name} = {convert(f'tl.load({pointer}{options})', held, node.dtype)}")
        return name

    def block_axis(self, number: int) -> str:
        """The variable of an axis, for outer columns that of the block's first lane."""
        axes, first = self.a.axes[COLS], self.a.first[COLS]
        if number < first:
            return self.axis(number)
        key = ("block", number)
        if key not in self.index_env:
            self.index_env[key] = name = self.fresh(f"block_{self.loops.axes[number].name}")
            self.line(f"{name} = {decompose(axes, number - first, self.col_start or '0')}")
        return self.index_env[key]

    def index_groups(self, index: Index) -> frozenset[str]:
        groups: set[str] = set()
        for key, _ in index.terms:
            groups |= {self.loops.axes[key].group} if key >= 0 else self.a.groups[~key]
        return frozenset(groups)

    def random(self, node: Random) -> str:
        """Four numbers a Philox call where four neighbours lie along the columns."""
        function = "fm.words" if node.dtype is torch.uint32 else "fm.uniform"
        seed = self.variable(node.seed)
        merged, whole = self.a.merged(node.index)
        cols = range(self.a.first[COLS], len(self.loops.axes))
        along = [(k, c) for k, c in merged.terms if k in cols]
        others = tuple((k, quotient(c, 4)) for k, c in node.index.terms if k not in cols)
        first = quotient(node.index.const, 4)
        by_col = along == [(cols[-1], 1)] and (len(cols) == 1 or cols[-1] in whole) if cols else False
        if by_col and first is not None and self.s.block_cols >= 4 and all(c is not None for _, c in others):
            rest = Index(first, tuple((k, c) for k, c in others if c is not None))
            start = self.col_start
            quarter = f"tl.arange(0, {self.s.block_cols // 4})" + ("" if self.flat else "[None, :]")
            column = quarter if start is None else f"({start}) // 4 + {quarter}"
            base = "" if rest == Index(0, ()) else f"{self.index(rest)} + "
            return f"{function}_block({seed}, {base}{column}, {dim_text(node.salt)})"
        index = self.index(node.index)
        if not node.index.terms:
            index = self.full(index, torch.int32)
        return f"{function}({seed}, {index}, {dim_text(node.salt)})"

    def tile(self, number: int, over: frozenset[str]) -> str:
        """A reduction's operand as a full tile in the reduced groups, neutral where no element is."""
        reduce = self.loops.nodes[number]
        assert isinstance(reduce, Reduce)
        return self.tile_of(reduce, over)

    def tile_of(self, reduce: Reduce, over: frozenset[str]) -> str:
        """`tile` of a reduction that is no node."""
        have = self.loops.nodes[reduce.operand].dtype
        if isinstance(self.loops.nodes[reduce.operand], Constant):
            self.variable(reduce.operand)
        value = self.variable(reduce.operand)
        if reduce.combine in ("any", "all"):  # zero or one: a half is true, and so is what wraps to zero
            text = f"{convert(value, have, torch.bool)}.to(tl.int32)"
        else:
            text = convert(value, have, reduce.dtype)
        missing = over - self.a.groups[reduce.operand]
        if missing or (self.flat and isinstance(self.loops.nodes[reduce.operand], Constant)):
            text = f"tl.broadcast_to({text}, {self.shape(self.a.groups[reduce.operand] | over)})"
        zero = reduce.combine == "sum" and reduce.operand in self.a.zero_in_missing_rows
        mask = self.mask(over & frozenset({COLS} if zero else {ROWS, COLS}), None)
        return text if mask is None else f"tl.where({mask}, {text}, {self.neutral(reduce)})"

    def shape(self, groups: frozenset[str]) -> str:
        rows = self.s.block_rows if ROWS in groups else 1
        cols = self.s.block_cols if COLS in groups else 1
        if self.flat:
            return f"[{cols}]" if COLS in groups else "[]"
        return f"[{rows}, {cols}]"

    def neutral(self, reduce: Reduce) -> str:
        if reduce.combine in ("any", "all"):
            return str(int(bool(NEUTRAL[reduce.combine])))
        if not reduce.dtype.is_floating_point and reduce.combine in ("max", "min"):
            info = torch.iinfo(torch.int32 if reduce.dtype is torch.bool else reduce.dtype)
            return str(info.min if reduce.combine == "max" else info.max)
        return literal(
            float(NEUTRAL[reduce.combine]) if reduce.dtype.is_floating_point else NEUTRAL[reduce.combine]
        )

    def reduce(self, number: int) -> None:
        """A reduction over the columns of a tile that holds whole rows."""
        made_of = self.a.moments.get(number)
        if made_of and not moments.is_exact(self, made_of[0], self.a.size(COLS)):
            moments.print_squares(self, number)
            return
        together = [number, *self.sum_beside(number)]
        tiles = [self.tile(n, frozenset({COLS})) for n in together]
        names = [self.fresh(self.base_of(n)) for n in together]
        self.fold_along(together, names, tiles)
        self.env.update(zip(together, names, strict=True))

    def sum_beside(self, number: int) -> list[int]:
        """Another sum along the row that what this one waits for completes as well, if both are sums."""
        if number not in self.a.sums_along:
            return []
        own = (self.a.level[number], self.a.groups[number])
        others = (n for n in self.a.sums_along if n != number and n not in self.env)
        return [n for n in others if (self.a.level[n], self.a.groups[n]) == own][:1]

    def fold_along(self, numbers: Sequence[int], names: Sequence[str], tiles: Sequence[str]) -> None:
        """`print_folds` along the row; tiles of several rows keep the dimension."""
        self.print_folds(numbers, names, tiles, "0" if self.flat else "1", keep=not self.flat)

    def print_folds(
        self, numbers: Sequence[int], names: Sequence[str], tiles: Sequence[str], axis: str, keep: bool
    ) -> None:
        """One reduction of a tile along an axis, or two sums, for which threads wait for each other once."""
        if len(numbers) == 2:
            self.line(f"{', '.join(names)} = fm.sums({', '.join(tiles)}, {axis}, {keep})")
            return
        node = self.loops.nodes[numbers[0]]
        assert isinstance(node, Reduce)
        plain = numbers[0] in self.a.nan_safe_max
        self.line(f"{names[0]} = {self.fold(node, tiles[0], axis, keep, plain)}")

    def fold(self, node: Reduce, text: str, axis: str, keep: bool, plain: bool = False) -> str:
        """The tile reduced along one dimension."""
        kept = ", keep_dims=True" if keep else ""
        match node.combine:
            case "sum":
                return f"tl.sum({text}, axis={axis}{kept})"
            case "any":
                return f"tl.max({text}, axis={axis}{kept}) != 0"
            case "all":
                return f"tl.min({text}, axis={axis}{kept}) != 0"
            case "prod":
                return f"tl.reduce({text}, {axis}, fm.multiply{kept})"
            case _ if plain or not node.dtype.is_floating_point:
                return f"tl.{node.combine}({text}, axis={axis}{kept})"
            case _:
                return f"fm.{node.combine}imum_of({text}, {axis}, {keep})"

    # -- regions ------------------------------------------------------------------------------------

    def stores_of(self, stage: str) -> tuple[Store, ...]:
        if stage == "finish":
            return tuple(s for s in self.loops.stores if s.value in self.a.after_rows)
        return tuple(s for s in self.loops.stores if s.value not in self.a.finish)

    def store(self, store: Store) -> None:
        if isinstance(self.loops.nodes[store.value], Constant):
            self.variable(store.value)
        value = self.variable(store.value)
        if misaligned_tiles.in_words(self, store.index, store.within):
            misaligned_tiles.store(self, store.buffer, store.index, value)
            return
        groups = self.index_groups(store.index)
        mask = self.once(groups, self.mask(groups, store.within))
        target = f"{self.pointers[store.buffer]} + {self.index(store.index)}"
        if not groups and not self.flat:  # one element from a [1, 1] tile
            target = f"{target} + tl.zeros([1, 1], tl.int32)"
        self.line(f"tl.store({target}, {value}{f', mask={mask}' if mask else ''})")

    def print_nodes(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if number not in self.env and not isinstance(self.loops.nodes[number], Constant):
                self.node(number)

    def print_row_values(self, numbers: Iterable[int]) -> None:
        """What belongs to the row and waits for no reduction along it: loaded while the row itself is, since
        the compiler moves no load over a reduction.

        A loop that copies loads ahead would wait for the row values' copy before it begins to load the row.
        """
        if self.s.num_stages == 1:
            wanted = self.need(numbers)
            self.print_nodes(i for i in wanted if COLS not in self.a.groups[i] and not self.a.level[i])

    def whole_block(self) -> None:
        """Everything for one block of rows that lies in the tile entirely, stores included."""
        stores = self.stores_of("main")
        roots = [o for s in stores for o in store_operands(s)]
        self.print_row_values([*roots, *self.accumulated()])
        # A value that is used on as stored, rounded, is stored there: it is held once then and not twice.
        in_pairs = self.s.skewed or right_neighbours(self.loops.axes, enumerate(stores))
        early = set[int]() if in_pairs else {s.value for s in stores}
        done: set[int] = set()
        for number in pairs_last(self, self.need([*roots, *self.accumulated()])):
            self.print_nodes([number])
            node = self.loops.nodes[number]
            if rounding_of(node) is not None:
                for value in early.intersection(operands_of(node)) - done:
                    done.add(value)
                    store_all(self, [s for s in stores if s.value == value])
        store_all(self, [s for s in stores if s.value not in done])

    def accumulated(self) -> list[int]:
        """Operands of the reductions over rows, whole or by segments."""
        numbers = (*self.a.across_rows, *self.a.segmented)
        return [o for i in numbers for o in operands_of(self.loops.nodes[i])]

    def along(self, function: str, text: str) -> str:
        """A reduction along the row; tiles of several rows keep the dimension."""
        return f"{function}({text}, axis=0)" if self.flat else f"{function}({text}, axis=1, keep_dims=True)"

    def fold_cols(self, node: Reduce, text: str) -> str:
        return self.fold(node, text, "0" if self.flat else "1", keep=not self.flat)

    def stages(self) -> str:
        return f", num_stages={self.s.num_stages}" if self.s.num_stages > 1 else ""

    def base_of(self, number: int) -> str:
        node = self.loops.nodes[number]
        assert isinstance(node, Reduce)
        return f"{'row' if COLS in node.over else 'col'}_{node.combine}"

    def start_accumulator(self, number: int, groups: frozenset[str]) -> str:
        """The variable in which a reduction is accumulated over a tile of these groups."""
        node = self.loops.nodes[number]
        assert isinstance(node, Reduce)
        name = self.fresh(self.base_of(number))
        shape, dtype = self.shape(groups), TRITON_TYPES[accumulator_dtype(node)]
        self.line(f"{name} = tl.full({shape}, {self.neutral(node)}, {dtype})")
        return name

    def block_of_rows(self, number: int) -> str:
        """What a block adds to a sum over rows: its tile, or the sum of it where the rows have no lanes."""
        node = self.loops.nodes[number]
        assert isinstance(node, Reduce)
        text = self.tile(number, node.over)
        if self.flat or ROWS in accumulated_groups(self.a, self.s, number):
            return text
        text = self.fold(node, text, "0", keep=True)
        return f"({text}).to(tl.int32)" if node.combine in ("any", "all") else text

    def accumulate(self, number: int, name: str, text: str) -> None:
        """Print what adds `text` to a reduction's state: tiles, or what they were folded to."""
        node = self.loops.nodes[number]
        assert isinstance(node, Reduce)
        match node.combine:
            case "sum":
                self.line(f"{name} += {text}")
            case "prod":
                self.line(f"{name} *= {text}")
            case "any":
                self.line(f"{name} |= {text}")
            case "all":
                self.line(f"{name} &= {text}")
            case _:
                nan = ", propagate_nan=tl.PropagateNan.ALL" if node.dtype.is_floating_point else ""
                self.line(f"{name} = tl.{node.combine}imum({name}, {text}{nan})")

    # -- reductions over rows ----------------------------------------------------------------------

    def accumulate_rows(self, passes: int) -> None:
        """Add the block at hand to the sums over rows whose operands so many passes over it complete."""
        for number in [n for n in self.pending if self.a.level[n] <= passes]:
            self.accumulate(number, self.pending.pop(number), self.block_of_rows(number))

    def fold_rows(self, number: int, name: str) -> str:
        """An accumulator over row blocks, folded to this program's result: [1, cols], or one element."""
        node = self.loops.nodes[number]
        assert isinstance(node, Reduce)
        groups = self.a.groups[node.operand] | node.over
        text = name
        if self.flat:
            return self.fold(node, text, "0", keep=False) if COLS in node.over else text
        if COLS in node.over and COLS in groups:
            text = self.fold(node, text, "1", keep=True)
        return self.fold(node, text, "0", keep=True)


def axes_strides(axes: tuple[Axis, ...], first: int) -> tuple[tuple[int, Dim], ...]:
    """Terms of the row-major element number over consecutive axes that start at number `first`."""
    terms: list[tuple[int, Dim]] = []
    step: Dim = 1
    for i in range(len(axes) - 1, -1, -1):
        terms.append((first + i, step))
        step = product((step, axes[i].size))
    return tuple(sorted(terms))
