"""Errors against a float64 run of the same code, beside eager's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

FLOAT32_EPS = torch.finfo(torch.float32).eps


class InFloat64(TorchFunctionMode):
    """Casts to float32 are casts to float64 under this mode.

    Most norms of transformers cast to float32. Without this mode, the truth of such code is no more exact
    than eager's result and shares its errors.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map(_double_for_float, (args, kwargs or {}))
        return (Tensor.double if func is Tensor.float else func)(*args, **kwargs)


def _double_for_float(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@dataclass(frozen=True)
class Error:
    """The errors of one tensor against its float64 truth; scale is the truth's largest magnitude."""

    largest: float
    rms: float
    scale: float


def error_of(result: Tensor, truth: Tensor) -> Error:
    """Errors of `result` (any dtype) against `truth` (float64, same shape). NaN counts as infinite."""
    if result.shape != truth.shape:
        raise ValueError(f"shape {tuple(result.shape)}, expected {tuple(truth.shape)}")
    if not truth.numel():
        return Error(0.0, 0.0, 0.0)
    difference = (result.double() - truth).abs().nan_to_num(nan=float("inf"))
    return Error(difference.max().item(), difference.square().mean().sqrt().item(), truth.abs().max().item())


def rounding_error(dtype: torch.dtype, truth: Tensor) -> Error:
    """Return the error of the truth itself when stored in `dtype`. No result in that dtype can have a smaller
    one."""
    return error_of(truth.to(dtype), truth)


def rounding_floor(dtype: torch.dtype, truth: Tensor) -> float:
    """The RMS error that storing `truth` in `dtype` costs on average: a last place over sqrt(12)."""
    info = torch.finfo(dtype)
    exponents = torch.frexp(truth.abs().clamp(min=info.tiny)).exponent - 1
    places = info.eps * exponents.double().exp2()
    return (places.square().mean() / 12).sqrt().item()


def worst_ratio(ours: Sequence[Tensor], eager: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """Largest of (our RMS error / eager's RMS error) over the tensors; 1 where both are exact."""
    ratios: list[float] = []
    for our, their, true in zip(ours, eager, truth, strict=True):
        a, b = error_of(our, true).rms, error_of(their, true).rms
        ratios.append(1.0 if a == b else a / b if b else float("inf"))
    return max(ratios)


def ratios_to_eager(
    ours: Mapping[str, Tensor], eager: Mapping[str, Tensor], truth: Mapping[str, Tensor]
) -> dict[str, float]:
    """Our RMS error over eager's for each tensor of a model, by name; gradients are called "d ...".

    An error counts from that on which no result of the dtype avoids: what both round to the same is 1. That
    of a gradient which is zero in truth (a key's bias moves all scores of a row alike) counts from the
    rounding of the largest gradient of all. Single numbers are left out: the errors of a whole tensor meet
    in a loss with their signs, so that a ratio of two losses' errors says nothing.
    """
    largest = max((t.abs().max().item() for n, t in truth.items() if n.startswith("d ")), default=0.0)
    ratios: dict[str, float] = {}
    for name, exact in truth.items():
        true = exact.double()
        if true.numel() == 1:
            continue
        dtype = eager[name].dtype
        eps = torch.finfo(dtype).eps
        zero = name.startswith("d ") and true.abs().max().item() <= eps * largest
        floor = eps * largest / 12**0.5 if zero else rounding_floor(dtype, true)
        our_error, eager_error = (error_of(result[name], true).rms for result in (ours, eager))
        ratios[name] = max(our_error, floor) / max(eager_error, floor)
    return ratios


def chance(truth: Tensor) -> float:
    """The largest of a model's `ratios_to_eager` that chance makes: of few elements, an RMS is uncertain.

    1.6 is above what 100 runs of small models had at most, 1.4.
    """
    return 1.6 * math.exp(3 / math.sqrt(truth.numel()))


def not_worse(ours: Tensor, eager: Tensor, truth: Tensor) -> str | None:
    """None where ours is at least as close to the truth as eager is, else what is wrong.

    Closeness is the RMS error, which a single element's luck in rounding does not decide; the
    largest error is bounded as well. Neither can be below the rounding of the result's dtype,
    and both may differ by float32's own rounding, in which the clusters compute.
    """
    if ours.dtype != eager.dtype:
        return f"dtype {ours.dtype}, eager has {eager.dtype}"
    our, their = error_of(ours, truth), error_of(eager, truth)
    floor = rounding_error(ours.dtype, truth)
    noise = FLOAT32_EPS * their.scale
    if our.rms > max(their.rms, floor.rms) * (1 + sampling_error(truth.numel())) + noise:
        return f"RMS error {our.rms:.3e}, eager's {their.rms:.3e}, rounding {floor.rms:.3e}"
    # The largest of n errors has a heavier tail than their RMS: one last place more than eager's.
    if our.largest > max(their.largest, floor.largest) + 2 * floor.largest + noise:
        return f"largest error {our.largest:.3e}, eager's {their.largest:.3e}, rounding {floor.largest:.3e}"
    return None


def sampling_error(n: int) -> float:
    """Three standard deviations of the ratio of two RMS estimates over n independent errors."""
    return 3 / n**0.5
