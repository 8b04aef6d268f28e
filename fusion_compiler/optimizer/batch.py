"""Parameters that one launch updates, step after step: what is the same at each is found out once."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor

from fusion_compiler.optimizer.formula import Structure
from fusion_compiler.optimizer.launch import MultiTensor, Rows, Set
from fusion_compiler.optimizer.ready import PLAIN, Kind, Numbers, Ready, local, spread

Group = dict[str, Any]
Key = tuple[tuple[int, ...], tuple[float, ...], tuple[float, ...]]
NO_STATE: dict[str, Any] = {}


@dataclass
class Alike:
    """Of a batch's parameters those that take the same numbers.

    shape: of all of them, where the step may look at it. values: of the floats of their groups, by identity.
    counts: what their counters say.
    """

    shape: tuple[int, ...]
    values: tuple[float, ...]
    counts: tuple[float, ...]
    groups: dict[int, Group] = field(default_factory=dict[int, Group])

    def has(self, numbers: Mapping[int, Any], kind: Kind) -> bool:
        """Whether the groups' numbers are one still, of the same structure; takes the new values."""
        now = [numbers.get(key) for key in self.groups]
        first = now[0]
        if not isinstance(first, Numbers) or any(n is not first and n != first for n in now):
            return False
        if (first.paths, first.constants) != (kind.structure.floats, kind.structure.constants):
            return False
        self.values = first.values
        return True


class Batch:
    """Parameters of one kind whose memory is apart, in sets with numbers of their own.

    aligned: whether every tensor begins at a multiple of 16 bytes. at: which of the parameters that it was
    chosen from are its members. multi, ways: what updated them last, and by which formula each set.

    A step looks only at what may have changed. Counters of all members are views of one tensor each, so that
    one call writes them all and one compares them with what they should say.
    """

    def __init__(self, kind: Kind, aligned: bool) -> None:
        self.kind, self.aligned = kind, aligned
        self.members: list[tuple[Group, Ready]] = []
        self.at: list[int] = []
        self.sets: list[Alike] = []
        self.multi: MultiTensor | None = None
        self.ways: tuple[int, ...] = ()
        self._of: dict[Key, int] = {}
        self._set_of: list[int] = []

    def add(self, at: int, group: Group, ready: Ready, alike: Key) -> None:
        """alike: what `Alike` is made of; one set has all that have the same."""
        self.members.append((group, ready))
        self.at.append(at)
        which = self._of.setdefault(alike, len(self.sets))
        if which == len(self.sets):
            self.sets.append(Alike(*alike))
        self.sets[which].groups[id(group)] = group
        self._set_of.append(which)

    def split(self) -> list[Batch]:
        """One for each set."""
        parts = [Batch(self.kind, self.aligned) for _ in self.sets]
        for at, (group, ready), which in zip(self.at, self.members, self._set_of, strict=True):
            alike = self.sets[which]
            parts[which].add(at, group, ready, (alike.shape, alike.values, alike.counts))
        return parts

    def close(self) -> None:
        """Called when it has all of its members."""
        ready = [ready for _, ready in self.members]
        self._params = [one.param for one in ready]
        self._states = [list(column) for column in zip(*(one.states for one in ready), strict=True)]
        self._sharded = any(type(param) not in PLAIN for param in self._params)
        self._spread = [spread(param) for param in self._params] if self._sharded else []
        counters = [list(column) for column in zip(*(one.counters for one in ready), strict=True)]
        self._counts = list(map(_side_by_side, counters))
        self._expected = [column.clone() for column in self._counts]
        self._addresses = self._addresses_of([one.held for one in ready])
        self._places: dict[tuple[int, ...], tuple[tuple[int, ...], Tensor]] = {}
        self._tables: dict[tuple[int, ...], Tensor] = {}
        sizes = [local(param).numel() for param in self._params]
        self._filled = [i for i, size in enumerate(sizes) if size]
        self._elements = tuple(sizes[i] for i in self._filled)
        self._sets = tuple(self._set_of[i] for i in self._filled)
        self._index = torch.tensor(self._set_of)
        grads: Any = [param.grad for param in self._params]
        parts = self._parts(grads)
        self._like = _likeness(parts)
        self._grads_aligned = is_aligned(map(Tensor.data_ptr, parts))

    def has(self, numbers: Mapping[int, Any]) -> bool:
        """Whether its groups' numbers are as one as they were; takes the new values."""
        return all(each.has(numbers, self.kind) for each in self.sets)

    def values(self) -> list[tuple[float, ...]]:
        """Of each set: the floats and the counters."""
        return [(*each.values, *each.counts) for each in self.sets]

    def asked(self) -> list[tuple[Group, Structure]]:
        """Of each set: a group, and what is traced for it."""
        structure = self.kind.structure
        return [(next(iter(s.groups.values())), replace(structure, shape=s.shape)) for s in self.sets]

    def rows(self, state: Mapping[Tensor, Mapping[str, Any]], grads: Sequence[Any]) -> Rows | None:
        """The tensors as they are now; None where anything of them has changed but values."""
        try:
            held = map(state.get, self._params, repeat(NO_STATE))
            if self._addresses_of(held) != self._addresses:
                return None
            parts = self._parts(grads)
            if _likeness(parts) != self._like:
                return None
            addresses = tuple(map(Tensor.data_ptr, parts))
        except (RuntimeError, TypeError):  # no memory, as of a sparse gradient; no tensor
            return None
        if not all(map(torch.equal, self._counts, self._expected)):
            return None
        if addresses not in self._places and is_aligned(addresses) is not self._grads_aligned:
            return None
        columns = [self._params, parts, *self._states]
        if self._sharded:
            columns = [parts if column is parts else list(map(local, column)) for column in columns]
        if len(self._filled) < len(self._params):  # an empty one has no address
            columns = [[column[i] for i in self._filled] for column in columns]
            addresses = tuple(addresses[i] for i in self._filled)
        return Rows(columns, addresses, self._elements, self._sets, self._places, self._tables)

    def _parts(self, grads: Sequence[Any]) -> Sequence[Tensor]:
        """What of the gradients lies on this process. Raises TypeError where one is of another class."""
        if not self._sharded:
            if not set(map(type, grads)).issubset(PLAIN):
                raise TypeError("gradients of classes of their own")
            return grads
        if any(grad is None for grad in grads) or [spread(grad) for grad in grads] != self._spread:
            raise TypeError("gradients that are spread otherwise")
        return list(map(local, grads))

    def _addresses_of(self, held: Iterable[Mapping[str, Any]]) -> list[int]:
        """Of parameters and all that they hold, of which a user may replace each, or its memory."""
        tensors = chain(self._params, chain.from_iterable(map(operator.methodcaller("values"), held)))
        return list(map(Tensor.data_ptr, map(local, tensors) if self._sharded else tensors))

    def count(self, counts: Sequence[tuple[float, ...]]) -> None:
        """Gives the counters of each set their new values."""
        for counters, expected, values in zip(
            self._counts, self._expected, zip(*counts, strict=True), strict=True
        ):
            if len(values) == 1:  # in a third of the time
                expected.fill_(values[0])
            else:
                expected.copy_(torch.tensor(values, dtype=expected.dtype)[self._index])
            counters.copy_(expected)
        for each, now in zip(self.sets, counts, strict=True):
            each.counts = now


def _side_by_side(counters: Sequence[Tensor]) -> Tensor:
    """One vector that holds tensors of one number, which are views of it from now on."""
    made = torch.stack(list(counters))
    for i, counter in enumerate(counters):
        counter.set_(made.untyped_storage(), i, (), ())  # type: ignore[call-overload]
    return made


def _likeness(grads: Sequence[Tensor]) -> tuple[Any, ...]:
    """What of gradients is not their values."""
    return [grad.dtype for grad in grads], list(map(Tensor.stride, grads))


def is_aligned(places: Iterable[int]) -> bool:
    return not functools.reduce(operator.or_, places, 0) & 15


@dataclass(frozen=True)
class Update:
    """One step of a batch, prepared: what updates it, the tensors, the kernel's numbers as they were then,
    the counters' new values, the factor of clipped gradients, and the key of its random numbers."""

    batch: Batch
    multi: MultiTensor
    rows: Rows
    sets: Sequence[Set]
    counts: Sequence[tuple[float, ...]]
    factor: Tensor | None
    seed: int

    def run(self) -> None:
        self.multi.run(self.rows, self.sets, self.factor, self.seed)
        self.batch.count(self.counts)


class Assembly:
    """Parameters sorted into batches, and those that no kernel updates, with their places in the choice.

    gathered: batches as parameters come. batches: those of them, or parts, that have a kernel.
    """

    def __init__(self) -> None:
        self.gathered: list[Batch] = []
        self.batches: list[Batch] = []
        self.own: list[tuple[int, Group, Tensor]] = []
        self._open: dict[tuple[Any, ...], Batch] = {}
        self._turns: dict[int, int] = {}

    def add(
        self,
        at: int,
        group: Group,
        ready: Ready,
        kind: Kind,
        shape: tuple[int, ...],
        values: tuple[float, ...],
    ) -> None:
        """Parameters that begin at one address are in several batches, one after the other."""
        assert ready.param.grad is not None
        tensors = map(local, (ready.param, ready.param.grad, *ready.states))
        places = [tensor.data_ptr() for tensor in tensors]
        turn = self._turns.get(places[0], 0) if places[0] else 0
        self._turns[places[0]] = turn + 1
        counts = tuple(counter.item() for counter in ready.counters)
        aligned = is_aligned(places)
        key = (id(kind), aligned, turn)
        if key not in self._open:
            self._open[key] = Batch(kind, aligned)
            self.gathered.append(self._open[key])
        self._open[key].add(at, group, ready, (shape, values, counts))

    def leave(self, batch: Batch) -> None:
        """No kernel updates these."""
        self.own += [
            (at, group, ready.param) for at, (group, ready) in zip(batch.at, batch.members, strict=True)
        ]


@dataclass(frozen=True)
class Prepared:
    """One step of some parameters, with the numbers of when it was prepared; nothing is written yet.

    own: those that take the class's own step.
    """

    updates: Sequence[Update]
    own: Sequence[Tensor]

    def run(self) -> None:
        for update in self.updates:
            update.run()
