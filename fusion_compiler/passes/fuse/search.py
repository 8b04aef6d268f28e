"""The search for clusters: it tries the best predicted gain first, and scores again as clusters grow.

A merge is legal when no path leaves the pair and comes back, when the union lowers to one loop nest,
and when that obeys the laws; it is worth it when the cost model predicts that the union is faster.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from fusion_compiler.ir import layout
from fusion_compiler.ir.walk import walk
from fusion_compiler.ops.table import Kind
from fusion_compiler.passes.fuse.candidates import Candidate, Candidates
from fusion_compiler.passes.fuse.reach import Reach
from fusion_compiler.passes.lower.effort import ATTEMPT
from fusion_compiler.passes.lower.space import Illegal
from fusion_compiler.passes.patterns.match import Match
from fusion_compiler.patterns import ClusterHint

# A candidate is tried with at most so many readers of one tensor: a learning rate is read by all of an
# optimizer's updates, and a kernel can hold no more than a few of them.
MOST_READERS = 64


class Search:
    """A search clusters one graph.

    candidates: by number, updated as they merge. owner: the candidate of every op that is in one alone.
    """

    def __init__(self, pool: Candidates, matches: Sequence[Match] = ()) -> None:
        self.pool, self.dag, self.reads = pool, pool.dag, pool.reads
        self.matches = matches
        self.candidates = dict(pool.first)
        self.order = self.dag.order
        self.owner = {self.order[number]: number for number in self.candidates}
        self.users_of: tuple[frozenset[str], dict[str, list[int]]] = (pool.again, {})
        self.refused_hints: list[tuple[Match, str]] = []  # with the reason
        self.reach = Reach(self.units())
        self.version = dict.fromkeys(self.candidates, 0)
        self.heap: list[tuple[float, bool, int, int, int, int]] = []

    def units(self) -> dict[int, set[int]]:
        """Return the units, candidates and the ops that none holds, with the units that each reads, in
        topological order."""
        unit = {
            name: self.reads.position[name]
            for name in self.dag.order
            if name in self.owner or not (layout.is_view(self.dag.op(name)) or name in self.pool.again)
        }
        sources: dict[int, set[int]] = {}
        for name, number in unit.items():
            ops = self.candidates[number].ops if number in self.candidates else (name,)
            before = (s for op in ops for s in (*self.reads.sources[op], *self.pool.waits.get(op, ())))
            read = {unit[s] for s in before if s not in ops and s in unit}
            sources[number] = read - {number}
        return sources

    def run(self) -> None:
        """Merge until no merge gains, or the effort is spent; ops that patterns name are merged first."""
        for match in self.matches:
            if isinstance(match.pattern, ClusterHint) and match.pattern.fuse:
                self.try_hint(match)
        self.merge_all()

    def merge_all(self) -> None:
        """Merge pairs until none gains: a merge elsewhere can remove what stood between two candidates."""
        before = -1
        while len(self.candidates) != before:
            before = len(self.candidates)
            for number in self.candidates:
                for other, saved in self.neighbours(number).items():
                    if number < other:
                        self.push(number, other, saved)
            while self.heap and not self.pool.effort.is_spent():
                _, _, a, b, va, vb = heapq.heappop(self.heap)
                if self.version.get(a) == va and self.version.get(b) == vb:
                    self.try_merge(a, b)
            self.heap.clear()

    def push(self, a: int, b: int, saved: int) -> None:
        """Queue a pair. Of pairs that save as much, those come first whose `a` serves a reduction alone."""
        alone = self.serves(a, b)
        heapq.heappush(self.heap, (-float(saved), not alone, a, b, self.version[a], self.version[b]))

    def serves(self, a: int, b: int) -> bool:
        """True if the results of `a` stay in L2 and only `b` reads them, which reduces. There they end;
        merged with the ops before `a`, they may wait for another reduction."""
        if all(self.dag.op(name).kind is not Kind.REDUCTION for name in self.candidates[b].ops):
            return False
        pool, outputs = self.pool, self.candidates[a].outputs
        return all(pool.info(n).in_l2 and self.readers(n) == {b} and not pool.must_exist(n) for n in outputs)

    def neighbours(self, number: int) -> dict[int, int]:
        """Return candidates that share a tensor with this one, and the bytes that one pass would save."""
        candidate = self.candidates[number]
        inside = set(candidate.ops)
        savings: dict[int, int] = {}
        for name in dict.fromkeys(
            s for op in candidate.ops for s in self.reads.sources[op] if s not in inside
        ):
            if not self.dag.op(name).outputs:
                continue
            size = self.pool.bytes(name)
            owner = self.owner.get(name)
            if owner is not None and owner != number and owner in self.candidates:
                savings[owner] = savings.get(owner, 0) + 2 * size
            for user in self.readers(name, number):
                if user != number:
                    savings[user] = savings.get(user, 0) + size
        for name in candidate.outputs:
            for user in self.readers(name, number):
                if user != number:
                    savings[user] = savings.get(user, 0) + 2 * self.pool.bytes(name)
        return savings

    def readers(self, name: str, near: int | None = None) -> set[int]:
        """Return candidates that read a tensor, directly or through ops that they compute again; of many
        readers return the nearest."""
        users = self.users(name)
        if near is None or len(users) <= MOST_READERS:
            return {self.owner[self.order[u]] for u in users if self.order[u] in self.owner}
        readers: set[int] = set()
        for position in _outward(users, near):
            readers.update({self.owner[op]} if (op := self.order[position]) in self.owner else ())
            if len(readers) > MOST_READERS:
                break
        return readers

    def users(self, name: str) -> list[int]:
        """Return the ops that read a tensor, directly or through ops that are computed again, by position."""
        if self.users_of[0] is not self.pool.again:
            self.users_of = (self.pool.again, {})
        cached = self.users_of[1]
        if name not in cached:
            again, users = self.pool.again, self.reads.users
            through = walk([name], lambda op: [user for user in users[op] if user in again])
            readers = {user for op in through for user in users[op]}
            cached[name] = sorted(self.reads.position[user] for user in readers)
        return cached[name]

    def held(self, ops: Sequence[str]) -> list[Match]:
        """Return the matches whose ops all are in a set of ops, views aside."""
        inside = set(ops)
        return [
            m
            for m in self.matches
            if all(n in inside or not self.pool.fusible(self.dag.op(n)) for n in m.ops)
        ]

    def try_hint(self, match: Match) -> None:
        """Merge all that a hint names into one cluster, if that is legal and faster than its ops alone."""
        numbers = sorted({self.owner[n] for n in match.ops if n in self.owner})
        refused = self.merge(numbers) if len(numbers) > 1 else None
        if refused is not None and refused[0] != "dead":
            self.refused_hints.append((match, ": ".join(refused)))

    def try_merge(self, a: int, b: int) -> None:
        if self.merge((a, b)) is not None:
            return
        first = min(a, b)
        for other, saved in self.neighbours(first).items():
            self.push(min(first, other), max(first, other), saved)

    def merge(self, numbers: Sequence[int]) -> tuple[str, str] | None:
        """Merge several candidates into the first of them if that is legal and gains, and return None; else
        return the rule that refused them, and its reason."""
        self.pool.effort.spent += ATTEMPT
        candidates = [self.candidates[n] for n in numbers]
        if not self.reach.convex(numbers):
            return "convex", "an op between them needs one and feeds the other"
        try:
            union = self.pool.union(candidates)
        except Illegal as error:
            return error.rule, error.reason
        if union.cost.us >= sum(p.cost.us for p in candidates):
            return "cost", one_or_apart(candidates, union)
        first, *others = sorted(numbers)
        for gone in others:
            self.join(first, gone)
        self.candidates[first] = union
        return None

    def drop(self, number: int) -> None:
        """Remove a candidate that all its readers compute themselves. Its place in `reach` stays, as the
        units that it read still lead to its readers."""
        del self.candidates[number], self.version[number]

    def join(self, first: int, gone: int) -> None:
        """Give `first` all that belonged to the candidate `gone`."""
        candidate = self.candidates.pop(gone)
        del self.version[gone]
        self.owner.update({name: first for name in candidate.ops if self.owner.get(name) == gone})
        self.reach.join(first, gone)
        self.version[first] += 1

    def label(self, number: int) -> str:
        return self.candidates[number].outputs[-1]


def one_or_apart(candidates: Sequence[Candidate], union: Candidate) -> str:
    """Return the predicted times of one kernel and of several, as text."""
    apart_us = " + ".join(f"{p.cost.us:.1f}" for p in candidates)
    return (
        f"one kernel would take {union.cost.us:.1f} us ({union.cost.bound}), apart they take {apart_us} us"
    )


def _outward(positions: Sequence[int], middle: int) -> Iterator[int]:
    """Yield sorted positions, those nearest to `middle` first."""
    after = bisect_left(positions, middle)
    before = after - 1
    while before >= 0 or after < len(positions):
        left = before >= 0 and (
            after == len(positions) or middle - positions[before] <= positions[after] - middle
        )
        yield positions[before if left else after]
        before, after = before - left, after + (not left)
