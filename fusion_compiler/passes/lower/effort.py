"""A limit on the work of planning one graph. When it is reached, the plan is the best one so far, with a
note.

The unit is one value computed by lowering, so plans do not depend on the speed of the machine. A generous
limit in seconds stands behind it. Models need 5 to 30 values per op, because repeated layers are lowered
once; random programs of shifted copies need a few hundred.
"""

from __future__ import annotations

import time

LEAST = 200_000
PER_OP = 300
ATTEMPT = 20  # values that comparing two parts costs, whether or not they are lowered
SECONDS = 900.0


class Effort:
    """The effort of one search. note: why the search ended early, for the plan; None if it did not."""

    def __init__(self, ops: int) -> None:
        self.most, self.spent = LEAST + PER_OP * ops, 0
        self.start = time.monotonic()
        self.note: str | None = None

    def is_spent(self) -> bool:
        """True if the limit has been reached. Once true, it stays true."""
        seconds = time.monotonic() - self.start
        if self.note is None and self.spent > self.most:
            self.note = f"{self.spent} values were lowered, of {self.most} that a graph of its size may take"
        elif self.note is None and seconds > SECONDS:
            self.note = f"it took {seconds:.0f} s, of {SECONDS:.0f} that it may; a faster machine finds more"
        return self.note is not None
