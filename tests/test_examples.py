"""Every example runs, and does what it says."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from examples import custom_pattern, demo, encoder_layer, train_gpt2

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_every_example_is_run_here() -> None:
    here = Path(__file__).read_text()
    names = [file.stem for file in EXAMPLES.glob("*.py") if file.stem != "__init__"]
    assert names
    assert [n for n in names if f"{n}.main(" not in here] == []


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


def test_three_sorts_of_pattern_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    custom_pattern.main()
    out = capsys.readouterr().out
    assert "scaled_softplus" in out and "root_of_square: done" in out and "squared_relu: done" in out


@pytest.mark.filterwarnings("ignore::fusion_compiler.errors.FusionWarning")  # CPU tensors run their fx graphs
def test_gpt2_learns_to_count() -> None:
    assert train_gpt2.main() < 1.0  # guessing is 4.1
