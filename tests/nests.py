"""LoopNests written by hand, for tests: torch-like calls that append nodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

import torch

from fusion_compiler.ir.dims import Dim, hint
from fusion_compiler.ir.loops import (
    COLS,
    Axis,
    Compute,
    Constant,
    Index,
    InRange,
    Load,
    LoopNest,
    Node,
    Random,
    Reduce,
    Scan,
    Store,
    Value,
)
from fusion_compiler.ops.table import OPS
from fusion_compiler.schedule.work import BufferInfo

TARGETS = {str(spec.target).removeprefix("aten.").removeprefix("prims."): spec.target for spec in OPS}


@dataclass
class Nest:
    """axes: name -> (size, group); an index is written as {axis or node: coefficient}."""

    axes: dict[str, tuple[Dim, str]]
    nodes: list[Node] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    buffers: dict[str, BufferInfo] = field(default_factory=dict)

    def index(self, terms: dict[str | Value, int], const: int = 0) -> Index:
        names = list(self.axes)
        return Index(
            const, tuple((names.index(k) if isinstance(k, str) else ~k.node, c) for k, c in terms.items())
        )

    def strides_of(self, axes: tuple[str, ...]) -> dict[str | Value, int]:
        """Contiguous over the given axes."""
        sizes = [hint(self.axes[name][0]) for name in axes]
        return {name: prod(sizes[i + 1 :]) for i, name in enumerate(axes)}

    def push(self, node: Node) -> Value:
        self.nodes.append(node)
        return Value(len(self.nodes) - 1)

    def describe(
        self, name: str, terms: dict[str | Value, int], dtype: torch.dtype, numel: int | None
    ) -> None:
        size = prod(hint(self.axes[k][0]) for k in terms if isinstance(k, str))
        self.buffers.setdefault(name, BufferInfo(numel or size, dtype.itemsize))

    def load(
        self,
        name: str,
        *axes: str,
        at: dict[str | Value, int] | None = None,
        const: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        numel: int | None = None,
        within: Value | None = None,
    ) -> Value:
        terms = self.strides_of(axes) if at is None else at
        self.describe(name, terms, dtype, numel)
        inside = torch.float32 if dtype.is_floating_point and dtype.itemsize < 8 else dtype
        return self.push(Load(name, self.index(terms, const), within.node if within else None, inside))

    def store(
        self,
        name: str,
        value: Value,
        *axes: str,
        at: dict[str | Value, int] | None = None,
        const: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        numel: int | None = None,
        within: Value | None = None,
    ) -> None:
        terms = self.strides_of(axes) if at is None else at
        self.describe(name, terms, dtype, numel)
        self.stores.append(Store(name, self.index(terms, const), value.node, within.node if within else None))

    def op(self, target: str, *operands: object, dtype: torch.dtype = torch.float32) -> Value:
        names = [argument.name for argument in TARGETS[target]._schema.arguments]
        return self.push(Compute(TARGETS[target], tuple(zip(names, operands, strict=False)), dtype))

    def add(self, a: Value, b: Value) -> Value:
        return self.op("add.Tensor", a, b)

    def mul(self, a: Value, b: Value) -> Value:
        return self.op("mul.Tensor", a, b)

    def sub(self, a: Value, b: Value) -> Value:
        return self.op("sub.Tensor", a, b)

    def constant(self, value: float) -> Value:
        return self.push(Constant(value, torch.float32))

    def reduce(self, combine: str, value: Value, *over: str) -> Value:
        return self.push(Reduce(combine, value.node, self.axes_in(*over or (COLS,)), torch.float32))

    def axes_in(self, *groups: str) -> frozenset[int]:
        return frozenset(k for k, (_, group) in enumerate(self.axes.values()) if group in groups)

    def scan(self, combine: str, value: Value, reverse: bool = False) -> Value:
        return self.push(Scan(combine, value.node, reverse, torch.float32))

    def mean(self, value: Value) -> Value:
        cols = prod(hint(size) for size, group in self.axes.values() if group == COLS)
        return self.mul(self.reduce("sum", value), self.constant(1 / max(1, cols)))

    def random(self, *axes: str) -> Value:
        seed = self.load("seed", dtype=torch.int64, numel=1)
        return self.push(Random(seed.node, self.index(self.strides_of(axes)), 0))

    def in_range(self, axis: str, low: int, high: int) -> Value:
        return self.push(InRange(self.index({axis: 1}), low, high))

    def nest(self) -> LoopNest:
        axes = tuple(Axis(name, size, group) for name, (size, group) in self.axes.items())
        names = tuple(f"v{n}" for n in range(len(self.nodes)))
        return LoopNest(axes, tuple(self.nodes), tuple(self.stores), names)
