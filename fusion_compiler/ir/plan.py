"""Define the fusion plan: its data (`plan_data`), and how it prints (`plan_text`)."""

from __future__ import annotations

from fusion_compiler.ir import plan_text
from fusion_compiler.ir.plan_data import PlanData


class FusionPlan(PlanData):
    """A plan has all decisions for one graph, and prints them."""

    def __str__(self) -> str:
        """Return the text to show a colleague: totals, clusters, library calls, eager ops, and the refusals
        that cost most."""
        return plan_text.format_plan(self)

    def json(self) -> dict[str, object]:
        """Return the plan as plain data; `plan_text.plan_json` documents the schema."""
        return plan_text.plan_json(self)
