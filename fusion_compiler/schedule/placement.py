"""A placement says where each axis of a loop nest lies. It is an ordered list of directives:

    fuse(a b, c)        axes a and b become axis c, of all their elements in row-major order
    align(a, n)         lanes of axis a count from the word, of n elements, in which the row begins
                        (`schedule.misaligned`)
    split(a, n)         axis a becomes a.o and a.i; a.i has n elements
    place(a, GRID)      programs share the axis; of several, the last one varies fastest
    place(a, SHARED)    programs with consecutive numbers run together; each has a part of the axis, and they
                        exchange what they reduce
    place(a, LOOP)      each program goes through the axis in a loop; the first one is the outermost loop
    place(a, LANES)     a tile holds the axis; of several, the last one lies innermost in the tile
    place(a, UNROLL)    the program's text is repeated for each element
    combine(r, LAST)    the last of the programs that share the reduction r to arrive combines their results,
                        instead of a second kernel
    combine(r, TURN)    each turn of a loop over the reduction r reduces what a thread loads in it, instead of
                        once behind the loop
    combine(r, EACH)    each program makes all of the reduction r, whose axes programs share, by itself
    combine(r, CARRIED) one loop makes the reduction r and those over the same axis that it reads; the sum is
                        rescaled when these change (`schedule.carried`)
    unit(r, TENSOR_CORE)  tensor cores make the reduction r: a sum of products of two tiles that have the axes
                        which it reduces in common, and no others
    access(x, DESCRIPTOR)    loads of buffer x copy boxes of it by a tensor descriptor (TMA); PLAIN, by
                        pointers, is the default and is not printed

`str` prints a placement and `parse` reads it back. `verifier.refusal` says why a nest cannot run under one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, NamedTuple

from fusion_compiler.ir.dims import Dim, product
from fusion_compiler.ir.loops import Axis
from fusion_compiler.schedule.analysis import ceil_div
from fusion_compiler.schedule.shapes import padded


class Place(StrEnum):
    GRID = "GRID"
    SHARED = "SHARED"
    LOOP = "LOOP"
    LANES = "LANES"
    UNROLL = "UNROLL"


class Access(StrEnum):
    PLAIN = "PLAIN"
    DESCRIPTOR = "DESCRIPTOR"


class Unit(StrEnum):
    TENSOR_CORE = "TENSOR_CORE"


class Stage(StrEnum):
    LAST = "LAST"
    TURN = "TURN"
    EACH = "EACH"
    CARRIED = "CARRIED"


class Printed:
    """A directive prints as its word, with the two values of its fields."""

    word: ClassVar[str]

    def __str__(self) -> str:
        return f"{self.word}({', '.join(str(value) for value in vars(self).values())})"


@dataclass(frozen=True)
class Fuse(Printed):
    axes: tuple[str, ...]
    name: str
    word = "fuse"

    def __str__(self) -> str:
        return f"{self.word}({' '.join(self.axes)}, {self.name})"


@dataclass(frozen=True)
class Align(Printed):
    axis: str
    word_size: int
    word = "align"


@dataclass(frozen=True)
class Split(Printed):
    axis: str
    inner: int
    word = "split"


@dataclass(frozen=True)
class At(Printed):
    axis: str
    place: Place
    word = "place"


@dataclass(frozen=True)
class On(Printed):
    reduction: str
    unit: Unit
    word = "unit"


@dataclass(frozen=True)
class Via(Printed):
    buffer: str
    access: Access
    word = "access"


@dataclass(frozen=True)
class In(Printed):
    reduction: str
    stage: Stage
    word = "combine"


Directive = Fuse | Align | Split | At | On | Via | In
PLACING = (At, Split, Align)  # directives of one axis


class Leaf(NamedTuple):
    """A part of an axis that is placed as one.

    axis: the number of the axis; fused axes have the numbers behind all others. members: the number of the
        axis, or those of the axes that were fused to it.
    step: elements of the axis from one of the leaf to the next.
    order: the position of its directive.
    """

    name: str
    axis: int
    members: frozenset[int]
    extent: Dim
    step: int
    place: Place
    order: int

    def __hash__(self) -> int:
        return hash(self.name)  # which differs among the leaves of a placement; other fields take longer

    @property
    def lanes(self) -> int:
        """Return the number of elements that a tile has of the leaf, a power of two."""
        assert isinstance(self.extent, int)
        return padded(self.extent)


@dataclass(frozen=True)
class Placement:
    """A placement has directives, and what a launch needs besides: threads, stages of loops, registers of a
    thread, and iterations of a loop that are prefetched before the kernel waits for its predecessors."""

    directives: tuple[Directive, ...]
    num_warps: int = 4
    num_stages: int = 1
    registers: int | None = None
    early: int = 0

    def __str__(self) -> str:
        stages = f", {self.num_stages} stages" if self.num_stages > 1 else ""
        limit = f", {self.registers} registers" if self.registers else ""
        printed = (str(d) for d in self.directives if not isinstance(d, Via) or d.access is not Access.PLAIN)
        early = f", {self.early} early" if self.early else ""
        return f"{'; '.join(printed)}; {self.num_warps} warps{stages}{limit}{early}"

    @property
    def descriptors(self) -> frozenset[str]:
        """Return the buffers that are loaded through descriptors."""
        accesses = {d.buffer: d.access for d in self.directives if isinstance(d, Via)}
        return frozenset(buffer for buffer, access in accesses.items() if access is Access.DESCRIPTOR)

    def combined(self, stage: Stage) -> frozenset[str]:
        """Return the names of the reductions that are combined in some stage."""
        return frozenset(d.reduction for d in self.directives if isinstance(d, In) and d.stage is stage)

    @property
    def misaligned(self) -> bool:
        """True if another program has to run where an input is not aligned."""
        return bool(self.descriptors or self.word)

    @property
    def word(self) -> int:
        """Return the elements of the words in which rows begin; 0 if they begin anywhere."""
        return next((d.word_size for d in self.directives if isinstance(d, Align)), 0)

    @staticmethod
    def parse(text: str) -> Placement:
        """Return the placement that prints as `text`. Raises ValueError for any other text."""
        directives: list[Directive] = []
        words = "fuse|align|split|place|unit|access|combine"
        for word, name, value in re.findall(rf"({words})\(([\w. ]+), (\w+)\)", text):
            match word:
                case "fuse":
                    directives.append(Fuse(tuple(name.split()), value))
                case "align":
                    directives.append(Align(name, int(value)))
                case "split":
                    directives.append(Split(name, int(value)))
                case "place":
                    directives.append(At(name, Place(value)))
                case "unit":
                    directives.append(On(name, Unit(value)))
                case "combine":
                    directives.append(In(name, Stage(value)))
                case _:
                    directives.append(Via(name, Access(value)))
        counted = re.findall(r"(\d+) (warps|stages|registers|early)", text)
        counts = {word: int(number) for number, word in counted}
        placement = Placement(
            tuple(directives),
            counts.get("warps", 4),
            counts.get("stages", 1),
            counts.get("registers"),
            counts.get("early", 0),
        )
        if str(placement) != text:
            raise ValueError(f"{text!r} is not a placement; write it as {placement}")
        return placement

    def axes(self, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        """Return a nest's axes, and behind them those that directives fuse."""
        fuses = (directive for directive in self.directives if isinstance(directive, Fuse))
        sizes = {axis.name: axis.size for axis in axes}
        fused = ((fuse.name, product(sizes[name] for name in fuse.axes)) for fuse in fuses)
        return (*axes, *(Axis(name, size, axes[0].group) for name, size in fused))

    def fused(self, axes: tuple[Axis, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the numbers of the axes that each fused axis has. Raises ValueError where there are none."""
        fuses = [directive for directive in self.directives if type(directive) is Fuse]
        if not fuses:
            return ()
        numbers = {axis.name: number for number, axis in enumerate(axes)}
        for fuse in fuses:
            if missing := set(fuse.axes) - numbers.keys():
                raise ValueError(f"{fuse}: there is no axis {min(missing)} left to place")
        return tuple(tuple(numbers[name] for name in fuse.axes) for fuse in fuses)

    def leaves(self, axes: tuple[Axis, ...]) -> tuple[Leaf, ...]:
        """Return the parts of all axes in the order of their directives. Raises ValueError where an axis is
        not placed, or placed twice."""
        parts = {axis.name: (number, frozenset((number,)), axis.size, 1) for number, axis in enumerate(axes)}
        fused = enumerate(self.fused(axes), len(axes))
        leaves: list[Leaf] = []
        for position, directive in enumerate(self.directives):
            if type(directive) is Fuse:
                number, members = next(fused)
                for member in members:
                    del parts[axes[member].name]
                size = product(axes[member].size for member in members)
                parts[directive.name] = number, frozenset(members), size, 1
            elif isinstance(directive, PLACING):
                name = directive.axis
                if name not in parts:
                    raise ValueError(f"{directive}: there is no axis {name} left to place")
                number, members, extent, step = parts.pop(name)
                if isinstance(directive, At):
                    leaves.append(Leaf(name, number, members, extent, step, directive.place, position))
                elif isinstance(directive, Align):
                    parts[name] = number, members, extent + directive.word_size - 1, step
                else:
                    inner = directive.inner
                    parts[f"{name}.o"] = number, members, ceil_div(extent, inner), step * inner
                    parts[f"{name}.i"] = number, members, inner, step
        if parts:
            raise ValueError(f"{', '.join(parts)} has no place")
        return tuple(leaves)
