"""What a pass over the columns of a row keeps of it: a state for each of its reductions, or for two together.

A state goes on with each block, is folded to one value a row, and, where several programs share the row,
merged with theirs:

    Plain      sum(x), max(x), ...             an accumulator for each lane of the block
    Scaled     sum(w x) = w sum(x)             of what the block adds up anyway, for sums over segments
    Sums       sum(x), sum(y)                  two of those, folded together
    Softmax    max(x), sum(exp(x - max))       one running maximum a row (Milakov and Gimelshein, 2018)
    Moments    sum(x), sum((x - mean)^2)       one running mean a row (Chan, Golub and LeVeque, 1983)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fusion_compiler.codegen.expression import TRITON_TYPES, dim_text
from fusion_compiler.codegen.moments import is_exact
from fusion_compiler.codegen.names import Own
from fusion_compiler.codegen.partial_reductions import scaled_sum
from fusion_compiler.codegen.printer import Printer
from fusion_compiler.ir.loops import COLS, ROWS, Load, Reduce
from fusion_compiler.schedule.analysis import Analysis, part_cols
from fusion_compiler.schedule.schedule import WORD, Cols

ALONG = frozenset({COLS})
BLOCK: tuple[Own, Own] = ("block_mean", "block_squares")
LEAST_TURNS = 4  # of a block, for a state in each lane, which costs as much as one element of them


@dataclass(frozen=True)
class Plain:
    """Any reduction by itself."""

    total: int

    @property
    def numbers(self) -> tuple[int, ...]:
        return (self.total,)

    def start(self, p: Printer) -> tuple[str, ...]:
        return (p.start_accumulator(self.total, p.a.groups[_reduce(p, self.total).operand] | ALONG),)

    def step(self, p: Printer, names: Sequence[str]) -> None:
        p.accumulate(self.total, names[0], p.tile(self.total, ALONG))

    def single(self, p: Printer, names: Sequence[str]) -> None:
        p.line(f"{names[0]} = {p.tile(self.total, ALONG)}")

    def fold(self, p: Printer, names: Sequence[str]) -> None:
        p.line(f"{names[0]} = {p.fold_cols(_reduce(p, self.total), names[0])}")

    def end(self, p: Printer, names: Sequence[str]) -> None:
        tile = p.tile(self.total, ALONG)
        p.accumulate(self.total, names[0], p.fold_cols(_reduce(p, self.total), tile))

    def merge(self, p: Printer, names: Sequence[str], parts: Sequence[str]) -> None:
        p.line(f"{names[0]} = {p.fold_cols(_reduce(p, self.total), parts[0])}")

    def bind(self, p: Printer, names: Sequence[str]) -> None:
        p.env[self.total] = names[0]


@dataclass(frozen=True)
class Scaled(Plain):
    """A sum that is one over the segment in which the block lies, times what the block shares."""

    segment: int
    shared: tuple[int, ...]

    def single(self, p: Printer, names: Sequence[str]) -> None:
        loads = [(i, p.loops.nodes[i]) for i in self.shared]
        factors = [p.loaded_once(i, node) for i, node in loads if isinstance(node, Load)]
        p.line(f"{names[0]} = {' * '.join([p.index_env['sum', self.segment], *factors])}")

    def fold(self, p: Printer, names: Sequence[str]) -> None:
        """The state is one value a row already."""


@dataclass(frozen=True)
class Sums:
    """Two sums, for which the threads of a program wait for each other once."""

    members: tuple[Plain, Plain]

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(state.total for state in self.members)

    def start(self, p: Printer) -> tuple[str, ...]:
        return tuple(name for state in self.members for name in state.start(p))

    def step(self, p: Printer, names: Sequence[str]) -> None:
        for state, name in zip(self.members, names, strict=True):
            state.step(p, (name,))

    def single(self, p: Printer, names: Sequence[str]) -> None:
        for state, name in zip(self.members, names, strict=True):
            state.single(p, (name,))

    def fold(self, p: Printer, names: Sequence[str]) -> None:
        p.fold_along(self.numbers, names, names)

    def end(self, p: Printer, names: Sequence[str]) -> None:
        for state, name in zip(self.members, names, strict=True):
            state.end(p, (name,))

    def merge(self, p: Printer, names: Sequence[str], parts: Sequence[str]) -> None:
        p.fold_along(self.numbers, names, parts)

    def bind(self, p: Printer, names: Sequence[str]) -> None:
        p.env.update(zip(self.numbers, names, strict=True))


@dataclass(frozen=True)
class Softmax:
    """sum(exp(x - max(x))) with its maximum; the sum is repaired whenever the maximum moves.

    Each lane has its own where a thread holds several of a block's elements for it and the row is read once:
    no thread waits for another until the loop is over, by which long rows are 1% to 6% faster. With a second
    pass over the row they are not.
    """

    peak: int
    total: int

    @property
    def numbers(self) -> tuple[int, ...]:
        return (self.peak, self.total)

    def start(self, p: Printer) -> tuple[str, ...]:
        lanes = _lanes(p)
        if not lanes:
            return tuple(p.start_accumulator(n, frozenset({ROWS})) for n in self.numbers)
        names = tuple(p.fresh(p.base_of(n)) for n in self.numbers)
        for name, number in zip(names, self.numbers, strict=True):
            node = _reduce(p, number)
            p.line(f"{name} = tl.full([{lanes}], {p.neutral(node)}, {TRITON_TYPES[node.dtype]})")
        return names

    def step(self, p: Printer, names: Sequence[str]) -> None:
        lanes = _lanes(p)
        if not lanes:
            self.end(p, names)
            return
        top, total = names
        p.define("x", f"tl.reshape({p.tile(self.peak, ALONG)}, [{p.s.block_cols // lanes}, {lanes}])")
        p.define("new_max", f"tl.maximum({top}, tl.max(x, axis=0))")
        p.define("shift", 'tl.where(new_max == float("-inf"), 0.0, new_max)')
        p.line(f"{total} = {total} * tl.exp({top} - shift) + tl.sum(tl.exp(x - shift[None, :]), axis=0)")
        p.line(f"{top} = new_max")

    def single(self, p: Printer, names: Sequence[str]) -> None:
        top, total = names
        p.define("x", p.tile(self.peak, ALONG))
        p.line(f"{top} = {p.along('tl.max', 'x')}")
        p.define("shift", f'tl.where({top} == float("-inf"), 0.0, {top})')
        p.line(f"{total} = {p.along('tl.sum', 'tl.exp(x - shift)')}")

    def fold(self, p: Printer, names: Sequence[str]) -> None:
        if p.s.cols is Cols.LOOP and _lanes(p):
            p.define("tops", names[0])
            self.merge(p, names, ("tops", names[1]))

    def end(self, p: Printer, names: Sequence[str]) -> None:
        top, total = names
        p.define("x", p.tile(self.peak, ALONG))
        p.define("new_max", f"tl.maximum({top}, {p.along('tl.max', 'x')})")
        p.define("shift", 'tl.where(new_max == float("-inf"), 0.0, new_max)')
        p.line(f"{total} = {total} * tl.exp({top} - shift) + {p.along('tl.sum', 'tl.exp(x - shift)')}")
        p.line(f"{top} = new_max")

    def merge(self, p: Printer, names: Sequence[str], parts: Sequence[str]) -> None:
        top, total = names
        tops, totals = parts
        p.line(f"{top} = {p.along('tl.max', tops)}")
        p.define("shift", f'tl.where({top} == float("-inf"), 0.0, {top})')
        p.line(f"{total} = {p.along('tl.sum', f'{totals} * tl.exp({tops} - shift)')}")

    def bind(self, p: Printer, names: Sequence[str]) -> None:
        top, total = names
        p.line(f'{total} = tl.where({top} == float("-inf"), float("nan"), {total})')
        p.env[self.peak], p.env[self.total] = names


@dataclass(frozen=True)
class Moments:
    """The sum of squares around the mean, and the mean itself, which is all that the sum is used for."""

    total: int
    mean: int
    squares: int

    @property
    def numbers(self) -> tuple[int, ...]:
        return (self.total, self.squares)

    def start(self, p: Printer) -> tuple[str, ...]:
        names = (p.fresh("mean"), p.fresh("squares"))
        dtype = TRITON_TYPES[_reduce(p, self.squares).dtype]
        for name in names:
            p.line(f"{name} = tl.full({p.shape(p.a.groups[self.squares])}, 0.0, {dtype})")
        return names

    def step(self, p: Printer, names: Sequence[str]) -> None:
        mean, squares = names
        self.block(p, *BLOCK)
        state = f"{mean}, {squares}, {_seen(p)}"
        p.line(f"{mean}, {squares} = fm.merge_moments({state}, {', '.join(BLOCK)}, {_count(p)})")

    def single(self, p: Printer, names: Sequence[str]) -> None:
        self.block(p, *names)

    def block(self, p: Printer, mean: str, squares: str) -> None:
        p.define("x", p.tile(self.total, ALONG))
        p.line(f"{mean} = {p.along('tl.sum', 'x')} / {_count(p)}")
        mask = p.mask(ALONG, None)
        p.define("off", f"tl.where({mask}, x - {mean}, 0.0)" if mask else f"x - {mean}")
        if is_exact(p, self.total, p.s.block_cols):
            p.line(f"{squares} = {p.along('tl.sum', 'off * off')}")
            return
        p.line(f"{squares}, left = fm.sums(off * off, off, {'0' if p.flat else '1'}, {not p.flat})")
        p.line(f"{mean}, {squares} = fm.corrected({mean}, {squares}, left, {_count(p)})")

    def fold(self, p: Printer, names: Sequence[str]) -> None:
        """The state is one value a row already."""

    def end(self, p: Printer, names: Sequence[str]) -> None:
        self.step(p, names)

    def merge(self, p: Printer, names: Sequence[str], parts: Sequence[str]) -> None:
        mean, squares = names
        means, others = parts
        p.define("counts", _part_counts(p))
        tops = f'tl.where(counts > 0, {means}, float("-inf"))'
        p.define("top", p.along("tl.max", tops))  # means differ by less than they are, which rounds less
        p.define("off", f"{means} - top")
        p.define("move", f"{p.along('tl.sum', 'counts * off')} / {dim_text(p.a.size(COLS))}")
        p.line(f"{mean} = top + move")
        p.line(f"{squares} = {p.along('tl.sum', f'{others} + counts * (off - move) * (off - move)')}")

    def bind(self, p: Printer, names: Sequence[str]) -> None:
        p.env[self.mean], p.env[self.squares] = names


Running = Plain | Sums | Softmax | Moments


def _lanes(p: Printer) -> int:
    """Columns that a program's threads take in one access each; 0 where a lane has no state of its own."""
    turn = WORD * 32 * p.s.num_warps
    return turn if p.flat and p.last_pass and p.s.block_cols >= LEAST_TURNS * turn else 0


def states_of(a: Analysis, reductions: Sequence[int]) -> list[Running]:
    """The states of one pass over the columns, in the order of the reductions."""
    together: Mapping[int, Running] = {
        **{total: Softmax(peak, total) for total, peak in a.online.items()},
        **{squares: Moments(total, mean, squares) for squares, (total, mean) in a.moments.items()},
    }
    inner = {n for state in together.values() for n in state.numbers} - set(together)
    return [together.get(n, Plain(n)) for n in reductions if n not in inner]


def two_by_two(a: Analysis, states: Sequence[Running]) -> list[Running]:
    """Neighbours that are sums of float32 as one state."""
    found: list[Running] = []
    for state in states:
        last = found[-1] if found else None
        if isinstance(last, Plain) and isinstance(state, Plain) and _adds(a, last) and _adds(a, state):
            found[-1] = Sums((last, state))
        else:
            found.append(state)
    return found


def _adds(a: Analysis, state: Plain) -> bool:
    """Whether a state is the sum of tiles of float32 and nothing more."""
    return type(state) is Plain and a.is_sum(state.total)


def scaled(p: Printer, state: Running) -> Running:
    """A state in terms of a sum over segments that the block computes anyway, where it has such terms."""
    if not isinstance(state, Plain) or p.s.cols is not Cols.WHOLE:
        return state
    found = scaled_sum(p, state.total)
    return state if found is None else Scaled(state.total, *found)


def first_of(states: Sequence[Running]) -> Iterator[int]:
    """The reductions whose operands a pass computes; what else a state needs it makes."""
    for state in states:
        if not isinstance(state, Scaled):
            yield from state.numbers if isinstance(state, Sums) else state.numbers[:1]


def complete_after(a: Analysis, level: int) -> list[int]:
    """The reductions along the row that so many passes complete."""
    return [i for i in a.reductions if i not in a.finish and a.level[i] == level]


def reduction(a: Analysis, number: int) -> Reduce:
    reduce = a.loops.nodes[number]
    assert isinstance(reduce, Reduce)
    return reduce


def _reduce(p: Printer, number: int) -> Reduce:
    return reduction(p.a, number)


def _seen(p: Printer) -> str:
    """How many columns of its part a program has been through before the block at hand."""
    assert p.col_start is not None  # a pass begins somewhere
    return p.col_start if p.s.splits == 1 else f"{p.col_start} - first_col"


def _column(p: Printer, lane: str) -> str:
    """The column of a lane, or the first one of the row where that lies behind."""
    return f"tl.maximum({lane} - skew, 0)" if p.s.skewed else lane


def _count(p: Printer) -> str:
    """How many columns the block at hand has."""
    start, size = p.col_start, p.a.size(COLS)
    if p.col_mask is None:
        return str(p.s.block_cols)
    assert start is not None and isinstance(size, int)  # a pass begins somewhere
    if start.isdecimal():  # behind the loop
        return str(size - int(start))
    end = f"{start} + {p.s.block_cols}{' - skew' if p.s.skewed else ''}"
    return f"(tl.minimum({end}, {size}) - {_column(p, start)})"


def _part_counts(p: Printer) -> str:
    """How many columns each part of a row has, as float32: with a loop the same at any skew."""
    size, part = p.a.size(COLS), part_cols(p.a, p.s)
    first = f"parts * {dim_text(part)}"
    skewed = p.s.skewed and p.s.cols is Cols.WHOLE
    end = f"tl.minimum({first} + {dim_text(part)}{' - skew' if skewed else ''}, {dim_text(size)})"
    return f"tl.maximum({end} - {_column(p, first) if skewed else first}, 0).to(tl.float32)"
