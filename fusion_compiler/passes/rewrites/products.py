"""Batched products in any of their forms, as letters for dimensions.

matmul(a, b)                     a [.., m, k], b [.., k, n] -> [.., m, n]
baddbmm(c, a, b, beta, alpha)    alpha * (a @ b) + beta * c
einsum("bhqd,bhkd->bhqk", a, b)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from fusion_compiler.capture.graphs import arguments
from fusion_compiler.ir.graph_pass import Refused
from fusion_compiler.ops.products import factors_of
from fusion_compiler.passes.rewrites.axes import Axes, Dim, Layout, shape_of

_aten = torch.ops.aten
PRODUCTS = {
    _aten.matmul.default, _aten.bmm.default, _aten.mm.default, _aten.baddbmm.default, _aten.einsum.default,
}  # fmt: skip
_EINSUM_OPERANDS = 2


@dataclass(frozen=True)
class Product:
    """A sum of products: a letter for each dimension of its two operands and its result.

    None is a dimension of size 1 that is broadcast to the other operand's. No operand has a letter twice, and
    a letter that the result lacks is in both operands.
    """

    node: fx.Node
    operands: tuple[fx.Node, fx.Node]
    letters: tuple[tuple[str | None, ...], tuple[str | None, ...]]
    result: tuple[str | None, ...]

    @property
    def inner(self) -> set[str]:
        """Return the letters that are summed over."""
        left, right = ({x for x in letters if x} for letters in self.letters)
        return (left & right) - set(self.result)

    def layouts(self, axes: Axes, operand_layouts: dict[int, Layout]) -> tuple[Layout, Layout, Layout]:
        """Return the layouts of both operands and of the result.

        operand_layouts: the layouts that are known, by the operand's number.
        """
        dims: dict[str | None, Dim] = {None: ()}
        for i, layout in operand_layouts.items():
            dims |= {x: dim for x, dim in zip(self.letters[i], layout, strict=True) if x}
        for letters, operand in zip(self.letters, self.operands, strict=True):
            for letter, size in zip(letters, shape_of(operand), strict=True):
                if letter not in dims:
                    dims[letter] = axes.new(size)
        left, right, result = (tuple(dims[x] for x in row) for row in (*self.letters, self.result))
        return left, right, result


def product_of(node: fx.Node) -> Product | None:
    """Return a call of one of PRODUCTS as a product; return None or raise Refused for other forms of it."""
    factors = factors_of(node.target)
    if factors is None:
        return _einsum(node)
    named = arguments(node)
    return _matmul(node, named[factors.left], named[factors.right])


def _matmul(node: fx.Node, a: fx.Node, b: fx.Node) -> Product:
    rows, columns = shape_of(a), shape_of(b)
    if min(len(rows), len(columns)) < 2:
        raise Refused("a product with a vector")
    rank = max(len(rows), len(columns)) - 2
    outer = [f"b{d}" for d in range(rank)]

    def batch(shape: Sequence[object], others: Sequence[object]) -> tuple[str | None, ...]:
        sizes, theirs = shape[:-2], [1] * rank + list(others[:-2])
        theirs = theirs[len(theirs) - len(sizes) :]
        letters = outer[rank - len(sizes) :]
        return tuple(None if s == 1 and t != 1 else x for x, s, t in zip(letters, sizes, theirs, strict=True))

    letters = (*batch(rows, columns), "m", "k"), (*batch(columns, rows), "k", "n")
    return Product(node, (a, b), letters, (*outer, "m", "n"))


def _einsum(node: fx.Node) -> Product | None:
    named = arguments(node)
    equation, tensors = named["equation"].replace(" ", ""), named["tensors"]
    if len(tensors) != _EINSUM_OPERANDS or "..." in equation or "->" not in equation:
        return None
    inputs, result = equation.split("->")
    left, right = inputs.split(",")
    if any(len(set(row)) != len(row) for row in (left, right, result)):
        raise Refused(f"a diagonal in einsum {equation}")
    if (set(left) ^ set(right)) - set(result):
        raise Refused(f"a sum over one operand in einsum {equation}")
    shapes = [dict(zip(row, shape_of(t), strict=True)) for row, t in zip((left, right), tensors, strict=True)]
    if any(shapes[0][x] != shapes[1][x] for x in (set(left) & set(right)) - set(result)):
        raise Refused(f"a size of 1 is summed over in einsum {equation}")
    sizes = {
        x: size
        for letters, t in zip((left, right), tensors, strict=True)
        for x, size in zip(letters, shape_of(t), strict=True)
        if size != 1
    }

    def spread(letters: str, shape: Sequence[object]) -> tuple[str | None, ...]:
        return tuple(None if s == 1 and x in sizes else x for x, s in zip(letters, shape, strict=True))

    letters = spread(left, shape_of(tensors[0])), spread(right, shape_of(tensors[1]))
    return Product(node, (tensors[0], tensors[1]), letters, tuple(result))
