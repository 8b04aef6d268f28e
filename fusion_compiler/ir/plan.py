"""Define the fusion plan: its data (`plan_data`), and how it prints (`plan_text`)."""

from __future__ import annotations

import html

from fusion_compiler.ir import plan_text
from fusion_compiler.ir.plan_data import PlanData


class FusionPlan(PlanData):
    """A plan has all decisions for one graph, and prints them."""

    def __str__(self) -> str:
        """Return the text to show a colleague: totals, clusters, library calls, eager ops, and the refusals
        that cost most."""
        return plan_text.format_plan(self)

    def __repr__(self) -> str:
        t = plan_text.totals(self)
        held = f"{plan_text.count(t.ops, 'op')}, {plan_text.count(t.kernels, 'kernel')}"
        return f"<FusionPlan {self.name}: {held}>"

    def _repr_html_(self) -> str:
        """Return the text as a notebook shows it. The page is that of a report of all graphs."""
        return f"<pre>{html.escape(str(self))}</pre>"

    def json(self) -> dict[str, object]:
        """Return the plan as plain data; `plan_text.plan_json` documents the schema."""
        return plan_text.plan_json(self)
