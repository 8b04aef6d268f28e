"""A sum of products over broadcast operands is a matrix product.

    (a[:, :, None, :] * b[:, None, :, :]).sum(-1)   ->   einsum("bik,bjk->bij", a, b)

State-space models without special kernels are written so. Each operand lacks dimensions that the other has,
and the sum is over dimensions that both have. If one operand has all dimensions of the other it is read once,
and a cluster computes the sum as fast; so it does if there is little to add up.
"""

from __future__ import annotations

import math
import string
from collections.abc import Iterable
from typing import Any

import torch

from fusion_compiler.ir.graph_pass import Pass
from fusion_compiler.passes.rewrites.engine import Rules, rule
from fusion_compiler.passes.rewrites.mask_algebra import expression

aten = torch.ops.aten
RULE = "sums of products"
LEAST = 16  # rows, columns and terms of a product that is worth a call of a library
Dims = tuple[int, ...]


def _dims(a: Any, b: Any, dims: list[int]) -> tuple[Dims, Dims, Dims]:
    """Return the dimensions of a product along which each operand has several elements, and those that a sum
    over `dims` keeps."""
    rank = max(a.dim(), b.dim())
    left, right = (
        tuple(rank - x.dim() + i for i, size in enumerate(x.shape) if expression(size) != 1) for x in (a, b)
    )
    return left, right, tuple(d for d in range(rank) if d not in {e % rank for e in dims})


def _equation(a: Any, b: Any, dims: list[int]) -> str:
    left, right, kept = _dims(a, b, dims)
    groups = left, right, [d for d in kept if d in (*left, *right)]
    return "{},{}->{}".format(*("".join(string.ascii_letters[d] for d in group) for group in groups))


def _multiplied(a: Any, b: Any, dims: list[int], keepdim: bool) -> Any:
    *both, kept = _dims(a, b, dims)
    rank = max(a.dim(), b.dim())
    operands = [_without_ones(x, [d - rank for d in has]) for x, has in zip((a, b), both, strict=True)]
    result = aten.contiguous.default(aten.einsum.default(_equation(a, b, dims), operands))
    for i, d in enumerate(range(rank) if keepdim else kept):
        if d not in kept or d not in {*both[0], *both[1]}:
            result = aten.unsqueeze.default(result, i)
    return result


def _without_ones(x: Any, kept: list[int]) -> Any:
    """Return an operand without dimensions of one element. kept: the others, counted from the last."""
    ones = [d for d in range(x.dim()) if d - x.dim() not in kept]
    return aten.squeeze.dims(x, ones) if ones else x


def _is_product(result: Any, a: Any, b: Any, dims: list[int], keepdim: bool) -> bool:
    """True if each operand lacks dimensions that the other has, and the sum is over dimensions of both."""
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and dims):
        return False
    if {a.dtype, b.dtype} != {result.dtype} or not a.is_floating_point() or max(a.dim(), b.dim()) > 26:
        return False
    left, right, kept = map(set, _dims(a, b, dims))
    return left ^ right <= kept and {*range(max(a.dim(), b.dim()))} - kept <= left


def _pays(result: Any, a: Any, b: Any, dims: list[int], keepdim: bool) -> bool:
    if a.dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return False  # the library may multiply with fewer digits
    left, right, kept = map(set, _dims(a, b, dims))
    parts = (a, left - right), (b, right - left), (a, left - kept)
    rank = max(a.dim(), b.dim())
    return all(_count(x.shape[d - rank] for d in part) >= LEAST for x, part in parts)


def _count(shape: Iterable[Any]) -> int:
    """Return the number of elements of a shape, or 0 for an empty one and if it is only known at run time."""
    sizes = [expression(n) for n in shape]
    return math.prod(int(n) for n in sizes) if sizes and all(n.is_Integer for n in sizes) else 0


SUMS_OF_PRODUCTS = Pass(
    RULE,
    Rules(
        RULE,
        (
            rule(
                lambda a, b, dims, keepdim: aten.sum.dim_IntList(aten.mul.Tensor(a, b), dims, keepdim),
                _multiplied,
                (torch.ones(2, 3, 1, 4), torch.ones(2, 1, 5, 4), [-1], False),
                (torch.ones(3, 1, 4, 6).bfloat16(), torch.ones(5, 4, 6).bfloat16(), [-1, -2], True),
                where=_is_product,
                pays=_pays,
                note=lambda result, a, b, dims, keepdim: _equation(a, b, dims),
            ),
        ),
    ),
    does="Replace a sum of products of broadcast operands by a matrix product.",
    when="each operand lacks dimensions that the other one has",
    rounds_as_eager=False,
)
