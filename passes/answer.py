"""An answer to "why are these two not one kernel?", where the two are named as a user would name them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import networkx as nx

from fusion_compiler.dag import OpDag
from fusion_compiler.errors import UnknownOpError, closest
from fusion_compiler.passes.why import Why
from fusion_compiler.plan import Cluster, FusionPlan, Rejected
from fusion_compiler.schema import is_view

PLACE = re.compile(r"(?P<file>[^:]+\.py):(?P<line>\d+)")


@dataclass(frozen=True)
class Answer:
    """What became of two ops in one graph. str() is the answer.

    fused: they are one kernel. refused: where they are not, the rule, its reason and the saving; None where
    one of them launches nothing.
    """

    graph: str
    text: str
    fused: bool = False
    refused: Rejected | None = None

    def __str__(self) -> str:
        return self.text


def ops_called(plan: FusionPlan, name: str) -> tuple[str, ...]:
    """What a name stands for: an op, a cluster, "file.py:12", a module's path or a piece of source."""
    dag = plan.dag
    clusters = {c.name: c.ops for c in plan.clusters}
    own = [n for n in dag.order if n not in dag.inputs]
    if name in own:
        return (name,)
    if name in clusters:
        return clusters[name]
    if place := PLACE.fullmatch(name.strip()):
        return tuple(n for n in own if _at(dag, n, place["file"], int(place["line"])))
    sources = {n: s for n in own if (s := dag.op(n).source) is not None}
    module = [n for n, s in sources.items() if s.module == name or s.module.startswith(f"{name}.")]
    return tuple(module) or tuple(n for n, s in sources.items() if name in s.code)


def _at(dag: OpDag, name: str, file: str, line: int) -> bool:
    source = dag.op(name).source
    return source is not None and source.line == line and Path(source.file).match(file)


def unknown(name: str, plans: Iterable[FusionPlan]) -> UnknownOpError:
    """The error for a name that no plan has."""
    known = {n for plan in plans for n in (*plan.dag.order, *(c.name for c in plan.clusters))}
    return UnknownOpError(name=name, suggestion=closest(name, known))


def answers(why: Why, a: str, b: str) -> list[Answer]:
    """Every different answer for the ops that two names stand for, in one graph; empty where it lacks one."""
    plan = why.plan
    first, second = ops_called(plan, a), ops_called(plan, b)
    if not first or not second:
        return []
    homes = {name: [u.name for u in why.units.values() if name in u.ops] for name in {*first, *second}}
    mine, theirs = ({unit for n in names for unit in homes[n]} for names in (first, second))
    if not mine or not theirs:
        name = (first if not mine else second)[-1]
        return [Answer(plan.name, _nothing(why, name))]
    both = [c for c in plan.clusters if c.name in mine & theirs]
    if both:
        return [Answer(plan.name, _together(c, a, b), fused=True) for c in both]
    pairs = [(x, y) for x in sorted(mine) for y in sorted(theirs) if x != y]
    if not pairs:
        return [Answer(plan.name, f"{a} and {b} are one call: {next(iter(mine))}", fused=True)]
    near = [p for p in pairs if why.graph.has_edge(*p) or why.graph.has_edge(*reversed(p))]
    return [_apart(why, x, y) for x, y in (near or pairs[:1])]


def _nothing(why: Why, name: str) -> str:
    """Why an op runs nowhere."""
    op = why.dag.op(name)
    if is_view(op.target):
        base = why.tensors.base(name)
        return f"{name} is a view of {base}: it moves nothing, and who reads it reads {base}"
    return f"{name} is in no kernel: nothing that the graph returns needs it"


def _together(cluster: Cluster, a: str, b: str) -> str:
    rest = f"; eager's {len(cluster.eager)} calls for it take {cluster.eager_us:.1f} us"
    return (
        f"{a} and {b} are one kernel: {cluster.name}, {cluster.cost.us:.1f} us ({cluster.cost.bound}){rest}"
    )


def _apart(why: Why, a: str, b: str) -> Answer:
    if nx.has_path(why.graph, b, a):
        a, b = b, a
    refused = why.refusal(a, b)
    lead = f"{a} and {b} are apart: {refused.rule}: {refused.reason}"
    if not refused.tensors:
        lead += "; they share no tensor"
    return Answer(why.plan.name, f"{lead}. {saving(refused)}", refused=refused)


def saving(refused: Rejected) -> str:
    """A sentence on what a refusal costs."""
    if refused.at_most:
        return f"One kernel would save at most {max(0.0, refused.saving_us):.1f} us."
    if refused.saving_us > 0:
        return f"One kernel would save {refused.saving_us:.1f} us."
    return f"One kernel would cost {-refused.saving_us:.1f} us more."
