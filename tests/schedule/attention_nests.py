"""Loop nests whose reductions read reductions over the same axis, for tests: attention in several forms.

    axes b, h, i, e, j, d
    t = sum(q[b, h, i, d] * k[b, h, j, d], {d})
    s = scores(t)                                   a scale, a soft cap, a mask, a bias
    m = max(s, {j}); p = exp(s - m); l = sum(p, {j})
    o = sum(p * v[b, h, j, e], {j}) / l

`d` and `j` are inner axes, since reductions are over them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fusion_compiler.ir.kernel import Buffer
from fusion_compiler.ir.loops import COLS, INNER, Coordinate, InRange, LoopNest, Reduce, Value
from tests.hand_made import contiguous
from tests.nests import Nest

AXES = ("b", "h", "i", "e", "j", "d")


@dataclass
class Chain(Nest):
    """A nest whose nodes may have names, which directives use.

    called: the names, by node. tensors: the shapes and dtypes of the buffers.
    """

    called: dict[int, str] = field(default_factory=dict[int, str])
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = field(
        default_factory=dict[str, tuple[tuple[int, ...], torch.dtype]]
    )

    def tensor(self, name: str, *axes: str, dtype: torch.dtype) -> Value:
        """Load a contiguous tensor that has these axes."""
        self.declare(name, *axes, dtype=dtype)
        return self.load(name, *axes, dtype=dtype)

    def result(self, name: str, value: Value, *axes: str, dtype: torch.dtype) -> None:
        """Store a value as a contiguous tensor that has these axes."""
        self.declare(name, *axes, dtype=dtype)
        self.store(name, value, *axes, dtype=dtype)

    def declare(self, name: str, *axes: str, dtype: torch.dtype) -> None:
        sizes = [self.axes[axis][0] for axis in axes]
        self.tensors[name] = tuple(size for size in sizes if isinstance(size, int)) or (1,), dtype

    def call(self, name: str, value: Value) -> Value:
        self.called[value.node] = name
        return value

    def over(self, combine: str, value: Value, *axes: str) -> Value:
        numbers = frozenset(list(self.axes).index(axis) for axis in axes)
        return self.push(Reduce(combine, value.node, numbers, torch.float32))

    def place(self, axis: str) -> Value:
        """Return the number of an element along an axis."""
        return self.push(Coordinate(self.index({axis: 1}), torch.int64))

    def compare(self, target: str, left: Value, right: Value | int) -> Value:
        return self.op(target, left, right, dtype=torch.bool)

    def where(self, condition: Value, value: Value, other: float) -> Value:
        return self.op("where.self", condition, value, self.constant(other))

    def exp(self, value: Value) -> Value:
        return self.op("exp.default", value)

    def div(self, value: Value, by: Value) -> Value:
        return self.op("div.Tensor", value, by)

    def nest(self) -> LoopNest:
        loops = super().nest()
        names = tuple(self.called.get(n, name) for n, name in enumerate(loops.names))
        return LoopNest(loops.axes, loops.nodes, loops.stores, names)

    def memory(self) -> dict[str, Buffer]:
        """Return the buffers of the nest by name."""
        return {name: contiguous(name, shape, dtype) for name, (shape, dtype) in self.tensors.items()}


def chain(*sizes: int) -> Chain:
    """Return a nest with the axes b, h, i, e, j and d, of these sizes."""
    inner = {"j", "d"}
    pairs = zip(AXES, sizes, strict=True)
    return Chain({name: (size, INNER if name in inner else COLS) for name, size in pairs})


def products(nest: Chain, dtype: torch.dtype, names: tuple[str, str, str] = ("q", "k", "t")) -> Value:
    """Return the scores of queries and keys."""
    query, key, called = names
    q = nest.tensor(query, "b", "h", "i", "d", dtype=dtype)
    k = nest.tensor(key, "b", "h", "j", "d", dtype=dtype)
    return nest.call(called, nest.over("sum", nest.mul(q, k), "d"))


@dataclass(frozen=True)
class Variant:
    """A way to compute scores of products, in a nest and in PyTorch.

    nest: the scores of the products. plain: the same of tensors [b, h, i, j] and of other inputs.
    inputs: by name, the axes of each other input. sink: the name of an input of which every row has another
    score without a value.
    """

    nest: Callable[[Chain, Value], Value]
    plain: Callable[..., Tensor]
    inputs: dict[str, str] = field(default_factory=dict[str, str])
    sink: str = ""


def attention(variant: Variant, dtype: torch.dtype, *sizes: int) -> Chain:
    """Return attention, forward: `out` [b, h, i, e] and `lse` [b, h, i], the logarithms of the sums.

    sizes: of the axes b, h, i, e, j and d.
    """
    nest = chain(*sizes)
    scores = variant.nest(nest, products(nest, dtype))
    m = nest.call("m", nest.over("max", scores, "j"))
    sink = nest.tensor(variant.sink, *variant.inputs[variant.sink], dtype=dtype) if variant.sink else None
    top = m if sink is None else nest.op("maximum.default", m, sink)
    p = nest.exp(nest.sub(scores, top))
    total = nest.call("l", nest.over("sum", p, "j"))
    if sink is not None:
        total = nest.add(total, nest.exp(nest.sub(sink, top)))
    v = nest.tensor("v", "b", "h", "j", "e", dtype=dtype)
    o = nest.call("o", nest.over("sum", nest.mul(p, v), "j"))
    nest.result("out", nest.div(o, total), "b", "h", "i", "e", dtype=dtype)
    nest.result("lse", nest.add(top, nest.op("log.default", total)), "b", "h", "i", dtype=torch.float32)
    return nest


def plain(variant: Variant, q: Tensor, k: Tensor, v: Tensor, **inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `attention` computes, in PyTorch: `out` and `lse`."""
    sink = inputs.pop(variant.sink, None)
    scores = variant.plain(q @ k.mT, **inputs)
    top = scores.amax(-1, keepdim=True)
    if sink is not None:
        top = torch.maximum(top, sink[:, None, None])
    p = (scores - top).exp()
    total = p.sum(-1, keepdim=True)
    if sink is not None:
        total = total + (sink[:, None, None] - top).exp()
    dtype = torch.promote_types(q.dtype, torch.float32)
    return p.to(v.dtype) @ v / total, (top + total.log())[..., 0].to(dtype)


def positions(s: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers of the queries and keys of scores [..., i, j]."""
    return torch.arange(s.shape[-2])[:, None], torch.arange(s.shape[-1])


def scaled(scale: float) -> Variant:
    return Variant(lambda nest, t: nest.mul(t, nest.constant(scale)), lambda s: s * scale)


def soft_capped(scale: float, cap: float) -> Variant:
    """Return cap * tanh(t * scale / cap)."""

    def nest_scores(nest: Chain, t: Value) -> Value:
        return nest.mul(nest.op("tanh.default", nest.mul(t, nest.constant(scale / cap))), nest.constant(cap))

    return Variant(nest_scores, lambda s: cap * torch.tanh(s * (scale / cap)))


def masked(
    inner: Variant, nest_mask: Callable[[Chain], Value], mask: Callable[..., Tensor], **inputs: str
) -> Variant:
    """Return the scores of another variant where a condition holds, and -inf elsewhere."""

    def scores(nest: Chain, t: Value) -> Value:
        return nest.where(nest_mask(nest), inner.nest(nest, t), -math.inf)

    def plain_scores(s: Tensor, **tensors: Tensor) -> Tensor:
        i, j = positions(s)
        visible = mask(i, j, **{name: tensors.pop(name) for name in inputs})
        return inner.plain(s, **tensors).masked_fill(~visible, -math.inf)

    return Variant(scores, plain_scores, inner.inputs | inputs, inner.sink)


def causal(inner: Variant) -> Variant:
    return masked(
        inner, lambda nest: nest.compare("le.Tensor", nest.place("j"), nest.place("i")), lambda i, j: j <= i
    )


def soft_capped_causal(scale: float, cap: float) -> Variant:
    """Return the scores of program 4: where(j <= i, cap * tanh(t * scale / cap), -inf)."""
    return causal(soft_capped(scale, cap))


def window(inner: Variant, size: int) -> Variant:
    """Return scores of the last `size` keys up to each query."""
    return masked(
        inner,
        lambda nest: nest.push(InRange(nest.index({"i": 1, "j": -1}), 0, size)),
        lambda i, j: (i >= j) & (i - j < size),
    )


def padded(inner: Variant) -> Variant:
    """Return scores of the first keys of each batch; `length` says how many."""

    def mask(nest: Chain) -> Value:
        return nest.compare("lt.Tensor", nest.place("j"), nest.tensor("length", "b", dtype=torch.int64))

    return masked(inner, mask, lambda i, j, length: j < length[:, None, None, None], length="b")


def alibi(scale: float) -> Variant:
    """Return t * scale + slope[h] * (j - i)."""

    def scores(nest: Chain, t: Value) -> Value:
        apart = nest.push(Coordinate(nest.index({"j": 1, "i": -1}), torch.float32))
        slope = nest.tensor("slope", "h", dtype=torch.float32)
        return nest.add(nest.mul(t, nest.constant(scale)), nest.mul(slope, apart))

    def plain_scores(s: Tensor, slope: Tensor) -> Tensor:
        i, j = positions(s)
        return s * scale + slope[:, None, None] * (j - i)

    return Variant(scores, plain_scores, {"slope": "h"})


def biased(scale: float) -> Variant:
    """Return t * scale + bias[h, i, j]."""

    def scores(nest: Chain, t: Value) -> Value:
        bias = nest.tensor("bias", "h", "i", "j", dtype=torch.float32)
        return nest.add(nest.mul(t, nest.constant(scale)), bias)

    return Variant(scores, lambda s, bias: s * scale + bias, {"bias": "hij"})


def with_sink(inner: Variant) -> Variant:
    """Return the same scores, beside which every row of a head has another one, without a value."""
    return replace(inner, inputs=inner.inputs | {"sink": "h"}, sink="sink")


def gradient_of_queries(variant: Variant, dtype: torch.dtype, *sizes: int) -> Chain:
    """Return the gradient of the queries of `scaled` or masked scores, without the factor of the scale.

    p = exp(scores - lse);  dq = sum(p * (sum(do * v, {e}) - delta) * k, {j});  delta = sum(do * o, {e})

    sizes: of the axes b, h, i, d, j, e and c, along which q and k have the features d where they make scores.
    """
    names = ("b", "h", "i", "d", "j", "e", "c")
    inner = {"j", "e", "c"}
    pairs = zip(names, sizes, strict=True)
    nest = Chain({name: (size, INNER if name in inner else COLS) for name, size in pairs})
    q = nest.tensor("q", "b", "h", "i", "c", dtype=dtype)
    k = nest.tensor("k", "b", "h", "j", "c", dtype=dtype)
    t = nest.call("t", nest.over("sum", nest.mul(q, k), "c"))
    lse = nest.tensor("lse", "b", "h", "i", dtype=torch.float32)
    p = nest.exp(nest.sub(variant.nest(nest, t), lse))
    do = nest.tensor("do", "b", "h", "i", "e", dtype=dtype)
    v = nest.tensor("v", "b", "h", "j", "e", dtype=dtype)
    dp = nest.call("dp", nest.over("sum", nest.mul(do, v), "e"))
    ds = nest.mul(p, nest.sub(dp, nest.tensor("delta", "b", "h", "i", dtype=torch.float32)))
    key = nest.tensor("k", "b", "h", "j", "d", dtype=dtype)
    dq = nest.call("dq", nest.over("sum", nest.mul(ds, key), "j"))
    nest.result("dq", dq, "b", "h", "i", "d", dtype=dtype)
    return nest
