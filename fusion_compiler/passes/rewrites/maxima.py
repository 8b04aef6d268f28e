"""Maxima over windows are element-wise work.

    max_pool2d(x, ...)   ->   max_pool(x, ...)[0]   (`ir.max_pool`)

ATen's kernels read an image and write one, forward and backward; taken apart they join the norms and
activations around them. Windows of many elements stay ATen's.
"""

from __future__ import annotations

import math
import operator
from typing import Any

from torch import fx

from fusion_compiler.capture.graphs import arguments, copied, emit
from fusion_compiler.ir.max_pool import aten, max_pool
from fusion_compiler.ir.rewrite_note import Notes, RewriteNote

RULE = "maxima over windows"
MOST = 16  # elements of a window: more are read faster one after the other than all at once


def compare_windows(gm: fx.GraphModule) -> tuple[fx.GraphModule, Notes]:
    """Put operators that clusters hold in the place of such pooling in `gm` (ATen above autograd)."""
    pools = gm.graph.find_nodes(op="call_function", target=aten.max_pool2d.default)
    found = [node for node in pools if _is_small(node)]
    if not found:
        return gm, ()
    new, nodes = copied(gm)
    for node in (nodes[old] for old in found):
        named = arguments(node)
        kernel = _pair(named["kernel_size"])
        geometry = kernel, _pair(named["stride"] or kernel), _pair(named["padding"]), named["ceil_mode"]
        with new.graph.inserting_before(node):
            both = emit(node, max_pool, named["self"], *geometry)
            largest = emit(node, operator.getitem, both, 0)
        node.replace_all_uses_with(largest)
        new.graph.erase_node(node)
    new.recompile()
    return new, tuple(RewriteNote(RULE, node.name, True, _described(node)) for node in found)


def _is_small(node: fx.Node) -> bool:
    named = arguments(node)
    x, kernel = named["self"].meta["val"], _pair(named["kernel_size"])
    sizes = all(isinstance(n, int) and n for n in x.shape[-2:])
    dense = all(s <= k for s, k in zip(_pair(named["stride"] or kernel), kernel, strict=True))
    few = math.prod(kernel) <= MOST and _pair(named["dilation"]) == [1, 1]
    return sizes and dense and few and x.is_floating_point()


def _pair(n: Any) -> list[int]:
    several = list(n) if isinstance(n, list | tuple) else [n]
    return [several[0], several[-1]]


def _described(node: fx.Node) -> str:
    return f"windows of {' x '.join(map(str, _pair(arguments(node)['kernel_size'])))} in a cluster"
