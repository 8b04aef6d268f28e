"""A compiled module is the model: same class, parameters, state, mode, hooks and attributes."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._functorch.aot_autograd import make_boxed_func

from fusion_compiler.capture.capture import Capture
from fusion_compiler.capture.module import CompiledFunction, Compiling, Plans, plan_of, wrap
from fusion_compiler.ir.dag import OpDag
from fusion_compiler.ir.graph_info import GraphInfo
from fusion_compiler.ir.graph_pass import Level
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ops.decompositions.table import decomposition_table
from fusion_compiler.pipeline import passes_at

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def compiled(target: Any, **options: Any) -> Any:
    """Return the result of compile() with graphs that run as they are, and plans that only have a name."""
    plans = Plans()

    def keep(gm: fx.GraphModule, inputs: Sequence[Any], info: GraphInfo) -> Any:
        dag = OpDag(None, (), (), gm)  # type: ignore[arg-type]
        plans.record(FusionPlan(info.name, dag, (), "cpu"))
        return make_boxed_func(gm.forward)

    rewrites = passes_at(Level.ABOVE_AUTOGRAD)
    backend = Capture(keep, rewrites=rewrites, decompositions=decomposition_table).backend
    return wrap(target, Compiling(backend, plans, **options), functools.partial(compiled, **options))


class Block(nn.Module):
    """A module with a buffer, a child and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.gain = 1.0

    def forward(self, x: torch.Tensor, *, shift: float = 0.0) -> torch.Tensor:
        self.calls += 1
        return torch.tanh(self.linear(x)) * self.gain + shift


def names(fast: Any) -> list[str]:
    return [plan.name for plan in plan_of(fast)]


def test_it_is_the_model() -> None:
    model = Block()
    fast = compiled(model)
    assert isinstance(fast, Block) and type(fast).__name__ == "Block"
    assert inspect.signature(fast.forward) == inspect.signature(model.forward)
    assert repr(fast) == repr(model)
    assert list(fast.state_dict()) == list(model.state_dict())
    for a, b in zip(fast.parameters(), model.parameters(), strict=True):
        assert a is b
    assert [n for n, _ in fast.named_modules()] == [n for n, _ in model.named_modules()]


def test_results_gradients_and_buffers() -> None:
    model = Block()
    other = copy.deepcopy(model)
    fast = compiled(model)
    x = torch.randn(3, 4)
    torch.testing.assert_close(fast(x, shift=0.5), other(x, shift=0.5))
    fast(x).sum().backward()
    other(x).sum().backward()
    torch.testing.assert_close(model.linear.weight.grad, other.linear.weight.grad)
    assert float(model.calls) == float(fast.calls) == 2
    assert names(fast) == ["graph0.forward", "graph1.forward", "graph1.backward"]


def test_attributes_and_modes_are_shared_both_ways() -> None:
    model = Block()
    fast = compiled(model)
    x = torch.randn(3, 4)
    before = fast(x)
    fast.gain = 3.0
    assert model.gain == 3.0
    torch.testing.assert_close(fast(x), 3 * before)
    model.gain = 2.0
    torch.testing.assert_close(fast(x), 2 * before)
    fast.eval()
    assert not model.training and not model.linear.training
    model.train()
    assert fast.training
    fast.extra = nn.Linear(2, 2)
    assert "extra.weight" in model.state_dict()
    del fast.extra
    assert not hasattr(model, "extra")


def test_dtype_moves_and_loaded_states() -> None:
    model = Block()
    fast = compiled(model)
    x = torch.randn(3, 4)
    fast(x)
    assert fast.to(torch.float64) is fast
    assert model.linear.weight.dtype is torch.float64
    assert fast(x.double()).dtype is torch.float64
    fast.float()
    state = {k: torch.zeros_like(v) for k, v in model.state_dict().items()}
    fast.load_state_dict(state)
    torch.testing.assert_close(fast(x), torch.zeros(3, 4))


@pytest.mark.parametrize("early", [True, False])
def test_optimizers_made_before_and_after(early: bool) -> None:
    model = Block()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1) if early else None
    fast = compiled(model)
    optimizer = optimizer or torch.optim.AdamW(fast.parameters(), lr=0.1)
    other = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for _ in range(3):
        x = torch.randn(5, 4)
        for module, step in ((fast, optimizer), (plain, other)):
            step.zero_grad()
            module(x).square().sum().backward()
            step.step()
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-5)


def test_hooks_run() -> None:
    model = Block()
    fast = compiled(model)
    seen: list[str] = []
    fast.register_forward_hook(lambda module, args, result: seen.append("after") or result * 2)
    model.register_forward_pre_hook(lambda module, args: seen.append("before"))
    x = torch.randn(3, 4)
    torch.testing.assert_close(fast(x), 2 * model.forward(x))
    assert seen == ["before", "after"]


def test_a_forward_of_the_instance_is_compiled_too() -> None:
    model = Block()
    model.forward = lambda x: x + 7  # type: ignore[method-assign]
    fast = compiled(model)
    torch.testing.assert_close(fast(torch.ones(2)), torch.full((2,), 8.0))
    assert names(fast) == ["graph0.inference"]
    fast.forward = lambda x: x * 3  # another in its place, and none
    torch.testing.assert_close(fast(torch.ones(2)), torch.full((2,), 3.0))
    del fast.forward
    assert "forward" not in vars(model) and fast(torch.ones(2, 4)).shape == (2, 4)
    assert names(fast) == ["graph0.inference", "graph1.inference", "graph2.forward"]


def test_a_plan_attribute_of_the_model_stays_its_own() -> None:
    model = Block()
    model.plan = "mine"  # type: ignore[assignment]
    fast = compiled(model)
    fast(torch.randn(2, 4))
    assert fast.plan == "mine"
    assert names(fast) == ["graph0.forward", "graph0.backward"] or names(fast) == ["graph0.forward"]


def test_copies_and_pickles_are_compiled_again() -> None:
    model = Block()
    fast = compiled(model)
    x = torch.randn(3, 4)
    want = fast(x)
    twin = copy.deepcopy(fast)
    assert type(twin) is not type(fast) and isinstance(twin, Block)
    torch.testing.assert_close(twin(x), want)
    assert twin.linear.weight is not model.linear.weight
    assert names(twin) == ["graph0.forward"]
    read = pickle.loads(pickle.dumps(fast))
    torch.testing.assert_close(read(x), want)
    assert names(read) == ["graph0.forward"]


def test_inside_another_module() -> None:
    fast = compiled(Block())
    outer = nn.Sequential(nn.Linear(4, 4), fast)
    outer(torch.randn(2, 4)).sum().backward()
    assert fast.linear.weight.grad is not None
    assert "1.linear.weight" in outer.state_dict()


def test_replicas_compute_with_their_own_parameters() -> None:
    fast = compiled(Block())
    x = torch.randn(3, 4)
    fast(x)
    replica = fast._replicate_for_data_parallel()  # as nn.DataParallel does for each device
    replica.linear = nn.Linear(4, 4)
    torch.testing.assert_close(replica(x), torch.tanh(replica.linear(x)))
    torch.testing.assert_close(fast(x), torch.tanh(fast.linear(x)))


def test_many_models_of_one_class_do_not_exhaust_recompilations() -> None:
    x = torch.randn(2, 4)
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(4):
            fast = compiled(Block())
            fast(x)
            assert names(fast) == ["graph0.forward"]


def test_functions_and_methods() -> None:
    @compiled
    def double(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        """Twice x."""
        return x * scale

    assert isinstance(double, CompiledFunction)
    assert double.__name__ == "double" and double.__doc__ == "Twice x."
    assert str(inspect.signature(double)) == "(x: 'torch.Tensor', scale: 'float' = 2.0) -> 'torch.Tensor'"
    assert str(double.plan) == "no graph has been captured yet: call it once"
    torch.testing.assert_close(double(torch.ones(3)), torch.full((3,), 2.0))
    assert [p.name for p in double.plan] == ["graph0.inference"] and len(double.plan) == 1

    class Holder:
        @compiled
        def method(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    torch.testing.assert_close(Holder().method(torch.ones(2)), torch.full((2,), 2.0))
