"""Maxima over windows are operators that clusters hold (`ir.max_pool`).

    max_pool2d(x, ...)         ->   max_pool(x, ...)[0]
    max_pool2d(relu(x), ...)   ->   relu(max_pool(x, ...)[0])

ATen's kernels read an image and write one, forward and backward; these operators join the norms and
activations around them. ReLU keeps the order of elements: it is computed for each window instead of each
element, and its gradient needs nothing of the image. Windows of many elements stay ATen's.
"""

from __future__ import annotations

import math
import operator
from typing import Any

from torch import fx

from fusion_compiler.capture.graphs import arguments, copied, emit
from fusion_compiler.ir.decision import Decision, Decisions, Outcome
from fusion_compiler.ir.graph_pass import Pass
from fusion_compiler.ir.max_pool import aten, max_pool
from fusion_compiler.ir.schema import is_view

RULE = "max-pool lowering"
MOST = 16  # elements of a window: more are read faster one after the other than all at once


def lower_max_pools(gm: fx.GraphModule) -> tuple[fx.GraphModule, Decisions]:
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
        image = named["self"]
        relu = image if _is_relu_of_windows(image) else None
        with new.graph.inserting_before(node):
            both = emit(node, max_pool, image if relu is None else relu.args[0], *geometry)
            largest = emit(node, operator.getitem, both, 0)
            result = largest if relu is None else emit(relu, aten.relu.default, largest)
        node.replace_all_uses_with(result)
        new.graph.erase_node(node)
        if relu is not None:
            new.graph.erase_node(relu)
    new.recompile()
    return new, tuple(Decision(RULE, node.name, Outcome.DONE, _described(node)) for node in found)


def _is_relu_of_windows(node: fx.Node) -> bool:
    """True for ReLU that pooling alone reads; where ReLU is in place, nothing else shows its memory."""
    if node.target not in (aten.relu.default, aten.relu_.default) or len(node.users) != 1:
        return False
    (source,) = node.all_input_nodes
    is_apart = source.op == "call_function" and not is_view(source.target) and len(source.users) == 1
    return node.target is aten.relu.default or is_apart


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


MAX_POOL = Pass(
    RULE,
    lower_max_pools,
    does="Replace max pooling by an operator that clusters hold.",
    when="windows have few elements",
    gains="the image is read and written once less",
)
