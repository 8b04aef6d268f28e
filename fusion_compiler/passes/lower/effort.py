"""What planning one graph may take: when it is spent, what was found so far is the plan, which says so.

It is counted in values that lowering computes, so that a plan does not depend on how fast a machine is; a
clock that lets any machine through is behind it. Models take 5 to 30 values an op, since what repeats in
their layers is lowered once; random programs of shifted copies a few hundred.
"""

from __future__ import annotations

import time

LEAST = 200_000
PER_OP = 300
ATTEMPT = 20  # values that it takes to look at two parts, whether or not they are lowered
SECONDS = 900.0


class Effort:
    """Of one search. note: what the plan says of it, where it ended early."""

    def __init__(self, ops: int) -> None:
        self.most, self.spent = LEAST + PER_OP * ops, 0
        self.start = time.monotonic()
        self.note: str | None = None

    def is_spent(self) -> bool:
        """Once it is, it stays so."""
        seconds = time.monotonic() - self.start
        if self.note is None and self.spent > self.most:
            self.note = f"{self.spent} values were lowered, of {self.most} that a graph of its size may take"
        elif self.note is None and seconds > SECONDS:
            self.note = f"it took {seconds:.0f} s, of {SECONDS:.0f} that it may; a faster machine finds more"
        return self.note is not None
