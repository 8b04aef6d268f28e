"""Cuts over machines, without machines: python -m benchmarks machines [--quick] [--json FILE]

Three bars. On a hundred random DAGs of up to 14 cuts the bottleneck is within 1% of the best of all cuts. A
model of 48 layers is cut in less than 2 s of processor time, after it has been exported. On four models with
uneven layers, on four H200 with links of 200 GB/s, the predicted step is at least 1.10 times as fast as with
equal layers on each stage.

--quick: the small sizes of the models, and ten DAGs. --filter: only models whose name matches.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch

import fusion_compiler as fc
from benchmarks.harness.record import Record, environment
from benchmarks.harness.tables import Bar, at_least, at_most, counted, missed
from benchmarks.machines.dags import bottleneck, exhaustive, random_dag, step_of, times
from benchmarks.machines.uneven import UNEVEN, TiedHead
from fusion_compiler.machines import partition as partition_module
from fusion_compiler.machines.cut import cut, improve

LINK = fc.Link(bytes_per_s=200e9, latency_us=10.0)
MACHINES = tuple(fc.Machine(f"gpu{i}", "h200", memory_bytes=141e9) for i in range(4))


def main(options: argparse.Namespace) -> None:
    record = Record("machines", environment(torch.device(options.device)), options.json)
    bars = [
        *random_bars(record, 10 if options.quick else 100),
        *layers_bar(record, 4 if options.quick else 48),
    ]
    for name in UNEVEN:
        if re.search(options.filter, name):
            bars += uneven_bar(record, name, "small" if options.quick else "large")
    record.summary = {"bars": counted(bars), "missed": missed(bars)}
    record.write()
    print(counted(bars), *missed(bars), sep="\n  ")


def random_bars(record: Record, count: int) -> Iterator[Bar]:
    """The bottleneck and the simulated step of the cuts, by those of the best of all cuts."""
    bottlenecks, steps = [], []
    for dag in map(random_dag, range(count)):
        chain, places = dag.chain(), dag.places()
        first = cut(chain, places)
        assert first is not None
        bottlenecks.append(bottleneck(*times(dag, first.at)) / exhaustive(dag, bottleneck))
        best = improve(chain, places, [first], lambda cuts, d=dag: step_of(*times(d, cuts.at)))
        steps.append(step_of(*times(dag, best.at)) / exhaustive(dag, step_of))
    near = sum(ratio <= 1.01 for ratio in steps) / count
    record.add({
        "name": f"{count} random DAGs", "worst bottleneck": max(bottlenecks), "worst step": max(steps),
        "steps within 1%": near,
    })  # fmt: skip
    print(
        f"{count} random DAGs: the worst bottleneck is {max(bottlenecks):.4f} of the best there is; "
        f"{near:.0%} of the steps are within 1%, the worst is {max(steps):.4f}"
    )
    yield from at_most("bottleneck / exhaustive", max(bottlenecks), 1.01)


def planned(model: torch.nn.Module, args: tuple[Any, ...]) -> tuple[fc.Pipeline, float]:
    """Return the plan for MACHINES, and the processor's seconds behind torch.export."""
    exported: list[float] = []
    workload = partition_module.workload

    def timed(*args: Any, **options: Any) -> Any:
        result = workload(*args, **options)
        exported.append(time.process_time())
        return result

    with patch.object(partition_module, "workload", timed):
        plan = fc.partition(model, args, machines=MACHINES, links=LINK)
    return plan, time.process_time() - exported[0]


def layers_bar(record: Record, layers: int) -> Iterator[Bar]:
    with torch.device("meta"):
        model, args = TiedHead(1600, layers, 50257), (torch.zeros(2, 1024, dtype=torch.long),)
    _, seconds = planned(model.bfloat16(), args)
    record.add({"name": f"{layers} layers", "seconds": seconds})
    print(f"{layers} layers: cut in {seconds:.2f} s of processor time")
    yield from at_most(f"seconds for {layers} layers", seconds, 2.0)


def uneven_bar(record: Record, name: str, size: str) -> Iterator[Bar]:
    with torch.device("meta"):
        model, args = UNEVEN[name](size)
    plan, _ = planned(model.bfloat16(), tuple(x.bfloat16() if x.is_floating_point() else x for x in args))
    (equal,) = [d for d in plan.decisions if d.rule == "equal layers"]
    if equal.us is None:
        record.add({"name": name, "step us": plan.step_us, "equal layers": equal.reason})
        print(f"{name}: {equal.reason}")
        return
    ratio = 1 - equal.us / plan.step_us
    record.add({"name": name, "step us": plan.step_us, "bubble": plan.bubble, "over equal layers": ratio})
    print(f"{name}: {plan.step_us:.0f} us predicted, {ratio:.2f} times as fast as equal layers")
    yield from at_least(f"{name} over equal layers", ratio, 1.10)
