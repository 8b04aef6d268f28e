"""The planner and the code generator share one schedule space: what is accepted has schedules that print."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import pytest
import sympy
import torch

from fusion_compiler.codegen.assemble import Nests, build
from fusion_compiler.ir.device import DEVICES, DeviceSpec
from fusion_compiler.ir.dims import Dim
from fusion_compiler.ir.kernel import Buffer
from fusion_compiler.ir.loops import COLS, ROWS, Value
from fusion_compiler.passes.fuse.cost import cost_of
from fusion_compiler.passes.fuse.legality import first_refusal
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.row_widths import ALONE, PART
from fusion_compiler.schedule.space import schedules
from tests.nests import Nest

WIDTHS: tuple[Dim, ...] = (
    0, 1, 7, 64, 257, 1000, 4096, 8200, ALONE, ALONE + 1, PART + 8, 4 * PART, 100_001, 1 << 20, (1 << 21) + 3,
    sympy.Symbol("width", integer=True, positive=True),
)  # fmt: skip
HEIGHTS: tuple[Dim, ...] = (0, 1, 3, 300, 1 << 17, sympy.Symbol("height", integer=True, positive=True))


def _gate(n: Nest, x: Value) -> None:
    n.store("y", n.op("sigmoid.default", x), "r", "c")


def _sine(n: Nest, x: Value) -> None:
    n.store("y", n.op("sin.default", x), "r", "c")


def _softmax(n: Nest, x: Value) -> None:
    e = n.op("exp.default", n.sub(x, n.reduce("max", x)))
    n.store("y", n.op("div.Tensor", e, n.reduce("sum", e)), "r", "c")


def _norm(n: Nest, x: Value) -> None:
    n.store("y", n.mul(n.mul(x, n.op("rsqrt.default", n.mean(n.mul(x, x)))), n.load("w", "c")), "r", "c")


def _norm_backward(n: Nest, x: Value) -> None:
    gradient = n.load("g", "r", "c")
    scale = n.reduce("sum", n.mul(x, gradient))
    n.store("dx", n.sub(gradient, n.mul(x, scale)), "r", "c")
    n.store("dw", n.reduce("sum", n.mul(gradient, n.mul(x, scale)), ROWS), "c", dtype=torch.float32)


def _loss(n: Nest, x: Value) -> None:
    row = n.op("log.default", n.reduce("sum", n.op("exp.default", n.sub(x, n.reduce("max", x)))))
    n.store("rows", row, "r", dtype=torch.float32)
    n.store("all", n.reduce("sum", row, ROWS), at={}, dtype=torch.float32)


def _sum_of_rows(n: Nest, x: Value) -> None:
    n.store("rows", n.reduce("sum", x, COLS), "r", dtype=torch.float32)


def _sum_over_rows(n: Nest, x: Value) -> None:
    n.store("cols", n.reduce("sum", x, ROWS), "c", dtype=torch.float32)


def _sum_of_all(n: Nest, x: Value) -> None:
    n.store("all", n.reduce("sum", x, ROWS, COLS), at={}, dtype=torch.float32)


def _both(n: Nest, x: Value) -> None:
    _sum_over_rows(n, x)
    n.store("y", n.mul(x, x), "r", "c")


def _running_sum(n: Nest, x: Value) -> None:
    n.store("y", n.op("exp.default", n.scan("sum", x)), "r", "c")


def _running_back(n: Nest, x: Value) -> None:
    _running_sum(n, x)
    n.store("total", n.reduce("sum", n.scan("logsumexp", x, reverse=True)), "r", dtype=torch.float32)
    n.store("cols", n.reduce("sum", x, ROWS), "c", dtype=torch.float32)


KINDS = (
    _gate, _sine, _softmax, _norm, _norm_backward, _loss, _sum_of_rows, _sum_over_rows, _sum_of_all, _both,
    _running_sum, _running_back,
)  # fmt: skip


def nests(kind: Callable[[Nest, Value], None]) -> Iterator[Nest]:
    for rows, cols in product(HEIGHTS, WIDTHS):
        n = Nest({"r": (rows, ROWS), "c": (cols, COLS)})
        kind(n, n.load("x", "r", "c"))
        yield n


def buffers_of(n: Nest) -> dict[str, Buffer]:
    """The tensors of a nest: those of whole rows are 16 bits wide."""
    sizes = {name: (size, group) for name, (size, group) in n.axes.items()}
    buffers: dict[str, Buffer] = {}
    for name, info in n.buffers.items():
        dtype = torch.bfloat16 if info.itemsize == 2 else torch.float32
        shape = {"w": ("c",), "dw": ("c",), "cols": ("c",), "rows": ("r",), "all": ()}.get(name, ("r", "c"))
        dims = tuple(sizes[axis][0] for axis in shape)
        strides = (dims[1], 1) if len(dims) == 2 else (1,) * len(dims)
        buffers[name] = Buffer(name, dims, strides, dtype)
    return buffers


@pytest.mark.sample(24)
@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.name)
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__[1:])
def test_what_is_accepted_has_schedules_that_print(
    kind: Callable[[Nest, Value], None], device: DeviceSpec
) -> None:
    accepted = 0
    for n in nests(kind):
        loops = n.nest()
        refused = first_refusal(Analysis(loops), device)
        placements = schedules(loops, device)
        assert (refused is None) == bool(placements), (kind.__name__, n.axes, refused)
        if refused is not None:
            continue
        accepted += 1
        empty = any(size == 0 for size, _ in n.axes.values())
        assert (cost_of(loops, device, n.buffers).us > 0) is not empty
        assert all(s.num_warps * device.warp_size <= 1024 for s in placements)
        for schedule in {placements[0], placements[min(3, len(placements) - 1)]}:
            assert build(Nests((loops,), buffers_of(n)), (schedule,), "kernel", "").kernels
    assert accepted > len(HEIGHTS)
