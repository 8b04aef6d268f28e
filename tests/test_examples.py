"""Every example runs, and does what it says."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from examples import (
    custom_pattern,
    demo,
    encoder_layer,
    flex_attention,
    folded_scale,
    machines,
    one_kernel,
    own_norm,
    own_optimizer,
    swiglu_fp8,
    train_gpt2,
)

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_every_example_is_run_here() -> None:
    here = Path(__file__).read_text()
    names = {file.stem for file in EXAMPLES.glob("*.py")} - {"__init__", "helpers"}
    table = (EXAMPLES / "README.md").read_text()
    assert names == set(re.findall(r"^\| \[(\w+)\.py\]", table, re.MULTILINE))
    assert [n for n in sorted(names) if f"{n}.main(" not in here] == []


def test_demo_shows_plan_kernel_errors_and_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    demo.main()
    out = capsys.readouterr().out
    assert "@triton.jit" in out
    assert "iteration space" in out
    before, after = out.split("bytes moved by the fused ops: ")[1].split(" (")[0].split(" -> ")
    assert int(after.replace(",", "")) < int(before.replace(",", ""))
    rows = out.split("relative error against float64")[1].splitlines()[1:]
    errors = [line.split()[-2:] for line in rows if line.startswith(("output", "d "))]
    assert len(errors) == 14
    # float32 in and out: some tens of its rounding unit after a whole block.
    assert all(float(ours) < 1e-5 for ours, _ in errors)


def test_encoder_layer_trains_and_prints_its_plan(capsys: pytest.CaptureFixture[str]) -> None:
    encoder_layer.main()
    out = capsys.readouterr().out
    gradient = float(out.split("gradient of the input: ")[1])
    assert math.isfinite(gradient) and gradient > 0
    assert "iteration space" in out


def test_one_kernel_is_followed_from_code_to_triton(capsys: pytest.CaptureFixture[str]) -> None:
    one_kernel.main()  # tests/test_architecture.py has the text
    out = capsys.readouterr().out
    assert "sum of 2 over col\n" in out and "def rms_norm(" in out


def test_three_sorts_of_pattern_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    custom_pattern.main()
    out = capsys.readouterr().out
    assert "scaled_softplus" in out and "root_of_square: done" in out and "squared_relu: done" in out


def table(out: str, start: str) -> dict[str, list[str]]:
    """The rows of a printed error table whose first column begins with `start`, by output."""
    rows = [line.rsplit(maxsplit=4) for line in out.splitlines() if line.startswith(start)]
    return {row[0].removeprefix(start).strip(): row[1:] for row in rows if len(row) == 5}


def test_swiglu_is_quantized_by_a_kernel_as_by_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    swiglu_fp8.main()
    out = capsys.readouterr().out
    assert (
        "plan: swiglu_fp8: done: 8 ops replaced" in out
        and "return (h / scale).to(torch.float8_e4m3fn)" in out
    )
    rows = table(out, "swiglu_fp8  ")
    assert rows["output 0"][0] == "float8_e4m3fn" and "WRONG" not in out
    assert float(rows["output 0"][1]) <= 32  # one step between the largest values
    ours, eager = (float(part.split()[-1]) for part in out.split("ours")[1].split(", eager"))
    assert 0 < ours <= 1.05 * eager < 0.05  # three bits of mantissa: 2^-4 at most, half of it on average


def test_a_normalization_of_ones_own_trains(capsys: pytest.CaptureFixture[str]) -> None:
    own_norm.main()
    out = capsys.readouterr().out
    assert "plan: mean_norm: done: 5 ops replaced" in out and "WRONG" not in out
    assert {"output 0"} <= table(out, "mean_norm  ").keys()
    assert {"gradient of argument 0", "gradient of argument 1"} <= table(out, "mean_norm_backward").keys()
    errors = [
        float(line.split()[-1]) for line in out.split("against float64")[1].splitlines() if line.strip()
    ]
    assert len(errors) == 4 and all(0 < e < 1e-6 for e in errors)


def test_a_scale_is_folded_where_it_pays(capsys: pytest.CaptureFixture[str]) -> None:
    folded_scale.main()
    out = capsys.readouterr().out
    assert "256 rows: scaled_linear: done: 2 ops replaced" in out
    assert "16 rows: scaled_linear: never matched: where= said no to 1 match" in out
    errors = [float(line.split()[-1]) for line in out.splitlines() if "relative error" in line]
    assert len(errors) == 2 and all(0 < e < 1e-6 for e in errors)
    assert "does not equal the pattern" in out and "counterexample: x = [[[" in out


def test_attention_becomes_flex_attention(capsys: pytest.CaptureFixture[str]) -> None:
    flex_attention.main()
    out = capsys.readouterr().out
    assert "plan: attention: done: 7 ops replaced" in out and "WRONG" not in out
    assert {"output 0"} <= table(out, "attention  ").keys()
    errors = [
        float(line.split()[-1]) for line in out.split("against float64")[1].splitlines() if line.strip()
    ]
    assert len(errors) == 2 and all(0 < e < 1e-6 for e in errors)


@pytest.mark.filterwarnings("ignore::fusion_compiler.errors.FusionWarning")  # CPU tensors run their fx graphs
def test_gpt2_learns_to_count() -> None:
    assert train_gpt2.main() < 1.0  # guessing is 4.1


def test_an_optimizer_of_ones_own_is_one_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    assert own_optimizer.main() < 0.1  # of a sine's mean square, 0.5
    out = capsys.readouterr().out
    assert "Lion: 1 kernel for 6 parameters" in out
    assert "def lion_block(" in out and "fm.sign(" in out


def test_two_processes_train_one_model(capfd: pytest.CaptureFixture[str]) -> None:
    machines.main(processes=2)
    out = capfd.readouterr().out
    assert "4 bits: the link takes 100% of the slowest link's time" in out
    first, last = out.split("\nloss ")[1].split(" in ")[0].split(" -> ")
    assert float(last) < float(first) / 10
