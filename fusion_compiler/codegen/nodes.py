"""The nodes of a loop nest as statements: one variable each, and its operands before it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import cast

import torch

from fusion_compiler.codegen import accesses, moments, segments
from fusion_compiler.codegen.bits import floats_of, widened_byte
from fusion_compiler.codegen.builder import ALONG, Builder
from fusion_compiler.codegen.expression import computed, convert, convert_literal, scalar
from fusion_compiler.codegen.monoids import carry, is_logical, neutral, scan
from fusion_compiler.codegen.tile import Check
from fusion_compiler.codegen.totals import build_total
from fusion_compiler.codegen.windows import interleaved
from fusion_compiler.ir.dims import quotient
from fusion_compiler.ir.loops import (
    COLS,
    ROWS,
    Checked,
    Compute,
    Constant,
    Coordinate,
    Index,
    InRange,
    Load,
    Random,
    Reduce,
    Scan,
    Total,
    Value,
    operands_of,
)
from fusion_compiler.ir.syntax import Expression, Var, fm, lift, plus, tl
from fusion_compiler.schedule.analysis import operand_of, rounding_of
from fusion_compiler.schedule.schedule import Cols

aten = torch.ops.aten
KEPT = (torch.float16, torch.bfloat16, torch.float32)  # dtypes of tiles that stay as they were loaded


def build_nodes(b: Builder, numbers: Iterable[int]) -> None:
    """Some nodes, and whatever of their operands is missing, each once."""
    of_segments = b.a.narrow
    for number in numbers:
        if number in of_segments:
            _build_narrow(b, number)
        elif number not in b.env and not isinstance(b.loops.nodes[number], Constant):
            build_node(b, number)


def build_row_values(b: Builder, numbers: Iterable[int]) -> None:
    """What belongs to the row and waits for no reduction along it: loaded while the row itself is, since
    the compiler moves no load over a reduction.

    A loop that copies loads ahead would wait for the row values' copy before it begins to load the row.
    """
    if b.s.num_stages == 1:
        wanted = b.need(numbers)
        build_nodes(b, (i for i in wanted if COLS not in b.a.groups[i] and not b.a.level[i]))


def build_node(b: Builder, number: int) -> None:
    if number in b.made:
        b.made[number]()
        return
    node = b.loops.nodes[number]
    if isinstance(node, Load) and (pair := interleaved.pair_of(b, number)) is not None:
        interleaved.load(b, pair)
        return
    build_nodes(b, b.need(b.operands(number)))
    if not isinstance(node, Compute):
        spread(b, operands_of(node))
    if number in b.env:  # with an operand, of which it is a part
        return
    if isinstance(node, Reduce):
        _reduce(b, number)
        return
    if isinstance(node, Scan):
        _scan(b, number, node)
        return
    if isinstance(node, Total):
        build_total(b, number, node, build_nodes)
        return
    value, base = value_of(b, number)
    if isinstance(value, Var):  # an operand that passes through
        b.env[number] = value
    else:
        b.env[number] = b.let(base, value, number)


def spread(b: Builder, numbers: Iterable[int]) -> None:
    """Values of segments for each of their elements, which read them."""
    for number in numbers:
        if number not in b.env and (segments.NARROW, number) in b.named:
            segments.spread(b, number)


def _build_narrow(b: Builder, number: int) -> None:
    """A node that has one value for each segment of a row."""
    node, key = b.loops.nodes[number], (segments.NARROW, number)
    if key in b.named:
        return
    if isinstance(node, Reduce):
        segments.reduced(b, number, elements(b, node, ALONG))
        return
    build_nodes(b, b.need(b.operands(number)))
    env = dict(b.env)
    b.env |= {n: v for (kind, n), v in b.named.items() if kind == segments.NARROW}
    value, base = value_of(b, number)
    b.env = env
    b.named[key] = value if isinstance(value, Var) else b.let(base, value, number)


def value_of(b: Builder, number: int) -> tuple[Expression, str]:
    """(what a node is, what its name is made of)."""
    node = b.loops.nodes[number]
    match node:
        case Load():
            return _loaded(b, number, node), b.called(node.buffer)
        case Coordinate() if not node.index.terms:  # a size: no tile whose type could be changed
            return b.full(node.index.const, node.dtype), "position"
        case Coordinate():
            return b.index(node.index).to(node.dtype), "position"
        case Constant():
            return b.full(node.value, node.dtype), "constant"
        case InRange():
            index = b.index(node.index)
            return (index >= node.low) & (index < node.high), "inside"
        case Random():
            return _random(b, node), "word" if node.dtype is torch.uint32 else "uniform"
        case Checked():
            _check(b, node)
            value = b.variable(node.operand)
            if b.a.groups[node.operand] != b.a.groups[number]:  # of a table of one element
                return tl.broadcast_to(value, b.shape(b.a.groups[number])), "same"
            return value, "same"
        case Compute():
            return _compute(b, number, node), base_name(node)
        case _:
            raise TypeError(node)


def _loaded(b: Builder, number: int, node: Load) -> Expression:
    held = b.dtypes[node.buffer]
    dtype = held if number in b.as_loaded else node.dtype
    if not is_kept(b, number):
        return accesses.load(b, number, dtype)
    b.kept[number] = b.let(f"{b.called(node.buffer)}_loaded", accesses.load(b, number, held))
    return convert(b.kept[number], held, dtype)


def is_kept(b: Builder, number: int) -> bool:
    """Whether a tile stays in registers as it was loaded, while programs wait for each other.

    What is computed from it is computed again after that (`rematerialize.py`), for which more programs have
    room.
    """
    node = b.loops.nodes[number]
    if b.s.splits == 1 or b.s.cols is Cols.LOOP or not isinstance(node, Load):
        return False
    whole = b.a.groups[number] == frozenset({ROWS, COLS})
    return whole and b.dtypes[node.buffer] in KEPT and node.buffer not in b.empty


def _check(b: Builder, node: Checked) -> None:
    groups = b.a.groups[node.position]
    shape = b.shape(groups | b.within_groups(node.within))
    zero = tl.full(shape, 0, b.loops.nodes[node.position].dtype)
    index, mask = b.variable(node.position), b.mask(groups, node.within)
    b.add(Check(index, lift(node.low), lift(node.high), node.what, mask, zero))


def base_name(node: Compute) -> str:
    return "rounded" if rounding_of(node) else str(node.target._opname).lstrip("_")


def _compute(b: Builder, number: int, node: Compute) -> Expression:
    nodes = b.loops.nodes
    refs = [a.node for _, a in node.operands if isinstance(a, Value)]
    numbers = sum(isinstance(nodes[n], Constant) for n in refs)
    if numbers == len(refs) or (numbers > 1 and node.target is not aten.where.self):
        for n in refs:  # two numbers have no type in Triton's functions
            b.variable(n)
        return computed(node, lambda n: (b.variable(n), nodes[n].dtype))
    total = b.means.get(number)
    if total in b.scaled and isinstance(width := b.a.size(COLS), int):
        count = b.scaled[total] * width  # a fraction that float32 holds
        divided = (("self", Value(total)), ("other", count if node.target is aten.div.Tensor else 1 / count))
        node = replace(node, operands=divided)
    rough = number in b.rough and total is None
    if rough and node.target is aten.div.Tensor:
        divisor, dividend = operand_of(node, "other"), operand_of(node, "self")
        if divisor is not None and dividend is not None and _is_narrower(b, divisor, number):
            return _as_float(b, dividend) * _reciprocal(b, divisor)

    if (floats := floats_of(b.loops, number)) is not None:
        spread(b, floats.operands())
        return floats.value(b.variable)
    spread(b, refs)
    if (byte := widened_byte(b.loops, node)) is not None:
        return fm.from_byte(b.variable(byte))

    def operand(n: int) -> tuple[Expression, torch.dtype]:
        value = nodes[n]
        return lift(cast(float, value.value)) if isinstance(value, Constant) else b.variable(n), value.dtype

    return computed(node, operand, rough)


def _is_narrower(b: Builder, operand: int, number: int) -> bool:
    """Whether a value serves a whole row, column or segment of a result."""
    of_segments = b.a.narrow
    if operand in of_segments:
        return number not in of_segments
    variable = not isinstance(b.loops.nodes[operand], Constant)
    return variable and b.a.groups[operand] < b.a.groups[number]


def _as_float(b: Builder, number: int) -> Expression:
    node = b.loops.nodes[number]
    if isinstance(node, Constant):
        return scalar(convert_literal(node.value, torch.float32), torch.float32)
    spread(b, (number,))
    return convert(b.variable(number), node.dtype, torch.float32)


def _reciprocal(b: Builder, number: int) -> Expression:
    """1 / a row's or a segment's value, once for each."""
    if ~number not in b.env and (segments.NARROW, number) in b.named:
        value, key = b.named[segments.NARROW, number], (segments.NARROW, ~number)
        b.named[key] = b.let(f"per_{value.base}", 1.0 / value)
        segments.spread(b, number, ~number)
    if ~number not in b.env:
        value = _as_float(b, number)
        b.env[~number] = b.let(f"per_{b.variable(number).base}", 1.0 / value)
    return b.env[~number]


def _random(b: Builder, node: Random) -> Expression:
    """Four numbers a Philox call where four neighbours lie along the columns."""
    words = node.dtype is torch.uint32
    seed = b.variable(node.seed)
    merged, whole = b.a.merged(node.index)
    cols = range(b.a.first[COLS], len(b.loops.axes))
    along = [(k, c) for k, c in merged.terms if k in cols]
    others = tuple((k, quotient(c, 4)) for k, c in node.index.terms if k not in cols)
    first = quotient(node.index.const, 4)
    by_col = along == [(cols[-1], 1)] and (len(cols) == 1 or cols[-1] in whole) if cols else False
    if by_col and first is not None and b.tile.lanes >= 4 and all(c is not None for _, c in others):
        rest = Index(first, tuple((k, c) for k, c in others if c is not None))
        start, quarter = b.tile.start, b.lanes(b.tile.lanes // 4)
        column = plus(None if start is None else start // 4, quarter)
        number = column if rest == Index(0, ()) else plus(b.index(rest), column)
        return (fm.words_block if words else fm.uniform_block)(seed, number, node.salt)
    index = b.index(node.index) if node.index.terms else b.full(node.index.const, torch.int32)
    return (fm.words if words else fm.uniform)(seed, index, node.salt)


# -- reductions of a tile ----------------------------------------------------------------------------


def elements(b: Builder, reduce: Reduce | Scan, over: frozenset[str]) -> Expression:
    """A reduction's or a scan's operand as a full tile in the reduced groups, neutral where no element is."""
    build_nodes(b, b.need((reduce.operand,)))
    spread(b, (reduce.operand,))
    return as_elements(b, reduce, over, b.variable(reduce.operand))


def as_elements(
    b: Builder, reduce: Reduce | Scan, over: frozenset[str], value: Expression
) -> Expression:
    """The same of what stands in the operand's place."""
    source = b.loops.nodes[reduce.operand]
    groups = b.a.groups[reduce.operand]
    if is_logical(reduce):  # zero or one: a half is true, and so is what wraps to zero
        value = convert(value, source.dtype, torch.bool).to(torch.int32)
    else:
        value = convert(value, source.dtype, reduce.dtype)
    if over - groups or (b.tile.flat and isinstance(source, Constant)):
        value = tl.broadcast_to(value, b.shape(groups | over))
    zero = reduce.combine == "sum" and reduce.operand in b.a.zero_in_missing_rows
    mask = b.mask(over & frozenset({COLS} if zero else {ROWS, COLS}), None)
    return value if mask is None else tl.where(mask, value, neutral(reduce))


def carry_scans(b: Builder, numbers: Iterable[int]) -> None:
    """What the scans among some nodes come to before the first block of a loop."""
    for number in numbers:
        node = b.loops.nodes[number]
        if isinstance(node, Scan):
            groups = b.a.groups[node.operand] - ALONG
            b.carried[number] = b.let("carried", tl.full(b.shape(groups), neutral(node), node.dtype))


def _scan(b: Builder, number: int, node: Scan) -> None:
    """A scan of the tile; in a loop it goes on from the block before, to what its last column comes to."""
    value = scan(node, elements(b, node, ALONG), b.col_axis)
    carried = b.carried.get(number)
    if carried is not None:
        value = carry(node, carried, value)
    b.env[number] = b.let(f"running_{node.combine}", value, number)
    if carried is not None:
        last = 0 if node.reverse else b.tile.lanes - 1
        alone = tl.where(b.lanes(b.tile.lanes).eq(last), b.env[number], 0)
        b.set(carried, b.along(tl.sum, alone))


def _reduce(b: Builder, number: int) -> None:
    """A reduction over the columns of a tile that holds whole rows, or over the rows of a whole matrix."""
    if ROWS in b.a.over(number):
        _reduce_rows(b, number)
        return
    made_of = b.a.moments.get(number)
    if made_of and not moments.is_exact(b, made_of[0], b.a.size(COLS)):
        off, squares = moments.operands(b, number)
        reduce = b.reduction(number)
        tiles = [elements(b, replace(reduce, operand=n), ALONG) for n in (squares, off)]
        moments.build_squares(b, number, tiles)
        return
    tile, base = elements(b, b.reduction(number), ALONG), b.base_of(number)
    mean = next((mean for mean, total in b.means.items() if total == number), None)
    if mean is not None and isinstance(width := b.a.size(COLS), int) and width > 1:
        scale = b.scaled[number] = moments.scale_of(width)
        tile, base = tile * scale, "row_mean" if scale * width == 1 else base
    alike = (b.a.level[number], b.a.groups[number]) if number in b.a.sums_along else None
    b.env[number] = b.let(base, b.folded_along(number, tile, alike))
    if mean is not None and base == "row_mean":
        b.env[mean] = b.env[number]


def _reduce_rows(b: Builder, number: int) -> None:
    """A reduction over the rows of a matrix, or over all of it."""
    reduce, over = b.reduction(number), b.a.over(number)
    tile = elements(b, reduce, over)
    if COLS in over:
        tile = b.let(b.base_of(number), b.folded_along(number, tile))
    alike = ("rows", b.a.groups[reduce.operand]) if b.a.is_sum(number) else None
    folded = tile if b.tile.flat else b.folded(number, tile, 0, True, alike)
    b.env[number] = b.let(b.base_of(number), folded, number)
