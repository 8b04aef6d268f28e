"""Concatenations and what is like them, over the space of one piece: right, and without a condition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion_compiler as fc
from fusion_compiler.codegen.emit import schedules_of
from fusion_compiler.ir.loops import InRange, LoopNest
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.passes.lower.index_splits import index_splits_of
from fusion_compiler.passes.lower.lower import lower
from fusion_compiler.passes.lower.space import Illegal
from tests.exactness import Compiled, Schedules, cramped, not_as_close, rounding_noise, wide


def x(*shape: int) -> Tensor:
    return torch.randn(shape)


@dataclass(frozen=True)
class Joined:
    """pieces: the largest number of stores to one result, forward; 1 where it stays whole. conditions: some
    pieces are not made in one way."""

    fn: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    pieces: int
    conditions: bool = False


def beside(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    product = a * b
    return torch.cat([product.sin(), product.cos(), b], -1), product.sum(0), product + 1


def read_again(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    joined = torch.cat([a * b, a + b], -1)
    return joined, joined.sin(), joined.view(-1, 2, 5).transpose(0, 1).contiguous()


def softmaxes(a: Tensor) -> Tensor:
    return torch.cat([torch.softmax(part, -1) for part in a.chunk(3, -1)], -1)


def rotated(q: Tensor, cos: Tensor) -> Tensor:
    first, second = q[..., : q.shape[-1] // 2], q[..., q.shape[-1] // 2 :]
    return q * cos + torch.cat([-second, first], -1) * cos


def interleaved(q: Tensor, cos: Tensor) -> Tensor:
    even, odd = q[..., ::2], q[..., 1::2]
    return torch.stack((even * cos - odd, even + odd * cos), -1).flatten(-2)


def norms_of_pairs(q: Tensor) -> Tensor:
    return torch.stack([torch.softmax(q[..., ::2], -1), q[..., 1::2].exp()], -1)


def summed(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    joined = torch.cat([a * b, a + b], -1)
    return joined, joined.sum(0), joined.amax(0, keepdim=True) * 2, (a * b).sum(0)


def summed_across(a: Tensor) -> tuple[Tensor, ...]:
    """Softmaxes of parts, so that a piece is the space, beside sums that no piece has."""
    joined = torch.cat([torch.softmax(a, -1), torch.softmax(-a, -1)], -1)
    return joined, joined.sum(-1), joined.sum(), joined.view(-1, 2, 5).sum((0, 2))


def gated(x: Tensor, bias: Tensor) -> Tensor:
    first, second = (x + bias).chunk(2, -1)
    return F.silu(first) * second


CASES = {
    "first": Joined(lambda a, b: torch.cat([a.sin(), b.cos()]), (x(3, 5), x(3, 5)), 2),
    "middle, with an input": Joined(
        lambda a, b, c: torch.cat([a.sin(), b, c.cos()], 1), (x(4, 5, 3), x(4, 5, 3), x(4, 5, 3)), 3
    ),
    "last, from anywhere in memory": Joined(
        lambda a, b: torch.cat([a.sin(), b.cos()], -1),
        (x(41)[1:].view(8, 5), x(8, 11)[:, 3:8]),
        2,
    ),
    "one part twice": Joined(lambda a: torch.cat([a.sin(), (y := a.cos()), y], 1), (x(4, 5),), 3),
    "in front": Joined(lambda a, b: torch.stack([a.sin(), b.cos()]), (x(3, 5), x(3, 5)), 2),
    "numbers": Joined(lambda a, b: torch.stack([a.sin(), b.cos()]), (x(), x()), 2),
    "nested": Joined(
        lambda a, b: torch.cat([torch.cat([a, b.sin()], 1), torch.cat([b, a.sin()], 1)]),
        (x(4, 5), x(4, 5)),
        2,
        conditions=True,
    ),
    "whole multiples": Joined(
        lambda q, k, v: torch.cat([q.sin(), k.cos(), v], 1), (x(3, 20), x(3, 5), x(3, 5)), 6
    ),
    "neither": Joined(lambda a, b: torch.cat([a.sin(), b.cos()], 1), (x(4, 5), x(4, 7)), 1),
    "beside a piece and a sum": Joined(beside, (x(4, 5), x(4, 5)), 3),
    "beside what reads it": Joined(read_again, (x(4, 5), x(4, 5)), 2),
    "reduced": Joined(lambda a: torch.cat([a, a.sin()], -1).sum(-1), (x(4, 5),), 1),
    "of reductions": Joined(softmaxes, (x(4, 15),), 3),
    "of reductions, side by side": Joined(
        lambda a, b: torch.stack([torch.softmax(a, -1), torch.softmax(b, -1), b], 1),
        (x(4, 2, 5), x(4, 2, 5)),
        3,
    ),
    "summed over rows": Joined(summed, (x(4, 5), x(4, 5)), 2),
    "summed across": Joined(summed_across, (x(4, 5),), 1),
    "gradient summed over rows": Joined(gated, (x(9, 10), x(10)), 1),
    "rotated": Joined(rotated, (x(2, 3, 8), x(3, 8)), 2),
    "padded": Joined(lambda a: F.pad(a.sin(), (0, 0, 3, 0)), (x(3, 5),), 2),
    "padded by less": Joined(lambda a: F.pad(a.sin(), (0, 0, 1, 0)), (x(5, 3),), 6),
    "padded by less than a sector": Joined(lambda a: F.pad(a.sin(), (1, 0)), (x(3, 5),), 1),
    "padded by a sector": Joined(lambda a: F.pad(a.sin(), (8, 0)), (x(3, 16),), 3),
    "padded both ways": Joined(lambda a: F.pad(a.sin(), (5, 0, 3, 0)), (x(3, 5),), 1),
    "written range": Joined(lambda a, b: torch.slice_scatter(a, b.sin(), 1, -4), (x(4, 8), x(4, 4)), 2),
    "written by twos": Joined(
        lambda a, b: torch.slice_scatter(a, b.sin(), 1, 3, 6, 2), (x(4, 8), x(4, 2)), 2, True
    ),
    "interleaved": Joined(interleaved, (x(2, 3, 8), x(3, 4)), 2),
    "interleaved, of another order, from an odd place": Joined(
        lambda q, cos: interleaved(q.transpose(0, 1), cos), (x(81)[1:].view(5, 2, 8), x(5, 4)), 2
    ),
    "interleaved by row": Joined(norms_of_pairs, (x(7, 10),), 2),
    "interleaved by four": Joined(
        lambda a: torch.stack([a[..., i::4] * (i + 1.5) for i in range(4)], -1), (x(3, 20),), 4
    ),
    "interleaved with a constant": Joined(
        lambda a: torch.stack([a[..., ::2] * 2, torch.ones(5)], -1), (x(10),), 2
    ),
}


def pieces_of(plan: FusionPlan) -> int:
    return max(n for nest in nests_of(plan) for n in Counter(s.buffer for s in nest.stores).values())


def nests_of(plan: FusionPlan) -> list[LoopNest]:
    return [nest for cluster in plan.clusters for nest in cluster.nests]


# Small blocks meet every mask; pairs are printed differently where one block holds everything.
RUNS = [(name, cramped) for name in CASES] + [(n, schedules_of) for n in CASES if "interleaved" in n]


@pytest.mark.sample(12)
@pytest.mark.parametrize(("name", "schedules"), RUNS)
def test_pieces_are_exact(name: str, schedules: Schedules) -> None:
    """Values and gradients."""
    case = CASES[name]
    compiled = Compiled(case.fn, schedules=schedules)
    ours, eager = gradients(compiled, case.inputs), gradients(case.fn, case.inputs)
    exact = gradients(case.fn, wide(case.inputs))
    noise = rounding_noise((*case.inputs, *eager), (*wide(case.inputs), *exact))
    for our, their, truth in zip(ours, eager, exact, strict=True):
        problem = not_as_close(our, their, truth, noise)
        assert problem is None, problem
    forward = compiled.plans[0]
    assert pieces_of(forward) == case.pieces
    has_conditions = any(isinstance(n, InRange) for nest in nests_of(forward) for n in nest.nodes)
    assert has_conditions == case.conditions or case.pieces == 1


def gradients(fn: Callable[..., Any], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Results, and the gradients of a sum of theirs with the same weights for every dtype."""
    inputs = tuple(i.detach().requires_grad_() for i in inputs)
    results = fn(*inputs)
    results = list(results) if isinstance(results, tuple | list) else [results]
    weights = [torch.arange(1, y.numel() + 1, dtype=y.dtype).div(y.numel()).view(y.shape) for y in results]
    return [y.detach() for y in results] + list(torch.autograd.grad(results, inputs, weights))


@pytest.mark.parametrize("dim", [-1, 0, (0, 1)])
def test_a_reduction_has_pieces_only_where_it_keeps_the_cut(dim: int | tuple[int, ...]) -> None:
    def joined(a: Tensor) -> tuple[Tensor, ...]:
        both = torch.cat([torch.softmax(a, 0), torch.softmax(-a, 0)], -1)
        return both, both.sum(dim)

    compiled = Compiled(joined)
    compiled(x(4, 5))
    dag = compiled.plans[0].dag
    ops = tuple(n for n in dag.order if n not in dag.inputs)
    (split,) = index_splits_of(dag, ops, dag.outputs)
    if dim == 0:
        stores = lower(dag, ops, dag.outputs, index_split=split).stores
        assert Counter(s.buffer for s in stores) == dict.fromkeys(dag.outputs, 2)
    else:
        with pytest.raises(Illegal, match="across the pieces"):
            lower(dag, ops, dag.outputs, index_split=split)


def test_symbolic_sizes_are_pieces_too() -> None:
    fast = fc.compile(
        lambda a, b: torch.cat([a * b, b.sin()], -1) + 1, backend="interpret", dynamic=True, strict=True
    )
    for shape in ((3, 5), (4, 9)):
        a, b = x(*shape), x(*shape)
        want = torch.cat([a.double() * b.double(), b.double().sin()], -1) + 1
        torch.testing.assert_close(fast(a, b).double(), want, rtol=1e-6, atol=1e-6)
    (plan,) = fast.plan
    assert pieces_of(plan) == 2 and not isinstance(nests_of(plan)[0].axes[0].size, int)


MIXED = {
    "integers that no longer wrap": lambda i, f, h: torch.cat([i, f], -1) * 3,
    "a product that eager rounds": lambda i, f, h: torch.cat([h * h, f], -1),
    "interleaved": lambda i, f, h: torch.stack([f, h + 1], -1),
    "written range": lambda i, f, h: torch.slice_scatter(i, 1e3 * f[:, :2], 1, 0, 2) + 1,
}


@pytest.mark.parametrize("numerics", ["float32", "eager"])
@pytest.mark.parametrize("name", MIXED)
def test_parts_of_other_dtypes_become_the_results(name: str, numerics: str) -> None:
    fn = MIXED[name]
    inputs = (torch.randint(2**30, 2**31 - 1, (3, 4), dtype=torch.int32), x(3, 4), x(3, 4).bfloat16())
    fast = fc.compile(fn, backend="interpret", numerics=numerics, strict=True)
    ours, eager = fast(*inputs), fn(*inputs)
    assert not_as_close(ours, eager, fn(*wide(inputs))) is None
    assert numerics != "eager" or torch.equal(ours, eager)
    assert pieces_of(fast.plan[0]) == 2


def test_pairs_are_moved_as_words() -> None:
    """And the loads of others come first: what Triton computes is laid out as the last load is."""
    compiled = Compiled(interleaved)
    compiled(x(6, 40, 8), x(40, 4))
    (runner,) = compiled.compiler.runners.values()
    source = runner.candidates[0].kernels[0].source
    assert source.index("tl.load(in1_ptr + ") < source.index("in0, in0_1 = tl.split(tl.load(in0_ptr + pair")
    assert source.count("tl.load(") == 2 and source.count("tl.store(out0_ptr + pair_i, tl.interleave(") == 1
