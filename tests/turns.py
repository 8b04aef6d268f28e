"""A measurement for tests: when it began to measure and when it was done."""

from __future__ import annotations

import sys
import time
from typing import Any

from benchmarks.harness.processes import my_turn, only


def measure(task: dict[str, Any]) -> dict[str, float]:
    time.sleep(task.get("prepares", 0))
    my_turn()
    if "fails" in task:
        sys.exit(task["fails"])
    began = time.monotonic()
    time.sleep(task["measures"])
    return {"began": began, "done": time.monotonic(), "number": task["number"]}


if __name__ == "__main__":
    only(measure)
