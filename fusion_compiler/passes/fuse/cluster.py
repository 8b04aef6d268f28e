"""Group ops into clusters: `candidates` says what a cluster can hold, `search` which of them merge, and
`horizontal` which of these share a launch."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf

import sympy

from fusion_compiler.ir.dag import FEW_ROWS, OpDag
from fusion_compiler.ir.decision import Decision, Decisions, Outcome, noted
from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.layout import is_view
from fusion_compiler.ir.loops import Compute, Load, LoopNest
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ir.plan_data import Call, Cluster, Setting
from fusion_compiler.ir.plan_text import count
from fusion_compiler.ir.reproducible import is_joint
from fusion_compiler.ops.schema import HALVES, short_name
from fusion_compiler.ops.table import spec_of
from fusion_compiler.passes.fuse.candidates import Candidate, Candidates
from fusion_compiler.passes.fuse.cost import contraction_cost, side_by_side, tokens_of
from fusion_compiler.passes.fuse.horizontal import solve
from fusion_compiler.passes.fuse.movement import eager_calls
from fusion_compiler.passes.fuse.search import Search
from fusion_compiler.passes.fuse.why import Why
from fusion_compiler.passes.patterns.match import Match
from fusion_compiler.patterns import DEFAULT_PATTERNS


def cluster_name(dag: OpDag, ops: tuple[str, ...], matches: Sequence[Match] = (), limit: int = 6) -> str:
    """Return a name that says what the kernel does."""
    short = parts_of(dag, ops, matches)
    return "_".join(short if len(short) <= limit else [*short[: limit - 1], "etc"])


def parts_of(dag: OpDag, ops: tuple[str, ...], matches: Sequence[Match] = ()) -> list[str]:
    """Return the names of what a kernel does, in order: its whole patterns, and its other ops."""
    skip = {"cast", "clone", "_to_copy", "full", "scalar_tensor", "where", "uniform"}
    first = {next(n for n in ops if n in set(m.ops)): m.name for m in matches}
    covered = {n for m in matches for n in m.ops} - first.keys()
    names = [first.get(n) or short_name(dag.op(n).target).strip("_") for n in ops if n not in covered]
    names = [n for n in names if n not in skip] or names
    return [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]


def plan(
    name: str,
    dag: OpDag,
    device: DeviceSpec,
    hints: Mapping[sympy.Symbol, int],
    *,
    numerics: str = "float32",
    backward: bool = False,
    matches: Sequence[Match] = (),
) -> FusionPlan:
    """Decide what is fused in one graph. The function is pure: the plan is all that comes out.

    hints: the sizes that symbols had. backward: whether autograd made the graph.
    matches: the matches of patterns in the graph.
    """
    setting = Setting(device, hints, numerics, tuple(matches))
    return assembled(name, dag, solve(dag, setting), setting, backward=backward)


def assembled(
    name: str,
    dag: OpDag,
    solved: tuple[Search, list[list[int]]],
    setting: Setting,
    *,
    backward: bool,
    products: Decisions = (),
) -> FusionPlan:
    """Return the plan of what `solve` returns. products: what was decided about products with many rows."""
    search, groups = solved
    pool = search.pool
    clusters = clusters_of(search, groups)
    if setting.numerics != "eager":
        clusters = _mark_single_producers(clusters, dag)
    calls = eager_calls(dag, backward, setting.device, setting.hints)
    eager = _by_cluster(calls, clusters)
    clusters = [replace(c, eager=tuple(eager.get(c.name, ()))) for c in clusters]
    held = {op for cluster in clusters for op in cluster.ops}
    left = (call for call in pool.leftovers if call.subject not in held)
    early = pool.effort.note
    ended = () if early is None else (noted("search", f"ended before all was tried: {early}"),)
    taken = tuple(d for d in products if not d.other)
    decisions = (*_rounded(dag), *_phase(dag, clusters, setting), *ended, *taken, *left)
    pairs = tuple(d for d in products if d.other)
    device = setting.device.name
    plan = FusionPlan(name, dag, tuple(clusters), device, calls, (*decisions, *pairs), setting, solved)
    return replace(plan, decisions=(*decisions, *_refused_hints(search, clusters), *Why(plan).edges()))


def _refused_hints(search: Search, clusters: Sequence[Cluster]) -> Decisions:
    """Return why matches of the user's hints are not one cluster."""
    return tuple(
        Decision(match.name, match.root, Outcome.REFUSED, reason)
        for match, reason in search.refused_hints
        if match.pattern not in DEFAULT_PATTERNS and not any({*match.ops} <= {*c.ops} for c in clusters)
    )


def _mark_single_producers(clusters: Sequence[Cluster], dag: OpDag) -> list[Cluster]:
    """Return the clusters, with nodes marked that compute a reproducible value in one cluster alone."""
    times = Counter(name for cluster in clusters for name in cluster.ops)
    again = is_joint(dag.module.graph)

    def freed(loops: LoopNest) -> LoopNest:
        nodes = (
            replace(n, single_producer=True) if isinstance(n, Compute) and n.reproducible else n
            for n in loops.nodes
        )
        return replace(loops, nodes=tuple(nodes))

    def marked(c: Cluster) -> Cluster:
        if again or any(times[name] > 1 for name in c.ops if dag.op(name).reproducible):
            return c
        return replace(c, loops=freed(c.loops), horizontal=tuple(map(freed, c.horizontal)))

    return [marked(c) for c in clusters]


def _rounded(dag: OpDag) -> Decisions:
    """Return the plan's note on values that are rounded because a discontinuous operation depends on
    them."""
    ops = [dag.op(name) for name in dag.order]
    computed = (op for op in ops if op.reproducible and spec_of(op.target) is not None and not is_view(op))
    rounded = [op.name for op in computed if op.outputs[0].dtype in HALVES]
    if not rounded:
        return ()
    names = ", ".join(rounded[:4]) + (", ..." if len(rounded) > 4 else "")
    values = count(len(rounded), "16-bit value")
    return (noted("reproducible", f"{values} rounded where computed, for comparisons: {names}"),)


def _phase(dag: OpDag, clusters: Sequence[Cluster], setting: Setting) -> Decisions:
    """Return the plan's note on a graph whose products of few tokens take most of its products' time."""
    tokens = {op.name: tokens_of(op, setting.hints) for op in map(dag.op, dag.order)}
    every = [dag.op(name) for name, number in tokens.items() if number < inf]
    few = [op for op in every if tokens[op.name] <= FEW_ROWS]
    us = {op.name: contraction_cost(op, setting.device, setting.hints).us for op in every}
    if 2 * sum(us[op.name] for op in few) <= sum(us.values()):
        return ()
    rows = sorted({int(tokens[op.name]) for op in few})
    fused = len({n for c in clusters for n in c.ops}.intersection(op.name for op in few))
    if not fused:
        return ()
    span = count(rows[0], "row") if len(rows) == 1 else f"{rows[0]} to {rows[-1]} rows"
    if not all(isinstance(size, int) for op in few for size in op.outputs[0].shape[-2:]):
        span += " now"  # the note "row ranges" says how many they may be
    products = count(len(few), "product")
    text = f"decode: {products} of {span}, as fast as matrices are read; {fused} in clusters"
    return (noted("phase", text),)


def clusters_of(search: Search, groups: Sequence[Sequence[int]]) -> list[Cluster]:
    """Return a cluster for each group of candidates, given by their numbers, with a name of its own."""
    pool, clusters = search.pool, list[Cluster]()
    taken = set(pool.dag.order)
    for numbers in groups:
        candidates = [search.candidates[n] for n in numbers]
        ops = pool.ordered({n for p in candidates for n in p.ops})
        held = search.held(ops)
        base = cluster_name(pool.dag, ops, held)
        names = itertools.chain((base,), (f"{base}_{i}" for i in itertools.count(2)))
        name = next(name for name in names if name not in taken)
        taken.add(name)
        pattern = ", ".join(dict.fromkeys(m.name for m in held)) or None
        clusters.append(cluster_of(name, ops, pattern, candidates, pool))
    return clusters


def cluster_of(
    name: str, ops: tuple[str, ...], pattern: str | None, candidates: list[Candidate], pool: Candidates
) -> Cluster:
    """Return the cluster of candidates that share a launch."""
    nests, bases = tuple(p.loops for p in candidates), pool.bases
    loaded = dict.fromkeys(n.buffer for loops in nests for n in loops.nodes if isinstance(n, Load))
    cost = side_by_side([p.cost for p in candidates], pool.device)
    outputs = tuple(n for p in candidates for n in p.outputs)
    inputs = tuple(loaded | dict.fromkeys(bases[n] for n in outputs if n in bases))
    return Cluster(name, ops, inputs, outputs, nests[0], cost, (), pattern=pattern, horizontal=nests[1:])


def _by_cluster(calls: Sequence[Call], clusters: Sequence[Cluster]) -> dict[str, list[Call]]:
    """Assign each call of eager to the cluster that stores its result, else to the first that computes it."""
    computes = {name: c.name for c in reversed(clusters) for name in c.ops}
    stores = {name: c.name for c in clusters for name in c.outputs}
    by_cluster: dict[str, list[Call]] = {}
    for call in calls:
        homes = (where[n] for where in (stores, computes) for n in reversed(call.ops) if n in where)
        home = next(homes, None)
        if home is not None:
            by_cluster.setdefault(home, []).append(call)
    return by_cluster
