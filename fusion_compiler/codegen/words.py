"""Sums of a product's terms by words: of the columns that a thread loads together, so that its registers hold
the sums of many products of one matrix.

    row_sum += tl.sum(tl.reshape(in0 * in1, [4, 256, 8]), axis=2)

What all terms of a word have in common, as a group of weights its scale, is multiplied by what they come to:

    run = first_col // 128 + tl.arange(0, 16)[None, :]
    of_words = fm.repeated(tl.load(in2_ptr + row * 16 + run), 16)
    row_sum += tl.sum(tl.reshape(in0 * sub, [4, 256, 8]), axis=2) * of_words
"""

from __future__ import annotations

from collections.abc import Collection

from fusion_compiler.codegen.builder import ALONG, Builder
from fusion_compiler.codegen.nodes import as_elements, build_nodes, spread
from fusion_compiler.codegen.windows import runs
from fusion_compiler.ir.loops import COLS, ROWS, Load, operands_of
from fusion_compiler.ir.syntax import Expression, Variable, times, tl
from fusion_compiler.schedule.schedule import WORD


def word_of(b: Builder, number: int) -> int:
    """Columns of which a pass adds up a sum's terms at once; 1 where it does not."""
    if number not in b.a.weighted:
        return 1
    whole = frozenset({ROWS, COLS})
    loads = (n for i, n in enumerate(b.loops.nodes) if isinstance(n, Load) and b.a.groups[i] == whole)
    widest = max((b.dtypes[n.buffer].itemsize for n in loads), default=4)
    return min(2 * WORD // widest, WORD, b.tile.lanes)


def wanted(b: Builder, number: int) -> tuple[int, ...]:
    """The nodes that a pass computes for such a sum."""
    return _left(b, b.reduction(number).operand, _common(b, number))


def summed(b: Builder, number: int) -> Expression:
    """The sum of each word of the tile."""
    word, common = word_of(b, number), _common(b, number)
    operand = b.reduction(number).operand
    tile = as_elements(b, b.reduction(number), ALONG, _product(b, operand, common))
    shape = [*([] if b.tile.flat else [b.s.block_rows]), b.tile.lanes // word, word]
    total = tl.sum(tl.reshape(tile, shape), axis=len(shape) - 1)
    return times(total, *(_of_words(b, load, word) for load in common))


def _common(b: Builder, number: int) -> tuple[int, ...]:
    """The factors of the terms that have one value in each word: they are loaded so."""
    word = word_of(b, number)
    factors = tuple(b.a.factors[b.reduction(number).operand].elements())
    common = tuple(n for n in factors if _is_common(b, n, word))
    return common if word > 1 and len(common) < len(factors) else ()


def _is_common(b: Builder, number: int, word: int) -> bool:
    node = b.loops.nodes[number]
    return isinstance(node, Load) and node.within is None and runs.length_of(b, node) % word == 0


def _left(b: Builder, number: int, common: Collection[int]) -> tuple[int, ...]:
    """The largest nodes without such a factor, of which a product of the others is made."""
    if number in common:
        return ()
    if b.a.factors[number].keys().isdisjoint(common):
        return (number,)
    return tuple(n for operand in operands_of(b.loops.nodes[number]) for n in _left(b, operand, common))


def _product(b: Builder, number: int, common: Collection[int]) -> Expression:
    left = _left(b, number, common)
    build_nodes(b, b.need(left))
    spread(b, left)
    return times(*map(b.variable, left))


def _of_words(b: Builder, number: int, word: int) -> Variable:
    """Such a factor, once for each word."""
    node, key = b.loops.nodes[number], ("word", number)
    assert isinstance(node, Load)
    if key not in b.named:
        length = runs.length_of(b, node)
        b.named[key] = b.let("of_words", runs.loaded(b, node, length, node.dtype, length // word))
    return b.named[key]
