"""A number that a trace holds as a tensor of the host becomes a number of the graph's device.

    kept[..., -1:] = 0

    fill_(view, lift_fresh_copy(_tensor_constant0))   ->   fill_(view, full([], False, device="cuda"))

Otherwise the reader would be a call outside kernels, which read one device; CUDA graphs have no tensors of
the host, and a graph with tensors of its own is not kept on disk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from fusion_compiler.capture.graphs import emit
from fusion_compiler.ir.graph_pass import Pass
from fusion_compiler.passes.rewrites.constants import literal
from fusion_compiler.passes.rewrites.engine import Nodes, Replacement, Replacements

_aten = torch.ops.aten
RULE = "scalar constants"


def _look(node: fx.Node, written: set[fx.Node]) -> Replacement | None:
    constant: Any = node.args[0]
    number = literal(constant)
    if number is None or number.device.type != "cpu" or number.dim() > 0:
        return None
    if number.is_complex() or number.is_quantized or number.requires_grad:
        return None
    devices = {getattr(user.meta.get("val"), "device", None) for user in node.users}
    device = devices.pop() if len(devices) == 1 else None
    if device is None:
        return None
    with unset_fake_temporarily():
        value = number.item()

    def full(nodes: Nodes) -> fx.Node:
        return emit(nodes[node], _aten.full.default, [], value, dtype=number.dtype, device=device)

    return Replacement(full, "a number of the host is one of the device", (constant,))


SCALAR_CONSTANTS = Pass(
    RULE,
    Replacements(RULE, (_aten.lift_fresh_copy.default,), _look),
    does="Replace a trace's host tensors of one number by numbers on the graph's device.",
    when="all readers are on one device",
    gains="kernels and CUDA graphs need nothing of the host",
)
