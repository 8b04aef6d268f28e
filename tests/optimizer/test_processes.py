"""Fused optimizers where two processes train: the update waits for the sum of their gradients."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer

import fusion_compiler as fc
from fusion_compiler.errors import OptimizerStepError
from tests import ROOT

STEPS = 4


def model_of() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3), nn.Linear(3, 1)
    )  # 3 rows on 2 processes


def train(model: nn.Module, optimizer: Optimizer, rank: int, clip: Callable[[], Tensor]) -> list[Tensor]:
    """Train with clipping in every other step, and return the norms."""
    norms: list[Tensor] = []
    generator = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(5, 6, generator=generator)).square().mean().backward()
        if step % 2:
            norms.append(clip())
        optimizer.step()
    return norms


def same(one: nn.Module, other: nn.Module) -> None:
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        a, b = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in (a, b))  # type: ignore[operator]
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def process(rank: int, way: str, store: str) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    compare(rank, way)
    distributed.barrier()
    # FSDP keeps the group, and Gloo's threads, beyond its end (eager's alone does): an interpreter that is
    # taken down beside them aborts at times.
    os._exit(0)


def compare(rank: int, way: str) -> None:
    ours, eager = model_of(), model_of()
    if way == "ddp":
        ours, eager = DistributedDataParallel(ours), DistributedDataParallel(eager)
    else:
        mesh = distributed.device_mesh.init_device_mesh("cpu", (2,))
        fully_shard(ours, mesh=mesh)
        fully_shard(eager, mesh=mesh)
    one, other = AdamW(ours.parameters(), lr=0.01), AdamW(eager.parameters(), lr=0.01)
    refused = copy.copy(one)
    with pytest.raises(OptimizerStepError, match="summed over processes"):
        fc.fuse_optimizer(ours, refused, when="backward", backend="eager")
    fused = fc.fuse_optimizer(ours, one, backend="interpret", strict=True)
    norms = train(ours, one, rank, lambda: fused.clip_grad_norm_(0.05))
    assert norms == train(eager, other, rank, lambda: clip_grad_norm_(eager.parameters(), 0.05))
    same(ours, eager)
    # Of parts that begin at a multiple of 16 bytes and of others, clipped and not.
    assert 2 <= len(fused.kernels) <= 4
    state = one.state[next(ours.parameters())]["exp_avg"]
    assert isinstance(state, DTensor) == (way == "fsdp")


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_gradients_are_summed_first(way: str, tmp_path: Path) -> None:
    code = f"import sys; from {__name__} import process; process(int(sys.argv[1]), *sys.argv[2:])"
    commands = [[sys.executable, "-c", code, str(rank), way, str(tmp_path / "store")] for rank in range(2)]
    running = [subprocess.Popen(c, cwd=ROOT, stderr=subprocess.PIPE, text=True) for c in commands]
    try:
        failed = [each.communicate(timeout=120)[1] for each in running]
    finally:
        for each in running:
            each.kill()
            each.communicate()
    assert [each.returncode for each in running] == [0, 0], failed
