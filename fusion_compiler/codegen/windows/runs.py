"""The window of a load that varies only over outer columns, of which a block has several: each element serves
a run of lanes.

    run = first_col // 128 + tl.arange(0, 8)[None, :]
    scale = fm.repeated(tl.load(in2_ptr + row * 16 + run), 128)

Examples are the scale of a group of weights, a byte that contains two of them, and the nearest pixel of a
smaller image.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fusion_compiler.codegen.builder import Builder
from fusion_compiler.codegen.expression import convert
from fusion_compiler.codegen.windows.columns import Columns, address
from fusion_compiler.ir.dims import quotient
from fusion_compiler.ir.loops import COLS, InRange, Load
from fusion_compiler.ir.syntax import Expression, fm, tl

RUN = "run"  # the variable with the number of each run
# Integers used as indices: Triton sees that neighbours load the same one, so that their addresses are
# contiguous. It does not see that for repeated values.
POSITIONS = (torch.int32, torch.int64)


def length_of(b: Builder, node: Load) -> int:
    """Return how many lanes one element serves, at most; 1 if the window does not fit."""
    outer = any(key >= b.a.first[COLS] and b.loops.axes[key].size != 1 for key, _ in node.index.terms)
    direct = all(key >= 0 for key, _ in node.index.terms)
    if not outer or not direct or b.dtypes[node.buffer] in POSITIONS:
        return 1
    inner, length = b.a.within_moving(node.index, COLS), b.tile.lanes // 2
    while length > 1 and (inner == 0 or quotient(inner, length) is None):
        length //= 2
    within = None if node.within is None else b.loops.nodes[node.within]
    if length > 1 and within is not None and not (isinstance(within, InRange) and _is_inner(b, node, within)):
        return 1
    return max(1, length)


def _is_inner(b: Builder, node: Load, within: InRange) -> bool:
    """True if a mask depends only on inner columns, which share one element: all of them may load it."""
    bounds = within.low, within.high
    valid = all(isinstance(n, int) for n in bounds) and within.low < within.high and bool(within.index.terms)
    last = max(key for key, _ in node.index.terms)
    return valid and all(key > last for key, _ in within.index.terms)


def load(b: Builder, number: int, node: Load, length: int, dtype: torch.dtype) -> Expression:
    """Return one load per run, repeated along it."""
    equal_loads = [i for i, n in enumerate(b.loops.nodes) if isinstance(n, Load) and _of(n) == _of(node)]
    if node.within is None and len(equal_loads) == 1:
        return loaded(b, node, length, dtype, length)
    key = (f"{RUN} {dtype}", equal_loads[0])
    if key not in b.named:
        b.named[key] = b.let(b.called(node.buffer), loaded(b, node, length, dtype, length), number)
    if node.within is None:
        return b.named[key]
    return tl.where(b.variable(node.within), b.named[key], 0)


def _of(node: Load) -> object:
    return node.buffer, node.index, node.dtype


def loaded(b: Builder, node: Load, length: int, dtype: torch.dtype, times: int) -> Expression:
    """Return one element per run of `length` lanes, each repeated `times` times. Its index is over columns
    that are runs."""
    axes, outer = b.loops.axes, max(key for key, _ in node.index.terms) + 1
    inner = b.a.within_moving(node.index, COLS)
    sizes = (quotient(inner, length) or 1, *(1 for _ in axes[outer + 1 :]))
    axes = (*axes[:outer], *(replace(a, size=n) for a, n in zip(axes[outer:], sizes, strict=True)))
    columns = Columns(RUN, axes, b.tile.lanes // length, lambda start: start // length, f"{RUN} {length}")
    value = b.loaded(node, *address(b, columns, node.buffer, node.index))
    value = convert(value, b.dtypes[node.buffer], dtype)
    return fm.repeated(value, times) if times > 1 else value
