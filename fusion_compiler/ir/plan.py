"""The fusion plan: its data (`plan_data`), and how it prints (`plan_text`)."""

from __future__ import annotations

from fusion_compiler.ir import plan_text
from fusion_compiler.ir.plan_data import PlanData


class FusionPlan(PlanData):
    """All decisions for one graph; prints."""

    def __str__(self) -> str:
        """What to show a colleague: totals, clusters, library calls, eager ops, largest rejections."""
        return plan_text.format_plan(self)

    def json(self) -> dict[str, object]:
        """The plan as plain data; `plan_text.plan_json` documents the schema."""
        return plan_text.plan_json(self)
