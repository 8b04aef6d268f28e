"""Every decomposition against eager, values and gradients, and what is left when it is done."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import fusion_compiler as fc
from fusion_compiler.ops.decompositions import reductions
from fusion_compiler.ops.decompositions.table import decomposition_table
from fusion_compiler.ops.table import Kind, spec_of
from tests.exactness import Compiled
from tests.samples import opinfo_samples

aten = torch.ops.aten
TABLE = decomposition_table()

NAMES = """
    nn.functional.layer_norm native_layer_norm nn.functional.rms_norm nn.functional.group_norm
    nn.functional.batch_norm native_batch_norm _native_batch_norm_legit
    _batch_norm_with_update nn.functional.instance_norm nn.functional.local_response_norm
    softmax log_softmax _softmax_backward_data nn.functional.softmin
    nn.functional.gelu nn.functional.silu nn.functional.mish nn.functional.hardswish nn.functional.softplus
    nn.functional.hardsigmoid nn.functional.logsigmoid nn.functional.softsign nn.functional.tanhshrink
    nn.functional.threshold nn.functional.prelu nn.functional.hardshrink nn.functional.softshrink
    nn.functional.elu nn.functional.selu nn.functional.celu nn.functional.leaky_relu nn.functional.relu
    nn.functional.relu6 nn.functional.hardtanh nn.functional.glu nn.functional.rrelu
    nn.functional.nll_loss nn.functional.cross_entropy nn.functional.mse_loss nn.functional.l1_loss
    nn.functional.smooth_l1_loss nn.functional.huber_loss nn.functional.binary_cross_entropy
    nn.functional.binary_cross_entropy_with_logits nn.functional.kl_div nn.functional.poisson_nll_loss
    nn.functional.gaussian_nll_loss nn.functional.soft_margin_loss nn.functional.margin_ranking_loss
    nn.functional.cosine_embedding_loss nn.functional.hinge_embedding_loss
    nn.functional.cosine_similarity nn.functional.normalize nn.functional.pairwise_distance
    nn.functional.upsample_nearest nn.functional.pixel_shuffle nn.functional.pad nn.functional.one_hot
    mean sum prod amax amin argmax argmin all any aminmax nansum nanmean logsumexp count_nonzero
    var var_mean std std_mean norm linalg.vector_norm max min
    dist renorm lerp addcmul addcdiv masked_fill where clamp clamp_min clamp_max nan_to_num logaddexp
    bucketize xlogy sinc logit frac sgn sign round floor ceil trunc rsub float_power square isclose isfinite
    tril triu repeat tile roll flip chunk split split_with_sizes unbind __getitem__ narrow select
    select_scatter slice slice_scatter stack cat hstack diagonal expand unflatten movedim swapaxes squeeze
    unsqueeze index_select gather take_along_dim zeros_like ones_like full_like new_zeros new_full
    pow add sub mul div remainder fmod floor_divide maximum minimum fmax fmin hypot atan2 sigmoid tanh
    exp log erf erfc sqrt rsqrt reciprocal abs neg sin cos logical_not bitwise_not
"""
OPINFOS = [info for info in op_db if info.name in NAMES.split() and info.variant_test_name != "nuc"]

# Two samples are of functions that PyTorch warns about.
pytestmark = [
    pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning"),
    pytest.mark.filterwarnings("ignore:`nn.functional.upsample_nearest` is deprecated"),
]

# What stays an ATen call on purpose: scatters, and gathers' gradients with many positions in a row.
OPAQUE = {
    "aten.scatter.src",
    "aten.scatter_add.default",
    "aten.index_put.default",
    "aten.sort.stable",  # of numbers by which rows are added up
    "aten.searchsorted.Tensor",
    "aten.diagonal_scatter.default",
    "aten.upsample_nearest1d_backward.default",
    "aten.upsample_nearest2d_backward.default",
    "aten.upsample_nearest3d_backward.default",
    "aten.replication_pad1d_backward.default",
    "aten.replication_pad2d_backward.default",
    "aten.replication_pad3d_backward.default",
}
# Only without functionalization: buffers about to be filled, constants of Python, and numbers that
# the operator's own Python code asks for.
HERE = {
    "aten.empty.memory_format",
    "aten.empty_permuted.default",
    "aten.new_empty_strided.default",
    "aten.as_strided.default",
    "aten._efficientzerotensor.default",
    "aten.lift_fresh.default",
    "aten._assert_async.msg",  # of probabilities
    "aten._local_scalar_dense.default",
}


class Decompose(TorchDispatchMode):
    """Applies the table under autograd, as AOTAutograd does, and keeps what is left."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[tuple[Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        decompose = TABLE.get(func)
        if decompose is not None:
            with self:
                result = decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        if func._can_decompose():
            with self:
                return func.decompose(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if not func._schema.is_mutable:  # AOTAutograd makes these functional first
            self.left.append((func, result))
        return result


def leaves(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def forward_and_gradients(
    info: Any, sample: Any, dtype: torch.dtype | None = None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    def fresh(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        widened = value.to(dtype or value.dtype) if value.is_floating_point() else value
        return widened.detach().clone().requires_grad_(value.requires_grad)

    args, kwargs = tree_map(fresh, ([sample.input, *sample.args], sample.kwargs))
    outputs = leaves(info.op(*args, **kwargs))
    smooth = [out for out in outputs if out.requires_grad and out.numel()]
    inputs = [leaf for leaf in leaves((args, kwargs)) if leaf.requires_grad]
    # Exact in every dtype: otherwise rounding of the cotangents would count as an error.
    weights = [((torch.arange(out.numel()) * 5 % 13 - 4) / 8).view(out.shape).to(out.dtype) for out in smooth]
    gradients = torch.autograd.grad(smooth, inputs, weights, allow_unused=True) if smooth and inputs else ()
    return outputs, [torch.zeros(()) if gradient is None else gradient for gradient in gradients]


def flat(results: tuple[list[torch.Tensor], list[torch.Tensor]]) -> list[torch.Tensor]:
    return [*results[0], *results[1]]


def compare(mine: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> None:
    """As near to the result in float64 as eager is, or as near as assert_close asks."""
    assert mine.dtype is eager.dtype and mine.shape == eager.shape
    if not mine.is_floating_point():
        assert torch.equal(mine, eager)
        return
    absolute, relative = (1e-5, 1.3e-6) if mine.dtype is torch.float32 else (1e-7, 1e-7)
    exact = torch.where(exact.to(mine.dtype).isinf(), exact.to(mine.dtype), exact)

    def excess(result: torch.Tensor) -> float:
        """The worst error in units of what is allowed anyway; NaN beside a number is infinitely wrong."""
        same = (result == exact) | (result.isnan() & exact.isnan())
        error = (result - exact).abs() / (absolute + relative * exact.abs())
        return torch.where(same, 0.0, error.nan_to_num(math.inf)).amax().item() if result.numel() else 0.0

    assert excess(mine) <= max(1.0, excess(eager)), (mine, eager, exact)


@pytest.mark.sample(200)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool, torch.int64], ids=str)
@pytest.mark.parametrize("info", OPINFOS, ids=lambda info: info.formatted_name)
def test_against_eager(info: Any, dtype: torch.dtype) -> None:
    if dtype not in info.dtypes:
        pytest.skip("not an operator of this dtype")
    grad = dtype.is_floating_point and info.supports_autograd
    for sample in opinfo_samples(info, dtype, 8, grad):
        expected = forward_and_gradients(info, sample)
        mode = Decompose()
        with mode:
            got = forward_and_gradients(info, sample)
        truth = forward_and_gradients(info, sample, torch.float64) if dtype is torch.float32 else expected
        for mine, eager, exact in zip(*map(flat, (got, expected, truth)), strict=True):
            compare(mine, eager, exact)
        for target, _ in mode.left:
            spec = spec_of(target)
            assert spec is not None or str(target) in OPAQUE | HERE, target


# Sums in the user's own dtype, and operators that eager itself composes of such sums.
OWN_SUMS = """
    sum nansum prod nanmean nn.functional.cross_entropy nn.functional.kl_div nn.functional.l1_loss
    nn.functional.cosine_similarity
    nn.functional.cosine_embedding_loss nn.functional.hinge_embedding_loss nn.functional.margin_ranking_loss
"""


@pytest.mark.sample(60)
@pytest.mark.parametrize("info", OPINFOS, ids=lambda info: info.formatted_name)
def test_no_reduction_returns_16_bits(info: Any) -> None:
    """Sums inside a decomposition are in float32, so that they cannot overflow."""
    if torch.float16 not in info.dtypes or info.name in OWN_SUMS.split():
        pytest.skip("no 16-bit floats, or a reduction itself")
    for sample in opinfo_samples(info, torch.float16, 6):
        mode = Decompose()
        with mode:
            info.op(sample.input, *sample.args, **sample.kwargs)
        for target, result in mode.left:
            spec = spec_of(target)
            if spec is not None and spec.kind is Kind.REDUCTION and spec.combine in ("sum", "prod"):
                assert result.dtype not in (torch.float16, torch.bfloat16), target


def decomposed(function: Any, *args: Any, **kwargs: Any) -> tuple[Any, set[Any]]:
    mode = Decompose()
    with mode:
        result = function(*args, **kwargs)
    return result, {target for target, _ in mode.left}


@pytest.mark.parametrize("with_weight", [True, False])
@pytest.mark.parametrize("shape", [[6], [5, 6], [4, 5, 6]])
def test_fused_rms_norm(shape: list[int], with_weight: bool) -> None:
    """The operator that CUDA uses, against the formula in float64 and autograd's own gradients."""
    x, grad = torch.randn(4, 5, 6), torch.randn(4, 5, 6)
    weight = torch.randn(shape) if with_weight else None
    dims = tuple(range(-len(shape), 0))
    wide = [None if t is None else t.double().requires_grad_() for t in (x, weight)]
    assert wide[0] is not None
    expected = wide[0] * torch.rsqrt(wide[0].square().mean(dims, keepdim=True) + 1e-6)
    expected = expected if wide[1] is None else expected * wide[1]
    (out, rstd), _ = decomposed(aten._fused_rms_norm.default, x, shape, weight, 1e-6)
    torch.testing.assert_close(out, expected.float())
    mask = [True, with_weight]
    results, left = decomposed(aten._fused_rms_norm_backward.default, grad, x, shape, rstd, weight, mask)
    expected.backward(grad.double())
    for mine, source in zip(results, wide, strict=True):
        assert (mine is None) == (source is None)
        if source is not None:
            torch.testing.assert_close(mine, source.grad.float())
    assert all(spec_of(target) is not None for target in left)


@pytest.mark.parametrize(
    "function", ["mean", "var", "std", "logsumexp", "norm", "layer_norm", "mse", "softmax"]
)
def test_no_overflow_inside(function: str) -> None:
    """float16 values whose sum or square float16 does not hold, but whose result it does."""
    x = torch.full((2, 4096), 300.0, dtype=torch.float16)
    x[:, ::2] = 301.0
    wide = x.double()
    evaluate = {
        "mean": lambda x: x.mean(-1),
        "var": lambda x: x.var(-1),
        "std": lambda x: x.std(-1),
        "logsumexp": lambda x: x.logsumexp(-1),
        "norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
        "layer_norm": lambda x: torch.nn.functional.layer_norm(x, (4096,)),
        "mse": lambda x: torch.nn.functional.mse_loss(x, torch.zeros_like(x) + 200),
        "softmax": lambda x: x.softmax(-1),
    }[function]
    mine, _ = decomposed(evaluate, x)
    torch.testing.assert_close(mine, evaluate(wide).half(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_backward_neither_gathers_nor_scatters(weighted: bool, reduction: str) -> None:
    logits = torch.randn(6, 11, requires_grad=True)
    target = torch.tensor([0, 3, -100, 10, 5, 5])
    weight = torch.rand(11) if weighted else None
    mode = Decompose()
    with mode:
        loss = torch.nn.functional.cross_entropy(logits, target, weight, reduction=reduction)
        mode.left.clear()
        loss.sum().backward()
    specs = [spec_of(target) for target, _ in mode.left if str(target) not in HERE]
    gathers = 1 if weighted else 0  # of the class weights, by target
    assert [s for s in specs if s is None] == []
    assert sum(s.target is aten.index.Tensor for s in specs if s) == gathers
    assert not any(s.target is aten.gather.default for s in specs if s)


def test_slices_and_picks_in_backward_are_padding() -> None:
    x = torch.randn(5, 7, requires_grad=True)
    mode = Decompose()
    with mode:
        (x[1:4, 2:].sum() + 2 * x[-1].sum() + 3 * x.select(1, 2).sum()).backward()
    expected = torch.zeros(5, 7)
    expected[1:4, 2:] += 1
    expected[-1] += 2
    expected[:, 2] += 3
    assert x.grad is not None
    torch.testing.assert_close(x.grad, expected)
    assert aten.constant_pad_nd.default in {target for target, _ in mode.left}
    assert aten.slice_scatter.default not in {target for target, _ in mode.left}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("kind", ["src", "value", "add"])
def test_scatter_of_one_in_a_row_is_a_choice(kind: str, turned: bool) -> None:
    x, index, src = torch.randn(4, 6), torch.tensor([[2], [0], [5], [5]]), torch.randn(4, 1)
    x = x.t().contiguous().t() if turned else x
    call = {
        "src": lambda: x.scatter(1, index, src),
        "value": lambda: x.scatter(1, index, 2.5),
        "add": lambda: x.scatter_add(1, index, src),
    }[kind]
    mine, left = decomposed(call)
    assert torch.equal(mine, call()) and mine.stride() == call().stride()
    assert all(spec_of(target) is not None for target in left)


def test_bools_add_and_multiply_logically() -> None:
    x, y = torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])
    for function in (torch.add, torch.mul, torch.maximum, torch.minimum):
        mine, left = decomposed(function, x, y)
        assert torch.equal(mine, function(x, y))
        assert left <= {aten.logical_or.default, aten.logical_and.default}


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16], ids=str)
def test_what_is_scattered_into_keeps_its_dtype(dtype: torch.dtype) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return torch.select_scatter(x * 2, y * 5, 1, -1)

    x, y = (torch.randn(3, 4) * 9).to(dtype), torch.randn(3)
    ours = fc.compile(fn, backend="interpret", strict=True)(x, y)
    assert ours.dtype is dtype and torch.equal(ours, fn(x, y))


def test_what_is_scattered_into_a_result_that_shares_memory_is_as_in_eager() -> None:
    """In which an element of a window is one of the next window, too: the last one written stays."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        return torch.select_scatter(x.unfold(0, 8, 1), y, -1, -1)

    x, y = torch.randn(3, 16).t(), torch.randn(9, 3)
    fast = fc.compile(fn, backend="interpret")
    ours = fast(x, y)
    assert torch.equal(ours, fn(x, y)) and ours.stride() == fn(x, y).stride()
    assert any("share memory" in left.reason for plan in fast.plan for left in plan.leftovers)


NORMS = {
    aten.native_layer_norm.default: lambda x, w: (x, [6], None if w is None else w[:6], None, 1e-5),
    aten.native_group_norm.default: lambda x, w: (x, None if w is None else w[:4], None, 2, 4, 6, 2, 1e-5),
}


@pytest.mark.parametrize("weight", [None, "float32", "own"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_statistics_have_eagers_dtypes(norm: Any, dtype: torch.dtype, weight: str | None) -> None:
    if weight == "float32" and dtype is torch.float64:
        pytest.skip("eager refuses it")
    x = torch.randn(2, 4, 6, dtype=dtype)
    w = None if weight is None else torch.randn(8, dtype=dtype if weight == "own" else torch.float32)
    for ours, eager in zip(TABLE[norm](*NORMS[norm](x, w)), norm(*NORMS[norm](x, w)), strict=True):
        assert ours.dtype is eager.dtype and ours.shape == eager.shape
    with FakeTensorMode():
        args = NORMS[norm](torch.empty(2, 4, 6, dtype=dtype, device="cuda"), None)
        assert [t.dtype for t in TABLE[norm](*args)] == [t.dtype for t in norm(*args)]


def test_the_backward_of_a_norm_reads_what_no_dtype_has_rounded() -> None:
    compiled = Compiled(lambda x: torch.nn.functional.layer_norm(x, (64,)))
    x = (torch.randn(8, 64, dtype=torch.bfloat16) + 100).requires_grad_()
    compiled(x).sum().backward()
    forward, backward = compiled.plans
    saved = {m.dtype for c in forward.clusters for o in c.outputs for m in forward.dag.op(o).outputs}
    assert saved == {torch.bfloat16, torch.float32}  # the result, and mean and deviation
    read = {backward.dag.op(n).outputs[0].dtype for c in backward.clusters for n in c.inputs}
    assert read == {torch.bfloat16, torch.float32}


def slopes(fn: Any, x: Tensor) -> Tensor:
    """The derivative of an element-wise function at each element."""
    leaf = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(fn(leaf).sum(), leaf)
    return slope


@pytest.mark.parametrize("target", [1.0, -1.0, 0.5])
def test_soft_margin_gradients_keep_their_digits(target: float) -> None:
    """sigmoid(t x) - 1 is 0 from t x = 17 on."""

    def fn(x: Tensor) -> Tensor:
        return torch.nn.functional.soft_margin_loss(x, torch.full_like(x, target), reduction="none")

    x = torch.linspace(-200, 200, 4001)
    truth = slopes(fn, x.double())
    ours, _ = decomposed(slopes, fn, x)
    assert ((ours - truth).abs() <= 1e-6 * truth.abs() + 1e-37).all()


@pytest.mark.parametrize("name", ["elu", "selu", "celu", "hardswish", "smooth_l1_loss"])
def test_gradients_at_nan_are_nan(name: str) -> None:
    function = getattr(torch.nn.functional, name)
    zeros = {"target": torch.zeros(5)} if name == "smooth_l1_loss" else {}
    x = torch.tensor([math.nan, -3.0, 0.0, 3.0, 1.0])
    ours, _ = decomposed(slopes, lambda x: function(x, **zeros), x)
    assert ours[0].isnan()  # eager's last few elements, which fill no vector, are another matter
    torch.testing.assert_close(ours[1:], slopes(lambda x: function(x, **zeros), x)[1:])


@pytest.mark.parametrize("shape", [(3, 0), (0,), (2, 0, 4)])
def test_logsumexp_of_nothing(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape)
    for dim in range(len(shape)):
        if shape[dim] == 0:
            mine, _ = decomposed(torch.logsumexp, x, dim)
            assert torch.equal(mine, torch.logsumexp(x, dim))


@pytest.mark.parametrize("format", [torch.channels_last, torch.contiguous_format], ids=str)
def test_group_norm_keeps_the_memory_format(format: torch.memory_format) -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.nn.functional.group_norm(x, 2)

    x = torch.randn(2, 4, 5, 6).contiguous(memory_format=format)
    for mine, eager in ((decomposed(fn, x)[0], fn(x)), (decomposed(slopes, fn, x)[0], slopes(fn, x))):
        assert mine.stride() == eager.stride()


MODES = [("nearest", 2, 0), ("bilinear", 2, 1), ("nearest-exact", 1, 1), ("trilinear", 3, 1)]


@pytest.mark.parametrize(("mode", "rank", "calls"), MODES)
def test_interpolation_is_fused_and_its_gradient_is_eagers(mode: str, rank: int, calls: int) -> None:
    """But for that of whole blocks, which is their sum."""

    def fn(x: Tensor) -> Tensor:
        return torch.nn.functional.interpolate(x * 2, scale_factor=2, mode=mode).sin()

    x = torch.randn(2, 3, *[4] * rank)
    torch.testing.assert_close(fc.compile(fn, backend="interpret", strict=True)(x), fn(x))
    fast = fc.compile(fn, backend="interpret")
    torch.testing.assert_close(slopes(fast, x), slopes(fn, x))
    left = [item.target for plan in fast.plan for item in plan.leftovers]
    assert len(left) == calls and all(target.endswith("_backward.default") for target in left)
    assert torch.ops.aten.upsample_nearest2d.vec.py_kernels  # others trace as before


def far_off(x: Tensor) -> Tensor:
    """The part that is looked at beforehand is as far from the rest as it can be."""
    x[0] += 1e4
    return x


COLUMNS = {
    "plain": lambda x: x,
    "large mean": lambda x: x * 0.1 + 300,
    "constant": lambda x: torch.full_like(x, 0.3),
    "far off": far_off,
    "not a number": lambda x: x.index_fill(0, torch.tensor([3]), math.nan),
    "infinite": lambda x: x.index_fill(0, torch.tensor([3]), math.inf),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_the_variance_of_large_columns_takes_one_reading(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a value near the mean: no second look at what no cache holds, and no digits lost."""
    monkeypatch.setattr(reductions, "LARGE", 1 << 12)
    x = COLUMNS[kind](torch.randn(128, 5, 3, 7)).to(memory_format=torch.channels_last)
    fn = fc.compile(lambda x: torch.var_mean(x, (0, 2, 3)), backend="interpret", strict=True)
    (var, mean), (true_var, true_mean) = fn(x), torch.var_mean(x.double(), (0, 2, 3))
    grown = reductions.SAMPLE if kind == "far off" else 1  # what rounding errors grow by
    for ours, true, size in ((var, true_var, true_var), (mean, true_mean, true_mean.abs() + true_var.sqrt())):
        finite = true.isfinite()
        assert torch.equal(finite, ours.isfinite())
        assert ((ours - true).abs() <= grown * 2**-21 * size + 1e-12)[finite].all()
    sums = [n for plan in fn.plan for n in plan.dag.order if "sum" in n]
    assert len(sums) == 3, "a part's mean, and two sums of one reading"


@pytest.mark.parametrize("batch", [(), (3,)])
def test_a_product_over_one_is_element_wise(batch: tuple[int, ...]) -> None:
    """As of frequencies and positions: no call of a library, whatever the memory order of its operands."""

    def turned(x: Tensor, y: Tensor) -> Tensor:
        return torch.matmul(x, y.mT).mT.cos()

    compiled = Compiled(turned)
    x, y = (torch.randn(*batch, size, 1, dtype=torch.float64) for size in (5, 7))
    got = compiled(x.float(), y.float())
    truth = turned(x, y)
    assert got.stride() == truth.stride()
    torch.testing.assert_close(got.double(), truth, rtol=1e-5, atol=1e-5)
    (plan,) = compiled.plans
    assert len(plan.clusters) == 1 and not [left for left in plan.leftovers if left.rule == "library call"]


def triangle(left: Tensor, right: Tensor) -> Tensor:
    return torch.einsum("bikc,bjkc->bijc", left.sin(), right.cos())


def test_matrices_whose_elements_follow_each_other_nowhere_are_laid_out_by_clusters() -> None:
    left, right = (torch.randn(2, n, 20, 3, dtype=torch.float64, requires_grad=True) for n in (18, 24))
    fast = fc.compile(triangle, backend="interpret", strict=True)
    truth, ours = triangle(left, right), fast(left, right)
    torch.testing.assert_close(ours, truth)
    grad = torch.randn(truth.shape, dtype=torch.float64)
    for a, b in zip(*(torch.autograd.grad(y, (left, right), grad) for y in (ours, truth)), strict=True):
        torch.testing.assert_close(a, b)
    for plan in fast.plan:
        products = [plan.dag.op(call.subject) for call in plan.leftovers]
        operands = [plan.dag.op(name).outputs[0] for op in products for name in op.inputs]
        assert operands and all(1 in meta.stride[-2:] for meta in operands), plan.name
    assert len(fast.plan[0].clusters) + len(fast.plan[1].clusters) <= 5, "each is laid out once"


@pytest.mark.parametrize(("rows", "columns"), [(16, 24), (24, 1), (17, 24)])
def test_products_of_few_rows_read_their_operands_as_they_lie(rows: int, columns: int) -> None:
    x, y = torch.randn(20, rows, 3).permute(2, 1, 0), torch.randn(20, columns, 3).permute(2, 0, 1)
    graph = make_fx(torch.bmm, decomposition_table=decomposition_table())(x, y)
    torch.testing.assert_close(graph(x, y), torch.bmm(x, y))
    copies = graph.graph.find_nodes(op="call_function", target=aten.clone.default)
    assert len(copies) == (2 if min(rows, columns) > 16 else 0)
