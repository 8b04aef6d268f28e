"""Every row of the operator table that has an expression, as a kernel of its own, against eager.

The arguments come from the row's schema: values at the edges of the dtype (NaN, infinities,
signed zeros, negatives, halves) in every combination, and PyTorch's OpInfo samples.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode

from fusion_compiler.codegen.expression import (
    CONDITIONS,
    computed,
    convert_literal,
)
from fusion_compiler.ir.kernel import Argument, Kernel, Role
from fusion_compiler.ir.loops import Compute, Value
from fusion_compiler.ops.decompositions.table import decomposition_table
from fusion_compiler.ops.syntax import Expression, Literal, Name, lift, literal
from fusion_compiler.ops.table import OPS, OpSpec, spec_of
from fusion_compiler.passes.lower.space import SUPPORTED, compute_dtype
from fusion_compiler.runtime.builds import Build, compile_build
from fusion_compiler.runtime.interpreter import run_kernel
from fusion_compiler.runtime.target import TRITON_TYPES as ARGUMENT_TYPES
from tests.samples import opinfo_samples

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
HEADER = """\
import triton
import triton.language as tl
from triton.language.extra import libdevice
from fusion_compiler.codegen import math as fm

@triton.jit"""
EXPRESSIONS = [spec for spec in OPS if spec.expr is not None and spec.form is None]
SUMS = {getattr(torch.ops.aten, name) for name in ("add", "sub", "rsub", "lerp", "addcmul", "addcdiv")}
# Of two zeros that are equal the larger is 0.0 to a GPU and whichever comes first to eager on a CPU; of what
# lerp adds up the order differs as well.
EITHER_ZERO = {
    getattr(torch.ops.aten, name)
    for name in ("maximum", "minimum", "clamp", "clamp_min", "clamp_max", "relu", "hardtanh", "lerp")
}
DECOMPOSITIONS = decomposition_table()


def node_of(spec: OpSpec, values: dict[str, Any], out: torch.dtype, bf16: bool = False) -> Compute:
    """The node that lowering makes of a call; tensors are the nodes 0, 1, ... in the order of the schema."""
    numbers = itertools.count()
    operands = tuple(
        (name, Value(next(numbers)) if isinstance(value, torch.Tensor) else value)
        for name, value in values.items()
    )
    return Compute(spec.target, operands, compute_dtype(out), bf16)


def expression(
    spec: OpSpec,
    values: dict[str, Any],
    out: torch.dtype,
    fp16: bool = False,
    bf16: bool = False,
    numbers: Sequence[str] = (),
) -> str:
    """The text of a call on variables v_<name of the argument>; those named in `numbers` are 3."""
    held = [(name, compute_dtype(v.dtype)) for name, v in values.items() if isinstance(v, torch.Tensor)]

    def operand(number: int) -> tuple[Expression, torch.dtype]:
        name, dtype = held[number]
        if name in numbers:
            return Literal(cast(float, convert_literal(3, dtype))), dtype
        return Name(f"v_{name}"), dtype

    return str(computed(node_of(spec, values, out, bf16), operand, fp16))


def run(
    spec: OpSpec, values: dict[str, Any], out: torch.Tensor, fp16: bool = False, bf16: bool = False
) -> torch.Tensor:
    """The row's expression on `values` (schema name -> tensor or number), in the shape and dtype of out."""
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    loads = [
        f"    v_{name} = tl.load({name}_ptr + i, inside).to({lift(compute_dtype(tensor.dtype))})"
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
            f"    v = {expression(spec, values, out.dtype, fp16, bf16)}",
            "    tl.store(out_ptr + i, v, inside)",
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
        if spec.target.overloadpacket not in EITHER_ZERO:
            zero = (truth == 0) & (got == 0)
            assert torch.equal(torch.signbit(got[zero]), torch.signbit(truth[zero])), "sign of zero"
        return
    if eager.dtype is not torch.bool:  # a float that is not finite has no integer
        for source in values.values():
            if isinstance(source, torch.Tensor) and source.is_floating_point():
                fits = source.isfinite().broadcast_to(eager.shape)
                eager, got = eager.where(fits, 0), got.where(fits, 0)
    assert torch.equal(got, eager), (values, got, eager)


def magnitude(spec: OpSpec, values: dict[str, Any], truth: torch.Tensor) -> torch.Tensor:
    """Return the magnitude to which a relative error refers: in a sum, whose terms may cancel, the terms'."""
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
        integers = (0, 1, 2, 3, -3) if name == "exponent" else (2, 3)
        return (*integers, *((0.5, -0.5, -1, -2, 2.5) if name == "exponent" else (0.1, -0.75, math.inf)))
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


@pytest.mark.sample(100)
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
    pytest.param(spec, form, error, id=f"{spec.target} {error}")
    for spec in EXPRESSIONS
    for form, error in (("fp16", 2**-15), ("bf16", 2**-11))
    if getattr(spec, form) is not None
]


@pytest.mark.parametrize(("spec", "form", "allowed"), ROUGH)
def test_expressions_of_16_bits(spec: OpSpec, form: str, allowed: float) -> None:
    """A row's faster forms keep its bound relative to normal results, and have the same NaN and infinities.

    The test is of the formula: the interpreter computes the hardware's approximate functions exactly.
    """
    magnitudes = torch.logspace(-6, 1, 200)
    x = torch.cat([magnitudes, -magnitudes, edges(torch.float32, 0)])
    for values in samples(spec, torch.float32):
        values |= {n: x if i == 0 else torch.full_like(x, 0.3) for i, n in enumerate(tensor_names(values))}
        truth = call(spec, {name: _double(value) for name, value in values.items()})
        faster = run(spec, values, truth.float(), fp16=True, bf16=form == "bf16")
        error = distance(faster, truth)
        assert (error <= allowed * truth.abs().nan_to_num() + torch.finfo(torch.float32).tiny).all()


def tensor_names(values: dict[str, Any]) -> list[str]:
    return [name for name, value in values.items() if isinstance(value, torch.Tensor)]


NAMES = {spec.target.overloadpacket.__name__ for spec in EXPRESSIONS}
OPINFOS = [info for info in op_db if info.name in NAMES or info.aten_name in NAMES]


@pytest.mark.parametrize("info", OPINFOS, ids=lambda info: info.formatted_name)
def test_opinfo(info: Any) -> None:
    """Run PyTorch's own samples of an operator: broadcasts, non-contiguous, 0-d and empty tensors, all
    scalars."""
    for dtype in {torch.float32, torch.bfloat16, torch.int64, torch.bool} & info.dtypes:
        recorder = Recorder()
        with recorder:
            for sample in opinfo_samples(info, dtype, 6):
                info.op(sample.input, *sample.args, **sample.kwargs)
        for spec, values in recorder.calls[:6]:
            operands = [value for value in values.values() if isinstance(value, torch.Tensor)]
            if all(value.dtype in SUPPORTED for value in operands) and reaches_kernel(spec, values):
                check(spec, values)


COMPILED = (torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool)


@pytest.mark.parametrize("target", [("cuda", 90, 32), ("hip", "gfx942", 64)], ids=lambda t: str(t[1]))
@pytest.mark.parametrize("dtype", COMPILED, ids=str)
def test_compiles(dtype: torch.dtype, target: tuple[str, int | str, int]) -> None:
    """Every expression that the dtype reaches, all in one kernel, becomes machine code."""
    body: list[str] = []
    for spec in EXPRESSIONS:
        values = next((v for v in samples(spec, dtype) if reaches_kernel(spec, v)), None)
        if values is not None:
            result = call(spec, values).dtype
            body += loads_of(values)
            for form in FORMS if dtype is torch.float32 else FORMS[:1]:
                text = expression(spec, values, result, *form)
                body += [f"    v = {text}", f"    tl.store(out_ptr + i + {len(body)}, v)"]
    assert machine_code(body, dtype, target)


FORMS = ((False, False), (True, False), (True, True))  # fp16, bf16


def loads_of(values: dict[str, Any]) -> list[str]:
    """Lines that define an expression's variables."""
    tensors = {n: v.dtype for n, v in values.items() if isinstance(v, torch.Tensor)}
    return [
        f"    v_{name} = tl.load({'b' if dtype is torch.bool else 'x'}_ptr + i + {k})"
        f".to({lift(compute_dtype(dtype))})"
        for k, (name, dtype) in enumerate(tensors.items())
    ]


def machine_code(body: list[str], dtype: torch.dtype, target: tuple[str, int | str, int]) -> Any:
    source = "\n".join([HEADER, "def kernel(x_ptr, b_ptr, out_ptr):", "    i = tl.arange(0, 128)", *body])
    pointers = (("x_ptr", f"*{ARGUMENT_TYPES[dtype]}"), ("b_ptr", "*i1"), ("out_ptr", "*fp64"))
    return compile_build(Build(source, "kernel", pointers, (0, 1, 2), target)).asm


@pytest.mark.parametrize("dtype", [*COMPILED, torch.int8], ids=str)
def test_an_expression_has_the_dtype_of_its_result(dtype: torch.dtype) -> None:
    """Whatever numbers stand in it: then any expression can be an operand of any other.

    Triton takes a number that stands for itself for int32 or float32.
    """
    body: list[str] = []
    for spec in EXPRESSIONS:
        texts: set[str] = set()
        for values in samples(spec, dtype):
            if reaches_kernel(spec, values):
                result = call(spec, values).dtype
                for numbers in mixes(tensor_names(values)):
                    for form in FORMS if dtype is torch.float32 else FORMS[:1]:
                        text = expression(spec, values, result, *form, numbers)
                        if text not in texts:
                            body += [*([] if texts else loads_of(values)), f"    v = {text}"]
                            want = lift(compute_dtype(result))
                            body.append(f"    tl.static_assert(v.dtype == {want})")
                        texts.add(text)
    assert machine_code(body, dtype, ("cuda", 90, 32))


def mixes(names: list[str]) -> list[list[str]]:
    """Return the lists of operands that may be numbers in the text: none, one of several, all that a
    condition chooses."""
    chosen = [name for name in names if name not in CONDITIONS]
    return [[], *([name] for name in names if len(names) > 1), *([chosen] if chosen != names else [])]


def test_minus_zero_reaches_the_machine_code() -> None:
    """Every zero that Triton is given as a number becomes 0.0."""
    text = f"    tl.store(out_ptr + i, tl.where(tl.load(b_ptr + i), {literal(-0.0)}, {literal(0.0)}))"
    assert "-0.000000e+00" in machine_code([text], torch.float32, ("cuda", 90, 32))["ttir"]
