"""The operator DAG: a networkx.DiGraph of frozen Op records, read from an fx graph."""

from __future__ import annotations

from dataclasses import dataclass

import networkx as nx
import sympy
import torch
from torch import fx

from fusion_compiler.ops import Kind

Dim = int | sympy.Expr


@dataclass(frozen=True, slots=True)
class Source:
    """Where an op comes from in the user's model."""

    module: str  # "model.layers.0.mlp"
    file: str
    line: int
    code: str  # the line itself


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Shape and strides in elements; integers, or sympy expressions of the graph's symbols."""

    shape: tuple[Dim, ...]
    stride: tuple[Dim, ...]
    dtype: torch.dtype
    device: str


@dataclass(frozen=True)
class Op:
    """One operator. `inputs` are the names of the ops that it reads, in argument order.

    args, kwargs: as in the fx node, with Ref(name) for tensors. outputs: one per result.
    flops, bytes: what it computes, and what it reads and writes when it runs alone.
    """

    name: str
    target: object
    kind: Kind
    inputs: tuple[str, ...]
    outputs: tuple[TensorMeta, ...]
    args: tuple[object, ...]
    kwargs: tuple[tuple[str, object], ...]
    flops: int
    bytes: int
    source: Source | None


@dataclass(frozen=True)
class OpDag:
    """graph: nodes are op names with attribute `op`; edges producer -> consumer.

    inputs: names of placeholders and attributes; outputs: names of what the graph returns.
    """

    graph: nx.DiGraph
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    module: fx.GraphModule

    def op(self, name: str) -> Op:
        return self.graph.nodes[name]["op"]
