"""The names in generated kernels: none stands for two things, and no text that breaks that is handed on."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import fusion_compiler as fc
from fusion_compiler.codegen import emit, nodes
from fusion_compiler.codegen.names import HEADER, problem
from fusion_compiler.errors import KernelError
from fusion_compiler.ir.device import device_spec
from fusion_compiler.ir.kernel import Buffer
from fusion_compiler.ir.loops import COLS, ROWS
from tests.exactness import Compiled
from tests.nests import Nest

KERNEL = HEADER + "@triton.jit\ndef kernel(in0_ptr, out0_ptr):\n    "
WRONG = {
    "per_add.to(tl.float32) = 1.0": "line 10 is no Python: cannot assign to function call",
    "tl.store(out0_ptr, add)": "line 10 reads add before it is assigned",
    "add += 1": "line 10 adds to what is not assigned",
    "tl = in0_ptr": "line 10 assigns to tl, which is no variable",
    "in0_ptr = 3": "line 10 assigns to in0_ptr, which is no variable",
    "max = tl.load(in0_ptr)": "line 10 assigns to max, which is no variable",
    "for start in tl.range(0, 4, 1):\n        x = start\n    tl.store(out0_ptr, x)": "line 12 reads x",
    "if in0_ptr == 0:\n        x = 1\n    tl.store(out0_ptr, x)": "line 12 reads x",
    "kernel_last(in0_ptr)\n    kernel_last = 1": "line 10 reads kernel_last before it is assigned",
    "del in0_ptr": "line 10 is no statement of a kernel: del in0_ptr",
}


@pytest.mark.parametrize("body", WRONG)
def test_a_text_that_breaks_the_rules_is_refused(body: str) -> None:
    found = problem(f"{KERNEL}{body}\n\n\ndef kernel_last(in0_ptr):\n    x = 0\n")
    assert found is not None and found.startswith(WRONG[body])


def test_names_of_functions() -> None:
    good = f"{KERNEL}x = tl.load(in0_ptr)\n    tl.store(out0_ptr, x + float('inf'))\n"
    assert problem(good) is None
    assert "called kernel, kernel" in str(problem(good + good.removeprefix(HEADER)))
    for name in ("fm", "lambda"):
        assert problem(good.replace("def kernel", f"def {name}")) is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_division_by_a_converted_value_of_the_row(dtype: torch.dtype) -> None:
    """One over it has a name of its own, whatever the value's text is."""

    def counted(x: Tensor) -> Tensor:
        return x.sum(1) / torch.ones(x.shape, dtype=torch.int64).sum(1)

    def share(x: Tensor) -> Tensor:
        return x / (x > 0).sum(1, keepdim=True)

    x = torch.randn(4, 60).to(dtype)
    for fn in (counted, share):
        torch.testing.assert_close(Compiled(fn)(x), fn(x), rtol=2e-2, atol=2e-2)


def test_values_make_way_for_names_that_are_the_same_in_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators may be called as anything: rows, columns, loops' variables, modules."""
    names = itertools.cycle(("row", "col", "start", "part", "shift", "fm", "float", "col_inside"))
    monkeypatch.setattr(nodes, "base_name", lambda node: next(names))
    nest = Nest({"i": (6, ROWS), "j": (40000, COLS)})
    value = nest.load("x", "i", "j", dtype=torch.float32)
    for _ in range(8):
        value = nest.mul(value, nest.constant(2.0))
    nest.store("sums", nest.reduce("sum", value), "i", dtype=torch.float32)
    nest.store("y", value, "i", "j", dtype=torch.float32)
    shapes = {"x": (6, 40000), "y": (6, 40000), "sums": (6,)}
    strides = {"x": (40000, 1), "y": (40000, 1), "sums": (1,)}
    buffers = {n: Buffer(n, shapes[n], strides[n], torch.float32) for n in shapes}
    for program in emit.emit((nest.nest(),), "fm", "", buffers, device_spec("h200")):
        source = program.kernels[0].source
        assert problem(source) is None and "def fm_(" in source
        assert "row_1 = " in source and "fm_1 = " in source


def test_a_wrong_text_is_an_error_where_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "base_name", lambda node: "to(tl.float32)")
    with pytest.raises(KernelError, match=r"failed to be printed: .* line \d+ is no Python: "):
        fc.compile(lambda x: torch.exp(x * 2), backend="interpret", strict=True)(torch.randn(8))


def test_a_cluster_named_after_a_lambda() -> None:
    """A pattern's name is an identifier, which Python's own words are as well."""
    hint = replace(fc.cluster_hint(lambda x: torch.exp(x) * 2, torch.randn(8)), name="lambda")
    fast = fc.compile(lambda x: torch.exp(x) * 2, patterns=(hint,), backend="interpret", strict=True)
    x = torch.randn(8)
    torch.testing.assert_close(fast(x), torch.exp(x) * 2)
    assert [c.name for c in fast.plan[0].clusters] == ["lambda"]
