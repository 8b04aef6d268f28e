"""Dependent launch: choose the kernels of a graph that are on the device before the previous one has ended.

A kernel of a few microseconds spends one or two of them before its programs have their first operands: a gap
behind the last kernel, placing programs, loads from cold memory. With programmatic dependent launch (CUDA
Programming Guide, NVIDIA from Hopper on) programs are placed while those before them end. They load what
no op of the graph writes, such as weights, and then wait for the kernel before (`math.wait_for_kernels`).

`codegen.passes.launched_dependently` says what holds inside such a kernel. This module chooses the kernels
and their constants:

- A kernel is launched dependently if it follows another cluster's kernel in the graph, on the same device,
  which surely is launched: no size of it can be zero. So the first kernel of a graph, and the first after a
  call, begins when all before it has ended: an optimizer's step may have written the weights, and calls may
  trigger, clear memory or wait for other streams as they like.
- Constants are graph inputs whose addresses stay (parameters and buffers), if no op of the graph writes any
  part of their memory.

Graphs that are trained take no part: hooks of an optimizer write parameters while a backward runs.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch._ops import OpOverload

from fusion_compiler.ir.dag import Op, OpDag, Ref
from fusion_compiler.ir.decision import Decision, Outcome
from fusion_compiler.ir.dims import is_positive
from fusion_compiler.ir.graph_info import GraphInfo, Phase
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ir.plan_data import Cluster
from fusion_compiler.ir.plan_text import count
from fusion_compiler.ir.writes import memory
from fusion_compiler.ops.schema import written

NOTE = "dependent launch"
# Clusters are bound by launches if they take less on average: a kernel that starts early saves two or three
# microseconds, which is 4% of one that takes 22.
LAUNCH_BOUND_US = 30.0


def launched_dependently(
    plan: FusionPlan, order: Sequence[str], info: GraphInfo, wanted: bool | Literal["auto"] = "auto"
) -> FusionPlan:
    """Return the plan with `Cluster.constants` set for clusters that are launched dependently, and a note of
    the decision. The plan stays as it is for a graph of a single kernel, or one that is trained, if nobody
    asked.

    order: names of clusters and calls as they run. wanted: "auto" launches dependently if kernels are short,
    True wherever possible, False nowhere.
    """
    if len(plan.clusters) < 2 or (info.phase is not Phase.INFERENCE and wanted is not True):
        return plan
    reason = refusal(plan, info, wanted)
    if reason is not None:
        return plan.decided(Decision(NOTE, "", Outcome.REFUSED, reason))
    clusters = {cluster.name: cluster for cluster in plan.clusters}
    constant = constants(plan.dag, info.static_inputs)
    dependent: dict[str, Cluster] = {}
    for before, name in itertools.pairwise(order):
        if before in clusters and name in clusters and _follows(clusters[before], clusters[name], plan.dag):
            fixed = tuple(i for i in clusters[name].inputs if i in constant)
            dependent[name] = replace(clusters[name], constants=fixed)
    kernels = count(len(plan.clusters), "kernel")
    short = f"{len(dependent)} of {kernels}, of {_mean(plan):.1f} us each"
    text = f"{short}, start while the one before them ends"
    decided = tuple(dependent.get(cluster.name, cluster) for cluster in plan.clusters)
    return replace(plan, clusters=decided).decided(Decision(NOTE, "", Outcome.DONE, text))


def refusal(plan: FusionPlan, info: GraphInfo, wanted: bool | Literal["auto"]) -> str | None:
    """Return why no kernel of a graph is launched dependently; None if some may be."""
    assert plan.setting is not None
    if wanted is False:
        return "dependent_launch=False"
    if info.phase is not Phase.INFERENCE:
        return "the graph is trained, and parameters may be written while it runs"
    device = plan.setting.device
    if not device.dependent_launch:
        return f"{device.name} has none ({device.target}; NVIDIA has it from sm_90 on)"
    if wanted == "auto" and _mean(plan) >= LAUNCH_BOUND_US:
        return f"kernels of {_mean(plan):.1f} us each are not bound by launches"
    return None


def constants(dag: OpDag, static_inputs: Sequence[int]) -> frozenset[str]:
    """Return the inputs whose addresses stay, if no op writes any part of their memory.

    static_inputs: their positions among the placeholders.
    """
    nodes = {node.name: node for node in dag.module.graph.nodes}
    changed = {memory(dag, name) for op in map(dag.op, dag.order) for name in _written(op)}
    values = {name: v for name, node in nodes.items() if isinstance(v := node.meta.get("val"), torch.Tensor)}
    stores = {_storage(values[name]) for name in changed if name in values}
    inputs = [node.name for node in nodes.values() if node.op == "placeholder"]
    fixed = [name for i in static_inputs if (name := inputs[i]) in values and name not in changed]
    return frozenset(name for name in fixed if _storage(values[name]) not in stores)


def _written(op: Op) -> Iterator[str]:
    """Yield the operands that an op may write into: those that its schema names, all if it has no schema."""
    if not isinstance(op.target, OpOverload):
        yield from () if op.target is operator.getitem else op.inputs
        return
    for position in written(op.target):
        argument = op.args[position] if position < len(op.args) else None
        yield from (argument.name,) if isinstance(argument, Ref) else op.inputs


def _storage(value: torch.Tensor) -> int:
    """Return a number that fake tensors have in common if they share memory."""
    return value.untyped_storage()._cdata


def _follows(before: Cluster, cluster: Cluster, dag: OpDag) -> bool:
    """True if a cluster's first kernel comes right behind another's last one, which surely runs."""
    metas = [dag.op(name).outputs[0] for name in (*before.inputs, *before.outputs)]
    runs = all(is_positive(size) for meta in metas for size in meta.shape)
    devices = {dag.op(name).outputs[0].device for c in (before, cluster) for name in c.outputs}
    return runs and len(devices) == 1


def _mean(plan: FusionPlan) -> float:
    return sum(cluster.cost.us for cluster in plan.clusters) / len(plan.clusters)
