"""Reduce windows, here in one dimension: depthwise convolutions (`ops/own/depthwise.py`), pooling, and the
gradients of convolutions and averages.

    y[n, c, i]  = sum over r        of  x[n, c, place(i, r)] * w[c, 0, r]       place(i, r) = stride * i
    dx[n, c, j] = sum over i and r  of  dy[n, c, i] * w[c, 0, r]                              - padding
                  with place(i, r) = j                                                        + dilation * r
    dw[c, 0, r] = sum over n and i  of  dy[n, c, i] * x[n, c, place(i, r)]

An average has 1 / d(i) in the place of w. d(i) is a number; near borders it may be a function of i, namely
how many places of the window lie inside of the image. A maximum has no w, and max in the place of sum.

A handler answers for one element, whatever its coordinates are, and reduces inner axes of its own. The
operands are pulled at coordinates that move along these axes, so that element-wise work on them fuses, and is
done again for each window that an element is in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusion_compiler.ir.dag import Op
from fusion_compiler.ir.dims import Dim, not_above, simple
from fusion_compiler.ir.index import ZERO, combine, shifted
from fusion_compiler.ir.loops import Coordinate, Index, Reduce, Value
from fusion_compiler.ops.arithmetic import BITS_NOT, DIV, EQ, IS_NAN, MAXIMUM, MINIMUM, MUL, SUB
from fusion_compiler.ops.own import depthwise, max_pool
from fusion_compiler.passes.lower.builder import Builder
from fusion_compiler.passes.lower.space import Coords, Illegal, compute_dtype

aten = torch.ops.aten


@dataclass(frozen=True)
class Windows:
    """The windows of an op are described by a number for each dimension. image, count: elements, and windows
    over them."""

    image: tuple[Dim, ...]
    count: tuple[Dim, ...]
    kernel: tuple[Dim, ...]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]

    def parted(self, coords: Coords) -> tuple[Coords, Coords]:
        """Return the coordinates of batch and channels, and those of the windows' dimensions."""
        return coords[: -len(self.kernel)], coords[-len(self.kernel) :]

    def places(self, windows: Coords, taps: Coords) -> Coords:
        """Return the coordinates in the image that taps of windows read."""
        rows = zip(windows, taps, self.stride, self.dilation, self.padding, strict=True)
        return tuple(shifted(combine([(window, s), (tap, d)]), -p) for window, tap, s, d, p in rows)


# -- convolutions --------------------------------------------------------------------------------------------


def _convolve(build: Builder, op: Op, coords: Coords, within: int | None) -> int:
    image, weight = op.operand("x"), op.operand("weight")
    windows = _of_convolution(build, op, image, op.name, weight)
    lead, at = windows.parted(coords)
    taps = build.inner_axes(op.name, windows.kernel)
    value, _ = _in_image(build, windows, image, lead, windows.places(at, taps), within)
    return _sum(build, op, value, taps, build.value(weight, (lead[1], ZERO, *taps), within))


def _weight_gradient(build: Builder, op: Op, coords: Coords, within: int | None) -> int:
    gradient, image = op.operand("gradient"), op.operand("x")
    windows = _of_convolution(build, op, image, gradient, op.name)
    (channel, _), taps = windows.parted(coords)
    inner = build.inner_axes(op.name, (_shape(build, gradient)[0], *windows.count))
    n, at = inner[0], inner[1:]
    value, _ = _in_image(build, windows, image, (n, channel), windows.places(at, taps), within)
    return _sum(build, op, value, inner, build.value(gradient, (n, channel, *at), within))


def _input_gradient(build: Builder, op: Op, coords: Coords, within: int | None) -> int:
    gradient, weight = op.operand("gradient"), op.operand("weight")
    windows = _of_convolution(build, op, op.name, gradient, weight)
    lead, places = windows.parted(coords)
    taps = build.inner_axes(op.name, windows.kernel)
    at, inside, never = _meeting(build, op, windows, places, taps, within)
    value = None if never else _read(build, gradient, (*lead, *at), within, inside)
    return _sum(build, op, value, taps, build.value(weight, (lead[1], ZERO, *taps), within))


def _of_convolution(build: Builder, op: Op, image: str, windows: str, weight: str) -> Windows:
    """Return the windows of an op, by the names of its tensors: an operand's, or its own for the result."""
    sizes: Any = [_shape(build, name)[2:] for name in (image, windows, weight)]
    return Windows(*sizes, *op.args[-3:])  # type: ignore[arg-type]


# -- pooling -------------------------------------------------------------------------------------------------


def _average(build: Builder, op: Op, coords: Coords, within: int | None) -> int:
    image = op.operand("self")
    windows = _of_pooling(build, op, image, op.name)
    lead, at = windows.parted(coords)
    taps = build.inner_axes(op.name, windows.kernel)
    value, _ = _in_image(build, windows, image, lead, windows.places(at, taps), within)
    return _divided(build, op, _sum(build, op, value, taps), _divisor(build, op, windows, at))


def _average_gradient(build: Builder, op: Op, coords: Coords, within: int | None) -> int:
    gradient = op.operand("grad_output")
    windows = _of_pooling(build, op, op.name, gradient)
    lead, places = windows.parted(coords)
    sizes = zip(windows.kernel, windows.stride, strict=True)
    taps = build.inner_axes(op.name, tuple(1 if k <= s else k for k, s in sizes))
    at, inside, never = _meeting(build, op, windows, places, taps, within)
    if never:
        return _sum(build, op, None, taps)
    value = _read(build, gradient, (*lead, *at), within, inside)
    divisor = _divisor(build, op, windows, at)
    value = _divided(build, op, value, divisor)
    if isinstance(divisor, Value) and inside is not None and inside != within:
        # The divisor of a window that is not there may be zero.
        value = build.zero_outside(value, inside, build.nodes[value].dtype, op.name)
    return _sum(build, op, value, taps)


def _maximum(build: Builder, op: Op, coords: Coords, within: int | None) -> int:
    value, _, taps = _elements(build, op, coords, within)
    return _reduced(build, op, "max", value, taps)


def _place_of_maximum(build: Builder, op: Op, coords: Coords, within: int | None) -> int:
    """Return the number of a window's first element that is the maximum, or of the last one that is NaN.

    Element n has the key n where it is the maximum, and -1 - n where it is NaN: the least key is wanted.
    """
    value, inside, taps = _elements(build, op, coords, within)
    largest = _reduced(build, op, "max", value, taps)
    rows, cols = taps
    image: Any = _shape(build, op.operand("input"))[-2:]
    high = 1 << max_pool.windows_of(image, *_geometry(op))[1].bits
    hit = build.apply(f"{op.name}_eq", EQ, value, largest)
    hit = hit if inside is None else build.both(inside, hit)
    nan = build.apply(f"{op.name}_nan", IS_NAN, value)
    number = _coordinate(build, op, combine([(rows, high), (cols, 1)]))
    mirrored = _coordinate(build, op, combine([(Index(-1, ()), 1), (rows, -high), (cols, -1)]))
    key = build.constant(torch.iinfo(torch.int8).max, torch.int32, op.name)
    for condition, other in ((nan, mirrored), (hit, number)):
        key = build.choose(condition, other, key, torch.int32, f"{op.name}_key")
    least = _reduced(build, op, "min", key, taps)
    taken = build.apply(f"{op.name}_maximum", MAXIMUM, least, build.apply(op.name, BITS_NOT, least))
    return build.converted(taken, op.outputs[0].dtype, op.name)


def _elements(build: Builder, op: Op, coords: Coords, within: int | None) -> tuple[int, int | None, Coords]:
    """Return the node of the elements of windows, -inf outside of the image; the node that holds whether they
    lie in it, if some do not; and the taps along which they vary."""
    image, (kernel, stride, padding, _) = op.operand("input"), _geometry(op)
    sizes = _shape(build, image)[-2:], _shape(build, op.name)[-2:]
    windows = Windows(*sizes, kernel, stride, padding, (1, 1))
    lead, at = windows.parted(coords)
    taps = build.inner_axes(f"{image} in windows of {op.args[1:]}", windows.kernel)
    value, inside = _in_image(build, windows, image, lead, windows.places(at, taps), within)
    if value is None:
        raise Illegal("space", f"{op.name} is read where no window overlaps the image")
    dtype = build.nodes[value].dtype
    if inside is None or inside == within:
        return value, None, taps
    nothing = build.constant(-math.inf, dtype, op.name)
    return build.choose(inside, value, nothing, dtype, image), inside, taps


def _geometry(op: Op) -> Any:
    """Return kernel, stride, padding and ceil_mode of maxima."""
    return op.args[1:]


def _of_pooling(build: Builder, op: Op, image: str, windows: str) -> Windows:
    """Return the windows of averages, by the names of its tensors. Raises Illegal."""
    named, dtype = op.arguments, op.outputs[0].dtype
    if not dtype.is_floating_point:
        raise Illegal("dtype", f"averages of {dtype} are rounded to whole numbers")
    geometry = named["kernel_size"], named["stride"] or named["kernel_size"], named["padding"]
    kernel, stride, padding = (tuple(n) * 2 if len(n) == 1 else tuple(n) for n in geometry)
    if not all(isinstance(n, int) for n in (*kernel, *stride, *padding)):
        raise Illegal("size", f"the windows of {op.name} have unknown sizes")
    sizes = _shape(build, image)[-2:], _shape(build, windows)[-2:]
    return Windows(*sizes, kernel, stride, padding, (1, 1))


def _divisor(build: Builder, op: Op, windows: Windows, at: Coords) -> Value | int:
    """Return the divisor of sums of windows: a number, or the node that holds it if it differs."""
    named = op.arguments
    if named["divisor_override"] is not None:
        return named["divisor_override"]
    number, node = 1, None
    sizes = zip(windows.image, windows.count, windows.kernel, windows.stride, windows.padding, strict=True)
    for window, (size, count, k, s, p) in zip(at, sizes, strict=True):
        assert isinstance(k, int)
        is_padded = named["count_include_pad"]
        low, high = (-p, simple(size + p)) if is_padded else (0, size)
        fits = is_padded and not named["ceil_mode"]
        ends_inside = fits or not_above(simple((count - 1) * s - p + k), high)
        if low <= -p and ends_inside:
            number *= k
            continue
        begin = shifted(combine([(window, s)]), -p)
        first, last = _coordinate(build, op, begin), _coordinate(build, op, shifted(begin, k))
        if low > -p:
            first = build.apply(f"{op.name}_maximum", MAXIMUM, first, _coordinate(build, op, ZERO))
        if not ends_inside:
            last = build.apply(f"{op.name}_minimum", MINIMUM, last, _coordinate(build, op, Index(high, ())))
        length = build.apply(f"{op.name}_sub", SUB, last, first)
        node = length if node is None else build.apply(f"{op.name}_mul", MUL, node, length)
    if node is None:
        return number
    if number != 1:
        node = build.apply(f"{op.name}_count", MUL, node, other=number)
    return Value(build.converted(node, compute_dtype(op.outputs[0].dtype), f"{op.name}_count"))


def _divided(build: Builder, op: Op, value: int, divisor: Value | int) -> int:
    """Return the node of a value divided by a number or a node."""
    return value if divisor == 1 else build.apply(op.name, DIV, value, other=divisor)


# -- of both -------------------------------------------------------------------------------------------------


def _shape(build: Builder, name: str) -> tuple[Dim, ...]:
    return build.dag.op(name).outputs[0].shape


def _meeting(
    build: Builder, op: Op, windows: Windows, places: Coords, taps: Coords, within: int | None
) -> tuple[Coords, int | None, bool]:
    """Return the windows whose taps meet places in the image; the node that holds whether there are such
    windows, and `within`; and whether there never are.

    In a dimension without taps, windows do not overlap: one alone may meet the place, at any of its elements.
    """
    at, inside = list[Index](), within
    for place, tap, count, k, s, p, d in zip(
        places, taps, windows.count, windows.kernel, windows.stride, windows.padding, windows.dilation,
        strict=True,
    ):  # fmt: skip
        begin = shifted(combine([(place, 1), (tap, -d)]), p)
        if tap.terms or k == 1:
            window, inside, never = build.stepped(op, begin, count, s, inside)
        else:
            window, inside, never = build.in_block(op, begin, count, s, k, inside)
        if never:
            return (), None, True
        at.append(window)
    return tuple(at), inside, False


def _in_image(
    build: Builder, windows: Windows, name: str, lead: Coords, places: Coords, within: int | None
) -> tuple[int | None, int | None]:
    """Return the node that holds `name` at places, zero outside of the image, and the node that holds whether
    they lie inside, and `within`; None if they always lie outside."""
    inside = within
    for place, size in zip(places, windows.image, strict=True):
        inside, partial = build.in_range(place, 0, size, inside)
        if inside is None and partial:
            return None, None
    return _read(build, name, (*lead, *places), within, inside), inside


def _read(build: Builder, name: str, coords: Coords, within: int | None, inside: int | None) -> int:
    """Return the node that holds `name` at `coords` where `inside` holds, and else zero."""
    value = build.value(name, coords, inside)
    if inside is None or inside == within:
        return value
    return build.zero_outside(value, inside, build.nodes[value].dtype, name)


def _sum(build: Builder, op: Op, value: int | None, inner: Coords, factor: int | None = None) -> int:
    """Return the node that holds the sum over inner axes of a value, times a factor; no value is zero."""
    dtype = compute_dtype(op.outputs[0].dtype)
    if value is None or any(build.extents.of(key) == 0 for index in inner for key, _ in index.terms):
        return build.constant(0, dtype, op.name)
    if factor is not None:
        value = build.apply(f"{op.name}_terms", MUL, value, factor, dtype=dtype)
    return _reduced(build, op, "sum", value, inner)


def _reduced(build: Builder, op: Op, combine: str, value: int, inner: Coords) -> int:
    """Return the node that holds a value reduced over inner axes; without axes it is the value."""
    axes = frozenset(key for index in inner for key, _ in index.terms)
    return build.emit(Reduce(combine, value, axes, build.nodes[value].dtype), op.name) if axes else value


def _coordinate(build: Builder, op: Op, index: Index) -> int:
    return build.emit(Coordinate(index, torch.int32), f"{op.name}_place")


HANDLERS: dict[object, Callable[[Builder, Op, Coords, int | None], int]] = {
    depthwise.depthwise: _convolve,
    depthwise.depthwise_input_gradient: _input_gradient,
    depthwise.depthwise_weight_gradient: _weight_gradient,
    aten.avg_pool2d.default: _average,
    aten.avg_pool2d_backward.default: _average_gradient,
    max_pool.maxima: _maximum,
    max_pool.places: _place_of_maximum,
}
