"""python -m benchmarks compile-time: seconds until a model's first step is done, and where they go.

Each measurement is a process of its own (`first_step`): cold with empty caches on disk, warm with those that
the cold one left. Python's bytecode is there, as an installer leaves it. Models have as many layers as in
`models`; the first of them also has 2, 4, 8 and 32. On a CPU sizes are tiny, numbers float32, and ours plans
and prints kernels as for an H200, none of which is compiled or launched; torch.compile is another compiler
there, which is left out unless --only names it.
"""

from __future__ import annotations

import argparse
import compileall
import functools
import itertools
import re
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.harness import tables
from benchmarks.harness.processes import ROOT, in_turn
from benchmarks.harness.record import Record, begin
from benchmarks.harness.tables import Bar, Row, at_most, cell_of, figure, over
from benchmarks.models.workloads import WORKLOADS

KINDS = ("cold", "warm")
MODELS = ("BERT-large 12", "GPT-2", "Llama 8 layers of the 1B shape, train", "ViT")  # how their names begin
DEPTHS = (2, 4, 8, 32)  # of the first of them
WALL = "seconds"
WARM_SECONDS = 2.0  # of BERT-large
SHARE = 0.5  # of torch.compile's seconds
DEEP = 1.5  # times the cold seconds of 4 layers, with 32


def rows_of(pattern: str) -> Iterator[dict[str, Any]]:
    """A row without figures for each model and depth whose name matches."""
    for model in MODELS:
        number = next(i for i, w in enumerate(WORKLOADS) if w.name.startswith(model))
        depth = WORKLOADS[number].sizes["layers"]
        for layers in sorted({depth, *DEPTHS}) if model == MODELS[0] else (depth,):
            name = f"{model.split()[0]}, {layers} layers"
            if re.search(pattern, name):
                row = {"workload": name, "number": number, "layers": layers, "own": layers == depth}
                yield row | {"cells": {}}


def measure(row: dict[str, Any], contender: str, options: argparse.Namespace) -> None:
    task = {
        "workload": row["number"], "layers": row["layers"], "contender": contender, "device": options.device,
        "backend": options.backend, "quick": options.quick or options.device == "cpu",
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="compile-time-", ignore_cleanup_errors=True) as home:
        twice = [task | {"caches": home}] * len(KINDS)
        cells = zip(KINDS, in_turn("benchmarks.compile_time.first_step", twice, options.budget), strict=True)
        row["cells"][contender] = {}
        for kind, cell in cells:
            row["cells"][contender][kind] = cell
            print(f"  {contender} {kind}: {describe(cell)}", flush=True)


def describe(cell: Row) -> str:
    if "failed" in cell:
        return cell["failed"]
    stages = ", ".join(f"{name} {s:.2f}" for name, s in cell["stages"].items() if s >= 0.005)
    return f"{cell['seconds']:.2f} s ({cell['processor']:.2f} of processors): {stages}"


def figure_of(row: Row | None, contender: str, kind: str, key: str = WALL) -> float | None:
    return None if row is None else cell_of(row, contender).get(kind, {}).get(key)


def ratio(row: Row, kind: str) -> float | None:
    """Return torch.compile's seconds over ours."""
    return over(figure_of(row, "compile", kind), figure_of(row, "ours", kind))


def bars(rows: Sequence[Row], key: str = WALL) -> Iterator[Bar]:
    seconds = functools.partial(figure_of, key=key)
    for row, kind in itertools.product(rows, KINDS):
        share = over(seconds(row, "ours", kind), seconds(row, "compile", kind))
        yield from at_most(f"{row['workload']}, {kind}: of torch.compile's seconds", share, SHARE)
    named = {row["workload"]: row for row in rows}
    bert = next((r for r in rows if r["own"] and r["workload"].startswith("BERT")), None)
    yield from at_most("BERT-large warm, seconds", seconds(bert, "ours", "warm"), WARM_SECONDS)
    few, many = (seconds(named.get(f"BERT-large, {n} layers"), "ours", "cold") for n in (4, 32))
    yield from at_most("cold, 32 layers / 4 layers", over(many, few), DEEP)


def show(rows: Sequence[Row], key: str = WALL) -> str:
    """key: "seconds" on the clock, or of the "processor", which others who use the machine change less."""
    names = dict.fromkeys(name for row in rows for name in row["cells"])
    columns = [*itertools.product(names, KINDS)]
    header = [f"first step, {'processor ' if key != WALL else ''}seconds", *(" ".join(c) for c in columns)]
    lines = [
        [row["workload"], *(figure(figure_of(row, *column, key), ".1f") for column in columns)]
        for row in rows
    ]
    held = [*bars(rows, key)]
    missed = [f"  not {line}" for line in tables.missed(held)]
    return "\n".join([tables.table(header, lines), tables.counted(held) if held else "", *missed])


def main(options: argparse.Namespace) -> Record:
    record = begin("compile-time", options)
    only = options.only or ("^ours$" if options.device == "cpu" else "")
    names = [name for name in ("compile", "ours") if re.search(only, name)]
    compileall.compile_dir(ROOT / "fusion_compiler", quiet=1)
    for row in rows_of(options.filter):
        print(row["workload"], flush=True)
        row = record.row({"workload": row["workload"]}, **{n: v for n, v in row.items() if n != "cells"})
        for name in names:
            measure(row, name, options)
            record.write()
    ratios = {f"{kind}: compile / ours": functools.partial(ratio, kind=kind) for kind in KINDS}
    text = show(record.rows, "processor" if options.device == "cpu" else WALL)
    return record.finish(tables.means(record.rows, ratios), text)
