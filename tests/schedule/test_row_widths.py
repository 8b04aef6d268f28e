"""Legality allows only what schedules can run: for every device, at every width of a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations

import pytest
import sympy
import torch

import fusion_compiler as fc
from fusion_compiler.codegen.assemble import Nests, build
from fusion_compiler.codegen.emit import schedules_of
from fusion_compiler.ir.device import DEVICES, device_spec
from fusion_compiler.ir.dims import Dim, strides_of
from fusion_compiler.ir.kernel import Buffer
from fusion_compiler.ir.loops import (
    COLS,
    ROWS,
    Axis,
    Compute,
    Index,
    Load,
    LoopNest,
    Node,
    Reduce,
    Store,
    Value,
)
from fusion_compiler.passes.fuse.legality import first_refusal
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.placement import Placement

aten = torch.ops.aten
ROW_COUNT, WIDTH = (sympy.Symbol(name, integer=True, positive=True) for name in ("s0", "s1"))
ROW_COUNTS: tuple[Dim, ...] = (300, ROW_COUNT)
WIDTHS: tuple[Dim, ...] = (1000, 16384, 16385, 200000, 1500000, WIDTH)
# Those with other numbers of anything that counts here, and parts of them, as a driver may report.
WHOLE = {(d.sms, d.registers_per_sm, d.warp_size): d for d in DEVICES}.values()
EVERY_DEVICE = (*WHOLE, *(replace(device_spec(n), sms=sms) for n, sms in (("h200", 1), ("mi300x", 16))))


class Made:
    """A loop nest over rows and columns, and its buffers, as forms add to it."""

    def __init__(self, rows: Dim, cols: Dim, dtype: torch.dtype) -> None:
        self.sizes, self.dtype = (rows, cols), dtype
        self.nodes: list[Node] = []
        self.stores: list[Store] = []
        self.buffers: dict[str, Buffer] = {}
        self.x = self.load("x", 0, 1)

    def node(self, node: Node) -> Value:
        self.nodes.append(node)
        return Value(len(self.nodes) - 1)

    def at(self, name: str, axes: tuple[int, ...], dtype: torch.dtype) -> Index:
        shape = tuple(self.sizes[axis] for axis in axes)
        self.buffers[name] = Buffer(name, shape, strides_of(shape), dtype)
        return Index(0, tuple(zip(axes, strides_of(shape), strict=True)))

    def load(self, name: str, *axes: int) -> Value:
        return self.node(Load(name, self.at(name, axes, self.dtype), None, self.dtype))

    def times(self, a: Value, b: Value) -> Value:
        return self.node(Compute(aten.mul.Tensor, (("self", a), ("other", b)), self.dtype))

    def sum(self, value: Value, *over: str) -> Value:
        return self.node(Reduce("sum", value.node, frozenset(map((ROWS, COLS).index, over)), self.dtype))

    def any(self, value: Value, *over: str) -> Value:
        return self.node(Reduce("any", value.node, frozenset(map((ROWS, COLS).index, over)), torch.bool))

    def store(self, value: Value, *axes: int) -> None:
        name, dtype = f"out{len(self.stores)}", self.nodes[value.node].dtype  # type: ignore[union-attr]
        self.stores.append(Store(name, self.at(name, axes, dtype), value.node))

    def nest(self) -> LoopNest:
        axes = tuple(Axis(n, s, g) for n, s, g in zip("rc", self.sizes, (ROWS, COLS), strict=True))
        return LoopNest(axes, tuple(self.nodes), tuple(self.stores), tuple(map(str, range(len(self.nodes)))))


FORMS: dict[str, Callable[[Made], None]] = {
    "row value": lambda m: m.store(m.sum(m.x, COLS), 0),
    "normal": lambda m: m.store(m.times(m.x, m.sum(m.x, COLS)), 0, 1),
    "column sums": lambda m: m.store(m.sum(m.x, ROWS), 1),
    "weight gradient": lambda m: m.store(m.sum(m.times(m.x, m.sum(m.x, COLS)), ROWS), 1),
    "total": lambda m: m.store(m.sum(m.x, ROWS, COLS)),
    "any": lambda m: m.store(m.any(m.x, ROWS, COLS)),
    "total for each column": lambda m: m.store(m.times(m.load("w", 1), m.sum(m.x, ROWS, COLS)), 1),
}


def programs(dtype: torch.dtype) -> Iterator[tuple[str, Made]]:
    """Every form alone and with every other, of rows of every width."""
    for rows, cols in ((r, c) for r in ROW_COUNTS for c in WIDTHS):
        for names in (*((name,) for name in FORMS), *combinations(FORMS, 2)):
            nest = Made(rows, cols, dtype)
            for name in names:
                FORMS[name](nest)
            yield f"{' + '.join(names)} of {rows} x {cols}", nest


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_what_is_allowed_can_be_printed(dtype: torch.dtype) -> None:
    allowed = refused = 0
    for what, nest in programs(dtype):
        loops, printed = nest.nest(), set[Placement]()
        for device in EVERY_DEVICE:
            if first_refusal(Analysis(loops), device) is not None:
                refused += 1
                continue
            allowed += 1
            try:
                first = schedules_of(loops, what, device)[0]
                if first not in printed:
                    build(Nests((loops,), nest.buffers), (first,), "kernel", what)
            except Exception as error:
                raise AssertionError(f"{what} for {device.name} of {device.sms}") from error
            printed.add(first)
    assert allowed > refused > 300


def test_gradients_of_a_norm_where_a_device_has_more_registers() -> None:
    """An MI300X has twice those of others a multiprocessor, and no schedule that holds rows twice as wide."""
    shapes = ((2, 20000), (20000,), (20000,))
    x, weight, bias = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)

    def loss(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, (20000,), weight, bias).sin().sum()

    fast = fc.compile(loss, backend="interpret", device="mi300x", strict=True)
    ours = torch.autograd.grad(fast(x, weight, bias), (x, weight, bias))
    for our, exact in zip(ours, torch.autograd.grad(loss(x, weight, bias), (x, weight, bias)), strict=True):
        torch.testing.assert_close(our, exact)
