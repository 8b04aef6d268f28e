"""python -m tests.replay FILE: the benchmarks' kernels under many schedules, or what changed of them.

The first time it writes digests of the texts into FILE; then it names the kernels that are others than those.
A refactoring of codegen leaves all of them as they are, also those that no schedule chooses yet. (Names of
variables are numbered through, so that they do not count.)
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.kernels.schedule_grid import grid
from benchmarks.kernels.sizes import ALL_CASES
from fusion_compiler.codegen.assemble import Nests, build
from fusion_compiler.ir.canonical import Canonical, canonical
from fusion_compiler.ir.device import device_spec
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.row_tiles import RowTile
from tests import golden_cases
from tests.exactness import placements

DEVICE = device_spec(golden_cases.DEVICE)
SAMPLE = 40  # schedules of each nest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--texts", type=Path, help="a folder for the texts of those that changed")
    options = parser.parse_args()
    before = json.loads(options.file.read_text()) if options.file.exists() else {}
    digests: dict[str, str] = {}
    changed = 0
    for name, text in kernels():
        digests[name] = hashlib.sha256(text.encode()).hexdigest()[:16]
        if before and before.get(name) != digests[name]:
            changed += 1
            print(name)
            if options.texts:
                options.texts.mkdir(exist_ok=True)
                (options.texts / f"{changed}.txt").write_text(f"{name}\n{text}\n")
    if not before:
        options.file.write_text(json.dumps(digests))
    missing = before.keys() - digests.keys()
    print(f"{len(digests)} programs, {changed} others than before, {len(missing)} missing")
    return bool(changed or missing)


def kernels() -> Iterator[tuple[str, str]]:
    """(case, cluster and schedule; the program's text, or why there is none)."""
    makers = {
        f"{c.family} {c.name}": partial(golden_cases._cluster_plans, c) for c in ALL_CASES if c.differentiate
    }
    for case, make in {**golden_cases.MAKERS, **makers}.items():
        torch._dynamo.reset()
        torch.manual_seed(0)
        with FakeTensorMode(allow_non_fake_inputs=True):
            plans = make()
        seen: set[Canonical] = set()
        for plan in plans:
            yield from ((f"{case} {name}", text) for name, text in programs(plan, seen))


def programs(plan: FusionPlan, seen: set[Canonical]) -> Iterator[tuple[str, str]]:
    for cluster in plan.clusters:
        key = canonical(cluster, plan.dag)
        if key in seen or len(key.nests) > 1:
            continue
        seen.add(key)
        buffers = {b.name: b for b in key.buffers}
        every = sorted(grid(Analysis(key.nests[0]), DEVICE), key=str)
        for schedule in random.Random(0).sample(every, min(SAMPLE, len(every))):
            yield f"{plan.name} {cluster.name} {schedule}", text_of(key, schedule, cluster.name, buffers)


def text_of(key: Canonical, tile: RowTile, name: str, buffers: dict[str, object]) -> str:
    try:
        (placement,) = placements(key.nests[0], tile)
        program = build(Nests(key.nests, buffers), (placement,), name, "")  # type: ignore[arg-type]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    kernels = (f"{k.grid} {k.num_warps} {k.registers}\n{k.source}" for k in program.kernels)
    return renamed("\n".join(kernels))


def renamed(text: str) -> str:
    """Names that end in a number without it: which of them has which is no matter."""
    return re.sub(r"\b([a-z_]+?)_\d+\b", r"\1", text)


if __name__ == "__main__":
    raise SystemExit(main())
