"""Errors of a model's own calls are eager's, also where TorchDynamo meets them first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusion_compiler as fc
from fusion_compiler.errors import FusionWarning, GraphBreakError

FLAT = torch.ones(2, 2)  # pooling takes three dimensions
pytestmark = pytest.mark.filterwarnings("ignore:the graph is on cpu", "ignore:TorchDynamo breaks the graph")


def pooled(x: Tensor) -> Tensor:
    return F.adaptive_avg_pool2d(x, (2, 2))


def pooled_or_not(x: Tensor) -> Tensor:
    try:
        return F.adaptive_avg_pool2d(x, (2, 2)) * 2
    except ValueError:
        return x * 3


CALLS: dict[str, Callable[[], Any]] = {
    "a ValueError": lambda: fc.compile(pooled)(FLAT),
    "an IndexError": lambda: fc.compile(lambda x: x.amax(1))(torch.ones(5, 0, 5)),
    "strict": lambda: fc.compile(pooled, strict=True)(FLAT),
    "in a module": lambda: fc.compile(nn.Softmax(4))(FLAT),
}
EAGER: dict[str, type[Exception]] = {"a ValueError": ValueError, "strict": ValueError}


@pytest.mark.parametrize("name", CALLS)
def test_the_class_is_eagers_and_the_traceback_shows_nothing_else(name: str) -> None:
    with pytest.raises(EAGER.get(name, IndexError)) as raised:
        CALLS[name]()
    assert raised.value.__cause__ is None
    assert raised.value.__context__ is None or raised.value.__suppress_context__


def test_a_call_that_fits_is_compiled_after_one_that_did_not() -> None:
    fast = fc.compile(pooled)
    with pytest.raises(ValueError, match="at least 3"):
        fast(FLAT)
    x = torch.randn(1, 2, 8, 8)
    torch.testing.assert_close(fast(x), pooled(x))
    assert len(fast.plan) == 1


def test_code_before_the_error_runs_once() -> None:
    ran: list[int] = []

    def broken(x: Tensor) -> Tensor:
        ran.append(1)
        torch._dynamo.graph_break()
        return pooled(x)

    with pytest.raises(ValueError, match="at least 3"):
        fc.compile(broken)(FLAT)
    assert ran == [1]


def test_an_error_that_the_model_handles_costs_speed_alone() -> None:
    fast = fc.compile(pooled_or_not)
    ours = r"the call of pooled_or_not could not be compiled: ValueError: Input dim"
    with pytest.warns(FusionWarning, match=rf"{ours}|Observed exception"):  # as TorchDynamo says since 2.15
        torch.testing.assert_close(fast(FLAT), FLAT * 3)
    with pytest.raises((ValueError, GraphBreakError), match="at least 3"):
        fc.compile(pooled_or_not, strict=True)(FLAT)


def test_a_users_errors_do_not_end_compilation() -> None:
    fast = fc.compile(pooled)
    for _ in range(torch._dynamo.config.recompile_limit + 1):
        with pytest.raises(ValueError, match="at least 3"):
            fast(FLAT)
    fast(torch.randn(1, 2, 8, 8))
    assert len(fast.plan) == 1
