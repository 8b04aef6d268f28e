"""Share memory among CUDA graphs of one compile() call: how much it is, and which graph may use it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from fusion_compiler.ir.plan_text import human_bytes
from fusion_compiler.runtime.binding import unkept_scratch
from fusion_compiler.runtime.boxed import Boxed, boxed

Memory = tuple[int, str]  # a capture's number, and which of its results lie there:
SAVED, LENT = "saved", "lent"  # those for a backward pass, or the caller's
ATTACH = "_cuda_attach_out_of_memory_observer"  # of torch._C, where PyTorch is built with CUDA


class Holder(Protocol):
    """A holder is a CUDA graph whose results may lie in the pool after its replay.

    number: its place in the order of captures. kept: bytes that it keeps between replays. places: addresses
    of what it saves. beside: memory that was allocated while it was captured, so that no replay writes
    there. is_released: True if the memory of what it saves is not allocated any more.
    """

    number: int
    kept: int
    places: frozenset[int]
    beside: frozenset[Memory]
    is_released: bool

    @property
    def is_awaited(self) -> bool: ...

    @property
    def held(self) -> set[Memory]: ...

    @property
    def allocated(self) -> set[Memory]: ...

    def call_in(self) -> None: ...


class Owner(Protocol):
    """An owner has the CUDA graphs of one captured graph."""

    recordings: list[Any]

    def give_back(self) -> None: ...


class Pool:
    """A pool is the device memory of CUDA graphs that are replayed one at a time, on the stream of the first
    capture.

    All captures allocate from one private pool of PyTorch's allocator. What a graph computes on its way is
    free again when its capture ends, and later captures use that memory as well. What it hands out without a
    copy stays allocated: lent results while the graph exists, what it saves until the backward pass that
    reads it is captured. A replay may write anywhere but to memory that was allocated when it was captured:
    `may_replay` allows it only where nobody holds results in other memory of the pool.
    """

    def __init__(self, index: int, limit: float | int, pools: Sequence[Pool] = ()) -> None:
        """Create a pool on the device `index`. limit: `Options.graph_memory`. pools: those that share the
        limit, to which this one is added."""
        self._pools = pools
        self.turn = threading.Lock()  # held while a graph is captured or replayed
        self.index, self._limit = index, limit
        self._memory: tuple[Any, torch.cuda.Stream] | None = None  # PyTorch's pool, and the capturing stream
        self._stream: torch.cuda.Stream | None = None  # on which the graphs are replayed
        self._captures = 0
        self._pending: list[Holder] = []  # replayed graphs whose results somebody may hold
        self._refused = 0  # captures before the last one that could not be made
        self._owners: weakref.WeakSet[Owner] = weakref.WeakSet()

    def is_beside(self) -> bool:
        """True if the current stream is not the one on which the graphs are replayed."""
        return self._stream is not None and torch.cuda.current_stream(self.index) != self._stream

    def may_replay(self, recording: Holder) -> bool:
        """True if a replay overwrites nothing that somebody still holds, be it of its own last replay."""
        held = [(other, memory) for other in self._pending if (memory := other.held)]
        self._pending = [other for other, _ in held]
        return all(memory <= recording.beside for _, memory in held)

    def awaited(self) -> list[frozenset[int]]:
        """Return the addresses of what graphs have saved for backward passes that are still to come."""
        return [other.places for other in self._pending if other.is_awaited]

    def forget(self) -> None:
        """Let go of graphs whose results nobody holds."""
        self._pending = [other for other in self._pending if other.held]

    def may_capture(self) -> bool:
        """True if no memory is held that a capture would use."""
        if not any(other.is_released and other.is_awaited for other in self._pending):
            return True
        self._refused = self._captures
        return False

    def is_in_the_way(self, recording: Holder) -> bool:
        """True if a graph should be captured again, so that others can be captured while somebody holds its
        saved values: their memory is allocated again until its backward is captured as well."""
        return recording.is_released and recording.number <= self._refused

    def call_in(self, recording: Holder) -> bool:
        """Have graphs lend no more whose lent results keep `recording` from being replayed. Return False if
        there are none."""
        lenders = [other for other in self._pending if (other.number, LENT) in other.held - recording.beside]
        for other in lenders:
            other.call_in()
        return bool(lenders)

    def allocated(self) -> frozenset[Memory]:
        """Return the memory of results that no capture of now would use."""
        recordings = (recording for owner in self._owners for recording in owner.recordings)
        return frozenset[Memory]().union(*(r.allocated for r in (*recordings, *self._pending)))

    def replays(self, recording: Holder) -> None:
        """Remember that somebody may hold results of `recording` from now on."""
        if recording not in self._pending:
            self._pending.append(recording)

    # -- how much is kept ----------------------------------------------------------------------------

    def register(self, owner: Owner) -> None:
        """Count what the graphs of `owner` keep, and drop them where memory runs out."""
        self._owners.add(owner)

    @property
    def kept(self) -> int:
        """Return the bytes that the graphs keep between replays."""
        return sum(recording.kept for owner in self._owners for recording in owner.recordings)

    def refusal(self, needed: int) -> str | None:
        """Return why a graph that would keep `needed` bytes more is not recorded, or None if it may be."""
        kept, free = sum(pool.kept for pool in self._pools or (self,)), self.free_bytes()
        most = int(self._limit * free) if isinstance(self._limit, float) else self._limit
        if kept + needed <= most:
            return None
        beside = f" beside {human_bytes(kept)} of others" if kept else ""
        share = f" of the {human_bytes(free)} that are free" if isinstance(self._limit, float) else ""
        return (
            f"it would keep {human_bytes(needed)} between calls{beside}: graph_memory={self._limit}{share} "
            f"allows {human_bytes(most)}"
        )

    def free_bytes(self) -> int:
        """Return the bytes that the device has free, or that PyTorch's allocator holds without using them."""
        free, _ = torch.cuda.mem_get_info(self.index)
        unused = torch.cuda.memory_reserved(self.index) - torch.cuda.memory_allocated(self.index)
        return free + unused

    def renew(self) -> None:
        """Return memory to the device once graphs were dropped. The other graphs are captured anew, since
        what a pool has reserved is free only when all of its graphs are gone."""
        with self.turn:
            for owner in list(self._owners):
                owner.recordings.clear()
            self._leave_memory()
            torch.cuda.empty_cache()

    def give_back(self, device: int | None = None) -> None:
        """Drop all graphs on `device`, or on any, unless one of them is just captured or replayed."""
        if device not in (None, self.index) or not self.turn.acquire(blocking=False):
            return
        try:
            self.drop()
        finally:
            self.turn.release()

    def drop(self) -> None:
        """Drop all graphs. What somebody holds of their results stays valid, and allocated."""
        for owner in list(self._owners):
            owner.give_back()
        self._leave_memory()
        if not self._pending:
            _watched.discard(self)

    def _leave_memory(self) -> None:
        """Have the next capture begin a pool. PyTorch frees one whose graphs are gone; memory that is not
        allocated is the pool's as long as a graph of it is there."""
        self._pending = [other for other in self._pending if other.is_released and other.is_awaited]
        self._memory = None

    # -- capturing -----------------------------------------------------------------------------------

    def next_number(self) -> int:
        self._captures += 1
        return self._captures

    def capture(self, run: Boxed, arguments: list[Any]) -> tuple[Callable[[], None], list[Any], int]:
        """Return a function that launches a call again, the results that it writes, and the bytes by which
        the pool grew. Nothing runs yet. arguments: emptied."""
        from torch._inductor.cudagraph_trees import clear_cublas_manager

        with torch.cuda.device(self.index):
            if self._memory is None:
                self._memory = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
                self._stream = torch.cuda.current_stream()
                _watch(self)
            pool, stream = self._memory
            graph = torch.cuda.CUDAGraph()
            captured = torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local")
            # Memory that is kept from call to call must not come from the pool; libraries keep workspaces.
            with clear_cublas_manager(), unkept_scratch(), captured:
                before = torch.cuda.memory_reserved(self.index)
                results = list(run(arguments))
                arguments.clear()
                grown = torch.cuda.memory_reserved(self.index) - before
        return graph.replay, results, grown


_watched: weakref.WeakSet[Pool] = weakref.WeakSet()
_is_watching = False


def _watch(pool: Pool) -> None:
    """Have `pool` give back its memory when an allocation fails on its device, whoever makes it.

    PyTorch calls the observer before it raises torch.OutOfMemoryError: that allocation has failed, and the
    next one finds the memory.
    """
    global _is_watching
    _watched.add(pool)
    if not _is_watching:
        attach: Any = getattr(torch._C, ATTACH, None)
        if attach is not None:  # without it a graph of ours that fails still gives back what it keeps
            attach(memory_ran_out)
        _is_watching = True


def memory_ran_out(device: int, *_: int) -> None:
    """Drop the idle CUDA graphs of a device on which an allocation has failed."""
    for pool in list(_watched):
        pool.give_back(device)


def retried(run: Boxed) -> Boxed:
    """Return `run`, called once more where memory did not suffice and CUDA graphs have given back theirs.

    run: writes into none of its arguments, which are its caller's own.
    """

    pools: set[object] = vars(_watched)["data"]  # whose length is asked for without running Python code

    def call(arguments: list[Any]) -> Any:
        if not (before := len(pools)):
            return run(arguments)
        again = list(arguments)
        try:
            return run(arguments)
        except torch.OutOfMemoryError:
            if len(pools) == before:
                raise
        return run(again)

    return boxed(call)
