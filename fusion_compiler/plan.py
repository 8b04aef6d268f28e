"""The fusion plan: clusters, the refusals between them, and what stays an ATen call."""

from __future__ import annotations

from dataclasses import dataclass, field

from fusion_compiler import report
from fusion_compiler.dag import OpDag, Source
from fusion_compiler.loops import LoopNest


@dataclass(frozen=True)
class Rejected:
    """Why two things did not become one cluster: the rule that spoke first and its numbers."""

    a: str
    b: str
    rule: str
    reason: str
    saving_us: float = 0.0  # what merging would have saved (negative: cost)


@dataclass(frozen=True)
class Leftover:
    """An op that stays an ATen call, and why."""

    op: str
    target: str
    kind: str
    reason: str
    source: Source | None = None


@dataclass(frozen=True)
class Cost:
    """A prediction for one cluster on one device.

    bytes_read, bytes_written: device memory traffic after L2. us: predicted time.
    bound: "memory", "arithmetic", "launch" or "latency".
    """

    us: float
    bytes_read: int
    bytes_written: int
    flops: int
    bound: str


@dataclass(frozen=True)
class Cluster:
    """Ops that become one kernel. `ops` in topological order; `inputs` and `outputs` are op names.

    beside: further tile programs that share the launch, independent of `loops` and of each other.
    """

    name: str
    ops: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    loops: LoopNest
    cost: Cost
    unfused_us: float  # the same ops, one kernel each
    pattern: str | None = None
    beside: tuple[LoopNest, ...] = ()

    @property
    def nests(self) -> tuple[LoopNest, ...]:
        return (self.loops, *self.beside)


@dataclass(frozen=True)
class FusionPlan:
    """All decisions for one graph. `dag` is the graph that they were made for."""

    name: str
    dag: OpDag
    clusters: tuple[Cluster, ...]
    leftovers: tuple[Leftover, ...]
    rejections: tuple[Rejected, ...]
    device: str
    notes: dict[str, str] = field(default_factory=dict[str, str])

    def __str__(self) -> str:
        """What to show a colleague: totals, clusters, library calls, eager ops, largest rejections."""
        return report.format_plan(self)

    def json(self) -> dict[str, object]:
        """The plan as plain data; `report.plan_json` documents the schema."""
        return report.plan_json(self)
