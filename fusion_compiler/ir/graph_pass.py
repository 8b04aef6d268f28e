"""Passes over captured graphs, as values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from torch import fx

from fusion_compiler.ir.decision import Decisions

# A rewrite never changes the graph module that it is given: it returns that one, or a changed copy.
Rewrite = Callable[[fx.GraphModule], tuple[fx.GraphModule, Decisions]]


class Level(StrEnum):
    """The level says which graph a pass is given."""

    ABOVE_AUTOGRAD = "above autograd"  # of one call of the model, before gradients are traced
    JOINT = "forward and backward"  # as one graph, or the one graph of inference
    BACKWARD = "backward"
    GRAPH = "each graph"  # forward, backward or inference, before kernels are planned
    PLAN = "each plan"  # of such a graph


@dataclass(frozen=True)
class Pass:
    """A pass over a graph that `compile(..., disable=(name,))` leaves out.

    name: the name by which decisions, dumps and `disable` know it.
    apply: graph module -> (the same module or a changed copy, decisions). A pass of level JOINT changes an
        fx.Graph in place and returns decisions. One of level PLAN takes a plan and returns another.
    does: what it does, in one sentence. when: what has to hold. gains: what that saves, if it was measured or
        follows from the rewrite.
    rounds_as_eager: False if results are rounded at other places than eager rounds them; numerics="eager"
        then leaves the pass out.
    needs: the name of a pass that has to follow, or "". If that one is left out, `otherwise` runs in place of
        this one, or nothing does.
    """

    name: str
    apply: Callable[[Any], Any]
    does: str
    when: str
    gains: str = ""
    rounds_as_eager: bool = True
    level: Level = Level.ABOVE_AUTOGRAD
    needs: str = ""
    otherwise: Pass | None = None


class Refused(Exception):
    """The error says why a match is left alone."""
