"""Every row of the operator table that has an expression, as a kernel of its own, against eager.

The arguments come from the row's schema: values at the edges of the dtype (NaN, infinities,
signed zeros, negatives, halves) in every combination, and PyTorch's OpInfo samples.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode

from fusion_compiler.builds import Build, compile_build
from fusion_compiler.decompositions import decomposition_table
from fusion_compiler.interpreter import run_kernel
from fusion_compiler.kernel import Argument, Kernel, Role
from fusion_compiler.ops import OPS, Operands, OpSpec, spec_of
from fusion_compiler.target import TRITON_TYPES
from tests.samples import opinfo_samples

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
HEADER = """\
import triton
import triton.language as tl
from triton.language.extra import libdevice
from fusion_compiler.codegen import math as fm

@triton.jit"""
EXPRESSIONS = [spec for spec in OPS if spec.expr is not None]
SUMS = {getattr(torch.ops.aten, name) for name in ("add", "sub", "rsub", "lerp", "addcmul", "addcdiv")}
DECOMPOSITIONS = decomposition_table()
LANGUAGE = {
    torch.bool: "tl.int1",
    torch.float16: "tl.float32",
    torch.bfloat16: "tl.float32",
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
    **{getattr(torch, name): f"tl.{name}" for name in ("uint8", "int8", "int16", "int32", "int64")},
}


def literal(value: Any, result: torch.dtype) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, float) and result is torch.float64:
        exact = torch.tensor(value, dtype=torch.float32).double().item() == value
        return repr(value) if exact else f"tl.full((), {value!r}, tl.float64)"
    return repr(value)


def texts(values: dict[str, Any], out: torch.Tensor) -> dict[str, str]:
    return {
        name: f"v_{name}" if isinstance(value, torch.Tensor) else literal(value, out.dtype)
        for name, value in values.items()
    }


def expression(spec: OpSpec, text: dict[str, str]) -> str:
    assert spec.expr is not None
    return spec.expr.format(**text) if isinstance(spec.expr, str) else spec.expr(**text)


def run(spec: OpSpec, values: dict[str, Any], out: torch.Tensor) -> torch.Tensor:
    """The row's expression on `values` (schema name -> tensor or number), in the shape and dtype of out."""
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    target = {
        Operands.RESULT: out.dtype,
        Operands.PROMOTED: functools.reduce(
            torch.promote_types, [t.dtype for t in tensors.values()], torch.bool
        ),
        Operands.OWN: None,
    }[spec.operands]
    loads = [
        f"    v_{name} = tl.load({name}_ptr + i, inside).to({LANGUAGE[tensor.dtype]})"
        + (f".to({LANGUAGE[target]})" if target else "")
        for name, tensor in tensors.items()
    ]
    extent = 1 << max(out.numel() - 1, 0).bit_length()
    source = "\n".join(
        [
            HEADER,
            f"def kernel({', '.join(f'{name}_ptr' for name in (*tensors, 'out'))}):",
            f"    i = tl.arange(0, {extent})",
            f"    inside = i < {out.numel()}",
            *loads,
            f"    v = {expression(spec, texts(values, out))}",
            "    v = v + tl.zeros((1,), tl.int1)" if not tensors else "",
            f"    tl.store(out_ptr + i, v.to({LANGUAGE[out.dtype]}), inside)",
        ]
    )
    inputs = [tensor.broadcast_to(out.shape).contiguous() for tensor in tensors.values()]
    arguments = [
        Argument(f"{name}_ptr", role, index, tensor.dtype)
        for index, (name, role, tensor) in enumerate(
            [
                *((n, Role.INPUT, t) for n, t in tensors.items()),
                ("out", Role.OUTPUT, out),
            ]
        )
    ]
    got = torch.empty_like(out, memory_format=torch.contiguous_format)
    run_kernel(Kernel("kernel", source, tuple(arguments), (1,)), [*inputs, got], (1,))
    return got


def check(spec: OpSpec, values: dict[str, Any]) -> None:
    """The kernel against eager: integers and bools equal; floats as close to float64 as eager is."""
    eager = call(spec, values)
    got = run(spec, values, eager)
    if eager.is_floating_point():
        truth = call(spec, {name: _double(value) for name, value in values.items()})
        tolerance = 4 * torch.finfo(eager.dtype).eps
        allowed = torch.maximum(distance(eager, truth), magnitude(spec, values, truth) * tolerance)
        wrong = distance(got, truth) > allowed
        assert not wrong.any(), (values, got[wrong], eager[wrong], truth[wrong])
        if not any(choice in expression(spec, texts(values, eager)) for choice in ("where", "imum")):
            zero = (truth == 0) & (got == 0)  # of two equal zeros, either may be chosen
            assert torch.equal(torch.signbit(got[zero]), torch.signbit(truth[zero])), "sign of zero"
        return
    if eager.dtype is not torch.bool:  # a float that is not finite has no integer
        for source in values.values():
            if isinstance(source, torch.Tensor) and source.is_floating_point():
                fits = source.isfinite().broadcast_to(eager.shape)
                eager, got = eager.where(fits, 0), got.where(fits, 0)
    assert torch.equal(got, eager), (values, got, eager)


def magnitude(spec: OpSpec, values: dict[str, Any], truth: torch.Tensor) -> torch.Tensor:
    """What a relative error refers to: in a sum, whose terms may cancel, the terms."""
    if spec.target.overloadpacket not in SUMS:
        return truth.abs().nan_to_num()
    if spec.target is torch.ops.aten.addcdiv.default:
        values = values | {"tensor2": 1 / values["tensor2"]}
    terms = (torch.as_tensor(value).double().nan_to_num().abs() for value in values.values())
    return functools.reduce(torch.mul, (1 + term for term in terms)).broadcast_to(truth.shape)


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def distance(x: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """|x - truth|: 0 where both are the same infinity or NaN, after truth is rounded to x's range."""
    rounded = truth.to(x.dtype).double()
    truth = torch.where(rounded.isinf(), rounded, truth.double())
    same = (x == truth) | (x.isnan() & truth.isnan())
    return torch.where(same, 0.0, (x.double() - truth).abs().nan_to_num(math.inf, math.inf))


def call(spec: OpSpec, values: dict[str, Any], function: Any = None) -> Any:
    arguments = spec.target._schema.arguments
    args = [values[a.name] for a in arguments if not a.kwarg_only]
    return (function or spec.target)(*args, **{a.name: values[a.name] for a in arguments if a.kwarg_only})


def edges(dtype: torch.dtype, position: int) -> torch.Tensor:
    if dtype.is_floating_point:
        values = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.0, 1e-3, 0.9, -7.25, 40.0]
        return torch.tensor(values, dtype=dtype)
    if dtype is torch.bool:
        return torch.tensor([True, False])
    # No zero among divisors: integer division by it raises in eager and is undefined on a GPU.
    values = [-7, -3, -1, 0, 1, 2, 5, 100] if position == 0 else [-3, -1, 1, 2, 3, 70]
    return torch.tensor(values).to(dtype)


def candidates(kind: str, name: str, dtype: torch.dtype) -> tuple[Any, ...]:
    """Values for one argument that is no tensor."""
    if name == "rounding_mode":
        return (None, "floor", "trunc")
    if name == "decimals":
        return (1, -1)
    if "number" in kind or "float" in kind or "Scalar" in kind:
        whole = (0, 1, 2, 3, -3) if name == "exponent" else (2, 3)
        return (*whole, *((0.5, -0.5, -1, -2, 2.5) if name == "exponent" else (0.1, -0.75, math.inf)))
    return ()


def samples(spec: OpSpec, dtype: torch.dtype) -> list[dict[str, Any]]:
    schema = spec.target._schema.arguments
    tensors = [a.name for a in schema if "Tensor" in str(a.type)]
    grids = torch.meshgrid(*[edges(dtype, i) for i in range(len(tensors))], indexing="ij") if tensors else []
    values: dict[str, Any] = dict(zip(tensors, grids, strict=True))
    for name in ("condition", "mask"):
        if name in values:
            values[name] = values[name] > 0
    scalars = [a for a in schema if a.name not in tensors]
    choices = [
        ((a.default_value,) if a.has_default_value() else ()) + candidates(str(a.type), a.name, dtype)
        for a in scalars
    ]
    names = [a.name for a in scalars]
    return [values | dict(zip(names, choice, strict=True)) for choice in itertools.product(*choices)]


def reaches_kernel(spec: OpSpec, values: dict[str, Any]) -> bool:
    """Eager takes these arguments, and no decomposition takes them away."""
    try:
        result = call(spec, values)
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    if not result.is_floating_point() and any(isinstance(v, float) for v in values.values()):
        return result.dtype is torch.bool  # a fraction beside integers is cut off or refused
    decompose = DECOMPOSITIONS.get(spec.target)
    return decompose is None or call(spec, values, decompose) is NotImplemented


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("spec", EXPRESSIONS, ids=lambda s: str(s.target))
def test_edges(spec: OpSpec, dtype: torch.dtype) -> None:
    for values in samples(spec, dtype):
        if reaches_kernel(spec, values):
            check(spec, values)


class Recorder(TorchDispatchMode):
    """Every call of an overload that has an expression, checked where its dtypes have kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[OpSpec, dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        spec = spec_of(func)
        if spec is not None and spec.expr is not None:
            kwargs = kwargs or {}
            names = [a.name for a in func._schema.arguments]
            values = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
            self.calls.append((spec, values | dict(zip(names, args, strict=False)) | kwargs))
        return func(*args, **(kwargs or {}))


ROUGH = [
    pytest.param(replace(spec, expr=form), error, id=f"{spec.target} {error}")
    for spec in EXPRESSIONS
    for form, error in ((spec.rough, 2**-15), (spec.coarse, 2**-11))
    if form is not None
]


@pytest.mark.parametrize(("spec", "allowed"), ROUGH)
def test_rough_expressions(spec: OpSpec, allowed: float) -> None:
    """What a row promises of its faster forms, relative to normal results, and the same NaN and infinities.

    The formula, that is: the interpreter computes the hardware's approximate functions exactly.
    """
    magnitudes = torch.logspace(-6, 1, 200)
    x = torch.cat([magnitudes, -magnitudes, edges(torch.float32, 0)])
    for values in samples(spec, torch.float32):
        values |= {n: x if i == 0 else torch.full_like(x, 0.3) for i, n in enumerate(tensor_names(values))}
        truth = call(spec, {name: _double(value) for name, value in values.items()})
        error = distance(run(spec, values, truth.float()), truth)
        assert (error <= allowed * truth.abs().nan_to_num() + torch.finfo(torch.float32).tiny).all()


def tensor_names(values: dict[str, Any]) -> list[str]:
    return [name for name, value in values.items() if isinstance(value, torch.Tensor)]


NAMES = {spec.target.overloadpacket.__name__ for spec in EXPRESSIONS}
OPINFOS = [info for info in op_db if info.name in NAMES or info.aten_name in NAMES]


@pytest.mark.parametrize("info", OPINFOS, ids=lambda info: info.formatted_name)
def test_opinfo(info: Any) -> None:
    """What PyTorch tests an operator with: broadcasts, non-contiguous, 0-d and empty tensors, all scalars."""
    for dtype in {torch.float32, torch.bfloat16, torch.int64, torch.bool} & info.dtypes:
        recorder = Recorder()
        with recorder:
            for sample in opinfo_samples(info, dtype, 6):
                info.op(sample.input, *sample.args, **sample.kwargs)
        for spec, values in recorder.calls[:6]:
            operands = [value for value in values.values() if isinstance(value, torch.Tensor)]
            if all(value.dtype in LANGUAGE for value in operands) and reaches_kernel(spec, values):
                check(spec, values)


@pytest.mark.parametrize("target", [("cuda", 90, 32), ("hip", "gfx942", 64)], ids=lambda t: str(t[1]))
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool], ids=str
)
def test_compiles(dtype: torch.dtype, target: tuple[str, int | str, int]) -> None:
    """Every expression that the dtype reaches, all in one kernel, becomes machine code."""
    body: list[str] = []
    for spec in EXPRESSIONS:
        values = next((v for v in samples(spec, dtype) if reaches_kernel(spec, v)), None)
        if values is not None:
            result = call(spec, values)
            text = texts(values, result)
            loads = {text[n]: v for n, v in values.items() if isinstance(v, torch.Tensor)}
            convert = f".to({LANGUAGE[result.dtype]})" if spec.operands is Operands.RESULT else ""
            body += [
                f"    {name} = tl.load({'b' if v.dtype is torch.bool else 'x'}_ptr + i + {k}){convert}"
                for k, (name, v) in enumerate(loads.items())
            ]
            faster = (spec.rough, spec.coarse) if dtype is torch.float32 else ()
            for form in (spec, *(replace(spec, expr=text) for text in faster if text is not None)):
                body += [f"    v = {expression(form, text)}", f"    tl.store(out_ptr + i + {len(body)}, v)"]
    source = "\n".join([HEADER, "def kernel(x_ptr, b_ptr, out_ptr):", "    i = tl.arange(0, 128)", *body])
    pointers = (("x_ptr", f"*{TRITON_TYPES[dtype]}"), ("b_ptr", "*i1"), ("out_ptr", "*fp64"))
    assert compile_build(Build(source, "kernel", pointers, (0, 1, 2), target)).asm
