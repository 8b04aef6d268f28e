"""What a report consists of: the plans of a model's graphs, their edges, their kernels, what is missed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fusion_compiler.ir.breaks import GraphBreak
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ir.plan_data import Rejected
from fusion_compiler.passes.fuse.answer import saving
from fusion_compiler.passes.fuse.why import Why

MOST_MISSED = 10
Kernels = Mapping[tuple[str, str], tuple[str, str]]


@dataclass(frozen=True)
class Missed:
    """A fusion that was not made, and the graph that it is missing in.

    times: how many pairs are refused alike, in other layers; `refused` is the first of them.
    total_us: what all of these would save.
    """

    graph: str
    refused: Rejected
    times: int
    total_us: float

    def __str__(self) -> str:
        r, times = self.refused, f" x{self.times}" if self.times > 1 else ""
        return f"{r.a} + {r.b}{times}: {r.rule}: {r.reason}. {saving(r)}"


@dataclass(frozen=True)
class ReportData:
    """The plans of a model's graphs, forward and backward, and what they answer.

    model: its name. device: the DeviceSpec planned for. incomplete: why later graphs are missing, "" where
    none are: what follows depends on data. not_whole: why torch.fx cannot trace the model whole, so that
    TorchDynamo captured it; "" where it can. measured: of each graph's units what `profile` measured.
    breaks: the places at which TorchDynamo's graphs end early, and what no graph holds.
    assumed: what the plans hold for and this machine does not show, "" where nothing is assumed.
    """

    model: str
    device: str
    plans: tuple[FusionPlan, ...]
    incomplete: str = ""
    not_whole: str = ""
    emit: Callable[[tuple[FusionPlan, ...]], Kernels] = field(default=lambda plans: {}, repr=False)
    measured: Mapping[str, Any] | None = None
    breaks: tuple[GraphBreak, ...] = ()
    assumed: str = ""

    @property
    def captured_by(self) -> str:
        """ "torch.fx" or "TorchDynamo"."""
        return "TorchDynamo" if self.not_whole else "torch.fx"

    @cached_property
    def questions(self) -> Mapping[str, Why]:
        """What each graph answers, by its name."""
        return {plan.name: Why(plan) for plan in self.plans}

    @cached_property
    def edges(self) -> Mapping[str, tuple[Rejected, ...]]:
        """Of each graph, why neighbours are not one kernel."""
        return {name: why.edges() for name, why in self.questions.items()}

    @cached_property
    def kernels(self) -> Kernels:
        """(graph, cluster) -> (kernel, Triton source); clusters that are the same work share a kernel."""
        return self.emit(self.plans)

    @property
    def missed(self) -> tuple[Missed, ...]:
        """The ten fusions whose absence costs most, or may; what repeats in other layers is one of them."""
        found = [
            Missed(name, same[0], len(same), sum(r.saving_us for r in same))
            for name, edges in self.edges.items()
            for same in _alike(edges)
        ]
        ranked = sorted((m for m in found if m.total_us > 0), key=lambda m: -m.total_us)
        return tuple(ranked[:MOST_MISSED])


def _alike(edges: Sequence[Rejected]) -> list[list[Rejected]]:
    """Refusals in groups that differ only in the numbers within their names.

    Two that share a unit are in different groups: they are alternatives, and their savings do not add up.
    """
    groups: dict[tuple[str, ...], list[list[Rejected]]] = {}
    for r in edges:
        key = tuple(re.sub(r"_\d+\b", "", text) for text in (r.a, r.b, r.rule, r.reason))
        known = groups.setdefault(key, [])
        apart = (same for same in known if not any({r.a, r.b} & {s.a, s.b} for s in same))
        home = next(apart, None)
        if home is None:
            known.append([r])
        else:
            home.append(r)
    return [same for known in groups.values() for same in known]
