"""Attention that is recognised by what it computes: a product, row-wise arithmetic, a softmax, a product.

    scores = q @ k^T;  scale, biases, masks, cap, views, casts;  p = softmax(...);  dropout, views;  p @ v

The search goes from the softmax forward to the product that sums over its axis, and back through the
arithmetic of scores to the product that has this axis from one operand alone, the keys. Which axes are heads,
queries and features follows from the two products (axes.py), however they are ordered, folded or spread.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily

from fusion_compiler.capture.graphs import arguments, between, mutated_nodes, refuse_effects
from fusion_compiler.ir.graph_pass import Refused
from fusion_compiler.ops.table import Kind, spec_of
from fusion_compiler.passes.rewrites.axes import (
    Axes,
    Dim,
    Layout,
    rearrangement,
    shape_of,
)
from fusion_compiler.passes.rewrites.constants import base_name, constant
from fusion_compiler.passes.rewrites.products import PRODUCTS, Product, product_of

_aten = torch.ops.aten
SOFTMAXES = {_aten.softmax.int, _aten._softmax.default, _aten.special_softmax.default}
_CASTS = {"to", "_to_copy", "type_as"}


@dataclass(frozen=True)
class Operand:
    """A tensor and the axes of its dimensions."""

    node: fx.Node
    layout: Layout


@dataclass(frozen=True)
class Bias:
    """factor * the tensor is added to the scores."""

    of: Operand
    factor: float


@dataclass(frozen=True)
class Fill:
    """Scores become `value` where the bool tensor is `hides`."""

    of: Operand
    hides: bool
    value: float


@dataclass(frozen=True)
class Scores:
    """The scores that a softmax reads: scale * query key^T + biases, filled.

    layout: the axes of their dimensions. capped: if it is a number, scores are scale * tanh(capped * query
    key^T).
    """

    layout: Layout
    scale: float = 1.0
    capped: float | None = None
    biases: tuple[Bias, ...] = ()
    fills: tuple[Fill, ...] = ()


@dataclass(frozen=True)
class Attention:
    """softmax(scores) value, and the nodes and axes that it is written in.

    batch: the axes beside rows and keys that scores share with query or key, as dimensions. inner: the axes
    that the first product sums over. features: the axes that only values have. root: the node of the
    attention's result, laid out as `layout`. inside: all nodes that only the attention needs.
    """

    query: Operand
    key: Operand
    value: Operand
    scores: Scores
    dropout: float
    batch: tuple[Dim, ...]
    rows: Dim
    keys: Dim
    inner: Dim
    features: Dim
    root: fx.Node
    layout: Layout
    inside: frozenset[fx.Node]
    axes: Axes
    products: tuple[fx.Node, fx.Node]


@dataclass(frozen=True)
class Softmax:
    """A softmax over the dimension `over` of `scores`. inside: its nodes; `result` is the last."""

    scores: fx.Node
    over: int
    result: fx.Node
    inside: frozenset[fx.Node]


@dataclass(frozen=True)
class _Step:
    """The effect of `node` on scores or probabilities. refusal: the reason why attention has no such step."""

    node: fx.Node
    effect: Callable[[Scores], Scores] = lambda scores: scores
    dropout: float = 0.0
    refusal: str = ""


def _softmax_of(node: fx.Node) -> Softmax | None:
    """Return `node` as a softmax, also written as exp(x - max(x)) / sum(exp(x - max(x))), or None."""
    if node.target in SOFTMAXES:
        named = arguments(node)
        return Softmax(
            named["self"], named["dim"] % named["self"].meta["val"].dim(), node, frozenset((node,))
        )
    if node.target is not _aten.div.Tensor or not all(isinstance(a, fx.Node) for a in node.args[:2]):
        return None
    exponentials, total = (a for a in node.args[:2] if isinstance(a, fx.Node))
    if exponentials.target is not _aten.exp.default or not _reduces(
        total, _aten.sum.dim_IntList, exponentials
    ):
        return None
    inside, scores = {node, exponentials, total}, exponentials.all_input_nodes[0]
    operands = [a for a in scores.args if isinstance(a, fx.Node)]
    if scores.target is _aten.sub.Tensor and len(operands) == 2:
        source, largest = operands
        chain = {scores}
        while largest.target in (_aten.detach.default, _aten.alias.default):
            chain.add(largest)
            largest = largest.all_input_nodes[0]
        if _reduces(largest, _aten.amax.default, source) and _over(largest) == _over(total):
            inside |= {*chain, largest}
            scores = source
    return Softmax(scores, _over(total), node, frozenset(inside))


def _reduces(node: fx.Node, target: OpOverload, source: fx.Node) -> bool:
    """True if a node reduces `source` along one dimension that it keeps."""
    if node.target is not target or node.args[0] is not source:
        return False
    named = arguments(node)
    return len(named["dim"] or ()) == 1 and named["keepdim"] and named.get("dtype") is None


def _over(reduction: fx.Node) -> int:
    named = arguments(reduction)
    return named["dim"][0] % named["self"].meta["val"].dim()


def attention_at(node: fx.Node) -> Attention | None:
    """Return the attention around a softmax, or None for other nodes and without a product on both sides.

    Raises Refused if there are products, and the nodes between are not attention, or not proved to be.
    """
    softmax = _softmax_of(node)
    if softmax is None:
        return None
    ways = list(_forward(softmax.result))
    if not ways:
        return None
    refusals: list[str] = []
    for first, before in _back(softmax.scores, set()):
        for second, after in ways:
            try:
                return _read(softmax, first, before, second, after)
            except Refused as refused:
                refusals.append(str(refused))
    if refusals:
        raise Refused(refusals[0])
    return None


# -- walking ------------------------------------------------------------------------------------------


def _back(node: Any, seen: set[fx.Node]) -> Iterator[tuple[fx.Node, tuple[_Step, ...]]]:
    """Yield the products that `node` may be computed from, with the steps from the product to `node`."""
    if not isinstance(node, fx.Node) or node in seen:
        return
    seen.add(node)
    if node.target in PRODUCTS:
        yield node, ()
        return
    for source, step in _steps(node):
        for product, steps in _back(source, seen):
            yield product, (*steps, step)


def _forward(node: fx.Node) -> Iterator[tuple[fx.Node, tuple[_Step, ...]]]:
    """Yield the products that read `node`, with the steps from `node` to the product."""
    for user in node.users:
        if user.target in PRODUCTS:
            yield user, ()
            continue
        for source, step in _after(user):
            if source is node:
                for product, steps in _forward(user):
                    yield product, (step, *steps)


def _after(node: fx.Node) -> Iterator[tuple[Any, _Step]]:
    """Yield the effects that a node may have on probabilities, each with the operand that would be these."""
    name = base_name(node)
    if name == "dropout":
        named = arguments(node)
        yield named["input"], _Step(node, dropout=named["p"] if named["train"] else 0.0)
    elif rearrangement(node) or name in _CASTS:
        yield from _steps(node)
    elif _is_elementwise(node):
        for source in node.all_input_nodes:
            yield source, _Step(node, refusal=f"{name} of the probabilities")


def _steps(node: fx.Node) -> Iterator[tuple[Any, _Step]]:
    """Yield the effects that a node may have on scores, each with the operand that would be these."""
    name = base_name(node)
    if rearrangement(node):
        yield node.all_input_nodes[0], _Step(node)
    elif name in _CASTS:
        source = arguments(node)["self"]
        kept = all(t.meta["val"].is_floating_point() for t in (source, node))
        same = source.meta["val"].device == node.meta["val"].device
        yield source, _Step(node, refusal="" if kept and same else "a cast of the scores")
    elif name == "tanh":
        yield arguments(node)["self"], _Step(node, _capped)
    elif name in _ARITHMETIC:
        yield from _ARITHMETIC[name](node, arguments(node))
    elif _is_elementwise(node):
        for source in node.all_input_nodes:
            yield source, _Step(node, refusal=f"{name} of the scores")


def _is_elementwise(node: fx.Node) -> bool:
    spec = spec_of(node.target) if node.op == "call_function" else None
    return spec is not None and spec.kind is Kind.ELEMENTWISE


def _multiplied(node: fx.Node, named: dict[str, Any]) -> Iterator[tuple[Any, _Step]]:
    pair = named["self"], named["other"]
    for source, other in (pair, pair[::-1]):
        factor = constant(other)
        if factor is not None:
            yield source, _Step(node, lambda s, f=factor: _scaled(s, f))
            return
    for source in pair:
        yield source, _Step(node, refusal="the scores are multiplied by a tensor")


def _divided(node: fx.Node, named: dict[str, Any]) -> Iterator[tuple[Any, _Step]]:
    divisor = constant(named["other"])
    if divisor and named.get("rounding_mode") is None:
        yield named["self"], _Step(node, lambda s: _scaled(s, 1 / divisor))
    else:
        yield named["self"], _Step(node, refusal="the scores are divided by a tensor")


def _added(node: fx.Node, named: dict[str, Any]) -> Iterator[tuple[Any, _Step]]:
    sign = -1.0 if base_name(node) == "sub" else 1.0
    one, other, alpha = named["self"], named["other"], float(named.get("alpha", 1))
    if isinstance(one, fx.Node) and isinstance(other, fx.Node):
        yield one, _Step(node, lambda s: _biased(s, node, other, sign * alpha))
        turned = "" if sign * alpha == 1.0 else "scores are subtracted"
        yield other, _Step(node, lambda s: _biased(s, node, one, 1.0), refusal=turned)
    else:
        yield one, _Step(node, refusal="" if constant(other) == 0 else "a number is added to the scores")


def _filled(node: fx.Node, named: dict[str, Any]) -> Iterator[tuple[Any, _Step]]:
    value = constant(named["value"])
    if value is None:
        yield named["self"], _Step(node, refusal="the scores are filled with data")
    else:
        yield named["self"], _Step(node, lambda s: _masked(s, node, named["mask"], True, value))


def _chosen(node: fx.Node, named: dict[str, Any]) -> Iterator[tuple[Any, _Step]]:
    for source, other, hides in (("self", "other", False), ("other", "self", True)):
        value = constant(named[other])
        if value is not None:
            fill = functools.partial(_masked, at=node, mask=named["condition"], hides=hides, value=value)
            yield named[source], _Step(node, fill)
        else:
            yield named[source], _Step(node, refusal="the scores are one of two tensors")


_ARITHMETIC: dict[str, Callable[[fx.Node, dict[str, Any]], Iterator[tuple[Any, _Step]]]] = {
    "mul": _multiplied,
    "div": _divided,
    "add": _added,
    "sub": _added,
    "masked_fill": _filled,
    "where": _chosen,
}


# -- reading ------------------------------------------------------------------------------------------


def _read(
    softmax: Softmax, one: fx.Node, before: tuple[_Step, ...], two: fx.Node, after: tuple[_Step, ...]
) -> Attention:
    """Return the attention of two products and the steps around a softmax. Raises Refused."""
    for step in (*before, *after):
        if step.refusal:
            raise Refused(step.refusal)
    first, second = product_of(one), product_of(two)
    if first is None or second is None:
        raise Refused("a product that is not of two tensors")
    axes = Axes()
    left, right, layout = first.layouts(axes, {})
    scores = _scores(axes, first, layout, before)
    keys = scores.layout[softmax.over]
    dropout, weights = _weights(axes, scores.layout, after)
    reads = after[-1].node if after else softmax.result
    if second.operands.count(reads) != 1 or second.node.target is _aten.baddbmm.default:
        raise Refused("the second product is of another form")
    side = second.operands.index(reads)
    sides = second.layouts(axes, {side: weights})
    root, result = _to_the_end(axes, second, sides[2])
    _check_numbers(first.node, second.node, softmax, before)
    now = axes.now
    keys, summed = now(keys), {a for x in second.inner for a in now(_dim(second, side, x, sides[side]))}
    if not keys or set(keys) != summed:
        raise Refused("the second product sums over another dimension than the softmax")
    factors = Operand(first.operands[0], left), Operand(first.operands[1], right)
    query, key = factors if _has(axes, factors[1], keys) else factors[::-1]
    if not _has(axes, key, keys) or set(keys) & _axes(axes, query):
        raise Refused("the softmax is not over the keys of a product")
    value = Operand(second.operands[1 - side], sides[1 - side])
    inner = {a for x in first.inner for a in now(_dim(first, 0, x, left))}
    values = _axes(axes, value)
    features = tuple(a for d in value.layout for a in now(d) if a not in {a for w in weights for a in now(w)})
    rows = _rows(axes, layout, _axes(axes, query) - _axes(axes, key) - values)
    batch = tuple(now(d) for d in layout)
    batch = tuple(d for d in (tuple(a for a in d if a not in (*rows, *keys)) for d in batch) if d)
    inside = _inside(softmax, first.node, before, after, second.node, root)
    attention = Attention(
        query, key, value, scores, dropout, batch, rows, keys,
        tuple(a for d in query.layout for a in now(d) if a in inner), features, root, result, inside, axes,
        (first.node, second.node),
    )  # fmt: skip
    _check_effects(attention)
    return attention


def _dim(product: Product, operand: int, letter: str, layout: Layout) -> Dim:
    return layout[product.letters[operand].index(letter)]


def _axes(axes: Axes, operand: Operand) -> set[int]:
    return {a for d in operand.layout for a in axes.now(d)}


def _has(axes: Axes, operand: Operand, keys: Dim) -> bool:
    return set(keys) <= _axes(axes, operand)


def _rows(axes: Axes, layout: Layout, free: set[int]) -> Dim:
    """Return the last dimension of the scores that only queries have."""
    for dim in reversed(layout):
        dim_axes = axes.now(dim)
        if dim_axes and set(dim_axes) <= free:
            return dim_axes
    return ()


def _scores(axes: Axes, product: Product, layout: Layout, steps: tuple[_Step, ...]) -> Scores:
    scores = Scores(layout)
    if product.node.target is _aten.baddbmm.default:
        named = arguments(product.node)
        scores = _scaled(scores, float(named["alpha"]))
        if named["beta"] != 0:
            scores = _biased(scores, product.node, named["self"], float(named["beta"]))
    for step in steps:
        moved = axes.through(step.node, scores.layout)
        if moved is not None:
            scores = replace(scores, layout=moved)
        elif len(shape_of(step.node)) != len(scores.layout):
            raise Refused("the scores are broadcast to more dimensions")
        scores = _rounded(step.effect(scores), step.node.meta["val"].dtype)
    return scores


def _rounded(scores: Scores, dtype: torch.dtype) -> Scores:
    """Round the numbers that masks fill in to `dtype`, in which some are infinite."""
    with unset_fake_temporarily():
        fills = tuple(Fill(f.of, f.hides, float(torch.tensor(f.value, dtype=dtype))) for f in scores.fills)
    return replace(scores, fills=fills)


def _capped(scores: Scores) -> Scores:
    if scores.biases or scores.fills or scores.capped is not None:
        raise Refused("tanh of masked scores")
    return replace(scores, scale=1.0, capped=scores.scale)


def _scaled(scores: Scores, factor: float) -> Scores:
    if factor == 1.0:
        return scores
    touched = scores.biases or scores.fills
    if not math.isfinite(factor) or factor == 0 or (touched and factor < 0):
        raise Refused(f"the scores are multiplied by {factor:g}")
    biases = tuple(Bias(b.of, b.factor * factor) for b in scores.biases)
    fills = tuple(Fill(f.of, f.hides, f.value * factor) for f in scores.fills)
    return replace(scores, scale=scores.scale * factor, biases=biases, fills=fills)


def _biased(scores: Scores, at: fx.Node, tensor: fx.Node, factor: float) -> Scores:
    if not tensor.meta["val"].is_floating_point():
        raise Refused("the scores are added to integers")
    if any(math.isfinite(f.value) for f in scores.fills):
        raise Refused("a bias is added to scores that a mask has filled")
    bias = Bias(_spread(scores, at, tensor), factor)
    return replace(scores, biases=(*scores.biases, bias))


def _masked(scores: Scores, at: fx.Node, mask: fx.Node, hides: bool, value: float) -> Scores:
    if mask.meta["val"].dtype is not torch.bool:
        raise Refused("a mask that is not bool")
    fill = Fill(_spread(scores, at, mask), hides, value)
    return replace(scores, fills=(*scores.fills, fill))


def _spread(scores: Scores, at: fx.Node, tensor: fx.Node) -> Operand:
    """Return the operand of a tensor that is broadcast to the scores at node `at`. Raises Refused."""
    sizes, scores_sizes = shape_of(tensor), shape_of(at)
    if len(sizes) > len(scores_sizes) or len(scores_sizes) != len(scores.layout):
        raise Refused("a mask with more dimensions than the scores")
    layout = scores.layout[len(scores_sizes) - len(sizes) :]
    if any(s == 1 and d for s, d in zip(scores_sizes, scores.layout, strict=True)) or any(
        s != 1 and not d for s, d in zip(scores_sizes, scores.layout, strict=True)
    ):
        raise Refused("a mask with more rows or heads than the scores")
    return Operand(tensor, tuple(() if s == 1 else d for s, d in zip(sizes, layout, strict=True)))


def _weights(axes: Axes, layout: Layout, steps: tuple[_Step, ...]) -> tuple[float, Layout]:
    """Return the dropout of the probabilities, and how they are laid out in the second product."""
    dropped = [s.dropout for s in steps if s.dropout]
    if len(dropped) > 1:
        raise Refused("two dropouts")
    for step in steps:
        layout = axes.through(step.node, layout) or layout
    return (dropped[0] if dropped else 0.0), layout


def _to_the_end(axes: Axes, product: Product, layout: Layout) -> tuple[fx.Node, Layout]:
    """Return (node, layout) of the last contiguous view or copy that alone reads the second product."""
    last = root, _ = product.node, layout
    while len(root.users) == 1 and rearrangement(next(iter(root.users))):
        (root,) = root.users
        try:
            layout = axes.through(root, layout) or layout
        except Refused:
            break
        if root.meta["val"].is_contiguous():
            last = root, layout
    return last


def _check_numbers(first: fx.Node, second: fx.Node, softmax: Softmax, steps: tuple[_Step, ...]) -> None:
    """Raise Refused for empty products, and for scores with more digits than a fused kernel has."""
    if 0 in shape_of(first) or 0 in shape_of(second):
        raise Refused("there is nothing to compute")
    dtypes = {n.meta["val"].dtype for n in (first, softmax.result, *(s.node for s in steps))}
    if torch.float64 in dtypes and second.meta["val"].dtype is not torch.float64:
        raise Refused("the scores are float64")


def _inside(
    softmax: Softmax, first: fx.Node, before: tuple[_Step, ...], after: tuple[_Step, ...],
    second: fx.Node, root: fx.Node,
) -> frozenset[fx.Node]:  # fmt: skip
    """Return every node that the attention replaces. Raises Refused if other nodes read one of them."""
    scores = {first, *(s.node for s in before)}
    weights = {*softmax.inside, *(s.node for s in after)}
    inside = scores | weights | {second, root}
    node = root
    while node is not second:
        inside.add(node)
        node = node.all_input_nodes[0]
    inside |= {  # full_like(scores) reads only the shape of the scores
        user for n in scores for user in n.users if constant(user) is not None and set(user.users) <= inside
    }
    for node in sorted(inside - {root}):
        if others := set(node.users) - inside:
            what = "scores" if node in scores else "probabilities" if node in weights else "result"
            raise Refused(f"{min(others).name} also reads the {what}")
    return frozenset(inside)


def _check_effects(attention: Attention) -> None:
    """Raise Refused if a tensor that the attention reads changes, or another node has an effect, between the
    attention's first node and its last."""
    inside, start, read = attention.inside, attention.products[0], set[fx.Node]()
    masks = (*attention.scores.biases, *attention.scores.fills)
    for operand in (attention.query, attention.key, attention.value, *(m.of for m in masks)):
        node = operand.node
        read.add(node)
        # The call may read what this is a view or a copy of.
        while rearrangement(node) or base_name(node) in _CASTS or getattr(node.target, "is_view", False):
            start, node = min(start, node), node.all_input_nodes[0]
            read.add(node)
    others = between(start, attention.root, inside)
    refuse_effects(others, "its products")
    if changed := mutated_nodes(others) & read:
        raise Refused(f"{min(changed).name} is changed in place")
    for node in inside:  # its nodes may change their own values in place
        if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
            if mutated_nodes([node]) - inside or len(node.all_input_nodes[0].users) > 1:
                raise Refused(f"{node.name} changes a tensor that other ops read")
