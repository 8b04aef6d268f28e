"""The axes that the dimensions of a tensor are made of: the meaning of a dimension apart from its place.

    [batch * heads, rows, keys]   is   ((batch, heads), (rows,), (keys,))

An axis is a number. A dimension is a tuple of axes, outermost first: none for a size of 1, several where it
folds them. A view that cuts an axis cuts it for every tensor that has it, operands met before included.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from fusion_compiler.ir.graph_pass import Refused
from fusion_compiler.ir.layout import view_of_node
from fusion_compiler.ops.views import Permuted, Reshaped
from fusion_compiler.passes.rewrites.mask_algebra import expression

_aten = torch.ops.aten
Dim = tuple[int, ...]
Layout = tuple[Dim, ...]
COPIES = {_aten.contiguous.default, _aten.clone.default, _aten.alias.default}


class Axes:
    """The axes of one computation, and the parts of those that a view cut."""

    def __init__(self) -> None:
        self._sizes: list[sympy.Expr] = []
        self._parts: dict[int, Dim] = {}

    def new(self, size: sympy.Expr) -> Dim:
        """Return a dimension of a new axis; no axis if its size is 1."""
        if size == 1:
            return ()
        self._sizes.append(size)
        return (len(self._sizes) - 1,)

    def size(self, axis: int) -> sympy.Expr:
        return self._sizes[axis]

    def now(self, dim: Iterable[int]) -> Dim:
        """Return a dimension's axes after all cuts."""
        return tuple(
            a for axis in dim for a in (self.now(self._parts[axis]) if axis in self._parts else (axis,))
        )

    def through(self, node: fx.Node, layout: Layout) -> Layout | None:
        """Return the layout after a view, a permutation or a copy, or None for another operator.

        Raises Refused for a view that cuts across axes.
        """
        match rearrangement(node):
            case Reshaped():
                return self._reshaped(layout, shape_of(node))
            case Permuted(order):
                return tuple(layout[d] for d in order)
            case _:
                return None

    def _reshaped(self, layout: Layout, shape: Sequence[sympy.Expr]) -> Layout:
        pending = [axis for dim in layout for axis in self.now(dim)][::-1]
        result: list[Dim] = []
        for size in shape:
            dim: list[int] = []
            while size != 1:
                if not pending:
                    raise Refused("a view of the scores has other elements")
                axis = pending.pop()
                if (rest := _quotient(size, self._sizes[axis])) is not None:
                    dim.append(axis)
                    size = rest
                elif (rest := _quotient(self._sizes[axis], size)) is not None:
                    outer, inner = self.new(size), self.new(rest)
                    self._parts[axis] = (*outer, *inner)
                    pending += [*inner, *outer]
                else:
                    raise Refused("a view of the scores cuts across their axes")
            result.append(tuple(dim))
        if pending:
            raise Refused("a view of the scores has other elements")
        return tuple(result)


def shape_of(node: fx.Node) -> tuple[sympy.Expr, ...]:
    return tuple(expression(s) for s in node.meta["val"].shape)


def rearrangement(node: fx.Node) -> Reshaped | Permuted | None:
    """Return what a reshape, a permutation or a copy does with its operand; None for another operator."""
    if node.target in COPIES:
        return Permuted(tuple(range(node.meta["val"].dim())))
    view = view_of_node(node)
    return view if isinstance(view, Reshaped | Permuted) else None


def _quotient(size: sympy.Expr, part: sympy.Expr) -> sympy.Expr | None:
    """Return size / part, or None if that is not an integer for all values of the symbols."""
    ratio: Any = sympy.cancel(size / part)
    is_whole = ratio.is_Integer or (not ratio.is_number and sympy.denom(ratio) == 1)
    return ratio if is_whole else None
