"""Results on disk: rows of cells, with the command, commit and device that made them."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.processes import ROOT, Result, Task, in_turn


def commit() -> str:
    """Return BENCH_COMMIT, else git's HEAD (with a + if the tree differs from it), else "unknown"."""
    if named := os.environ.get("BENCH_COMMIT"):
        return named
    command = ["git", "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def environment(device: torch.device) -> dict[str, Any]:
    """Return what a figure depends on besides the code."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"
    return {
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": name,
        "python": platform.python_version(),
        "versions": {p: version(p) for p in ("torch", "triton", "transformers", "liger-kernel")},
        "command": "python -m benchmarks " + " ".join(sys.argv[1:]),
    }


@dataclass
class Record:
    """A benchmark's results, written after every row: a run that is cut short keeps what it has."""

    benchmark: str
    environment: dict[str, Any]
    path: Path | None
    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    summary: dict[str, Any] = field(default_factory=dict[str, Any])

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.write()

    def row(self, key: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
        """Return the row that has what `key` says, or a new one; `fields` are written into it."""
        row = next((r for r in self.rows if key.items() <= {n: r.get(n) for n in key}.items()), None)
        if row is None:
            row = {**key, "cells": {}}
            self.rows.append(row)
        row.update(fields)
        return row

    def keeps(self, cell: Mapping[str, Any], contender: str, figure: str) -> bool:
        """Return True if a resumed run keeps a cell: it needs the figure, and ours needs this commit."""
        ours = contender.startswith("ours")
        return figure in cell and (not ours or cell.get("commit") == self.environment["commit"])

    def write(self) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        results = {"summary": self.summary, "rows": self.rows}
        content = {"benchmark": self.benchmark, **self.environment, **results}
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(partial, self.path)

    def finish(self, summary: Mapping[str, Any], text: str, form: str = "{}: {:.2f}") -> Record:
        """Write the summary, and print the text and the summary's numbers."""
        self.summary = dict(summary)
        self.write()
        numbers = [form.format(name, x) for name, x in summary.items() if isinstance(x, int | float)]
        print("\n".join(["", text, *numbers]))
        return self


def begin(benchmark: str, options: argparse.Namespace, **facts: Any) -> Record:
    """Return a record with what its figures depend on; with --resume it has the rows of its file."""
    record = Record(benchmark, environment(torch.device(options.device)) | facts, options.json)
    if options.resume and options.json.exists():
        record.rows = json.loads(options.json.read_text())["rows"]
    return record


def reason(error: BaseException) -> str:
    """Return an error as one line, for a table's cell."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:160]


@dataclass(frozen=True)
class Cell:
    """A measurement has a contender, the key of its row, and the task of the process that measures it."""

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
    before = [row.get(cell.contender, {}) for cell, row in zip(cells, rows, strict=True)]
    missing = [c for c, b in zip(cells, before, strict=True) if not record.keeps(b, c.contender, figure)]
    cells = order(missing)
    jobs, tasks = options.jobs or 1, [cell.task for cell in cells]
    results = in_turn(module, tasks, options.budget, jobs, one_cache=one_cache, within=options.within)
    for cell, result in itertools.zip_longest(cells, results):
        if result is None:
            print(f"not measured: {cell.case}, {cell.contender}")
            continue
        record.row(cell.row)["cells"][cell.contender] = result | {"commit": record.environment["commit"]}
        record.write()
        print(f"{cell.case}, {cell.contender}: {describe(result)}", flush=True)
