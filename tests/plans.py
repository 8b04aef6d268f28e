"""A fusion plan put together by hand: three layers of bias + GELU + product + norm, without a compiler."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import networkx as nx
import torch
from torch import fx

from fusion_compiler.ir.dag import Op, OpDag, Source, TensorMeta
from fusion_compiler.ir.decision import EAGER_OP, LIBRARY_CALL, Decision, Outcome, apart, noted
from fusion_compiler.ir.device import device_spec
from fusion_compiler.ir.loops import COLS, ROWS
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ir.plan_data import Cluster
from fusion_compiler.ops.table import Kind
from fusion_compiler.passes.fuse.cost import cost_of
from fusion_compiler.passes.fuse.movement import eager_calls
from tests.nests import TARGETS, Nest

aten = torch.ops.aten
H200 = device_spec("h200")
META = TensorMeta((8192, 4096), (4096, 1), torch.bfloat16, "cuda:0")
FILE = str(Path("/home/me/block.py"))


def op(name: str, target: object, kind: Kind, *inputs: str, layer: int, line: int = 7) -> Op:
    source = Source(f"model.layers.{layer}.mlp", FILE, line, "h = F.gelu(self.up(x))")
    moved = 8192 * 4096 * 2 * (1 + len(inputs))
    return Op(name, target, kind, inputs, (META,), (), (), 8192 * 4096, moved, source)


def left(rule: str, name: str, target: str, reason: str, source: Source | None = None) -> Decision:
    """The decision that an op stays a call."""
    return Decision(rule, name, Outcome.REFUSED, reason, target=target, source=source)


def nest() -> Nest:
    n = Nest({"r": (8192, ROWS), "c": (4096, COLS)})
    total = n.add(n.load("x", "r", "c"), n.load("b", "c"))
    n.store("y", n.mul(total, n.op("tanh.default", total)), "r", "c")
    return n


def layered_plan(layers: int = 3) -> FusionPlan:
    graph = nx.DiGraph()
    graph.add_node("x", op=Op("x", "placeholder", Kind.OPAQUE, (), (META,), (), (), 0, 0, None))
    clusters: list[Cluster] = []
    leftovers: list[Decision] = []
    last = "x"
    for i in range(layers):
        ops = [
            op(f"mm_{i}", aten.mm.default, Kind.CONTRACTION, last, layer=i),
            op(f"view_{i}", aten.view.default, Kind.LAYOUT, f"mm_{i}", layer=i),
            op(f"add_{i}", TARGETS["add.Tensor"], Kind.ELEMENTWISE, f"view_{i}", layer=i),
            op(f"tanh_{i}", TARGETS["tanh.default"], Kind.ELEMENTWISE, f"add_{i}", layer=i),
            op(f"mul_{i}", TARGETS["mul.Tensor"], Kind.ELEMENTWISE, f"add_{i}", f"tanh_{i}", layer=i),
            op(f"topk_{i}", aten.topk.default, Kind.OPAQUE, f"mul_{i}", layer=i, line=9),
        ]
        for record in ops:
            graph.add_node(record.name, op=record)
            graph.add_edges_from((name, record.name) for name in record.inputs)
        n = nest()
        members = tuple(o.name for o in ops[1:5])
        cost = cost_of(n.nest(), H200, n.buffers)
        inputs, outputs = (f"mm_{i}",), (f"mul_{i}",)
        clusters.append(Cluster(f"add_tanh_mul_{i}", members, inputs, outputs, n.nest(), cost, ()))
        leftovers.append(left(LIBRARY_CALL, f"mm_{i}", "aten.mm.default", "library call"))
        reason = "no row in the operator table"
        leftovers.append(left(EAGER_OP, f"topk_{i}", "aten.topk.default", reason, ops[5].source))
        last = f"topk_{i}"
    refusals = tuple(
        apart(f"mul_{i}", f"mm_{i + 1}", "contraction", "mm is a library call", 12.25, True)
        for i in range(layers - 1)
    ) + tuple(
        apart(f"a{i}x", f"b{i}x", "cost", f"merging costs {i} us in registers", -1.0 * i) for i in range(6)
    )
    dag = OpDag(graph, ("x",), (last,), fx.GraphModule({}, fx.Graph()))
    decisions = (noted("masks", "one attention mask proved causal"),)
    calls = eager_calls(dag, False, H200, {})
    fused = [replace(c, eager=tuple(call for call in calls if call.name in c.ops)) for c in clusters]
    return FusionPlan("graph0.forward", dag, tuple(fused), "h200", calls, (*decisions, *leftovers, *refusals))
