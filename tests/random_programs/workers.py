"""Judges many programs in processes of their own, which may crash or never end."""

from __future__ import annotations

import multiprocessing
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from tests.random_programs.generate import draw
from tests.random_programs.judge import judge
from tests.random_programs.shrink import shrunk

A_PROCESS = 150  # programs, after which it is replaced: Dynamo and Triton never forget


@dataclass
class Worker:
    """A process that judges one program after the other."""

    process: BaseProcess
    connection: Connection
    seed: int = -1
    since: float = 0.0
    done: int = 0


def judged(seeds: Sequence[int], jobs: int, seconds: float, shrink: bool) -> Iterator[dict[str, Any]]:
    """Verdicts as they come. A process that ends or is silent for too long is replaced."""
    todo = list(reversed(seeds))
    workers = [_started(seconds, shrink) for _ in range(min(jobs, len(todo)))]
    limit = 4 * seconds + 120 if not shrink else 60 * seconds
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
                    verdict = _failure(worker.seed, "crash", f"the process ended with {code}")
            elif time.time() - worker.since > limit:
                worker.process.kill()
                verdict = _failure(worker.seed, "no end", f"no answer after {limit:.0f} seconds")
            if verdict is None:
                continue
            yield verdict
            workers.remove(worker)
            worker.done += 1
            if worker.done >= A_PROCESS or verdict["kind"] in ("crash", "no end"):
                worker.process.kill()
                worker.process.join()
                worker = _started(seconds, shrink) if todo else worker
            if todo:
                _give(worker, todo)
                workers.append(worker)
            else:
                worker.process.kill()
                worker.process.join()


def _give(worker: Worker, todo: list[int]) -> None:
    worker.seed, worker.since = todo.pop(), time.time()
    worker.connection.send(worker.seed)


def _failure(seed: int, kind: str, what: str) -> dict[str, Any]:
    return {"seed": seed, "kind": kind, "what": what, "detail": "", "failed": True, "text": draw(seed).text()}


def _started(seconds: float, shrink: bool) -> Worker:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_work, args=(theirs, seconds, shrink), daemon=True)
    process.start()
    theirs.close()
    return Worker(process, ours)


def _work(connection: Connection, seconds: float, shrink: bool) -> None:
    """Judges the seeds that come until nobody sends any."""

    from tests.random_programs.generate import draw

    warnings.simplefilter("ignore")
    while True:
        try:
            seed = connection.recv()
        except EOFError:
            return
        start = time.time()
        program = draw(seed)
        verdict = judge(program, seconds=seconds)
        if verdict.failed and shrink:
            program = shrunk(program, verdict, lambda p: judge(p, seconds=seconds))
            verdict = judge(program, seconds=seconds)
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
