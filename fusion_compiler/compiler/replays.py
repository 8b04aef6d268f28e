"""Decide which graphs are replayed as CUDA graphs, from predictions of their plans (`runtime.pairs`)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from fusion_compiler.capture.module import Plans
from fusion_compiler.errors import WarnOnce
from fusion_compiler.ir.dag import nbytes
from fusion_compiler.ir.decision import Decision, Decisions
from fusion_compiler.ir.dims import Hints
from fusion_compiler.ir.graph_info import GraphInfo, Phase
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.options import Options
from fusion_compiler.passes.fuse.step_time import step_time
from fusion_compiler.runtime.boxed import Boxed
from fusion_compiler.runtime.cuda_graphs import FORWARD_IS_NOT, Recordings
from fusion_compiler.runtime.gradients import Handover
from fusion_compiler.runtime.graph_tuning import GraphTuning
from fusion_compiler.runtime.pairs import Terms, not_replayed
from fusion_compiler.stitch.order import ordered


class Replays:
    """The object records the graphs of one compile() as CUDA graphs.

    plans: receive later decisions. warned: warns of a graph that was asked for and is not recorded.
    """

    def __init__(self, options: Options, plans: Plans, warned: WarnOnce) -> None:
        self.options, self.plans, self.warned = options, plans, warned
        self.recordings = Recordings(options.graph_memory)

    def wrap(
        self,
        run: Boxed,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        info: GraphInfo,
        plan: FusionPlan,
        *,
        backend: str,
        allocated: int,
        tuning: GraphTuning | None,
        handover: Handover | None,
    ) -> tuple[Boxed, Decisions]:
        """Return `run`, replayed as a CUDA graph if that is possible and pays, and the decision.

        allocated: `Order.allocated` of the plan. handover: hands gradients to an optimizer; a recording gives
        back what was recorded, so that it is disabled.
        """
        # A chunk's body is recorded with the graph that calls it.
        asked = False if info.phase is Phase.CHUNK else self.options.cudagraphs
        decision = not_replayed(f"backend {backend!r} launches nothing") if asked is True else None
        if asked and backend == "triton":
            predicted = functools.partial(self._terms, replace(plan, solved=None), info, allocated)
            terms = predicted if asked == "auto" else None
            decide = functools.partial(self._decided, info, handover)
            run, decision = self.recordings.wrap(run, gm, inputs, info, terms, tuning, decide)
        if asked is True and decision is not None:
            self._warn(info.name, decision)
        if handover is not None:
            handover.enabled = decision is None or not decision.is_done
        return run, () if decision is None else (decision,)

    def _warn(self, graph: str, decision: Decision) -> None:
        """Warn if a graph is not recorded although that was asked for."""
        if not decision.is_done and decision.reason != FORWARD_IS_NOT:
            self.warned.warn(
                f"cudagraphs {decision.reason}",
                f"{graph} is not recorded as a CUDA graph: {decision.reason}\n"
                "  what to do: remove that cause, or leave out cudagraphs=True",
            )

    def _decided(self, info: GraphInfo, handover: Handover | None, decision: Decision) -> None:
        """Record what calls of a graph have shown about its CUDA graph."""
        self.plans.decide(info.name, decision)
        if handover is not None:
            handover.enabled = not decision.is_done

    def _terms(self, plan: FusionPlan, info: GraphInfo, allocated: int, at: Hints | None = None) -> Terms:
        """Return the predictions that decide if a graph is recorded without being asked for.

        at: the sizes of the calls, if other than planned. allocated: `Order.allocated` for the planned sizes.
        """
        setting = plan.setting
        assert setting is not None
        at = at or setting.hints
        time = step_time(plan, setting.device, setting.hints, at)
        arguments = [n for n in plan.dag.inputs if plan.dag.op(n).target == "placeholder"]
        moving = [n for i, n in enumerate(arguments) if i not in info.static_inputs]
        # A backward pass reads what its forward pass has saved. In training results are lent.
        copied = [] if info.phase is Phase.BACKWARD else moving
        copied += dict.fromkeys(plan.dag.outputs) if info.phase is Phase.INFERENCE else ()
        copied_bytes = nbytes((meta for name in copied for meta in plan.dag.op(name).outputs), at)
        if at != setting.hints:
            allocated = ordered(plan, info.owned, at, info.donated).allocated
        copy_us = 2e6 * copied_bytes / setting.device.copy_bandwidth
        return Terms(time.host_us, time.gpu_us, allocated, copy_us, time.replay_us)
