"""Updates that are put off until a parameter is read: nobody sees an old value, and none is lost."""

from __future__ import annotations

import copy
import functools
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

import fusion_compiler as fc
from fusion_compiler.errors import OptimizerStepError
from fusion_compiler.optimizer import forward
from tests.optimizer.test_backward import Counting
from tests.optimizers import OPTIMIZERS, Pair, Tied, check_same, data, loss_of, values
from tests.optimizers import both as fused_and_eager


class Borrowing(nn.Module):
    """Parameters that are used and whose modules are never called, as in attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.table = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = nn.functional.one_hot(tokens, 11).to(self.head.weight.dtype) @ self.table.weight
        x, _ = self.attention(x, x, x, need_weights=False)
        return nn.functional.linear(x, self.table.weight) + self.head(x)


@pytest.fixture(params=[1, 200, 1 << 20])
def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes: an update for each parameter, for a few, for all."""
    monkeypatch.setattr(forward, "BUCKET_BYTES", request.param)


both = functools.partial(fused_and_eager, when="forward")


def one_step(pair: Pair, batch: Any, clip: bool = False) -> None:
    model, optimizer = pair
    loss_of(model, batch).backward()
    if clip:
        clip_grad_norm_(list(model.parameters()), 0.05)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("make", [Tied, Borrowing])
@pytest.mark.parametrize("name", ["adamw", "sgd", "radam", "lion"])
def test_the_same_steps_as_at_once(make: Callable[[], nn.Module], name: str, bucket: None) -> None:
    ours, eager, fused = both(make(), OPTIMIZERS[name])
    schedulers = [LambdaLR(o, lambda epoch: 1 / (1 + epoch)) for _, o in (ours, eager)]
    for step in range(8):
        batch = data()
        for pair, scheduler in zip((ours, eager), schedulers, strict=True):
            one_step(pair, batch, clip=step % 2 == 0)
            scheduler.step()
    fused.finish()
    check_same(values(*ours), values(*eager))


def test_a_parameter_is_updated_when_it_is_read_and_the_rest_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "BUCKET_BYTES", 1)
    layers = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    params = list(layers.parameters())
    (_, one), _, fused = both(layers, lambda p: SGD(p, lr=0.5))
    for _ in range(2):  # the first is the class's own
        layers(torch.randn(2, 3)).sum().backward()
        one.step()
        one.zero_grad()
    old = [param.detach().clone() for param in params]
    assert "4 parameters due" in str(fused)
    layers[0](torch.randn(2, 3))
    changed = [not torch.equal(now, before) for now, before in zip(params, old, strict=True)]
    assert changed == [True, True, False, False] and "2 parameters due" in str(fused)
    layers[1].bias.sum()
    changed = [not torch.equal(now, before) for now, before in zip(params, old, strict=True)]
    assert changed == [True, True, False, True]
    fused.finish()
    assert not torch.equal(params[2], old[2]) and "nothing due" in str(fused)


def due(bytes_: int = 1) -> tuple[Pair, Pair, fc.FusedOptimizer]:
    """Three steps, the last of which is due."""
    ours, eager, fused = both(Tied(), lambda p: AdamW(p, lr=0.05))
    for _ in range(3):
        batch = data()
        for pair in (ours, eager):
            one_step(pair, batch)
    assert fused.timing.pending  # type: ignore[attr-defined]
    return ours, eager, fused


def same_state(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=0)


READERS: dict[str, Callable[[Any, Any], Any]] = {
    "state_dict": lambda m, o: m.state_dict(),
    "state_dict of a part": lambda m, o: m.first.state_dict(),
    "parameters": lambda m, o: {str(i): p.detach().clone() for i, p in enumerate(m.parameters())},
    "named_parameters": lambda m, o: {n: p.detach().clone() for n, p in m.named_parameters()},
    "attribute": lambda m, o: {"embed": m.embed.weight.detach().clone()},
    "get_parameter": lambda m, o: {"first": m.get_parameter("first.weight").detach().clone()},
    "deepcopy": lambda m, o: copy.deepcopy(m).state_dict(),
    "pickle": lambda m, o: pickle.loads(pickle.dumps(m)).state_dict(),
    "optimizer's state_dict": lambda m, o: {
        f"{i}.{name}": value for i, kept in o.state_dict()["state"].items() for name, value in kept.items()
    },
    "eval": lambda m, o: {"logits": m.eval()(torch.arange(10).view(2, 5)).detach()},
    "no_grad": lambda m, o: {"logits": torch.no_grad()(m)(torch.arange(10).view(2, 5))},
    "inference": lambda m, o: {"logits": torch.inference_mode()(m)(torch.arange(10).view(2, 5))},
    "functional_call": lambda m, o: {
        "logits": torch.func.functional_call(m, {"second.bias": torch.zeros(6)}, torch.arange(10).view(2, 5))
    },
    "double": lambda m, o: m.double().state_dict(),
}


@pytest.mark.parametrize("name", READERS)
def test_whoever_reads_sees_the_update(name: str) -> None:
    ours, eager, _ = due()
    same_state(READERS[name](*ours), READERS[name](*eager))


COMPILERS: dict[str, Callable[[Any], Any]] = {
    "compile": lambda m: fc.compile(m, backend="eager", strict=True),
    "torch.compile": lambda m: torch.compile(m, backend="aot_eager"),
    "a function that calls it": lambda m: torch.compile(lambda x: m(x) * 1.0, backend="aot_eager"),
    "compile of a function": lambda m: fc.compile(lambda x: m(x) * 1.0, backend="eager"),
}


@pytest.mark.filterwarnings("ignore::fusion_compiler.errors.FusionWarning")  # the break for what is due
@pytest.mark.parametrize("name", COMPILERS)
@pytest.mark.parametrize("first", [True, False])
def test_compiled_code_reads_what_is_updated(name: str, first: bool) -> None:
    """The model is compiled before or after the optimizer is fused."""
    torch._dynamo.reset()
    model = Tied()
    eager = copy.deepcopy(model)
    one, other = (SGD(m.parameters(), lr=0.2, momentum=0.9) for m in (model, eager))
    fast = COMPILERS[name](model) if first else None
    fused = fc.fuse_optimizer(model, one, when="forward", backend="eager", strict=True)
    fast = COMPILERS[name](model) if fast is None else fast
    for _ in range(6):
        batch = data()
        for called, optimizer in ((fast, one), (eager, other)):
            loss_of(called, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    fused.finish()
    for key, value in values(model, one).items():
        torch.testing.assert_close(value, values(eager, other)[key], rtol=1e-4, atol=1e-5)


def test_kernels_and_compile_of_both() -> None:
    model = Tied()
    eager = copy.deepcopy(model)
    one, other = AdamW(model.parameters(), lr=0.02), AdamW(eager.parameters(), lr=0.02)
    fast = fc.compile(model, optimizer=one, when="forward", backend="interpret")
    for _ in range(4):
        batch = data()
        one_step((fast, one), batch)
        one_step((eager, other), batch)
    fast.plan.optimizer.remove()
    assert type(model.first._parameters) is dict and not {"step", "zero_grad"} & set(one.__dict__)
    assert not any(module._forward_pre_hooks for module in model.modules())
    for key, value in values(model, one).items():
        torch.testing.assert_close(value, values(eager, other)[key], rtol=1e-4, atol=1e-5)


def test_the_numbers_are_those_of_the_step() -> None:
    ours, eager, fused = both(Tied(), lambda p: SGD(p, lr=0.1))
    for step in range(4):
        batch = data()
        for pair in (ours, eager):
            one_step(pair, batch)
            pair[1].param_groups[0]["lr"] = 0.1 * (step + 2)
    fused.finish()
    check_same(values(*ours), values(*eager))


def test_gradients_are_kept_whatever_zero_grad_does() -> None:
    ours, eager, fused = both(Tied(), lambda p: AdamW(p, lr=0.05))
    for step in range(6):
        batch = data()
        for model, optimizer in (ours, eager):
            loss_of(model, batch).backward()
            optimizer.step()
            if step % 3 == 2:
                model.zero_grad()
            else:
                optimizer.zero_grad(set_to_none=step % 3 == 0)
    fused.finish()
    check_same(values(*ours), values(*eager))


def test_a_parameter_that_is_not_used_is_updated_by_the_next_step() -> None:
    """Two steps without a forward between them, as with gradients that are set by hand."""
    ours, eager, fused = both(Tied(), lambda p: AdamW(p, lr=0.05))
    for _ in range(4):
        grad = torch.randn(4)
        for model, optimizer in (ours, eager):
            model.unused.grad = grad.clone()
            optimizer.step()
            optimizer.zero_grad()
    fused.finish()
    check_same(values(*ours), values(*eager))
    assert ours[1].state[ours[0].unused]["step"] == 4


def test_a_scaler_skips_steps_and_loses_none() -> None:
    ours, eager, fused = both(nn.Linear(4, 3), lambda p: AdamW(p, lr=0.05))
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in range(2)]
    for step in range(7):
        x = torch.randn(2, 4) * (math.inf if step in (2, 5) else 1)
        for (model, optimizer), scaler in zip((ours, eager), scalers, strict=True):
            scaler.scale(model(x).square().sum()).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    fused.finish()
    check_same(values(*ours), values(*eager))
    assert ours[1].state[ours[0].weight]["step"] == 5


def test_sums_over_several_passes() -> None:
    ours, eager, fused = both(Tied(), lambda p: AdamW(p, lr=0.05))
    for step in range(9):
        batch = data()
        for model, optimizer in (ours, eager):
            loss_of(model, batch).backward()
            if step % 3 == 2:
                clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
    fused.finish()
    check_same(values(*ours), values(*eager))


def test_a_checkpoint_goes_on_in_either_direction() -> None:
    ours, eager, _ = due()
    saved = copy.deepcopy((ours[0].state_dict(), ours[1].state_dict()))
    check_same(values(*ours), values(*eager))
    ours, other, fused = both(Tied(), lambda p: AdamW(p, lr=0.05))
    one_step(ours, data())
    one_step(ours, data())  # what is due is not carried out on what is loaded
    for model, optimizer in (ours, other):
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
    for _ in range(3):
        batch = data()
        for pair in (ours, eager, other):
            one_step(pair, batch)
    fused.finish()
    check_same(values(*ours), values(*eager))
    check_same(values(*other), values(*eager))


WRITERS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "a parameter that is held": lambda held, grads, state: held.mul_(0.5),
    "its gradient": lambda held, grads, state: grads.zero_(),
    "its state": lambda held, grads, state: state["exp_avg"].zero_(),
}


@pytest.mark.parametrize("name", WRITERS)
def test_who_writes_what_is_due_is_told(name: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = AdamW(model.parameters(), lr=0.05)
    held = model[0].weight
    fc.fuse_optimizer(model, optimizer, when="forward", backend="eager", strict=True)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(2, 3)).sum().backward()
        optimizer.step()
    with torch.no_grad():
        WRITERS[name](held, held.grad, optimizer.state[held])
    with pytest.raises(OptimizerStepError, match=r"state of 0\.weight was written.*\n.*call finish"):
        model(torch.randn(2, 3))
    model(torch.randn(2, 3))
    assert optimizer.state[held]["step"] == 1


@pytest.mark.filterwarnings("ignore::fusion_compiler.errors.FusionWarning")
def test_what_no_kernel_updates_is_not_put_off() -> None:
    ours, eager, fused = both(Tied(), lambda p: Counting(p, lr=0.1))
    for _ in range(4):
        batch = data()
        for pair in (ours, eager):
            one_step(pair, batch)
        assert not fused.timing.pending  # type: ignore[attr-defined]
    check_same(values(*ours), values(*eager))
    assert len(fused.unfused) == 4


def test_parameters_of_no_module_are_not_put_off() -> None:
    model, loose = nn.Linear(3, 2), nn.Parameter(torch.randn(3))
    optimizer = SGD([*model.parameters(), loose], lr=0.5)
    fc.fuse_optimizer(model, optimizer, when="forward", backend="eager", strict=True)
    for _ in range(3):
        before = loose.detach().clone()
        model(torch.randn(4, 3) * loose).sum().backward()
        assert loose.grad is not None
        expected = before - 0.5 * loose.grad
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(loose.detach(), expected)


def test_a_graph_break_is_an_error_where_the_whole_is_asked_for() -> None:
    torch._dynamo.reset()
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.5)
    fused = fc.fuse_optimizer(model, optimizer, when="forward", backend="eager")
    fast = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        fast(torch.randn(2, 3)).sum().backward()
        optimizer.step()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        fast(torch.randn(2, 3))
    fused.finish()
    x = torch.randn(2, 3)
    torch.testing.assert_close(fast(x), model(x))
