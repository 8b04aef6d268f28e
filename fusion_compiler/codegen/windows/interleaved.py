"""Elements and their right neighbours, moved together.

Separate accesses to every other element of a row, and then to those between, would touch each sector twice
and move two bytes at a time. One access to twice the columns moves whole words:

    pair = first_col * 2 + tl.arange(0, 2 * 1024)
    x, y = tl.split(tl.load(in0_ptr + pair).reshape(1024, 2))
    tl.store(out0_ptr + pair, tl.interleave(x, y))
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fusion_compiler.codegen.builder import Builder
from fusion_compiler.codegen.expression import convert
from fusion_compiler.codegen.tile import Assign
from fusion_compiler.codegen.tile import Store as StoreStatement
from fusion_compiler.codegen.windows.columns import Columns, address
from fusion_compiler.ir.dims import simple
from fusion_compiler.ir.loops import COLS, Index, Load, Store, axes_in
from fusion_compiler.ir.syntax import Expression, Var, tl

PAIR = "pair"  # the variable with the element numbers of twice the columns


def pair_of(b: Builder, number: int) -> tuple[int, int] | None:
    """Return a load and that of the neighbouring elements, if neither is built yet, else None."""
    pair = next((p for p in b.a.pairs.items() if number in p), None)
    if pair is None or any(n in b.env for n in pair):
        return None
    left = b.loops.nodes[pair[0]]
    assert isinstance(left, Load)
    return None if left.buffer in b.empty else pair


def load(b: Builder, pair: tuple[int, int]) -> None:
    """Build two loads as one of twice the columns."""
    left = b.loops.nodes[pair[0]]
    assert isinstance(left, Load)
    pointer, mask = _address(b, left.buffer, left.index)
    shape = b.shape(b.index_groups(left.index)).items
    value = b.loaded(left, pointer, mask).reshape(*shape, 2)
    variables = tuple(Var(b.called(left.buffer)) for _ in pair)
    b.add(Assign(variables, tl.split(convert(value, b.dtypes[left.buffer], left.dtype)), pair[0]))
    b.env.update(zip(pair, variables, strict=True))


def store(b: Builder, left: Store, right: Store) -> None:
    """Build two stores as one. Their values must be built."""
    groups = b.index_groups(left.index)
    values: list[Expression] = []
    for number in (left.value, right.value):
        value = convert(b.variable(number), b.loops.nodes[number].dtype, b.dtypes[left.buffer])
        is_full = b.a.groups[number] == groups
        values.append(value if is_full else tl.broadcast_to(value, b.shape(groups)))
    pointer, mask = _address(b, left.buffer, left.index)
    b.add(StoreStatement(pointer, tl.interleave(*values), mask))


def can_be_stored(b: Builder, left: Store) -> bool:
    return b.dtypes[left.buffer] is not torch.bool


def _address(b: Builder, buffer: str, index: Index) -> tuple[Expression, Expression | None]:
    """Return (addresses of elements and their right neighbours, mask) for an index over the columns."""
    last = max(axes_in(b.loops.axes, (COLS,)))
    axes = (*b.loops.axes[:last], replace(b.loops.axes[last], size=simple(b.loops.axes[last].size * 2)))
    terms = tuple((k, c if k != last else 1) for k, c in index.terms)
    columns = Columns(PAIR, axes, 2 * b.tile.lanes, lambda start: start * 2, PAIR)
    return address(b, columns, buffer, Index(index.const, terms))
