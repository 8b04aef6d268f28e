"""Print a tile program as one Triton kernel under a schedule.

    rows      := one block of rows a program, or a loop over blocks by a fixed number of programs
    cols      := the whole row in the tile, a grid over column blocks, or a loop over them

With one row a block, tiles are vectors over the columns and row values are scalars; with several,
tiles are [rows, cols]. Looped columns take one pass over the row for each level of reductions that
feed each other; row values live between the passes. Reductions over rows accumulate in the tile
and end in one partial result a program.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import torch

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
from fusion_compiler.dims import Dim, hint, product, quotient
from fusion_compiler.loops import (
    COLS,
    ROWS,
    Axis,
    Compute,
    Constant,
    Coordinate,
    Index,
    InRange,
    Load,
    LoopNest,
    Random,
    Reduce,
    Ref,
    Store,
    groups_of,
    operands_of,
    store_operands,
)

aten = torch.ops.aten
NEUTRAL = {"sum": 0, "prod": 1, "max": float("-inf"), "min": float("inf"), "any": False, "all": True}
RESERVED = frozenset(
    {"tl", "fm", "libdevice", "row", "col", "sum", "max", "min", "all", "any", "pow", "abs", "round"}
)


class Cols(StrEnum):
    WHOLE = "whole"
    GRID = "grid"
    LOOP = "loop"


@dataclass(frozen=True)
class Schedule:
    """How a tile program runs.

    block_rows, block_cols: tile extents, powers of two. cols: how the columns are covered.
    programs: number of programs that share the rows in a loop; None is one block a program.
    """

    block_rows: int
    block_cols: int
    cols: Cols
    programs: int | None = None
    num_warps: int = 4
    num_stages: int = 1

    def __str__(self) -> str:
        loop = f", {self.programs} programs" if self.programs else ""
        stages = f", {self.num_stages} stages" if self.num_stages > 1 else ""
        return f"{self.block_rows} x {self.block_cols} {self.cols}{loop}, {self.num_warps} warps{stages}"


class Analysis:
    """What the printer and the templates ask of a tile program."""

    def __init__(self, loops: LoopNest) -> None:
        self.loops = loops
        self.groups = groups_of(loops)
        self.axes = {g: tuple(a for a in loops.axes if a.group == g) for g in (ROWS, COLS)}
        self.first = {ROWS: 0, COLS: len(self.axes[ROWS])}  # axes are sorted: rows, then cols

    def size(self, group: str) -> Dim:
        return product(a.size for a in self.axes[group])

    @cached_property
    def contiguous(self) -> dict[str, int]:
        """How many full-size accesses are contiguous along the rows, and along the columns."""
        votes = {ROWS: 0, COLS: 0}
        indices = [n.index for n in self.loops.nodes if isinstance(n, Load)]
        for index in [*indices, *(s.index for s in self.loops.stores)]:
            groups = {self.loops.axes[k].group for k, _ in index.terms if k >= 0}
            for key, coeff in index.terms:
                if key >= 0 and coeff == 1 and groups == {ROWS, COLS}:
                    votes[self.loops.axes[key].group] += 1
        return votes

    @property
    def tall(self) -> bool:
        """Whether most full-size accesses are contiguous along the rows: a tile needs several of them."""
        return self.contiguous[ROWS] > self.contiguous[COLS]

    @property
    def mixed(self) -> bool:
        """Whether some full-size accesses are contiguous along the rows and some along the columns."""
        return self.contiguous[ROWS] > 0 and self.contiguous[COLS] > 0

    @cached_property
    def reductions(self) -> tuple[int, ...]:
        return tuple(i for i, n in enumerate(self.loops.nodes) if isinstance(n, Reduce))

    @cached_property
    def across_rows(self) -> tuple[int, ...]:
        """Reductions over the rows: complete only when every program is done."""
        return tuple(i for i in self.reductions if ROWS in self.over(i))

    def over(self, node: int) -> frozenset[str]:
        reduce = self.loops.nodes[node]
        assert isinstance(reduce, Reduce)
        return reduce.over

    @cached_property
    def finish(self) -> frozenset[int]:
        """Nodes that wait for a reduction over the rows."""
        late = set(self.across_rows)
        for i, node in enumerate(self.loops.nodes):
            if any(o in late for o in operands_of(node)):
                late.add(i)
        return frozenset(late)

    @cached_property
    def online(self) -> dict[int, int]:
        """sum(exp(x - max(x))): the sum's node -> the max's (Milakov and Gimelshein, 2018)."""
        nodes = self.loops.nodes
        pairs: dict[int, int] = {}
        for number in self.reductions:
            reduce = nodes[number]
            assert isinstance(reduce, Reduce)
            power = nodes[reduce.operand]
            if (
                reduce.combine != "sum"
                or not isinstance(power, Compute)
                or power.target is not aten.exp.default
            ):
                continue
            centred = _tensor(power, "self")
            minus = nodes[centred] if centred is not None else None
            if (
                not isinstance(minus, Compute)
                or minus.target is not aten.sub.Tensor
                or dict(minus.operands).get("alpha", 1) != 1
            ):
                continue
            value, top = _tensor(minus, "self"), _tensor(minus, "other")
            peak = nodes[top] if top is not None else None
            if (
                isinstance(peak, Reduce)
                and peak.combine == "max"
                and peak.operand == value
                and peak.over == reduce.over == frozenset({COLS})
            ):
                assert top is not None
                pairs[number] = top
        return pairs

    @cached_property
    def level(self) -> tuple[int, ...]:
        """How many passes over the columns a node needs behind it."""
        levels: list[int] = []
        for i, node in enumerate(self.loops.nodes):
            depth = max((levels[o] for o in operands_of(node)), default=0)
            if i in self.online:
                depth = levels[self.online[i]]
            elif isinstance(node, Reduce) and COLS in node.over:
                depth += 1
            levels.append(depth)
        return tuple(levels)

    @cached_property
    def nan_safe_max(self) -> frozenset[int]:
        """Maxima whose NaN reaches every store through the online sum anyway."""
        users = self._reach()
        safe: set[int] = set()
        for total, peak in self.online.items():
            stores = {s.buffer for s in self.loops.stores if s.value in users[peak]}
            if stores and all(s.value in users[total] for s in self.loops.stores if s.buffer in stores):
                safe.add(peak)
        return frozenset(safe)

    def _reach(self) -> list[set[int]]:
        reach: list[set[int]] = [{i} for i in range(len(self.loops.nodes))]
        for i in range(len(self.loops.nodes) - 1, -1, -1):
            for operand in operands_of(self.loops.nodes[i]):
                reach[operand] |= reach[i]
        return reach

    def rough(self, dtypes: Mapping[str, torch.dtype]) -> frozenset[int]:
        """float32 values of which nothing but 16-bit results is made; dtypes: of the buffers."""
        nodes = self.loops.nodes
        exact = {i for i, n in enumerate(nodes) if n.dtype is not torch.float32}
        exact |= {
            s.value for s in self.loops.stores if dtypes[s.buffer] not in (torch.float16, torch.bfloat16)
        }
        for i in range(len(nodes) - 1, -1, -1):
            if i in exact:
                exact.update(operands_of(nodes[i]))
        return frozenset(range(len(nodes))) - exact

    @cached_property
    def furthest(self) -> int:
        """The largest element offset of any access; -1 where a size is only known at run time."""
        worst = 0
        indices = [n.index for n in self.loops.nodes if isinstance(n, Load | Coordinate | Random)]
        for index in [*indices, *(s.index for s in self.loops.stores)]:
            reach = index.const
            for key, coeff in index.terms:
                if key < 0:
                    continue
                reach = reach + coeff * (self.loops.axes[key].size - 1)
            if not isinstance(reach, int):
                return -1
            worst = max(worst, reach)
        return max(worst, hint(self.size(ROWS)) * hint(self.size(COLS)))


def _tensor(node: Compute, name: str) -> int | None:
    value = dict(node.operands).get(name)
    return value.node if isinstance(value, Ref) else None


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
    ) -> None:
        self.a, self.s = analysis, schedule
        self.loops = analysis.loops
        self.pointers = pointers  # buffer -> parameter
        self.dtypes = dtypes  # of the buffers
        self.load_options = load_options
        self.rough = analysis.rough(dtypes)
        self.lines: list[str] = []
        self.depth = 1
        self.env: dict[int, str] = {}
        self.index_env: dict[tuple[str, int], str] = {}
        self.taken = taken | RESERVED
        self.flat = schedule.block_rows == 1  # tiles are vectors
        self.row_mask: str | None = None
        self.col_mask: str | None = None
        self.wide = analysis.furthest < 0 or analysis.furthest >= 2**31
        self.last_pass = True
        self.program = "tl.program_id(0)"
        self.col_start: str | None = None  # where the block of columns begins

    # -- text ------------------------------------------------------------------------------------

    def line(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)

    @contextmanager
    def scope(self, header: str) -> Generator[None]:
        """A block whose variables end with it."""
        self.line(header)
        env, index_env, masks = dict(self.env), dict(self.index_env), (self.row_mask, self.col_mask)
        self.depth += 1
        yield
        self.depth -= 1
        self.env, self.index_env = env, index_env
        self.row_mask, self.col_mask = masks

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
            self.line(f"row = {start}")
            return
        self.line(f"row = {start} + tl.arange(0, {self.s.block_rows})[:, None]")
        if size == 0 or quotient(size, self.s.block_rows) is None:
            self.line(f"row_inside = row < {dim_text(size)}")
            self.row_mask = "row_inside"

    def cols_at(self, start: str | None) -> None:
        """Define `col` for the block of columns that starts at `start` (None: the only one)."""
        self.col_start = start
        lanes = f"tl.arange(0, {self.s.block_cols})"
        lanes = lanes if self.flat else f"{lanes}[None, :]"
        self.line(f"col = {lanes if start is None else f'{start} + {lanes}'}")
        size = self.a.size(COLS)
        if size == 0 or quotient(size, self.s.block_cols) is None:
            self.line(f"col_inside = col < {dim_text(size)}")
            self.col_mask = "col_inside"

    def axis(self, number: int) -> str:
        """The variable of one axis, taken out of its group's element number on first use."""
        axis = self.loops.axes[number]
        base = "row" if axis.group == ROWS else "col"
        axes = self.a.axes[axis.group]
        if len(axes) == 1:
            return base
        key = (axis.group, number)
        if key not in self.index_env:
            self.line(f"{axis.name} = {decompose(axes, number - self.a.first[axis.group], base)}")
            self.index_env[key] = axis.name
        return self.index_env[key]

    def index(self, index: Index) -> str:
        """Element index as text; a group whose axes are contiguous in it goes by its own number."""
        whole: dict[int, str] = {}
        terms = dict(index.terms)
        for group, base in ((ROWS, "row"), (COLS, "col")):
            axes, first = self.a.axes[group], self.a.first[group]
            step = terms.get(first + len(axes) - 1, 0)
            if len(axes) > 1 and step != 0:
                inner = [product((step, *(a.size for a in axes[i + 1 :]))) for i in range(len(axes))]
                if all(terms.get(first + i, 0) == c for i, c in enumerate(inner)):
                    for i in range(len(axes) - 1):
                        terms.pop(first + i, None)  # absent where an inner axis is empty
                    whole[first + len(axes) - 1] = base
        merged = Index(index.const, tuple(sorted(terms.items())))
        return index_text(merged, lambda k: whole[k] if k in whole else self.axis(k), self.variable)

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
        match node:
            case Load():
                text, base = self.load(number, node), self.pointers[node.buffer].removesuffix("_ptr")
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
                text, base = self.random(node), "uniform"
            case Compute():
                text, base = self.compute(number, node), self.base_name(node)
            case Reduce():
                text, base = (
                    self.reduce(number, node),
                    f"{'row' if COLS in node.over else 'col'}_{node.combine}",
                )
        if text.isidentifier():  # a cast within the compute dtype, an operand that passes through
            self.env[number] = text
            return
        self.env[number] = name = self.fresh(base)
        self.line(f"{name} = {text}")

    def full(self, value: str, dtype: torch.dtype) -> str:
        """A tile of one element that broadcasts to any other."""
        return f"tl.full({'[]' if self.flat else '[1, 1]'}, {value}, {TRITON_TYPES[dtype]})"

    def base_name(self, node: Compute) -> str:
        if dict(node.operands).get("rounding"):
            return "rounded"
        return str(node.target._opname).lstrip("_")

    def compute(self, number: int, node: Compute) -> str:
        if all(
            isinstance(self.loops.nodes[a.node], Constant) for _, a in node.operands if isinstance(a, Ref)
        ):
            for _, arg in node.operands:  # nothing else gives the expression a type
                if isinstance(arg, Ref):
                    self.variable(arg.node)
            return compute_text(node, lambda n: (self.variable(n), None, self.loops.nodes[n].dtype))
        rough = number in self.rough
        if rough and node.target is aten.div.Tensor:
            divisor = _tensor(node, "other")
            dividend = _tensor(node, "self")
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
            self.env[~number] = name = self.fresh(f"per_{value}")
            self.line(f"{name} = 1.0 / {value}")
        return self.env[~number]

    def load(self, number: int, node: Load) -> str:
        groups = self.a.groups[number]
        pointer = f"{self.pointers[node.buffer]} + {self.index(node.index)}"
        if not node.index.terms and node.index.const == 0:
            pointer = self.pointers[node.buffer]
        own = self.index_groups(node.index)
        if node.within is not None and (
            more := self.a.groups[node.within] - own
        ):  # a block needs a mask's shape
            pointer += f" + tl.zeros({self.shape(own | more)}, tl.int32)"
        mask = self.mask(own, node.within)
        options = (f", mask={mask}, other=0" if mask else "") + self.load_options
        if self.s.cols is Cols.LOOP and groups == frozenset({ROWS, COLS}):
            options += f', eviction_policy="{"evict_first" if self.last_pass else "evict_last"}"'
        return convert(f"tl.load({pointer}{options})", self.dtypes[node.buffer], node.dtype)

    def index_groups(self, index: Index) -> frozenset[str]:
        groups: set[str] = set()
        for key, _ in index.terms:
            groups |= {self.loops.axes[key].group} if key >= 0 else self.a.groups[~key]
        return frozenset(groups)

    def random(self, node: Random) -> str:
        """Four numbers a Philox call where four neighbours lie along the columns."""
        seed = self.variable(node.seed)
        terms = dict(node.index.terms)
        last = len(self.loops.axes) - 1
        fours = (
            all(quotient(c, 4) is not None for k, c in terms.items() if k != last)
            and quotient(node.index.const, 4) is not None
        )
        if terms.get(last) == 1 and fours and len(self.a.axes[COLS]) == 1 and self.s.block_cols >= 4:
            rest = Index(
                quotient(node.index.const, 4) or 0,
                tuple((k, quotient(c, 4) or 0) for k, c in node.index.terms if k != last),
            )
            start = self.col_start
            quarter = f"tl.arange(0, {self.s.block_cols // 4})" + ("" if self.flat else "[None, :]")
            column = quarter if start is None else f"({start}) // 4 + {quarter}"
            base = "" if rest == Index(0, ()) else f"{self.index(rest)} + "
            return f"fm.uniform_block({seed}, {base}{column}, {dim_text(node.salt)})"
        return f"fm.uniform({seed}, {self.index(node.index)}, {dim_text(node.salt)})"

    def tile(self, number: int, over: frozenset[str]) -> str:
        """A reduction's operand as a full tile in the reduced groups, neutral where no element is."""
        reduce = self.loops.nodes[number]
        assert isinstance(reduce, Reduce)
        have = self.loops.nodes[reduce.operand].dtype
        if isinstance(self.loops.nodes[reduce.operand], Constant):
            self.variable(reduce.operand)
        text = convert(
            self.variable(reduce.operand),
            have,
            torch.int32 if reduce.combine in ("any", "all") else reduce.dtype,
        )
        if have is torch.bool and reduce.combine in ("any", "all"):
            text = f"{self.variable(reduce.operand)}.to(tl.int32)"
        missing = over - self.a.groups[reduce.operand]
        if missing or (self.flat and isinstance(self.loops.nodes[reduce.operand], Constant)):
            text = f"tl.broadcast_to({text}, {self.shape(self.a.groups[reduce.operand] | over)})"
        mask = self.mask(over & frozenset({ROWS, COLS}), None)
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

    def reduce(self, number: int, node: Reduce) -> str:
        """A reduction over the columns of a tile that holds whole rows."""
        text = self.tile(number, frozenset({COLS}))
        return self.fold(
            node, text, "0" if self.flat else "1", keep=not self.flat, plain=number in self.a.nan_safe_max
        )

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
        late = stage == "finish"
        return tuple(s for s in self.loops.stores if (s.value in self.a.finish) == late)

    def store(self, store: Store) -> None:
        if isinstance(self.loops.nodes[store.value], Constant):
            self.variable(store.value)
        value = self.variable(store.value)
        groups = self.index_groups(store.index)
        mask = self.mask(groups, store.within)
        target = f"{self.pointers[store.buffer]} + {self.index(store.index)}"
        if not groups and not self.flat:  # one element from a [1, 1] tile
            target = f"{target} + tl.zeros([1, 1], tl.int32)"
        self.line(f"tl.store({target}, {value}{f', mask={mask}' if mask else ''})")

    def print_nodes(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if number not in self.env and not isinstance(self.loops.nodes[number], Constant):
                self.node(number)

    def whole_block(self) -> None:
        """Everything for one block of rows that lies in the tile entirely, stores included."""
        stores = self.stores_of("main")
        roots = [o for s in stores for o in store_operands(s)]
        self.print_nodes(self.need([*roots, *self.accumulated()]))
        for store in stores:
            self.store(store)

    def accumulated(self) -> list[int]:
        """Operands of the reductions over rows."""
        return [o for i in self.a.across_rows for o in operands_of(self.loops.nodes[i])]

    def looped_block(self) -> None:
        """One block of rows, its columns in passes: reductions of a level, then what depends on them."""
        reductions = [i for i in self.a.reductions if i not in self.a.finish]
        stores = list(self.stores_of("main"))
        by_row = [s for s in stores if COLS not in self.index_groups(s.index)]
        full = [s for s in stores if s not in by_row]
        levels = [self.a.level[i] for i in reductions] + [self.a.level[s.value] + 1 for s in full]
        for number in range(max(levels, default=0)):
            mine = [i for i in reductions if self.a.level[i] == number + 1]
            writes = [s for s in full if self.a.level[s.value] == number]
            self.last_pass = number == max(levels) - 1
            if mine or writes:
                self.column_pass(mine, writes)
        for store in by_row:
            self.print_nodes(self.need(store_operands(store)))
            self.store(store)

    def column_pass(self, reductions: list[int], stores: list[Store]) -> None:
        """One loop over the columns."""
        roots = [o for i in reductions for o in operands_of(self.loops.nodes[i])]
        roots += [o for s in stores for o in store_operands(s)]
        self.print_nodes(i for i in self.need(roots) if COLS not in self.a.groups[i] and i not in reductions)
        accumulators = self.start_accumulators(reductions)
        size = dim_text(self.a.size(COLS))
        with self.scope(f"for start in tl.range(0, {size}, {self.s.block_cols}{self.stages()}):"):
            self.cols_at("start")
            online_parts = {self.a.online[i] for i in reductions if i in self.a.online}
            wanted = [
                o for i in reductions if i not in self.a.online for o in operands_of(self.loops.nodes[i])
            ]
            wanted += [o for s in stores for o in store_operands(s)]
            self.print_nodes(self.need(wanted))
            for number in reductions:
                if number in self.a.online:
                    self.online_step(number, accumulators)
                elif number not in online_parts:
                    self.accumulate(number, accumulators[number], frozenset({COLS}))
            for store in stores:
                self.store(store)
        for number in reductions:
            self.finish_accumulator(number, accumulators)

    def stages(self) -> str:
        return f", num_stages={self.s.num_stages}" if self.s.num_stages > 1 else ""

    def start_accumulators(self, reductions: list[int]) -> dict[int, str]:
        names: dict[int, str] = {}
        online = {*self.a.online, *self.a.online.values()}
        for number in reductions:
            node = self.loops.nodes[number]
            assert isinstance(node, Reduce)
            names[number] = name = self.fresh(f"{'row' if COLS in node.over else 'col'}_{node.combine}")
            dtype = torch.int32 if node.combine in ("any", "all") else node.dtype
            groups = frozenset({ROWS}) if number in online else self.a.groups[node.operand] | node.over
            self.line(f"{name} = tl.full({self.shape(groups)}, {self.neutral(node)}, {TRITON_TYPES[dtype]})")
        return names

    def accumulate(self, number: int, name: str, over: frozenset[str]) -> None:
        node = self.loops.nodes[number]
        assert isinstance(node, Reduce)
        text = self.tile(number, over)
        match node.combine:
            case "sum":
                self.line(f"{name} += {text}")
            case "prod":
                self.line(f"{name} *= {text}")
            case "any":
                self.line(f"{name} = tl.maximum({name}, {text})")
            case "all":
                self.line(f"{name} = tl.minimum({name}, {text})")
            case _:
                nan = ", propagate_nan=tl.PropagateNan.ALL" if node.dtype.is_floating_point else ""
                self.line(f"{name} = tl.{node.combine}imum({name}, {text}{nan})")

    def online_step(self, number: int, accumulators: dict[int, str]) -> None:
        """Running maximum, and the running sum repaired when it moves."""
        peak = self.a.online[number]
        total, top = accumulators[number], accumulators[peak]
        node = self.loops.nodes[peak]
        assert isinstance(node, Reduce)
        axis, keep = ("0", "") if self.flat else ("1", ", keep_dims=True")
        x = self.tile(peak, frozenset({COLS}))
        self.line(f"x = {x}")
        self.line(f"new_max = tl.maximum({top}, tl.max(x, axis={axis}{keep}))")
        self.line('shift = tl.where(new_max == float("-inf"), 0.0, new_max)')
        self.line(f"{total} = {total} * tl.exp({top} - shift) + tl.sum(tl.exp(x - shift), axis={axis}{keep})")
        self.line(f"{top} = new_max")

    def finish_accumulator(self, number: int, accumulators: dict[int, str]) -> None:
        """A pass's accumulator becomes the row value."""
        node = self.loops.nodes[number]
        assert isinstance(node, Reduce)
        name = accumulators[number]
        if number in self.a.online:
            peak = accumulators[self.a.online[number]]
            self.line(f'{name} = tl.where({peak} == float("-inf"), float("nan"), {name})')
        elif number not in self.a.online.values():
            self.line(f"{name} = {self.fold(node, name, '0' if self.flat else '1', keep=not self.flat)}")
        self.env[number] = name

    # -- reductions over rows ----------------------------------------------------------------------

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
