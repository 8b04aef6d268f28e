"""Fused optimizers beside torch.optim's own and the same in float64; what is refused, and how."""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import ASGD, LBFGS, SGD, Adafactor, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import fusion_compiler as fc
from fusion_compiler.errors import FusionWarning, NotAnOptimizerError, OptimizerStepError
from fusion_compiler.optimizer.kernels import Kernels
from fusion_compiler.optimizer.launch import MultiTensor
from fusion_compiler.runtime.target import compile_for
from tests.fake_gpu import FakeGpu
from tests.optimizers import (
    OPTIMIZERS,
    Sizes,
    check_close,
    check_same,
    copies,
    give,
    gradients,
    values,
)

STEPS = 20
Make = Callable[[Any], Optimizer]


def decaying(optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_twenty_steps_are_as_close_to_the_truth_as_eager(name: str) -> None:
    make = OPTIMIZERS[name]
    ours = Sizes()
    models = (ours, *copies(ours))
    optimizers = [make(model.groups()) for model in models]  # type: ignore[operator]
    fused = fc.fuse_optimizer(ours, optimizers[0], backend="interpret", strict=True)
    schedulers = [decaying(optimizer) for optimizer in optimizers]
    made: list[int] = []
    for step in range(STEPS):
        grads = gradients(ours, step)
        for model, optimizer, scheduler in zip(models, optimizers, schedulers, strict=True):
            give(model, grads)
            optimizer.step()
            scheduler.step()
        made.append(len(fused.kernels))
    check_close(*(values(model, o) for model, o in zip(models, optimizers, strict=True)))
    # RAdam goes another way from the sixth step on; a group without weight decay another than one with it.
    assert made[8] == made[-1] <= 4 and not fused.own


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_traced_step_is_the_classes_own_to_the_bit(name: str) -> None:
    ours = Sizes()
    eager, _ = copies(ours)
    one, other = (OPTIMIZERS[name](model.groups()) for model in (ours, eager))  # type: ignore[operator]
    fused = fc.fuse_optimizer(ours, one, backend="eager", strict=True)
    for step in range(STEPS):
        grads = gradients(ours, step)
        for model, optimizer in ((ours, one), (eager, other)):
            give(model, grads)
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * 0.9
            optimizer.step()
    if isinstance(one.param_groups[0]["lr"], float):
        check_same(values(ours, one), values(eager, other))
    assert not fused.own and not fused.kernels


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["sgd momentum", "adamw", "adagrad", "lion"])
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    ours = Sizes(dtype)
    models = (ours, *copies(ours))
    optimizers = [OPTIMIZERS[name](model.parameters()) for model in models]
    fc.fuse_optimizer(ours, optimizers[0], backend="interpret", strict=True)
    for step in range(8):
        grads = gradients(ours, step)
        for model, optimizer in zip(models, optimizers, strict=True):
            give(model, grads)
            optimizer.step()
    check_close(*(values(model, o) for model, o in zip(models, optimizers, strict=True)))


def test_parameters_in_bfloat16_with_states_in_float32() -> None:
    """Each combination of dtypes has a kernel; states keep their dtype and what float32 keeps of them."""
    ours = nn.ParameterList([nn.Parameter(torch.randn(3000).bfloat16()), nn.Parameter(torch.randn(70))])
    truth = copy.deepcopy(ours).double()
    one, other = AdamW(ours, lr=1e-2), AdamW(truth, lr=1e-2)
    fused = fc.fuse_optimizer(ours, one, backend="interpret", strict=True)
    for param, wide in zip(ours, truth, strict=True):
        for optimizer, p in ((one, param), (other, wide)):
            dtype = torch.promote_types(p.dtype, torch.float32)
            states = {name: torch.zeros_like(p, dtype=dtype) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[p] = {"step": torch.tensor(0.0), **states}
    before = [param.detach().clone() for param in ours]
    for _ in range(3):
        grads = [torch.randn_like(p) for p in ours]
        for model in (ours, truth):
            give(model, grads)
        one.step()
        other.step()
    assert len(fused.kernels) == 2
    for param, wide, old in zip(ours, truth, before, strict=True):
        moved = (wide - old.double()).abs().max()
        error = (param.double() - wide).abs()
        # One rounding of the parameter a step.
        assert (error <= 3 * torch.finfo(param.dtype).eps * wide.abs().clamp(min=1e-2) + 1e-6 * moved).all()
        for name in ("exp_avg", "exp_avg_sq"):
            state = one.state[param][name]
            assert state.dtype == torch.float32
            torch.testing.assert_close(state.double(), other.state[wide][name], rtol=1e-5, atol=2e-7)


def test_addresses_that_are_not_aligned_have_a_kernel_of_their_own() -> None:
    flat = torch.randn(5000)
    ours = nn.ParameterList([nn.Parameter(flat[1:2050]), nn.Parameter(torch.randn(2050))])
    models = (ours, *copies(ours))
    optimizers = [AdamW(model.parameters()) for model in models]
    fused = fc.fuse_optimizer(ours, optimizers[0], backend="interpret", strict=True)
    for step in range(3):
        grads = gradients(ours, step)
        for model, optimizer in zip(models, optimizers, strict=True):
            give(model, grads)
            optimizer.step()
    check_close(*(values(model, o) for model, o in zip(models, optimizers, strict=True)))
    aligned = ["multiple_of" in kernel.source for kernel in fused.kernels]
    assert sorted(aligned) == [False, True]


def test_elements_in_another_order() -> None:
    """Channels-last parameters are updated as they lie; with a gradient in another order by the own step."""
    ours = nn.ParameterList([nn.Parameter(torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last))])
    eager, _ = copies(ours)
    one, other = AdamW(ours), AdamW(eager)
    fused = fc.fuse_optimizer(ours, one, backend="eager")
    for step in range(4):
        grad = torch.randn_like(ours[0]) if step < 3 else torch.randn(4, 3, 5, 5)
        ours[0].grad, eager[0].grad = grad.clone(), grad.clone()  # type: ignore[union-attr]
        if step < 3:
            one.step()
            assert not fused.own
        else:
            with pytest.warns(FusionWarning, match="its grad has the strides"):
                one.step()
        other.step()
    check_same(values(ours, one), values(eager, other))


def test_strides_of_axes_of_one_element_say_nothing() -> None:
    """A channels-last 1 x 1 convolution's gradient may have others than its weight."""
    ours = nn.ParameterList([nn.Parameter(torch.randn(4, 3, 1, 1).to(memory_format=torch.channels_last))])
    eager, _ = copies(ours)
    one, other = SGD(ours, lr=0.1, momentum=0.9), SGD(eager, lr=0.1, momentum=0.9)
    fc.fuse_optimizer(ours, one, backend="interpret", strict=True)
    for _ in range(3):
        grad = torch.randn(4, 3)
        for model, optimizer in ((ours, one), (eager, other)):
            model[0].grad = grad.clone().as_strided((4, 3, 1, 1), (3, 1, 1, 1))
            assert model[0].grad.stride() != model[0].stride()
            optimizer.step()
    for name, value in values(ours, one).items():
        torch.testing.assert_close(value, values(eager, other)[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["sgd momentum", "adam amsgrad", "nadam", "rmsprop centered", "lion"])
@pytest.mark.parametrize("fused_first", [True, False])
def test_a_checkpoint_goes_on_as_the_other(name: str, fused_first: bool) -> None:
    model = Sizes()
    eager, _ = copies(model)
    make = OPTIMIZERS[name]
    whole, first = make(eager.groups()), make(model.groups())  # type: ignore[operator]
    steps = [gradients(model, step) for step in range(10)]
    if fused_first:
        fc.fuse_optimizer(model, first, backend="eager", strict=True)
    for grads in steps[:5]:
        give(model, grads)
        first.step()
    saved = copy.deepcopy((model.state_dict(), first.state_dict()))
    resumed = Sizes()
    second = make(resumed.groups())
    if not fused_first:
        fc.fuse_optimizer(resumed, second, backend="eager", strict=True)
    resumed.load_state_dict(saved[0])
    second.load_state_dict(saved[1])
    for grads in steps[5:]:
        give(resumed, grads)
        second.step()
    for grads in steps:
        give(eager, grads)
        whole.step()
    check_same(values(resumed, second), values(eager, whole))


def test_tied_parameters_are_updated_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embed(tokens))

    ours = Tied()
    models = (ours, *copies(ours))
    optimizers = [AdamW(model.parameters(), lr=0.01) for model in models]
    fc.fuse_optimizer(ours, optimizers[0], backend="interpret", strict=True)
    for _ in range(6):
        tokens, targets = torch.randint(11, (4, 5)), torch.randint(11, (20,))
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets).backward()
            optimizer.step()
    weight = optimizers[0].state[ours.embed.weight]
    assert weight["step"] == 6
    check_close(*(values(model, o) for model, o in zip(models, optimizers, strict=True)))


@pytest.mark.parametrize("first", [True, False])
def test_schedulers_and_hooks_find_what_they_look_for(first: bool) -> None:
    model = nn.Linear(4, 3)
    optimizer = SGD(model.parameters(), lr=0.1)
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    early = decaying(optimizer) if first else None
    fused = fc.fuse_optimizer(model, optimizer, backend="eager")
    scheduler = early or decaying(optimizer)
    for _ in range(3):
        give(model, [torch.randn_like(p) for p in model.parameters()])
        optimizer.step()
        scheduler.step()  # a warning, which is an error, where the step was not seen
    assert called == ["before", "after"] * 3
    assert optimizer.param_groups[0]["lr"] == 0.1 / 4
    fused.remove()
    optimizer.step()
    assert called == ["before", "after"] * 4
    assert not hasattr(optimizer.step, "fused_by")


def test_a_grad_scaler_skips_steps_with_infinities() -> None:
    model = nn.Linear(4, 3)
    eager, _ = copies(model)
    pairs = [(model, AdamW(model.parameters())), (eager, AdamW(eager.parameters()))]
    fc.fuse_optimizer(model, pairs[0][1], backend="eager", strict=True)
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in pairs]
    for step in range(5):
        x = torch.randn(2, 4) * (math.inf if step == 2 else 1)
        for (each, optimizer), scaler in zip(pairs, scalers, strict=True):
            optimizer.zero_grad()
            scaler.scale(each(x).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    check_same(values(*pairs[0]), values(*pairs[1]))
    assert pairs[0][1].state[model.weight]["step"] == 4


def replaced_state(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.state[model.all[0]] = {n: v.clone() for n, v in optimizer.state[model.all[0]].items()}  # type: ignore[index]


def counted_further(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.state[model.all[2]]["step"] += 5  # type: ignore[index]


def other_memory(model: nn.Module, optimizer: Optimizer) -> None:
    model.all[3].data = model.all[3].detach().clone()  # type: ignore[index]


def unaligned(model: nn.Module, optimizer: Optimizer) -> None:
    memory = torch.empty(37 * 71 + 1, dtype=model.all[3].dtype)[1:].view(37, 71)  # type: ignore[index]
    model.all[3].data = memory.copy_(model.all[3].detach())  # type: ignore[index]


def one_memory(model: nn.Module, optimizer: Optimizer) -> None:
    model.all[6].data = model.all[2].data[:1024].view(1, 1024).expand(2, 1024).contiguous()  # type: ignore[index]
    model.all[2].data = model.all[6].data[0]  # type: ignore[index]


def another_rate(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.param_groups[1]["lr"] = 0.3


def another_way(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["amsgrad"] = False
    optimizer.param_groups[0]["maximize"] = True


def another_place(model: nn.Module, optimizer: Optimizer) -> None:
    first, second = optimizer.param_groups
    first["params"], second["params"] = second["params"], first["params"]
    second["lr"] = 0.3


def frozen(model: nn.Module, optimizer: Optimizer) -> None:
    model.all[1].requires_grad_(False)  # type: ignore[index]


CHANGES = (
    replaced_state, counted_further, other_memory, unaligned, one_memory, another_rate,
    another_way, another_place, frozen,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_steps_is_seen(change: Callable[[nn.Module, Optimizer], None]) -> None:
    """What is the same at each step is found out once; whatever of it a user changes counts at the next."""
    ours = Sizes()
    eager, _ = copies(ours)
    pairs = [(model, AdamW(model.groups(), lr=0.02, weight_decay=0.05)) for model in (ours, eager)]  # type: ignore[operator]
    fc.fuse_optimizer(ours, pairs[0][1], backend="interpret", strict=True)
    for step in range(5):
        grads = gradients(ours, 1)
        for model, optimizer in pairs:
            give(model, grads)
            if step == 3:
                change(model, optimizer)
            optimizer.step()
    for name, value in values(*pairs[0]).items():
        torch.testing.assert_close(value, values(*pairs[1])[name], rtol=1e-5, atol=1e-6)


# -- what is refused -------------------------------------------------------------------------------


def stepped(optimizer: Optimizer, model: nn.Module, **options: Any) -> fc.FusedOptimizer:
    """Two steps with fused optimizer: the second is one that a kernel may take."""
    fused = fc.fuse_optimizer(model, optimizer, **options)
    for _ in range(2):
        give(model, [torch.randn_like(p) for p in model.parameters()])
        optimizer.step()
    return fused


def test_what_needs_something_else_is_an_error_that_says_what() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(NotAnOptimizerError, match="not list"):
        fc.fuse_optimizer(model, list(model.parameters()))
    with pytest.raises(OptimizerStepError, match="LBFGS cannot be fused: it needs a closure"):
        fc.fuse_optimizer(model, LBFGS(model.parameters()))
    optimizer = Adam(model.parameters())
    fc.fuse_optimizer(model, optimizer, backend="eager")
    with pytest.raises(OptimizerStepError, match="fused already"):
        fc.fuse_optimizer(model, optimizer)
    with pytest.raises(OptimizerStepError, match="closure is given"):
        optimizer.step(lambda: 0.0)


def test_sparse_and_complex_gradients_are_errors_before_anything_is_written() -> None:
    model = nn.ModuleList([nn.Linear(3, 2), nn.Embedding(5, 3, sparse=True)])
    optimizer = SGD(model.parameters(), lr=0.1)
    fc.fuse_optimizer(model, optimizer, backend="eager")
    model[0](model[1](torch.tensor([1, 2]))).sum().backward()
    before = values(model, optimizer)
    before = {name: value.clone() for name, value in before.items()}
    with pytest.raises(OptimizerStepError, match=r"gradient of 1\.weight is sparse"):
        optimizer.step()
    check_same(values(model, optimizer), before)
    phases = nn.ParameterList([nn.Parameter(torch.randn(3, dtype=torch.complex64))])
    with pytest.raises(OptimizerStepError, match="0 is complex"):
        stepped(SGD(phases.parameters(), lr=0.1), phases, backend="eager")


class Normed(SGD):
    """A step that looks at the whole of a gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.add_(param.grad / param.grad.norm(), alpha=-group["lr"])


class Counting(SGD):
    """A step that counts in the optimizer itself."""

    steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            for param in group["params"]:
                param.add_(param.grad, alpha=-group["lr"] / self.steps)


class Shaped(SGD):
    """A step that differs for vectors."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                rate = group["lr"] * (0.5 if param.dim() == 1 else 1)
                param.add_(param.grad, alpha=-rate)


class Fixing(SGD):
    """A step whose number is made outside of what is traced."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.add_(param.grad, alpha=-math.sqrt(group["lr"]))


REFUSED: dict[str, tuple[Make, str]] = {
    "reduction": (lambda p: Normed(p, lr=0.1), "no element-wise operator"),
    "counter": (lambda p: Counting(p, lr=0.1), "changes its attribute steps"),
    "factored state": (Adafactor, "its state|cannot be traced"),
    "averages": (ASGD, "cannot be traced"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_kernel_does_takes_the_own_step_with_the_reason(name: str) -> None:
    make, reason = REFUSED[name]
    model = nn.Linear(4, 3)
    eager, _ = copies(model)
    one, other = make(model.parameters()), make(eager.parameters())
    fused = fc.fuse_optimizer(model, one, backend="eager")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(4):
            grads = gradients(model, 1)
            for each, optimizer in ((model, one), (eager, other)):
                give(each, grads)
                optimizer.step()
    check_same(values(model, one), values(eager, other))
    assert {re.search(reason, why) is not None for why in fused.own.values()} == {True}
    assert set(fused.own) == {"weight", "bias"} and re.search(reason, str(fused))
    assert 1 <= len([w for w in told if issubclass(w.category, FusionWarning)]) <= 2
    with pytest.raises(OptimizerStepError, match="cannot be fused"):
        stepped(make(eager.parameters()), eager, backend="eager", strict=True)


def test_a_step_that_looks_at_the_shape_is_traced_for_each() -> None:
    model = nn.ModuleList([nn.Linear(4, 3), nn.Linear(3, 4)])
    eager, _ = copies(model)
    one, other = Shaped(model.parameters(), lr=0.1), Shaped(eager.parameters(), lr=0.1)
    fused = fc.fuse_optimizer(model, one, backend="interpret", strict=True)
    for _ in range(3):
        grads = gradients(model, 1)
        for each, optimizer in ((model, one), (eager, other)):
            give(each, grads)
            optimizer.step()
    for name, value in values(model, one).items():
        torch.testing.assert_close(value, values(eager, other)[name], rtol=1e-6, atol=1e-7)
    assert len(fused.kernels) == 2


@pytest.mark.parametrize("shape", [(1,), (1, 1), (3, 1), (0, 2), (2, 3, 4)])
def test_the_own_optimizer_of_a_parameter_of_any_shape(shape: tuple[int, ...]) -> None:
    model = nn.ParameterList([nn.Parameter(torch.randn(shape))])
    eager, _ = copies(model)
    one, other = OPTIMIZERS["lion"](model), OPTIMIZERS["lion"](eager)
    fc.fuse_optimizer(model, one, backend="interpret", strict=True)
    for _ in range(3):
        grads = [torch.randn(shape)]
        for each, optimizer in ((model, one), (eager, other)):
            give(each, grads)
            optimizer.step()
    for name, value in values(model, one).items():
        torch.testing.assert_close(value, values(eager, other)[name], rtol=1e-6, atol=1e-7)


def test_a_number_that_is_fixed_is_never_out_of_date() -> None:
    model = nn.Linear(4, 3)
    eager, _ = copies(model)
    one, other = Fixing(model.parameters(), lr=0.1), Fixing(eager.parameters(), lr=0.1)
    fused = fc.fuse_optimizer(model, one, backend="eager")
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        for step in range(12):
            grads = gradients(model, 1)
            for each, optimizer in ((model, one), (eager, other)):
                give(each, grads)
                optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
                optimizer.step()
    check_same(values(model, one), values(eager, other))
    assert "different ways" in str(fused)


def test_on_a_cpu_the_own_step_runs_and_says_so_once() -> None:
    model = nn.Linear(4, 3)
    with pytest.warns(FusionWarning, match="it is on cpu") as told:
        fused = stepped(AdamW(model.parameters()), model)
    assert len(told) == 1 and set(fused.own) == {"weight", "bias"}


def test_an_error_leaves_parameters_and_states_of_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 3)
    eager, _ = copies(model)
    one, other = AdamW(model.parameters()), AdamW(eager.parameters())
    fc.fuse_optimizer(model, one, backend="eager", strict=True)
    steps = [gradients(model, 1) for _ in range(4)]
    for step, grads in enumerate(steps):
        for each in (model, eager):
            give(each, grads)
        if step == 2:
            before = {name: value.clone() for name, value in values(model, one).items()}
            with monkeypatch.context() as patch:
                patch.setattr(MultiTensor, "run", lambda *_: 1 / 0)  # pyright: ignore[reportUnknownLambdaType]
                with pytest.raises(ZeroDivisionError):
                    one.step()
            check_same(values(model, one), before)
        one.step()
        other.step()
    check_same(values(model, one), values(eager, other))


def test_it_prints_its_kernels_and_what_decides_between_them() -> None:
    model = nn.ParameterList([nn.Parameter(torch.randn(3))])
    optimizer = OPTIMIZERS["radam"](model)
    fused = fc.fuse_optimizer(model, optimizer, backend="interpret")
    for _ in range(7):
        give(model, [torch.randn(3)])
        optimizer.step()
    first, second = str(fused).splitlines()[1:]
    assert str(fused).startswith("RAdam: 2 kernels for 1 parameter\n")
    assert "exp_avg float32" in first and "<= 5.0" in first and "> 5.0" in second and "step" in second
    assert "number_5 = lr" in fused.kernels[1].source


# -- the kernel ------------------------------------------------------------------------------------


def test_launches_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch for all parameters of a group, by addresses in tables."""
    gpu = FakeGpu(compiles=True)
    monkeypatch.setattr(Kernels, "backend_for", lambda *_: "triton")  # pyright: ignore[reportUnknownLambdaType]
    ours = Sizes()
    models = (ours, *copies(ours))
    optimizers = [AdamW(model.groups()) for model in models]  # type: ignore[operator]
    fused = fc.FusedOptimizer(optimizers[0], {}, strict=True, gpus=lambda _: gpu)
    fused.install()
    for _ in range(3):
        grads = gradients(ours, 1)
        for model, optimizer in zip(models, optimizers, strict=True):
            give(model, grads)
            optimizer.step()
    check_close(*(values(model, o) for model, o in zip(models, optimizers, strict=True)))
    assert [name for name, _, _ in gpu.launched] == ["adamw"] * 4 and len(gpu.loaded) == 1


def test_parameters_of_one_memory_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two parameters, not a tied one: each has its gradient and state, and PyTorch updates one by one."""
    gpu = FakeGpu()
    monkeypatch.setattr(Kernels, "backend_for", lambda *_: "triton")  # pyright: ignore[reportUnknownLambdaType]
    data, other = torch.randn(700), torch.randn(30)
    memory = [[d.clone() for d in (data, other)] for _ in range(2)]
    ours, eager = (nn.ParameterList(nn.Parameter(d) for d in (m[0], m[1], m[0])) for m in memory)
    assert ours[0].data_ptr() == ours[2].data_ptr() and ours[0] is not ours[2]
    one, two = AdamW(ours, lr=0.1), AdamW(eager, lr=0.1)
    fc.FusedOptimizer(one, {}, strict=True, gpus=lambda _: gpu).install()
    for _ in range(3):
        grads = gradients(ours, 1)
        for model, optimizer in ((ours, one), (eager, two)):
            give(model, grads)
            optimizer.step()
    assert [grid[0] for _, grid, _ in gpu.launched] == [2, 1] * 2
    for name, value in values(ours, one).items():
        torch.testing.assert_close(value, values(eager, two)[name], rtol=1e-5, atol=1e-6)


KERNELS: dict[str, tuple[torch.dtype, torch.dtype]] = {
    "adamw": (torch.bfloat16, torch.float32),
    "sgd momentum": (torch.bfloat16, torch.bfloat16),
    "radam": (torch.float32, torch.float32),
    "adadelta": (torch.bfloat16, torch.bfloat16),
}


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_without_spills_and_move_whole_words(name: str, target: str) -> None:
    of_params, of_states = KERNELS[name]
    model = nn.ParameterList([nn.Parameter(torch.randn(8, dtype=of_params))])
    optimizer = OPTIMIZERS[name](model.parameters())
    fused = fc.fuse_optimizer(model, optimizer, backend="interpret", strict=True)
    for _ in range(2):
        give(model, [torch.randn(8)])
        optimizer.step()
        state = optimizer.state[model[0]]
        state |= {n: v.to(of_states) if v.dim() else v for n, v in state.items()}
    kernel = fused.kernels[-1]
    binary = compile_for(kernel, target)
    assert binary.spills == 0 and binary.registers <= 128
    if target.startswith("sm"):
        loads = re.findall(r"ld\.global\.(\S+) +\t?", binary.asm["ptx"])
        states = sum(v.dim() for v in optimizer.state[model[0]].values())
        assert loads.count("v4.b32") >= 2 + states
