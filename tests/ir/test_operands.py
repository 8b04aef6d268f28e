"""Operators whose arguments are one tensor: arguments are found by name, not by place among what is read."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fusion_compiler as fc
from fusion_compiler.ir.dag import Op, build
from fusion_compiler.ops.schema import written

aten = torch.ops.aten
CONVOLUTION = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu
CALLS: dict[str, tuple[tuple[int, ...], int, Callable[..., Any]]] = {
    "mm": ((4, 4), 2, aten.mm.default),
    "bmm": ((2, 4, 4), 2, aten.bmm.default),
    "addmm": ((4, 4), 3, aten.addmm.default),
    "baddbmm": ((2, 4, 4), 3, aten.baddbmm.default),
    "convolution": ((3, 3, 5, 5), 2, lambda x, w: aten.convolution.default(x, w, None, *CONVOLUTION)),
    "convolution_backward": (
        (3, 3, 3, 3),
        3,
        lambda g, x, w: aten.convolution_backward.default(g, x, w, None, *CONVOLUTION, [True, True, False]),
    ),
    "attention": ((2, 2, 8, 4), 3, lambda q, k, v: ATTENTION.default(q, k, v)),
    "attention_backward": (
        (2, 2, 8, 4),
        5,
        lambda g, q, k, v, out: aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            g, q, k, v, out, torch.ones(2, 2, 8), 0.0, False
        ),
    ),
}


def traced(function: Callable[..., Any], *tensors: Tensor) -> list[Op]:
    """The calls of a function, in order."""
    dag = build(make_fx(function, tracing_mode="fake")(*tensors))
    return [op for name in dag.order if name not in dag.inputs and (op := dag.op(name))]


@pytest.mark.parametrize("name", CALLS)
def test_the_arithmetic_of_a_call_does_not_depend_on_which_arguments_are_one_tensor(name: str) -> None:
    shape, count, call = CALLS[name]
    tensors = [torch.randn(shape) for _ in range(count)]
    (apart, *_) = sorted(traced(call, *tensors), key=lambda op: -op.flops)
    assert apart.flops > 0
    for first in range(count):  # all of them, the last two, ...
        chosen = torch.randint(first + 1, (count,)).tolist()  # whose number is at most `first`
        (alike, *_) = sorted(
            traced(lambda *x, c=chosen: call(*(x[i] for i in c)), *tensors), key=lambda op: -op.flops
        )
        assert alike.flops == apart.flops, chosen


def test_a_product_is_counted_by_its_matrices() -> None:
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    wide = torch.randn(8, 32)
    assert traced(lambda x, w: aten.addmm.default(x, x, w), x, w)[0].flops == 2 * 8 * 8 * 8
    assert traced(lambda x, y: aten.addmm.default(x, y, y.t()), x, wide)[-1].flops == 2 * 8 * 8 * 32
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 64, 8)
    assert traced(lambda q, k: ATTENTION.default(q, k, k)[0], q, k)[0].flops == 4 * q.numel() * 64


def test_an_operand_is_named_by_its_argument() -> None:
    def written_into_itself(x: Tensor) -> Tensor:
        return aten.slice_scatter.default(x, x, 0, 0, 4)

    (op,) = traced(written_into_itself, torch.randn(4))
    assert (*op.inputs,) == (op.operand("self"),) == (op.operand("src"),)
    assert written(op.target) == ()


@pytest.mark.parametrize("backend", ["eager", "interpret"])
def test_values_and_gradients_of_products_of_one_tensor(backend: str) -> None:
    def model(a: Tensor) -> tuple[Tensor, ...]:
        b = a.tanh()
        image = b[None, None]
        return (
            torch.addmm(b, b, b, beta=2).relu(),
            torch.baddbmm(b[None], b[None], b[None]),
            torch.nn.functional.conv2d(image, image, padding=1),
            torch.slice_scatter(b, b, 0, 0, 4) + 1,
            torch.softmax(b @ b.T, -1) @ torch.softmax(b @ b.T, -1),
        )

    torch._dynamo.reset()
    fast: Any = fc.compile(model, backend=backend, strict=True, device="h200")
    x = torch.randn(4, 4, requires_grad=True)
    exact = x.detach().double().requires_grad_()
    ours, theirs = fast(x), model(exact)
    weights = [torch.randn_like(y) for y in ours]
    sum((y * w).sum() for y, w in zip(ours, weights, strict=True)).backward()  # type: ignore[union-attr]
    sum((y * w).sum() for y, w in zip(theirs, weights, strict=True)).backward()  # type: ignore[union-attr]
    for y, z in zip((*ours, x.grad), (*theirs, exact.grad), strict=True):
        torch.testing.assert_close(y.double(), z, rtol=1e-4, atol=1e-4)


def test_no_module_takes_an_operand_by_its_place_among_what_is_read() -> None:
    """`all_input_nodes` has a node that two arguments name once: only its first entry is an argument's."""
    package = Path(fc.__file__).parent
    wrong: list[str] = []
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Subscript):
                index = node.slice.value if isinstance(node.slice, ast.Constant) else None
                taken, places = node.value, 1 if index == 0 else 2
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
                taken, places = node.value, len(node.targets[0].elts)
            else:
                continue
            if isinstance(taken, ast.Attribute) and taken.attr == "all_input_nodes" and places > 1:
                wrong.append(f"{file.relative_to(package)}:{node.lineno}")
    assert not wrong
