"""Decisions: what a rule did about a part of a graph, or why it did nothing.

Passes, the planner and the runtime return them; plans, reports and messages are printed from them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """The outcome says what became of the subject of a decision."""

    DONE = "done"
    FORCED = "forced"  # done because an option asks for it, whether or not it pays
    REFUSED = "refused"
    NOTED = "noted"  # there was nothing to decide: the reason is a fact about the graph

    @classmethod
    def of(cls, done: bool) -> Outcome:
        """Return DONE or REFUSED."""
        return cls.DONE if done else cls.REFUSED


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision of one rule about one subject.

    rule: the name of a pass, a pattern or a law. subject: the node, op, cluster or pair that it is about; ""
    for the whole graph. reason: what was proved or measured, or why it was refused.
    us: the predicted microseconds that it saves, or that a refused one would have saved; None if nothing
        predicts them.
    """

    rule: str
    subject: str
    outcome: Outcome
    reason: str
    us: float | None = None

    @property
    def is_done(self) -> bool:
        return self.outcome in (Outcome.DONE, Outcome.FORCED)

    def __str__(self) -> str:
        return f"{self.rule}: {self.subject or 'graph'} {self.outcome}: {self.reason}"


Decisions = tuple[Decision, ...]


def noted(rule: str, reason: str) -> Decision:
    """Return a fact about the whole graph."""
    return Decision(rule, "", Outcome.NOTED, reason)


def texts_of(decisions: Iterable[Decision]) -> dict[str, str]:
    """Return {rule: what it decided}, in the order of the rules' first decisions. Equal ones are counted."""
    counts = Counter((d.rule, d.outcome, d.reason) for d in decisions)
    texts: dict[str, list[str]] = {}
    for (rule, outcome, reason), times in counts.items():
        repeated = f" x{times}" if times > 1 else ""
        text = reason if outcome is Outcome.NOTED else f"{outcome}{repeated}: {reason}"
        texts.setdefault(rule, []).append(text)
    return {rule: "; ".join(each) for rule, each in texts.items()}
