"""Emit, tune and, if asked, verify the kernels of a plan's clusters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from fusion_compiler.codegen.emit import emit
from fusion_compiler.errors import KernelError, WarnOnce
from fusion_compiler.ir.canonical import Canonical, aliased_inputs, canonical, describe
from fusion_compiler.ir.dag import OpDag
from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.kernel import Program
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ir.plan_data import Cluster
from fusion_compiler.options import Options
from fusion_compiler.passes.fuse.step_time import step_time
from fusion_compiler.runtime.debug import Debug
from fusion_compiler.runtime.graph_tuning import GraphTuning
from fusion_compiler.runtime.launch import Runner
from fusion_compiler.runtime.stages import Stages
from fusion_compiler.runtime.verify import Verification, Verifier, coarsest
from fusion_compiler.stitch.stitch import subgraph
from fusion_compiler.support.store import Store

K = TypeVar("K")

LITTLE = 0.005  # of a graph's time: clusters that take less are not timed


@dataclass(frozen=True)
class Target:
    """The target is what a graph runs on.

    kind: "cuda" or "cpu". device: the one that is planned for. backend: as `Options.backend`, but not "auto".
    """

    kind: str
    device: DeviceSpec
    backend: str


class Runners:
    """The runners of a model's clusters, by canonical form and backend."""

    def __init__(
        self, options: Options, store: Store, stages: Stages, debug: Debug, warned: WarnOnce
    ) -> None:
        self.options, self.store, self.stages = options, store, stages
        self.debug, self.warned = debug, warned
        self.runners: dict[tuple[Canonical, str], Runner] = {}

    def of_plan(
        self, plan: FusionPlan, target: Target, ready: Mapping[str, tuple[Program, ...]] | None = None
    ) -> tuple[dict[str, Runner], dict[str, tuple[Program, ...]]]:
        """Return (the runners of a plan's clusters by name, the programs of new runners by name).

        Clusters of one form share a runner. ready: the programs of the clusters, if they come from disk.
        """
        before = len(self.runners)
        forms = {c.name: canonical(c, plan.dag) for c in plan.clusters}
        timed = self.timed(plan, forms) if target.backend == "triton" else set[Canonical]()
        runners = {
            c.name: self.runner(c, forms[c.name], plan, target, ready or {}, timed=forms[c.name] in timed)
            for c in plan.clusters
        }
        new = [*self.runners.values()][before:]
        return runners, {r.name: r.candidates for r in new if r.candidates}

    def runner(
        self,
        cluster: Cluster,
        form: Canonical,
        plan: FusionPlan,
        target: Target,
        ready: Mapping[str, tuple[Program, ...]],
        *,
        timed: bool,
    ) -> Runner:
        """Return the runner of a cluster's form, which is created on first use.

        timed: True if the fastest schedule is chosen by timing.
        """
        key = (form, target.backend)
        if key not in self.runners:
            programs = ready.get(cluster.name, ())
            if not programs and target.backend != "eager":
                programs = self.programs_of(form, cluster, plan, target.device)
            backend = target.backend if programs else "eager"
            shown = programs
            if not programs and target.backend == "eager" and self.debug.reads_kernels:
                shown = self.programs_of(form, cluster, plan, target.device)
            for program in shown[:1]:
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
        self, form: Canonical, cluster: Cluster, plan: FusionPlan, device: DeviceSpec
    ) -> tuple[Program, ...]:
        """Emit a cluster's programs. If that fails, warn and return no programs; raise when strict."""
        try:
            return self.emit(form, cluster, plan.dag, device)
        except Exception as error:
            where = next((s for n in cluster.ops if (s := plan.dag.op(n).source) is not None), None)
            fields = {"kernel": cluster.name, "detail": f"{type(error).__name__}: {error}"}
            failure = KernelError(where, action="be printed", **fields)
            self.warned.fall_back(f"{plan.name} {cluster.name}", failure)
            return ()

    def emit(
        self, form: Canonical, cluster: Cluster, dag: OpDag, device: DeviceSpec
    ) -> tuple[Program, ...]:
        return emit_cluster(form, cluster, dag, device, self.options.schedules)

    def tuning(self, plan: FusionPlan, runners: Mapping[str, Runner]) -> GraphTuning:
        """Return the search that chooses among the schedules of a graph's kernels when it is recorded."""
        us = times_by(plan, runners)
        return GraphTuning(sorted(us, key=us.__getitem__, reverse=True), self.stages)


def emit_cluster(
    form: Canonical, cluster: Cluster, dag: OpDag, device: DeviceSpec, limit: int = 4
) -> tuple[Program, ...]:
    """Return the candidate programs of a cluster, best first, and at most `limit`."""
    buffers = {b.name: b for b in form.buffers}
    doc = describe(cluster, dag)
    return emit(form.nests, cluster.name, doc, buffers, device, limit, form.constants)


def verifier(
    cluster: Cluster, dag: OpDag, run: Runner, table: Verification, warned: WarnOnce
) -> Verifier:
    """Return `run` of a cluster, compared with the cluster's fx subgraph at its first call.

    table: receives the errors that are measured.
    """
    return Verifier(
        run,
        subgraph(cluster, dag),
        cluster.name,
        cluster.outputs,
        coarsest(dag, cluster.ops),
        table,
        warned,
        frozenset(map(cluster.inputs.index, aliased_inputs(cluster, dag).values())),
    )


def times_by(plan: FusionPlan, of: Mapping[str, K]) -> dict[K, float]:
    """Return the predicted microseconds of a plan's clusters, summed by the value of `of` for the name."""
    us: dict[K, float] = {}
    for cluster in plan.clusters:
        us[of[cluster.name]] = us.get(of[cluster.name], 0.0) + cluster.cost.us
    return us


def deferred(make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """Return a function that calls `make` on its first call and then calls the result."""
    cached = functools.cache(make)
    return lambda *arguments: cached()(*arguments)
