"""Where a value is rounded to its dtype inside of a kernel: the numbers in registers are float32.

A value has one number wherever it is used. What one kernel stores another one loads, rounded: so whoever
makes it goes on with what is stored. What is never stored is made of the same numbers everywhere, and need
not be rounded, unless it is pinned (ir/pinned.py): then the rounding decides something.

    r = x + y; store r; norm(r)           r = x + y; store r; norm(r.to(bfloat16))
    y = 1.1 * x; y == m            ->     y = 1.1 * x; y.to(bfloat16) == m
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fusion_compiler.ir.dag import Op, Ref, TensorMeta
from fusion_compiler.ir.loops import Compute, Constant, Load, Node, Reduce, Scan, Value
from fusion_compiler.passes.lower.builder import Builder

aten = torch.ops.aten
HALVES = (torch.float16, torch.bfloat16)
# Whose result is one of their operands, or its negative: rounded as these are.
_CHOOSING = frozenset({
    aten.where.self, aten.maximum.default, aten.minimum.default, aten.relu.default, aten.abs.default,
    aten.neg.default, aten.clone.default, aten.clamp_min.Tensor, aten.clamp_max.Tensor, aten.clamp.Tensor,
})  # fmt: skip


@dataclass(frozen=True)
class Rounding:
    """What a loop nest rounds. stored: ops whose results some kernel stores. like_eager: all of them are
    rounded and made as eager does."""

    stored: frozenset[str]
    like_eager: bool = False

    def pins(self, op: Op) -> bool:
        return op.pinned or self.like_eager

    def of(self, op: Op) -> bool:
        """Whether an op's value is rounded to its dtype. A conversion to eight bits always is, as it is there
        to quantize, and so is one that the model's code makes and undoes (`Op.rounds`)."""
        dtype = op.outputs[0].dtype
        asked_for = op.rounds or (dtype.is_floating_point and dtype.itemsize == 1)
        return asked_for or (dtype in HALVES and (self.pins(op) or op.name in self.stored))


class Rounder:
    """Rounds the values of a loop nest as it is built."""

    def __init__(self, build: Builder, rounding: Rounding) -> None:
        self.build, self.rounding = build, rounding
        self.dag, self.nodes = build.dag, build.nodes
        self._held: dict[tuple[int, torch.dtype], bool] = {}  # whether a node's values are a dtype's anyway

    def rounded(self, op: Op, node: int) -> int:
        """The node of an op's value as the op's dtype holds it, where that is part of the value."""
        dtype = op.outputs[0].dtype
        if not self.rounding.of(op) or self._is_held(node, dtype):
            return node
        value = self.nodes[node]
        if isinstance(value, Constant):
            return self.build.constant(_nearest(value.value, dtype), torch.float32, op.name)
        return self._converted(node, dtype, self.rounding.pins(op), op.name)

    def comparable(self, op: Op, operands: list[tuple[str, object]]) -> list[tuple[str, object]]:
        """What 16-bit tensors are compared with, numbers and single elements, in their dtype: as PyTorch
        promotes them on a CPU. Also single integers, which wrap around, that integers are compared with."""
        metas = {name: self.dag.op(name).outputs[0] for name in op.inputs if self.dag.op(name).outputs}
        names = (a.name for a in op.target._schema.arguments)  # type: ignore[union-attr]
        given = dict(zip(names, op.args, strict=False))
        several = {m.dtype for m in metas.values() if m.shape}
        if several and not any(map(_is_fractional, several)) and several != {torch.bool}:
            dtype = functools.reduce(torch.promote_types, several)
            return [(name, self._wrapped(v, given.get(name), metas, dtype)) for name, v in operands]
        dtypes = set(filter(_is_fractional, several))
        dtype = dtypes.pop() if len(dtypes) == 1 else None
        if dtype not in HALVES:
            return operands
        found: list[tuple[str, object]] = []
        for name, operand in operands:
            source = given.get(name)
            if isinstance(operand, float):
                operand = _nearest(operand, dtype)
            elif isinstance(operand, Value) and isinstance(source, Ref) and not metas[source.name].shape:
                node = operand.node
                if self.nodes[node].dtype.is_floating_point and not self._is_held(node, dtype):
                    operand = Value(self._converted(node, dtype, True, source.name))
            found.append((name, operand))
        return found

    def _wrapped(
        self, operand: object, source: object, metas: Mapping[str, TensorMeta], dtype: torch.dtype
    ) -> object:
        """An operand, in a dtype of integers if it is a single integer of another."""
        if not isinstance(operand, Value) or not isinstance(source, Ref) or metas[source.name].shape:
            return operand
        have = self.nodes[operand.node].dtype
        if _is_fractional(have) or have in (torch.bool, dtype):
            return operand
        return Value(self.build.converted(operand.node, dtype, source.name))

    def _converted(self, node: int, dtype: torch.dtype, pinned: bool, name: str) -> int:
        operands = (("self", Value(node)), ("rounding", str(dtype)))
        return self.build.emit(Compute(aten._to_copy.default, operands, torch.float32, pinned=pinned), name)

    def _is_held(self, number: int, dtype: torch.dtype) -> bool:
        """Whether a node's values are numbers of a dtype anyway."""
        key = number, dtype
        if key not in self._held:
            self._held[key] = self._holds(self.nodes[number], dtype)
        return self._held[key]

    def _holds(self, node: Node, dtype: torch.dtype) -> bool:
        match node:
            case Load():
                return self.dag.op(node.buffer).outputs[0].dtype is dtype
            case Constant():
                return _nearest(node.value, dtype) == node.value
            case Reduce() | Scan():
                return node.combine in ("max", "min") and self._is_held(node.operand, dtype)
            case Compute():
                if dict(node.operands).get("rounding") is not None:
                    return dict(node.operands)["rounding"] == str(dtype)
                return node.target in _CHOOSING and all(
                    self._is_held(a.node, dtype) if isinstance(a, Value) else _fits(a, dtype)
                    for name, a in node.operands
                    if name != "condition"
                )
            case _:
                return False


def _is_fractional(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def unrounded(nodes: Sequence[Node], node: int, dtype: torch.dtype) -> int:
    """What a store into a buffer of this dtype rounds to the same."""
    value = nodes[node]
    operands = dict(value.operands) if isinstance(value, Compute) else {}
    operand = operands.get("self")
    return operand.node if operands.get("rounding") == str(dtype) and isinstance(operand, Value) else node


def _fits(number: object, dtype: torch.dtype) -> bool:
    return not isinstance(number, int | float) or _nearest(number, dtype) == number


def _nearest(number: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(number, dtype=torch.float64).to(dtype))
