"""Convert integers with selected bits, and bytes, to floats, as packed weights of a few bits need.

    to_copy = fm.from_byte(in1)                                      # as they were loaded, four in a register
    sub = fm.from_bits(in1_1, 15, 0, 8, False)                       # (in1_1 & 15) - 8
    sub_1 = tl.where(inside, sub, fm.from_bits(in1_2, 240, 4, 8, False))

A multiprocessor executes few conversion instructions per cycle; `math.py` says how few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from fusion_compiler.ir.loops import (
    Compute,
    Load,
    LoopNest,
    Node,
    cast_of,
    is_applied,
    number_of,
    operand_of,
    operands_of,
)
from fusion_compiler.ops.arithmetic import BITS_AND, RIGHT_SHIFT, SUB, WHERE
from fusion_compiler.ops.syntax import Expression, fm, tl
from fusion_compiler.schedule.work import BYTES

WIDTHS = {torch.uint8: 8, torch.int8: 8, torch.int16: 16, torch.int32: 32, torch.int64: 64}  # in bits
DIGITS = 23  # digits of a float32 into which bits are inserted
MOST_ZERO = 1 << 20  # largest integer that is subtracted from them exactly


@dataclass(frozen=True)
class Bits:
    """The value is (x & mask) >> shift, where x is the node `source`. mask: None for all bits and the sign;
    not None in `Floats`."""

    source: int
    mask: int | None
    shift: int


@dataclass(frozen=True)
class Choice:
    """The value is where(condition, one, other)."""

    condition: int
    one: Bits | Choice
    other: Bits | Choice


@dataclass(frozen=True)
class Floats:
    """The values are integers converted to floats, minus an integer. signed: they are whole bytes of int8."""

    source: Bits | Choice
    offset: int
    signed: bool

    def operands(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(_operands(self.source)))

    def value(self, variable: Callable[[int], Expression]) -> Expression:
        return _value(self.source, self, variable)


def floats_of(loops: LoopNest, number: int) -> Floats | None:
    """Return a node as floats of selected bits, or of bytes that are not as loaded; None for any other
    node."""
    node, offset = loops.nodes[number], 0
    if is_applied(node, SUB):
        operands, widened = dict(node.operands), operand_of(node, "self")
        zero = operands.get("other")
        if widened is None or operands.get("alpha", 1) != 1 or not isinstance(zero, int | float):
            return None
        if not abs(zero) < MOST_ZERO or zero != int(zero):
            return None
        node, offset = loops.nodes[widened], int(zero)
    source = _widened(loops, node)
    if source is None or isinstance(loops.nodes[source], Load):
        return None
    dtype = loops.nodes[source].dtype
    if (bits := _selected_bits(loops, source)) is not None:
        return Floats(bits, offset, signed=False)
    return Floats(Bits(source, 255, 0), offset, dtype is torch.int8) if dtype in BYTES else None


def widened_byte(loops: LoopNest, node: Node) -> int | None:
    """Return the bytes that a node converts to floats, or None."""
    source = _widened(loops, node)
    return None if source is None or loops.nodes[source].dtype not in BYTES else source


def _widened(loops: LoopNest, node: Node) -> int | None:
    """Return the integers that a node converts to floats, or None."""
    source = cast_of(node)
    if source is None or node.dtype is not torch.float32 or loops.nodes[source].dtype not in WIDTHS:
        return None
    return source


def _selected_bits(loops: LoopNest, number: int) -> Bits | Choice | None:
    """Return the bits that a node selects, or that each arm of a choice selects; None if it does not
    select bits."""
    node = loops.nodes[number]
    if not is_applied(node, WHERE):
        bits = _bits(loops, number)
        return None if bits.mask is None else bits
    if len(operands_of(node)) != 3:
        return None
    condition, one, other = operands_of(node)
    first, second = _selected_bits(loops, one), _selected_bits(loops, other)
    return None if first is None or second is None else Choice(condition, first, second)


def _bits(loops: LoopNest, number: int) -> Bits:
    """Return a node as selected bits of another, or of itself."""
    node, itself = loops.nodes[number], Bits(number, None, 0)
    source = operand_of(node, "self") if isinstance(node, Compute) else None
    if source is None or not isinstance(node, Compute) or loops.nodes[source].dtype is not node.dtype:
        return itself
    constant, width = number_of(loops.nodes, node, "other"), WIDTHS.get(node.dtype)
    if not isinstance(constant, int) or constant < 0 or width is None:
        return itself
    inner = _bits(loops, source)
    if is_applied(node, BITS_AND):
        mask = constant << inner.shift if inner.mask is None else constant << inner.shift & inner.mask
        if mask >> min(width, DIGITS) == 0:
            return Bits(inner.source, mask, inner.shift)
        return itself if constant >> min(width, DIGITS) else Bits(source, constant, 0)
    if is_applied(node, RIGHT_SHIFT) and inner.shift + constant < min(width, DIGITS):
        shift = inner.shift + constant
        if inner.mask is not None:
            return Bits(inner.source, inner.mask >> shift << shift, shift)
        return Bits(inner.source, 256 - (1 << shift) if node.dtype is torch.uint8 else None, shift)
    return itself


def _operands(selection: Bits | Choice) -> Iterator[int]:
    """Yield the nodes that a selection reads."""
    if isinstance(selection, Choice):
        yield selection.condition
        yield from _operands(selection.one)
        yield from _operands(selection.other)
    else:
        yield selection.source


def _value(bits: Bits | Choice, floats: Floats, variable: Callable[[int], Expression]) -> Expression:
    if isinstance(bits, Choice):
        one, other = (_value(arm, floats, variable) for arm in (bits.one, bits.other))
        return tl.where(variable(bits.condition), one, other)
    return fm.from_bits(variable(bits.source), bits.mask, bits.shift, floats.offset, floats.signed)
