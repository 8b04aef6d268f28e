"""Measured schedules: the fastest tile shapes by kind of schedule, width and trait, which override the cost
model.

The rows stand in `measured.csv`; this module reads and checks them, and defines the traits that they name.
A row applies to loop nests with at most `widest` columns for which all traits are true; the first row of a
kind that applies is used. A row with a position inserts its shapes at that position of the result. The kind's
module defines what a shape means. Warps have 32 threads. Rows that the model ranks equally well can be
removed: `python -m benchmarks schedules --from benchmarks/results/schedules.json` tells without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib.resources import files

from fusion_compiler.ir.dims import hint
from fusion_compiler.ir.loops import COLS, ROWS, Compute, Load, Random
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.row_tiles import Cols, RowTile, placement_of
from fusion_compiler.schedule.run import Run
from fusion_compiler.schedule.shapes import WORD, padded

Shape = tuple[int, ...]
Trait = Callable[[Analysis], bool]

ANY = 1 << 60  # columns: the row applies to any width
# How many numbers a shape of each kind has.
KINDS = {
    "pointwise": (3,), "persistent": (4,), "cooperative": (5,), "inner_reduction": (3, 4), "looped": (3, 4),
    "tile_parts": (3, 4),
}  # fmt: skip
LONG = 16  # instructions
CROWDED = 128  # registers of a thread for tiles beyond which more threads are faster


def long_functions(a: Analysis) -> bool:
    """True if there are functions without a short form, such as sine: sixteen copies of libdevice's slow
    path spill."""
    specs = (n.spec for n in a.loops.nodes if isinstance(n, Compute))
    return any(s.flops >= LONG and s.fp16 is None for s in specs)


def mixed(a: Analysis) -> bool:
    """True if two memory orders meet, which takes square tiles through shared memory."""
    return a.mixed


def tall(a: Analysis) -> bool:
    """True if neighbours in memory are rows, at least one sector of them."""
    return a.tall


def known_width(a: Analysis) -> bool:
    """True if the number of columns is known."""
    return isinstance(a.size(COLS), int)


def only_reduced(a: Analysis) -> bool:
    """True if nothing is stored per element of a row."""
    return not a.tall and not a.stores_rows


def stored(a: Analysis) -> bool:
    """True if elements of rows are stored."""
    return not only_reduced(a)


def has_scans(a: Analysis) -> bool:
    """True if there is a scan along the rows."""
    return bool(a.scans)


def exponentials(a: Analysis) -> bool:
    """True if there are sums of exponentials, which need registers."""
    return bool(a.rescaled)


def simple(a: Analysis) -> bool:
    """True if a reduction needs each element only once, which leaves registers for more warps."""
    return not (a.rescaled or a.moments)


def several_tensors(a: Analysis) -> bool:
    """True if several tensors are read, which registers keep. A single tensor is read again from L2 or L1."""
    return a.full_loads > 1


def random_numbers(a: Analysis) -> bool:
    """True if there are random numbers, whose integers need registers beside the row."""
    return any(isinstance(n, Random) for n in a.loops.nodes)


def crowded(a: Analysis) -> bool:
    """True if eight warps would have few registers left beside tiles."""
    row = RowTile(1, padded(hint(a.size(COLS))), Cols.WHOLE, num_warps=8)
    return Run(a, placement_of(a, row)).registers > CROWDED


def misaligned(a: Analysis) -> bool:
    """True if rows begin at any address."""
    return hint(a.size(COLS)) % WORD != 0


def aligned(a: Analysis) -> bool:
    """True if rows begin with a word."""
    return not misaligned(a)


def one_sum(a: Analysis) -> bool:
    """True if programs keep a single row of sums over the rows."""
    return len(a.across_rows) == 1


def no_sums(a: Analysis) -> bool:
    """True if nothing is summed over the rows."""
    return not a.across_rows


def shareable(a: Analysis) -> bool:
    """True if programs can exchange the results of their reductions along the row."""
    return a.shareable


def same_for_all_rows(a: Analysis) -> bool:
    """True if every row reads the same weight or bias. To read it again takes as many accesses as the row, or
    more if it is not aligned."""
    return any(isinstance(n, Load) and a.groups[i] == frozenset({COLS}) for i, n in enumerate(a.loops.nodes))


def few_elements(a: Analysis) -> bool:
    """True if parts of 32768 columns would not fill the measured device with 32 warps per multiprocessor."""
    return max(1, hint(a.size(ROWS))) * hint(a.size(COLS)) // 32768 * 16 < 32 * 132


TRAITS: dict[str, Trait] = {
    trait.__name__: trait
    for trait in (
        long_functions, mixed, tall, known_width, only_reduced, stored, has_scans, exponentials, simple,
        several_tensors, random_numbers, crowded, misaligned, aligned, one_sum, no_sums, shareable,
        same_for_all_rows, few_elements,
    )
}  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """A row of `measured.csv`, whose columns are these fields: when shapes are the fastest, best first, and
    where, when and with what code they were measured."""

    kind: str
    widest: int
    traits: tuple[Trait, ...]
    shapes: tuple[Shape, ...]
    position: int | None
    device: str
    target: str
    date: str
    commit: str


COLUMNS = [field.name for field in fields(Measured)]


def read(text: str) -> tuple[Measured, ...]:
    """Return the rows of a table in the format of `measured.csv`. Raise ValueError, with the line and what to
    write instead, if one is malformed."""
    lines = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line and not line.startswith("#")]
    if not lines or lines[0][1].split(",") != COLUMNS:
        raise ValueError(f"measured.csv: write the columns {','.join(COLUMNS)} in the first line")
    rows: list[Measured] = []
    for number, line in lines[1:]:
        try:
            rows.append(_row(line.split(",")))
        except ValueError as error:
            raise ValueError(f"measured.csv, line {number}: {error}") from None
    return tuple(rows)


def _row(cells: list[str]) -> Measured:
    if len(cells) != len(COLUMNS):
        raise ValueError(f"{len(cells)} cells: write {len(COLUMNS)}, {','.join(COLUMNS)}")
    kind, widest, traits, shapes, position, *origin = cells
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}: write one of {', '.join(KINDS)}, or add it to KINDS")
    if not (widest == "any" or widest.isdecimal()):
        raise ValueError(f"widest is {widest!r}: write a number of columns, or any")
    for name in traits.split():
        if name not in TRAITS:
            names = ", ".join(TRAITS)
            raise ValueError(f"unknown trait {name!r}: write some of {names}, or add a function to TRAITS")
    if position and not position.isdecimal():
        raise ValueError(f"position is {position!r}: write a place in the result from 0, or nothing")
    if not all(origin):
        raise ValueError("write the device, target, date and commit of the measurement")
    return Measured(
        kind,
        ANY if widest == "any" else int(widest),
        tuple(TRAITS[name] for name in traits.split()),
        tuple(_shape(kind, shape) for shape in shapes.split(";") if shapes),
        int(position) if position else None,
        *origin,
    )


def _shape(kind: str, text: str) -> Shape:
    numbers = text.split()
    if len(numbers) not in KINDS[kind] or not all(n.removeprefix("-").isdecimal() for n in numbers):
        counts = " or ".join(map(str, KINDS[kind]))
        raise ValueError(f"malformed shape {text.strip()!r}: write {counts} integers for the kind {kind}")
    return tuple(map(int, numbers))


TABLE = read((files("fusion_compiler.schedule") / "measured.csv").read_text(encoding="utf-8"))
TARGETS = tuple(dict.fromkeys(row.target for row in TABLE))


def shapes(kind: str, a: Analysis, target: str, width: int | None = None) -> tuple[Shape, ...]:
    """Return the measured shapes of a kind of schedule for a loop nest, best first. If nothing was measured
    on the target, they are those of the first target of the table. width: the elements that take the place of
    the nest's columns."""
    width = hint(a.size(COLS)) if width is None else width
    source = target if target in TARGETS else TARGETS[0]
    rows = (row for row in TABLE if row.kind == kind and row.target == source and width <= row.widest)
    row_at: dict[int | None, Measured] = {}
    for row in rows:
        if row.position not in row_at and all(trait(a) for trait in row.traits):
            row_at[row.position] = row
    result = list(row_at.pop(None).shapes) if None in row_at else []
    for position in sorted(key for key in row_at if key is not None):
        result[position:position] = row_at[position].shapes
    return tuple(dict.fromkeys(result))
