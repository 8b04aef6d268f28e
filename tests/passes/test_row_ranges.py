"""Products whose number of rows is only known at run time: a plan for each range, values against float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusion_compiler as fc
from fusion_compiler.ir.dag import FEW_ROWS
from fusion_compiler.passes.rewrites import row_ranges
from tests.codegen.test_every_schedule import Checking
from tests.codegen.test_matvec import decode_step, doubled, rms_norm, swiglu
from tests.exactness import not_as_close

ENDS = (1, 4, 8, FEW_ROWS)  # a call of one row is captured by itself


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch: pytest.MonkeyPatch, small_matrices: None) -> None:
    """Also ranges of matrices that are too small to be worth them."""
    monkeypatch.setattr(row_ranges, "LEAST", 0)


def close(fast: Callable[..., object], f: Callable[..., object], *inputs: Tensor) -> None:
    """Values no further from float64's than eager's are."""
    with torch.no_grad():
        results = fast(*inputs), f(*inputs), f(*map(doubled, inputs))
    compare(*results)


def compare(*results: object) -> None:
    ours, eager, exact = (r if isinstance(r, tuple) else (r,) for r in results)
    for our, theirs, truth in zip(ours, eager, exact, strict=True):
        assert not (why := not_as_close(our, theirs, truth)), why


def last(fast: Any) -> fc.FusionPlan:
    return list(fast.plans if isinstance(fast, Checking) else fast.plan)[-1]


def note(fast: Any) -> str:
    return last(fast).notes.get("row ranges", "")


def products_left(fast: Any) -> list[str]:
    return [left.reason for left in last(fast).leftovers if left.rule == "library call"]


def planned_for(plan: fc.FusionPlan) -> str:
    return plan.notes["row ranges"].rpartition("a plan for ")[2]


class Mlp(nn.Module):
    def __init__(self, width: int, dtype: torch.dtype, inner: int = 48) -> None:
        super().__init__()
        shapes = (inner, width), (inner, width), (width, inner)
        weights = (nn.Parameter(torch.randn(s, dtype=dtype) / s[1] ** 0.5) for s in shapes)
        self.gate, self.up, self.down = weights
        self.norm = nn.Parameter(torch.rand(width, dtype=dtype) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(swiglu(rms_norm(x, self.norm), self.gate, self.up), self.down)


@pytest.mark.sample(1, group="long")
def test_each_number_of_rows() -> None:
    """A plan for each range, whichever numbers come first; of more rows the products are the library's."""
    model = Mlp(96, torch.bfloat16)
    wide = copy.deepcopy(model).double()
    fast = fc.compile(model, backend="interpret", strict=True)
    for rows in (3, *torch.randperm(18).add(1).tolist()):
        x = torch.randn(rows, 1, 96, dtype=torch.bfloat16)
        with torch.no_grad():
            ours, eager, exact = fast(x), model(x), wide(x.double())
        compare(ours, eager, exact)
    plans = list(fast.plan)
    assert len(plans) <= 1 + len(ENDS) + 1  # the first call's own
    kept = [planned_for(plan) for plan in plans if "row ranges" in plan.notes]
    assert sorted(kept) == ["1 to 4", "5 to 8", "9 to 16", "more than 16"]
    for plan in plans:
        left = [op for op in plan.leftovers if op.rule == "library call"]
        assert len(left) == (3 if "more than" in plan.notes.get("row ranges", "") else 0)


@pytest.mark.sample(1, group="long")
def test_a_range_has_one_plan() -> None:
    model = Mlp(160, torch.float32)
    fast = fc.compile(model, backend="interpret", strict=True)
    with torch.no_grad():
        for rows in (9, 5, 7, 8, 6):
            fast(torch.randn(rows, 160))
    plans = list(fast.plan)
    assert len(plans) == 2 and "now 5): a plan for 5 to 8" in note(fast)
    for rows, plan in zip(("9 rows", "5 rows now"), plans, strict=True):
        assert f"products of {rows}," in plan.notes["phase"]


@pytest.mark.sample(2)
@pytest.mark.filterwarnings("ignore::fusion_compiler.FusionWarning")  # clusters run by ATen
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [2, 3, 7, 16])
def test_every_schedule(rows: int, dtype: torch.dtype) -> None:
    def f(x: Tensor, norm: Tensor, gate: Tensor, up: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
        return swiglu(rms_norm(x, norm), gate, up), F.linear(x, up) + base

    compiler = Checking("interpret")
    fast = torch.compile(f, backend=compiler.backend())
    gate, up = torch.randn(2, 24, 320, dtype=dtype).unbind()
    x, base = torch.randn(rows, 320, dtype=dtype), torch.randn(rows, 24, dtype=dtype)
    for tensor in (x, base):
        torch._dynamo.mark_dynamic(tensor, 0)
    with torch.no_grad():
        fast(x, torch.rand(320, dtype=dtype) + 0.5, gate, up, base)
    checked = compiler.plans.verification.rows
    assert len(checked) >= (2 if dtype is torch.float32 else 6) and not compiler.refused
    assert all(row.agrees for row in checked), str(compiler.plans.verification)
    assert "a plan for" in note(compiler)
    assert not products_left(compiler)


@pytest.mark.sample(1, group="long")
def test_a_layer_that_decodes() -> None:
    """Attention is of any number of sequences too."""

    def t(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16) / shape[-1] ** 0.5

    shapes = [(3, 128), (128, 128), *2 * [(64, 128)], (128, 128), *2 * [(96, 128)], (128, 96), (256, 128)]
    weights = [t(*shape) for shape in shapes]
    fast = fc.compile(decode_step, backend="interpret", strict=True)
    for rows in (3, 4, 7):
        close(fast, decode_step, t(rows, 1, 128), *weights, t(rows, 1, 64, 64), t(rows, 1, 64, 64))
        assert not products_left(fast)
    assert len(list(fast.plan)) == 3
    assert "attention" not in str([left.target for left in list(fast.plan)[-1].leftovers])


def test_a_cache_that_is_written() -> None:
    """Rows that are not there write nothing, at whatever place; a residual is updated in its place once."""

    def f(x: Tensor, w: Tensor, cache: Tensor, at: Tensor, total: Tensor) -> Tensor:
        product = F.linear(x, w)
        cache.index_copy_(1, at, product[:, None])
        total.add_(product)
        return product * 2

    fast = fc.compile(f, backend="interpret", strict=True)
    w = torch.randn(48, 160)
    for rows in (6, 5, 7, 5, 8):
        x, at, total = torch.randn(rows, 160), torch.tensor([rows % 3]), torch.randn(rows, 48)
        cache = torch.randn(rows, 4, 48)
        written, truth = (cache.clone(), total.clone()), (cache.double(), total.double())
        with torch.no_grad():
            fast(x, w, written[0], at, written[1])
            f(x.double(), w.double(), truth[0], at, truth[1])
        for ours, exact in zip(written, truth, strict=True):
            torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-4)
    assert not products_left(fast)


def test_several_tokens_of_each_sequence() -> None:
    """Rows come in twos: a range has more than one number of them."""
    w = torch.randn(48, 160)
    fast = fc.compile(lambda x, w: F.linear(x, w) + 1, backend="interpret", strict=True)
    for sequences in (3, 2, 4, 5, 8, 20):
        close(fast, lambda x, w: F.linear(x, w) + 1, torch.randn(sequences, 2, 160), w)
    kept = [planned_for(plan) for plan in list(fast.plan)[1:]]
    assert kept == ["1 to 8", "9 to 16", "more than 16"]


@pytest.mark.parametrize(("most", "said"), [(8, "8 at most"), (64, "the caller's bounds")])
def test_bounds_of_the_callers_are_kept(most: int, said: str) -> None:
    fast = fc.compile(F.linear, backend="interpret", strict=True)
    w = torch.randn(48, 160)
    for rows in (3, 7, 2):
        x = torch.randn(rows, 160)
        torch._dynamo.mark_dynamic(x, 0, min=2, max=most)
        with torch.no_grad():
            torch.testing.assert_close(fast(x, w), F.linear(x, w), rtol=1e-5, atol=1e-4)
    assert len(list(fast.plan)) == 1 and said in note(fast)
    assert len(products_left(fast)) == (most > FEW_ROWS)


@pytest.mark.parametrize("least", [0, 1])
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_rows_whose_number_is_data(least: int) -> None:
    """If there may be no rows, no row is the last one."""

    def f(x: Tensor, w: Tensor, kept: Tensor) -> Tensor:
        chosen = x[kept]
        torch._check(chosen.shape[0] >= least)
        torch._check(chosen.shape[0] <= 8)
        return F.linear(chosen, w) + 1

    fast = fc.compile(f, backend="interpret")
    x, w = torch.randn(8, 160), torch.randn(48, 160)
    for count in (3, 8, 1, *([] if least else [0])):
        close(fast, f, x, w, torch.randperm(8) < count)
    assert len(products_left(fast)) == (least == 0)


def test_small_matrices_have_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    fast = fc.compile(F.linear, backend="interpret", strict=True)
    w = torch.randn(48, 160)
    with torch.no_grad():
        for rows in (3, 5, 20, 9):
            fast(torch.randn(rows, 160), w)
    assert len(list(fast.plan)) == 2 and "matrices of no more than 0.0 MB" in note(fast)
    assert products_left(fast) == ["library call: it has few rows, but how many is only known at run time"]


def test_a_training_step_has_one_plan() -> None:
    model = nn.Linear(160, 48)
    fast = fc.compile(model, backend="interpret", strict=True)
    for rows in (3, 5, 20, 9):
        fast(torch.randn(rows, 160)).sum().backward()
    plans = list(fast.plan)
    assert len(plans) == 4 and not any("row ranges" in plan.notes for plan in plans)
