"""Which clusters lead to which others, kept while clusters merge: ancestors and descendants as bit sets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence


class Reach:
    """Ancestors and descendants of every unit, a cluster or an op beside them, by number.

    sources: the units that each one reads, in topological order. Descendants have larger numbers.
    """

    def __init__(self, sources: Mapping[int, set[int]]) -> None:
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
        """Whether one leads to the other."""
        return bool((self.below[a] | self.above[a]) >> b & 1)

    def leads(self, a: int, b: int) -> bool:
        """Whether `a` comes before `b`."""
        return bool(self.below[a] >> b & 1)

    def convex(self, numbers: Sequence[int]) -> bool:
        """No other unit lies on a path between some of them."""
        mask = above = below = 0
        for number in numbers:
            mask |= 1 << number
            above |= self.above[number]
            below |= self.below[number]
        return not above & below & ~mask

    def join(self, kept: int, gone: int) -> None:
        """`gone` becomes part of `kept`: everything above either is above both, likewise below."""
        pair = (1 << kept) | (1 << gone)
        above = (self.above[kept] | self.above[gone]) & ~pair
        below = (self.below[kept] | self.below[gone]) & ~pair
        del self.above[gone], self.below[gone]
        self.above[kept], self.below[kept] = above, below
        bit = 1 << kept
        for numbers, reach, more in ((above, self.below, below | bit), (below, self.above, above | bit)):
            for number in bits(numbers):  # nothing else had either of the two in its reach
                reach[number] = (reach[number] & ~pair) | more


def bits(mask: int) -> Iterator[int]:
    """Positions of the bits that are set."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
