"""Lowering: the ops that it takes into one loop nest, and models that compile although they look hard."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion_compiler as fc
from fusion_compiler.codegen.emit import schedules_of
from fusion_compiler.ir.loops import ROWS, Load, Reduce
from fusion_compiler.passes.lower.simplify import LONG_ROW
from tests.exactness import Compiled, Schedules, cramped, not_as_close, rounding_noise, wide

FIRST = torch.tensor([2, 0, 1, -1])
SECOND = torch.tensor([[1], [-2]])


def x(*shape: int) -> Tensor:
    return torch.randn(shape)


def truth(a: Tensor) -> tuple[Tensor, ...]:
    return a.any(), a.all(), a.any(1), a.all(1), a.any(0), a.all(0)


def one_row_each(*values: float, dtype: torch.dtype) -> Tensor:
    """Rows of one value, but for a zero in the first."""
    rows = torch.tensor(values, dtype=dtype)[:, None].repeat(1, 70)
    rows[0, 5] = 0
    return rows


def statistics(a: Tensor, dim: int) -> Tensor:
    return torch.cat([a.mean(dim, True), a.amax(dim, True), a.exp().sum(dim, True)], dim)


CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "indices side by side": (lambda a, i, j: a[:, i, j] + 1, (x(3, 4, 5), FIRST, SECOND)),
    "indices apart": (lambda a, i, j: a[i, :, j] + 1, (x(3, 4, 5), FIRST, SECOND)),
    "index of no dimensions": (lambda a, i: torch.index_select(a, 1, i), (x(3, 4), torch.tensor(2))),
    "diagonal": (lambda a: torch.diagonal(a, 1, 0, 2) * 2, (x(3, 4, 5),)),
    "diagonal below": (lambda a: torch.diagonal(a, -1, 2, 1).sin(), (x(3, 4, 5),)),
    "write with a step": (lambda a, b: torch.slice_scatter(a, b.sin(), 1, 1, None, 2), (x(4, 7), x(4, 3))),
    "write with a step from the end": (
        lambda a, b: torch.slice_scatter(a, b, 1, -6, 6, 3),
        (x(4, 7), x(4, 2)),
    ),
    "sum of one element": (lambda a: a.sum(1), (x(1, 1).expand(2, 1),)),
    "sum that is the same for each element": (lambda a: a[None].sum(0), (x(1).expand(5),)),
    "reduction of a number": (lambda a: torch.softmax(a, 0) + a.amax(0), (torch.tensor(1.5),)),
    **{
        f"a single integer beside integers of {dtype}": (
            lambda a, b: (a > b, b >= a, torch.where(a < b, a, 1), torch.div(a, b, rounding_mode="trunc")),
            (torch.arange(240, 250).to(dtype), torch.tensor(-11)),
        )
        for dtype in (torch.uint8, torch.int8, torch.int32)
    },
    "any and all of one element": (
        lambda a, b: (a.any(0), a.all(0), b.any(0), b.all(0, True)),
        (torch.tensor([[0, 1, 6]], dtype=torch.uint8), torch.tensor([[0.0, 0.5, -2.0, float("nan")]])),
    ),
    "sum of nothing": (lambda a: (a.sum(1) + 2, a.sum(0), a.sum()), (x(3, 0),)),
    "sum over rows for each row": (lambda a: a.sum(0).sum(0) + a, (x(2, 1).expand(2, 2),)),
    "sums that are the same in every column": (lambda a: a.sum(0), (x(9, 1).expand(9, 30),)),
    "sum of all for each column": (lambda a, w: ((a.sin() + 1).sum() * w, a.amax(1)), (x(9, 30), x(30))),
    "sum of all of rows too wide for registers": (
        lambda a, w: ((b := a - a.mean(1, keepdim=True)), b.abs().sum() * w, (b > 3.8).any()),
        (x(2, 16500), x(16500)),
    ),
    "truth of fractions": (truth, (one_row_each(-0.3, 0.3, 0, math.nan, dtype=torch.float32),)),
    "truth of integers": (truth, (one_row_each(-3, 1 << 32, 0, -1, dtype=torch.int64),)),
    "truth of small integers": (truth, (one_row_each(-3, 4, 0, -1, dtype=torch.int8),)),
    "numbers that an unsigned dtype wraps": (
        lambda a: (a + -1, a.clamp(2, 3), a * -2, a - 300, a < -1, a // -3, a.masked_fill(a > 5, -1)),
        (torch.arange(12, dtype=torch.uint8).view(3, 4),),
    ),
    "constants that an unsigned dtype wraps": (
        lambda a: (a.new_full((2,), -3), torch.where(a > 5, a, -1)),
        (torch.arange(12, dtype=torch.uint8).view(3, 4),),
    ),
    "a norm of rows that are one number": (
        lambda a: (n := F.layer_norm((e := a.expand(3, 2)) / e.abs().sum(), (2,)), n.logsumexp(1)),
        (x(),),
    ),
    "small integers that a limit does not widen": (
        lambda a: ((a.clamp(0, 120) + 100) / 2, a.clamp(max=50) - 100 > 0, torch.fmod(a, a.clamp(1, 3) + 1)),
        (torch.arange(-100, 100, 7, dtype=torch.int8),),
    ),
    "elements beside a space without any": (
        lambda a, b: ((c := a != b), c[1:0:2].all(1, True)),
        (x(7), x(1, 7, 1)),
    ),
    "columns beside no rows": (
        lambda a, w: ((v := w.sin()), (a * v).sum(1), (a * v).sum(0)),
        (x(0, 7), x(7)),
    ),
    "concatenated numbers": (lambda a: torch.cat([a, a + 1]), (x(1),)),
    "mask of one element": (lambda a: torch.tril(a), (x(1, 1),)),
    "broadcast from an empty tensor": (lambda a, b: torch.minimum(a, b), (x(2, 1), x(1, 0).expand(2, 0))),
    "view that cuts across a pad": (
        lambda a: F.pad(a, (0, 5)).flatten().view(3, 64, -1).clone(),
        (x(3, 64, 19),),
    ),
    "counting in fractions": (
        lambda a: [a * torch.arange(b, 2, 0.25, dtype=d) for b in (-1, 0.5) for d in (None, torch.float64)],
        (x(1),),
    ),
    "a few statistics of each row and of each column": (
        lambda a, b: ((s := statistics(a, 1)) / s.amax(1, True) + b, statistics(a, 0).sum(0)),
        (x(20, 60), x(20, 3)),
    ),
    "sums of columns, stored side by side": (
        lambda a, b: (
            F.pad((a * b).sum(0)[None], (0, 0, 0, 1)) + F.pad((a + b).sum(0)[None], (0, 0, 1, 0)),
            (a * b).sum(1),
        ),
        (x(37, 60), x(37, 60)),
    ),
    "circular padding": (lambda a: F.pad(a, (1, 2), mode="circular"), (x(2, 3, 4),)),
    "reflection": (lambda a: F.pad(a, (1, 2), mode="reflect"), (x(2, 3, 4),)),
}


@pytest.mark.sample(25)
@pytest.mark.parametrize("schedules", [schedules_of, cramped], ids=["chosen schedule", "cramped schedule"])
@pytest.mark.parametrize("name", CASES)
def test_compiles_and_is_exact(name: str, schedules: Schedules) -> None:
    fn, inputs = CASES[name]
    compiled = Compiled(fn, schedules=schedules)
    results = (compiled(*inputs), fn(*inputs), fn(*wide(inputs)))
    ours, eager, truth = (tuple(r) if isinstance(r, tuple | list) else (r,) for r in results)
    for our, their, exact in zip(ours, eager, truth, strict=True):
        problem = not_as_close(our, their, exact, rounding_noise((*inputs, their), (*wide(inputs), exact)))
        assert problem is None, problem
    assert not compiled.eager_ops()


def test_statistics_of_one_row_share_a_program() -> None:
    compiled = Compiled(lambda a: (a - a.mean(1, keepdim=True)) / (a.var(1, keepdim=True) + 1).sqrt())
    compiled(x(6, 40))
    (cluster,) = compiled.plans[0].clusters
    reductions = [n for n in cluster.loops.nodes if isinstance(n, Reduce)]
    assert len({r.axes for r in reductions}) == 1 and len(reductions) >= 2


def test_a_few_elements_of_each_row_are_values_of_their_own() -> None:
    """Each is stored by itself, and their sum is an expression, also where all of them are as many as the
    columns."""

    def shares(a: Tensor, b: Tensor) -> Tensor:
        few = statistics(torch.softmax(a, 1), 1) * b
        return few / few.sum(1, True)

    a, b = x(20, 60), x(20, 3).exp()
    compiled = Compiled(shares)
    torch.testing.assert_close(compiled(a, b), shares(a, b))
    (cluster,) = compiled.plans[0].clusters
    assert [store.index.const for store in cluster.loops.stores] == [0, 1, 2]
    assert sum(isinstance(node, Reduce) for node in cluster.loops.nodes) == 5


def test_views_between_a_value_and_its_copy_cut_no_axis() -> None:
    """Keys as attention wants them: tiles as high as a head is wide and as long as the sequence."""

    def keys(a: Tensor) -> Tensor:
        return (a + 1).view(2, 32, 4, 16).permute(0, 2, 3, 1).contiguous()

    compiled = Compiled(keys)
    compiled(x(2, 32, 64))
    (cluster,) = compiled.plans[0].clusters
    assert [a.size for a in cluster.loops.axes] == [2, 64, 32]


@pytest.mark.parametrize("padded", [0, 3])
@pytest.mark.parametrize("columns", [LONG_ROW, LONG_ROW + 5, 64])
def test_long_rows_read_their_own_values_once(columns: int, padded: int) -> None:
    """Also where they count in some columns alone: a value of the row is no tile of loads."""

    def fn(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return F.pad((a - b) * c, (0, padded), value=1.0)

    inputs = (torch.randn(3, columns), torch.randn(3, 1), torch.randn(3, 1))
    compiled = Compiled(fn)
    torch.testing.assert_close(compiled(*inputs), fn(*inputs), rtol=1e-6, atol=1e-6)
    ((loops,),) = (cluster.nests for cluster in compiled.plans[0].clusters)
    (runner,) = compiled.compiler.runners.values()
    assert any(axis.group == ROWS for axis in loops.axes) == (columns >= LONG_ROW)
    if columns < LONG_ROW:
        return
    text = runner.candidates[0].kernels[0].source
    loads = [line for line in text.splitlines() if "tl.load(" in line]
    assert len(loads) == len([n for n in loops.nodes if isinstance(n, Load)]) == 3
    of_rows = [line for line in loads if "col" not in line]
    assert len(of_rows) == 2 and not any("mask=" in line for line in of_rows)


def test_what_is_broadcast_is_not_stored_for_every_element() -> None:
    compiled = Compiled(lambda a, b: ((c := a.sin()), b * c))
    compiled(x(8), x(4, 8))
    nests = [nest for c in compiled.plans[0].clusters for nest in c.nests]
    assert len(nests) == 2
    assert all(len(s.index.terms) == len(nest.axes) for nest in nests for s in nest.stores)


EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("dtype", [*EIGHT_BITS, torch.float8_e4m3fnuz, torch.uint16], ids=str)
def test_a_conversion_to_few_bits_is_made_even_where_nothing_is_stored(dtype: torch.dtype) -> None:
    """One kernel quantizes and converts back, since the model asks for that rounding. Types that Triton lacks
    stay ATen calls."""

    def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.abs().to(dtype)
        return y.float() * 2, y

    x = 3 * torch.randn(33, 65)
    fast = fc.compile(quantized, backend="interpret")
    for ours, eager in zip(fast(x), quantized(x), strict=True):
        assert ours.dtype == eager.dtype and torch.equal(ours.float(), eager.float())
    assert bool(fast.plan[0].leftovers) == (dtype not in EIGHT_BITS)


ROUND_TRIPS: dict[str, Callable[[Tensor], Tensor]] = {
    "half and float": lambda x: x.half().float() * 2,
    "through views": lambda x: x.half()[None].t().clone().to(torch.float32),
    "in a sum": lambda x: (x * 3).to(torch.bfloat16).type(torch.float32).sum(0),
    "to double": lambda x: x.type(torch.float16).double(),
    "what is rounded is so for all": lambda x: (h := x.half()).float() - h,
}


@pytest.mark.parametrize("capture", [Compiled, lambda f: fc.compile(f, backend="interpret", strict=True)])
def test_a_round_trip_that_is_written_by_hand_rounds(capture: Callable[..., Any]) -> None:
    def several(x: Tensor) -> list[Tensor]:
        return [f(x) for f in ROUND_TRIPS.values()]

    x = torch.tensor([1.0001, 70000.0, -1e-9, math.pi, 2049.0])
    for name, ours, eager in zip(ROUND_TRIPS, capture(several)(x), several(x), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-6, atol=0, equal_nan=True, msg=name)


def test_conversions_of_autocast_and_of_decompositions_round_nothing() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            product = torch.mm(x, w)
        normed = F.layer_norm(F.gelu(product), (8,))
        return normed.float(), torch.softmax(x.bfloat16(), -1, dtype=torch.float32)

    fast = fc.compile(fn, backend="interpret", strict=True)
    fast(torch.randn(8, 8), torch.randn(8, 8))
    assert not any(plan.dag.op(name).rounds for plan in fast.plan for name in plan.dag.order)


def test_a_reduction_of_loaded_places_beside_one_of_everything_compiles() -> None:
    """A random program: it ran eager."""

    def f(a: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        y = a.to(torch.float32, copy=True)
        return F.group_norm(y.permute(2, 1, 0)[places], 1), y.std((0, 1, 2), correction=0) + 0.1

    inputs = x(13, 3, 8).half(), torch.randperm(8)
    results = fc.compile(f, backend="interpret", strict=True)(*inputs)
    for ours, eager in zip(results, f(*inputs), strict=True):
        torch.testing.assert_close(ours, eager)
