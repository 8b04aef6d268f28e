"""An index outside of what it indexes, on the device: an error that says whose it is, at no cost."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fusion_compiler.ir.kernel import Buffer
from fusion_compiler.runtime.cuda import gpu_of
from fusion_compiler.runtime.launch import Runner
from tests import ROOT
from tests.codegen.test_lookups import COSTS, programs_of, unchecked

CUDA = torch.device("cuda")
# A CUDA context that an assertion ended is of no use: each case has a process of its own.
SCRIPT = """
import torch, torch.nn.functional as F, fusion_compiler as fc
torch.manual_seed(0)
table, scores = torch.randn(10, 4096, device="cuda"), torch.randn(64, 10, device="cuda")
calls = {{
    "embedding": (lambda i: F.embedding(i, table) * 2),
    "sum": (lambda i: F.embedding(i, table).sum(0)),
    "index": (lambda i: table[i] * 2),
    "cross entropy": (lambda i: F.cross_entropy(scores, i)),
}}
fast = fc.compile(calls[{name!r}], strict=True, dynamic=False)
inside = torch.arange(64, device="cuda") % 10
torch.testing.assert_close(fast(inside), calls[{name!r}](inside))
print("inside", flush=True)
inside[17] = {index}
try:
    fast(inside)
    torch.cuda.synchronize()
    print("no error", flush=True)
except RuntimeError as error:
    print("device-side assert" in str(error), flush=True)
"""


@pytest.mark.parametrize(
    ("name", "index", "said"),
    [
        ("embedding", 10, "embedding at script.py:6: an index is not in [0, 10)"),
        ("embedding", -1, "embedding at script.py:6: an index is not in [0, 10)"),
        ("sum", 12, "embedding at script.py:7: an index is not in [0, 10)"),
        ("index", -11, "index at script.py:8: an index is not in [-10, 10)"),
        ("cross entropy", 10, "an index is not in [0, 10)"),
    ],
)
def test_it_is_an_error_that_names_the_line(name: str, index: int, said: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(name=name, index=index))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["inside", "True"], done.stdout + done.stderr
    # Where memory before the table is no one's, the launch may end before the device's line is printed.
    assert said in done.stderr or (index < 0 and not done.stderr)


def tensor_for(buffer: Buffer) -> torch.Tensor:
    shape = tuple(map(int, buffer.shape))
    if buffer.dtype.is_floating_point:
        return torch.randn(shape, device=CUDA).to(buffer.dtype)
    return torch.randint(0, 100, shape, dtype=buffer.dtype, device=CUDA)


@pytest.mark.parametrize("name", COSTS)
def test_a_check_takes_no_time(name: str) -> None:
    function, arguments = COSTS[name]
    checked = [p for p in programs_of(function, *arguments) if "fm.check_index(" in p.kernels[0].source]
    gpu = gpu_of(0)
    for program in checked:
        plain = replace(program, kernels=tuple(map(unchecked, program.kernels)))
        inputs = [tensor_for(buffer) for buffer in program.inputs]
        runs = [Runner((p,), _never, name=name, strict=True) for p in (program, plain)]
        calls = [functools.partial(run, *inputs) for run in runs]
        measured = [gpu.times(calls) for _ in range(3)]  # the best: clocks drift by more than a check takes
        with_it, without = (min(times) for times in zip(*measured, strict=True))
        assert with_it <= 1.02 * without + 0.3, f"{with_it:.2f} us with it, {without:.2f} us without"


def _never(*_: object) -> tuple[torch.Tensor, ...]:
    raise AssertionError("the fallback was called")
