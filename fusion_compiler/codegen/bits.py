"""Floats of bytes that are computed: of the bits of bytes, as weights of four bits are packed.

    to_copy = fm.from_byte(in1)                                      # as they were loaded, four in a register
    sub = fm.from_bits(in1_1, 15, 0, 8, False)                       # (in1_1 & 15) - 8
    sub_1 = tl.where(inside, sub, fm.from_bits(in1_2, 240, 4, 8, False))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from fusion_compiler.ir.loops import Compute, Constant, Load, LoopNest
from fusion_compiler.schedule.analysis import operand_of, rounding_of
from fusion_compiler.schedule.work import AND, BYTES, RIGHT_SHIFTS

aten = torch.ops.aten
MOST_ZERO = 1 << 20  # of bytes: what is left is exact
MOST_POSITIVE = 127  # of int8


@dataclass(frozen=True)
class Bits:
    """(byte & mask) >> shift, of a node. signed: the byte's highest bit counts as int8's does."""

    byte: int
    mask: int
    shift: int
    signed: bool


@dataclass(frozen=True)
class Choice:
    """where(condition, one, other)."""

    condition: int
    one: Bits | Choice
    other: Bits | Choice


@dataclass(frozen=True)
class Floats:
    """Bytes as floats, less a whole number."""

    of: Bits | Choice
    less: int

    def operands(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(_read(self.of)))

    def text(self, variable: Callable[[int], str]) -> str:
        return _text(self.of, self.less, variable)


def floats_of(loops: LoopNest, number: int) -> Floats | None:
    """What a node is as floats of bytes; None where it is something else, or of bytes as they were loaded."""
    node, less = loops.nodes[number], 0
    if isinstance(node, Compute) and node.target is aten.sub.Tensor:
        operands, widened = dict(node.operands), operand_of(node, "self")
        zero = operands.get("other")
        if widened is None or operands.get("alpha", 1) != 1 or not isinstance(zero, int | float):
            return None
        if not abs(zero) < MOST_ZERO or zero != int(zero):
            return None
        node, less = loops.nodes[widened], int(zero)
    source = widened_byte(loops, node) if isinstance(node, Compute) else None
    if source is None or isinstance(loops.nodes[source], Load):
        return None
    return Floats(_chosen(loops, source), less)


def widened_byte(loops: LoopNest, node: Compute) -> int | None:
    """The bytes that a node makes floats of."""
    source = operand_of(node, "self")
    to_float = node.target is aten._to_copy.default and node.dtype is torch.float32
    of_bytes = source is not None and loops.nodes[source].dtype in BYTES
    return source if to_float and of_bytes and rounding_of(node) is None else None


def _chosen(loops: LoopNest, number: int) -> Bits | Choice:
    node = loops.nodes[number]
    if isinstance(node, Compute) and node.target is aten.where.self:
        condition, one, other = (operand_of(node, name) for name in ("condition", "self", "other"))
        if condition is not None and one is not None and other is not None:
            arms = _chosen(loops, one), _chosen(loops, other)
            if not any(isinstance(arm, Bits) and arm.byte in (one, other) for arm in arms):
                return Choice(condition, *arms)
    return _bits(loops, number)


def _bits(loops: LoopNest, number: int) -> Bits:
    node = loops.nodes[number]
    itself = Bits(number, 255, 0, node.dtype is torch.int8)
    if not isinstance(node, Compute) or (source := operand_of(node, "self")) is None:
        return itself
    by = _whole_number(loops, node)
    if by is None or loops.nodes[source].dtype is not node.dtype:
        return itself
    inner = _bits(loops, source)
    if node.target in AND and 0 <= by <= (MOST_POSITIVE if inner.signed else 255):
        return Bits(inner.byte, inner.mask & (by << inner.shift), inner.shift, False)
    if node.target in RIGHT_SHIFTS and by >= 0 and inner.shift + by < 8 and not inner.signed:
        shift = inner.shift + by
        return Bits(inner.byte, inner.mask >> shift << shift, shift, False)
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
        yield of.byte


def _text(of: Bits | Choice, less: int, variable: Callable[[int], str]) -> str:
    if isinstance(of, Choice):
        one, other = (_text(arm, less, variable) for arm in (of.one, of.other))
        return f"tl.where({variable(of.condition)}, {one}, {other})"
    return f"fm.from_bits({variable(of.byte)}, {of.mask}, {of.shift}, {less}, {of.signed})"
