"""Random operator DAGs over random machines, and the best cut among all, counted in the plainest way."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fusion_compiler.machines.cut import Chain, Item, Place, Value
from fusion_compiler.machines.plan import Link, Schedule
from fusion_compiler.machines.simulate import simulate


@dataclass(frozen=True)
class RandomDag:
    """A DAG in topological order. us: of each operator. reads: the earlier operators that each reads. sent:
    bytes of each result. weights: (bytes, the operators that read them). speeds: of the machines, in the
    pipeline's order.
    links: from each machine to the next. again: operators that every stage which reads them repeats."""

    us: tuple[float, ...]
    reads: tuple[tuple[int, ...], ...]
    sent: tuple[int, ...]
    weights: tuple[tuple[float, tuple[int, ...]], ...]
    speeds: tuple[float, ...]
    links: tuple[Link, ...]
    memory: float
    again: frozenset[int]

    def readers(self, i: int) -> list[int]:
        """Return the operators that read a result, also through one that is repeated."""
        direct = [j for j, reads in enumerate(self.reads) if i in reads]
        return sorted({k for j in direct for k in (self.readers(j) if j in self.again else [j])})

    def chain(self) -> Chain:
        n, machines = len(self.us), len(self.speeds)
        items = [Item(w[1], state=w[0]) for w in self.weights]
        values = []
        for i, us in enumerate(self.us):
            uses = tuple(self.readers(i))
            times = tuple((1 / 3 * us / s, 2 / 3 * us / s) for s in self.speeds)
            items.append(Item(uses if i in self.again else (i,), times))
            if i not in self.again:
                items.append(Item((i, *uses), saved=self.sent[i]))
                values.append(Value(i, max(uses, default=i), self.sent[i], self.sent[i]))
        return Chain(n, machines, tuple(items), tuple(values))

    def places(self) -> list[Place]:
        count = len(self.speeds)
        links = (None, *self.links)
        return [Place(s, s, links[s], self.memory, count - s) for s in range(count)]


def random_dag(seed: int) -> RandomDag:
    """Return a DAG of 6 to 15 operators, so at most 14 cuts, and two to five machines."""
    rng = random.Random(seed)
    n = rng.randint(6, 15)
    stages = rng.randint(2, min(5, n))
    reads = []
    for i in range(n):
        far = [j for j in range(i) if rng.random() < 0.15]
        reads.append(tuple(sorted({*far, *([i - 1] if i and rng.random() < 0.9 else [])})))
    us = tuple(rng.lognormvariate(3, 1) for _ in range(n))
    sent = tuple(int(rng.lognormvariate(8, 1.5)) for _ in range(n))
    weights = tuple(
        (1000 * rng.random(), tuple(rng.sample(range(n), rng.choice((1, 1, 1, 2))))) for _ in range(n)
    )
    speeds = tuple(rng.choice((1.0, 1.0, 2.0)) for _ in range(stages))
    links = tuple(Link(rng.lognormvariate(5.5, 1) * 1e6, rng.uniform(0, 10)) for _ in range(stages - 1))
    again = frozenset(
        i for i in range(n) if not reads[i] and rng.random() < 0.3 and any(i in r for r in reads)
    )
    free = RandomDag(us, tuple(reads), sent, weights, speeds, links, float("inf"), again)
    needs = [m for at in every(n, stages) for m in [max(needed(free, at))]]
    memory = float("inf") if rng.random() < 0.3 else min(needs) * rng.uniform(1.0, 1.6)
    return RandomDag(us, tuple(reads), sent, weights, speeds, links, memory, again)


def every(n: int, stages: int) -> Iterator[tuple[int, ...]]:
    return itertools.combinations(range(1, n), stages - 1)


def spans(dag: RandomDag, at: Sequence[int]) -> list[range]:
    return [range(i, j) for i, j in itertools.pairwise((0, *at, len(dag.us)))]


def needed(dag: RandomDag, at: Sequence[int]) -> list[float]:
    """Return what each stage holds in memory, under 1F1B."""
    needs = []
    for number, span in enumerate(spans(dag, at)):
        state = sum(size for size, uses in dag.weights if any(u in span for u in uses))
        held = [
            dag.sent[i]
            for i in range(len(dag.us))
            if i not in dag.again and any(k in span for k in (i, *dag.readers(i)))
        ]
        needs.append(state + (len(dag.speeds) - number) * sum(held))
    return needs


def times(dag: RandomDag, at: Sequence[int]) -> tuple[list[float], list[float]]:
    """Return the time of each stage and of each link; a stage that does not fit takes infinitely long."""
    stages, links = [], []
    for span, speed, need in zip(spans(dag, at), dag.speeds, needed(dag, at), strict=True):
        runs = [
            i
            for i in range(len(dag.us))
            if (any(r in span for r in dag.readers(i)) if i in dag.again else i in span)
        ]
        fits = need <= dag.memory * (1 + 1e-12)
        stages.append(sum(dag.us[i] for i in runs) / speed if fits else float("inf"))
    for link, border in zip(dag.links, at, strict=True):
        crossing = [
            dag.sent[i]
            for i in range(border)
            if i not in dag.again and any(r >= border for r in dag.readers(i))
        ]
        links.append(link.us(sum(crossing)))
    return stages, links


def exhaustive(dag: RandomDag, cost: Callable[[list[float], list[float]], float]) -> float:
    """Return the least cost of all cuts."""
    return min(cost(*times(dag, at)) for at in every(len(dag.us), len(dag.speeds)))


def bottleneck(stages: list[float], links: list[float]) -> float:
    return max(*stages, *links)


def step_of(stages: list[float], links: list[float], microbatches: int = 8) -> float:
    """Return the simulated step; a third of a stage's time is its forward pass."""
    if max(stages) == float("inf"):
        return float("inf")
    pairs = [(us / 3, us * 2 / 3) for us in stages]
    both = [(us, us) for us in links]
    return simulate(Schedule.ONE_F_ONE_B, pairs, both, len(stages), microbatches).us
