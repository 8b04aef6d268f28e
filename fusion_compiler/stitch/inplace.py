"""What the captured program writes into tensors of its caller, such as a decoder's cache of keys and values.

AOTAutograd makes the program functional and lets it end in `copy_(argument, result)`. Where the result
is the argument with something put into it, the whole is copied twice for a few new elements:

    cache_1 = index_put(cache, where, new)            cache_1 = index_put_(cache, where, new)
    attend(cache_1)                           ->      attend(cache_1)
    copy_(cache, cache_1)

Small results that are written into arguments (the statistics of batch norms) are copied together at the end,
by one call instead of one for each.

Other results are not written over dead tensors: the allocator gives a dead tensor's memory to the next
result anyway, and at the peak of the models that were measured nothing is dead (the logits, which the caller
keeps, and their gradient).
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.stitch.order import Step, root, written

_COPY = torch.ops.aten.copy_.default
SMALL = 1 << 16  # bytes: of what is copied together


def in_place(plan: FusionPlan, steps: Sequence[Step]) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    """Calls that can write into their first operand: name -> the operator that does; and the copies
    that this leaves without an effect: name -> the step whose result is theirs.

    steps: in the order in which they run.
    """
    nodes: dict[str, fx.Node] = {node.name: node for node in plan.dag.module.graph.nodes}
    order = {step.name: i for i, step in enumerate(steps)}
    returned = {root(plan.dag, name) for name in plan.dag.outputs}
    operators: dict[str, Any] = {}
    copies: dict[str, str] = {}
    for step in steps:
        node = nodes.get(step.name)
        if node is None or node.target is not _COPY:
            continue
        target, result = node.args[:2]
        if not isinstance(target, fx.Node) or not isinstance(result, fx.Node) or result.name not in order:
            continue
        operator = _writing(result)
        others = [c for c in steps if target.name in c.reads and c not in (step, steps[order[result.name]])]
        if (
            operator is not None
            and target.op == "placeholder"
            and result.args[0] is target
            and _same_memory(target, result)
            and all(root(plan.dag, n.name) != target.name for n in _operands(result)[1:])
            and result.name not in returned
            and all(order[c.name] < order[result.name] for c in others)
        ):
            operators[result.name] = operator
            copies[step.name] = result.name
    return operators, copies


def together(plan: FusionPlan, steps: Sequence[Step], elided: Container[str]) -> frozenset[str]:
    """Copies of small results into arguments that nothing reads or writes afterwards, if there are several.

    steps: in the order in which they run. elided: those without an effect.
    """
    nodes: dict[str, fx.Node] = {node.name: node for node in plan.dag.module.graph.nodes}
    returned = {root(plan.dag, name) for name in plan.dag.outputs}
    found: dict[str, str] = {}  # name -> the argument
    last = {name: i for i, step in enumerate(steps) for name in step.reads}
    for i, step in enumerate(steps):
        node = nodes.get(step.name)
        if node is None or node.target is not _COPY or step.name in elided or step.name in returned:
            continue
        target, result = node.args[:2]
        if isinstance(target, fx.Node) and isinstance(result, fx.Node) and target.op == "placeholder":
            if last[target.name] == i and _is_small(target, result):
                found[step.name] = target.name
    calls = [nodes[step.name] for step in steps if step.name in nodes]
    written = {call.all_input_nodes[0].name for call in calls if call.target is _COPY}
    sources = {name: root(plan.dag, nodes[name].all_input_nodes[1].name) for name in found}
    alone = {name for name, source in sources.items() if source in written}
    return frozenset(found.keys() - alone) if len(found) - len(alone) > 1 else frozenset()


def _is_small(target: fx.Node, result: fx.Node) -> bool:
    a, b = target.meta.get("val"), result.meta.get("val")
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    sizes = (*a.shape, *b.shape)
    static = all(type(n) is int for n in sizes) and a.layout is b.layout is torch.strided
    return static and a.shape == b.shape and a.device == b.device and a.numel() * a.itemsize <= SMALL


def _writing(node: fx.Node) -> Any:
    """`index_put_` for `index_put` and the like: the same operator that writes into its first operand."""
    overload: Any = node.target
    if not isinstance(overload, torch._ops.OpOverload):
        return None
    name, _, variant = str(overload._schema.name).partition("::")[2], None, overload._overloadname
    packet = getattr(torch.ops.aten, f"{name}_", None)
    found = getattr(packet, variant, None)
    if found is None or overload.namespace != "aten":
        return None
    same = [a.name for a in found._schema.arguments] == [a.name for a in overload._schema.arguments]
    return found if same and written(found) == (0,) else None


def _operands(node: fx.Node) -> list[fx.Node]:
    """The nodes among the arguments, as often as they stand there."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def _same_memory(a: fx.Node, b: fx.Node) -> bool:
    """Whether two results have one shape, the same strides and one dtype."""
    x, y = a.meta.get("val"), b.meta.get("val")
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return False
    return x.dtype == y.dtype and x.shape == y.shape and x.stride() == y.stride()
