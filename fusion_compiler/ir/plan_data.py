"""Describe what a fusion plan consists of: clusters, and the decisions about the graph, pairs and calls."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import sympy

from fusion_compiler.ir.dag import OpDag, Source
from fusion_compiler.ir.decision import Decision, Decisions, texts_of
from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.loops import LoopNest


@dataclass(frozen=True)
class Cost:
    """A cost is a prediction for one cluster on one device.

    bytes_read, bytes_written: device memory traffic after L2. us: predicted time.
    bound: "memory", "arithmetic", "launch" or "latency".
    """

    us: float
    bytes_read: int
    bytes_written: int
    flops: int
    bound: str

    @property
    def moved(self) -> int:
        """Return the bytes read and written."""
        return self.bytes_read + self.bytes_written


@dataclass(frozen=True)
class Call:
    """A call is one ATen call as eager makes it, and the ops of the graph that are its pieces.

    name: of the op that holds its (last) result. kind: its class: "contraction", "normalization",
    "element-wise", "random", "opaque" or "layout". inputs, outputs: the tensors that it reads and stores, by
    op name. words_read, words_written: their elements. flops: of floating point, random numbers aside.
    """

    name: str
    target: str
    kind: str
    ops: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    words_read: int
    words_written: int
    flops: int
    cost: Cost
    source: Source | None = None


@dataclass(frozen=True)
class Cluster:
    """A cluster has the ops that become one kernel. `ops` in topological order; `inputs` and `outputs` are op
    names.

    horizontal: further loop nests that share the launch, independent of `loops` and of each other.
    reuses: its results that are written over an input which nobody reads any more, each with that one.
    constants: where it is launched dependently (`passes.fuse.dependent`), those of its inputs that nothing in
        the graph writes, at addresses that stay; None where its launch is a plain one.
    """

    name: str
    ops: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    loops: LoopNest
    cost: Cost
    eager: tuple[Call, ...]  # what eager would run for the same ops
    pattern: str | None = None
    horizontal: tuple[LoopNest, ...] = ()
    constants: tuple[str, ...] | None = None
    reuses: tuple[tuple[str, str], ...] = ()

    @property
    def beside(self) -> tuple[LoopNest, ...]:
        """Return `horizontal` by its old name, which goes with version 0.2."""
        warnings.warn("Cluster.beside is now Cluster.horizontal", DeprecationWarning, stacklevel=2)
        return self.horizontal

    @property
    def nests(self) -> tuple[LoopNest, ...]:
        return (self.loops, *self.horizontal)

    @property
    def eager_us(self) -> float:
        """Return the cost of eager's calls for the same ops."""
        return sum(call.cost.us for call in self.eager)


@dataclass(frozen=True)
class Setting:
    """A setting says for what a graph's plan was decided, so that it can be decided again.

    hints: the sizes that symbols had. matches: where patterns were found (`passes.patterns.match.Match`).
    """

    device: DeviceSpec
    hints: Mapping[sympy.Symbol, int]
    numerics: str = "float32"
    matches: tuple[Any, ...] = ()


@dataclass(frozen=True)
class PlanData:
    """The object has all decisions for one graph, as data. `dag` is the graph for which they were made.

    calls: what eager would run for the whole graph. decisions: those about the whole graph, of passes, of the
    planner and of the runtime; those about pairs that are not one kernel; those about ops that stay calls.
    solved: the result of `passes.fuse.horizontal.solve`, for questions that are asked next; None if it was
    released, since it is large.
    """

    name: str
    dag: OpDag
    clusters: tuple[Cluster, ...]
    device: str
    calls: tuple[Call, ...] = ()
    decisions: Decisions = ()
    setting: Setting | None = None
    solved: Any = field(default=None, repr=False, compare=False)

    @property
    def phase(self) -> str:
        """Return "forward", "backward" or "inference", which the plan's name has behind the graph's. A second
        form of a backward graph, with fewer gradients, has a number there."""
        return self.name.partition(".")[2].partition(".")[0].rstrip("0123456789")

    @property
    def refusals(self) -> Decisions:
        """Return why pairs of clusters and calls are not one kernel, those first that would save most."""
        return tuple(d for d in self.decisions if d.other)

    @property
    def leftovers(self) -> Decisions:
        """Return why ops stay ATen calls."""
        return tuple(d for d in self.decisions if d.target)

    @property
    def about_graph(self) -> Decisions:
        """Return the decisions of passes, of the planner and of the runtime."""
        return tuple(d for d in self.decisions if not d.other and not d.target)

    @property
    def notes(self) -> dict[str, str]:
        """Return the decision of each rule about the graph, as text."""
        return texts_of(self.about_graph)

    def decision(self, rule: str) -> Decision | None:
        """Return the first decision of a rule about the graph, or None if it decided nothing."""
        return next((d for d in self.about_graph if d.rule == rule), None)

    def decided(self, *decisions: Decision) -> Self:
        """Return the plan with these decisions in place of earlier ones of their rules about the graph."""
        replaced = {d.rule for d in decisions}
        kept = (d for d in self.decisions if d.other or d.target or d.rule not in replaced)
        return replace(self, decisions=(*kept, *decisions))
