"""The data of a pipeline over machines: the machines and links, the stages and what crosses between them, and
the plan that `fc.partition` returns.

Times are microseconds and sizes are bytes. The times of a stage and of an edge are for one microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch import fx

from fusion_compiler.ir.decision import Decisions
from fusion_compiler.ir.device import DeviceSpec


@dataclass(frozen=True)
class Machine:
    """A machine runs one or more stages: a GPU, or a process on a CPU.

    device: its row of hardware numbers, or the name of a row ("h200").
    memory_bytes: what parameters, gradients, optimizer state and activations may take together.
    speed: operators take their predicted time divided by `speed`.
    """

    name: str
    device: DeviceSpec | str = "h200"
    memory_bytes: float = float("inf")
    speed: float = 1.0


@dataclass(frozen=True)
class Link:
    """A link connects machines: a message of n bytes takes `latency_us + n / bytes_per_s`. Both directions
    have this bandwidth at the same time.

    between: the names of two machines; None for every pair that no other link names.
    """

    bytes_per_s: float
    latency_us: float
    between: tuple[str, str] | None = None

    def us(self, nbytes: float) -> float:
        """Return the microseconds that a message takes; an empty one is not sent."""
        return self.latency_us + 1e6 * nbytes / self.bytes_per_s if nbytes else 0.0


class Schedule(StrEnum):
    """The order in which a machine runs the microbatches of its stages, by the names of PyTorch's classes:
    ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble and
    ScheduleZBVZeroBubble.

    Eager 1F1B (arXiv 2211.05322) begins with twice as many forward passes as 1F1B, so that messages are on
    their way while machines compute."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    EAGER = "eager-1f1b"
    INTERLEAVED = "interleaved"
    ZERO_BUBBLE = "zero-bubble"
    ZBV = "zbv"

    @property
    def splits_backward(self) -> bool:
        """True if the gradients of a stage's weights are computed later than those of its inputs."""
        return self in (Schedule.ZERO_BUBBLE, Schedule.ZBV)

    def rank(self, stage: int, machines: int) -> int:
        """Return the place of a stage's machine in the pipeline. Every second row of stages goes back in
        `zbv`, so that a machine has the first stage and the last one."""
        row, place = divmod(stage, machines)
        return machines - 1 - place if self is Schedule.ZBV and row % 2 else place


class Phase(StrEnum):
    """A phase of a microbatch in a stage. Zero-bubble schedules run two phases, INPUT and WEIGHT, instead of
    BACKWARD: the gradients of the stage's inputs, and later those of its weights."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"


@dataclass(frozen=True)
class Crossing:
    """A crossing is a tensor that goes from one stage to the next.

    name: its node in the exported graph. differentiable: its gradient comes back.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Stage:
    """A stage is a run of operators, in the order of the exported graph, on one machine.

    number: from 0, in the order of the forward pass. machine: the machine's name.
    operators: names of the exported graph's nodes, those that are `repeated` first: cheap producers of
        earlier stages, which are computed again here.
    modules: the user's modules that the operators belong to.
    parameters, buffers: qualified names, as in `model.named_parameters()`; a tied parameter has one name and
        is in every stage that reads it.
    memory_bytes: parameters, gradients, optimizer state, and the activations of `in_flight` microbatches.
    """

    number: int
    machine: str
    operators: tuple[str, ...]
    repeated: tuple[str, ...]
    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    parameter_bytes: int
    forward_us: float
    backward_us: float
    memory_bytes: int
    in_flight: int

    @property
    def us(self) -> float:
        return self.forward_us + self.backward_us


@dataclass(frozen=True)
class Edge:
    """An edge is what goes from a stage to the next: tensors forward, gradients of some of them backward.

    A tensor that a later stage reads goes through every stage between. `tensors` has the order in which the
    source's module returns them and the target's module takes them. latency_us: the part of both times that
    keeps no other message waiting.
    """

    source: int
    target: int
    tensors: tuple[Crossing, ...]
    forward_us: float
    backward_us: float
    latency_us: float = 0.0

    @property
    def forward_bytes(self) -> int:
        return sum(t.bytes for t in self.tensors)

    @property
    def backward_bytes(self) -> int:
        return sum(t.bytes for t in self.tensors if t.differentiable)

    @property
    def us(self) -> float:
        """Return the time of the slower direction."""
        return max(self.forward_us, self.backward_us)


@dataclass(frozen=True)
class Event:
    """An event is one phase of a microbatch in a stage, in the predicted step."""

    stage: int
    phase: Phase
    microbatch: int
    start_us: float
    end_us: float


@dataclass(frozen=True)
class PipelinePlan:
    """The plan says which machine runs which operators, and what the step is predicted to take.

    stages, edges: in the order of the forward pass; edge i goes from stage i to stage i + 1. Stage i runs on
        machine `rank(i)` of `machines`, which are in the order of the pipeline.
    events: the predicted step, in the order of their start.
    step_us: when the last event ends. bubble: the share of the step in which a machine computes nothing, of
        all machines.
    graph: the exported model, which the stages are parts of; it holds the model's own parameters.
    """

    model: str
    machines: tuple[Machine, ...]
    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]
    microbatches: int
    schedule: Schedule
    training: bool
    events: tuple[Event, ...]
    step_us: float
    bubble: float
    decisions: Decisions
    graph: fx.GraphModule = field(repr=False, compare=False)

    @property
    def cuts(self) -> tuple[str, ...]:
        """Return the operators before which the model is cut, as `fc.partition(..., cuts=)` takes them."""
        return tuple(next(n for n in s.operators if n not in s.repeated) for s in self.stages[1:])

    @property
    def repeated(self) -> frozenset[str]:
        """Return the operators that stages compute again, as `fc.partition(..., repeated=)` takes them."""
        return frozenset(n for s in self.stages for n in s.repeated)

    def rank(self, stage: int) -> int:
        """Return the place of a stage's machine in `machines`."""
        return self.schedule.rank(stage, len(self.machines))
