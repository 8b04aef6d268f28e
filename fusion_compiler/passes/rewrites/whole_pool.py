"""Average pooling to one element is a mean.

    adaptive_avg_pool2d(x, 1)           ->   mean(x, [-1, -2], keepdim=True)
    avg_pool2d(x, [*x.shape[-2:]])      ->   the same

So ATen computes the first too, and then gives a channels-last result its strides in place, by
`as_strided`: no cluster holds that, and its gradient scatters. Strides of dimensions of size 1 are all that
differs.
"""

from __future__ import annotations

import torch
from torch import fx

from fusion_compiler.capture.graphs import arguments, copied, emit
from fusion_compiler.ir.decision import Decision, Decisions, Outcome
from fusion_compiler.ir.graph_pass import Pass

_aten = torch.ops.aten
RULE = "global average pool"
_RANKS: dict[object, int] = {
    _aten.adaptive_avg_pool1d.default: 1,
    _aten.adaptive_avg_pool2d.default: 2,
    _aten.adaptive_avg_pool3d.default: 3,
}


_WINDOWS: dict[object, int] = {
    _aten.avg_pool1d.default: 1,
    _aten.avg_pool2d.default: 2,
    _aten.avg_pool3d.default: 3,
}


def lower_global_pools(gm: fx.GraphModule) -> tuple[fx.GraphModule, Decisions]:
    """Take means in `gm` (ATen above autograd) where whole images are pooled."""
    found = [node for node in gm.graph.nodes if _is_whole(node)]
    if not found:
        return gm, ()
    new, nodes = copied(gm)
    for node in (nodes[old] for old in found):
        dims = [-1 - d for d in range((_RANKS | _WINDOWS)[node.target])]
        with new.graph.inserting_before(node):
            mean = emit(node, _aten.mean.dim, node.args[0], dims, True)
        node.replace_all_uses_with(mean)
        new.graph.erase_node(node)
    new.recompile()
    return new, tuple(Decision(RULE, node.name, Outcome.DONE, "a mean") for node in found)


def _is_whole(node: fx.Node) -> bool:
    if (rank := _RANKS.get(node.target)) is not None:
        return all(s == 1 for s in node.meta["val"].shape[-rank:])
    if (rank := _WINDOWS.get(node.target)) is None:
        return False
    named = arguments(node)
    x, kernel = named["self"].meta["val"], [*named["kernel_size"]]
    sizes, kernel = [*x.shape[-rank:]], kernel * rank if len(kernel) == 1 else kernel
    is_known = all(type(n) is int for n in (*sizes, *kernel)) and x.is_floating_point()
    return is_known and sizes == kernel and not any(named["padding"]) and not named.get("divisor_override")


GLOBAL_AVERAGE_POOL = Pass(
    RULE,
    lower_global_pools,
    does="Replace average pooling to one element by a mean.",
    when="the window is the whole image",
)
