"""Count the work of one loop nest: elements moved from and to each buffer, and operations by class.

Shapes are plain integers here (`hint`), and groups and axes are bit sets, because this runs thousands of
times per model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod

import sympy
import torch
from torch._ops import OpOverload

from fusion_compiler.ir import ops
from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.dims import Dim, hint
from fusion_compiler.ir.loops import (
    COLS,
    INNER,
    RAGGED,
    ROWS,
    Checked,
    Compute,
    Coordinate,
    Index,
    InRange,
    Load,
    LoopNest,
    Node,
    Random,
    Reduce,
    Scan,
    Value,
    kept_axes,
    largest_aligned_block,
    operands_of,
    reduced_groups,
    right_neighbours,
)
from fusion_compiler.schedule.products import Products

LOGICAL_AND = torch.ops.aten.logical_and.default
# Integer operations on bytes are almost free: they vanish if the bytes become floats (`codegen/bits.py`).
BYTES = (torch.int8, torch.uint8)
AND = (torch.ops.aten.bitwise_and.Tensor, torch.ops.aten.bitwise_and.Scalar)
RIGHT_SHIFTS = (
    torch.ops.aten.__rshift__.Tensor,
    torch.ops.aten.__rshift__.Scalar,
    torch.ops.aten.bitwise_right_shift.Tensor,
    torch.ops.aten.bitwise_right_shift.Tensor_Scalar,
)
BYTE_OPERATIONS = frozenset({*AND, *RIGHT_SHIFTS, torch.ops.aten.where.self})
BITS = {ROWS: 1, COLS: 2, RAGGED: 0}
IN_TILES = {COLS: 0, INNER: 2, RAGGED: 0}  # of nests with inner axes, which count as columns
SECTOR = 32  # bytes: the granularity of device-memory traffic
PIECE = 4096  # at most so many columns of a row make one partial result
SCAN_OPERATIONS = 8  # per element, for the scan within its thread and between threads
SCAN_SPECIAL = 3  # exponentials per element of a logsumexp scan
# arithmetic operations of a float64 function, which is a polynomial because no unit computes it
FP64_SPECIAL = 16


@dataclass(frozen=True, slots=True)
class BufferInfo:
    """The facts about a tensor that the cost model needs. in_l2: True if the previous kernel wrote it, so
    that it is still in L2."""

    numel: Dim
    itemsize: int
    in_l2: bool = False


@cache
def weights_of(target: OpOverload) -> tuple[int, int]:
    """Return (arithmetic, special) operations per element; (1, 0) for an op without a row in the table."""
    spec = ops.spec_of(target)
    return (spec.flops, spec.special) if spec is not None else (1, 0)


class Work:
    """The work of a nest, counted in one pass over its nodes.

    Groups are bits: 1 for rows, 2 for columns. `count[groups]` is the number of tile elements of a value that
    varies over these groups. `shape` is (what all reductions keep in a nest with inner axes, rows,
    columns).
    Per node: `varies` (groups), `axes` (bits), `needs` (bits of the tile loads that it is computed from since
    the last reduction) and `phase` (length of the chain of reductions before it).
    """

    def __init__(self, loops: LoopNest, buffers: Mapping[str, BufferInfo], hints: Mapping[sympy.Symbol, int]):
        self.loops = loops
        self.buffers = buffers
        self.hints = hints
        sizes = (axis.size for axis in loops.axes)  # an estimate of a symbolic size may be negative
        self.sizes = [size if type(size) is int else max(0, hint(size, hints)) for size in sizes]
        self.tile = sum(1 << k for k, axis in enumerate(loops.axes) if axis.group == INNER)  # bits
        self.ragged = sum(1 << k for k, axis in enumerate(loops.axes) if axis.group == RAGGED)
        bits = IN_TILES if self.tile else BITS
        self.group_of = [bits[axis.group] for axis in loops.axes]
        shape = [1, 1, 1]
        for size, group in zip(self.sizes, self.group_of, strict=True):
            shape[group] *= size
        batch, rows, cols = self.shape = shape
        self.count = (batch, batch * rows, batch * cols, batch * rows * cols)
        self.varies: list[int] = []
        self.axes: list[int] = []
        self.needs: list[int] = []
        self.phase: list[int] = []
        self.fp32 = self.fp64 = self.special = self.integer = self.random = self.moves = 0
        self.reduced = 0  # groups that some node reduces
        self.partials = 0  # partial results of segment sums, which a second kernel adds up
        self.totals = self.addends = 0  # sums that it computes, and the most partial results of one sum
        self.sums_of_columns = 0  # reductions over rows with one result per column
        self.phases = 0  # the longest chain of reductions
        self.row_bytes = 4  # bytes of the widest element
        # tile loads that are reduced; those that a stored value needs after a reduction
        self.early = self.late = 0
        self.tile_loads: list[str] = []
        self.reads: dict[str, float] = {}  # elements read from each buffer
        # elements written; a sector that several stores share counts several times
        self.writes: dict[str, float] = {}
        self.row_contiguous: dict[str, float] = {}  # elements of accesses that are contiguous along the rows
        self.gathered: set[str] = set()
        self.seen: set[object] = set()
        self.inside: dict[int, float] = {}  # fraction of the space where a condition is true
        self.partial: dict[tuple[bool, str, object], tuple[float, float]] = {}
        for node in loops.nodes:
            if type(node) is Compute:
                self._compute(node)
            elif type(node) is Reduce:
                self._add(*self._reduce(node))
            else:
                self._other(node)
        several = len(loops.stores) > 1
        pairs = right_neighbours(loops.axes, enumerate(loops.stores)) if several else {}
        for number, store in enumerate(loops.stores):
            varies, axes, _ = self._index(store.index)
            self.moves += self.elements(varies, axes)
            run = 2 if number in pairs or number in pairs.values() else 1
            self._touch(True, store.buffer, store.index, axes, store.within, run)
            if self.phase[store.value]:
                self.late |= self.needs[store.value]
        for (written, buffer, terms), (moved, most) in self.partial.items():
            if (written, buffer, terms) not in self.seen:
                table = self.writes if written else self.reads
                table[buffer] = table.get(buffer, 0.0) + min(moved, most)

    @cached_property
    def products(self) -> Products | None:
        """Return the products of few rows that the nest makes, and little else; None if it makes none."""
        return Products.of(self.loops, self.hints)

    def _compute(self, node: Compute) -> None:
        varies = axes = needs = phase = 0
        for _, operand in node.operands:
            if type(operand) is Value:
                n = operand.node
                varies |= self.varies[n]
                axes |= self.axes[n]
                needs |= self.needs[n]
                if self.phase[n] > phase:
                    phase = self.phase[n]
                if n in self.inside and node.target is LOGICAL_AND:
                    number = len(self.varies)
                    self.inside[number] = self.inside.get(number, 1.0) * self.inside[n]
        self._add(varies, axes, needs, phase)
        flops, special = weights_of(node.target)
        count = self.elements(varies, axes)
        dtype = node.dtype
        if dtype is torch.float64:
            self.fp64 += (flops + FP64_SPECIAL * special) * count
            return
        if dtype is torch.float32 or dtype is torch.bool:
            self.fp32 += flops * count
        elif dtype not in BYTES or node.target not in BYTE_OPERATIONS:
            self.integer += flops * count
        self.special += special * count

    def _other(self, node: Node) -> None:
        varies = axes = needs = phase = 0
        if type(node) is Load:
            varies, axes, phase = self._index(node.index)
            self.moves += self.elements(varies, axes)
            if axes & self.ragged:  # each element is read once, by the row that it belongs to
                size = hint(self.buffers[node.buffer].numel, self.hints)
                self.reads[node.buffer] = self.reads.get(node.buffer, 0.0) + size
            else:
                self._touch(False, node.buffer, node.index, axes, node.within)
            is_tile = not self.tile & ~axes if self.tile else self.count[varies] == self.count[3]
            if is_tile:
                needs = 1 << len(self.tile_loads)
                self.tile_loads.append(node.buffer)
            if node.dtype is torch.float64:
                self.row_bytes = 8
        elif type(node) is Scan:
            varies, axes, needs, phase = self._scan(node)
        elif isinstance(node, Random):
            varies, axes, phase = self._index(node.index)
            self.random += self.elements(varies, axes)
        elif isinstance(node, Checked):
            varies, axes, needs, phase = self._together(operands_of(node))
            self.integer += self.elements(self.varies[node.position], self.axes[node.position])
        elif isinstance(node, Coordinate | InRange):
            varies, axes, phase = self._index(node.index)
            self.integer += self.elements(varies, axes)
            if isinstance(node, InRange):
                self.inside[len(self.varies)] = self._fraction_in_range(node)
        self._add(varies, axes, needs, phase)

    def elements(self, varies: int, axes: int) -> int:
        """Return the elements of a value. varies, axes: the groups and axes over which it varies."""
        return self.points(axes) if self.tile else self.count[varies]

    def points(self, axes: int) -> int:
        """Return the elements of some axes, given as bits."""
        return prod(size for k, size in enumerate(self.sizes) if axes >> k & 1)

    def _add(self, varies: int, axes: int, needs: int, phase: int) -> None:
        self.varies.append(varies)
        self.axes.append(axes)
        self.needs.append(needs)
        self.phase.append(phase)

    def _reduce(self, node: Reduce) -> tuple[int, int, int, int]:
        operand = node.operand
        groups = reduced_groups(self.loops.axes, node)
        if RAGGED in groups:
            varies, axes, needs, phase = self._together(operands_of(node))
            return varies, axes & ~self.ragged, needs, phase
        if len(groups) == 2 and (kept := kept_axes(self.loops.axes, node)):
            return self._reduce_segments(operand, kept)
        reduced = (ROWS in groups) | 2 * (COLS in groups)
        self.reduced |= reduced
        self.sums_of_columns += reduced == 1 and self.varies[operand] & 2 != 0
        axes = self.axes[operand]
        self.fp32 += self.elements(self.varies[operand], axes)
        if INNER in groups:
            axes &= ~sum(1 << axis for axis in node.axes)
            self.early |= self.needs[operand]
            self.phases = max(self.phases, self.phase[operand] + 1)
            return 2 * bool(axes & self.tile), axes, 0, self.phase[operand] + 1
        axes &= ~sum(1 << axis for axis in node.axes)
        phase = self.phase[operand]
        if reduced & 2:
            phase += 1
            self.early |= self.needs[operand]
            self.phases = max(self.phases, phase)
        return self.varies[operand] & ~reduced, axes, 0, phase

    def _scan(self, node: Scan) -> tuple[int, int, int, int]:
        """Count a scan: it adds a phase, as a reduction does, and varies over the columns."""
        operand, varies = node.operand, self.varies[node.operand] | 2
        needs, phase = self.needs[operand], self.phase[operand]
        count = SCAN_OPERATIONS * self.count[varies]
        if node.dtype is torch.float64:
            self.fp64 += count
        elif node.dtype is torch.float32:
            self.fp32 += count
        else:
            self.integer += count
        if node.combine == "logsumexp":
            self.special += SCAN_SPECIAL * self.count[varies]
        self.phases = max(self.phases, phase + 1)
        columns = sum(1 << axis for axis, group in enumerate(self.group_of) if group == 2)
        return varies, self.axes[operand] | columns, needs, phase

    def _reduce_segments(self, operand: int, numbers: frozenset[int]) -> tuple[int, int, int, int]:
        """Count a reduction with a partial result for each piece of a row. The tile does not hold the total.
        numbers: the kept axes."""
        self.fp32 += self.count[3]
        kept = [(self.sizes[k], self.group_of[k]) for k in numbers]
        segment = self.count[2] // max(1, prod(size for size, group in kept if group == 2))
        keeps_rows_only = all(group == 1 for _, group in kept)
        piece = min(PIECE, segment if keeps_rows_only else largest_aligned_block(segment))
        partials, totals = self.count[1] * -(-self.count[2] // max(1, piece)), prod(size for size, _ in kept)
        self.partials += partials
        self.totals = max(self.totals, totals)
        self.addends = max(self.addends, partials // max(1, totals))
        if self.phase[operand]:
            self.late |= self.needs[operand]
        return 0, sum(1 << k for k in numbers), 0, self.phase[operand]

    def _together(self, operands: Iterable[int]) -> tuple[int, int, int, int]:
        """Return (groups, axis bits, needs, phase) of a value computed from some nodes."""
        varies = axes = needs = phase = 0
        for n in operands:
            varies, axes, needs = varies | self.varies[n], axes | self.axes[n], needs | self.needs[n]
            phase = max(phase, self.phase[n])
        return varies, axes, needs, phase

    def _index(self, index: Index) -> tuple[int, int, int]:
        """Return (groups, axis bits, phase) of an index."""
        varies = axes = phase = 0
        for key, _ in index.terms:
            if key >= 0:
                axes |= 1 << key
                varies |= self.group_of[key]
            else:
                axes |= self.axes[~key]
                varies |= self.varies[~key]
                phase = max(phase, self.phase[~key])
        return varies, axes, phase

    def _fraction_in_range(self, node: InRange) -> float:
        """Return the fraction of an index's values that lie in the range."""
        first = last = hint(node.index.const, self.hints)
        for key, coefficient in node.index.terms:
            if key < 0:
                return 1.0
            span = hint(coefficient, self.hints) * (self.sizes[key] - 1)
            first, last = first + min(span, 0), last + max(span, 0)
        low, high = max(first, hint(node.low, self.hints)), min(last + 1, hint(node.high, self.hints))
        return max(0, high - low) / (last + 1 - first)

    def _touch(
        self, written: bool, buffer: str, index: Index, axes: int, within: int | None, together: int = 1
    ) -> None:
        """Count the elements that an access moves, in whole sectors, once per distinct access.

        together: the number of neighbouring elements that are accessed at once; each counts for itself.

        Accesses under a condition count for the part of the space where it is true. Accesses that differ only
        by an offset (the halves of a rotation, the sides of a concatenation) divide the space among
        themselves, and are part of any access without a condition.
        """
        pattern, exact = (written, buffer, index.terms), (written, buffer, index.terms, index.const, within)
        if exact in self.seen:
            return
        self.seen.add(exact)
        elements, run, row_contiguous, varies_over_cols = 1.0, 1, False, False
        for axis, size in enumerate(self.sizes):
            if axes >> axis & 1:
                elements *= size
        for key, coefficient in index.terms:
            if key < 0:  # an index that all programs share is an ordinary offset
                if self.axes[~key]:
                    self.gathered.add(buffer)
                continue
            varies_over_cols = varies_over_cols or self.group_of[key] == 2
            if coefficient == 1:
                run, row_contiguous = self.sizes[key], self.group_of[key] == 1
        if row_contiguous and varies_over_cols:
            self.row_contiguous[buffer] = self.row_contiguous.get(buffer, 0.0) + elements
        itemsize = self.buffers[buffer].itemsize
        if run * itemsize < SECTOR:
            elements *= self._waste(index, itemsize, together)
        if within is not None:
            counted, _ = self.partial.get(pattern, (0.0, 0.0))
            self.partial[pattern] = (counted + elements * self.inside.get(within, 1.0), elements)
            return
        self.seen.add(pattern)
        table = self.writes if written else self.reads
        table[buffer] = table.get(buffer, 0.0) + elements

    def _waste(self, index: Index, itemsize: int, run: int) -> float:
        """Return bytes moved per byte used: every contiguous run is rounded up to whole sectors. run:
        elements that are contiguous anyway."""
        gap = (
            SECTOR if any(key < 0 for key, _ in index.terms) else 0
        )  # distance between runs; that of gathered elements is unknown
        steps = [(abs(hint(c, self.hints)), self.sizes[key]) for key, c in index.terms if key >= 0]
        for stride, size in sorted(steps):
            if size > 1 and stride > run:
                gap = gap or stride
                break
            run = max(run, stride * size)
        return max(1.0, min(SECTOR / (run * itemsize), gap / run)) if gap else 1.0

    def rewritten(self) -> float:
        """Return the bytes of sectors that several stores write in parts, beyond the first time."""
        sizes = {name: hint(self.buffers[name].numel, self.hints) for name in self.writes}
        return sum(
            max(0.0, elements - sizes[name]) * self.buffers[name].itemsize
            for name, elements in self.writes.items()
        )

    def unused_bytes(self, rows: int) -> float:
        """Return the unused bytes of sectors in blocks of `rows` rows, for accesses that are contiguous
        along the rows."""
        unused = 0.0
        for name, elements in self.row_contiguous.items():
            itemsize = self.buffers[name].itemsize
            unused += elements * max(0.0, SECTOR / min(rows, self.count[1]) - itemsize)
        return unused

    def bytes_of(self, table: dict[str, float], buffer: str, device: DeviceSpec) -> float:
        """Return the bytes that an entry of reads or writes moves. It is at most the size of the buffer,
        unless the buffer is gathered from and larger than L2: then rows that occur again are read again."""
        info = self.buffers[buffer]
        count = info.numel
        size = (count if type(count) is int else hint(count, self.hints)) * info.itemsize
        bytes_moved = table[buffer] * info.itemsize
        return bytes_moved if buffer in self.gathered and size > device.l2_bytes else min(bytes_moved, size)
