"""A character model trained over slow links: how much compression gains, what it costs, and what was
predicted.

Two and four processes on one CPU, with one thread each, train a small language model on the text of this
repository's pages. Each sends as fast as a link of 100 Mbit/s would. The model is a perceptron over the last
sixteen characters (Bengio et al., 2003): what crosses a cut takes a link about as long as a stage takes for a
microbatch. `step` is the median of all steps but the first ones. `predicted` is a simulation of the
schedule with the times that each stage takes alone, codecs included, and with the bytes of its messages.
`loss` is the uncut model's on text that it has not seen, with the parameters that the run has saved.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn import functional as F

import fusion_compiler as fc
from benchmarks.harness.record import Record, environment
from benchmarks.harness.tables import Bar, at_least, at_most, counted, missed, table
from fusion_compiler.machines.plan import Schedule
from fusion_compiler.machines.simulate import simulate

ROOT = Path(__file__).parent.parent.parent
LINK = fc.Link(bytes_per_s=12.5e6, latency_us=200.0)
CONTEXT, WIDTH, BLOCKS = 16, 128, 6
MICROBATCHES, ROWS = 8, 512
STEPS, WARM = 300, 10
WAIT_S = 0.01  # between two phases of a stage
CONTENDERS: dict[str, fc.Compression | None] = {
    "raw": None,
    "8 bits": fc.Compression(ratio=4),
    "default": fc.Compression(),
    "top 10%": fc.Compression(keep=0.1),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(self.norm(x))))


class Characters(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH // CONTEXT)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary)

    def forward(self, characters: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(characters).flatten(1))))


class Text:
    """The pages as numbers of characters; the last tenth is for the loss alone."""

    def __init__(self) -> None:
        text = "".join(file.read_text() for file in sorted(ROOT.glob("docs/*.md")))
        characters = sorted(set(text))
        self.vocabulary = len(characters)
        numbers = torch.tensor([characters.index(c) for c in text])
        self.train, self.rest = numbers[: -len(numbers) // 10], numbers[-len(numbers) // 10 :]

    def batch(self, numbers: Tensor, rows: int, seed: int) -> tuple[Tensor, Tensor]:
        """Return contexts [rows, CONTEXT] and the characters that follow them."""
        generator = torch.Generator().manual_seed(seed)
        begins = torch.randint(0, len(numbers) - CONTEXT, (rows,), generator=generator)
        windows = numbers[begins.unsqueeze(1) + torch.arange(CONTEXT + 1)]
        return windows[:, :-1], windows[:, -1]


def model_of(vocabulary: int) -> Characters:
    torch.manual_seed(0)
    return Characters(vocabulary)


def plan_of(model: nn.Module, machines: int, **options: Any) -> fc.Pipeline:
    example = torch.zeros(ROWS, CONTEXT, dtype=torch.int64)
    names = [fc.Machine(f"process {i}") for i in range(machines)]
    return fc.partition(model, (example,), machines=names, links=LINK, microbatches=MICROBATCHES, **options)


def alone(pipeline: fc.PipelineRunner, turns: int = 20) -> list[list[float]]:
    """Return the microseconds of each of this process's stages, forward and backward, codecs included. Each
    phase comes after a wait, as in a step: its caches are cold."""
    times: list[list[float]] = []
    for stage in pipeline.stages:
        forward: list[float] = []
        backward: list[float] = []
        for _ in range(turns):
            time.sleep(WAIT_S)
            begin = time.perf_counter()
            if stage.before is None:
                inputs: tuple[Tensor, ...] = (torch.zeros(ROWS, CONTEXT, dtype=torch.int64),)
            else:
                inputs = stage.before.unpack_forward(0, stage.before.forward.empty().zero_())
            y = stage.submod(*inputs)
            if stage.after is None:
                y = F.cross_entropy(y, torch.zeros(ROWS, dtype=torch.int64))
            else:
                stage.after.pack_forward(0, (y,))
            middle = time.perf_counter()
            time.sleep(WAIT_S)
            again = time.perf_counter()
            back = None
            if stage.after is not None:
                (back,) = stage.after.unpack_backward(0, stage.after.backward.empty().zero_())
            y.backward(back)
            if stage.before is not None:
                stage.before.pack_backward(0, [x.grad for x in inputs])
            end = time.perf_counter()
            forward.append(1e6 * (middle - begin))
            backward.append(1e6 * (end - again))
        times.append([statistics.median(forward), statistics.median(backward)])
    return times


def process(
    rank: int, world: int, port: int, contender: str, cuts: list[str], steps: int, folder: str
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    text = Text()
    model = model_of(text.vocabulary)
    pipeline = fc.PipelineRunner(
        plan_of(model, world, cuts=cuts),
        loss=F.cross_entropy,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
        compression=CONTENDERS[contender],
        throttle=LINK,
    )
    seconds: list[float] = []
    for number in range(steps):
        inputs, target = text.batch(text.train, MICROBATCHES * ROWS, number)
        begin = time.perf_counter()
        pipeline.step(inputs, target)
        seconds.append(time.perf_counter() - begin)
    pipeline.save(folder)
    wires = [stage.after for stage in pipeline.stages if stage.after is not None]
    report = {
        "ms": 1e3 * statistics.median(seconds[min(WARM, steps - 1) :]),
        "links": [[LINK.us(w.forward.nbytes), LINK.us(w.backward.nbytes)] for w in wires],
        "bytes": sum(w.forward.nbytes + w.backward.nbytes for w in wires),
        "raw bytes": sum(w.edge.forward_bytes + w.edge.backward_bytes for w in wires),
        "compression": [str(d) for d in pipeline.decisions],
    }
    dist.barrier()
    report["stages"] = alone(pipeline)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(report))
    pipeline.close()
    dist.destroy_process_group()


def loss_of(text: Text, folder: Path, world: int, steps: int) -> float:
    """Return the loss of the saved parameters in the uncut model, on unseen text."""
    model = model_of(text.vocabulary)
    for rank in range(world):
        file = folder / f"step-{steps:08d}" / f"process-{rank}.pt"
        model.load_state_dict(torch.load(file, weights_only=True)["model"], strict=False)
    inputs, target = text.batch(text.rest, 8192, -1)
    with torch.no_grad():
        return float(F.cross_entropy(model.eval()(inputs), target))


def measure(text: Text, world: int, contender: str, cuts: list[str], steps: int) -> dict[str, Any]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments = (world, port, contender, cuts, steps, name)
        mp.spawn(process, arguments, world)
        reports = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]
        loss = loss_of(text, folder, world, steps)
    stages = [tuple(pair) for report in reports for pair in report["stages"]]
    links = [tuple(pair) for report in reports for pair in report["links"]]
    predicted = simulate(Schedule.ONE_F_ONE_B, stages, links, world, MICROBATCHES).us / 1e3
    return {
        "processes": world,
        "contender": contender,
        "ms": max(report["ms"] for report in reports),
        "predicted ms": predicted,
        "loss": loss,
        "bytes ratio": sum(r["raw bytes"] for r in reports) / sum(r["bytes"] for r in reports),
        "stages us": stages,
        "links us": links,
        "compression": reports[0]["compression"],
    }


def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    steps = 3 if options.quick else STEPS
    text = Text()
    record = Record("links", environment(torch.device("cpu")), options.json)
    rows: list[dict[str, Any]] = []
    for world in (2,) if options.quick else (2, 4):
        cuts: list[str] = []
        for contender in CONTENDERS:
            name = f"{world} processes, {contender}"
            if not re.search(options.filter, name):
                continue
            cuts = cuts or [*plan_of(model_of(text.vocabulary), world, measured=True).cuts]
            rows.append({"name": name} | measure(text, world, contender, cuts, steps))
            record.add(rows[-1])
    bars = [bar for row in rows for bar in bars_of(row, raw_of(row, rows))]
    record.summary = {"bars": counted(bars), "missed": missed(bars)}
    record.write()
    print(f"{os.cpu_count()} cores, {steps} steps of {MICROBATCHES} microbatches of {ROWS} rows, 100 Mbit/s")
    print(table([*COLUMNS], [[f(row, raw_of(row, rows)) for f in COLUMNS.values()] for row in rows]))
    print(counted(bars), *missed(bars), sep="\n  ")


def raw_of(row: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row without compression on as many processes; the row itself if that was not measured."""
    return next((r for r in rows if r["processes"] == row["processes"] and r["contender"] == "raw"), row)


def bars_of(row: dict[str, Any], raw: dict[str, Any]) -> Iterator[Bar]:
    yield from at_most(
        f"{row['name']}: |measured / predicted - 1|", abs(row["ms"] / row["predicted ms"] - 1), 0.1
    )
    if row["contender"] == "default" and raw is not row:
        yield from at_least(f"{row['name']}: gain", raw["ms"] / row["ms"], 3.0)
        yield from at_most(f"{row['name']}: gap in loss, %", 100 * (row["loss"] / raw["loss"] - 1), 1.0)


COLUMNS: dict[str, Callable[[dict[str, Any], dict[str, Any]], str]] = {
    "processes": lambda row, _: str(row["processes"]),
    "compression": lambda row, _: row["contender"],
    "bytes": lambda row, _: f"{row['bytes ratio']:.2f}x fewer",
    "step ms": lambda row, _: f"{row['ms']:.1f}",
    "gain": lambda row, raw: f"{raw['ms'] / row['ms']:.2f}x",
    "predicted ms": lambda row, _: f"{row['predicted ms']:.1f} ({row['predicted ms'] / row['ms'] - 1:+.0%})",
    "loss": lambda row, _: f"{row['loss']:.4f}",
    "gap": lambda row, raw: f"{row['loss'] / raw['loss'] - 1:+.2%}",
}
