"""The names in generated kernels: none stands for two things, and no program that breaks that is printed."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import fusion_compiler as fc
from fusion_compiler.codegen import emit, expression
from fusion_compiler.codegen.text import module
from fusion_compiler.codegen.tile import Assign, Do, For, Function, If, Range, Statement, Store, Update
from fusion_compiler.errors import KernelError
from fusion_compiler.ir.device import device_spec
from fusion_compiler.ir.kernel import Buffer
from fusion_compiler.ir.loops import COLS, ROWS
from fusion_compiler.ops.syntax import Global, Literal, Name, Var
from tests.exactness import Compiled
from tests.nests import Nest


def let(variable: Var | Name) -> Assign:
    return Assign((variable,), Literal(0))


POINTER, OUT, X = Name("in0_ptr"), Name("out0_ptr"), Var("add")
TURNS = Range(Literal(0), Literal(4), 1)
WRONG: list[tuple[str, list[Statement]]] = [
    ("has a variable called per_add.to(tl.float32)", [let(Var("per_add.to(tl.float32)"))]),
    ("reads add before it is assigned", [Store(OUT, Name("add"))]),
    ("reads add before it is assigned", [Update(X, "+", Literal(1))]),
    ("assigns to tl, which is not a variable", [let(Name("tl"))]),
    ("assigns to in0_ptr, which is not a variable", [let(POINTER)]),
    ("assigns to max, which is not a variable", [let(Name("max"))]),
    ("reads add before", [For(Name("start"), TURNS, [let(X)]), Store(OUT, X)]),
    ("reads start before", [For(Name("start"), TURNS, [let(X)]), Store(OUT, Name("start"))]),
    ("reads add before", [If(POINTER.eq(0), [let(X)]), Store(OUT, X)]),
    ("reads add before", [If(POINTER.eq(0), [let(X)], [Store(OUT, POINTER)]), Store(OUT, X)]),
]


@pytest.mark.parametrize(("message", "body"), WRONG)
def test_a_function_that_breaks_the_rules_is_refused(message: str, body: list[Statement]) -> None:
    with pytest.raises(ValueError, match=re.escape(f"kernel {message}")):
        module([Function("kernel", (POINTER, OUT), body)])


def test_what_both_arms_assign_is_there_behind_them() -> None:
    body = [If(POINTER.eq(0), [let(X)], [If(POINTER.eq(1), [let(X)], [let(X)])]), Store(OUT, X)]
    text = module([Function("kernel", (POINTER, OUT), body)])
    first = "    if in0_ptr == 0:\n        add = 0\n    elif in0_ptr == 1:\n        add = 0\n"
    assert text.endswith(f"{first}    else:\n        add = 0\n    tl.store(out0_ptr, add)\n")


def test_names_of_functions() -> None:
    good = Function("kernel", (POINTER,), [Do(Global("kernel_last")(POINTER)), let(Var("kernel_last"))])
    assert module([good]).endswith("    kernel_last(in0_ptr)\n    kernel_last_1 = 0\n")
    for name in ("kernel", "fm", "lambda"):
        with pytest.raises(ValueError, match=f"are equal or reserved: kernel, {name}"):
            module([good, replace(good, name=name)])


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
    monkeypatch.setattr(expression, "base_name", lambda node: next(names))
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
        assert "def fm_(" in source
        assert "row_1 = " in source and "fm_1 = " in source


def test_a_wrong_text_is_an_error_where_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expression, "base_name", lambda node: "to(tl.float32)")
    with pytest.raises(KernelError, match=r"failed to be printed: .* a variable called to\(tl"):
        fc.compile(lambda x: torch.exp(x * 2), backend="interpret", strict=True)(torch.randn(8))


def test_a_cluster_named_after_a_lambda() -> None:
    """A pattern's name is an identifier, which Python's own words are as well."""
    hint = replace(fc.cluster_hint(lambda x: torch.exp(x) * 2, torch.randn(8)), name="lambda")
    fast = fc.compile(lambda x: torch.exp(x) * 2, patterns=(hint,), backend="interpret", strict=True)
    x = torch.randn(8)
    torch.testing.assert_close(fast(x), torch.exp(x) * 2)
    assert [c.name for c in fast.plan[0].clusters] == ["lambda"]
