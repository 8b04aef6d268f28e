"""Errors, faults and bad input give an error or a warning and eager's result; they never cost a parameter or
a state."""

from __future__ import annotations

import copy
import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusion_compiler as fc
from fusion_compiler.codegen import emit
from fusion_compiler.compiler import compiler, planning, runners
from fusion_compiler.compiler.runners import Runners
from fusion_compiler.errors import (
    FusionWarning,
    InternalError,
    InvalidOptionError,
    KernelError,
    NotCallableError,
    OptimizerStepError,
    PatternConflictError,
    UnknownOptionError,
    UnsupportedDtypeError,
)
from fusion_compiler.ir.dag import OpDag
from fusion_compiler.ir.graph_pass import Pass
from fusion_compiler.ir.plan_data import Cluster
from fusion_compiler.stitch.stitch import subgraph


class Model(nn.Module):
    """No bias before the norm: its gradient would be zero but for rounding, which AdamW blows up."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.dropout(torch.tanh(self.norm(self.linear(x))), 0.5, self.training).square().mean()


def break_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel names something that does not exist."""
    emit = Runners.emit

    def broken(self: Any, *arguments: Any) -> Any:
        def spoilt(kernel: Any) -> Any:
            return dataclasses.replace(kernel, source=kernel.source.replace("tl.store(", "tl.misprint("))

        programs = emit(self, *arguments)
        return tuple(dataclasses.replace(p, kernels=tuple(map(spoilt, p.kernels))) for p in programs)

    monkeypatch.setattr(Runners, "emit", broken)


def count_fallbacks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fills with the names of the clusters whose fx graphs are made from now on."""
    names: list[str] = []

    def counted(cluster: Cluster, dag: OpDag) -> Any:
        names.append(cluster.name)
        return subgraph(cluster, dag)

    monkeypatch.setattr(runners, "subgraph", counted)
    return names


def train(model: Any, steps: int = 3) -> tuple[list[float], dict[str, Tensor], Tensor]:
    """Losses, parameters and buffers after some steps, and the random state."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(7)
    x = torch.randn(16, 8)
    losses: list[float] = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, copy.deepcopy(model.state_dict()), torch.get_rng_state()


def test_training_goes_on_where_no_kernel_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    fallbacks = count_fallbacks(monkeypatch)
    good = train(fc.compile(copy.deepcopy(model), backend="interpret", strict=True))
    assert not fallbacks, "nothing ran eager"
    torch._dynamo.reset()
    break_kernels(monkeypatch)
    with pytest.warns(FusionWarning, match=r"(?s)runs eager: kernel .* failed to run.*misprint.*what to do"):
        bad = train(fc.compile(copy.deepcopy(model), backend="interpret"))
    assert len(fallbacks) == len(set(fallbacks)) > 1, "each is made once"
    torch.testing.assert_close(bad[0], good[0], rtol=1e-5, atol=1e-6)
    for name, value in good[1].items():
        torch.testing.assert_close(bad[1][name], value, rtol=1e-3, atol=1e-4, msg=name)
    assert torch.equal(good[2], bad[2]), "the same numbers were drawn"


def test_a_kernel_that_cannot_be_printed_runs_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(loops: Any, name: str, device: Any) -> Any:
        raise LookupError(f"no schedule runs {name}")

    monkeypatch.setattr(emit, "schedules_of", fails)
    x = torch.randn(5, 8)
    said = r"(?s)tanh_2 failed to be printed: LookupError: .*test_bad_input.py:\d+.*what to do.*eager"
    with pytest.warns(FusionWarning, match=said) as caught:
        fast = fc.compile(lambda x: torch.tanh(x) @ torch.tanh(x).T, backend="interpret")
        torch.testing.assert_close(fast(x), torch.tanh(x) @ torch.tanh(x).T)
    assert len(caught) == 1
    torch._dynamo.reset()
    with pytest.raises(KernelError, match="no schedule runs tanh"):
        fc.compile(torch.tanh, backend="interpret", strict=True)(x)


def test_an_error_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    break_kernels(monkeypatch)
    model = Model().eval()
    before = copy.deepcopy(model.state_dict())
    fast = fc.compile(model, backend="interpret", strict=True)
    x, random = torch.randn(4, 8), torch.get_rng_state()
    with pytest.raises(KernelError, match="what to do"):
        fast(x)
    assert torch.equal(torch.get_rng_state(), random)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(model(x), model(x)), "the model itself still runs"


def complex_numbers(x: Tensor) -> Tensor:
    return (torch.tanh(x) * 2).abs() + 1


def test_complex_numbers_stay_eager_with_one_warning() -> None:
    x = torch.randn(5, dtype=torch.complex64)
    with pytest.warns(
        FusionWarning, match=r"(?s)no kernel supports torch.complex64.*test_bad_input"
    ) as caught:
        fast = fc.compile(complex_numbers, backend="interpret")
        torch.testing.assert_close(fast(x), complex_numbers(x))
    assert sum("complex" in str(w.message) for w in caught) == 1
    torch._dynamo.reset()
    with pytest.raises(UnsupportedDtypeError, match="complex64"):
        fc.compile(complex_numbers, backend="interpret", strict=True)(x)


@pytest.mark.parametrize("stage", ["plan_clusters", "stitch", "replace_patterns", "decomposition_table"])
def test_a_fault_of_the_compiler_costs_speed_only(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage, a rewrite or AOTAutograd's table fails: one warning for each graph, an error if strict."""

    def fails(*_: Any, **__: Any) -> Any:
        raise KeyError("copy_")

    broken = Pass("patterns", fails, does="It fails.", when="always")
    module = planning if stage == "plan_clusters" else compiler
    monkeypatch.setattr(module, stage, (lambda *_: broken) if stage == "replace_patterns" else fails)
    model, twin = Model().eval(), Model().eval()
    twin.load_state_dict(model.state_dict())
    x = torch.randn(16, 8)
    with pytest.warns(FusionWarning, match=r"could not be compiled: KeyError: 'copy_'  \(test_bad") as caught:
        fast = fc.compile(model, backend="interpret")
        for _ in range(2):
            fast(x).backward()
            twin(x).backward()
    parts = ["graph0.forward", "graph0.backward"] if stage in ("plan_clusters", "stitch") else ["graph0"]
    assert [str(w.message).split()[0] for w in caught] == parts
    assert str(fast.plan) == "\n\n".join(f"graph {part} runs eager: KeyError: 'copy_'" for part in parts)
    torch.testing.assert_close(model.linear.weight.grad, twin.linear.weight.grad)
    torch._dynamo.reset()
    with pytest.raises(InternalError, match=rf"{parts[0]} could not be compiled") as raised:
        fc.compile(model, backend="interpret", strict=True)(x)
    assert isinstance(raised.value.__cause__, KeyError)


def test_not_a_model_and_not_an_option() -> None:
    for thing in (torch.ones(3), int, {"state": 1}):
        with pytest.raises(NotCallableError):
            fc.compile(thing)  # type: ignore[arg-type]
    with pytest.raises(UnknownOptionError, match="did you mean 'numerics'"):
        fc.compile(torch.sin, numeric="eager")


def test_an_exported_program_is_an_error_that_names_its_module() -> None:
    x = torch.randn(2, 8)
    program = torch.export.export(Model().eval(), (x,))
    for compiled in (fc.compile, lambda model: fc.explain(model, x)):
        with pytest.raises(NotCallableError, match=r"compile\(program\.module\(\)\)"):
            compiled(program)
    fast = fc.compile(program.module(), backend="eager")
    torch.testing.assert_close(fast(x), program.module()(x))


def test_options_of_torch_compile_are_keyword_arguments_here() -> None:
    with pytest.raises(InvalidOptionError, match=r"compile\(model, \*\*options\)"):
        fc.compile(torch.sin, options={"numerics": "eager"})  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("device", ["cuda:99", "cpu", torch.device("meta")])
def test_a_device_that_cannot_be_planned_for_is_an_error(device: Any) -> None:
    for planned in (fc.compile, lambda model, device: fc.explain(model, torch.ones(3), device=device)):
        with pytest.raises(InvalidOptionError, match=r"give device the name of the GPU to plan for"):
            planned(torch.sin, device=device)


def test_cuda_is_an_error_where_there_is_none() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    with pytest.raises(InvalidOptionError, match="this machine has no device cuda"):
        fc.compile(torch.sin, device="cuda")


def test_another_models_optimizer_is_an_error() -> None:
    model, other = nn.Linear(8, 8), nn.Linear(8, 8)
    optimizer = torch.optim.SGD(other.parameters())
    for fused in (fc.fuse_optimizer, lambda model, optimizer: fc.compile(model, optimizer=optimizer)):
        with pytest.raises(OptimizerStepError, match="none of its parameters belongs to this Linear"):
            fused(model, optimizer)
    both = torch.optim.SGD([*model.parameters(), *other.parameters()])
    assert fc.fuse_optimizer(model, both).optimizer is both


def root(x: Tensor) -> Tensor:
    return torch.sqrt(x * x)


def test_a_pattern_that_an_earlier_one_hides_is_an_error() -> None:
    rows = torch.ones(6, 10)
    first = fc.rewrite(root, torch.abs, rows, name="first")
    second = fc.user_kernel(root, torch.abs, rows, name="second")
    with pytest.raises(PatternConflictError, match=r"first and second both claim op aten\.sqrt"):
        fc.compile(torch.sin, patterns=(first, second))
    narrow = fc.rewrite(root, torch.abs, rows, name="narrow", where=lambda x: x.shape[-1] > 100)
    fc.compile(torch.sin, patterns=(narrow, second))


SCRIPT = """
import sys, warnings, torch
sys.modules["triton"] = None
import fusion_compiler as fc
x = torch.randn(6)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert torch.equal(fc.compile(lambda x: x.abs() + 1, backend="interpret")(x), x.abs() + 1)
assert any("Triton cannot be imported" in str(w.message) for w in caught), caught
try:
    fc.compile(lambda x: x.abs() + 1, backend="interpret", strict=True)(x)
except fc.FusionError as error:
    print(type(error).__name__)
"""


def test_without_triton() -> None:
    root_folder = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=root_folder, capture_output=True, text=True)
    assert done.stdout.strip() == "MissingTritonError", done.stderr
