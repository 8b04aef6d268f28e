"""Errors of the first run of a graph: eager takes over once, and nothing is done twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import fusion_compiler as fc
from fusion_compiler.compiler.compiler import Compiler
from fusion_compiler.errors import FusionWarning, InternalError
from fusion_compiler.ir.graph_info import GraphInfo


class Fault(Exception):
    """A fault of the compiler's."""


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every compiled graph runs and then fails; the list has their names."""
    ran: list[str] = []
    graph = Compiler.graph

    def failing(self: Compiler, gm: fx.GraphModule, inputs: Sequence[Any], info: GraphInfo) -> Any:
        run = graph(self, gm, inputs, info)

        def call(args: list[Any]) -> Any:
            run(args)
            ran.append(info.name)
            raise Fault("too late")

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    monkeypatch.setattr(Compiler, "graph", failing)
    return ran


@pytest.mark.parametrize("trained", [False, True])
def test_a_graph_that_fails_when_it_first_runs_runs_eager(trained: bool, broken: list[str]) -> None:
    fast = fc.compile(lambda x: x.sin() * 2, backend="interpret")
    x = torch.randn(4, requires_grad=trained)
    with pytest.warns(FusionWarning, match="Fault: too late") as warned:
        got = fast(x)
    assert len(warned) == 1
    torch.testing.assert_close(got, x.sin() * 2)
    if trained:
        torch.testing.assert_close(*torch.autograd.grad(got.sum(), x), 2 * x.detach().cos())
    torch.testing.assert_close(fast(x), x.sin() * 2)
    assert len(broken) == 1
    assert "runs eager: Fault: too late" in str(fast.plan)


def test_strict_raises_it(broken: list[str]) -> None:
    with pytest.raises(InternalError, match="too late"):
        fc.compile(lambda x: x.sin() * 2, backend="interpret", strict=True)(torch.randn(4))


def _draws(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


@pytest.mark.parametrize("function", [lambda x: x.mul_(2), _draws], ids=["writes", "draws"])
def test_what_was_done_is_not_done_again(function: Callable[[Tensor], Tensor], broken: list[str]) -> None:
    x = torch.randn(4)
    before, fast = x.clone(), fc.compile(function, backend="interpret")
    with pytest.raises(Fault):
        fast(x)
    state = torch.get_rng_state()
    if function is not _draws:
        torch.testing.assert_close(x, before * 2)
    torch.testing.assert_close(torch.get_rng_state(), state)
    assert len(broken) == 1


def test_an_error_that_eager_raises_as_well_is_eagers() -> None:
    fast = fc.compile(lambda x, i: x[i] * 2, backend="eager")
    x = torch.randn(3)
    for _ in range(2):
        with pytest.raises(IndexError, match="out of bounds"):
            fast(x, torch.tensor([9]))
    torch.testing.assert_close(fast(x, torch.tensor([1])), x[1:2] * 2)
    assert "runs eager" not in str(fast.plan)


def test_running_out_of_memory_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def graph(self: Compiler, gm: fx.GraphModule, inputs: Sequence[Any], info: GraphInfo) -> Any:
        def call(*args: Any) -> Any:
            calls.append(len(args))
            raise torch.OutOfMemoryError("no memory")

        return call

    monkeypatch.setattr(Compiler, "graph", graph)
    with pytest.raises(torch.OutOfMemoryError):
        fc.compile(lambda x: x.sin())(torch.randn(3))
    assert calls == [1]


class Stripped(Tensor):
    """A subclass whose operators give plain tensors: TorchDynamo fails to capture it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        keep = not isinstance(result, Tensor) or func is Tensor.requires_grad.__get__  # type: ignore[attr-defined]
        return result if keep else result.as_subclass(Tensor)


def test_a_call_that_cannot_be_captured_runs_eager() -> None:
    fast, x = fc.compile(lambda x: (x * 2, x.sum()), backend="eager"), torch.randn(3).as_subclass(Stripped)
    with pytest.warns(FusionWarning, match="could not be compiled"):
        got = fast(x)
    torch.testing.assert_close(got, (x * 2, x.sum()))
    plain = torch.randn(3)
    torch.testing.assert_close(fast(plain), (plain * 2, plain.sum()))


def test_a_wrong_shape_raises_eagers_error() -> None:
    fast = fc.compile(lambda x: x.reshape(7))
    with pytest.raises(RuntimeError, match=r"^shape '\[7\]' is invalid"):
        fast(torch.randn(3))


@pytest.mark.filterwarnings("ignore:TorchDynamo breaks")
def test_nothing_is_called_again_after_a_print(capsys: pytest.CaptureFixture[str]) -> None:
    def prints(x: Tensor) -> Tensor:
        y = x + 1
        print("once")
        return y.reshape(7)

    with pytest.raises(RuntimeError, match="invalid for input"):
        fc.compile(prints, backend="eager")(torch.randn(3))
    assert capsys.readouterr().out == "once\n"
