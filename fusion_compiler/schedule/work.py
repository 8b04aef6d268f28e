"""What one loop nest does: elements moved from and to each buffer, and operations by class.

Shapes are plain integers in here (`hint`), groups and axes are bit sets: it runs thousands of times a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod

import sympy
import torch
from torch._ops import OpOverload

from fusion_compiler.ir import ops
from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.dims import Dim, hint
from fusion_compiler.ir.loops import (
    BATCH,
    COLS,
    ROWS,
    Checked,
    Compute,
    Coordinate,
    Counter,
    Index,
    InRange,
    Load,
    LoopNest,
    Node,
    Random,
    Reduce,
    Scan,
    Total,
    Value,
    kept_of,
    longest_piece,
    operands_of,
    over_of,
    right_neighbours,
)
from fusion_compiler.schedule.contractions import LEAST, MOST_MATRICES

LOGICAL_AND = torch.ops.aten.logical_and.default
MUL = torch.ops.aten.mul.Tensor
# Bits of bytes, which cost nothing where floats are made of them (`codegen/bits.py`), and else little.
BYTES = (torch.int8, torch.uint8)
AND = (torch.ops.aten.bitwise_and.Tensor, torch.ops.aten.bitwise_and.Scalar)
RIGHT_SHIFTS = (
    torch.ops.aten.__rshift__.Tensor,
    torch.ops.aten.__rshift__.Scalar,
    torch.ops.aten.bitwise_right_shift.Tensor,
    torch.ops.aten.bitwise_right_shift.Tensor_Scalar,
)
TAKES_BITS = frozenset({*AND, *RIGHT_SHIFTS, torch.ops.aten.where.self})
BITS = {BATCH: 0, ROWS: 1, COLS: 2}
SECTOR = 32  # bytes: the smallest piece of device memory that is moved
PIECE = 4096  # columns of a row that a program adds up before it stores what they come to, at most
SCAN_OPERATIONS = 8  # of an element: with those of its thread, and of the threads with each other
SCAN_SPECIAL = 3  # exponentials of an element in these, of sums of exponentials
FP64_SPECIAL = 16  # arithmetic operations of a float64 function: no unit for them, a polynomial each


@dataclass(frozen=True, slots=True)
class BufferInfo:
    """What the model needs to know of a tensor: elements, bytes an element, and whether the kernel that
    wrote it ran just before and left it in L2."""

    numel: Dim
    itemsize: int
    in_l2: bool = False


@dataclass(frozen=True, slots=True)
class Vectors:
    """Operations by class and bytes, of what varies along the columns alone."""

    fp32: int
    special: int
    bytes: int


@cache
def _weights(target: OpOverload) -> tuple[int, int]:
    """(arithmetic, special) operations per element; 1 and 0 for what the table does not have."""
    spec = ops.spec_of(target)
    return (spec.flops, spec.special) if spec is not None else (1, 0)


class Work:
    """One pass over a nest: what each node varies over and needs, and what the whole nest does.

    Groups are bits: 1 rows, 2 cols; `count[groups]` is how many tile elements such a value has. `shape` is
    matrices, rows, cols, of one matrix where there are none. Per node:
    `varies` (groups), `axes` (bits), `needs` (bits of the tile loads that it is computed from since the
    last reduction) and `phase` (reductions in a chain before it).
    """

    def __init__(self, loops: LoopNest, buffers: Mapping[str, BufferInfo], hints: Mapping[sympy.Symbol, int]):
        self.loops = loops
        self.buffers = buffers
        self.hints = hints
        sizes = (axis.size for axis in loops.axes)  # those that are estimated may come out below zero
        self.sizes = [size if type(size) is int else max(0, hint(size, hints)) for size in sizes]
        self.group_of = [BITS[axis.group] for axis in loops.axes]
        shape = [1, 1, 1]
        for size, group in zip(self.sizes, self.group_of, strict=True):
            shape[group] *= size
        batch, rows, cols = self.shape = shape
        self.matrices = 0 in self.group_of
        self.count = (batch, batch * rows, batch * cols, batch * rows * cols)
        self.varies: list[int] = []
        self.axes: list[int] = []
        self.needs: list[int] = []
        self.phase: list[int] = []
        self.fp32 = self.fp64 = self.special = self.integer = self.random = self.moves = 0
        self.reduced = 0  # groups that some node reduces
        self.partials = 0  # of sums over segments: results of single rows, which a second kernel adds up
        self.totals = self.addends = 0  # the sums that it makes of them, and how many partials one has
        self.ahead = 0  # reductions that every program of a product makes of its vectors
        self.of_rows = 0  # operations on what has no columns, of one row
        self.sums_of_columns = 0  # over the rows, of which each column has one
        self.sums: list[int] = []  # what is reduced along the rows
        self.phases = 0  # the longest chain of reductions
        self.row_bytes = 4  # of the widest value in a row
        self.early = self.late = 0  # tile loads that are reduced; that a stored value needs after that
        self.tile_loads: list[str] = []
        self.reads: dict[str, float] = {}  # elements moved from each buffer
        self.writes: dict[str, float] = {}  # to each, the same sector again and again where stores share it
        self.upright: dict[str, float] = {}  # elements of accesses that are contiguous along the rows
        self.gathered: set[str] = set()
        self.seen: set[object] = set()
        self.in_turns: set[int] = set()  # nodes that have a value for each turn of a counter
        self.inside: dict[int, float] = {}  # part of the space in which a condition holds
        self.partial: dict[tuple[bool, str, object], tuple[float, float]] = {}
        for number, node in enumerate(loops.nodes):
            if self.in_turns and not self.in_turns.isdisjoint(operands_of(node)):
                self.in_turns.add(number)
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
            self.moves += self.count[varies]
            run = 2 if number in pairs or number in pairs.values() else 1
            self._touch(True, store.buffer, store.index, axes, store.within, run)
            if self.phase[store.value]:
                self.late |= self.needs[store.value]
        for (written, buffer, terms), (moved, most) in self.partial.items():
            if (written, buffer, terms) not in self.seen:
                table = self.writes if written else self.reads
                table[buffer] = table.get(buffer, 0.0) + min(moved, most)

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
        flops, special = _weights(node.target)
        count = self.count[varies]
        dtype = node.dtype
        self.of_rows += flops + special if varies == 1 else 0
        if dtype is torch.float64:
            self.fp64 += (flops + FP64_SPECIAL * special) * count
            return
        if dtype is torch.float32 or dtype is torch.bool:
            self.fp32 += flops * count
        elif dtype not in BYTES or node.target not in TAKES_BITS:
            self.integer += flops * count
        self.special += special * count

    def _other(self, node: Node) -> None:
        varies = axes = needs = phase = 0
        if type(node) is Load:
            varies, axes, phase = self._index(node.index)
            self.moves += self.count[varies]
            if len(self.varies) in self.in_turns:  # of each row one that has it
                whole = hint(self.buffers[node.buffer].numel, self.hints)
                self.reads[node.buffer] = self.reads.get(node.buffer, 0.0) + whole
            else:
                self._touch(False, node.buffer, node.index, axes, node.within)
            if self.count[varies] == self.count[3]:
                needs = 1 << len(self.tile_loads)
                self.tile_loads.append(node.buffer)
            if node.dtype is torch.float64:
                self.row_bytes = 8
        elif type(node) is Scan:
            varies, axes, needs, phase = self._scan(node)
        elif isinstance(node, Random):
            varies, axes, phase = self._index(node.index)
            self.random += self.count[varies]
        elif isinstance(node, Checked):
            varies, axes, needs, phase = self._together(operands_of(node))
            self.integer += self.count[self.varies[node.position]]
        elif isinstance(node, Counter | Total):
            varies, axes, needs, phase = self._together(operands_of(node))
            if isinstance(node, Counter):
                self.in_turns.add(len(self.varies))
            else:
                self.in_turns.discard(len(self.varies))
        elif isinstance(node, Coordinate | InRange):
            varies, axes, phase = self._index(node.index)
            self.integer += self.count[varies]
            if isinstance(node, InRange):
                self.inside[len(self.varies)] = self._part(node)
        self._add(varies, axes, needs, phase)

    def _add(self, varies: int, axes: int, needs: int, phase: int) -> None:
        self.varies.append(varies)
        self.axes.append(axes)
        self.needs.append(needs)
        self.phase.append(phase)

    def _reduce(self, node: Reduce) -> tuple[int, int, int, int]:
        operand = node.operand
        groups = over_of(self.loops.axes, node)
        if len(groups) == 2 and (kept := kept_of(self.loops.axes, node)):
            return self._reduce_segments(operand, kept)
        over = (ROWS in groups) | 2 * (COLS in groups)
        self.reduced |= over
        self.ahead += over == 1 and self.varies[operand] == 1
        self.sums_of_columns += over == 1 and self.varies[operand] & 2 != 0
        self.fp32 += self.count[self.varies[operand]]
        axes = self.axes[operand]
        if over:  # of a segment's value each of its elements has one
            axes &= ~sum(1 << axis for axis in node.axes)
        phase = self.phase[operand]
        if over & 2 or self.matrices:
            if over == 2 and not self.matrices:
                self.sums.append(operand)
            phase += 1
            self.early |= self.needs[operand]
            self.phases = max(self.phases, phase)
        return self.varies[operand] & ~over, axes, 0, phase

    def products(self) -> int:
        """Operations of a product's sums where tensor units make them (`schedule/contractions.py`): several
        of one matrix, of whose elements bfloat16 holds what counts."""
        sums = list(filter(self._is_weighted, self.sums))
        held = {self.buffers[name].itemsize for name in self.tile_loads}
        matrices = len(set(map(self._matrix, sums)))
        suits = matrices <= MOST_MATRICES and len(sums) >= LEAST * matrices and max(held, default=4) <= 2
        return 2 * len(sums) * self.count[3] if suits else 0

    def _matrix(self, number: int) -> int:
        """What a vector weights in such a term."""
        return next(n for n in operands_of(self.loops.nodes[number]) if self.varies[n] == 3)

    def vectors(self) -> Vectors | None:
        """What is made for each block of the rows that a vector weights; None where rows are no matrix of a
        product (`Analysis.weighted`)."""
        if not any(map(self._is_weighted, self.sums)):
            return None
        flops = special = moved = 0
        for node, varies in zip(self.loops.nodes, self.varies, strict=True):
            if varies == 2 and isinstance(node, Compute):
                own = _weights(node.target)
                flops, special = flops + own[0], special + own[1]
            elif varies == 2 and isinstance(node, Load):
                flops, moved = flops + 1, moved + self.buffers[node.buffer].itemsize  # and its conversion
        cols = self.count[2]
        return Vectors(flops * cols, special * cols, moved * cols)

    def _is_weighted(self, number: int) -> bool:
        term = self.loops.nodes[number]
        if type(term) is not Compute or term.target is not MUL:
            return False
        factors = {self.varies[a.node] for _, a in term.operands if type(a) is Value}
        return factors == {2, 3}

    def _scan(self, node: Scan) -> tuple[int, int, int, int]:
        """As long as a reduction, and as wide as what it is made of."""
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
        """A partial result for every piece of a row, the sums of which do not exist in the tile.

        numbers: of the axes that are kept.
        """
        self.fp32 += self.count[3]
        kept = [(self.sizes[k], self.group_of[k]) for k in numbers]
        segment = self.count[2] // max(1, prod(size for size, group in kept if group == 2))
        whole = all(group == 1 for _, group in kept)
        piece = min(PIECE, segment if whole else longest_piece(segment))
        partials, totals = self.count[1] * -(-self.count[2] // max(1, piece)), prod(size for size, _ in kept)
        self.partials += partials
        self.totals = max(self.totals, totals)
        self.addends = max(self.addends, partials // max(1, totals))
        if self.phase[operand]:
            self.late |= self.needs[operand]
        return 0, sum(1 << k for k in numbers), 0, self.phase[operand]

    def _together(self, operands: Iterable[int]) -> tuple[int, int, int, int]:
        """(groups, axis bits, needs, phase) of what some nodes make."""
        varies = axes = needs = phase = 0
        for n in operands:
            varies, axes, needs = varies | self.varies[n], axes | self.axes[n], needs | self.needs[n]
            phase = max(phase, self.phase[n])
        return varies, axes, needs, phase

    def _index(self, index: Index) -> tuple[int, int, int]:
        """(groups, axis bits, phase) of what an index varies over."""
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

    def _part(self, node: InRange) -> float:
        """Of the values that an index takes, the part that lies in the range."""
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
        """Count the elements that an access moves, in whole sectors; the same access only once.

        together: neighbours that are accessed at once, each of which counts for itself.

        Accesses under a condition count for the part of the space where it holds. Those that differ only by
        an offset (the halves of a rotation, the sides of a concatenation) share the space out among
        themselves, and lie in what an access without a condition moves anyway.
        """
        where, exact = (written, buffer, index.terms), (written, buffer, index.terms, index.const, within)
        if exact in self.seen:
            return
        self.seen.add(exact)
        moved, run, upright, along = 1.0, 1, False, False
        for axis, size in enumerate(self.sizes):
            if axes >> axis & 1:
                moved *= size
        for key, coefficient in index.terms:
            if key < 0:  # by one number for all programs it is a place like any other
                if self.axes[~key]:
                    self.gathered.add(buffer)
                continue
            along = along or self.group_of[key] == 2
            if coefficient == 1:
                run, upright = self.sizes[key], self.group_of[key] == 1
        if upright and along:
            self.upright[buffer] = self.upright.get(buffer, 0.0) + moved
        itemsize = self.buffers[buffer].itemsize
        if run * itemsize < SECTOR:
            moved *= self._waste(index, itemsize, together)
        if within is not None:
            before, _ = self.partial.get(where, (0.0, 0.0))
            self.partial[where] = (before + moved * self.inside.get(within, 1.0), moved)
            return
        self.seen.add(where)
        table = self.writes if written else self.reads
        table[buffer] = table.get(buffer, 0.0) + moved

    def _waste(self, index: Index, itemsize: int, run: int) -> float:
        """Bytes moved per byte used: every contiguous run is rounded up to whole sectors.

        run: elements that are contiguous to begin with.
        """
        gap = (
            SECTOR if any(key < 0 for key, _ in index.terms) else 0
        )  # between runs; gathered ones lie anywhere
        steps = [(abs(hint(c, self.hints)), self.sizes[key]) for key, c in index.terms if key >= 0]
        for stride, size in sorted(steps):
            if size > 1 and stride > run:
                gap = gap or stride
                break
            run = max(run, stride * size)
        return max(1.0, min(SECTOR / (run * itemsize), gap / run)) if gap else 1.0

    def rewritten(self) -> float:
        """Bytes of sectors that several stores write, a part of them each, beyond the first time."""
        whole = {name: hint(self.buffers[name].numel, self.hints) for name in self.writes}
        return sum(
            max(0.0, moved - whole[name]) * self.buffers[name].itemsize for name, moved in self.writes.items()
        )

    def beside(self, rows: int) -> float:
        """Bytes of sectors of which blocks of so many rows need a part: what is contiguous along the rows."""
        unused = 0.0
        for name, moved in self.upright.items():
            itemsize = self.buffers[name].itemsize
            unused += moved * max(0.0, SECTOR / min(rows, self.count[1]) - itemsize)
        return unused

    def bytes_of(self, table: dict[str, float], buffer: str, device: DeviceSpec) -> float:
        """Bytes that an entry of reads or writes moves: no more than the buffer has, unless it is gathered
        from a buffer too large for L2, where rows that come up again are read again."""
        info = self.buffers[buffer]
        count = info.numel
        whole = (count if type(count) is int else hint(count, self.hints)) * info.itemsize
        moved = table[buffer] * info.itemsize
        return moved if buffer in self.gathered and whole > device.l2_bytes else min(moved, whole)
