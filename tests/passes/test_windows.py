"""Sums over windows: loop nests, evaluated node by node, against float64; what clusters hold beside them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fusion_compiler.ir import dag, layout
from fusion_compiler.ir.device import device_spec
from fusion_compiler.ir.dims import Hints
from fusion_compiler.ir.loops import COLS, INNER, LoopNest, Reduce, resized, symbols_of
from fusion_compiler.ops.decompositions.table import decomposition_table
from fusion_compiler.ops.own import depthwise
from fusion_compiler.passes.fuse.legality import LAWS, first_refusal
from fusion_compiler.passes.lower.index_splits import index_splits_of
from fusion_compiler.passes.lower.lower import lower
from fusion_compiler.passes.lower.simplify import simplify
from fusion_compiler.passes.lower.space import Illegal
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.space import buffers_of
from fusion_compiler.schedule.windowed import work_in_windows
from fusion_compiler.schedule.work import Work
from tests.convolutions import Depthwise, depthwise_cases
from tests.nest_values import stored

Function = Callable[..., Any]
H200 = device_spec("h200")


def convolve(case: Depthwise, x: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
    return depthwise.depthwise(x, weight, *case.geometry)


def image_gradient(case: Depthwise, x: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
    return depthwise.depthwise_input_gradient(gradient, weight, list(x.shape), *case.geometry)


def kernel_gradient(case: Depthwise, x: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
    return depthwise.depthwise_weight_gradient(gradient, x, list(case.kernel), *case.geometry)


PASSES = {"forward": convolve, "image gradient": image_gradient, "kernel gradient": kernel_gradient}


def halves(t: Tensor) -> Tensor:
    middle = t.shape[-1] // 2
    return torch.cat([t[..., :middle], t[..., middle:] * 2], -1)


def bias(y: Tensor) -> Tensor:
    return torch.arange(y.shape[1]).view([-1 if d == 1 else 1 for d in range(y.ndim)])


# What is done to an operand. Zero does not stay zero: what lies outside of an image must not count.
BEFORE: dict[str, Function] = {
    "nothing": lambda t: t,
    "numbers": lambda t: torch.relu(t * 2 - 1) + 3,
    "an infinity outside": lambda t: 1 / t,
    "two places": lambda t: torch.where(t > 0, t.flip(-1), t.flip(0)),
    "padding": lambda t: F.pad(t[..., 1:], (1, 0), value=2.0),
    "halves": halves,
    "a turned copy": lambda t: t.transpose(1, -1).contiguous().transpose(1, -1) - 1,
    "rows side by side": lambda t: (t.flatten(2) + 1).view(t.shape),
    "a lookup": lambda t: t[(torch.arange(t.shape[0]) + 1) % t.shape[0]],
}
# What is done to a result.
AFTER: dict[str, Function] = {
    "nothing": lambda y: y,
    "bias and activation": lambda y: torch.relu(y + bias(y)),
    "twice": lambda y: y * torch.sigmoid(y),
    "twice at other places": lambda y: y + y.flip(-1) * 2,
    "turned": lambda y: y.transpose(1, -1).contiguous() * 2,
    "every other": lambda y: y[..., ::2] * 3,
    "with its result": lambda y: (y, y * 2),
    "padded": lambda y: F.pad(y, (2, 1)) + 1,
    "beside itself": lambda y: torch.cat([y, y + 1], 1),
    "flat": lambda y: y.flatten() * 2,
    "rolled": lambda y: y + y.roll(1, 0),
}


class Recorder(fx.Interpreter):
    """Runs a graph and keeps each value, as the graph says that it lies in memory."""

    def __init__(self, built: dag.OpDag) -> None:
        super().__init__(built.module, garbage_collect_values=False)
        self.dag = built
        self.values: dict[str, Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.target is torch.ops.aten.full.default and result.is_floating_point():
            result = result.double()
        if isinstance(result, Tensor) and n.op != "output":
            (meta,) = self.dag.op(n.name).outputs
            laid = torch.empty_strided(meta.shape, meta.stride, dtype=result.dtype)  # type: ignore[arg-type]
            self.values[n.name] = laid.copy_(result) if laid.stride() != result.stride() else result
        return result


def graph(function: Function, *args: Tensor) -> dag.OpDag:
    return dag.build(make_fx(function, decomposition_table(), tracing_mode="fake")(*args))


def outputs(built: dag.OpDag) -> tuple[str, ...]:
    """The ops whose results the graph returns, or views of them."""
    names: dict[str, None] = {}
    for name in built.outputs:
        while layout.is_view(built.op(name)):
            name = built.op(name).first
        names[name] = None
    return tuple(names)


def ops_of(built: dag.OpDag) -> tuple[str, ...]:
    return tuple(n for n in built.order if n not in built.inputs and not layout.is_view(built.op(n)))


def check(function: Function, *args: Tensor) -> LoopNest:
    """Compare all ops of a function as one nest, as it is lowered and simplified, with it in float64."""
    built = graph(function, *args)
    wide = [arg.double() if arg.is_floating_point() else arg for arg in args]
    recorder = Recorder(built)
    recorder.run(*wide)
    lowered = lower(built, ops_of(built), outputs(built))
    for loops in (lowered, simplify(lowered)):
        got = stored(loops, recorder.values, {name: recorder.values[name] for name in outputs(built)})
        for name, value in got.items():
            torch.testing.assert_close(value, recorder.values[name], rtol=1e-9, atol=1e-9, equal_nan=True)
    check_axes(loops)
    return loops


def check_axes(loops: LoopNest) -> None:
    """Inner axes come last and are what reductions run over; all others are columns."""
    groups = [axis.group for axis in loops.axes]
    assert groups == sorted(groups, key=lambda group: group == INNER)
    inner = {k for k, group in enumerate(groups) if group == INNER}
    assert inner == frozenset[int]().union(*(n.axes for n in loops.nodes if isinstance(n, Reduce)))
    assert not inner or set(groups) <= {COLS, INNER}


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_alone_is_what_a_library_computes(name: str) -> None:
    for case in depthwise_cases(60):
        check(functools.partial(PASSES[name], case), *case.tensors(torch.float32))


@pytest.mark.sample(12)
@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("name", PASSES)
def test_what_is_around_a_pass_is_in_its_nest(name: str, before: str, after: str) -> None:
    for case in depthwise_cases(6):
        check(around(case, name, before, after), *case.tensors(torch.float32))


def around(case: Depthwise, name: str, before: str = "nothing", after: str = "nothing") -> Function:
    def run(*operands: Tensor) -> Any:
        return AFTER[after](PASSES[name](case, *map(BEFORE[before], operands)))

    return run


def test_two_passes_have_inner_axes_of_their_own() -> None:
    for case in depthwise_cases(10):
        two = Depthwise(case.batch, case.channels, case.result[2:], *same(case), case.last, case.seed)
        other = two.tensors(torch.float32)[1]

        check(functools.partial(both, case, two), *case.tensors(torch.float32), other)


def both(case: Depthwise, two: Depthwise, x: Tensor, weight: Tensor, gradient: Tensor, other: Tensor) -> Any:
    y = convolve(case, x, weight, gradient)
    return y, convolve(two, torch.relu(gradient), other, y) * y


def same(case: Depthwise) -> Any:
    """Kernel, stride, padding and dilation of a convolution whose result is as large as its image."""
    rank = len(case.size)
    return (3,) * rank, (1,) * rank, (2,) * rank, (2,) * rank


@pytest.mark.parametrize("name", PASSES)
def test_in_16_bits_nothing_is_rounded_but_what_is_stored(name: str) -> None:
    for case in depthwise_cases(10):
        args = case.tensors(torch.bfloat16)
        built = graph(around(case, name, "numbers", "twice"), *args)
        recorder = Recorder(built)
        recorder.run(*(arg.double() for arg in args))
        (result,) = outputs(built)
        loops = simplify(lower(built, ops_of(built), (result,)))
        assert not [node for node in loops.nodes if "rounding" in dict(getattr(node, "operands", ()))]
        ours = stored(loops, recorder.values, {result: recorder.values[result].bfloat16()})[result]
        torch.testing.assert_close(ours, recorder.values[result].bfloat16(), rtol=2**-7, atol=1e-30)


@pytest.mark.parametrize("name", PASSES)
def test_sizes_may_be_symbols(name: str) -> None:
    for case in depthwise_cases(8):
        args = case.tensors(torch.float32)
        gm = make_fx(around(case, name, "numbers", "twice"), tracing_mode="symbolic")(*args)
        built = dag.build(gm)
        hints = dag.size_hints([n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")])
        wide = [arg.double() for arg in args]
        (result,) = outputs(built)
        loops = simplify(lower(built, ops_of(built), (result,)))
        assert set(symbols_of((loops,), ())) <= set(hints)
        loops = resized(loops, functools.partial(sized, hints))
        truth = around(case, name, "numbers", "twice")(*wide)
        inputs = dict(zip(built.inputs, wide, strict=True))
        ours = stored(loops, inputs, {result: truth})[result]
        torch.testing.assert_close(ours, truth, rtol=1e-9, atol=1e-9, equal_nan=True)


def sized(hints: Hints, size: Any) -> int:
    return size if isinstance(size, int) else int(size.subs(hints))


def test_neighbouring_inner_axes_merge_where_every_index_allows() -> None:
    one = Depthwise(2, 3, (5, 4), (1, 1), (1, 1), (0, 0), (1, 1), (False,) * 3, 0)
    padded = Depthwise(2, 3, (5, 4), (3, 3), (1, 1), (1, 1), (1, 1), (False,) * 3, 0)
    for case, sizes in ((one, [2, 20]), (padded, [2, 5, 4])):
        loops = check(around(case, "kernel gradient"), *case.tensors(torch.float32))
        inner = [axis for axis in loops.axes if axis.group == INNER]
        assert [axis.size for axis in inner] == sizes
        assert [axis.name for axis in inner] == [f"inner_{i}" for i in range(len(sizes))]


def test_a_kernel_of_one_tap_needs_no_inner_axes() -> None:
    case = Depthwise(2, 3, (5, 4), (1, 1), (2, 1), (0, 0), (1, 1), (False,) * 3, 0)
    for name in ("forward", "image gradient"):
        loops = check(around(case, name), *case.tensors(torch.float32))
        assert not [axis for axis in loops.axes if axis.group == INNER]


def test_a_gradient_of_nothing_is_zero() -> None:
    case = Depthwise(0, 3, (5, 4), (3, 3), (1, 1), (1, 1), (1, 1), (False,) * 3, 0)
    check(around(case, "kernel gradient"), *case.tensors(torch.float32))


def test_what_is_made_in_pieces_holds_no_windows() -> None:
    (case,) = depthwise_cases(1)
    built = graph(around(case, "forward", after="beside itself"), *case.tensors(torch.float32))
    ops = ops_of(built)
    (split,) = index_splits_of(built, ops, outputs(built))
    with pytest.raises(Illegal, match="cannot be computed in pieces"):
        lower(built, ops, outputs(built), index_split=split)


# -- laws ----------------------------------------------------------------------------------------------------

CASE = Depthwise(2, 4, (8, 6), (3, 3), (1, 1), (1, 1), (1, 1), (False,) * 3, 0)


def law(function: Function, *args: Tensor, scheduled: bool = False) -> tuple[str, str] | None:
    """Return the first law that the nest of a function breaks. scheduled: with that about its schedules."""
    built = graph(function, *args)
    analysis = Analysis(simplify(lower(built, ops_of(built), outputs(built))))
    if scheduled:
        return first_refusal(analysis, H200)
    reasons = ((rule, each(analysis)) for rule, each in LAWS)
    return next(((rule, reason) for rule, reason in reasons if reason is not None), None)


def chained(x: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
    return convolve(CASE, convolve(CASE, x, weight, x), weight, x)


def normalized(x: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
    y = convolve(CASE, (x - 1) / 6, weight, x)
    return torch.relu(F.batch_norm(y, weight.flatten()[:4], weight.flatten()[4:8].abs())) + gradient


REFUSED: dict[str, tuple[Function, str]] = {
    "a sum of its result": (lambda x, w, g: convolve(CASE, x, w, g).sum((0, 2, 3)), "needs whole rows"),
    "a norm before it": (lambda x, w, g: convolve(CASE, F.layer_norm(x, (6,)), w, g), "at rows other than"),
    "a scan behind it": (lambda x, w, g: convolve(CASE, x, w, g).cumsum(-1), "cumsum is a scan"),
    "a function before it": (lambda x, w, g: convolve(CASE, torch.tanh(x), w, g), "tanh would be computed"),
    "a division before it": (lambda x, w, g: convolve(CASE, x / (1 + x * x), w, g), "div would be computed"),
    "another before it": (chained, "a tile would hold elements of x_1 several times"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_clusters_hold_no_more_beside_windows(name: str) -> None:
    function, reason = REFUSED[name]
    try:
        refusal = law(function, *CASE.tensors(torch.float32), scheduled=True)
    except Illegal as error:
        refusal = (error.rule, error.reason)
    assert refusal is not None and reason in refusal[1]


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("after", [name for name in AFTER if name != "padded"])
def test_clusters_hold_element_wise_work_around_windows(name: str, after: str) -> None:
    assert law(around(CASE, name, "numbers", after), *CASE.tensors(torch.float32)) is None


def test_clusters_hold_a_norm_in_inference_behind_windows() -> None:
    assert law(normalized, *CASE.tensors(torch.float32)) is None


def test_a_result_that_is_broadcast_is_not_computed_for_each_element() -> None:
    def run(x: Tensor, weight: Tensor, gradient: Tensor) -> Any:
        scale = weight.sum((2, 3))[:, 0] * 2
        return convolve(CASE, x, weight, gradient), scale

    built = graph(run, *CASE.tensors(torch.float32))
    ops = tuple(n for n in ops_of(built) if "sum" not in n)
    with pytest.raises(Illegal, match="space"):
        lower(built, ops, outputs(built))


def test_work_on_what_windows_read_counts_for_each_tap() -> None:
    x, weight, gradient = CASE.tensors(torch.float32)
    alone = nest_of(around(CASE, "forward"), x, weight, gradient)
    behind = nest_of(around(CASE, "forward", after="bias and activation"), x, weight, gradient)
    before = nest_of(around(CASE, "forward", before="numbers"), x, weight, gradient)
    assert work_of(alone) == work_of(behind) == 0
    # Of the image four operations and the choice of zero outside of it, of the kernel the same four.
    assert work_of(before) == 9 * x.numel() * 5 + weight.numel() * 4


def work_of(loops: LoopNest) -> int:
    return work_in_windows(Work(Analysis(loops), buffers_of(loops), {}))


def nest_of(function: Function, *args: Tensor) -> LoopNest:
    built = graph(function, *args)
    return simplify(lower(built, ops_of(built), outputs(built)))
