"""Decide whether it pays to record a forward and its backward as CUDA graphs unasked, and record them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import torch

from fusion_compiler.ir.decision import Decision, Outcome
from fusion_compiler.ir.graph_info import GraphInfo
from fusion_compiler.ir.plan_text import human_bytes
from fusion_compiler.ir.views import again
from fusion_compiler.runtime.boxed import Boxed, after_one, boxed, is_beside_group, paused, unless
from fusion_compiler.runtime.graph_pool import Pool
from fusion_compiler.runtime.recording import Calls, Recorder, unowned
from fusion_compiler.runtime.retained import is_kept

UNASKED = "recorded, as its launches can take longer than what they launch"
TRIED = "tried: steps with and without CUDA graphs are timed"
BACKWARD_IS_NOT = "its backward is not recorded, and gives back what is saved as it goes"
SLOWER_HOST = 2.0  # launches take as many times the prediction on slow or busy hosts (2.2 ms for 1.3)
SLOWEST_HOST = 4.0  # the same, for a host on which CUDA graphs may still pay, so that they are tried
LITTLE = 1 << 26  # bytes that a CUDA graph keeps where only such a host is slower than the device
TIMED = 3  # steps of each kind; the fastest one counts
GAIN = 0.02  # of the time of a step, that CUDA graphs save at least
GROUP = "a process group is there: it may move parameters, and a capture would wait for its messages"
MOST_LANES = 8  # CUDA graphs of one forward that wait for their backward at the same time
MOST_FORMS = 64  # CUDA graphs of one graph, as many as there are sets of parameters that it is called with

RULE = "CUDA graph"
Note = Callable[[Decision], None]  # changes what a plan says of its CUDA graph


def replayed(reason: str = UNASKED, outcome: Outcome = Outcome.DONE) -> Decision:
    """Return the decision that a graph is recorded."""
    return Decision(RULE, "", outcome, reason)


def not_replayed(reason: str) -> Decision:
    """Return the decision that a graph is not recorded, or that this is still being tried."""
    return Decision(RULE, "", Outcome.NOTED if reason == TRIED else Outcome.REFUSED, reason)


@dataclass(frozen=True)
class Terms:
    """Terms are predictions for one graph, or for a forward with its backward, that decide if it is recorded
    unasked.

    host_us: to launch its kernels and library calls one by one. gpu_us: for which these run. peak: bytes
    that it uses at once, arguments aside, which its CUDA graph keeps. copy_us: to copy its arguments in and
    its results out. replay_us: of the host, to replay its CUDA graph.
    """

    host_us: float
    gpu_us: float
    peak: int
    copy_us: float
    replay_us: float

    def __add__(self, other: Terms) -> Terms:
        return Terms(*map(operator.add, astuple(self), astuple(other)))

    @property
    def recorded_us(self) -> float:
        """Return the time of a replay, with the copies of arguments and results."""
        return max(self.gpu_us + self.copy_us, self.replay_us)

    @property
    def refusal(self) -> str | None:
        """Return why it is not recorded by prediction alone, or None where that pays."""
        return self._refusal(SLOWER_HOST if self.peak <= LITTLE else 1.0)

    @property
    def is_open(self) -> bool:
        """True if it may pay, as it would on a much slower host: it is tried."""
        return self._refusal(SLOWEST_HOST) is None

    def _refusal(self, slower: float) -> str | None:
        copies = f" and the copies of a CUDA graph {self.copy_us:.0f} us" if self.copy_us >= 1 else ""
        if self.host_us <= self.replay_us:
            return f"its launches take {self.host_us:.0f} us, a CUDA graph's {self.replay_us:.0f} us"
        if slower * self.host_us <= self.recorded_us:
            return f"its launches take {self.host_us:.0f} us, what they launch {self.gpu_us:.0f} us{copies}"
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized() and not is_beside_group():
            return GROUP
        return None


def keeping(text: str, kept: int) -> Decision:
    """Return the decision that a graph is recorded, with the bytes that it keeps."""
    return replayed(f"{text}; keeps {human_bytes(kept)} between calls")


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


class Trial:
    """A trial times steps without CUDA graphs, then as many with them, to decide whether they pay.

    A step lasts on the device from the first forward after a backward to the next such forward. It includes
    everything else that the caller does: the device may also wait for an update of the parameters.
    """

    def __init__(self, index: int) -> None:
        """Create a trial on the device `index`."""
        self._index = index
        self._steps: dict[bool, list[tuple[Any, Any]]] = {False: [], True: []}  # with CUDA graphs or without
        self._last: Any = None  # the beginning of the current step
        self._replays = self._captures = 0  # until that beginning
        self._has_backward = True  # whether a backward has run since
        self.us: dict[bool, float] = {}

    def forget(self) -> None:
        """Do not time the step that is under way."""
        self._last = None

    def backward(self) -> None:
        """Note that a backward is run."""
        self._has_backward = True

    def forward(self, replays: int, captures: int = 0) -> bool:
        """Note that a forward is run. Return True once the steps of one kind are timed.

        replays, captures: of CUDA graphs so far. A step with a capture does not count.
        """
        if not self._has_backward:
            return False
        self._has_backward = False
        before, self._last = self._last, mark(self._index)
        is_recorded = False in self.us
        was_recorded, self._replays = replays > self._replays, replays
        has_captured, self._captures = captures > self._captures, captures
        if before is None or was_recorded != is_recorded or has_captured:
            return False
        steps = self._steps[is_recorded]
        steps.append((before, self._last))
        if len(steps) < TIMED:
            return False
        self.us[is_recorded] = min(map(between_us, steps))
        steps.clear()
        return True

    @property
    def refusal(self) -> str | None:
        """Return why CUDA graphs do not pay, or None where they do."""
        return None if self.us[True] <= (1 - GAIN) * self.us[False] else str(self)

    def __str__(self) -> str:
        return f"a step takes {self.us[False]:.0f} us, and with CUDA graphs {self.us[True]:.0f} us"


def lying_in(saved: Sequence[frozenset[int]], arguments: Sequence[Any]) -> Iterator[int]:
    """Yield the positions of the tensors that lie at addresses of `saved`."""
    tensors = ((i, v.data_ptr()) for i, v in enumerate(arguments) if isinstance(v, torch.Tensor))
    return (i for i, place in tensors if any(place in places for places in saved)) if saved else iter(())


@dataclass
class Lane:
    """A lane is a forward and its backwards as CUDA graphs. Lanes of one number share a pool. A forward that
    is called again before its backward is replayed in the next lane, where it writes over nothing that this
    one has saved.

    replayed: calls the recorder of the forward. backwards: for each set of gradients that arrives, the
    recorder of the backward and a function that calls it.
    """

    pool: Pool
    recorder: Recorder
    replayed: Boxed
    backwards: list[tuple[Recorder, Boxed]] = field(default_factory=list[tuple[Recorder, Boxed]])

    @property
    def recorders(self) -> list[Recorder]:
        return [self.recorder, *(recorder for recorder, _ in self.backwards)]

    def is_busy(self, arguments: Sequence[Any]) -> bool:
        """True if the forward that would be replayed waits for its backward."""
        return any(r.is_awaited and r.fits(arguments) for r in self.recorder.recordings)

    def saved_in(self, arguments: Sequence[Any]) -> Iterator[int]:
        """Yield the positions of what replays of the forward have saved."""
        recordings = self.recorder.recordings
        return lying_in([each.places for each in recordings if each.is_awaited], arguments)

    def take(self, recorder: Recorder, arguments: list[Any]) -> list[int]:
        """Take over the memory of what the forward saved, for a capture of the backward. Drop graphs of other
        backwards whose forward is gone."""
        taken, forwards = list(self.saved_in(arguments)), self.recorder.recordings
        places = {arguments[i].data_ptr() for i in taken}
        aliases: dict[int, Any] = {}
        for recording in forwards:
            if recording.places & places:
                aliases |= recording.release()
        for i in taken:
            arguments[i] = aliases[id(arguments[i])] if id(arguments[i]) in aliases else unowned(arguments[i])
        recorder.recordings[:] = [b for b in recorder.recordings if any(f.places & b.reads for f in forwards)]
        return taken


class Pair:
    """A pair is a forward and its backward.

    A forward is replayed in the first lane whose last replay of it is over: its backward has run, or what it
    saved was released. If there is none, and for as long as its pool does not allow a replay, it runs without
    a CUDA graph, and so does its backward.

    If prediction does not say whether that pays, it is tried.
    """

    def __init__(
        self,
        plain: Boxed,
        pools: Callable[[int], Pool],
        terms: Terms,
        info: GraphInfo,
        note: Note,
    ) -> None:
        """Create a pair from its forward: `plain`, `terms`, `info` and `note` are the forward's. pools:
        returns the pool of a lane, by its number."""
        self._plain, self._pools, self._info = plain, pools, info
        self._terms = terms
        self._beside = 0  # bytes that the backward keeps besides what the forward does
        self._refusal = terms.refusal  # why the forward is not recorded now
        self._trial: Trial | None = None
        self._why = UNASKED  # it is recorded
        self._notes: list[Note] = [note]  # of the forward and the backward
        # For each set of gradients that arrives: the backward, `owning`, and the positions of parameters.
        self._backwards: list[tuple[Boxed, Boxed, Sequence[int]]] = []
        self._most = MOST_LANES
        self._lanes: list[Lane] = []
        self._add_lane()

        def forward(arguments: list[Any]) -> Any:
            if self._trial is not None:
                self._try(self._trial)
            if self._refusal is not None or (lane := self._lane(arguments)) is None:
                return plain(arguments)
            return lane.replayed(arguments)

        self.forward = boxed(forward)
        self.decision = self._decision()

    def _add_lane(self) -> None:
        calls = Calls(
            static=lambda _: self._info.static_inputs,
            shown=self._info.outputs,
            most=MOST_FORMS,
            needed=lambda: self._terms.peak + self._beside,
            twice=True,
            lends=True,
            report=self._report(0, len(self._lanes)),
        )
        pool = self._pools(len(self._lanes))
        recorder = Recorder(self._plain, pool, calls)
        self._lanes.append(Lane(pool, recorder, unless(paused, self._plain, recorder)))
        for backward in self._backwards:
            self._add_backward(self._lanes[-1], *backward)

    def _lane(self, arguments: Sequence[Any]) -> Lane | None:
        """Return the lane in which a forward may be replayed, a new one if need be; None if there is none."""
        for lane in self._lanes:
            if not lane.is_busy(arguments):
                return lane
        if len(self._lanes) >= self._most:
            return None
        self._add_lane()
        return self._lanes[-1]

    def _report(self, place: int, lane: int) -> Callable[[str | None, int], None]:
        """Return the function that notes why a graph is not recorded, or what it keeps.

        place: 0 for the forward, 1 for its first backward. A refusal in another lane than the first one ends
        that lane and those behind it, and the note stays.
        """

        def report(reason: str | None, kept: int) -> None:
            if reason is None:
                self._note_kept(place)
            elif lane:
                self._most = min(self._most, lane)
                if place:
                    self._lanes[lane].recorder.give_back(reason)
            else:
                if place:
                    self._leave_alone()
                self._notes[place](not_replayed(reason))

        return report

    def _note_kept(self, place: int) -> None:
        """Note what the graphs of the forward (0) or of a backward keep in all lanes."""
        kept = sum(lane.recorders[place].kept for lane in self._lanes if place < len(lane.recorders))
        self._notes[place](keeping(self._why, kept))

    def backward(
        self, plain: Boxed, static: Sequence[int], terms: Terms | str | None, note: Note
    ) -> tuple[Boxed, Decision]:
        """Return the backward in CUDA graphs or as it is, and what was decided.

        static: positions of the arguments that stay where they are. terms: or the reason why it cannot be
        recorded.
        """

        def owning(arguments: list[Any]) -> Any:
            """Run without a CUDA graph, with results that do not lie in a pool."""
            saved = [places for lane in self._lanes for places in lane.pool.awaited()]
            for i in list(lying_in(saved, arguments)):
                arguments[i] = again(arguments[i])
            return plain(arguments)

        if not isinstance(terms, Terms):
            self._leave_alone()
            return boxed(owning), not_replayed(terms or "")
        self._beside = terms.peak
        both = self._terms + terms
        is_open = both.refusal is not None and both.is_open
        reason = None if is_open else both.refusal
        reason = reason or self._lanes[0].pool.refusal(self._terms.peak + self._beside)
        if reason is not None:
            self._leave(reason)
            return boxed(owning), not_replayed(reason)
        self._refusal = TRIED if is_open else None
        self._trial = Trial(self._lanes[0].pool.index) if is_open else None
        self._notes[0](self._decision())
        self._notes.append(note)

        number = len(self._backwards)
        self._backwards.append((plain, owning, static))
        for lane in self._lanes:
            self._add_backward(lane, plain, owning, static)

        def call(arguments: list[Any]) -> Any:
            if self._trial is not None:
                self._trial.backward()
            lane = self._lane_of(arguments)
            return owning(arguments) if lane is None else lane.backwards[number][1](arguments)

        return after_one(owning, call), self._decision()

    def _lane_of(self, arguments: Sequence[Any]) -> Lane | None:
        """Return the lane in which the forward of a backward was replayed."""
        saved = [(r.places, lane) for lane in self._lanes for r in lane.recorder.recordings if r.is_awaited]
        for value in arguments if saved else ():
            place = value.data_ptr() if isinstance(value, torch.Tensor) else 0
            for places, lane in saved:
                if place in places:
                    return lane
        return None

    def _add_backward(self, lane: Lane, plain: Boxed, owning: Boxed, static: Sequence[int]) -> None:
        """Give a lane its backward, which is `owning` where it is not replayed."""
        calls = Calls(
            static=lambda arguments: {*static, *lane.saved_in(arguments)},
            most=MOST_FORMS,
            needed=lambda: self._beside,
            lends=True,
            take=lambda arguments: lane.take(recorder, arguments),
            anew=lane.recorder.recordings.clear,
            plain=owning,
            report=self._report(1 + len(lane.backwards), self._lanes.index(lane)),
        )
        recorder = Recorder(plain, lane.pool, calls)
        lane.backwards.append((recorder, unless(lambda: paused() or is_kept(), owning, recorder)))

    def _decision(self) -> Decision:
        return replayed() if self._refusal is None else not_replayed(self._refusal)

    @property
    def _recorders(self) -> list[Recorder]:
        return [recorder for lane in self._lanes for recorder in lane.recorders]

    def _try(self, trial: Trial) -> None:
        """Record a forward and its backward, or end that, when the steps that were to be timed are over."""
        if paused() or torch.cuda.is_current_stream_capturing():
            trial.forget()
            return
        counts = [(recorder.replays, recorder.captures) for recorder in self._recorders]
        if not trial.forward(*map(sum, zip(*counts, strict=True))):
            return
        self._refusal = None
        if True in trial.us:
            self._trial = None
            if trial.refusal is not None:
                self._leave(trial.refusal)
                for lane in self._lanes:
                    lane.pool.renew()
                return
            self._why = f"recorded: {trial}"
            for place in range(len(self._notes)):
                self._note_kept(place)

    def _leave(self, reason: str) -> None:
        """Record the forward and the backward no more."""
        self._refusal, self._trial = reason, None
        for recorder in self._recorders:
            recorder.give_back(reason)
        for note in self._notes:
            note(not_replayed(reason))
        for lane in self._lanes:
            lane.pool.forget()

    def _leave_alone(self) -> None:
        """Record no more a forward whose backward is not recorded, unless it keeps little: what it saves
        would outlive a backward that releases one by one what it has read."""
        if self._terms.peak > LITTLE and self._refusal is None:
            self._leave(BACKWARD_IS_NOT)
