"""Simulate a step of a pipeline: when each microbatch runs in each stage, and when it is through.

A machine runs the phases of its stages in the schedule's order, each as soon as its input has arrived. A
message takes alpha + beta * bytes, and a link carries one message after the other in each direction, while
the machines compute: it is busy for beta * bytes, and the latencies alpha of messages overlap. The orders are
torch.distributed.pipelining's. The gradients of a stage's inputs are taken to need half of its backward pass,
and those of its weights the other half; the first stage has no gradients of inputs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble

from fusion_compiler.machines.plan import Event, Phase, Schedule

Action = tuple[int, Phase, int]  # stage, phase, microbatch
Pair = tuple[float, float]
F, B, INPUT, WEIGHT = Phase.FORWARD, Phase.BACKWARD, Phase.INPUT, Phase.WEIGHT
ZERO_BUBBLE: dict[Schedule, Any] = {
    Schedule.ZERO_BUBBLE: ScheduleInterleavedZeroBubble,
    Schedule.ZBV: ScheduleZBVZeroBubble,
}
PHASES = {"FORWARD": F, "BACKWARD_INPUT": INPUT, "BACKWARD_WEIGHT": WEIGHT}


@dataclass(frozen=True)
class Step:
    """A simulated step. bubble: the share of the machines' time in which they compute nothing."""

    events: tuple[Event, ...]
    us: float
    bubble: float


def in_flight(schedule: Schedule, stage: int, stages: int, machines: int, microbatches: int) -> int:
    """Return the most microbatches whose activations a stage holds at a time."""
    if schedule is Schedule.GPIPE:
        return microbatches
    most = held = 0
    rank = schedule.rank(stage, machines)
    for number, phase, _ in actions(schedule, rank, stages, machines, microbatches):
        if number == stage and phase is not INPUT:
            held += 1 if phase is F else -1
            most = max(most, held)
    return most


def actions(
    schedule: Schedule, machine: int, stages: int, machines: int, microbatches: int, training: bool = True
) -> list[Action]:
    """Return the actions of a machine in order. Stage s is on machine `schedule.rank(s, machines)`."""
    local = stages // machines
    if not training or schedule is Schedule.GPIPE:
        numbers = [s for s in range(stages) if schedule.rank(s, machines) == machine]
        forward = [(s, F, m) for s in numbers for m in range(microbatches)]
        return forward + [(s, B, m) for s in reversed(numbers) for m in range(microbatches) if training]
    if schedule.splits_backward:
        return split_actions(schedule, machine, stages, machines, microbatches)
    rounds = max(1, microbatches // machines) if local > 1 else 1
    block = microbatches // rounds  # microbatches that one stage runs before the machine's next one does
    total = local * microbatches
    if local > 1 or schedule is Schedule.EAGER:
        warmup = min(total, (local - 1) * block + 2 * (machines - 1 - machine))
    else:
        warmup = min(total, machines - 1 - machine)

    def ordered(phase: Phase) -> list[Action]:
        numbers = range(local) if phase is F else range(local - 1, -1, -1)
        return [
            (s * machines + machine, phase, r * block + m)
            for r in range(rounds)
            for s in numbers
            for m in range(block)
        ]

    forward, backward = ordered(F), ordered(B)
    order = forward[:warmup]
    for i in range(total):
        order += [*forward[warmup + i : warmup + i + 1], backward[i]]
    return order


def split_actions(
    schedule: Schedule, machine: int, stages: int, machines: int, microbatches: int
) -> list[Action]:
    """Return the actions of a machine in a zero-bubble schedule, as PyTorch's class orders them."""
    scheduled: Any = SimpleNamespace(
        pp_group_size=machines,
        num_stages=stages,
        n_local_stages=stages // machines,
        _n_microbatches=microbatches,
        microbatches_per_round=microbatches // max(1, microbatches // machines),
    )
    order = ZERO_BUBBLE[schedule]._calculate_single_rank_operations(scheduled, machine)
    return [
        (a.stage_index, PHASES[a.computation_type.name], a.microbatch_index) for a in order if a is not None
    ]


def simulate(
    schedule: Schedule,
    stages: Sequence[Pair],
    links: Sequence[Pair],
    machines: int,
    microbatches: int,
    training: bool = True,
    latencies: Sequence[float] = (),
) -> Step:
    """Return a step. stages, links: their microseconds for a microbatch, forward and backward; link i is
    between the stages i and i + 1, and latencies[i] is the part of its messages' time that keeps no other
    message waiting. Stage s is on machine `schedule.rank(s, machines)`."""
    count = len(stages)
    queues = [actions(schedule, m, count, machines, microbatches, training) for m in range(machines)]
    arrived: dict[Action, float] = {(0, F, m): 0.0 for m in range(microbatches)}
    free = [0.0] * machines
    link_free: dict[tuple[int, int], float] = defaultdict(float)
    events: list[Event] = []
    backward = INPUT if schedule.splits_backward else B
    heads = [0] * machines

    def send(source: int, action: Action, us: float, end: float) -> None:
        way = (schedule.rank(source, machines), schedule.rank(action[0], machines))
        latency = min(us, latencies[min(source, action[0])]) if latencies else 0.0
        link_free[way] = max(end, link_free[way]) + us - latency
        arrived[action] = link_free[way] + latency

    def run(machine: int) -> bool:
        """Run the machine's next phase if its input has been sent."""
        if heads[machine] == len(queues[machine]):
            return False
        stage, phase, m = action = queues[machine][heads[machine]]
        if action not in arrived:
            return False
        heads[machine] += 1
        start = max(free[machine], arrived[action])
        end = free[machine] = start + phase_us(phase, stage, stages[stage])
        events.append(Event(stage, phase, m, start, end))
        if phase is INPUT:
            arrived[stage, WEIGHT, m] = end
        if phase is F and stage + 1 < count:
            send(stage, (stage + 1, F, m), links[stage][0], end)
        elif phase is F:
            arrived[stage, backward, m] = end
        elif stage and phase is backward:
            send(stage, (stage - 1, backward, m), links[stage - 1][1], end)
        return True

    while sum(run(machine) for machine in range(machines)):
        pass
    assert heads == [len(queue) for queue in queues], "the schedule waits for itself"
    us = max(event.end_us for event in events)
    busy = sum(event.end_us - event.start_us for event in events)
    return Step(tuple(sorted(events, key=lambda e: (e.start_us, e.stage))), us, 1 - busy / (machines * us))


def phase_us(phase: Phase, stage: int, us: Pair) -> float:
    """Return how long a phase takes. us: the stage's forward and backward passes."""
    if phase in (F, B):
        return us[phase is B]
    shares = (0.0, 1.0) if stage == 0 else (0.5, 0.5)
    return us[1] * shares[phase is WEIGHT]
