"""Values under a padding: views of them are followed up to where the padding begins."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.exactness import Compiled, not_as_close, wide


def padded(x: Tensor) -> Tensor:
    """x: [n, 3 * 6] -> [n, 3 * 8]: each group of 6 padded with zeros."""
    return F.pad(x.unflatten(1, (3, 6)), (0, 2)).flatten(1)


def cut(x: Tensor) -> Tensor:
    return x.unflatten(1, (3, 8))[..., :6].flatten(1)


def between(x: Tensor, scale: Tensor) -> Tensor:
    return padded(cut(x).sin() * scale)


def shifted(x: Tensor, scale: Tensor) -> Tensor:
    y = (cut(x) * scale).unflatten(1, (3, 6))
    return F.pad(y, (3, 1)) + F.pad(y.exp(), (1, 3)) + F.pad(y, (4, 0), value=2.5)


def both_ways(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The same values with their padding and without, and a sum that needs all of them."""
    y = cut(x) * scale
    return padded(y - y.sum(1, keepdim=True)), y - y.amax(1, keepdim=True)


def two_sides(x: Tensor, scale: Tensor) -> Tensor:
    return F.pad((cut(x) * scale).unflatten(1, (3, 6)), (2, 2, 1, 0)).cos()


def normed(x: Tensor, scale: Tensor) -> Tensor:
    """Reductions along the padded dimension, whose operands count everywhere."""
    y = torch.softmax((cut(x) * scale).unflatten(1, (3, 6)), -1)
    return F.pad(y, (0, 4)) * F.pad(y.cumsum(-1), (2, 2))


def normed_between(x: Tensor, scale: Tensor) -> Tensor:
    """A reduction of padded values, which counts their padding too, of which a part is padded."""
    y = torch.softmax(F.pad((cut(x) * scale).unflatten(1, (3, 6)), (0, 2)), -1)
    return F.pad(y[..., :6], (0, 2))


@pytest.mark.parametrize(
    "fn", [between, shifted, both_ways, two_sides, normed, normed_between], ids=lambda f: f.__name__
)
def test_values_and_gradients_are_exact(fn: Callable[[Tensor, Tensor], object]) -> None:
    inputs = (torch.randn(5, 24), torch.randn(18))
    exact = gradients(fn, wide(inputs))
    for our, their, truth in zip(gradients(Compiled(fn), inputs), gradients(fn, inputs), exact, strict=True):
        assert (problem := not_as_close(our, their, truth)) is None, problem


def gradients(fn: Callable[..., object], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    leaves = [i.detach().requires_grad_() for i in inputs]
    results = fn(*leaves)
    results = [*results] if isinstance(results, tuple | list) else [results]
    total = torch.stack([(r.sin() * r).sum() for r in results]).sum()
    return [*(r.detach() for r in results), *torch.autograd.grad(total, leaves)]


def test_one_kernel_reads_through_the_cut_and_stores_the_padding() -> None:
    compiled = Compiled(between)
    compiled(torch.randn(5, 24), torch.randn(18))
    (plan,) = compiled.plans
    assert len(plan.clusters) == 1 and len(plan.clusters[0].outputs) == 1


@pytest.mark.parametrize("last", [False, True])
def test_the_gradient_of_a_padding_is_a_view(last: bool) -> None:
    x = torch.randn(2, 3, 4, 5)
    x = x.to(memory_format=torch.channels_last) if last else x

    def fn(x: Tensor) -> Tensor:
        return torch.constant_pad_nd(x.sin(), [-1, 0, 0, -2, -1, 0])

    compiled = Compiled(fn)
    ours, eager = compiled(x), fn(x)
    torch.testing.assert_close(ours, eager)
    assert ours.stride() == eager.stride()
    (plan,) = compiled.plans
    assert not [name for name in plan.dag.order if "constant_pad_nd" in str(plan.dag.op(name).target)]
