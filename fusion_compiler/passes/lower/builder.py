"""The loop nest under construction: nodes without duplicates, and the values of ops at coordinates.

`Lowering` implements the builder for all ops. `Builder` declares what `special`, `windows` and `rounding`
need of it.
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
    RAGGED,
    Axis,
    Constant,
    Coordinate,
    Index,
    InRange,
    Load,
    Node,
    applied,
    wrapped,
)
from fusion_compiler.ops.arithmetic import ADD, AND, CAST, EQ, FLOOR_DIVIDE, LT, REMAINDER, WHERE
from fusion_compiler.ops.table import spec_of
from fusion_compiler.passes.lower.space import Coords, compute_dtype


class Builder(ABC):
    """A builder has the interface and the shared parts of the construction of a loop nest.

    nodes, names: the program so far, in SSA order.
    extents: sizes of the axes that indices use; those of the nest come first.
    """

    def __init__(self, dag: OpDag, axes: tuple[Axis, ...], extents: tuple[Dim, ...]) -> None:
        self.dag, self.axes, self.extents = dag, axes, Extents(extents)
        self.nodes: list[Node] = []
        self.names: list[str] = []
        self.numbering: dict[Node, int] = {}

    @abstractmethod
    def value(self, name: str, coords: Coords, within: int | None) -> int:
        """Return the node that holds `name` at `coords`. Where `within` is false the node may hold anything
        finite."""

    @abstractmethod
    def inner_axes(self, key: str, sizes: tuple[Dim, ...]) -> Coords:
        """Return coordinates that count up to `sizes` along axes over which only one value's reduction runs.

        The same key always returns the same coordinates. A size of 1 needs no axis. Raises Illegal if the
        space has other keys after its axes.
        """

    def operand(self, op: Op, name: str, coords: Coords, within: int | None) -> int:
        """Return the value of an operand of an element-wise op, broadcast to the op's result."""
        shape = self.dag.op(name).outputs[0].shape if self.dag.op(name).outputs else ()
        lead = len(op.outputs[0].shape) - len(shape)
        return self.value(name, coords[lead:], within)

    def emit(self, node: Node, name: str) -> int:
        """Return the number of a node, and append it if the program does not contain it."""
        number = self.numbering.get(node)
        if number is None:
            number = self.numbering[node] = len(self.nodes)
            self.nodes.append(node)
            self.names.append(name)
        return number

    def apply(
        self,
        name: str,
        target: OpOverload,
        /,
        *operands: int,
        dtype: torch.dtype | None = None,
        **others: object,
    ) -> int:
        """Return the node of an operator of nodes and of `others` by name (see `ir.loops.applied`)."""
        return self.emit(applied(self.nodes, target, *operands, dtype=dtype, **others), name)

    def ragged_axis(self, first: int, last: int) -> int:
        """Return the number of the axis with as many elements as lie between the values of two nodes."""
        bounds = first, last
        if all(axis.bounds != bounds for axis in self.axes):
            self.axes += (Axis(f"a{len(self.axes)}", 1, RAGGED, bounds),)
            self.extents.axes += (1,)
        return next(k for k, axis in enumerate(self.axes) if axis.bounds == bounds)

    def constant(self, value: bool | int | float, dtype: torch.dtype, name: str) -> int:
        if dtype.is_floating_point:
            return self.emit(Constant(float(value), dtype), name)
        typed = bool(value) if dtype is torch.bool else wrapped(int(value), dtype)
        return self.emit(Constant(typed, dtype), name)

    def converted(self, node: int, dtype: torch.dtype, name: str) -> int:
        """Return `node` converted to `dtype`."""
        if self.nodes[node].dtype == dtype:
            return node
        return self.apply(name, CAST, node, dtype=dtype)

    def of_one(self, op: Op, value: int) -> int:
        """Return a reduction or a scan of one element: the element itself, in the dtype of the result."""
        spec, dtype = spec_of(op.target), compute_dtype(op.outputs[0].dtype)
        assert spec is not None and spec.combine is not None
        if spec.combine.startswith("arg"):
            return self.constant(0, dtype, op.name)
        if spec.combine in ("any", "all"):  # the element may be a byte, the result is a truth value
            value = self.converted(value, torch.bool, op.name)
        return self.converted(value, dtype, op.name)

    def in_range(self, index: Index, low: Dim, high: Dim, within: int | None) -> tuple[int | None, bool]:
        """Return (node, partial) for the condition low <= index < high and `within`.

        node: the condition, or None if it is always true.
        partial: whether the range alone can be false. (None, True) means that the condition is never true.
        """
        smallest, largest = self.extents.limits(index)
        if not_above(low, smallest) and not_above(largest, simple(high - 1)):
            return within, False
        if not_above(high, smallest) or not_above(largest, simple(low - 1)):
            return None, True
        node = self.emit(InRange(index, low, high), "inside")
        return (node if within is None else self.both(within, node)), True

    def value_in_range(self, name: str, coords: Coords, dims: Iterable[int], within: int) -> int:
        """Return the node that holds `name` at `coords`, given that `within` implies that they are in bounds
        along `dims`."""
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
        """Find which of `length` elements at positions 0, step, 2 * step, ... lies at `index`. Return (number
        of the element, node for "an element is there, and `within`", True if none ever is)."""
        division = divided(index, step)
        if division is not None:  # the remainder is the same everywhere
            number, rest = division
            inside, partial = self.in_range(number, 0, length, within)
            return number, inside, bool(rest) or (inside is None and partial)
        inside, partial = self.in_range(index, 0, simple((length - 1) * step + 1), within)
        if inside is None and partial:
            return index, None, True
        position = self.emit(Coordinate(index, torch.int64), f"{op.name}_position")
        remainder = self.apply(f"{op.name}_over", REMAINDER, position, other=step)
        is_element = self.apply(f"{op.name}_hit", EQ, remainder, other=0)
        is_element = is_element if inside is None else self.both(inside, is_element)
        number = self.apply(f"{op.name}_number", FLOOR_DIVIDE, position, other=step)
        return self.indirect(op, number, length, signed=False), is_element, False

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
            over = self.apply(f"{op.name}_over", REMAINDER, here, other=step)
            hit = self.apply(f"{op.name}_hit", LT, over, other=size)
            inside = hit if inside is None else self.both(inside, hit)
        number = self.apply(f"{op.name}_number", FLOOR_DIVIDE, here, other=step)
        return self.indirect(op, number, length, signed=False), inside, False

    def indirect(self, op: Op, node: int, length: Dim, signed: bool) -> Index:
        """Return the index whose value is that of `node`. signed: negative values count from the end."""
        if signed:
            dtype = self.nodes[node].dtype
            negative = self.apply(f"{op.name}_negative", LT, node, self.constant(0, dtype, "zero"))
            if isinstance(length, int):
                from_end = self.apply(f"{op.name}_wrapped", ADD, node, other=length)
            else:
                from_end = self.emit(Coordinate(Index(length, ((~node, 1),)), dtype), f"{op.name}_wrapped")
            node = self.choose(negative, from_end, node, dtype, f"{op.name}_index")
        self.extents.indirect[~node] = length
        return Index(0, ((~node, 1),))

    def zero_outside(self, value: int, inside: int, dtype: torch.dtype, name: str) -> int:
        """Return a node that holds `value` where `inside` is true and zero elsewhere. A load masked by
        `inside` already does."""
        node = self.nodes[value]
        if isinstance(node, Load) and node.within == inside:
            return value
        return self.choose(inside, value, self.constant(0, dtype, "zero"), dtype, name)

    def both(self, a: int, b: int) -> int:
        return self.apply("inside", AND, a, b)

    def choose(self, condition: int, a: int, b: int, dtype: torch.dtype, name: str) -> int:
        return self.apply(name, WHERE, condition, a, b, dtype=dtype)
