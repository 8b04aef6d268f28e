"""Loads and stores of a tile. Each uses the first window that fits its lanes.

window                          accesses
windows/interleaved.py          every other element and its right neighbour, moved together
windows/block.py                one element for all lanes of a block, or one row for all its rows
windows/runs.py                 one element for each of several runs of lanes
here                            any address for each lane
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusion_compiler.codegen.builder import Builder
from fusion_compiler.codegen.expression import convert
from fusion_compiler.codegen.tile import Store as StoreStatement
from fusion_compiler.codegen.windows import block, interleaved, runs
from fusion_compiler.ir.loops import COLS, ROWS, InRange, Load, Node, Store, right_neighbours
from fusion_compiler.ir.syntax import Expression, plus, tl


def load(b: Builder, number: int, dtype: torch.dtype) -> Expression:
    """Return the value of a load in a dtype. Its operands must be built."""
    node, groups = b.loops.nodes[number], b.a.groups[number]
    assert isinstance(node, Load)
    if node.buffer in b.empty:  # only an empty reduction, which returns its neutral element, reads it
        return tl.full(b.shape(groups), 0, node.dtype)
    if block.is_same(b, node):
        return tl.broadcast_to(block.loaded_once(b, number, node), b.shape(groups))
    if block.is_same_in_rows(b, node):
        return tl.broadcast_to(block.row_loaded_once(b, number, node), b.shape(groups))
    if (length := runs.length_of(b, node)) > 1:
        return runs.load(b, number, node, length, dtype)
    is_first_element = not node.index.terms and node.index.const == 0
    pointer = b.pointers[node.buffer] if is_first_element else b.address(node.buffer, node.index)
    varies = b.index_groups(node.index)
    if node.within is not None and is_of_whole_rows(b, node, b.loops.nodes[node.within]):
        value = as_dtype(b, node, b.loaded(node, pointer, b.mask(varies, None)), dtype)
        return tl.where(b.variable(node.within), b.let(b.called(node.buffer), value), 0)
    if missing := b.within_groups(node.within) - varies:  # addresses need the shape of the mask
        pointer += tl.zeros(b.shape(varies | missing), torch.int32)
    mask = b.mask(varies, node.within)
    return as_dtype(b, node, b.loaded(node, pointer, mask), dtype)


def is_of_whole_rows(b: Builder, node: Load, within: Node) -> bool:
    """True if a load has one value per row, used only in a range of columns: every row may load it once."""
    if not isinstance(within, InRange) or b.index_groups(within.index) != frozenset({COLS}):
        return False
    bounds = within.low, within.high
    is_nonempty = all(isinstance(n, int) for n in bounds) and within.low < within.high
    varies_over_rows = all(key >= 0 and b.loops.axes[key].group == ROWS for key, _ in node.index.terms)
    return is_nonempty and varies_over_rows and bool(node.index.terms) and node.dtype is not torch.bool


def as_dtype(b: Builder, node: Load, value: Expression, dtype: torch.dtype) -> Expression:
    """Return a value converted from the dtype of a load's buffer to another dtype."""
    return convert(value, b.dtypes[node.buffer], dtype)


def store_all(b: Builder, stores: Sequence[Store]) -> None:
    """Store values that are built, neighbours together."""
    pairs = right_neighbours(b.loops.axes, enumerate(stores))
    together = {i: n for i, n in pairs.items() if interleaved.can_be_stored(b, stores[i])}
    for i, store in enumerate(stores):
        if i in together:
            interleaved.store(b, store, stores[together[i]])
        elif i not in together.values():
            store_one(b, store)


def store_one(b: Builder, store: Store) -> None:
    value = b.variable(store.value)
    groups = b.index_groups(store.index)
    mask = b.by_one(groups, b.mask(groups, store.within))
    target = b.address(store.buffer, store.index)
    if not groups and not b.tile.flat:  # store one element from a [1, 1] tile
        target = plus(target, tl.zeros([1, 1], torch.int32))
    b.add(StoreStatement(target, value, mask, store.value))
