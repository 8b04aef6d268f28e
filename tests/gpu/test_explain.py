"""A plan that explain() makes from CPU tensors for this device is the plan that compile() makes on it."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusion_compiler as fc
from fusion_compiler.capture.attention_choice import Call, backend_of
from fusion_compiler.ir.device import device_spec
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ops.table import Kind
from tests.report.test_target import CASES

DEVICE = "cuda"


def described(plans: tuple[FusionPlan, ...]) -> list[str]:
    """Describe the computations and the kernels of the graphs, without names and the order of arguments."""
    lines: list[str] = []
    for plan in plans:
        lines.append(plan.name)
        for op in map(plan.dag.op, plan.dag.order):
            if op.kind is not Kind.LAYOUT and op.name not in plan.dag.inputs:
                results = [f"{m.dtype}{list(m.shape)}{list(m.stride)}@{m.device}" for m in op.outputs]
                lines.append(f"{op.target} {' '.join(results)}")
        lines += sorted(
            f"kernel {' '.join(str(plan.dag.op(n).target) for n in c.ops)} {c.cost.us:.2f}"
            for c in plan.clusters
        )
    return lines


@pytest.mark.parametrize("name", CASES)
def test_plans_from_cpu_tensors_are_those_of_compile(name: str) -> None:
    model, x, _ = CASES[name]
    with torch.set_grad_enabled(model.training):
        explained = fc.explain(model, x, device=DEVICE)
        fast = fc.compile(copy.deepcopy(model).to(DEVICE), strict=True)
        result = fast(x.to(DEVICE))
        if model.training and result.requires_grad:
            result.backward(torch.ones_like(result))
    assert explained.assumed == ""
    assert described(explained.plans) == described(tuple(fast.plan))


def drawn(rng: random.Random) -> tuple[Call, dict[str, object]]:
    """A random call of attention, many of them at the edge of what a kernel takes."""
    batch, heads, size = (
        rng.choice([1, 3]),
        rng.choice([4, 8]),
        rng.choice([1, 7, 8, 64, 96, 128, 192, 256, 264]),
    )
    rows, columns = rng.choice([1, 16, 33, 64]), rng.choice([1, 16, 33, 64])
    grouped = rng.random() < 0.3
    dtype = rng.choice([torch.float16, torch.bfloat16, torch.float32, torch.float64])
    narrow = heads // 2 if grouped else heads
    wide = 128 if size == 192 and rng.random() < 0.5 else size
    make = {"dtype": dtype, "device": DEVICE, "requires_grad": rng.random() < 0.5}
    q = torch.zeros(batch, heads, rows, size, **make)  # type: ignore[call-overload]
    k = torch.zeros(batch, narrow, columns, size, **make)  # type: ignore[call-overload]
    v = torch.zeros(batch, narrow, columns, wide, **make)  # type: ignore[call-overload]
    if rng.random() < 0.2:
        k = k.transpose(-1, -2).contiguous().transpose(-1, -2)
    shapes = [
        None,
        None,
        (rows, columns),
        (batch, 1, rows, columns),
        (batch, heads, 1, columns),
        (1, rows, columns),
    ]
    shape = rng.choice(shapes)
    mask = None if shape is None else torch.ones(shape, dtype=rng.choice([torch.bool, dtype]), device=DEVICE)
    causal = mask is None and rng.random() < 0.5
    dropout = rng.choice([0.0, 0.0, 0.1, 0.125])
    call = Call(q, k, v, mask, dropout, causal, grouped)
    return call, {"attn_mask": mask, "dropout_p": dropout, "is_causal": causal, "enable_gqa": grouped}


def described_call(call: Call) -> str:
    """A call in one line: dtype, shape and strides of its tensors, and the other arguments."""
    tensors = (call.query, call.key, call.value, call.mask)
    parts = ["-" if t is None else f"{t.dtype} {list(t.shape)} {t.stride()}" for t in tensors]
    others = f"dropout {call.dropout} causal {call.causal} grouped {call.grouped} grad {call.differentiated}"
    return " | ".join([*parts, others])


def test_the_kernel_of_attention_is_pytorchs_choice() -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    rng, spec = random.Random(seed), device_spec(DEVICE)
    for _ in range(400):
        call, options = drawn(rng)
        chosen = torch._fused_sdp_choice(call.query, call.key, call.value, **options)  # type: ignore[arg-type]
        assert int(backend_of(call, spec)) == chosen, described_call(call)


def test_attention_of_the_plan_is_the_operator_that_runs() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            names.append(func._opname)
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    q, mask = torch.zeros(2, 4, 33, 64, dtype=torch.half), torch.ones(33, 33, dtype=torch.bool)

    def attend(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    with Record():
        attend(q.to(DEVICE), mask.to(DEVICE))
    (plan,) = fc.explain(attend, q, mask, device=DEVICE).plans
    planned = [plan.dag.op(name).target._opname for name in plan.dag.order if "attention" in name]  # type: ignore[attr-defined]
    assert planned == [name for name in names if "attention" in name]


def test_a_module_on_the_gpu_gives_the_plan_of_one_on_the_cpu() -> None:
    model, x, _ = CASES["dropout"]
    on_gpu: nn.Module = copy.deepcopy(model).to(DEVICE)
    on_device = fc.explain(on_gpu, x.to(DEVICE), device=DEVICE)
    assert described(on_device.plans) == described(fc.explain(model, x, device=DEVICE).plans)
