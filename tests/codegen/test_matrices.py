"""Nests of matrices: reductions over rows and along them that feed each other, one matrix a tile."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusion_compiler.codegen.emit import schedules_of
from fusion_compiler.ir.loops import BATCH, COLS, ROWS, Load
from fusion_compiler.schedule import matrices
from tests.exactness import Compiled, Schedules, cramped, not_as_close, wide


def sinkhorn(x: Tensor) -> Tensor:
    """Rows, then columns, then rows again sum to one."""
    e = (x - x.amax((-2, -1), keepdim=True)).exp()
    e = e / e.sum(-1, keepdim=True)
    e = e / e.sum(-2, keepdim=True)
    return e / e.sum(-1, keepdim=True)


def doubly_centred(x: Tensor) -> tuple[Tensor, Tensor]:
    rows, cols = x.mean(-1, keepdim=True), x.mean(-2, keepdim=True)
    centred = x - rows - cols + x.mean((-2, -1), keepdim=True)
    return centred, centred.square().sum((-2, -1), keepdim=True)


def pooled(x: Tensor) -> tuple[Tensor, Tensor]:
    """Columns weighted by how large their row is: a sum over rows of what a reduction along them gives."""
    scores = x.square().sum(-1, keepdim=True)
    shares = (scores - scores.amax(-2, keepdim=True)).exp()
    return (shares * x).sum(-2, keepdim=True), shares.sum(-2, keepdim=True)


def weighted(x: Tensor) -> Tensor:
    """Of the columns alone no reduction knows: a program has a block of them."""
    shares = x[..., :1].sigmoid()
    return (shares * x).sum(-2, keepdim=True) / shares.sum(-2, keepdim=True)


PROGRAMS: tuple[Callable[[Tensor], object], ...] = (sinkhorn, doubly_centred, pooled, weighted)


def checked(
    f: Callable[[Tensor], object], x: Tensor, number: int = 0, own: Schedules = schedules_of
) -> Compiled:
    """Compiled, with results as close to float64 as eager's."""
    fast = Compiled(f, number, own)
    with torch.no_grad():
        ours, eager, exact = fast(x), f(x), f(wide(x))
    tuples = (list(r) if isinstance(r, tuple | list) else [r] for r in (ours, eager, exact))
    for our, theirs, truth in zip(*tuples, strict=True):
        assert not_as_close(our, theirs, truth) is None
    return fast


@pytest.mark.sample(20)
@pytest.mark.parametrize("own", [schedules_of, cramped], ids=["own", "cramped"])
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("shape", [(3, 2, 16, 32), (5, 7, 24), (4, 1, 33)], ids=str)
@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_every_schedule(
    f: Callable[[Tensor], object], shape: tuple[int, ...], number: int, own: Schedules
) -> None:
    checked(f, torch.randn(shape), number, own)


@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_one_kernel_for_all_of_it(f: Callable[[Tensor], object], dtype: torch.dtype) -> None:
    fast = checked(f, torch.randn(6, 3, 24, 40, dtype=dtype))
    ((cluster,),) = [plan.clusters for plan in fast.plans]
    assert [axis.group for axis in cluster.loops.axes] == [BATCH, ROWS, COLS]
    assert "18 x 24 rows x 40" in str(fast.plans[0])


def test_infinities_and_nan() -> None:
    x = torch.randn(7, 6, 16)
    x[0, 0, 0], x[1, 1, 1], x[2] = float("inf"), float("nan"), float("-inf")
    for f in PROGRAMS:
        checked(f, x)


def test_matrices_beside_each_other_share_what_they_have_in_common() -> None:
    """One load of the keys for the four queries of each head."""

    def scores(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        s = (q[:, :, None] * k[:, None]).sum(-1, keepdim=True)
        peak = s.amax(-2, keepdim=True)
        return peak, (s - peak).exp().sum(-2, keepdim=True)

    q, k = torch.randn(3, 4, 16), torch.randn(3, 32, 16)
    fast = Compiled(lambda q, k: scores(q, k))
    with torch.no_grad():
        for our, truth in zip(fast(q, k), scores(q.double(), k.double()), strict=True):
            torch.testing.assert_close(our.double(), truth, rtol=1e-5, atol=1e-5)
    (cluster,) = fast.plans[0].clusters
    loads = [n.buffer for n in cluster.loops.nodes if isinstance(n, Load)]
    assert sorted(loads) == ["arg0_1"] * 4 + ["arg1_1"]


def test_large_matrices_are_several_kernels() -> None:
    side = 256
    assert side * side > matrices.LARGEST
    fast = checked(sinkhorn, torch.randn(2, side, side))
    assert len(fast.plans[0].clusters) > 1
    assert not any(a.group == BATCH for c in fast.plans[0].clusters for a in c.loops.axes)


def test_neighbours_in_memory_are_in_one_matrix() -> None:
    """Each of these would gather single elements."""
    fast = checked(lambda x: sinkhorn(x.permute(2, 0, 1)), torch.randn(8, 8, 64))
    assert not any(a.group == BATCH for c in fast.plans[0].clusters for a in c.loops.axes)
