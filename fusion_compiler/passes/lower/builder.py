"""A loop nest as it is written: nodes, each once, and the values that ops have at coordinates.

`Lowering` is the builder that knows how every op is asked for its value; what `special` and `rounding`
need of it stands here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch

from fusion_compiler.ir.dag import Op, OpDag
from fusion_compiler.ir.dims import Dim, not_above, simple
from fusion_compiler.ir.index import Extents
from fusion_compiler.ir.loops import Axis, Compute, Constant, Index, InRange, Node, Value, wrapped
from fusion_compiler.passes.lower.space import Coords

aten = torch.ops.aten


class Builder(ABC):
    """nodes, names: of the program so far, in SSA order. extents: of the axes that indices go by, the nest's
    first."""

    def __init__(self, dag: OpDag, axes: tuple[Axis, ...], extents: tuple[Dim, ...]) -> None:
        self.dag, self.axes, self.extents = dag, axes, Extents(extents)
        self.nodes: list[Node] = []
        self.names: list[str] = []
        self.numbering: dict[Node, int] = {}

    @abstractmethod
    def value(self, name: str, coords: Coords, within: int | None) -> int:
        """The node that holds `name` at `coords`; outside `within` it may be anything finite to read."""

    def operand(self, op: Op, name: str, coords: Coords, within: int | None) -> int:
        """An operand of an element-wise op, broadcast to its result."""
        shape = self.dag.op(name).outputs[0].shape if self.dag.op(name).outputs else ()
        lead = len(op.outputs[0].shape) - len(shape)
        return self.value(name, coords[lead:], within)

    def emit(self, node: Node, name: str) -> int:
        """The number of a node, which is added unless the program has it."""
        number = self.numbering.get(node)
        if number is None:
            number = self.numbering[node] = len(self.nodes)
            self.nodes.append(node)
            self.names.append(name)
        return number

    def constant(self, value: bool | int | float, dtype: torch.dtype, name: str) -> int:
        if dtype.is_floating_point:
            return self.emit(Constant(float(value), dtype), name)
        typed = bool(value) if dtype is torch.bool else wrapped(int(value), dtype)
        return self.emit(Constant(typed, dtype), name)

    def converted(self, node: int, dtype: torch.dtype, name: str) -> int:
        """A value in the dtype in which a result is computed."""
        if self.nodes[node].dtype == dtype:
            return node
        return self.emit(Compute(aten._to_copy.default, (("self", Value(node)),), dtype), name)

    def in_range(self, index: Index, low: Dim, high: Dim, within: int | None) -> tuple[int | None, bool]:
        """(node of low <= index < high and within, whether it can be false); (None, ...) when never true."""
        smallest, largest = self.extents.limits(index)
        if not_above(low, smallest) and not_above(largest, simple(high - 1)):
            return within, False
        if not_above(high, smallest) or not_above(largest, simple(low - 1)):
            return None, True
        node = self.emit(InRange(index, low, high), "inside")
        return (node if within is None else self.both(within, node)), True

    def value_in_range(self, name: str, coords: Coords, dims: Iterable[int], within: int) -> int:
        """The node that holds `name` at `coords`, which `within` says lie inside it along `dims`."""
        shape, before = self.dag.op(name).outputs[0].shape, self.extents.narrowed
        limits = dict(before)
        for dim in dims:
            if len(coords[dim].terms) != 1:
                continue
            ((key, step),) = coords[dim].terms
            limit = simple(shape[dim] - coords[dim].const)
            if key >= 0 and step == 1 and not_above(limit, limits.get(key, self.extents.of(key))):
                limits[key] = limit
        self.extents.narrowed = limits
        try:
            return self.value(name, coords, within)
        finally:
            self.extents.narrowed = before

    def both(self, a: int, b: int) -> int:
        return self.emit(
            Compute(aten.logical_and.default, (("self", Value(a)), ("other", Value(b))), torch.bool), "inside"
        )

    def choose(self, condition: int, a: int, b: int, dtype: torch.dtype, name: str) -> int:
        operands = (("condition", Value(condition)), ("self", Value(a)), ("other", Value(b)))
        return self.emit(Compute(aten.where.self, operands, dtype), name)
