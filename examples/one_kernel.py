"""Follow one cluster through all stages: code, graph, operators, loop nest, schedules, Triton.

    python -m examples.one_kernel

It needs no GPU: the plan is made for an H200, from shapes alone.
"""

from __future__ import annotations

import inspect
import re
import textwrap

import torch
from torch import Tensor, nn

import fusion_compiler as fc
from fusion_compiler.compiler.runners import emit_cluster
from fusion_compiler.ir.canonical import canonical
from fusion_compiler.ir.dag import OpDag
from fusion_compiler.ir.device import device_spec
from fusion_compiler.ir.loops import (
    Compute,
    Constant,
    Index,
    Load,
    LoopNest,
    Node,
    Reduce,
    Store,
    Value,
)

DEVICE = "h200"


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * (wide * scale).to(x.dtype)


def walk() -> dict[str, str]:
    """Return the text of each stage for the forward pass of RMSNorm on bfloat16 [8192, 4096]."""
    with torch.no_grad():
        x = torch.empty(8192, 4096, dtype=torch.bfloat16)
        report = fc.explain(RMSNorm(4096).bfloat16(), x, device=DEVICE)
    (plan,) = report.plans
    (cluster,) = plan.clusters
    key = canonical(cluster, plan.dag)
    programs = emit_cluster(key, cluster, plan.dag, device_spec(DEVICE))
    return {
        "code": textwrap.dedent(inspect.getsource(RMSNorm.forward)),
        "graph": re.sub(r";  .* = None", "", plan.dag.module.code),
        "operators": operators(plan.dag),
        "loop nest": loop_nest(cluster.loops),
        "schedules": "\n".join(program.schedule for program in programs),
        "kernel": programs[0].kernels[0].source,
    }


def operators(dag: OpDag) -> str:
    """Return a line for each operator: its name, kind, operands, dtype and shape."""
    ops = [dag.op(name) for name in dag.order]
    rows = [
        (op.name, str(op.kind), " ".join(op.inputs), f"{str(m.dtype).removeprefix('torch.')} {list(m.shape)}")
        for op in ops
        for m in op.outputs
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def loop_nest(loops: LoopNest) -> str:
    """Return the axes, then a line for each node, with its dtype, and for each store."""
    axes = [f"{axis.name} < {axis.size} ({axis.group})" for axis in loops.axes]
    nodes = [
        f"{i:>2}  {loops.names[i]:<10}  {str(n.dtype).removeprefix('torch.')}  {node_text(loops, n)}"
        for i, n in enumerate(loops.nodes)
    ]
    return "\n".join(["axes " + ", ".join(axes), *nodes, *(store_text(loops, s) for s in loops.stores)])


def node_text(loops: LoopNest, node: Node) -> str:
    match node:
        case Load():
            return f"load {node.buffer}[{index_text(loops, node.index)}]"
        case Constant():
            return repr(node.value)
        case Reduce():
            over = " and ".join(loops.axes[k].name for k in sorted(node.axes))
            return f"{node.combine} of {node.operand} over {over}"
        case Compute():
            operands = [
                (n, a) for n, a in node.operands if isinstance(a, Value | int | float) and a is not False
            ]
            shown = (str(a.node) if isinstance(a, Value) else f"{n}={a}" for n, a in operands)
            return f"{node.target._opname}({', '.join(shown)})"
        case _:
            return type(node).__name__


def store_text(loops: LoopNest, store: Store) -> str:
    return f"store {store.buffer}[{index_text(loops, store.index)}] = {store.value}"


def index_text(loops: LoopNest, index: Index) -> str:
    terms = [loops.axes[k].name if c == 1 else f"{c} {loops.axes[k].name}" for k, c in index.terms if k >= 0]
    return " + ".join([*terms, *([str(index.const)] if index.const or not terms else [])])


def main() -> None:
    for stage, text in walk().items():
        print(f"-- {stage} {'-' * (90 - len(stage))}\n{text.strip()}\n")


if __name__ == "__main__":
    main()
