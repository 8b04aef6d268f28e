"""Answers to "why are these two not one kernel?", where the two are named as a user would name them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import networkx as nx

from fusion_compiler.errors import UnknownOpError, closest
from fusion_compiler.ir.dag import OpDag
from fusion_compiler.ir.decision import Decision
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ir.plan_data import Cluster
from fusion_compiler.ir.plan_text import count
from fusion_compiler.ops.schema import runs_no_kernel
from fusion_compiler.passes.fuse.source_lookup import NameReference, references
from fusion_compiler.passes.fuse.why import Why

MOST_PAIRS = 16  # pairs of calls that are answered if two pieces of source stand for several
PLACE = re.compile(r"(?P<file>[^:]+\.py):(?P<line>\d+)")


@dataclass(frozen=True)
class Answer:
    """An answer says what became of two ops in one graph; str() is its text, with the graph before it.

    graph: its name, which says whether it is the forward or the backward pass ("graph0.backward"); "" if the
    ops are in different graphs.
    fused: they are one kernel. refused: if they are not, the rule, its reason and the saving; None if one of
    them launches nothing.
    """

    graph: str
    text: str
    fused: bool = False
    refused: Decision | None = None

    def __str__(self) -> str:
        return f"{self.graph}: {self.text}" if self.graph else self.text


def meanings(plan: FusionPlan, name: str) -> list[NameReference]:
    """Return what a name stands for: an op, a cluster, "file.py:12", a module's path or a piece of source,
    which may be several calls."""
    dag = plan.dag
    clusters = {c.name: c.ops for c in plan.clusters}
    computed = [n for n in dag.order if n not in dag.inputs]
    if name in computed:
        return [NameReference(name, (name,))]
    if name in clusters:
        return [NameReference(name, clusters[name])]
    if place := PLACE.fullmatch(name.strip()):
        ops = tuple(n for n in computed if _at(dag, n, place["file"], int(place["line"])))
        return [NameReference(name, ops)] if ops else []
    sources = {n: s for n in computed if (s := dag.op(n).source) is not None}
    module = [n for n, s in sources.items() if s.module == name or s.module.startswith(f"{name}.")]
    return [NameReference(name, tuple(module))] if module else references(dag, name)


def _at(dag: OpDag, name: str, file: str, line: int) -> bool:
    source = dag.op(name).source
    return source is not None and source.line == line and Path(source.file).match(file)


def unknown(name: str, plans: Iterable[FusionPlan]) -> UnknownOpError:
    """Return the error for a name that no plan has."""
    names = {n for plan in plans for n in (*plan.dag.order, *(c.name for c in plan.clusters))}
    return UnknownOpError(name=name, suggestion=closest(name, names))


def answers(why: Why, a: str, b: str) -> list[Answer]:
    """Return every different answer for the ops that two names stand for in one graph, fused pairs first.
    The list is empty if the graph lacks one of the names."""
    first, second = meanings(why.plan, a), meanings(why.plan, b)
    pairs = [(x, y) for x in first for y in second]
    every = [answer for x, y in pairs[:MOST_PAIRS] for answer in _answers(why, x, y)]
    if len(pairs) > MOST_PAIRS:
        text = f"{a} and {b} stand for {len(first)} and {len(second)} calls: give more of their lines"
        every.append(Answer(why.plan.name, text))
    different = {answer.text: answer for answer in every}
    return sorted(different.values(), key=lambda answer: not answer.fused)


def _answers(why: Why, a: NameReference, b: NameReference) -> list[Answer]:
    plan = why.plan
    homes = {name: [u.name for u in why.units.values() if name in u.ops] for name in {*a.ops, *b.ops}}
    mine, theirs = ({unit for n in each.ops for unit in homes[n]} for each in (a, b))
    if not mine or not theirs:
        return [Answer(plan.name, _nothing(why, (a if not mine else b).ops[-1]))]
    both = [c for c in plan.clusters if c.name in mine & theirs]
    if both:
        return [_together(plan, c, a, b) for c in both]
    pairs = [(x, y) for x in sorted(mine) for y in sorted(theirs) if x != y]
    if not pairs:
        return [Answer(plan.name, f"{a.label} and {b.label} are one call: {next(iter(mine))}", fused=True)]
    near = [p for p in pairs if why.graph.has_edge(*p) or why.graph.has_edge(*reversed(p))]
    return [_apart(why, x, y) for x, y in (near or pairs[:1])]


def _nothing(why: Why, name: str) -> str:
    """Return the answer for an op that runs nowhere."""
    op = why.dag.op(name)
    if runs_no_kernel(op.target):
        base = why.tensors.base(name)
        return f"{name} is a view of {base}: it moves nothing, and who reads it reads {base}"
    return f"{name} is in no kernel: nothing that the graph returns needs it"


def _together(plan: FusionPlan, cluster: Cluster, a: NameReference, b: NameReference) -> Answer:
    cost = f"{cluster.name}, {cluster.cost.us:.1f} us ({cluster.cost.bound})"
    calls = count(len(cluster.eager), "call")
    rest = f"eager's {calls} for it take{'s' * (len(cluster.eager) == 1)} {cluster.eager_us:.1f} us"
    if a.sure and b.sure:
        return Answer(plan.name, f"{a.label} and {b.label} are one kernel: {cost}; {rest}", fused=True)
    text = f"some of {a.label} and of {b.label} are in one kernel, which of it cannot be told: {cost}; {rest}"
    return Answer(plan.name, text)


def _apart(why: Why, a: str, b: str) -> Answer:
    if nx.has_path(why.graph, b, a):
        a, b = b, a
    refused = why.refusal(a, b)
    lead = f"{refused.subject} and {refused.other} are apart: {refused.rule}: {refused.reason}"
    if not refused.tensors:
        lead += "; they share no tensor"
    return Answer(why.plan.name, f"{lead}. {saving(refused)}", refused=refused)


def saving(refused: Decision) -> str:
    """Return a sentence on what a refusal costs."""
    if refused.at_most:
        return f"One kernel would save at most {max(0.0, refused.saving):.1f} us."
    if refused.saving > 0:
        return f"One kernel would save {refused.saving:.1f} us."
    return f"One kernel would cost {-refused.saving:.1f} us more."
