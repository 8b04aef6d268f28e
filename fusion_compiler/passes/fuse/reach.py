"""Ancestors and descendants of clusters, as bit sets that are updated while clusters merge."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence


class Reach:
    """Reach holds the ancestors and descendants of every unit, a cluster or an op beside them, by number.

    sources: the units that each one reads, in topological order. Descendants have larger numbers.
    A merged unit stays in the sets of others under the numbers of all its members, so that a merge changes
    only the sets of units that reach, or are reached from, exactly one of the two.
    """

    def __init__(self, sources: Mapping[int, set[int]]) -> None:
        self.members = {number: 1 << number for number in sources}
        self.kept = sum(self.members.values())  # the numbers that units still go by
        self.above: dict[int, int] = {}
        self.below = dict.fromkeys(sources, 0)
        for number, read in sources.items():
            above = 0
            for source in read:
                above |= self.above[source] | (1 << source)
            self.above[number] = above
        for number in sorted(sources, reverse=True):
            for source in sources[number]:
                self.below[source] |= self.below[number] | (1 << number)

    def path(self, a: int, b: int) -> bool:
        """True if one of two units leads to the other."""
        return bool((self.below[a] | self.above[a]) >> b & 1)

    def leads(self, a: int, b: int) -> bool:
        """True if `a` leads to `b`."""
        return bool(self.below[a] >> b & 1)

    def convex(self, numbers: Sequence[int]) -> bool:
        """True if no other unit lies on a path between some units."""
        mask = above = below = 0
        for number in numbers:
            mask |= self.members[number]
            above |= self.above[number]
            below |= self.below[number]
        return not above & below & ~mask

    def join(self, first: int, gone: int) -> None:
        """Make `gone` a part of `first`: everything above either is above both, likewise below."""
        pair = (first, gone)
        members = self.members[first] | self.members[gone]
        above, below = ([reach[n] & ~members for n in pair] for reach in (self.above, self.below))
        for mine, reach, theirs in ((above, self.below, below), (below, self.above, above)):
            for one, other in ((0, 1), (1, 0)):
                more = theirs[other] | self.members[pair[other]]
                for number in bits(mine[one] & ~mine[other] & self.kept):
                    reach[number] |= more
        self.members[first], self.kept = members, self.kept & ~(1 << gone)
        self.above[first], self.below[first] = above[0] | above[1], below[0] | below[1]
        del self.members[gone], self.above[gone], self.below[gone]


def bits(mask: int) -> Iterator[int]:
    """Yield the positions of the bits that are set."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
