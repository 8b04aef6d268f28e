"""Explain for a finished plan why any two of its units are not one kernel, and what that costs.

Every answer is about the final clusters, and not about those that the search had while they grew. A plan
holds the answers about neighbours. An answer about another pair takes the finished search, which is run again
for the plan's `Setting` if the plan no longer holds it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import networkx as nx

from fusion_compiler.ir.dag import Op
from fusion_compiler.ir.decision import Decision, Decisions, apart
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ir.plan_data import Cluster, Cost
from fusion_compiler.ops.own.recurrent import LAYERS
from fusion_compiler.ops.schema import runs_no_kernel, short_name
from fusion_compiler.ops.table import Kind
from fusion_compiler.passes.fuse.candidates import Candidate
from fusion_compiler.passes.fuse.cost import contraction_cost
from fusion_compiler.passes.fuse.horizontal import solve
from fusion_compiler.passes.fuse.movement import Tensors
from fusion_compiler.passes.fuse.products import retaken_groups
from fusion_compiler.passes.fuse.reach import Reach, bits
from fusion_compiler.passes.fuse.search import Search, one_or_apart
from fusion_compiler.passes.lower.space import Illegal

EPILOGUES = frozenset({"add", "relu", "gelu", "cast"})  # ops that cuBLAS can apply to a product's result

MOST_SIBLINGS = 8  # readers of one tensor after each that `edges` tries with it: a graph may have thousands

IN_WORDS = {"clone": "a copy in another order", "uniform": "dropout"}


@dataclass(frozen=True)
class Unit:
    """A unit runs as one: it is a cluster, or one op as a call.

    outputs: the ops whose results it stores.
    """

    name: str
    ops: tuple[str, ...]
    outputs: tuple[str, ...]
    cluster: Cluster | None = None


class UnitReach(Reach):
    """UnitReach is a Reach by name. number: each unit's number, in topological order."""

    def __init__(self, graph: nx.DiGraph[str]) -> None:
        self.names = list(nx.topological_sort(graph))
        self.number = {name: i for i, name in enumerate(self.names)}
        before = {n: graph.predecessors(n) for n in self.names}
        super().__init__({self.number[n]: {self.number[s] for s in before[n]} for n in self.names})

    def between(self, a: str, b: str) -> list[str]:
        """Return the units that lie on a path from one to the other."""
        return [self.names[i] for i in bits(self.below[self.number[a]] & self.above[self.number[b]])]


class Why:
    """Answer questions about a plan. Raises ValueError for a plan that was not made by `plan()`."""

    def __init__(self, plan: FusionPlan) -> None:
        if plan.setting is None:
            raise ValueError(f"plan {plan.name} does not record the device that it was decided for")
        self.plan, self.dag, self.setting = plan, plan.dag, plan.setting
        self.tensors = Tensors(plan.dag, self.setting.device, self.setting.hints)
        self.reasons = {left.subject: left.reason for left in plan.leftovers}
        self.refused = {(d.subject, d.other): d for d in plan.refusals}

    @cached_property
    def units(self) -> dict[str, Unit]:
        """Return the units by name."""
        units = {c.name: Unit(c.name, c.ops, c.outputs, c) for c in self.plan.clusters}
        held = {op for unit in units.values() for op in unit.ops}
        calls = [n for n in self.dag.order if n not in held and n not in self.dag.inputs]
        for name in calls:
            if name in self.reasons and not runs_no_kernel(self.dag.op(name).target):
                units[name] = Unit(name, (name,), (name,))
        return units

    @cached_property
    def solved(self) -> tuple[Search, dict[str, list[int]]]:
        """Return the finished search, and the numbers of each cluster's candidates in it."""
        search, groups = self.plan.solved or self._solved_again()
        numbers: dict[str, list[int]] = {}
        for cluster, group in zip(self.plan.clusters, groups, strict=True):
            assert cluster.outputs == tuple(o for n in group for o in search.candidates[n].outputs)
            numbers[cluster.name] = group
        return search, numbers

    def _solved_again(self) -> tuple[Search, list[list[int]]]:
        search, groups = solve(self.dag, self.setting)
        return search, retaken_groups(search, groups, {op for c in self.plan.clusters for op in c.ops})

    def candidates(self, *units: Unit) -> list[Candidate]:
        """Return the independent programs that clusters hold."""
        search, numbers = self.solved
        return [search.candidates[n] for unit in units for n in numbers[unit.name]]

    @cached_property
    def graph(self) -> nx.DiGraph[str]:
        """Return the units with an edge to each reader of their results; its `tensors` are op names."""
        stores = {name: unit.name for unit in self.units.values() for name in unit.outputs}
        graph: nx.DiGraph[str] = nx.DiGraph()
        graph.add_nodes_from(self.units)
        for unit in self.units.values():
            for name in self.reads(unit):
                maker = stores.get(name)
                if maker is not None and maker != unit.name:
                    tensors: dict[str, None] = graph.edges.get((maker, unit.name), {}).get("tensors", {})
                    graph.add_edge(maker, unit.name, tensors={**tensors, name: None})
        return graph

    def reads(self, unit: Unit) -> list[str]:
        """Return the tensors that a unit reads from memory, by the ops that store them."""
        if unit.cluster is not None:
            return list(dict.fromkeys(map(self.tensors.base, unit.cluster.inputs)))
        return list(dict.fromkeys(map(self.tensors.base, self.dag.op(unit.name).inputs)))

    @cached_property
    def order(self) -> list[str]:
        """Return the units in an order in which they can run, close to the graph's."""
        position = {name: i for i, name in enumerate(self.dag.order)}
        last = {unit.name: max(position[op] for op in unit.ops) for unit in self.units.values()}
        return list(nx.lexicographical_topological_sort(self.graph, key=last.__getitem__))

    def edges(self) -> Decisions:
        """Return why neighbours are not one kernel: for each edge of a cluster, and for each two clusters
        that read one tensor and could run at once. The refusal that costs most comes first."""
        refusals = [
            self.refusal(a, b)
            for a, b in self.graph.edges
            if self.units[a].cluster is not None or self.units[b].cluster is not None
        ]
        refusals += [self.refusal(a, b) for a, b in self._siblings()]
        return tuple(sorted(refusals, key=lambda r: -r.saving))

    def _siblings(self) -> list[tuple[str, str]]:
        clusters = [u for u in self.units.values() if u.cluster is not None]
        readers: dict[str, list[str]] = {}
        for unit in clusters:
            for name in self.reads(unit):
                if self.dag.op(name).outputs:
                    readers.setdefault(name, []).append(unit.name)
        pairs = {
            (a, b): None
            for names in readers.values()
            for i, a in enumerate(names)
            for b in names[i + 1 : i + 1 + MOST_SIBLINGS]
        }
        number = self.reach.number
        return [(a, b) for a, b in pairs if not self.reach.path(number[a], number[b])]

    @cached_property
    def reach(self) -> UnitReach:
        """Return the ancestors and descendants of the units."""
        return UnitReach(self.graph)

    def between(self, a: str, b: str) -> list[str]:
        """Return a shortest path from one unit to the other through a third one; empty if there is none."""
        for first, last in ((a, b), (b, a)):
            middle = self.reach.between(first, last)
            if middle:
                ways = nx.restricted_view(self.graph.subgraph({first, last, *middle}), [], [(first, last)])
                return list(nx.shortest_path(ways, first, last))
        return []

    def refusal(self, a: str, b: str) -> Decision:
        """Return why two units are not one kernel. Raises KeyError for a name that no unit has."""
        decided = self.refused.get((a, b)) or self.refused.get((b, a))
        if decided is not None and decided.us is not None:
            return decided
        first, second = self.units[a], self.units[b]
        tensors = self.shared(first, second)
        bound = self.bound(first, second)
        if decided is not None:
            return apart(a, b, decided.rule, decided.reason, bound, True, tensors)
        calls = [u for u in (first, second) if u.cluster is None]
        if calls:
            return apart(a, b, *self._call_reason(second, calls), bound, True, tensors)
        if way := self.between(a, b):
            steps = ", ".join(f"{y} needs {x}" for x, y in itertools.pairwise(way))
            reason = f"a path leaves them and comes back: {steps}"
            return apart(a, b, "convex", reason, bound, True, tensors)
        pool, candidates = self.solved[0].pool, self.candidates(first, second)
        wanted = set(tensors)  # a unit may hold several independent programs
        touching = [c for c in candidates if wanted & {*c.outputs, *pool.read_by(c)}]
        try:
            union = pool.union(touching or candidates)
        except Illegal as error:
            return apart(a, b, error.rule, error.reason, bound, True, tensors)
        merged = [p for p in candidates if set(p.ops) <= set(union.ops)]
        gain = sum(p.cost.us for p in merged) - union.cost.us
        reason = one_or_apart(merged, union)
        if gain > 0:
            return apart(a, b, "search", f"{reason}: the search did not come to it", gain, False, tensors)
        return apart(a, b, "cost", reason, gain, False, tensors)

    def _call_reason(self, b: Unit, calls: Sequence[Unit]) -> tuple[str, str]:
        """Return (rule, reason) of a pair with one or two ATen calls."""
        call = calls[0]
        op = self.dag.op(call.name)
        name = short_name(op.target).strip("_")
        if op.kind is not Kind.CONTRACTION:
            return "eager", f"{call.name} stays an ATen call: {self.reasons[call.name]}"
        if len(calls) == 2:
            return "contraction", "both are library calls"
        if call is b:
            return "contraction", f"{name} is a library call, which reads its operands from memory"
        return "contraction", f"{name} is a library call: {_epilogue(name, [self.dag.op(n) for n in b.ops])}"

    def shared(self, a: Unit, b: Unit) -> tuple[str, ...]:
        """Return the tensors that one unit stores and the other reads, or else those that both read."""
        return tuple(dict.fromkeys(self.passed(a, b) or self.read_by_both(a, b)))

    def passed(self, a: Unit, b: Unit) -> list[str]:
        """Return the tensors that one unit stores and the other reads."""
        mine, theirs = self.reads(a), self.reads(b)
        return [n for n in a.outputs if n in theirs] + [n for n in b.outputs if n in mine]

    def read_by_both(self, a: Unit, b: Unit) -> list[str]:
        """Return the tensors that both units read."""
        theirs = self.reads(b)
        return [n for n in self.reads(a) if n in theirs and self.dag.op(n).outputs]

    def cost(self, unit: Unit) -> Cost:
        return unit.cluster.cost if unit.cluster is not None else cost_of_call(self.plan, unit.name)

    def bound(self, a: Unit, b: Unit) -> float:
        """Return what one kernel of both could save at most: it moves what they do not share as fast as a
        copy, and computes no faster than either."""
        costs = (self.cost(a), self.cost(b))
        if not all(cost.us for cost in costs):
            return 0.0
        device = self.setting.device
        shared = dict.fromkeys(self.passed(a, b) + self.read_by_both(a, b))
        rest = sum(cost.moved for cost in costs) - sum(self._saved_bytes(name, a, b) for name in shared)
        computing = (cost.us for cost in costs if cost.bound == "arithmetic")
        best = max(device.launch_us, rest / device.copy_bandwidth * 1e6, *computing)
        return max(0.0, sum(cost.us for cost in costs) - best)

    def _saved_bytes(self, name: str, a: Unit, b: Unit) -> int:
        size = self.tensors.bytes(name)
        read = 0 if self.tensors.near(name) else size
        if name not in a.outputs and name not in b.outputs:
            return read
        maker = a if name in a.outputs else b
        edges = self.graph.out_edges(maker.name, data="tensors")
        readers = {reader for _, reader, tensors in edges if name in tensors}
        return read + (0 if name in self.returned or readers - {a.name, b.name} else size)

    @cached_property
    def returned(self) -> frozenset[str]:
        """Return the ops whose results leave the graph."""
        return frozenset(map(self.tensors.base, self.dag.outputs))


def cost_of_call(plan: FusionPlan, name: str) -> Cost:
    """Return the cost of an op that stays an ATen call. Raises ValueError for a plan not made by `plan()`."""
    if plan.setting is None:
        raise ValueError(f"plan {plan.name} does not record the device that it was decided for")
    op = plan.dag.op(name)
    if op.kind is Kind.CONTRACTION:
        return contraction_cost(op, plan.setting.device, plan.setting.hints)
    call = next((c for c in plan.calls if name in c.outputs), None)
    return call.cost if call is not None else Cost(0.0, 0, 0, 0, "launch")


def _epilogue(name: str, ops: Sequence[Op]) -> str:
    if name in LAYERS:
        return "each step of a recurrent layer needs the one before, and PyTorch's library runs all of them"
    if "attention" in name:
        return "attention kernels take a mask and a scale, and nothing after the second product"
    if "convolution" in name or "depthwise" in name:
        return "a convolution takes a bias; in inference of 16 bits a sum and ReLU; nothing after that"
    if {op.kind for op in ops} & {Kind.REDUCTION, Kind.NORMALIZATION, Kind.SCAN}:
        return "the epilogues of cuBLAS reduce nothing but a bias gradient"
    others = [short_name(op.target) for op in ops if not runs_no_kernel(op.target)]
    if set(others) <= EPILOGUES:
        return "cuBLAS could add a matrix or a bias and apply ReLU or GELU, which this compiler leaves alone"
    first = next(n for n in others if n not in EPILOGUES)
    return f"cuBLAS's epilogues are bias, ReLU, GELU and their gradients, none {IN_WORDS.get(first, first)}"
