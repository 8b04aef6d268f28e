"""Updates within backward passes: the same as at their end, each once, and what ends in an error."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

import fusion_compiler as fc
from fusion_compiler.errors import InvalidOptionError, OptimizerStepError, PartialStepError
from fusion_compiler.optimizer import backward
from fusion_compiler.runtime import gradients
from tests.optimizers import Lion, Tied, check_same, data, loss_of, values


def trained(
    model: nn.Module, optimizer: Optimizer, batches: list[Any], call: Callable[..., Any] | None = None
) -> None:
    for batch in batches:
        optimizer.zero_grad()
        loss_of(call or model, batch).backward()
        optimizer.step()


@pytest.fixture(params=[1, 200, 1 << 20])
def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes: a launch for each gradient, for a few, for all."""
    monkeypatch.setattr(backward, "BUCKET_BYTES", request.param)
    return request.param


MAKES: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda p: AdamW(p, lr=0.02),
    "sgd momentum": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "sgd": lambda p: SGD(p, lr=0.1),
}


@pytest.mark.parametrize("name", MAKES)
def test_the_same_steps_as_at_the_end(name: str, bucket: int) -> None:
    ours = Tied()
    eager = copy.deepcopy(ours)
    one, other = MAKES[name](ours.parameters()), MAKES[name](eager.parameters())
    fc.fuse_optimizer(ours, one, when="backward", backend="eager", strict=True)
    batches = [data() for _ in range(8)]
    trained(ours, one, batches)
    trained(eager, other, batches)
    check_same(values(ours, one), values(eager, other))
    assert all(param.grad is None for param in ours.parameters())
    if name == "adamw":
        assert one.state[ours.embed.weight]["step"] == 8 and not one.state[ours.unused]


def test_kernels_and_a_compiled_model() -> None:
    ours = Tied()
    models = (ours, copy.deepcopy(ours), copy.deepcopy(ours).double())
    optimizers = [AdamW(model.parameters(), lr=0.02) for model in models]
    fused = fc.fuse_optimizer(ours, optimizers[0], when="backward", backend="interpret", strict=True)
    batches = [data() for _ in range(4)]
    trained(ours, optimizers[0], batches, fc.compile(ours, backend="interpret"))
    for model, optimizer in zip(models[1:], optimizers[1:], strict=True):
        trained(model, optimizer, batches)
    ours_now, eager, truth = (values(model, o) for model, o in zip(models, optimizers, strict=True))
    for name, value in ours_now.items():
        torch.testing.assert_close(value.double(), truth[name].double(), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(value, eager[name], rtol=1e-3, atol=1e-4)
    assert len(fused.kernels) == 1


def test_gradients_are_freed_on_the_way() -> None:
    """At most a bucket's gradients of ten layers are alive beside the one that is computed."""
    layers = nn.Sequential(*(nn.Linear(50, 50, bias=False) for _ in range(10)))
    optimizer = SGD(layers.parameters(), lr=1e-3)
    most: list[int] = []
    alive: weakref.WeakSet[Any] = weakref.WeakSet()

    def note(param: Tensor) -> None:
        assert param.grad is not None
        alive.add(param.grad.untyped_storage())
        most.append(sum(type(p.grad) is Tensor for p in layers.parameters()))

    for param in layers.parameters():
        param.register_post_accumulate_grad_hook(note)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backward, "BUCKET_BYTES", 2 * 50 * 50 * 4)
        fused = fc.fuse_optimizer(layers, optimizer, when="backward", backend="eager")
        layers(torch.randn(3, 50)).sum().backward()
    assert max(most) == 2 and len(most) == 10
    assert not any(type(param.grad) is Tensor for param in layers.parameters())
    optimizer.step()
    assert all(param.grad is None for param in layers.parameters())
    fused.remove()
    layers(torch.randn(3, 50)).sum().backward()
    assert max(most) == 10


def test_a_checkpoint_between_passes_goes_on_as_torch_optims() -> None:
    model = Tied()
    eager = copy.deepcopy(model)
    one, other = AdamW(model.parameters()), AdamW(eager.parameters())
    fused = fc.fuse_optimizer(model, one, when="backward", backend="eager", strict=True)
    batches = [data() for _ in range(6)]
    trained(model, one, batches[:3])
    resumed = Tied()
    second = AdamW(resumed.parameters())
    resumed.load_state_dict(copy.deepcopy(model.state_dict()))
    second.load_state_dict(copy.deepcopy(one.state_dict()))
    trained(resumed, second, batches[3:])
    trained(eager, other, batches)
    check_same(values(resumed, second), values(eager, other))
    fused.remove()
    trained(model, one, batches[3:])
    check_same(values(model, one), values(eager, other))


def test_the_first_pass_after_a_checkpoint_has_its_rate() -> None:
    """`load_state_dict` makes other groups."""
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    fc.fuse_optimizer(model, optimizer, when="backward", backend="eager", strict=True)
    for _ in range(2):
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.0
    optimizer.load_state_dict(saved)
    before = model.weight.detach().clone()
    model(torch.randn(4, 3)).sum().backward()
    assert torch.equal(model.weight, before)


def test_what_is_read_after_the_pass_is_updated_without_step() -> None:
    model = nn.Linear(3, 2)
    fc.fuse_optimizer(model, SGD(model.parameters(), lr=0.5), when="backward", backend="eager")
    before = model.weight.detach().clone()
    x = torch.randn(4, 3)
    model(x).sum().backward()
    with torch.no_grad():
        expected = before - 0.5 * x.sum(0)
    torch.testing.assert_close(model.weight.detach(), expected.expand_as(before))


def test_a_gradient_that_no_pass_made_is_left_for_step() -> None:
    model = nn.Linear(3, 2)
    eager = copy.deepcopy(model)
    one, other = SGD(model.parameters(), lr=0.5), SGD(eager.parameters(), lr=0.5)
    fc.fuse_optimizer(model, one, when="backward", backend="eager")
    for each, optimizer in ((model, one), (eager, other)):
        each.weight.grad = torch.ones(2, 3)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
    check_same(values(model, one), values(eager, other))


def test_a_second_gradient_is_refused_before_anything_is_made_of_it() -> None:
    model = nn.Linear(3, 2)
    optimizer = AdamW(model.parameters())
    fc.fuse_optimizer(model, optimizer, when="backward", backend="eager")
    model(torch.randn(4, 3)).sum().backward()
    before = {name: value.clone() for name, value in values(model, optimizer).items()}
    with pytest.raises(OptimizerStepError, match=r'second gradient.*\n.*take when="step"'):
        model(torch.randn(4, 3)).sum().backward()
    check_same(values(model, optimizer), before)
    optimizer.zero_grad()
    optimizer.step()
    model(torch.randn(4, 3)).sum().backward()
    assert optimizer.state[model.weight]["step"] == 2


USES: dict[str, Callable[[nn.Module, Optimizer], Any]] = {
    "norm": lambda m, o: nn.utils.clip_grad_norm_(m.parameters(), 1.0),
    "value": lambda m, o: nn.utils.clip_grad_value_(m.parameters(), 1.0),
    "one's own": lambda m, o: sum(p.grad.square().sum() for p in m.parameters() if p.grad is not None),
    "print": lambda m, o: str(m.weight.grad),
    "zeros": lambda m, o: o.zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("name", USES)
def test_a_gradient_that_is_freed_is_not_taken_for_one(name: str) -> None:
    """A norm over gradients that are None would be zero, and nothing clipped."""
    model = nn.Linear(3, 2)
    optimizer = AdamW(model.parameters())
    fc.fuse_optimizer(model, optimizer, when="backward", backend="eager")
    for _ in range(2):
        model(torch.randn(4, 3)).sum().backward()
        with pytest.raises(OptimizerStepError, match=r"weight is wanted.*\n.*when=.step. or .forward."):
            USES[name](model, optimizer)
        optimizer.step()
        assert model.weight.grad is None
    assert optimizer.state[model.weight]["step"] == 2


def test_a_scaler_is_refused_before_anything_is_updated() -> None:
    model = nn.Linear(3, 2)
    optimizer = AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    fc.fuse_optimizer(model, optimizer, when="backward", backend="eager")
    before = {name: value.clone() for name, value in values(model, optimizer).items()}
    with pytest.raises(OptimizerStepError, match="a GradScaler scales"):
        scaler.scale(model(torch.randn(4, 3)).sum()).backward()
    check_same(values(model, optimizer), before)
    del scaler


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise ZeroDivisionError


@pytest.mark.parametrize("bytes_", [1, 1 << 20])
def test_an_error_in_a_pass_is_told_with_what_was_updated(
    bytes_: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backward, "BUCKET_BYTES", bytes_)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = SGD(model.parameters(), lr=0.1)
    fc.fuse_optimizer(model, optimizer, when="backward", backend="eager")
    before = {name: value.clone() for name, value in values(model, optimizer).items()}
    for way in ("step", "pass"):
        with pytest.raises(ZeroDivisionError):
            model[1](Failing.apply(model[0](torch.randn(2, 3)))).sum().backward()
        last = "1.weight, 1.bias" if bytes_ == 1 else "none"
        with pytest.raises(PartialStepError) as raised:
            if way == "step":
                optimizer.step()
            else:
                model(torch.randn(2, 3)).sum().backward()
        updated, waiting = str(raised.value.fields["updated"]), str(raised.value.fields["waiting"])
        assert set(updated.split(", ")) == set(last.split(", "))
        assert {"0.weight", "0.bias"} <= set(waiting.split(", "))
        changed = {n for n, v in values(model, optimizer).items() if not torch.equal(v, before[n])}
        assert changed == (set(updated.split(", ")) - {"none"})
        optimizer.zero_grad()
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before["0.weight"])


def test_a_read_after_the_update_is_autograds_error() -> None:
    """dX = dY W needs W of before: what detaches it first is no use that the hook waits for."""
    model = nn.Linear(3, 3, bias=False)
    optimizer = SGD(model.parameters(), lr=0.1)
    fc.fuse_optimizer(model, optimizer, when="backward", backend="interpret")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backward, "BUCKET_BYTES", 1)
        for _ in range(2):  # the first is the class's own, the second a kernel's
            x = torch.randn(2, 3, requires_grad=True)
            y = nn.functional.linear(x, model.weight.detach())
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                model(y).sum().backward()
            with pytest.raises(PartialStepError):
                optimizer.step()


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant: bool) -> None:
    layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
    eager = copy.deepcopy(layers)
    pairs = [(layers, AdamW(layers.parameters())), (eager, AdamW(eager.parameters()))]
    fc.fuse_optimizer(layers, pairs[0][1], when="backward", backend="eager", strict=True)
    for _ in range(4):
        x = torch.randn(2, 4, requires_grad=True)
        for each, optimizer in pairs:
            optimizer.zero_grad()
            y = x
            for layer in each:
                y = checkpoint(lambda v, layer=layer: torch.tanh(layer(v)), y, use_reentrant=reentrant)
            y.sum().backward()
            optimizer.step()
    check_same(values(*pairs[0]), values(*pairs[1]))


class Counting(SGD):
    """A class that counts its steps in its groups: it may be called once a step only."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"] / group["steps"])


@pytest.mark.filterwarnings("ignore::fusion_compiler.errors.FusionWarning")
@pytest.mark.parametrize("make", [Counting, Lion])
def test_a_class_of_the_users_own_steps_once(make: Callable[..., Optimizer], bucket: int) -> None:
    ours = Tied()
    eager = copy.deepcopy(ours)
    one, other = make(ours.parameters(), lr=0.1), make(eager.parameters(), lr=0.1)
    fused = fc.fuse_optimizer(ours, one, when="backward", backend="eager")
    batches = [data() for _ in range(5)]
    trained(ours, one, batches)
    trained(eager, other, batches)
    check_same(values(ours, one), values(eager, other))
    assert all(param.grad is None for param in ours.parameters())
    assert bool(fused.unfused) == (make is Counting)


def test_groups_and_parameters_that_come_later() -> None:
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    eager = copy.deepcopy(model)
    pairs = [(m, AdamW(m[0].parameters())) for m in (model, eager)]
    fc.fuse_optimizer(model, pairs[0][1], when="backward", backend="eager", strict=True)
    for step in range(6):
        x = torch.randn(2, 3)
        for each, optimizer in pairs:
            if step == 2:
                optimizer.add_param_group({"params": list(each[1].parameters()), "lr": 0.1})
            optimizer.zero_grad()
            each[1](each[0](x)).square().sum().backward()
            optimizer.step()
            if step < 2:
                each[1].zero_grad()
    check_same(values(*pairs[0]), values(*pairs[1]))


def test_what_needs_all_gradients_first_is_refused() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(InvalidOptionError, match="give when one of step, backward, forward, auto"):
        fc.fuse_optimizer(model, SGD(model.parameters(), lr=0.1), when="later")  # type: ignore[arg-type]
    with pytest.raises(InvalidOptionError, match="backend"):
        fc.fuse_optimizer(model, SGD(model.parameters(), lr=0.1), backend="cuda")  # type: ignore[arg-type]
    wrapped = nn.Sequential(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.parallel, "DistributedDataParallel", nn.Sequential)
        with pytest.raises(OptimizerStepError, match="summed over processes"):
            fc.fuse_optimizer(wrapped, optimizer, when="backward", backend="eager")
    assert "step" not in optimizer.__dict__
    fc.fuse_optimizer(wrapped, optimizer, when="backward", backend="eager")


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return x


class Watched:
    """How many gradients that compiled backwards have handed on are alive at a time, and which are taken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.alive: list[weakref.ref[Tensor]] = []
        self.most, self.taken = 0, 0
        handed = gradients.Handover._handed

        def watch(handover: Any, edge: Any, grad: Tensor) -> bool:
            self.alive = [ref for ref in self.alive if ref() is not None] + [weakref.ref(grad)]
            self.most = max(self.most, len(self.alive))
            taken = handed(handover, edge, grad)
            self.taken += taken
            return taken

        monkeypatch.setattr(gradients.Handover, "_handed", watch)

    def reset(self) -> None:
        self.most = self.taken = 0


Loss = Callable[[Any, Layers, Tensor], Tensor]


def both_trained(loss: Loss, steps: int = 4) -> tuple[Layers, Optimizer]:
    """Train a compiled model with a fused optimizer and an eager one, and check that losses and states
    agree."""
    torch.manual_seed(0)
    ours = Layers().double()
    eager = copy.deepcopy(ours)
    one, other = SGD(ours.parameters(), lr=0.1, momentum=0.9), SGD(eager.parameters(), lr=0.1, momentum=0.9)
    fc.fuse_optimizer(ours, one, when="backward", backend="eager", strict=True)
    fast = fc.compile(ours, backend="eager", strict=True)
    for _ in range(steps):
        x = torch.randn(8, 16, dtype=torch.float64)
        for call, model, optimizer in ((fast, ours, one), (eager, eager, other)):
            loss(call, model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
    want = values(eager, other)
    for name, value in values(ours, one).items():
        torch.testing.assert_close(value, want[name], rtol=1e-9, atol=1e-12, msg=name)
    return ours, one


def test_a_compiled_backward_hands_each_gradient_on_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward, "BUCKET_BYTES", 1)
    watched = Watched(monkeypatch)
    steps = 0

    def loss(call: Any, model: Layers, x: Tensor) -> Tensor:
        nonlocal steps
        steps += 1
        if steps == 3:  # the second of both: in its first pass a backward looks, and autograd frees
            assert watched.most == 12 and not watched.taken
            watched.reset()
        return call(x).square().mean()

    both_trained(loss)
    assert watched.taken == 36 and watched.most <= 2


@pytest.mark.parametrize(
    ("loss", "alone"),
    [
        (lambda call, model, x: call(x).square().mean() + model.layers[2].weight.square().sum(), 11),
        (lambda call, model, x: call(call(x)).square().mean(), 0),
        (lambda call, model, x: model.layers[1](call(x)).square().mean(), 10),
    ],
    ids=["a penalty outside", "called twice", "a layer outside"],
)
def test_a_gradient_that_is_a_sum_is_autograds(
    loss: Loss, alone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """alone: parameters with a gradient that is none; taken in three passes, after the one that looks."""
    watched = Watched(monkeypatch)
    both_trained(loss)
    assert watched.taken == 3 * alone


def test_a_gradient_that_was_alone_and_is_not_is_an_error() -> None:
    calls = 0

    def loss(call: Any, model: Layers, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        more = model.layers[2].weight.square().sum() if calls > 4 else 0.0
        return call(x).square().mean() + more

    with pytest.raises(OptimizerStepError, match=r"layers.2.weight has a second gradient since step"):
        both_trained(loss)


def test_what_asks_for_gradients_updates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """`autograd.grad` updates nothing, even after steps that did; `backward(inputs=)` updates its inputs
    alone."""
    monkeypatch.setattr(backward, "BUCKET_BYTES", 1)
    watched = Watched(monkeypatch)
    model = Layers().double()
    optimizer = SGD(model.parameters(), lr=0.1)
    fc.fuse_optimizer(model, optimizer, when="backward", backend="eager", strict=True)
    fast = fc.compile(model, backend="eager", strict=True)
    params, x = list(model.parameters()), torch.randn(8, 16, dtype=torch.float64)
    for _ in range(3):
        fast(x).square().mean().backward()
        optimizer.step()
    assert watched.taken == 24
    before = [param.detach().clone() for param in params]
    gradients = torch.autograd.grad(fast(x).square().mean(), params)
    torch.testing.assert_close(gradients, torch.autograd.grad(model(x).square().mean(), params))
    assert all(map(torch.equal, before, params))
    fast(x).square().mean().backward(inputs=params[:1])
    optimizer.step()
    assert [torch.equal(*pair) for pair in zip(before, params, strict=True)] == [False] + [True] * 11
    torch.testing.assert_close(params[0].detach(), before[0] - 0.1 * gradients[0])


def test_a_hook_of_the_users_sees_the_gradient() -> None:
    seen: list[float] = []
    calls = 0

    def loss(call: Any, model: Layers, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls in (5, 6):  # of both the third: the second handed this gradient on
            model.layers[3].weight.register_hook(lambda grad: seen.append(grad.norm().item()) or grad / 2)
        return call(x).square().mean()

    both_trained(loss)
    assert len(seen) == 4


class Shared(nn.Module):
    """A buffer is the memory of a parameter, and is read by the backward after the parameter's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(8, 8, dtype=torch.float64) for _ in range(2))
        self.register_buffer("other", self.second.weight.detach().t(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(nn.functional.gelu(self.first(x) @ self.other))


def test_memory_that_has_another_name_is_not_written_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward, "BUCKET_BYTES", 1)
    ours = Shared()
    optimizer = SGD(ours.parameters(), lr=0.1)
    fc.fuse_optimizer(ours, optimizer, when="backward", backend="eager", strict=True)
    fast = fc.compile(ours, backend="eager", strict=True)
    for _ in range(4):
        eager = Shared()
        eager.load_state_dict(ours.state_dict())
        x = torch.randn(4, 8, dtype=torch.float64)
        eager(x).square().mean().backward()
        want = [param - 0.1 * param.grad for param in eager.parameters() if param.grad is not None]
        fast(x).square().mean().backward()
        optimizer.step()
        torch.testing.assert_close([param.detach() for param in ours.parameters()], want)


def test_nothing_outlives_the_model_and_its_optimizer() -> None:
    model, optimizer = both_trained(lambda call, model, x: call(x).square().mean())
    param = weakref.ref(model.layers[0].weight)
    del model, optimizer
    torch._dynamo.reset()
    gc.collect()
    assert param() is None
