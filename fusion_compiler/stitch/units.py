"""List what runs as one in a plan: its clusters and the ops that stay calls, and their names in profilers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fusion_compiler.ir.dag import OpDag, Source
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ir.plan_text import modules_of, signature
from fusion_compiler.ops.table import Kind
from fusion_compiler.stitch.order import ordered


@dataclass(frozen=True)
class Unit:
    """A unit is one launch or call of a graph.

    sort: "cluster", "library" (a contraction) or "eager". ops: in order; the last makes its result.
    source: the user's line behind most of it. modules: the user's modules behind it, layer numbers as *.
    same: equal for units of one graph that are the same work in another layer.
    """

    graph: str
    name: str
    sort: str
    ops: tuple[str, ...]
    source: Source | None
    modules: tuple[str, ...]
    same: tuple[object, ...]

    @property
    def range(self) -> str:
        """Return the text of its range: "graph0.forward/add_layer_norm [norm1:60]"."""
        here = at(self.source)
        return f"{self.graph}/{self.name} [{here}]" if here else f"{self.graph}/{self.name}"


def at(source: Source | None) -> str:
    """Return "norm1:60", the module and the line of a source; for the outermost module, the file's name."""
    if source is None:
        return ""
    where = source.module or Path(source.file).stem
    return f"{where}:{source.line}" if source.line else where


def units_of(plan: FusionPlan) -> dict[str, Unit]:
    """Return every unit of a plan that runs, by name, in the order in which they run."""
    dag = plan.dag
    clusters = {cluster.name: cluster for cluster in plan.clusters}
    units: dict[str, Unit] = {}
    for step in ordered(plan).steps:
        name = step.name
        if name in clusters:
            cluster = clusters[name]
            sort, ops, same = "cluster", cluster.ops, signature(dag, cluster)
        else:
            op = dag.op(name)
            sort = "library" if op.kind is Kind.CONTRACTION else "eager"
            ops = (name,)
            same = (str(op.target), *(dag.op(i).outputs for i in op.inputs), op.outputs)
        modules = tuple(modules_of(dag, ops))
        units[name] = Unit(plan.name, name, sort, ops, _source(dag, ops), modules, same)
    return units


def ranges_of(plan: FusionPlan) -> Mapping[str, str]:
    """Return {unit: text of its range}."""
    return {name: unit.range for name, unit in units_of(plan).items()}


def _source(dag: OpDag, ops: Sequence[str]) -> Source | None:
    """Return the user's line from which most of the ops come, or the last of several such lines: a norm's, if
    its cluster begins with a residual and ends with a bias gradient."""
    sources = [source for name in ops if (source := dag.op(name).source) is not None]
    counts = Counter(source for source in sources if source.line)
    if not counts:
        return sources[-1] if sources else None
    most = max(counts.values())
    return next(source for source in reversed(sources) if counts[source] == most)
