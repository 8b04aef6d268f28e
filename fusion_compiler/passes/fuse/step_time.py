"""What one call of a graph takes: the host to launch it, the device to run it.

The host's times were read from a decoding step of a Llama-1B shape on an H200's host: 81 products and 33
kernels in 5.1 ms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sympy

from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.ops import Kind
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ir.schema import is_view
from fusion_compiler.passes.fuse.cost import contraction_cost
from fusion_compiler.schedule.cost import NO_HINTS

CALL_US, KERNEL_US, GRAPH_US = 35.0, 20.0, 100.0  # of the host: a library call, a kernel, a graph


@dataclass(frozen=True)
class StepTime:
    """Microseconds of the host and of the device, one beside the other."""

    host_us: float
    gpu_us: float


def step_time(plan: FusionPlan, device: DeviceSpec, hints: Mapping[sympy.Symbol, int] = NO_HINTS) -> StepTime:
    """Predicted from the plan; calls that are no contractions count as short ones."""
    calls = [left for left in plan.leftovers if not is_view(plan.dag.op(left.op).target)]
    products = [plan.dag.op(c.op) for c in calls if c.kind == Kind.CONTRACTION]
    gpu = sum(cluster.cost.us for cluster in plan.clusters)
    gpu += sum(contraction_cost(op, device, hints).us for op in products)
    gpu += (len(calls) - len(products)) * device.launch_us
    return StepTime(GRAPH_US + CALL_US * len(calls) + KERNEL_US * len(plan.clusters), gpu)
