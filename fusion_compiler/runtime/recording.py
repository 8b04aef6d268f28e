"""Record CUDA graphs that change nothing for callers except the speed: every result is the caller's own.

A `Recorder` has the CUDA graphs of one captured graph. Each of them reads parameters, buffers and what a
forward pass has saved where these lie, and copies the other arguments into memory of its own. Its results are
copied, or lent: a lent result lies in the pool, and no replay that would overwrite it runs while somebody
holds it. Where a replay had to be left out for that reason, results are copied from then on.

What a forward pass saves for its backward pass is returned without a copy as well: its version counts the
replays, so that autograd raises where a backward pass would read what a later forward pass has written. A
backward pass takes what was saved over (`Recording.release`): while it is captured, the memory of each saved
tensor is free again behind the last kernel that reads it, as it is without a CUDA graph.

A capture runs nothing. The call for which a graph is captured replays it as well, so that nothing is computed
or held twice. `graph_pool.Pool` says what graphs that share memory keep, and when one may be replayed.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion_compiler.errors import FusionWarning
from fusion_compiler.runtime.boxed import Boxed
from fusion_compiler.runtime.graph_pool import LENT, SAVED, Memory, Pool

ALIGNED = 16  # bytes, at which copies begin: kernels for other places than theirs need not be loaded
FEW_COPIES = 2  # made one by one: together a program has 64K elements, and logits take four times as long
NO_MEMORY = "memory does not suffice"
MOST_ONCE = 64  # places of calls that came once, that are remembered
ALONE = 2  # uses of a tensor's memory, that of asking among them, which no other tensor has
LARGE = 1 << 16  # bytes of the smallest result that is lent: to copy less takes hardly any time

_Lie = tuple[Any, ...]  # how a tensor lies in its storage, its dtype first


class Recording:
    """A recording is one CUDA graph: the launches of a call, with the arguments that it had.

    number: its place in the order of the pool's captures. kept: bytes that it keeps between replays. saved:
    results for a backward pass, in the pool. places: their addresses. is_released: True once the memory of
    what it saves is not allocated any more.
    """

    def __init__(
        self,
        pool: Pool,
        run: Boxed,
        arguments: list[Any],
        static: Collection[int],
        shown: int | None,
        called_in: Callable[[], None] | None,
        taken: Collection[int],
        beside: frozenset[Memory],
    ) -> None:
        """Capture a call. arguments: emptied, so that what nobody else holds is free when it was last read.
        static: positions of those that are read or written where they lie. shown: how many of the results are
        the caller's; None for all. called_in: called when a replay is left out because somebody holds a lent
        result; None to lend none. taken: positions of what a forward pass saved. beside: memory that no
        replay may write to, unless it is of what is taken and has been read."""
        tensors = [i for i, value in enumerate(arguments) if isinstance(value, Tensor)]
        self._static = [i for i in tensors if i in static]
        self._addresses = [arguments[i].data_ptr() for i in self._static]
        self._numbers = [i for i, value in enumerate(arguments) if not isinstance(value, Tensor)]
        self._values = [arguments[i] for i in self._numbers]
        self._inputs = [(i, _Layout(arguments[i])) for i in tensors if i not in static]
        with torch.inference_mode(False):
            self._into = [torch.empty_like(layout.memory(arguments[i])) for i, layout in self._inputs]
        inputs = self._replaced(arguments)
        arguments.clear()
        arguments_at = {
            inputs[i].untyped_storage().data_ptr(): (i, _lies(inputs[i])) for i in tensors if i not in taken
        }
        self.number = pool.next_number()
        self.beside = beside
        self._replay, self._results, grown = pool.capture(run, inputs)
        self.kept = grown + sum(memory.nbytes for memory in self._into)
        self._outputs = [
            (i, _Layout(value)) for i, value in enumerate(self._results[:shown]) if isinstance(value, Tensor)
        ]
        self.saved = self._saved({place: of for place, of in arguments_at.items() if of[0] in static})
        self.is_released = False
        self.places = frozenset(value.data_ptr() for value in self.saved if value.numel())
        self._called_in = called_in
        results = {i: self._results[i].data for i, _ in self._outputs}  # which keep no tensor that they view
        for i in results:
            self._results[i] = None
        large = [] if called_in is None else self._lendable(results, arguments_at)
        self._lent = [(i, value) for i, value in large if not _is_borrowed(value)]
        lent = {i for i, _ in self._lent}
        self._outputs = [(i, layout) for i, layout in self._outputs if i not in lent]
        # The copies are made right behind the replay, so that later captures may use this memory.
        self._originals = [unowned(layout.memory(results[i])) for i, layout in self._outputs]
        self._holders = self._held()

    @property
    def reads(self) -> frozenset[int]:
        """Return the addresses of the arguments that it reads or writes where they lie."""
        return frozenset(self._addresses)

    def _replaced(self, arguments: Sequence[Any]) -> list[Any]:
        """Return the arguments with the graph's own memory in the place of those that are copied."""
        inputs = list(arguments)
        for (i, layout), memory in zip(self._inputs, self._into, strict=True):
            inputs[i] = layout.tensor(memory)
        return inputs

    def _saved(self, arguments_at: Mapping[int, tuple[int, _Lie]]) -> list[Tensor]:
        """Return the results that are neither the caller's nor in the memory of an argument, and remember how
        the latter lie in it: arguments are not kept. arguments_at: address of memory -> argument, how that
        lies."""
        shown, saved = {i for i, _ in self._outputs}, list[Tensor]()
        self._of: list[tuple[int, int, _Layout, int]] = []
        self._same: list[tuple[int, int]] = []  # results that are arguments
        for i, value in enumerate(self._results):
            if i in shown or not isinstance(value, Tensor):
                continue
            of, lie = arguments_at.get(value.untyped_storage().data_ptr(), (None, None))
            if of is None or lie is None:
                saved.append(value)
            elif _lies(value) == lie:
                self._same.append((i, of))
                self._results[i] = None
            elif value.dtype == lie[0]:
                self._of.append((i, of, _Layout(value), int(value.storage_offset())))
                self._results[i] = None
        return saved

    def _lendable(self, results: Mapping[int, Tensor], memory: Collection[int]) -> list[tuple[int, Tensor]]:
        """Return the large results, with their positions, that share memory with no other and no argument.

        memory: addresses of the arguments' memory.
        """
        saved = (value for value in self._results if isinstance(value, Tensor))
        shared = Counter(value.untyped_storage().data_ptr() for value in (*results.values(), *saved))
        shared.update(list(memory))
        large = ((i, value) for i, value in results.items() if value.nbytes >= LARGE)
        return [(i, value) for i, value in large if shared[value.untyped_storage().data_ptr()] == 1]

    def release(self) -> dict[int, Tensor]:
        """Stop owning the memory of the saved tensors, since the backward pass that reads them is captured.

        Return the tensors that replace them, which own no memory, by the ids of the replaced ones.
        """
        ids = [id(value) for value in self.saved]
        aliases = dict(zip(ids, map(unowned, self.saved), strict=True))
        self._results = [aliases.get(id(value), value) for value in self._results]
        self.saved = [aliases[number] for number in ids]
        self.is_released = True
        self._holders = self._held() - 1  # `aliases`
        return aliases

    def _held(self) -> int:
        """Return how many hold the memory of the first saved result, in Python (an argument of the backward
        pass) or in C++ (autograd); all saved results are released together."""
        if not self.saved:
            return 0
        first: Any = self.saved[0]
        tensors = first._use_count() + torch._C._storage_Use_Count(first.untyped_storage()._cdata)
        return sys.getrefcount(first) + tensors

    @property
    def is_awaited(self) -> bool:
        """True if somebody holds what the last replay saved, for a backward pass to come."""
        return self._held() > self._holders

    @property
    def held(self) -> set[Memory]:
        """Return which of its memory holds results of the last replay that somebody has."""
        saved = {(self.number, SAVED)} if self.is_awaited else set[Memory]()
        is_lent = any(_is_borrowed(value) for _, value in self._lent)
        return saved | ({(self.number, LENT)} if is_lent else set[Memory]())

    @property
    def allocated(self) -> set[Memory]:
        """Return which of its memory no capture of now would use."""
        saved = {(self.number, SAVED)} if self.saved and not self.is_released else set[Memory]()
        return saved | ({(self.number, LENT)} if self._lent else set[Memory]())

    def call_in(self) -> None:
        """Lend no more, from the next capture on."""
        if self._called_in is not None:
            self._called_in()

    def fits(self, arguments: Sequence[Any]) -> bool:
        """True if a call with these arguments would launch the same."""
        lie = [arguments[i].data_ptr() for i in self._static] == self._addresses
        return lie and [arguments[i] for i in self._numbers] == self._values

    def __call__(self, arguments: Sequence[Any]) -> list[Any]:
        """Replay the graph for these arguments, and return its results. Raise torch.OutOfMemoryError before
        anything has run."""
        copies = [torch.empty_like(memory) for memory in self._originals]
        _copy(self._into, [layout.memory(arguments[i]) for i, layout in self._inputs])
        self._replay()
        if self.saved:
            torch.autograd.graph.increment_version(self.saved)
        results = list(self._results)
        for i, lent in self._lent:
            results[i] = lent.data
        _copy(copies, self._originals)
        for (i, layout), copy in zip(self._outputs, copies, strict=True):
            results[i] = layout.tensor(copy)
        for i, of in self._same:
            results[i] = arguments[of]
        for i, of, layout, offset in self._of:
            results[i] = arguments[of].as_strided(layout.shape, layout.stride, offset)
        return results


@dataclass(frozen=True)
class Calls:
    """The settings say how the calls of one captured graph are recorded.

    static: positions of the arguments of a call that are read or written where they lie. shown: how many
    results are the caller's; None for all. most: captures at most. needed: bytes that a CUDA graph of it
    keeps, by prediction. twice: record a call when one with the same static arguments has run before. lends:
    lend the caller's results until one is held too long, instead of copying them. take: called before a
    capture; replaces the arguments that a forward pass saved by tensors that do not own their memory, and
    returns their positions. anew: called when the CUDA graphs are dropped, to be captured anew. plain: runs
    calls that are not replayed, if not as they would be captured. report: called after each capture with None
    and the bytes that are kept, or with the reason why there are none.
    """

    static: Callable[[Sequence[Any]], Collection[int]]
    shown: int | None = None
    most: int = 1
    needed: Callable[[], int] = lambda: 0
    twice: bool = False
    lends: bool = False
    take: Callable[[list[Any]], Collection[int]] = lambda _: ()
    anew: Callable[[], None] = lambda: None
    plain: Boxed | None = None
    report: Callable[[str | None, int], None] = lambda reason, kept: None


class Recorder:
    """A recorder calls `run`, or replays a CUDA graph of it: one for each place of its static arguments."""

    def __init__(self, run: Boxed, pool: Pool, calls: Calls) -> None:
        self._run, self._pool, self._calls = run, pool, calls
        self._plain = calls.plain or run
        self._left = calls.most  # captures
        self.replays = self.captures = 0  # so far
        self._lends = calls.lends
        self._once: dict[tuple[Any, ...], None] = {}  # static arguments of calls that are not recorded yet
        self.recordings: list[Recording] = []
        pool.register(self)

    @property
    def kept(self) -> int:
        """Return the bytes that the CUDA graphs keep between replays."""
        return sum(recording.kept for recording in self.recordings)

    def give_back(self, reason: str = f"{NO_MEMORY} beside what it kept") -> None:
        """Drop the CUDA graphs, and record no more."""
        if self.recordings:
            self.recordings.clear()
            self._stop(reason)

    def __call__(self, arguments: list[Any]) -> Any:
        results = self._replayed(arguments)
        return self._plain(arguments) if results is None else results

    def _replayed(self, arguments: list[Any]) -> list[Any] | None:
        """Return the results of a replay; None for a call that is not recorded, or on another stream."""
        with self._pool.turn:
            if self._pool.is_beside():
                return None
            try:
                recording = self._find(arguments)
                if recording is None:
                    return None
                results = recording(arguments)
            except torch.OutOfMemoryError as error:
                text = f"{NO_MEMORY}: graphs run without CUDA graphs, as with cudagraphs=False"
                warnings.warn(f"{text}: {error}", FusionWarning, stacklevel=3)
                self._stop(NO_MEMORY)
                self._pool.drop()
                return None
            self._pool.replays(recording)
            self.replays += 1
            return results

    def _find(self, arguments: list[Any]) -> Recording | None:
        """Return the CUDA graph to be replayed for a call, captured now if need be; None if there is none."""
        recording = next((recording for recording in self.recordings if recording.fits(arguments)), None)
        if recording is None:
            return self._record(arguments)
        if self._pool.may_replay(recording) and not self._pool.is_in_the_way(recording):
            return recording
        if recording.is_awaited or self._pool.call_in(recording) or not self._pool.may_capture():
            return None
        self.recordings.remove(recording)  # captured behind the later graphs, it can be replayed again
        return self._record(arguments)

    def _record(self, arguments: list[Any]) -> Recording | None:
        if not self._left:
            return None
        if not self._pool.may_capture():
            return None
        static = set(self._calls.static(arguments))
        if self._calls.twice and self._is_first(arguments, static):
            return None
        if (reason := self._pool.refusal(self._calls.needed())) is not None:
            self._stop(reason)
            return None
        self._left -= 1
        self.captures += 1
        inputs = [value if i in static else _aligned(value) for i, value in enumerate(arguments)]
        called_in = self._lend_no_more if self._lends else None
        beside, taken = self._pool.allocated(), self._calls.take(arguments)
        recording = Recording(
            self._pool, self._run, inputs, static, self._calls.shown, called_in, taken, beside
        )
        self.recordings.append(recording)
        self._calls.report(None, self.kept)
        return self.recordings[-1]

    def _lend_no_more(self) -> None:
        """Drop the CUDA graphs whose results were lent: the next calls are recorded anew."""
        self._lends = False
        self.recordings.clear()
        self._calls.anew()

    def _is_first(self, arguments: Sequence[Any], static: Collection[int]) -> bool:
        """True if no call with the same static arguments and numbers has been asked about before."""
        key = tuple(
            value.data_ptr() if isinstance(value, Tensor) else value
            for i, value in enumerate(arguments)
            if i in static or not isinstance(value, Tensor)
        )
        if key in self._once:
            del self._once[key]
            return False
        self._once[key] = None
        if len(self._once) > MOST_ONCE:
            del self._once[next(iter(self._once))]
        return True

    def _stop(self, reason: str) -> None:
        self._left = 0
        self._calls.report(reason, 0)


def _aligned(value: Any) -> Any:
    """Return an argument, or a copy of it that is aligned as a CUDA graph's copy would be."""
    if not isinstance(value, Tensor) or not value.data_ptr() % ALIGNED:
        return value
    layout = _Layout(value)
    return layout.tensor(layout.memory(value).clone())


class _Layout:
    """A layout says how a tensor lies in the memory that it spans."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.stride = tuple(tensor.shape), tensor.stride()
        self._is_dense = torch.empty_like(tensor, device="meta").stride() == self.stride
        last = sum((int(n) - 1) * int(stride) for n, stride in zip(self.shape, self.stride, strict=True))
        self._span = last + 1 if tensor.numel() else 0

    def memory(self, tensor: Tensor) -> Tensor:
        """Return the memory that a tensor of this layout spans, each element once."""
        return tensor if self._is_dense else tensor.as_strided((self._span,), (1,))

    def tensor(self, memory: Tensor) -> Tensor:
        """Return a view of `memory` with this layout."""
        return memory if self._is_dense else memory.as_strided(self.shape, self.stride, 0)


def _lies(tensor: Tensor) -> _Lie:
    """Return how a tensor lies in its storage."""
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())


def _is_borrowed(result: Tensor) -> bool:
    """True if another tensor has the memory of a lent result, or has given it back."""
    storage = result.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) > ALONE or not storage.nbytes()


def _copy(into: list[Tensor], of: list[Tensor]) -> None:
    if len(into) > FEW_COPIES:
        torch._foreach_copy_(into, of)
        return
    for copy, memory in zip(into, of, strict=True):
        copy.copy_(memory)


def unowned(tensor: Tensor) -> Tensor:
    """Return the same memory as a tensor that does not keep it allocated."""
    storage = tensor.untyped_storage()
    alias: Any = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), tensor.device, storage.nbytes()
    )
    with torch.inference_mode(False):
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(alias, tensor.storage_offset(), tensor.shape, tensor.stride())
