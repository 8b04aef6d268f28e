"""The hand-written kernels of "Data Movement Is All You Need", found in the layer's DAG.

Ivanov et al. (MLSys 2021) fused BERT-large's encoder layer by hand. Each of their kernels is here by
the ops that it must hold, and must be one cluster of the plan at the paper's sizes (batch 8, length
512, fp16). Two things differ, both by what one pass can hold: our norm's backward does in one pass
what BSB and BLNRD did in two, with the bias gradient beside it; masks are not stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import pytest
import torch

import fusion_compiler as fc
from examples.encoder_layer import EncoderLayer
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ir.plan_data import Cluster
from fusion_compiler.ops.schema import short_name

BATCH, LENGTH, HIDDEN, HEADS, INNER = 8, 512, 1024, 16, 4096
ROWS = BATCH * LENGTH


@dataclass(frozen=True)
class Must:
    """An op that a kernel holds: its name, a fragment of its source line, its number of elements."""

    name: str
    line: str
    numel: int | None = None
    times: int = 1


SOFTMAX, PROBABILITIES = "torch.softmax(scores", BATCH * HEADS * LENGTH * LENGTH
FORWARD = {
    "AIB": (
        Must("add", "self.query.bias"), Must("add", "self.key.bias"), Must("add", "self.value.bias"),
        Must("clone", "scores =", ROWS * HIDDEN, 2), Must("clone", "weights @ v", ROWS * HIDDEN),
    ),
    "SM": (
        Must("mul", "scores ="), Must("amax", SOFTMAX), Must("exp", SOFTMAX), Must("sum", SOFTMAX),
        Must("uniform", SOFTMAX), Must("ge", SOFTMAX), Must("mul", SOFTMAX, PROBABILITIES, 2),
    ),
    "BDRLN 1": (
        Must("add", "self.output.bias"), Must("ge", "self.output.bias"),
        Must("add", "x + attended", ROWS * HIDDEN), Must("sum", "x + attended", ROWS, 2),
        Must("rsqrt", "x + attended"),
    ),
    "BRD": (Must("add", "self.up.bias"), Must("relu", "self.up.bias"), Must("ge", "self.up.bias")),
    "BDRLN 2": (
        Must("add", "self.down.bias"), Must("ge", "self.down.bias"), Must("add", "x + outer", ROWS * HIDDEN),
        Must("sum", "x + outer", ROWS, 2), Must("rsqrt", "x + outer"),
    ),
}  # fmt: skip
BACKWARD = {
    "BSB": (Must("sum", "x + outer", HIDDEN, 2), Must("mul", "x + outer", ROWS * HIDDEN)),
    "BLNRD 2": (
        Must("sum", "x + outer", ROWS, 2), Must("ge", "self.down.bias"), Must("mul", "self.down.bias"),
    ),
    "BDRB": (
        Must("ge", "self.up.bias"), Must("where", "self.up.bias", ROWS * INNER),
        Must("sum", "self.up.bias", INNER),
    ),
    "EBSB": (
        Must("add", "x @ self.weight"), Must("sum", "x + attended", HIDDEN, 2),
        Must("mul", "x + attended", ROWS * HIDDEN),
    ),
    "BLNRD 1": (
        Must("sum", "x + attended", ROWS, 2), Must("ge", "self.output.bias"), Must("mul", "self.output.bias"),
    ),
    "BAOB": (Must("sum", "self.output.bias", HIDDEN),),
    "BS": (
        Must("ge", SOFTMAX), Must("exp", SOFTMAX), Must("sum", SOFTMAX, BATCH * HEADS * LENGTH),
        Must("mul", "scores =", PROBABILITIES),
    ),
    "BAIB": (
        Must("sum", "self.query.bias", HIDDEN), Must("sum", "self.key.bias", HIDDEN),
        Must("sum", "self.value.bias", HIDDEN),
    ),
    "BEI": (Must("add", "x @ self.weight", ROWS * HIDDEN, 3),),
}  # fmt: skip


@pytest.fixture(scope="module")
def plans() -> tuple[FusionPlan, FusionPlan]:
    """Forward and backward at the paper's sizes; meta tensors, because only the plan is wanted."""
    layer = EncoderLayer(HIDDEN, HEADS, INNER).half().to("meta")
    # The paper writes attention with its scores in memory; one nest would have none of its kernels.
    fast = fc.compile(layer, backend="eager", device="h200", disable=("general attention",))
    x = torch.empty(BATCH, LENGTH, HIDDEN, dtype=torch.half, device="meta", requires_grad=True)
    y = fast(x)
    y.backward(torch.empty_like(y))
    forward, backward = fast.plan
    return forward, backward


def holds(plan: FusionPlan, cluster: Cluster, must: Must) -> bool:
    ops = [plan.dag.op(name) for name in cluster.ops]
    members = [
        op
        for op in ops
        if short_name(op.target) == must.name
        and op.source is not None
        and must.line in op.source.code
        and must.numel in (None, prod(op.outputs[0].shape))
    ]
    return len(members) >= must.times


def holders(plan: FusionPlan, ops: tuple[Must, ...]) -> list[str]:
    return [c.name for c in plan.clusters if all(holds(plan, c, must) for must in ops)]


@pytest.mark.parametrize("kernel", FORWARD)
def test_forward_kernel_is_one_cluster(kernel: str, plans: tuple[FusionPlan, FusionPlan]) -> None:
    assert len(holders(plans[0], FORWARD[kernel])) == 1, plans[0]


@pytest.mark.parametrize("kernel", BACKWARD)
def test_backward_kernel_is_one_cluster(kernel: str, plans: tuple[FusionPlan, FusionPlan]) -> None:
    assert len(holders(plans[1], BACKWARD[kernel])) == 1, plans[1]


def test_norm_backward_is_one_pass_with_its_dropout_and_its_bias_gradient(
    plans: tuple[FusionPlan, FusionPlan],
) -> None:
    one, two = (holders(plans[1], BACKWARD[name]) for name in ("BSB", "BLNRD 2"))
    assert one == two == holders(plans[1], (Must("sum", "self.down.bias", HIDDEN),))
    one, two = (holders(plans[1], BACKWARD[name]) for name in ("EBSB", "BLNRD 1"))
    assert one == two == holders(plans[1], BACKWARD["BAOB"])


def test_nothing_that_is_not_a_product_runs_alone_and_unfused(plans: tuple[FusionPlan, FusionPlan]) -> None:
    for plan in plans:
        eager = {left.target for left in plan.leftovers if left.rule != "library call"}
        assert eager <= {"fusion_compiler.seed.default"}, plan


def test_no_dropout_mask_is_stored(plans: tuple[FusionPlan, FusionPlan]) -> None:
    forward, _ = plans
    stored = {name for cluster in forward.clusters for name in cluster.outputs}
    masks = {name for name in stored if short_name(forward.dag.op(name).target) == "ge"}
    assert not masks
