"""Lower scans (cumsum and similar ops), which run along the columns, either forwards or backwards.

    flip(cumsum(flip(x)))    becomes one reverse scan of x,
    cumsum(x)[..., -1:]      becomes the last element of each row's scan.

A scan that is needed in both directions is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fusion_compiler.ir.dag import Op, OpDag
from fusion_compiler.ir.dims import Dim, not_above, product, simple, strides_of
from fusion_compiler.ir.index import axis, combine, shifted
from fusion_compiler.ir.layout import reversed_dims
from fusion_compiler.ir.loops import COLS, Coordinate, Index, InRange, Reduce, Scan, axes_in
from fusion_compiler.ops.arithmetic import EQ, IS_NAN, OR
from fusion_compiler.ops.table import spec_of
from fusion_compiler.passes.lower.builder import Builder
from fusion_compiler.passes.lower.space import Coords, Illegal, compute_dtype, scanned_dim

MOST = 2**31  # int32 counts the positions of fewer elements than this
WORD = 4  # bytes of the shortest integer that is scanned; shorter ones are truncated from it


@dataclass(frozen=True)
class Columns:
    """The columns of a space.

    index: the position along the columns.
    size: the number of columns.
    rows: the axes of the rows.
    """

    index: Index
    size: Dim
    rows: frozenset[int]

    @staticmethod
    def of(axes: Sequence[Dim], cols: Sequence[int], rows: Sequence[int]) -> Columns:
        """Return the columns of a space.

        axes: sizes of all axes.
        cols, rows: the numbers of the column and row axes.
        """
        sizes = tuple(axes[i] for i in cols)
        index = combine([(axis(i), step) for i, step in zip(cols, strides_of(sizes), strict=True)])
        return Columns(index, product(sizes), frozenset(rows))

    @property
    def reversed(self) -> Index:
        """Return the position counted from the last column."""
        return shifted(combine([(self.index, -1)]), simple(self.size - 1))


def scan_coords(dag: OpDag, op: Op, coords: Coords, columns: Columns) -> Coords:
    """Return the coordinates of a scan that is not stored: reversed if all of its readers flip it."""
    dim, readers = scanned_dim(op), [dag.op(name) for name in dag.consumers(op.name)]
    if dim is None or not all(dim in reversed_dims(reader) for reader in readers):
        return coords
    return (*coords[:dim], columns.reversed, *coords[dim + 1 :])


class Scans:
    """The scans of a loop nest. Each has one direction, because the other one rounds in another order."""

    def __init__(self, build: Builder, columns: Columns) -> None:
        self.build, self.columns = build, columns
        self.backwards: dict[str, bool] = {}

    def value(self, op: Op, coords: Coords) -> int:
        """Return the node that holds a scan's value at `coords`. Raises Illegal if the scan does not run
        along the space's rows, or is needed in both directions."""
        dim, columns = scanned_dim(op), self.columns
        if dim is None or op.outputs[0].shape[dim] == 1:
            return self.build.of_one(op, self.build.value(op.first, coords, None))
        _check_rows(self.build, op, coords, dim, columns)
        place = coords[dim]
        if place in (columns.index, columns.reversed):
            return self.running(op, coords, place)
        if place.terms or not isinstance(place.const, int):
            raise Illegal("rows", f"{op.name} is needed in another order than the scan's")
        place_of_scan = columns.reversed if self.backwards.get(op.name) else columns.index
        value = self.running(op, (*coords[:dim], place_of_scan, *coords[dim + 1 :]), place_of_scan)
        return _picked(self.build, op, value, place_of_scan, place.const)

    def running(self, op: Op, coords: Coords, place: Index) -> int:
        backwards = place != self.columns.index
        if self.backwards.setdefault(op.name, backwards) is not backwards:
            raise Illegal("rows", f"{op.name} is needed both forwards and backwards")
        return _running(self.build, op, coords, place, backwards)


def _check_rows(build: Builder, op: Op, coords: Coords, dim: int, columns: Columns) -> None:
    shape = op.outputs[0].shape
    if simple(shape[dim]) != simple(columns.size):
        raise Illegal("rows", f"{op.name} scans {shape[dim]} elements, rows have {columns.size}")
    for d, (index, size) in enumerate(zip(coords, shape, strict=True)):
        if d == dim:
            continue
        if not columns.rows.issuperset(k for k, _ in index.terms):
            raise Illegal("rows", f"{op.name} is needed at other rows for each column")
        low, high = build.extents.limits(index)
        if not (not_above(0, low) and not_above(high, simple(size - 1))):
            raise Illegal("rows", f"{op.name} is needed at rows that may not exist")


def _running(build: Builder, op: Op, coords: Coords, place: Index, reverse: bool) -> int:
    """Return the scan of whole rows. place: its position at each column."""
    spec = spec_of(op.target)
    assert spec is not None and spec.combine is not None
    value = build.value(op.first, coords, None)
    result = compute_dtype(op.outputs[0].dtype)
    if spec.combine.startswith("arg"):
        return _last_place(build, op, value, place, reverse)
    if spec.combine not in ("max", "min") and result is torch.bool:
        raise Illegal("dtype", f"{op.name} adds or multiplies bools")
    counts = spec.combine == "sum" and build.nodes[value].dtype is torch.bool
    scan = _scanned(build, op, spec.combine, value, _position_dtype(op) if counts else result, reverse)
    return build.converted(scan, result, op.name)


def _last_place(build: Builder, op: Op, value: int, place: Index, reverse: bool) -> int:
    """Return the position of a running maximum: the last one so far that holds the maximum or a NaN."""
    spec, dtype = spec_of(op.target), build.nodes[value].dtype
    assert spec is not None and spec.combine is not None
    best = _scanned(build, op, spec.combine.removeprefix("arg"), value, dtype, reverse)
    hit = f"{op.name}_hit"
    is_best = build.apply(hit, EQ, value, best)
    if dtype.is_floating_point:
        is_best = build.apply(hit, OR, is_best, build.apply(hit, IS_NAN, value))
    integer = _position_dtype(op)
    position = build.emit(Coordinate(place, integer), f"{op.name}_position")
    first = build.constant(0, integer, f"{op.name}_first")
    candidates = build.choose(is_best, position, first, integer, f"{op.name}_candidate")
    return build.converted(_scanned(build, op, "max", candidates, integer, reverse), torch.int64, op.name)


def _position_dtype(op: Op) -> torch.dtype:
    """Return the integer dtype that counts the elements of a row."""
    dim = scanned_dim(op)
    size = 1 if dim is None else op.outputs[0].shape[dim]
    return torch.int32 if isinstance(size, int) and size < MOST else torch.int64


def _scanned(build: Builder, op: Op, combine: str, value: int, dtype: torch.dtype, reverse: bool) -> int:
    """Return a scan in `dtype`. Short integers and bools are truncated from int32, which wraps to the same
    value."""
    short = not dtype.is_floating_point and dtype.itemsize < WORD
    scan = build.emit(Scan(combine, value, reverse, torch.int32 if short else dtype), op.name)
    return build.converted(scan, dtype, op.name)


def _picked(build: Builder, op: Op, value: int, place: Index, number: int) -> int:
    """Return one element of each row, as the sum of the row with all other elements replaced by zero."""
    dtype = build.nodes[value].dtype
    is_place = build.emit(InRange(place, number, number + 1), f"{op.name}_here")
    selected = build.choose(is_place, value, build.constant(0, dtype, "zero"), dtype, f"{op.name}_alone")
    return build.emit(Reduce("sum", selected, axes_in(build.axes, (COLS,)), dtype), f"{op.name}_picked")
