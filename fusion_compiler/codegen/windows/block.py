"""The window of a load that moves with outer columns alone: one element serves all lanes of the block."""

from __future__ import annotations

from fusion_compiler.codegen.builder import Builder
from fusion_compiler.codegen.expression import convert, decompose, dim_text, index_text
from fusion_compiler.codegen.tile import Load as LoadValue
from fusion_compiler.ir.dims import product, quotient
from fusion_compiler.ir.loops import COLS, ROWS, Load


def is_same(b: Builder, node: Load) -> bool:
    """Whether all lanes of the block load the same element of each row."""
    axes, first = b.a.axes[COLS], b.a.first[COLS]
    cols = [key for key, _ in node.index.terms if key >= first]
    inner = product(a.size for a in axes[max(cols, default=first) - first + 1 :])
    alone = node.within is None and not b.s.misaligned and b.tile.start is not None
    direct = all(key >= 0 for key, _ in node.index.terms)
    return bool(cols) and alone and direct and quotient(inner, b.tile.lanes) is not None


def loaded_once(b: Builder, number: int, node: Load) -> str:
    """The variable of the one element that each row of the block has: for each lane it were a load."""
    key = ("once", number)
    if key in b.named:
        return b.named[key]
    pointer = f"{b.pointers[node.buffer]} + {index_text(node.index, lambda k: _axis(b, k), b.variable)}"
    masks = [b.tile.row_mask] if b.tile.row_mask and ROWS in b.a.groups[number] else []
    masks += [f"({b.tile.start} < {dim_text(b.a.size(COLS))})"] if b.tile.col_mask else []
    then = convert("{}", b.dtypes[node.buffer], node.dtype)
    value = LoadValue(pointer, " & ".join(masks) or None, options=b.load_options, then=then)
    b.named[key] = b.let(f"block_{b.pointers[node.buffer].removesuffix('_ptr')}", value)
    return b.named[key]


def _axis(b: Builder, number: int) -> str:
    """The variable of an axis, for outer columns that of the block's first lane."""
    axes, first = b.a.axes[COLS], b.a.first[COLS]
    if number < first:
        return b.axis(number)
    text = decompose(axes, number - first, b.tile.start or "0")
    return b.once(("block", number), f"block_{b.loops.axes[number].name}", text)
