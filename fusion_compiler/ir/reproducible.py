"""Find the values on which a discontinuous operation depends: each must be one number everywhere.

    y = x.sin(); y == y.amax()       a bfloat16 y that is float32 in one kernel and rounded in another
                                     has no element that is equal to its own maximum

A comparison, a rounding, the choice of a maximum: where such a use decides, the number that it sees has to be
the one that every other place sees. So these values, and all from which they are computed, are
*reproducible*: each is rounded to its dtype where it is computed, as if it had been stored, and computed by
the same arithmetic in every kernel (no shorter form of a function, no product fused into a sum). It is a
property of the program, known before anything is clustered. Where there is a gradient it is one of the joint
graph, so that forward and backward agree.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils.checkpoint import CheckpointPolicy

from fusion_compiler.ops.table import OpSpec, spec_of

_MARK = "fusion_compiler.reproducible"

# Discontinuous library calls; what they read is stored, but others may hold it as well.
_DISCONTINUOUS = frozenset({
    "argsort", "bernoulli", "bucketize", "cummax", "cummin", "equal", "grid_sampler_2d", "grid_sampler_3d",
    "histc", "isin", "kthvalue", "max_pool2d_with_indices", "max_pool3d_with_indices", "median", "mode",
    "multinomial", "nanmedian", "nonzero", "searchsorted", "sort", "topk", "unique2", "unique_consecutive",
    "unique_dim", "adaptive_max_pool2d", "adaptive_max_pool3d", "fractional_max_pool2d",
    "fractional_max_pool3d", "histogram", "_unique2", "unique_dim_consecutive", "isclose", "allclose",
})  # fmt: skip
# exp(x - m) / sum(exp(x - m)) is the same for every m: the maximum that these take decides nothing.
_SHIFTED = frozenset({"_softmax", "_log_softmax", "_safe_softmax", "logsumexp", "_logsumexp"})


def mark_reproducible(joint: fx.Graph) -> None:
    """Mark the reproducible values of a joint graph; their copies in forward and backward keep the mark.

    A reproducible sum is saved for backward and not added up again, which could be done in another order.
    """
    for node in reproducible_values(joint):
        node.meta[_MARK] = True
        spec = spec_of(node.target)
        if spec is not None and spec.combine in ("sum", "prod", "logsumexp"):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def is_joint(graph: fx.Graph) -> bool:
    """True if another graph computes values of this one again."""
    return any(node.meta.get(_MARK) for node in graph.nodes)


def reproducible_values(graph: fx.Graph) -> set[fx.Node]:
    """Return the floating-point values on which a discontinuous operation depends, as far back as clusters
    may reach."""
    reproducible = {node for node in graph.nodes if node.meta.get(_MARK)}
    stack = [n for node in graph.nodes if _is_discontinuous(node) for n in node.all_input_nodes]
    while stack:
        node = stack.pop()
        if node in reproducible or node.op != "call_function" or not _is_floating(node):
            continue
        reproducible.add(node)
        # What a library call reads is stored, and the call made once, unless a checkpoint asks for it again.
        if spec_of(node.target) is not None or node.meta.get("recompute") is not None:
            stack.extend(node.all_input_nodes)
    return reproducible


def _is_discontinuous(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload) or _origin(node) in _SHIFTED:
        return False
    spec: OpSpec | None = spec_of(node.target)
    if spec is None:
        return node.target._opname in _DISCONTINUOUS
    return spec.discontinuous or not _is_floating(node)


def _origin(node: fx.Node) -> str:
    """Return the operator that tracing took apart into a node."""
    original: Any = node.meta.get("original_aten")
    return getattr(original, "_opname", "")


def _is_floating(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()
