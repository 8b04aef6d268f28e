"""Results that are views of arguments which share memory, or of wrappers; gradients in inference mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import return_and_correct_aliasing

import fusion_compiler as fc
from fusion_compiler.errors import FusionWarning


def _both(base: Tensor, view: Tensor) -> Any:
    base.add_(1)
    view.mul_(2)
    return base.t(), view[:, 2], view.view(-1)[3:]


SHARED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "base written, view of the view": lambda b, v: (b.add_(100), v[0])[1],
    "view written, view of the base": lambda b, v: (v.mul_(3), b[2:, 1])[1],
    "both written, views of both": _both,
}


@pytest.mark.parametrize("backend", ["eager", "interpret"])
@pytest.mark.parametrize("function", SHARED.values(), ids=SHARED)
def test_views_of_arguments_that_share_memory(
    function: Callable[[Tensor, Tensor], Any], backend: str
) -> None:
    mine = torch.randn(4, 6, dtype=torch.float64)
    theirs = mine.clone()
    got = fc.compile(function, backend=backend)(mine, mine[1:])
    want = function(theirs, theirs[1:])
    torch.testing.assert_close(got, want, check_stride=True)
    torch.testing.assert_close(mine, theirs)
    offsets = [[t.storage_offset() for t in pytree.tree_leaves(r)] for r in (got, want)]
    assert offsets[0] == offsets[1]
    assert all(t.untyped_storage()._cdata == mine.untyped_storage()._cdata for t in pytree.tree_leaves(got))


class Two(Tensor):
    """A wrapper of two tensors."""

    a: Tensor
    b: Tensor

    @staticmethod
    def __new__(cls, a: Tensor, b: Tensor) -> Any:
        fields = {"dtype": a.dtype, "device": a.device, "requires_grad": a.requires_grad}
        return Tensor._make_wrapper_subclass(cls, a.shape, strides=a.stride(), **fields)  # type: ignore[attr-defined]

    def __init__(self, a: Tensor, b: Tensor) -> None:
        self.a, self.b = a, b

    def __repr__(self) -> str:  # type: ignore[override]
        return "Two(...)"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> Two:
        return Two(inner["a"], inner["b"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        parts = [
            func(*pytree.tree_map_only(Two, get, args), **pytree.tree_map_only(Two, get, kwargs))
            for get in (lambda t: t.a, lambda t: t.b)
        ]
        wrapped = Two(*parts) if isinstance(parts[0], Tensor) else parts[0]
        return return_and_correct_aliasing(func, args, kwargs, wrapped)


@pytest.mark.parametrize("part", [lambda x: x.t()[1:], lambda x: x[1:, 2]])
def test_a_view_of_a_wrapper_has_its_offset(part: Callable[[Tensor], Tensor]) -> None:
    x = Two(torch.randn(3, 4), torch.randn(3, 4))
    with pytest.warns(FusionWarning, match="a view of"):
        got = fc.compile(part, backend="interpret")(x)
    torch.testing.assert_close((got.a, got.b), (part(x.a), part(x.b)))


def test_enabling_gradients_in_inference_mode_makes_none() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            y = x.cos()
        return x.sin(), y, x[1:]

    fast, x = fc.compile(function, backend="interpret"), torch.randn(3, requires_grad=True)
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            got, want = fast(x), function(x)
            torch.testing.assert_close(got, want)
            flags = [[(t.requires_grad, t.is_inference()) for t in r] for r in (got, want)]
            assert flags[0] == flags[1]
