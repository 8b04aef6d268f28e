"""Decide where a kernel rounds a value to its dtype; values in registers are float32 otherwise.

A value is the same number wherever it is used. A kernel that loads a stored value gets the rounded one, so
the kernel that stores it also continues with the rounded one. A value that is never stored is computed from
the same numbers in every kernel and need not be rounded, unless it is reproducible (ir/reproducible.py): then
the rounding decides a discontinuous result.

    r = x + y; store r; norm(r)           r = x + y; store r; norm(r.to(bfloat16))
    y = 1.1 * x; y == m            ->     y = 1.1 * x; y.to(bfloat16) == m
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fusion_compiler.ir.dag import Op, Ref, TensorMeta
from fusion_compiler.ir.loops import Compute, Constant, Load, Node, Reduce, Scan, Value, applied
from fusion_compiler.ops.arithmetic import CAST
from fusion_compiler.ops.schema import HALVES
from fusion_compiler.passes.lower.builder import Builder


@dataclass(frozen=True)
class Rounding:
    """The values that a loop nest rounds.

    stored: ops whose results a kernel stores. like_eager: round every value and compute it as eager does.
    """

    stored: frozenset[str]
    like_eager: bool = False

    def pins(self, op: Op) -> bool:
        return op.reproducible or self.like_eager

    def applies_to(self, op: Op) -> bool:
        """True if an op's value is rounded to its dtype. A conversion to eight bits quantizes, so it is
        always rounded. So is a conversion that the model's code makes and undoes (`Op.rounds`)."""
        dtype = op.outputs[0].dtype
        explicit = op.rounds or (dtype.is_floating_point and dtype.itemsize == 1)
        return explicit or (dtype in HALVES and (self.pins(op) or op.name in self.stored))


class Rounder:
    """Rounds the values of a loop nest under construction."""

    def __init__(self, build: Builder, rounding: Rounding) -> None:
        self.build, self.rounding = build, rounding
        self.dag, self.nodes = build.dag, build.nodes
        # (node, dtype) -> whether its values are
        self._representable: dict[tuple[int, torch.dtype], bool] = {}

    def rounded(self, op: Op, node: int) -> int:
        """Return `node` rounded to the op's dtype, if the rounding is part of the op's value."""
        dtype = op.outputs[0].dtype
        if not self.rounding.applies_to(op) or self._is_representable(node, dtype):
            return node
        value = self.nodes[node]
        if isinstance(value, Constant):
            return self.build.constant(_nearest(value.value, dtype), torch.float32, op.name)
        return self._converted(node, dtype, self.rounding.pins(op), op.name)

    def comparable(self, op: Op, operands: list[tuple[str, object]]) -> list[tuple[str, object]]:
        """Return the operands of a comparison, with scalars in the dtype of the tensors. PyTorch promotes
        16-bit operands so on a CPU. A single integer that is compared with an integer tensor wraps around."""
        metas = {name: self.dag.op(name).outputs[0] for name in op.inputs if self.dag.op(name).outputs}
        names = (a.name for a in op.target._schema.arguments)  # type: ignore[union-attr]
        sources = dict(zip(names, op.args, strict=False))
        dtypes = {m.dtype for m in metas.values() if m.shape}
        if dtypes and not any(map(_is_fractional, dtypes)) and dtypes != {torch.bool}:
            dtype = functools.reduce(torch.promote_types, dtypes)
            return [(name, self._wrapped(v, sources.get(name), metas, dtype)) for name, v in operands]
        fractional = set(filter(_is_fractional, dtypes))
        dtype = fractional.pop() if len(fractional) == 1 else None
        if dtype not in HALVES:
            return operands
        result: list[tuple[str, object]] = []
        for name, operand in operands:
            source = sources.get(name)
            if isinstance(operand, float):
                operand = _nearest(operand, dtype)
            elif isinstance(operand, Value) and isinstance(source, Ref) and not metas[source.name].shape:
                node = operand.node
                if self.nodes[node].dtype.is_floating_point and not self._is_representable(node, dtype):
                    operand = Value(self._converted(node, dtype, True, source.name))
            result.append((name, operand))
        return result

    def _wrapped(
        self, operand: object, source: object, metas: Mapping[str, TensorMeta], dtype: torch.dtype
    ) -> object:
        """Return an operand converted to `dtype` if it is a single integer of another dtype."""
        if not isinstance(operand, Value) or not isinstance(source, Ref) or metas[source.name].shape:
            return operand
        operand_dtype = self.nodes[operand.node].dtype
        if _is_fractional(operand_dtype) or operand_dtype in (torch.bool, dtype):
            return operand
        return Value(self.build.converted(operand.node, dtype, source.name))

    def _converted(self, node: int, dtype: torch.dtype, reproducible: bool, name: str) -> int:
        cast = applied(self.nodes, CAST, node, dtype=torch.float32, rounding=str(dtype))
        return self.build.emit(replace(cast, reproducible=reproducible), name)

    def _is_representable(self, number: int, dtype: torch.dtype) -> bool:
        """True if all values of a node are representable in `dtype`."""
        key = number, dtype
        if key not in self._representable:
            self._representable[key] = self._compute_representable(self.nodes[number], dtype)
        return self._representable[key]

    def _compute_representable(self, node: Node, dtype: torch.dtype) -> bool:
        match node:
            case Load():
                return self.dag.op(node.buffer).outputs[0].dtype is dtype
            case Constant():
                return _nearest(node.value, dtype) == node.value
            case Reduce() | Scan():
                return node.combine in ("max", "min") and self._is_representable(node.operand, dtype)
            case Compute():
                if dict(node.operands).get("rounding") is not None:
                    return dict(node.operands)["rounding"] == str(dtype)
                return node.spec.chooses and all(
                    self._is_representable(a.node, dtype) if isinstance(a, Value) else _fits(a, dtype)
                    for name, a in node.operands
                    if name != "condition"
                )
            case _:
                return False


def _is_fractional(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def unrounded(nodes: Sequence[Node], node: int, dtype: torch.dtype) -> int:
    """Return the operand of a rounding that the store to a buffer of this dtype repeats, else `node`."""
    value = nodes[node]
    operands = dict(value.operands) if isinstance(value, Compute) else {}
    operand = operands.get("self")
    return operand.node if operands.get("rounding") == str(dtype) and isinstance(operand, Value) else node


def _fits(number: object, dtype: torch.dtype) -> bool:
    return not isinstance(number, int | float) or _nearest(number, dtype) == number


def _nearest(number: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(number, dtype=torch.float64).to(dtype))
