"""The pipeline: `Compiler.backend` captures and rewrites, and `Compiler.graph` takes each captured graph
through the other stages, in order.

Some stages are also called elsewhere: a report emits the kernels of its plans (`report.explanation`) and
clusters a graph again to say why two ops are apart (`passes.fuse.why`). The user's rewrites and kernels are
matched above autograd, before this pipeline begins (`passes.rewrites.user`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import exceptions_allowed_to_be_fallback

from fusion_compiler.capture.capture import Capture
from fusion_compiler.capture.module import Plans
from fusion_compiler.capture.partition import partition
from fusion_compiler.compiler.nested import Predicted, with_chunks, with_inner_graphs
from fusion_compiler.compiler.planning import Planner
from fusion_compiler.compiler.products import Products
from fusion_compiler.compiler.replays import Replays
from fusion_compiler.compiler.runners import Runners, Target, verifier
from fusion_compiler.errors import (
    EagerDeviceError,
    EagerGraphError,
    EagerMethodError,
    EagerOperatorError,
    FusionError,
    InternalError,
    InvalidOptionError,
    OmittedFieldError,
    UnsupportedDtypeError,
    WarnOnce,
    closest,
    first_line,
    of_process,
)
from fusion_compiler.ir.breaks import GraphBreak
from fusion_compiler.ir.canonical import Canonical
from fusion_compiler.ir.dag import OpDag, build, size_hints
from fusion_compiler.ir.decision import EAGER_OP, Decisions, noted
from fusion_compiler.ir.device import DEFAULT, device_spec
from fusion_compiler.ir.graph_info import GraphInfo, Phase
from fusion_compiler.ir.graph_pass import Level, Pass
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ir.plan_data import Setting
from fusion_compiler.ir.plan_text import count
from fusion_compiler.ir.record import NotWritable
from fusion_compiler.ir.sources import source_of
from fusion_compiler.ir.views import reinterpreted, restrided
from fusion_compiler.ops.decompositions.table import decomposition_table
from fusion_compiler.options import Options
from fusion_compiler.passes.fuse.dependent import launched_dependently
from fusion_compiler.passes.fuse.step_time import step_time
from fusion_compiler.passes.patterns.trace import (
    check_numbers,
    traced_above_autograd,
    traced_gradient,
    traced_hint,
)
from fusion_compiler.passes.rewrites.equality import check_equal
from fusion_compiler.passes.rewrites.user import check_reachable, replace_patterns
from fusion_compiler.patterns import (
    DEFAULT_PATTERNS,
    ClusterHint,
    Pattern,
    Rewrite,
    UserKernel,
    checked,
    text_of_patterns,
)
from fusion_compiler.pipeline import NAMES, passes_at
from fusion_compiler.runtime.boxed import boxed
from fusion_compiler.runtime.collection import rare_collections
from fusion_compiler.runtime.debug import Debug, DebugSettings
from fusion_compiler.runtime.gradients import Handovers
from fusion_compiler.runtime.launch import Runner, compile_all
from fusion_compiler.runtime.progress import Progress
from fusion_compiler.runtime.retained import sparing
from fusion_compiler.runtime.stages import Stages, since
from fusion_compiler.runtime.verify import KernelCheck
from fusion_compiler.stitch.order import Order, ordered
from fusion_compiler.stitch.stitch import stitch
from fusion_compiler.stitch.units import ranges_of
from fusion_compiler.support.store import Store


class Compiler:
    """A compiler serves one compile() call. Its graphs share the options, kernels, plans and warnings.

    asked: True if the plans keep their searches, to answer questions.
    """

    def __init__(
        self, options: Options, patterns: Sequence[Pattern] = DEFAULT_PATTERNS, *, asked: bool = False
    ) -> None:
        check_disabled(options)
        self.options, self.asked = options, asked
        self.patterns = checked(patterns)
        self.stages, self.store = Stages(), Store()
        self.warned = WarnOnce(options.strict)
        self.debug = Debug(DebugSettings.of(os.environ), self.warned)
        products = Products(options, self.store, self.stages, self.debug)
        self.planner = Planner(options, self.patterns, self.store, self.stages, products, asked=asked)
        for pattern in self.planner.user_patterns:
            check(pattern)
        check_reachable(self.patterns)
        with contextlib.suppress(NotWritable):
            text_of_patterns(self.patterns)  # what they read must not change from now on
        self.plans = Plans(self.stages)
        self.progress = Progress(options.progress)
        self.kernels = Runners(options, self.store, self.stages, self.debug, self.warned)
        self.replays = Replays(options, self.plans, self.warned)
        self.handovers = Handovers()
        self.predicted: dict[str, Predicted] = {}  # of chunks' bodies, by their graphs' names
        self.compiling = False  # whether the last graph's kernels are

    @property
    def runners(self) -> Mapping[tuple[Canonical, str], Runner]:
        """Return the runners of all clusters so far, by canonical form and backend."""
        return self.kernels.runners

    def backend(self) -> Callable[..., Any]:
        """Return the TorchDynamo backend that captures, rewrites, and compiles each graph."""
        check = KernelCheck(self.plans.verification, self.warned) if self.options.verify else None
        user_rewrites = replace_patterns(self.patterns, check)
        rewrites = self.passes_at(Level.ABOVE_AUTOGRAD)
        rewrites = rewrites if user_rewrites is None else (user_rewrites, *rewrites)
        # Around both: a backward may be compiled when it is first called.
        rarely = rare_collections()
        graph = rarely(self.progress(self.stages.of("read")(self.graph)))
        split = functools.partial(partition, memory=self.options.memory, device=self.options.device)
        backend = self.progress(
            Capture(
                graph,
                rewrites=rewrites,
                decompositions=decomposition_table,
                joint_rewrite=self.rewrite_joint,
                give_up=self.give_up,
                split=split,
                options=[self.options, self.asked],
                patterns=lambda: text_of_patterns(self.patterns),
                store=self.store,
                stages=self.stages,
                meanwhile=lambda: self.compiling,
                after=self.debug.stage,
            ).backend
        )
        return rarely(backend)

    def graph(self, gm: fx.GraphModule, inputs: Sequence[Any], info: GraphInfo) -> Callable[..., Any]:
        """Take a graph through the stages read, match, plan, emit and stitch; return a boxed function."""
        began = self.stages.seconds
        self.debug.stage(info.name, "capture", gm)
        if info.phase is Phase.BACKWARD:
            gm, info = self.after_passes(Level.BACKWARD, gm, info)
        gm = with_chunks(gm, info, self.graph, self.predicted)
        gm = with_inner_graphs(gm, info, self.graph)
        self.stages.enter("read")
        written, info = self.after_passes(Level.GRAPH, gm, info)
        dag = build(written, source_of)
        self.progress.say(f"captured {info.name} ({len(dag.order) - len(dag.inputs)} ops)")
        target = self.target_of(dag)
        setting = Setting(target.device, size_hints(inputs), self.options.numerics)
        planned = self.planner.plan(info, dag, setting, target.backend)
        plan, order = self.in_order(planned.plan, info, is_new=planned.programs is None)
        self.report_left(plan)
        self.progress.say(f"planned {count(len(plan.clusters), 'kernel')}")
        self.stages.enter("emit")
        runners, new = self.kernels.of_plan(plan, target, planned.programs)
        decisions = (*self.planner.keep(planned, plan, new), *info.rewrites)
        if info.phase is Phase.CHUNK:
            self.predicted[info.name] = order.peak, step_time(plan, target.device, setting.hints)
        self.stages.enter("stitch")
        run, replay_decisions = self.stitched(gm, inputs, info, plan, order, runners, target)
        where = ["captured " + ("from disk" if info.from_disk else "anew")]
        where += ["planned from disk"] if planned.programs is not None else []
        seconds = ", ".join([*where, since(began, self.stages.seconds)])
        decisions = (*self.planner.not_looked_for(decisions), *decisions, *replay_decisions)
        if self.options.omit and info.phase is Phase.FORWARD:
            names = ", ".join(self.options.omit)
            decisions = (*decisions, noted("omitted results", f"{names}: None beside the loss, in training"))
        plan = plan.decided(*decisions, noted("memory", str(order)), noted("seconds", seconds))
        plan = plan if self.asked else replace(plan, solved=None)
        self.plans.record(plan)
        self.debug.plan(plan)
        return run

    def in_order(self, plan: FusionPlan, info: GraphInfo, *, is_new: bool) -> tuple[FusionPlan, Order]:
        """Return the plan with memory that is reused and launches that overlap, and the order of its steps.

        is_new: False if the plan comes from disk, where its launches are decided.
        """
        donated = info.donated if self.options.cudagraphs is not True else ()  # PyTorch's recordings own it
        order = ordered(plan, info.owned, donated=donated)
        plan = order.placed(plan)
        if is_new:
            steps = [step.name for step in order.steps]
            plan = launched_dependently(plan, steps, info, self.options.dependent_launch)
        return plan, order

    def stitched(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        info: GraphInfo,
        plan: FusionPlan,
        order: Order,
        runners: Mapping[str, Runner],
        target: Target,
    ) -> tuple[Callable[..., Any], Decisions]:
        """Return the boxed function that runs a plan, and what was decided about its CUDA graph."""
        called = self.verified(plan, runners, target) if self.options.verify else runners
        is_triton = target.backend == "triton"
        view = reinterpreted if is_triton else restrided
        ranges = functools.partial(ranges_of, plan)
        handover = self.handovers.of(gm, info)
        hooks = handover.hooks if handover is not None else {}
        module = stitch(plan, called, order, view=view, ranges=ranges, hooks=hooks)
        self.debug.stage(info.name, "stitch", module)
        if is_triton:
            self.stages.enter("kernels")
            device = torch.device(target.kind)
            self.compiling = compile_all(dict.fromkeys(runners.values()), device, self.progress)
        run = boxed(functools.partial(module.forward))
        run = handover.around(run) if handover is not None else run
        tuning = self.kernels.tuning(plan, runners) if is_triton and not self.options.verify else None
        run, decisions = self.replays.wrap(
            run,
            gm,
            inputs,
            info,
            plan,
            backend=target.backend,
            allocated=order.allocated,
            tuning=tuning,
            handover=handover,
        )
        run = sparing(run, order.taken([n.name for n in gm.graph.find_nodes(op="placeholder")]))
        return run, decisions

    def passes_at(self, level: Level) -> tuple[Pass, ...]:
        return passes_at(level, self.options.numerics, self.options.disable)

    def rewrite_joint(self, graph: fx.Graph) -> Decisions:
        """Apply the passes over forward and backward together to a graph, in place."""
        return tuple(note for each in self.passes_at(Level.JOINT) for note in each.apply(graph))

    def after_passes(
        self, level: Level, gm: fx.GraphModule, info: GraphInfo
    ) -> tuple[fx.GraphModule, GraphInfo]:
        """Return a graph after the passes of a level, and its description with their notes."""
        for each in self.passes_at(level):
            before, (gm, notes) = gm, each.apply(gm)
            info = replace(info, rewrites=(*info.rewrites, *notes))
            if gm is not before:
                self.debug.stage(info.name, each.name, gm)
        return gm, info

    def target_of(self, dag: OpDag) -> Target:
        """Return the device and the backend of a graph."""
        kinds = [m.device.split(":")[0] for name in dag.order for m in dag.op(name).outputs[:1]]
        kind = max(set(kinds), key=kinds.count) if kinds else "cpu"  # of most tensors
        device = device_spec(self.options.device or (torch.device(kind) if kind == "cuda" else DEFAULT))
        return Target(kind, device, self.backend_for(kind))

    def backend_for(self, kind: str) -> str:
        """Return the name of the backend that runs the clusters of a graph on this kind of device."""
        if self.options.backend != "auto":
            return self.options.backend
        if kind == "cuda":
            return "triton"
        warned = self.warned if self.options.strict else of_process
        warned.fall_back(f"device {kind}", EagerDeviceError(device=kind))
        return "eager"

    def verified(
        self, plan: FusionPlan, runners: Mapping[str, Runner], target: Target
    ) -> Mapping[str, Callable[..., Any]]:
        """Return the runners of a graph, each compared with its cluster's fx subgraph when first called.

        With backend "eager" the subgraphs themselves run: return the runners unchanged, and warn.
        """
        if target.backend != "eager":
            table = self.plans.verification
            return {c.name: verifier(c, plan.dag, runners[c.name], table, self.warned) for c in plan.clusters}
        if not any(isinstance(p, UserKernel) for p in self.patterns):  # with one, a kernel is compared
            nothing = f"the clusters run as ATen ops on {target.kind}, so there is no kernel to compare"
            todo = "run the kernels: on a GPU, or here with backend='interpret'"
            self.plans.verification.nothing = nothing
            self.warned.warn("verify", f"verify=True: {nothing}\n  what to do: {todo}")
        return runners

    def give_up(self, name: str, error: Exception) -> None:
        """Warn once that a graph runs eager because of `error`, or raise it when strict.

        The user's errors, and errors that TorchDynamo handles, are raised unchanged.
        """
        if isinstance(error, EagerGraphError):
            self.warned.fall_back(f"eager {error}", error)
            self.plans.leave(name, first_line(error))
            return
        if isinstance(error, FusionError | Warning):  # the user's, or one that a filter made an error
            raise error
        if isinstance(error, exceptions_allowed_to_be_fallback):  # Dynamo breaks the graph where data decides
            raise error
        place = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {error}"
        fault = InternalError(
            graph=name, detail=reason, place=f"{os.path.basename(place.filename)}:{place.lineno}"
        )
        fault.__cause__ = error
        self.warned.fall_back(f"give up {name}", fault)
        self.plans.leave(name, reason)

    def report_left(self, plan: FusionPlan) -> None:
        """Warn of dtypes that no kernel supports; if strict, raise if an op has no kernel and no library."""
        wanting = [left for left in plan.leftovers if left.rule == EAGER_OP]
        for left in wanting:
            complex_ones = [m.dtype for m in plan.dag.op(left.subject).outputs if m.dtype.is_complex]
            if complex_ones:
                error = UnsupportedDtypeError(left.source, op=left.target, dtype=complex_ones[0])
                self.warned.fall_back("dtype", error)
        if wanting and self.options.strict:
            first, others = wanting[0], {left.target for left in wanting[1:]} - {wanting[0].target}
            more = f"; as would {', '.join(sorted(others))}" if others else ""
            raise EagerOperatorError(first.source, op=first.target, reason=first.reason, others=more)

    def broke(self, breaks: Sequence[GraphBreak]) -> None:
        """Record the graph breaks of a call in the plans, and warn of the one that leaves most to eager."""
        self.plans.broke(breaks)
        self.debug.breaks(breaks)
        for one in sorted((b for b in breaks if not b.deliberate), key=lambda b: not b.function)[:1]:
            self.warned.fall_back("graph break", one.error)

    def missed(self, model: str, method: str) -> None:
        """Warn that a module is trained by a method that is not compiled; raise when strict."""
        self.warned.fall_back("method", EagerMethodError(model=model, method=method))

    def kept(self, reason: str) -> None:
        """Warn once that a module's result keeps the fields that `omit` names; raise when strict."""
        self.warned.fall_back("omit", OmittedFieldError(omit=self.options.omit, reason=reason))


def check_disabled(options: Options) -> None:
    """Raise InvalidOptionError if `disable` has a name that is no pass."""
    unknown = [name for name in options.disable if name not in NAMES]
    if unknown:
        nearest = closest(unknown[0], NAMES)
        expected = "a name that `fusion-compiler passes` lists"
        expected += f", such as {nearest!r}" if nearest else ""
        raise InvalidOptionError(option="disable", value=unknown[0], expected=expected)


def check(pattern: Pattern) -> None:
    """Raise InvalidPatternError if a pattern cannot be traced, RewriteNotEqualError if its sides differ."""
    if isinstance(pattern, ClusterHint):
        traced_hint(pattern)
        if pattern.backward:
            traced_gradient(pattern)
    else:
        traced_above_autograd(pattern)
    check_numbers(pattern)
    if isinstance(pattern, Rewrite):
        check_equal(pattern)
