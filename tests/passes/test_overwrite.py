"""Results that are written over operands which nobody reads any more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusion_compiler as fc
from benchmarks.harness.accuracy import InFloat64
from fusion_compiler.codegen.passes import stored_late
from fusion_compiler.codegen.tile import Assign, For, Range, Statement, Store
from fusion_compiler.ir.loops import LARGEST_TILE
from fusion_compiler.ops.syntax import Name
from fusion_compiler.stitch import order
from tests.exactness import not_as_close
from tests.kernel_text import parsed
from tests.random_programs.generate import draw
from tests.random_programs.judge import judge


@pytest.fixture(autouse=True)
def however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "LEAST_PLACED", 1)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


Function = Callable[[Tensor, Tensor], object]


def placed(compiled: object) -> list[tuple[str, str]]:
    plans = compiled.plan  # type: ignore[attr-defined]
    return [pair for plan in plans for cluster in plan.clusters for pair in cluster.reuses]


def halves(x: Tensor, w: Tensor) -> Tensor:
    a, b = (x @ w).chunk(2, -1)
    return torch.cat([a * b, torch.sigmoid(b)], -1)


PLACED: dict[str, Function] = {
    "element-wise": lambda x, w: F.gelu(x @ w),
    "by another shape": lambda x, w: F.gelu((x @ w).view(2, -1, w.shape[1])),
    "in two passes": lambda x, w: torch.softmax(x @ w, -1),
    "in three": lambda x, w: F.layer_norm(x @ w, w.shape[1:]) * (x @ w).float().norm(),
    "of each column": lambda x, w: (h := x @ w) - h.mean(0),
    "parts of rows": halves,
    "beside another result": lambda x, w: (F.gelu(h := x @ w), h.amax(-1)),
    "one of two operands": lambda x, w: (x @ w) * torch.sin(x @ (w + 1)),
}
APART: dict[str, Function] = {
    "returned": lambda x, w: (h := x @ w, F.gelu(h)),
    "read later": lambda x, w: F.gelu(h := x @ w) @ w.t() @ x.t() @ h,
    "an argument": lambda x, w: F.gelu(x),
    "another dtype": lambda x, w: F.gelu(x @ w).half(),
    "larger": lambda x, w: torch.cat([h := x @ w, h.exp()]),
    "turned": lambda x, w: (h := (x @ w)[:, :16])[:16] + h[:16].t(),
    "other elements": lambda x, w: (h := x @ w) + h.flip(0),
    "a scan": lambda x, w: torch.cumsum(x @ w, -1),
}


def close(*results: object) -> None:
    """Ours as close to the truth as eager's."""
    for ours, eager, truth in zip(*(r if isinstance(r, tuple) else (r,) for r in results), strict=True):
        assert not_as_close(ours, eager, truth) is None


def exact(function: Callable[..., Any], x: Tensor, w: Tensor) -> Any:
    with InFloat64():
        return function(x.double(), w.double())


def operands(*sizes: int) -> tuple[Tensor, Tensor]:
    rows, inner, columns = sizes
    return torch.randn(rows, inner), torch.randn(inner, columns)


@pytest.mark.parametrize("columns", [48, 3000])
@pytest.mark.parametrize("name", PLACED)
def test_a_result_takes_an_operands_place(name: str, columns: int) -> None:
    """Rows that a tile holds and rows that it does not, beside float64. No tile holds all rows."""
    fast = fc.compile(PLACED[name], backend="interpret", strict=True)
    x, w = operands(LARGEST_TILE // columns + 32, 16, columns)
    close(fast(x, w), PLACED[name](x, w), exact(PLACED[name], x, w))
    assert placed(fast)


@pytest.mark.parametrize("name", APART)
def test_others_have_memory_of_their_own(name: str) -> None:
    fast = fc.compile(APART[name], backend="interpret", strict=True)
    x, w = operands(32, 16, 32)
    close(fast(x, w), APART[name](x, w), exact(APART[name], x, w))
    assert not placed(fast)


class Gated(nn.Module):
    """Its backward writes over what its forward saved."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(24, 40), nn.Linear(24, 40), nn.Linear(40, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def gradients(model: nn.Module, loss: Tensor, keep: bool) -> list[Tensor]:
    model.zero_grad()
    loss.backward(retain_graph=keep)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("from_disk", [False, True])
def test_a_graph_that_is_kept_can_be_gone_through_again(from_disk: bool) -> None:
    model = Gated()
    for _ in range(1 + from_disk):
        torch._dynamo.reset()
        fast = fc.compile(model, backend="interpret", strict=True)
        x = torch.randn(33, 24)
        loss = fast(x).square().sum()
        first = gradients(model, loss, keep=True)
    saved = [argument for _, argument in placed(fast)]
    assert any(argument in plan.dag.inputs for plan in fast.plan for argument in saved), "nothing saved is"
    second, third = gradients(model, loss, keep=True), gradients(model, loss, keep=False)
    want = gradients(model, model(x).square().sum(), keep=False)
    for mine, again, last, theirs in zip(first, second, third, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
        assert torch.equal(mine, again) and torch.equal(mine, last)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_what_hooks_see_of_a_gradient_stays() -> None:
    """The gradient of a result may be anybody's."""
    fast = fc.compile(lambda x: torch.sin(x) * 2, backend="interpret", strict=True)
    x = torch.randn(40, 40, requires_grad=True)
    sent = torch.randn(40, 40)
    before = sent.clone()
    fast(x).backward(sent)
    assert torch.equal(sent, before)


def test_verification_compares_what_was_there() -> None:
    fast = fc.compile(PLACED["element-wise"], backend="interpret", strict=True, verify=True)
    x, w = operands(32, 16, 48)
    fast(x, w)
    assert placed(fast)
    assert fast.verification.rows and all(row.agrees for row in fast.verification.rows)


def test_a_store_waits_for_loads_of_what_it_lies_over() -> None:
    texts = {"a": "tl.load(x + i)", "b": "f(a)", "c": "tl.load(x + j)"}
    a, b, c = (Assign((Name(name),), parsed(text)) for name, text in texts.items())
    y, z = Store(parsed("y + i"), Name("b")), Store(parsed("z + j"), Name("c"))
    turns = Range(parsed("0"), parsed("8"))
    body: list[Statement] = [For(Name("i"), turns, [a, b, y, c, z]), a, b, y]
    stored_late(body, {Name("y"): Name("x")})
    assert body == [For(Name("i"), turns, [a, b, c, y, z]), a, b, y]


def test_random_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, of results as small as theirs."""
    written: list[str] = []
    taken = order.Order.taken

    def counted(self: order.Order, inputs: Sequence[str]) -> tuple[int, ...]:
        written.extend(self.reuses)
        return taken(self, inputs)

    monkeypatch.setattr(order.Order, "taken", counted)
    verdicts = {seed: judge(draw(seed)) for seed in range(990000, 990016)}
    assert not {seed: verdict.detail for seed, verdict in verdicts.items() if verdict.failed}
    assert written
