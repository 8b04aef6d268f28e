"""Describe a captured graph beside its nodes: its phase, and where its tensors come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from torch import fx, nn

from fusion_compiler.ir.decision import Decisions


@dataclass(frozen=True, slots=True)
class Origin:
    """An origin describes a graph's input. kind: "parameter", "buffer" or "input"."""

    kind: str
    requires_grad: bool


Origins = Mapping[str, Origin]  # by placeholder; a missing one holds a value that another graph computed


def argument_name(position: int) -> str:
    """Return AOTAutograd's name for an argument of a graph that is trained, in its forward and in its
    backward."""
    return f"primals_{position + 1}"


def origins_of(graph: fx.Graph) -> dict[str, Origin]:
    """Return the origins of the placeholders of a graph above autograd, as TorchDynamo describes them."""
    return {node.name: _origin(node) for node in graph.find_nodes(op="placeholder")}


def _origin(node: fx.Node) -> Origin:
    value = node.meta.get("example_value", node.meta.get("val"))
    static = "_dynamo_static_input_type" in (node.meta.get("tensor_dict") or {})
    kind = "parameter" if isinstance(value, nn.Parameter) else "buffer" if static else "input"
    return Origin(kind, bool(getattr(value, "requires_grad", False)))


class Phase(StrEnum):
    FORWARD = "forward"  # of a graph that is trained: also returns what backward needs
    BACKWARD = "backward"
    INFERENCE = "inference"
    CHUNK = "chunk"  # of a loop over chunks of rows, which is a node of one of the others


@dataclass(frozen=True)
class GraphInfo:
    """The object describes one captured graph beside its nodes.

    name: "graph0.forward"; graphs are numbered in the order in which Dynamo finds them.
    static_inputs: positions of the parameters and buffers among the placeholders: their
        addresses stay the same from call to call (until the module is moved).
    outputs: how many leading outputs belong to the caller; the others are saved for backward.
    owned: names of the placeholders that the caller gives up: activations saved for backward and
        the gradients that it starts from.
    donated: those of them that nobody but the graph reads: it may write over them.
    rewrites: what the pre-autograd rewrites did or refused, the same for all phases.
    origins: of the placeholders that are arguments of the Dynamo graph, by name.
    from_disk: it was not traced, an earlier process had kept it.
    digest: a hash of the graph and of all that is known of it; "" where that cannot be told.
    one_nest: it was cut out of another graph so that one kernel computes it.
    """

    name: str
    phase: Phase
    static_inputs: tuple[int, ...]
    outputs: int
    owned: tuple[str, ...] = ()
    donated: tuple[str, ...] = ()
    rewrites: Decisions = ()
    origins: Origins = field(default_factory=dict[str, Origin])
    from_disk: bool = False
    digest: str = ""
    one_nest: bool = False
