"""Run a function in several processes that form a group of torch.distributed."""

from __future__ import annotations

import multiprocessing
import os
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


def meet(rank: int, world: int, folder: Path) -> None:
    """Form a group whose first process serves the store, as tests kill this process too.

    The system chooses the store's port, and a file tells it to the other processes. A port that is chosen
    before the store is made may be taken by another test in between.
    """
    patience = timedelta(seconds=60)
    address = folder / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=patience)
        unfinished = folder / "port.unfinished"
        unfinished.write_text(str(store.port))
        unfinished.rename(address)
    else:
        until = time.monotonic() + patience.total_seconds()
        while not address.exists() and time.monotonic() < until:
            time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", int(address.read_text()), timeout=patience)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=patience)


def enter(function: Callable[..., Any], rank: int, world: int, folder: Path, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        meet(rank, world, folder)
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
    (folder / "port").unlink(missing_ok=True)
    running = [
        CONTEXT.Process(target=enter, args=(function, rank, world, folder, args), daemon=True)
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
