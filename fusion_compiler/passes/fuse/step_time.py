"""Predict the time of one call of a graph: of the host to launch it, and of the device to run it.

The host's times were read from a decoding step of a Llama-1B shape on an H200's host: 81 products and 33
kernels in 5.1 ms.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusion_compiler.ir.chunks import Chunked
from fusion_compiler.ir.dag import nbytes
from fusion_compiler.ir.decision import LIBRARY_CALL
from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.dims import Hints
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ops.schema import runs_no_kernel
from fusion_compiler.passes.fuse.cost import contraction_cost
from fusion_compiler.schedule.cost import NO_HINTS

CALL_US, KERNEL_US, GRAPH_US = 35.0, 20.0, 100.0  # host time of a library call, a kernel, a graph
REPLAY_US = 60.0  # host time to replay a CUDA graph, with PyTorch's bookkeeping


@dataclass(frozen=True)
class StepTime:
    """A step takes microseconds of the host and of the device, one beside the other.

    replay_us: host time if the graph is replayed as a CUDA graph.
    """

    host_us: float
    gpu_us: float
    replay_us: float = GRAPH_US + REPLAY_US


def step_time(
    plan: FusionPlan,
    device: DeviceSpec,
    hints: Hints = NO_HINTS,
    at: Hints | None = None,
) -> StepTime:
    """Predict the time of a step from the plan. Calls that are no contractions count as short ones, loops
    over chunks as all of their chunks.

    hints: the sizes that the plan was made for. at: the sizes of the call, if they differ: it takes longer or
    shorter as it moves more bytes or fewer.
    """
    at = hints if at is None else at
    calls = [left for left in plan.leftovers if not runs_no_kernel(plan.dag.op(left.subject).target)]
    products = [plan.dag.op(c.subject) for c in calls if c.rule == LIBRARY_CALL]
    times = [(c.cost.us, (*c.inputs, *c.outputs)) for c in plan.clusters]
    times += [(contraction_cost(op, device, hints).us, (*op.inputs, op.name)) for op in products]
    loops = [op.target for c in calls if isinstance((op := plan.dag.op(c.subject)).target, Chunked)]
    gpu = (len(calls) - len(products) - len(loops)) * device.launch_us + sum(loop.gpu_us for loop in loops)
    for us, names in times:
        metas = [meta for name in names for meta in plan.dag.op(name).outputs]
        grown = 1.0 if at == hints else nbytes(metas, at) / max(1, nbytes(metas, hints))
        gpu += us if grown == 1.0 else max(device.launch_us, us * grown)
    host = GRAPH_US + CALL_US * (len(calls) - len(loops)) + KERNEL_US * len(plan.clusters)
    return StepTime(host + sum(loop.host_us for loop in loops), gpu)
