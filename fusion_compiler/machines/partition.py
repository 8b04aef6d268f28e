"""`partition`, which cuts a model over machines."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from fusion_compiler.errors import InvalidOptionError, MachinesError, NotCallableError
from fusion_compiler.ir.decision import Decision, Outcome
from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.plan_text import human_bytes
from fusion_compiler.machines.cut import Cuts, Place, best_order, improve, orders, price
from fusion_compiler.machines.estimate import Times, estimate, measure, spec_of
from fusion_compiler.machines.layout import Layout
from fusion_compiler.machines.pipeline import Pipeline
from fusion_compiler.machines.plan import Link, Machine, Schedule
from fusion_compiler.machines.reasons import equal_layers, reasons
from fusion_compiler.machines.simulate import Step, in_flight, simulate
from fusion_compiler.machines.text import timed
from fusion_compiler.machines.workload import Workload, repeatable, workload

ADAM_BYTES = 8  # two float32 moments for each element
AUTO = (Schedule.ONE_F_ONE_B, Schedule.EAGER, Schedule.GPIPE)  # by the activations that they hold
LOCAL = {  # the least and the most stages that each machine has
    Schedule.INTERLEAVED: (2, math.inf),
    Schedule.ZERO_BUBBLE: (1, math.inf),
    Schedule.ZBV: (2, 2),
}


def partition(
    model: object,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    machines: Sequence[Machine],
    links: Link | Sequence[Link],
    microbatches: int = 8,
    schedule: str = "1f1b",
    stages_per_machine: int = 1,
    cuts: Sequence[str] | None = None,
    repeated: Collection[str] | None = None,
    measured: bool = False,
    optimizer_bytes: float = ADAM_BYTES,
) -> Pipeline:
    """Cut a model into the stages of a pipeline over machines, and predict the step.

    Every stage fits into its machine's memory. Among all cuts of the model's operators in their order, those
    are searched that make the slowest stage or link as fast as possible, and then those near them whose
    predicted step is shorter.

    args, kwargs: the arguments of one microbatch, of fixed shapes; on the meta device, if the model is too.
    machines: what runs the stages. Their order in the pipeline is chosen: machines with fast links between
        them are neighbours.
    links: between the machines; one of them without names is for all pairs that no other names.
    microbatches: how many make a step. schedule: "gpipe", "1f1b", "eager-1f1b", "interleaved", "zero-bubble"
        or "zbv"; "auto" for that of the first three whose predicted step is shortest.
    stages_per_machine: 1; more for "interleaved", 1 or more for "zero-bubble", both with `microbatches` a
        multiple of the rounds; 2 for "zbv".
    cuts: the operators before which the model is cut, by their names in the exported graph, instead of the
        best ones; the machines keep their order.
    repeated: the operators that each stage which reads them computes. The default is those that take less
        to compute than to send. With `cuts`, machines and links, another process makes the same stages.
    measured: run the model on this machine and time each operator, on the model's device, instead of
        estimating it from its arithmetic and bytes. All machines have these times then, divided by their
        `speed`.
    optimizer_bytes: what the optimizer keeps for each element of a trained parameter.
    A model in training mode is trained: memory holds gradients, optimizer state and the activations of the
    microbatches in flight, and gradients cross the cuts.

    Raises NotCallableError, NotExportableError, InvalidOptionError, UnsupportedDeviceError, and MachinesError
    if a pair of machines has no link, the model does not fit, or a model on the meta device is to be
    measured.

    Sources: FusionLLM (arXiv 2410.12707) for the machines' order and the estimate, GPipe (arXiv 1811.06965),
    1F1B and its interleaved form (arXiv 2104.04473), zero bubble (arXiv 2401.10241).
    """
    if not isinstance(model, nn.Module):
        raise NotCallableError(got=type(model).__name__)
    orders = [
        check_schedule(name, stages_per_machine, len(machines), microbatches)
        for name in (AUTO if schedule == "auto" else (schedule,))
    ]
    if len({m.name for m in machines}) < len(machines):
        raise InvalidOptionError(option="machines", value=machines, expected="machines of different names")
    table = link_table(machines, [links] if isinstance(links, Link) else list(links))
    work = workload(model, args, kwargs or {}, training=model.training)
    kinds = tuple(dict.fromkeys((m.device, m.speed) for m in machines))
    times = times_of(work, kinds, measure_here(work, args, kwargs or {}) if measured else None)
    if repeated is None:
        slowest = max(([forward for forward, _ in each] for each in times), key=sum)
        send = min(table.values(), key=lambda link: link.bytes_per_s, default=None)
        repeated = repeatable(work, slowest, send.us) if send else ()
    layout = Layout.of(work, times, frozenset(repeated), optimizer_bytes)
    return shortest(
        [
            Problem(layout, tuple(machines), kinds, table, order, microbatches, stages_per_machine)
            for order in orders
        ],
        cuts,
    )


@dataclass(frozen=True)
class Problem:
    """A problem is a model, machines with links, and a schedule. kinds: devices and speeds of machines, for
    each of which the layout has times. ranks: always the machines in the order of the pipeline, by their
    numbers."""

    layout: Layout
    machines: tuple[Machine, ...]
    kinds: tuple[tuple[DeviceSpec | str, float], ...]
    table: Mapping[tuple[int, int], Link]
    schedule: Schedule
    microbatches: int
    local: int

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        count = len(self.machines)
        return tuple(
            in_flight(self.schedule, s, count * self.local, count, self.microbatches)
            for s in range(count * self.local)
        )

    def places(self, ranks: Sequence[int]) -> list[Place]:
        """Return the place of each stage."""
        places, previous = [], None
        for stage, flight in enumerate(self.in_flight):
            rank = ranks[self.schedule.rank(stage, len(ranks))]
            m = self.machines[rank]
            link = None if previous in (None, rank) else self.table[previous, rank]
            kind = self.kinds.index((m.device, m.speed))
            places.append(Place(rank, kind, link, m.memory_bytes / self.local, flight))
            previous = rank
        return places

    def step(self, places: Sequence[Place], cuts: Cuts) -> Step:
        stages, links = self.layout.chain.times(places, cuts.at)
        training = bool(self.layout.work.differentiable)
        latencies = [place.link.latency_us if place.link else 0.0 for place in places[1:]]
        return simulate(
            self.schedule, stages, links, len(self.machines), self.microbatches, training, latencies
        )

    def best(self) -> tuple[tuple[int, ...], Cuts]:
        """Return the best order of the machines, and the best cuts for it. Raise MachinesError if no cuts
        fit."""
        chain, stages = self.layout.chain, len(self.in_flight)
        if chain.groups < stages:
            detail = f"{stages} stages are too many for {chain.groups} operators"
            raise MachinesError(detail=detail, todo="use fewer machines")
        best = best_order(chain, orders(self.machines, lambda a, b: self.table[a, b]), self.places)
        if best is None:
            need = human_bytes(int(chain.state[0, -1] + chain.saved[0, -1]))
            raise MachinesError(
                detail=f"the model does not fit: it takes {need} with one microbatch in flight",
                todo="use more machines or memory, smaller microbatches, or a schedule with fewer in flight",
            )
        ranks, cuts = best
        if not cuts.at:
            return best
        places = self.places(ranks)
        equal = equal_layers(self.layout, places)
        starts = [cuts, *([equal] if equal and equal.us < float("inf") else [])]
        return ranks, improve(chain, places, starts, lambda c: self.step(places, c).us)

    def fixed(self, names: Sequence[str]) -> tuple[tuple[int, ...], Cuts]:
        """Return the machines in their order, and the cuts before these operators. Raise MachinesError if the
        model cannot be cut so, or a stage does not fit."""
        borders, positions = self.layout.borders, self.layout.work.position
        wrong = [name for name in names if positions.get(name) not in borders[1:-1]]
        at = [borders.index(positions[name]) for name in names if name not in wrong]
        if wrong or at != sorted(set(at)) or len(at) != len(self.in_flight) - 1:
            raise MachinesError(
                detail=f"the model cannot be cut before {', '.join(wrong or names)}",
                todo=f"name {len(self.in_flight) - 1} operators of the plan's graph in their order, none "
                "within a list of tensors or between a tensor and a write into it",
            )
        ranks = tuple(range(len(self.machines)))
        cuts = price(self.layout.chain, self.places(ranks), at)
        if cuts.us == float("inf"):
            raise MachinesError(
                detail="a stage does not fit in its machine's memory", todo="choose other cuts"
            )
        return ranks, cuts

    def plan(self, ranks: tuple[int, ...], cuts: Cuts) -> Pipeline:
        layout, places = self.layout, self.places(ranks)
        names = [m.name for m in self.machines]
        step = self.step(places, cuts)
        why = reasons(layout, places, cuts, lambda c: self.step(places, c).us, self.microbatches)
        if ranks != tuple(sorted(ranks)):
            text = f"the machines are in the order {' '.join(names[rank] for rank in ranks)}"
            why = (*why, Decision("order", "", Outcome.DONE, text))
        return Pipeline(
            model=layout.work.name,
            machines=tuple(self.machines[rank] for rank in ranks),
            stages=layout.stages(places, names, cuts.at),
            edges=layout.edges(places, cuts.at),
            microbatches=self.microbatches,
            schedule=self.schedule,
            training=bool(layout.work.differentiable),
            events=step.events,
            step_us=step.us,
            bubble=step.bubble,
            decisions=why,
            graph=layout.work.graph,
        )


def shortest(problems: Sequence[Problem], cuts: Sequence[str] | None) -> Pipeline:
    """Return the plan of the problem whose step is shortest; of plans whose steps differ by less than 1%, the
    first. Raise MachinesError if no problem has a plan."""
    plans: list[Pipeline] = []
    for number, problem in enumerate(problems, 1):
        try:
            plans.append(problem.plan(*(problem.best() if cuts is None else problem.fixed(cuts))))
        except MachinesError:
            if number == len(problems) and not plans:
                raise
    us = min(plan.step_us for plan in plans)
    best = next(plan for plan in plans if plan.step_us <= 1.01 * us)
    others: list[Decision] = []
    for plan in plans:
        longer = plan.step_us - best.step_us
        reason = f"the step would take {timed(plan.step_us)}, {plan.step_us / best.step_us:.2f} times as long"
        if plan is not best:
            others.append(Decision("schedule", plan.schedule, Outcome.REFUSED, reason, -longer))
    return replace(best, decisions=(*best.decisions, *others))


def check_schedule(schedule: str, local: int, machines: int, microbatches: int) -> Schedule:
    """Return the schedule by its name. Raise InvalidOptionError if it cannot run so many microbatches."""
    if schedule not in tuple(Schedule):
        raise InvalidOptionError(
            option="schedule", value=schedule, expected=f"one of {', '.join(Schedule)}"
        )
    order = Schedule(schedule)
    if machines < 1:
        raise InvalidOptionError(option="machines", value=machines, expected="at least one machine")
    least, most = LOCAL.get(order, (1, 1))
    if not least <= local <= most:
        expected = "at least 2 for 'interleaved', at least 1 for 'zero-bubble', 2 for 'zbv', 1 for the others"
        raise InvalidOptionError(option="stages_per_machine", value=local, expected=expected)
    in_rounds = order in (Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE)
    if microbatches < 1 or (in_rounds and microbatches % max(1, microbatches // machines)):
        expected = "a positive number; for 'interleaved' and 'zero-bubble' a multiple of "
        expected += "microbatches // machines"
        raise InvalidOptionError(option="microbatches", value=microbatches, expected=expected)
    return order


def link_table(machines: Sequence[Machine], links: Sequence[Link]) -> dict[tuple[int, int], Link]:
    """Return the link of each pair of machines, in both orders. Raise MachinesError if there is none."""
    numbers = {m.name: i for i, m in enumerate(machines)}
    default = next((link for link in links if link.between is None), None)
    table = {} if default is None else dict.fromkeys(itertools.permutations(range(len(machines)), 2), default)
    for link in links:
        if link.between is None:
            continue
        if not set(link.between) <= numbers.keys():
            raise MachinesError(
                detail=f"a link connects {' and '.join(link.between)}, not two of the machines",
                todo=f"name two of {', '.join(numbers)}",
            )
        a, b = (numbers[name] for name in link.between)
        table[a, b] = table[b, a] = link
    for a, b in itertools.combinations(range(len(machines)), 2):
        if (a, b) not in table:
            raise MachinesError(
                detail=f"no link connects {machines[a].name} and {machines[b].name}",
                todo="add a Link of both, or one with between=None for all pairs",
            )
    return table


def measure_here(work: Workload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Times:
    """Return the operators' times on the model's device. Raise MachinesError if that is the meta device."""
    tensors = [t for n in work.attributes if isinstance(t := work.tensor(n), torch.Tensor)]
    if any(t.is_meta for t in tensors):
        detail = "a model on the meta device cannot be measured"
        raise MachinesError(detail=detail, todo="give it real parameters, or leave out measured=True")
    return measure(work, args, kwargs, tensors[0].device if tensors else torch.device("cpu"))


def times_of(
    work: Workload, kinds: Sequence[tuple[DeviceSpec | str, float]], here: Times | None
) -> tuple[Times, ...]:
    """Return the operators' times on each kind of machine. here: as measured on this machine."""
    pairs = [(here or estimate(work, spec_of(device)), speed) for device, speed in kinds]
    return tuple(tuple((f / speed, b / speed) for f, b in each) for each, speed in pairs)
