"""The operator table: one row for every ATen overload that a cluster may hold.

A row says what an operator *is* (its kind), what it *computes* (a Triton expression over
the names of its ATen schema) and what it *costs* (operations per output element). Shapes
and dtypes never come from here: FakeTensor knows them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch._ops import OpOverload


class Kind(StrEnum):
    """Operator classes of Ivanov et al. (2021), with layout, random and opaque beside them."""

    CONTRACTION = "contraction"  # matrix products, convolution, attention: stays a library call
    NORMALIZATION = "normalization"  # a reduction whose result is broadcast back
    REDUCTION = "reduction"
    ELEMENTWISE = "elementwise"
    LAYOUT = "layout"  # moves no data, or only moves data
    RANDOM = "random"
    OPAQUE = "opaque"  # no row in the table: stays an ATen call


class Operands(StrEnum):
    """The dtype in which an expression sees its tensor operands."""

    RESULT = "result"  # converted to the compute dtype of the result
    PROMOTED = "promoted"  # promoted among themselves (comparisons)
    OWN = "own"  # each as it is (where's condition, shifts)


@dataclass(frozen=True)
class OpSpec:
    """One operator.

    expr: Triton expression with the schema's argument names in braces, or a function from
        those names to such an expression where the text depends on a scalar argument.
        Tensor operands arrive as variable names, scalars as literals.
    combine: for reductions, the combining function: sum, prod, max, min, any, all,
        argmax or argmin.
    flops: arithmetic operations per element (of the input, for reductions).
    special: how many of the slow-unit operations (exp, log, tanh, division, ...) it takes.
    """

    target: OpOverload
    kind: Kind
    expr: str | Callable[..., str] | None = None
    operands: Operands = Operands.RESULT
    combine: str | None = None
    flops: int = 1
    special: int = 0
