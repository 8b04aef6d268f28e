"""Dynamic shapes: one further compile for all sizes, and right results at every one of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion_compiler as fc
from benchmarks.kernels.clusters import CASES, Case
from fusion_compiler.ir import device
from tests import models


@pytest.fixture(autouse=True)
def few_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of unknown number are shared by as many programs as fill the device: the interpreter runs all."""
    monkeypatch.setitem(device._BY_NAME, "h200", replace(device.device_spec("h200"), sms=6))


SIZES = {
    "rows": ({"rows": 16}, {"rows": 1}, {"rows": 133}),
    "batch": ({"batch": 2}, {"batch": 1}, {"batch": 5}),
}


def sizes_of(case: Case) -> list[dict[str, int]]:
    """The case's quick sizes, then others: fewer, one, many rows; other row lengths where they may differ."""
    varied = SIZES["rows" if "rows" in case.quick else "batch"]
    return [dict(case.quick) | other for other in varied]


def graphs(fast: Any, phase: str = "backward") -> int:
    return sum(plan.name.endswith(phase) for plan in fast.plan)


def compare(case: Case, fast: Any, tensors: dict[str, Tensor]) -> None:
    """Outputs and gradients against float64, at least as close as float32 rounding allows."""
    fn = case.without_randomness()
    leaves = {n: t.clone().requires_grad_(n in case.differentiate) for n, t in tensors.items()}
    wide = {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}
    exact = {n: t.clone().requires_grad_(n in case.differentiate) for n, t in wide.items()}
    got, want = fast(*leaves.values()), fn(*exact.values())
    got, want = (v if isinstance(v, tuple) else (v,) for v in (got, want))
    weights = [torch.randn(v.shape, dtype=torch.float64) for v in want]
    torch.autograd.backward(got, [w.float() for w in weights])
    torch.autograd.backward(want, weights)
    pairs = [*zip(got, want, strict=True)]
    pairs += [(leaves[n].grad, exact[n].grad) for n in case.differentiate]
    for a, b in pairs:
        scale = float(b.detach().abs().max()) if b.numel() else 0.0
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5 * max(scale, 1.0))


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_clusters_at_every_size(case: Case) -> None:
    # Asked for, or found by itself at the second size: half of the cases each.
    dynamic = True if CASES.index(case) % 2 else None
    fast = fc.compile(case.without_randomness(), backend="interpret", strict=True, dynamic=dynamic)
    for sizes in sizes_of(case):
        compare(case, fast, case.make(**sizes))
    assert graphs(fast) <= 3  # a size of 1 is a graph of its own to TorchDynamo


@pytest.mark.parametrize("case", [c for c in CASES if "columns" in c.quick], ids=lambda case: case.name)
def test_rows_of_every_length(case: Case) -> None:
    fast = fc.compile(case.without_randomness(), backend="interpret", strict=True, dynamic=True)
    for columns in (256, 31, 1000):
        compare(case, fast, case.make(rows=8, columns=columns))
    assert graphs(fast) == 1


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "dynamic"), [("llama", None), ("bert", True)])
def test_models_at_another_batch_and_length(name: str, dynamic: bool | None) -> None:
    """The second size compiles once more unless the first was symbolic; then no size does."""
    model, _ = models.small(name, dropout=False)
    exact = models.exact(model)
    fast = fc.compile(model, backend="interpret", strict=True, dynamic=dynamic)
    counts: list[int] = []
    for batch, length in ((2, 19), (3, 11), (4, 13)):
        _, inputs = models.small(name, dropout=False, batch=batch, length=length)
        model.zero_grad()
        exact.zero_grad()
        loss, want = fast(**inputs).loss, exact(**inputs).loss
        loss.backward()
        want.backward()
        torch.testing.assert_close(loss.double(), want.double(), rtol=1e-5, atol=1e-5)
        for (key, a), b in zip(model.named_parameters(), exact.parameters(), strict=True):
            scale = float(b.grad.abs().max())
            torch.testing.assert_close(
                a.grad.double(), b.grad, rtol=1e-3, atol=2e-5 * max(scale, 1e-2), msg=key
            )
        counts.append(graphs(fast))
    assert counts == ([1, 1, 1] if dynamic else [1, 2, 2])
    if name == "llama":  # proved for symbolic sizes too
        masks = {plan.notes["attention mask"] for plan in fast.plan}
        assert masks == {"done x2: causal, proved from its indices"}
        assert all(plan.notes.keys() >= {"attention mask", "grouped queries"} for plan in fast.plan)


def test_generation_compiles_as_often_as_torch_compile_does() -> None:
    """A prompt, the first token after it, tokens at any length of the cache; then prompts of any length."""
    model: Any = models.small("llama", dropout=False)[0].eval()
    fast = fc.compile(model, backend="eager")
    options = {"do_sample": False, "max_new_tokens": 4, "pad_token_id": 0, "use_cache": True}
    counts: list[int] = []
    for length in (9, 9, 13, 11):
        tokens = torch.randint(3, 90, (1, length))
        settings = {"attention_mask": torch.ones_like(tokens), **options}
        assert torch.equal(fast.generate(tokens, **settings), model.generate(tokens, **settings))
        counts.append(len(fast.plan))
    assert counts == [3, 3, 4, 4]


def test_static_shapes_stay_numbers() -> None:
    fast = fc.compile(lambda x: torch.tanh(x) + 1, backend="interpret", dynamic=False, strict=True)
    for rows in (3, 5, 7):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(fast(x), torch.tanh(x) + 1)
    assert len(fast.plan) == 3
    assert all(isinstance(a.size, int) for p in fast.plan for c in p.clusters for a in c.loops.axes)


def halves(x: Tensor) -> Tensor:
    a, b = x.chunk(2, 0)
    return torch.cat([b * 2, a[: b.shape[0]] + 1], 0)


def shifted(x: Tensor) -> Tensor:
    return x[1:] * x[:-1] - x[1:].mean(0)


def flattened(x: Tensor) -> Tensor:
    return torch.softmax(x.transpose(0, 1).reshape(x.shape[1], -1) * x.shape[0], -1)


def column_sums(x: Tensor) -> Tensor:
    return (x - x.mean(0)).square().sum(0).sqrt() + x.sum()


def padded(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (1, 2, 3, 0)).cumsum(0)[2:].tanh() * 2


def positions(x: Tensor) -> Tensor:
    index = torch.arange(x.shape[0])
    return torch.where(index[:, None] >= torch.arange(x.shape[1]), x, -x.flip(0)) + index[:, None]


def overwritten_end(x: Tensor) -> Tensor:
    y = x.clone()
    y[-2:] = x[:2] * 2
    return y.tanh()


def strided(x: Tensor) -> Tensor:
    return (x[::2].exp() + 1).amax(1) + x[-1].sum()


FUNCTIONS = (halves, shifted, flattened, column_sums, padded, positions, strided, overwritten_end)


def rows_replaced(x: Tensor, n: int) -> Tensor:
    return torch.slice_scatter(x, x[:3] + 1, 0, n, n + 3) * 2


def joined_and_cut_off(x: Tensor, n: int) -> Tensor:
    """The kernel reads nothing of what has `n` rows, and is not told how many they are."""
    return torch.cat([x, torch.tanh(x[:1]).expand(n, -1)])[: x.shape[0]] * 2


@pytest.mark.parametrize("backend", ["eager", "interpret"])
@pytest.mark.parametrize("fn", [rows_replaced, joined_and_cut_off])
def test_numbers_among_the_arguments(fn: Any, backend: str) -> None:
    fast = fc.compile(fn, backend=backend, strict=True, dynamic=True)
    for n, rows in ((4, 9), (5, 11), (2, 7)):
        x = torch.randn(rows, 6)
        torch.testing.assert_close(fast(x, n).double(), fn(x.double(), n), rtol=1e-6, atol=1e-6)
    assert len(fast.plan) == 1


@pytest.mark.sample(8)
@pytest.mark.parametrize("layout", ["rows", "columns", "sliced"])
@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_views_and_sums_of_symbolic_sizes(fn: Any, layout: str) -> None:
    fast = fc.compile(fn, backend="interpret", strict=True, dynamic=True)
    for rows, columns in ((6, 10), (14, 3), (40, 129)):
        x = torch.randn(rows, columns)
        if layout == "columns":
            x = torch.randn(columns, rows).t()
        if layout == "sliced":
            x = torch.randn(rows + 3, columns + 5)[2 : rows + 2, 4 : columns + 4]
        torch.testing.assert_close(fast(x).double(), fn(x.double()).double(), rtol=1e-5, atol=1e-5)
    assert len(fast.plan) <= 2


def sums_of_all(x: Tensor) -> Tensor:
    return torch.tanh(x).sum(-1) * 2 + x.sum()


def normalized(x: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[1:]) + x.mean(0)


@pytest.mark.parametrize("fn", [sums_of_all, normalized, column_sums], ids=lambda fn: fn.__name__)
def test_no_rows_and_one_row(fn: Any) -> None:
    """Values, NaN where there is nothing to take a mean of, and gradients."""
    fast = fc.compile(fn, backend="interpret", strict=True)
    for rows in (4, 0, 6, 1, 0):
        x = torch.randn(rows, 5, requires_grad=True)
        exact = x.detach().double().requires_grad_()
        got, want = fast(x), fn(exact)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5, equal_nan=True)
        (a,), (b,) = (torch.autograd.grad(y.square().sum(), v) for y, v in ((got, x), (want, exact)))
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_sizes_are_arguments_of_one_kernel() -> None:
    fast = fc.compile(lambda x: torch.softmax(x, -1), backend="interpret", dynamic=True, strict=True)
    for rows, columns in ((4, 8), (9, 33)):
        x = torch.randn(rows, columns)
        torch.testing.assert_close(fast(x), torch.softmax(x, -1))
    (plan,) = fast.plan
    assert not any(isinstance(axis.size, int) for c in plan.clusters for axis in c.loops.axes)


# Sizes that a kernel's text does not spell, or would spell as something else: of negative numbers Triton's
# // and % are C's.
EXPRESSIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "int(n / 6)": lambda x: x.view(int(x.shape[0] / 6), 6).sum(1),
    "n x int(n / 6)": lambda x: x.view(6, int(x.shape[0] / 6)).softmax(-1).sum(0),
    "int(n * 0.5)": lambda x: x[: int(x.shape[0] * 0.5)].exp(),
    "round(n * 0.3)": lambda x: x[: round(x.shape[0] * 0.3)].sin(),
    "ceil(n / 4)": lambda x: torch.zeros(math.ceil(x.shape[0] / 4)) + x.mean(),
    "floor(n / 4)": lambda x: x[math.floor(x.shape[0] / 4) :].sin(),
    "int(sqrt(n))": lambda x: x[: int(math.sqrt(x.shape[0]))].sin(),
    "-(-n // 4)": lambda x: x[: -(-x.shape[0] // 4)].sin(),
    "(3 - n) % 7": lambda x: x[(3 - x.shape[0]) % 7 :].sin(),
    "padded to a multiple": lambda x: F.pad(x, (0, -x.shape[0] % 8)).view(-1, 8).sum(1),
    "min(n // 6, 4)": lambda x: (x.view(-1, 6)[: min(x.shape[0] // 6, 4)] * 2).sum(0),
    "max(n - 20, 1)": lambda x: torch.cat([x.sin(), x.new_ones(max(x.shape[0] - 20, 1))]).cos(),
    "abs(n - 20)": lambda x: x[: abs(x.shape[0] - 20) + 1].sin(),
    "n * (n + 1) // 2": lambda x: (x[:, None] * x).view(-1)[: x.shape[0] * (x.shape[0] + 1) // 2].cos(),
}


@pytest.mark.parametrize("backend", ["interpret", "eager"])
def test_sizes_are_computed_as_python_computes_them(backend: str) -> None:
    def all_of_them(x: Tensor) -> list[Tensor]:
        return [fn(x) for fn in EXPRESSIONS.values()]

    fast = fc.compile(all_of_them, backend=backend, strict=True, dynamic=True)
    for size in (30, 66, 42):
        x = torch.randn(size)
        for what, our, eager in zip(EXPRESSIONS, fast(x), all_of_them(x), strict=True):
            torch.testing.assert_close(our, eager, rtol=1e-5, atol=1e-5, msg=f"{what} at {size}")
    assert len(fast.plan) == 1


def test_sizes_in_a_gradient() -> None:
    parts = [EXPRESSIONS[what] for what in ("int(n / 6)", "-(-n // 4)", "padded to a multiple")]

    def loss(x: Tensor) -> Tensor:
        return torch.cat([fn(x) for fn in parts]).sin().sum()

    fast = fc.compile(loss, backend="interpret", strict=True, dynamic=True)
    for size in (30, 18, 66):
        x = torch.randn(size, requires_grad=True)
        (our,), (eager,) = (torch.autograd.grad(fn(x), x) for fn in (fast, loss))
        torch.testing.assert_close(our, eager, rtol=1e-4, atol=1e-5, msg=f"at {size}")
    assert graphs(fast) == 1


def test_a_number_that_is_no_size() -> None:
    """The start of a slice is in no shape, but the kernel receives it as a number."""

    def fn(x: Tensor, first: int) -> tuple[Tensor, Tensor]:
        return x[first : first + 3].sin(), x.select(1, first).cos()

    fast = fc.compile(fn, backend="interpret", strict=True, dynamic=True)
    x = torch.randn(10, 9)
    for first in (2, 3, 5):
        torch.testing.assert_close(fast(x, first), fn(x, first))
    assert graphs(fast, "inference") == 1


def test_sizes_that_are_estimated_below_zero_take_no_memory() -> None:
    """Two convolutions leave x - k - l + 2 of sizes that are not known."""

    def convolved(x: Tensor, one: Tensor, other: Tensor) -> Tensor:
        return F.conv1d(F.conv1d(x, one).exp(), other)

    fast = fc.compile(convolved, backend="eager", dynamic=True)
    tensors = torch.randn(3, 2, 13), torch.randn(2, 2, 3), torch.randn(2, 2, 4)
    torch.testing.assert_close(fast(*tensors), convolved(*tensors))
    assert "memory: " in str(fast.plan[0])


DIFFERENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "sum over rows": lambda x: x.square().sum(0),
    "sum over columns": lambda x: x.square().sum(1),
    "sum of all": lambda x: x.exp().sum(),
    "softmax": lambda x: torch.softmax(x, 1),
    "softmax over rows": lambda x: torch.softmax(x, 0),
    "running sums": lambda x: x.cumsum(1),
    "largest of each column": lambda x: x.argmax(0),
    "layer norm": lambda x: F.layer_norm(x, x.shape[1:]),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize("name", DIFFERENCES)
def test_sizes_that_are_differences(name: str, one: bool) -> None:
    """A size is the difference of two symbols. Estimates give both the same number, so it seems to be 0 or
    1."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        first = y.shape[0] - 1 if one else y.shape[0]
        return DIFFERENCES[name](x.narrow(1, first, x.shape[1] - first))

    fast = fc.compile(fn, backend="interpret", device="h200", dynamic=True)
    for rows, columns, cut in ((9, 12, 3), (5, 200, 2), (20, 700, 11)):
        x, y = torch.randn(rows, columns), torch.randn(cut)
        torch.testing.assert_close(fast(x, y), fn(x, y))


def test_rows_of_what_is_made_of_a_size_alone() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.full((x.shape[0], 2), 2)[2:-1]

    fast = fc.compile(fn, backend="interpret", device="h200", dynamic=True, fullgraph=True)
    for rows, columns in ((9, 12), (5, 7)):
        torch.testing.assert_close(fast(x := torch.randn(rows, columns)), fn(x))


def test_a_size_that_a_guard_makes_one_is_broadcast() -> None:
    """Other sizes are captured again."""

    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        return y - y[14::3]

    fast = fc.compile(fn, backend="interpret", device="h200", dynamic=True)
    for length in (16, 17, 15):
        torch.testing.assert_close(fast(x := torch.randn(length)), fn(x))


def test_the_gradient_of_one_column_of_a_number_that_differs() -> None:
    """It is padded by a number and by a size less a number, which are not compared."""

    def column(x: Tensor) -> Tensor:
        return (x * 2).select(1, 4).exp()

    fast = fc.compile(column, backend="interpret", strict=True, dynamic=True)
    for columns in (7, 10):
        x = torch.randn(3, columns, requires_grad=True)
        ours, eager = (torch.autograd.grad(f(x).sum(), x)[0] for f in (fast, column))
        torch.testing.assert_close(ours, eager)
