"""Products of few rows with matrices stored [k, n]: sums over the matrix's rows, which programs share.

The last program of each block of columns adds up what the others left, and computes what waits for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

import fusion_compiler as fc
from fusion_compiler.codegen.emit import schedules_of
from fusion_compiler.compiler.runners import emit_cluster
from fusion_compiler.ir.canonical import canonical
from fusion_compiler.ir.device import DEVICES, DeviceSpec, device_spec
from fusion_compiler.ir.kernel import Program
from fusion_compiler.ir.loops import LoopNest
from fusion_compiler.options import ALL
from fusion_compiler.runtime.target import compile_for
from fusion_compiler.schedule.few_rows import Tile, placed_tile
from fusion_compiler.schedule.placement import Place, Placement
from fusion_compiler.schedule.products import Products
from fusion_compiler.schedule.space import schedules
from tests.exactness import Compiled, Schedules, cramped, not_as_close, wide

ROW_LANES = ("row", "row.i", "row.i.i")  # the names of the lanes that have a matrix' rows
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Function = Callable[..., Tensor]


def product(x: Tensor, w: Tensor, b: Tensor, r: Tensor, g: Tensor) -> Tensor:
    return torch.addmm(b, x, w)


def gelu_and_residual(x: Tensor, w: Tensor, b: Tensor, r: Tensor, g: Tensor) -> Tensor:
    return r + F.gelu(torch.addmm(b, x, w), approximate="tanh")


def normed(x: Tensor, w: Tensor, b: Tensor, r: Tensor, g: Tensor) -> Tensor:
    return torch.addmm(b, F.layer_norm(x, g.shape, g), w)


def rms_normed(x: Tensor, w: Tensor, b: Tensor, r: Tensor, g: Tensor) -> Tensor:
    return r + torch.addmm(b, F.rms_norm(x, g.shape, g), w)


def softmax_product(x: Tensor, w: Tensor, b: Tensor, r: Tensor, g: Tensor) -> Tensor:
    return torch.addmm(b, torch.softmax(x, -1), w)


def operands(rows: int, k: int, n: int, dtype: torch.dtype) -> list[Tensor]:
    """x [rows, k], the matrix [k, n], its bias [n], a residual [rows, n], the weights of a norm [k]."""
    shapes = (rows, k), (k, n), (n,), (rows, n), (k,)
    return [torch.randn(shape).to(dtype) for shape in shapes]


def finished(fast: Compiled) -> list[str]:
    """The schedules that run, of the clusters whose last programs finish."""
    chosen = (r.candidates[min(fast.schedule, len(r.candidates) - 1)] for r in fast.compiler.runners.values())
    return [p.schedule for p in chosen if "LAST" in p.schedule]


def finishes(s: Placement) -> bool:
    return "LAST" in str(s)


def divided(loops: LoopNest, name: str, device: DeviceSpec) -> tuple[Placement, ...]:
    """Return the schedules, with the ones whose programs share the rows first."""
    return tuple(sorted(schedules_of(loops, name, device), key=lambda s: not finishes(s)))


def check(f: Function, inputs: list[Tensor], number: int = 0, choose: Schedules = divided) -> Compiled:
    """One kernel, as close to float64 as eager, whose bits are the same again; the interpreter finds counters
    that are not zero at the end."""
    fast = Compiled(f, number, choose)
    with torch.no_grad():
        ours, eager, truth = fast(*inputs), f(*inputs), f(*wide(inputs))
        assert torch.equal(ours, fast(*inputs))
    # The interpreter rounds each product before it is added, which a GPU does not: over twelve draws of 300
    # terms, the root mean square of errors is 1.4 times eager's, and the largest one is up to 2.6 times.
    # Two units in the last place of the sum of all terms without their signs bound both.
    terms = (inputs[0].abs() @ inputs[1].abs()).max().item()
    noise = 2 * torch.finfo(torch.float32).eps * terms if ours.dtype is torch.float32 else 0.0
    assert not_as_close(ours, eager, truth, noise) is None
    (plan,) = fast.plans
    assert len(plan.clusters) == 1 and not plan.leftovers, str(plan)
    return fast


@pytest.mark.sample(10)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("f", [product, gelu_and_residual])
@pytest.mark.usefixtures("small_matrices")
def test_the_last_program_finishes(f: Function, rows: int, dtype: torch.dtype) -> None:
    assert finished(check(f, operands(rows, 300, 136, dtype)))


@pytest.mark.parametrize(("k", "n"), [(257, 130), (7, 33), (2, 64), (640, 2), (1030, 1001)])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.usefixtures("small_matrices")
def test_odd_sizes(rows: int, k: int, n: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        check(gelu_and_residual, operands(rows, k, n, dtype))


def undivided(loops: LoopNest, name: str, device: DeviceSpec) -> tuple[Placement, ...]:
    """Return the schedules whose programs have all rows."""
    return tuple(s for s in schedules_of(loops, name, device) if "place(row.o, GRID)" not in str(s))


@pytest.mark.sample(20)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("f", [gelu_and_residual, normed, rms_normed, softmax_product])
@pytest.mark.parametrize(("k", "n"), [(300, 136), (600, 520), (1024, 40), (257, 130), (2100, 24)])
@pytest.mark.usefixtures("small_matrices")
def test_programs_of_all_rows_leave_nothing_over(f: Function, k: int, n: int, dtype: torch.dtype) -> None:
    fast = check(f, operands(1, k, n, dtype), choose=undivided)
    (runner,) = fast.compiler.runners.values()
    (kernel,) = runner.candidates[0].kernels
    assert "ticket" not in kernel.source and not runner.candidates[0].scratch


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("f", [normed, rms_normed])
@pytest.mark.parametrize(("k", "n"), [(304, 72), (128, 128), (257, 96)])
@pytest.mark.usefixtures("small_matrices")
def test_a_vectors_norm_is_made_ahead(f: Function, k: int, n: int, dtype: torch.dtype) -> None:
    fast = check(f, operands(1, k, n, dtype))
    assert finished(fast)
    (runner,) = fast.compiler.runners.values()
    assert "_first(in0_ptr)" in runner.candidates[0].kernels[0].source


@pytest.mark.usefixtures("small_matrices")
def test_several_vectors_are_normalized_by_numbers_of_their_own() -> None:
    for f, rows in ((normed, 2), (rms_normed, 2), (rms_normed, 4)):
        for dtype in (torch.float32, torch.bfloat16):
            check(f, operands(rows, 96, 640, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("small_matrices")
def test_a_softmax_is_made_ahead(dtype: torch.dtype) -> None:
    inputs = operands(1, 300, 136, dtype)
    fast = check(softmax_product, inputs)
    (runner,) = fast.compiler.runners.values()
    assert finished(fast) and "_first(in0_ptr)" in runner.candidates[0].kernels[0].source
    for worst in (float("inf"), float("nan"), -float("inf")):
        inputs[0][0, 7] = worst
        with torch.no_grad():
            assert torch.equal(fast(*inputs).isnan(), softmax_product(*inputs).isnan())


@pytest.mark.usefixtures("small_matrices")
def test_projections_of_one_input_share_a_launch() -> None:
    def projections(x: Tensor, w: Tensor, b: Tensor, r: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        y = F.rms_norm(x, g.shape, g)
        return tuple(torch.addmm(b, y, w * n) for n in (1, 2, 3))

    inputs = operands(1, 304, 136, torch.float32)
    fast = Compiled(projections)
    with torch.no_grad():
        results = fast(*inputs), projections(*inputs), projections(*wide(inputs))
        for ours, eager, truth in zip(*results, strict=True):
            assert not_as_close(ours, eager, truth) is None
    assert [len(plan.clusters) for plan in fast.plans] == [1]


def every(loops: LoopNest, name: str, device: DeviceSpec) -> tuple[Placement, ...]:
    return schedules(loops, device)


@pytest.mark.sample(1)
@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.usefixtures("small_matrices")
def test_every_schedule(rows: int) -> None:
    """Also those of a few rows in turn, which only larger matrices have."""
    inputs, few = operands(rows, 300, 136, torch.bfloat16), operands(rows, 37, 19, torch.bfloat16)

    def looped(loops: LoopNest, name: str, device: DeviceSpec) -> tuple[Placement, ...]:
        products = Products.of(loops, {})
        assert products is not None
        tiles = (Tile(tall, 8, 4, stages=3, part=104) for tall in (32, 64, 128))
        return tuple(placed_tile(loops, products, tile, Place.UNROLL, (), device) for tile in tiles)

    for choose, tensors in ((every, inputs), (looped, inputs), (cramped, few)):
        seen: set[str] = set()
        for number in range(40):
            fast = check(gelu_and_residual, tensors, number, choose)
            (runner,) = fast.compiler.runners.values()
            seen.add(runner.candidates[min(number, len(runner.candidates) - 1)].schedule)
            if number >= len(runner.candidates) - 1:
                break
        assert len(seen) == number + 1


# -- what is planned ------------------------------------------------------------------------------------


def planned(f: Function, shapes: tuple[int, int, int], device: str = "h200") -> fc.FusionPlan:
    torch._dynamo.reset()
    fast = fc.compile(f, backend="eager", device=device, dynamic=False)
    with FakeTensorMode(), torch.no_grad():
        fast(*operands(*shapes, torch.bfloat16))
    (plan,) = fast.plan
    return plan


def programs_of(plan: fc.FusionPlan, device: str = "h200") -> tuple[Program, ...]:
    """All candidates of the one cluster, launched behind another: matrix, bias and weights are constants."""
    (cluster,) = plan.clusters
    shapes = {name: plan.dag.op(name).outputs[0].shape for name in cluster.inputs}
    constants = tuple(name for name, shape in shapes.items() if len(shape) == 1 or shape[0] > 16)
    cluster = replace(cluster, constants=constants)
    return emit_cluster(canonical(cluster, plan.dag), cluster, plan.dag, device_spec(device), ALL)


@pytest.mark.parametrize(("k", "n"), [(1024, 3072), (1024, 1024), (1024, 4096), (4096, 1024)])
def test_it_takes_a_launch_and_its_bytes(k: int, n: int) -> None:
    plan = planned(gelu_and_residual, (1, k, n))
    (cluster,) = plan.clusters
    streamed = 1e6 * 2 * k * n / 4.28e12
    assert streamed + 1.5 < cluster.cost.us < streamed + 2.8
    shared = [p.kernels[0] for p in programs_of(plan) if "LAST" in p.schedule]
    assert shared and all(66 <= kernel.grid[0] <= 528 for kernel in shared)


class Block(nn.Module):
    """The part of a GPT-2 layer after attention, and the projections of the next one's attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        dtype = torch.bfloat16
        self.norms = nn.ModuleList(nn.LayerNorm(width, dtype=dtype) for _ in range(2))
        sizes = (width, width), (width, 4 * width), (4 * width, width), (width, 3 * width)
        self.matrices = nn.ParameterList(torch.empty(size, dtype=dtype) for size in sizes)
        self.biases = nn.ParameterList(torch.empty(n, dtype=dtype) for _, n in sizes)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        (out, up, down, qkv), biases = self.matrices, self.biases
        x = x + torch.addmm(biases[0], y, out)
        inner = F.gelu(torch.addmm(biases[1], self.norms[0](x), up), approximate="tanh")
        x = x + torch.addmm(biases[2], inner, down)
        return x, torch.addmm(biases[3], self.norms[1](x), qkv)


def test_a_layer_of_gpt_2_medium_is_four_kernels() -> None:
    torch._dynamo.reset()
    with FakeTensorMode(), torch.no_grad():
        model = Block(1024).eval()
        fast = fc.compile(model, backend="eager", device="h200", dynamic=False)
        fast(*torch.empty(2, 1, 1024, dtype=torch.bfloat16).unbind())
    (plan,) = fast.plan
    assert len(plan.clusters) == 4 and not plan.leftovers, str(plan)
    assert "3 of 4 kernels" in plan.notes["dependent launch"]
    assert sum(cluster.cost.us for cluster in plan.clusters) < 18


def test_other_sums_over_rows_keep_their_second_kernel() -> None:
    """They are longer, and a block has more partial results than one program reads while others wait."""

    def gradients(x: Tensor, w: Tensor, b: Tensor, r: Tensor, g: Tensor) -> Tensor:
        return (w * 2).sum(0)

    (cluster,) = planned(gradients, (1, 8192, 1024)).clusters
    assert not any(finishes(s) for s in schedules(cluster.loops, device_spec("h200")))


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.name)
def test_threads_of_a_tile_have_no_rows_of_their_own(device: DeviceSpec) -> None:
    """Or the matrix would go through shared memory to those that have its vector's elements."""
    for shapes in ((1, 1024, 3072), (2, 1024, 1000), (1, 4096, 1024), (1, 4096, 16384), (1, 40, 8192)):
        plan = planned(product, shapes)
        for cluster in plan.clusters:
            every = [s for s in schedules(cluster.loops, device) if isinstance(s, Placement)]
            rows = [next(x.lanes for x in s.leaves(cluster.loops.axes) if x.name in ROW_LANES) for s in every]
            parts = [(s, n) for s, n in zip(every, rows, strict=True) if n < min(shapes[1], 1024)]
            assert parts and all(s.num_warps * device.warp_size >= 2 * n for s, n in parts)


# -- machine code ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("f", "shapes"),
    [(gelu_and_residual, (1, 1024, 1024)), (normed, (1, 1024, 3072)), (product, (2, 1024, 4096))],
)
def test_kernels_wait_before_counters_and_spill_nothing(f: Function, shapes: tuple[int, int, int]) -> None:
    program = next(p for p in programs_of(planned(f, shapes)) if "LAST" in p.schedule)
    (kernel,) = program.kernels
    body = kernel.source.rpartition("@triton.jit\n")[2]
    before, _, after = body.partition("fm.wait_for_kernels()")
    assert kernel.dependent and "LAST" in program.schedule
    assert "ticket_ptr" not in before.partition('"""')[2]
    assert "tl.atomic_add(ticket_ptr + col_o, 1)" in after
    matrix = re.findall(r"tl\.load\((in\d+_ptr) \+ row \* \d+ \+ col\b", before)
    assert len(matrix) == 1 and f"tl.load({matrix[0]}" not in after
    for target in ("sm_80", "sm_90", "sm_100"):
        assert not compile_for(kernel, target).spills, target
    (theirs,) = programs_of(planned(f, shapes, "mi300x"), "mi300x")[0].kernels
    assert not compile_for(theirs, "gfx942").spills


@pytest.mark.parametrize("shapes", [(1, 2048, 2048), (2, 4096, 4096)])
def test_a_norms_sums_are_made_once_and_behind_the_loads_of_its_product(shapes: tuple[int, int, int]) -> None:
    """Threads wait while they are made, and no load passes that."""
    programs = programs_of(planned(normed, shapes))
    for program in programs:
        body = program.kernels[0].source.rpartition("@triton.jit\n")[2]
        assert body.count("tl.range(") == ("LOOP" in program.schedule), program.schedule
        before, _, after = body.partition("_first(in0_ptr)")
        assert after and "tl.range(" not in before, program.schedule
        assert "LOOP" in program.schedule or before.count("tl.load(") >= 3, program.schedule
    assert len(programs) >= 4


@pytest.mark.parametrize("f", [gelu_and_residual, normed])
def test_all_rows_stay_in_the_registers_of_those_who_load_them(f: Function) -> None:
    programs = [p for p in programs_of(planned(f, (1, 1024, 3072))) if "place(row, LANES)" in p.schedule]
    assert len(programs) == 2
    for program in programs:
        (kernel,) = program.kernels
        binary = compile_for(kernel, "sm_90")
        assert not binary.spills and binary.shared_bytes < 1024 * 32, "less than the matrix's part"
