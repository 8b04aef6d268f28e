"""Name the operators that the compiler itself writes into loop nests and looks for in them.

A name stands for all overloads of its row in the table: `ir.loops.applied` makes a node of the overload that
stands here, and `ir.loops.is_applied` is true for any other one as well.
"""

from __future__ import annotations

import torch

aten = torch.ops.aten

ADD, SUB, MUL, DIV = aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor
FLOOR_DIVIDE, REMAINDER = aten.floor_divide.default, aten.remainder.Tensor
ABS, EXP, EXP2 = aten.abs.default, aten.exp.default, aten.exp2.default
ERF, ERFC = aten.erf.default, aten.erfc.default
POW = aten.pow.Tensor_Scalar
MAXIMUM, MINIMUM, AT_LEAST = aten.maximum.default, aten.minimum.default, aten.clamp_min.default
EQ, LT, GE = aten.eq.Tensor, aten.lt.Tensor, aten.ge.Tensor
AND, OR, IS_NAN = aten.logical_and.default, aten.logical_or.default, aten.isnan.default
BITS_NOT, BITS_AND, RIGHT_SHIFT = (
    aten.bitwise_not.default, aten.bitwise_and.Tensor, aten.bitwise_right_shift.Tensor,
)  # fmt: skip
WHERE, CAST = aten.where.self, aten._to_copy.default
MASKED_FILL = aten.masked_fill.Scalar
OF_BOOLEANS = {BITS_AND: AND, aten.bitwise_or.Tensor: OR}  # what operators on bits are for two booleans

