"""Decisions are values: texts are made from them, and nothing is read back from a text."""

from __future__ import annotations

import torch

import fusion_compiler as fc
from fusion_compiler.ir.decision import Decision, Outcome, noted, texts_of


def test_equal_decisions_are_counted_and_those_of_a_rule_are_joined() -> None:
    decisions = [
        Decision("patches", "conv", Outcome.DONE, "its stride is its window"),
        noted("memory", "1 MB"),
        Decision("patches", "conv_1", Outcome.DONE, "its stride is its window"),
        Decision("patches", "conv_2", Outcome.REFUSED, "it is padded"),
    ]
    assert texts_of(decisions) == {
        "patches": "done x2: its stride is its window; refused: it is padded",
        "memory": "1 MB",
    }


def test_a_forced_decision_counts_as_done() -> None:
    assert [Decision("rule", "", outcome, "").is_done for outcome in Outcome] == [True, True, False, False]


def test_a_plan_tells_its_decisions_as_values() -> None:
    """The plan has decisions of passes, of pairs that stay apart, and of calls that stay calls."""

    def residual(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        wave = x.sin()
        return torch.mm(wave, w).relu() + wave

    fast = fc.compile(residual, backend="eager")
    fast(torch.randn(300, 40), torch.randn(40, 40))
    (plan,) = fast.plan
    assert {d.rule for d in plan.about_graph} >= {"memory", "seconds"}
    assert {d.about for d in plan.refusals} == {"sin_2 + mm", "mm + relu_add", "sin_2 + relu_add"}
    assert all(d.outcome is Outcome.REFUSED and d.reason and d.us is not None for d in plan.refusals)
    assert [(d.rule, d.subject) for d in plan.leftovers] == [("library call", "mm")]
    assert plan.decisions == (*plan.leftovers, *plan.refusals, *plan.about_graph)


def test_a_later_decision_of_a_rule_takes_the_place_of_the_earlier_one() -> None:
    fast = fc.compile(torch.sin, backend="eager")
    fast(torch.randn(3))
    later = noted("memory", "measured")
    plan = fast.plan[0].decided(later)
    assert plan.decision("memory") == later and plan.decisions.count(later) == 1
    assert plan.decision("no such rule") is None
