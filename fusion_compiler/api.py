"""Provide the public functions and run the pipeline: `Compiler.backend` captures and rewrites, and
`Compiler.graph` takes each captured graph through the other stages, in order.

Some stages are also called elsewhere: a report emits the kernels of its plans (`report.explanation`) and
clusters a graph again to say why two ops are apart (`passes.fuse.why`). The user's rewrites and kernels are
matched above autograd, before this pipeline begins (`passes.rewrites.user`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch._dynamo.exc import exceptions_allowed_to_be_fallback
from torch.optim import Optimizer

from fusion_compiler.capture.capture import make_backend
from fusion_compiler.capture.decompositions import decomposition_table
from fusion_compiler.capture.graphs import copied
from fusion_compiler.capture.module import Plans, compiled_class, plain, wrap
from fusion_compiler.capture.partition import partition
from fusion_compiler.codegen.emit import emit
from fusion_compiler.errors import (
    EagerDeviceError,
    EagerGraphError,
    EagerMethodError,
    EagerOperatorError,
    FusionError,
    InternalError,
    InvalidOptionError,
    KernelError,
    NotCallableError,
    TorchScriptError,
    UnsupportedDtypeError,
    WarnOnce,
    closest,
    of_process,
)
from fusion_compiler.ir.breaks import GraphBreak
from fusion_compiler.ir.canonical import Canonical, aliased_inputs, canonical, describe
from fusion_compiler.ir.chunks import Chunked
from fusion_compiler.ir.dag import OpDag, build, nbytes, size_hints
from fusion_compiler.ir.decision import Decision, Decisions, noted
from fusion_compiler.ir.device import DEFAULT, DeviceSpec, device_spec
from fusion_compiler.ir.dims import Hints
from fusion_compiler.ir.graph_info import GraphInfo, Phase
from fusion_compiler.ir.graph_pass import Level, Pass
from fusion_compiler.ir.kernel import Program
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ir.plan_data import Cluster, Setting
from fusion_compiler.ir.plan_text import count
from fusion_compiler.ir.record import NotWritable
from fusion_compiler.ir.sources import source_of
from fusion_compiler.ir.views import reinterpreted, restrided
from fusion_compiler.options import Options, When
from fusion_compiler.passes.chunks.body import examples
from fusion_compiler.passes.fuse.cluster import plan as plan_clusters
from fusion_compiler.passes.fuse.dependent import launched_dependently
from fusion_compiler.passes.fuse.step_time import StepTime, step_time
from fusion_compiler.passes.patterns.indexed import key_of
from fusion_compiler.passes.patterns.match import match_all
from fusion_compiler.passes.patterns.notes import notes_of_hints
from fusion_compiler.passes.patterns.trace import (
    Traced,
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
from fusion_compiler.runtime.builds import prepare
from fusion_compiler.runtime.collection import rare_collections
from fusion_compiler.runtime.cuda_graphs import (
    FORWARD_IS_NOT,
    Recordings,
)
from fusion_compiler.runtime.debug import Debug, DebugSettings
from fusion_compiler.runtime.gradients import Handover, Handovers
from fusion_compiler.runtime.graph_tuning import GraphTuning
from fusion_compiler.runtime.kept_plans import read_plan, write_plan
from fusion_compiler.runtime.launch import Runner, compile_all
from fusion_compiler.runtime.pairs import RULE as CUDA_GRAPH
from fusion_compiler.runtime.pairs import Terms, not_replayed
from fusion_compiler.runtime.progress import Progress
from fusion_compiler.runtime.retained import sparing
from fusion_compiler.runtime.stages import Stages, since
from fusion_compiler.runtime.verify import KernelCheck, Verifier, coarsest
from fusion_compiler.stitch.higher_order import compiled_graph, inner_graphs
from fusion_compiler.stitch.order import ordered
from fusion_compiler.stitch.stitch import stitch, subgraph
from fusion_compiler.stitch.units import ranges_of
from fusion_compiler.support.store import PLAN, Key, Store

K = TypeVar("K")

LITTLE = 0.005  # of a graph's time: clusters that take less are not timed


def compile(
    model: nn.Module | Callable[..., Any] | None = None,
    *,
    patterns: Sequence[Pattern] = DEFAULT_PATTERNS,
    mode: str | None = None,
    optimizer: Optimizer | None = None,
    when: When = "step",
    **options: Any,
) -> Any:
    """Compile a module or function; the result is called, trained and saved like the original.

    model: a module, a function or a class. If the model is compiled already, by this function or
        torch.compile, its original is compiled with these options instead. For a class, a subclass whose
        instances are compiled is returned. Without a model, a decorator with these options is returned.
    patterns: what to recognise and replace; the first match wins (`fusion_compiler.patterns`).
    mode: a name for several options, as in torch.compile (`options.MODES`).
    optimizer, when: an optimizer of the module, which is fused as by `fuse_optimizer(model, optimizer,
        when=when)` with this `backend` and `strict`; `.plan.optimizer` is the result. An optimizer that is
        fused already is fused anew. Copies of the compiled module have no optimizer.
    options: the fields of `Options`.

    The returned module shares the model's parameters, buffers and mode; its `.plan` holds the FusionPlan of
    every graph captured so far. Compilation happens at the first call, and again for inputs that do not fit
    what was compiled.

    Raises NotCallableError, UnknownOptionError, InvalidOptionError, ContradictoryOptionsError,
    InvalidPatternError or RewriteNotEqualError at once, and the errors of `fuse_optimizer`.
    """
    chosen = Options.of(mode=mode, **options)
    recompile = functools.partial(compile, patterns=patterns, mode=mode, **options)
    if model is None:
        return functools.partial(recompile, optimizer=optimizer, when=when)
    model = plain(model)
    check_optimizer(model, optimizer, when)
    if inspect.isclass(model):
        return compiled_class(model, recompile)
    if not callable(model):
        raise NotCallableError(got=type(model).__name__)
    compiler = Compiler(chosen, patterns)
    if optimizer is not None and isinstance(model, nn.Module):
        from fusion_compiler.optimizer.fuse import fuse_anew  # where none is fused its modules are not read

        fused = fuse_anew(model, optimizer, when=when, backend=chosen.backend, strict=chosen.strict)
        compiler.plans.optimizer = fused
    if isinstance(model, torch.jit.ScriptModule):
        compiler.warned.fall_back("TorchScript", TorchScriptError(model=type(model).__name__))
        return model
    if chosen.backend == "auto" and torch.cuda.is_available():
        prepare()  # while the model is captured
    return wrap(
        model,
        compiler.backend(),
        compiler.plans,
        recompile,
        dynamic=chosen.dynamic,
        fullgraph=chosen.fullgraph,
        strict=chosen.strict,
        broke=compiler.broke,
        give_up=compiler.give_up,
        missed=compiler.missed,
    )


def check_optimizer(model: object, optimizer: object, when: str) -> None:
    """Raise InvalidOptionError if there is no optimizer to fuse, or no module with the parameters."""
    if optimizer is None and when != "step":
        raise InvalidOptionError(option="when", value=when, expected="together with optimizer=")
    if optimizer is not None and not isinstance(model, nn.Module):
        expected = "with an nn.Module; for a function: fuse_optimizer(the module, optimizer)"
        raise InvalidOptionError(option="optimizer", value=type(optimizer).__name__, expected=expected)


def dynamo_backend(gm: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """Compile a graph for `torch.compile(model, backend="fusion_compiler")`; options are as in `compile`."""
    settings = {**options.pop("options", {}), **options}
    patterns = settings.pop("patterns", DEFAULT_PATTERNS)
    return Compiler(Options.of(**settings), patterns).backend()(gm, inputs)


class Compiler:
    """A compiler serves one compile() call. Its graphs share the options, kernels, plans and warnings.

    asked: True if the plans keep their searches, to answer questions.
    """

    def __init__(
        self, options: Options, patterns: Sequence[Pattern] = DEFAULT_PATTERNS, *, asked: bool = False
    ) -> None:
        if unknown := [name for name in options.disable if name not in NAMES]:
            nearest = closest(unknown[0], NAMES)
            expected = "a name that `fusion-compiler passes` lists"
            expected += f", such as {nearest!r}" if nearest else ""
            raise InvalidOptionError(option="disable", value=unknown[0], expected=expected)
        self.options, self.asked = options, asked
        self.patterns = checked(patterns)
        self.user_patterns = tuple(p for p in self.patterns if p not in DEFAULT_PATTERNS)
        for pattern in self.user_patterns:
            check(pattern)
        check_reachable(self.patterns)
        with contextlib.suppress(NotWritable):
            text_of_patterns(self.patterns)  # what they read must not change from now on
        self.stages = Stages()
        self.plans = Plans(self.stages)
        self.warned = WarnOnce(options.strict)
        self.debug = Debug(DebugSettings.of(os.environ), self.warned)
        self.store = Store()
        self.runners: dict[tuple[Canonical, str], Runner] = {}
        self.computed: set[str] = set()  # operators of the forward graphs
        self.recordings = Recordings(options.graph_memory)
        self.handovers = Handovers()
        self.peaks: dict[str, int] = {}  # bytes that graphs use at once, by prediction
        self.times: dict[str, StepTime] = {}  # of chunks' bodies, by prediction
        self.progress = Progress(options.progress)
        self.compiling = False  # whether the last graph's kernels are

    def backend(self) -> Callable[..., Any]:
        check = KernelCheck(self.plans.verification, self.warned) if self.options.verify else None
        user_rewrites = replace_patterns(self.patterns, check)
        rewrites = self.passes_at(Level.ABOVE_AUTOGRAD)
        rewrites = rewrites if user_rewrites is None else (user_rewrites, *rewrites)
        # Around both: a backward may be compiled when it is first called.
        rarely = rare_collections()
        graph = rarely(self.progress.during(self.stages.during("read", self.graph)))
        split = functools.partial(partition, memory=self.options.memory, device=self.options.device)
        backend = self.progress.during(
            make_backend(
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
            )
        )
        return rarely(backend)

    def graph(self, gm: fx.GraphModule, inputs: Sequence[Any], info: GraphInfo) -> Callable[..., Any]:
        """Take a graph through the stages dag, match, cluster, emit and stitch; return a boxed function."""
        began = self.stages.seconds
        self.debug.stage(info.name, "capture", gm)
        if info.phase is Phase.BACKWARD:
            gm, info = self.after_passes(Level.BACKWARD, gm, info)
        gm = self.with_inner_graphs(self.with_chunks(gm, info), info)
        self.stages.enter("read")
        written, info = self.after_passes(Level.GRAPH, gm, info)
        dag = build(written, source_of)
        self.progress.say(f"captured {info.name} ({len(dag.order) - len(dag.inputs)} ops)")
        kind = device_type(dag)
        device = device_spec(self.options.device or (torch.device(kind) if kind == "cuda" else DEFAULT))
        backend = self.backend_for(kind)
        setting = Setting(device, size_hints(inputs), self.options.numerics)
        notes: Decisions = ()
        try:
            key = self.key(info, dag, setting, backend)
        except NotWritable as reason:
            key, notes = None, (noted("plan on disk", f"not kept: {reason}"),)
        kept = read_plan(self.store, key, info.name, dag, setting) if key is not None else None
        if kept is not None:
            plan, ready = kept
        else:
            self.stages.enter("match")
            hints = self.hints(info.phase)
            matched = match_all(hints, dag, origins=info.origins, watched=self.user_patterns)
            backward = info.phase is Phase.BACKWARD
            hint_notes = notes_of_hints(hints, matched, self.user_patterns, backward=backward)
            self.stages.enter("plan")
            plan, ready = planned(info, dag, replace(setting, matches=matched.matches)), None
            plan = plan.decided(*hint_notes)
        donated = info.donated if self.options.cudagraphs is not True else ()  # PyTorch's recordings own it
        order = ordered(plan, info.owned, donated=donated)
        plan = order.placed(plan)
        if ready is None:
            steps = [step.name for step in order.steps]
            plan = launched_dependently(plan, steps, info, self.options.dependent_launch)
        self.report_left(plan)
        self.progress.say(f"planned {count(len(plan.clusters), 'kernel')}")
        self.stages.enter("emit")
        count_before = len(self.runners)
        runners = self.runners_of(plan, device, backend, ready)
        if key is not None and ready is None:
            new_runners = [*self.runners.values()][count_before:]
            programs = {r.name: r.candidates for r in new_runners if r.candidates}
            reason = write_plan(self.store, key, plan, programs)
            notes = (*notes, noted("plan on disk", f"not kept: {reason}")) if reason else notes
        self.stages.enter("stitch")
        called = self.verified(plan, runners, kind, backend) if self.options.verify else runners
        view = reinterpreted if backend == "triton" else restrided
        ranges = functools.partial(ranges_of, plan)
        self.peaks[info.name] = order.peak
        if info.phase is Phase.CHUNK:
            self.times[info.name] = step_time(plan, device, setting.hints)
        handover = self.handovers.of(gm, info)
        hooks = handover.hooks if handover is not None else {}
        stitched = stitch(plan, called, order, view=view, ranges=ranges, hooks=hooks)
        self.debug.stage(info.name, "stitch", stitched)
        if backend == "triton":
            self.stages.enter("kernels")
            self.compiling = compile_all(dict.fromkeys(runners.values()), torch.device(kind), self.progress)
        run = functools.partial(stitched.forward)
        run._boxed_call = True  # type: ignore[attr-defined]  AOTAutograd looks for it
        run = handover.around(run) if handover is not None else run
        notes = (*notes, *info.rewrites)
        if any(d.rule == "pre-autograd" for d in notes):  # rules that were not looked for decided nothing
            rules = {p.name for p in self.user_patterns if not isinstance(p, ClusterHint)}
            left = sorted(rules.difference(d.rule for d in notes))
            notes = (*(noted(name, "not looked for: see pre-autograd") for name in left), *notes)
        graphs = False if info.phase is Phase.CHUNK else self.options.cudagraphs  # recorded with its caller
        tuning = self.tuning(plan, runners) if backend == "triton" and not self.options.verify else None
        if graphs is True:
            run, graph = self.recorded(run, gm, inputs, info, backend, tuning)
            notes = (*notes, graph)
        elif graphs == "auto" and backend == "triton":
            terms = functools.partial(self.terms, replace(plan, solved=None), info, order.allocated)
            decided = functools.partial(self.decided, info, handover)
            run, graph = self.recordings.wrap(run, gm, inputs, info, terms, tuning, decided)
            notes = (*notes, graph)
        if handover is not None:  # a recording gives back what was recorded
            handover.enabled = not any(d.rule == CUDA_GRAPH and d.is_done for d in notes)
        run = sparing(run, order.taken([n.name for n in gm.graph.find_nodes(op="placeholder")]))
        where = ["captured " + ("from disk" if info.from_disk else "anew")]
        where += ["planned from disk"] if ready is not None else []
        seconds = ", ".join([*where, since(began, self.stages.seconds)])
        plan = plan.decided(*notes, noted("memory", str(order)), noted("seconds", seconds))
        plan = replace(plan, solved=plan.solved if self.asked else None)
        self.plans.record(plan)
        self.debug.plan(plan)
        return run

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

    def decided(self, info: GraphInfo, handover: Handover | None, decision: Decision) -> None:
        """Record what calls of a graph have shown about its CUDA graph."""
        self.plans.decide(info.name, decision)
        if handover is not None:
            handover.enabled = not decision.is_done

    def key(self, info: GraphInfo, dag: OpDag, setting: Setting, backend: str) -> Key | None:
        """Return the disk-cache key of a graph's plan, or None if the plan must not be cached.

        Plans that answer questions (`asked`) need the full search. Graphs without a digest or with dynamic
        sizes have no key either. Raise NotWritable if a pattern has no stable text.
        """
        if info.phase is not Phase.BACKWARD:
            self.computed |= {key_of(dag.op(name)) for name in dag.order}
        if not info.digest or self.asked or setting.hints:
            return None
        return PLAN.key(
            device=setting.device,
            backend=backend,
            options=self.options,
            patterns=text_of_patterns(self.patterns),
            graph=info.digest,
            phase=info.phase,
            operators=[(name, str(dag.op(name).target)) for name in dag.order],
            origins=info.origins,  # which `where=` asks about
            forward_operators=sorted(self.computed),  # which gradients a backward has
        )

    def with_chunks(self, gm: fx.GraphModule, info: GraphInfo) -> fx.GraphModule:
        """Return `gm` with compiled bodies of its loops over chunks of rows; `gm` itself if it has none.

        A body's plan is named for the graph, the logits and the rows. A smaller last chunk has its own body.
        """
        loops = [node for node in gm.graph.nodes if isinstance(node.target, Chunked)]
        if not loops:
            return gm
        copy, nodes = copied(gm)
        for node in loops:
            loop: Chunked = node.target
            names = {rows: f"{loop.name}.{rows}_{loop.unit}" for rows in loop.bodies}
            runs = {
                rows: self.graph(body, examples(body), self.chunk_info(names[rows], info))
                for rows, body in loop.bodies.items()
            }
            peak = max(self.peaks[f"{info.name}.{name}"] for name in names.values())
            times = [self.times[f"{info.name}.{names[rows]}"] for rows in loop.sizes]
            host, gpu = (sum(getattr(time, of) for time in times) for of in ("host_us", "gpu_us"))
            nodes[node].target = replace(loop, runs=runs, peak=peak, host_us=host, gpu_us=gpu)
        copy.recompile()
        return copy

    def with_inner_graphs(self, gm: fx.GraphModule, info: GraphInfo) -> fx.GraphModule:
        """Return `gm` with compiled branches and loop bodies of its control flow; `gm` itself if it has none.

        The plan of each is named for the graph and the branch.
        """
        inner = inner_graphs(gm)
        if not inner:
            return gm
        copy, _ = copied(gm)
        for name, graph in inner.items():
            inner_info = self.chunk_info(name, info)
            setattr(copy, name, compiled_graph(graph, lambda g, i=inner_info: self.graph(g, examples(g), i)))
        copy.recompile()
        return copy

    def chunk_info(self, name: str, info: GraphInfo) -> GraphInfo:
        digest = f"{info.digest} {name}" if info.digest else ""
        return GraphInfo(f"{info.name}.{name}", Phase.CHUNK, (), 0, from_disk=info.from_disk, digest=digest)

    def give_up(self, name: str, error: Exception) -> None:
        """Warn once that a graph runs eager because of `error`, or raise it when strict.

        The user's errors, and errors that TorchDynamo handles, are raised unchanged.
        """
        if isinstance(error, EagerGraphError):
            self.warned.fall_back(f"eager {error}", error)
            self.plans.leave(name, str(error).splitlines()[0])
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

    def recorded(
        self,
        run: Callable[..., Any],
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        info: GraphInfo,
        backend: str,
        tuning: GraphTuning | None,
    ) -> tuple[Callable[..., Any], Decision]:
        """Return (`run`, replayed as a CUDA graph if possible; the decision)."""
        decision = not_replayed(f"backend {backend!r} launches nothing")
        if backend == "triton":
            run, decision = self.recordings.wrap(run, gm, inputs, info, tuning=tuning)
        if not decision.is_done and decision.reason != FORWARD_IS_NOT:
            self.warned.warn(
                f"cudagraphs {decision.reason}",
                f"{info.name} is not recorded as a CUDA graph: {decision.reason}\n"
                "  what to do: change that, or leave it where host time does not count",
            )
        return run, decision

    def tuning(self, plan: FusionPlan, runners: Mapping[str, Runner]) -> GraphTuning:
        """Return the search that chooses among the schedules of a graph's kernels when it is recorded."""
        us = times_by(plan, runners)
        return GraphTuning(sorted(us, key=us.__getitem__, reverse=True), self.stages)

    def terms(self, plan: FusionPlan, info: GraphInfo, allocated: int, at: Hints | None = None) -> Terms:
        """Return the predictions that decide if a graph is recorded without being asked for.

        at: the sizes of the calls, if other than planned. allocated: `Order.allocated` for the planned sizes.
        """
        setting = plan.setting
        assert setting is not None
        at = at or setting.hints
        time = step_time(plan, setting.device, setting.hints, at)
        is_copied = info.phase is Phase.INFERENCE  # in training results are lent
        results = dict.fromkeys(plan.dag.outputs if is_copied else ())
        copied = nbytes((meta for name in results for meta in plan.dag.op(name).outputs), at)
        allocated = (
            allocated if at == setting.hints else ordered(plan, info.owned, at, info.donated).allocated
        )
        copy_us = 2e6 * copied / setting.device.copy_bandwidth
        return Terms(time.host_us, time.gpu_us, allocated, copy_us, time.replay_us)

    def report_left(self, plan: FusionPlan) -> None:
        """Warn of dtypes that no kernel can hold; if strict, raise if an op has no kernel and no library."""
        wanting = [left for left in plan.leftovers if not left.library]
        for left in wanting:
            complex_ones = [m.dtype for m in plan.dag.op(left.op).outputs if m.dtype.is_complex]
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

    def verified(
        self, plan: FusionPlan, runners: Mapping[str, Runner], kind: str, backend: str
    ) -> Mapping[str, Callable[..., Any]]:
        """Return the runners of a graph, each compared with its cluster's fx subgraph when first called.

        With backend "eager" the subgraphs themselves run: return the runners unchanged, and warn.
        """
        if backend == "eager" and any(isinstance(p, UserKernel) for p in self.patterns):
            return runners  # the user's kernels are compared, and nothing else runs
        if backend == "eager":
            nothing = f"the clusters run as ATen ops on {kind}: there is no kernel to compare them with"
            todo = "run the kernels: on a GPU, or here with backend='interpret'"
            self.plans.verification.nothing = nothing
            self.warned.warn("verify", f"verify=True: {nothing}\n  what to do: {todo}")
            return runners
        return {c.name: self.verifier(c, plan.dag, runners[c.name]) for c in plan.clusters}

    def verifier(self, cluster: Cluster, dag: OpDag, run: Runner) -> Verifier:
        """Return `run` of a cluster, compared with the cluster's fx subgraph when it is first called."""
        return Verifier(
            run,
            subgraph(cluster, dag),
            cluster.name,
            cluster.outputs,
            coarsest(dag, cluster.ops),
            self.plans.verification,
            self.warned,
            frozenset(map(cluster.inputs.index, aliased_inputs(cluster, dag).values())),
        )

    def hints(self, phase: Phase) -> list[Traced]:
        """Return the cluster hints to look for in a graph.

        In a backward graph the gradient of a hint stands before it, if a forward graph had its operators.
        """
        hints: list[Traced] = []
        for pattern in self.patterns:
            if isinstance(pattern, ClusterHint):
                hint = traced_hint(pattern)
                if pattern.backward and phase is Phase.BACKWARD and hint.operators <= self.computed:
                    hints.append(traced_gradient(pattern))
                hints.append(hint)
        return hints

    def backend_for(self, kind: str) -> str:
        """Return the name of the backend that runs the clusters of a graph on this kind of device."""
        if self.options.backend != "auto":
            return self.options.backend
        if kind == "cuda":
            return "triton"
        warned = self.warned if self.options.strict else of_process
        warned.fall_back(f"device {kind}", EagerDeviceError(device=kind))
        return "eager"

    def runners_of(
        self,
        plan: FusionPlan,
        device: DeviceSpec,
        backend: str,
        ready: Mapping[str, tuple[Program, ...]] | None,
    ) -> dict[str, Runner]:
        """Return the runners of a plan's clusters, by name; clusters of one form share a runner."""
        forms = {c.name: canonical(c, plan.dag) for c in plan.clusters}
        timed = self.timed(plan, forms) if backend == "triton" else set[Canonical]()
        return {
            c.name: self.runner(c, forms[c.name], plan, device, backend, ready, timed=forms[c.name] in timed)
            for c in plan.clusters
        }

    def runner(
        self,
        cluster: Cluster,
        form: Canonical,
        plan: FusionPlan,
        device: DeviceSpec,
        backend: str,
        ready: Mapping[str, tuple[Program, ...]] | None,
        *,
        timed: bool,
    ) -> Runner:
        """Return the runner of a cluster's form, which is created on first use.

        ready: programs by the names of clusters. timed: True if the fastest schedule is chosen by timing.
        """
        key = (form, backend)
        if key not in self.runners:
            programs = (ready or {}).get(cluster.name, ())
            if not programs and backend != "eager":
                programs = self.programs_of(form, cluster, plan, device)
            backend = backend if programs else "eager"
            for program in programs[:1]:
                for kernel in program.kernels:
                    self.debug.kernel(plan.name, kernel.name, kernel.source)
            fallback = functools.partial(subgraph, cluster, plan.dag)
            self.runners[key] = Runner(
                programs,
                fallback() if backend == "eager" else deferred(fallback),
                name=cluster.name,
                backend=backend,  # type: ignore[arg-type]
                strict=self.options.strict,
                tune=timed,
                store=self.store,
                home=torch.device(form.device),
                stages=self.stages,
            )
        return self.runners[key]

    def timed(self, plan: FusionPlan, forms: Mapping[str, Canonical]) -> set[Canonical]:
        """Return the forms of clusters whose schedules are timed; the others use their first schedule."""
        if self.options.tune is not True or plan.setting is None:
            return set(forms.values()) if self.options.tune else set()
        us = times_by(plan, forms)
        least = LITTLE * step_time(plan, plan.setting.device, plan.setting.hints).gpu_us
        return {form for form, took in us.items() if took >= least}

    def programs_of(
        self, key: Canonical, cluster: Cluster, plan: FusionPlan, device: DeviceSpec
    ) -> tuple[Program, ...]:
        """Emit a cluster's programs. If that fails, warn and return no programs; raise when strict."""
        try:
            return self.emit(key, cluster, plan.dag, device)
        except Exception as error:
            where = next((s for n in cluster.ops if (s := plan.dag.op(n).source) is not None), None)
            fields = {"kernel": cluster.name, "detail": f"{type(error).__name__}: {error}"}
            failure = KernelError(where, action="be printed", **fields)
            self.warned.fall_back(f"{plan.name} {cluster.name}", failure)
            return ()

    def emit(self, key: Canonical, cluster: Cluster, dag: OpDag, device: DeviceSpec) -> tuple[Program, ...]:
        buffers = {b.name: b for b in key.buffers}
        doc, limit = describe(cluster, dag), self.options.schedules
        return emit(key.nests, cluster.name, doc, buffers, device, limit, key.constants)


def times_by(plan: FusionPlan, of: Mapping[str, K]) -> dict[K, float]:
    """Return the predicted microseconds of a plan's clusters, summed by the value of `of` for the name."""
    us: dict[K, float] = {}
    for cluster in plan.clusters:
        us[of[cluster.name]] = us.get(of[cluster.name], 0.0) + cluster.cost.us
    return us


def planned(info: GraphInfo, dag: OpDag, setting: Setting) -> FusionPlan:
    """Return a new plan of a graph."""
    return plan_clusters(
        info.name,
        dag,
        setting.device,
        setting.hints,
        numerics=setting.numerics,
        backward=info.phase is Phase.BACKWARD,
        matches=setting.matches,
    )


def deferred(make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """Return a function that calls `make` on its first call and then calls the result."""
    cached = functools.cache(make)
    return lambda *arguments: cached()(*arguments)


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


def device_type(dag: OpDag) -> str:
    """Return the device kind of most tensors."""
    kinds = [m.device.split(":")[0] for name in dag.order for m in dag.op(name).outputs[:1]]
    return max(set(kinds), key=kinds.count) if kinds else "cpu"
