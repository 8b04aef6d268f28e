"""The best clustering of a small graph by trying all: what the greedy search is measured against."""

from __future__ import annotations

from collections.abc import Iterator

import networkx as nx

from fusion_compiler.passes.fuse.candidates import Candidate
from fusion_compiler.passes.fuse.search import Search
from fusion_compiler.passes.lower.space import Illegal


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """All ways to group items."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for grouping in partitions(rest):
        yield [[first], *grouping]
        for i in range(len(grouping)):
            yield [*grouping[:i], [first, *grouping[i]], *grouping[i + 1 :]]


def best_us(search: Search) -> float:
    """The least predicted time of any legal, acyclic grouping of the candidates that `search` starts with."""
    base = dict(search.candidates)
    unions: dict[frozenset[int], Candidate | None] = {}

    def joined(group: list[int]) -> Candidate | None:
        key = frozenset(group)
        if key not in unions:
            try:
                unions[key] = search.pool.union(base[g] for g in group)
            except Illegal:
                unions[key] = None
        return unions[key]

    best = float("inf")
    for grouping in partitions(sorted(base)):
        candidates = [joined(group) for group in grouping]
        if all(p is not None for p in candidates) and _acyclic(
            search, [p for p in candidates if p is not None]
        ):
            best = min(best, sum(p.cost.us for p in candidates if p is not None))
    return best


def _acyclic(search: Search, candidates: list[Candidate]) -> bool:
    home = {name: i for i, candidate in enumerate(candidates) for name in candidate.outputs}
    graph: nx.DiGraph[int] = nx.DiGraph()
    for i, candidate in enumerate(candidates):
        for name in candidate.ops:
            for source in search.reads.sources[name]:
                if source not in candidate.ops and home.get(source, i) != i:
                    graph.add_edge(home[source], i)
    return nx.is_directed_acyclic_graph(graph)
