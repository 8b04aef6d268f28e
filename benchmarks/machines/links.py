"""A character model trained over slow links: how much compression gains, what it costs, and what was
predicted.

Two and four processes, each with a thread of a CPU or with `--device cuda` on one of the host's GPUs, which
they may share, train a small language model on the text of this repository's pages. Messages go over Gloo.
The model is a perceptron over the last sixteen characters (Bengio et al., 2003).

`step` is the median of a few steps in which each process sends as fast as a link of 100 Mbit/s would.
`predicted` is a simulation of the schedule with what was measured alone: the phases of each stage, codecs
included, a message's way through the host besides the link's time, and the optimizer's step.

`loss` is the uncut model's on text that it has not seen, after 300 steps over links that are not slowed
down: the numbers do not depend on the time of a message.
"""

from __future__ import annotations

import argparse
import json
import os
import re
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
from benchmarks.harness.timing import synchronize
from benchmarks.machines.alone import WAIT_S, Alone, Parts, step_us
from benchmarks.machines.group import device_of
from fusion_compiler.machines.plan import Schedule

ROOT = Path(__file__).parent.parent.parent
LINK = fc.Link(bytes_per_s=12.5e6, latency_us=200.0)
CONTEXT, WIDTH, BLOCKS = 16, 128, 6
SCHEDULE = Schedule.EAGER  # messages are on their way while the processes compute
MICROBATCHES, ROWS = 8, 512
STEPS = 300  # for the loss
TIMED, WARM = 26, 6  # steps, and those of them that do not count
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


def plan_of(model: nn.Module, machines: int, device: torch.device, **options: Any) -> fc.Pipeline:
    example = torch.zeros(ROWS, CONTEXT, dtype=torch.int64, device=device)
    names = [fc.Machine(f"process {i}") for i in range(machines)]
    return fc.partition(
        model,
        (example,),
        machines=names,
        links=LINK,
        microbatches=MICROBATCHES,
        schedule=SCHEDULE,
        **options,
    )


def process(
    rank: int, world: int, kind: str, contenders: list[str], cuts: list[str], steps: int, name: str
) -> None:
    torch.set_num_threads(1)
    device = device_of(kind, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("gloo", f"file://{name}/rendezvous", rank=rank, world_size=world)
    text = Text()

    def pipeline_of(contender: str, throttle: fc.Link | None) -> fc.PipelineRunner:
        return fc.PipelineRunner(
            plan_of(model_of(text.vocabulary).to(device), world, device, cuts=cuts),
            loss=F.cross_entropy,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
            compression=CONTENDERS[contender],
            throttle=throttle,
        )

    def batch(number: int) -> tuple[Tensor, Tensor]:
        inputs, target = text.batch(text.train, MICROBATCHES * ROWS, number)
        return inputs.to(device), target.to(device)

    for contender in contenders:
        folder = Path(name) / contender
        folder.mkdir(exist_ok=True)
        pipeline = pipeline_of(contender, LINK)
        report = timed_steps(pipeline, batch, min(steps, TIMED))
        report |= measured_alone(pipeline, *batch(0))
        pipeline.close()
        pipeline = pipeline_of(contender, None)
        for number in range(steps):
            pipeline.step(*batch(number))
        pipeline.save(folder)
        pipeline.close()
        (folder / f"{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


def timed_steps(
    pipeline: fc.PipelineRunner, batch: Callable[[int], tuple[Tensor, Tensor]], steps: int
) -> dict[str, Any]:
    seconds: list[float] = []
    for number in range(steps):
        inputs, target = batch(number)
        synchronize(pipeline.device)
        begin = time.perf_counter()
        pipeline.step(inputs, target)
        synchronize(pipeline.device)
        seconds.append(time.perf_counter() - begin)
    wires = [stage.after for stage in pipeline.stages if stage.after is not None]
    return {
        "ms": 1e3 * statistics.median(seconds[min(WARM, steps - 1) :]),
        "links": [[LINK.us(w.forward.nbytes), LINK.us(w.backward.nbytes)] for w in wires],
        "bytes": sum(w.forward.nbytes + w.backward.nbytes for w in wires),
        "raw bytes": sum(w.edge.forward_bytes + w.edge.backward_bytes for w in wires),
        "compression": [str(d) for d in pipeline.decisions],
    }


def measured_alone(pipeline: fc.PipelineRunner, inputs: Tensor, target: Tensor) -> dict[str, Any]:
    alone = Alone(pipeline, (inputs[:ROWS],), target[:ROWS], wait_s=WAIT_S)
    alone.listen(lambda: pipeline.step(inputs, target))
    alone.measure()
    return {"parts": alone.parts().json}


def loss_of(text: Text, folder: Path, world: int, steps: int) -> float:
    """Return the loss of the saved parameters in the uncut model, on unseen text."""
    model = model_of(text.vocabulary)
    for rank in range(world):
        file = folder / f"step-{steps:08d}" / f"process-{rank}.pt"
        model.load_state_dict(torch.load(file, map_location="cpu", weights_only=True)["model"], strict=False)
    inputs, target = text.batch(text.rest, 8192, -1)
    with torch.no_grad():
        return float(F.cross_entropy(model.eval()(inputs), target))


def measure(
    text: Text, world: int, contenders: list[str], cuts: list[str], steps: int, kind: str
) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        mp.spawn(process, (world, kind, contenders, cuts, steps, name), world)
        for contender in contenders:
            folder = Path(name) / contender
            reports = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]
            row = {"name": f"{world} processes, {contender}", "processes": world, "contender": contender}
            yield row | row_of(reports) | {"loss": loss_of(text, folder, world, steps)}


def row_of(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what was measured of a contender and what its step was predicted to take."""
    parts = [Parts(**report["parts"]) for report in reports]
    links = [tuple(pair) for report in reports for pair in report["links"]]
    # a message's way through the host, besides the link's own time
    ways = [part.link[0] - link[0] for part, link in zip(parts, links, strict=False)]
    latencies = [LINK.latency_us + way for way in ways]
    return {
        "ms": max(report["ms"] for report in reports),
        "predicted ms": step_us(SCHEDULE, MICROBATCHES, parts, latencies) / 1e3,
        "bytes ratio": sum(r["raw bytes"] for r in reports) / sum(r["bytes"] for r in reports),
        "stages us": [part.stage for part in parts],
        "links us": links,
        "messages through the host us": ways,
        "optimizer us": [part.optimizer for part in parts],
        "compression": reports[0]["compression"],
    }


def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    steps = 3 if options.quick else STEPS
    text, device = Text(), device_of(options.device, 0)
    record = Record("links", environment(device), options.json)
    rows: list[dict[str, Any]] = []
    for world in (2,) if options.quick else (2, 4):
        contenders = [c for c in CONTENDERS if re.search(options.filter, f"{world} processes, {c}")]
        if not contenders:
            continue
        model = model_of(text.vocabulary).to(device)
        cuts = [*plan_of(model, world, device, measured=True).cuts]
        for row in measure(text, world, contenders, cuts, steps, device.type):
            rows.append(row)
            record.add(row)
    bars = [bar for row in rows for bar in bars_of(row, raw_of(row, rows))]
    record.summary = {"bars": counted(bars), "missed": missed(bars)}
    record.write()
    where = f"{torch.cuda.device_count()} GPUs" if device.type == "cuda" else f"{os.cpu_count()} cores"
    print(f"{where}, {steps} steps of {MICROBATCHES} microbatches of {ROWS} rows, 100 Mbit/s")
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
