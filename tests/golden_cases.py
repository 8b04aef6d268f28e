"""The cases of the golden files: the benchmarks' clusters, and their models with one layer, for an H200.

Everything is planned at real sizes on FakeTensors: nothing is computed, and no GPU is needed. Each case gives
two texts: its plans, and the first candidate of each of its distinct kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.initialization import no_init_weights

import fusion_compiler as fc
from benchmarks.kernels.clusters import CASES, CAT_CASES, Case
from benchmarks.kernels.measure import leaves
from benchmarks.models.workloads import WORKLOADS, Workload
from fusion_compiler.compiler.runners import emit_cluster
from fusion_compiler.ir.canonical import canonical
from fusion_compiler.ir.device import device_spec
from fusion_compiler.ir.kernel import Argument, Kernel, Program, Role
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ir.plan_text import execution_order
from tests.codegen.test_experts import mixtral, mixture
from tests.codegen.test_matvec import decode_step, llama_1b
from tests.ops.test_few_queries import attention, tensors, window

FOLDER = Path(__file__).parent / "golden"
DEVICE = "h200"
Make = Callable[[], tuple[FusionPlan, ...]]


def _cluster_plans(case: Case) -> tuple[FusionPlan, ...]:
    """Forward and backward of one of the benchmarks' clusters, in bfloat16."""
    inputs = leaves(case.inputs("cpu"), case.differentiate)
    return fc.explain(case.fn, *inputs.values(), device=DEVICE).plans


def _model_plans(workload: Workload) -> tuple[FusionPlan, ...]:
    """A benchmark's model with one layer; forward and backward where the benchmark trains it."""
    sizes = {name: 1 if name == "layers" else size for name, size in workload.sizes.items()}
    before = torch.get_default_dtype()
    torch.set_default_dtype(workload.dtype)  # born in it: parameters that are fake cannot be converted
    try:
        with no_init_weights():  # some initializations look at values
            model, batch = workload.build(**sizes)
    finally:
        torch.set_default_dtype(before)
    model.train(workload.train)
    with torch.set_grad_enabled(workload.train):
        return fc.explain(model, **batch, device=DEVICE).plans


def _decoding_plans() -> tuple[FusionPlan, ...]:
    """A layer of Llama-1B and its head for one token, and one query of a long context with a mask."""
    with torch.no_grad():
        layer = fc.explain(decode_step, *llama_1b(1), device=DEVICE).plans
        query, *cache = tensors(1, 8, 4, 32768, 128, torch.bfloat16)
        long = fc.explain(attention, query, *cache, window(1, 32768), device=DEVICE).plans
    return (*layer, *long)


def _expert_plans() -> tuple[FusionPlan, ...]:
    """Mixtral's experts for one token, and for four."""
    with torch.no_grad():
        plans = (fc.explain(mixture, *mixtral(tokens), device=DEVICE).plans for tokens in (1, 4))
        return tuple(plan for each in plans for plan in each)


JOINED = tuple(case for case in CAT_CASES if case.fn.__name__ in ("lstm_cell", "rope_interleaved"))
# A decoding step fills its cache before: that needs values, which FakeTensors do not have.
_MODELS = {w.build.__name__: w for w in WORKLOADS if "decode" not in w.name}
MAKERS: dict[str, Make] = {
    **{case.fn.__name__: functools.partial(_cluster_plans, case) for case in (*CASES, *JOINED)},
    **{name: functools.partial(_model_plans, workload) for name, workload in _MODELS.items()},
    "decoding": _decoding_plans,
    "experts": _expert_plans,
}


@functools.cache
def plans_of(name: str) -> tuple[FusionPlan, ...]:
    """The plans of a case, without the seconds that they took."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    with FakeTensorMode(allow_non_fake_inputs=True):
        plans = MAKERS[name]()
    return tuple(
        replace(p, decisions=tuple(d for d in p.decisions if d.rule != "seconds")) for p in plans
    )


def plan_text(name: str) -> str:
    """All plans of a case with every rejection, as the user reads them at FUSION_DEBUG=1."""
    return "\n\n".join(str(plan) for plan in plans_of(name)) + "\n"


def programs_of(name: str) -> list[Program]:
    """The first candidate of every distinct cluster of a case, in the order in which they run."""
    programs: dict[object, Program] = {}
    for plan in plans_of(name):
        for cluster in execution_order(plan):
            key = canonical(cluster, plan.dag)
            if key not in programs:
                programs[key] = emit_cluster(key, cluster, plan.dag, device_spec(DEVICE))[0]
    return list(programs.values())


# -- kernels as text and back -------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """The line above a kernel in a golden file: everything that its source does not say."""

    kernel: Kernel
    schedule: str

    def __str__(self) -> str:
        k = self.kernel
        arguments = ", ".join(
            f"{a.name}: {a.role} {str(a.dtype).removeprefix('torch.')}{'' if a.aligned else ' unaligned'}"
            for a in k.arguments
        )
        grid = ", ".join(map(str, k.grid))
        limit = f", {k.registers} registers" if k.registers else ""
        rounded = "" if k.fp_fusion else ", products rounded"
        return (
            f"{MARK}{k.name} | {self.schedule} | grid {grid} | {k.num_warps} warps"
            f" | {k.num_stages} stages{limit}{rounded} | {arguments}"
        )


MARK = "# kernel "


def kernels_text(name: str) -> str:
    """Kernels of a case, each below the line that says how it is launched."""
    launches = [
        Launch(kernel, program.schedule) for program in programs_of(name) for kernel in program.kernels
    ]
    return "\n\n".join(f"{launch}\n{launch.kernel.source.rstrip()}" for launch in launches) + "\n"


def parse_kernels(text: str) -> list[Kernel]:
    """The kernels of a golden file. Grids are left out: compiling does not need them."""
    return [_parse_kernel(part) for part in text.split(MARK)[1:]]


def _parse_kernel(part: str) -> Kernel:
    head, _, source = part.partition("\n")
    name, _, _, warps, stages, arguments = head.split(" | ")
    stages, *more = stages.split(", ")
    return Kernel(
        name=name,
        source=source.rstrip() + "\n",
        arguments=tuple(_parse_argument(a, i) for i, a in enumerate(arguments.split(", "))),
        grid=(1,),
        num_warps=int(warps.split()[0]),
        num_stages=int(stages.split()[0]),
        registers=next((int(m.split()[0]) for m in more if m.endswith(" registers")), None),
        fp_fusion="products rounded" not in more,
    )


def _parse_argument(text: str, index: int) -> Argument:
    name, _, rest = text.partition(": ")
    role, dtype, *unaligned = rest.split()
    return Argument(name, Role(role), index, getattr(torch, dtype), aligned=not unaligned)
