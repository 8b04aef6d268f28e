"""Eager, every result of which is rounded up or down at random: results that a correct program may have.

Each floating-point operation is computed in float64, and its result becomes one of the two neighbours in
its dtype (Monte Carlo arithmetic: Parker, Pierce, Eggert 2000). What is exact stays as it is, so that a
comparison of exact numbers never changes its mind; what cancels or amplifies shows by how much.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# Sums of many terms, whose order is free: their terms are rounded as well.
ACCUMULATING = {
    "sum", "mean", "var", "var_mean", "std", "std_mean", "norm", "linalg_vector_norm", "prod", "cumsum",
    "logsumexp", "_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data",
    "mm", "bmm", "addmm", "baddbmm", "dot", "mv", "native_layer_norm", "native_layer_norm_backward",
    "native_group_norm", "native_group_norm_backward", "native_batch_norm", "native_batch_norm_backward",
    "_fused_rms_norm", "_fused_rms_norm_backward",
    "index_add", "index_put", "scatter_add", "scatter_reduce", "embedding_dense_backward", "convolution",
    "convolution_backward", "avg_pool2d", "avg_pool2d_backward", "_adaptive_avg_pool2d", "diff", "cdist",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_native_batch_norm_legit", "_batch_norm_with_update", "batch_norm_backward",
}  # fmt: skip


# Differences of their operand and its mean: of what is all one number nothing is left, in any order.
NORMALIZING = {
    "native_layer_norm", "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward",
    "native_batch_norm", "native_batch_norm_backward", "_native_batch_norm_legit", "batch_norm_backward",
    "_batch_norm_with_update", "_softmax_backward_data", "_log_softmax_backward_data",
}  # fmt: skip
# Where their weight and bias are. What is as large as the mean is zero, or all but zero, before the weight.
WEIGHTED = {
    "native_layer_norm": (2, 3), "native_group_norm": (1, 2),
    "native_batch_norm": (1, 2), "_native_batch_norm_legit": (1, 2),
}  # fmt: skip
# Formulas whose terms cancel: 1 + tanh(u) of a gelu far below zero. The size of the terms, by the operands.
CANCELLING: dict[str, Callable[..., Tensor]] = {
    "gelu": lambda x: x.abs(),
    "gelu_backward": lambda gradient, x: gradient.abs() * (1 + x * x),
}
VARIANCES = {"var", "var_mean", "std", "std_mean"}
# What a term may be off by; for 16 bits alone, kernels take the hardware's functions (docs/numerics.md).
TERMS = {
    torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.bfloat16: 2.0**-18, torch.float16: 2.0**-18
}  # fmt: skip


def _chooses(args: tuple[Any, ...]) -> bool:
    """Whether a call is a norm that is one of its terms, to which its gradient goes by comparing."""
    return any(isinstance(x, float) and math.isinf(x) for x in args[1:2])


class RandomRounding(TorchDispatchMode):
    """While it is entered, floats round up or down as `seed` has it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__.rstrip("_")
        returns = func._schema.returns
        written = [i for i, a in enumerate(func._schema.arguments) if a.alias_info and a.alias_info.is_write]
        if name == "native_batch_norm" and args[5]:
            written = [3, 4]  # which its schema does not say
        aliased = not written and any(r.alias_info for r in returns)
        if func.is_view or torch.Tag.inplace_view in func.tags or aliased:
            return func(*args, **kwargs)
        copied = [x.clone() if i in written and isinstance(x, Tensor) else x for i, x in enumerate(args)]
        result = func(*copied, **kwargs)
        sizes = [r.numel() for r in tree_leaves(result) if isinstance(r, Tensor) and r.numel()]
        fewest = min(sizes, default=1)
        wide_args, wide_kwargs = tree_map(self._wide, (args, kwargs))
        try:
            if name in ACCUMULATING and not _chooses(args):
                wide_args = tree_map(lambda w, x: self._disturbed(w, x, fewest), wide_args, args)
            wide = func(*wide_args, **wide_kwargs)
        except RuntimeError:  # it takes these dtypes only
            wide_args, wide = copied, result
        if name in VARIANCES | NORMALIZING:
            unsteady = functools.partial(self._unsteady, args[0].numel() / fewest)
            wide = tree_map(unsteady, wide, result)
            wide_args = [unsteady(x, args[i]) if i in written else x for i, x in enumerate(wide_args)]
        if name in NORMALIZING:
            wide = tree_map(self._centred, wide, result)
        if name in WEIGHTED:
            # copies, as a batch norm updates its running statistics in each call
            bare_args = [None if i in WEIGHTED[name] else self._wide(x) for i, x in enumerate(wide_args)]
            bare = func(*bare_args, **wide_kwargs)
            wide = (self._undecided(wide[0], bare[0], result[0]), *wide[1:])
        if name in CANCELLING and isinstance(wide, Tensor):
            tensors = [a for a in wide_args if isinstance(a, Tensor)]
            noise = torch.rand(wide.shape, generator=self.generator, dtype=wide.dtype) * 2 - 1
            wide = wide + noise * TERMS[torch.float64] * CANCELLING[name](*tensors).nan_to_num(0, 0, 0)
        for i in written:
            self._write(args[i], wide_args[i])
        if any(r.alias_info for r in returns):
            return args[written[0]]
        return tree_map(self._rounded, result, wide)

    def _wide(self, value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return torch.float64 if value.is_floating_point else value
        if not isinstance(value, Tensor):
            return value
        return value.double().clone() if value.is_floating_point() else value.clone()

    def _disturbed(self, x: Any, narrow: Any, results: int) -> Any:
        """Terms, such that their sum has the rounding of another order; that of small halves has none.

        narrow: the same in its own dtype.
        """
        if not isinstance(x, Tensor) or not x.is_floating_point() or not x.numel():
            return x
        if bool(((x * 64).frac() == 0).all()) and x.abs().sum() < 2**16:
            return x
        count = max(x.numel() / results, x.shape[-1] if x.dim() else 1)
        eps = math.sqrt(count) * TERMS[narrow.dtype]
        return x * (1 + eps * (torch.rand(x.shape, generator=self.generator, dtype=x.dtype) * 2 - 1))

    def _centred(self, x: Any, narrow: Any) -> Any:
        """A result with the rounding of the terms that cancelled out in it."""
        if not isinstance(x, Tensor) or not x.is_floating_point() or not x.numel():
            return x
        noise = torch.rand(x.shape, generator=self.generator, dtype=x.dtype) * 2 - 1
        return x + noise * TERMS[narrow.dtype] * x.abs().nan_to_num(0, 0, 0).max()

    def _undecided(self, x: Tensor, bare: Tensor, narrow: Tensor) -> Tensor:
        """Return the results of a norm. Zero times an infinite weight is NaN, and all but zero an infinity.

        bare: the results without a weight.
        """
        largest = bare.abs().nan_to_num(0, 0, 0).amax() if bare.numel() else 0
        undecided = (bare.abs() <= TERMS[narrow.dtype] * largest) & ~x.isfinite()
        kind = torch.randint(0, 3, x.shape, generator=self.generator)
        return torch.where(undecided, x.new_tensor([math.nan, math.inf, -math.inf])[kind], x)

    def _unsteady(self, count: float, x: Any, narrow: Any) -> Any:
        """In float64 a result of statistics of so many elements, as far off as a running mean makes them.

        There the truth is eager's own, whose variance of 2808 elements is off by 10 to 30 units in the last
        place, by rational numbers, where a compiled program's is off by one.
        """
        if not isinstance(x, Tensor) or narrow.dtype is not torch.float64 or not x.numel():
            return x
        eps = math.sqrt(count) * TERMS[torch.float64]
        return x * (1 + eps * (torch.rand(x.shape, generator=self.generator, dtype=x.dtype) * 2 - 1))

    def _write(self, target: Any, wide: Any) -> None:
        if isinstance(target, Tensor):
            rounded = self._rounded(target, wide) if target.is_floating_point() else wide
            for dim, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
                if size > 1 and stride == 0:  # one element for all: `copy_` refuses
                    target, rounded = target.narrow(dim, 0, 1), rounded.narrow(dim, 0, 1)
            target.copy_(rounded)

    def _rounded(self, result: Any, wide: Any) -> Any:
        """`wide` as a tensor of the dtype and layout of `result`; that itself where it holds no floats.

        A backend of convolutions may return what it was not asked for, and another for float64 may not.
        """
        if not isinstance(result, Tensor) or not isinstance(wide, Tensor) or not result.is_floating_point():
            return result
        if result.dtype is torch.float64:
            inexact = wide.isfinite() & (wide.float().double() != wide)
            sign = torch.randint(-1, 2, wide.shape, generator=self.generator).double()
            near = torch.where(inexact, wide * (1 + sign * 2.0**-52), wide)
        else:
            nearest = wide.to(result.dtype)
            error = wide - nearest.double()
            other = torch.nextafter(nearest, torch.where(error > 0, torch.inf, -torch.inf).to(result.dtype))
            turned = torch.rand(wide.shape, generator=self.generator) < 0.5
            near = torch.where(turned & (error != 0) & nearest.isfinite() & other.isfinite(), other, nearest)
        if bool(near.isnan().any()):  # whose sign nothing says, but copysign and signbit show
            sign = torch.randint(0, 2, near.shape, generator=self.generator) * 2 - 1
            near = torch.where(near.isnan(), torch.copysign(near, sign), near)
        return near if near.stride() == result.stride() else torch.empty_like(result).copy_(near)
