"""Count the seconds of a compilation by stage."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Stages:
    """The object counts the seconds of each stage, without those of the stages within it.

    One graph is compiled at a time (Dynamo's lock), so that there is one present stage.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._now = ""  # outside of any stage
        self._since = 0.0

    @property
    def seconds(self) -> dict[str, float]:
        """Return the seconds by stage up to now, in the order in which stages were first entered."""
        self.enter(self._now)
        return dict(self._seconds)

    def add(self, stage: str, seconds: float) -> None:
        """Add seconds outside of any present stage, as of a kernel's first call, which any thread makes."""
        self._seconds[stage] = self._seconds.get(stage, 0.0) + seconds

    def enter(self, stage: str) -> None:
        """Make a stage the present one, until the next one or the end of what `during` surrounds."""
        now = time.perf_counter()
        if self._now:
            self.add(self._now, now - self._since)
        self._now, self._since = stage, now

    @contextmanager
    def of(self, stage: str) -> Generator[None]:
        """Count what runs in this context for the stage."""
        before = self._now
        self.enter(stage)
        try:
            yield
        finally:
            self.enter(before)

    def during(self, stage: str, function: Callable[P, R]) -> Callable[P, R]:
        """Return `function`, each call of which counts for the stage."""

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with self.of(stage):
                return function(*args, **kwargs)

        return call


def since(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """Return "plan 1.00, emit 0.06": what has been added in between, where that shows."""
    spent = {stage: seconds - before.get(stage, 0.0) for stage, seconds in after.items()}
    return ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in spent.items() if seconds >= 0.005)
