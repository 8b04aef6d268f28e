"""Dependent launch on the device: kernels that overlap give what kernels one after the other give, always."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusion_compiler as fc
from benchmarks.accuracy import not_worse
from fusion_compiler.passes.fuse.dependent import NOTE

CUDA = torch.device("cuda")
WIDTH, PLACES, LAYERS, REPLAYS = 1024, 16, 6, 10_000

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs sm_90"
)


class Layer(nn.Module):
    """What decoding is made of: a norm, products of one row, a residual, a cache that is written and read."""

    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.register_buffer("cache", torch.zeros(PLACES, WIDTH))

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        self.cache.index_copy_(0, at, x)
        return x + self.down(F.silu(self.up(self.norm(x)))) + self.cache.mean(0)


class Decoder(nn.Module):
    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, at)
        return x


def a_round(called: object, inputs: Tensor) -> list[Tensor]:
    places = torch.arange(PLACES, device=CUDA)
    return [called(inputs[i : i + 1], places[i : i + 1]).clone() for i in range(PLACES)]  # type: ignore[operator]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_ten_thousand_replays(dtype: torch.dtype) -> None:
    """Each replay gives the bits of kernels one after the other, also right behind a write of the weights."""
    model = Decoder().to(CUDA, dtype)
    plain = fc.compile(
        copy.deepcopy(model), dependent_launch=False, tune=False, dynamic=False, strict=True, cudagraphs=True
    )
    fast = fc.compile(model, dependent_launch=True, tune=False, dynamic=False, strict=True, cudagraphs=True)
    exact, other = copy.deepcopy(model).double(), copy.deepcopy(model)
    inputs, places = torch.randn(PLACES, WIDTH, device=CUDA, dtype=dtype), torch.arange(PLACES, device=CUDA)
    wrong = torch.zeros((), dtype=torch.int64, device=CUDA)
    with torch.no_grad():
        for _ in range(LAYERS + 1):  # each layer's cache stays as it is once the one before it does
            expected, found, theirs = (a_round(f, inputs) for f in (plain, fast, other))
            truth = a_round(exact, inputs.double())
        assert fast.plan[0].notes[NOTE].startswith("done"), fast.plan[0].notes[NOTE]
        assert plain.plan[0].notes[NOTE].startswith("refused")
        assert all(torch.equal(x, y) for x, y in zip(expected, found, strict=True))
        for ours, eager, true in zip(found, theirs, truth, strict=True):
            assert not (problem := not_worse(ours, eager, true)), problem
        weight = model.layers[0].up.weight  # type: ignore[union-attr]
        kept, none = weight.clone(), torch.zeros_like(weight)
        for i in range(REPLAYS):
            if i % 7 == 0:  # an optimizer's write: the next replay's first kernel comes right behind it
                weight.copy_(none)
                weight.copy_(kept)
            at = i % PLACES
            wrong += (fast(inputs[at : at + 1], places[at : at + 1]) != expected[at]).any()
    assert int(wrong) == 0, f"{int(wrong)} of {REPLAYS} replays differ"
