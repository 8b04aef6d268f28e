"""python -m benchmarks descriptors: depthwise convolutions that load images through tensor descriptors.

The first placements of each nest with windows, forward and both gradients, are timed with plain loads and
with boxes of the image, or of all buffers of its size. One with a loop is also timed with several stages.
"""

from __future__ import annotations

import argparse
import itertools
import re
from dataclasses import replace
from typing import Any

import torch

from benchmarks.harness.record import Record, begin, reason
from benchmarks.harness.tables import figure, geometric_mean, table
from benchmarks.kernels import depthwise
from benchmarks.kernels.schedules import CapturedCluster, Clock, Search, clock_of, clusters_of
from fusion_compiler.ir.dims import hint, product
from fusion_compiler.ir.loops import Load
from fusion_compiler.schedule.placement import Access, At, Place, Placement, Via
from fusion_compiler.schedule.verifier import refusal

PLACEMENTS = 2  # of a nest
STAGES = 3
LARGE = 4  # a buffer with at least this part of the largest one's elements is an image


def boxed(cluster: CapturedCluster, plain: Placement) -> tuple[list[Placement], list[str]]:
    """Return a placement with descriptors for its images, and why some have none."""
    nest, buffers = cluster.key.nests[0], {b.name: b for b in cluster.key.buffers}
    sizes = {n.buffer: hint(product(buffers[n.buffer].shape)) for n in nest.nodes if isinstance(n, Load)}
    images = [name for name in sizes if LARGE * sizes[name] >= max(sizes.values())]

    def through(accesses: tuple[Via, ...], stages: int = 1) -> Placement:
        return replace(plain, directives=(*plain.directives, *accesses), num_stages=stages)

    accesses = [Via(name, Access.DESCRIPTOR) for name in images]
    reasons = {access: refusal(nest, through((access,)), buffers, cluster.device) for access in accesses}
    able = tuple(access for access, why in reasons.items() if why is None)
    has_loop = any(isinstance(d, At) and d.place is Place.LOOP for d in plain.directives)
    choices = itertools.product(dict.fromkeys((able[:1], able)), (1, STAGES) if has_loop else (1,))
    variants = [through(a, stages) for a, stages in choices if a]
    return variants, [why for why in reasons.values() if why is not None]


def measured(cluster: CapturedCluster, clock: Clock) -> list[dict[str, Any]]:
    """Return a row for each placement: its time, the plain one's, and the largest relative error."""
    rows: list[dict[str, Any]] = []
    for plain in [p for p in cluster.candidates if isinstance(p, Placement)][:PLACEMENTS]:
        variants, reasons = boxed(cluster, plain)
        rows += [{"refused": why} for why in reasons]
        rows += [{"plain": plain, "placement": placement} for placement in (plain, *variants)]
    search = Search(cluster, clock, limit=0)
    search.measure(dict.fromkeys(row["placement"] for row in rows if "placement" in row))
    return [{"cluster": cluster.name} | timed(row, search) for row in rows]


def timed(row: dict[str, Any], search: Search) -> dict[str, Any]:
    """Return the row with its figures, or with the reason why it has none."""
    if "placement" not in row:
        return row
    plain, placement = row["plain"], row["placement"]
    row = {"plain": str(plain), "placement": str(placement)}
    if placement in search.failed:
        return row | {"refused": search.failed[placement]}
    row |= {"us": search.times[placement], "error": search.error(placement)}
    return row | ({"ratio": row["us"] / search.times[plain]} if plain in search.times else {})


def show(rows: list[dict[str, Any]]) -> str:
    """Return a table. A ratio is the time over that with plain loads."""
    lines: list[list[str]] = []
    for row in rows:
        boxes = len(re.findall(r"access\(", row.get("placement", "")))
        stages = STAGES if "stages" in row.get("placement", "") else 1
        what = row["cluster"] + (f": {row['refused'][:60]}" if "refused" in row else "")
        numbers = (figure(row.get("us"), ".1f"), figure(row.get("ratio")), figure(row.get("error"), ".1e"))
        lines.append([what, str(boxes), str(stages), *numbers])
    return table(["cluster", "boxed", "stages", "us", "ratio", "error"], lines)


def best_ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return, by cluster, the least time with descriptors over the least without."""
    us: dict[str, dict[bool, list[float]]] = {}
    for row in rows:
        if "us" in row:
            of_cluster = us.setdefault(row["cluster"], {False: [], True: []})
            of_cluster["access(" in row["placement"]].append(row["us"])
    return {name: min(u[True]) / min(u[False]) for name, u in us.items() if all(u.values())}


def main(options: argparse.Namespace) -> Record:
    record, clock = begin("descriptors", options), clock_of(torch.device(options.device))
    done = {row["case"] for row in record.rows if "best" in row}
    for case in depthwise.CASES:
        if case.name in done or not re.search(options.filter, case.name):
            continue
        row = record.row({"case": case.name, "phase": "descriptors"}, clusters=[])
        try:
            row["clusters"] = [r for cluster in clusters_of(case, options) for r in measured(cluster, clock)]
            row["best"] = best_ratios(row["clusters"])
        except Exception as error:
            row["failed"] = reason(error)
        record.write()
        print(f"{case.name} {row.get('failed', '')}\n{show(row['clusters'])}\n", flush=True)
    every = [(name, ratio) for row in record.rows for name, ratio in row.get("best", {}).items()]
    for name in dict.fromkeys(re.sub(r"_\d+$", "", name) for name, _ in every):
        ratios = [ratio for other, ratio in every if other.startswith(name)]
        record.summary[name] = {"ratio": geometric_mean(ratios), "best": min(ratios), "worst": max(ratios)}
        print(name, {key: figure(value) for key, value in record.summary[name].items()})
    record.write()
    return record
