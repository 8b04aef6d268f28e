"""Plan a graph that is one loop nest, a chain of products and reductions, as one cluster."""

from __future__ import annotations

from collections.abc import Mapping

import sympy

from fusion_compiler.ir import layout
from fusion_compiler.ir.dag import OpDag
from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.dims import product
from fusion_compiler.ir.loops import Load, Reduce
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ir.plan_data import Cluster, Setting
from fusion_compiler.passes.fuse.cost import cost_of
from fusion_compiler.passes.fuse.movement import eager_calls
from fusion_compiler.passes.lower.chains import lower_chain
from fusion_compiler.passes.lower.space import Illegal
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.separated import separated
from fusion_compiler.schedule.space import refusal
from fusion_compiler.schedule.uneven_widths import in_powers_of_two
from fusion_compiler.schedule.work import BufferInfo


def plan_one(
    name: str, dag: OpDag, device: DeviceSpec, hints: Mapping[sympy.Symbol, int]
) -> FusionPlan | str:
    """Return the plan of a graph with one cluster that computes all of it, or why it has none."""
    try:
        loops = separated(in_powers_of_two(lower_chain(dag)))
    except Illegal as error:
        return f"{error.rule}: {error}"
    analysis = Analysis(loops)
    if analysis.chain is None:
        return "it has no product that reads a product over an axis of one tile"
    if (reason := refusal(analysis, device)) is not None:
        return reason
    inputs = tuple(dict.fromkeys(n.buffer for n in loops.nodes if isinstance(n, Load)))
    infos = {n: _info(dag, n) for n in (*inputs, *dag.outputs)}
    cost = cost_of(loops, device, infos, hints, analysis)
    ops = tuple(n for n in dag.order if n not in dag.inputs and not layout.is_view(dag.op(n)))
    calls = eager_calls(dag, False, device, hints)
    products = sum(isinstance(node, Reduce) and node.combine == "sum" for node in loops.nodes)
    title = f"chain_of_{products}_sums"
    outputs = tuple(n for n in ops if n in dag.outputs)
    cluster = Cluster(title, ops, inputs, outputs, loops, cost, calls)
    return FusionPlan(name, dag, (cluster,), device.name, calls, (), Setting(device, hints, "float32", ()))


def _info(dag: OpDag, name: str) -> BufferInfo:
    meta = dag.op(name).outputs[0]
    return BufferInfo(product(meta.shape), meta.dtype.itemsize)
