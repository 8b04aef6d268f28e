"""One measurement of `python -m benchmarks compile-time`: a model's first compiled step, stage by stage.

    python -m benchmarks.compile_time.first_step '{"workload": 0, "layers": 12, "contender": "ours", ...}'

The process has imported nothing of PyTorch's at first. What counts begins when the model is there and has
done a step in eager: the compiler's own imports, compiling, loading, and the step itself.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.harness.processes import my_turn, only


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """{"seconds", "processor" seconds, "stages": {name: seconds}, "torch_import" seconds, "disk"}.

    disk: what each plan of ours says of the caches.
    """
    start = time.perf_counter()
    import torch

    torch_import = time.perf_counter() - start
    from benchmarks.harness.timing import synchronize
    from benchmarks.models.workloads import gradient_for, step

    device = torch.device(task["device"])
    workload = workload_of(task)
    if device.type == "cpu":  # what the step computes should not count
        torch.set_num_threads(1)
    dtype = torch.float32 if device.type == "cpu" else None
    model, batch = workload.make(device, task["quick"], dtype=dtype)
    gradient = gradient_for(model, batch) if workload.train else None
    step(model, batch, workload.train, gradient)
    model.zero_grad(set_to_none=True)
    synchronize(device)
    my_turn()
    start, processor = time.perf_counter(), time.process_time()
    compile_ = compiler(task)
    imported = time.perf_counter() - start
    called = compile_(model)
    step(called, batch, workload.train, gradient)
    synchronize(device)
    seconds, processor = time.perf_counter() - start, time.process_time() - processor
    stages = {"import": imported, **stages_of(called)}
    stages["the rest"] = seconds - sum(stages.values())
    cell = {"seconds": seconds, "processor": processor, "stages": stages, "torch_import": torch_import}
    return cell | {"disk": from_disk(called)}


def workload_of(task: Mapping[str, Any]) -> Any:
    """The workload with so many layers, in both of its sizes."""
    from benchmarks.models.workloads import WORKLOADS

    chosen = WORKLOADS[task["workload"]]
    sizes, quick = ({**fields, "layers": task["layers"]} for fields in (chosen.sizes, chosen.quick))
    return dataclasses.replace(chosen, sizes=sizes, quick=quick)


def compiler(task: Mapping[str, Any]) -> Callable[[Any], Any]:
    """The contender, with what it imports before it is called."""
    from benchmarks.harness.contenders import contenders

    if task["contender"] != "ours":
        return contenders(False)[task["contender"]]
    import fusion_compiler as fc

    if task["device"] == "cpu" and task["backend"] == "auto":
        launch_nothing()
        return functools.partial(fc.compile, device="h200", tune=False)
    return functools.partial(fc.compile, backend=task["backend"])


def launch_nothing() -> None:
    """Without a GPU: kernels are planned and printed as for one, neither compiled nor launched."""
    import pytest

    from tests.fake_gpu import IdleGpu, use

    gpu = IdleGpu()
    gpu.empty = _zeros  # type: ignore[method-assign]  what was to be computed may be an index
    use(gpu, pytest.MonkeyPatch())


def _zeros(shape: Any, stride: Any, dtype: Any) -> Any:
    import torch

    return torch.empty_strided(shape, stride, dtype=dtype).zero_()


def stages_of(called: Any) -> dict[str, float]:
    """Dynamo's seconds and those of the stages after it."""
    from torch._dynamo.utils import compilation_time_metrics

    def total(name: str) -> float:
        return sum(compilation_time_metrics.get(name, ()))

    dynamo = {"dynamo": total("_compile.compile_inner") - total("OutputGraph.call_user_compiler")}
    plan = getattr(called, "plan", None)
    if plan is not None:
        return dynamo | plan.seconds
    forward = total("compile_fx.<locals>.fw_compiler_base") + total("AOTAutogradCache.inductor_load")
    backward = total("compile_fx.<locals>.bw_compiler")  # when it is first called
    autograd = total("OutputGraph.call_user_compiler") - forward
    return dynamo | {"autograd": autograd, "inductor": forward + backward}


def from_disk(called: Any) -> dict[str, str]:
    """Return what the plan of each graph says about the caches; empty for other contenders."""
    return {p.name: p.notes["seconds"] for p in getattr(called, "plan", ())}


if __name__ == "__main__":
    only(measure)
