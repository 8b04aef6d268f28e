"""python -m benchmarks.live_memory CONTENDER STEP [OPTIMIZER]: the tensors alive at a training run's peak.

Run five training steps of one row of `benchmarks.optimizer` (STEP is a regular expression on its name,
OPTIMIZER one of its optimizers, AdamW if left out), and print a line for each forward pass, backward pass and
update: the peak of the allocated memory, what stays allocated, and what CUDA graph pools hold besides.
At the end list the largest tensors that were alive at the peak of the whole run, by the line of code that
allocated them. CONTENDER is "torch.compile", "ours", or another column of that benchmark.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

import fusion_compiler as fc
from benchmarks.contenders import inductor
from benchmarks.models import of_recordings
from benchmarks.optimizer import STEPS, Task, update_of
from benchmarks.workloads import gradient_for, result_of

SHOWN = 14  # lines of code that are listed
EVENTS = 1_000_000  # allocations and frees that are remembered
BELOW = ("benchmarks/", "fusion_compiler/", "torch/optim/")  # files whose lines are named


def place_of(frames: Iterable[dict[str, Any]]) -> str:
    """The innermost line in this repository or an optimizer, or else the innermost of all."""
    frames = list(frames)
    chosen = next((f for f in frames if any(part in f["filename"] for part in BELOW)), None)
    chosen = chosen or (frames[0] if frames else {"filename": "?", "line": 0, "name": "?"})
    file = "/".join(chosen["filename"].split("/")[-2:])
    return f"{file}:{chosen['line']} {chosen['name']}"


def alive_at_peak(events: Iterable[dict[str, Any]]) -> list[tuple[str, int, int]]:
    """(place, bytes, tensors) of what one phase had allocated when most was, the largest first.

    events: allocations and frees in the order of a memory snapshot's `device_traces`.
    """
    alive: dict[int, tuple[int, str]] = {}
    used = most = 0
    best: list[tuple[int, str]] = []
    for event in events:
        if event["action"] == "alloc":
            alive[event["addr"]] = event["size"], place_of(event.get("frames", ()))
            used += event["size"]
            if used > most:
                most, best = used, []
        elif event["action"] == "free_completed" and event["addr"] in alive:
            if not best and used == most:
                best = list(alive.values())
            used -= alive.pop(event["addr"])[0]
    best = best or list(alive.values())
    size, count = Counter[str](), Counter[str]()
    for number, place in best:
        size[place] += number
        count[place] += 1
    return [(place, total, count[place]) for place, total in size.most_common(SHOWN)]


def main(contender: str, step: str, optimizer: str = "AdamW") -> None:
    number = next(i for i, workload in enumerate(STEPS) if re.search(step, workload.name))
    task = Task(number, optimizer, contender, "cuda", False, "auto", 1)
    device = torch.device("cuda", torch.cuda.current_device())
    model, batch = STEPS[number].make(device)
    gradient = gradient_for(model, batch)
    torch.cuda.empty_cache()
    fast = inductor(model) if contender == "torch.compile" else fc.compile(model)
    update = update_of(task, model)
    results: dict[str, Any] = {}

    def forward() -> None:
        output = fast(**batch)
        results["loss"] = output.loss if gradient is None else result_of(output)

    def backward() -> None:
        results.pop("loss").backward(gradient)

    def finish() -> None:
        update.step()
        update.zero_grad()

    peaks: dict[str, int] = {}
    for turn in range(1, 6):
        for phase in (forward, backward, finish):
            torch.cuda.reset_peak_memory_stats(device)
            phase()
            torch.cuda.synchronize(device)
            name = f"step {turn}, {phase.__name__}"
            peaks[name] = torch.cuda.max_memory_allocated(device)
            rest, kept = torch.cuda.memory_allocated(device), of_recordings(device)
            reserved = torch.cuda.memory_reserved(device)
            print(
                f"{contender} {name}: peak {peaks[name] / 1e9:.2f} GB, after it {rest / 1e9:.2f}, pools "
                f"{kept / 1e9:.2f}, reserved {reserved / 1e9:.2f}",
                flush=True,
            )
    for plan in getattr(fast, "plan", ()):
        print(f"  {plan.name}: CUDA graph: {plan.notes.get('CUDA graph')}; memory {plan.notes.get('memory')}")
    print(f"highest: {max(peaks, key=peaks.__getitem__)}, {max(peaks.values()) / 1e9:.2f} GB")


def listed(contender: str, step: str, optimizer: str = "AdamW") -> None:
    """`main`, and what was alive at the peak of the whole run."""
    torch.cuda.memory._record_memory_history(max_entries=EVENTS, stacks="python")
    main(contender, step, optimizer)
    (events, *_) = torch.cuda.memory._snapshot()["device_traces"]
    for place, size, count in alive_at_peak(events):
        print(f"  {size / 1e9:7.3f} GB in {count:5d} tensors: {place}")


if __name__ == "__main__":
    listed(*sys.argv[1:])
