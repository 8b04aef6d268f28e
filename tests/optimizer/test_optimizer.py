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
from torch import nn
from torch.optim import ASGD, LBFGS, SGD, Adafactor, Adam, AdamW, Optimizer
from torch.optim import adam as adam_module
from torch.optim import optimizer as optimizer_module
from torch.optim.lr_scheduler import LambdaLR

import fusion_compiler as fc
from fusion_compiler.errors import FusionWarning, NotAnOptimizerError, OptimizerStepError
from fusion_compiler.optimizer import fused as fused_module
from fusion_compiler.optimizer.launch import MultiTensor
from fusion_compiler.runtime.target import compile_for
from tests.fake_gpu import FakeGpu
from tests.optimizers import (
    OPTIMIZERS,
    Sizes,
    Tied,
    check,
    check_nearly,
    check_same,
    copies,
    data,
    fused_on,
    give,
    gradients,
    loss_of,
    schedule,
    take_steps,
    three,
    two,
    values,
)

STEPS = 20
Make = Callable[[Any], Optimizer]


def decaying(optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_twenty_steps_are_as_close_to_the_truth_as_eager(name: str) -> None:
    pairs = three(Sizes(), OPTIMIZERS[name], Sizes.groups)
    fused = fc.fuse_optimizer(*pairs[0], backend="interpret", strict=True)
    counts: list[int] = []

    def before(step: int, model: nn.Module, optimizer: Optimizer) -> None:
        schedule(step, model, optimizer)
        counts.append(len(fused.kernels))

    take_steps(pairs, STEPS, before)
    check(*pairs)
    # RAdam goes another way from the sixth step on; a group without weight decay another than one with it.
    assert counts[3 * 9] == counts[-1] <= 4 and not fused.unfused


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_traced_step_is_the_classes_own_to_the_bit(name: str) -> None:
    pairs = two(Sizes(), OPTIMIZERS[name], Sizes.groups)
    fused = fc.fuse_optimizer(*pairs[0], backend="eager", strict=True)
    take_steps(pairs, STEPS, schedule)
    if isinstance(pairs[0][1].param_groups[0]["lr"], float):
        check(*pairs)
    assert not fused.unfused and not fused.kernels


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["sgd momentum", "adamw", "adagrad", "lion"])
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    pairs = three(Sizes(dtype), OPTIMIZERS[name])
    fc.fuse_optimizer(*pairs[0], backend="interpret", strict=True)
    take_steps(pairs, 8)
    check(*pairs)


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
    pairs = three(ours, AdamW)
    fused = fc.fuse_optimizer(*pairs[0], backend="interpret", strict=True)
    take_steps(pairs, 3)
    check(*pairs)
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
            assert not fused.unfused
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
    check_nearly((ours, one), (eager, other))


@pytest.mark.parametrize("name", ["sgd momentum", "adam amsgrad", "nadam", "rmsprop centered", "lion"])
@pytest.mark.parametrize("fused_first", [True, False])
def test_a_checkpoint_goes_on_as_the_other(name: str, fused_first: bool) -> None:
    model = Sizes()
    eager, _ = copies(model)
    make = OPTIMIZERS[name]
    unfused, first = make(eager.groups()), make(model.groups())  # type: ignore[operator]
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
        unfused.step()
    check_same(values(resumed, second), values(eager, unfused))


def test_tied_parameters_are_updated_once() -> None:
    pairs = three(Tied(), lambda p: AdamW(p, lr=0.01))
    fc.fuse_optimizer(*pairs[0], backend="interpret", strict=True)
    for _ in range(6):
        batch = data()
        for model, optimizer in pairs:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    model, optimizer = pairs[0]
    assert optimizer.state[model.embed.weight]["step"] == 6
    check(*pairs)


def test_a_first_step_goes_one_way_whatever_fused_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step runs by foreach on a GPU, whose last digits are not those of the for-loop."""
    monkeypatch.setattr(optimizer_module, "_get_foreach_kernels_supported_devices", lambda: ["cpu", "cuda"])
    taken: list[str] = []
    for way in ("_single_tensor_adam", "_multi_tensor_adam"):
        monkeypatch.setattr(adam_module, way, lambda *_, way=way, **__: taken.append(way))  # pyright: ignore[reportUnknownLambdaType]
    for fused in (None, True):
        model = nn.Linear(4, 3)
        optimizer = AdamW(model.parameters(), fused=fused)
        fc.fuse_optimizer(model, optimizer, backend="eager")
        give(model, [torch.randn_like(p) for p in model.parameters()])
        optimizer.step()
        assert optimizer.param_groups[0]["fused"] is fused
    assert taken == ["_multi_tensor_adam"] * 2


@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_first_steps_are_taken_in_parts(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A foreach implementation allocates as much as the parameters that it gets: the numbers are the same."""
    monkeypatch.setattr(fused_module, "PART_BYTES", 128)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 16), nn.Linear(16, 2))
    eager = copy.deepcopy(model)
    optimizers = [kind(m.parameters(), lr=0.1, foreach=True) for m in (model, eager)]
    fc.fuse_optimizer(model, optimizers[0], backend="eager")
    gradients = [torch.randn_like(p) for p in model.parameters()]
    for m in (model, eager):
        give(m, [gradient.clone() for gradient in gradients])
    taken: list[list[int]] = []
    unwrapped = kind.step.__wrapped__

    def step(optimizer: Any) -> None:
        taken.append([p.nbytes for group in optimizer.param_groups for p in group["params"]])
        unwrapped(optimizer)

    with monkeypatch.context() as patch:
        patch.setattr(fused_module, "own_step", lambda optimizer: step)
        optimizers[0].step()
    optimizers[1].step()
    assert taken == [[192], [128], [48, 12, 64], [8]]
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert [len(g["params"]) for g in optimizers[0].param_groups] == [6]


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


def counters_of_other_memory(model: nn.Module, optimizer: Optimizer) -> None:
    """As a loop that moves an optimizer's state to another device and back writes it."""
    for state in optimizer.state.values():
        for value in state.values():
            value.data = value.data.clone()


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


def moved(model: nn.Module, optimizer: Optimizer) -> None:
    """The last parameter of one group to the beginning of the other: all come in the order that they had."""
    first, second = optimizer.param_groups
    second["lr"] = 0.3
    second["params"].insert(0, first["params"].pop())


def parameters_as_gradients(model: nn.Module, optimizer: Optimizer) -> None:
    for param in model.all:  # type: ignore[union-attr]
        param.grad = nn.Parameter(param.grad)


def frozen(model: nn.Module, optimizer: Optimizer) -> None:
    model.all[1].requires_grad_(False)  # type: ignore[index]


CHANGES = (
    replaced_state, counted_further, other_memory, counters_of_other_memory, moved, unaligned, one_memory,
    another_rate, parameters_as_gradients, another_way, another_place, frozen,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_steps_is_seen(change: Callable[[nn.Module, Optimizer], None]) -> None:
    """Facts that are the same at each step are computed once; a change by the user counts at the next
    step."""
    pairs = two(Sizes(), lambda p: AdamW(p, lr=0.02, weight_decay=0.05), Sizes.groups)
    fc.fuse_optimizer(*pairs[0], backend="interpret", strict=True)
    take_steps(pairs, 5, lambda step, *pair: change(*pair) if step == 3 else None, all_of_them=True)
    check_nearly(*pairs)


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
    pairs = two(nn.Linear(4, 3), make)
    fused = fc.fuse_optimizer(*pairs[0], backend="eager")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        take_steps(pairs, 4, all_of_them=True)
    check(*pairs)
    assert {re.search(reason, why) is not None for why in fused.unfused.values()} == {True}
    assert set(fused.unfused) == {"weight", "bias"} and re.search(reason, str(fused))
    assert 1 <= len([w for w in warned if issubclass(w.category, FusionWarning)]) <= 2
    with pytest.raises(OptimizerStepError, match="cannot be fused"):
        eager = pairs[1][0]
        stepped(make(eager.parameters()), eager, backend="eager", strict=True)


def test_a_step_that_looks_at_the_shape_is_traced_for_each() -> None:
    pairs = two(nn.ModuleList([nn.Linear(4, 3), nn.Linear(3, 4)]), lambda p: Shaped(p, lr=0.1))
    fused = fc.fuse_optimizer(*pairs[0], backend="interpret", strict=True)
    take_steps(pairs, 3, all_of_them=True)
    check_nearly(*pairs)
    (kernel,) = fused.kernels
    assert "shaped_1_block" in kernel.source


@pytest.mark.parametrize("shape", [(1,), (1, 1), (3, 1), (0, 2), (2, 3, 4)])
def test_the_own_optimizer_of_a_parameter_of_any_shape(shape: tuple[int, ...]) -> None:
    pairs = two(nn.ParameterList([nn.Parameter(torch.randn(shape))]), OPTIMIZERS["lion"])
    fc.fuse_optimizer(*pairs[0], backend="interpret", strict=True)
    take_steps(pairs, 3, all_of_them=True)
    check_nearly(*pairs)


def test_a_number_that_is_fixed_is_never_out_of_date() -> None:
    pairs = two(nn.Linear(4, 3), lambda p: Fixing(p, lr=0.1))
    fused = fc.fuse_optimizer(*pairs[0], backend="eager")
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        take_steps(pairs, 12, schedule, all_of_them=True)
    check(*pairs)
    assert "different branches" in str(fused)


def test_on_a_cpu_the_own_step_runs_and_says_so_once() -> None:
    model = nn.Linear(4, 3)
    with pytest.warns(FusionWarning, match="it is on cpu") as warned:
        fused = stepped(AdamW(model.parameters()), model)
    assert len(warned) == 1 and set(fused.unfused) == {"weight", "bias"}


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
    """One launch for all parameters, of two groups, by addresses and numbers in tables."""
    gpu = FakeGpu(compiles=True)
    pairs = three(Sizes(), AdamW, Sizes.groups)
    fused_on(gpu, pairs[0][1], monkeypatch)
    take_steps(pairs, 3, all_of_them=True)
    check(*pairs)
    assert [name for name, _, _ in gpu.launched] == ["adamw"] * 2 and len(gpu.loaded) == 1


def test_parameters_of_one_memory_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two parameters, not a tied one: each has its gradient and state, and PyTorch updates one by one."""
    gpu = FakeGpu()
    long, short = torch.randn(700), torch.randn(30)
    memory = [[d.clone() for d in (long, short)] for _ in range(2)]
    ours, eager = (nn.ParameterList(nn.Parameter(d) for d in (m[0], m[1], m[0])) for m in memory)
    assert ours[0].data_ptr() == ours[2].data_ptr() and ours[0] is not ours[2]
    pairs = [(model, AdamW(model, lr=0.1)) for model in (ours, eager)]
    fused_on(gpu, pairs[0][1], monkeypatch)
    take_steps(pairs, 3, all_of_them=True)
    assert [grid[0] for _, grid, _ in gpu.launched] == [2, 1] * 2
    check_nearly(*pairs)


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
