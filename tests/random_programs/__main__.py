"""The command: see the package."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tests.random_programs.generate import MOST_LINES
from tests.random_programs.workers import Task, judged


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.random_programs", description=__doc__)
    parser.add_argument("--count", type=int, default=2000, help="programs")
    parser.add_argument("--seed", type=int, default=0, help="of the first program; the others follow")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seconds", type=float, default=60, help="that a program may take")
    parser.add_argument("--lines", type=int, default=MOST_LINES, help="that a program may have")
    parser.add_argument("--shrink", action="store_true", help="make the programs that fail smaller")
    parser.add_argument("--schedules", action="store_true", help="run nests under any of their schedules")
    parser.add_argument("--compile", metavar="TARGET", help="also compile the kernels for it: sm_90")
    parser.add_argument("--json", metavar="FILE", help="every verdict, and the text of what failed")
    options = parser.parse_args(arguments)
    # No run reads what an earlier one left on disk.
    os.environ.setdefault("FUSION_CACHE_DIR", tempfile.mkdtemp(prefix="fusion-cache"))
    seeds = range(options.seed, options.seed + options.count)
    verdicts: list[dict[str, Any]] = []
    start = time.time()
    task = Task(options.lines, options.seconds, options.shrink, options.schedules, options.compile)
    for verdict in judged(seeds, options.jobs, task):
        verdicts.append(verdict)
        if len(verdicts) % 100 == 0:
            print(f"{len(verdicts)} done", file=sys.stderr, flush=True)
        if verdict["failed"]:
            print(f"seed {verdict['seed']}: {verdict['kind']}: {verdict['what']}")
            print(f"{verdict['text']}\n{verdict['detail']}\n", flush=True)
    verdicts.sort(key=lambda v: v["seed"])
    if options.json:
        with open(options.json, "w") as file:
            json.dump(verdicts, file, indent=1)
    counts = Counter(v["kind"] for v in verdicts)
    print(f"{options.count} programs from seed {options.seed} in {time.time() - start:.0f} s:", end=" ")
    print(", ".join(f"{n} {kind}" for kind, n in counts.most_common()))
    for what, number in Counter(v["what"] for v in verdicts if v["kind"] == "does not apply").most_common():
        print(f"  does not apply, {number} times: {what}")
    return int(any(v["failed"] for v in verdicts))


if __name__ == "__main__":
    sys.exit(main())
