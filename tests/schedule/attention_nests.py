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
from dataclasses import dataclass, field

import torch

from fusion_compiler.ir.kernel import Buffer
from fusion_compiler.ir.loops import COLS, INNER, Coordinate, LoopNest, Reduce, Value
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


Scores = Callable[[Chain, Value], Value]


def chain(b: int, h: int, i: int, j: int, d: int, e: int) -> Chain:
    """Return a nest with the axes of attention, of these sizes. Nests have no axes of one element."""
    sizes = {"b": b, "h": h, "i": i, "e": e, "j": j, "d": d}
    return Chain({name: (sizes[name], INNER if name in "jd" else COLS) for name in AXES})


def products(nest: Chain, dtype: torch.dtype, names: tuple[str, str, str] = ("q", "k", "t")) -> Value:
    """Return the scores of queries and keys."""
    query, key, called = names
    q = nest.tensor(query, "b", "h", "i", "d", dtype=dtype)
    k = nest.tensor(key, "b", "h", "j", "d", dtype=dtype)
    return nest.call(called, nest.over("sum", nest.mul(q, k), "d"))


def weights(nest: Chain, scores: Value, suffix: str = "") -> tuple[Value, Value, Value]:
    """Return the largest score of a row, exp(score - largest) and their sum."""
    m = nest.call(f"m{suffix}", nest.over("max", scores, "j"))
    p = nest.exp(nest.sub(scores, m))
    return m, p, nest.call(f"l{suffix}", nest.over("sum", p, "j"))


def attention(
    b: int, h: int, i: int, j: int, d: int, e: int, scores: Scores, dtype: torch.dtype = torch.bfloat16
) -> Chain:
    """Return attention, forward: `out` [b, h, i, e] and `lse` [b, h, i], the logarithms of the sums."""
    nest = chain(b, h, i, j, d, e)
    m, p, total = weights(nest, scores(nest, products(nest, dtype)))
    v = nest.tensor("v", "b", "h", "j", "e", dtype=dtype)
    o = nest.call("o", nest.over("sum", nest.mul(p, v), "j"))
    nest.result("out", nest.div(o, total), "b", "h", "i", "e", dtype=dtype)
    nest.result("lse", nest.add(m, nest.op("log.default", total)), "b", "h", "i", dtype=torch.float32)
    return nest


def scaled(scale: float) -> Scores:
    return lambda nest, t: nest.mul(t, nest.constant(scale))


def capped(scale: float, cap: float) -> Scores:
    """Return cap * tanh(t * scale / cap)."""

    def scores(nest: Chain, t: Value) -> Value:
        return nest.mul(nest.op("tanh.default", nest.mul(t, nest.constant(scale / cap))), nest.constant(cap))

    return scores


def causal(inner: Scores) -> Scores:
    def scores(nest: Chain, t: Value) -> Value:
        visible = nest.compare("le.Tensor", nest.place("j"), nest.place("i"))
        return nest.where(visible, inner(nest, t), -math.inf)

    return scores


def soft_capped_causal(scale: float, cap: float) -> Scores:
    """Return the scores of program 4: where(j <= i, cap * tanh(t * scale / cap), -inf)."""
    return causal(capped(scale, cap))
