"""Floats of integers of which some bits are taken, and of bytes: as weights of a few bits are packed.

    to_copy = fm.from_byte(in1)                                      # as they were loaded, four in a register
    sub = fm.from_bits(in1_1, 15, 0, 8, False)                       # (in1_1 & 15) - 8
    sub_1 = tl.where(inside, sub, fm.from_bits(in1_2, 240, 4, 8, False))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from fusion_compiler.ir.loops import Compute, Constant, Load, LoopNest, Node
from fusion_compiler.ir.syntax import Expression, fm, tl
from fusion_compiler.schedule.analysis import operand_of, rounding_of
from fusion_compiler.schedule.work import AND, BYTES, RIGHT_SHIFTS

aten = torch.ops.aten
WIDTHS = {torch.uint8: 8, torch.int8: 8, torch.int16: 16, torch.int32: 32, torch.int64: 64}  # in bits
DIGITS = 23  # of a float32, in which bits lie
MOST_ZERO = 1 << 20  # that is taken from them: what is left is exact


@dataclass(frozen=True)
class Bits:
    """(x & mask) >> shift of the node `of`. mask: None, but never in floats, for all bits and the sign."""

    of: int
    mask: int | None
    shift: int


@dataclass(frozen=True)
class Choice:
    """where(condition, one, other)."""

    condition: int
    one: Bits | Choice
    other: Bits | Choice


@dataclass(frozen=True)
class Floats:
    """Integers as floats, less a whole number. signed: they are whole bytes of int8."""

    of: Bits | Choice
    less: int
    signed: bool

    def operands(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(_read(self.of)))

    def value(self, variable: Callable[[int], Expression]) -> Expression:
        return _value(self.of, self, variable)


def floats_of(loops: LoopNest, number: int) -> Floats | None:
    """What a node is as floats of bits, or of bytes that are not as they were loaded; None of all else."""
    node, less = loops.nodes[number], 0
    if isinstance(node, Compute) and node.target is aten.sub.Tensor:
        operands, widened = dict(node.operands), operand_of(node, "self")
        zero = operands.get("other")
        if widened is None or operands.get("alpha", 1) != 1 or not isinstance(zero, int | float):
            return None
        if not abs(zero) < MOST_ZERO or zero != int(zero):
            return None
        node, less = loops.nodes[widened], int(zero)
    source = _widened(loops, node)
    if source is None or isinstance(loops.nodes[source], Load):
        return None
    dtype = loops.nodes[source].dtype
    if (taken := _taken(loops, source)) is not None:
        return Floats(taken, less, signed=False)
    return Floats(Bits(source, 255, 0), less, dtype is torch.int8) if dtype in BYTES else None


def widened_byte(loops: LoopNest, node: Node) -> int | None:
    """The bytes that a node makes floats of."""
    source = _widened(loops, node)
    return None if source is None or loops.nodes[source].dtype not in BYTES else source


def _widened(loops: LoopNest, node: Node) -> int | None:
    """The integers that a node makes floats of."""
    if not isinstance(node, Compute) or node.target is not aten._to_copy.default:
        return None
    source = operand_of(node, "self")
    if source is None or node.dtype is not torch.float32 or rounding_of(node) is not None:
        return None
    return source if loops.nodes[source].dtype in WIDTHS else None


def _taken(loops: LoopNest, number: int) -> Bits | Choice | None:
    """The bits that a node takes, or each arm of a choice; None where that is not so."""
    node = loops.nodes[number]
    if not isinstance(node, Compute) or node.target is not aten.where.self:
        bits = _bits(loops, number)
        return None if bits.mask is None else bits
    condition, one, other = (operand_of(node, name) for name in ("condition", "self", "other"))
    if condition is None or one is None or other is None:
        return None
    first, second = _taken(loops, one), _taken(loops, other)
    return None if first is None or second is None else Choice(condition, first, second)


def _bits(loops: LoopNest, number: int) -> Bits:
    node, itself = loops.nodes[number], Bits(number, None, 0)
    source = operand_of(node, "self") if isinstance(node, Compute) else None
    if source is None or not isinstance(node, Compute) or loops.nodes[source].dtype is not node.dtype:
        return itself
    by, width = _whole_number(loops, node), WIDTHS.get(node.dtype)
    if by is None or by < 0 or width is None:
        return itself
    inner = _bits(loops, source)
    if node.target in AND:
        mask = by << inner.shift if inner.mask is None else by << inner.shift & inner.mask
        if mask >> min(width, DIGITS) == 0:
            return Bits(inner.of, mask, inner.shift)
        return itself if by >> min(width, DIGITS) else Bits(source, by, 0)
    if node.target in RIGHT_SHIFTS and inner.shift + by < min(width, DIGITS):
        shift = inner.shift + by
        if inner.mask is not None:
            return Bits(inner.of, inner.mask >> shift << shift, shift)
        return Bits(inner.of, 256 - (1 << shift) if node.dtype is torch.uint8 else None, shift)
    return itself


def _whole_number(loops: LoopNest, node: Compute) -> int | None:
    other = operand_of(node, "other")
    constant = None if other is None else loops.nodes[other]
    value = constant.value if isinstance(constant, Constant) else dict(node.operands).get("other")
    return value if isinstance(value, int) else None


def _read(of: Bits | Choice) -> Iterator[int]:
    if isinstance(of, Choice):
        yield of.condition
        yield from _read(of.one)
        yield from _read(of.other)
    else:
        yield of.of


def _value(of: Bits | Choice, floats: Floats, variable: Callable[[int], Expression]) -> Expression:
    if isinstance(of, Choice):
        one, other = (_value(arm, floats, variable) for arm in (of.one, of.other))
        return tl.where(variable(of.condition), one, other)
    return fm.from_bits(variable(of.of), of.mask, of.shift, floats.less, floats.signed)
