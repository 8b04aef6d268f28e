"""How people use a module: what works on the plain one works on the compiled one, with the same results."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusion_compiler as fc
from tests.versions import not_before


class Net(nn.Module):
    """An MLP with a norm, running statistics and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.batch, self.head = nn.BatchNorm1d(8), nn.Linear(8, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.head(self.batch(x + F.gelu(self.first(self.norm(x)))))


@pytest.fixture
def net() -> tuple[Any, Net]:
    """Return a compiled model and a plain twin."""
    model = Net()
    return fc.compile(model, backend="interpret"), copy.deepcopy(model)


def same(fast: Any, plain: Any, *more: Any) -> None:
    """A step of both: gradients of the argument and of parameters, and what the step leaves in buffers."""
    mine = torch.randn(4, 8, dtype=next(plain.parameters()).dtype).requires_grad_()
    theirs = mine.detach().clone().requires_grad_()
    for model, x in ((fast, mine), (plain, theirs)):
        model.zero_grad()
        model(x, *more).square().sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gradients(fast), gradients(plain), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dict(fast.named_buffers()), dict(plain.named_buffers()))


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


def captures(fast: Any) -> int:
    return len({plan.name.split(".")[0] for plan in fast.plan})


def test_states_and_files(net: tuple[Any, Net]) -> None:
    fast, plain = net
    same(fast, plain)
    other = Net()
    fast.load_state_dict(other.state_dict())
    same(fast, other)
    file = io.BytesIO()
    torch.save(fast.state_dict(), file)
    file.seek(0)
    plain.load_state_dict(torch.load(file))
    same(fast, plain)
    assert captures(fast) == 1


@pytest.mark.parametrize("through", ["deepcopy", "pickle", "torch.save"])
def test_copies(net: tuple[Any, Net], through: str) -> None:
    fast, plain = net
    same(fast, plain)
    if through == "deepcopy":
        twin = copy.deepcopy(fast)
    elif through == "pickle":
        twin = pickle.loads(pickle.dumps(fast))
    else:
        file = io.BytesIO()
        torch.save(fast, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert isinstance(twin, Net) and twin.head.weight is twin.embed.weight is not fast.embed.weight
    same(twin, plain)
    assert captures(twin) == 1


def test_hooks(net: tuple[Any, Net]) -> None:
    """Hooks of the module come before and after the first call; of a part, as for torch.compile, before
    it."""
    logs: list[list[Tensor]] = [[], []]
    for model, log in zip(net, logs, strict=True):
        model.double()  # these hooks make of differences of float32 what is no difference of meaning
        model.register_forward_pre_hook(lambda m, args, log=log: log.append(args[0].detach()))
        model.register_forward_hook(lambda m, args, result: result * 2)
        model.norm.register_forward_hook(lambda m, args, result: result + 1)
        model.register_full_backward_hook(lambda m, inner, outer, log=log: log.append(outer[0].detach()))
    same(*net)
    removed = [model.register_forward_hook(lambda m, args, result: result * 3) for model in net]
    same(*net)
    for handle in removed:
        handle.remove()
    for model, log in zip(net, logs, strict=True):
        model.first.weight.register_hook(lambda grad: grad * 5)
        model.first.bias.register_post_accumulate_grad_hook(lambda p, log=log: log.append(p.grad.clone()))
    same(*net)
    assert len(logs[0]) == 7
    torch.testing.assert_close(*logs, rtol=1e-4, atol=1e-4)


class LowRank(nn.Module):
    """An adapter in the place of a linear layer, as LoRA has it: the base is frozen."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x)) * 0.5


def test_adapters_put_in_and_merged_after_compilation(net: tuple[Any, Net]) -> None:
    same(*net)
    adapter = LowRank(nn.Linear(8, 8))
    for model in net:
        replacement = copy.deepcopy(adapter)
        replacement.base.load_state_dict(model.first.state_dict())
        model.first = replacement
    same(*net)
    assert net[0].first.base.weight.grad is None and net[0].first.up.weight.grad is not None
    for model in net:
        merged = model.first.base
        with torch.no_grad():
            merged.weight += 0.5 * model.first.up.weight @ model.first.down.weight
        model.first = merged
    same(*net)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_checkpointing(reentrant: bool, inside: bool) -> None:
    """Regions of a compiled model; compiled parts in regions."""

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            blocks = (nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()) for _ in range(2))
            self.blocks = nn.ModuleList(blocks)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x + checkpoint(block, x, use_reentrant=reentrant)
            return x

    plain = Blocks()
    fast: Any = copy.deepcopy(plain)
    if inside:
        fast = fc.compile(fast, backend="interpret")
    else:
        for i, block in enumerate(fast.blocks):
            fast.blocks[i] = fc.compile(block, backend="interpret")
    for _ in range(2):
        same(fast, plain)


@pytest.mark.parametrize("outside", [True, False])
def test_autocast(outside: bool) -> None:
    """Around the call and inside of the model; on and off by turns."""

    class Mixed(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not outside):
                return super().forward(x).float()

    plain = Mixed().eval()
    fast = fc.compile(copy.deepcopy(plain), backend="interpret")
    for enabled in (outside, False, outside):
        x = torch.randn(4, 8)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            got, want = fast(x), plain(x)
        exact = Net.forward(copy.deepcopy(plain).double(), x.double())
        assert got.dtype is want.dtype
        assert (got - exact).abs().max() <= 1.5 * (want - exact).abs().max() + 1e-5


def test_a_gradient_scaler(net: tuple[Any, Net]) -> None:
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1) for _ in net]
    optimizers = [torch.optim.SGD(model.parameters(), 0.01) for model in net]
    for step in range(3):
        x = torch.randn(4, 8) * (torch.inf if step == 1 else 1)  # a step that is left out
        for model, scaler, optimizer in zip(net, scalers, optimizers, strict=True):
            optimizer.zero_grad()
            scaler.scale(model.eval()(x).square().mean()).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale() == (128.0, 64.0, 128.0)[step]
    torch.testing.assert_close(net[0].state_dict(), net[1].state_dict(), rtol=1e-4, atol=1e-5)


FUNCTIONS: dict[str, Callable[[Any, Tensor], Any]] = {
    "functional_call": lambda m, x: torch.func.functional_call(m, _doubled(m), (x,)),
    "grad": lambda m, x: torch.func.grad(lambda p: _called(m, p, x).sum())(dict(m.named_parameters())),
    "vmap": lambda m, x: torch.func.vmap(m)(x),
    "jacrev": lambda m, x: torch.func.jacrev(m)(x),
    "per sample": lambda m, x: torch.func.vmap(
        torch.func.grad(lambda p, row: _called(m, p, row).sum()), (None, 0)
    )(dict(m.named_parameters()), x),
}


def _doubled(m: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() * 2 for name, p in m.named_parameters()}


def _called(m: nn.Module, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.func.functional_call(m, parameters, (x,))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("together", [True, False])
def test_function_transforms(name: str, together: bool) -> None:
    """Transforms apply to a compiled module, and are compiled together with it."""
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    x = torch.randn(3, 8)
    want = FUNCTIONS[name](model, x)
    if together:
        got = fc.compile(lambda x: FUNCTIONS[name](model, x), backend="interpret")(x)
    else:
        supported = name == "functional_call"
        eager = pytest.warns(fc.FusionWarning, match=r"torch\.func\.|torch\.vmap|functorch")
        with nullcontext() if supported else eager:
            got = FUNCTIONS[name](fc.compile(model, backend="interpret"), x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_gradient_modes_by_turns(net: tuple[Any, Net]) -> None:
    fast, plain = net
    same(fast, plain)
    fast.eval(), plain.eval()
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad, torch.inference_mode):
        x = torch.randn(4, 8)
        with mode():
            got, want = fast(x), plain(x)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        assert (got.requires_grad, got.is_inference()) == (want.requires_grad, want.is_inference())
    fast.train(), plain.train()
    same(fast, plain)


def test_parameters_frozen_and_thawed(net: tuple[Any, Net]) -> None:
    for frozen in ((), ("first",), ("first", "norm"), ()):
        for model in net:
            for name in ("first", "norm"):
                getattr(model, name).requires_grad_(name not in frozen)
        same(*net)
        assert (net[0].first.weight.grad is None) == ("first" in frozen)


def test_parameters_written_and_replaced(net: tuple[Any, Net]) -> None:
    same(*net)
    for model in net:
        with torch.no_grad():
            model.first.weight.mul_(2)
            model.embed.weight[0] = 1.0
        model.first.bias.data = torch.ones(8)
    same(*net)
    for model in net:
        model.norm.weight = nn.Parameter(torch.full((8,), 2.0))
        model.batch.running_mean = torch.ones(8)
    same(*net)
    assert captures(net[0]) <= 2


def test_tied_weights(net: tuple[Any, Net]) -> None:
    fast, plain = net
    same(fast, plain)
    assert fast.head.weight is fast.embed.weight
    for model in net:
        model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    same(fast, plain)
    for model in net:
        model.head.weight = model.embed.weight
    same(fast, plain)


def test_moved_to_another_dtype(net: tuple[Any, Net]) -> None:
    fast, plain = net
    same(fast, plain)
    for dtype in (torch.float64, torch.float32):
        assert fast.to(dtype) is fast
        plain.to(dtype)
        x = torch.randn(4, 8, dtype=dtype)
        got, want = fast(x), plain(x)
        assert got.dtype is dtype
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    same(fast, plain)


def test_compiled_again(net: tuple[Any, Net]) -> None:
    """The last compilation counts: other options, in the place of torch.compile, within a larger model."""
    fast, plain = net
    same(fast, plain)
    again = fc.compile(fast, backend="eager")
    assert again.embed is fast.embed and not isinstance(again, type(fast))
    same(again, plain)
    assert captures(again) == 1 and captures(fast) == 1
    other = torch.compile(copy.deepcopy(plain), backend="aot_eager")
    same(fc.compile(other, backend="eager"), copy.deepcopy(plain))
    outer = fc.compile(nn.Sequential(fast, nn.Tanh()), backend="interpret")
    same(outer, nn.Sequential(plain, nn.Tanh()))
    assert captures(outer) == 1 and captures(fast) == 1
    x = torch.randn(4, 8)
    torch.testing.assert_close(torch.compile(fast.eval(), backend="aot_eager")(x), plain.eval()(x))


AGAIN = not_before((2, 13), "threads that compile after other threads did crash, with torch.compile too")


@pytest.mark.parametrize(
    "sizes",
    [(4, 4, 4, 4), pytest.param((2, 3, 5, 9), marks=AGAIN)],
    ids=["one shape", "four shapes"],
)
def test_threads_share_a_model(sizes: tuple[int, ...]) -> None:
    """All make the first call at once, and the first backward."""
    plain = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU())
    fast = fc.compile(copy.deepcopy(plain), backend="interpret")
    start, failed = threading.Barrier(len(sizes)), []
    config = torch._dynamo.config.record_runtime_overhead

    def work(number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        try:
            start.wait()
            for _ in range(2):
                x = torch.randn(sizes[number], 8, generator=generator, requires_grad=True)
                results = [model(x) for model in (fast, plain)]
                torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
                start.wait()
                grads = [torch.autograd.grad(y.square().sum(), x)[0] for y in results]
                torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)
            assert torch._dynamo.config.record_runtime_overhead is config
        except BaseException as error:
            failed.append(error)
            start.abort()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(sizes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def test_a_backward_that_threads_call_first_is_compiled_once() -> None:
    plain = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    fast = fc.compile(plain, backend="eager")
    losses = [fast(torch.randn(4, 8)).sum() for _ in range(4)]
    start = threading.Barrier(4)

    def work(loss: Tensor) -> None:
        start.wait()
        loss.backward()

    threads = [threading.Thread(target=work, args=(loss,)) for loss in losses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [plan.name for plan in fast.plan] == ["graph0.forward", "graph0.backward"]
