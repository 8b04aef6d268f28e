"""Elements and their right neighbours, moved together.

What takes every other element of a row, and then those between them, would touch each sector twice and move
two bytes at a time; so would what makes them. As one access of twice the columns both move whole words:

    pair = first_col * 2 + tl.arange(0, 2 * 1024)
    x, y = tl.split(tl.load(in0_ptr + pair).reshape(1024, 2))
    tl.store(out0_ptr + pair, tl.interleave(x, y))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fusion_compiler.codegen.expression import convert, decompose, dim_text, index_text
from fusion_compiler.ir.dims import simple
from fusion_compiler.ir.loops import COLS, ROWS, Constant, Index, Load, Store, operands_of, right_neighbours
from fusion_compiler.schedule.analysis import Analysis

if TYPE_CHECKING:
    from fusion_compiler.codegen.printer import Printer

PAIR = "pair"  # the variable with the element numbers of twice the columns


def load_with_neighbour(p: Printer, number: int) -> bool:
    """Print a load together with that of the elements beside it; False where there is none."""
    found = next((pair for pair in p.a.pairs.items() if number in pair), None)
    if found is None or p.s.skewed or any(n in p.env for n in found):
        return False
    left = p.loops.nodes[found[0]]
    assert isinstance(left, Load)
    if left.buffer in p.empty:
        return False
    pointer, mask = _address(p, left.buffer, left.index)
    groups = p.index_groups(left.index)
    shape = f"{p.shape(groups)[1:-1]}, 2"
    text = f"{p.loaded(left, pointer, mask, groups)}.reshape({shape})"
    base = p.pointers[left.buffer].removesuffix("_ptr")
    names = [p.fresh(base) for _ in found]
    p.line(f"{', '.join(names)} = tl.split({convert(text, p.dtypes[left.buffer], left.dtype)})")
    p.env.update(zip(found, names, strict=True))
    return True


def pairs_last(p: Printer, numbers: list[int]) -> list[int]:
    """Nodes in an order in which single loads come first.

    Triton computes in the layout of the last load; the others, which are narrower, go through shared memory.
    """
    if not p.a.pairs:
        return numbers
    pairs = {n for pair in p.a.pairs.items() for n in pair}
    nodes = p.loops.nodes
    single = [
        n for n in numbers if isinstance(nodes[n], Load) and n not in pairs and not operands_of(nodes[n])
    ]
    return [*single, *(n for n in numbers if n not in single)]


def store_all(p: Printer, stores: Sequence[Store]) -> None:
    """Print stores, those of neighbours as one."""
    pairs = right_neighbours(p.loops.axes, enumerate(stores))
    together = {i: n for i, n in pairs.items() if p.dtypes[stores[i].buffer] is not torch.bool}
    if p.s.skewed:
        together = {}
    for i, store in enumerate(stores):
        if i in together:
            _store_pair(p, store, stores[together[i]])
        elif i not in together.values():
            p.store(store)


def _store_pair(p: Printer, left: Store, right: Store) -> None:
    groups = p.index_groups(left.index)
    values: list[str] = []
    for number in (left.value, right.value):
        if isinstance(p.loops.nodes[number], Constant):
            p.variable(number)
        text = convert(p.variable(number), p.loops.nodes[number].dtype, p.dtypes[left.buffer])
        whole = p.a.groups[number] == groups
        values.append(text if whole else f"tl.broadcast_to({text}, {p.shape(groups)})")
    pointer, mask = _address(p, left.buffer, left.index)
    p.line(f"tl.store({pointer}, tl.interleave({', '.join(values)}){f', mask={mask}' if mask else ''})")


def _address(p: Printer, buffer: str, index: Index) -> tuple[str, str | None]:
    """(addresses of elements and their right neighbours, mask): the index over twice the columns."""
    last = len(p.loops.axes) - 1
    axes = (*p.loops.axes[:last], replace(p.loops.axes[last], size=simple(p.loops.axes[last].size * 2)))
    wide = Analysis(replace(p.loops, axes=axes))
    terms = tuple((k, c if k != last else 1) for k, c in index.terms)
    merged, whole = wide.merged(Index(index.const, terms))

    def variable(number: int) -> str:
        if axes[number].group == ROWS:
            return "row" if number in whole else p.axis(number)
        text = _columns(p)
        if number not in whole and len(wide.axes[COLS]) > 1:
            text = decompose(wide.axes[COLS], number - wide.first[COLS], text)
            return _defined(p, f"{PAIR}_{number - wide.first[COLS]}", text)
        return text

    pointer = f"{p.pointers[buffer]} + {index_text(merged, variable, p.variable)}"
    masks = [p.row_mask if ROWS in p.index_groups(index) else None]
    if p.col_mask:
        masks.append(_defined(p, f"{PAIR}_inside", f"{_columns(p)} < {dim_text(wide.size(COLS))}"))
    return pointer, " & ".join(m for m in masks if m) or None


def _columns(p: Printer) -> str:
    lanes = f"tl.arange(0, {2 * p.s.block_cols})" + ("" if p.flat else "[None, :]")
    start = p.col_start
    if start is None:
        return _defined(p, PAIR, lanes)
    return _defined(p, PAIR, f"{start if start.isidentifier() else f'({start})'} * 2 + {lanes}")


def _defined(p: Printer, name: str, text: str) -> str:
    """A variable, printed on its first use in the scopes now open."""
    if (name, 0) not in p.index_env:
        p.index_env[name, 0] = variable = p.fresh(name)
        p.line(f"{variable} = {text}")
    return p.index_env[name, 0]
