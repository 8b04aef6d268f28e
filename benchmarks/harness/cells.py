"""Cells of a table, each measured in a process of its own and written as it comes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.processes import Result, Task, in_turn
from benchmarks.harness.record import Record


@dataclass(frozen=True)
class Cell:
    """One measurement: whose it is, the key of its row, and the task of the process that measures it."""

    case: str
    contender: str
    row: Mapping[str, Any]
    task: Task


def fill(
    record: Record, cells: Sequence[Cell], figure: str, module: str, options: argparse.Namespace,
    describe: Callable[[Result], str], *, order: Callable[[Sequence[Cell]], Sequence[Cell]] = tuple,
    one_cache: bool = False,
) -> None:  # fmt: skip
    """Measure cells by `module` in processes of their own, and write each into its row as it comes.

    A resumed run measures the cells that have no `figure`, and ours of another commit. Rows are in the
    order of the cells, which `order` changes for the measurements.
    """
    rows = [record.row(cell.row)["cells"] for cell in cells]
    cells = order(
        [
            cell
            for cell, row in zip(cells, rows, strict=True)
            if not record.keeps(row.get(cell.contender, {}), cell.contender, figure)
        ]
    )
    jobs, tasks = options.jobs or 1, [cell.task for cell in cells]
    results = in_turn(module, tasks, options.budget, jobs, one_cache=one_cache, within=options.within)
    done = 0
    for cell, result in zip(cells, results, strict=False):
        record.row(cell.row)["cells"][cell.contender] = result | {"commit": record.environment["commit"]}
        record.write()
        print(f"{cell.case}, {cell.contender}: {describe(result)}", flush=True)
        done += 1
    for cell in cells[done:]:
        print(f"not measured: {cell.case}, {cell.contender}")
