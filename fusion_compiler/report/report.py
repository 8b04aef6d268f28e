"""What `explain` found, for people and for programs: text, JSON, DOT, GraphML and a page.

A report holds the plans of a model's graphs and answers questions about them; nothing in it was measured
unless `profile` put it there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO

import networkx as nx

from fusion_compiler.errors import MissingPackageError
from fusion_compiler.ir import plan_text
from fusion_compiler.ir.breaks import GraphBreak
from fusion_compiler.ir.plan import FusionPlan, Rejected
from fusion_compiler.passes.fuse.answer import Answer, answers, candidates, saving, unknown
from fusion_compiler.passes.fuse.why import Why
from fusion_compiler.report.page import page
from fusion_compiler.report.report_json import Row, class_rows, report_json, totals_of

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
class Report:
    """The plans of a model's graphs, forward and backward, and the questions that they answer.

    model: its name. device: the DeviceSpec planned for. incomplete: why later graphs are missing, "" where
    none are: what follows depends on data. not_whole: why torch.fx cannot trace the model whole, so that
    TorchDynamo captured it; "" where it can. measured: of each graph's units what `profile` measured.
    breaks: the places at which TorchDynamo's graphs end early, and what no graph holds.
    """

    model: str
    device: str
    plans: tuple[FusionPlan, ...]
    incomplete: str = ""
    not_whole: str = ""
    emit: Callable[[tuple[FusionPlan, ...]], Kernels] = field(default=lambda plans: {}, repr=False)
    measured: Mapping[str, Any] | None = None
    breaks: tuple[GraphBreak, ...] = ()

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

    def why(self, a: str, b: str) -> list[Answer]:
        """Why two ops are one kernel or are not, in every graph that has both; print one for its text.

        a, b: an op or a cluster by name, a place ("model.py:12"), a module's path, or a piece of source
        ("F.gelu("). Raises UnknownOpError for a name that no graph has.
        """
        found = [answer for why in self.questions.values() for answer in answers(why, a, b)]
        if not found:
            for name in (a, b):
                if not any(candidates(plan, name) for plan in self.plans):
                    raise unknown(name, self.plans)
            return [
                Answer(
                    "", f"{a} and {b} are in different graphs: one of the forward, one of the backward pass"
                )
            ]
        return found

    def __str__(self) -> str:
        return "\n\n".join(self._sections())

    def show(self, file: TextIO | None = None) -> None:
        """Print the report; with colours at a terminal where rich is installed."""
        plan_text.show(str(self), file)

    def json(self) -> dict[str, Any]:
        """The report as plain data for json.dumps; docs/report-schema.md documents it."""
        return report_json(self)

    def graph(self) -> nx.MultiDiGraph[str]:
        """Units of all graphs with their predictions, edges with their refusals; every attribute is plain."""
        found: nx.MultiDiGraph[str] = nx.MultiDiGraph()
        for graph in self.json()["graphs"]:
            for unit in graph["units"]:
                plain = {k: v for k, v in unit.items() if isinstance(v, str | int | float)}
                name = f"{graph['name']}/{unit['name']}"
                found.add_node(name, **{k: v for k, v in plain.items() if k != "name"}, label=unit["name"])
            for edge in graph["edges"]:
                a, b = (f"{graph['name']}/{edge[end]}" for end in ("a", "b"))
                plain = {k: v for k, v in edge.items() if isinstance(v, str | int | float)}
                found.add_edge(a, b, **{k: v for k, v in plain.items() if k not in ("a", "b")})
        return found

    def dot(self) -> str:
        """The graph in Graphviz' language. Raises MissingPackageError where pydot is not installed."""
        try:
            return str(nx.nx_pydot.to_pydot(self.graph()).to_string())
        except ImportError as error:
            raise MissingPackageError(package="pydot", what="DOT output") from error

    def graphml(self, path: str | Path) -> None:
        """Write the graph as GraphML, which yEd, Gephi and networkx read."""
        nx.write_graphml(self.graph(), str(path))

    def html(self, path: str | Path) -> None:
        """Write the page of this report: one file that opens offline."""
        Path(path).write_text(page(self.json()), encoding="utf-8")

    def _sections(self) -> list[str]:
        reason = f", not whole by torch.fx: {self.not_whole}" if self.not_whole else ""
        head = f"{self.model} on {self.device}, captured by {self.captured_by}{reason}"
        sections = [f"{head}\n{self._summary()}"]
        sections += [str(replace(plan, rejections=())) for plan in self.plans]
        if self.breaks:
            sections.append(plan_text.breaks_text(self.breaks))
        if self.missed:
            sections.append(missed_text(self.missed))
        return [*sections, f"incomplete: {self.incomplete}"] if self.incomplete else sections

    def _summary(self) -> str:
        """Totals, and a row for each class of operators."""
        t = totals_of(self)
        lines = [
            f"  {plan_text.count(t['launches_before'], 'call')} of eager -> {t['launches_after']}: "
            f"{plan_text.count(t['kernels'], 'kernel')}, "
            f"{plan_text.count(t['library_calls'], 'library call')}, {t['eager_ops']} eager",
            f"  {plan_text.human_bytes(t['bytes_before'])} -> "
            f"{plan_text.human_bytes(t['bytes_after'])} moved, "
            f"{plan_text.count(t['intermediates'], 'intermediate')} never stored, "
            f"{t['us_before']:.1f} -> {t['us_after']:.1f} us predicted",
            "",
        ]
        head = ("class", "calls", "Gflop", "flop", "Mwords", "us eager", "share", "us fused")
        rows = [head, *(_class_row(row) for row in class_rows(self) if row["us_before"] or row["us_after"])]
        return "\n".join([*lines, *(f"  {line}" for line in plan_text.aligned(rows, left=(0,)))])


def _alike(edges: Sequence[Rejected]) -> list[list[Rejected]]:
    """Refusals that differ only in the numbers of their names together, but none that share a unit: those
    are alternatives, whose savings do not add up."""
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


def missed_text(missed: Sequence[Missed]) -> str:
    """Fusions that were not made, one entry each."""
    lines = ["missed fusions, by what they would save at most"]
    for one in missed:
        lead = f"  {one.total_us:>8.1f} us  {one.graph}  "
        lines += plan_text.wrapped(lead, str(one))
    return "\n".join(lines)


def _class_row(row: Row) -> tuple[str, ...]:
    return (
        row["class"],
        str(row["calls"]),
        f"{row['gflop']:.2f}",
        f"{row['flop_share']:.2%}",
        f"{row['input_mwords'] + row['output_mwords']:.1f}",
        f"{row['us_before']:.1f}",
        f"{row['share']:.1%}",
        f"{row['us_after']:.1f}",
    )
