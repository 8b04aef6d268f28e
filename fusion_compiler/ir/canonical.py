"""Make clusters that need the same kernel equal, so that it is compiled once."""

from __future__ import annotations

from dataclasses import dataclass, replace

import sympy

from fusion_compiler.ir.dag import OpDag
from fusion_compiler.ir.kernel import Buffer
from fusion_compiler.ir.loops import Load, LoopNest, Node, Random
from fusion_compiler.ir.plan_data import Cluster
from fusion_compiler.ir.writes import base_of
from fusion_compiler.ops.schema import short_name


@dataclass(frozen=True)
class Canonical:
    """A canonical form has the tile programs of a cluster with tensors named by position; it is equal for
    clusters with the same kernel.

    Equal clusters' fx subgraphs may also replace each other; `device` is part of the key because they create
    constants on it.
    constants: for a dependent launch, the buffers that `Cluster.constants` names.
    """

    nests: tuple[LoopNest, ...]
    buffers: tuple[Buffer, ...]
    device: str
    constants: frozenset[str] | None = None


def canonical(cluster: Cluster, dag: OpDag) -> Canonical:
    """Rename tensors by first use and values by number, so that identical clusters become equal."""
    names = dict.fromkeys((*cluster.inputs, *cluster.outputs))
    short = {name: f"buffer{i}" for i, name in enumerate(names)}
    salts = {salt: sympy.Symbol(f"salt{i}", integer=True) for i, salt in enumerate(salts_of(cluster))}
    nests = tuple(_renamed(loops, short, salts) for loops in cluster.nests)
    aliases = {name: short[source] for name, source in aliased_inputs(cluster, dag).items()}
    metas = [(name, dag.op(name).outputs[0]) for name in names]
    buffers = tuple(Buffer(short[n], m.shape, m.stride, m.dtype, reuses=aliases.get(n)) for n, m in metas)
    constants = None if cluster.constants is None else frozenset(short[name] for name in cluster.constants)
    return Canonical(nests, buffers, dag.op(cluster.outputs[0]).outputs[0].device, constants)


def aliased_inputs(cluster: Cluster, dag: OpDag) -> dict[str, str]:
    """Return a map from each result that reuses an input's memory to that input."""
    bases = {name: base for name in cluster.outputs if (base := base_of(dag, name)) is not None}
    return bases | dict(cluster.reuses)


def salts_of(cluster: Cluster) -> tuple[int, ...]:
    """Return the random number streams of a cluster. Kernels take them as arguments after the sizes."""
    nodes = (n for loops in cluster.nests for n in loops.nodes)
    return tuple(dict.fromkeys(n.salt for n in nodes if isinstance(n, Random) and isinstance(n.salt, int)))


def _renamed(loops: LoopNest, short: dict[str, str], salts: dict[int, sympy.Symbol]) -> LoopNest:
    def rename(node: Node) -> Node:
        if isinstance(node, Load):
            return replace(node, buffer=short[node.buffer])
        if isinstance(node, Random) and isinstance(node.salt, int):
            return replace(node, salt=salts[node.salt])
        return node

    nodes = tuple(map(rename, loops.nodes))
    stores = tuple(replace(s, buffer=short[s.buffer]) for s in loops.stores)
    return LoopNest(loops.axes, nodes, stores, tuple(str(i) for i in range(len(nodes))))


def describe(cluster: Cluster, dag: OpDag) -> str:
    """Return a kernel's docstring: its operators and their places in the model."""
    ops = " ".join(short_name(dag.op(n).target) for n in cluster.ops)
    sources = [s for n in cluster.ops if (s := dag.op(n).source) is not None]
    places = dict.fromkeys(f"{s.module} {s.file.rpartition('/')[2]}:{s.line}".strip() for s in sources)
    lines = [ops if len(ops) <= 100 else ops[:97] + "...", *(f"from {p}" for p in list(places)[:4])]
    return "\n".join(lines).replace("\\", "/").replace('"""', "'''")
