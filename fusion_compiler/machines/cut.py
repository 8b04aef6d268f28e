"""Cut a chain of operators into stages so that the slowest stage or link is as fast as possible.

This is an exact dynamic programme over the cuts of one topological order: `best[s][j]`, the least bottleneck
of stages 0 ... s that end before group j, is the minimum over i of max(best[s - 1][i], the time of groups i
... j - 1 on machine s, the time of the link before it). A stage that does not fit in its machine's memory
takes infinitely long. Of all cuts with the least bottleneck, a second pass returns those of the least sum,
which is the time in which the pipeline fills.

The order of the machines follows FusionLLM's OP-Fence (arXiv 2410.12707): machines with fast links between
them are neighbours. Within such clusters, and of the clusters themselves, every order that differs is tried.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from fusion_compiler.machines.plan import Link, Machine

Array = NDArray[np.float64]
Pair = tuple[float, float]
MOST_ORDERS = 200  # of machines, that are compared
SLACKS = (1.0, 1.02, 1.05, 1.1, 1.2, 1.35, 1.5, 2.0, 3.0, 5.0)  # of the bottleneck, for a shorter sum
SEEDS = 5  # choices whose cuts are moved
MOVES = (-4, -3, -2, -1, 1, 2, 3, 4)  # of cuts, in groups


@dataclass(frozen=True)
class Item:
    """An item belongs to every stage that has one of the operators `uses`, and counts there once: an operator
    that is computed there, a parameter, an activation that is saved.

    us: microseconds forward and backward, on each kind of machine. state: bytes, whatever is in flight.
    saved: bytes for each microbatch in flight.
    """

    uses: tuple[int, ...]
    us: tuple[Pair, ...] = ()
    state: float = 0.0
    saved: float = 0.0


@dataclass(frozen=True)
class Value:
    """A value is produced at operator `first` (-1: an input) and last read at `last`; forward and backward
    are its bytes, and those of its gradient. It crosses every cut between."""

    first: int
    last: int
    forward: int
    backward: int


@dataclass(frozen=True)
class Place:
    """A place in the pipeline: a machine and its kind, by which times differ, the link to it from the place
    before (None: the same machine), what its stage may take of the memory, and how many microbatches are in
    flight."""

    machine: int
    kind: int
    link: Link | None
    memory: float
    in_flight: int


@dataclass(frozen=True)
class Chain:
    """A chain is what the cut knows of a model: `groups` operators in order, numbered from 0, between which
    it may be cut. kinds: how many kinds of machines the items have times for. A table has at [i, j] a figure
    of the stage of groups i ... j - 1."""

    groups: int
    kinds: int
    items: tuple[Item, ...]
    values: tuple[Value, ...]

    @cached_property
    def us(self) -> tuple[tuple[Array, Array], ...]:
        """Return the tables of times, forward and backward, on each kind of machine."""

        def of(kind: int, way: int) -> Array:
            return self.table(lambda item: item.us[kind][way] if item.us else 0.0)

        return tuple((of(kind, 0), of(kind, 1)) for kind in range(self.kinds))

    @cached_property
    def state(self) -> Array:
        return self.table(lambda item: item.state)

    @cached_property
    def saved(self) -> Array:
        return self.table(lambda item: item.saved)

    def table(self, amount: Callable[[Item], float]) -> Array:
        """Return the sum over the items of each stage, which counts an item once however often it is used."""
        n = self.groups
        ends = np.zeros(n + 1)
        pairs = np.zeros(
            (n + 1, n + 1)
        )  # [a, b]: of neighbouring uses at a and b, both of which `ends` counts
        for item in self.items:
            if weight := amount(item):
                uses = sorted(set(item.uses))
                for a, b in itertools.pairwise(uses):
                    pairs[a, b] += weight
                for use in uses:
                    ends[use + 1] += weight
        total = np.cumsum(ends)
        table = total[None, :] - total[:, None]
        if pairs.any():
            both = np.cumsum(np.cumsum(pairs[::-1], axis=0)[::-1], axis=1)  # pairs with a >= i and b <= j
            table[:, 1:] -= both[:, :-1]
        return table

    @cached_property
    def _stages(self) -> dict[tuple[int, float, int], Array]:
        return {}

    def stage_us(self, place: Place) -> Array:
        """Return the table of times at a place: infinite where the stage is empty or does not fit."""
        key = (place.kind, place.memory, place.in_flight if np.isfinite(place.memory) else 0)
        if key not in self._stages:
            forward, backward = self.us[place.kind]
            table = forward + backward
            table[np.tril_indices(self.groups + 1)] = np.inf
            if np.isfinite(place.memory):
                table[self.state + place.in_flight * self.saved > place.memory] = np.inf
            self._stages[key] = table
        return self._stages[key]

    @cached_property
    def crossing(self) -> tuple[Array, Array]:
        """Return the bytes that cross a cut before each group, forward and backward."""
        steps = np.zeros((2, self.groups + 2))
        for value in self.values:
            if value.last > value.first:
                steps[:, value.first + 1] += (value.forward, value.backward)
                steps[:, value.last + 1] -= (value.forward, value.backward)
        forward, backward = np.cumsum(steps, axis=1)[:, : self.groups + 1]
        return forward, backward

    def link_us(self, link: Link | None) -> Array:
        """Return the time of the slower direction of a cut before each group; no link takes no time."""
        most = np.maximum(*self.crossing)
        if link is None:
            return np.zeros_like(most)
        return np.where(most > 0, link.latency_us + 1e6 * most / link.bytes_per_s, 0.0)

    def times(self, places: Sequence[Place], at: Sequence[int]) -> tuple[list[Pair], list[Pair]]:
        """Return the times, forward and backward, of the stages and of the links between them."""
        ends = itertools.pairwise((0, *at, self.groups))
        tables = [(*self.us[place.kind], i, j) for place, (i, j) in zip(places, ends, strict=True)]
        stages = [(float(forward[i, j]), float(backward[i, j])) for forward, backward, i, j in tables]
        forward, backward = self.crossing
        links = [
            (p.link.us(float(forward[g])), p.link.us(float(backward[g]))) if p.link else (0.0, 0.0)
            for p, g in zip(places[1:], at, strict=True)
        ]
        return stages, links


@dataclass(frozen=True)
class Cuts:
    """The cuts say where each stage begins, after the first. us: of the slowest stage or link. total: of all
    stages and links, one after the other. stage_us: of the slowest stage."""

    at: tuple[int, ...]
    us: float
    total: float
    stage_us: float


def cut(chain: Chain, places: Sequence[Place]) -> Cuts | None:
    """Return the best cuts into one stage for each place; None if no cuts fit in the memory."""
    bottleneck = least(chain, places, float("inf"), np.maximum)
    return None if bottleneck is None else filling(chain, places, bottleneck[1])


def filling(chain: Chain, places: Sequence[Place], limit: float) -> Cuts:
    """Return the cuts with the least sum of times, none of which is above `limit`, if there are such cuts."""
    total = least(chain, places, limit * (1 + 1e-9), np.add)
    assert total is not None
    return price(chain, places, total[0])


def improve(
    chain: Chain, places: Sequence[Place], starts: Sequence[Cuts], step_us: Callable[[Cuts], float]
) -> Cuts:
    """Return the tried cuts whose simulated step is the shortest, and of equal ones those with the fastest
    stages: where links decide, balanced stages gain once the links are compressed.

    A step of few microbatches also has to fill and drain the pipeline, and a message's way there and back may
    be longer than any stage. So cuts with a longer bottleneck and a shorter sum are tried beside `starts`, of
    which the first has the least bottleneck. From the best of all each cut is moved while the step gets
    shorter.
    """
    tried = [*starts, *(filling(chain, places, starts[0].us * slack) for slack in SLACKS)]

    def rank(cuts: Cuts) -> tuple[float, float]:
        return round(step_us(cuts), 3), cuts.stage_us

    seeds = sorted({c.at: c for c in tried}.values(), key=rank)[:SEEDS]
    return min((descend(chain, places, seed, rank) for seed in seeds), key=rank)


def descend(
    chain: Chain, places: Sequence[Place], best: Cuts, rank: Callable[[Cuts], tuple[float, float]]
) -> Cuts:
    """Return cuts that no move of one, or of neighbouring ones together, makes better."""
    best_rank, moved = rank(best), True
    while moved:
        moved = False
        for at in moves(chain, best.at):
            if list(at) != sorted(set(at)) or at[0] < 1 or at[-1] >= chain.groups:
                continue
            cuts = price(chain, places, at)
            if cuts.us < float("inf") and (lower := rank(cuts)) < best_rank:
                best_rank, best, moved = lower, cuts, True
    return best


def moves(chain: Chain, at: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield cuts of which neighbouring ones are moved by a few groups, or one to the next place before or
    behind it where no more is sent."""
    runs = itertools.combinations(range(len(at) + 1), 2)
    for (first, last), distance in itertools.product(runs, MOVES):
        yield tuple(g + distance * (first <= i < last) for i, g in enumerate(at))
    sent = np.maximum(*chain.crossing)
    for i, g in enumerate(at):
        others = np.flatnonzero(sent[1 : chain.groups] <= sent[g]) + 1
        for other in (*others[others < g][-1:], *others[others > g][:1]):
            yield (*at[:i], int(other), *at[i + 1 :])


def least(
    chain: Chain, places: Sequence[Place], limit: float, join: np.ufunc
) -> tuple[tuple[int, ...], float] | None:
    """Return the cuts with the least maximum, or sum, of the times of stages and links, none of which takes
    longer than `limit`; and that maximum or sum. None if there are no such cuts."""
    best = np.full(chain.groups + 1, np.inf)
    best[0] = 0.0
    choices: list[NDArray[np.intp]] = []
    for number, place in enumerate(places):
        stage = chain.stage_us(place)
        if number:
            link = chain.link_us(place.link)
            best = join(best, np.where(link > limit, np.inf, link))
        through = join(best[:, None], np.where(stage > limit, np.inf, stage))
        choices.append(np.argmin(through, axis=0))
        best = through[choices[-1], np.arange(chain.groups + 1)]
    if not np.isfinite(best[-1]):
        return None
    ends = [chain.groups]
    for choice in reversed(choices[1:]):
        ends.append(int(choice[ends[-1]]))
    return tuple(reversed(ends[1:])), float(best[-1])


def price(chain: Chain, places: Sequence[Place], at: Sequence[int]) -> Cuts:
    """Return the times of given cuts, which are infinite if a stage is empty or does not fit."""
    ends = list(itertools.pairwise((0, *at, chain.groups)))
    fit = [np.isfinite(chain.stage_us(place)[i, j]) for place, (i, j) in zip(places, ends, strict=True)]
    if not all(fit):
        return Cuts(tuple(at), us=float("inf"), total=float("inf"), stage_us=float("inf"))
    stages, links = chain.times(places, at)
    us = [*map(sum, stages), *map(max, links)]
    return Cuts(tuple(at), max(us), sum(us), max(map(sum, stages)))


# The order of the machines.

Links = Callable[[int, int], Link]  # the link between two machines


def clusters(count: int, link: Links) -> list[list[int]]:
    """Return the machines that fast links connect. A link is fast if its bandwidth is above the widest gap
    between two bandwidths, by their ratio, if that is at least 2."""
    rates = sorted({link(a, b).bytes_per_s for a, b in itertools.combinations(range(count), 2)})
    gaps = [(high / low, high) for low, high in itertools.pairwise(rates)]
    ratio, fast = max(gaps, default=(1.0, 0.0))
    fast = fast if ratio >= 2 else 0.0
    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(range(count))
    pairs = itertools.combinations(range(count), 2)
    graph.add_edges_from((a, b) for a, b in pairs if link(a, b).bytes_per_s >= fast)
    return sorted(sorted(part) for part in nx.connected_components(graph))


def orders(machines: Sequence[Machine], link: Links) -> Iterator[tuple[int, ...]]:
    """Yield the orders of the machines in which clusters stay together, of equal machines only one."""
    count = len(machines)

    def equal(a: int, b: int) -> bool:
        x, y = machines[a], machines[b]
        others = [c for c in range(count) if c not in (a, b)]
        same = (x.device, x.memory_bytes, x.speed) == (y.device, y.memory_bytes, y.speed)
        return same and all(cost(a, c) == cost(b, c) for c in others)

    def cost(a: int, b: int) -> tuple[float, float]:
        return link(a, b).bytes_per_s, link(a, b).latency_us

    def arrangements(rest: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if not rest:
            yield ()
        for i, first in enumerate(rest):
            if not any(equal(first, earlier) for earlier in rest[:i]):
                yield from ((first, *others) for others in arrangements(rest[:i] + rest[i + 1 :]))

    groups = clusters(count, link)
    for blocks in itertools.permutations(groups):
        for parts in itertools.product(
            *(list(itertools.islice(arrangements(tuple(b)), MOST_ORDERS)) for b in blocks)
        ):
            yield tuple(itertools.chain.from_iterable(parts))


def best_order(
    chain: Chain, candidates: Iterable[tuple[int, ...]], places: Callable[[tuple[int, ...]], Sequence[Place]]
) -> tuple[tuple[int, ...], Cuts] | None:
    """Return the order of machines with the best cuts, and these; None if no cuts fit in any."""
    best: tuple[tuple[int, ...], Cuts] | None = None
    for order in itertools.islice(candidates, MOST_ORDERS):
        cuts = cut(chain, places(order))
        if cuts is not None and (best is None or (cuts.us, cuts.total) < (best[1].us, best[1].total)):
            best = order, cuts
    return best
