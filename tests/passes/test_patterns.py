"""Patterns: what matches, what is refused, and that what replaces is equal, forward and backward."""

from __future__ import annotations

import copy
import json
import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import fusion_compiler as fc
from fusion_compiler.errors import InvalidPatternError, RewriteNotEqualError
from fusion_compiler.ir.dag import TensorMeta, build
from fusion_compiler.passes.patterns import indexed, trace
from fusion_compiler.passes.patterns.match import find
from fusion_compiler.passes.patterns.trace import traced_gradient, traced_hint
from fusion_compiler.patterns import DEFAULT_PATTERNS, ClusterHint
from tests import models

rows, row = torch.ones(6, 10), torch.ones(10)


def names(fast: Any) -> list[str]:
    return [c.name for plan in fast.plan for c in plan.clusters]


def targets(fast: Any) -> list[str]:
    plan = fast.plan[0]
    return [str(plan.dag.op(n).target) for n in plan.dag.order]


def against(fn: Any, *inputs: Tensor, backend: str = "interpret", **options: Any) -> Any:
    """The compiled function, after its outputs and gradients agreed with float64 eager as well as eager's."""
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    exact = [x.double().requires_grad_() if x.is_floating_point() else x for x in inputs]
    fast = fc.compile(fn, backend=backend, strict=True, **options)
    got, want = fast(*leaves), fn(*exact)
    got, want = (v if isinstance(v, tuple) else (v,) for v in (got, want))
    weights = [torch.randn(v.shape) for v in want]
    torch.autograd.backward(got, weights)
    torch.autograd.backward(want, [w.double() for w in weights])
    pairs = [
        *zip(got, want, strict=True),
        *((a.grad, b.grad) for a, b in zip(leaves, exact, strict=True) if b.is_floating_point()),
    ]
    for a, b in pairs:
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    return fast


# -- names ------------------------------------------------------------------------------------------------


def test_default_patterns_name_the_kernels_of_models() -> None:
    for name, expected in (
        ("llama", {"rms_norm", "swiglu", "rope"}),
        ("bert", {"layer_norm", "gelu", "cross_entropy"}),
    ):
        model, batch = models.small(name, dropout=False)
        fast = fc.compile(model, backend="eager")
        fast(**batch).loss.backward()
        patterns = {
            p for plan in fast.plan for c in plan.clusters if c.pattern for p in c.pattern.split(", ")
        }
        assert expected <= patterns and any(p.endswith("_backward") for p in patterns)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(4, 12), (2, 3, 12)], ids=str)
def test_a_name_holds_for_other_dtypes_and_leading_dimensions(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    weight, bias = torch.randn(12, dtype=dtype), torch.randn(12, dtype=dtype)
    fast = fc.compile(lambda x, r: F.layer_norm(x + r, (12,), weight, bias), backend="eager")
    fast(torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype))
    assert names(fast) == ["add_layer_norm"]
    assert fast.plan[0].clusters[0].pattern == "layer_norm"


def test_a_size_in_the_maths_must_agree() -> None:
    """The mean over half of the row is no norm."""

    def nearly(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / 7 + 1e-6)

    fast = fc.compile(nearly, backend="eager")
    fast(torch.randn(4, 8))
    assert fast.plan[0].clusters[0].pattern is None


def test_operands_of_commutative_operators_are_tried_both_ways() -> None:
    def swapped(x: Tensor, w: Tensor) -> Tensor:
        return (torch.rsqrt(1e-5 + x.pow(2).mean(-1, keepdim=True)) * x) * w

    fast = fc.compile(swapped, backend="eager")
    fast(torch.randn(4, 8), torch.randn(8))
    assert names(fast) == ["rms_norm"]


def test_matching_looks_only_where_the_operators_are() -> None:
    """Time is counted in comparisons: none for patterns whose operators do not occur."""
    gm = make_fx(lambda x: torch.tanh(x) + x)(torch.randn(3))
    hints = [
        t(p) for p in DEFAULT_PATTERNS if isinstance(p, ClusterHint) for t in (traced_gradient, traced_hint)
    ]
    assert find(hints, build(gm)) == ()


@pytest.mark.parametrize("hint", DEFAULT_PATTERNS, ids=lambda hint: hint.name)
def test_recording_a_pattern_gives_what_make_fx_traces(
    hint: ClusterHint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ops(traced: trace.Traced) -> list[tuple[object, ...]]:
        dag = traced.dag
        kept = [op for op in map(dag.op, dag.order) if "alias" not in str(op.target)]
        place = {op.name: i for i, op in enumerate(kept)}
        read = [tuple(place[indexed.bare(dag, i)] for i in op.inputs) for op in kept]
        return [(op.target, r, op.outputs, op.kwargs) for op, r in zip(kept, read, strict=True)]

    def by_make_fx(run: Any, fakes: Any, table: Any) -> torch.fx.GraphModule:
        return make_fx(run, table)(*fakes)

    traces = (trace.traced_hint.__wrapped__, trace.traced_gradient.__wrapped__)
    recorded = [ops(traced(hint)) for traced in traces]
    monkeypatch.setattr(trace, "_recorded", by_make_fx)
    assert recorded == [ops(traced(hint)) for traced in traces]


def test_where_sees_shapes_dtypes_and_numbers() -> None:
    seen: list[tuple[Any, ...]] = []

    def where(x: TensorMeta, scale: float) -> bool:
        seen.append((x.shape, x.dtype, scale))
        return scale > 1

    def code(x: Tensor, scale: float) -> Tensor:
        return torch.tanh(x) * scale

    hint = fc.cluster_hint(code, rows, 2.0, name="scaled", where=where)
    fast = fc.compile(
        lambda x: (torch.tanh(x) * 0.25).sum(-1) + (torch.tanh(x + 1) * 3.0).sum(-1),
        patterns=(hint,),
        backend="eager",
    )
    fast(torch.randn(5, 7))
    assert [s[2] for s in seen] == [0.25, 3.0] and seen[0][:2] == ((5, 7), torch.float32)
    assert sum(c.pattern == "scaled" for p in fast.plan for c in p.clusters) == 1


def test_the_first_of_two_patterns_wins() -> None:
    def code(x: Tensor) -> Tensor:
        return torch.tanh(torch.sin(x))

    first, second = (fc.cluster_hint(code, rows, name=n) for n in ("first", "second"))
    for patterns, expected in (((first, second), "first"), ((second, first), "second")):
        fast = fc.compile(code, patterns=patterns, backend="eager")
        fast(torch.randn(3, 4))
        assert names(fast) == [expected]
        torch._dynamo.reset()


def test_a_hint_that_cannot_be_one_cluster_says_why() -> None:
    def code(x: Tensor) -> Tensor:
        return torch.tanh(x @ torch.sin(x))

    fast = fc.compile(
        code, patterns=(fc.cluster_hint(code, torch.ones(6, 6), name="around"),), backend="eager"
    )
    fast(torch.randn(8, 8))
    note = fast.plan[0].notes["around"]
    assert note.endswith("; refused: convex: an op between them needs one and feeds the other")


def test_a_pattern_prints_as_its_code() -> None:
    assert "torch.log_softmax(x, -1)" in str(DEFAULT_PATTERNS[1])


# -- rewrites ---------------------------------------------------------------------------------------------


def root(x: Tensor) -> Tensor:
    return torch.sqrt(x * x)


def test_a_rewrite_is_applied_and_right() -> None:
    rule = fc.rewrite(root, torch.abs, rows, name="root")
    fast = against(
        lambda x, y: torch.sin(torch.sqrt(x * x)) + y, torch.randn(3, 5), torch.randn(3, 5), patterns=(rule,)
    )
    assert not any("sqrt" in t for t in targets(fast)) and any("abs" in t for t in targets(fast))
    assert "done: 2 ops replaced" in fast.plan[0].notes["root"]


def test_several_outputs() -> None:
    def before(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.exp(x) * torch.exp(-x) + x, torch.exp(x)

    def after(x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, torch.exp(x)

    rule = fc.rewrite(before, after, rows, name="both", domain="finite")  # of infinity one side makes NaN

    def user(x: Tensor) -> Tensor:
        e = torch.exp(x)
        return (e * torch.exp(-x) + x) * torch.tanh(e)

    fast = against(user, torch.randn(4, 6), patterns=(rule,))
    assert "done" in fast.plan[0].notes["both"] and not any("neg" in t for t in targets(fast))


def test_a_value_that_others_read_keeps_its_ops() -> None:
    rule = fc.rewrite(root, torch.abs, rows, name="root")

    def user(x: Tensor) -> Tensor:
        square = x * x
        return torch.sqrt(square) + square

    fast = against(user, torch.randn(4, 6) + 3, patterns=(rule,))
    assert "refused: mul is read by add too" in fast.plan[0].notes["root"]


def test_what_is_written_in_place_is_left_alone() -> None:
    rule = fc.rewrite(root, torch.abs, rows, name="root")

    def user(x: Tensor) -> Tensor:
        y = x * 2
        square = y * y
        y.add_(5)
        return torch.sqrt(square) + y

    fast = fc.compile(user, patterns=(rule,), backend="interpret", strict=True)
    x = torch.randn(4, 6)
    torch.testing.assert_close(fast(x), user(x))
    assert "refused: its tensors are changed in place" in fast.plan[0].notes["root"]


def test_casts_are_looked_through_and_the_maths_stays_wide() -> None:
    rule = fc.rewrite(lambda x: torch.exp(x) * torch.exp(x), lambda x: torch.exp(2 * x), rows, name="square")

    def user(x: Tensor) -> Tensor:
        wide = torch.exp(x.float())
        return (wide * wide).to(x.dtype)

    fast = fc.compile(user, patterns=(rule,), backend="interpret")
    x = torch.randn(8, 8, dtype=torch.bfloat16)
    assert "done" in (fast(x), fast.plan[0].notes["square"])[1]
    error = (fast(x).double() - torch.exp(2 * x.double())).abs() / torch.exp(2 * x.double())
    assert float(error.max()) <= 2**-8


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        (root, lambda x: x, "output 0"),
        (lambda x: torch.relu(x), lambda x: torch.relu(x).detach(), "gradient of argument 0"),
        (lambda x: x.sum(-1) / 10, lambda x: x.mean(-1), "output 0"),  # equal at the example's size alone
        (lambda x: x + 1, lambda x: x + (1 + 1e-6), "output 0"),
        (lambda x: x.sum(-1), lambda x: x.sum(-1, keepdim=True), "output 0"),
    ],
)  # fmt: skip
def test_an_unequal_rewrite_is_an_error_with_a_counterexample(before: Any, after: Any, what: str) -> None:
    state = torch.get_rng_state()
    with pytest.raises(RewriteNotEqualError, match=f"(?s){what}.*counterexample.*manual_seed"):
        fc.compile(torch.sin, patterns=(fc.rewrite(before, after, rows, name="wrong"),))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_counterexample_fits_a_line_and_shows_outputs_and_gradients() -> None:
    rule = fc.rewrite(lambda x, s: x * s, lambda x, s: x * s + torch.relu(x), rows, 2.0, name="wrong")
    with pytest.raises(RewriteNotEqualError) as caught:
        fc.compile(torch.sin, patterns=(rule,))
    text = str(caught.value)
    values = re.search(r"counterexample: x = (.*), s = 2\n", text)
    assert values is not None
    x = torch.tensor(json.loads(values[1]), dtype=torch.float64)
    assert x.shape == (2, 2)
    lists = re.search(r"output 0 is (.*), then (.*)\n.*of argument 0 of the sum is (.*), then (.*)\n", text)
    assert lists is not None
    before, after, gradient, other = (
        torch.tensor(json.loads(t), dtype=torch.float64) for t in lists.groups()
    )
    assert torch.equal(before, 2 * x) and torch.equal(after, 2 * x + torch.relu(x))
    assert torch.equal(gradient, torch.full_like(x, 2)) and torch.equal(other, 2 + (x > 0).double())
    assert "manual_seed(0): element" in text and "what to do: correct the replacement" in text


def test_a_difference_in_the_last_digits_is_printed_with_them() -> None:
    rule = fc.rewrite(lambda x: x + 1, lambda x: x + (1 + 1e-6), rows, name="wrong")
    with pytest.raises(RewriteNotEqualError) as caught:
        fc.compile(torch.sin, patterns=(rule,))
    shown = re.search(r"output 0 is (.*), then (.*)\n", str(caught.value))
    assert shown is not None and shown[1] != shown[2]


def test_code_that_takes_the_examples_sizes_alone_has_the_example_as_counterexample() -> None:
    rule = fc.rewrite(lambda x: x.view(3, 20).sum(-1), lambda x: x.view(20, 3).sum(0), rows, name="wrong")
    with pytest.raises(RewriteNotEqualError, match=r"counterexample: normal inputs of \[6, 10\].*element"):
        fc.compile(torch.sin, patterns=(rule,))


def test_narrowing_casts_do_not_hide_or_make_differences() -> None:
    rule = fc.rewrite(
        lambda x: (x.float() * 2.0).to(torch.bfloat16),
        lambda x: (x + x).to(torch.bfloat16),
        rows,
        name="twice",
    )
    fc.compile(torch.sin, patterns=(rule,))


# -- kernels ----------------------------------------------------------------------------------------------


def gate(x: Tensor, y: Tensor, scale: float) -> Tensor:
    return torch.tanh(x) * y * scale


class Calls:
    """A kernel that counts."""

    def __init__(self) -> None:
        self.forward = self.backward = 0

    def run(self, x: Tensor, y: Tensor, scale: float) -> Tensor:
        self.forward += 1
        return x.tanh().mul(y).mul(scale)

    def gradient(self, x: Tensor, y: Tensor, scale: float, out: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        self.backward += 1
        return g * y * scale * (1 - x.tanh() ** 2), g * x.tanh() * scale


@pytest.mark.parametrize("backward", [False, True], ids=["derived gradient", "own gradient"])
def test_a_kernel_replaces_its_pattern(backward: bool) -> None:
    calls = Calls()
    pattern = fc.user_kernel(gate, calls.run, rows, rows, 2.0, backward=calls.gradient if backward else None)

    def user(x: Tensor, y: Tensor) -> Tensor:
        return torch.sin(torch.tanh(x) * y * 0.7) + x

    fast = against(user, torch.randn(4, 6), torch.randn(4, 6), patterns=(pattern,))
    assert (calls.forward, calls.backward) == (1, int(backward))
    left = [x.reason for x in fast.plan[0].leftovers]
    assert left == ["a kernel of the user's"]


def test_a_kernel_of_the_wrong_shape_is_an_error() -> None:
    pattern = fc.user_kernel(gate, lambda x, y, scale: x.sum(), rows, rows, 2.0)
    fast = fc.compile(lambda x, y: torch.tanh(x) * y * 0.7, patterns=(pattern,), backend="eager")
    with pytest.raises(fc.FusionError, match=r"result 0 is .*, not \[4, 6\]"):
        fast(torch.randn(4, 6), torch.randn(4, 6))


def test_a_kernel_whose_result_is_its_argument() -> None:
    pattern = fc.user_kernel(lambda x: torch.relu(torch.relu(x)), lambda x: x, rows, name="same")
    fast = fc.compile(lambda x: torch.relu(torch.relu(x)) + 1, patterns=(pattern,), backend="eager")
    x = torch.rand(3, 4)
    torch.testing.assert_close(fast(x), x + 1)


def test_patterns_in_a_model_that_trains() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            return torch.tanh(h) * x * math.pi

    model = Block()
    calls = Calls()
    fast = fc.compile(
        copy.deepcopy(model),
        patterns=(fc.user_kernel(gate, calls.run, rows, rows, 2.0),),
        backend="interpret",
    )
    x = torch.randn(5, 8)
    fast(x).sum().backward()
    model(x).sum().backward()
    assert calls.forward == 1
    for a, b in zip(fast.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)


def nothing(x: Tensor) -> Tensor:
    return x


def nonsense(x: Any) -> Any:
    return x.nonsense


# -- wrong forms ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: fc.cluster_hint("softmax", rows), "code is str, not a function"),
        (lambda: fc.cluster_hint(torch.sin), "no example argument is a tensor"),
        (lambda: fc.cluster_hint(root, rows, rows), "does not fit its code"),
        (lambda: fc.cluster_hint(root, rows, name="two words"), "must be a Python identifier"),
        (lambda: fc.rewrite(root, None, rows), "after is NoneType, not a function"),
        (lambda: fc.user_kernel(root, torch.abs, rows, backward=3), "backward is int, not a function"),
        (lambda: fc.compile(root, patterns=fc.DEFAULT_PATTERNS[0]), "give a tuple"),
        (lambda: fc.compile(root, patterns=("softmax",)), "str is none of cluster_hint"),
        (lambda: fc.compile(root, patterns=(fc.cluster_hint(nothing, rows),)), "computes nothing"),
        (lambda: fc.compile(root, patterns=(fc.cluster_hint(nonsense, rows),)), "nonsense"),
        (lambda: fc.compile(root, patterns=(fc.rewrite(root, lambda x: x.nonsense, rows),)), "nonsense"),
        (
            lambda: fc.compile(root, patterns=(fc.cluster_hint(lambda x, s: x.clamp(-s, s), rows, 0.5),)),
            "computes with a float argument in Python",
        ),
        (
            lambda: fc.compile(root, patterns=(fc.user_kernel(lambda x: x * torch.tensor(2.0), root, rows),)),
            "a tensor of its own",
        ),
    ],
)  # fmt: skip
def test_a_pattern_of_the_wrong_form(make: Any, text: str) -> None:
    with pytest.raises(InvalidPatternError, match=text):
        make()
