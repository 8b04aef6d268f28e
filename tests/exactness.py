"""Helpers of the generated tests: functions compiled below Dynamo, and closeness to float64."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch.utils._pytree import tree_map

from benchmarks.kernels import ranking
from fusion_compiler.capture.partition import partition
from fusion_compiler.codegen import emit
from fusion_compiler.codegen.emit import schedules_of
from fusion_compiler.compiler.compiler import Compiler
from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.dims import hint
from fusion_compiler.ir.graph_info import GraphInfo, Phase
from fusion_compiler.ir.loops import COLS, LoopNest
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ops.decompositions.table import decomposition_table
from fusion_compiler.ops.decompositions.traced_gradients import traced_gradients
from fusion_compiler.options import Options
from fusion_compiler.runtime.launch import Runner
from fusion_compiler.schedule import looped, misaligned, space
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.placement import Placement
from fusion_compiler.schedule.row_tiles import Cols, RowTile, placement_of

Schedules = Callable[[LoopNest, str, DeviceSpec], tuple[RowTile | Placement, ...]]


@dataclass
class Compiled:
    """A function as AOTAutograd and the compiler see it, without Dynamo before them: ten times as fast.

    schedule: which candidate of each cluster runs; the last one where a cluster has fewer.
    schedules: what gives the candidates their schedules.
    """

    fn: Callable[..., Any]
    schedule: int = 0
    schedules: Schedules = schedules_of
    compiler: Compiler = field(init=False)

    def __post_init__(self) -> None:
        # Not strict, as tests list what they leave to ATen; a kernel that fails warns, which pytest raises.
        self.compiler = Compiler(Options.of(backend="interpret"))
        stage = functools.partial(self._stage, itertools.count())
        self.call = aot_function(
            self.fn,
            fw_compiler=functools.partial(stage, Phase.FORWARD),
            bw_compiler=functools.partial(stage, Phase.BACKWARD),
            inference_compiler=functools.partial(stage, Phase.INFERENCE),
            partition_fn=partition,
            decompositions=dict(decomposition_table()),
        )

    def _stage(self, numbers: Any, phase: Phase, gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        outputs = len(gm.graph.output_node().args[0])  # type: ignore[arg-type]
        info = GraphInfo(f"g{next(numbers)}.{phase}", phase, (), outputs)
        with patch.object(emit, "schedules_of", placing(self.schedules)):
            run = self.compiler.graph(gm, inputs, info)
        for runner in self.compiler.runners.values():
            runner.schedule = min(self.schedule, len(runner.candidates) - 1)
        return make_boxed_func(lambda *args: run(list(args)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with traced_gradients():
            return self.call(*args, **kwargs)

    def fall_back(self) -> None:
        fall_back(self.compiler.runners.values())

    @property
    def plans(self) -> list[FusionPlan]:
        return list(self.compiler.plans)

    def eager_ops(self) -> set[str]:
        """Targets that stayed ATen calls, library calls aside."""
        left = (left for plan in self.plans for left in plan.leftovers)
        return {item.target for item in left if item.rule != "library call"}


def fall_back(runners: Iterable[Runner]) -> None:
    """Make every call from now on run the fallback for kernels that fail."""
    for runner in runners:
        runner._enter(runner.fallback)


def placing(schedules: Schedules) -> Callable[[LoopNest, str, DeviceSpec], tuple[Placement, ...]]:
    """The same schedules, all of them as placements."""

    def placed(loops: LoopNest, name: str, device: DeviceSpec) -> tuple[Placement, ...]:
        return placements(loops, *schedules(loops, name, device))

    return placed


def placements(loops: LoopNest, *schedules: RowTile | Placement) -> tuple[Placement, ...]:
    """Some tiles of rows and columns as placements; placements are what they are."""
    a = Analysis(loops)
    return tuple(placement_of(a, s) if isinstance(s, RowTile) else s for s in schedules)


def fits(kind: ModuleType, a: Analysis, device: DeviceSpec) -> bool:
    """True if a kind has schedules for a loop nest."""
    return kind.suits(a) and not kind.refuses(a, device)


def cramped(loops: LoopNest, name: str, device: DeviceSpec) -> tuple[RowTile | Placement, ...]:
    """Blocks of two rows and four columns, and three programs, for every kind that fits, so that small
    tensors meet every loop, mask and partial sum: one of each kind that the program allows.

    Wide rows are cut into at most 256 blocks. Nests under placements have small tiles as they are.
    """
    analysis = Analysis(loops)
    if not analysis.in_rows:
        return schedules_of(loops, name, device)
    few = max(4, 1 << (hint(analysis.size(COLS)) // 256).bit_length())
    kinds: dict[RowTile, None] = {}
    along = any(COLS in analysis.reduced_groups(i) for i in analysis.reductions)
    for kind in space.KINDS:
        if not fits(kind, analysis, device):
            continue
        for s in kind.measured(analysis, device) or kind.typical(analysis, device):
            if s.splits > 1 or (s.cols is Cols.LOOP and not along):
                continue  # see below; only what goes through a row knows the columns of a loop
            cols = s.block_cols if s.cols is Cols.WHOLE else min(s.block_cols, few)
            programs = None if s.programs is None else 3
            kinds[RowTile(min(s.block_rows, 2), cols, s.cols, programs)] = None
    half = 1 << max(1, hint(analysis.size(COLS)) // 2).bit_length()
    if along and analysis.shareable and half < hint(analysis.size(COLS)):  # each has a column
        kinds[RowTile(1, half, Cols.WHOLE, 3, splits=2)] = None
        if fits(looped, analysis, device):
            kinds[RowTile(1, few, Cols.LOOP, splits=3)] = None
            kinds[RowTile(1, half, Cols.WHOLE, splits=2)] = None
    return tuple(kinds)


def misaligned_forms(loops: LoopNest, name: str, device: DeviceSpec) -> tuple[RowTile | Placement, ...]:
    """Misaligned forms of schedules, of tiles too narrow for the tuner to choose; others where none is."""
    analysis, plain = Analysis(loops), ranking.ranked(loops, device)
    if not analysis.in_rows or not misaligned.fits(analysis):
        return schedules_of(loops, name, device)
    few = (s._replace(programs=s.programs and 8) for s in plain if isinstance(s, RowTile))
    forms = (misaligned.form_of(analysis, s) for s in few)
    return tuple(dict.fromkeys(s for s in forms if s is not None)) or plain


def wide(value: Any) -> Any:
    """Every float tensor in a structure as float64."""
    return tree_map(
        lambda x: x.detach().double() if isinstance(x, Tensor) and x.is_floating_point() else x, value
    )


def not_as_close(ours: Tensor, eager: Tensor, truth: Tensor, noise: float = 0.0) -> str | None:
    """None where ours is as close to the float64 truth as eager, else what is wrong.

    Integers and bools: equal to eager's. Floats: NaN and infinities where the truth, rounded to the
    result's dtype, or eager has them. The largest error is at most twice eager's largest (two orders of
    the same sum differ by that much), or four units in the last place of the largest result (one for
    the result's rounding, the others for luck in eager's), or `noise`: see `rounding_noise`.
    """
    if ours.dtype != eager.dtype or ours.shape != eager.shape:
        return f"{ours.dtype} {list(ours.shape)}, eager has {eager.dtype} {list(eager.shape)}"
    if not ours.is_floating_point():
        return None if torch.equal(ours, eager) else f"{ours} != {eager}"
    our, their = _distance(ours, truth), _distance(eager, truth)
    our = torch.where((ours == eager) | (ours.isnan() & eager.isnan()), our.clamp(max=their), our)
    compared = their.isfinite()
    if (our[~compared] > their[~compared]).any() or not our[compared].isfinite().all():
        return f"not finite where eager is, or the reverse: {ours} != {eager}, truth {truth}"
    if not compared.any():
        return None
    finite = truth[compared].abs()
    scale = finite[finite.isfinite()].max().item() if finite.isfinite().any() else 0.0
    allowed = max(2 * their[compared].max().item(), 4 * torch.finfo(ours.dtype).eps * scale, noise)
    worst = our[compared].max().item()
    return None if worst <= allowed else f"error {worst:.3e} is more than {allowed:.3e}: {ours} != {truth}"


def rounding_noise(values: Iterable[Tensor], truth: Iterable[Tensor]) -> float:
    """Eight units in the last place of the coarsest dtype that a computation went through, float32 at
    best where it is not all in float64, at its largest value: what cancels leaves that much in any order.
    """
    floats = [v.dtype for v in values if v.is_floating_point()]
    coarsest = max((torch.finfo(d).eps for d in floats), default=0.0)
    finite = [t.double().abs().nan_to_num(0, 0, 0).max().item() for t in truth if t.numel()]
    return 8 * coarsest * max(finite, default=0.0)


def _distance(x: Tensor, truth: Tensor) -> Tensor:
    """|x - truth|; 0 for equal infinities or NaN, infinite where just one is finite."""
    rounded = truth.to(x.dtype).double()
    truth = torch.where(rounded.isinf(), rounded, truth.double())
    same = (x == truth) | (x.isnan() & truth.isnan())
    return torch.where(same, 0.0, (x.double() - truth).abs().nan_to_num(math.inf, math.inf))
