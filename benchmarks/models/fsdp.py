"""FSDP2 training steps of a Llama, each block sharded: torchrun --nproc-per-node 2 -m benchmarks fsdp

It prints milliseconds of a step (median of nine means of four steps), the host's share, GB at the peak and
the last loss, for eager, torch.compile and ours, each over the whole model and over each block. `--size
small` is bound by the host, `large` by the device. It runs on GPUs with NCCL. On CPUs it uses gloo: take
`--size tiny`, and ignore the times.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import fusion_compiler as fc
from benchmarks.harness.timing import synchronize
from benchmarks.models.workloads import llama_model, tokens

KEYS = ("hidden", "inner", "heads", "kv_heads", "vocabulary", "batch", "length")
ROWS = {
    "tiny": (64, 128, 2, 1, 256, 2, 16),
    "small": (256, 512, 4, 1, 2048, 2, 64),
    "middle": (2048, 8192, 32, 8, 32000, 4, 1024),
    "large": (2048, 8192, 32, 8, 128256, 4, 2048),
}
SIZES = {name: dict(zip(KEYS, row, strict=True)) for name, row in ROWS.items()}
LAYERS = 4
ROUNDS, STEPS = 9, 4
Compile = Callable[[nn.Module], Any]
CONTENDERS: dict[str, Compile] = {"eager": lambda model: model, "compile": torch.compile, "ours": fc.compile}


def sharded(
    compile_: Compile, size: dict[str, int], device: torch.device, blocks: bool
) -> tuple[nn.Module, Any]:
    """Return the sharded model and what is called in its place: compiled as a whole, or block by block."""
    torch.manual_seed(0)
    shape = {k: v for k, v in size.items() if k != "batch"}
    model: Any = llama_model(layers=LAYERS, **shape).to(device, torch.bfloat16).train()
    model.config.use_cache = False
    layers = model.model.layers
    for i, layer in enumerate(layers):
        if blocks:
            layers[i] = compile_(layer)
        fully_shard(layers[i])
    fully_shard(model)
    return model, model if blocks else compile_(model)


def measure(compile_: Compile, size: dict[str, int], device: torch.device, blocks: bool) -> dict[str, float]:
    model, called = sharded(compile_, size, device, blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    torch.manual_seed(1 + dist.get_rank())
    ids = tokens(size["vocabulary"], size["batch"], size["length"]).to(device)
    loss = torch.zeros(())

    def run(steps: int) -> float:
        """Seconds of a step, the device's work included."""
        nonlocal loss
        dist.barrier()
        synchronize(device)
        start = time.perf_counter()
        for _ in range(steps):
            loss = called(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        launched = time.perf_counter() - start
        synchronize(device)
        host.append(launched / steps)
        return (time.perf_counter() - start) / steps

    host: list[float] = []
    run(6)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    host.clear()
    step = statistics.median(run(STEPS) for _ in range(ROUNDS))
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    times = {"ms": step * 1e3, "host ms": statistics.median(host) * 1e3}
    return times | {"peak GB": peak / 1e9, "loss": loss.item()}


def main(options: argparse.Namespace) -> None:
    rank, cuda = int(os.environ["LOCAL_RANK"]), torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    for (name, compile_), blocks in itertools.product(CONTENDERS.items(), (False, True)):
        if (name == "eager" and blocks) or not re.search(options.only, name):
            continue
        torch._dynamo.reset()
        gc.collect()
        row = measure(compile_, SIZES[options.size], device, blocks)
        if rank == 0:
            figures = ", ".join(f"{key} {value:.2f}" for key, value in row.items())
            over = "each block" if blocks else "whole model"
            print(f"{options.size}, {name}, {over}: {figures}", flush=True)
    dist.destroy_process_group()

