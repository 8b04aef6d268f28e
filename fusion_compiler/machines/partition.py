"""`partition`, which cuts a model over machines."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fusion_compiler.errors import InvalidOptionError, MachinesError, NotCallableError
from fusion_compiler.machines.cut import Cuts, Place, best_order, improve, orders, price
from fusion_compiler.machines.estimate import Times, estimate, measure, spec_of
from fusion_compiler.machines.layout import Layout
from fusion_compiler.machines.pipeline import Pipeline
from fusion_compiler.machines.plan import Link, Machine, Schedule
from fusion_compiler.machines.reasons import equal_layers, reasons
from fusion_compiler.machines.simulate import Step, in_flight, simulate
from fusion_compiler.machines.workload import Workload, repeatable, workload

ADAM_BYTES = 8  # two float32 moments for each element


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
    microbatches: how many make a step. schedule: "gpipe", "1f1b" or "interleaved".
    stages_per_machine: 1, or more for "interleaved", with `microbatches` a multiple of the rounds.
    cuts: the operators before which the model is cut, by their names in the exported graph, instead of the
        best ones; the machines keep their order.
    measured: measure each operator on this machine, on the model's device, instead of estimating it from its
        arithmetic and bytes. All machines have these times then, divided by their `speed`.
    optimizer_bytes: what the optimizer keeps for each element of a trained parameter.
    A model in training mode is trained: memory holds gradients, optimizer state and the activations of the
    microbatches in flight, and gradients cross the cuts.

    Raises NotCallableError, NotExportableError, InvalidOptionError, UnsupportedDeviceError, and MachinesError
    if a pair of machines has no link or the model does not fit.

    Sources: FusionLLM (arXiv 2410.12707) for the machines' order and the estimate, GPipe (arXiv 1811.06965),
    1F1B and its interleaved form (arXiv 2104.04473).
    """
    if not isinstance(model, nn.Module):
        raise NotCallableError(got=type(model).__name__)
    order = check_schedule(schedule, stages_per_machine, len(machines), microbatches)
    named = {m.name: i for i, m in enumerate(machines)}
    if len(named) < len(machines):
        raise InvalidOptionError(option="machines", value=list(named), expected="machines of different names")
    table = link_table(machines, [links] if isinstance(links, Link) else list(links))
    work = workload(model, args, kwargs or {}, training=model.training)
    kinds = {(m.device, m.speed): m for m in reversed(machines)}
    layout = layout_of(work, list(kinds.values()), table, measured, optimizer_bytes)
    count = len(machines) * stages_per_machine
    held = [in_flight(order, s, count, len(machines), microbatches) for s in range(count)]

    def places(ranks: Sequence[int]) -> list[Place]:
        ranks = list(ranks) * stages_per_machine
        pairs = [None, *itertools.pairwise(ranks)]
        return [
            place(rank, table[pair] if pair and pair[0] != pair[1] else None, flight)
            for rank, pair, flight in zip(ranks, pairs, held, strict=True)
        ]

    def place(rank: int, link: Link | None, flight: int) -> Place:
        m = machines[rank]
        kind = list(kinds).index((m.device, m.speed))
        return Place(rank, kind, link, m.memory_bytes / stages_per_machine, flight)

    ranks, chosen = choose(layout, machines, table, places, cuts)
    at = places(ranks)
    names = [m.name for m in machines]

    def step(cuts: Cuts) -> Step:
        stages, edges = layout.chain.times(at, cuts.at)
        return simulate(order, stages, edges, len(machines), microbatches, model.training)

    if cuts is None and chosen.at:
        equal = equal_layers(layout, at)
        starts = [chosen, *([equal] if equal and equal.us < float("inf") else [])]
        chosen = improve(layout.chain, at, starts, lambda c: step(c).us)
    result = step(chosen)
    return Pipeline(
        model=type(model).__name__,
        machines=tuple(machines[i] for i in ranks),
        stages=layout.stages(at, names, chosen.at),
        edges=layout.edges(at, chosen.at),
        microbatches=microbatches,
        schedule=order,
        training=model.training,
        events=result.events,
        step_us=result.us,
        bubble=result.bubble,
        decisions=reasons(layout, at, chosen, lambda c: step(c).us, machines, ranks, microbatches),
        graph=work.graph,
    )


def check_schedule(schedule: str, local: int, machines: int, microbatches: int) -> Schedule:
    """Return the schedule by its name. Raise InvalidOptionError if it cannot run so many microbatches."""
    if schedule not in tuple(Schedule):
        raise InvalidOptionError(
            option="schedule", value=schedule, expected="one of gpipe, 1f1b, interleaved"
        )
    order = Schedule(schedule)
    if machines < 1:
        raise InvalidOptionError(option="machines", value=machines, expected="at least one machine")
    if (local > 1) != (order is Schedule.INTERLEAVED) or local < 1:
        expected = "at least 2 with schedule='interleaved', and 1 with the others"
        raise InvalidOptionError(option="stages_per_machine", value=local, expected=expected)
    if microbatches < 1 or (local > 1 and microbatches % max(1, microbatches // machines)):
        expected = "a positive number; for 'interleaved' a multiple of microbatches // machines"
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
                detail=f"a link names {' and '.join(link.between)}",
                todo=f"the machines are {', '.join(numbers)}",
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


def layout_of(
    work: Workload,
    kinds: Sequence[Machine],
    table: Mapping[tuple[int, int], Link],
    measured: bool,
    extra: float,
) -> Layout:
    if measured:
        times = measure(work, device_of(work))
        by_kind = [scaled(times, m.speed) for m in kinds]
    else:
        by_kind = [scaled(estimate(work, spec_of(m.device)), m.speed) for m in kinds]
    slowest = max(by_kind, key=lambda t: sum(t[0]))
    send = min(table.values(), key=lambda link: link.bytes_per_s, default=None)
    again = repeatable(work, slowest[0], send.us) if send else frozenset[str]()
    return Layout(work, tuple(by_kind), again, extra)


def device_of(work: Workload) -> torch.device:
    tensors = [t for n in work.attributes if isinstance(t := work.tensor(n), torch.Tensor)]
    return tensors[0].device if tensors else torch.device("cpu")


def scaled(times: Times, speed: float) -> Times:
    forward, backward = times
    return tuple(us / speed for us in forward), tuple(us / speed for us in backward)


def choose(
    layout: Layout, machines: Sequence[Machine], table: Mapping[tuple[int, int], Link], places: Any, cuts: Any
) -> tuple[tuple[int, ...], Cuts]:
    """Return the order of the machines, and the cuts: the best ones, or those that are given by name."""
    stages = len(places(range(len(machines))))
    if layout.chain.groups < stages:
        raise MachinesError(
            detail=f"{stages} stages are too many for {layout.chain.groups} operators",
            todo="use fewer machines",
        )
    if cuts is not None:
        at = [group_before(layout, name) for name in cuts]
        return tuple(range(len(machines))), price(layout.chain, places(range(len(machines))), at)
    best = best_order(layout.chain, orders(machines, lambda a, b: table[a, b]), places)
    if best is None:
        chain = layout.chain
        need = (chain.state[0, -1] + chain.saved[0, -1]) / 1e9
        raise MachinesError(
            detail=f"the model does not fit: it takes {need:.2f} GB with one microbatch in flight",
            todo="use more machines or memory, smaller microbatches, or a schedule with fewer in flight",
        )
    return best


def group_before(layout: Layout, name: str) -> int:
    position = layout.work.position.get(name)
    if position is None or position not in layout.borders:
        raise MachinesError(
            detail=f"the model cannot be cut before {name}",
            todo="name an operator of plan.graph that no list of tensors or write in place reaches across",
        )
    return layout.borders.index(position)
