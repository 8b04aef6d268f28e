"""Choose schedules by what a whole graph takes.

What a kernel takes alone (`launch.Runner`) is not what it takes between others: it starts while the one
before it ends, on multiprocessors that are not all free, and the next one starts while it ends. If a graph is
recorded, candidates that came close are recorded and replayed in their places, those of the longest kernels
first; then the best few of each once more, until no choice gets better by the choices for others. Candidates
that load early come first, which pays if the kernels around them do so too. At last each kernel that starts
early is tried once as one that starts when the one before it has ended.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from fusion_compiler.errors import FusionError
from fusion_compiler.runtime.binding import unkept_scratch
from fusion_compiler.runtime.boxed import Boxed
from fusion_compiler.runtime.builds import compile_builds
from fusion_compiler.runtime.cuda import elapsed_us
from fusion_compiler.runtime.launch import Runner
from fusion_compiler.runtime.preserved import preserved, room_below_peak
from fusion_compiler.runtime.stages import Stages

GAIN = 0.005  # of the graph's time, by which a candidate is better: noise is less
ROUNDS = 7
MOST_SECONDS = 5.0
AGAIN = 4  # candidates of a kernel that are tried another time

Measure = Callable[[], float]  # microseconds that the graph takes with what its runners launch now


class GraphTuning:
    """Try the candidates of one graph's runners within it, once.

    runners: each once, those that take longest first. measured: callable(graph, its arguments, function that
    puts back what it has written) -> `Measure`.
    """

    def __init__(
        self,
        runners: Sequence[Runner],
        stages: Stages,
        measured: Callable[[Boxed, Sequence[Any], Callable[[], None]], Measure] | None = None,
    ) -> None:
        self._runners, self._stages = runners, stages
        self._measured = measured or replayed

    def __call__(self, run: Boxed, arguments: Sequence[Any], written: Sequence[int], index: int) -> None:
        """Leave the runners with the fastest of their candidates, and the arguments as they are.

        written: positions of arguments that the graph writes into. index: of the device. If memory does not
        suffice, or the graph cannot be recorded, which its recording then says, the runners keep what was
        fastest alone.
        """
        runners = [runner for runner in self._runners if runner.rivals(index)]
        if not runners:
            return
        start = time.perf_counter()
        compile_builds(build for runner in runners for build in runner.rival_builds(index))
        trials, ended = [_Trial(runner, index) for runner in runners], False
        values = preserved([arguments[i] for i in written], room_below_peak(index))
        with suppress(RuntimeError), values as restore:
            measure = self._measured(run, arguments, restore)
            deadline = time.perf_counter() + MOST_SECONDS
            for trial in trials:
                trial.begin()
            best, before, most = measure(), math.inf, None
            while best < before:  # what one of them gains depends on what others are
                before = best
                for trial in trials:
                    if time.perf_counter() < deadline:
                        best = trial.turn(best, measure, most)
                if len(trials) == 1:
                    break
                most = AGAIN
            for trial in trials:
                if time.perf_counter() < deadline:
                    best = trial.start(best, measure)
            ended = True
        for trial in trials:
            trial.end(settled=ended)
        self._stages.add("tune within the graph", time.perf_counter() - start)


class _Trial:
    """A trial has the candidates of one runner, and what the graph took with each."""

    def __init__(self, runner: Runner, index: int) -> None:
        self._runner, self._index = runner, index
        self._us = dict.fromkeys(runner.rivals(index), 0.0)  # those that take longer alone behind others
        self._first = self._chosen = next(iter(self._us))
        self._had_turn = self._behind = False

    def begin(self) -> None:
        """Let the runner begin with the fastest alone of those that load early, if there are any."""
        early = next((i for i in self._us if self._runner.loads_early(i)), self._first)
        with suppress(FusionError):  # it needs more than the device has
            self._runner.take(early, self._index)
            self._chosen = early

    def turn(self, best: float, measure: Measure, most: int | None = None) -> float:
        """Leave the runner with its fastest candidate, and return what the graph takes with it.

        best: what it takes now. most: so many of the others are tried, those that were fastest so far.
        """
        self._us[self._chosen], self._had_turn = best, True
        others = sorted((i for i in self._us if i != self._chosen), key=self._us.__getitem__)
        try:
            for i in others[:most]:
                try:
                    self._runner.take(i, self._index)
                except FusionError:  # it needs more than the device has
                    self._us[i] = math.inf
                    continue
                us = self._us[i] = measure()
                if (better := _better(us, best, measure)) is not None:
                    best, self._chosen = better, i
        finally:
            self._runner.take(self._chosen, self._index)
        return best

    def start(self, best: float, measure: Measure) -> float:
        """Leave the runner's kernels starting early or not, as is faster, and return what the graph takes."""
        if not self._had_turn or not self._runner.starts_early(self._chosen):
            return best
        try:
            self._runner.take(self._chosen, self._index, behind=True)
            if (better := _better(measure(), best, measure)) is not None:
                best, self._behind = better, True
        finally:
            self._runner.take(self._chosen, self._index, behind=self._behind)
        return best

    def end(self, *, settled: bool) -> None:
        """Keep the choice, if it had a turn and is settled, or else what the runner launched before."""
        if settled and self._had_turn:
            self._runner.settle(self._chosen, self._index, behind=self._behind)
        else:
            self._runner.take(self._first, self._index)


def _better(us: float, best: float, measure: Measure) -> float | None:
    """Return what the graph takes, measured once more, if it took less; None if it did not."""
    if us < best * (1 - GAIN):
        us = (us + measure()) / 2  # it may have been luck
    return us if us < best * (1 - GAIN) else None


def replayed(run: Boxed, arguments: Sequence[Any], restore: Callable[[], None]) -> Measure:
    """Return the function that records a graph anew and returns the median microseconds of its replays."""
    from torch._inductor.cudagraph_trees import clear_cublas_manager

    def measure() -> float:
        with unkept_scratch():
            run(list(arguments))  # loads what this form of arguments needs, which a recording may not
        restore()
        graph = torch.cuda.CUDAGraph()
        # Libraries keep a workspace for each stream, which would outlive this graph and its stream.
        with clear_cublas_manager():
            with unkept_scratch(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                run(list(arguments))
            return statistics.median(elapsed_us(restore, graph.replay) for _ in range(ROUNDS))

    return measure
