"""Gradients of norms in rows that programs share: one kernel, right, with loads under way while it waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode

import fusion_compiler as fc
from fusion_compiler.canonical import canonical
from fusion_compiler.codegen.templates import emit
from fusion_compiler.device import device_spec
from fusion_compiler.kernel import Program
from fusion_compiler.target import compile_for
from tests.exactness import Compiled, not_as_close, wide


def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, w.shape, w, b)


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, w.shape, w)


def with_gradients(fn: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = fn(*leaves)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, weights)]


def backward_programs(fn: Any, width: int, rows: int = 512) -> tuple[Program, ...]:
    """The candidates of the only cluster of the backward, for an H200."""
    with FakeTensorMode():
        vectors = [torch.randn(width, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        x = torch.randn(rows, width, dtype=torch.bfloat16, device="cuda")
        inputs = (x, *vectors[: fn.__code__.co_argcount - 1])
        report = fc.explain(fn, *(t.requires_grad_() for t in inputs), device="h200")
    plan = report.plans[1]
    (cluster,) = plan.clusters
    key = canonical(cluster, plan.dag)
    buffers = {b.name: b for b in key.buffers}
    return emit(key.nests, cluster.name, "", buffers, device_spec("h200"))


@pytest.mark.parametrize("width", [16500, 20001])
@pytest.mark.parametrize("fn", [layer_norm, rms_norm], ids=["LayerNorm", "RMSNorm"])
def test_values_and_gradients(fn: Callable[..., Tensor], width: int) -> None:
    sizes = ((7, width), (width,), (width,))[: fn.__code__.co_argcount]
    inputs = tuple(torch.randn(*size) for size in sizes)
    compiled = Compiled(fn)
    ours, eager = with_gradients(compiled, inputs), with_gradients(fn, inputs)
    problems = [not_as_close(*v) for v in zip(ours, eager, with_gradients(fn, wide(inputs)), strict=True)]
    assert not any(problems), problems
    assert [len(plan.clusters) for plan in compiled.plans] == [1, 1]


@pytest.mark.parametrize("width", [16384, 65536, 262144])
@pytest.mark.parametrize("fn", [layer_norm, rms_norm], ids=["LayerNorm", "RMSNorm"])
def test_loads_are_under_way_and_nothing_spills(fn: Any, width: int) -> None:
    first = backward_programs(fn, width)[0]
    binary = compile_for(first.kernels[0], "sm_90")
    assert "of" in first.schedule and binary.asm["ptx"].count("cp.async.cg") and not binary.spills
    assert binary.asm["ptx"].count("bra WAIT") == 1  # two numbers are one letter


def test_sums_that_programs_cannot_exchange_are_refused_with_the_reason() -> None:
    with FakeTensorMode():
        x = torch.randn(64, 20000, dtype=torch.float64, device="cuda", requires_grad=True)
        w = torch.randn(20000, dtype=torch.float64, device="cuda", requires_grad=True)
        report = fc.explain(rms_norm, x, w, device="h200")
    assert "20000 sums over rows do not fit in registers (16384)" in " ".join(str(report.plans[1]).split())
