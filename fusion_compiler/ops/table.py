"""List the operators in a table: one row for every ATen overload that a cluster may hold.

A row says what an operator *is* (its kind), what it *computes* (a function from
its operands to a Triton expression) and what it *costs* (operations per output element). Shapes
and dtypes never come from here: FakeTensor knows them.

How an expression is filled in. A row's function is called with every argument of the schema, defaults
included, by its name: a tensor as a tree (`ops/syntax.py`), a number as a `Literal`, anything else as it is.
A function that kernels import, `tl.floor` say, is called with them in the schema's order. A tensor argument
may be a literal too (`1 - x` is aten.sub.Tensor(1, x)). Tl functions read a literal as float32, so where the
result is float64 a number that float32 does not hold is written `tl.full((), 0.1, tl.float64)`. The result is
then converted to the result's compute dtype.

A row without an expression is lowered by what its kind or its form says: layout ops become access maps,
lookups indirect loads, arange and iota coordinates.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch._ops import OpOverload

from fusion_compiler.ops import expressions as ex
from fusion_compiler.ops.lookups import GATHERS
from fusion_compiler.ops.own import depthwise, max_pool, put, random, running, sum_rows
from fusion_compiler.ops.syntax import (
    INFINITY,
    MINUS_INFINITY,
    Binary,
    Expression,
    Global,
    Literal,
    Unary,
    fm,
    libdevice,
    tl,
)
from fusion_compiler.ops.views import SPLITS, VIEWS

aten = torch.ops.aten
prims = torch.ops.prims
Row = Callable[..., Expression]
MINUS_ONE = Literal(-1)
FEW_ROWS = 16  # of a product that clusters hold: with more, arithmetic bounds what a matrix's bytes do not


class Kind(StrEnum):
    """Operators have the classes of Ivanov et al. (2021), with scan, layout, random and opaque beside
    them."""

    CONTRACTION = "contraction"  # matrix products, convolution, attention; library calls unless rows are few
    NORMALIZATION = "normalization"  # a reduction whose result is broadcast back
    REDUCTION = "reduction"
    WINDOWS = "windows"  # a reduction of windows of an image, which may overlap: pooling
    SCAN = "scan"  # a reduction of all elements up to each, in order
    ELEMENTWISE = "elementwise"
    LAYOUT = "layout"  # moves no data, or only moves data
    RANDOM = "random"
    OPAQUE = "opaque"  # no row in the table: stays an ATen call


class Form(StrEnum):
    """Operators that are no computation on their operands at the same point have one of these forms."""

    FILL = "fill"  # the same number everywhere
    COPY = "copy"  # one operand in other memory, and in the dtype of the result
    COUNT = "count"  # start, start + step, start + 2 * step, ...
    LOOKUP = "lookup"  # elements of an operand by indices that are data (ops/lookups.py)
    SEGMENTS = "segments"  # sums, maxima or minima of rows in segments (ops/own/sum_rows.py)
    CONCATENATION = "concatenation"  # tensors side by side along a dimension
    STACK = "stack"  # tensors side by side along a new dimension
    PADDING = "padding"  # a tensor with a number around it
    OVERLAY = "overlay"  # a tensor with another in the place of a view of it (views.OVERLAYS)
    RANDOM = "random"  # numbers by a seed and the place
    REVERSAL = "reversal"  # a tensor with dimensions counted from their ends


class Operands(StrEnum):
    """The member says in which dtype an expression sees its tensor operands."""

    RESULT = "result"  # converted to the compute dtype of the result
    PROMOTED = "promoted"  # promoted among themselves (comparisons)
    OWN = "own"  # each as it is (where's condition, shifts)


@dataclass(frozen=True)
class OpSpec:
    """A row describes one operator.

    expr: a function from the schema's arguments to a Triton expression.
    combine: for reductions, the combining function: sum, prod, max, min, any, all,
        argmax or argmin; for scans sum, prod, max, min, logsumexp, argmax or argmin.
    flops: arithmetic operations per element (of the input, for reductions).
    special: how many of the slow-unit operations (exp, log, tanh, division, ...) it takes.
    fp16: a faster expression, right to 2^-15 relative: taken where all that comes of the result is
        stored in 16 bits.
    bf16: a faster one still, right to 2^-11 relative: taken where, besides, eager itself would round
        this result to bfloat16. What follows may cancel all but the error: of a result that eager
        keeps in float32 (GELU's tanh) that would be seen.
    discontinuous: its result jumps where an operand crosses a value, or is taken from one element of it. What
        the operand rounds to decides (see `ir/reproducible.py`).
    operator: the first overload of the same row, which stands for all of them: aten.add.Tensor for
        aten.add.Scalar. `ops/arithmetic.py` names the operators that the compiler itself writes.
    is_condition: its result is a bool whatever its operands are.
    compare: the function of two numbers that a comparison is; None for all else.
    keeps_zero: its result is zero where all of its operands are.
    chooses: its result is one of its operands, the negative of one, or zero: every dtype that holds these
        holds it.
    selects_bits: its result has bits of its operands, perhaps moved down. It is almost free for bytes, since
        it vanishes if these become floats (`codegen/bits.py`).
    multiplies: its value is a product for some arguments, or a sum with one: compilers may round both once.
    form: how the result is lowered, unless it is `expr` of the operands at the same point.
    linear: groups of arguments, by name. While all other arguments stay the same, the result is a linear
        function of the arguments of a group together: a + b of both, a * b of either one.
    """

    target: OpOverload
    kind: Kind
    expr: Row | None = None
    operands: Operands = Operands.RESULT
    combine: str | None = None
    flops: int = 1
    special: int = 0
    fp16: Row | None = None
    bf16: Row | None = None
    discontinuous: bool = False
    operator: OpOverload | None = None
    is_condition: bool = False
    compare: Callable[[Any, Any], bool] | None = None
    keeps_zero: bool = False
    chooses: bool = False
    selects_bits: bool = False
    multiplies: bool = False
    form: Form | None = None
    linear: tuple[tuple[str, ...], ...] = ()

    def applied(self, row: Row, arguments: Mapping[str, Any]) -> Expression:
        """Return an expression of this operator, such as `expr`, with its arguments filled in."""
        if isinstance(row, Global):  # its parameters do not have the schema's names
            return row(*(arguments[a.name] for a in self.target._schema.arguments if a.name in arguments))
        return row(**arguments)


def _elementwise(expr: Row | None, *targets: OpOverload, **facts: Any) -> tuple[OpSpec, ...]:
    """Return the rows of the overloads of one operator. facts: further fields of `OpSpec`."""
    facts = {"operator": targets[0], **facts}
    return tuple(OpSpec(target, Kind.ELEMENTWISE, expr, **facts) for target in targets)


_OF_SELF = (("self",),)
_OF_BOTH = (("self", "other"),)
_OF_EACH = (("self",), ("other",))


def _fill(expr: Row | None, *targets: OpOverload) -> tuple[OpSpec, ...]:
    return _elementwise(expr, *targets, flops=0, form=Form.FILL)


def _layout(*targets: OpOverload, **facts: Any) -> tuple[OpSpec, ...]:
    return tuple(OpSpec(target, Kind.LAYOUT, flops=0, **facts) for target in targets)


def _reduction(combine: str, *targets: OpOverload) -> tuple[OpSpec, ...]:
    chooses, linear = combine not in ("sum", "prod"), _OF_SELF if combine == "sum" else ()
    return tuple(
        OpSpec(target, Kind.REDUCTION, combine=combine, discontinuous=chooses, linear=linear)
        for target in targets
    )


def _scan(combine: str, target: OpOverload, flops: int = 8, **row: Any) -> OpSpec:
    chooses = combine not in ("sum", "prod", "logsumexp")
    return OpSpec(target, Kind.SCAN, combine=combine, flops=flops, discontinuous=chooses, **row)


def _condition(expr: Row, *targets: OpOverload, **facts: Any) -> tuple[OpSpec, ...]:
    return _elementwise(expr, *targets, is_condition=True, discontinuous=True, **facts)


def _comparison(
    symbol: str, compare: Callable[[Any, Any], bool], packet: torch._ops.OpOverloadPacket
) -> tuple[OpSpec, ...]:
    def compared(self: Expression, other: Expression) -> Expression:
        return Binary(symbol, self, other)

    return _condition(compared, packet.Tensor, packet.Scalar, operands=Operands.PROMOTED, compare=compare)


_ARITHMETIC = (
    *_elementwise(tl.abs, aten.abs.default, chooses=True),
    # Not `-x`: Triton computes 0 - x, which loses the sign of zero.
    *_elementwise(lambda self: self * -1, aten.neg.default, keeps_zero=True, chooses=True, linear=_OF_SELF),
    *_elementwise(ex.add, aten.add.Tensor, aten.add.Scalar, keeps_zero=True, linear=_OF_BOTH),
    *_elementwise(ex.sub, aten.sub.Tensor, aten.sub.Scalar, keeps_zero=True, linear=_OF_BOTH),
    *_elementwise(ex.rsub, aten.rsub.Tensor, aten.rsub.Scalar, linear=_OF_BOTH),
    *_elementwise(
        lambda self, other: self * other, aten.mul.Tensor, aten.mul.Scalar, multiplies=True, linear=_OF_EACH
    ),
    *_elementwise(
        ex.div,
        aten.div.Tensor,
        aten.div.Scalar,
        special=1,
        fp16=ex.fp16_div,
        multiplies=True,
        linear=_OF_SELF,
    ),
    *_elementwise(
        ex.div_mode,
        aten.div.Tensor_mode,
        aten.div.Scalar_mode,
        flops=4,
        special=1,
        discontinuous=True,
        multiplies=True,
    ),
    *_elementwise(
        fm.floor_divide,
        aten.floor_divide.default,
        aten.floor_divide.Scalar,
        flops=8,
        special=2,
        discontinuous=True,
    ),
    *_elementwise(
        fm.fmod, aten.fmod.Tensor, aten.fmod.Scalar, flops=8, special=1, discontinuous=True
    ),
    *_elementwise(
        fm.remainder,
        aten.remainder.Tensor,
        aten.remainder.Scalar,
        aten.remainder.Scalar_Tensor,
        flops=8,
        special=1,
        discontinuous=True,
    ),
    *_elementwise(ex.pow, aten.pow.Tensor_Scalar, flops=2, fp16=ex.fp16_pow, multiplies=True),
    *_elementwise(fm.pow, aten.pow.Tensor_Tensor, flops=16, special=2, multiplies=True),
    *_elementwise(
        fm.pow, aten.pow.Scalar, flops=16, special=2, fp16=ex.fp16_pow_of_scalar, multiplies=True
    ),
    *_elementwise(
        ex.lerp, aten.lerp.Scalar, aten.lerp.Tensor, flops=3, multiplies=True, linear=(("self", "end"),)
    ),
    *_elementwise(
        ex.addcmul,
        aten.addcmul.default,
        flops=2,
        multiplies=True,
        linear=(("self", "tensor1"), ("self", "tensor2")),
    ),
    *_elementwise(
        ex.addcdiv,
        aten.addcdiv.default,
        flops=2,
        special=1,
        multiplies=True,
        linear=(("self", "tensor1"),),
    ),
    *_elementwise(ex.maximum, aten.maximum.default, chooses=True),
    *_elementwise(ex.minimum, aten.minimum.default, chooses=True),
    # Unlike maximum and minimum these ignore a NaN on one side.
    *_elementwise(
        lambda self, other: tl.where((self >= other) | other.ne(other), self, other),
        aten.fmax.default,
        flops=3,
    ),
    *_elementwise(
        lambda self, other: tl.where((self <= other) | other.ne(other), self, other),
        aten.fmin.default,
        flops=3,
    ),
    *_elementwise(ex.clamp, aten.clamp.default, aten.clamp.Tensor, flops=2, chooses=True),
    *_elementwise(
        lambda self, min: ex.maximum(self, min), aten.clamp_min.default, aten.clamp_min.Tensor, chooses=True
    ),
    *_elementwise(
        lambda self, max: ex.minimum(self, max), aten.clamp_max.default, aten.clamp_max.Tensor, chooses=True
    ),
    *_elementwise(fm.copysign, aten.copysign.Tensor, aten.copysign.Scalar, discontinuous=True),
)

_COMPARISONS = (
    *_comparison("==", operator.eq, aten.eq),
    *_comparison("!=", operator.ne, aten.ne),
    *_comparison("<", operator.lt, aten.lt),
    *_comparison("<=", operator.le, aten.le),
    *_comparison(">", operator.gt, aten.gt),
    *_comparison(">=", operator.ge, aten.ge),
    *_elementwise(
        lambda self: self.ne(self), aten.isnan.default, operands=Operands.OWN, is_condition=True
    ),
    *_condition(
        lambda self: self.eq(INFINITY) | self.eq(MINUS_INFINITY),
        aten.isinf.default,
        operands=Operands.OWN,
        flops=3,
    ),
    *_condition(
        lambda self: (self > MINUS_INFINITY) & (self < INFINITY),
        aten.isfinite.default,
        operands=Operands.OWN,
        flops=3,
    ),
    *_condition(lambda self, other: self & other, aten.logical_and.default),
    *_condition(lambda self, other: self | other, aten.logical_or.default),
    *_condition(lambda self, other: self ^ other, aten.logical_xor.default),
    *_condition(lambda self: self.eq(0), aten.logical_not.default, operands=Operands.OWN),
    *_elementwise(
        tl.where,
        aten.where.self,
        operands=Operands.OWN,
        chooses=True,
        selects_bits=True,
        linear=_OF_BOTH,
    ),
    *_elementwise(
        lambda self, mask, value: tl.where(mask, value, self),
        aten.masked_fill.Scalar,
        aten.masked_fill.Tensor,
        operands=Operands.OWN,
        linear=(("self", "value"),),
    ),
)

_BITS = (
    *_elementwise(lambda self: Unary("~", self), aten.bitwise_not.default),
    *_elementwise(
        lambda self, other: self & other,
        aten.bitwise_and.Tensor,
        aten.bitwise_and.Scalar,
        aten.bitwise_and.Scalar_Tensor,
        aten.__and__.Tensor,
        aten.__and__.Scalar,
        selects_bits=True,
    ),
    *_elementwise(
        lambda self, other: self | other,
        aten.bitwise_or.Tensor,
        aten.bitwise_or.Scalar,
        aten.bitwise_or.Scalar_Tensor,
        aten.__or__.Tensor,
        aten.__or__.Scalar,
    ),
    *_elementwise(
        lambda self, other: self ^ other,
        aten.bitwise_xor.Tensor,
        aten.bitwise_xor.Scalar,
        aten.bitwise_xor.Scalar_Tensor,
        aten.__xor__.Tensor,
        aten.__xor__.Scalar,
    ),
    *_elementwise(
        fm.left_shift,
        aten.bitwise_left_shift.Tensor,
        aten.bitwise_left_shift.Tensor_Scalar,
        aten.bitwise_left_shift.Scalar_Tensor,
        aten.__lshift__.Tensor,
        aten.__lshift__.Scalar,
        flops=4,
    ),
    *_elementwise(
        fm.right_shift,
        aten.bitwise_right_shift.Tensor,
        aten.bitwise_right_shift.Tensor_Scalar,
        aten.bitwise_right_shift.Scalar_Tensor,
        aten.__rshift__.Tensor,
        aten.__rshift__.Scalar,
        flops=4,
        selects_bits=True,
    ),
)

_ROUNDING = (
    *_elementwise(fm.sign, aten.sign.default, aten.sgn.default, flops=2, discontinuous=True),
    *_elementwise(tl.floor, aten.floor.default, discontinuous=True),
    *_elementwise(tl.ceil, aten.ceil.default, discontinuous=True),
    *_elementwise(libdevice.trunc, aten.trunc.default, discontinuous=True),
    *_elementwise(lambda self: self - libdevice.trunc(self), aten.frac.default, flops=2, discontinuous=True),
    *_elementwise(libdevice.nearbyint, aten.round.default, discontinuous=True),
    *_elementwise(ex.round_decimals, aten.round.decimals, flops=3, special=1, discontinuous=True),
)

_FUNCTIONS = (
    # libdevice's exp and not Triton's, whose float32 error grows with |x| to 40 ulp.
    *_elementwise(
        libdevice.exp, aten.exp.default, flops=4, special=1, fp16=fm.fp16_exp
    ),
    *_elementwise(libdevice.exp2, aten.exp2.default, special=1, fp16=tl.exp2),
    *_elementwise(
        libdevice.expm1, aten.expm1.default, flops=12, special=1, fp16=fm.fp16_expm1
    ),
    *_elementwise(
        tl.log,
        aten.log.default,
        flops=8,
        special=1,
        fp16=lambda self: fm.fp16_log2(self) * math.log(2),
    ),
    *_elementwise(tl.log2, aten.log2.default, flops=8, special=1, fp16=fm.fp16_log2),
    *_elementwise(
        libdevice.log10,
        aten.log10.default,
        flops=8,
        special=1,
        fp16=lambda self: fm.fp16_log2(self) * math.log10(2),
    ),
    *_elementwise(
        libdevice.log1p, aten.log1p.default, flops=12, special=1, fp16=fm.fp16_log1p
    ),
    *_elementwise(fm.sqrt, aten.sqrt.default, flops=4, special=1, fp16=fm.fp16_sqrt),
    *_elementwise(tl.rsqrt, aten.rsqrt.default, special=1),
    *_elementwise(
        lambda self: fm.div(1.0, self),
        aten.reciprocal.default,
        flops=4,
        special=1,
        fp16=lambda self: 1.0 / self,
    ),
    *_elementwise(
        fm.sigmoid,
        aten.sigmoid.default,
        flops=8,
        special=2,
        fp16=fm.fp16_sigmoid,
        bf16=fm.bf16_sigmoid,
    ),
    *_elementwise(
        fm.tanh,
        aten.tanh.default,
        flops=12,
        special=2,
        fp16=fm.fp16_tanh,
        bf16=fm.bf16_tanh,
    ),
    *_elementwise(libdevice.sin, aten.sin.default, flops=16),
    *_elementwise(libdevice.cos, aten.cos.default, flops=16),
    *_elementwise(libdevice.tan, aten.tan.default, flops=24, special=1),
    *_elementwise(libdevice.asin, aten.asin.default, flops=16, special=1),
    *_elementwise(libdevice.acos, aten.acos.default, flops=16, special=1),
    *_elementwise(libdevice.atan, aten.atan.default, flops=16, special=1),
    *_elementwise(libdevice.sinh, aten.sinh.default, flops=16, special=1),
    *_elementwise(libdevice.cosh, aten.cosh.default, flops=16, special=1),
    *_elementwise(libdevice.asinh, aten.asinh.default, flops=16, special=2),
    *_elementwise(libdevice.acosh, aten.acosh.default, flops=16, special=2),
    *_elementwise(libdevice.atanh, aten.atanh.default, flops=16, special=2),
    *_elementwise(fm.atan2, aten.atan2.default, flops=20, special=1),
    *_elementwise(fm.hypot, aten.hypot.default, flops=12, special=1),
    *_elementwise(tl.erf, aten.erf.default, flops=20, special=1, fp16=fm.fp16_erf),
    *_elementwise(
        libdevice.erfc, aten.erfc.default, flops=24, special=2, fp16=fm.fp16_erfc
    ),
    *_elementwise(libdevice.erfinv, aten.erfinv.default, flops=24, special=2),
    *_elementwise(libdevice.lgamma, aten.lgamma.default, flops=40, special=2),
    *_elementwise(lambda self: ex.maximum(self, Literal(0)), aten.relu.default, chooses=True),
    *_elementwise(
        lambda self, negative_slope: tl.where(self > 0, self, self * negative_slope),
        aten.leaky_relu.default,
        flops=3,
    ),
    *_elementwise(
        ex.elu,
        aten.elu.default,
        flops=16,
        special=1,
        fp16=functools.partial(ex.elu, expm1=fm.fp16_expm1),
    ),
    *_elementwise(
        lambda self, min_val=MINUS_ONE, max_val=ex.ONE: ex.clamp(self, min_val, max_val),
        aten.hardtanh.default,
        flops=2,
    ),
)

_COPIES_AND_CONSTANTS = (
    *_elementwise(
        lambda a, **_: a,
        prims.convert_element_type.default,
        flops=0,
        operator=aten._to_copy.default,
        linear=(("a",),),
    ),
    *_elementwise(
        lambda self, **_: self,
        aten._to_copy.default,
        flops=0,
        keeps_zero=True,
        linear=_OF_SELF,
    ),
    *_elementwise(lambda self, **_: self, aten.clone.default, flops=0, form=Form.COPY, linear=_OF_SELF),
    *_elementwise(lambda src, **_: src, aten.copy.default, flops=0, form=Form.COPY, linear=(("src",),)),
    *_fill(lambda value, **_: value, aten.fill.Scalar, aten.fill.Tensor),
    *_fill(lambda fill_value, **_: fill_value, aten.full.default, aten.full_like.default),
    *_fill(lambda **_: Literal(0), aten.zeros_like.default, aten._efficientzerotensor.default),
    *_fill(lambda **_: Literal(1), aten.ones_like.default),
    *_fill(lambda s, **_: s, aten.scalar_tensor.default),
    # Whoever writes into an empty tensor writes all of it that is ever read: any constant will do.
    *_fill(
        None,
        aten.empty.memory_format,
        aten.empty_permuted.default,
        aten.empty_strided.default,
        aten.new_empty_strided.default,
    ),
    *_elementwise(
        None,
        aten.arange.start_step,
        aten.arange.start,
        aten.arange.default,
        prims.iota.default,
        flops=0,
        form=Form.COUNT,
    ),
)

_GATHERS = tuple(
    OpSpec(target, Kind.ELEMENTWISE, flops=0, form=Form.LOOKUP, linear=((operand,),))
    for target, operand in GATHERS.items()
)

# A lookup costs its bytes alone. The flops of a sum of rows keep it from being recomputed.
_SUMS_OF_ROWS = tuple(
    OpSpec(target, Kind.ELEMENTWISE, flops=16, discontinuous=combine != "sum", form=Form.SEGMENTS)
    for target, combine in sum_rows.COMBINES.items()
)

_REDUCTIONS = (
    *_reduction("sum", aten.sum.dim_IntList, aten.sum.default),
    *_reduction("prod", aten.prod.default, aten.prod.dim_int),
    *_reduction("max", aten.amax.default),
    *_reduction("min", aten.amin.default),
    *_reduction("any", aten.any.default, aten.any.dim, aten.any.dims),
    *_reduction("all", aten.all.default, aten.all.dim, aten.all.dims),
    *_reduction("argmax", aten.argmax.default),
    *_reduction("argmin", aten.argmin.default),
)

# Operations: of each element with those of its thread, and of the threads' results with each other.
_SCANS = (
    _scan("sum", aten.cumsum.default, linear=_OF_SELF),
    _scan("prod", aten.cumprod.default),
    _scan("logsumexp", aten.logcumsumexp.default, flops=40, special=3),
    _scan("max", running.largest),
    _scan("min", running.smallest),
    _scan("argmax", running.where_largest, flops=20),
    _scan("argmin", running.where_smallest, flops=20),
)

_LAYOUTS = (
    *_layout(*VIEWS, linear=_OF_SELF),
    *_layout(*SPLITS),
    *_layout(aten.cat.default, form=Form.CONCATENATION, linear=(("tensors",),)),
    *_layout(aten.stack.default, form=Form.STACK, linear=(("tensors",),)),
    *_layout(aten.constant_pad_nd.default, form=Form.PADDING, linear=(("self", "value"),)),
    *_layout(
        aten.slice_scatter.default,
        aten.select_scatter.default,
        form=Form.OVERLAY,
        linear=(("self", "src"),),
    ),
    *_layout(aten.flip.default, form=Form.REVERSAL, linear=_OF_SELF),
)

# Operations of each element and tap. `ir/dag.py` counts the taps.
_CONVOLUTIONS = tuple(OpSpec(target, Kind.CONTRACTION, flops=2) for target in depthwise.CALLS)

_POOLING = (
    OpSpec(aten.avg_pool2d.default, Kind.WINDOWS),
    OpSpec(aten.avg_pool2d_backward.default, Kind.WINDOWS),
    OpSpec(max_pool.maxima, Kind.WINDOWS, discontinuous=True),
    OpSpec(max_pool.places, Kind.WINDOWS, flops=6, discontinuous=True),
)

_WRITES = _layout(put.put)  # into memory that exists: stores at other places than those of their results

OPS: tuple[OpSpec, ...] = (
    *_ARITHMETIC,
    *_COMPARISONS,
    *_BITS,
    *_ROUNDING,
    *_FUNCTIONS,
    *_COPIES_AND_CONSTANTS,
    *_GATHERS,
    *_SUMS_OF_ROWS,
    *_REDUCTIONS,
    *_SCANS,
    *_LAYOUTS,
    *_CONVOLUTIONS,
    *_POOLING,
    *_WRITES,
    OpSpec(random.uniform, Kind.RANDOM, flops=16, form=Form.RANDOM),
)

BY_TARGET: Mapping[OpOverload, OpSpec] = {spec.target: spec for spec in OPS}
# Sorts of row numbers (`ops/decompositions/rows_by_number.py`) stay library calls. An unstable sort is not
# one of them: the plan reports it as an operator without a kernel.
SORTS = (aten.sort.stable, aten.searchsorted.Tensor)


def spec_of(target: object) -> OpSpec | None:
    """Return the row of an ATen overload, or None for everything that is not in the table."""
    return BY_TARGET.get(target) if isinstance(target, OpOverload) else None


def form_of(target: object) -> Form | None:
    """Return the form of an operator that is no computation on its operands at the same point, else None."""
    spec = spec_of(target)
    return spec and spec.form


def is_always_held(target: object) -> bool:
    """True for an operator that clusters hold whatever it costs: they hold a contraction only if that is
    faster, and windows only if these have a known size."""
    spec = spec_of(target)
    return spec is not None and spec.kind not in (Kind.CONTRACTION, Kind.WINDOWS)
