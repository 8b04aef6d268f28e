"""Fewer instructions for each score of a nest whose products have 16-bit factors.

    exp(s - m) / l                 =   2 ^ (s * log2 e - r)        r = m * log2 e + log2 l
    sum over j of (c * x) * y      =   c * (sum over j of x * y)   c a number
    a * (b * x)                    =   (a * b) * x

In a nest that computes scores again for a gradient, m and l are known for each row, and so is r. Such values
leave the nest: they are computed once before it, and not by each program that reads the row.

A score that is a number times another value takes log2 e into that number. A sum takes none: a mask that it
adds may be the lowest number, which a factor would make infinite. Then the nest computes
2 ^ ((s - m) * log2 e - log2 l).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx

from fusion_compiler.capture.graphs import emit
from fusion_compiler.ir.layout import is_view_node
from fusion_compiler.ir.walk import reached
from fusion_compiler.ops.schema import is_cast
from fusion_compiler.passes.nests.region import PRODUCTS, count, is_pointwise

_aten = torch.ops.aten
LOG2_E = math.log2(math.e)
_SUMS = (_aten.sum.dim_IntList, _aten.amax.default)
_KEEP_SIGN = (_aten.add.Tensor, _aten.mul.Tensor, _aten.div.Tensor, _aten.reciprocal.default)
LARGEST = torch.finfo(torch.float32).max
LEAST_SHIFT = -1e38  # of a row that sees nothing, so that the product with log2 e is finite


def simplify(graph: fx.Graph, statistics: Collection[fx.Node], positive: Collection[fx.Node]) -> None:
    """Rewrite, in place, the arithmetic of a nest's graph. statistics: its inputs that hold a value of each
    row. positive: its inputs that hold positive numbers only."""
    rows = rows_of(graph, statistics)
    for power in graph.find_nodes(op="call_function", target=_aten.exp.default):
        _in_base_2(power, rows, positive)
    for product in graph.find_nodes(op="call_function", target=_aten.bmm.default):
        _factor_out(product)
    for target in (_aten.mul.Tensor, _aten.div.Tensor):
        for node in graph.find_nodes(op="call_function", target=target):
            _merge(node)
    graph.eliminate_dead_code()


def rows_of(graph: fx.Graph, statistics: Collection[fx.Node]) -> set[fx.Node]:
    """Return the values that are computed, element by element, from statistics of rows and from inputs that
    are no larger."""
    largest = max(map(count, statistics), default=0)
    rows, small = {*statistics}, set[fx.Node]()
    for node in graph.nodes:
        if count(node) > largest or not (node.op == "placeholder" or is_pointwise(node)):
            continue
        if small.issuperset(node.all_input_nodes):
            small.add(node)
            if not rows.isdisjoint(node.all_input_nodes):
                rows.add(node)
    return rows


def is_positive(node: fx.Node, positive: Collection[fx.Node] = ()) -> bool:
    """True of a value that is zero or positive everywhere: exponentials, and what is computed of such ones.
    positive: nodes of which that is true."""

    def is_source(node: fx.Node) -> bool:
        if node.target is _aten.clamp_min.default:
            return isinstance(node.args[1], int | float) and node.args[1] >= 0
        return node in positive or node.target in (_aten.exp.default, _aten.exp2.default)

    def keeps_sign(node: fx.Node) -> bool:
        if node.target not in _KEEP_SIGN:
            return node.target in _SUMS or is_cast(node.target) or is_view_node(node)
        numbers = [*node.kwargs.values(), *(a for a in node.args if not isinstance(a, fx.Node))]
        return all(isinstance(n, int | float) and n >= 0 for n in numbers)

    def operands(node: fx.Node) -> list[fx.Node]:
        return node.all_input_nodes if keeps_sign(node) and not is_source(node) else []

    return all(is_source(n) or keeps_sign(n) for n in reached([node], operands))


def hoist(graph: fx.Graph, rows: Collection[fx.Node]) -> fx.Graph:
    """Move the computation of row values out of a nest's graph, and return a graph of the same inputs that
    computes them. The nest's graph loses the inputs that only row values read, and receives one for each
    result behind the others."""
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    results = [
        n for n in graph.nodes
        if n in rows and not _is_input(n) and any(user not in rows for user in n.users)
    ]  # fmt: skip
    before, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in inputs:
        copies[node] = before.placeholder(node.name)
    behind = reached(results, lambda n: n.all_input_nodes)
    for node in graph.nodes:
        if node in behind and node.op != "placeholder":
            copies[node] = before.node_copy(node, copies.__getitem__)
    before.output(tuple(copies[n] for n in results))
    last = inputs[-1]
    for node in results:
        with graph.inserting_after(last):
            last = graph.placeholder(f"row_{node.name}")
        last.meta = dict(node.meta)
        node.replace_all_uses_with(last)
    graph.eliminate_dead_code()
    for node in inputs:
        if results and not node.users:
            graph.erase_node(node)
    return before


def _is_input(node: fx.Node) -> bool:
    """True of an input and of views of one."""
    while is_view_node(node):
        node = node.all_input_nodes[0]
    return node.op == "placeholder"


def _in_base_2(power: fx.Node, rows: Collection[fx.Node], positive: Collection[fx.Node]) -> None:
    """Replace exp(s - m), divided by a positive sum if that is all it is for, by a power of two."""
    difference = power.args[0]
    if not isinstance(difference, fx.Node) or difference.target is not _aten.sub.Tensor:
        return
    scores, shift = difference.args
    if not isinstance(scores, fx.Node) or shift not in rows or difference.kwargs:
        return
    result, total = power, None
    if len(power.users) == 1:
        divisor = _divisor(user := next(iter(power.users)), power)
        if divisor is not None and divisor in rows and is_positive(divisor, positive):
            result, total = user, divisor

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return emit(result, target, *args, **kwargs)

    with power.graph.inserting_before(result):
        if (exponent := _times(scores, LOG2_E, call)) is not None:
            least = call(_aten.clamp_min.default, shift, LEAST_SHIFT)
            subtracted = call(_aten.mul.Tensor, least, LOG2_E)
            if total is not None:
                subtracted = call(_aten.add.Tensor, subtracted, call(_aten.log2.default, total))
        else:
            exponent = call(_aten.mul.Tensor, difference, LOG2_E)
            subtracted = None if total is None else call(_aten.log2.default, total)
        if subtracted is not None:
            exponent = call(_aten.sub.Tensor, exponent, subtracted)
        result.replace_all_uses_with(call(_aten.exp2.default, exponent))


def _divisor(node: fx.Node, dividend: fx.Node) -> fx.Node | None:
    """Return what a node divides another one by; None if it does not divide it."""
    others = [n for n in node.all_input_nodes if n is not dividend]
    if len(node.args) != 2 or len(others) != 1:
        return None
    if node.target is _aten.div.Tensor and node.args[0] is dividend:
        return others[0]
    is_product = node.target is _aten.mul.Tensor and others[0].target is _aten.reciprocal.default
    return others[0].all_input_nodes[0] if is_product else None


def _times(node: fx.Node, factor: float, call: Callable[..., fx.Node]) -> fx.Node | None:
    """Emit the product of a value with a positive number, which is merged with a number that is there
    already; None if there is none."""
    if (parts := _number_of(node)) is not None:
        return call(_aten.mul.Tensor, parts[0], parts[1] * factor)
    if node.target in PRODUCTS and node.target is not _aten.baddbmm.default:
        return call(_aten.mul.Tensor, node, factor)
    if node.target in (_aten.scalar_tensor.default, _aten.full.default, _aten.masked_fill.Scalar):
        *before, value = node.args
        product = float(value) * factor  # type: ignore[arg-type]
        if abs(product) > LARGEST and not math.isinf(value):  # type: ignore[arg-type]
            return None
        if node.target is _aten.masked_fill.Scalar:
            before[0] = _times(before[0], factor, call)  # type: ignore[arg-type]
        return None if None in before else call(node.target, *before, product, **node.kwargs)
    if node.target is _aten.where.self:
        condition, *values = node.args
        inner = [_times(v, factor, call) if isinstance(v, fx.Node) else None for v in values]
        return None if None in inner else call(_aten.where.self, condition, *inner)
    if is_view_node(node):
        inner = _times(node.all_input_nodes[0], factor, call)
        return None if inner is None else call(node.target, inner, *node.args[1:], **node.kwargs)
    return None


def _number_of(node: fx.Node) -> tuple[fx.Node, float] | None:
    """Return the value and the number whose product a node is, or None if it is none."""
    if node.op != "call_function" or not node.meta["val"].is_floating_point() or len(node.args) != 2:
        return None
    operand, number = node.args
    if not isinstance(operand, fx.Node) or not isinstance(number, int | float) or node.kwargs:
        return None
    if node.target in (_aten.mul.Tensor, _aten.mul.Scalar):
        return operand, number
    if node.target in (_aten.div.Tensor, _aten.div.Scalar) and number:
        return operand, 1.0 / number
    return None


def _merge(node: fx.Node) -> None:
    """Make one product with a number of two, if nothing else reads the inner one."""
    outer = _number_of(node)
    if outer is None or len(outer[0].users) > 1 or (inner := _number_of(outer[0])) is None:
        return
    node.target, node.args = _aten.mul.Tensor, (inner[0], outer[1] * inner[1])


def _factor_out(product: fx.Node) -> None:
    """Multiply a product, and not the scores that are one of its factors, by the numbers in them."""
    for position, scores in enumerate(product.args):
        if not isinstance(scores, fx.Node) or count(scores) <= count(product):
            continue
        with product.graph.inserting_before(product):
            inner, factor = _without_numbers(scores)
        if factor == 1.0 or abs(factor) > 1:  # without a large factor, fp16 would lose digits of small scores
            continue
        product.update_arg(position, inner)
        with product.graph.inserting_after(product):
            result = emit(product, _aten.mul.Tensor, product, factor)
        product.replace_all_uses_with(result, lambda user, result=result: user is not result)


def _without_numbers(node: fx.Node) -> tuple[fx.Node, float]:
    """Return a value without the numbers that it is multiplied by, and their product."""
    if len(node.users) > 1:
        return node, 1.0
    if (parts := _number_of(node)) is not None:
        inner, factor = _without_numbers(parts[0])
        return inner, factor * parts[1]
    is_masked = node.target is _aten.masked_fill.Scalar and node.args[2] == 0
    if is_view_node(node) or is_masked:
        operands = [n for n in node.args[:1] if isinstance(n, fx.Node)]
    elif node.target is _aten.mul.Tensor and len(node.all_input_nodes) == 2:  # no square
        operands = node.all_input_nodes
    else:
        return node, 1.0
    every = {operand: _without_numbers(operand) for operand in operands}
    factor = math.prod(factor for _, factor in every.values())
    if factor == 1.0:
        return node, 1.0
    args = [every[a][0] if a in every else a for a in node.args]  # type: ignore[index]
    return emit(node, node.target, *args, **node.kwargs), factor  # type: ignore[arg-type]
