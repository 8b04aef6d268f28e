"""A number that a trace holds as a tensor of the host becomes a number of the graph's device.

    kept[..., -1:] = 0

    fill_(view, lift_fresh_copy(_tensor_constant0))   ->   fill_(view, full([], False, device="cuda"))

Otherwise what reads it would be a call: kernels read one device, a recorded graph has nothing of the host's,
and a graph with tensors of its own is not kept on disk.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from fusion_compiler.capture.graphs import copied, emit, fake_mode
from fusion_compiler.ir.decision import Decisions
from fusion_compiler.ir.graph_pass import Pass

_aten = torch.ops.aten
RULE = "scalar constants"


def make_constants_scalar(gm: fx.GraphModule) -> tuple[fx.GraphModule, Decisions]:
    """A graph in which literals are numbers; itself where it has none."""
    if not any(map(_readers_device, gm.graph.nodes)):
        return gm, ()
    made, _ = copied(gm)
    for node in list(made.graph.nodes):
        device = _readers_device(node)
        if device is None:
            continue
        (constant,) = node.args
        with unset_fake_temporarily():
            literal = getattr(made, constant.target)
            number = literal.item()
        with made.graph.inserting_before(node), fake_mode([node.meta["val"]]):
            full = emit(node, _aten.full.default, [], number, dtype=literal.dtype, device=device)
        node.replace_all_uses_with(full)
        made.graph.erase_node(node)
        if not constant.users:
            made.graph.erase_node(constant)
            if not made.graph.find_nodes(op="get_attr", target=constant.target):
                delattr(made, constant.target)
    made.recompile()
    return made, ()


def _readers_device(node: fx.Node) -> torch.device | None:
    """Where a literal's readers compute, which are on one device; None of anything else."""
    if node.target is not _aten.lift_fresh_copy.default or node.args[0].op != "get_attr":  # type: ignore[union-attr]
        return None
    literal = getattr(node.graph.owning_module, str(node.args[0].target), None)  # type: ignore[union-attr]
    if type(literal) is not torch.Tensor or literal.device.type != "cpu" or literal.dim() > 0:
        return None
    if literal.is_complex() or literal.is_quantized or literal.requires_grad:
        return None
    found = {getattr(user.meta.get("val"), "device", None) for user in node.users}
    return found.pop() if len(found) == 1 else None


SCALAR_CONSTANTS = Pass(
    RULE,
    make_constants_scalar,
    does="Replace a trace's host tensors of one number by numbers on the graph's device.",
    when="all readers are on one device",
    gains="kernels and CUDA graphs need nothing of the host",
)
