"""Pipelines of two and four processes against the uncut model, with the same microbatches, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

import fusion_compiler as fc
from fusion_compiler.machines.compression import Compression
from fusion_compiler.machines.pipeline import Pipeline
from fusion_compiler.machines.plan import Link, Machine
from fusion_compiler.machines.run import PipelineRunner
from fusion_compiler.machines.stage import seed_of
from tests.machines.processes import run

COUNT, STEPS, WORDS = 4, 3, 20
SLOW = Link(bytes_per_s=1e5, latency_us=50.0)
# So slow a link is best cut where little crosses it. These cuts give each stage weights, by their number.
EVEN = {1: ("linear_2",), 3: ("linear_1", "linear_2", "linear_3")}


class Model(nn.Module):
    """Tied embeddings, a batch norm with its buffers, an integer that crosses each cut, and a skip
    connection."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.one, self.two = nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm = nn.BatchNorm1d(6)
        self.three, self.four = nn.Linear(16, 32), nn.Linear(32, 16)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(16, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        first = self.embedding(words)
        x = first + self.two(self.norm(torch.tanh(self.one(first))))
        x = self.dropout(x)
        x = x + self.four(torch.tanh(self.three(x))) + first
        x = torch.where((words > 9).unsqueeze(-1), x, 2 * x)
        return self.head(self.dropout(x))


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def optimizer_of(parameters: Any) -> SGD:
    return SGD(parameters, lr=0.1, momentum=0.9)


def model_of(dropout: float = 0.0) -> Model:
    torch.manual_seed(3)
    return Model(dropout).double()


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    words, target = torch.randint(0, WORDS, (2, 2 * COUNT, 6), generator=generator)
    return words, target


def plan_of(model: nn.Module, world: int, schedule: str = "1f1b", local: int = 1) -> Pipeline:
    machines = [Machine(f"m{i}") for i in range(world)]
    return fc.partition(
        model, (data(0)[0][:2],), machines=machines, links=SLOW, microbatches=COUNT, schedule=schedule,
        stages_per_machine=local, cuts=EVEN[world * local - 1] if schedule.startswith("z") else None,
    )  # fmt: skip


def pipeline_of(plan: Pipeline, **options: Any) -> PipelineRunner:
    options.setdefault("compression", None)
    return fc.PipelineRunner(plan, loss=loss_of, optimizer=optimizer_of, **options)


def train(
    rank: int, world: int, schedule: str, local: int, dropout: float, options: dict[str, Any]
) -> tuple[list[Tensor], dict[str, Tensor], str]:
    model = model_of(dropout)
    pipeline = pipeline_of(plan_of(model, world, schedule, local), **options)
    losses = [pipeline.step(*data(step)) for step in range(STEPS)]
    tensors = {**pipeline.parameters, **pipeline.buffers}
    pipeline.close()
    return [x for x in losses if x is not None], {n: t.detach() for n, t in tensors.items()}, str(pipeline)


def uncut(step: Any, model: nn.Module, steps: int = STEPS) -> list[Tensor]:
    """Train with the same microbatches, one after the other; `step(microbatch, number of the step)`."""
    optimizer = optimizer_of(model.parameters())
    losses: list[Tensor] = []
    for number in range(steps):
        optimizer.zero_grad()
        words, target = (x.chunk(COUNT) for x in data(number))
        total = torch.zeros((), dtype=torch.float64)
        for i in range(COUNT):
            loss = loss_of(step(words[i], number, i), target[i]) / COUNT
            loss.backward()
            total += loss.detach()
        optimizer.step()
        losses.append(total)
    return losses


def seeded_stages(model: nn.Module, world: int, seed: int, **options: Any) -> Any:
    """Return a `step` for `uncut` that draws the random numbers which the stages of a pipeline draw."""
    stages = [fc.compile(m, **options) if options else m for m in plan_of(model, world).modules()]

    def step(words: Tensor, number: int, microbatch: int) -> Tensor:
        values: Any = words
        for i, stage in enumerate(stages):
            torch.manual_seed(seed_of(seed, number, microbatch, i))
            values = stage(*values) if isinstance(values, tuple) else stage(values)
        return values

    return step


def compare(results: list[Any], losses: list[Tensor], model: nn.Module) -> None:
    assert all(isinstance(result, tuple) for result in results), results
    compare_tensors([tensors for _, tensors, _ in results], model)
    (ours,) = (result[0] for result in results if result[0])
    torch.testing.assert_close(ours, losses, rtol=1e-12, atol=0)


def compare_tensors(results: list[dict[str, Tensor]], model: nn.Module) -> None:
    truth = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert {name for tensors in results for name in tensors} == truth.keys()
    for tensors in results:
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, truth[name].detach(), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(
    ("world", "schedule", "local"),
    [
        (2, "gpipe", 1), (2, "1f1b", 1), (2, "interleaved", 2), (4, "1f1b", 1),
        (4, "eager-1f1b", 1), (2, "zero-bubble", 1), (2, "zero-bubble", 2), (2, "zbv", 2),
    ],
)  # fmt: skip
@pytest.mark.sample(3)
def test_loss_and_parameters_are_those_of_the_uncut_model(
    world: int, schedule: str, local: int, tmp_path: Path
) -> None:
    results = run(train, world, tmp_path, world, schedule, local, 0.0, {})
    model = model_of()
    compare(results, uncut(lambda words, *_: model(words), model), model)


@pytest.mark.parametrize(("world", "schedule", "local"), [(2, "zero-bubble", 2), (2, "zbv", 2)])
def test_zero_bubble_schedules_run_compiled_stages_in_two_graphs(
    world: int, schedule: str, local: int, tmp_path: Path
) -> None:
    results = run(train, world, tmp_path, world, schedule, local, 0.0, {"backend": "eager"})
    model = model_of()
    compare(results, uncut(lambda words, *_: model(words), model), model)
    lines = [line.strip() for *_, text in results for line in text.splitlines() if "split" in line]
    assert sorted(lines) == [f"split backward: stage {n} done: two graphs" for n in (1, 2, 3)]


class Bare(nn.Module):
    """Its second stage has no weights and returns a view."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.mix, self.head = nn.Linear(6, 6), nn.Linear(16, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = torch.tanh(self.embedding(words)).transpose(1, 2)
        return self.head(self.mix(x).transpose(1, 2))


def train_bare(rank: int, options: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    model = Bare().double()
    plan = fc.partition(
        model, (data(0)[0][:2],), machines=[Machine("a"), Machine("b")], links=SLOW, microbatches=COUNT,
        schedule="zero-bubble", stages_per_machine=2, cuts=("tanh", "linear", "linear_1"),
    )  # fmt: skip
    pipeline = pipeline_of(plan, **options)
    losses = [pipeline.step(*data(step)) for step in range(STEPS)]
    left = [len(s.backward_state) + len(s.fwd_cache) + len(s.arrivals) for s in pipeline.stages]
    pipeline.close()
    parameters = {n: p.detach() for n, p in pipeline.parameters.items()}
    return [x for x in losses if x is not None], parameters, str(pipeline) + f"left {left}"


@pytest.mark.parametrize("options", [{}, {"backend": "eager"}])
def test_a_stage_without_weights_that_returns_a_view_runs_in_zero_bubble_schedules(
    options: dict[str, Any], tmp_path: Path
) -> None:
    results = run(train_bare, 2, tmp_path, options)
    torch.manual_seed(3)
    model = Bare().double()
    compare(results, uncut(lambda words, *_: model(words), model), model)
    assert all("left [0, 0]" in text for *_, text in results)
    assert ("split backward: stage 1 refused: it has no weights" in results[1][2]) == bool(options)


def test_dropout_of_a_microbatch_depends_on_nothing_but_its_seed(tmp_path: Path) -> None:
    results = run(train, 2, tmp_path, 2, "gpipe", 1, 0.5, {"seed": 5, "backend": "eager"})
    model = model_of(0.5)
    compare(results, uncut(seeded_stages(model, 2, 5, backend="eager"), model), model)


def test_a_compressed_run_says_what_it_sends_and_stays_near(tmp_path: Path) -> None:
    results = run(train, 2, tmp_path, 2, "1f1b", 1, 0.0, {"compression": Compression(ratio=8)})
    model = model_of()
    losses = uncut(lambda words, *_: model(words), model)
    assert all(isinstance(result, tuple) for result in results), results
    (ours,) = (result[0] for result in results if result[0])
    assert ours != losses
    torch.testing.assert_close(ours, losses, rtol=1e-2, atol=0)
    assert "8 bits: the link takes 100% of the slowest link's time" in results[0][2]
    assert "x)" in results[0][2]
