"""compile() takes whatever torch.compile takes, and is a decorator as torch.compile is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusion_compiler as fc
from fusion_compiler.compiler.compiler import Compiler
from fusion_compiler.compiler.runners import Runners
from fusion_compiler.errors import (
    ContradictoryOptionsError,
    FusionWarning,
    InvalidOptionError,
    NotCallableError,
    TorchScriptError,
)
from fusion_compiler.options import ALL, MODES, Options

compiled = functools.partial(fc.compile, backend="eager")


def scaled(x: Tensor, by: float = 2.0) -> Tensor:
    return torch.tanh(x * by)


class Scale:
    def __init__(self) -> None:
        self.by = torch.randn(4)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.by)

    def method(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.by)

    @staticmethod
    def static(x: Tensor) -> Tensor:
        return x.sin() * 2

    @classmethod
    def of_class(cls, x: Tensor) -> Tensor:
        return x.cos() * 2


def pieces(x: Tensor) -> Any:
    for i in range(3):
        yield x.sin() * i


LAYER = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
SCALE = Scale()


def loss(x: Tensor) -> Tensor:
    return F.gelu(LAYER(x)).square().sum()


# How to make the callable, given what compiles a part of it.
TAKEN: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "lambda": lambda c: c(lambda x: x.sin() * 2),
    "partial": lambda c: c(functools.partial(scaled, by=3.0)),
    "bound method": lambda c: c(SCALE.method),
    "callable object": lambda c: c(SCALE),
    "static method": lambda c: c(Scale.static),
    "class method": lambda c: c(Scale.of_class),
    "builtin": lambda c: c(torch.sin),
    "tensor method": lambda c: c(Tensor.sin),
    "operator": lambda c: c(torch.ops.aten.sin.default),
    "function of torch": lambda c: c(F.gelu),
    "method of a module": lambda c: c(LAYER.forward),
    "generator": lambda c: lambda x: list(c(pieces)(x)),
    "wrapped": lambda c: c(torch.no_grad()(scaled)),
    "fx graph": lambda c: c(torch.fx.symbolic_trace(LAYER)),
    "scripted function": lambda c: c(torch.jit.script(scaled)),
    "scripted part": lambda c: c(nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.Tanh())),
    "torch.compile'd function": lambda c: c(torch.compile(scaled, backend="eager")),
    "torch.compile'd module": lambda c: c(torch.compile(LAYER, backend="eager")),
    "disabled function": lambda c: c(torch.compiler.disable(scaled)),
    "compiled twice": lambda c: c(c(scaled)),
    "module compiled twice": lambda c: c(c(LAYER)),
    "compiled within": lambda c: c(nn.Sequential(c(LAYER), nn.Tanh())),
    "for torch.compile": lambda c: torch.compile(c(scaled), backend="eager"),
    "grad": lambda c: c(torch.func.grad(loss)),
    "vmap": lambda c: c(torch.func.vmap(lambda row: row.sin() * row.sum())),
    "jvp": lambda c: c(lambda x: torch.func.jvp(scaled, (x,), (x,))),
}


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:`torch.jit:FutureWarning")
@pytest.mark.parametrize("name", TAKEN)
def test_what_can_be_compiled(name: str) -> None:
    x = torch.randn(3, 4)
    torch.manual_seed(0)
    want = TAKEN[name](lambda part: part)(x)
    torch.manual_seed(0)
    broken = pytest.warns(fc.FusionWarning, match=r"torch\.jit|ScriptModule")
    with broken if name == "scripted part" else nullcontext():
        got = TAKEN[name](compiled)(x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_nested_tensors() -> None:
    rows = [torch.randn(2, 4), torch.randn(3, 4)]
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU())
    got: list[Any] = []
    for run in (fc.compile(model, backend="interpret", strict=True), model):
        ragged = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)
        result = run(ragged)
        result.values().square().sum().backward()
        assert result.is_nested and ragged.grad is not None
        got.append((result.values().detach(), ragged.grad.values()))
    torch.testing.assert_close(*got, rtol=1e-4, atol=1e-5)


def test_a_decorator_with_options() -> None:
    @fc.compile(backend="interpret", dynamic=True)
    def double(x: Tensor) -> Tensor:
        return x * 2

    for size in (3, 5):
        torch.testing.assert_close(double(torch.ones(size)), torch.full((size,), 2.0))
    assert [plan.name for plan in double.plan] == ["graph0.inference"]
    with pytest.raises(InvalidOptionError, match="give backend one of"):
        fc.compile(backend="fast")


def test_a_class() -> None:
    """Gives a class whose instances are compiled; the one that was given stays as it is."""

    class Plain(nn.Module):
        def __init__(self, by: float) -> None:
            super().__init__()
            self.by = nn.Parameter(torch.tensor(by))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x * self.by)

    fast = compiled(Plain)
    assert issubclass(fast, Plain) and fast.__qualname__ == Plain.__qualname__ and fast is not Plain
    x = torch.randn(3)
    for by in (2.0, 3.0):
        torch.testing.assert_close(fast(by)(x), Plain(by)(x))
    assert len(fast.forward.plan) >= 1
    other: Any = compiled(Scale)
    scale, x = other(), torch.randn(3, 4)
    torch.testing.assert_close(scale(x), torch.tanh(x * scale.by))
    assert len(other.__call__.plan) == 1 and not hasattr(Scale.__call__, "plan")
    with pytest.raises(NotCallableError):
        fc.compile(int)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:`torch.jit:FutureWarning")
def test_torchscript_stays_as_it_is() -> None:
    scripted = torch.jit.script(nn.Linear(4, 4))
    with pytest.warns(FusionWarning, match=r"(?s)no Python code to capture.*compile the nn.Module"):
        assert fc.compile(scripted) is scripted
    with pytest.raises(TorchScriptError):
        fc.compile(scripted, strict=True)


def test_modes_are_names_of_options() -> None:
    assert Options.of() == Options.of(mode="default") == Options()
    assert Options.of(mode="reduce-overhead") == Options(cudagraphs=True)
    assert Options.of(mode="max-autotune") == Options(cudagraphs=True, tune="all")
    without = Options.of(mode="max-autotune-no-cudagraphs", cudagraphs=False)
    assert without == Options(cudagraphs=False, tune="all")
    with pytest.raises(ContradictoryOptionsError, match="sets cudagraphs=True, but cudagraphs=False"):
        fc.compile(torch.sin, mode="reduce-overhead", cudagraphs=False)
    with pytest.raises(InvalidOptionError, match="give mode one of default, reduce-overhead, max-"):
        fc.compile(torch.sin, mode="fastest")
    documented = fc.compile.__doc__ or ""
    assert "options.MODES" in documented and None in MODES


def test_max_autotune_has_every_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int] = []
    emit = Runners.emit

    def spy(self: Runners, *arguments: Any) -> Any:
        programs = emit(self, *arguments)
        limits.append(len(programs))
        return programs

    monkeypatch.setattr(Runners, "emit", spy)
    x = torch.randn(8, 1001)
    for mode in (None, "max-autotune-no-cudagraphs"):
        torch._dynamo.reset()
        fast = fc.compile(lambda x: torch.softmax(x, -1), mode=mode, backend="interpret")
        torch.testing.assert_close(fast(x), torch.softmax(x, -1))
    assert limits[0] == 4 < limits[1] < ALL


def test_torch_compile_passes_its_mode_and_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[Options] = []
    monkeypatch.setattr(Compiler, "backend", lambda self: options.append(self.options) or (lambda gm, _: gm))
    x = torch.randn(3)
    torch.compile(scaled, backend="fusion_compiler", mode="reduce-overhead")(x)
    torch._dynamo.reset()
    torch.compile(scaled, backend="fusion_compiler", options={"mode": "max-autotune", "strict": True})(x)
    assert options == [Options(cudagraphs=True), Options(cudagraphs=True, tune="all", strict=True)]
