"""Note what a pre-autograd rewrite did, or why it did not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True, slots=True)
class RewriteNote:
    """A note is one decision of a rewrite.

    rule: the rewrite's name. node: the fx node that it looked at ("" for the whole graph).
    applied: whether the graph changed; None where there was nothing to change. reason: what was proved, or
    why it was refused or not found.
    """

    rule: str
    node: str
    applied: bool | None
    reason: str

    def __str__(self) -> str:
        verdict = "not found" if self.applied is None else "rewritten" if self.applied else "left"
        return f"{self.rule}: {self.node or 'graph'} {verdict}: {self.reason}"


Notes = tuple[RewriteNote, ...]

# A rewrite never changes the graph module that it is given: it returns that one, or a changed copy.
Rewrite = Callable[[fx.GraphModule], tuple[fx.GraphModule, Notes]]


class Refused(Exception):
    """The error says why a match is left alone."""
