"""Loads through tensor descriptors: their values in Triton's interpreter, what is refused, and the bulk
copies that they become."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_compiler.codegen import assemble
from fusion_compiler.errors import KernelError
from fusion_compiler.ir.device import device_spec
from fusion_compiler.ir.kernel import Buffer, Program
from fusion_compiler.ir.loops import COLS, INNER, InRange, LoopNest, Value
from fusion_compiler.runtime import cuda
from fusion_compiler.runtime.launch import Runner, interpret
from fusion_compiler.runtime.target import compile_for
from fusion_compiler.schedule import windowed
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.placement import Access, Placement, Via
from fusion_compiler.schedule.shapes import padded
from fusion_compiler.schedule.verifier import refusal
from tests.codegen.test_placed import H200, Windows, close, convolution, filter_gradient, out_size
from tests.hand_made import contiguous

BULK = "cp.async.bulk.tensor"
ROWS_OF_FOUR = (
    "place(n, GRID); place(y, GRID); split(x, 4); place(x.o, GRID); split(c, 16); place(c.o, GRID); "
    "place(x.i, LANES); place(c.i, LANES); place(r, UNROLL); place(s, UNROLL); access(x, DESCRIPTOR); 1 warps"
)


def program_of(loops: LoopNest, buffers: dict[str, Buffer], placement: Placement) -> Program:
    return assemble.build(assemble.Nests((loops,), buffers), (placement,), "boxed", "")


def through(placement: Placement, *names: str) -> Placement:
    """A placement whose loads of some buffers go through descriptors."""
    accesses = (Via(name, Access.DESCRIPTOR) for name in names)
    return replace(placement, directives=(*placement.directives, *accesses))


def described(dtype: torch.dtype = torch.float32, **shapes: tuple[int, ...]) -> dict[str, Buffer]:
    return {name: contiguous(name, shape, dtype) for name, shape in shapes.items()}


def random_inputs(buffers: dict[str, Buffer]) -> dict[str, Tensor]:
    shapes = {name: [int(size) for size in buffer.shape] for name, buffer in buffers.items()}
    return {name: torch.randn(shape) for name, shape in shapes.items() if name != "out"}


def of_convolution(
    n: int, size: int, c: int, geometry: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> dict[str, Buffer]:
    out, kernel = out_size(size, *geometry), geometry[0]
    shapes = {"x": (n, size, size, c), "out": (n, out, out, c), "w": (c, kernel, kernel), "bias": (c,)}
    return described(dtype, **shapes)


def computed(
    loops: LoopNest, placement: Placement, buffers: dict[str, Buffer], tensors: dict[str, Tensor]
) -> tuple[Tensor, ...]:
    program = program_of(loops, buffers, placement)
    text = "".join(kernel.source for kernel in program.kernels)
    for i, buffer in enumerate(program.inputs):
        is_boxed = f"tl.make_tensor_descriptor(in{i}_ptr" in text
        assert is_boxed == (buffer.name in placement.descriptors) != (f"tl.load(in{i}_ptr" in text), text
    return interpret(program, [tensors[b.name] for b in program.inputs], [])


@pytest.mark.parametrize("geometry", [(3, 1, 1, 1), (5, 1, 2, 1), (3, 1, 2, 2), (2, 1, 0, 1), (7, 1, 3, 1)])
def test_a_convolution_and_its_filters_gradient_load_boxes(geometry: tuple[int, ...]) -> None:
    _, stride, padding, dilation = geometry
    n, size, c = 2, random.randint(8, 12), random.choice([8, 20, 36])
    out = out_size(size, *geometry)
    buffers = of_convolution(n, size, c, geometry) | described(g=(n, out, out, c))
    tensors = random_inputs(buffers)
    image = tensors["x"].double().permute(0, 3, 1, 2)
    filters = tensors["w"].double()[:, None].requires_grad_()
    result = F.conv2d(image, filters, None, stride, padding, dilation, c)
    total = result.detach() + tensors["bias"].double()[:, None, None]
    (of_filters,) = torch.autograd.grad(result, filters, tensors["g"].double().permute(0, 3, 1, 2))
    for loops, names, truth in (
        (convolution(n, size, c, geometry), ("x",), F.silu(total).permute(0, 2, 3, 1)),
        (filter_gradient(n, size, c, geometry), ("x", "g"), of_filters[:, 0]),
    ):
        buffers["out"] = described(out=tuple(truth.shape))["out"]
        placements = [through(placement, *names) for placement in windowed.placements(Analysis(loops), H200)]
        boxed = [placement for placement in placements if refusal(loops, placement, buffers, H200) is None]
        assert boxed, refusal(loops, placements[0], buffers, H200)
        for placement in random.sample(boxed, min(2, len(boxed))):
            (ours,) = computed(loops, placement, buffers, tensors)
            assert close(ours, truth), placement


@pytest.mark.parametrize("in_lanes", [True, False])
def test_positions_with_strides_load_boxes(in_lanes: bool) -> None:
    """Lanes two elements apart meet every other element, from a first or a second one on."""
    geometry = (3, 2, 1, 1)
    loops, buffers = convolution(2, 9, 20, geometry), of_convolution(2, 9, 20, geometry)
    text = ROWS_OF_FOUR
    if not in_lanes:
        text = text.replace("split(x, 4); place(x.o, GRID)", "place(x, LOOP)")
        text = text.replace("place(x.i, LANES); ", "")
    placement = Placement.parse(text)
    assert refusal(loops, placement, buffers) is None
    tensors = random_inputs(buffers)
    image, filters = tensors["x"].double().permute(0, 3, 1, 2), tensors["w"].double()[:, None]
    truth = F.silu(F.conv2d(image, filters, tensors["bias"].double(), 2, 1, 1, 20)).permute(0, 2, 3, 1)
    (ours,) = computed(loops, placement, buffers, tensors)
    assert close(ours, truth)


@pytest.mark.parametrize("reduced", ["rs", "yt"])
def test_windows_without_a_condition_share_a_dimension(reduced: str) -> None:
    """x[y + r, t + s, c] has three dimensions, not five. Positions behind the last still meet elements."""
    high, wide, c = random.choice([5, 7, 9]), random.randint(5, 9), random.choice([4, 12])
    sizes = {"y": high, "t": wide, "c": c, "r": 3, "s": 2}
    nest = Windows({name: (size, INNER if name in "rs" else COLS) for name, size in sizes.items()})
    row = (wide + 1) * c
    x = nest.load("x", at={"y": row, "r": row, "t": c, "s": c, "c": 1}, dtype=torch.float32)
    kept = [name for name in sizes if name not in reduced]
    nest.store("out", nest.reduced("sum", x, reduced), *kept, dtype=torch.float32)
    loops = nest.nest()
    buffers = described(x=(high + 2, wide + 1, c), out=tuple(sizes[name] for name in kept))
    text = ("split(y, 2); place(y.o, LOOP); place(y.i, LANES); place(t, LANES); place(c, LANES); "
            "place(r, LOOP); place(s, UNROLL); access(x, DESCRIPTOR); 1 warps")  # fmt: skip
    assert refusal(loops, Placement.parse(text), buffers, H200) is None
    (kernel,) = program_of(loops, buffers, Placement.parse(text)).kernels
    assert f"tl.make_tensor_descriptor(in0_ptr, [{high + 2}, {wide + 1}, {c}], " in kernel.source
    tensor = torch.randn(high + 2, wide + 1, c)
    (ours,) = computed(loops, Placement.parse(text), buffers, {"x": tensor})
    windows = tensor.double().unfold(0, 3, 1).unfold(1, 2, 1)  # y, t, c, r, s
    assert close(ours, windows.sum(["ytcrs".index(name) for name in reduced]))


@pytest.mark.parametrize("seed", range(16))
def test_boxes_of_a_part_of_a_tensor_have_nothing_of_what_lies_around(seed: int) -> None:
    """Sums over some axes of a part of a tensor that is NaN elsewhere, under splits and with any lanes."""
    chosen = random.Random(seed)
    names = "abcd"
    sizes = {name: chosen.randint(1, 6) for name in names} | {"d": chosen.choice([4, 6, 8, 9, 16])}
    first = {name: chosen.randint(0, 2) for name in names} | {"d": 4 * chosen.randint(0, 2)}
    shape = [first[name] + sizes[name] + chosen.randint(0, 3) for name in names]
    shape[-1] = -(-shape[-1] // 4) * 4
    strides = [math.prod(shape[i + 1 :]) for i in range(4)]
    nest = Windows({name: (size, COLS) for name, size in sizes.items()})
    at: dict[str | Value, int] = dict(zip(names, strides, strict=True))
    const = sum(first[name] * stride for name, stride in zip(names, strides, strict=True))
    x = nest.load("x", at=at, const=const, dtype=torch.float32)
    reduced = chosen.sample(names, chosen.randint(1, 3))
    kept = [name for name in names if name not in reduced]
    nest.store("out", nest.reduced("sum", x, "".join(reduced)), *kept, dtype=torch.float32)
    loops = nest.nest()
    buffers = described(x=tuple(shape), out=tuple(sizes[name] for name in kept))
    tensor = torch.full(shape, math.nan)
    part = tensor[tuple(slice(first[name], first[name] + sizes[name]) for name in names)]
    part.copy_(torch.randn(part.shape))
    truth = part.double().sum([names.index(name) for name in reduced])
    tried = 0
    for _ in range(200):
        placement = _any_placement(chosen, sizes)
        if placement is None or refusal(loops, placement, buffers) is not None:
            continue
        (ours,) = computed(loops, placement, buffers, {"x": tensor})
        assert close(ours, truth), placement
        tried += 1
        if tried == 4:
            return
    assert tried


def _any_placement(chosen: random.Random, sizes: dict[str, int]) -> Placement | None:
    directives: list[str] = []
    lanes = 1
    for name in chosen.sample(list(sizes), len(sizes)):
        place, inner = chosen.choice(["GRID", "LOOP", "LANES", "UNROLL"]), sizes[name]
        if name == "d":
            place = "LANES"
        if chosen.random() < 0.5:
            inner = chosen.choice([2, 4, 8])
            directives += [f"split({name}, {inner})", f"place({name}.o, {chosen.choice(['GRID', 'LOOP'])})"]
            name = f"{name}.i"
        lanes *= padded(inner) if place == "LANES" else 1
        directives.append(f"place({name}, {place})")
    text = "; ".join([*directives, "access(x, DESCRIPTOR)", "1 warps"])
    return Placement.parse(text) if lanes <= 256 else None


def test_a_placement_with_accesses_reads_back() -> None:
    placement = Placement.parse(ROWS_OF_FOUR)
    assert Via("x", Access.DESCRIPTOR) in placement.directives
    assert placement.descriptors == {"x"} and placement.misaligned
    plain = replace(placement, directives=(*placement.directives[:-1], Via("x", Access.PLAIN)))
    assert str(plain) == ROWS_OF_FOUR.replace("access(x, DESCRIPTOR); ", "")
    assert not plain.descriptors and not plain.misaligned
    with pytest.raises(ValueError):
        Placement.parse(ROWS_OF_FOUR.replace("DESCRIPTOR", "BOXES"))


NARROW = ROWS_OF_FOUR.replace("split(c, 16)", "split(c, 2)")
REFUSALS = [
    ((3, 1, 1, 1), 40, ROWS_OF_FOUR.replace("access(x", "access(y"), "the nest loads no y"),
    ((3, 2, 1, 1), 40, ROWS_OF_FOUR.replace("s, UNROLL", "s, LOOP"), "no multiple of 2 elements"),
    ((3, 1, 1, 1), 33, ROWS_OF_FOUR, "begin at no multiple of 16 bytes"),
    ((3, 1, 1, 1), 40, NARROW, "do not cover 16 bytes"),
    ((3, 1, 1, 1), 40, ROWS_OF_FOUR.replace("c.i, LANES", "c.i, UNROLL"), "do not cover 16 bytes"),
    ((3, 1, 1, 1), 40, ROWS_OF_FOUR.replace("split(c, 16)", "split(c, 6)"), "c.i has 6 elements in 8 lanes"),
    ((3, 1, 1, 1), 40, ROWS_OF_FOUR.replace("s, UNROLL", "s, LANES"), "x.i and s are lanes along one"),
    ((3, 1, 1, 1), 40, ROWS_OF_FOUR.replace("access(x", "access(w"), "16 bytes of neighbours in w"),
]  # fmt: skip


@pytest.mark.parametrize("geometry, c, text, reason", REFUSALS)
def test_what_no_box_holds_is_refused(geometry: tuple[int, ...], c: int, text: str, reason: str) -> None:
    loops, buffers = convolution(2, 10, c, geometry), of_convolution(2, 10, c, geometry)
    why = refusal(loops, Placement.parse(text), buffers, H200)
    assert why is not None and reason in why


def test_refusals_tell_of_buffers_and_devices() -> None:
    geometry = (3, 1, 1, 1)
    loops, buffers = convolution(2, 10, 40, geometry), of_convolution(2, 10, 40, geometry)
    placement = Placement.parse(ROWS_OF_FOUR)
    assert refusal(loops, placement, buffers, H200) is None
    assert refusal(loops, placement) == "nothing is known about x"
    for device in ("a100", "mi300x"):
        assert "has no tensor descriptors" in str(refusal(loops, placement, buffers, device_spec(device)))
    over = buffers | {"out": replace(buffers["out"], reuses="x")}
    assert refusal(loops, placement, over, H200) == "x is overwritten"
    flags = buffers | {"x": replace(buffers["x"], dtype=torch.bool)}
    assert refusal(loops, placement, flags, H200) == "x has elements of torch.bool"


def test_indices_that_are_data_and_conditions_of_two_dimensions_are_refused() -> None:
    text = "place(a, GRID); place(b, LANES); access(x, DESCRIPTOR); 1 warps"
    for reason in ("an index that is data", "no range", "none of one of its dimensions"):
        nest = Windows({"a": (8, COLS), "b": (16, COLS)})
        at: dict[str | Value, int] = {"a": 16, "b": 1}
        within = None
        if reason == "an index that is data":
            at[nest.load("i", "a", dtype=torch.int64)] = 16
        elif reason == "no range":
            within = nest.op("gt.Scalar", nest.load("i", "a", dtype=torch.int64), 0, dtype=torch.bool)
        else:
            within = nest.push(InRange(nest.index({"a": 16, "b": 2}), 0, 100))
        x = nest.load("x", at=at, dtype=torch.float32, within=within)
        nest.store("out", x, "a", "b", dtype=torch.float32)
        buffers = described(x=(24, 16), out=(8, 16)) | described(torch.int64, i=(8,))
        assert reason in str(refusal(nest.nest(), Placement.parse(text), buffers, H200))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.float64])
@pytest.mark.parametrize("block", [16, 512])
def test_a_box_is_one_bulk_copy_where_the_target_has_them(dtype: torch.dtype, block: int) -> None:
    geometry = (3, 1, 1, 1)
    loops, buffers = convolution(2, 10, 528, geometry), of_convolution(2, 10, 528, geometry)
    buffers["x"] = replace(buffers["x"], dtype=dtype)
    placement = Placement.parse(ROWS_OF_FOUR.replace("split(c, 16)", f"split(c, {block})"))
    assert refusal(loops, placement, buffers, H200) is None
    (kernel,) = program_of(loops, buffers, placement).kernels
    assert kernel.source.count("in0_box.load(") == 9
    assert BULK in compile_for(kernel, "sm_90").asm["ptx"]
    assert BULK not in compile_for(kernel, "sm_89").asm["ptx"]  # where Triton 3.6 begins to convert float8


def test_offsets_have_32_bits_where_addresses_need_more() -> None:
    geometry, size = (3, 1, 1, 1), 2048
    loops, buffers = convolution(64, size, 64, geometry), of_convolution(64, size, 64, geometry)
    (kernel,) = program_of(loops, buffers, Placement.parse(ROWS_OF_FOUR)).kernels
    assert "tl.program_id(0).to(tl.int64)" in kernel.source
    assert BULK in compile_for(kernel, "sm_90").asm["ptx"]


def test_inputs_at_other_addresses_are_loaded_plainly() -> None:
    """A descriptor begins at a multiple of 16 bytes. Where an input does not, another program runs."""
    geometry = (3, 1, 1, 1)
    loops, buffers = convolution(2, 10, 40, geometry), of_convolution(2, 10, 40, geometry)
    boxed = Placement.parse(ROWS_OF_FOUR)
    plain = replace(boxed, directives=boxed.directives[:-1])
    programs = tuple(program_of(loops, buffers, p) for p in (boxed, plain))
    assert [program.word > 0 for program in programs] == [True, False]
    tensors = random_inputs(buffers)
    inputs = [tensors[b.name] for b in programs[0].inputs]
    shifted = [torch.empty(t.numel() + 1)[1:].view(t.shape).copy_(t) for t in inputs]
    assert all(t.data_ptr() % 16 for t in shifted)
    with pytest.raises(KernelError):
        interpret(programs[0], shifted)
    runner = Runner(programs, lambda *_: (), name="boxed", strict=True, backend="interpret")
    assert torch.equal(*runner(*shifted), *runner(*inputs))


class _Run:
    """A stand-in for a launcher of Triton's, which asks for memory as that one does."""

    launch_pdl = True

    def __init__(self) -> None:
        self.launched: list[tuple[object, ...]] = []

    def __call__(self, *arguments: object) -> None:
        from triton.runtime import _allocation

        self.launched.append((_allocation._allocator.get(), self.launch_pdl, *arguments))


def test_a_kernel_that_needs_memory_has_it_from_pytorch_and_starts_behind_others() -> None:
    from triton.runtime import _allocation

    run, build = _Run(), SimpleNamespace(signature=())
    kernels = [
        SimpleNamespace(function=1, packed_metadata=2, metadata=SimpleNamespace(global_scratch_size=size))
        for size in (0, 128)
    ]
    plain, kernel = kernels
    assert cuda._entry(build, plain, run).run is run  # type: ignore[arg-type]
    entry = cuda._entry(build, kernel, run)  # type: ignore[arg-type]
    before = _allocation._allocator.get()
    entry.run(1, 1, 1)
    ((allocator, is_dependent, *arguments),) = run.launched
    assert allocator is not before and not is_dependent and arguments == [1, 1, 1]
    assert entry.direct is None and _allocation._allocator.get() is before
