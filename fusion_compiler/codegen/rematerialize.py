"""Recompute values instead of keeping them in registers while a program waits for others."""

from __future__ import annotations

from collections.abc import Iterable

from fusion_compiler.codegen.accesses import as_dtype
from fusion_compiler.codegen.builder import Builder
from fusion_compiler.ir.loops import COLS, ROWS, Compute, Load, operands_of
from fusion_compiler.ir.ops import spec_of
from fusion_compiler.ir.syntax import fm

WHOLE = frozenset({ROWS, COLS})


def rematerialize(b: Builder, wanted: Iterable[int]) -> None:
    """Before `wanted` is built, let tiles be recomputed from loaded ones. Tiles that it reads and that took
    special functions are kept."""
    read = {o for n in b.need(wanted) for o in operands_of(b.loops.nodes[n])}
    for number in sorted(b.env):
        node = b.loops.nodes[number] if number >= 0 else None
        if number in b.kept:
            assert isinstance(node, Load)
            again = as_dtype(b, node, fm.again(b.kept[number]), node.dtype)
            b.env[number] = b.let(b.env[number].base, again, number)
        elif isinstance(node, Compute) and b.a.groups[number] == WHOLE:
            if number not in read or not takes_long(b, number):
                del b.env[number]


def takes_long(b: Builder, number: int) -> bool:
    """True if computing a tile from loaded values takes special functions."""
    node = b.loops.nodes[number]
    if not isinstance(node, Compute) or b.a.groups[number] != WHOLE:
        return False
    spec = spec_of(node.target)
    return spec is None or spec.special > 0 or any(takes_long(b, o) for o in operands_of(node))
