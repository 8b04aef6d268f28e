"""A plan for a GPU is that GPU's plan, wherever the tensors are from which it is made."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

import fusion_compiler as fc
from fusion_compiler.capture import attention_choice
from fusion_compiler.capture.attention_choice import DROPOUT_IN_SIXTEENTHS, Call, backend_of
from fusion_compiler.capture.target import capturing_for
from fusion_compiler.ir.device import device_spec
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ir.plan_text import library_calls

CUDNN, FLASH, EFFICIENT, MATH = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)


class Attention(nn.Module):
    """Projections around scaled_dot_product_attention, with fewer key heads than query heads if asked to."""

    def __init__(
        self, *, groups: int = 1, mask: Callable[..., Tensor | None] | None = None, **options: Any
    ) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(64, 64, bias=False), nn.Linear(64, 128 // groups, bias=False)
        self.mask, self.options = mask, {**options, "enable_gqa": groups > 1}

    def forward(self, x: Tensor) -> Tensor:
        q, k = (self._heads(projection(x)) for projection in (self.query, self.key))
        k, v = k.chunk(2, dim=1)
        mask = self.mask(x) if self.mask is not None else None
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **self.options)
        return y.transpose(1, 2).reshape(x.shape)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, 16).transpose(1, 2)


def window(x: Tensor) -> Tensor:
    """A mask that depends on the values, on the device of `x`."""
    places = torch.arange(x.shape[1], device=x.device)
    return (places[None] <= places[:, None]) & (x[0, :, 0] > 0)


class Wide(nn.Module):
    """Computes in 32 bits where it is not on a GPU."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x, -1) if x.is_cuda and x.device.type == "cuda" else torch.softmax(x.float(), -1)


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(96, 64), nn.RMSNorm(64)
        self.register_buffer("scale", torch.ones(64))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embedding(ids)) * self.scale.to(ids.device)
        return F.cross_entropy((F.silu(x) @ self.embedding.weight.t()).flatten(0, 1), ids.flatten())


class Cast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return F.dropout(self.down(F.gelu(self.up(x))), 0.1, self.training)


class Constants(nn.Module):
    """Makes tensors of numbers on the device, as an empty cache of keys does."""

    def forward(self, x: Tensor) -> Tensor:
        half, cache = (torch.tensor(n, dtype=x.dtype, device=x.device) for n in (0.5, []))
        if torch.tensor(3).item() == 3:
            return torch.cat([cache.reshape(0, *x.shape[1:]), x * half]) + 1
        return x


X = (4, 32, 64)
CNN = nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3))
LAYER = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.25, batch_first=True)
CASES: dict[str, tuple[nn.Module, Tensor, str]] = {
    "causal": (Attention(is_causal=True).bfloat16(), torch.zeros(X).bfloat16(), "cudnn"),
    "dropout": (
        Attention(dropout_p=0.1).bfloat16(),
        torch.zeros(X).bfloat16(),
        "flash" if DROPOUT_IN_SIXTEENTHS else "cudnn",
    ),
    "grouped queries": (Attention(groups=2).half(), torch.zeros(X).half(), "cudnn"),
    "mask": (Attention(mask=window).eval().bfloat16(), torch.zeros(X).bfloat16(), "cudnn"),
    "mask in 32 bits": (Attention(mask=window), torch.zeros(X), "efficient"),
    "encoder layer": (LAYER.half(), torch.zeros(X).half(), "cudnn"),
    "autocast": (Cast(), torch.zeros(X), ""),
    "device of a tensor": (Wide(), torch.zeros(X).half(), ""),
    "batch norm": (CNN.half(), torch.zeros(2, 8, 16, 16).half(), ""),
    "constants": (Constants(), torch.zeros(X), ""),
    "loss": (Loss(), torch.zeros(4, 32, dtype=torch.int64), ""),
}


def text(plans: tuple[FusionPlan, ...]) -> str:
    timeless = (replace(p, decisions=tuple(d for d in p.decisions if d.rule != "seconds")) for p in plans)
    return "\n".join(json.dumps(p.json()) for p in timeless)


def calls(plans: tuple[FusionPlan, ...]) -> list[str]:
    return list(dict.fromkeys(c.target.split(".")[1] for plan in plans for c in library_calls(plan)))


@pytest.mark.parametrize("name", CASES)
def test_plans_from_cpu_and_meta_and_cuda_tensors_are_the_same(name: str) -> None:
    model, x, attention = CASES[name]
    with torch.set_grad_enabled(model.training):
        plans = fc.explain(model, x).plans
        without_data = copy.deepcopy(model).to("meta")
        assert text(fc.explain(without_data, x.to("meta")).plans) == text(plans)
        with FakeTensorMode():
            on_gpu = torch.empty(x.shape, dtype=x.dtype, device="cuda")
        assert text(fc.explain(without_data, on_gpu).plans) == text(plans)
    devices = {op.outputs[0].device for p in plans for n in p.dag.order if (op := p.dag.op(n)).outputs}
    copied = {"cpu"} if name == "constants" else set()  # numbers, to the GPU
    assert devices == {"cuda:0", *copied}
    expected = (
        [f"_scaled_dot_product_{attention}_attention{end}" for end in ("", "_backward")] if attention else []
    )
    assert [c for c in calls(plans) if "attention" in c] == expected[: 2 if model.training else 1]


def test_what_the_model_asks_of_its_tensors_is_answered_for_the_gpu() -> None:
    (plan,) = fc.explain(Wide(), torch.zeros(X).half()).plans
    assert plan.dag.op(plan.dag.outputs[0]).outputs[0].dtype is torch.float16
    forward, _ = fc.explain(Cast(), torch.zeros(X)).plans
    assert plan.device == "h200" and calls((forward,)) == ["addmm"]
    assert all(
        op.outputs[0].dtype is torch.bfloat16
        for name in forward.dag.order
        if "addmm" in str((op := forward.dag.op(name)).target)
    )


def test_a_model_that_only_works_on_a_cpu_is_planned_there_and_line_one_says_so() -> None:
    report = fc.explain(lambda x: torch.tanh(x) + torch.arange(8), torch.zeros(4, 8))
    first = str(report).splitlines()[0]
    assert "with all tensors on the CPU" in first and "device" in first.partition("as else")[2]
    assert report.json()["assumed"] == report.assumed
    assert {op.outputs[0].device for op in map(report.plans[0].dag.op, report.plans[0].dag.order)} == {"cpu"}


def test_line_one_says_which_library_computes_attention_if_this_pytorch_lacks_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention_choice, "cudnn_version", lambda: None)
    monkeypatch.setattr("fusion_compiler.report.explanation.cudnn_version", lambda: None)
    model, x, _ = CASES["causal"]
    assert "with cuDNN 9.15.1 or later" in str(fc.explain(model, x)).splitlines()[0]
    assert fc.explain(model, x, device="a100").assumed == ""


def test_attention_counts_its_products() -> None:
    q, k, v = (torch.zeros(2, 4, n, 16, requires_grad=True) for n in (32, 48, 48))
    forward, backward = fc.explain(F.scaled_dot_product_attention, q, k, v).plans
    shapes = q.shape, k.shape, v.shape
    for plan, expected in (
        (forward, sdpa_flop_count(*shapes)),
        (backward, sdpa_backward_flop_count(q.shape, *shapes)),
    ):
        ops = map(plan.dag.op, plan.dag.order)
        assert [op.flops for op in ops if "attention" in str(op.target)] == [expected]


def results() -> dict[str, list[torch.dtype]]:
    """The dtypes of operators of each of autocast's lists for mixed arguments, of fake tensors on a GPU."""
    functions: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "lower": lambda x, y: F.linear(x, y),
        "float32": lambda x, y: F.layer_norm(y, (8,)),
        "float32 by dtype": lambda x, y: torch.softmax(y, -1),
        "widest": lambda x, y: torch.addcmul(x, y, y),
        "none": lambda x, y: y * y,
        "composite": lambda x, y: F.cosine_similarity(y, y),
    }
    with FakeTensorMode(), torch.no_grad():
        x, y = (torch.empty(8, 8, dtype=dtype, device="cuda") for dtype in (torch.float32, torch.float16))
        torch.set_autocast_enabled("cuda", True)
        try:
            return {name: [f(x, y).dtype, f(y, y).dtype, f(x, x).dtype] for name, f in functions.items()}
        finally:
            torch.set_autocast_enabled("cuda", False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="C++ itself casts where there is a GPU")
def test_autocast_casts_what_cpp_casts() -> None:
    before = results()
    with capturing_for(device_spec("h200")):
        assert results() == before
    assert before["lower"] == 3 * [torch.float16] and before["float32"] == 3 * [torch.float32]


def call(q: tuple[int, ...] = (2, 4, 32, 64), k: tuple[int, ...] | None = None, **changes: Any) -> Call:
    dtype = changes.pop("dtype", torch.bfloat16)
    query, key = torch.zeros(q, dtype=dtype), torch.zeros(k or q, dtype=dtype)
    return replace(Call(query, key, key), **changes)


MASK = torch.zeros(32, 32, dtype=torch.bool)


@pytest.mark.parametrize(
    ("case", "h200", "a100", "rtx4090"),
    [
        (call(), CUDNN, FLASH, FLASH),
        (call(dropout=0.1), FLASH if DROPOUT_IN_SIXTEENTHS else CUDNN, FLASH, FLASH),
        (call(dropout=0.125), CUDNN, FLASH, FLASH),
        (call(mask=MASK), CUDNN, EFFICIENT, EFFICIENT),
        (call(mask=MASK, dropout=0.1), EFFICIENT if DROPOUT_IN_SIXTEENTHS else CUDNN, EFFICIENT, EFFICIENT),
        (call(mask=MASK.t()[:, ::2].t().t()), *3 * (MATH,)),
        (call(dtype=torch.float32), *3 * (EFFICIENT,)),
        (call(dtype=torch.float64), *3 * (MATH,)),
        (call((2, 4, 32, 256)), *3 * (FLASH,)),
        (call((2, 4, 32, 100)), *3 * (FLASH,)),
        (call((2, 4, 32, 100), mask=MASK), *3 * (MATH,)),
        (call((2, 4, 32, 264)), *3 * (EFFICIENT,)),
        (call((2, 4, 32, 64), (2, 2, 48, 64), grouped=True), CUDNN, FLASH, FLASH),
        (call((2, 4, 32, 64), (2, 2, 48, 64)), *3 * (MATH,)),
        (call((2, 4, 32, 64), (2, 4, 48, 64), causal=True, dropout=0.125), CUDNN, EFFICIENT, EFFICIENT),
        (call((2, 4, 32, 64), (2, 4, 48, 64), causal=True), CUDNN, EFFICIENT, EFFICIENT),
        (call((2, 4, 32, 64), (2, 4, 1, 64)), *3 * (FLASH,)),
        (call((4, 32, 64)), *3 * (MATH,)),
    ],
)
def test_attention_is_the_kernel_that_pytorch_chooses_on_the_gpu(
    case: Call, h200: SDPBackend, a100: SDPBackend, rtx4090: SDPBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_choice, "cudnn_version", lambda: None)
    expected = {"h200": h200, "a100": a100, "rtx4090": rtx4090}
    assert {name: backend_of(case, device_spec(name)) for name in expected} == expected


def test_kernels_that_the_user_turned_off_are_not_chosen() -> None:
    h200 = device_spec("h200")
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION]):
        assert backend_of(call(), h200) is EFFICIENT
    model, x, _ = CASES["causal"]
    with sdpa_kernel([SDPBackend.MATH]):
        assert not any("attention" in name for name in calls(fc.explain(model, x).plans))


def test_nothing_of_pytorch_stays_changed() -> None:
    q = torch.randn(2, 3, 5, 8)
    before = F.scaled_dot_product_attention(q, q, q)
    sdpa = torch.ops.aten.scaled_dot_product_attention.default
    kernels = dict(sdpa.py_kernels), vars(FakeTensorMode)["__torch_dispatch__"]
    fc.explain(F.scaled_dot_product_attention, q, q, q)
    assert torch.equal(F.scaled_dot_product_attention(q, q, q), before)
    assert (dict(sdpa.py_kernels), vars(FakeTensorMode)["__torch_dispatch__"]) == kernels
    assert "_make_wrapper_subclass" not in vars(Tensor)
    assert math.isclose(
        torch.compile(lambda x: torch.nn.functional.silu(x).sum(), backend="aot_eager")(q),
        F.silu(q).sum(),
        rel_tol=1e-5,
    )
