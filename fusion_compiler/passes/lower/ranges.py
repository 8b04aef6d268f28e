"""Value ranges of integer tensors that index others, as far as the graph proves them.

A kernel does not check an index that is proved to be in bounds, such as an arange, an argmax or a clamped
value.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import sympy
import torch

from fusion_compiler.ir import layout
from fusion_compiler.ir.dag import Op, OpDag, Ref
from fusion_compiler.ir.dims import Dim, not_above, product, simple
from fusion_compiler.ir.writes import meta_of
from fusion_compiler.ops.own.experts import expert_mm
from fusion_compiler.ops.own.put import put
from fusion_compiler.ops.views import wrap

aten = torch.ops.aten
Range = tuple[Dim, Dim]
DEEPEST = 64  # depth of the analysis, in ops; a value beyond it has an unknown range


@dataclass(frozen=True, slots=True)
class Lookup:
    """An index of an op that is data.

    dim: the dimension of the op's operand (or of the written view) along which elements of the tensor `index`
        select positions low <= i < high.
    unproved: the name of the op for the error message of an index out of bounds; "" if the index is proved to
        be in bounds.
    """

    dim: int
    index: str
    low: Dim
    high: Dim
    unproved: str


def lookups(dag: OpDag, op: Op) -> tuple[Lookup, ...]:
    """Return the lookups of a gather, a write or a similar op, in the order of its arguments; () for other
    ops."""
    if op.target not in _LOOKUPS or (op.target is put and len(op.args) < 4):
        return ()
    source = op.args[1] if op.target in (put, expert_mm) else op.args[0]
    shape = meta_of(dag, source).shape
    if op.target is aten.embedding.default:
        pairs = [(0, op.args[1])]
    elif op.target is expert_mm:
        pairs = [(0, op.args[2])]
    elif op.target in (aten.gather.default, aten.index_select.default):
        pairs = [(wrap(op.args[1], len(shape)), op.args[2])]  # type: ignore[arg-type]
    else:
        indices = op.args[3] if op.target is put else op.args[1]
        pairs = [(i, a) for i, a in enumerate(indices) if a is not None]  # type: ignore[arg-type]
    result: list[Lookup] = []
    for dim, index in pairs:
        assert isinstance(index, Ref)
        length = shape[dim] if shape else 1
        low = simple(-length) if op.target in _WRAP else 0
        smallest, largest = _Ranges(dag).of(index.name, DEEPEST)
        in_bounds = not_above(low, smallest) and not_above(largest, simple(length - 1))
        trusted = in_bounds or op.target is aten._unsafe_index.Tensor  # the op promises indices in bounds
        result.append(Lookup(dim, index.name, low, length, "" if trusted else _title(op)))
    return tuple(result)


def _title(op: Op) -> str:
    """Return the name of an op in error messages: the user's call that it is part of, and its source line."""
    name = op.call.target if op.call is not None else op.target._opname  # type: ignore[union-attr]
    if op.source is None:
        return name
    file = re.split(r"[/\\]", op.source.file)[-1]
    return f"{name} at {file}:{op.source.line}".replace('"', "'")


class _Ranges:
    def __init__(self, dag: OpDag) -> None:
        self.dag = dag
        self.ranges: dict[str, Range] = {}

    def of(self, name: str, depth: int) -> Range:
        """Return (smallest, largest) of a tensor's elements; the dtype's range if nothing else is known."""
        if name not in self.ranges:
            op = self.dag.op(name)
            dtype = op.outputs[0].dtype if op.outputs else torch.float32
            limits = _range_of_dtype(dtype)
            range_ = self._infer(op, depth) if depth else None
            self.ranges[name] = range_ if range_ is not None and _fits(range_, limits, dtype) else limits
        return self.ranges[name]

    def _infer(self, op: Op, depth: int) -> Range | None:
        """Return the range that follows from the op's rule, or None."""

        def of(position: int, name: str, default: object = None) -> Range | None:
            value = layout.argument(op, position, name, default)
            if isinstance(value, Ref):
                return self.of(value.name, depth - 1)
            return (value, value) if isinstance(value, int | sympy.Expr) else None

        if op.target in _SAME or layout.is_view(op):
            return self.of(op.first, depth - 1)
        if op.target in _ANY_OF:
            return _hull([self.of(name, depth - 1) for name in op.inputs])
        if op.target is operator.getitem:
            return self._position_range(self.dag.op(op.first)) if op.args[1] == 1 else None
        if op.target in (aten.argmax.default, aten.argmin.default):
            return self._position_range(op)
        if op.target in _COUNTS:
            return _counted(op)
        rule = _RULES.get(op.target)
        return rule(of) if rule is not None else None

    def _position_range(self, op: Op) -> Range | None:
        """Return the range of positions along a dimension, or in the flattened tensor if no dimension is
        given."""
        shape = self.dag.op(op.first).outputs[0].shape
        if op.target not in _PLACES:
            return None
        position, default = _PLACES[op.target]
        dim = layout.argument(op, position, "dim", default)
        count = shape[wrap(dim, len(shape))] if isinstance(dim, int) and shape else product(shape)
        return 0, simple(count - 1)


def _range_of_dtype(dtype: torch.dtype) -> Range:
    """Return the range of a dtype; for a float, the range of an integer converted from it."""
    if dtype is torch.bool:
        return 0, 1
    info = torch.iinfo(torch.int64 if dtype.is_floating_point or dtype.is_complex else dtype)
    return info.min, info.max


def _fits(range_: Range, limits: Range, dtype: torch.dtype) -> bool:
    """True if a range lies within its dtype, so that nothing wrapped around. Tensor sizes always fit in
    int64."""
    if all(isinstance(end, int) for end in range_):
        return not_above(limits[0], range_[0]) and not_above(range_[1], limits[1])
    return dtype is torch.int64


def _hull(ranges: Iterable[Range | None]) -> Range | None:
    """Return the smallest range that contains all of them, or None if one is unknown."""
    hull: Range | None = None
    for range_ in ranges:
        if range_ is None:
            return None
        previous = range_ if hull is None else hull
        low, high = _least(previous[0], range_[0]), _greatest(previous[1], range_[1])
        if low is None or high is None:
            return None
        hull = low, high
    return hull


def _least(a: Dim, b: Dim) -> Dim | None:
    return a if not_above(a, b) else b if not_above(b, a) else None


def _greatest(a: Dim, b: Dim) -> Dim | None:
    return b if not_above(a, b) else a if not_above(b, a) else None


def start_and_step(op: Op) -> tuple[object, object]:
    """Return the first element of arange or iota, and the difference of neighbours."""
    if op.target is torch.ops.prims.iota.default:
        return dict(op.kwargs)["start"], dict(op.kwargs)["step"]
    bounds = [a for a in op.args if not isinstance(a, torch.dtype)]
    return (0, 1) if len(bounds) == 1 else (bounds[0], bounds[2] if len(bounds) > 2 else 1)


def _counted(op: Op) -> Range | None:
    """Return the range of arange and iota: start, start + step, ..."""
    start, step = start_and_step(op)
    if op.outputs[0].dtype.is_floating_point or not all(isinstance(n, int | float) for n in (start, step)):
        return None
    start, step = int(start), int(step)  # type: ignore[arg-type]
    last = simple(start + step * (op.outputs[0].shape[0] - 1))
    return (start, last) if step > 0 else (last, start)


Operand = Callable[..., Range | None]  # (position, name, default) of an argument -> its range


def _clamped(value: Range | None, least: Range | None, most: Range | None) -> Range | None:
    if value is None:  # the bounds alone give a range
        return None if least is None or most is None else (least[0], most[1])
    low, high = value
    if least is not None:
        low, high = _greatest(low, least[0]), _greatest(high, least[1])
    if most is not None and low is not None and high is not None:
        low, high = _least(low, most[0]), _least(high, most[1])
    return None if low is None or high is None else (low, high)


def _sum(of: Operand, sign: int) -> Range | None:
    a, b, alpha = of(0, "self"), of(1, "other"), of(2, "alpha", 1)
    if a is None or b is None or alpha != (1, 1):
        return None
    low, high = b if sign > 0 else (-b[1], -b[0])
    return simple(a[0] + low), simple(a[1] + high)


def _scaled(of: Operand) -> Range | None:
    a, b = of(0, "self"), of(1, "other")
    if a is None or b is None or not all(isinstance(end, int) for end in (*a, *b)):
        return None
    ends = [x * y for x in a for y in b]
    return min(ends), max(ends)  # type: ignore[type-var]


def _rest(of: Operand) -> Range | None:
    """Return the range of x % n, which has the sign of n."""
    divisor = of(1, "other")
    is_constant = divisor is not None and divisor[0] == divisor[1] and not_above(1, divisor[0])
    return (0, simple(divisor[0] - 1)) if is_constant and divisor is not None else None


def _quotient(of: Operand) -> Range | None:
    value, divisor = of(0, "self"), of(1, "other")
    if value is None or divisor is None or not all(isinstance(end, int) for end in (*value, *divisor)):
        return None
    low, high, by = int(value[0]), int(value[1]), int(divisor[0])
    return (low // by, high // by) if divisor == (by, by) and by > 0 else None


def _masked(of: Operand) -> Range | None:
    """Return the range of x & y: from zero to any operand that is not negative."""
    tops = [r[1] for r in (of(0, "self"), of(1, "other")) if r is not None and not_above(0, r[0])]
    return (0, tops[0]) if tops else None


_WRAP = frozenset({aten.index.Tensor, aten._unsafe_index.Tensor, put})  # negative indices count from the end
_LOOKUPS = _WRAP | {aten.embedding.default, aten.gather.default, aten.index_select.default, expert_mm}
_SAME = frozenset({
    aten.clone.default, aten._to_copy.default, torch.ops.prims.convert_element_type.default,
    aten.flip.default, aten.gather.default, aten.index_select.default, aten.index.Tensor,
    aten._unsafe_index.Tensor, aten.amax.default, aten.amin.default,
})  # fmt: skip
_ANY_OF = frozenset({
    aten.cat.default, aten.stack.default, aten.slice_scatter.default, aten.select_scatter.default,
})  # fmt: skip
_COUNTS = frozenset({
    aten.arange.default, aten.arange.start, aten.arange.start_step, torch.ops.prims.iota.default,
})  # fmt: skip
_PLACES: dict[object, tuple[int, int | None]] = {  # position of the `dim` argument, and its default
    aten.argmax.default: (1, None), aten.argmin.default: (1, None), aten.max.dim: (1, None),
    aten.min.dim: (1, None), aten.sort.default: (1, -1), aten.sort.stable: (2, -1),
    aten.topk.default: (2, -1),
}  # fmt: skip
_RULES: dict[object, Callable[[Operand], Range | None]] = {
    **dict.fromkeys((aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default), lambda of: (0, 0)),
    **dict.fromkeys((aten.ones.default, aten.ones_like.default, aten.new_ones.default), lambda of: (1, 1)),
    **dict.fromkeys((aten.full.default, aten.full_like.default), lambda of: of(1, "fill_value")),
    aten.scalar_tensor.default: lambda of: of(0, "s"),
    **dict.fromkeys(
        (aten.clamp.default, aten.clamp.Tensor),
        lambda of: _clamped(of(0, "self"), of(1, "min"), of(2, "max")),
    ),
    aten.where.self: lambda of: _hull((of(1, "self"), of(2, "other"))),
    aten.clamp_min.default: lambda of: _clamped(of(0, "self"), of(1, "min"), None),
    aten.clamp_max.default: lambda of: _clamped(of(0, "self"), None, of(1, "max")),
    aten.maximum.default: lambda of: _clamped(of(0, "self"), of(1, "other"), None),
    aten.minimum.default: lambda of: _clamped(of(0, "self"), None, of(1, "other")),
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar), lambda of: _sum(of, 1)),
    **dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar), lambda of: _sum(of, -1)),
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), _scaled),
    **dict.fromkeys((aten.remainder.Scalar, aten.remainder.Tensor), _rest),
    **dict.fromkeys((aten.floor_divide.default,), _quotient),
    **dict.fromkeys((aten.bitwise_and.Tensor, aten.bitwise_and.Scalar), _masked),
}
