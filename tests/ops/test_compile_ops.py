"""Every operator of the table and the composites made of them, compiled, with PyTorch's own samples.

One graph for each operator and dtype holds its samples side by side: strided, sliced, expanded, 0-d
and empty tensors, NaN and infinities among them. Values and gradients are as close to float64 as
eager's, in the interpreter, and nothing stays an ATen call but what EAGER lists with its reason.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import fusion_compiler as fc
from fusion_compiler.ops.table import OPS
from tests.exactness import Compiled, not_as_close, wide
from tests.ops.test_ops import EXPRESSIONS, call, reaches_kernel, samples
from tests.samples import opinfo_samples

# What is made of the table's operators.
COMPOSITES = """
    softmax log_softmax nn.functional.softmin nn.functional.layer_norm nn.functional.group_norm
    nn.functional.batch_norm nn.functional.instance_norm nn.functional.rms_norm
    var std var_mean std_mean mean logsumexp norm linalg.vector_norm max min
    nn.functional.cross_entropy nn.functional.nll_loss nn.functional.mse_loss nn.functional.l1_loss
    nn.functional.smooth_l1_loss nn.functional.huber_loss nn.functional.binary_cross_entropy_with_logits
    nn.functional.kl_div nn.functional.gelu nn.functional.silu nn.functional.mish nn.functional.hardswish
    nn.functional.softplus nn.functional.hardsigmoid nn.functional.logsigmoid nn.functional.relu
    nn.functional.relu6 nn.functional.leaky_relu nn.functional.elu nn.functional.hardtanh nn.functional.glu
    nn.functional.embedding nn.functional.pad nn.functional.normalize nn.functional.cosine_similarity
    nan_to_num logaddexp square tril triu repeat roll chunk __getitem__ where aminmax
    unflatten movedim swapaxes hstack vstack take_along_dim
    zeros_like ones_like full_like new_full float half bfloat16 double long int bool
"""
NAMES = {spec.target.overloadpacket.__name__ for spec in OPS} | set(COMPOSITES.split())
# `uniform` is a draw of PyTorch's own (ours has a test of its own); what `empty` holds is not defined.
NAMES -= {"uniform", "empty", "empty_permuted", "empty_strided", "new_empty_strided"}
INFOS = [i for i in op_db if i.name in NAMES and i.variant_test_name != "nuc"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool)

EAGER = {  # ATen calls that remain, and why
    "aten.index_put.default": "a scatter with any number of values for one place",
    "aten.scatter_add.default": "a scatter with any number of values for one place",
    "aten.index_put_.default": "the same into memory that nothing else reads",
    "aten.scatter_add_.default": "the same into memory that nothing else reads",
    "aten.sort.stable": "the order in which a scatter adds up its rows",
    "aten.searchsorted.Tensor": "where the rows of each place begin in that order",
    "aten.scatter.src": "a scatter with any number of values for one place",
    "aten.scatter.value": "a scatter with any number of values for one place",
    "aten.index_add.default": "a scatter with any number of values for one place",
    "aten.embedding_dense_backward.default": "a scatter with any number of values for one place",
    "aten.embedding_renorm.default": "writes into a weight that it also reads",
    "aten.replication_pad1d_backward.default": "a scatter: the edge gathers all that was copied from it",
    "aten.replication_pad2d_backward.default": "a scatter: the edge gathers all that was copied from it",
    "aten.replication_pad3d_backward.default": "a scatter: the edge gathers all that was copied from it",
    "aten.digamma.default": "no device function computes it",
}


@dataclass(frozen=True)
class Call:
    """One operator on one sample; tensors are given apart, in the order of the sample's structure."""

    op: Callable[..., Any]
    structure: Any
    leaves: tuple[Any, ...]

    def __call__(self, tensors: Iterator[Tensor]) -> list[Tensor]:
        leaves = [next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.structure)
        return [r for r in tree_leaves(self.op(*args, **kwargs)) if isinstance(r, Tensor)]

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]


def relaid(x: Tensor, form: int) -> Tensor:
    """The same values laid out otherwise: as they are, transposed, every other element of a larger tensor."""
    if form % 3 == 0 or x.dim() == 0:
        copied = x.detach().clone(memory_format=torch.contiguous_format)
    elif form % 3 == 1:
        order = tuple(reversed(range(x.dim())))
        copied = x.detach().permute(order).contiguous().permute(order)
    else:
        larger = x.new_zeros([2 * s + 1 for s in x.shape])
        copied = larger[tuple(slice(1, None, 2) for _ in x.shape)].copy_(x.detach())
    return copied.requires_grad_(x.requires_grad)


def with_special_values(call: Call) -> Call:
    """NaN, infinities and zeros of both signs in place of the first elements of the first tensor.

    Not of the others: which infinities meet between a statistic and a weight is a matter of order.
    """

    def spoilt(x: Tensor) -> Tensor:
        copied = x.detach().clone(memory_format=torch.contiguous_format)
        values = copied.new_tensor([math.nan, math.inf, -math.inf, 0.0, -0.0])[: x.numel()]
        copied.view(-1)[: len(values)] = values
        return copied

    first = next(i for i, v in enumerate(call.leaves) if isinstance(v, Tensor) and v.is_floating_point())
    leaves = [spoilt(v) if i == first else copy.deepcopy(v) for i, v in enumerate(call.leaves)]
    return Call(call.op, call.structure, tuple(leaves))


def calls(info: Any, dtype: torch.dtype, most: int) -> list[Call]:
    """Samples of different shapes first; each in another layout."""
    by_kind: dict[object, list[Any]] = {}
    differentiable = info.supports_autograd and dtype.is_floating_point
    for sample in opinfo_samples(info, dtype, 40, differentiable):
        leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
        shapes = tuple((v.dim(), 0 in v.shape) for v in leaves if isinstance(v, Tensor))
        if sum(v.numel() for v in leaves if isinstance(v, Tensor)) <= 1024:
            by_kind.setdefault((shapes, len(leaves)), []).append(sample)
    ordered = [s for row in itertools.zip_longest(*by_kind.values()) for s in row if s is not None]
    calls_: list[Call] = []
    for form, sample in enumerate(ordered[:most]):
        leaves, structure = tree_flatten(((sample.input, *sample.args), sample.kwargs))
        arguments = tuple(relaid(v, form) if isinstance(v, Tensor) else v for v in leaves)
        calls_.append(Call(info.op, structure, arguments))
    return [c for c in calls_ if works(c)]


def works(call: Call) -> bool:
    """Eager takes it, and its result is made of tensors that kernels know."""
    tensors = call.tensors
    try:
        results = call(iter(tensors))
    except (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError):
        return False
    return bool(results) and not any(t.is_complex() for t in (*tensors, *results))


def run(call_list: Sequence[Call]) -> Callable[..., list[Tensor]]:
    def several(*tensors: Tensor) -> list[Tensor]:
        rest = iter(tensors)
        return [result for call in call_list for result in call(rest)]

    return several


def check(call_list: Sequence[Call], differentiate: bool, compiled: Any = None) -> Any:
    """Values, and gradients where asked for, of all calls in one graph. Returns what was compiled."""
    fn = run(call_list)
    compiled = compiled or Compiled(fn)
    tensors = [t for call in call_list for t in call.tensors]
    doubles = [w.requires_grad_(t.requires_grad) for w, t in zip(wide(tensors), tensors, strict=True)]
    outcomes = [
        outcome(f, inputs, differentiate) for f, inputs in ((compiled, tensors), (fn, tensors), (fn, doubles))
    ]
    largest = max(
        (t.double().abs().nan_to_num(0, 0, 0).max().item() for t in (*tensors, *outcomes[2]) if t.numel()),
        default=0.0,
    )
    for ours, eager, truth in zip(*outcomes, strict=True):
        single = torch.finfo(torch.float64 if ours.dtype is torch.float64 else torch.float32).eps
        problem = not_as_close(ours, eager, truth, 8 * single * largest)
        assert problem is None, problem
    return compiled


def outcome(fn: Callable[..., Any], inputs: Sequence[Tensor], differentiate: bool) -> list[Tensor]:
    """Results, then the gradients of the float inputs."""
    # Copies of the storage: strides stay, and what one run writes (running statistics) no other sees.
    leaves = [copy.deepcopy(x.detach()).requires_grad_(differentiate and x.requires_grad) for x in inputs]
    results = fn(*leaves)
    differentiable = [r for r in results if r.requires_grad]
    if not differentiable:
        return [r.detach() for r in results]
    generator = torch.Generator().manual_seed(3)
    cotangents = [(torch.randint(1, 8, r.shape, generator=generator) / 4).to(r.dtype) for r in differentiable]
    floats = [x for x in leaves if x.requires_grad]
    grads = torch.autograd.grad(differentiable, floats, cotangents, allow_unused=True)
    return [r.detach() for r in results] + [
        torch.zeros_like(x) if g is None else g for g, x in zip(grads, floats, strict=True)
    ]


def clustered(compiled: Compiled) -> None:
    unknown = compiled.eager_ops() - EAGER.keys()
    assert not unknown, [left for plan in compiled.plans for left in plan.leftovers]


@pytest.mark.sample(20)
@pytest.mark.parametrize("info", INFOS, ids=lambda info: info.formatted_name)
def test_values_and_gradients(info: Any) -> None:
    """In float32: two samples of different shapes, each in another layout, with their gradients."""
    if torch.float32 in info.dtypes and (drawn := calls(info, torch.float32, 2)):
        clustered(check(drawn, info.supports_autograd))


@pytest.mark.sample(20)
@pytest.mark.parametrize("info", INFOS, ids=lambda info: info.formatted_name)
def test_every_dtype(info: Any) -> None:
    """One sample of every other dtype, and one of NaN and infinities, in one graph."""
    drawn = [c for dtype in DTYPES if dtype in info.dtypes for c in calls(info, dtype, 1)]
    special = (with_special_values(c) for c in drawn if any(t.dtype is torch.float32 for t in c.tensors))
    if drawn := [*drawn, *(c for c in special if works(c))]:
        clustered(check(drawn, differentiate=False))


@pytest.mark.parametrize("name", ["softmax", "nn.functional.layer_norm", "index_select", "add", "argmax"])
def test_through_dynamo(name: str) -> None:
    """The whole way in: fc.compile of a function of the samples' tensors."""
    info = next(i for i in INFOS if i.name == name)
    drawn = calls(info, torch.float32, 2)
    compiled = check(drawn, info.supports_autograd, fc.compile(run(drawn), backend="interpret", strict=True))
    left = {item.target for plan in compiled.plan for item in plan.leftovers if item.rule != "library call"}
    assert not left - EAGER.keys()


MADE = {  # what an operand may be besides a tensor's elements
    "a result without a type of its own": torch.sign,
    "a number": lambda x: torch.full_like(x, 2),
    "one of two numbers": lambda x: torch.where(x > 0, torch.full_like(x, 2), torch.full_like(x, 1)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int8], ids=str)
@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_every_operator_takes_what_others_make(make: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    x = torch.tensor([[-3, 7, 2, 5, 1], [1, 2, 6, -1, 4]]).to(dtype)  # integers are divided by it
    drawn = [(s, next((v for v in samples(s, dtype) if reaches_kernel(s, v)), None)) for s in EXPRESSIONS]
    for start in range(0, len(drawn), 24):

        def several(x: Tensor, start: int = start) -> list[Tensor]:
            operand = make(x)
            return [
                call(s, {n: operand.to(t.dtype) if isinstance(t, Tensor) else t for n, t in values.items()})
                for s, values in drawn[start : start + 24]
                if values is not None
            ]

        for ours, eager, truth in zip(Compiled(several)(x), several(x), several(wide(x)), strict=True):
            problem = not_as_close(ours, eager, truth.to(torch.promote_types(truth.dtype, eager.dtype)))
            assert problem is None, problem


X = torch.tensor([1.0, -1.0, 0.0, -0.0, 3.0, math.nan, math.inf])
MINUS_ZEROS: dict[str, Callable[[Tensor], Tensor]] = {
    "x * -0.0": lambda x: x * -0.0,
    "x / -0.0": lambda x: x / -0.0,
    "x + -0.0": lambda x: x + -0.0,
    "0.0 - x": lambda x: 0.0 - x,
    "full": lambda x: torch.full_like(x, -0.0),
    "full of both": lambda x: torch.stack([torch.full_like(x, v) for v in (0.0, -0.0)]),
    "where": lambda x: torch.where(x > 0, -0.0, x),
    "where of both": lambda x: torch.where(x > 0, -0.0, 0.0),
    "masked_fill": lambda x: x.masked_fill(x > 0, -0.0),
    "pad": lambda x: torch.nn.functional.pad(x, (1, 1), value=-0.0),
    "copysign": lambda x: torch.copysign(x, -0.0),
    "copysign of a number": lambda x: torch.copysign(torch.ones_like(x), x),
    "atan2": lambda x: torch.atan2(torch.full_like(x, -0.0), -x),
    "pow": lambda x: (x * -0.0) ** -1.0,
    "trunc": lambda x: torch.trunc(x * 0.1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_zeros_keep_their_signs(dtype: torch.dtype) -> None:
    def several(x: Tensor) -> list[Tensor]:
        return [f(x) for f in MINUS_ZEROS.values()]

    x = X.to(dtype)
    for name, ours, eager in zip(MINUS_ZEROS, Compiled(several)(x), several(x), strict=True):
        numbers = ~eager.isnan()
        assert torch.equal(1 / ours[numbers], 1 / eager[numbers]), name


def test_kernels_that_differ_in_the_sign_of_a_zero_are_two() -> None:
    def both(x: Tensor, w: Tensor) -> Tensor:
        first = torch.where(x >= 0, 0.0, x) @ w
        return torch.where(first >= 0, -0.0, first)

    x, w = torch.ones(16, 16), torch.ones(16, 16)
    compiled = Compiled(both)
    assert compiled(x, w).signbit().all() and both(x, w).signbit().all()
    assert len(compiled.plans[0].clusters) == len(compiled.compiler.runners) == 2
