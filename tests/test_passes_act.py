"""Every pass of the list acts on a small model and says so, and `disable` leaves it out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusion_compiler as fc
from benchmarks.chains.variants import Shape, gpt_oss, soft_capped
from fusion_compiler.pipeline import NAMES

HALF, BFLOAT = torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Case:
    """A model, what it is called with, and options of compile()."""

    model: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    dynamic: bool | None = None
    products: str = "auto"


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (4, 8)).transpose(1, 2).contiguous()


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / 4, -1) @ v


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    return F.scaled_dot_product_attention(q, k, v, mask)


def repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(q.shape) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q * 0.25, k, v)


def copied(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(heads(q), heads(k), heads(v))


def biased(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, table.permute(2, 0, 1).expand(len(q), -1, -1, -1))


def dropped(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w).float()[:, :-1].sin()


def part_written(x: Tensor) -> Tensor:
    y = x.clone()
    y[x > 0] = 0
    return y.cos()


def loss(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w).float(), target)


def loss_and_logits(x: Tensor, w: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    logits = F.linear(x, w)
    return F.cross_entropy(logits.float(), target), logits


class Stream(nn.Module):
    """A speech encoder in small: what a convolution over time leaves is read along its features."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm, self.linear = nn.Conv1d(16, 16, 3), nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        stream = F.gelu(self.convolution(x)).transpose(1, 2)
        return self.linear(self.norm(stream + stream.sin()))


def attention(queries: int = 40, keys: int = 40, size: int = 16) -> tuple[Tensor, ...]:
    return torch.randn(2, 4, queries, size), *torch.randn(2, 2, 4, keys, size)


ON_CPU: dict[str, Callable[[], Case]] = {
    "row ranges": lambda: Case(nn.Linear(2048, 2304), (torch.randn(3, 2048),), dynamic=True),
    "attention sinks": lambda: Case(gpt_oss, (*Shape(2, 3, 37, 8, 8).inputs(), torch.randn(3))),
    "fused attention": lambda: Case(written_out, attention()),
    "general attention": lambda: Case(soft_capped, tuple(Shape(2, 3, 37, 8, 8).inputs())),
    "attention mask": lambda: Case(masked, attention()),
    "scaled scores": lambda: Case(scaled, attention()),
    "attention operands in place": lambda: Case(copied, tuple(torch.randn(3, 2, 9, 32))),
    "decode attention": lambda: Case(F.scaled_dot_product_attention, attention(1, 256, 64)),
    "expert products": lambda: Case(
        lambda x, w, ends: F.grouped_mm(x, w, offs=ends),
        (torch.randn(4, 16).to(BFLOAT), torch.randn(3, 16, 8).to(BFLOAT), torch.tensor([1, 3, 4]).int()),
    ),
    "embedding bags": lambda: Case(
        lambda i, w: F.embedding_bag(i, w, mode="sum"), (torch.randint(6, (40, 4)), torch.randn(6, 5))
    ),
    "affine lookups": lambda: Case(lambda x: x[torch.arange(5, -1, -1)], (torch.randn(7, 6),)),
    "permuted rows": lambda: Case(
        lambda x, keys: x[keys.argsort()].tanh(), (torch.randn(9, 3, requires_grad=True), torch.randn(9))
    ),
    "scaled rows": lambda: Case(
        lambda a, w, s: torch.bmm(F.silu(a), w) * s[..., None],
        (torch.randn(3, 5, 8), torch.randn(3, 8, 16), torch.randn(3, 5)),
    ),
    "dropped rows": lambda: Case(dropped, (torch.randn(2, 40, 32), torch.randn(48, 32))),
    "patches": lambda: Case(nn.Conv2d(3, 8, 4, stride=4), (torch.randn(2, 3, 8, 8),)),
    "sums of products": lambda: Case(
        lambda a, b: (a[:, None] * b[None]).sum(-1), (torch.randn(17, 18), torch.randn(19, 18))
    ),
    "global average pool": lambda: Case(lambda x: F.adaptive_avg_pool2d(x, 1), (torch.randn(2, 3, 5, 5),)),
    "contiguous activations": lambda: Case(Stream(), (torch.randn(2, 16, 40),)),
    "max-pool lowering": lambda: Case(lambda x: F.max_pool2d(x, 2), (torch.randn(2, 3, 6, 6),)),
    "scalar constants": lambda: Case(
        lambda x: torch.where(x > 0, torch.tensor(0.5), x), (torch.randn(4, 5),)
    ),
    "in place": lambda: Case(part_written, (torch.randn(6, 5),)),
    "products": lambda: Case(
        lambda x, w: F.gelu(x @ w),
        (torch.randn(40, 32).to(BFLOAT), torch.randn(32, 48).to(BFLOAT)),
        products="always",
    ),
}


def images() -> Case:
    net = nn.Sequential(nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU())
    return Case(net.half().requires_grad_(False), (torch.empty(32, 64, 56, 56, dtype=HALF),))


def head(model: Callable[..., Any]) -> Case:
    x, w = (torch.empty(n, 256, dtype=HALF, requires_grad=True) for n in (8192, 50304))
    return Case(model, (x, w, torch.empty(8192, dtype=torch.int64)))


def halves(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.empty(shape, dtype=HALF) for shape in shapes)


# These act in 16 bits on a GPU alone, by its kernels or its measured times. The last two act where logits are
# larger than a test should store. None of them is computed: `explain` plans from shapes.
ON_GPU: dict[str, Callable[[], Case]] = {
    "masked attention": lambda: Case(
        F.scaled_dot_product_attention,
        (*halves(*[(2, 4, 256, 32)] * 3), torch.empty(2, 1, 1, 256, dtype=torch.bool)),
    ),
    "grouped queries": lambda: Case(repeated, halves((2, 4, 40, 64), (2, 2, 40, 64), (2, 2, 40, 64))),
    "contiguous attention operands": lambda: Case(biased, halves(*[(2, 4, 64, 64)] * 3, (64, 64, 4))),
    "channels last": images,
    "convolution and ReLU": images,
    "padded features": lambda: Case(nn.Linear(1024, 50257, dtype=HALF), halves((4096, 1024))),
    "chunked loss": lambda: head(loss),
    "chunked gradient": lambda: head(loss_and_logits),
}


def test_every_pass_has_a_model() -> None:
    assert {*ON_CPU, *ON_GPU} == {*NAMES} and not ON_CPU.keys() & ON_GPU.keys()


def acted(plans: Any, name: str) -> bool:
    """Whether a pass did something in one of some graphs."""
    return any(d.is_done for plan in plans for d in plan.about_graph if d.rule == name)


@pytest.mark.parametrize("name", ON_CPU)
def test_a_pass_acts_and_can_be_left_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = ON_CPU[name]()
    trained = any(x.requires_grad for x in case.inputs)
    for disable, expected in (((), True), ((name,), False)):
        torch._dynamo.reset()
        chosen: dict[str, Any] = {"disable": disable, "dynamic": case.dynamic, "products": case.products}
        fast = fc.compile(case.model, backend="eager", **chosen)
        with torch.set_grad_enabled(trained):
            ours, theirs = fast(*case.inputs), case.model(*case.inputs)
            torch.testing.assert_close(ours, theirs)
            if trained:
                grads = (torch.autograd.grad(y, case.inputs[0], torch.ones_like(y)) for y in (ours, theirs))
                torch.testing.assert_close(*grads)
        assert acted(fast.plan, name) == expected, str(fast.plan)


@pytest.mark.parametrize("name", ON_GPU)
def test_a_pass_for_gpus_acts_and_can_be_left_out(name: str) -> None:
    case = ON_GPU[name]()
    assert acted(fc.explain(case.model, *case.inputs).plans, name)
    assert not acted(fc.explain(case.model, *case.inputs, disable=(name,)).plans, name)
