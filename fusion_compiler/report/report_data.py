"""The data of a report: the plans of a model's graphs, their edges, their kernels, and missed fusions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fusion_compiler.compiler.runners import emit_cluster
from fusion_compiler.ir.breaks import GraphBreak
from fusion_compiler.ir.canonical import Canonical, canonical
from fusion_compiler.ir.decision import Decision, Decisions
from fusion_compiler.ir.device import device_spec
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ir.plan_text import alike
from fusion_compiler.passes.fuse.why import Why

MOST_MISSED = 10
Kernels = Mapping[tuple[str, str], tuple[str, str]]


@dataclass(frozen=True)
class Missed:
    """A `Missed` is a fusion that was refused. graph: the name of its graph.

    times: how many pairs are refused alike, in other layers; `refused` is the first of them.
    total_us: the time that all of these would save. others: how many pairs are alike as well and share a unit
    with one of these: alternatives, whose savings do not add up.
    """

    graph: str
    refused: Decision
    times: int
    total_us: float
    others: int = 0


@dataclass(frozen=True)
class ReportData:
    """The data of a report are the plans of a model's graphs, forward and backward, and their answers.

    model: its name. device: the DeviceSpec of the plans. incomplete: why later graphs are missing (they
    depend on data), "" if none are. not_whole: why torch.fx cannot trace the model whole, so that TorchDynamo
    captured it; "" if it can. measured: the times of each graph's units from `profile`.
    breaks: the places at which TorchDynamo's graphs end early, and the code that no graph holds.
    assumed: the conditions of the plans that this machine does not show, "" if nothing is assumed.
    """

    model: str
    device: str
    plans: tuple[FusionPlan, ...]
    incomplete: str = ""
    not_whole: str = ""
    measured: Mapping[str, Any] | None = None
    breaks: tuple[GraphBreak, ...] = ()
    assumed: str = ""

    @property
    def captured_by(self) -> str:
        """Return "torch.fx" or "TorchDynamo"."""
        return "TorchDynamo" if self.not_whole else "torch.fx"

    @cached_property
    def questions(self) -> Mapping[str, Why]:
        """Return the object that answers questions about each graph, by the graph's name."""
        return {plan.name: Why(plan) for plan in self.plans}

    @property
    def edges(self) -> Mapping[str, Decisions]:
        """Return, for each graph, the reasons why neighbours are not one kernel."""
        return {plan.name: plan.refusals for plan in self.plans}

    @cached_property
    def kernels(self) -> Kernels:
        """Return (graph, cluster) -> (kernel, Triton source); the same work is emitted once."""
        emitted: dict[Canonical, tuple[str, str]] = {}
        kernels_by_cluster: dict[tuple[str, str], tuple[str, str]] = {}
        for plan in self.plans:
            for cluster in plan.clusters:
                key = canonical(cluster, plan.dag)
                if key not in emitted:
                    kernels = emit_cluster(key, cluster, plan.dag, device_spec(plan.device))[0].kernels
                    taken = {name for name, _ in emitted.values()}
                    name = f"{plan.name}.{cluster.name}" if cluster.name in taken else cluster.name
                    emitted[key] = name, "\n\n".join(kernel.source for kernel in kernels)
                kernels_by_cluster[plan.name, cluster.name] = emitted[key]
        return kernels_by_cluster

    @property
    def missed(self) -> tuple[Missed, ...]:
        """Return the ten missed fusions that cost most, or may. Pairs that are alike are one family, and one
        row."""
        candidates: list[Missed] = []
        for name, edges in self.edges.items():
            for family in alike(edges):
                most = max(family, key=lambda same: sum(r.saving for r in same))
                total, others = sum(r.saving for r in most), sum(map(len, family)) - len(most)
                candidates.append(Missed(name, most[0], len(most), total, others))
        ranked = sorted((m for m in candidates if m.total_us > 0), key=lambda m: -m.total_us)
        return tuple(ranked[:MOST_MISSED])
