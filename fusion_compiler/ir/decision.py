"""Decisions: what a rule did about a part of a graph, or why it did nothing.

Passes, the planner and the runtime return them; plans, reports and messages are printed from them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from fusion_compiler.ir.dag import Source

# The rules of decisions about ops that stay ATen calls.
LIBRARY_CALL = "library call"  # a product, a convolution or attention
DELIBERATE_CALL = "call on purpose"  # a scatter, the model's own kernel, ...: no kernel is wanted
EAGER_OP = "eager op"  # a kernel is wanted, and there is none


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

    rule: the name of a pass, a pattern or a law. subject: the node, op or cluster that it is about; "" for
    the whole graph. other: the second of two that did not become one kernel, else "".
    reason: what was proved or measured, or why it was refused.
    us: the predicted microseconds that it saves, or that a refused one would have saved (negative: cost);
        None if nothing predicts them. at_most: no kernel of both exists, so that `us` is a bound.
    tensors: what one of a pair stores and the other reads, or both read, by op name.
    target: the operator, if the subject is an op that stays an ATen call, else "".
    source: the user's line of such an op, or None.
    """

    rule: str
    subject: str
    outcome: Outcome
    reason: str
    us: float | None = None
    other: str = ""
    at_most: bool = False
    tensors: tuple[str, ...] = ()
    target: str = ""
    source: Source | None = None

    @property
    def is_done(self) -> bool:
        return self.outcome in (Outcome.DONE, Outcome.FORCED)

    @property
    def about(self) -> str:
        """Return the subject, or "a + b" for a pair."""
        return f"{self.subject} + {self.other}" if self.other else self.subject

    @property
    def saving(self) -> float:
        """Return `us`, or 0.0 if nothing predicts it."""
        return self.us or 0.0

    def __str__(self) -> str:
        return f"{self.rule}: {self.about or 'graph'} {self.outcome}: {self.reason}"


Decisions = tuple[Decision, ...]


def noted(rule: str, reason: str) -> Decision:
    """Return a fact about the whole graph."""
    return Decision(rule, "", Outcome.NOTED, reason)


def apart(
    a: str, b: str, rule: str, reason: str, us: float | None = None, at_most: bool = False,
    tensors: tuple[str, ...] = (),
) -> Decision:  # fmt: skip
    """Return the refusal to make one kernel of two."""
    return Decision(rule, a, Outcome.REFUSED, reason, us, b, at_most, tensors)


def texts_of(decisions: Iterable[Decision]) -> dict[str, str]:
    """Return {rule: what it decided}, in the order of the rules' first decisions. Equal ones are counted, and
    those that say nothing are left out."""
    counts = Counter((d.rule, d.outcome, d.reason) for d in decisions if d.reason)
    texts: dict[str, list[str]] = {}
    for (rule, outcome, reason), times in counts.items():
        repeated = f" x{times}" if times > 1 else ""
        text = reason if outcome is Outcome.NOTED else f"{outcome}{repeated}: {reason}"
        texts.setdefault(rule, []).append(text)
    return {rule: "; ".join(each) for rule, each in texts.items()}
