"""Run a function in several processes that form a group of torch.distributed."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "fusion_compiler.api", "torch.distributed.pipelining"])


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def enter(
    function: Callable[..., Any], rank: int, world: int, port: int, folder: Path, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
        )
        torch.save(function(rank, *args), folder / f"{rank}.pt")
        code = 0
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc())
        code = 1
    sys.stdout.flush()
    os._exit(
        code
    )  # Gloo's threads outlive the group; an interpreter that is taken down beside them may abort


def run(
    function: Callable[..., Any], world: int, folder: Path, *args: Any, timeout: float = 90, victim: int = -1
) -> list[Any]:
    """Return what `function(rank, *args)` returned in each process: an error's text if it raised, None if the
    process was killed or did not end in time. Nobody waits for the victim."""
    folder.mkdir(exist_ok=True)
    port = free_port()
    running = [
        CONTEXT.Process(target=enter, args=(function, rank, world, port, folder, args), daemon=True)
        for rank in range(world)
    ]
    for each in running:
        each.start()
    until = time.monotonic() + timeout
    for rank, each in enumerate(running):
        if rank != victim:
            each.join(max(0.0, until - time.monotonic()))
    for each in running:
        each.kill()
    return [result(folder, rank) for rank in range(world)]


def result(folder: Path, rank: int) -> Any:
    if (folder / f"{rank}.pt").exists():
        return torch.load(folder / f"{rank}.pt", weights_only=False)
    error = folder / f"{rank}.error"
    return error.read_text() if error.exists() else None
