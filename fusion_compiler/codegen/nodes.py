"""Build the nodes of a loop nest as statements: one variable per node, after its operands."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import cast

import torch

from fusion_compiler.codegen import accesses, expression, moments
from fusion_compiler.codegen.bits import floats_of, widened_byte
from fusion_compiler.codegen.builder import ALONG, Builder
from fusion_compiler.codegen.expression import computed, convert, convert_literal, scalar
from fusion_compiler.codegen.monoids import is_logical, neutral
from fusion_compiler.codegen.tile import Check
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
    Value,
    axes_in,
)
from fusion_compiler.ir.syntax import Expression, Var, fm, lift, plus, tl
from fusion_compiler.schedule.analysis import operand_of
from fusion_compiler.schedule.schedule import Cols

aten = torch.ops.aten
KEPT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)  # of tiles that may stay as they were loaded


def build_nodes(b: Builder, numbers: Iterable[int]) -> None:
    """Build some nodes and their missing operands, each once."""
    for number in numbers:
        if number not in b.env and not isinstance(b.loops.nodes[number], Constant):
            build_node(b, number)


def build_row_values(b: Builder, numbers: Iterable[int]) -> None:
    """Build the values of a row that depend on no reduction along it, to load them while the row itself is
    loaded.

    The compiler does not move loads before a reduction. A loop with pipelined loads would wait for the row
    values' copy before it begins to load the row, so there this does nothing.
    """
    if b.s.num_stages == 1:
        needed = b.need(numbers)
        build_nodes(b, (i for i in needed if COLS not in b.a.groups[i] and not b.a.level[i]))


def build_node(b: Builder, number: int) -> None:
    if number in b.made:
        b.made[number]()
        return
    node = b.loops.nodes[number]
    if isinstance(node, Load) and (pair := interleaved.pair_of(b, number)) is not None:
        interleaved.load(b, pair)
        return
    build_nodes(b, b.need(b.operands(number)))
    if number in b.env:  # built together with an operand
        return
    if isinstance(node, Reduce):
        _reduce(b, number)
        return
    value, base = value_of(b, number)
    if isinstance(value, Var):  # the operand itself
        b.env[number] = value
    else:
        b.env[number] = b.let(base, value, number)


def value_of(b: Builder, number: int) -> tuple[Expression, str]:
    """Return (the expression of a node, the base of its name)."""
    node = b.loops.nodes[number]
    match node:
        case Load():
            return _loaded(b, number, node), b.called(node.buffer)
        case Coordinate() if not node.index.terms:  # a size is not a tile, so it cannot be cast
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
            # the operand is an element of a table of size one
            if b.a.groups[node.operand] != b.a.groups[number]:
                return tl.broadcast_to(value, b.shape(b.a.groups[number])), "same"
            return value, "same"
        case Compute():
            return _compute(b, number, node), expression.base_name(node)
        case _:
            raise TypeError(node)


def _loaded(b: Builder, number: int, node: Load) -> Expression:
    stored_dtype = b.dtypes[node.buffer]
    dtype = stored_dtype if number in b.as_loaded else node.dtype
    if not is_kept(b, number):
        return accesses.load(b, number, dtype)
    b.kept[number] = b.let(f"{b.called(node.buffer)}_loaded", accesses.load(b, number, stored_dtype))
    return convert(b.kept[number], stored_dtype, dtype)


def is_kept(b: Builder, number: int) -> bool:
    """True if a tile stays in registers as it was loaded, while programs wait for each other. Values computed
    from it are recomputed afterwards (`rematerialize.py`), which leaves room for more programs."""
    node = b.loops.nodes[number]
    if b.s.splits == 1 or b.s.cols is Cols.LOOP or not isinstance(node, Load):
        return False
    is_full = b.a.groups[number] == frozenset({ROWS, COLS})
    return is_full and b.dtypes[node.buffer] in KEPT_DTYPES and node.buffer not in b.empty


def _check(b: Builder, node: Checked) -> None:
    groups = b.a.groups[node.position]
    shape = b.shape(groups | b.within_groups(node.within))
    zero = tl.full(shape, 0, b.loops.nodes[node.position].dtype)
    index, mask = b.variable(node.position), b.mask(groups, node.within)
    b.add(Check(index, lift(node.low), lift(node.high), node.what, mask, zero))


def _compute(b: Builder, number: int, node: Compute) -> Expression:
    nodes = b.loops.nodes
    refs = [a.node for _, a in node.operands if isinstance(a, Value)]
    constants = sum(isinstance(nodes[n], Constant) for n in refs)
    if constants == len(refs) or (constants > 1 and node.target is not aten.where.self):
        for n in refs:  # Triton's functions cannot infer a type from two literals
            b.variable(n)
        return computed(node, lambda n: (b.variable(n), nodes[n].dtype))
    total = b.means.get(number)
    if total in b.scaled and isinstance(width := b.a.size(COLS), int):
        count = b.scaled[total] * width  # float32 represents this fraction exactly
        operands = (("self", Value(total)), ("other", count if node.target is aten.div.Tensor else 1 / count))
        node = replace(node, operands=operands)
    rough = number in b.rough and total is None
    if rough and node.target is aten.div.Tensor:
        divisor, dividend = operand_of(node, "other"), operand_of(node, "self")
        if divisor is not None and dividend is not None and _is_narrower(b, divisor, number):
            return _as_float(b, dividend) * _reciprocal(b, divisor)

    if (floats := floats_of(b.loops, number)) is not None:
        return floats.value(b.variable)
    if (byte := widened_byte(b.loops, node)) is not None:
        return fm.from_byte(b.variable(byte))

    def operand(n: int) -> tuple[Expression, torch.dtype]:
        value = nodes[n]
        return lift(cast(float, value.value)) if isinstance(value, Constant) else b.variable(n), value.dtype

    return computed(node, operand, rough)


def _is_narrower(b: Builder, operand: int, number: int) -> bool:
    """True if one value is shared by a whole row or column of a result."""
    variable = not isinstance(b.loops.nodes[operand], Constant)
    return variable and b.a.groups[operand] < b.a.groups[number]


def _as_float(b: Builder, number: int) -> Expression:
    node = b.loops.nodes[number]
    if isinstance(node, Constant):
        return scalar(convert_literal(node.value, torch.float32), torch.float32)
    return convert(b.variable(number), node.dtype, torch.float32)


def _reciprocal(b: Builder, number: int) -> Expression:
    """Return 1 / the value of a row, computed once per row."""
    if ~number not in b.env:
        value = _as_float(b, number)
        b.env[~number] = b.let(f"per_{b.variable(number).base}", 1.0 / value)
    return b.env[~number]


def _random(b: Builder, node: Random) -> Expression:
    """Return random numbers, with one Philox call per four adjacent columns where possible."""
    words = node.dtype is torch.uint32
    seed = b.variable(node.seed)
    merged, merged_axes = b.a.merged(node.index)
    cols = sorted(axes_in(b.loops.axes, (COLS,)))
    column_terms = [(k, c) for k, c in merged.terms if k in cols]
    others = tuple((k, quotient(c, 4)) for k, c in node.index.terms if k not in cols)
    first = quotient(node.index.const, 4)
    by_col = bool(cols) and column_terms == [(cols[-1], 1)] and (len(cols) == 1 or cols[-1] in merged_axes)
    if by_col and first is not None and b.tile.lanes >= 4 and all(c is not None for _, c in others):
        rest = Index(first, tuple((k, c) for k, c in others if c is not None))
        start, quarter = b.tile.start, b.lanes(b.tile.lanes // 4)
        column = plus(None if start is None else start // 4, quarter)
        number = column if rest == Index(0, ()) else plus(b.index(rest), column)
        return (fm.words_block if words else fm.uniform_block)(seed, number, node.salt)
    index = b.index(node.index) if node.index.terms else b.full(node.index.const, torch.int32)
    return (fm.words if words else fm.uniform)(seed, index, node.salt)


# -- reductions of a tile ----------------------------------------------------------------------------


def elements(b: Builder, reduce: Reduce, over: frozenset[str]) -> Expression:
    """Return the operand of a reduction or scan as a full tile in `over`, with the neutral element
    outside."""
    build_nodes(b, b.need((reduce.operand,)))
    return as_elements(b, reduce, over, b.variable(reduce.operand))


def as_elements(
    b: Builder, reduce: Reduce, over: frozenset[str], value: Expression
) -> Expression:
    """Return `value` in place of the operand as a full tile; see `elements`."""
    source = b.loops.nodes[reduce.operand]
    groups = b.a.groups[reduce.operand]
    # convert to zero or one first: 0.5 is true, and so is an integer that wraps to zero
    if is_logical(reduce):
        value = convert(value, source.dtype, torch.bool).to(torch.int32)
    else:
        value = convert(value, source.dtype, reduce.dtype)
    if over - groups or (b.tile.flat and isinstance(source, Constant)):
        value = tl.broadcast_to(value, b.shape(groups | over))
    zero = reduce.combine == "sum" and reduce.operand in b.a.zero_in_missing_rows
    mask = b.mask(over & frozenset({COLS} if zero else {ROWS, COLS}), None)
    return value if mask is None else tl.where(mask, value, neutral(reduce))


def _reduce(b: Builder, number: int) -> None:
    """Build a reduction over the columns of a tile with whole rows, or over the rows of a whole matrix."""
    if ROWS in b.a.over(number):
        _reduce_rows(b, number)
        return
    moment = b.a.moments.get(number)
    if moment and not moments.is_exact(b.loops, b.dtypes, moment[0], b.a.size(COLS)):
        deviations, squares = moments.operands(b.loops, number)
        reduce = b.reduction(number)
        tiles = [elements(b, replace(reduce, operand=n), ALONG) for n in (squares, deviations)]
        moments.build_squares(b, number, tiles)
        return
    tile, base = elements(b, b.reduction(number), ALONG), b.base_of(number)
    mean = next((mean for mean, total in b.means.items() if total == number), None)
    if mean is not None and isinstance(width := b.a.size(COLS), int) and width > 1:
        scale = b.scaled[number] = moments.scale_of(width)
        tile, base = tile * scale, "row_mean" if scale * width == 1 else base
    join_key = (b.a.level[number], b.a.groups[number]) if number in b.a.sums_along else None
    b.env[number] = b.let(base, b.folded_along(number, tile, join_key))
    if mean is not None and base == "row_mean":
        b.env[mean] = b.env[number]


def _reduce_rows(b: Builder, number: int) -> None:
    """Build a reduction over the rows of a matrix, or over all of it."""
    reduce, over = b.reduction(number), b.a.over(number)
    tile = elements(b, reduce, over)
    if COLS in over:
        tile = b.let(b.base_of(number), b.folded_along(number, tile))
    join_key = ("rows", b.a.groups[reduce.operand]) if b.a.is_sum(number) else None
    folded = tile if b.tile.flat else b.folded(number, tile, 0, True, join_key)
    b.env[number] = b.let(b.base_of(number), folded, number)
