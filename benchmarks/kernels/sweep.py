"""python -m benchmarks sweep: rows of 256 to 262144 elements, each wider by sqrt 2, and its cliffs.

Ours alone unless --only names others. `python -m benchmarks readme` draws the figure from the JSON.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence

from benchmarks.harness.record import Record
from benchmarks.harness.tables import Row
from benchmarks.kernels import measure as kernels
from benchmarks.kernels.bars import fraction
from benchmarks.kernels.case import PHASES
from benchmarks.kernels.sizes import sweep
from benchmarks.pages.plot import Line, svg

CLIFF = 0.85  # of the neighbour's fraction
SHORT = {PHASES[0]: "fwd", PHASES[1]: "fwd+bwd"}
COLOURS = {PHASES[0]: "#1f6fb4", PHASES[1]: "#c7501e"}


def width_of(row: Row) -> int:
    """sizes.sweep names its cases "softmax, 4096 wide"."""
    return int(row["case"].split(", ")[1].split()[0])


def series(rows: Sequence[Row], kind: str, phase: str, name: str) -> list[tuple[int, float | None]]:
    members = [r for r in rows if (r["family"], r["phase"]) == (kind, phase) and name in r["cells"]]
    return sorted((width_of(r), fraction(r, name)) for r in members)


def kinds_of(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(r["family"] for r in rows))


def cliffs(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each series of widths in which a width reaches much less of the bandwidth than the
    next one, or much more."""
    for kind, phase in itertools.product(kinds_of(rows), PHASES):
        points: list[str] = []
        for (a, reached), (b, next_reached) in itertools.pairwise(series(rows, kind, phase, "ours")):
            low, high = sorted((reached or 0.0, next_reached or 0.0))
            if low and low < CLIFF * high:
                points = [*(points or [f"{reached:.2f} at {a}"]), f"{next_reached:.2f} at {b}"]
            elif points:
                yield f"{kind}, {phase}: {', '.join(points)}"
                points = []
        if points:
            yield f"{kind}, {phase}: {', '.join(points)}"


def figure_of(rows: Sequence[Row]) -> str:
    """Fraction of the copy bandwidth over the width, a panel for each kind of row."""
    panels = {
        kind: [
            Line(f"{name} {SHORT[phase]}", COLOURS[phase], points, dashed=name != "ours")
            for name, phase in itertools.product(("ours", "compile"), PHASES)
            if (points := series(rows, kind, phase, name))
        ]
        for kind in kinds_of(rows)
    }
    return svg(panels)


def main(options: argparse.Namespace) -> Record:
    chosen = argparse.Namespace(**vars(options) | {"only": options.only or "ours"})
    record = kernels.main(chosen, sweep(), "sweep")
    lines = list(cliffs(record.rows))
    record.summary["cliffs"] = lines
    record.write()
    print(f"\n{len(lines)} cliffs: a neighbour reaches less than {CLIFF} of the other")
    for line in lines:
        print(line)
    return record
