"""Every schedule of every cluster of whole models beside the cluster's fx subgraph, in the interpreter.

Which schedule runs is decided by time alone, so that a wrong one among them shows on some devices, or days.
Sizes are tiny here; on a GPU they are the models' own (`gpu/test_every_schedule.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.decoding.decoders import DECODERS
from benchmarks.models.workloads import WORKLOADS, Workload, gradient_for, step
from fusion_compiler.compiler.compiler import Compiler
from fusion_compiler.compiler.runners import Runners, Target, verifier
from fusion_compiler.errors import HardwareExceededError
from fusion_compiler.ir.canonical import Canonical
from fusion_compiler.ir.dag import OpDag
from fusion_compiler.ir.kernel import Program
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ir.plan_data import Cluster
from fusion_compiler.ir.writes import base_of
from fusion_compiler.options import Options
from fusion_compiler.runtime.builds import compile_builds
from fusion_compiler.runtime.launch import Backend, Runner, find_gpu, program_builds


class Checking(Compiler):
    """Runs clusters by ATen, and at the first call of each all programs that it has."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(Options.of(backend="eager", tune="all"))
        self.kernels = CheckingRunners(self, backend)

    @property
    def seen(self) -> set[Canonical]:
        return self.kernels.seen

    @property
    def refused(self) -> list[str]:
        return self.kernels.refused


class CheckingRunners(Runners):
    """backend: what runs the programs, "interpret" or "triton"."""

    def __init__(self, compiler: Compiler, backend: Backend) -> None:
        usual = compiler.kernels
        super().__init__(usual.options, usual.store, usual.stages, usual.debug, usual.warned)
        self.table, self.backend = compiler.plans.verification, backend
        self.seen: set[Canonical] = set()
        self.refused: list[str] = []

    def runner(
        self, cluster: Cluster, form: Canonical, plan: FusionPlan, target: Target, *rest: Any, **more: Any
    ) -> Any:
        by_aten = super().runner(cluster, form, plan, target, *rest, **more)

        def call(*arguments: Any) -> tuple[torch.Tensor, ...]:
            if form not in self.seen:
                self.seen.add(form)
                programs = self.emit(form, cluster, plan.dag, target.device)
                self._check(programs, cluster, plan.dag, by_aten, arguments)
            return by_aten(*arguments)

        call.__name__ = call.__qualname__ = cluster.name
        return call

    def _check(
        self,
        programs: tuple[Program, ...],
        cluster: Cluster,
        dag: OpDag,
        by_aten: Runner,
        arguments: tuple[Any, ...],
    ) -> None:
        bases = [base_of(dag, name) for name in cluster.outputs]
        written = {cluster.inputs.index(base) for base in bases if base is not None}
        if self.backend == "triton":
            compile_builds(b for p in programs for b in program_builds(p, find_gpu(None).target))
        for program in programs:
            name = f"{cluster.name} under {program.schedule}"
            run = Runner((program,), by_aten.fallback, name=name, strict=True, backend=self.backend)
            copies = [a.clone() if i in written else a for i, a in enumerate(arguments)]
            try:
                verifier(replace(cluster, name=name), dag, run, self.table, self.warned)(*copies)
            except HardwareExceededError:
                self.refused.append(name)


def check(workload: Workload, device: str, quick: bool, kernels: Backend) -> None:
    torch._dynamo.reset()
    compiler = Checking(kernels)
    model, batch = workload.make(device, quick)
    fast: Any = torch.compile(model, backend=compiler.backend(), dynamic=False)
    gradient = gradient_for(model, batch) if workload.train else None
    step(fast, batch, workload.train, gradient)
    rows = compiler.plans.verification.rows
    assert len({row.cluster for row in rows}) > 4
    assert not [row for row in rows if not row.agrees], str(compiler.plans.verification)
    assert len(compiler.refused) < len(compiler.seen), compiler.refused


ROWS = (*WORKLOADS, *DECODERS)
EACH = pytest.mark.parametrize("workload", ROWS, ids=[w.name for w in ROWS])


@pytest.mark.sample(2)
@pytest.mark.filterwarnings("ignore::fusion_compiler.FusionWarning")  # clusters run by ATen
@EACH
def test_every_schedule_is_right(workload: Workload) -> None:
    check(workload, "cpu", True, "interpret")
