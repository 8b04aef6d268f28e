"""Value ranges of integer tensors that index others, as far as the graph proves them.

A kernel does not check an index that is proved to be in bounds, such as an arange, an argmax or a clamped
value. The range of an element-wise operator follows from its row's expression: `intervals.evaluated`.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch._ops import OpOverload

from fusion_compiler.ir import layout
from fusion_compiler.ir.dag import Op, OpDag, Ref
from fusion_compiler.ir.dims import Dim, not_above, product, simple
from fusion_compiler.ir.writes import meta_of
from fusion_compiler.ops.dims import dim_of
from fusion_compiler.ops.syntax import Literal, Name
from fusion_compiler.ops.table import Form, spec_of
from fusion_compiler.passes.lower.intervals import Range, evaluated, fits, hull, range_of_dtype

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
    looked = layout.lookups_of(dag, op)
    if looked is None:
        return ()
    shape = meta_of(dag, op.arguments[looked.operand]).shape
    result: list[Lookup] = []
    for dim, index in looked.indices:
        length = shape[dim] if shape else 1
        low = simple(-length) if looked.wraps else 0
        smallest, largest = range_of(dag, index.name)
        in_bounds = not_above(low, smallest) and not_above(largest, simple(length - 1))
        unproved = "" if in_bounds or looked.in_bounds else _title(op)
        result.append(Lookup(dim, index.name, low, length, unproved))
    return tuple(result)


def range_of(dag: OpDag, name: str) -> Range:
    """Return (smallest, largest) of an op's elements; the dtype's range if nothing else is known."""
    return _Ranges(dag).of(name, DEEPEST)


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
            limits = range_of_dtype(dtype)
            range_ = self._infer(op, depth) if depth else None
            self.ranges[name] = range_ if range_ is not None and fits(range_, limits, dtype) else limits
        return self.ranges[name]

    def _infer(self, op: Op, depth: int) -> Range | None:
        """Return the range that follows from what the op is, or None."""
        if layout.is_view(op):
            return self.of(op.first, depth - 1)
        if op.target is operator.getitem:
            call = self.dag.op(op.first)
            return self._positions(call) if op.args[1] == 1 and _finds_places(call.target) else None
        spec = spec_of(op.target)
        match spec and (spec.form or spec.combine):
            case Form.LOOKUP | Form.REVERSAL | "max" | "min":
                return self.of(op.first, depth - 1)
            case Form.CONCATENATION | Form.STACK | Form.OVERLAY:
                return hull(*(self.of(name, depth - 1) for name in op.inputs))
            case Form.COUNT:
                return _counted(op)
            case "argmax" | "argmin":
                return self._positions(op)
            case _:
                pass
        if spec is None or spec.expr is None:
            return None

        def operand(argument: str) -> Range | None:
            value = op.arguments[argument]
            if not isinstance(value, Ref):
                return value, value
            range_, dtype = self.of(value.name, depth - 1), self.dag.op(value.name).outputs[0].dtype
            may_be_nan = dtype.is_floating_point and range_ == range_of_dtype(dtype)
            return None if may_be_nan else range_  # no clamp bounds the integer that NaN becomes

        arguments = {name: _argument(name, value) for name, value in op.arguments.items()}
        return evaluated(spec.applied(spec.expr, arguments), operand)

    def _positions(self, op: Op) -> Range:
        """Return the range of positions along a dimension, or in the flattened tensor if no dimension is
        given."""
        shape = self.dag.op(op.first).outputs[0].shape
        dim = None if op.arguments["dim"] is None else dim_of(op.arguments, len(shape))
        return 0, simple((product(shape) if dim is None else shape[dim]) - 1)


def _finds_places(target: object) -> bool:
    """True if an operator returns elements along a dimension and their positions, as a sort does."""
    returned = target._schema.returns if isinstance(target, OpOverload) else ()
    return [result.name for result in returned] == ["values", "indices"]


def _argument(name: str, value: object) -> Any:
    """Return an argument of an op as an operand of its row's expression."""
    if isinstance(value, Ref | sympy.Expr):
        return Name(name)
    return Literal(value) if isinstance(value, int | float) else value


def start_and_step(op: Op) -> tuple[object, object]:
    """Return the first element of arange or iota, and the difference of neighbours."""
    return op.arguments.get("start", 0), op.arguments.get("step", 1)


def _counted(op: Op) -> Range | None:
    """Return the range of arange and iota: start, start + step, ..."""
    start, step = start_and_step(op)
    if op.outputs[0].dtype.is_floating_point or not all(isinstance(n, int | float) for n in (start, step)):
        return None
    start, step = int(start), int(step)  # type: ignore[arg-type]
    last = simple(start + step * (op.outputs[0].shape[0] - 1))
    return (start, last) if step > 0 else (last, start)
