"""Count the seconds of a compilation by stage."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager


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
        """Count for the stage what runs in this context, or in each call of a function that it decorates."""
        before = self._now
        self.enter(stage)
        try:
            yield
        finally:
            self.enter(before)


def since(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """Return the seconds that each stage took between two readings, as "plan 1.00, emit 0.06", without those
    below 0.005."""
    spent = {stage: seconds - before.get(stage, 0.0) for stage, seconds in after.items()}
    return ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in spent.items() if seconds >= 0.005)
