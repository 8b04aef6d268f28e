"""Every command of `python -m benchmarks` runs without a GPU, and every case builds at its real sizes."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.__main__ import BENCHMARKS, module_of, parse
from benchmarks.decoding.decoders import DECODERS
from benchmarks.harness.record import ROOT
from benchmarks.kernels import depthwise, products
from benchmarks.kernels.case import PHASES, Case
from benchmarks.kernels.measure import leaves, run
from benchmarks.kernels.sizes import ALL_CASES, sweep
from benchmarks.models.untuned import UNTUNED
from benchmarks.models.workloads import Workload, gradient_for, result_of, step
from benchmarks.optimizer.measure import STEPS
from benchmarks.pages import readme, reports

# What each command is called with, and a part of what it prints.
CALLS = {
    "kernels": (("--filter", "^a . b.t.., forward$", "--only", "eager"), "a + b.t(), forward"),
    "sweep": (("--filter", "^softmax, 256 wide, forward$", "--only", "eager"), "softmax, 256 wide"),
    "depthwise": (("--filter", "PoolFormer, small, inference", "--only", "eager"), "pooling, forward"),
    "descriptors": (("--filter", "PoolFormer, small, inference"), "addcmul_relu_avg_pool2d"),
    "products": (("--filter", "^(4096|down).*(4096|ViT)", "--only", "library|fused"), "share of cuBLAS"),
    "schedules": (("--filter", "chunked SwiGLU", "--limit", "1", "--budget", "0"), "first choice"),
    "overhead": (("--filter", "nothing", "--only", "eager"), "computes nothing, step"),
    "channel-order": (("--filter", "^odd bf16 64x33x"), "1 of 1"),
    "chains": (("--filter", "^sigmoid.*forward$", "--backend", "eager", "--only", "ours"), "sigmoid, causal"),
    "models": (("--filter", "^ViT-B", "--only", "eager", "--no-check"), "ViT-B/16"),
    "memory": (("--filter", "^ViT-B", "--only", "eager"), "ViT-B/16"),
    "untuned": (("--filter", "^PatchTST", "--only", "eager", "--no-check"), "PatchTST"),
    "fsdp": (("--size", "tiny", "--only", "eager"), "tiny, eager, whole model"),
    "decode": (("--filter", "^Llama-1B, batch 1", "--only", "eager", "--no-check"), "of copy"),
    "generation": (("--only", "step|loop"), "tokens a second"),
    "row-ranges": (("--only", "number"), "this / any"),
    "optimizer": (("--filter", "parameters, SGD", "--only", "^foreach$"), "of copy"),
    "compile-time": (("--filter", "ViT", "--only", "nobody"), "ViT, 12 layers"),
    "links": (("--filter", "^2 processes, (raw|default)"), "fewer"),
    "uneven": (("--filter", "U-Net", "--only", "ours|equal", "--threads", "1"), "over equal"),
    "machines": (("--filter", "U-Net"), "times as fast as equal layers"),
    "architectures": (("--filter", "^gpt2$", "--backend", "eager"), "1 same"),
}


def test_every_command_is_tried() -> None:
    assert {*CALLS, "readme"} == BENCHMARKS.keys()


@pytest.mark.parametrize("name", CALLS)
def test_a_command_runs_without_a_gpu(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for variable, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(variable, value)  # fsdp is a process of a group
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")
    arguments, printed = CALLS[name]
    dtype = torch.get_default_dtype()
    torch._dynamo.reset()
    try:
        quick = ("--quick", "--device", "cpu", "--repetitions", "1", "--jobs", "1")
        module_of(name).main(parse([name, *quick, *arguments]))
    finally:
        torch.set_default_dtype(dtype)
    out = capfd.readouterr().out
    assert printed in out and "Error" not in out, out


def test_the_pages_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(ROOT / "README.md", tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    monkeypatch.setattr(reports, "picture", lambda file: None)
    readme.main(parse(["readme"]))
    for page in ("docs/figures.md", "docs/optimizer.md"):
        assert (tmp_path / page).read_text() == (ROOT / page).read_text()


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse([name, "--help"])
    out = capsys.readouterr().out
    assert ended.value.code == 0 and "--resume" in out
    assert (module_of(name).__doc__ or "").strip().splitlines()[0] in out


@pytest.mark.parametrize("cases", [ALL_CASES, sweep(), depthwise.CASES], ids=["all", "sweep", "depthwise"])
def test_every_case_runs_at_its_real_sizes(cases: tuple[Case, ...]) -> None:
    """Nothing is computed: tensors are fake."""
    assert len({case.name for case in cases}) == len(cases)
    with FakeTensorMode():
        for case in cases:
            inputs = leaves(case.inputs("cpu"), case.differentiate)
            with torch.no_grad():
                outputs = run(case.fn, case.inputs("cpu"), (), ())
            assert case.forward_bytes(inputs, outputs) > sum(t.nbytes for t in outputs), case.name
            if PHASES[1] in case.phases:
                gradients = [torch.empty_like(o) for o in outputs]
                run(case.fn, inputs, case.differentiate, gradients)
                assert case.backward_bytes(inputs, outputs) > 0, case.name


def test_every_product_runs_at_its_real_size() -> None:
    cases = (*products.ALONE, *products.FUSED)
    assert len(products.FUSED) == 24 and len({case.name for case in cases}) == len(cases)
    with FakeTensorMode():
        for case in cases:
            results = products.results_of(case.fn(*case.inputs("cpu", quick=False)))
            assert {result.shape[0] for result in results} & {case.shapes[0][0]}


@pytest.mark.parametrize("workload", (*UNTUNED, *DECODERS, *STEPS), ids=lambda w: w.name)
def test_every_other_workload_runs(workload: Workload) -> None:
    try:
        model, batch = workload.make("cpu", quick=True, dtype=torch.float32)
    except ModuleNotFoundError as error:
        assert error.name == "timm" and importlib.util.find_spec("timm") is None
        pytest.skip("timm is not installed")
    gradient = gradient_for(model, batch) if workload.train else None
    assert result_of(step(model, batch, workload.train, gradient)).isfinite().all()
