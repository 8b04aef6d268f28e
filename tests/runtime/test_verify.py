"""verify=True finds kernels that compute something else; numerics="eager" rounds where eager rounds."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion_compiler as fc
from fusion_compiler.compiler.runners import Runners
from fusion_compiler.errors import FusionWarning, KernelError
from fusion_compiler.runtime.verify import compare
from tests import models


def test_a_model_is_verified_once() -> None:
    model, batch = models.small("llama", dropout=False)
    fast = fc.compile(model, backend="interpret", verify=True, strict=True)
    assert "nothing has been verified" in str(fast.verification)
    fast(**batch).loss.backward()
    rows = fast.verification.rows
    assert len(rows) == sum(len(c.outputs) for plan in fast.plan for c in plan.clusters)
    assert all(row.agrees for row in rows) and any(row.error > 0 for row in rows)
    fast(**batch).loss.backward()
    assert len(fast.verification.rows) == len(rows)
    assert "WRONG" not in str(fast.plan) and rows[0].cluster in str(fast.plan)


def wrong_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel computes a sine where the model has a hyperbolic tangent."""
    emit = Runners.emit

    def broken(self: Any, *arguments: Any) -> Any:
        def spoilt(kernel: Any) -> Any:
            return dataclasses.replace(kernel, source=kernel.source.replace("fm.tanh(", "libdevice.sin("))

        programs = emit(self, *arguments)
        return tuple(dataclasses.replace(p, kernels=tuple(map(spoilt, p.kernels))) for p in programs)

    monkeypatch.setattr(Runners, "emit", broken)


def function(x: Tensor) -> Tensor:
    return torch.tanh(x.double()) + 1


def test_a_wrong_kernel_is_found_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_kernels(monkeypatch)
    x = torch.randn(5, 7)
    unverified = fc.compile(function, backend="interpret")
    assert not torch.allclose(unverified(x), function(x)), "the injected fault must show"
    fast = fc.compile(function, backend="interpret", verify=True)
    with pytest.warns(FusionWarning, match=r"(?s)failed to verify: .* differs .*this part runs eager"):
        first = fast(x)
    assert torch.equal(first, function(x)) and torch.equal(fast(x + 1), function(x + 1))
    assert "WRONG" in str(fast.verification)
    strict = fc.compile(function, backend="interpret", verify=True, strict=True)
    with pytest.raises(KernelError, match="failed to verify"):
        strict(x)


@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_without_kernels_nothing_is_verified_and_a_warning_says_so(backend: str) -> None:
    x = torch.randn(5, 7)
    fast = fc.compile(function, backend=backend, verify=True)
    with pytest.warns(FusionWarning) as warned:
        assert torch.equal(fast(x), function(x))
    assert sum("no kernel to compare" in str(w.message) for w in warned) == 1
    assert not fast.verification.rows and "no kernel to compare" in str(fast.verification)


def test_what_counts_as_different() -> None:
    one = torch.tensor([1.0, torch.nan, torch.inf, -2.0])
    assert compare("c", "o", one, one).agrees
    for other in (
        torch.tensor([1.0, 0.0, torch.inf, -2.0]),
        torch.tensor([1.0, torch.nan, -torch.inf, -2.0]),
        torch.tensor([1.0, torch.nan, torch.inf, -2.0001]),
    ):
        assert not compare("c", "o", other, one).agrees
    assert not compare("c", "o", one[:1], one).agrees
    assert not compare("c", "o", torch.tensor([3]), torch.tensor([4])).agrees
    assert compare("c", "o", torch.empty(0), torch.empty(0)).agrees


def test_what_cancels_in_eager_is_no_error() -> None:
    """Eager's result is rounding alone, against which ours is held in float64."""

    def centred(x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)).sum(-1)

    x = torch.randn(8, 64).bfloat16() + 3
    fast = fc.compile(centred, backend="interpret", verify=True, strict=True)
    want = centred(x)
    assert (fast(x) - want).abs().max() > 0.5 * want.abs().max()
    (row,) = fast.verification.rows
    assert row.agrees and row.error < 1e-3


# -- numerics="eager" -------------------------------------------------------------------------------------


def chain(x: Tensor, y: Tensor) -> Tensor:
    z = x * y + x
    return (z - y) * z.abs().sqrt() / (y * y + 1)


def norm(x: Tensor, y: Tensor) -> Tensor:
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().amax(-1, keepdim=True) + 1e-3)  # a maximum has no order
    return y * scaled.to(x.dtype) + x


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fn", [chain, norm])
def test_sixteen_bit_results_are_those_of_eager(fn: Any, dtype: torch.dtype) -> None:
    x, y = (torch.randn(33, 65).to(dtype) for _ in range(2))
    assert torch.equal(fc.compile(fn, backend="interpret", numerics="eager", strict=True)(x, y), fn(x, y))
    torch._dynamo.reset()
    fused = fc.compile(fn, backend="interpret", strict=True)(x, y)
    assert not torch.equal(fused, fn(x, y)), "in float32 throughout, some bits differ"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_functions_differ_by_one_rounding_at_most(dtype: torch.dtype) -> None:
    """Transcendental functions are other implementations: now and then their rounding is another one."""
    x = torch.randn(64, 64).to(dtype)

    def fn(x: Tensor) -> Tensor:
        return torch.tanh(F.silu(x) + x)

    got = fc.compile(fn, backend="interpret", numerics="eager", strict=True)(x)
    want = fn(x)
    assert float((got != want).double().mean()) < 0.02
    ulps = (got.view(torch.int16).int() - want.view(torch.int16).int()).abs()
    assert int(ulps.max()) <= 1


def test_sixteen_bits_on_the_way_to_a_float32_result_are_no_error() -> None:
    """As autocast leaves them: eager rounds between the operators, a kernel does not."""

    def mixed(x: Tensor) -> Tensor:
        return (torch.exp(x.bfloat16()) * 1.1 - x.bfloat16()).float() * 3

    x = torch.randn(64, 32)
    fast = fc.compile(mixed, backend="interpret", verify=True, strict=True)
    torch.testing.assert_close(fast(x), mixed(x.double()).float(), rtol=0.05, atol=0.05)
    (row,) = fast.verification.rows
    assert row.agrees and row.error > 64 * torch.finfo(torch.float32).eps * row.scale
