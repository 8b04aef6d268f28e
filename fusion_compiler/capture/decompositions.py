"""Write composite operators in rows of the operator table, for AOTAutograd.

Start: PyTorch's core ATen decompositions, less the operators that have a row of their own and
the contractions, which stay whole. The functions here replace those that are missing there, that
would sum 16-bit floats in 16 bits, or that scatter, that cancel, or that lose a NaN. The rules: 16-bit
floats are widened to float32 once at the entry and narrowed once at the exit; variances are of centred
values; 1 - sigmoid(x) is sigmoid(-x), of which digits are left where x is large; of a choice between
formulas NaN takes the one that computes with it; what eager makes contiguous is contiguous here, and
channels-last what is that in eager, as a traced view may rely on it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, _refs
from torch._decomp import _core_aten_decompositions_post_autograd, get_decompositions
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_compiler.capture import eager_decompositions, image_decompositions, rows_by_number
from fusion_compiler.capture.eager_decompositions import (
    assert_probabilities,
    dense_on_cpu,
    in_order,
    unless_refused,
)
from fusion_compiler.capture.few_queries import in_chunks
from fusion_compiler.capture.target import on_gpu
from fusion_compiler.capture.traced_gradients import INTERPOLATIONS
from fusion_compiler.ir.dag import FEW_ROWS
from fusion_compiler.ops.own import few_queries, group_norm, max_pool, permuted_rows, random, running
from fusion_compiler.ops.table import Kind, spec_of

aten = torch.ops.aten

LARGE = 1 << 24  # elements that no cache holds until they are read again
SAMPLE = 64  # rows of which one is looked at beforehand
# Top-k of more elements stays a library call: each adds a search, two reductions, to the kernel, and lowering
# stores no more of them beside a row.
MOST_SEARCHED = 8
# So does top-k of longer rows: all searches are of one tile, in registers. If a row's elements are not
# neighbours in memory, the tile has several rows side by side.
LONGEST, LONGEST_ACROSS = 4096, 2048

# Contractions and scatters that core ATen would take apart. They stay library calls.
_WHOLE = (
    aten.baddbmm.default,
    aten.scaled_dot_product_attention.default,
    aten._scaled_dot_product_attention_math.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten.select_scatter.default,  # PyTorch's gives the dtype of both, eager that of the first
)

# Right as they are in PyTorch, and not part of its core table. They call var_mean and friends,
# which are then taken from this table.
_BORROWED = (
    aten.native_batch_norm,
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_functional,
    aten._native_batch_norm_legit_no_training,
    aten._batch_norm_with_update_functional,
    aten._batch_norm_no_update,
    aten.batch_norm_backward,
    aten.addmv,
    aten.dist,
    *(target for target in INTERPOLATIONS if target._overloadname == "default"),
    aten.rrelu_with_noise_backward,
)


def decomposition_table() -> dict[OpOverload, Callable[..., Any]]:
    """Return ATen overload -> its decomposition, for the `decompositions` argument of AOTAutograd.

    Each capture needs a new table: every random operator that is traced with a table gets another salt, so
    that two dropouts differ even where a later pass merges their seeds.
    """
    return _shared() | _random(itertools.count())


@functools.cache
def _shared() -> dict[OpOverload, Callable[..., Any]]:
    """Return the part that all tables share. Composite operators come apart above it, without a table."""
    table: dict[Any, Callable[..., Any]] = dict(_core_aten_decompositions_post_autograd())
    table.update(get_decompositions(_BORROWED))
    unchanged = (*_WHOLE, *eager_decompositions.WHOLE)
    for target in list(table):
        spec = spec_of(target)
        if target in unchanged or (spec is not None and spec.kind is not Kind.LAYOUT):
            del table[target]
    ours = _OURS | image_decompositions.TABLE | max_pool.FORMULAS | eager_decompositions.TABLE
    table |= {target: _for_real(function) for target, function in ours.items()}
    table |= {aten._neg_view.default: torch.neg}  # a lazily negated tensor's memory has other values
    table |= {target: in_order(table[target]) for target in eager_decompositions.ELEMENTWISE}
    table |= {target: dense_on_cpu(table[target]) for target in eager_decompositions.BATCH_NORMS}
    return {target: unless_refused(target, function) for target, function in table.items()}


def _for_real(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which leaves complex tensors whole because no kernel holds them."""

    def decomposition(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(arg, Tensor) and arg.is_complex() for arg in args):
            return NotImplemented
        return function(*args, **kwargs)

    return decomposition


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x


def _axes(x: Tensor, dims: int | Sequence[int] | None) -> list[int]:
    """Return the dimensions to reduce, non-negative and in order. No dimensions mean all of them."""
    if dims is None or (isinstance(dims, Sequence) and not dims):
        return list(range(x.ndim))
    listed = [dims] if isinstance(dims, int) else list(dims)
    return sorted(dim % max(x.ndim, 1) for dim in listed) if x.ndim else []


def _count(x: Tensor, dims: Sequence[int]) -> int:
    return math.prod(x.shape[dim] for dim in dims)


def _sum(x: Tensor, dims: Sequence[int], keepdim: bool = False) -> Tensor:
    return torch.sum(x, list(dims), keepdim=keepdim) if x.ndim else x


def _zero(like: Tensor) -> Tensor:
    return torch.zeros((), dtype=like.dtype, device=like.device)


def _coordinates(size: int, dim: int, like: Tensor) -> Tensor:
    """Return 0 .. size - 1 along `dim`, to be broadcast against `like`."""
    return torch.arange(size, device=like.device).view([-1 if d == dim else 1 for d in range(like.ndim)])


# Reductions


def _mean(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    x = x if dtype is None else x.to(dtype)
    dims = _axes(x, dim)
    return (_sum(_wide(x), dims, keepdim) / _count(x, dims)).to(x.dtype)


def _var_mean(
    x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    dims, wide = _axes(x, dim), _wide(x)
    count = _count(x, dims)
    near = _near_mean(wide, dims)
    mean = _sum(wide if near is None else wide - near, dims, True) / count
    centred = wide - (mean if near is None else near)
    squares = _sum(centred * centred, dims, True)
    if near is not None:
        squares, mean = (squares - count * mean * mean).clamp_min(0), near + mean
    freedom = torch.sym_max(count - (1 if correction is None else correction), 0)
    var = squares / freedom
    if not keepdim:
        var, mean = var.squeeze(dims), mean.squeeze(dims)
    return var.to(x.dtype), mean.to(x.dtype)


def _near_mean(x: Tensor, dims: Sequence[int]) -> Tensor | None:
    """Return the mean of one in `SAMPLE` rows for a large tensor whose columns are reduced, or None for any
    other.

    Programs hold a row until its mean is known, but must read columns a second time for the variance. With a
    value near the mean, both sums are computed in one pass. Rounding errors grow by the square of its
    distance, which is at most SAMPLE - 1 variances for the mean of such a part (Chan, Golub and LeVeque 1983,
    on shifted data).
    """
    kept = [d for d in range(x.ndim) if d not in dims and not statically_known_true(x.shape[d] == 1)]
    across = any(statically_known_true(x.stride(d) == 1) for d in kept)
    if not across or not statically_known_true(x.numel() >= LARGE):
        return None
    outermost = max((d for d in dims if not statically_known_true(x.shape[d] == 1)), key=x.stride)
    part = x.narrow(outermost, 0, -(-x.shape[outermost] // SAMPLE))
    return _sum(part, dims, True) / _count(part, dims)


def _var(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    return _var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def _logsumexp(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    wide, dims = _wide(x if x.is_floating_point() else x.to(torch.get_default_dtype())), _axes(x, dim)
    if statically_known_true(_count(x, dims) == 0):  # there is no largest
        nothing = torch.log(_sum(torch.exp(wide), dims, keepdim))
        return nothing.to(x.dtype if x.is_floating_point() else wide.dtype)
    top = torch.amax(wide, dims, keepdim=True)
    top = torch.where(torch.isinf(top), _zero(top), top)
    total = torch.log(_sum(torch.exp(wide - top), dims, True)) + top
    return (total if keepdim else total.squeeze(dims)).to(x.dtype if x.is_floating_point() else wide.dtype)


def _vector_norm(
    x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    x = x if dtype is None else x.to(dtype)
    dims, size = _axes(x, dim), _wide(x).abs()
    match float(ord):
        case 0.0:
            norm = _sum((size != 0).to(size.dtype), dims, keepdim)
        case _ if all(statically_known_true(x.shape[d] == 1) for d in dims):
            norm = size if keepdim else size.squeeze(dims)  # exact, as eager's: no power and its root
        case 1.0:
            norm = _sum(size, dims, keepdim)
        case 2.0:
            norm = torch.sqrt(_sum(size * size, dims, keepdim))
        case power if math.isinf(power):
            norm = (torch.amax if power > 0 else torch.amin)(size, dims, keepdim)
        case power:
            norm = _sum(size**power, dims, keepdim) ** (1 / power)
    return norm.to(x.dtype)


def _max_dim(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    ordered = x.to(torch.uint8) if x.dtype is torch.bool else x
    return torch.amax(x, dim, keepdim), torch.argmax(ordered, dim, keepdim)


def _min_dim(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    ordered = x.to(torch.uint8) if x.dtype is torch.bool else x
    return torch.amin(x, dim, keepdim), torch.argmin(ordered, dim, keepdim)


def _topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """Return the largest (smallest) elements of each row and their positions, which searches find one after
    the other, each among the elements that are left.

    position: the place of each element in its row. Of equal elements the first is taken; zeros of both signs
    are equal, and the sign of a result may be that of another zero than the one at its index. A NaN is larger
    than any number: it counts as infinite, and its position lies before the row for the largest, behind the
    row for the smallest. An element that was taken counts as the last of all, and has the last position.
    """
    if not on_gpu(x) or not x.is_floating_point() or not -x.ndim <= dim < x.ndim:
        return NotImplemented
    size, is_row = x.shape[dim], statically_known_true(x.stride(dim) == 1)
    if type(k) is not int or type(size) is not int or not 0 < k <= MOST_SEARCHED or k >= size:
        return NotImplemented
    if size > (LONGEST if is_row else LONGEST_ACROSS) or statically_known_true(x.numel() == 0):
        return NotImplemented
    reduce, last, shift = (torch.amax, -math.inf, -size) if largest else (torch.amin, math.inf, size)
    position, is_nan = _coordinates(size, dim % x.ndim, x).to(torch.int32), torch.isnan(x)
    left, position = torch.where(is_nan, math.inf, x), torch.where(is_nan, position + shift, position)
    values, indices = list[Tensor](), list[Tensor]()
    for _ in range(k):
        value = reduce(left, dim, keepdim=True)
        first = torch.amin(torch.where(left == value, position, 2 * size), dim, keepdim=True)
        index, taken = first % size, position == first
        left, position = torch.where(taken, last, left), torch.where(taken, 2 * size, position)
        values.append(torch.where(first == index, value, math.nan))
        indices.append(index.to(torch.int64))
    return torch.cat(values, dim).contiguous(), torch.cat(indices, dim).contiguous()


def _one_in_each_row(x: Tensor, dim: int, index: Tensor) -> Tensor | None:
    """Return True where `index` points, or None unless it names one position along dim for each row of x."""
    sizes = [1 if d == dim % max(x.ndim, 1) else size for d, size in enumerate(x.shape)]
    if not x.ndim or index.ndim != x.ndim:
        return None
    if not all(statically_known_true(a == b) for a, b in zip(index.shape, sizes, strict=True)):
        return None
    return _coordinates(x.shape[dim], dim % x.ndim, x) == _looked_up(index, dim % x.ndim, x.shape[dim])


def _looked_up(index: Tensor, dim: int, size: int) -> Tensor:
    """Return index, looked up along `dim` among 0 .. size - 1, which raises an error where it is outside."""
    shape = [size if d == dim else n for d, n in enumerate(index.shape)]
    return torch.gather(_coordinates(size, dim, index).expand(shape), dim, index)


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
    position = _coordinates(zeros.shape[dim], dim, zeros)
    for i in range(count):
        zeros = torch.where(position == index.narrow(dim, i, 1), grad.narrow(dim, i, 1), zeros)
    return zeros.contiguous()


def _scatter_add(x: Tensor, dim: int, index: Tensor, src: Tensor) -> Any:
    hit = _one_in_each_row(x, dim, index)
    if hit is None:
        return rows_by_number.scatter_reduce(x, dim, index, src, "sum")
    return (x + torch.where(hit, src[tuple(slice(size) for size in index.shape)], _zero(src))).contiguous()


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


# Normalizations


def _normalized(x: Tensor, dims: Sequence[int], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return (x - mean) * rstd over dims, mean and rstd (both with dims kept), of a wide x."""
    count = _count(x, dims)
    mean = _sum(x, dims, True) / count
    centred = x - mean
    rstd = torch.rsqrt(_sum(centred * centred, dims, True) / count + eps)
    return centred * rstd, mean, rstd


def _normalized_backward(grad: Tensor, unit: Tensor, rstd: Tensor, dims: Sequence[int]) -> Tensor:
    """Return the gradient of x, given the gradient of unit = (x - mean) * rstd."""
    count = _count(unit, dims)
    mean_grad = _sum(grad, dims, True) / count
    mean_product = _sum(grad * unit, dims, True) / count
    return (grad - mean_grad - unit * mean_product) * rstd


def _affine(unit: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    scaled = unit if weight is None else unit * _wide(weight)
    return scaled if bias is None else scaled + _wide(bias)


def _statistics_dtype(x: Tensor, weight: Tensor | None) -> torch.dtype:
    """Return eager's dtype for what a norm of channels returns of its rows, and for layer norm on a CPU."""
    return x.dtype if weight is None else weight.dtype


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dims = list(range(x.ndim - len(shape), x.ndim))
    unit, mean, rstd = _normalized(_wide(x.contiguous()), dims, eps)
    dtype = _statistics_dtype(x, weight) if x.device.type == "cpu" else mean.dtype
    return _affine(unit, weight, bias).to(x.dtype), mean.to(dtype), rstd.to(dtype)


def _layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    inner = list(range(x.ndim - len(shape), x.ndim))
    outer = list(range(x.ndim - len(shape)))
    wide_grad = _wide(grad.contiguous())
    mean, rstd = _wide(mean), _wide(rstd)
    unit = (_wide(x.contiguous()) - mean) * rstd
    dx = dweight = dbias = None
    if output_mask[0]:
        dx = _normalized_backward(_affine(wide_grad, weight, None), unit, rstd, inner).to(x.dtype)
    if output_mask[1] and weight is not None:
        product = wide_grad * unit
        dweight = (_sum(product, outer) if outer else product).to(weight.dtype)
    if output_mask[2] and bias is not None:
        dbias = (_sum(wide_grad, outer) if outer else wide_grad).to(bias.dtype)
    return dx, dweight, dbias


def _rms_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    wide = _wide(x.contiguous())
    dims = list(range(x.ndim - len(shape), x.ndim))
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    rstd = torch.rsqrt(_sum(wide * wide, dims, True) / _count(x, dims) + eps)
    return _affine(wide * rstd, weight, None).to(x.dtype), rstd


def _rms_norm_backward(
    grad: Tensor,
    x: Tensor,
    shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    inner = list(range(x.ndim - len(shape), x.ndim))
    outer = list(range(x.ndim - len(shape)))
    wide_grad, unit = _wide(grad.contiguous()), _wide(x.contiguous()) * rstd
    dx = dweight = None
    if output_mask[0]:
        scaled = _affine(wide_grad, weight, None)
        mean_product = _sum(scaled * unit, inner, True) / _count(x, inner)
        dx = ((scaled - unit * mean_product) * rstd).to(x.dtype)
    if output_mask[1] and weight is not None:
        product = wide_grad * unit
        dweight = (_sum(product, outer) if outer else product).to(weight.dtype)
    return dx, dweight


def _per_channel(x: Tensor, values: Tensor | None) -> Tensor | None:
    return None if values is None else values.view([1, -1] + [1] * (x.ndim - 2))


def _group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, hw: int, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    shape = _group_shape(x, groups)
    inner = list(range(2, len(shape)))
    unit, mean, rstd = _normalized(_wide(x).reshape(shape), inner, eps)
    out = _affine(unit.reshape(x.shape), _per_channel(x, weight), _per_channel(x, bias)).to(x.dtype)
    dtype = _statistics_dtype(x, weight)
    out = out.contiguous(memory_format=suggest_memory_format(x))
    return out, mean.squeeze(inner).to(dtype), rstd.squeeze(inner).to(dtype)


def _group_norm_as_it_lies(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _group_norm(x, weight, bias, *group_norm.sizes(x), groups, eps)


def _group_norm_as_it_lies_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor, ...]:
    sizes = group_norm.sizes(x)
    gradients = _group_norm_backward(grad, x, mean, rstd, weight, *sizes, groups, output_mask)
    return tuple(x.new_empty(0) if t is None else t for t in gradients)


def _group_shape(x: Tensor, groups: int) -> tuple[int, ...]:
    """Return the shape in which x [n, c, ...] is a view with a group's values last: in one dimension if they
    lie together."""
    if x.is_contiguous():
        return x.shape[0], groups, x.shape[1] // groups * math.prod(x.shape[2:])
    return x.shape[0], groups, x.shape[1] // groups, *x.shape[2:]


def _group_norm_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    n: int,
    c: int,
    hw: int,
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    shape = _group_shape(x, groups)
    inner = list(range(2, len(shape)))
    wide_grad = _wide(grad)
    mean, rstd = (_wide(v).view([n, groups] + [1] * len(inner)) for v in (mean, rstd))
    unit = (_wide(x).reshape(shape) - mean) * rstd
    dx = dweight = dbias = None
    if output_mask[0]:
        scaled = _affine(wide_grad, _per_channel(x, weight), None).reshape(shape)
        dx = _normalized_backward(scaled, unit, rstd, inner).reshape(x.shape).to(x.dtype)
        dx = dx.contiguous(memory_format=suggest_memory_format(x))
    rest = [dim for dim in range(x.ndim) if dim != 1]
    dtype = x.dtype if weight is None else weight.dtype
    if output_mask[1]:
        dweight = _sum(wide_grad * unit.reshape(x.shape), rest).to(dtype)
    if output_mask[2]:
        dbias = _sum(wide_grad, rest).to(dtype)
    return dx, dweight, dbias


# Softmax and losses


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    wide = _wide(x.contiguous())
    if wide.numel() == 0:
        return wide if half_to_float else wide.to(x.dtype)
    exp = torch.exp(wide - torch.amax(wide, dim, keepdim=True))
    out = exp / torch.sum(exp, dim, keepdim=True)
    return out if half_to_float else out.to(x.dtype)


def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    wide = _wide(x.contiguous())
    if wide.numel() == 0:
        return wide if half_to_float else wide.to(x.dtype)
    shifted = wide - torch.amax(wide, dim, keepdim=True)
    out = shifted - torch.log(torch.sum(torch.exp(shifted), dim, keepdim=True))
    return out if half_to_float else out.to(x.dtype)


def _softmax_backward(grad: Tensor, out: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    product = _wide(grad.contiguous()) * _wide(out)
    return (product - _wide(out) * torch.sum(product, dim, keepdim=True)).to(input_dtype)


def _log_softmax_backward(grad: Tensor, out: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    wide = _wide(grad.contiguous())
    return (wide - torch.exp(_wide(out)) * torch.sum(wide, dim, keepdim=True)).to(input_dtype)


def _nll_loss_forward(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Return the loss and its total weight. x: [N, C, ...] or [C]; target: the same without C. reduction: 0
    none, 1 mean, 2 sum."""
    dim = 0 if x.ndim < 2 else 1
    counts = target != ignore_index
    safe = torch.where(counts, target, _zero(target))
    loss = -_wide(torch.gather(x, dim, safe.unsqueeze(dim)).squeeze(dim))
    scale = torch.ones_like(loss) if weight is None else aten.index.Tensor(_wide(weight), [safe])
    loss = torch.where(counts, loss if weight is None else loss * scale, _zero(loss))
    if reduction == 0:
        return loss.contiguous().to(x.dtype), _zero(loss)
    total_weight = torch.sum(torch.where(counts, scale, _zero(scale)))
    total = torch.sum(loss)
    return (total / total_weight if reduction == 1 else total).to(x.dtype), total_weight


def _nll_loss_backward(
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    dim = 0 if x.ndim < 2 else 1
    wide = -_wide(grad)
    if reduction == 1:
        wide = wide / total_weight
    counts = target != ignore_index
    if weight is not None:
        wide = wide * aten.index.Tensor(_wide(weight), [torch.where(counts, target, _zero(target))])
    row = torch.where(counts, wide, _zero(wide)).unsqueeze(dim)
    hit = _coordinates(x.shape[dim], dim, row) == target.unsqueeze(dim)
    return torch.where(hit, row, _zero(row)).to(x.dtype)


# Element-wise


_ROOT_HALF = math.sqrt(0.5)
_GELU_SCALE, _GELU_CUBE = math.sqrt(2 / math.pi), 0.044715


def _normal_cdf(wide: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(wide * _ROOT_HALF))


def _gelu_argument(wide: Tensor) -> Tensor:
    """Return 2u of the approximation (1 + tanh(u)) / 2 = sigmoid(2u), which does not cancel where x is
    negative."""
    return wide * (2 * _GELU_SCALE + 2 * _GELU_SCALE * _GELU_CUBE * (wide * wide))


def _gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    wide = _wide(x)
    part = torch.sigmoid(_gelu_argument(wide)) if approximate == "tanh" else _normal_cdf(wide)
    return (wide * part).to(x.dtype)


def _gelu_backward(grad: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    wide = _wide(x)
    if approximate == "tanh":
        argument = _gelu_argument(wide)
        part, rest = torch.sigmoid(argument), torch.sigmoid(-argument)  # 1 - part would cancel
        rise = 2 * _GELU_SCALE + 6 * _GELU_SCALE * _GELU_CUBE * (wide * wide)
        slope = part + part * rest * wide * rise
    else:
        density = math.sqrt(0.5 / math.pi) * torch.exp(wide * wide * -0.5)
        slope = _normal_cdf(wide) + wide * density
    return (_wide(grad) * slope).to(grad.dtype)


def _softplus_backward(grad: Tensor, x: Tensor, beta: float, threshold: float) -> Tensor:
    scaled = _wide(x) * beta
    wide = _wide(grad)
    return torch.where(scaled > threshold, wide, wide * torch.sigmoid(scaled)).to(grad.dtype)


def _log_sigmoid_backward(grad: Tensor, x: Tensor, buffer: Tensor) -> Tensor:
    return (_wide(grad) * torch.sigmoid(-_wide(x))).to(grad.dtype)


def _soft_margin_loss_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    wide, sign = _wide(x), _wide(target)
    slope = -sign * torch.sigmoid(-(sign * wide))
    slope = slope / x.numel() if reduction == 1 else slope
    return (_wide(grad) * slope).to(torch.promote_types(x.dtype, grad.dtype))


def _elu_backward(
    grad: Tensor, alpha: float, scale: float, input_scale: float, is_result: bool, value: Tensor
) -> Tensor:
    """Return the gradient of elu. value: the result of the forward pass or its input."""
    wide, wide_value = _wide(grad), _wide(value)
    rise = wide_value + alpha * scale if is_result else alpha * scale * torch.exp(wide_value * input_scale)
    return torch.where(wide_value > 0, wide * scale, wide * input_scale * rise).to(grad.dtype)


def _hardswish_backward(grad: Tensor, x: Tensor) -> Tensor:
    wide, wide_x = _wide(grad), _wide(x)
    inner = wide * (wide_x / 3 + 0.5)
    return torch.where(wide_x <= -3, _zero(wide), torch.where(wide_x >= 3, wide, inner)).to(grad.dtype)


def _smooth_l1_loss_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int, beta: float) -> Tensor:
    off = _wide(x) - _wide(target)
    scaled = _wide(grad) / x.numel() if reduction == 1 else _wide(grad)
    slope = torch.sign(off) if beta == 0 else torch.where(off.abs() >= beta, torch.sign(off), off / beta)
    return (scaled * slope).to(torch.promote_types(x.dtype, grad.dtype))


def _tanh_of_softplus(wide: Tensor) -> Tensor:
    """Return tanh(log(1 + e)) = n / (n + 2) with n = e (e + 2), which is 1 in float64 too from x = 20 on."""
    e = torch.exp(torch.clamp_max(wide, 20))
    n = e * (e + 2)
    return n / (n + 2)


def _mish(x: Tensor) -> Tensor:
    wide = _wide(x)
    return (wide * _tanh_of_softplus(wide)).to(x.dtype)


def _mish_backward(grad: Tensor, x: Tensor) -> Tensor:
    wide = _wide(x)
    part = _tanh_of_softplus(wide)
    slope = part + wide * torch.sigmoid(wide) * (1 - part * part)
    return (_wide(grad) * slope).to(grad.dtype)


def _add_bool(x: Any, y: Any, *, alpha: Any = 1) -> Any:
    """Return the sum of bools, which is a logical or. All other sums have a row."""
    return torch.logical_or(x, y) if _bools(x, y) and alpha else NotImplemented


def _mul_bool(x: Any, y: Any) -> Any:
    return torch.logical_and(x, y) if _bools(x, y) else NotImplemented


def _maximum_bool(x: Any, y: Any) -> Any:
    return torch.logical_or(x, y) if _bools(x, y) else NotImplemented


def _minimum_bool(x: Any, y: Any) -> Any:
    return torch.logical_and(x, y) if _bools(x, y) else NotImplemented


def _bools(*operands: Any) -> bool:
    return all(isinstance(operand, Tensor) and operand.dtype is torch.bool for operand in operands)


def _neg_unsigned(x: Tensor) -> Any:
    return NotImplemented if x.dtype.is_signed else aten.rsub.Scalar(x, 0)


def _not_unsigned(x: Tensor) -> Any:
    unsigned = not x.dtype.is_signed and x.dtype is not torch.bool
    return torch.bitwise_xor(x, torch.iinfo(x.dtype).max) if unsigned else NotImplemented


def _whole_number(x: Tensor, **_: Any) -> Any:
    """Round integers, which leaves them as they are."""
    return NotImplemented if x.is_floating_point() else x.clone()


def _relu_whole(x: Tensor) -> Any:
    """Keep the dtype of integers, which a comparison with a float would change."""
    return NotImplemented if x.is_floating_point() else torch.clamp_min(x, 0)


def _pow_zero(x: Tensor, exponent: float) -> Any:
    return torch.ones_like(x) if exponent == 0 and not isinstance(exponent, float) else NotImplemented


def _shrink_backward(grad: Tensor, x: Tensor, lambd: float) -> Tensor:
    return torch.where((x >= -lambd) & (x <= lambd), _zero(grad), grad)


# Layout


def _pad(x: Tensor, dim: int, before: int, after: int) -> Tensor:
    return F.pad(x, [0, 0] * (x.ndim - 1 - dim) + [before, after])


def _cut(x: Tensor, pads: Sequence[int | torch.SymInt], value: float = 0) -> Tensor:
    """Return a copy of a range of `x` for pads that are all negative, which is how a padding's gradient is
    written: clusters read a view where it lies."""
    if not all(isinstance(pad, int) and pad <= 0 for pad in pads):
        return NotImplemented
    for i in range(len(pads) // 2):
        dim = x.ndim - 1 - i
        x = x.narrow(dim, -pads[2 * i], x.shape[dim] + pads[2 * i] + pads[2 * i + 1])
    return x.clone()


def _slice_backward(grad: Tensor, sizes: Sequence[int], dim: int, start: int, end: int, step: int) -> Tensor:
    dim %= len(sizes)
    size, length = sizes[dim], grad.shape[dim]
    if step != 1:
        return torch.slice_scatter(grad.new_zeros(sizes), grad, dim, start, end, step)
    start = min(max(start + size if start < 0 else start, 0), size)
    return _pad(grad, dim, start, size - start - length)


def _select_backward(grad: Tensor, sizes: Sequence[int], dim: int, index: int) -> Tensor:
    dim %= len(sizes)
    index = index + sizes[dim] if index < 0 else index
    return _pad(grad.unsqueeze(dim), dim, index, sizes[dim] - index - 1)


def _split_with_sizes(x: Tensor, sizes: Sequence[int], dim: int = 0) -> list[Tensor]:
    starts = [0, *itertools.accumulate(sizes)]
    return [x.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=False)]


def _repeat(x: Tensor, repeats: Sequence[int]) -> Tensor:
    sizes = [1] * (len(repeats) - x.ndim) + list(x.shape)
    spread = x.view([extent for size in sizes for extent in (1, size)])
    spread = spread.expand([extent for pair in zip(repeats, sizes, strict=True) for extent in pair])
    return spread.clone(memory_format=torch.contiguous_format).view(
        [times * size for times, size in zip(repeats, sizes, strict=True)]
    )


# Random numbers


_FEWER_BITS = (torch.float32, torch.bfloat16, torch.float16)  # than eager has for float64
_NOT_PROBABILITIES = "probability tensor contains `inf`, `nan` or an element < 0, or its sum is not positive"


def _random(salts: Iterator[int]) -> dict[OpOverload, Callable[..., Any]]:
    def numbers(shape: Sequence[int], device: torch.device) -> Tensor:
        return random.uniform(random.seed(device), shape, next(salts))

    def native_dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
        if train is False or p == 0:
            return x.clone(), torch.ones_like(x, dtype=torch.bool)
        if p == 1:
            return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
        keep = numbers(x.shape, x.device) >= p
        return _native_dropout_backward(x, keep, 1 / (1 - p)), keep

    def bernoulli_p(x: Tensor, p: float = 0.5, *, generator: object = None) -> Any:
        refused = generator or not 0 <= p <= 1
        return NotImplemented if refused else (numbers(x.shape, x.device) < p).to(x.dtype)

    def bernoulli(x: Tensor, *, generator: object = None) -> Any:
        if generator:
            return NotImplemented
        assert_probabilities(x, "p")
        return (numbers(x.shape, x.device) < x).to(x.dtype)

    def rand(shape: Sequence[int], *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Any:
        # Only float32 has as many random bits as eager gives.
        if (dtype or torch.get_default_dtype()) is not torch.float32:
            return NotImplemented
        return numbers(shape, torch.device(device or torch.get_default_device()))

    def rand_like(x: Tensor, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Any:
        return rand(x.shape, dtype=dtype or x.dtype, device=device or x.device)

    def exponential(x: Tensor, lambd: float = 1, *, generator: object = None) -> Any:
        if generator or x.dtype not in _FEWER_BITS:
            return NotImplemented
        u = numbers(x.shape, x.device)
        least = 2**-25  # is never 0, as in eager
        return (torch.where(u > 0, -torch.log1p(-u), least) / lambd).to(x.dtype)

    def multinomial(p: Tensor, n: int, replacement: bool = False, *, generator: object = None) -> Any:
        """Return the places where exponential variables over p are least. Eager computes the same, and its
        host waits for checks."""
        if generator or p.dtype not in _FEWER_BITS or (replacement and n > 1):
            return NotImplemented
        wide = p.float()
        times = wide / exponential(wide)
        finite = (wide.amax(-1) < math.inf) & (wide.amin(-1) >= 0)
        aten._assert_async.msg((finite & (wide.sum(-1) > 0)).all(), _NOT_PROBABILITIES)
        return times.argmax(-1, keepdim=True) if n == 1 else times.topk(n, -1).indices

    return {
        aten.exponential.default: exponential,
        aten.multinomial.default: multinomial,
        aten.native_dropout.default: native_dropout,
        aten.bernoulli.default: bernoulli,
        aten.bernoulli.p: bernoulli_p,
        aten.rand.default: rand,
        aten.rand_like.default: rand_like,
    }


def _native_dropout_backward(grad: Tensor, mask: Tensor, scale: float) -> Tensor:
    wide = _wide(grad)
    return (wide * (mask.to(wide.dtype) * scale)).to(
        grad.dtype
    )  # a choice between two numbers, and a product


def _running(value: OpOverload, place: OpOverload, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Compute cummax or cummin by two operators of one result each."""
    return value(x, dim), place(x, dim)


_OURS: dict[OpOverload, Callable[..., Any]] = {
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.var.correction: _var,
    aten.var_mean.correction: _var_mean,
    aten.logsumexp.default: _logsumexp,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.max.default: lambda x: torch.amax(x),
    aten.min.default: lambda x: torch.amin(x),
    aten.cummax.default: functools.partial(_running, running.largest, running.where_largest),
    aten.cummin.default: functools.partial(_running, running.smallest, running.where_smallest),
    aten.max.dim: _max_dim,
    aten.min.dim: _min_dim,
    aten.topk.default: _topk,
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
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten._fused_rms_norm.default: _rms_norm,
    aten._fused_rms_norm_backward.default: _rms_norm_backward,
    aten.native_group_norm.default: _group_norm,
    few_queries.attend: in_chunks,
    permuted_rows.permuted_rows: permuted_rows.lookup,
    group_norm.group_norm: _group_norm_as_it_lies,
    group_norm.group_norm_backward: _group_norm_as_it_lies_backward,
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten._softmax.default: _softmax,
    aten._softmax_backward_data.default: _softmax_backward,
    aten._log_softmax.default: _log_softmax,
    aten._log_softmax_backward_data.default: _log_softmax_backward,
    aten.nll_loss_forward.default: _nll_loss_forward,
    aten.nll_loss_backward.default: _nll_loss_backward,
    aten.nll_loss2d_forward.default: _nll_loss_forward,
    aten.nll_loss2d_backward.default: _nll_loss_backward,
    aten.gelu.default: _gelu,
    aten.gelu_backward.default: _gelu_backward,
    aten.softplus_backward.default: _softplus_backward,
    aten.log_sigmoid_backward.default: _log_sigmoid_backward,
    aten.soft_margin_loss_backward.default: _soft_margin_loss_backward,
    aten.elu_backward.default: _elu_backward,
    aten.hardswish_backward.default: _hardswish_backward,
    aten.smooth_l1_loss_backward.default: _smooth_l1_loss_backward,
    aten.mish.default: _mish,
    aten.mish_backward.default: _mish_backward,
    aten.hardshrink_backward.default: _shrink_backward,
    aten.softshrink_backward.default: _shrink_backward,
    aten.add.Tensor: _add_bool,
    aten.mul.Tensor: _mul_bool,
    aten.maximum.default: _maximum_bool,
    aten.minimum.default: _minimum_bool,
    aten.neg.default: _neg_unsigned,
    aten.bitwise_not.default: _not_unsigned,
    aten.floor.default: _whole_number,
    aten.ceil.default: _whole_number,
    aten.trunc.default: _whole_number,
    aten.round.default: _whole_number,
    aten.round.decimals: _whole_number,
    aten.relu.default: _relu_whole,
    aten.pow.Tensor_Scalar: _pow_zero,
    aten.constant_pad_nd.default: _cut,
    aten.slice_backward.default: _slice_backward,
    aten.select_backward.default: _select_backward,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.repeat.default: _repeat,
    aten.native_dropout_backward.default: _native_dropout_backward,
}
