"""A factor of each row of a product's result multiplies the operand's rows instead.

    bmm(a, w) * s[..., None]   ->   bmm(a * s[..., None], w)

A mixture weights the results of its experts so. In the kernel that computes `a` the factor costs nothing.
Behind the product it is a pass over the result, as a scatter follows that no kernel takes part in; and its
gradient reads the result, which is saved for nothing else.

This applies if the operand is no wider than the result, as the factor's gradient then adds up the operand's
rows instead of the result's, and not in float16, in whose range a small factor may leave nothing of `a`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from fusion_compiler.capture.graphs import arguments, emit
from fusion_compiler.ir.dag import CONVERSIONS
from fusion_compiler.ir.graph_pass import Pass
from fusion_compiler.ir.layout import is_view_node
from fusion_compiler.ops.own.experts import expert_mm
from fusion_compiler.ops.products import Factors, factors_of
from fusion_compiler.passes.rewrites.engine import Nodes, Replacement, Replacements
from fusion_compiler.passes.rewrites.routing import GROUPED

_aten = torch.ops.aten
RULE = "scaled rows"
_WIDE_RANGE = (torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class _Scaled:
    """result = product * factor, and nothing else reads the product."""

    result: fx.Node
    product: fx.Node
    factor: fx.Node

    @property
    def rows(self) -> fx.Node:
        """Return the operand that has a row for each of the product's."""
        operand: fx.Node = self.product.args[0]  # type: ignore[assignment]
        return operand


def _look(node: fx.Node, written: set[fx.Node]) -> Replacement | None:
    scaled = _scaled(node)
    if scaled is None:
        return None
    if not written.isdisjoint({scaled.factor, scaled.product, *scaled.product.all_input_nodes}):
        return None

    def moved(nodes: Nodes) -> fx.Node:
        return _moved(_Scaled(*(nodes[n] for n in (scaled.result, scaled.product, scaled.factor))))

    return Replacement(moved, _reason(scaled))


def _reason(scaled: _Scaled) -> str:
    before, behind = _width(scaled.rows), _width(scaled.product)
    return f"{before} columns are multiplied before the product, not {behind} behind"


def _scaled(result: fx.Node) -> _Scaled | None:
    operands = result.args[:2]
    if not all(isinstance(n, fx.Node) and isinstance(n.meta.get("val"), torch.Tensor) for n in operands):
        return None
    for product, factor in (operands, operands[::-1]):
        scaled = _Scaled(result, product, factor)  # type: ignore[arg-type]
        if _is_product(scaled.product, result) and _is_of_rows(scaled) and _is_free(scaled):
            return scaled
    return None


def _is_product(node: fx.Node, user: fx.Node) -> bool:
    """True if a node is a product without a bias that only `user` reads."""
    factors = Factors("self", "mat2", "bias") if node.target is GROUPED else factors_of(node.target)
    if factors is None or node.target is expert_mm or {*node.users} != {user}:
        return False
    named = arguments(node)
    rows, value = named[factors.left].meta["val"], node.meta["val"]
    biased = factors.added is not None and named[factors.added] is not None
    biased = biased or named.get("out_dtype") not in (None, value.dtype)
    return not biased and value.dtype in _WIDE_RANGE and rows.shape[:-1] == value.shape[:-1]


def _is_of_rows(scaled: _Scaled) -> bool:
    """True if the factor is the same along the columns, and makes the product no larger."""
    value, product, factor = (n.meta["val"] for n in (scaled.result, scaled.product, scaled.factor))
    if value.shape != product.shape or not factor.dtype.is_floating_point or factor.dim() < 1:
        return False
    return factor.shape[-1] == 1 and product.shape[-1] != 1


def _is_free(scaled: _Scaled) -> bool:
    """True if a kernel computes the operand for the product alone, and has no more columns to add up."""
    wide = [_width(n) for n in (scaled.rows, scaled.product)]
    if not all(isinstance(n, int) for n in wide) or wide[0] > wide[1]:
        return False
    node = scaled.rows
    while _hands_on(node) and len(node.users) == 1:
        node = node.all_input_nodes[0]
    is_one = len(node.users) == 1 and isinstance(node.target, OpOverload)
    return is_one and torch.Tag.pointwise in node.target.tags  # type: ignore[union-attr]


def _hands_on(node: fx.Node) -> bool:
    converts = getattr(node.target, "_opname", "") in CONVERSIONS
    return converts or is_view_node(node) or node.target is _aten.flatten.using_ints


def _width(node: fx.Node) -> Any:
    return node.meta["val"].shape[-1]


def _moved(scaled: _Scaled) -> fx.Node:
    result, product, rows = scaled.result, scaled.product, scaled.rows
    multiplied = emit(result, _aten.mul.Tensor, rows, scaled.factor)
    multiplied = _as(multiplied, rows.meta["val"].dtype)
    target: Any = product.target
    multiplied = emit(product, target, multiplied, *product.args[1:], **product.kwargs)
    return _as(multiplied, result.meta["val"].dtype)


def _as(node: fx.Node, dtype: torch.dtype) -> fx.Node:
    if node.meta["val"].dtype == dtype:
        return node
    return emit(node, _aten.to.dtype, node, dtype)


SCALED_ROWS = Pass(
    RULE,
    Replacements(RULE, (_aten.mul.Tensor,), _look),
    does="Multiply the rows of a product's operand by a factor, instead of those of its result.",
    when="the operand is no wider than the result, and not float16",
    gains="a pass over the result, and a saved value, fewer",
    rounds_as_eager=False,
)
