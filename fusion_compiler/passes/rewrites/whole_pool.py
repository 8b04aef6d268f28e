"""Average pooling to one element is a mean.

    adaptive_avg_pool2d(x, 1)   ->   mean(x, [-1, -2], keepdim=True)

So ATen computes it too, and then gives a channels-last result its strides in place, by `as_strided`: no
cluster holds that, and its gradient scatters. Strides of dimensions of size 1 are all that differs.
"""

from __future__ import annotations

import torch
from torch import fx

from fusion_compiler.capture.graphs import copied, emit
from fusion_compiler.ir.rewrite_note import Notes, RewriteNote

_aten = torch.ops.aten
RULE = "pooling to one element"
_RANKS: dict[object, int] = {
    _aten.adaptive_avg_pool1d.default: 1,
    _aten.adaptive_avg_pool2d.default: 2,
    _aten.adaptive_avg_pool3d.default: 3,
}


def average_whole(gm: fx.GraphModule) -> tuple[fx.GraphModule, Notes]:
    """Take means in `gm` (ATen above autograd) where whole images are pooled."""
    found = [node for node in gm.graph.nodes if _is_whole(node)]
    if not found:
        return gm, ()
    new, nodes = copied(gm)
    for node in (nodes[old] for old in found):
        dims = [-1 - d for d in range(_RANKS[node.target])]
        with new.graph.inserting_before(node):
            mean = emit(node, _aten.mean.dim, node.args[0], dims, True)
        node.replace_all_uses_with(mean)
        new.graph.erase_node(node)
    new.recompile()
    return new, tuple(RewriteNote(RULE, node.name, True, "a mean") for node in found)


def _is_whole(node: fx.Node) -> bool:
    rank = _RANKS.get(node.target)
    return rank is not None and all(s == 1 for s in node.meta["val"].shape[-rank:])
