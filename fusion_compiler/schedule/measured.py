"""Measured schedules: the fastest tile shapes by kind of schedule, width and trait, which override the cost
model.

A row applies to loop nests with at most `widest` columns for which all traits are true; the first row of a
kind that applies is used. A row with `at` inserts its shapes at that position of the result. The kind's
module defines what a shape means. Warps have 32 threads. Rows that the model ranks equally well can be
removed: `python -m benchmarks schedules --from benchmarks/results/schedules.json` tells without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fusion_compiler.ir.dims import hint
from fusion_compiler.ir.loops import COLS, ROWS, Compute, Load, Random
from fusion_compiler.ir.ops import spec_of
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.registers import tile_registers
from fusion_compiler.schedule.row_widths import ALONE
from fusion_compiler.schedule.schedule import WORD, Cols, Schedule
from fusion_compiler.schedule.shapes import padded

Shape = tuple[int, ...]
Trait = Callable[[Analysis], bool]

ANY = 1 << 60
LONG = 16  # instructions
CROWDED = 128  # registers of a thread for tiles beyond which more threads are faster


def long_functions(a: Analysis) -> bool:
    """True if there are functions without a short form, such as sine: sixteen copies of libdevice's slow
    path spill."""
    specs = (spec_of(n.target) for n in a.loops.nodes if isinstance(n, Compute))
    return any(s is not None and s.flops >= LONG and s.rough is None for s in specs)


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
    return bool(a.online)


def simple(a: Analysis) -> bool:
    """True if a reduction needs each element only once, which leaves registers for more warps."""
    return not (a.online or a.moments)


def several_tensors(a: Analysis) -> bool:
    """True if several tensors are read, which registers keep. A single tensor is read again from L2 or L1."""
    return a.full_loads > 1


def random_numbers(a: Analysis) -> bool:
    """True if there are random numbers, whose integers need registers beside the row."""
    return any(isinstance(n, Random) for n in a.loops.nodes)


def crowded(a: Analysis) -> bool:
    """True if eight warps would have few registers left beside tiles."""
    return tile_registers(a, Schedule(1, padded(hint(a.size(COLS))), Cols.WHOLE, num_warps=8)) > CROWDED


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


@dataclass(frozen=True)
class Source:
    """The device, date and code of a measurement."""

    device: str
    target: str
    date: str
    commit: str


H200 = Source("h200", "sm_90", "2026-11-22", "6060cb2")


@dataclass(frozen=True)
class Measured:
    kind: str
    widest: int
    when: tuple[Trait, ...]
    shapes: tuple[Shape, ...]
    at: int | None = None
    source: Source = H200


NARROW, TWO, WIDE = (2, 2048, 4, 4, 3), (2, 4096, 2, 8, 3), (2, 8192, 1, 16, 3)
ONE, THREE, WIDEST_PART = (1, 4096, 2, 8, 3), (1, 4096, 3, 8, 3), (1, 16384, 1, 16, 3)
IN_TURN = (-4096, 0, 8, 2)  # two programs per multiprocessor, which loop over rows
KEPT = 64  # registers of a thread that keeps 32 elements of two tensors
SMALL, PART = (4096, 4096, 4), (8192, 8192, 8)
LOOPS = ((0, 16384, 16), (0, 8192, 16))
SIMPLE = ((8192, 4096, 8), (16384, 8192, 8), (8192, 4096, 4))
OTHERS = ((8192, 4096, 4), (16384, 8192, 8), (8192, 4096, 8))
LONGER = (
    (16384, 8192, 8),
    (16384, 4096, 8),
    (32768, 4096, 16),
    (16384, 8192, 4),
    (0, 16384, 8),
    (0, 8192, 16),
)
LONGEST = ((16384, 4096, 16), (16384, 8192, 16), (16384, 8192, 8), (0, 16384, 8), (0, 8192, 16))

WITH_EXPONENTIALS = ((-4096, 0, 2), (-8192, 0, 4), (-2048, 0, 1), (-8192, 0, 8))
LOADED_ONCE = ((-4096, 256, 4), (-2048, 256, 4), (-8192, 256, 8), (-16384, 256, 32))
SMALL_FIRST = (SMALL, PART, (*SMALL, KEPT), (4096, 4096, 8), *LOOPS)
PART_FIRST = (PART, SMALL, (*PART, KEPT), (4096, 4096, 8), *LOOPS)
KEPT_FIRST = ((*PART, KEPT), PART, (8192, 8192, 16), (16384, 4096, 16), *LOOPS)
WIDER = ((16384, 8192, 8), (16384, 4096, 16), (16384, 8192, 16), (32768, 8192, 16), *LOOPS)

TABLE: tuple[Measured, ...] = (
    Measured("flat", ANY, (mixed,), ((64, 64, 8), (32, 64, 4), (64, 32, 4), (128, 64, 8))),
    Measured("flat", ANY, (long_functions,), ((0, 512, 4), (0, 1024, 8), (0, 1024, 4), (0, 256, 2))),
    Measured("flat", ANY, (), ((0, 2048, 4), (0, 1024, 2), (0, 4096, 8), (0, 1024, 4))),
    # Norms' gradients: each program keeps a row of sums.
    Measured("persistent", 256, (), ((8192, 1, 16, 3), (8192, 1, 8, 3), (8192, 2, 16, 3), (1024, 4, 4, 3))),
    Measured("persistent", 1024, (), ((2048, 4, 2, 3), (4096, 2, 4, 3), (8192, 1, 8, 3), (2048, 4, 4, 3))),
    Measured("persistent", 4096, (), ((4096, 2, 4, 3), (8192, 1, 8, 3), (4096, 2, 8, 3), (8192, 1, 16, 2))),
    Measured("persistent", 8192, (), ((8192, 1, 8, 3), (8192, 2, 8, 3), (8192, 1, 16, 2))),
    Measured("persistent", ANY, (shareable,), ((8192, 1, 16, 2), (8192, 1, 8, 3), (8192, 2, 8, 3))),
    Measured("persistent", ANY, (), ((8192, 1, 8, 3), (8192, 2, 8, 3), (8192, 1, 16, 2))),
    # The wider the row, the longer its programs wait, and the more each must keep. Misaligned tiles need
    # registers for masks: programs with few columns have more of them.
    Measured("shared", 8192, (), ()),
    Measured("shared", 16384, (), (NARROW, TWO, WIDE)),
    Measured("shared", 131072, (misaligned, one_sum), (NARROW, THREE, ONE, WIDE)),
    Measured("shared", 32768, (misaligned,), (TWO, ONE, WIDE, NARROW)),
    Measured("shared", 131072, (misaligned,), (NARROW, TWO, ONE, WIDE)),
    Measured("shared", 524288, (misaligned, one_sum), (THREE, ONE, TWO, WIDE)),
    Measured("shared", 524288, (misaligned,), (TWO, ONE, WIDE)),
    Measured("shared", 32768, (), (TWO, NARROW, WIDE, ONE)),
    Measured("shared", 524288, (one_sum,), (THREE, TWO, WIDE, ONE)),
    Measured("shared", 65536, (), (TWO, WIDE, ONE, NARROW)),
    Measured("shared", 524288, (), (WIDE, TWO, ONE, NARROW)),
    Measured("shared", ANY, (), (WIDE, WIDEST_PART)),
    # Short rows that are only reduced: four times as many, with loads in a loop, which do not stay in caches.
    Measured("rows", 256, (only_reduced, exponentials), WITH_EXPONENTIALS),
    Measured("rows", 256, (only_reduced,), LOADED_ONCE),
    # Scans keep the whole row in registers: as many rows of a sector as do not spill. Chosen by the registers
    # of sm_90 code, and not timed yet.
    Measured("rows", 1024, (tall, has_scans), ((8, 0, 8), (16, 0, 16), (8, 0, 16))),
    Measured("rows", 2048, (tall, has_scans), ((8, 0, 16), (4, 0, 8), (16, 0, 32))),
    Measured("rows", 4096, (tall, has_scans), ((4, 0, 16), (8, 0, 32))),
    Measured("rows", 8192, (tall, has_scans), ((2, 0, 16), (4, 0, 32))),
    Measured("rows", ANY, (tall, has_scans), ((1, 0, 16), (2, 0, 32))),
    Measured("rows", 1024, (tall,), ((16, 0, 16), (32, 0, 16), (8, 0, 8))),
    Measured("rows", 2048, (tall,), ((16, 0, 16), (8, 0, 8))),
    Measured("rows", 4096, (tall,), ((8, 0, 8),)),
    Measured("rows", 256, (), ((-1024, 0, 4), (-512, 0, 2), (-256, 0, 1), (-2048, 0, 4))),
    Measured("rows", 1024, (), ((1, 0, 1), (4, 0, 2), (4, 0, 4), (1, 0, 4))),
    Measured("rows", 2048, (), ((1, 0, 4), (1, 0, 2), (2, 0, 4), (1, 0, 8))),
    Measured("rows", 4096, (random_numbers,), ((1, 0, 8), (1, 0, 4), (1, 0, 16))),
    Measured("rows", 4096, (), ((1, 0, 4), (1, 0, 8), (1, 0, 16))),
    Measured("rows", 8192, (crowded,), ((1, 0, 16), (1, 0, 32), (1, 0, 8), (1, 0, 4))),
    Measured("rows", 8192, (), ((1, 0, 8), (1, 0, 32), (1, 0, 16), (1, 0, 4))),
    Measured("rows", ANY, (misaligned,), ((1, 0, 8), (1, 0, 16), (1, 0, 32))),  # masks take issue slots
    Measured("rows", ANY, (), ((1, 0, 16), (1, 0, 32), (1, 0, 8))),
    # Rows that are only reduced: a loop with 64 elements per thread.
    Measured("rows", 2048, (), (), at=0),
    Measured("rows", 4096, (only_reduced,), ((1, 4096, 2),), at=0),
    Measured("rows", 8192, (only_reduced,), ((1, 8192, 4), (1, 4096, 2)), at=0),
    Measured("rows", ANY, (only_reduced,), ((1, 4096, 2), (1, 8192, 4)), at=0),
    # Misaligned rows: a loop has no masks within the row, and few programs keep weights from row to row.
    Measured("rows", 4096, (misaligned, same_for_all_rows, no_sums), (IN_TURN,), at=1),
    Measured("rows", 4096, (), (), at=1),
    Measured("rows", ANY, (misaligned, stored, same_for_all_rows, no_sums), (IN_TURN, (1, 4096, 4)), at=1),
    Measured("rows", ANY, (misaligned, stored, no_sums), ((1, 4096, 4),), at=1),
    Measured("rows", ANY, (misaligned, same_for_all_rows, no_sums), (IN_TURN,), at=1),
    Measured("rows", 2048, (), (), at=3),
    Measured("rows", ANY, (aligned, same_for_all_rows, no_sums), (IN_TURN,), at=3),
    # Rows that are read, reduced and read again, from registers that keep small parts of several tensors.
    Measured("wide", ALONE, (known_width,), ()),
    Measured("wide", ANY, (has_scans,), ((0, 4096, 8), (0, 8192, 16), (0, 4096, 4))),  # not timed yet
    Measured("wide", 65535, (stored, several_tensors), SMALL_FIRST),
    Measured("wide", 131072, (stored, several_tensors), PART_FIRST),
    Measured("wide", 524288, (stored, several_tensors), KEPT_FIRST),
    Measured("wide", ANY, (stored, several_tensors), WIDER),
    # One tensor, read again from L2 or L1.
    Measured("wide", 32768, (stored, simple), ((0, 16384, 32), *SIMPLE, *LOOPS)),
    Measured("wide", 32768, (stored,), ((0, 16384, 8), *OTHERS, *LOOPS)),
    Measured("wide", 131072, (stored, simple), (*SIMPLE, (0, 16384, 32), *LOOPS)),
    Measured("wide", 131072, (stored,), (*OTHERS, (0, 16384, 8), *LOOPS)),
    Measured("wide", 262144, (stored, simple), LONGER),
    Measured("wide", 262144, (stored,), ((16384, 8192, 4), *LONGER[1:3], (16384, 8192, 8), *LONGER[4:])),
    Measured("wide", 524288, (stored,), LONGER),
    Measured("wide", ANY, (stored, simple, few_elements), ((16384, 4096, 8), *LONGEST)),
    Measured("wide", ANY, (stored, simple), ((32768, 16384, 16), *LONGEST)),
    Measured("wide", ANY, (stored,), LONGER),
)


def shapes(kind: str, a: Analysis) -> tuple[Shape, ...]:
    """Return the measured shapes of a kind of schedule for a loop nest, best first."""
    width = hint(a.size(COLS))
    row_at: dict[int | None, Measured] = {}
    for row in TABLE:
        if row.kind == kind and row.at not in row_at and width <= row.widest and all(t(a) for t in row.when):
            row_at[row.at] = row
    result = list(row_at.pop(None).shapes) if None in row_at else []
    for at in sorted(key for key in row_at if key is not None):
        result[at:at] = row_at[at].shapes
    return tuple(dict.fromkeys(result))
