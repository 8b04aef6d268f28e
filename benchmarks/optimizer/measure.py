"""python -m benchmarks optimizer: updates over a model's list of parameters, and whole training steps.

Updates: GPU time of one `step()`, and what part of it a copy that moves as many bytes would take (parameters
and states read and written once, gradients read once). Steps: wall time of forward, backward and update, and
the peak of memory. The model is what `compile` compiled for all, so that the columns differ by the update
alone, but for "torch.compile", where it is torch.compile's with PyTorch's fused optimizer.

Each cell has a process of its own; with --jobs 12 so many compile side by side and measure one by one, and
what one has compiled the others find: the first of each model, and what torch.compile makes, go first.
--filter AdamW is a third of the table; --within 480 begins no cell after eight minutes, and says which are
missing; --resume measures those that --json does not have, and ours of another commit.

    python -m benchmarks.optimizer.measure '{"workload": 0, "optimizer": "AdamW", ...}'     one cell, as JSON
"""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer

import fusion_compiler as fc
from benchmarks.harness import tables
from benchmarks.harness.contenders import inductor
from benchmarks.harness.processes import my_turn, only
from benchmarks.harness.record import Cell, Record, begin, fill
from benchmarks.harness.tables import Bar, Column, Row, at_least, cell_of, figure, over, value
from benchmarks.harness.timing import Yardstick, device_time, wall_time
from benchmarks.models.convolutions import mobilenet
from benchmarks.models.workloads import WORKLOADS, Workload, gradient_for, step, vit

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD momentum": lambda p, **kw: SGD(p, lr=1e-3, momentum=0.9, **kw),
    "Adagrad": lambda p, **kw: Adagrad(p, lr=1e-3, **kw),
    "AdamW": lambda p, **kw: AdamW(p, lr=1e-4, **kw),
}
FLAGS: dict[str, dict[str, bool]] = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}}
UPDATES = ("for-loop", "foreach", "fused", "compiled step", "ours")  # the contenders without a backward pass


LLAMA, BERT = (
    next(w for w in WORKLOADS if w.train and w.name.startswith(name)) for name in ("Llama", "BERT-large 12")
)
STEPS: tuple[Workload, ...] = (
    replace(
        LLAMA, name=LLAMA.name.replace("4 x 2048", "1 x 1024"),
        sizes={**LLAMA.sizes, "batch": 1, "length": 1024},
    ),
    LLAMA,
    BERT,
    Workload(
        "ViT-L/16, train, 1 image", vit,
        {"batch": 1, "hidden": 1024, "layers": 24, "heads": 16, "side": 224},
        {"batch": 1, "hidden": 64, "layers": 2, "heads": 4, "side": 32},
    ),
    Workload(
        "MobileNetV2, train, 32 images", mobilenet, {"batch": 32, "stages": 7, "side": 224},
        {"batch": 2, "stages": 2, "side": 32},
    ),
)  # fmt: skip
LIST = "Llama-1B parameters"
QUICK = {"layers": 2, "hidden": 64, "inner": 96, "vocabulary": 200}


def llama_1b(layers: int = 16, hidden: int = 2048, inner: int = 8192, vocabulary: int = 128256) -> list[Any]:
    """Shapes of the parameters of Llama 3.2 1B."""
    heads = hidden // 4
    layer = [(hidden, hidden), (heads, hidden), (heads, hidden), (hidden, hidden)]
    layer += [(inner, hidden), (inner, hidden), (hidden, inner), (hidden,), (hidden,)]
    return [(vocabulary, hidden), *layer * layers, (hidden,)]


@dataclass(frozen=True)
class Task:
    """One cell: a workload by its number, or -1 for the update alone; which optimizer, and who runs it."""

    workload: int
    optimizer: str
    contender: str
    device: str
    quick: bool
    backend: str
    repetitions: int

    @property
    def case(self) -> str:
        return LIST if self.workload < 0 else STEPS[self.workload].name


@dataclass(frozen=True)
class Update:
    """The work that follows a backward pass. optimizers: the ones whose state counts."""

    step: Callable[[], Any]
    zero_grad: Callable[[], Any]
    optimizers: tuple[Optimizer, ...]


def update_of(task: Task, model: nn.Module) -> Update:
    make = OPTIMIZERS[task.optimizer]
    if task.contender == "hooks":
        return in_hooks(model, functools.partial(make, **flags_of(task)))
    optimizer = make(model.parameters(), **flags_of(task))
    if task.contender == "compiled step":
        return Update(torch.compile(lambda: optimizer.step()), optimizer.zero_grad, (optimizer,))
    if task.contender.startswith("ours"):
        when: Any = task.contender.partition(", ")[2] or "step"
        fc.fuse_optimizer(model, optimizer, when=when, backend=task.backend, strict=True)
    return Update(optimizer.step, optimizer.zero_grad, (optimizer,))


def flags_of(task: Task) -> dict[str, bool]:
    """Return the flags of PyTorch's optimizer: the fused implementation, if it exists and no other is asked
    for."""
    if task.contender.startswith("ours"):
        return {}
    missing = task.optimizer == "Adagrad" and task.device.startswith("cuda") and task.contender != "fused"
    return FLAGS.get(task.contender, {} if missing else {"fused": True})


def in_hooks(model: nn.Module, make: Callable[..., Optimizer]) -> Update:
    """As PyTorch's tutorial on optimizers in the backward pass has it: one for each parameter."""
    each = {param: make([param]) for param in model.parameters()}

    def hook(param: Tensor) -> None:
        each[param].step()
        each[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(hook)
    return Update(lambda: None, lambda: None, tuple(each.values()))


def moved(model: nn.Module, update: Update) -> int:
    """Bytes that an update reads and writes at least."""
    states = [v for o in update.optimizers for s in o.state.values() for v in s.values()]
    held = sum(state.nbytes for state in states if isinstance(state, Tensor) and state.dim())
    return 3 * sum(param.nbytes for param in model.parameters()) + 2 * held


def measure(task: Task) -> dict[str, Any]:
    return measure_update(task) if task.workload < 0 else measure_step(task)


def measure_update(task: Task) -> dict[str, float | int]:
    device = torch.device(task.device)
    shapes = llama_1b(**QUICK) if task.quick else llama_1b()
    model = nn.ParameterList(
        nn.Parameter(torch.randn(s, device=device, dtype=torch.bfloat16)) for s in shapes
    )
    update = update_of(task, model)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    for _ in range(3):
        update.step()
    my_turn()
    spent = device_time(update.step, device, task.repetitions)
    copy = Yardstick(device, 1 << 20 if task.quick else 1 << 30).seconds(moved(model, update))
    return {"ms": spent.seconds * 1e3, "of copy": copy / spent.seconds, "launches": spent.kernels}


def measure_step(task: Task) -> dict[str, float]:
    device = torch.device(task.device)
    model, batch = STEPS[task.workload].make(device, task.quick)
    gradient = gradient_for(model, batch)
    theirs = task.contender == "torch.compile"
    fast = inductor(model) if theirs else fc.compile(model, backend=task.backend)
    update = update_of(task, model)

    def call() -> None:
        step(fast, batch, True, gradient)
        update.step()
        update.zero_grad()

    for _ in range(5):
        call()
    my_turn()
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    seconds = wall_time(call, device, task.repetitions)
    peak = torch.cuda.max_memory_allocated(device) if cuda else 0
    gradients = sum(param.nbytes for param in model.parameters() if param.requires_grad)
    busy = device_time(call, device, 5, warmup=1)
    times = {"ms": seconds * 1e3, "gpu_ms": busy.seconds * 1e3}
    return times | {"peak_gb": peak / 1e9, "gradients_gb": gradients / 1e9}


# Rows are held to bars, and shown in a table.

WHOLE = "torch.compile"  # with PyTorch's fused optimizer
PEERS = ("for-loop", "foreach", "fused", "compiled step", "hooks")
OURS = ("ours", "ours, backward", "ours, forward")
CONTENDERS = (WHOLE, *PEERS, *OURS)
FASTER = {"1 x 1024": 1.25, "4 x 2048": 1.05}  # than `WHOLE`, by the workload's name; elsewhere not slower
PAPER = 1.2  # times as fast as the for-loop and foreach, on half of the rows
OF_COPY = 0.93  # of the copy bandwidth, of the update alone
FREED = 0.9  # of the gradients' bytes, which the peak is lower by where updates are in the backward pass


def ratio(row: Row, peer: str) -> float | None:
    """A peer's wall time over that of our fastest."""
    return over(value(row, peer, "ms"), value(row, OURS, "ms"))


def means(rows: Sequence[Row]) -> dict[str, float]:
    """Geometric means over the rows that have both."""
    return tables.means(rows, {f"vs {peer}": functools.partial(ratio, peer=peer) for peer in (WHOLE, *PEERS)})


def bars(rows: Sequence[Row], update: str) -> Iterator[Bar]:
    """update: the case that is no whole step."""
    for row in rows:
        name, ours = f"{row['case']}, {row['phase']}", cell_of(row, "ours")
        if row["case"] == update:
            yield from at_least(f"{name}: of the copy bandwidth", ours.get("of copy"), OF_COPY)
            continue
        least = next((bar for part, bar in FASTER.items() if part in row["case"]), 1.0)
        yield from at_least(f"{name}: x torch.compile and fused", ratio(row, WHOLE), least)
        freeing = cell_of(row, "ours, backward")
        if ours.get("peak_gb") and freeing.get("peak_gb") and "1 x 1024" in row["case"]:
            part = (ours["peak_gb"] - freeing["peak_gb"]) / ours["gradients_gb"]
            yield from at_least(f"{name}: freed of the gradients, at the peak", part, FREED)
    for peer in ("for-loop", "foreach"):
        ratios = [r for row in rows if row["case"] != update and (r := ratio(row, peer)) is not None]
        if ratios:
            part = sum(r >= PAPER for r in ratios) / len(ratios)
            yield Bar(f"rows of whole steps {PAPER} x as fast as {peer} >= .5", part, part >= 0.5)


def describe(cell: Mapping[str, Any]) -> str:
    if "failed" in cell:
        return cell["failed"]
    if "of copy" in cell:
        return f"{cell['ms']:.3f} ms, {cell['of copy']:.2f} of copy, {cell['launches']} launches"
    return f"{cell['ms']:.2f} ms (GPU {cell['gpu_ms']:.2f}), peak {cell['peak_gb']:.2f} GB"


def shown(cell: Mapping[str, Any]) -> str:
    if "failed" in cell:
        return "failed"
    other = cell.get("of copy", cell.get("peak_gb"))
    return f"{figure(cell.get('ms'))} ({figure(other)})" if cell else "-"


COLUMNS: tuple[Column, ...] = (
    ("ms (updates: of a copy; steps: peak GB)", lambda row: f"{row['case']}, {row['phase']}"),
    *((name, lambda row, name=name: shown(cell_of(row, name))) for name in CONTENDERS),
    *((f"x {peer}", lambda row, peer=peer: figure(ratio(row, peer))) for peer in (WHOLE, "fused")),
)


def show(rows: Sequence[Row], update: str) -> str:
    return tables.table(*tables.lines_of(COLUMNS, rows)) + "\n\n" + tables.verdicts(bars(rows, update))


def cells_of(options: argparse.Namespace) -> list[Cell]:
    cells = list[Cell]()
    for number in range(-1, len(STEPS)):
        for name in OPTIMIZERS:
            for contender in UPDATES if number < 0 else CONTENDERS:
                task = Task(
                    number, name, contender, options.device, options.quick, options.backend,
                    options.repetitions,
                )  # fmt: skip
                case = f"{task.case}, {name}"
                if re.search(options.filter, case) and re.search(options.only, contender):
                    cells.append(Cell(case, contender, {"case": task.case, "phase": name}, vars(task)))
    return cells


def in_order(cells: Sequence[Cell]) -> list[Cell]:
    """Put the cells that compile first: they do so side by side, and the others find it done.

    The first cell of each model by each compiler leads, then the steps that torch.compile makes.
    """
    seen: set[tuple[int, bool]] = set()
    ranks: list[int] = []
    for cell in cells:
        number = cell.task["workload"]
        model = (number, cell.contender == WHOLE)
        first = number >= 0 and model not in seen
        seen.add(model)
        ranks.append(0 if first else 1 if cell.contender == "compiled step" else 2)
    return [cell for _, cell in sorted(zip(ranks, cells, strict=True), key=lambda pair: pair[0])]


def main(options: argparse.Namespace) -> Record:
    record = begin("optimizer", options)
    module = "benchmarks.optimizer.measure"
    fill(record, cells_of(options), "ms", module, options, describe, order=in_order, one_cache=True)
    return record.finish(means(record.rows), show(record.rows, LIST), "geometric mean, {}: {:.2f}x")


if __name__ == "__main__":
    only(lambda task: measure(Task(**task)))
