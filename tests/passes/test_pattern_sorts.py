"""Each sort of pattern in training: results, uses, aliases, sizes, numbers, roundings; kernels verified."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import fusion_compiler as fc
from fusion_compiler.errors import UserKernelError
from tests.passes.test_patterns import against, gate, root

rows, row = torch.ones(6, 10), torch.ones(10)
SORTS: dict[str, Any] = {
    "hint": fc.cluster_hint,
    "rewrite": lambda code, *example: fc.rewrite(code, lambda *a: code(*a), *example, name="same"),
    "kernel": lambda code, *example: fc.user_kernel(code, lambda *a: code(*a), *example, name="same"),
}


@pytest.mark.parametrize("sort", ["rewrite", "kernel"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bfloat16], ids=str)
def test_a_replacement_rounds_only_where_the_model_does(dtype: torch.dtype, sort: str) -> None:
    def code(x: Tensor) -> Tensor:
        return (x * 2).to(dtype)

    def run(x: Tensor) -> Tensor:
        return (x + x).to(dtype)

    make: Any = {"rewrite": fc.rewrite, "kernel": fc.user_kernel}[sort]
    x = torch.randn(4, 6)
    for user, text in (
        (lambda x: torch.sin(x * 2), "never matched: no op" if dtype is not torch.bfloat16 else "refused"),
        (lambda x: torch.sin((x * 2).to(dtype).float()), "done"),
    ):
        fast = fc.compile(user, patterns=(make(code, run, rows, name="round"),), backend="eager")
        torch.testing.assert_close(fast(x), user(x), rtol=1e-6, atol=1e-6)
        assert text in fast.plan[0].notes["round"]
        torch._dynamo.reset()


@pytest.mark.parametrize("sort", ["rewrite", "kernel"])
@pytest.mark.parametrize(
    ("code", "user"),
    [
        (lambda x, y: torch.add(y, torch.tanh(x), alpha=2), lambda x: torch.add(torch.tanh(x), x, alpha=2)),
        (lambda x, y: torch.tanh(x) - y, lambda x: x - torch.tanh(x)),
        (lambda x, y: torch.where(x > 0, torch.tanh(x), y), lambda x: torch.where(x > 0, x, torch.tanh(x))),
        (lambda x, y: torch.cat((torch.tanh(x), y), -1), lambda x: torch.cat((x, torch.tanh(x)), -1)),
        (lambda x, y: torch.tanh(x) * y, lambda x: torch.tanh(x) * x[:1]),
    ],
    ids=["alpha", "sub", "where", "cat", "broadcast"],
)  # fmt: skip
def test_operands_keep_their_places_where_these_count(sort: str, code: Any, user: Any) -> None:
    fast = fc.compile(user, patterns=(SORTS[sort](code, rows, rows),), backend="eager")
    x = torch.randn(4, 6)
    torch.testing.assert_close(fast(x), user(x))
    assert fast.plan[0].notes["same"].startswith("never matched: closest")


def test_a_replacement_for_floats_is_none_for_integers() -> None:
    fast = fc.compile(root, patterns=(fc.rewrite(root, torch.abs, rows),), backend="eager")
    x = torch.arange(-3, 3).reshape(2, 3)
    torch.testing.assert_close(fast(x), root(x))
    assert "of torch.int64 where the pattern has torch.float32" in fast.plan[0].notes["root"]


def test_a_gradient_of_the_wrong_shape_is_an_error_and_none_is_zero() -> None:
    def user(x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(x) * y * 0.7

    x, y = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6, requires_grad=True)
    for gradients, text in (
        (lambda x, y, s, out, g: (g.t(), g), r"its gradient of argument 0 is \[6, 4\], not \[4, 6\]"),
        (lambda x, y, s, out, g: (g,), "1 gradients for 2 floating tensors"),
    ):
        pattern = fc.user_kernel(gate, gate, rows, rows, 2.0, backward=gradients)
        fast = fc.compile(user, patterns=(pattern,), backend="eager")
        with pytest.raises(UserKernelError, match=text):
            fast(x, y).sum().backward()
        torch._dynamo.reset()
    pattern = fc.user_kernel(gate, gate, rows, rows, 2.0, backward=lambda x, y, s, out, g: (None, g))
    fc.compile(user, patterns=(pattern,), backend="eager")(x, y).sum().backward()
    assert x.grad is not None and y.grad is not None
    assert torch.equal(x.grad, torch.zeros_like(x)) and torch.equal(y.grad, torch.ones_like(y))


# -- verify=True ------------------------------------------------------------------------------------------


def halves(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """In two results, the second of which float32 rounds much."""
    h = x * w
    return torch.tanh(h), (h * h).sum(-1)


def halves_gradient(x: Tensor, w: Tensor, y: Tensor, z: Tensor, dy: Tensor, dz: Tensor) -> tuple[Tensor, ...]:
    dh = dy * (1 - y * y) + 2 * x * w * dz.unsqueeze(-1)
    return dh * w, (dh * x).sum(0)


def use_halves(x: Tensor, w: Tensor) -> Tensor:
    y, z = halves(x, w)
    return y * z.unsqueeze(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_right_kernel_is_verified_forward_and_backward(dtype: torch.dtype) -> None:
    def wide(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return tuple(v.to(dtype) for v in halves(x.double(), w.double()))

    pattern = fc.user_kernel(halves, wide, rows, row, backward=halves_gradient)
    fast = fc.compile(use_halves, patterns=(pattern,), backend="eager", verify=True, strict=True)
    x, w = torch.randn(4, 8, dtype=dtype, requires_grad=True), torch.randn(8, dtype=dtype, requires_grad=True)
    for _ in range(2):
        fast(x, w).sum().backward()
    of_halves = [r for r in fast.verification.rows if r.cluster.startswith("halves")]
    assert [(r.cluster, r.output) for r in of_halves] == [
        ("halves", "output 0"), ("halves", "output 1"),
        ("halves_backward", "gradient of argument 0"), ("halves_backward", "gradient of argument 1"),
    ]  # fmt: skip
    assert all(r.agrees and r.dtype is dtype and r.scale > 0 for r in of_halves)
    fast(x[:3], w)  # other sizes are verified at their first call
    assert len([r for r in fast.verification.rows if r.cluster == "halves"]) == 4


@pytest.mark.parametrize("part", ["forward", "backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_wrong_kernel_is_caught_and_its_code_used(part: str, dtype: torch.dtype) -> None:
    off = 1 + (1e-3 if dtype is torch.float32 else 0.2)

    def run(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y, z = halves(x, w)
        return y, z * (off if part == "forward" else 1)

    def gradient(*args: Tensor) -> tuple[Tensor, ...]:
        dx, dw = halves_gradient(*args)
        return dx, dw * (off if part == "backward" else 1)

    pattern = fc.user_kernel(halves, run, rows, row, backward=gradient)
    what, name = {
        "forward": ("output 1", "halves"),
        "backward": ("gradient of argument 1", "halves_backward"),
    }[part]
    fast = fc.compile(use_halves, patterns=(pattern,), backend="eager", verify=True)
    x, w = torch.randn(4, 8, dtype=dtype, requires_grad=True), torch.randn(8, dtype=dtype, requires_grad=True)
    with pytest.warns(fc.FusionWarning, match=f"kernel {name} does not compute.*{what} differs.*\n.*where="):
        y = fast(x, w)
        y.sum().backward()
    assert "WRONG" in str(fast.verification)
    twins = [v.detach().clone().requires_grad_() for v in (x, w)]
    z = use_halves(*twins)
    z.sum().backward()
    for _ in range(2):  # the code's results, then and later
        for a, b in [(y, z), *((v.grad, t.grad) for v, t in zip((x, w), twins, strict=True))]:
            allowed = 16 * torch.finfo(dtype).eps * float(b.detach().abs().max())  # less than the fault
            assert float((a - b).detach().abs().max()) <= allowed
        x.grad = w.grad = None
        y = fast(x, w)
        y.sum().backward()
    torch._dynamo.reset()
    strict = fc.compile(use_halves, patterns=(pattern,), backend="eager", verify=True, strict=True)
    with pytest.raises(UserKernelError, match="what to do: correct run= or backward="):
        strict(x, w).sum().backward()


def test_a_kernel_is_not_compared_without_verify() -> None:
    pattern = fc.user_kernel(root, lambda x: x, rows)
    fast = fc.compile(root, patterns=(pattern,), backend="eager")
    x = torch.randn(4, 8)
    assert torch.equal(fast(x), x) and not fast.verification.rows


def test_a_backward_may_use_autograd() -> None:
    def gradient(x: Tensor, y: Tensor, scale: float, out: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        fresh = [v.requires_grad_() for v in (x, y)]
        return torch.autograd.grad(gate(*fresh, scale), fresh, g)

    pattern = fc.user_kernel(gate, gate, rows, rows, 2.0, backward=gradient)
    against(
        lambda x, y: torch.tanh(x) * y * 0.7,
        torch.randn(4, 6),
        torch.randn(4, 6),
        patterns=(pattern,),
        verify=True,
    )


# -- each sort: results, uses, aliases, sizes, numbers, training ------------------------------------------


def two_results(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    e = torch.exp(x)
    return e * y, e + y


def uses_two(x: Tensor, y: Tensor) -> Tensor:
    a, b = two_results(x, y)
    return (a + b) * a - b * torch.cos(a)


def is_argument(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, torch.exp(torch.sin(x))


def is_view(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.exp(torch.sin(x)), x.view(-1)


def views_of_one(x: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.exp(torch.sin(x))
    return y, y.view(-1)


def one_twice(x: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.exp(torch.sin(x))
    return y, y


def numbered(x: Tensor, scale: float, dim: int) -> Tensor:
    return torch.softmax(x * scale, dim)


MATRIX: dict[str, tuple[Any, tuple[Any, ...], Any, int]] = {
    "several results, several uses": (two_results, (rows, rows), uses_two, 1),
    "several matches": (root, (rows,), lambda x, y: root(x) * root(y) + root(x + 1), 3),
    "a result that is an argument": (
        is_argument, (rows,), lambda x, y: (lambda a, b: a.cos() + b * y)(*is_argument(torch.tanh(x))), 1,
    ),
    "a result that is an input of the model": (
        is_argument, (rows,), lambda x, y: (lambda a, b: a.cos() + b * y)(*is_argument(x)), 1,
    ),
    "a result that is a view of an argument": (
        is_view, (rows,), lambda x, y: (lambda a, b: a * y + b.cos().view(a.shape))(*is_view(x.tanh())), 1,
    ),
    "a result that is a view of another": (
        views_of_one, (rows,), lambda x, y: (lambda a, b: a * y + b.cos().view(a.shape))(*views_of_one(x)), 1,
    ),
    "a result twice": (one_twice, (rows,), lambda x, y: (lambda a, b: a.cos() * y + b)(*one_twice(x)), 1),
    "numbers": (numbered, (rows, 0.5, -1), lambda x, y: numbered(x, 0.25, -1) + numbered(y, 3, -1), 2),
}  # fmt: skip


@pytest.mark.sample(8)
@pytest.mark.parametrize("sort", SORTS)
@pytest.mark.parametrize("case", MATRIX)
def test_every_sort_in_training(case: str, sort: str) -> None:
    code, example, user, matches = MATRIX[case]
    dynamic = bool((list(MATRIX).index(case) + list(SORTS).index(sort)) % 2)  # half of them each
    pattern = SORTS[sort](code, *example)
    inputs = torch.randn(4, 6), torch.randn(4, 6)
    fast = against(user, *inputs, patterns=(pattern,), dynamic=dynamic, backend="eager")
    text = fast.plan[0].notes[pattern.name]
    counts = re.findall(r"done(?: x(\d+))?: |matched (?:once|(\d+) times)", text)
    assert sum(int(a or b or 1) for a, b in counts) == matches and "refused" not in text
    if dynamic:
        more = torch.randn(7, 5), torch.randn(7, 5)
        torch.testing.assert_close(fast(*more), user(*more))
        assert len(fast.plan) <= 3  # forward twice at most: with gradients, and without


@pytest.mark.parametrize("sort", ["rewrite", "kernel"])
def test_a_view_of_an_argument_still_shares_its_memory(sort: str) -> None:
    def user(x: Tensor) -> Tensor:
        y, flat = is_view(x)
        return y.sum() + flat.sum(), flat  # type: ignore[return-value]

    fast = fc.compile(user, patterns=(SORTS[sort](is_view, rows),), backend="eager")
    x = torch.randn(4, 6)
    _, flat = fast(x)
    assert "done" in fast.plan[0].notes["same"] and flat.data_ptr() == x.data_ptr()


def test_a_size_cut_in_halves_matches_where_it_is_known() -> None:
    def half(x: Tensor) -> Tensor:
        return torch.cat((torch.tanh(x[..., x.shape[-1] // 2 :]), x[..., : x.shape[-1] // 2]), -1)

    for dynamic, text in ((False, "matched once"), (True, "where the pattern has slice(…, 1, n10/2)")):
        fast = fc.compile(
            lambda x: half(x + 1) * 2,
            patterns=(fc.cluster_hint(half, rows),),
            backend="eager",
            dynamic=dynamic,
        )
        fast(torch.randn(4, 6))
        assert text in fast.plan[0].notes["half"]
        torch._dynamo.reset()
