"""Ops that are left to a library on purpose, and why. Any other op that stays a call wants a kernel."""

from __future__ import annotations

from torch._ops import HigherOrderOperator, OpOverload

from fusion_compiler.ir.chunks import Chunked
from fusion_compiler.ir.dag import Op
from fusion_compiler.ops.own.put import put
from fusion_compiler.ops.own.random import seed
from fusion_compiler.ops.own.recurrent import OPERATORS
from fusion_compiler.ops.schema import CONTROL_FLOW, WRITE_BACK
from fusion_compiler.ops.table import SORTS, Kind
from fusion_compiler.patterns import USER_NAMESPACE

# Data decides which places these write, and how often.
SCATTERS = frozenset({
    "index_put", "index_add", "index_copy", "index_reduce", "scatter", "scatter_add", "scatter_reduce",
    "embedding_dense_backward",
})  # fmt: skip


def library_call(op: Op) -> str | None:
    """Return why an op is a call on purpose; None if it is not."""
    target = op.target
    if target in OPERATORS:
        return "a recurrent layer: each step needs the one before, and PyTorch's library runs all of them"
    if op.kind is Kind.CONTRACTION:
        return "library call"
    if target is seed:
        return "draws the seed from PyTorch's generator, once a graph"
    if isinstance(target, Chunked):
        times = f"{target.count} times for {target.chunk} of {target.rows} {target.unit}"
        return f"runs a graph of its own, {times}" if target.unit else "runs a graph of its own"
    if isinstance(target, HigherOrderOperator):
        if target in CONTROL_FLOW:
            return "control flow: its graphs have plans of their own, and data decides what runs"
        return "a kernel of the model's own" if target.name().startswith("triton_kernel_wrapper") else None
    if not isinstance(target, OpOverload):
        return None
    if target.namespace == USER_NAMESPACE:
        return "a kernel of the user's"
    if target is not put and target.namespace not in ("aten", "prims"):
        return f"an operator of {target.namespace}, not of PyTorch"
    if target is WRITE_BACK:
        return "writes a result into an argument of the graph"
    if target is put:
        return "writes into memory that exists, at places that no kernel of ours counts"
    if target in SORTS:
        return "a sort: where an element comes to lie depends on all others"
    if target._opname.rstrip("_") in SCATTERS:
        return "a scatter: data decides which places are written, and how often"
    return None
