"""Loop nests under placements, in Triton's interpreter: convolutions and their gradients, reductions over any
axes, and what the text of their kernels repeats and leaves out."""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_compiler.codegen import assemble
from fusion_compiler.ir.device import device_spec
from fusion_compiler.ir.kernel import Program
from fusion_compiler.ir.loops import COLS, INNER, Compute, Coordinate, InRange, LoopNest, Reduce, Value
from fusion_compiler.runtime.launch import interpret
from fusion_compiler.schedule import windowed
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.placement import Placement
from fusion_compiler.schedule.shapes import padded
from fusion_compiler.schedule.verifier import refusal
from tests.hand_made import contiguous
from tests.nests import TARGETS, Nest

H200 = device_spec("h200")
KERNELS = [(3, 1, 1, 1), (5, 2, 2, 1), (3, 1, 2, 2), (7, 1, 3, 1), (2, 2, 0, 1), (3, 3, 1, 1)]


class Windows(Nest):
    """A nest of images [n, y, x, c] and filters [c, r, s]; r and s are inner axes, or y and x are."""

    def reduced(self, combine: str, value: Value, axes: str) -> Value:
        numbers = frozenset(list(self.axes).index(axis) for axis in axes)
        return self.push(Reduce(combine, value.node, numbers, torch.float32))

    def condition(self, *parts: Value) -> Value:
        operands = (("self", parts[0]), ("other", parts[1]))
        return self.push(Compute(TARGETS["logical_and.default"], operands, torch.bool))

    def window(self, name: str, sizes: tuple[int, int], geometry: tuple[int, ...]) -> Value:
        """Load an image [n, *sizes, c] at y * stride - padding + r * dilation, and likewise x."""
        _, stride, padding, dilation = geometry
        high, wide = sizes
        c = self.axes["c"][0]
        assert isinstance(c, int)
        steps = {"y": wide * c, "x": c}
        conditions: list[Value] = []
        at: dict[str | Value, int] = {"n": high * wide * c, "c": 1}
        for (p, t), size in zip((("y", "r"), ("x", "s")), sizes, strict=True):
            terms: dict[str | Value, int] = {p: stride, t: dilation}
            conditions.append(self.push(InRange(self.index(terms, -padding), 0, size)))
            at |= {p: stride * steps[p], t: dilation * steps[p]}
        const = -padding * (steps["y"] + steps["x"])
        return self.load(name, at=at, const=const, dtype=torch.float32, within=self.condition(*conditions))


def built(loops: LoopNest, placement: Placement, shapes: dict[str, tuple[int, ...]]) -> Program:
    buffers = {name: contiguous(name, shape, torch.float32) for name, shape in shapes.items()}
    return assemble.build(assemble.Nests((loops,), buffers), (placement,), "placed", "")


def run(program: Program, **tensors: Tensor) -> Tensor:
    (result,) = interpret(program, [tensors[b.name] for b in program.inputs], [])
    return result


def out_size(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def convolution(n: int, size: int, c: int, geometry: tuple[int, ...]) -> LoopNest:
    kernel, out = geometry[0], out_size(size, *geometry)
    sizes = {"n": n, "y": out, "x": out, "c": c}
    axes = {name: (extent, COLS) for name, extent in sizes.items()}
    nest = Windows({**axes, "r": (kernel, INNER), "s": (kernel, INNER)})
    x = nest.window("x", (size, size), geometry)
    w = nest.load("w", "c", "r", "s", dtype=torch.float32)
    total = nest.reduced("sum", nest.mul(x, w), "rs")
    total = nest.add(total, nest.load("bias", "c", dtype=torch.float32))
    nest.store("out", nest.mul(total, nest.op("sigmoid.default", total)), *"nyxc", dtype=torch.float32)
    return nest.nest()


def filter_gradient(n: int, size: int, c: int, geometry: tuple[int, ...]) -> LoopNest:
    kernel, out = geometry[0], out_size(size, *geometry)
    axes = {name: (extent, COLS) for name, extent in {"c": c, "r": kernel, "s": kernel}.items()}
    nest = Windows(axes | {name: (extent, INNER) for name, extent in {"n": n, "y": out, "x": out}.items()})
    x = nest.window("x", (size, size), geometry)
    g = nest.load("g", *"nyxc", dtype=torch.float32)
    nest.store("out", nest.reduced("sum", nest.mul(x, g), "nyx"), *"crs", dtype=torch.float32)
    return nest.nest()


def image_gradient(n: int, size: int, c: int, geometry: tuple[int, ...]) -> LoopNest:
    """The gradient at (y + padding - r * dilation) / stride, where that is a whole number."""
    kernel, stride, padding, dilation = geometry
    out = out_size(size, *geometry)
    axes = {name: (extent, COLS) for name, extent in {"n": n, "y": size, "x": size, "c": c}.items()}
    nest = Windows({**axes, "r": (kernel, INNER), "s": (kernel, INNER)})
    at: dict[str | Value, int] = {"n": out * out * c, "c": 1}
    conditions: list[Value] = []
    for p, t, step in (("y", "r", out * c), ("x", "s", c)):
        index = nest.index({p: 1, t: -dilation}, padding)
        place = nest.push(Coordinate(index, torch.int64))
        conditions.append(nest.push(InRange(index, 0, stride * out)))
        rest = nest.op("remainder.Scalar", place, stride, dtype=torch.int64)
        conditions.append(nest.op("eq.Scalar", rest, 0, dtype=torch.bool))
        at[nest.op("floor_divide.default", place, stride, dtype=torch.int64)] = step
    within = conditions[0]
    for other in conditions[1:]:
        within = nest.condition(within, other)
    g = nest.load("g", at=at, dtype=torch.float32, within=within)
    w = nest.load("w", "c", "r", "s", dtype=torch.float32)
    nest.store("out", nest.reduced("sum", nest.mul(g, w), "rs"), *"nyxc", dtype=torch.float32)
    return nest.nest()


def close(ours: Tensor, truth: Tensor) -> bool:
    return bool((ours.double() - truth).abs().max() <= 1e-5 * (1 + truth.abs().max()))


@pytest.mark.parametrize("geometry", KERNELS)
def test_every_placement_of_a_convolution_is_right(geometry: tuple[int, ...]) -> None:
    kernel, stride, padding, dilation = geometry
    n, size, c = 2, random.randint(8, 12), random.choice([8, 20, 33])
    out = out_size(size, *geometry)
    x, w, bias = torch.randn(n, size, size, c), torch.randn(c, kernel, kernel), torch.randn(c)
    image, filters = x.double().permute(0, 3, 1, 2), w.double()[:, None]
    truth = F.silu(F.conv2d(image, filters, bias.double(), stride, padding, dilation, c)).permute(0, 2, 3, 1)
    loops = convolution(n, size, c, geometry)
    shapes = {"x": (n, size, size, c), "w": (c, kernel, kernel), "bias": (c,), "out": (n, out, out, c)}
    placements = windowed.placements(Analysis(loops), H200)
    assert placements
    for placement in random.sample(placements, min(3, len(placements))):
        assert close(run(built(loops, placement, shapes), x=x, w=w, bias=bias), truth), placement


@pytest.mark.parametrize("geometry", KERNELS)
def test_every_placement_of_its_gradients_is_right(geometry: tuple[int, ...]) -> None:
    kernel, stride, padding, dilation = geometry
    n, size, c = 2, random.randint(8, 12), random.choice([8, 20, 33])
    out = out_size(size, *geometry)
    x, w, g = torch.randn(n, size, size, c), torch.randn(c, kernel, kernel), torch.randn(n, out, out, c)
    image, filters = x.double().permute(0, 3, 1, 2).requires_grad_(), w.double()[:, None].requires_grad_()
    result = F.conv2d(image, filters, None, stride, padding, dilation, c)
    of_image, of_filters = torch.autograd.grad(result, (image, filters), g.double().permute(0, 3, 1, 2))
    shapes = {"x": (n, size, size, c), "w": (c, kernel, kernel), "g": (n, out, out, c)}
    for loops, truth in (
        (image_gradient(n, size, c, geometry), of_image.permute(0, 2, 3, 1)),
        (filter_gradient(n, size, c, geometry), of_filters[:, 0]),
    ):
        placements = windowed.placements(Analysis(loops), H200)
        assert placements
        for placement in random.sample(placements, min(3, len(placements))):
            program = built(loops, placement, shapes | {"out": tuple(truth.shape)})
            assert close(run(program, x=x, w=w, g=g), truth), placement


def test_neighbours_share_the_elements_of_their_windows() -> None:
    loops = convolution(1, 16, 32, (3, 1, 1, 1))
    text = ("place(n, GRID); place(y, GRID); split(x, 4); place(x.o, GRID); place(c, LANES); "
            "place(x.i, UNROLL); place(r, UNROLL); place(s, UNROLL); 1 warps")  # fmt: skip
    shapes = {"x": (1, 16, 16, 32), "w": (32, 3, 3), "bias": (32,), "out": (1, 16, 16, 32)}
    (kernel,) = built(loops, Placement.parse(text), shapes).kernels
    assert kernel.source.count("tl.load(in0_ptr") == 3 * (4 + 2)  # of 4 * 9 taps


def test_taps_that_meet_no_element_are_left_out() -> None:
    loops = image_gradient(1, 16, 32, (3, 2, 1, 1))
    text = ("place(n, GRID); split(y, 2); place(y.o, GRID); split(x, 2); place(x.o, LANES); "
            "place(c, LANES); place(y.i, UNROLL); place(x.i, UNROLL); place(r, UNROLL); "
            "place(s, UNROLL); 1 warps")  # fmt: skip
    shapes = {"g": (1, 8, 8, 32), "w": (32, 3, 3), "out": (1, 16, 16, 32)}
    (kernel,) = built(loops, Placement.parse(text), shapes).kernels
    assert kernel.source.count("tl.load(in0_ptr") == 4
    assert kernel.source.count("tl.store(") == 4


COMBINES = {"sum": Tensor.sum, "max": Tensor.amax, "min": Tensor.amin}


@pytest.mark.parametrize("seed", range(12))
def test_reductions_over_any_axes_of_five_share_a_kernel(seed: int) -> None:
    """Several different subsets of the axes, each placed somewhere; results of programs' parts are merged."""
    chosen = random.Random(seed)
    names = "abcde"
    sizes = {name: chosen.randint(2, 5) for name in names}
    nest = Windows({name: (size, COLS) for name, size in sizes.items()})
    x = nest.load("x", *names, dtype=torch.float32)
    subsets = [chosen.sample(names, chosen.randint(1, 4)) for _ in range(3)]
    kept = [[name for name in names if name not in subset] for subset in subsets]
    combines = [chosen.choice(list(COMBINES)) for _ in subsets]
    for i, (subset, combine) in enumerate(zip(subsets, combines, strict=True)):
        total = nest.reduced(combine, x, "".join(subset))
        nest.store(f"out{i}", nest.mul(total, nest.constant(2.0)), *kept[i], dtype=torch.float32)
    loops = nest.nest()
    tensor = torch.randn(*sizes.values())
    shapes = {f"out{i}": tuple(sizes[n] for n in of) for i, of in enumerate(kept)}
    shapes["x"] = tuple(tensor.shape)
    tried = 0
    for _ in range(40):
        places = {name: chosen.choice(["GRID", "LOOP", "LANES"]) for name in names}
        placement = Placement.parse("".join(f"place({n}, {p}); " for n, p in places.items()) + "1 warps")
        lanes = math.prod(padded(sizes[name]) for name, place in places.items() if place == "LANES")
        if lanes > 256 or refusal(loops, placement) is not None:
            continue
        tried += 1
        results = interpret(built(loops, placement, shapes), [tensor], [])
        for result, subset, combine in zip(results, subsets, combines, strict=True):
            dims = tuple(names.index(name) for name in subset)
            truth = 2 * COMBINES[combine](tensor.double(), dims)
            assert close(result, truth), f"{placement}: {combine} over {subset}"
        if tried == 3:
            return
    assert tried


@pytest.mark.parametrize(("few", "rows", "terms"), [(4, 64, 96), (3, 50, 70), (16, 33, 200)])
@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("order", ["m n k", "n m k", "k n m"])
def test_tensor_cores_add_up_products_in_a_loop(
    few: int, rows: int, terms: int, divided: bool, order: str
) -> None:
    """A matrix times vectors of bfloat16, or times these over their largest elements, of which each is three
    numbers of bfloat16."""
    nest = Windows({"m": (few, COLS), "n": (rows, COLS), "k": (terms, INNER)})
    x = nest.load("x", "m", "k")
    vectors = nest.op("div.Tensor", x, nest.reduced("max", nest.op("abs.default", x), "k")) if divided else x
    total = nest.reduced("sum", nest.mul(vectors, nest.load("w", "n", "k")), "k")
    nest.store("out", nest.mul(total, nest.constant(0.5)), "m", "n", dtype=torch.float32)
    loops = nest.nest()
    tile = {"m": "m", "n": "n.i", "k": "k.i"}
    lanes = "; ".join(f"place({tile[name]}, LANES)" for name in order.split())
    placement = Placement.parse(
        f"split(n, 16); split(k, 32); place(n.o, GRID); place(k.o, LOOP); {lanes}; "
        f"unit({loops.names[total.node]}, TENSOR_CORE); 4 warps"
    )
    assert refusal(loops, placement) is None
    unrolled = str(placement).replace("place(k.o, LOOP)", "place(k.o, UNROLL)")  # nothing adds up these terms
    assert "no sum of products" in str(refusal(loops, Placement.parse(unrolled)))
    shapes = {"x": (few, terms), "w": (rows, terms), "out": (few, rows)}
    dtypes = {"x": torch.bfloat16, "w": torch.bfloat16, "out": torch.float32}
    buffers = {name: contiguous(name, shape, dtypes[name]) for name, shape in shapes.items()}
    program = assemble.build(assemble.Nests((loops,), buffers), (placement,), "placed", "")
    assert program.kernels[0].source.count("fm.contract(") == 1
    values, matrix = torch.randn(few, terms).bfloat16(), torch.randn(rows, terms).bfloat16()
    exact = values.double() / (values.double().abs().amax(1, keepdim=True) if divided else 1)
    assert close(run(program, x=values, w=matrix), 0.5 * exact @ matrix.double().T)
