"""A loop nest as it is written: nodes, each once, and the values that ops have at coordinates.

`Lowering` is the builder that knows how every op is asked for its value; what `special`, `windows` and
`rounding` need of it stands here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch._ops import OpOverload

from fusion_compiler.ir.dag import Op, OpDag
from fusion_compiler.ir.dims import Dim, not_above, simple
from fusion_compiler.ir.index import Extents, divided
from fusion_compiler.ir.loops import (
    Axis,
    Compute,
    Constant,
    Coordinate,
    Index,
    InRange,
    Load,
    Node,
    Value,
    wrapped,
)
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

    @abstractmethod
    def inner_axes(self, key: str, sizes: tuple[Dim, ...]) -> Coords:
        """Return coordinates that count to `sizes` along axes over which only a value's reduction runs.

        They are the same whenever the same key is asked for again. Of size 1 there is no axis. Raises Illegal
        where the space has other keys behind its axes.
        """

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

    def stepped(
        self, op: Op, index: Index, length: Dim, step: int, within: int | None
    ) -> tuple[Index, int | None, bool]:
        """Of `length` elements that lie at 0, step, 2 * step, ...: (number of the one that lies at `index`,
        node that holds whether one does, and `within`; whether none ever does)."""
        everywhere = divided(index, step)
        if everywhere is not None:  # all lie as far from an element
            number, away = everywhere
            inside, partial = self.in_range(number, 0, length, within)
            return number, inside, bool(away) or (inside is None and partial)
        inside, partial = self.in_range(index, 0, simple((length - 1) * step + 1), within)
        if inside is None and partial:
            return index, None, True
        here = self.emit(Coordinate(index, torch.int64), f"{op.name}_position")
        over = self.integer(op, aten.remainder.Scalar, here, step, f"{op.name}_over")
        equal = (("self", Value(over)), ("other", 0))
        hit = self.emit(Compute(aten.eq.Scalar, equal, torch.bool), f"{op.name}_hit")
        hit = hit if inside is None else self.both(inside, hit)
        number = self.integer(op, aten.floor_divide.default, here, step, f"{op.name}_number")
        return self.indirect(op, number, length, signed=False), hit, False

    def in_block(
        self, op: Op, index: Index, length: Dim, step: int, size: int, within: int | None
    ) -> tuple[Index, int | None, bool]:
        """Return what `stepped` does of the block in which `index` lies. `length` blocks of `size` elements
        begin at 0, step, 2 * step, ..."""
        inside, partial = self.in_range(index, 0, simple(length * step), within)
        if inside is None and partial:
            return index, None, True
        everywhere = divided(index, step)
        if everywhere is not None:
            number, over = everywhere
            return number, inside, over >= size
        here = self.emit(Coordinate(index, torch.int64), f"{op.name}_position")
        if size < step:
            over = self.integer(op, aten.remainder.Scalar, here, step, f"{op.name}_over")
            before = (("self", Value(over)), ("other", size))
            hit = self.emit(Compute(aten.lt.Scalar, before, torch.bool), f"{op.name}_hit")
            inside = hit if inside is None else self.both(inside, hit)
        number = self.integer(op, aten.floor_divide.default, here, step, f"{op.name}_number")
        return self.indirect(op, number, length, signed=False), inside, False

    def indirect(self, op: Op, node: int, length: Dim, signed: bool) -> Index:
        """An index that is data; `signed`: negative ones count from the end."""
        if signed:
            dtype = self.nodes[node].dtype
            zero = self.constant(0, dtype, "zero")
            negative = self.emit(
                Compute(aten.lt.Tensor, (("self", Value(node)), ("other", Value(zero))), torch.bool),
                f"{op.name}_negative",
            )
            wrapped: Compute | Coordinate = Coordinate(Index(length, ((~node, 1),)), dtype)
            if isinstance(length, int):
                wrapped = Compute(
                    aten.add.Tensor, (("self", Value(node)), ("other", length), ("alpha", 1)), dtype
                )
            node = self.choose(
                negative, self.emit(wrapped, f"{op.name}_wrapped"), node, dtype, f"{op.name}_index"
            )
        self.extents.indirect[~node] = length
        return Index(0, ((~node, 1),))

    def integer(self, op: Op, target: OpOverload, node: int, other: object, name: str = "") -> int:
        """An operation of an integer and a constant."""
        operands = (("self", Value(node)), ("other", other))
        operands += (("alpha", 1),) if target is aten.add.Tensor else ()
        name = name or f"{op.name}_{target._opname}"
        return self.emit(Compute(target, operands, self.nodes[node].dtype), name)

    def zero_outside(self, value: int, inside: int, dtype: torch.dtype, name: str) -> int:
        """The node that holds `value` where `inside` holds, and else zero, as a load has by itself."""
        node = self.nodes[value]
        if isinstance(node, Load) and node.within == inside:
            return value
        return self.choose(inside, value, self.constant(0, dtype, "zero"), dtype, name)

    def both(self, a: int, b: int) -> int:
        return self.emit(
            Compute(aten.logical_and.default, (("self", Value(a)), ("other", Value(b))), torch.bool), "inside"
        )

    def choose(self, condition: int, a: int, b: int, dtype: torch.dtype, name: str) -> int:
        operands = (("condition", Value(condition)), ("self", Value(a)), ("other", Value(b)))
        return self.emit(Compute(aten.where.self, operands, dtype), name)
