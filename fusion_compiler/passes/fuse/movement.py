"""Bytes and times of the ATen calls of eager: the data-movement analysis of Ivanov et al. (2021).

An operator of the graph is often a piece of what eager computes in one call (a softmax is five of them).
Each op names the call that it is a part of (`Op.call`), so that a plan's saving is counted against the calls
that eager makes and not against their pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import sympy

from fusion_compiler.ir import layout
from fusion_compiler.ir.calls import EagerCall
from fusion_compiler.ir.dag import Op, OpDag
from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.dims import hint, product
from fusion_compiler.ir.plan_data import Call
from fusion_compiler.ops.own import depthwise
from fusion_compiler.ops.own.random import seed
from fusion_compiler.ops.schema import runs_no_kernel, short_name
from fusion_compiler.ops.table import Kind
from fusion_compiler.passes.fuse.cost import contraction_cost, eager_cost, one_after_the_other

L2_SHARE = 0.25  # the share of L2 that a tensor may fill and still be there when the next kernel reads it
# The class of a call by the first of these kinds that it has: the paper's three, then others.
CLASSES = {
    Kind.CONTRACTION: "contraction",
    Kind.NORMALIZATION: "normalization",
    Kind.REDUCTION: "normalization",
    Kind.WINDOWS: "normalization",
    Kind.SCAN: "normalization",
    Kind.ELEMENTWISE: "element-wise",
    Kind.RANDOM: "random",
    Kind.OPAQUE: "opaque",
    Kind.LAYOUT: "layout",
}
# Calls that store a mask of one byte an element beside their result; the graph makes it again instead.
MASKS = frozenset({"native_dropout"})
# Calls that read one element of a tensor for each index; the graph computes them as sums over one-hot rows.
PICKS = frozenset({"nll_loss_forward", "nll_loss2d_forward"})


def class_of(ops: Iterable[Op]) -> str:
    """Return the class of a call of some ops: contraction before all other classes, layout last."""
    kinds = {op.kind for op in ops}
    return next((name for kind, name in CLASSES.items() if kind in kinds), "layout")


@dataclass(frozen=True)
class Tensors:
    """Tensors give the sizes of a graph's tensors on a device, and say which of them lie in its L2."""

    dag: OpDag
    device: DeviceSpec
    hints: Mapping[sympy.Symbol, int]

    def base(self, name: str) -> str:
        """Return the op whose result a chain of views shows."""
        while runs_no_kernel(self.dag.op(name).target) and self.dag.op(name).inputs:
            name = self.dag.op(name).first
        return name

    def words(self, name: str) -> int:
        """Return the number of elements of all results; for a view that repeats its base, the base's."""
        base = self.base(name)
        view_words, base_words = (sum(self._count(n)) for n in (name, base))
        return min(view_words, base_words)

    def itemsize(self, name: str) -> int:
        outputs = self.dag.op(name).outputs
        return outputs[0].dtype.itemsize if outputs else 0

    def bytes(self, name: str) -> int:
        return self.words(name) * self.itemsize(name)

    def near(self, name: str) -> bool:
        """True if a tensor is read from L2: it is small, and the graph itself computes it."""
        base = self.base(name)
        return base not in self.dag.inputs and self.bytes(base) < L2_SHARE * self.device.l2_bytes

    def _count(self, name: str) -> list[int]:
        return [hint(product(meta.shape), self.hints) for meta in self.dag.op(name).outputs]


def eager_calls(
    dag: OpDag, backward: bool, device: DeviceSpec, hints: Mapping[sympy.Symbol, int]
) -> tuple[Call, ...]:
    """Return the ATen calls that eager makes for one graph, in order, with predictions; views make none.

    backward: whether it is a backward graph. Ops of the forward pass that such a graph computes again are not
    counted, as eager has stored their results; ops that a forward graph computes ahead for the backward pass
    are counted there.
    """
    groups: dict[object, list[str]] = {}
    for name in dag.order:
        op = dag.op(name)
        if name not in dag.inputs and (op.call is None or op.call.backward == backward):
            groups.setdefault(name if op.call is None else op.call, []).append(name)
    tensors = Tensors(dag, device, hints)
    returned = {tensors.base(name) for name in dag.outputs}
    calls = (_call(tensors, names, returned) for names in groups.values())
    return tuple(call for call in calls if call is not None)


def _call(tensors: Tensors, names: list[str], returned: set[str]) -> Call | None:
    """Return some ops as one call of eager; None if it launches nothing."""
    dag, inside = tensors.dag, set(names)
    runs = [
        op
        for op in map(dag.op, names)
        if not (runs_no_kernel(op.target) or layout.is_view(op)) and op.target is not seed
    ]
    stored = [op.name for op in runs if op.outputs and _is_stored(tensors, op.name, inside, returned)]
    if not stored:
        return None
    read = _words_read(tensors, names)
    words_written, bytes_written = sum(map(tensors.words, stored)), sum(map(tensors.bytes, stored))
    call = runs[0].call
    if call is not None and call.target in MASKS:
        words_written, bytes_written = 2 * words_written, bytes_written + words_written
    masks = {i for i in read if _is_mask(dag.op(i), call)}
    sizes = {i: n * (1 if i in masks else tensors.itemsize(i)) for i, n in read.items()}
    products = [op for op in runs if op.kind is Kind.CONTRACTION]
    if products:
        alone = products if products[0].target in depthwise.CALLS else products[:1]  # a kernel each
        costs = [contraction_cost(op, tensors.device, tensors.hints) for op in alone]
        cost = one_after_the_other(costs)
    else:
        cost = eager_cost(
            bytes_read=sum(size for i, size in sizes.items() if not tensors.near(i)),
            bytes_near=sum(size for i, size in sizes.items() if tensors.near(i)),
            bytes_written=bytes_written,
            flops=sum(op.flops for op in runs),
            reduces=any(op.kind in (Kind.NORMALIZATION, Kind.REDUCTION, Kind.SCAN) for op in runs),
            device=tensors.device,
        )
    return Call(
        name=stored[-1],
        target=short_name(runs[-1].target) if call is None else call.target,
        kind=class_of(runs),
        ops=tuple(names),
        inputs=tuple(read),
        outputs=tuple(stored),
        words_read=sum(read.values()),
        words_written=words_written,
        flops=sum(op.flops for op in runs if op.kind is not Kind.RANDOM),
        cost=cost,
        source=next((op.source for op in runs if op.source is not None), None),
    )


def _is_mask(op: Op, reader: EagerCall | None) -> bool:
    """True if an operand of a call is, in eager, a mask that forward stored."""
    return reader is not None and op.call is not None and reader.backward and op.call.target in MASKS


def _words_read(tensors: Tensors, names: list[str]) -> dict[str, int]:
    """Return how many elements a call reads of each tensor from outside; of a table, those looked up."""
    dag, inside = tensors.dag, set(names)
    reads: dict[str, int] = {}
    for op in map(dag.op, names):
        for name in op.inputs:
            if name in inside or not dag.op(name).outputs:
                continue
            words = tensors.words(name)
            if op.kind in (Kind.ELEMENTWISE, Kind.LAYOUT):
                words = min(words, tensors.words(op.name))
            reads[name] = max(words, reads.get(name, 0))
    call = dag.op(names[0]).call
    if call is not None and call.target in PICKS:
        indices = [tensors.words(i) for i in reads if not dag.op(i).outputs[0].dtype.is_floating_point]
        reads = {name: min(words, max(indices, default=words)) for name, words in reads.items()}
    return reads


def _is_stored(tensors: Tensors, name: str, inside: set[str], returned: set[str]) -> bool:
    """True if the result of one of a call's ops is read outside the call, directly or through a view."""
    if name in returned:
        return True
    for user in tensors.dag.consumers(name):
        if user not in inside:
            return True
        if runs_no_kernel(tensors.dag.op(user).target) and _is_stored(tensors, user, inside, returned):
            return True
    return False
