"""A forward and its backward that are recorded as CUDA graphs unasked, and whether that pays."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusion_compiler.ir.graph_info import GraphInfo, Phase
from fusion_compiler.ir.plan_text import human_bytes
from fusion_compiler.ir.views import again
from fusion_compiler.runtime.boxed import Boxed, after_one, boxed, paused, unless
from fusion_compiler.runtime.graph_pool import Pool
from fusion_compiler.runtime.recording import Calls, Recorder, unowned
from fusion_compiler.runtime.retained import is_kept

UNASKED = "recorded, as its launches can take longer than what they launch"
MEASURED = "measured first: whether the device waits for its launches"
BACKWARD_IS_NOT = "its backward is not recorded, and gives back what is saved as it goes"
SLOWER_HOST = 2.0  # times what is predicted for launches, on hosts that are slower or busy (2.2 ms for 1.3)
OPEN_HOST = 4.0  # times that, up to which it is measured whether the device waits for the host
LITTLE = 1 << 26  # bytes that a CUDA graph keeps where only such a host is slower than the device
CYCLES = 2000  # of a device in a microsecond, at most
GAIN = 0.05  # of the time of a step, that CUDA graphs save at least
MOST_FORMS = 64  # CUDA graphs of one graph, as many as there are sets of parameters that it is called with

Note = Callable[[str], None]  # changes what a plan says of its CUDA graph


@dataclass(frozen=True)
class Terms:
    """Predictions for one graph, or for a forward with its backward, by which it is recorded unasked or not.

    host_us: to launch its kernels and library calls one by one. gpu_us: for which these run. peak: bytes
    that it uses at once, arguments aside, which its CUDA graph keeps. copy_us: to copy its results out.
    replay_us: of the host, to replay its CUDA graph.
    """

    host_us: float
    gpu_us: float
    peak: int
    copy_us: float
    replay_us: float

    def __add__(self, other: Terms) -> Terms:
        return Terms(
            self.host_us + other.host_us,
            self.gpu_us + other.gpu_us,
            self.peak + other.peak,
            self.copy_us + other.copy_us,
            self.replay_us + other.replay_us,
        )

    @property
    def recorded_us(self) -> float:
        """Return the time of a replay, with copies of the results."""
        return max(self.gpu_us + self.copy_us, self.replay_us)

    @property
    def refusal(self) -> str | None:
        """Return why it is not recorded by prediction alone, or None where that pays."""
        return self._refusal(SLOWER_HOST if self.peak <= LITTLE else 1.0)

    @property
    def is_open(self) -> bool:
        """True if it would pay on a slower host: whether the device waits for this one has to be measured."""
        return self._refusal(OPEN_HOST) is None

    def _refusal(self, slower: float) -> str | None:
        copies = f" and copies of its results {self.copy_us:.0f} us" if self.copy_us >= 1 else ""
        if self.host_us <= self.replay_us:
            return f"its launches take {self.host_us:.0f} us, a CUDA graph's {self.replay_us:.0f} us"
        if slower * self.host_us <= self.recorded_us:
            return f"its launches take {self.host_us:.0f} us, what they launch {self.gpu_us:.0f} us{copies}"
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return "a process group is there, which may move parameters"
        return None


def report_to(note: Note, text: str = UNASKED) -> Callable[[str | None, int], None]:
    """Return what notes the reason why a graph is not recorded, or `text` and the bytes that are kept."""

    def report(reason: str | None, kept: int) -> None:
        note(reason or f"{text}; keeps {human_bytes(kept)} between calls")

    return report


def mark(index: int) -> Any:
    """Return an event on the current stream of a device."""
    with torch.cuda.device(index):
        event = torch.cuda.Event(enable_timing=True)
        event.record()
    return event


def between_us(marks: tuple[Any, Any]) -> float:
    """Wait for the second of two events, and return the microseconds that lie between them."""
    begin, end = marks
    end.synchronize()
    return 1e3 * begin.elapsed_time(end)


def hold_back(index: int, us: float) -> None:
    """Have the device do nothing for some microseconds, in which the host goes ahead."""
    with torch.cuda.device(index):
        torch.cuda._sleep(int(us * CYCLES))


class Pair:
    """A forward and its backward.

    A forward is replayed where its pool allows it, which is not before the backward of its last replay has
    run, or what that saved was released; any other runs as without a CUDA graph, and so does its backward.

    Where prediction does not say whether the device waits for the host, two steps behind the one that
    compiles tell: the first runs as it comes, in the second the device is held back until the host is ahead.
    What the second takes less of the device is time that it waited for launches.
    """

    def __init__(
        self,
        plain: Boxed,
        pool: Pool,
        terms: Terms,
        info: GraphInfo,
        note: Note,
    ) -> None:
        """plain, terms, info, note: of the forward."""
        self._pool, self._terms, self._note = pool, terms, note
        self._beside = 0  # bytes that the backward keeps besides what the forward does
        self._refusal = terms.refusal  # why the forward is not recorded now
        self._left = 0  # steps to be measured
        self._waiting_us = 0.0  # of the device, for the first of these
        self._marks: dict[Phase, tuple[Any, Any]] = {}  # around the last forward and backward
        self._host_us: dict[Phase, float] = {}  # of the last forward and backward
        calls = Calls(
            static=lambda _: info.static_inputs,
            shown=info.outputs,
            most=MOST_FORMS,
            needed=lambda: terms.peak + self._beside,
            twice=True,
            lends=True,
            report=report_to(note),
        )
        self._recorder = Recorder(plain, pool, calls)
        replayed = unless(paused, plain, self._recorder)

        def forward(arguments: list[Any]) -> Any:
            if self._refusal is None:
                return replayed(arguments)
            return self._timed(Phase.FORWARD, plain, arguments) if self._left else plain(arguments)

        self.forward = boxed(forward)
        self.decision = self._refusal or UNASKED

    def backward(
        self, plain: Boxed, static: Sequence[int], terms: Terms | str | None, note: Note
    ) -> tuple[Boxed, str]:
        """Return the backward in CUDA graphs or as it is, and what was decided.

        static: positions of the arguments that stay where they are. terms: or the reason why it cannot be
        recorded.
        """
        if not isinstance(terms, Terms):
            self._leave_alone()
            return plain, terms or ""
        self._beside = terms.peak
        both = self._terms + terms
        is_open = both.refusal is not None and both.is_open
        reason = None if is_open else both.refusal
        reason = reason or self._pool.refusal(self._terms.peak + self._beside)
        if reason is not None:
            self._leave(reason)
            return plain, reason
        self._refusal = MEASURED if is_open else None
        self._left = 2 if is_open else 0
        self._note(self._refusal or UNASKED)
        report = report_to(note)

        def reported(reason: str | None, kept: int) -> None:
            report(reason, kept)
            if reason is not None:
                self._leave_alone()

        def owning(arguments: list[Any]) -> Any:
            """Run without a CUDA graph, with results that do not lie in the pool."""
            for i in list(self._saved_in(arguments)):
                arguments[i] = again(arguments[i])
            return plain(arguments)

        calls = Calls(
            static=lambda arguments: {*static, *self._saved_in(arguments)},
            most=MOST_FORMS,
            needed=lambda: self._beside,
            lends=True,
            take=lambda arguments: self._take(recorder, arguments),
            anew=self._recorder.recordings.clear,
            plain=owning,
            report=reported,
        )
        recorder = Recorder(plain, self._pool, calls)
        replayed = unless(lambda: paused() or is_kept(), owning, recorder)

        def call(arguments: list[Any]) -> Any:
            if next(self._saved_in(arguments), None) is not None:
                return replayed(arguments)
            if not self._left:
                return plain(arguments)
            results = self._timed(Phase.BACKWARD, plain, arguments)
            self._measure(both, note)
            return results

        return after_one(plain, call), self._refusal or UNASKED

    def _timed(self, phase: Phase, plain: Boxed, arguments: list[Any]) -> Any:
        """Run one of the two between two marks, ahead of the device in the last step that is measured."""
        if paused() or torch.cuda.is_current_stream_capturing():
            return plain(arguments)
        index = self._pool.index
        if self._left == 1 and phase in self._host_us:
            hold_back(index, self._host_us[phase])
        before = mark(index)
        begin = time.perf_counter()
        results = plain(arguments)
        self._host_us[phase] = 1e6 * (time.perf_counter() - begin)
        self._marks[phase] = before, mark(index)
        return results

    def _measure(self, both: Terms, note: Note) -> None:
        """Decide at the end of the second step's backward by how long the device waited in the first."""
        marks, self._marks = self._marks, {}
        if len(marks) < 2:
            return
        us = sum(map(between_us, marks.values()))
        self._left -= 1
        if self._left:
            self._waiting_us = us
            return
        recorded = max(us + both.copy_us, both.replay_us)
        if recorded > (1 - GAIN) * self._waiting_us:
            reason = f"a step takes {self._waiting_us:.0f} us, a CUDA graph would take {recorded:.0f} us"
            self._leave(reason)
            note(reason)
        else:
            self._refusal = None
            self._note(UNASKED)
            note(UNASKED)

    def _leave(self, reason: str) -> None:
        """Record the forward no more."""
        self._refusal = reason
        self._recorder.give_back(reason)
        self._note(reason)

    def _leave_alone(self) -> None:
        """Record no more a forward whose backward is not recorded, unless it keeps little: what it saves
        would outlive a backward that releases one by one what it has read."""
        if self._terms.peak > LITTLE and self._refusal is None:
            self._leave(BACKWARD_IS_NOT)

    def _take(self, recorder: Recorder, arguments: list[Any]) -> list[int]:
        """Take over the memory of what the forward saved, for a capture of the backward. Drop graphs of other
        backwards whose forward is gone."""
        taken, forwards = list(self._saved_in(arguments)), self._recorder.recordings
        places = {arguments[i].data_ptr() for i in taken}
        own: dict[int, Any] = {}
        for recording in forwards:
            if recording.places & places:
                own |= recording.release()
        for i in taken:
            arguments[i] = own[id(arguments[i])] if id(arguments[i]) in own else unowned(arguments[i])
        recorder.recordings[:] = [b for b in recorder.recordings if any(f.places & b.reads for f in forwards)]
        return taken

    def _saved_in(self, arguments: Sequence[Any]) -> Iterator[int]:
        """Yield the positions of what replays of the forward have saved."""
        replayed = [recording.places for recording in self._recorder.recordings if recording.is_awaited]
        tensors = ((i, v.data_ptr()) for i, v in enumerate(arguments) if isinstance(v, torch.Tensor))
        return (i for i, place in tensors if any(place in places for places in replayed))
