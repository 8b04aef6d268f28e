"""CUDA graphs of which callers notice nothing but their speed: every result is the caller's own.

A `Recorder` keeps one graph's recordings. Of each it knows where those arguments lie that are read in place
(parameters, buffers, what a forward saved), has memory into which the others are copied, and hands out copies
of the results. What a forward saves for its backward is handed out as it is: its version counts the replays,
so that autograd raises where a backward would read what a later forward has written.

What is recorded does not run until it is replayed, which the call does for which it is made: nothing is
computed or held twice. Recordings of one `Pool` share memory: they are replayed one after another, on one
stream.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from fusion_compiler.errors import FusionWarning
from fusion_compiler.runtime.binding import unkept_scratch

ALIGNED = 16  # bytes, at which copies begin: kernels for other places than theirs need not be loaded
FEW_COPIES = 2  # made one by one: together a program has 64K elements, and logits take four times as long

Boxed = Callable[[list[Any]], Any]


class Pool:
    """Memory of the recordings that are replayed in turn, on the stream of the first."""

    def __init__(self, index: int) -> None:
        """index: of the device."""
        self.turn = threading.RLock()
        self._index = index
        self._memory: tuple[Any, Any] | None = None  # and the stream that captures into it
        self._stream: torch.cuda.Stream | None = None  # of the calls, once there is a recording

    def is_beside(self) -> bool:
        """Whether the current stream is another than that of the recordings."""
        return self._stream is not None and torch.cuda.current_stream(self._index) != self._stream

    def capture(self, run: Boxed, arguments: Sequence[Any]) -> tuple[Callable[[], None], list[Any]]:
        """What launches a call anew, and the results that this leaves; nothing runs yet."""
        from torch._inductor.cudagraph_trees import clear_cublas_manager

        with torch.cuda.device(self._index):
            if self._memory is None:
                self._memory = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
                self._stream = torch.cuda.current_stream()
            pool, stream = self._memory
            graph = torch.cuda.CUDAGraph()
            captured = torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local")
            # Memory that is kept from call to call must not come from the pool; libraries keep workspaces.
            with clear_cublas_manager(), unkept_scratch(), captured:
                results = list(run(list(arguments)))
        return graph.replay, results


class Recording:
    """The launches of a call, with the arguments that it had.

    saved: what each replay leaves in the pool and hands out without a copy. places: where that lies.
    """

    def __init__(
        self, pool: Pool, run: Boxed, arguments: Sequence[Any], static: Collection[int], shown: int | None
    ) -> None:
        """static: positions of arguments that are read or written where they lie. shown: how many of the
        results are copied; all without a number."""
        tensors = [i for i, value in enumerate(arguments) if isinstance(value, Tensor)]
        self._static = [i for i in tensors if i in static]
        self._addresses = [arguments[i].data_ptr() for i in self._static]
        self._numbers = [i for i, value in enumerate(arguments) if not isinstance(value, Tensor)]
        self._values = [arguments[i] for i in self._numbers]
        self._inputs = [(i, _Layout(arguments[i])) for i in tensors if i not in static]
        with torch.inference_mode(False):
            self._into = [torch.empty_like(layout.memory(arguments[i])) for i, layout in self._inputs]
        given = list(arguments)
        for (i, layout), memory in zip(self._inputs, self._into, strict=True):
            given[i] = layout.tensor(memory)
        self._replay, self._results = pool.capture(run, given)
        self._outputs = [
            (i, _Layout(value)) for i, value in enumerate(self._results[:shown]) if isinstance(value, Tensor)
        ]
        self._own = [layout.memory(self._results[i]) for i, layout in self._outputs]
        self.saved = self._saved(given)
        self.places = frozenset(value.data_ptr() for value in self.saved)
        self._holders = self._held()

    def _saved(self, given: Sequence[Any]) -> list[Tensor]:
        """The results that are not copied and in no argument's memory; of others, how they lie in it, as
        arguments are not kept."""
        places = {given[i].untyped_storage().data_ptr(): i for i in self._static}
        shown, saved = {i for i, _ in self._outputs}, list[Tensor]()
        self._of: list[tuple[int, int, _Layout, int]] = []
        self._same: list[tuple[int, int]] = []  # results that are arguments
        for i, value in enumerate(self._results):
            if i in shown or not isinstance(value, Tensor):
                continue
            if (of := places.get(value.untyped_storage().data_ptr())) is None:
                saved.append(value)
            elif _lies(value) == _lies(given[of]):
                self._same.append((i, of))
                self._results[i] = None
            elif value.dtype == given[of].dtype:
                self._of.append((i, of, _Layout(value), int(value.storage_offset())))
                self._results[i] = None
        return saved

    def _held(self) -> int:
        """How many hold what a replay saves, or an alias of it, by the first: all is let go at once."""
        if not self.saved:
            return 0
        kept: Any = self.saved[0]
        return kept._use_count() + torch._C._storage_Use_Count(kept.untyped_storage()._cdata)

    @property
    def is_awaited(self) -> bool:
        """Whether somebody still holds what the last replay saved."""
        return self._held() > self._holders

    def fits(self, arguments: Sequence[Any]) -> bool:
        """Whether a call with such arguments launches the same."""
        lie = [arguments[i].data_ptr() for i in self._static] == self._addresses
        return lie and [arguments[i] for i in self._numbers] == self._values

    def __call__(self, arguments: Sequence[Any]) -> list[Any]:
        _copy(self._into, [layout.memory(arguments[i]) for i, layout in self._inputs])
        self._replay()
        if self.saved:
            torch.autograd.graph.increment_version(self.saved)
        results = list(self._results)
        copies = [torch.empty_like(memory) for memory in self._own]
        _copy(copies, self._own)
        for (i, layout), copy in zip(self._outputs, copies, strict=True):
            results[i] = layout.tensor(copy)
        for i, of in self._same:
            results[i] = arguments[of]
        for i, of, layout, offset in self._of:
            results[i] = arguments[of].as_strided(layout.shape, layout.stride, offset)
        return results


class Recorder:
    """`run`, recorded once for each place of its arguments, for the first `most` of them.

    static: positions of those that a call reads or writes where they lie, of its arguments.
    """

    def __init__(
        self,
        run: Boxed,
        pool: Pool,
        static: Callable[[Sequence[Any]], Collection[int]],
        shown: int | None,
        most: int,
    ) -> None:
        self._run, self._pool, self._static, self._shown, self._most = run, pool, static, shown, most
        self._made: list[Recording] = []

    def find(self, arguments: Sequence[Any]) -> Recording | None:
        """The recording to be replayed for a call."""
        return next((made for made in self._made if made.fits(arguments)), None)

    def record(self, arguments: list[Any]) -> Recording | None:
        """A recording for a call of which `find` gave nothing; None where there is to be none."""
        if len(self._made) >= self._most:
            return None
        static = set(self._static(arguments))
        given = [value if i in static else _aligned(value) for i, value in enumerate(arguments)]
        try:
            self._made.append(Recording(self._pool, self._run, given, static, self._shown))
        except torch.OutOfMemoryError as error:
            self._most = 0
            text = "memory does not suffice: the graph runs without a recording, as with cudagraphs=False"
            warnings.warn(f"{text}: {error}", FusionWarning, stacklevel=2)
            return None
        return self._made[-1]

    def __call__(self, arguments: list[Any]) -> Any:
        """Replayed, behind being recorded where it is new; as it is on another stream than before."""
        with self._pool.turn:
            beside = self._pool.is_beside()
            found = None if beside else self.find(arguments) or self.record(arguments)
            return self._run(arguments) if found is None else found(arguments)


def _aligned(value: Any) -> Any:
    """An argument where a recording's copy of it could lie."""
    if not isinstance(value, Tensor) or not value.data_ptr() % ALIGNED:
        return value
    layout = _Layout(value)
    return layout.tensor(layout.memory(value).clone())


class _Layout:
    """How a tensor lies in the memory that it spans."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.stride = tuple(tensor.shape), tensor.stride()
        self._is_dense = torch.empty_like(tensor, device="meta").stride() == self.stride
        last = sum((int(n) - 1) * int(stride) for n, stride in zip(self.shape, self.stride, strict=True))
        self._span = last + 1 if tensor.numel() else 0

    def memory(self, tensor: Tensor) -> Tensor:
        """All that a tensor of this layout spans, each element once."""
        return tensor if self._is_dense else tensor.as_strided((self._span,), (1,))

    def tensor(self, memory: Tensor) -> Tensor:
        """The tensor of memory of its own."""
        return memory if self._is_dense else memory.as_strided(self.shape, self.stride, 0)


def _lies(tensor: Tensor) -> tuple[Any, ...]:
    """What a tensor is of its memory."""
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())


def _copy(into: list[Tensor], of: list[Tensor]) -> None:
    if len(into) > FEW_COPIES:
        torch._foreach_copy_(into, of)
        return
    for copy, memory in zip(into, of, strict=True):
        copy.copy_(memory)
