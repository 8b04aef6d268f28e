"""The law of carried reductions: the rank of terms, what bounds them, and the reasons of refusals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload

from fusion_compiler.ir.loops import Compute, Constant, LoopNest, Value
from fusion_compiler.schedule.carried import (
    Carried,
    Values,
    carried_of,
    rescaled,
    squares_of,
    step_of,
)
from fusion_compiler.schedule.carried import (
    Terms as CarriedTerms,
)
from fusion_compiler.schedule.placement import Placement
from fusion_compiler.schedule.separated import separated
from fusion_compiler.schedule.verifier import refusal
from tests.nest_values import node_values
from tests.schedule import attention_nests as nests
from tests.schedule.attention_nests import Chain

Terms = Callable[[Chain, Value, Value], Value]  # of a nest, scores x [i, j] and values w [j, e]


def verdict(terms: Terms, combine: str = "sum") -> Carried | str:
    nest = nests.chain(2, 2, 8, 4, 8, 4)
    x = nest.tensor("x", "i", "j", dtype=torch.float32)
    w = nest.tensor("w", "j", "e", dtype=torch.float32)
    total = nest.call("r", nest.over(combine, terms(nest, x, w), "j"))
    return carried_of(nest.nest(), total.node)


def top(nest: Chain, x: Value) -> Value:
    return nest.call("m", nest.over("max", x, "j"))


def mean(nest: Chain, x: Value) -> Value:
    return nest.call("mu", nest.over("sum", nest.mul(x, nest.constant(0.125)), "j"))


def shifted(nest: Chain, x: Value) -> Value:
    return nest.exp(nest.sub(x, top(nest, x)))


def log_softmax(nest: Chain, x: Value) -> Value:
    y = nest.sub(x, top(nest, x))
    total = nest.call("l", nest.over("sum", nest.exp(y), "j"))
    return nest.sub(y, nest.op("log.default", total))


def twice(nest: Chain, value: Value) -> Value:
    return nest.mul(value, nest.constant(2.0))


def guarded(nest: Chain, value: Value) -> Value:
    return nest.where(nest.compare("gt.Scalar", value, -(2**62)), value, 0.0)


CARRIED: dict[str, Terms] = {
    "exp(x - m)": lambda n, x, w: shifted(n, x),
    "exp(x - m) * x": lambda n, x, w: n.mul(shifted(n, x), w),
    "exp((x - m) * 2)": lambda n, x, w: n.exp(twice(n, n.sub(x, top(n, x)))),
    "exp(x - m * 2)": lambda n, x, w: n.exp(n.sub(twice(n, x), twice(n, top(n, x)))),
    "exp(m - x)": lambda n, x, w: n.exp(n.sub(n.call("m", n.over("min", x, "j")), x)),
    "exp(x - m) * exp(x - m)": lambda n, x, w: n.mul(shifted(n, x), n.exp(n.sub(w, top(n, w)))),
}
REFUSED: dict[str, tuple[Terms, str]] = {
    "sigmoid": (
        lambda n, x, w: n.op("sigmoid.default", n.sub(x, top(n, x))),
        "sigmoid(x - m) is not separable: rank > 8",
    ),
    "distance": (
        lambda n, x, w: n.op("abs.default", n.sub(x, mean(n, x))),
        "abs(x - mu) is not separable: rank > 8",
    ),
    "rounding": (
        lambda n, x, w: n.op("round.default", n.div(x, top(n, x))),
        "round(x / m) is not separable: rank > 8",
    ),
    "square": (
        lambda n, x, w: n.mul(n.sub(x, mean(n, x)), n.sub(x, mean(n, x))),
        "(x - mu) * (x - mu) has rank 3, but factors that are not carried",
    ),
    "entropy": (
        lambda n, x, w: n.mul(n.exp(y := log_softmax(n, x)), y),
        "exp(x - m - log(l)) * (x - m - log(l)) has rank 2, but factors that are not carried",
    ),
    "other data": (
        lambda n, x, w: n.exp(n.sub(w, top(n, x))),
        "exp(x - m) is not bounded by its maximum",
    ),
    "too small a shift": (
        lambda n, x, w: n.exp(n.sub(twice(n, x), top(n, x))),
        "exp(x - m) is not bounded by its maximum",
    ),
    "a guarded maximum": (
        lambda n, x, w: n.exp(n.sub(x, guarded(n, top(n, x)))),
        "exp(x - where(gt(m), m, 0)) is not bounded by its maximum",
    ),
    "no exponential": (
        lambda n, x, w: n.mul(n.op("rsqrt.default", n.call("v", n.over("sum", n.mul(x, x), "j"))), w),
        "rsqrt(v) * x has rank 1, but factors that are not carried",
    ),
    "no reduction": (lambda n, x, w: x, "r reads no reduction over the same axes"),
}


@pytest.mark.parametrize("text", CARRIED)
def test_terms_of_rank_one_are_carried(text: str) -> None:
    carried = verdict(CARRIED[text])
    assert isinstance(carried, Carried) and (carried.rank, carried.text, carried.empty) == (1, text, True)


@pytest.mark.parametrize("name", REFUSED)
def test_other_terms_are_refused_with_a_reason(name: str) -> None:
    terms, reason = REFUSED[name]
    assert verdict(terms) == reason


def test_a_factor_that_is_shifted_needs_the_sum_without_it() -> None:
    def terms(nest: Chain, x: Value, w: Value, with_sum: bool) -> Value:
        y = nest.sub(x, top(nest, x))
        p = nest.exp(y)
        if with_sum:
            nest.over("sum", p, "j")
        return nest.mul(p, y)

    carried = verdict(lambda n, x, w: terms(n, x, w, with_sum=True))
    assert isinstance(carried, Carried) and carried.rank == 2 and carried.plain is not None
    reason = "exp(x - m) * (x - m) has rank 2, and there is no sum without the factor x - m"
    assert verdict(lambda n, x, w: terms(n, x, w, with_sum=False)) == reason


@pytest.mark.parametrize(
    ("name", "ranks"), [("entropy", [1, 2]), ("softmax times values", [1, 1]), ("norm", []), ("square", None)]
)
def test_sums_are_taken_apart_until_the_law_allows_them(name: str, ranks: list[int] | None) -> None:
    """The square of x - mean stays: it needs the mean of all elements, not that of those so far."""
    softmax: Terms = lambda n, x, w: n.mul(n.exp(log_softmax(n, x)), w)  # noqa: E731
    terms = {"softmax times values": softmax, "norm": REFUSED["no exponential"][0]}
    nest = nests.chain(2, 2, 8, 4, 8, 4)
    x = nest.tensor("x", "i", "j", dtype=torch.float32)
    w = nest.tensor("w", "j", "e", dtype=torch.float32)
    value = (terms.get(name) or REFUSED[name][0])(nest, x, w)
    nest.result("out", nest.call("r", nest.over("sum", value, "j")), "i", "e", dtype=torch.float32)
    loops = nest.nest()
    apart = separated(loops)
    laws = [carried_of(apart, n) for n in range(len(apart.nodes))]
    assert [law.rank for law in laws if isinstance(law, Carried)] == (ranks or [])
    if ranks is None:
        assert len(apart.nodes) == len(loops.nodes)
        return
    tensors = {"x": torch.randn(8, 8), "w": torch.randn(8, 4)}
    before, after = node_values(loops, tensors), node_values(apart, tensors)
    torch.testing.assert_close(after[apart.stores[0].value], before[loops.stores[0].value])


def test_a_maximum_of_what_waits_is_refused() -> None:
    assert verdict(lambda n, x, w: shifted(n, x), "max") == "r is no sum, but the max of exp(x - m)"


def test_a_sink_leaves_something_in_a_row_without_elements() -> None:
    """exp(x - max(m, sink)) is zero there, and not NaN."""
    carried = verdict(lambda n, x, w: n.exp(n.sub(x, n.op("maximum.default", top(n, x), n.constant(0.5)))))
    assert isinstance(carried, Carried) and not carried.empty


def test_the_verifier_refuses_what_the_law_does() -> None:
    nest = nests.chain(2, 2, 8, 4, 8, 4)
    x = nest.tensor("x", "i", "j", dtype=torch.float32)
    total = nest.over("sum", nest.op("sigmoid.default", nest.sub(x, top(nest, x))), "j")
    nest.result("out", nest.call("r", total), "i", dtype=torch.float32)
    text = (
        "split(j, 4); place(b, GRID); place(h, GRID); place(i, GRID); place(j.o, LOOP); place(e, GRID); "
        "place(d, GRID); place(j.i, LANES); combine(r, CARRIED); 4 warps"
    )
    placement = Placement.parse(text)
    assert refusal(nest.nest(), placement) == "sigmoid(x - m) is not separable: rank > 8"


def test_a_carried_reduction_needs_a_loop() -> None:
    nest = nests.attention(nests.scaled(1.0), torch.bfloat16, 2, 2, 8, 4, 8, 4)
    text = (
        "place(b, GRID); place(h, GRID); place(i, GRID); place(j, LANES); place(d, LANES); place(e, LANES); "
        "combine(l, CARRIED); 4 warps"
    )
    reason = "l is carried by a loop over its axis, and there are 0"
    assert refusal(nest.nest(), Placement.parse(text)) == reason


@dataclass(frozen=True)
class Numbers(Values[Tensor]):
    """Values that are tensors."""

    loops: LoopNest

    def computed(self, node: Compute, operands: Mapping[int, Tensor]) -> Tensor:
        values = {name: operands[a.node] if isinstance(a, Value) else a for name, a in node.operands}
        return node.target(*values.values())

    def fixed(self, number: int) -> Tensor:
        node = self.loops.nodes[number]
        return torch.tensor(node.value if isinstance(node, Constant) else 0.0, dtype=torch.float64)

    def finite(self, number: int, value: Tensor) -> Tensor:
        return torch.where(value.isfinite(), value, 0.0)

    def combined(self, operator: OpOverload, left: Tensor, right: Tensor) -> Tensor:
        return operator(left, right)


def test_sums_of_parts_are_merged_by_the_law() -> None:
    """The sum of each of a row's three parts, one of them -inf, is moved to the maximum of all."""
    nest = nests.chain(2, 2, 8, 4, 8, 4)
    x = nest.tensor("x", "i", "j", dtype=torch.float32)
    y = nest.sub(x, m := top(nest, x))
    power = nest.exp(y)
    plain = nest.call("l", nest.over("sum", power, "j"))
    total = nest.call("r", nest.over("sum", nest.mul(power, y), "j"))
    nest.result("out", nest.mul(plain, total), "i", dtype=torch.float32)
    loops = nest.nest()
    laws = [carried_of(loops, n.node) for n in (plain, total)]
    row = 300 * torch.randn(3, 8, dtype=torch.float64)
    row[1] = -torch.inf
    peaks = row.amax(1)
    finite = torch.where(peaks.isfinite(), peaks, 0.0)[:, None]
    powers = (row - finite).exp()
    sums = [powers.sum(1), torch.where(powers > 0, powers * (row - finite), 0.0).sum(1)]
    values, moved = Numbers(loops), list[Tensor]()
    for law, part in zip(laws, sums, strict=True):
        assert isinstance(law, Carried)
        step = partial(step_of, loops, before={m.node: peaks}, now={m.node: peaks.max()}, values=values)
        moved.append(rescaled(law, part, moved[0] if moved else None, step, values))
    off = row[row > -torch.inf] - peaks.max()
    torch.testing.assert_close(moved[0].sum(), off.exp().sum())
    torch.testing.assert_close(moved[1].sum(), (off.exp() * off).sum())


def test_moments_of_parts_are_merged_by_the_law() -> None:
    nest = nests.chain(2, 2, 8, 4, 8, 4)
    x = nest.tensor("x", "i", "j", dtype=torch.float32)
    total = nest.call("s", nest.over("sum", x, "j"))
    mean = nest.mul(total, nest.constant(0.125))
    off = nest.sub(x, mean)
    squares = nest.call("r", nest.over("sum", nest.mul(off, off), "j"))
    nest.result("out", squares, "i", dtype=torch.float32)
    loops = nest.nest()
    law, values = squares_of(loops, total.node, squares.node), Numbers(loops)
    assert law.rank == CarriedTerms(loops, loops.reduction(squares.node)).rank() == 3
    row = torch.randn(3, 8, dtype=torch.float64) + 1e4
    now = {mean.node: row.mean()}
    step = partial(step_of, loops, before={mean.node: row.mean(1)}, now=now, values=values)
    moved = rescaled(law, row.var(1, correction=0) * 8, torch.tensor(8.0), step, values)
    torch.testing.assert_close(moved.sum(), row.var(correction=0) * 24)
