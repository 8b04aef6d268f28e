"""Loads and stores of a tile: each by the first window that its lanes fit.

window                          of what
windows/interleaved.py          every other element and its right neighbour, moved together
windows/block.py                one element that serves all lanes of a block, or one row that serves all
windows/runs.py                 one element for each of several runs of lanes
windows/misaligned.py           whole words of rows that begin anywhere
segments.py                     one element for each segment of a row
here                            any address for each lane
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusion_compiler.codegen import segments
from fusion_compiler.codegen.builder import Builder
from fusion_compiler.codegen.expression import TRITON_TYPES, convert
from fusion_compiler.codegen.tile import Expression
from fusion_compiler.codegen.tile import Store as StoreStatement
from fusion_compiler.codegen.windows import block, interleaved, misaligned, runs
from fusion_compiler.ir.loops import COLS, ROWS, InRange, Load, Node, Store, right_neighbours


def load(b: Builder, number: int, then: str) -> Expression:
    """What a load gives in the dtype of the buffer, and `then` of it; its operands are built."""
    node, groups = b.loops.nodes[number], b.a.groups[number]
    assert isinstance(node, Load)
    if node.buffer in b.empty:  # nothing is made of it but what an empty reduction gives
        return f"tl.full({b.shape(groups)}, 0, {TRITON_TYPES[node.dtype]})"
    if block.is_same(b, node):
        return f"tl.broadcast_to({block.loaded_once(b, number, node)}, {b.shape(groups)})"
    if block.is_same_in_rows(b, node):
        return f"tl.broadcast_to({block.row_loaded_once(b, number, node)}, {b.shape(groups)})"
    if (length := runs.length_of(b, node)) > 1:
        return runs.load(b, number, node, length, then)
    pointer = f"{b.pointers[node.buffer]} + {b.index(node.index)}"
    if not node.index.terms and node.index.const == 0:
        pointer = b.pointers[node.buffer]
    own = b.index_groups(node.index)
    if node.within is not None and is_of_whole_rows(b, node, b.loops.nodes[node.within]):
        name = b.pointers[node.buffer].removesuffix("_ptr")
        once = b.let(name, b.loaded(node, pointer, b.mask(own, None), then))
        return f"tl.where({b.variable(node.within)}, {once}, 0)"
    if more := b.within_groups(node.within) - own:  # a block needs a mask's shape
        pointer += f" + tl.zeros({b.shape(own | more)}, tl.int32)"
    mask = b.mask(own, node.within)
    if misaligned.is_behind(b, node):
        return misaligned.load_behind(b, node)
    if misaligned.moves_words(b, node.index, node.within):
        return misaligned.load(b, node, then)
    return b.loaded(node, pointer, mask, then)


def is_of_whole_rows(b: Builder, node: Load, within: Node) -> bool:
    """Whether a row's own value counts in some of its columns alone: every row has it, loaded once."""
    if not isinstance(within, InRange) or b.index_groups(within.index) != frozenset({COLS}):
        return False
    bounds = within.low, within.high
    some = all(isinstance(n, int) for n in bounds) and within.low < within.high
    of_rows = all(key >= 0 and b.loops.axes[key].group == ROWS for key, _ in node.index.terms)
    return some and of_rows and bool(node.index.terms) and node.dtype is not torch.bool


def converted(b: Builder, node: Load) -> str:
    """What is made of an element at once: the dtype in which it is computed with."""
    return convert("{}", b.dtypes[node.buffer], node.dtype)


def store_all(b: Builder, stores: Sequence[Store]) -> None:
    """Stores of values that are built, those of neighbours as one."""
    pairs = right_neighbours(b.loops.axes, enumerate(stores))
    together = {i: n for i, n in pairs.items() if interleaved.can_be_stored(b, stores[i])}
    for i, store in enumerate(stores):
        if i in together:
            interleaved.store(b, store, stores[together[i]])
        elif i not in together.values():
            store_one(b, store)


def store_one(b: Builder, store: Store) -> None:
    if segments.is_stored(b, store):
        segments.store(b, store)
        return
    if (segments.NARROW, store.value) in b.named and store.value not in b.env:
        segments.spread(b, store.value)
    value = b.variable(store.value)
    if misaligned.moves_words(b, store.index, store.within):
        misaligned.store(b, store.buffer, store.index, value, store.value)
        return
    groups = b.index_groups(store.index)
    mask = b.by_one(groups, b.mask(groups, store.within))
    target = f"{b.pointers[store.buffer]} + {b.index(store.index)}"
    if not groups and not b.tile.flat:  # one element from a [1, 1] tile
        target = f"{target} + tl.zeros([1, 1], tl.int32)"
    b.add(StoreStatement(target, value, mask, store.value))
