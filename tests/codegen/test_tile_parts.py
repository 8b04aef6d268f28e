"""Sums over some axes beside sums over others, in one reading of the data, by programs that have parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode

import fusion_compiler as fc
from fusion_compiler.codegen import assemble
from fusion_compiler.codegen.emit import emit
from fusion_compiler.ir.canonical import canonical
from fusion_compiler.ir.device import device_spec
from fusion_compiler.ir.kernel import Buffer, Program
from fusion_compiler.ir.loops import COLS, INNER, LoopNest, Reduce, Value
from fusion_compiler.passes.lower.algebra import nested_sums
from fusion_compiler.runtime.launch import interpret
from fusion_compiler.runtime.target import compile_for
from fusion_compiler.schedule import tile_parts, tiles
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.placement import Placement
from fusion_compiler.schedule.tile_parts import group_of
from fusion_compiler.schedule.verifier import refusal
from tests.exactness import Compiled, not_as_close, wide
from tests.hand_made import contiguous
from tests.nests import Nest
from tests.versions import not_before, of_measured_versions

AXES = ("n", "g", "c", "s")
H200 = device_spec("h200")


def norm_like(sizes: dict[str, int], kept: str) -> Nest:
    """y = x * w - sum over c and s, with sums over all but kept axes before and after it, and a maximum."""
    live = [name for name in AXES if sizes[name] > 1]
    reduced = {"c", "s", *AXES} - {*kept} | {"c", "s"}
    nest = Nest({name: (sizes[name], INNER if name in reduced else COLS) for name in live})
    left = [name for name in kept if name in live]

    def reduce(combine: str, value: Value, names: Iterable[str]) -> Value:
        numbers = frozenset(live.index(name) for name in names if name in live)
        return nest.push(Reduce(combine, value.node, numbers, torch.float32))

    others = {*AXES} - {*kept}
    x = nest.load("x", *live, dtype=torch.float32)
    scaled = nest.mul(x, nest.load("w", *(n for n in live if n in "gc"), dtype=torch.float32))
    y = nest.sub(scaled, reduce("sum", scaled, "cs"))
    nest.store("y", y, *live, dtype=torch.float32)
    nest.store("before", nest.mul(reduce("sum", x, others), nest.constant(0.5)), *left)
    nest.store("after", reduce("sum", y, others), *left)
    nest.store("most", reduce("max", y, others), *left)
    return nest


def expected(x: Tensor, w: Tensor, kept: str) -> list[Tensor]:
    dims = [d for d, name in enumerate(AXES) if name not in kept]
    scaled = x * w[None, :, :, None]
    y = scaled - scaled.sum((2, 3), keepdim=True)
    return [y, x.sum(dims) * 0.5, y.sum(dims), y.amax(dims)]


def built(loops: LoopNest, placement: Placement, shapes: dict[str, tuple[int, ...]]) -> Program:
    buffers = {n: contiguous(n, shape, torch.float32) for n, shape in shapes.items()}
    return assemble.build(assemble.Nests((loops,), buffers), (placement,), "norm_like", "")


def poisoned(*args: object, **options: object) -> Tensor:
    """Memory as a kernel may find it: what it does not write it must not read."""
    shape, _ = args
    return torch.full(shape, torch.nan if options["dtype"].is_floating_point else 7, **options)  # type: ignore


def placement_of(text: str, live: Iterable[str]) -> Placement:
    """Return the placement that a text describes, without the axes of one element."""
    names, directives = {*live}, list[str]()
    for directive in text.split("; "):
        if directive.split("(")[1][0] in names:
            directives.append(directive)
    return Placement.parse(f"{'; '.join(directives)}; 4 warps")


PLACEMENTS = (
    "place(n, GRID); place(g, GRID); place(c, LANES); place(s, LANES)",
    "split(g, 2); place(n, GRID); place(g.o, GRID); place(g.i, LANES); place(c, LANES); place(s, LANES)",
    "split(n, 2); place(n.i, GRID); place(g, GRID); place(n.o, LOOP); place(c, LANES); place(s, LANES)",
    "split(s, 16); place(n, GRID); place(g, GRID); place(c, LOOP); place(s.o, LOOP); place(s.i, LANES)",
    "place(n, GRID); place(g, GRID); place(c, LOOP); place(s, LANES)",
    "split(s, 16); place(n, GRID); place(g, GRID); place(s.o, LOOP); place(c, LANES); place(s.i, LANES)",
    "place(n, GRID); place(g, GRID); place(c, SHARED); place(s, LANES)",
    "split(s, 32); place(n, GRID); place(g, GRID); place(c, SHARED); place(s.o, SHARED); place(s.i, LANES)",
    "split(s, 16); place(n, GRID); place(g, GRID); place(c, SHARED); place(s.o, LOOP); place(s.i, LANES)",
    "split(c, 2); split(s, 32); split(s.i, 16); place(n, GRID); place(g, GRID); place(c.o, SHARED); "
    "place(s.o, SHARED); place(c.i, LOOP); place(s.i.o, LOOP); place(s.i.i, LANES)",
    "split(c, 2); split(s, 16); place(n, GRID); place(g, GRID); place(c.o, SHARED); place(s.o, LOOP); "
    "place(c.i, LANES); place(s.i, LANES)",
    "split(c, 2); place(n, GRID); place(g, GRID); place(c.o, SHARED); place(c.i, LANES); place(s, LANES)",
    "split(n, 2); split(s, 16); place(n.i, GRID); place(g, GRID); place(n.o, LOOP); place(c, LOOP); "
    "place(s.o, LOOP); place(s.i, LANES)",
)


@pytest.mark.sample(40)
@pytest.mark.parametrize("is_nested", [True, False])
@pytest.mark.parametrize("text", PLACEMENTS)
@pytest.mark.parametrize(
    ("shape", "kept"),
    [
        *(((3, 2, 3, 64), kept) for kept in ("gc", "c", "g", "nc", "s")),
        *(((3, 2, 3, 48), kept) for kept in ("ngc", "gc")),  # more in a sum than a tile makes alone
        *(((3, 2, 5, 49), kept) for kept in ("gc", "c")),  # no block divides these
        ((5, 1, 6, 32), "gc"),
        ((1, 3, 4, 48), "gc"),
        ((1, 1, 3, 80), "c"),
    ],
    ids=str,
)
def test_every_part_is_summed_once(
    shape: tuple[int, ...], kept: str, text: str, is_nested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """is_nested: sums are made of inner sums where they can be."""
    sizes = dict(zip(AXES, shape, strict=True))
    loops = norm_like(sizes, kept).nest()
    loops = nested_sums(loops) if is_nested else loops
    placement = placement_of(text, (name for name in AXES if sizes[name] > 1))
    if reason := refusal(loops, placement):  # a loop inside of the one over which a sum is kept
        assert "would need room for each element of" in reason
        assert "place(n.o, LOOP); place(c, LOOP)" in text or kept == "s"
        return
    small = tuple(sizes[name] for name in kept)
    outputs = {"y": shape, "before": small, "after": small, "most": small}
    program = built(loops, placement, {"x": shape, "w": (shape[1], shape[2]), **outputs})
    x, w = torch.randn(shape), torch.randn(shape[1], shape[2])
    monkeypatch.setattr(torch, "empty_strided", poisoned)
    tensors = {"x": x, "w": w}
    ours = interpret(program, [tensors[b.name] for b in program.inputs])
    for result, truth in zip(ours, expected(x.double(), w.double(), kept), strict=True):
        torch.testing.assert_close(result, truth.float(), rtol=1e-5, atol=1e-4)


def test_a_sum_of_which_others_are_made_is_summed_once() -> None:
    """sum(x * w) over a part with one w is w times sum(x), which is stored anyway."""
    shape, nest = (3, 2, 3, 64), norm_like({"n": 3, "g": 2, "c": 3, "s": 64}, "gc")
    shapes = {"x": shape, "w": (2, 3), "y": shape, "before": (2, 3), "after": (2, 3), "most": (2, 3)}
    apart, loop = (placement_of(PLACEMENTS[n], "ngcs") for n in (6, 3))
    sums = [
        built(loops, placement, shapes).kernels[0].source.count("tl.sum(")
        for loops in (nest.nest(), nested_sums(nest.nest()))
        for placement in (apart, loop)
    ]
    assert sums == [4, 3, 3, 2]  # before, after, of the group, and what others sent of it


def test_a_loop_is_repeated_for_what_needs_a_sum_over_it_and_for_nothing_else() -> None:
    """Sums of each c are stored in the loop over c in which they are complete."""
    shape, nest = (3, 2, 3, 64), norm_like({"n": 3, "g": 2, "c": 3, "s": 64}, "gc")
    shapes = {"x": shape, "w": (2, 3), "y": shape, "before": (2, 3), "after": (2, 3), "most": (2, 3)}
    source = built(nested_sums(nest.nest()), placement_of(PLACEMENTS[3], "ngcs"), shapes).kernels[0].source
    loops = [line.strip() for line in source.splitlines() if "tl.range(" in line]
    assert loops == 2 * ["for c in tl.range(0, 3):", "for first_s in tl.range(0, 64, 16):"]
    policies = [word for word in ("evict_last", "evict_first") for _ in range(source.count(word))]
    assert policies == ["evict_last", "evict_first"]  # the second time, x is in the cache


@pytest.mark.parametrize(
    ("text", "dtype", "reason"),
    [
        (PLACEMENTS[6], torch.float64, "do not fit in a message"),
        ("place(n, GRID); place(g, LANES); place(c, SHARED); place(s, LANES)", torch.float32, "element of g"),
        ("place(n, GRID); place(g, GRID); place(c, GRID); place(s, LANES)", torch.float32, "programs share"),
        ("place(n, GRID); place(s, LOOP); place(c, LOOP); place(g, LANES)", torch.float32, "room for each"),
    ],
)
def test_what_programs_cannot_share_is_refused(text: str, dtype: torch.dtype, reason: str) -> None:
    nest = norm_like({"n": 3, "g": 2, "c": 3, "s": 64}, "gc").nest()
    nodes = (replace(n, dtype=dtype) if isinstance(n, Reduce) else n for n in nest.nodes)
    nest = replace(nest, nodes=tuple(nodes))
    assert reason in str(refusal(nested_sums(nest), placement_of(text, "ngcs")))


def test_nothing_but_stores_follows_a_sum_of_which_programs_store_parts() -> None:
    nest = norm_like({"n": 3, "g": 2, "c": 3, "s": 64}, "gc")
    x = nest.load("x", "n", "g", "c", "s", dtype=torch.float32)
    total = nest.push(Reduce("sum", x.node, frozenset({0, 3}), torch.float32))
    nest.store("z", nest.mul(x, total), "n", "g", "c", "s")
    reason = refusal(nest.nest(), placement_of(PLACEMENTS[0], "ngcs"))
    assert reason is not None and "which programs share" in reason


def test_parts_that_would_store_as_much_as_they_load_are_not_made() -> None:
    def group(kept: str) -> frozenset[int] | None:
        return group_of(Analysis(norm_like({"n": 64, "g": 2, "c": 3, "s": 64}, kept).nest()), range(4))

    assert group("gc") == group("c") == frozenset({2, 3})
    assert group("s") is None  # of 64 columns, each program would store all


def test_a_group_of_few_neighbours_in_memory_is_no_part() -> None:
    """Channels-last: three channels of a group are beside those of others."""
    nest = norm_like({"n": 64, "g": 2, "c": 3, "s": 64}, "gc").nest()
    assert group_of(Analysis(nest), [0, 3, 1, 2]) is None


# GroupNorm and its like, from PyTorch code.


def group_norm_silu(groups: int) -> Callable[..., Tensor]:
    return lambda x, w, b: F.silu(F.group_norm(x, groups, w, b))


def by_hand(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Groups of four channels; its gradients are autograd's own."""
    parts = x.view(x.shape[0], -1, 4 * x.shape[2] * x.shape[3])
    centred = parts - parts.mean(-1, keepdim=True)
    unit = centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + 1e-5)
    return torch.tanh(unit.view_as(x) * w[:, None, None] + b[:, None, None])


def with_gradients(fn: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = fn(*leaves)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, weights)]


@pytest.mark.parametrize(
    ("fn", "shape", "dtype"),
    [
        (group_norm_silu(2), (3, 8, 4, 4), torch.float32),
        (group_norm_silu(2), (2, 4, 32, 32), torch.bfloat16),
        (group_norm_silu(1), (3, 4, 8, 8), torch.bfloat16),
        (group_norm_silu(6), (3, 6, 5, 5), torch.float32),  # a row is a channel: any size
        (group_norm_silu(4), (1, 8, 8, 8), torch.float32),
        (by_hand, (3, 8, 4, 8), torch.float32),
        (group_norm_silu(2), (2, 4, 150, 150), torch.bfloat16),  # 45,000 elements of a group: two parts
        (group_norm_silu(1), (2, 3, 130, 130), torch.float32),
    ],
)
def test_values_and_gradients_in_one_kernel_each(
    fn: Callable[..., Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    inputs = (torch.randn(shape).to(dtype), *(torch.randn(shape[1]).to(dtype) for _ in range(2)))
    compiled = Compiled(fn)
    ours, eager = with_gradients(compiled, inputs), with_gradients(fn, inputs)
    problems = [not_as_close(*v) for v in zip(ours, eager, with_gradients(fn, wide(inputs)), strict=True)]
    assert not any(problems), problems
    assert [len(plan.clusters) for plan in compiled.plans] == [1, 1]


SMALL = (((64, 32, 1), (32, 32, 2), (32, 16, 1), (128, 16, 4), (0, 32, 1)), ((256, 32, 4), (16, 16, 1)))


@pytest.mark.sample(12)
@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("shapes", SMALL, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("fn", "shape"),
    [
        (group_norm_silu(2), (3, 8, 8, 8)),
        (group_norm_silu(2), (2, 12, 5, 7)),
        (group_norm_silu(1), (1, 6, 9, 9)),
        (group_norm_silu(3), (2, 6, 4, 25)),
        (group_norm_silu(2), (5, 8, 16, 3)),
    ],
)
def test_values_and_gradients_of_groups_in_parts(
    fn: Callable[..., Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    shapes: tuple[tuple[int, ...], ...],
    number: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """shapes: of parts, which would otherwise be those of large groups."""
    monkeypatch.setattr(tile_parts.table, "shapes", lambda *_: shapes)
    for module, name in ((tile_parts, "LARGEST_TILE"), (tiles, "LARGEST_TILE"), (tile_parts, "ALONE")):
        monkeypatch.setattr(module, name, 64)
    inputs = (torch.randn(shape).to(dtype), *(torch.randn(shape[1]).to(dtype) for _ in range(2)))
    compiled = Compiled(fn, number)
    ours, eager = with_gradients(compiled, inputs), with_gradients(fn, inputs)
    problems = [not_as_close(*v) for v in zip(ours, eager, with_gradients(fn, wide(inputs)), strict=True)]
    assert not any(problems), problems
    (cluster,) = compiled.plans[1].clusters
    assert any(axis.group == INNER for axis in cluster.loops.axes)
    schedules = [runner.candidates[0].schedule for runner in compiled.compiler.runners.values()]
    assert "SHARED" in schedules[-1] or "LOOP" in schedules[-1]


def backward(
    *shape: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[fc.Report, tuple[Program, ...]]:
    """GroupNorm's backward for an H200: the report, and its first cluster's candidates."""
    with FakeTensorMode():
        sizes = (shape, shape[1:2], shape[1:2])
        inputs = [torch.empty(s, dtype=dtype, device="cuda", requires_grad=True) for s in sizes]
        report = fc.explain(group_norm_silu(32), *inputs, device="h200")
    plan = report.plans[1]
    key = canonical(plan.clusters[0], plan.dag)
    buffers: dict[str, Buffer] = {b.name: b for b in key.buffers}
    return report, emit(key.nests, plan.clusters[0].name, "", buffers, H200)


def test_a_tile_of_several_channels_does_not_spill() -> None:
    report, (first, *_) = backward(256, 256, 32, 32)
    assert len(report.plans[1].clusters) == 1
    assert [compile_for(kernel, "sm_90").spills for kernel in first.kernels] == [0, 0]
    source = first.kernels[0].source  # fewer tiles wait for the group's sums once the channels' are stored
    assert source.index("sum_1, sum_2 =") < source.index("tl.store(partial_1_ptr") < source.index("sum_3")
    assert source.count("tl.load(in0_ptr") == source.count("tl.load(in1_ptr") == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(16, 512, 128, 128), (2, 64, 1024, 1024), (4, 320, 100, 100)], ids=str)
def test_groups_larger_than_a_tile_compile_without_spills(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    report, programs = backward(*shape, dtype=dtype)
    assert len(report.plans[1].clusters) == 1
    for program in programs:
        assert len(program.kernels) == 2
        source, passes = program.kernels[0].source, 1 + ("LOOP" in program.schedule)
        assert source.count("tl.load(in0_ptr") == source.count("tl.load(in1_ptr") == passes
    assert not min(compile_for(program.kernels[0], "sm_90").spills for program in programs)
    if dtype is torch.bfloat16:
        assert not any(compile_for(program.kernels[0], "sm_90").spills for program in programs)


@not_before((2, 12), "the gradient of SiLU has no sigmoid to keep")
@of_measured_versions
def test_what_took_special_functions_is_kept_and_the_rest_computed_again() -> None:
    """Between the sums and dx: x as it was loaded, and the product in which the sigmoid is."""
    _, (first, *_) = backward(16, 512, 128, 128)
    kernel = first.kernels[0]
    counts = [kernel.source.count(name) for name in ("_sigmoid(", "fm.again(in1_loaded)", "fm.sums(")]
    assert counts == [1, 1, 2]
    binary = compile_for(kernel, "sm_90")
    assert binary.registers == kernel.registers == 64 and not binary.spills


def test_images_of_odd_size_take_one_reading() -> None:
    report, (first, *_) = backward(32, 320, 63, 65)
    assert len(report.plans[1].clusters) == 1
    assert first.kernels[0].source.count("tl.load(in0_ptr") == 1


def test_channels_and_pixels_that_fill_little_of_a_tile_are_two_kernels() -> None:
    """A tile of 32 x 256 elements would hold 17 channels of 132 pixels."""
    report, _ = backward(64, 544, 11, 12)
    assert len(report.plans[1].clusters) == 2
    report, (first, *_) = backward(64, 640, 12, 12)  # 20 channels of 144 pixels
    assert len(report.plans[1].clusters) == 1
    assert first.kernels[0].source.count("tl.load(in0_ptr") == 1


def test_partial_results_of_small_groups_are_first_added_up_in_a_tile() -> None:
    report, (first, *_) = backward(65536, 64, 4, 4)
    assert len(report.plans[1].clusters) == 1
    assert first.scratch[0].shape == (65536 // 4, 64)


def test_channels_that_lie_inside_are_an_axis_of_the_tile() -> None:
    """Channels-last: those of a pixel lie side by side, and a tile has all of them."""

    def scaled(x: Tensor) -> Tensor:
        y = x / x.amax((1, 2, 3), keepdim=True)
        return y / y.amax(1, keepdim=True)

    x = torch.rand(4, 64, 8, 8).contiguous(memory_format=torch.channels_last)
    compiled = Compiled(scaled)
    assert not_as_close(compiled(x), scaled(x), scaled(x.double())) is None
    assert len(compiled.plans[0].clusters) == 1


def test_a_sum_over_pixels_keeps_channels_that_lie_inside_of_them() -> None:
    """Channels-last: channels, which the sum keeps, lie inside of the pixels that it reduces."""
    x, weight, shift, out = (torch.randn(s) for s in ((2, 16, 8, 8), (16,), (2, 16), (2, 16, 8, 8)))

    def block(x: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
        return F.silu(F.group_norm(x + shift[:, :, None, None], 8, weight))

    def gradients(fn: Callable[..., Tensor], order: torch.memory_format, dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in (x, weight, shift)]
        first = leaves[0].contiguous(memory_format=order)
        fn(first, *leaves[1:]).backward(out.to(dtype).contiguous(memory_format=order))
        return [t.grad for t in leaves if t.grad is not None]

    rows = torch.contiguous_format
    eager, truth = (gradients(block, rows, d) for d in (torch.float32, torch.float64))
    for our, their, true in zip(
        gradients(Compiled(block), torch.channels_last, torch.float32), eager, truth, strict=True
    ):
        assert not_as_close(our, their, true) is None
