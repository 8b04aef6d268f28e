"""Sums over windows: depthwise convolutions and their gradients (`ir/depthwise.py`), here in one dimension.

    y[n, c, i]  = sum over r        of  x[n, c, place(i, r)] * w[c, 0, r]       place(i, r) = stride * i
    dx[n, c, j] = sum over i and r  of  dy[n, c, i] * w[c, 0, r]                              - padding
                  with place(i, r) = j                                                        + dilation * r
    dw[c, 0, r] = sum over n and i  of  dy[n, c, i] * x[n, c, place(i, r)]

A handler answers for one element, whatever its coordinates are, and sums over inner axes of its own. The
operands are pulled at coordinates that move along these axes, so that element-wise work on them fuses, and is
done again for each window that an element is in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fusion_compiler.ir import depthwise
from fusion_compiler.ir.dag import Op
from fusion_compiler.ir.dims import Dim
from fusion_compiler.ir.index import ZERO, combine, shifted
from fusion_compiler.ir.loops import Compute, Index, Reduce, Value
from fusion_compiler.passes.lower.builder import Builder
from fusion_compiler.passes.lower.space import Coords, compute_dtype

aten = torch.ops.aten


def _convolve(build: Builder, op: Op, coords: Coords, within: int | None) -> int:
    image, weight = op.operand("x"), op.operand("weight")
    n, channel, *windows = coords
    taps = build.inner_axes(op.name, _sizes(build, weight))
    value = _in_image(build, image, (n, channel, *_places(op, windows, taps)), within)
    return _sum(build, op, value, build.value(weight, (channel, ZERO, *taps), within), taps)


def _weight_gradient(build: Builder, op: Op, coords: Coords, within: int | None) -> int:
    gradient, image = op.operand("gradient"), op.operand("x")
    channel, _, *taps = coords
    batch = build.dag.op(gradient).outputs[0].shape[0]
    n, *windows = inner = build.inner_axes(op.name, (batch, *_sizes(build, gradient)))
    value = _in_image(build, image, (n, channel, *_places(op, windows, taps)), within)
    return _sum(build, op, value, build.value(gradient, (n, channel, *windows), within), inner)


def _input_gradient(build: Builder, op: Op, coords: Coords, within: int | None) -> int:
    gradient, weight = op.operand("gradient"), op.operand("weight")
    n, channel, *places = coords
    taps = build.inner_axes(op.name, _sizes(build, weight))
    windows, inside = list[Index](), within
    for place, tap, count, step, padding, dilation in zip(
        places, taps, _sizes(build, gradient), *_geometry(op), strict=True
    ):
        begin = shifted(combine([(place, 1), (tap, -dilation)]), padding)
        window, inside, never = build.stepped(op, begin, count, step, inside)
        if never:
            return build.constant(0, compute_dtype(op.outputs[0].dtype), op.name)
        windows.append(window)
    value = _read(build, gradient, (n, channel, *windows), within, inside)
    return _sum(build, op, value, build.value(weight, (channel, ZERO, *taps), within), taps)


def _sizes(build: Builder, name: str) -> tuple[Dim, ...]:
    """Return the sizes of a tensor's windows or taps: all behind batch and channels."""
    return build.dag.op(name).outputs[0].shape[2:]


def _geometry(op: Op) -> Sequence[Sequence[int]]:
    """Return stride, padding and dilation, with a number for each dimension."""
    sizes: Any = op.args[-3:]
    return sizes


def _places(op: Op, windows: Iterable[Index], taps: Iterable[Index]) -> list[Index]:
    """Return the coordinates in the image that taps of windows read."""
    rows = zip(windows, taps, *_geometry(op), strict=True)
    return [shifted(combine([(window, s), (tap, d)]), -p) for window, tap, s, p, d in rows]


def _in_image(build: Builder, name: str, coords: Coords, within: int | None) -> int | None:
    """Return the node that holds `name` at `coords`, zero outside of it; None if they always lie outside."""
    inside = within
    for place, size in zip(coords[2:], _sizes(build, name), strict=True):
        inside, partial = build.in_range(place, 0, size, inside)
        if inside is None and partial:
            return None
    return _read(build, name, coords, within, inside)


def _read(build: Builder, name: str, coords: Coords, within: int | None, inside: int | None) -> int:
    """Return the node that holds `name` at `coords` where `inside` holds, and else zero."""
    value = build.value(name, coords, inside)
    if inside is None or inside == within:
        return value
    return build.zero_outside(value, inside, build.nodes[value].dtype, name)


def _sum(build: Builder, op: Op, value: int | None, factor: int, inner: Coords) -> int:
    """Return the node that holds the sum over inner axes of a value times a factor; no value is zero."""
    dtype = compute_dtype(op.outputs[0].dtype)
    axes = frozenset(key for index in inner for key, _ in index.terms)
    if value is None or any(build.extents.of(key) == 0 for key in axes):
        return build.constant(0, dtype, op.name)
    operands = (("self", Value(value)), ("other", Value(factor)))
    term = build.emit(Compute(aten.mul.Tensor, operands, dtype), f"{op.name}_terms")
    return build.emit(Reduce("sum", term, axes, dtype), op.name) if axes else term


HANDLERS: dict[object, Callable[[Builder, Op, Coords, int | None], int]] = {
    depthwise.depthwise: _convolve,
    depthwise.depthwise_input_gradient: _input_gradient,
    depthwise.depthwise_weight_gradient: _weight_gradient,
}
