"""Judges many programs in processes of their own, which may crash or never end."""

from __future__ import annotations

import multiprocessing
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from tests.random_programs.generate import draw
from tests.random_programs.judge import any_schedules, compiling_for, judge
from tests.random_programs.shrink import shrunk

A_PROCESS = 150  # programs, after which it is replaced: Dynamo and Triton never forget


@dataclass(frozen=True)
class Task:
    """The work for each seed. lines: most lines of a program; seconds: most time that it may take; schedules:
    nests run under any schedules, and not under the best; target: the architecture for which kernels must
    compile."""

    lines: int
    seconds: float
    shrink: bool
    schedules: bool = False
    target: str | None = None


@dataclass
class Worker:
    """A process that judges one program after the other."""

    process: BaseProcess
    connection: Connection
    seed: int = -1
    since: float = 0.0
    done: int = 0


def judged(seeds: Sequence[int], jobs: int, task: Task) -> Iterator[dict[str, Any]]:
    """Verdicts as they come. A process that ends or is silent for too long is replaced."""
    todo = list(reversed(seeds))
    workers = [_started(task) for _ in range(min(jobs, len(todo)))]
    limit = task.seconds * (60 if task.shrink else 4) + 120
    for worker in workers:
        _give(worker, todo)
    while workers:
        ready = wait([w.connection for w in workers], timeout=5)
        for worker in list(workers):
            verdict: dict[str, Any] | None = None
            if worker.connection in ready:
                try:
                    verdict = worker.connection.recv()
                except (EOFError, ConnectionError):
                    worker.process.join()
                    code = worker.process.exitcode
                    verdict = _failure(worker.seed, task.lines, "crash", f"the process ended with {code}")
            elif time.time() - worker.since > limit:
                worker.process.kill()
                verdict = _failure(worker.seed, task.lines, "no end", f"no answer after {limit:.0f} seconds")
            if verdict is None:
                continue
            yield verdict
            workers.remove(worker)
            worker.done += 1
            if worker.done >= A_PROCESS or verdict["kind"] in ("crash", "no end"):
                worker.process.kill()
                worker.process.join()
                worker = _started(task) if todo else worker
            if todo:
                _give(worker, todo)
                workers.append(worker)
            else:
                worker.process.kill()
                worker.process.join()


def _give(worker: Worker, todo: list[int]) -> None:
    worker.seed, worker.since = todo.pop(), time.time()
    worker.connection.send(worker.seed)


def _failure(seed: int, lines: int, kind: str, what: str) -> dict[str, Any]:
    text = draw(seed, lines).text()
    return {"seed": seed, "kind": kind, "what": what, "detail": "", "failed": True, "text": text}


def _started(task: Task) -> Worker:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_work, args=(theirs, task), daemon=True)
    process.start()
    theirs.close()
    return Worker(process, ours)


def _work(connection: Connection, task: Task) -> None:
    """Judges the seeds that come until nobody sends any."""
    warnings.simplefilter("ignore")
    while True:
        try:
            seed = connection.recv()
        except EOFError:
            return
        start = time.time()
        program = draw(seed, task.lines)
        with ExitStack() as stack:
            if task.schedules:
                stack.enter_context(any_schedules(seed))
            if task.target is not None:
                stack.enter_context(compiling_for(task.target))
            verdict = judge(program, seconds=task.seconds)
            if verdict.failed and task.shrink:
                program = shrunk(program, verdict, lambda p: judge(p, seconds=task.seconds))
                verdict = judge(program, seconds=task.seconds)
        connection.send(
            {
                "seed": seed,
                "kind": verdict.kind,
                "what": verdict.what,
                "failed": verdict.failed,
                "detail": verdict.detail[-2000:],
                "seconds": round(time.time() - start, 2),
                "text": program.text() if verdict.failed else "",
            }
        )
