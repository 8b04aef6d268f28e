"""Processes of torch.distributed that run a function side by side, for a limited time: their devices and
cores, the texts that they exchange, and the link between them."""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fusion_compiler as fc
from benchmarks.harness.timing import synchronize

Job = Callable[[int, "Texts", Any], Any]
PATIENCE_S = 120.0  # for a message that does not come
CPUS = Path("/sys/devices/system/cpu")
SHORT, LONG = 16, 8 << 20  # bytes of the messages that measure a link
ROUNDS, WARM = 12, 2  # messages of each length, and those of them that do not count


class GroupError(Exception):
    """A process of a group has failed, or was not ready in time."""


class Texts:
    """Texts are what processes tell each other as JSON, through the group's store. Every process makes the
    same calls in the same order."""

    def __init__(self, store: dist.Store, rank: int, world: int) -> None:
        self.store, self.rank, self.world, self.calls = store, rank, world, 0

    def gathered(self, value: Any) -> list[Any]:
        """Return the values of all processes, which all call this."""
        self.calls += 1
        self.store.set(f"{self.calls}/{self.rank}", json.dumps(value))
        return [json.loads(self.store.get(f"{self.calls}/{other}")) for other in range(self.world)]

    def from_first(self, value: Any) -> Any:
        """Return the value of the first process; the others' values do not count."""
        return self.gathered(value)[0]


def device_of(kind: str, rank: int) -> torch.device:
    """Return the device of a process: the CPU, or one of the host's GPUs, which the processes may share."""
    if kind != "cuda":
        return torch.device("cpu")
    return torch.device("cuda", rank % torch.cuda.device_count())


def take_cores(rank: int, world: int, threads: int) -> list[int]:
    """Let this process have so many threads. If the processes need most of the cores, let each run on an
    equal share of them, and return this one's: of a core with two threads it has both."""
    torch.set_num_threads(threads)
    cores = sorted(os.sched_getaffinity(0), key=place_of)
    if not world * threads <= len(cores) < 2 * world * threads:
        return []
    share = len(cores) // world
    cores = cores[rank * share : (rank + 1) * share]
    os.sched_setaffinity(0, cores)
    return cores


def place_of(core: int) -> tuple[int, int, int]:
    """Return the socket of a logical core, and its place there: siblings of one physical core are
    neighbours."""

    def read(name: str) -> int:
        file = CPUS / f"cpu{core}" / "topology" / name
        return int(file.read_text()) if file.exists() else 0

    return read("physical_package_id"), read("core_id"), core


def link_of(texts: Texts, device: torch.device) -> fc.Link:
    """Return the link between the first two processes, measured with a short and a long message."""
    if dist.get_backend() != "nccl":
        device = torch.device("cpu")  # where the messages of Gloo are
    dist.barrier()
    seconds = [one_way(texts.rank, n, device) if texts.rank < 2 else 0.0 for n in (SHORT, LONG)]
    short, long = texts.from_first(seconds)
    return fc.Link(bytes_per_s=(LONG - SHORT) / max(long - short, 1e-9), latency_us=1e6 * short)


def one_way(rank: int, nbytes: int, device: torch.device) -> float:
    """Return half of the seconds of a message from process 0 to process 1 and back. Both call this."""
    message = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    seconds: list[float] = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for sender in (0, 1):
            if rank == sender:
                dist.send(message, 1 - rank)
            else:
                dist.recv(message, 1 - rank)
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[WARM:]) / 2


def run_group(job: Job, world: int, backend: str, seconds: float, task: Any) -> list[Any]:
    """Return what `job(rank, texts, task)` returns in each process, by way of JSON.

    Raises GroupError, with the text of the first error, if a process fails or the seconds are over; all
    processes have ended then.
    """
    context = multiprocessing.get_context("spawn")
    until = time.monotonic() + seconds
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="benchmarks-", ignore_cleanup_errors=True) as name:
        arguments = (job, world, backend, server.port, name, task)
        processes = [context.Process(target=enter, args=(rank, *arguments)) for rank in range(world)]
        for process in processes:
            process.start()
        try:
            while any(process.exitcode is None for process in processes) and time.monotonic() < until:
                if any(process.exitcode for process in processes):
                    until = min(until, time.monotonic() + 5)  # the others end, or wait for the lost one
                time.sleep(0.05)
        finally:
            late = [rank for rank, process in enumerate(processes) if process.exitcode is None]
            for process in processes:
                process.kill()
                process.join()
        return results(Path(name), [process.exitcode for process in processes], late, seconds)


def results(folder: Path, codes: Sequence[int | None], late: Sequence[int], seconds: float) -> list[Any]:
    """Return the results that the processes have written. Raise GroupError if one is missing."""
    errors = sorted(folder.glob("*.error"), key=lambda file: file.stat().st_mtime)
    if errors:
        raise GroupError(f"process {errors[0].stem}: {errors[0].read_text()}")
    if late:
        raise GroupError(f"over {seconds:.0f} s")
    if any(codes):
        raise GroupError(f"exit status {', '.join(map(str, codes))}")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(len(codes))]


def enter(rank: int, job: Job, world: int, backend: str, port: int, name: str, task: Any) -> None:
    """Run the job in this process, write its result or its error into the folder, and end the process."""
    folder = Path(name)
    try:
        patience = timedelta(seconds=PATIENCE_S)
        store = dist.TCPStore("127.0.0.1", port, timeout=patience)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=patience)
        result = job(rank, Texts(dist.PrefixStore("texts", store.clone()), rank, world), task)
        (folder / f"{rank}.json").write_text(json.dumps(result))
        code = 0
    except BaseException as error:
        traceback.print_exc()
        (folder / f"{rank}.error").write_text(f"{type(error).__name__}: {error}")
        code = 1
    sys.stderr.flush()
    os._exit(code)  # Gloo's threads outlive the group; a process that ends beside them may abort
