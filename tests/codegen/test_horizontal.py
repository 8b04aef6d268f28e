"""Tile programs that share a launch: partial sums, tickets and finishing kernels of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusion_compiler as fc
from fusion_compiler.codegen.assemble import Nests, build
from fusion_compiler.ir.canonical import canonical
from fusion_compiler.ir.loops import LoopNest, Reduce
from fusion_compiler.ir.plan_data import Cluster
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.row_tiles import Cols, RowTile, placement_of
from tests.exactness import Compiled, cramped, not_as_close, rounding_noise, wide

ROWS, COLS = 18, 17
INPUTS = (torch.randn(ROWS, 4), *(torch.randn(4, COLS) for _ in range(3)))


def row_sums(s: Tensor, u: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """The bias gradients of three projections, one of them transposed."""
    a, b, c = s @ u, s @ v, (w.t() @ s.t()).t()
    return a.sin().sum(0), b.cos().sum(0), b.cos(), c.contiguous(), c.sum(0)


def losses(s: Tensor, u: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """One element each: the last program of each cluster adds its partial sums."""
    return tuple((s @ m).logsumexp(1).sum() for m in (u, v, w))


def unlike_sums(s: Tensor, u: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Rows of other widths, other reductions, and a cluster that stores its rows as well."""
    return (s @ u).sin().sum(0), (c := (s @ v).cos()), c.amax(0), (s @ w[:, :3]).prod(0)


def maps(s: Tensor, u: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Nothing is reduced; one cluster is transposed."""
    return (s @ u).sin(), (s @ v).cos().t().contiguous(), (s @ w).tanh()


FUNCTIONS = (row_sums, losses, unlike_sums, maps)


def sharing(compiled: Compiled) -> Cluster:
    """The cluster that has a loop nest for each product."""
    (cluster,) = (c for c in compiled.plans[0].clusters if len(c.nests) == 3)
    return cluster


def assert_exact(fn: Callable[..., Any], results: tuple[Tensor, ...]) -> None:
    for our, their, exact in zip(results, fn(*INPUTS), fn(*wide(INPUTS)), strict=True):
        noise = rounding_noise((*INPUTS, their), (*wide(INPUTS), exact))
        problem = not_as_close(our, their, exact, noise)
        assert problem is None, problem


@pytest.mark.parametrize("schedule", [None, 0, 1], ids=["chosen", "cramped", "cramped 1"])
@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_horizontally_fused_clusters_are_exact(fn: Callable[..., Any], schedule: int | None) -> None:
    compiled = Compiled(fn) if schedule is None else Compiled(fn, schedule, cramped)
    assert_exact(fn, compiled(*INPUTS))
    assert_exact(fn, compiled(*INPUTS))  # which finds the tickets as the first call left them
    sharing(compiled)


@pytest.mark.parametrize("fn", [row_sums, losses], ids=lambda fn: fn.__name__)
def test_unlike_schedules_have_launches_of_their_own(fn: Callable[..., Any]) -> None:
    """One number of warps a launch, and what few registers do well alone is not held up by many."""
    compiled = Compiled(fn)
    compiled(*INPUTS)
    key = canonical(sharing(compiled), compiled.plans[0].dag)
    buffers = {b.name: b for b in key.buffers}
    small = RowTile(2, 32, Cols.WHOLE, programs=3)
    more_warps = small._replace(num_warps=8)
    more_registers = small._replace(block_rows=1024)
    finishing = fn is row_sums
    for third, launches in ((small, 1), (more_warps, 2), (more_registers, 2)):
        tiles = zip(key.nests, (small, small, third), strict=True)
        placed = tuple(placement_of(Analysis(nest), tile) for nest, tile in tiles)
        program = build(Nests(key.nests, buffers), placed, "sums", "")
        assert len(program.kernels) == launches + finishing, third
        assert len({b.name for b in program.scratch}) == (3 if finishing else 6)
        compiled.compiler.runners[key, "interpret"].candidates = (program,)
        assert_exact(fn, compiled(*INPUTS))


def test_the_old_name_still_works_and_says_so() -> None:
    compiled = Compiled(row_sums)
    compiled(*INPUTS)
    cluster = sharing(compiled)
    with pytest.warns(DeprecationWarning, match="horizontal"):
        assert cluster.beside == cluster.horizontal == cluster.nests[1:]


def test_small_work_that_waits_for_nothing_shares_launches() -> None:
    """The counters of a net's batch norms: sixteen a launch, though nothing else relates them."""
    layers = [layer for _ in range(20) for layer in (nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2), nn.ReLU())]
    model = nn.Sequential(*layers)
    fast = fc.compile(model, backend="interpret", device="h200")
    fast(torch.randn(2, 2, 5))
    counters = [c for c in fast.plan[0].clusters if all(op.startswith(("add", "put")) for op in c.ops)]
    assert sorted(len(c.nests) for c in counters) == [4, 16]
    assert {n.item() for name, n in model.named_buffers() if "num_batches" in name} == {1}


def reductions(nest: LoopNest) -> list[Reduce]:
    return [n for n in nest.nodes if isinstance(n, Reduce)]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (2, 8)).transpose(1, 2) for p in self.projections)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def test_results_of_one_call_share_a_launch() -> None:
    """The bias gradients of attention's projections, which its backward makes at once."""
    model, x = Attention(), torch.randn(2, 12, 16)
    exact = Attention().double()
    exact.load_state_dict(model.state_dict())
    fast: Any = fc.compile(model, backend="interpret")
    fast(x).sin().sum().backward()
    exact(x.double()).sin().sum().backward()
    sums = [c for c in fast.plan[-1].clusters if all(map(reductions, c.nests))]
    assert [len(c.nests) for c in sums] == [3]
    for our, true in zip(model.parameters(), exact.parameters(), strict=True):
        assert our.grad is not None and true.grad is not None
        torch.testing.assert_close(our.grad.double(), true.grad, rtol=1e-4, atol=1e-5)
