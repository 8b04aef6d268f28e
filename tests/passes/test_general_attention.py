"""Attention that PyTorch has no call for: found in the graph, one nest forward and a few backward, equal in
values and gradients."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fusion_compiler as fc
from benchmarks.chains import variants
from benchmarks.chains.variants import VARIANTS, Shape, Variant
from benchmarks.harness.accuracy import InFloat64
from fusion_compiler.ir.dag import OpDag
from fusion_compiler.ir.loops import Load, Reduce
from fusion_compiler.passes.lower.chains import lower_chain
from fusion_compiler.passes.nests.attention import RULE
from fusion_compiler.passes.rewrites import masked_attention
from fusion_compiler.schedule.uneven_widths import in_powers_of_two
from tests.exactness import not_as_close
from tests.nest_values import stored

BY_NAME = {v.name: v for v in VARIANTS if not v.name.startswith("call")}
SMALL = Shape(2, 3, 37, 8, 8)
LOWEST = torch.finfo(torch.bfloat16).min
Run = Callable[..., Any]


@pytest.fixture(autouse=True)
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "WINDOW", 9)


def shape_of(variant: Variant, **sizes: Any) -> Shape:
    """Return a small shape with other widths of keys and values, or fewer heads of keys, where a variant has
    them."""
    asked = dict(variant.sizes)
    smaller = {"width": 8, "values": 6} if "width" in asked else {}
    shared = {"key_heads": 1} if "key_heads" in asked else {}
    return replace(SMALL, **smaller, **shared, **sizes)


def inputs_of(variant: Variant, shape: Shape) -> list[Tensor]:
    return [*shape.inputs(), *variant.more(shape)]


def run(code: Run, inputs: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Return the result and the gradients of all trained inputs."""
    copies = [
        x.detach().to(dtype or x.dtype).requires_grad_(x.requires_grad) if x.is_floating_point() else x
        for x in inputs
    ]
    result = code(*copies)
    trained = [x for x in copies if x.requires_grad]
    torch.manual_seed(5)
    weights = torch.randn(result.shape, dtype=torch.float64).to(result)
    return [result, *torch.autograd.grad((result * weights).sum(), trained)]


def run_all(compiled: Run, code: Run, inputs: Sequence[Tensor]) -> tuple[list[Tensor], ...]:
    """Return the results and gradients of a compiled function, of eager and of eager in float64."""
    ours, eager = run(compiled, inputs), run(code, inputs)
    with InFloat64():
        return ours, eager, run(code, inputs, torch.float64)


def general_of(code: Run, **options: Any) -> Any:
    """Compile without the pass that calls PyTorch's attention, which takes some of the variants on a CPU."""
    return fc.compile(code, backend="eager", disable=("fused attention",), **options)


def bodies_of(compiled: Any) -> dict[str, OpDag]:
    """Return the graphs of the nests of a compiled function, by the plans' names."""
    return {p.name: p.dag for p in compiled.plan if ".nest_" in p.name}


def notes_of(compiled: Any) -> list[str]:
    notes = {d.subject: d for p in compiled.plan for d in p.decisions if d.rule == RULE}
    return [f"{d.outcome}: {d.reason}" for d in notes.values()]


# -- values and gradients -----------------------------------------------------------------------------

MORE: dict[torch.dtype, dict[str, int]] = {  # nests of the gradient of a bias, and of row sums
    torch.float32: {
        "bucketed bias with gradient (T5)": 4,
        "pair bias, gate (Evoformer)": 4,
        "sigmoid, causal": 2,
    },
    torch.bfloat16: {
        "bucketed bias with gradient (T5)": 3,
        "pair bias, gate (Evoformer)": 3,
        "sinks, causal (gpt-oss)": 3,
        "differential, causal": 3,
    },
}
LEAST = {torch.float32: 3, torch.bfloat16: 2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [name for name in BY_NAME if "dropout" not in name])
@pytest.mark.sample(8)
def test_attention_and_its_nests_are_as_close_to_float64_as_eager(name: str, dtype: torch.dtype) -> None:
    variant = BY_NAME[name]
    inputs = inputs_of(variant, shape_of(variant, dtype=dtype))
    compiled = general_of(variant.code)
    ours, eager, truth = run_all(compiled, variant.code, inputs)
    backward = MORE[dtype].get(name, LEAST[dtype])
    assert notes_of(compiled)[0].startswith(f"done: 1 nest forward and {backward} backward")
    bodies = bodies_of(compiled)
    assert len(bodies) == 1 + backward
    wrong = [not_as_close(*each) for each in zip(ours, eager, truth, strict=True)]
    assert not any(wrong), wrong
    for dag in bodies.values():
        check_nest(dag)


def check_nest(dag: OpDag) -> None:
    """Assert that the loop nest of a graph computes what the graph does."""
    loops, arguments = lower_chain(dag), arguments_of(dag)
    expected = dag.module(*arguments.values())
    like = dict(zip(dag.outputs, expected, strict=True))
    for result, value in zip(stored(loops, arguments, like).values(), expected, strict=True):
        near = 1e-4 if value.dtype is torch.float32 else torch.finfo(value.dtype).eps
        torch.testing.assert_close(result, value, rtol=near, atol=near * value.abs().max().item())


@pytest.mark.parametrize("name", [name for name in BY_NAME if "dropout" not in name])
@pytest.mark.sample(4)
def test_kernels_are_as_close_to_float64_as_eager(name: str) -> None:
    """Every nest is one kernel, in Triton's interpreter, and the length is no multiple of a block."""
    variant = BY_NAME[name]
    sizes = {"batch": 2, "heads": 2, "length": 200, "width": 16, "values": 16}
    inputs = inputs_of(variant, replace(SMALL, **sizes, dtype=torch.bfloat16))
    compiled = fc.compile(variant.code, backend="interpret", disable=("fused attention",))
    wrong = [not_as_close(*each) for each in zip(*run_all(compiled, variant.code, inputs), strict=True)]
    assert not any(wrong), wrong
    nests = [plan for plan in compiled.plan if ".nest_" in plan.name]
    assert len(nests) > 2 and all(len(plan.clusters) == 1 and not plan.leftovers for plan in nests)


def test_widths_that_are_no_power_of_two_are_two_axes() -> None:
    """The parts have as many features as tiles, so that no tile has a mask for them."""
    variant = BY_NAME["soft cap, wide keys (MLA)"]
    inputs = inputs_of(variant, Shape(1, 2, 48, 48, 80))
    compiled = fc.compile(variant.code, backend="interpret", disable=("fused attention",))
    for one, theirs, exact in zip(*run_all(compiled, variant.code, inputs), strict=True):
        assert not (wrong := not_as_close(one, theirs, exact)), wrong
    for dag in bodies_of(compiled).values():
        loops = in_powers_of_two(lower_chain(dag))
        sizes = {axis.size for axis in loops.axes}
        assert sizes.isdisjoint({80}) and {32, 16, 64} <= sizes, sizes


class Layer(torch.nn.Module):
    """Soft-capped attention as models write it: heads are a dimension of features, before and after."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inner = torch.nn.Linear(width, 3 * width)
        self.outer = torch.nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.inner(x).split(width, -1)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        return self.outer(variants.soft_capped(q, k, v).view(batch, length, width))


@pytest.mark.parametrize("is_trained", [False, True])
def test_operands_and_results_are_not_copied_into_another_order(is_trained: bool) -> None:
    torch.manual_seed(7)
    layer = Layer(24, 3).requires_grad_(is_trained)
    x = torch.randn(2, 40, 24, requires_grad=is_trained)
    compiled: Any = fc.compile(layer, backend="interpret", disable=("fused attention",))
    exact = copy.deepcopy(layer).double()
    results, narrow = list[list[Tensor]](), torch.float32
    codes: list[tuple[Run, torch.dtype]] = [(compiled, narrow), (layer, narrow), (exact, torch.float64)]
    for code, dtype in codes:
        y = code(z := x.detach().to(dtype).requires_grad_(is_trained))
        weights = torch.linspace(-1, 1, y.numel(), dtype=dtype).view_as(y)
        results.append([y, *(torch.autograd.grad((y * weights).sum(), [z]) if is_trained else ())])
    assert [not_as_close(*of) for of in zip(*results, strict=True)] == [None] * len(results[0])
    plan = next(p for p in compiled.plan if "nest" not in p.name)
    assert not any(n.target is torch.ops.aten.clone.default for n in plan.dag.nodes.values())


def test_layers_that_are_alike_share_plans() -> None:
    torch.manual_seed(8)
    layers = torch.nn.Sequential(*(Layer(24, 3) for _ in range(4))).requires_grad_(False)
    compiled: Any = fc.compile(layers, backend="interpret", disable=("fused attention",))
    x = torch.randn(2, 40, 24)
    ours, eager, exact = compiled(x), layers(x), copy.deepcopy(layers).double()(x.double())
    assert not (wrong := not_as_close(ours, eager, exact)), wrong
    assert notes_of(compiled) and len(bodies_of(compiled)) == 1


def test_dropped_probabilities_are_the_same_in_all_nests() -> None:
    variant = BY_NAME["soft cap, dropout"]
    inputs, results = inputs_of(variant, SMALL), list[list[Tensor]]()
    for off in ((), (RULE,)):
        torch._dynamo.reset()
        compiled = fc.compile(variant.code, backend="eager", disable=("fused attention", *off))
        torch.manual_seed(3)
        results.append(run(compiled, inputs))
        assert len(bodies_of(compiled)) == (0 if off else 4)
    for ours, apart in zip(*results, strict=True):
        torch.testing.assert_close(ours, apart)


# -- nests --------------------------------------------------------------------------------------------


def arguments_of(dag: OpDag) -> dict[str, Tensor]:
    """Return random values of a graph's inputs; positive, as some of them are sums of exponentials."""
    arguments = {}
    for name in dag.inputs:
        meta = dag.op(name).outputs[0]
        sizes = torch.empty_strided(meta.shape, meta.stride)  # type: ignore[arg-type]
        if meta.dtype.is_floating_point:
            arguments[name] = sizes.uniform_(0.5, 1.5).to(meta.dtype)
        else:
            arguments[name] = sizes.uniform_(0, 2).to(meta.dtype)
    return arguments


@pytest.mark.parametrize("name", ["soft cap, causal", "soft cap, window (Gemma 2)", "soft cap, documents"])
def test_masks_of_positions_are_conditions_and_nothing_as_large_as_scores_is_read(name: str) -> None:
    variant = BY_NAME[name]
    compiled = general_of(variant.code)
    run(compiled, inputs_of(variant, shape_of(variant)))
    for plan_name, dag in bodies_of(compiled).items():
        loops = lower_chain(dag)
        read = {n.buffer for n in loops.nodes if isinstance(n, Load)}
        sizes = [math.prod(dag.op(n).outputs[0].shape) for n in (*read, *dag.outputs)]  # type: ignore[arg-type]
        assert max(sizes) <= SMALL.batch * SMALL.heads * SMALL.length * SMALL.width, plan_name
        along = [n.axes for n in loops.nodes if isinstance(n, Reduce)]
        looped = {k for axes in along for k in axes if loops.axes[k].size == SMALL.length}
        assert len(looped) == 1, f"{plan_name} goes through the scores more than once"


# -- edges --------------------------------------------------------------------------------------------


def hidden(q: Tensor, k: Tensor, v: Tensor, shown: Tensor) -> Tensor:
    """Hide all keys from some rows, with -inf: NaN in eager."""
    scores = 5 * torch.tanh(q @ k.mT / 5)
    return scores.masked_fill(~shown[:, None], -math.inf).softmax(-1) @ v


def test_rows_that_a_mask_hides_are_those_of_eager() -> None:
    inputs = [*SMALL.inputs(), torch.rand(2, 37, 37) < 0.5]
    inputs[3][1, 5] = False
    compiled = general_of(hidden)
    ours, eager, truth = run_all(compiled, hidden, inputs)
    assert ours[0][1, :, 5].isnan().all() and notes_of(compiled)[0].startswith("done")
    assert not any(not_as_close(*each) for each in zip(ours, eager, truth, strict=True))


def with_weights(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = (5 * torch.tanh(q @ k.mT / 5)).softmax(-1)
    return weights @ v, weights.clone()


@pytest.mark.parametrize("backend", ["eager", "interpret"])
@pytest.mark.parametrize("side", ["left", "right", "none at all"])
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.sample(6)
def test_masks_of_the_lowest_number_hide_padding(window: int, side: str, backend: Any) -> None:
    """A row that sees no key, as with padding at the left, has weights for all keys, as in eager."""

    def code(q: Tensor, k: Tensor, v: Tensor, shown: Tensor) -> Tensor:
        i, j = (torch.arange(x.shape[2]) for x in (q, k))
        mask = (j <= i[:, None]) & shown[:, None, None, :]
        mask = mask & (j > i[:, None] - window) if window else mask
        scores = 5 * torch.tanh(q @ k.mT / 5) + torch.where(mask, 0.0, LOWEST).to(q.dtype)
        return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v

    place = torch.arange(200)
    shown = {"left": place >= 70, "right": place < 130, "none at all": place < 0}[side]
    inputs = [x.detach().bfloat16().requires_grad_() for x in Shape(2, 1, 200, 16, 16).inputs()]
    inputs.append(torch.stack((shown, place >= 0)))
    compiled = general_of(code) if backend == "eager" else fc.compile(code, backend=backend, strict=True)
    for one, theirs, exact in zip(*run_all(compiled, code, inputs), strict=True):
        assert not (wrong := not_as_close(one, theirs, exact)), wrong


def test_scores_that_others_read_are_left_alone() -> None:
    inputs = SMALL.inputs()
    compiled = general_of(with_weights)
    for ours, eager in zip(compiled(*inputs), with_weights(*inputs), strict=True):
        torch.testing.assert_close(ours, eager)
    assert (
        notes_of(compiled)[0].startswith("refused: ") and "would have to be stored" in notes_of(compiled)[0]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lengths_may_differ_from_call_to_call(dtype: torch.dtype) -> None:
    variant = BY_NAME["soft cap, causal"]
    compiled = general_of(variant.code)
    for length in (37, 45, 64):
        inputs = replace(SMALL, length=length, dtype=dtype).inputs()
        ours, eager, truth = run_all(compiled, variant.code, inputs)
        assert not any(not_as_close(*each) for each in zip(ours, eager, truth, strict=True))
    shapes = [dag.op(name).outputs[0].shape for dag in bodies_of(compiled).values() for name in dag.outputs]
    nests = 2 * (1 + LEAST[dtype])
    assert len(bodies_of(compiled)) == nests, "a graph for the first length, and one for all others"
    assert sum(any(not isinstance(n, int) for n in shape) for shape in shapes) == len(shapes) // 2


def test_nests_are_read_from_disk() -> None:
    variant, results = BY_NAME["soft cap, causal"], list[list[Tensor]]()
    inputs = inputs_of(variant, SMALL)
    for where in ("anew", "from disk"):
        torch._dynamo.reset()
        compiled = general_of(variant.code)
        results.append(run(compiled, inputs))
        assert len(bodies_of(compiled)) == 4
        graphs = [plan for plan in compiled.plan if ".nest_" not in plan.name]
        assert all(f"captured {where}" in str(plan.decisions) for plan in graphs)
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_the_pass_can_be_left_out() -> None:
    left_out = fc.compile(BY_NAME["soft cap, causal"].code, backend="eager", disable=(RULE,))
    run(left_out, SMALL.inputs())
    assert not bodies_of(left_out) and not notes_of(left_out)


def two_layers(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Compute two attentions, one of the other's result, that add the same bias."""
    bias = 2 * bias
    one = (5 * torch.tanh(q @ k.mT / 5) + bias).softmax(-1) @ v
    return (5 * torch.tanh(one @ k.mT / 5) + bias).softmax(-1) @ v


def test_a_bias_as_large_as_scores_does_not_join_attentions() -> None:
    inputs = [*replace(SMALL, batch=1).inputs(), torch.randn(1, 3, 37, 37)]
    compiled = general_of(two_layers)
    ours, eager, truth = run_all(compiled, two_layers, inputs)
    assert not any(not_as_close(*each) for each in zip(ours, eager, truth, strict=True))
    assert [note.split(":")[0] for note in notes_of(compiled)] == ["done", "done"]


def shifted(q: Tensor, k: Tensor, v: Tensor, r: Tensor) -> Tensor:
    """Add products with relative positions, moved by a view of another shape, as XLNet does."""
    b, h, n, _ = q.shape
    moved = (q @ r.mT).reshape(b, h, 2 * n, n)[:, :, 1:].reshape(b, h, n, 2 * n - 1)[..., :n]
    return (5 * torch.tanh(q @ k.mT / 5) + moved).softmax(-1) @ v


def test_what_has_no_index_in_a_nest_is_read_from_memory() -> None:
    inputs = [x.detach() for x in (*SMALL.inputs(), torch.randn(2, 3, 74, 8))]
    compiled = general_of(shifted)
    wrong = not_as_close(compiled(*inputs), shifted(*inputs), shifted(*(x.double() for x in inputs)))
    assert not wrong and notes_of(compiled)[-1].startswith("done"), wrong


def looked_up(q: Tensor, k: Tensor, v: Tensor, r: Tensor, index: Tensor) -> Tensor:
    """Add products with relative positions, looked up by distance, as DeBERTa does."""
    return (q @ k.mT * 0.25 + (q @ r.mT).gather(-1, index)).softmax(-1) @ v


def test_a_product_that_is_looked_up_is_stored() -> None:
    inputs = [*SMALL.inputs(), torch.randn(2, 3, 37, 8, requires_grad=True)]
    inputs.append(torch.randint(0, 37, (2, 3, 37, 37)))
    compiled = general_of(looked_up)
    ours, eager, truth = run_all(compiled, looked_up, inputs)
    assert not any(not_as_close(*each) for each in zip(ours, eager, truth, strict=True))
    assert notes_of(compiled)[-1].startswith("done")
    nodes = [node for body in bodies_of(compiled).values() for node in body.nodes.values()]
    assert torch.ops.aten.exp.default in {node.target for node in nodes}
    assert torch.ops.aten.gather.default not in {node.target for node in nodes}


# -- gradients of scores that others read -----------------------------------------------------------------


def added(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.mT * 0.25 + bias).softmax(-1) @ v


def added_to_capped(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (5 * torch.tanh(q @ k.mT / 5) + bias).softmax(-1) @ v


def capped_with_added(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (5 * torch.tanh((q @ k.mT + bias) / 5)).softmax(-1) @ v


@pytest.mark.parametrize("code", [added, added_to_capped, capped_with_added, two_layers])
@pytest.mark.parametrize("backend", ["eager", "interpret"])
@pytest.mark.sample(5)
def test_a_nest_stores_the_gradient_of_a_bias_that_is_as_large_as_scores(code: Run, backend: Any) -> None:
    inputs = [x.detach() for x in (*Shape(1, 2, 70, 16, 16).inputs(), torch.randn(1, 2, 70, 70))]
    inputs = [x.bfloat16().requires_grad_() for x in inputs]
    compiled = fc.compile(code, backend=backend, disable=("fused attention",), strict=True)
    ours, eager, truth = run_all(compiled, code, inputs)
    assert not any(not_as_close(*each) for each in zip(ours, eager, truth, strict=True))
    layers = 2 if code is two_layers else 1
    assert [note.split(":")[0] for note in notes_of(compiled)] == ["done"] * layers
    assert len(bodies_of(compiled)) == 4 * layers


# -- calls with a mask ----------------------------------------------------------------------------------

SDPA = torch.nn.functional.scaled_dot_product_attention


def causal_and_shown(q: Tensor, k: Tensor, v: Tensor, shown: Tensor) -> Tensor:
    i = torch.arange(q.shape[2], device=q.device)
    return SDPA(q, k, v, (i[None, :] <= i[:, None]) & shown[:, None, None, :])


def with_documents(q: Tensor, k: Tensor, v: Tensor, document: Tensor) -> Tensor:
    return SDPA(q, k, v, (document[:, :, None] == document[:, None, :])[:, None])


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i = torch.arange(q.shape[2], device=q.device)
    return SDPA(q, k, v, (i[None, :] <= i[:, None]) & (i[None, :] > i[:, None] - 9), scale=0.3)


def grouped_keys(q: Tensor, k: Tensor, v: Tensor, shown: Tensor) -> Tensor:
    return SDPA(q, k[:, :2], v[:, :2], shown[:, None, None, :], enable_gqa=True)


def columns(first: int, last: int) -> Tensor:
    return (torch.arange(70) >= torch.tensor([[first], [0]])) & (torch.arange(70) < last)


MASKED: dict[str, tuple[Run, Callable[[], list[Tensor]]]] = {
    "padding on the left, with rows that see nothing": (causal_and_shown, lambda: [columns(33, 70)]),
    "padding on the right": (causal_and_shown, lambda: [columns(0, 41)]),
    "a batch that sees nothing": (causal_and_shown, lambda: [columns(70, 70)]),
    "documents": (with_documents, lambda: [torch.randint(4, (2, 70)).sort(-1).values]),
    "window": (window, list),
    "grouped keys": (grouped_keys, lambda: [columns(3, 60)]),
    "a bias with a gradient": (SDPA, lambda: [torch.randn(1, 4, 70, 70, requires_grad=True)]),
}


@pytest.mark.parametrize("backend", ["eager", "interpret"])
@pytest.mark.parametrize("name", MASKED)
@pytest.mark.sample(6)
def test_calls_with_a_mask_are_as_close_to_float64_as_eager(
    name: str, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masked_attention, "DEVICES", ("cpu",))
    code, more = MASKED[name]
    inputs = [*Shape(2, 4, 70, 16, 16, dtype=torch.bfloat16).inputs(), *more()]
    inputs = [x.detach().bfloat16().requires_grad_() if x.is_floating_point() else x for x in inputs]
    compiled = fc.compile(code, backend=backend)
    for one, theirs, exact in zip(*run_all(compiled, code, inputs), strict=True):
        assert not (wrong := not_as_close(one, theirs, exact)), wrong
    assert notes_of(compiled)[0].startswith("done") and bodies_of(compiled)


def padded(q: Tensor, k: Tensor, v: Tensor, shown: Tensor) -> Tensor:
    scores = (q @ k.mT * 0.25).masked_fill(~shown[:, None, None, :], -math.inf)
    return scores.softmax(-1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor, shown: Tensor) -> Tensor:
    i = torch.arange(q.shape[2], device=q.device)
    return (q @ k.mT * 0.25).masked_fill(i[None, :] > i[:, None], -math.inf).softmax(-1) @ v


def window_added(q: Tensor, k: Tensor, v: Tensor, shown: Tensor) -> Tensor:
    i = torch.arange(q.shape[2], device=q.device)
    hidden = (i[None, :] > i[:, None]) | (i[None, :] < i[:, None] - 9)
    mask = torch.zeros((), dtype=q.dtype, device=q.device).masked_fill(hidden, torch.finfo(q.dtype).min)
    return (q @ k.mT * 0.25 + mask).softmax(-1) @ v


@pytest.mark.parametrize("code", [padded, causal, window_added])
@pytest.mark.parametrize("disable", [(), (RULE,), ("masked attention", RULE)])
def test_written_attention_is_a_call_where_a_flash_kernel_takes_it_or_no_nest_does(
    code: Run, disable: tuple[str, ...]
) -> None:
    q, k, v = (torch.empty(2, 4, 256, 32, dtype=torch.half) for _ in range(3))
    report = fc.explain(code, q, k, v, torch.empty(2, 256, dtype=torch.bool), disable=disable)
    are_calls = "fused attention: done" in str(report)
    assert are_calls == (code is causal or RULE in disable)
    assert ("general attention: done" in str(report)) == (not are_calls)


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.mT * 0.25 + bias).softmax(-1) @ v


def called(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return SDPA(q, k, v, bias)


@pytest.mark.parametrize("code", [biased, called])
@pytest.mark.parametrize(("batch", "of_bias"), [(2, 2), (2, 1), (1, 1)])
@pytest.mark.parametrize("trained", [True, False])
def test_a_bias_of_any_size_is_a_nest_with_and_without_a_gradient(
    code: Run, batch: int, of_bias: int, trained: bool
) -> None:
    q, k, v = (torch.empty(batch, 4, 256, 32, dtype=torch.half, requires_grad=True) for _ in range(3))
    bias = torch.empty(of_bias, 4, 256, 256, dtype=torch.half, requires_grad=trained)
    assert "general attention: done" in str(fc.explain(code, q, k, v, bias))
