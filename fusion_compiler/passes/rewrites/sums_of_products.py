"""A sum of products over broadcast operands is a matrix product.

    (a[:, :, None, :] * b[:, None, :, :]).sum(-1)   ->   einsum("bik,bjk->bij", a, b)

State-space models without special kernels are written so. Each operand lacks dimensions that the other has,
and the sum is over dimensions that both have. If one operand has all dimensions of the other it is read once,
and a cluster computes the sum as fast; so it does if there is little to add up.
"""

from __future__ import annotations

import math
import string
from dataclasses import dataclass

import torch
from torch import fx

from fusion_compiler.capture.graphs import arguments, emit, written_between
from fusion_compiler.ir.graph_pass import Pass
from fusion_compiler.passes.rewrites.engine import Replacement, Replacements
from fusion_compiler.passes.rewrites.mask_algebra import expression

_aten = torch.ops.aten
RULE = "sums of products"
LEAST = 16  # rows, columns and terms of a product that is worth a call of a library


@dataclass(frozen=True)
class _Product:
    """sum(left * right), as the dimensions of their product that each operand has and that the sum keeps."""

    left: tuple[int, ...]
    right: tuple[int, ...]
    kept: tuple[int, ...]

    @property
    def equation(self) -> str:
        dims_of_both = (*self.left, *self.right)
        groups = self.left, self.right, [d for d in self.kept if d in dims_of_both]
        left, right, kept = ("".join(string.ascii_letters[d] for d in dims) for dims in groups)
        return f"{left},{right}->{kept}"


def _look(node: fx.Node, written: set[fx.Node]) -> Replacement | None:
    product = _product_of(node)
    return product and Replacement(lambda nodes: _multiply(nodes[node], product), product.equation)


def _product_of(node: fx.Node) -> _Product | None:
    named = arguments(node)
    source, dims = named["self"], named["dim"]
    if source.target is not _aten.mul.Tensor or {*source.users} != {node} or not dims:
        return None
    operands = source.args[:2]
    if not all(isinstance(operand, fx.Node) for operand in operands):
        return None
    full, *values = (n.meta["val"] for n in (source, *operands))  # type: ignore[union-attr]
    if {v.dtype for v in values} != {full.dtype} or node.meta["val"].dtype != full.dtype:
        return None
    if not full.dtype.is_floating_point or _is_coarse(full) or full.dim() > 26:
        return None
    left, right = (_dims(value, full.dim()) for value in values)
    summed = {d % full.dim() for d in dims}
    kept = tuple(d for d in range(full.dim()) if d not in summed)
    rows, columns = ({*a} - {*b} for a, b in ((left, right), (right, left)))
    if (rows | columns) & summed or summed - {*left}:
        return None  # a dimension of one operand would be added up first, or none is added up
    if any(_count(full, part) < LEAST for part in (rows, columns, summed)):
        return None
    return None if written_between(source, node, operands) else _Product(left, right, kept)


def _is_coarse(value: torch.Tensor) -> bool:
    """True if the library may multiply with fewer digits than the dtype has."""
    return value.dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest"


def _dims(value: torch.Tensor, rank: int) -> tuple[int, ...]:
    """Return the dimensions of a broadcast shape of `rank` along which a tensor has several elements."""
    first = rank - value.dim()
    return tuple(first + i for i, size in enumerate(value.shape) if expression(size) != 1)


def _count(value: torch.Tensor, dims: set[int]) -> int:
    """Return the number of elements along some dimensions, or 0 if it is only known at run time."""
    sizes = [expression(value.shape[d]) for d in dims]
    return math.prod(int(n) for n in sizes) if sizes and all(n.is_Integer for n in sizes) else 0


def _multiply(node: fx.Node, product: _Product) -> fx.Node:
    source = arguments(node)["self"]
    rank, lost = source.meta["val"].dim(), node.meta["val"].dim()
    operands = [
        _without_ones(node, operand, [d - rank for d in dims])
        for operand, dims in zip(source.args[:2], (product.left, product.right), strict=True)
    ]
    result = emit(node, _aten.einsum.default, product.equation, operands)
    result = emit(node, _aten.contiguous.default, result)
    places = range(rank) if lost == rank else product.kept
    present = {*product.left, *product.right} & {*product.kept}
    for i, d in enumerate(places):
        if d not in present:
            result = emit(node, _aten.unsqueeze.default, result, i)
    return result


def _without_ones(node: fx.Node, operand: object, dims: list[int]) -> fx.Node:
    """Emit an operand without dimensions of one element. dims: dimensions to keep, counted from the last."""
    assert isinstance(operand, fx.Node)
    rank = operand.meta["val"].dim()
    ones = [d for d in range(rank) if d - rank not in dims]
    return emit(node, _aten.squeeze.dims, operand, ones) if ones else operand


SUMS_OF_PRODUCTS = Pass(
    RULE,
    Replacements(RULE, (_aten.sum.dim_IntList,), _look),
    does="Replace a sum of products of broadcast operands by a matrix product.",
    when="each operand lacks dimensions that the other one has",
    rounds_as_eager=False,
)
