"""The parts of a pipeline's step measured one by one, and the step that follows from them."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

import fusion_compiler as fc
from benchmarks.harness.timing import synchronize
from fusion_compiler.machines.estimate import Clock
from fusion_compiler.machines.plan import Schedule
from fusion_compiler.machines.simulate import simulate

TURNS = 20  # of a phase and of a message
WAIT_S = 0.01  # between two phases of a stage that waits for slow links
T = TypeVar("T")
Span = tuple[Any, Any]  # two marks of a clock
PING = 1000  # a tag that no message of a step has


@dataclass(frozen=True)
class Parts:
    """The parts of a step in one process, in microseconds. stage: the forward and the backward pass of a
    microbatch. link: a message to the next stage and one back, zeros of the last stage. ties: the sum of the
    gradients of tied parameters, 0 without any. optimizer: the optimizer's step."""

    stage: tuple[float, float]
    link: tuple[float, float]
    ties: float
    optimizer: float

    @property
    def json(self) -> dict[str, Any]:
        return asdict(self)


def step_us(
    schedule: Schedule, microbatches: int, parts: Sequence[Parts], latencies: Sequence[float] = ()
) -> float:
    """Return the microseconds of a step with one stage for each process. Each process runs its optimizer
    after its last phase, and those with tied parameters add up their gradients before that."""
    links = [part.link for part in parts[:-1]]
    stages = [part.stage for part in parts]
    step = simulate(schedule, stages, links, len(parts), microbatches, latencies=latencies)
    ends = [max(e.end_us for e in step.events if e.stage == stage) for stage in range(len(parts))]
    together = max((end for end, part in zip(ends, parts, strict=True) if part.ties), default=0.0)
    return max(
        (together + part.ties if part.ties else end) + part.optimizer
        for end, part in zip(ends, parts, strict=True)
    )


class Alone:
    """Measure the parts of a step, each alone, in a process of a pipeline. Every process of the pipeline
    makes one and calls the same methods: `listen` once, `measure` once or more often, then `parts`.

    A stage has as many microbatches in flight as the schedule's steady state. What it receives are messages
    of a step that `listen` has kept: a product of zeros takes less power, and so less time. The parameters
    stay as they are, so steps and measurements may take turns.

    inputs, target: of one microbatch. turns: of each part, whenever parts are measured. wait_s: before each
    phase; after a wait, its caches are cold.
    """

    def __init__(
        self,
        pipeline: fc.PipelineRunner,
        inputs: tuple[Tensor, ...],
        target: Tensor,
        turns: int = TURNS,
        wait_s: float = 0.0,
    ) -> None:
        self.pipeline, self.inputs, self.target = pipeline, inputs, target
        self.turns, self.wait_s = turns, wait_s
        self.lanes, self.clock = pipeline._lanes, Clock(pipeline.device)
        (self.stage,) = pipeline.stages
        self.times: dict[str, list[float]] = defaultdict(list)  # the microseconds of each part
        self.losses: dict[int, Tensor] = {}
        self.arrived: dict[str, Tensor] = {}

    def listen(self, step: Callable[[], T]) -> T:
        """Run a step and return what it returns. Keep the last message of each direction."""
        stage: Any = self.stage
        arrived = stage._arrived

        def kept(way: str, microbatch: int) -> Tensor:
            buffer: Tensor = arrived(way, microbatch)
            self.arrived[way] = buffer.clone()
            return buffer

        stage._arrived = kept
        try:
            return step()
        finally:
            del stage._arrived

    def timed(self, call: Callable[[], object]) -> Span:
        """Call, and return the marks before and behind that. Nothing waits for the device, as in a step."""
        time.sleep(self.wait_s)
        begin = self.clock.mark()
        call()
        return begin, self.clock.mark()

    def record(self, part: str, spans: Iterable[Span]) -> None:
        """Record the time between marks, after all calls were made."""
        self.times[part] += [self.clock.us(*span) for span in list(spans)]

    def phases(self) -> None:
        """Measure the stage's forward and backward passes, codecs included."""
        held = self.pipeline.plan.stages[self.stage.stage_index].in_flight
        numbers = [i % self.pipeline.plan.microbatches for i in range(self.turns + held - 1)]
        for number in numbers[: held - 1]:
            self.forward(number)
        pairs = [
            (self.timed(partial(self.forward, number)), self.timed(partial(self.backward, oldest)))
            for number, oldest in zip(numbers[held - 1 :], numbers, strict=False)
        ]
        for number in numbers[self.turns :]:
            self.backward(number)
        for part, spans in zip(("forward", "backward"), zip(*pairs, strict=True), strict=True):
            self.record(part, spans)

    def forward(self, microbatch: int) -> None:
        if self.stage.before is not None:
            self.arrive("forward", microbatch)
        outputs = self.stage.forward_one_chunk(microbatch, self.inputs, save_forward_output=False)
        self.stage.get_fwd_send_ops(microbatch)
        if self.stage.is_last:
            self.losses[microbatch] = self.pipeline.loss(outputs, self.target)

    def backward(self, microbatch: int) -> None:
        if self.stage.after is not None:
            self.arrive("backward", microbatch)
        self.stage.backward_one_chunk(microbatch, loss=self.losses.pop(microbatch, None))
        self.stage.get_bwd_send_ops(microbatch)

    def arrive(self, way: str, microbatch: int) -> None:
        operation: Any = None  # nobody asks for it
        message = self.arrived[way]
        self.stage.messages[way, microbatch] = self.lanes.buffer(message.nbytes).copy_(message), operation

    def optimizer(self) -> None:
        """Measure the optimizer's step at a learning rate of zero."""
        if (optimizer := self.pipeline.optimizer) is None:
            return
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        self.record("optimizer", (self.timed(optimizer.step) for _ in range(self.turns)))
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def ties(self) -> None:
        """Measure the sum of the gradients of tied parameters."""
        if self.pipeline.ties:
            self.record("ties", (self.timed(self.pipeline._add_up_ties) for _ in range(self.turns)))

    def messages(self) -> None:
        """Measure a message to the next stage and one back, one link after the other."""
        rank = self.pipeline.rank
        for left in range(self.pipeline.world - 1):
            dist.barrier()
            if rank == left and (after := self.stage.after) is not None:
                self.times["next"] += self.message(rank + 1, after.forward.nbytes, first=True)
                self.times["back"] += self.message(rank + 1, after.backward.nbytes, first=True)
            elif rank == left + 1 and (before := self.stage.before) is not None:
                self.message(rank - 1, before.forward.nbytes, first=False)
                self.message(rank - 1, before.backward.nbytes, first=False)

    def message(self, peer: int, nbytes: int, first: bool) -> list[float]:
        """Return half of the microseconds that a message takes to a process and back, for each turn.

        Both processes call this. first: this one sends first.
        """
        tensor = torch.zeros(nbytes, dtype=torch.uint8, device=self.pipeline.device)
        arrivals = [self.lanes.receive(nbytes, peer, self.stage.group, PING)[1] for _ in range(self.turns)]
        times: list[float] = []
        for arrival in arrivals:
            begin = time.perf_counter()
            for turn in (first, not first):
                self.exchange(self.lanes.send(tensor, peer, self.stage.group, PING) if turn else arrival)
            times.append(1e6 * (time.perf_counter() - begin) / 2)
        return times

    def exchange(self, operation: dist.P2POp) -> None:
        """Run an operation as PyTorch's schedules do, and wait for it. Over Gloo, nobody waits for what is
        sent."""
        for work in dist.batch_isend_irecv([operation]):
            work.wait()
        if not self.lanes.gloo:
            synchronize(self.pipeline.device)

    def measure(self) -> None:
        """Measure all parts, while the other processes measure theirs."""
        dist.barrier()
        self.phases()
        dist.barrier()
        self.ties()
        self.messages()
        self.optimizer()

    def parts(self) -> Parts:
        """Return the medians of all that was measured."""

        def median(part: str) -> float:
            return statistics.median(self.times[part]) if self.times[part] else 0.0

        return Parts(
            stage=(median("forward"), median("backward")),
            link=(median("next"), median("back")),
            ties=median("ties"),
            optimizer=median("optimizer"),
        )
