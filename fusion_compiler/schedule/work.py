"""Count the work of one loop nest: elements moved from and to each buffer, and operations by class.

Shapes are plain integers here (`hint`), and groups and axes are bit sets, because this runs thousands of
times per model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import sympy
import torch

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
    Node,
    Random,
    Reduce,
    Scan,
    Value,
    is_applied,
    operands_of,
    right_neighbours,
)
from fusion_compiler.ops.arithmetic import AND, MUL
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.products import Products

BYTES = (torch.int8, torch.uint8)
BITS = {ROWS: 1, COLS: 2, RAGGED: 0}
IN_TILES = {COLS: 0, INNER: 2, RAGGED: 0}  # of nests with inner axes, which count as columns
SECTOR = 32  # bytes: the granularity of device-memory traffic
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


class Work:
    """The work of a nest, counted in one pass over its nodes.

    Groups are bits: 1 for rows, 2 for columns. `count[groups]` is the number of tile elements of a value that
    varies over these groups. `shape` is (what all reductions keep in a nest with inner axes, rows,
    columns).
    `axes` has, per node, the axes over which it varies (bits). `values` has what it needs (bits of the tile
    loads from which it is computed since the last reduction) and its phase (length of the chain of reductions
    so far).
    """

    def __init__(self, a: Analysis, buffers: Mapping[str, BufferInfo], hints: Mapping[sympy.Symbol, int]):
        self.a, self.loops = a, a.loops
        loops = a.loops
        self.buffers = buffers
        self.hints = hints
        self.sizes: list[int] = []
        self.group_of: list[int] = []
        self.tile = self.ragged = self.columns = 0  # bits of axes
        shape, groups = [1, 1, 1], IN_TILES if a.inner else BITS
        for k, axis in enumerate(loops.axes):
            size, group = axis.size, groups[axis.group]
            # An estimate of a symbolic size may be negative.
            self.sizes.append(size if type(size) is int else max(0, hint(size, hints)))
            self.group_of.append(group)
            shape[group] *= self.sizes[k]
            self.tile |= (axis.group == INNER) << k
            self.ragged |= (axis.group == RAGGED) << k
            self.columns |= (group == 2) << k
        batch, rows, cols = self.shape = shape
        self.count = (batch, batch * rows, batch * cols, batch * rows * cols)
        self._elements: dict[int, int] = {}  # by axes
        self._points: dict[int, int] = {}
        bits = {axes: sum(1 << k for k in axes) for axes in {*a.node_axes}}
        self.axes = [bits[axes] for axes in a.node_axes]
        self.values: list[tuple[int, int]] = []
        self.fp32 = self.fp64 = self.special = self.integer = self.random = self.moves = 0
        self.reduced = 0  # groups that some node reduces
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
        self._count_nodes()
        self._count_stores()
        for (written, buffer, terms), (moved, most) in self.partial.items():
            if (written, buffer, terms) not in self.seen:
                table = self.writes if written else self.reads
                table[buffer] = table.get(buffer, 0.0) + min(moved, most)

    def _count_nodes(self) -> None:
        for node in self.loops.nodes:
            if type(node) is Compute:
                self.values.append(self._compute(node))
            elif type(node) is Reduce:
                self.values.append(self._reduce(node))
            else:
                self.values.append(self._other(node))

    def _count_stores(self) -> None:
        stores = self.loops.stores
        pairs = right_neighbours(self.loops.axes, enumerate(stores)) if len(stores) > 1 else {}
        for number, store in enumerate(stores):
            axes, _ = self._index(store.index)
            self.moves += self.elements(axes)
            run = 2 if number in pairs or number in pairs.values() else 1
            self._touch(True, store.buffer, store.index, axes, store.within, run)
            needs, phase = self.values[store.value]
            if phase:
                self.late |= needs

    @cached_property
    def products(self) -> Products | None:
        """Return the products of few rows that the nest makes, and little else; None if it makes none."""
        return Products.of(self.loops, self.hints) if self.hints else self.a.products

    @property
    def flops(self) -> int:
        """Return the operations of all classes but random numbers."""
        return self.fp32 + self.fp64 + self.special + self.integer

    def _compute(self, node: Compute) -> tuple[int, int]:
        needs, phase, spec = 0, 0, node.spec
        for _, operand in node.operands:
            if type(operand) is Value:
                its_needs, its_phase = self.values[operand.node]
                needs |= its_needs
                if its_phase > phase:
                    phase = its_phase
        if spec.operator is AND:
            self._divide(operands_of(node))
        flops, special = spec.flops, spec.special
        count, dtype = self.elements(self.axes[len(self.values)]), node.dtype
        if dtype is torch.float64:
            self.fp64 += (flops + FP64_SPECIAL * special) * count
            return needs, phase
        if dtype is torch.float32 or dtype is torch.bool:
            self.fp32 += flops * count
        elif dtype not in BYTES or not spec.selects_bits:
            self.integer += flops * count
        self.special += special * count
        return needs, phase

    def _divide(self, conditions: Iterable[int]) -> None:
        """Note the fraction of the space where all of some conditions are true, as the next node is."""
        for n in conditions:
            if n in self.inside:
                number = len(self.values)
                self.inside[number] = self.inside.get(number, 1.0) * self.inside[n]

    def _other(self, node: Node) -> tuple[int, int]:
        needs = phase = 0
        if type(node) is Load:
            axes, phase = self._index(node.index)
            self.moves += self.elements(axes)
            if axes & self.ragged:  # each element is read once, by the row that it belongs to
                size = hint(self.buffers[node.buffer].numel, self.hints)
                self.reads[node.buffer] = self.reads.get(node.buffer, 0.0) + size
            else:
                self._touch(False, node.buffer, node.index, axes, node.within)
            is_tile = not self.tile & ~axes if self.tile else self.elements(axes) == self.count[3]
            if is_tile:
                needs = 1 << len(self.tile_loads)
                self.tile_loads.append(node.buffer)
            if node.dtype is torch.float64:
                self.row_bytes = 8
        elif type(node) is Scan:
            return self._scan(node)
        elif type(node) is Random:
            axes, phase = self._index(node.index)
            self.random += self.elements(axes)
        elif type(node) is Checked:
            self.integer += self.elements(self.axes[node.position])
            return self._together(operands_of(node))
        elif type(node) is Coordinate or type(node) is InRange:
            axes, phase = self._index(node.index)
            self.integer += self.elements(axes)
            if type(node) is InRange:
                self.inside[len(self.values)] = self._fraction_in_range(node)
        return needs, phase

    def elements(self, axes: int) -> int:
        """Return the elements of the tiles of a value that varies over some axes (bits)."""
        count = self._elements.get(axes)
        if count is None:
            groups = 0
            for axis, group in enumerate(self.group_of):
                groups |= group if axes >> axis & 1 else 0
            count = self._elements[axes] = self.points(axes) if self.tile else self.count[groups]
        return count

    def points(self, axes: int) -> int:
        """Return the elements of some axes, given as bits."""
        count = self._points.get(axes)
        if count is None:
            count = self._points[axes] = prod(s for k, s in enumerate(self.sizes) if axes >> k & 1)
        return count

    def _reduce(self, node: Reduce) -> tuple[int, int]:
        groups = self.a.reduced_groups(len(self.values))
        if RAGGED in groups:
            return self._together(operands_of(node))
        reduced = (ROWS in groups) | 2 * (COLS in groups)
        self.reduced |= reduced
        axes, (needs, phase) = self.axes[node.operand], self.values[node.operand]
        self.sums_of_columns += reduced == 1 and axes & self.columns != 0
        self.fp32 += self.elements(axes)
        if INNER in groups or reduced & 2:
            self.early |= needs
            phase += INNER not in groups or not self._is_nested(node)
            self.phases = max(self.phases, phase)
        return 0, phase

    def _is_nested(self, node: Reduce) -> bool:
        """True if a sum adds up sums, perhaps times a factor, and so waits for no memory (see
        `algebra.nested_sums`)."""
        inner = self.loops.nodes[node.operand]
        operands = operands_of(inner) if is_applied(inner, MUL) else ()
        sums = [n for n in map(self.loops.nodes.__getitem__, operands) if isinstance(n, Reduce)] or [inner]
        return node.combine == "sum" and any(isinstance(n, Reduce) and n.combine == "sum" for n in sums)

    def _scan(self, node: Scan) -> tuple[int, int]:
        """Count a scan: it adds a phase, as a reduction does, and varies over the columns."""
        axes, (needs, phase) = self.axes[node.operand] | self.columns, self.values[node.operand]
        count = SCAN_OPERATIONS * self.elements(axes)
        if node.dtype is torch.float64:
            self.fp64 += count
        elif node.dtype is torch.float32:
            self.fp32 += count
        else:
            self.integer += count
        if node.combine == "logsumexp":
            self.special += SCAN_SPECIAL * self.elements(axes)
        self.phases = max(self.phases, phase + 1)
        return needs, phase

    def _together(self, operands: Iterable[int]) -> tuple[int, int]:
        """Return (needs, phase) of a value computed from some nodes."""
        needs = phase = 0
        for n in operands:
            its_needs, its_phase = self.values[n]
            needs, phase = needs | its_needs, max(phase, its_phase)
        return needs, phase

    def _index(self, index: Index) -> tuple[int, int]:
        """Return (axis bits, phase) of an index."""
        axes = phase = 0
        for key, _ in index.terms:
            axes |= 1 << key if key >= 0 else self.axes[~key]
            if key < 0:
                phase = max(phase, self.values[~key][1])
        return axes, phase

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
        pattern = written, buffer, index.terms
        before = len(self.seen)
        self.seen.add((pattern, index.const, within))
        if len(self.seen) == before:
            return
        elements, run, row_contiguous, varies_over_cols = float(self.points(axes)), 1, False, False
        for key, coefficient in index.terms:
            if key < 0:  # an index that all programs share is an ordinary offset
                if self.axes[~key] and self.a.windows is None:  # neighbouring windows share elements
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
