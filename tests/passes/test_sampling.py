"""The next token is drawn in the graph: what logits processors filter, and the draw, without a break."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as hf

import fusion_compiler as fc
from fusion_compiler.ir.plan import FusionPlan

TOKENS = 500


def graph_of(function: Callable[..., object], *inputs: Tensor, backend: str = "interpret") -> FusionPlan:
    """The plan of the one graph that a function is, after a call like eager's."""
    fast = fc.compile(function, backend=backend, device="h200", fullgraph=True)
    torch.testing.assert_close(fast(*inputs), function(*inputs))
    (plan,) = fast.plan
    return plan


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(3, TOKENS) * 3, torch.randint(0, TOKENS, (3, 7))


def written_out(logits: Tensor, tokens: Tensor) -> Tensor:
    """Repetition penalty, temperature, top-k and top-p."""
    score = logits.gather(1, tokens)
    logits = logits.scatter(1, tokens, torch.where(score < 0, score * 1.3, score / 1.3)) / 0.7
    logits = logits.masked_fill(logits < logits.topk(50)[0][..., -1, None], -torch.inf)
    ordered, order = logits.sort(descending=False)
    drop = ordered.softmax(-1).cumsum(-1) <= 1 - 0.9
    drop[..., -1:] = 0
    return logits.masked_fill(drop.scatter(1, order, drop), -torch.inf)


def test_filters_written_out() -> None:
    for _ in range(3):
        logits, tokens = inputs()
        plan = graph_of(written_out, logits, tokens)
    eager = {left.target for left in plan.leftovers}
    assert eager == {"aten.scatter.src", "aten.topk.default", "aten.sort.default"}, (
        "none of which the host waits for"
    )


@pytest.mark.parametrize(
    "processor",
    [
        hf.RepetitionPenaltyLogitsProcessor(1.3),
        hf.TemperatureLogitsWarper(0.7),
        hf.TopKLogitsWarper(50),
        hf.TopPLogitsWarper(0.9),
        hf.MinPLogitsWarper(0.05),
        hf.TypicalLogitsWarper(0.9),
        hf.EpsilonLogitsWarper(1e-4),
        hf.EtaLogitsWarper(1e-4, device="cpu"),
        hf.MinLengthLogitsProcessor(9, 5, device="cpu"),
        hf.SuppressTokensLogitsProcessor([1, 2], device="cpu"),
        hf.NoBadWordsLogitsProcessor([[3]], eos_token_id=5),
        hf.InfNanRemoveLogitsProcessor(),
    ],
    ids=lambda p: type(p).__name__,
)
def test_processors_of_transformers(processor: Callable[[Tensor, Tensor], Tensor]) -> None:
    logits, tokens = inputs()
    graph_of(lambda logits, tokens: processor(tokens, logits), logits, tokens)


def test_the_most_probable_of_128k() -> None:
    plan = graph_of(lambda logits: logits.argmax(-1), torch.randn(2, 128_256))
    assert len(plan.clusters) == 1 and not plan.leftovers


def drawn(logits: Tensor) -> Tensor:
    return torch.multinomial(torch.softmax(logits / 0.7, -1), 1)


PROBABILITIES = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.04, 0.01, 0.0, 0.0])


@pytest.mark.parametrize("backend", ["eager", "interpret"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_drawn_as_often_as_they_are_probable(backend: str, dtype: torch.dtype) -> None:
    rows = 1 << 15
    logits = (PROBABILITIES.log() * 0.7).to(dtype).expand(rows, -1).contiguous()
    exact = torch.softmax(logits[0].double() / 0.7, -1)
    fast = fc.compile(drawn, backend=backend, device="h200", fullgraph=True)
    torch.manual_seed(5)
    tokens = fast(logits)
    assert tokens.shape == (rows, 1) and tokens.dtype is torch.int64
    often = torch.bincount(tokens.flatten(), minlength=8).double() / rows
    assert ((often - exact).abs() <= 5 * (exact * (1 - exact) / rows).sqrt() + 4e-3 * exact).all()
    assert not often[6:].any()
    neighbours = ((tokens[1:] == 0) & (tokens[:-1] == 0)).double().mean()
    assert abs(neighbours - exact[0] ** 2) < 0.02, "rows are independent"
    torch.manual_seed(5)
    assert torch.equal(fast(logits), tokens)
    assert not torch.equal(fast(logits), tokens)


def test_softmax_and_the_draw_are_one_kernel() -> None:
    fast = fc.compile(drawn, backend="interpret", device="h200")
    fast(torch.randn(4, 128))
    (plan,) = fast.plan
    assert len(plan.clusters) == 1
    assert {left.target for left in plan.leftovers} <= {
        "fusion_compiler.seed.default",
        "aten._assert_async.msg",
    }


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -1.0, 0.0])
def test_what_are_no_probabilities_is_an_error(wrong: float) -> None:
    fast = fc.compile(lambda p: torch.multinomial(p, 1), backend="interpret", device="h200")
    p = torch.rand(3, 8)
    fast(p)
    p[1] = wrong
    with pytest.raises(RuntimeError, match="probability tensor contains"):
        fast(p)


def test_several_without_replacement() -> None:
    fast = fc.compile(lambda p: torch.multinomial(p, 3), backend="interpret", device="h200")
    tokens = fast(PROBABILITIES.expand(2000, -1).contiguous())
    assert tokens.shape == (2000, 3) and (tokens.sort(-1).values.diff(dim=-1) > 0).all()
    often = torch.bincount(tokens[:, 0], minlength=8) / 2000
    assert ((often - PROBABILITIES).abs() < 0.06).all()
    left = PROBABILITIES / 0.5
    second = torch.bincount(tokens[tokens[:, 0] == 0, 1], minlength=8)
    assert abs(second[1] / second.sum() - left[1]) < 0.08


def test_draws_that_stay_eager() -> None:
    """More bits than a kernel's numbers have; a generator of the user's."""
    p = torch.rand(3, 8, dtype=torch.float64)
    torch.manual_seed(3)
    want = torch.multinomial(p, 2, replacement=True)
    fast = fc.compile(lambda p: torch.multinomial(p, 2, replacement=True), backend="interpret", device="h200")
    torch.manual_seed(3)
    assert torch.equal(fast(p), want)


def test_exponential_numbers() -> None:
    fast = fc.compile(lambda x: torch.empty_like(x).exponential_(2.0), backend="interpret", device="h200")
    x = fast(torch.empty(64, 1024)).double()
    assert x.min() > 0 and x.isfinite().all()
    assert abs(x.mean() - 0.5) < 5 * 0.5 / x.numel() ** 0.5
    assert abs((x > 1).double().mean() - torch.tensor(-2.0).exp()) < 0.01


def test_the_gradient_of_a_draws_probability() -> None:
    def loss(logits: Tensor) -> Tensor:
        p = torch.softmax(logits, -1)
        return -torch.log(p.gather(1, torch.multinomial(p.detach(), 1))).sum()

    logits = torch.randn(4, 9, requires_grad=True)
    fast = fc.compile(loss, backend="interpret", device="h200")
    fast(logits).backward()
    assert logits.grad is not None
    token = logits.grad.argmin(-1)  # p - 1 at the one that was drawn, p at all others
    want = torch.softmax(logits.detach(), -1) - torch.nn.functional.one_hot(token, 9)
    torch.testing.assert_close(logits.grad, want)
