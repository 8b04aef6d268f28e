"""Faults of a pipeline over processes: agreement before the start, heartbeats, and checkpoints.

Processes exchange short texts through a store of torch.distributed (JSON and numbers, never pickled objects).
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fusion_compiler.errors import StageLostError, StageMissingError, StagesDisagreeError, first_line
from fusion_compiler.machines.links import LinkFailure

BEAT_S = 0.25
CLOSED = b"closed"
Card = dict[str, Any]  # what a process says about itself, of JSON's types


def private_stores(rank: int) -> tuple[dist.Store, dist.Store]:
    """Return two stores for one pipeline, over the store of the default group: one for each thread that uses
    it.

    A store's connection serves one call at a time, and a call may wait.
    """
    store: Any = dist.distributed_c10d._get_default_store()
    number = store.add(f"fusion_compiler/pipelines/{rank}", 1)  # all processes make them in the same order
    prefix = f"fusion_compiler/pipeline/{number}"
    return dist.PrefixStore(prefix, store.clone()), dist.PrefixStore(prefix, store.clone())


def agree(store: dist.Store, rank: int, world: int, card: Card, timeout_s: float) -> None:
    """Exchange the processes' cards.

    Raises StageMissingError if a process does not come, and StagesDisagreeError, in every process, if two
    cards differ.
    """
    store.set(f"card/{rank}", json.dumps(card))
    cards: list[Card] = []
    for other in range(world):
        try:
            store.wait([f"card/{other}"], timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise StageMissingError(rank=other, seconds=timeout_s) from error
        cards.append(json.loads(store.get(f"card/{other}")))
    store.set(f"read/{rank}", "")
    if rank == 0:  # it may hold the store, so it ends last
        store.wait([f"read/{other}" for other in range(world)], timedelta(seconds=timeout_s))
    for other, theirs in enumerate(cards):
        for field in sorted({*cards[0], *theirs}):
            one, two = cards[0].get(field), theirs.get(field)
            if one != two:
                raise StagesDisagreeError(what=field, first=0, one=one, second=other, two=two)


class Watch:
    """Watch over the processes of a pipeline by heartbeats in a store, from a thread of its own.

    names: what to call each rank, such as "stage 2 on machine c".
    patience_s: a process whose heart has not beaten for so long is lost.
    lose: called once, from the thread, when a process is lost.
    """

    def __init__(
        self, store: dist.Store, rank: int, names: Sequence[str], patience_s: float, lose: Callable[[], None]
    ) -> None:
        self.store, self.rank, self.names, self.patience_s = store, rank, names, patience_s
        self.lose = lose
        self.verdict: tuple[int, str] | None = None
        self.seen = {other: (b"", time.monotonic()) for other in range(len(names)) if other != rank}
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.store.set(f"beat/{rank}", "0")
        if rank == 0:
            self.store.set("lost", "")

    def start(self) -> None:
        """Begin to watch, when every process has said that it is there."""
        self.thread.start()

    def close(self) -> None:
        """End the watch. The first process, which may hold the store, waits until the others have done so."""
        if self.closed.is_set() or self.verdict is not None:
            return
        self.closed.set()
        if self.thread.ident is not None:  # one in the store's code would abort a process that ends
            self.thread.join(self.patience_s)
        self.store.set(f"beat/{self.rank}", CLOSED.decode())
        until = time.monotonic() + self.patience_s
        beats = [f"beat/{other}" for other in self.seen]
        while self.rank == 0 and any(b != CLOSED for b in self.store.multi_get(beats)):
            if time.monotonic() > until:
                return
            time.sleep(BEAT_S / 4)

    def check(self) -> None:
        """Raise StageLostError if a process is lost."""
        if self.verdict is not None:
            rank, reason = self.verdict
            raise StageLostError(stage=self.names[rank], reason=reason)

    @contextmanager
    def guard(self) -> Generator[None]:
        """Turn a failed message into an error that names the lost process; tell the others of any error."""
        try:
            yield
        except StageLostError:
            self._linger()
            raise
        except (LinkFailure, dist.DistError) as error:
            until = time.monotonic() + self.patience_s + 4 * BEAT_S
            while self.verdict is None and time.monotonic() < until:
                time.sleep(BEAT_S / 2)
            if self.verdict is None:
                self._tell(self.rank, f"its message failed: {first_line(error)}")
            self._linger()
            self.check()
            raise
        except BaseException as error:
            self._tell(self.rank, f"it raised {type(error).__name__}: {first_line(error)}")
            self._linger()
            raise

    def _linger(self) -> None:
        """Let the others read the verdict before the process that may hold the store ends."""
        if self.rank == 0:
            time.sleep(4 * BEAT_S)

    def _tell(self, rank: int, reason: str) -> None:
        with suppress(RuntimeError):  # the store may be lost as well, which the others see by themselves
            self.store.set("lost", json.dumps([rank, reason]))

    def _run(self) -> None:
        beats = 0
        while self.verdict is None and not self.closed.wait(BEAT_S):
            beats += 1
            try:
                self.store.set(f"beat/{self.rank}", str(beats))
                self._look()
            except RuntimeError as error:  # errors of torch.distributed are among them
                self.verdict = 0, f"the store that it holds cannot be reached: {first_line(error)}"
        if self.verdict is not None:
            self._tell(*self.verdict)
            self.lose()

    def _look(self) -> None:
        now = time.monotonic()
        others = list(self.seen)
        lost, *beats = self.store.multi_get(["lost", *(f"beat/{other}" for other in others)])
        if lost:
            rank, reason = json.loads(lost)
            self.verdict = rank, reason
            return
        for other, beat in zip(others, beats, strict=True):
            last, since = self.seen[other]
            if beat != last:
                self.seen[other] = beat, now
            elif now - since > self.patience_s and beat != CLOSED:
                self.verdict = other, f"its heart has not beaten for {now - since:.1f} s"


def save(folder: Path, step: int, rank: int, state: dict[str, Any]) -> None:
    """Write a process's part of the checkpoint of a step. A file is complete if it is there."""
    folder = folder / f"step-{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"process-{rank}.pt"
    unfinished = part.with_suffix(".tmp")
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(part)


def saved_steps(folder: Path, rank: int) -> list[int]:
    """Return the steps whose part of this process is complete."""
    return sorted(
        int(file.parent.name.removeprefix("step-")) for file in folder.glob(f"step-*/process-{rank}.pt")
    )


def last_shared(store: dist.Store, rank: int, world: int, steps: list[int]) -> int:
    """Return the last of the steps that every process has saved, or 0; each process calls it with its own."""
    turn = store.add(f"resumes/{rank}", 1)
    store.set(f"saved/{turn}/{rank}", json.dumps(steps))
    shared = set(steps)
    for other in range(world):
        shared &= {*json.loads(store.get(f"saved/{turn}/{other}"))}
    return max(shared, default=0)


def load(folder: Path, step: int, rank: int) -> dict[str, Any]:
    """Read a process's part of a checkpoint: tensors, numbers and texts alone, no pickled code."""
    file = folder / f"step-{step:08d}" / f"process-{rank}.pt"
    return torch.load(file, map_location="cpu", weights_only=True)
