"""Decompositions check what eager checks, and lay out their results as eager does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion_compiler as fc

BACKENDS = ("auto", "interpret")
pytestmark = pytest.mark.filterwarnings("ignore:the graph is on cpu")


def ints(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


def floats(*shape: int) -> Tensor:
    return torch.randn(shape)


# Calls that FakeTensors accept and eager refuses.
REFUSED: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "an activation of integers": (lambda x: F.hardswish(x) * 2, (ints(3, 4),)),
    "a loss of integers": (F.soft_margin_loss, (ints(5), ints(5))),
    "a weight of integers": (lambda x, w: F.layer_norm(x, (4,), w), (floats(3, 4), ints(4))),
    "bits of floats": (lambda x, y: (x & y) + 1, (ints(0, 4), floats(0, 4))),
    "bools": (lambda x: torch.fmod(x, x) * 2, (ints(3, 4) > 2,)),
    "a product of two dtypes": (
        lambda x, y, z: torch.addmm(x, y, z) * 2,
        (ints(3, 3), floats(3, 4), floats(4, 3)),
    ),
    "rows of another length": (lambda x, y: x.index_add(0, ints(2), y), (floats(3, 2), floats(2))),
    "a slice of another shape": (lambda x, y: x.select_scatter(y, 0, 0) * 2, (floats(3, 4), floats(5))),
    "an index that is no integer": (lambda x, i: x.index_select(0, i) * 2, (floats(3, 4), floats(2))),
    "no such dimension": (lambda x: F.softmax(x, 3), (floats(4, 0),)),
    "a larger weight": (
        lambda x, w: F.binary_cross_entropy_with_logits(x, x, pos_weight=w),
        (floats(3, 4), floats(2, 3, 4)),
    ),
    "a probability above one": (F.binary_cross_entropy, (torch.tensor([0.5, 1.5]), torch.tensor([0.0, 1.0]))),
    "a target below zero": (F.binary_cross_entropy, (torch.tensor([0.5, 0.5]), torch.tensor([0.0, -1.0]))),
    "an index beyond what is unpooled": (
        lambda x, i: F.max_unpool1d(x, i, 2),
        (floats(1, 2, 3), ints(1, 2, 3) + 9),
    ),
    "a class that is not there": (lambda x, t: F.nll_loss(x, t), (floats(2, 3), ints(2) + 2)),
    "a place that is not there": (
        lambda x, i: x.scatter_add(1, i, torch.ones(2, 1)),
        (floats(2, 3), ints(2, 1) + 2),
    ),
    "a random choice of a probability above one": (torch.bernoulli, (torch.tensor([0.5, 1.5]),)),
    "a negative power of integers": (lambda x: x**-1, (ints(3) + 1,)),
    "values of another dtype": (
        lambda x, i, y: x.index_put((i,), y),
        (floats(3, 4).double(), ints(2), floats(2, 4)),
    ),
    "a target without a pixel": (F.nll_loss, (floats(2, 3, 2, 3), ints(2, 2, 2) % 2)),
    "an index beyond what is gathered": (lambda x, i: x.gather(1, i) * 2, (floats(2, 2), ints(2, 2))),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", REFUSED)
def test_a_call_that_eager_refuses_raises_its_exception(name: str, backend: str) -> None:
    function, arguments = REFUSED[name]
    with pytest.raises((RuntimeError, IndexError)) as eager:
        function(*arguments)
    with pytest.raises(eager.type):
        fc.compile(function, backend=backend)(*arguments)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bounds", [(-2, 3), (None, 300), (300, None), (None, -1), (-300, 300)], ids=str)
def test_bounds_that_a_dtype_cannot_hold(bounds: tuple[int | None, int | None], backend: str) -> None:
    """They wrap around, are errors or are no bounds, by PyTorch's version."""

    def bounded(x: Tensor) -> Tensor:
        return x.clamp(*bounds) + 1

    x = torch.tensor([0, 1, 5, 200, 255], dtype=torch.uint8)
    fast = fc.compile(bounded, backend=backend)
    try:
        expected = bounded(x)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            fast(x)
    else:
        assert torch.equal(fast(x), expected)


def test_index_fill_of_a_number_of_rows_that_differs() -> None:
    def filled(x: Tensor, rows: Tensor) -> Tensor:
        return x.index_fill(1, rows, 2.0) + 1

    fast = fc.compile(filled, backend="interpret", strict=True, dynamic=True)
    for count in (5, 7):
        x, rows = torch.randn(count, 1).t() @ torch.randn(count, 1), torch.tensor([0])
        assert torch.equal(fast(x, rows), filled(x, rows))
        wide = torch.randn(count, 1)
        assert torch.equal(fast(wide, rows), filled(wide, rows))


@pytest.mark.filterwarnings("ignore:TorchDynamo breaks")
def test_the_gradient_of_what_is_filled_in() -> None:
    """PyTorch 2.11 finds the distinct indices for it, whose number depends on data."""

    def filled(x: Tensor, i: Tensor, value: Tensor) -> Tensor:
        return x.index_fill(1, i, value)

    x, i, value = torch.randn(5, 5), torch.tensor([0, 2, 2, 1]), torch.tensor(1.5, requires_grad=True)
    ours, eager = (f(x, i, value) for f in (fc.compile(filled, backend="interpret"), filled))
    torch.testing.assert_close(*(torch.autograd.grad((y * x).sum(), value)[0] for y in (ours, eager)))


def test_binary_cross_entropy_is_still_one_kernel_with_its_gradient() -> None:
    x, target = torch.rand(64, 40).requires_grad_(), torch.rand(64, 40)
    fast = fc.compile(F.binary_cross_entropy, backend="interpret")
    loss = fast(x, target)
    torch.testing.assert_close(loss.double(), F.binary_cross_entropy(x.double(), target.double()))
    (ours,) = torch.autograd.grad(loss, x)
    wide = x.detach().double().requires_grad_()
    (truth,) = torch.autograd.grad(F.binary_cross_entropy(wide, target.double()), wide)
    torch.testing.assert_close(ours.double(), truth, rtol=1e-5, atol=1e-7)
    assert all(left.target == "aten._assert_async.msg" for plan in fast.plan for left in plan.leftovers)


def test_two_checks_and_the_draws_between_them_are_in_one_plan() -> None:
    """The second draw is in one kernel with the values that wait for the first check."""

    def twice(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        return torch.bernoulli(p) * 2, torch.bernoulli(q) * 3

    fast = fc.compile(twice, backend="interpret", strict=True)
    first, second = fast(torch.ones(2, 3), torch.zeros(3))
    assert torch.equal(first, torch.full((2, 3), 2.0)) and torch.equal(second, torch.zeros(3))
    with pytest.raises(RuntimeError, match="between 0 and 1"):
        fast(torch.ones(2, 3), torch.full((3,), 2.0))


LAID_OUT: dict[str, Callable[[Tensor], Tensor]] = {
    "slice_scatter": lambda x: x.slice_scatter(x.narrow(0, 0, 1) + 1, 0, 2, 3),
    "select_scatter": lambda x: x.select_scatter(x.select(1, 0) * 2, 1, 3),
    "diagonal_scatter": lambda x: x.diagonal_scatter(x.diagonal() * 2),
    "index_fill": lambda x: x.index_fill(1, torch.tensor([0, 2, 2]), 0.5),
    "cummax": lambda x: x.cummax(0)[0],
    "copysign": lambda x: torch.copysign(x, x.detach().contiguous() - 1),
    "xlogy": lambda x: torch.xlogy(x, (x.detach().contiguous() ** 2 + 1)),
    "nll_loss": lambda x: F.nll_loss(x, torch.ones(5, 3, dtype=torch.int64), reduction="none"),
    "channel_shuffle": lambda x: F.channel_shuffle(x.unsqueeze(1).transpose(1, 2), 3),
    "a power of a number": lambda x: torch.pow(2.0, x),
    "ldexp": lambda x: torch.ldexp(x, x.detach()[:1].transpose(0, -1).contiguous().transpose(0, -1)),
    "logical_xor": lambda x: torch.logical_xor(x[:1].detach(), x[:, :1].detach().clone().mul_(0)) + x,
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "pad by nothing": lambda x: F.pad(x, (0, 0)),
    "pad by less than nothing": lambda x: F.pad(x, (0, 0, -1, 0)),
    "floor_divide": lambda x: x.detach() // (x.detach().contiguous() ** 2 + 1) + x,
}
INPUTS: dict[str, Callable[[], Tensor]] = {
    "expanded": lambda: torch.randn(5, 1, 3).expand(5, 6, 3),
    "transposed": lambda: torch.randn(3, 6, 5).transpose(0, 2),
    "strided": lambda: torch.randn(10, 6, 6)[::2, :, ::2],
}


@pytest.mark.parametrize("operator", LAID_OUT)
@pytest.mark.parametrize("layout", INPUTS)
def test_results_are_laid_out_as_eagers_are(operator: str, layout: str) -> None:
    function, x = LAID_OUT[operator], INPUTS[layout]().requires_grad_()
    ours, eager = fc.compile(function, backend="interpret")(x), function(x)
    torch.testing.assert_close(ours, eager)
    assert ours.stride() == eager.stride()
    gradients = (torch.autograd.grad((y * y).sum(), x)[0] for y in (ours, eager))
    torch.testing.assert_close(*gradients)


def test_strides_of_dimensions_of_one_element_decide_no_layout() -> None:
    x, y = torch.randn(2, 1, 2, 2).permute(3, 2, 1, 0), torch.randint(1, 6, (2, 2, 1, 2))
    fast = fc.compile(lambda x, y: torch.div(x, y, rounding_mode="floor"), backend="interpret", strict=True)
    assert torch.equal(fast(x, y), torch.div(x, y, rounding_mode="floor"))
