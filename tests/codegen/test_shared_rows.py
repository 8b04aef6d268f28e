"""Gradients of norms in rows that programs share: one kernel, right, with loads under way while it waits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode

import fusion_compiler as fc
from benchmarks.kernels import ranking
from fusion_compiler.codegen.emit import emit, schedules_of
from fusion_compiler.ir import device as devices
from fusion_compiler.ir.canonical import canonical
from fusion_compiler.ir.device import DeviceSpec, device_spec
from fusion_compiler.ir.kernel import Program
from fusion_compiler.ir.loops import COLS, LoopNest
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.runtime.target import compile_for
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.placement import Placement
from fusion_compiler.schedule.row_tiles import Cols, RowTile
from tests.exactness import Compiled, not_as_close, wide
from tests.versions import of_measured_versions


def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, w.shape, w, b)


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, w.shape, w)


def with_gradients(fn: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = fn(*leaves)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, weights)]


def backward_plan(fn: Any, width: int, rows: int = 512, device: str = "h200") -> FusionPlan:
    with FakeTensorMode():
        vectors = [torch.randn(width, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        x = torch.randn(rows, width, dtype=torch.bfloat16, device="cuda")
        inputs = (x, *vectors[: fn.__code__.co_argcount - 1])
        return fc.explain(fn, *(t.requires_grad_() for t in inputs), device=device).plans[1]


def backward_programs(fn: Any, width: int, rows: int = 512) -> tuple[Program, ...]:
    """The candidates of the only cluster of the backward, for an H200."""
    plan = backward_plan(fn, width, rows)
    (cluster,) = plan.clusters
    key = canonical(cluster, plan.dag)
    buffers = {b.name: b for b in key.buffers}
    return emit(key.nests, cluster.name, "", buffers, device_spec("h200"))


@pytest.mark.parametrize("width", [16500, 20001])
@pytest.mark.parametrize("fn", [layer_norm, rms_norm], ids=["LayerNorm", "RMSNorm"])
def test_values_and_gradients(fn: Callable[..., Tensor], width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch costs more here than all else, so that even few rows are one kernel."""
    monkeypatch.setitem(devices._BY_NAME, "h200", replace(device_spec("h200"), launch_us=50.0))
    sizes = ((7, width), (width,), (width,))[: fn.__code__.co_argcount]
    inputs = tuple(torch.randn(*size) for size in sizes)
    compiled = Compiled(fn)
    ours, eager = with_gradients(compiled, inputs), with_gradients(fn, inputs)
    problems = [not_as_close(*v) for v in zip(ours, eager, with_gradients(fn, wide(inputs)), strict=True)]
    assert not any(problems), problems
    assert [len(plan.clusters) for plan in compiled.plans] == [1, 1]


@of_measured_versions
@pytest.mark.parametrize("fn", [layer_norm, rms_norm], ids=["LayerNorm", "RMSNorm"])
def test_several_rows_find_room_in_registers(fn: Any) -> None:
    """And are waited for once a block: what tiles hold is computed again after that."""
    several = [p for p in backward_programs(fn, 65536) if "place(row.i, LANES)" in p.schedule]
    assert {p.kernels[0].registers for p in several} == {128}
    for program in several:
        binary = compile_for(program.kernels[0], "sm_90")
        assert binary.registers <= 128 and not binary.spills
        assert binary.asm["ptx"].count("bra WAIT") == 1


@of_measured_versions
@pytest.mark.parametrize("width", [23170, 46341])
@pytest.mark.parametrize("fn", [layer_norm, rms_norm], ids=["LayerNorm", "RMSNorm"])
def test_several_rows_of_one_lead_find_room_too(fn: Any, width: int) -> None:
    """And are moved in words: of eight elements, or of four where twice as many programs are in step so."""
    programs = backward_programs(fn, width)
    several = [p for p in programs if "align(" in p.schedule and "split(row.o, 2)" in p.schedule]
    assert several
    for program in several:
        binary = compile_for(program.kernels[0], "sm_90")
        assert binary.registers <= 128 and binary.spills <= 16
        copied, stored = ("ca", "v2") if "align(col, 4)" in program.schedule else ("cg", "v4")
        ptx = binary.asm["ptx"]
        assert ptx.count(f"cp.async.{copied}.shared.global") and ptx.count(f"st.global.{stored}.b32")
        assert ptx.count("bra WAIT") == 1


@of_measured_versions
@pytest.mark.parametrize("width", [16384, 65536, 262144])
@pytest.mark.parametrize("fn", [layer_norm, rms_norm], ids=["LayerNorm", "RMSNorm"])
def test_loads_are_under_way_and_nothing_spills(fn: Any, width: int) -> None:
    first = backward_programs(fn, width)[0]
    binary = compile_for(first.kernels[0], "sm_90")
    assert "SHARED" in first.schedule and binary.asm["ptx"].count("cp.async.cg") and not binary.spills
    assert binary.asm["ptx"].count("bra WAIT") == 1  # two numbers are one letter


@pytest.mark.parametrize(("sms", "widest"), [(20, 20 * 8192), (100, 64 * 8192), (132, 128 * 8192)])
def test_programs_that_wait_for_each_other_run_at_once(
    sms: int, widest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few multiprocessors there are; what would take more programs is no single kernel."""
    device = replace(device_spec("h200"), sms=sms)
    monkeypatch.setitem(devices._BY_NAME, "few", device)
    for width in (widest // 5, widest // 2 - 1, widest):
        plan = backward_plan(rms_norm, width, device="few")
        (cluster,) = plan.clusters
        tiles = ranking.ranked(canonical(cluster, plan.dag).nests[0], device)
        assert tiles
        for s in tiles[:4]:
            assert isinstance(s, RowTile)
            at_once = device.registers_per_sm // (32 * s.num_warps * (s.registers or 128))
            assert s.splits <= sms * max(1, at_once)
    assert len(backward_plan(rms_norm, widest + 8, device="few").clusters) == 2


def test_sums_that_programs_cannot_exchange_are_refused_with_the_reason() -> None:
    with FakeTensorMode():
        x = torch.randn(64, 20000, dtype=torch.float64, device="cuda", requires_grad=True)
        w = torch.randn(20000, dtype=torch.float64, device="cuda", requires_grad=True)
        report = fc.explain(rms_norm, x, w, device="h200")
    assert "20000 sums over rows do not fit in registers (16384)" in " ".join(str(report).split())


# Functions of a row whose reductions are exchanged in every form: pairs of floats, single ones, integers.


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def of_largest(x: Tensor) -> Tensor:
    return x / x.abs().amax(-1, keepdim=True)


def of_counts(x: Tensor) -> Tensor:
    """Integers, as they add up and as truth values."""
    positive = (x > 0).sum(-1, keepdim=True, dtype=torch.int32)
    return torch.where((x > 2).any(-1, keepdim=True) & (x > -3).all(-1, keepdim=True), x * positive, -x)


def together(
    rows: int, cols: Cols, programs: int | None, loops: LoopNest, name: str, device: DeviceSpec
) -> tuple[RowTile | Placement, ...]:
    """Blocks of several rows that three programs share, where there is something to exchange."""
    a = Analysis(loops)
    if not any(COLS in a.reduced_groups(i) for i in a.reductions):
        return schedules_of(loops, name, device)
    block = 128 if cols is Cols.WHOLE or a.across_rows else 32
    cols = Cols.WHOLE if a.across_rows else cols
    return (RowTile(rows, block, cols, 2 if a.across_rows else programs, num_stages=2, splits=3),)


FORMS = (
    (2, Cols.WHOLE, None, torch.float32),
    (4, Cols.WHOLE, 2, torch.bfloat16),
    (4, Cols.LOOP, None, torch.float16),
)


@pytest.mark.parametrize(("rows", "cols", "programs", "dtype"), FORMS, ids=str)
@pytest.mark.parametrize("fn", [layer_norm, softmax, of_largest, of_counts])
def test_several_rows_at_once(
    fn: Callable[..., Tensor], rows: int, cols: Cols, programs: int | None, dtype: torch.dtype
) -> None:
    """Five rows: the last block has one or three that do not exist; the last part has fewer columns."""
    sizes = ((5, 301), (301,), (301,))[: fn.__code__.co_argcount]
    inputs = tuple(torch.randn(*size).to(dtype) for size in sizes)
    compiled = Compiled(fn, schedules=functools.partial(together, rows, cols, programs))
    ours, eager = with_gradients(compiled, inputs), with_gradients(fn, inputs)
    problems = [not_as_close(*v) for v in zip(ours, eager, with_gradients(fn, wide(inputs)), strict=True)]
    assert not any(problems), problems
    chosen = [r.candidates[0].schedule for r in compiled.compiler.runners.values()]
    assert all(f"split(row, {rows})" in s and "SHARED" in s for s in chosen[:1]), chosen
