"""Say why a model is cut where it is: what the neighbouring cuts and equal layers would take, what is
computed again, which parameters live on several stages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn

from fusion_compiler.ir.decision import Decision, Decisions, Outcome
from fusion_compiler.ir.plan_text import human_bytes
from fusion_compiler.machines.cut import Cuts, Place, price
from fusion_compiler.machines.layout import Layout
from fusion_compiler.machines.text import timed
from fusion_compiler.machines.workload import module_path

CUT, EQUAL_LAYERS, REPEATED, TIED = "cut", "equal layers", "computed again", "tied parameter"
ALONE, SHARED = "one machine", "shared buffer"
NEIGHBOURS = 40  # groups on either side of a cut; the best one is shown


def reasons(
    layout: Layout,
    places: Sequence[Place],
    chosen: Cuts,
    step_us: Callable[[Cuts], float],
    microbatches: int,
) -> Decisions:
    """Return the decisions of a plan. step_us: the predicted step of cuts. ranks: the order of the
    machines."""
    decisions = [
        *neighbours(layout, places, chosen, step_us),
        *compared(layout, places, chosen, step_us),
        *alone(layout, places, microbatches, step_us(chosen)),
        *repeats(layout, chosen),
        *ties(layout, chosen),
    ]
    return tuple(decisions)


def neighbours(
    layout: Layout, places: Sequence[Place], chosen: Cuts, step_us: Callable[[Cuts], float]
) -> Iterator[Decision]:
    """Yield the comparison with each cut moved to the best place before it, and to the best one after it, in
    another module."""
    ours = step_us(chosen)
    for number, group in enumerate(chosen.at):
        lower, upper = ((0, *chosen.at)[number], (*chosen.at, layout.chain.groups)[number + 1])
        before, behind = range(lower + 1, group)[-NEIGHBOURS:], range(group + 1, upper)[:NEIGHBOURS]
        for side, others in (("earlier", before), ("later", behind)):
            cuts = [
                price(layout.chain, places, (*chosen.at[:number], g, *chosen.at[number + 1 :]))
                for g in others
                if path(layout, g) != path(layout, group)
            ]
            if cuts:
                moved = min(cuts, key=lambda c: (c.us, c.total))
                saved = ours - step_us(moved) if moved.us < float("inf") else None
                reason = f"{side}, before {label(layout, moved.at[number])}: "
                reason += effect(layout, saved, group, moved.at[number])
                yield Decision(CUT, label(layout, group), Outcome.REFUSED, reason, saved)


def effect(layout: Layout, saved: float | None, group: int, other: int) -> str:
    """Say what moving a cut does. saved: of the step, None if a stage does not fit."""
    if saved is None:
        return "a stage does not fit in its machine's memory"
    before, after = (human_bytes(int(layout.chain.crossing[0][g])) for g in (group, other))
    change = "less" if saved > 0 else "longer"
    return f"the step takes {timed(abs(saved))} {change}, {before} -> {after} cross"


def path(layout: Layout, group: int) -> str:
    return module_path(layout.work.dag.nodes[first_of(layout, group)])


def first_of(layout: Layout, group: int) -> str:
    """Return the first operator from a group on that returns something."""
    names = layout.work.order[layout.borders[group] :]
    return next((n for n in names if layout.work.dag.op(n).outputs), names[0])


def label(layout: Layout, group: int) -> str:
    """Return the first operator of a group with its module: "add_3 (blocks.1)"."""
    name, module = first_of(layout, group), path(layout, group)
    return f"{name} ({module})" if module else name


def equal_layers(layout: Layout, places: Sequence[Place]) -> Cuts | None:
    """Return the cuts that give each stage as many layers of the model's lists of layers; None if there are
    fewer layers than stages."""
    first: dict[str, int] = {}
    for position, layer in enumerate(layout.work.layers):
        if layer:
            first.setdefault(layer, position)
    starts, stages = list(first.values()), len(places)
    if len(starts) < stages:
        return None
    positions = [starts[len(starts) * s // stages] for s in range(1, stages)]
    groups = tuple(next(g for g, b in enumerate(layout.borders) if b >= p) for p in positions)
    return price(layout.chain, places, groups) if groups and groups[-1] < layout.chain.groups else None


def compared(
    layout: Layout, places: Sequence[Place], chosen: Cuts, step_us: Callable[[Cuts], float]
) -> Iterator[Decision]:
    """Yield the comparison with equal layers on each stage."""
    equal = equal_layers(layout, places)
    if equal is None:
        return
    if equal.us == float("inf"):
        yield Decision(EQUAL_LAYERS, "", Outcome.REFUSED, "a stage would not fit in its machine's memory")
        return
    if equal.at == chosen.at:
        yield Decision(EQUAL_LAYERS, "", Outcome.DONE, "each stage has as many layers: no cuts are faster")
        return
    ours, theirs = step_us(chosen), step_us(equal)
    reason = f"the step would take {timed(theirs)}, {theirs / ours:.2f} times as long"
    yield Decision(EQUAL_LAYERS, "", Outcome.REFUSED, reason, ours - theirs)


def alone(layout: Layout, places: Sequence[Place], microbatches: int, ours: float) -> Iterator[Decision]:
    """Yield the comparison with the fastest single machine whose memory the model fits into."""
    chain = layout.chain
    fits = [p for p in places if chain.state[0, -1] + chain.saved[0, -1] <= p.memory]
    if not fits:
        yield Decision(ALONE, "", Outcome.REFUSED, "the model does not fit into one machine's memory")
        return
    us = min(float(sum(table[0, -1] for table in chain.us[p.kind])) for p in fits) * microbatches
    text = f"the fastest would take {timed(us)}, {us / ours:.2f} times as long"
    yield Decision(ALONE, "", Outcome.REFUSED if us > ours else Outcome.NOTED, text, ours - us)


def repeats(layout: Layout, chosen: Cuts) -> Iterator[Decision]:
    """Yield the values that a stage computes again for its own operators, instead of receiving them."""
    stages: dict[str, list[int]] = {}
    for number, (i, j) in enumerate(itertools.pairwise((0, *chosen.at, layout.chain.groups))):
        again = layout.repeated_in(i, j)
        for name in again:
            if not again & {*layout.work.dag.consumers(name)}:
                stages.setdefault(name, []).append(number)
    for name in sorted(stages, key=layout.work.position.__getitem__):
        text = f"on {counted(stages[name])} instead of sent, {human_bytes(layout.work.nbytes(name))} each"
        yield Decision(REPEATED, name, Outcome.DONE, text)


def counted(stages: Sequence[int]) -> str:
    return f"stage {stages[0]}" if len(stages) == 1 else f"stages {', '.join(map(str, stages))}"


def ties(layout: Layout, chosen: Cuts) -> Iterator[Decision]:
    """Yield the parameters and buffers that several stages read, and whose gradients have to be summed."""
    ends = list(itertools.pairwise((0, *chosen.at, layout.chain.groups)))
    for node, name in layout.work.attributes.items():
        stages = [s for s, (i, j) in enumerate(ends) if any(i <= g < j for g in layout.uses[node])]
        if len(stages) > 1 and isinstance(tensor := layout.work.tensor(node), Tensor):
            trained = node in layout.work.differentiable
            todo = "; its gradients have to be added up before the optimizer's step" if trained else ""
            rule = TIED if isinstance(tensor, nn.Parameter) else SHARED
            yield Decision(rule, name, Outcome.NOTED, f"on {counted(stages)}{todo}")
