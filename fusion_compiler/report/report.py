"""The report of `explain`, for people and for programs: text, JSON, DOT, GraphML and a page.

A report holds the plans of a model's graphs and answers questions about them; nothing in it was measured
unless `profile` put it there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TextIO

import networkx as nx

from fusion_compiler.errors import MissingPackageError
from fusion_compiler.ir import plan_text
from fusion_compiler.passes.fuse.answer import Answer, answers, meanings, unknown
from fusion_compiler.report.page import framed, page
from fusion_compiler.report.report_data import ReportData
from fusion_compiler.report.report_json import Row, class_rows, report_json, totals_of


class Report(ReportData):
    """A report holds the plans of a model's graphs; it prints, answers questions and writes files."""

    def why(self, a: str, b: str) -> list[Answer]:
        """Explain why two ops are one kernel or are not, in every graph that has both; print one to read it.

        a, b: an op or a cluster by name, a place ("model.py:12"), a module's path, or a piece of source
        ("F.gelu("). Raises UnknownOpError for a name that no graph has.
        """
        results = [answer for why in self.questions.values() for answer in answers(why, a, b)]
        if not results:
            for name in (a, b):
                if not any(meanings(plan, name) for plan in self.plans):
                    raise unknown(name, self.plans)
            return [
                Answer(
                    "", f"{a} and {b} are in different graphs: one of the forward, one of the backward pass"
                )
            ]
        return results

    def __str__(self) -> str:
        return "\n\n".join(self._sections())

    def __repr__(self) -> str:
        graphs = ", ".join(map(repr, self.plans)) or "no graph"
        return f"<Report of {self.model} on {self.device}: {graphs}>"

    def _repr_html_(self) -> str:
        """Return the page in a frame of its own, as a notebook shows it."""
        return framed(self.json())

    def show(self, file: TextIO | None = None) -> None:
        """Print the report, with colours at a terminal if rich is installed."""
        plan_text.show(str(self), file)

    def json(self) -> dict[str, Any]:
        """Return the report as plain data for json.dumps; docs/report-schema.md documents it."""
        return report_json(self)

    def graph(self) -> nx.MultiDiGraph[str]:
        """Return a graph of all units with their predictions, and edges with their refusals; every attribute
        is a string or a number."""
        units: nx.MultiDiGraph[str] = nx.MultiDiGraph()
        for graph in self.json()["graphs"]:
            for unit in graph["units"]:
                plain = {k: v for k, v in unit.items() if isinstance(v, str | int | float)}
                name = f"{graph['name']}/{unit['name']}"
                units.add_node(name, **{k: v for k, v in plain.items() if k != "name"}, label=unit["name"])
            for edge in graph["edges"]:
                a, b = (f"{graph['name']}/{edge[end]}" for end in ("a", "b"))
                plain = {k: v for k, v in edge.items() if isinstance(v, str | int | float)}
                units.add_edge(a, b, **{k: v for k, v in plain.items() if k not in ("a", "b")})
        return units

    def dot(self) -> str:
        """Return the graph in Graphviz' language. Raises MissingPackageError if pydot is not installed."""
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
        assumed = f" ({self.assumed})" if self.assumed else ""
        head = f"{self.model} on {self.device}{assumed}, captured by {self.captured_by}{reason}"
        sections = [f"{head}\n{self._summary()}"]
        sections += map(str, self.plans)
        if self.breaks:
            sections.append(plan_text.breaks_text(self.breaks))
        return [*sections, f"incomplete: {self.incomplete}"] if self.incomplete else sections

    def _summary(self) -> str:
        """Return the totals, and a row for each class of operators."""
        t = totals_of(self)
        passes = " and ".join(dict.fromkeys(plan.phase for plan in self.plans)) or "nothing captured"
        lines = [
            f"  {passes}: {plan_text.count(t['launches_before'], 'call')} of eager -> {t['launches_after']}: "
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
