"""Sum a product's terms by words (the columns that a thread loads together), so that registers hold the sums
of many products of one matrix.

    row_sum += tl.sum(tl.reshape(in0 * in1, [4, 256, 8]), axis=2)

A factor that all terms of a word share, such as the scale of a group of weights, multiplies their sum:

    run = first_col // 128 + tl.arange(0, 16)[None, :]
    of_words = fm.repeated(tl.load(in2_ptr + row * 16 + run), 16)
    row_sum += tl.sum(tl.reshape(in0 * sub, [4, 256, 8]), axis=2) * of_words
"""

from __future__ import annotations

from collections.abc import Collection

from fusion_compiler.codegen.builder import ALONG, Builder
from fusion_compiler.codegen.nodes import as_elements, build_nodes
from fusion_compiler.codegen.windows import runs
from fusion_compiler.ir.loops import COLS, ROWS, Load, operands_of
from fusion_compiler.ir.syntax import Expression, Variable, times, tl
from fusion_compiler.schedule.schedule import WORD


def word_of(b: Builder, number: int) -> int:
    """Return how many columns of a sum's terms a pass adds up at once; 1 if it does not."""
    if number not in b.a.weighted:
        return 1
    tile_groups = frozenset({ROWS, COLS})
    loads = (n for i, n in enumerate(b.loops.nodes) if isinstance(n, Load) and b.a.groups[i] == tile_groups)
    widest = max((b.dtypes[n.buffer].itemsize for n in loads), default=4)
    return min(2 * WORD // widest, WORD, b.tile.lanes)


def wanted(b: Builder, number: int) -> tuple[int, ...]:
    """Return the nodes that a pass computes for a sum by words."""
    return _varying(b, b.reduction(number).operand, _shared_factors(b, number))


def summed(b: Builder, number: int) -> Expression:
    """Return the sum of each word of the tile."""
    word, shared = word_of(b, number), _shared_factors(b, number)
    operand = b.reduction(number).operand
    tile = as_elements(b, b.reduction(number), ALONG, _product(b, operand, shared))
    shape = [*([] if b.tile.flat else [b.s.block_rows]), b.tile.lanes // word, word]
    total = tl.sum(tl.reshape(tile, shape), axis=len(shape) - 1)
    return times(total, *(_shared_factor(b, load, word) for load in shared))


def _shared_factors(b: Builder, number: int) -> tuple[int, ...]:
    """Return the factors of the terms that have one value per word, and are loaded once per word."""
    word = word_of(b, number)
    factors = tuple(b.a.factors[b.reduction(number).operand].elements())
    shared = tuple(n for n in factors if _is_shared(b, n, word))
    return shared if word > 1 and len(shared) < len(factors) else ()


def _is_shared(b: Builder, number: int, word: int) -> bool:
    node = b.loops.nodes[number]
    return isinstance(node, Load) and node.within is None and runs.length_of(b, node) % word == 0


def _varying(b: Builder, number: int, shared: Collection[int]) -> tuple[int, ...]:
    """Return the largest subexpressions without shared factors; the terms are their product times the
    shared factors."""
    if number in shared:
        return ()
    if b.a.factors[number].keys().isdisjoint(shared):
        return (number,)
    return tuple(n for operand in operands_of(b.loops.nodes[number]) for n in _varying(b, operand, shared))


def _product(b: Builder, number: int, shared: Collection[int]) -> Expression:
    varying = _varying(b, number, shared)
    build_nodes(b, b.need(varying))
    return times(*map(b.variable, varying))


def _shared_factor(b: Builder, number: int, word: int) -> Variable:
    """Return a shared factor, loaded once per word."""
    node, key = b.loops.nodes[number], ("word", number)
    assert isinstance(node, Load)
    if key not in b.named:
        length = runs.length_of(b, node)
        b.named[key] = b.let("of_words", runs.loaded(b, node, length, node.dtype, length // word))
    return b.named[key]
