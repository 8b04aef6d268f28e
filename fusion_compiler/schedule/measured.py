"""Measured schedules: the fastest tile shapes by kind of schedule, width and trait, which override the cost
model.

The rows stand in `measured.csv`; this module reads and checks them, and has the traits that they name.
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


def _crowded(a: Analysis) -> bool:
    row = RowTile(1, padded(hint(a.size(COLS))), Cols.WHOLE, num_warps=8)
    return Run(a, placement_of(a, row)).registers > CROWDED


# What rows of the table say of the loop nests that they are for.
TRAITS: dict[str, Trait] = {
    # A function without a short form, such as sine: sixteen copies of libdevice's slow path spill.
    "long_functions": lambda a: any(
        isinstance(n, Compute) and n.spec.flops >= LONG and n.spec.fp16 is None for n in a.loops.nodes
    ),
    "mixed": lambda a: a.mixed,  # two memory orders meet, which takes square tiles through shared memory
    "tall": lambda a: a.tall,  # neighbours in memory are rows, at least one sector of them
    "known_width": lambda a: isinstance(a.size(COLS), int),
    "only_reduced": lambda a: not a.tall and not a.stores_rows,  # nothing is stored per element of a row
    "stored": lambda a: a.tall or a.stores_rows,
    "has_scans": lambda a: bool(a.scans),
    "exponentials": lambda a: bool(a.rescaled),  # sums of exponentials, which need registers
    # A reduction needs each element only once, which leaves registers for more warps.
    "simple": lambda a: not (a.rescaled or a.moments),
    # Registers keep several tensors. A single one is read again from L2 or L1.
    "several_tensors": lambda a: a.full_loads > 1,
    # Random numbers, whose integers need registers beside the row.
    "random_numbers": lambda a: any(isinstance(n, Random) for n in a.loops.nodes),
    "crowded": _crowded,  # eight warps would have few registers left beside tiles
    "misaligned": lambda a: hint(a.size(COLS)) % WORD != 0,  # rows begin at any address
    "aligned": lambda a: hint(a.size(COLS)) % WORD == 0,  # rows begin with a word
    "one_sum": lambda a: len(a.across_rows) == 1,  # programs keep a single row of sums over the rows
    "no_sums": lambda a: not a.across_rows,
    "shareable": lambda a: a.shareable,  # programs can exchange the results of reductions along the row
    # Every row reads the same weight or bias. To read it again takes as many accesses as the row, or more if
    # it is not aligned.
    "same_for_all_rows": lambda a: any(
        isinstance(n, Load) and a.groups[i] == frozenset({COLS}) for i, n in enumerate(a.loops.nodes)
    ),
    # Parts of 32768 columns would not fill the measured device with 32 warps per multiprocessor.
    "few_elements": lambda a: max(1, hint(a.size(ROWS))) * hint(a.size(COLS)) // 32768 * 16 < 32 * 132,
}


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
