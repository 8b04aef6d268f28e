"""Random numbers are drawn once, and effects happen once, whatever saves memory or is read by nobody."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fusion_compiler as fc
from fusion_compiler.capture import capture
from fusion_compiler.capture.saved_values import Budget

pytestmark = pytest.mark.filterwarnings("error:.*could not be compiled")
CALLS: list[float] = []


@torch.library.custom_op(
    "tests_single_runs::noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def noise(x: Tensor) -> Tensor:
    return torch.rand_like(x)


@noise.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("tests_single_runs::report", mutates_args=())
def report(x: Tensor) -> None:
    CALLS.append(float(x.detach().sum()))


@report.register_fake
def _(x: Tensor) -> None:
    pass


@torch.library.custom_op("tests_single_runs::count", mutates_args=("places",))
def count(places: Tensor, x: Tensor) -> None:
    CALLS.append(float(x.detach().sum()))
    places.add_(1)


@count.register_fake
def _(places: Tensor, x: Tensor) -> None:
    pass


DRAWS: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.randn_like,
    torch.rand_like,
    lambda x: noise(x.detach()),
    lambda x: torch.bernoulli(torch.full_like(x, 0.4)),
    lambda x: torch.bernoulli(x.detach(), 0.4),
    lambda x: torch.empty_like(x).exponential_(),
    lambda x: torch.empty_like(x).normal_(1.0),
    lambda x: torch.poisson(torch.full_like(x, 3.0)),
    lambda x: torch.randint_like(x, 4),
    lambda x: torch.randperm(x.shape[-1]).to(x.dtype).expand_as(x),
    lambda x: torch.multinomial(torch.ones(8, 8, dtype=x.dtype), 8).to(x.dtype),
    lambda x: F.dropout(torch.ones_like(x)),
    lambda x: F.rrelu(-torch.ones_like(x), training=True),
    lambda x: F.alpha_dropout(torch.ones_like(x), 0.5, True),
)
# Each smooth in x, so that a difference of two calls with the same draws is a derivative.
STEPS: tuple[Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor], ...] = (
    lambda x, draw: x * draw(x),
    lambda x, draw: torch.tanh(x) + x.sin() * draw(x),
    lambda x, draw: (x @ x.mT * draw(x)).cos(),
    lambda x, draw: F.layer_norm(x * draw(x).cos(), (8,)),
    lambda x, draw: F.scaled_dot_product_attention(x, x, x * draw(x), dropout_p=0.3),
    lambda x, draw: checkpoint(lambda t: (t * draw(t)).sigmoid() * t, x, use_reentrant=False),  # type: ignore[return-value]
)


def program(choice: random.Random) -> Callable[[Tensor], Tensor]:
    chosen = [(choice.choice(STEPS), choice.choice(DRAWS)) for _ in range(choice.randint(1, 4))]

    def run(x: Tensor) -> Tensor:
        for step, draw in chosen:
            x = step(x, draw)
        return x

    return run


def check_derivative(fast: Callable[[Tensor], Tensor], seed: int) -> None:
    """The gradient of a call is the derivative of calls with the same draws, in float64."""
    generator = torch.Generator().manual_seed(seed)
    x, along = (torch.randn(1, 8, 8, dtype=torch.float64, generator=generator) for _ in range(2))

    def value(away: float) -> tuple[Tensor, Tensor]:
        point = (x + away * along).requires_grad_()
        torch.manual_seed(seed)
        return point, fast(point).sum()

    point, total = value(0.0)
    total.backward()
    assert point.grad is not None

    def slope(step: float) -> Tensor:
        return (value(step)[1] - value(-step)[1]).detach() / (2 * step)

    # Richardson's extrapolation: the third derivative of a steep program is in the fourth digit of one slope
    exact = (4 * slope(5e-7) - slope(1e-6)) / 3
    torch.testing.assert_close((point.grad * along).sum(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("number", range(8))
def test_gradients_are_of_the_draws_of_the_forward(number: int) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")  # of a failure
    choice = random.Random(seed)
    memory: Budget = ("fast", 0.0, choice.random(), choice.randrange(1 << 12))[number % 4]
    torch._dynamo.reset()
    check_derivative(fc.compile(program(choice), backend="eager", memory=memory), seed)


@pytest.mark.parametrize("memory", ["fast", 0.0, 0.3])
def test_no_draw_is_repeated_to_save_memory(memory: Budget) -> None:
    def model(x: Tensor) -> Tensor:
        return torch.stack([row * draw(row) for row, draw in zip(x, DRAWS, strict=True)])

    torch._dynamo.reset()
    x = torch.ones(len(DRAWS), 8, 8, requires_grad=True)
    y = fc.compile(model, backend="eager", memory=memory)(x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, y.detach())


def test_a_region_that_runs_uncompiled_draws_the_same_numbers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def model(x: Tensor) -> Any:
        inner = lambda t: t * F.dropout(torch.ones_like(t))  # noqa: E731
        return checkpoint(
            lambda t: t * torch.rand_like(t) * checkpoint(inner, torch.ones_like(t), use_reentrant=False),
            x,
            use_reentrant=False,
        )

    def fail(*_: Any, **__: Any) -> Any:
        raise ValueError("not today")

    monkeypatch.setattr(capture._Compilers, "compile", fail)
    torch._dynamo.reset()
    x = torch.ones(16, requires_grad=True)
    with pytest.warns(fc.FusionWarning, match="not today"):
        y = fc.compile(model, backend="eager")(x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, y.detach())


def false(x: Tensor) -> Tensor:
    return (x > 5).all()


FAILING: dict[str, Callable[[Tensor], object]] = {
    "_assert_async": lambda x: torch._assert_async(false(x)),
    "_assert_async with a message": lambda x: torch._assert_async(false(x), "wanted"),
    "_functional_assert_async": lambda x: torch.ops.aten._functional_assert_async(false(x), "wanted", x),
    "_assert_tensor_metadata": lambda x: torch.ops.aten._assert_tensor_metadata(
        x * 2, None, None, torch.int8
    ),
    "_linalg_check_errors": lambda x: torch.linalg.inv(x.new_zeros(2, 2)),
}


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("name", FAILING)
def test_what_nobody_reads_still_raises(name: str, gradient: bool) -> None:
    def model(x: Tensor) -> Tensor:
        FAILING[name](x)
        return x * 2

    torch._dynamo.reset()
    with pytest.raises((RuntimeError, torch.linalg.LinAlgError)):
        fc.compile(model, backend="eager")(torch.ones(3, requires_grad=gradient))


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("memory", ["fast", 0.0])
def test_an_operator_that_returns_nothing_runs_once_in_each_call(memory: Budget, checkpointed: bool) -> None:
    def region(x: Tensor) -> Tensor:
        report(x)
        report(x)  # again, with equal arguments
        count(torch.zeros(2), x.detach().exp())
        return x.sin() * x.exp()

    def model(x: Tensor) -> Any:
        return checkpoint(region, x, use_reentrant=False) if checkpointed else region(x)

    torch._dynamo.reset()
    CALLS.clear()
    fast: Any = fc.compile(model, backend="eager", memory=memory)
    x = torch.rand(4, requires_grad=True)
    for _ in range(2):
        fast(x).sum().backward()
    total, grown = float(x.detach().sum()), float(x.detach().exp().sum())
    assert sorted(CALLS) == pytest.approx(sorted([total, total, grown] * 2))
