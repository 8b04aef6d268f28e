"""Decompose lookups, scatters and searches, and products whose operands have to lie in lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, _refs
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_compiler.ops.decompositions import rows_by_number
from fusion_compiler.ops.decompositions.reductions import MOST_SEARCHED
from fusion_compiler.ops.decompositions.tensors import coordinates, on_gpu, zero_like
from fusion_compiler.ops.table import FEW_ROWS

aten = torch.ops.aten


def _one_in_each_row(x: Tensor, dim: int, index: Tensor) -> Tensor | None:
    """Return True where `index` points, or None unless it names one position along dim for each row of x."""
    sizes = [1 if d == dim % max(x.ndim, 1) else size for d, size in enumerate(x.shape)]
    if not x.ndim or index.ndim != x.ndim:
        return None
    if not all(statically_known_true(a == b) for a, b in zip(index.shape, sizes, strict=True)):
        return None
    return coordinates(x.shape[dim], dim % x.ndim, x) == _looked_up(index, dim % x.ndim, x.shape[dim])


def _looked_up(index: Tensor, dim: int, size: int) -> Tensor:
    """Return index, looked up along `dim` among 0 .. size - 1, which raises an error where it is outside."""
    shape = [size if d == dim else n for d, n in enumerate(index.shape)]
    return torch.gather(coordinates(size, dim, index).expand(shape), dim, index)


def _scatter(x: Tensor, dim: int, index: Tensor, src: Tensor | float) -> Any:
    """Scatter element-wise if each row gets one value: the gradient of max, one-hot, a target's probability.

    The result is in row order as in eager, whatever the order of the operands.
    """
    if isinstance(src, Tensor) and (gradient := _gradient_of_topk(x, dim, index, src)) is not None:
        return gradient
    hit = _one_in_each_row(x, dim, index)
    if hit is None:
        return NotImplemented
    if isinstance(src, Tensor):
        value = src[tuple(slice(size) for size in index.shape)]
    else:
        value = torch.full((), src, dtype=x.dtype, device=x.device)
    return torch.where(hit, value, x).contiguous()


def _gradient_of_topk(zeros: Tensor, dim: int, index: Tensor, grad: Tensor) -> Tensor | None:
    """Return the gradient of topk, which autograd scatters into zeros, or None for any other scatter. Nothing
    checks the indices of a row, which topk returned: they are different, and lie inside of the row."""
    node: Any = torch._C._current_autograd_node()  # type: ignore[attr-defined]
    if node is None or node.name() != "TopkBackward0" or not on_gpu(zeros) or not zeros.ndim:
        return None
    count, dim = index.shape[dim], dim % zeros.ndim
    sizes = enumerate(zip(zeros.shape, index.shape, grad.shape, strict=True))
    alike = all(statically_known_true(n == m == size) for d, (size, n, m) in sizes if d != dim)
    if not alike or type(count) is not int or count > MOST_SEARCHED:
        return None
    position = coordinates(zeros.shape[dim], dim, zeros)
    for i in range(count):
        zeros = torch.where(position == index.narrow(dim, i, 1), grad.narrow(dim, i, 1), zeros)
    return zeros.contiguous()


def _scatter_add(x: Tensor, dim: int, index: Tensor, src: Tensor) -> Any:
    hit = _one_in_each_row(x, dim, index)
    if hit is None:
        return rows_by_number.scatter_reduce(x, dim, index, src, "sum")
    value = src[tuple(slice(size) for size in index.shape)]
    return (x + torch.where(hit, value, zero_like(src))).contiguous()


def _product(x: Tensor, y: Tensor) -> Any:
    """Multiply [.., m, k] by [.., k, n]. With k = 1, as for frequencies and positions, this is
    element-wise."""
    if statically_known_true(x.shape[-1] == 1):
        return (x * y).contiguous()
    if any(statically_known_true(n <= FEW_ROWS) for n in (x.shape[-2], y.shape[-1])):
        return NotImplemented  # a cluster reads its operands as they lie
    a, b = _in_lines(x), _in_lines(y)
    if a is x and b is y:
        return NotImplemented
    return (aten.bmm.default if x.ndim == 3 else aten.mm.default)(a, b)


def _in_lines(x: Tensor) -> Tensor:
    """Return matrices whose elements follow each other along one of their dimensions, as a library needs
    them.

    PyTorch copies other matrices, as in an einsum over all but the last dimension, slowly before the product.
    Here a cluster stores in the copy's order. The larger stride comes first, so that a matrix and its
    transpose have one copy.
    """
    row, column = x.stride()[-2:]
    if not all(statically_known_true(n > 1) for n in (row, column, *x.shape[-2:])):
        return x
    if statically_known_true(row >= column):
        return x.contiguous()
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Look up by a 1-d index. PyTorch's own decomposition reads the value of a 0-d index while tracing, which
    a FakeTensor does not have."""
    return aten.index.Tensor(x.reshape(-1), [index])


def _bucketize(x: Tensor, boundaries: Tensor, *, out_int32: bool = False, right: bool = False) -> Tensor:
    """Search as PyTorch does. A 0-d tensor is searched as a tensor of one element, because PyTorch's code
    would read the values of boundaries for it, which a FakeTensor does not have."""
    if statically_known_true(boundaries.shape[0] == 0):
        return torch.zeros_like(x, dtype=torch.int32 if out_int32 else torch.int64)
    listed = x if x.ndim else x.view(1)
    return _refs.bucketize(listed, boundaries, out_int32=out_int32, right=right).view(x.shape)


TABLE: dict[OpOverload, Callable[..., Any]] = {
    aten.scatter.src: _scatter,
    aten.scatter.value: _scatter,
    aten.scatter_add.default: _scatter_add,
    aten.scatter_reduce.two: rows_by_number.scatter_reduce,
    aten.embedding_dense_backward.default: rows_by_number.embedding_backward,
    aten.index_put.default: rows_by_number.index_put,
    aten.mm.default: _product,
    aten.bmm.default: _product,
    aten.take.default: _take,
    aten.bucketize.Tensor: _bucketize,
}
