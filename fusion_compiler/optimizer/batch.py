"""Parameters that one launch updates, step after step: facts that no step changes are computed once."""

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
class NumberSet:
    """The parameters of one set of a batch take the same numbers.

    shape: that of all the parameters, where the step may look at it. values: the floats of their groups.
    counts: the values of their counters. groups: their groups, by identity.
    """

    shape: tuple[int, ...]
    values: tuple[float, ...]
    counts: tuple[float, ...]
    groups: dict[int, Group] = field(default_factory=dict[int, Group])

    def has(self, numbers: Mapping[int, Any], kind: Kind) -> bool:
        """Return True if the groups' numbers are still equal, of the same structure; store the values."""
        now = [numbers.get(key) for key in self.groups]
        first = now[0]
        if not isinstance(first, Numbers) or any(n is not first and n != first for n in now):
            return False
        if (first.paths, first.constants) != (kind.structure.floats, kind.structure.constants):
            return False
        self.values = first.values
        return True


class Batch:
    """A batch holds parameters of one kind whose memory is disjoint, in sets that have different numbers.

    aligned: whether every tensor begins at a multiple of 16 bytes. at: the positions of its members among the
    parameters that it was chosen from. multi, ways: the MultiTensor that updated them last, and the position
    of each set's formula there.

    A step checks only facts that may have changed. The counters of one name are views of one tensor, so that
    one call writes those of all members and one compares them with the values that they should have.
    """

    def __init__(self, kind: Kind, aligned: bool) -> None:
        self.kind, self.aligned = kind, aligned
        self.members: list[tuple[Group, Ready]] = []
        self.at: list[int] = []
        self.sets: list[NumberSet] = []
        self.multi: MultiTensor | None = None
        self.ways: tuple[int, ...] = ()
        self._of: dict[Key, int] = {}
        self._set_of: list[int] = []

    def add(self, at: int, group: Group, ready: Ready, key: Key) -> None:
        """Add a parameter. key: the first fields of its `NumberSet`; equal keys mean the same set."""
        self.members.append((group, ready))
        self.at.append(at)
        which = self._of.setdefault(key, len(self.sets))
        if which == len(self.sets):
            self.sets.append(NumberSet(*key))
        self.sets[which].groups[id(group)] = group
        self._set_of.append(which)

    def split(self) -> list[Batch]:
        """Return one batch for each set."""
        parts = [Batch(self.kind, self.aligned) for _ in self.sets]
        for at, (group, ready), which in zip(self.at, self.members, self._set_of, strict=True):
            part = self.sets[which]
            parts[which].add(at, group, ready, (part.shape, part.values, part.counts))
        return parts

    def close(self) -> None:
        """Compute the facts that stay the same at every step; all members have been added before."""
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
        """Return True if the groups of each set still have equal numbers; store the new values."""
        return all(each.has(numbers, self.kind) for each in self.sets)

    def values(self) -> list[tuple[float, ...]]:
        """Return, for each set, the floats and the counters."""
        return [(*each.values, *each.counts) for each in self.sets]

    def asked(self) -> list[tuple[Group, Structure]]:
        """Return, for each set, one of its groups and the structure to trace."""
        structure = self.kind.structure
        return [(next(iter(s.groups.values())), replace(structure, shape=s.shape)) for s in self.sets]

    def rows(self, state: Mapping[Tensor, Mapping[str, Any]], grads: Sequence[Any]) -> Rows | None:
        """Return the tensors as they are now, or None if anything but their values has changed."""
        try:
            held = map(state.get, self._params, repeat(NO_STATE))
            if self._addresses_of(held) != self._addresses:
                return None
            parts = self._parts(grads)
            if _likeness(parts) != self._like:
                return None
            addresses = tuple(map(Tensor.data_ptr, parts))
        except (RuntimeError, TypeError):  # a gradient without memory (a sparse one), or no tensor
            return None
        if not all(map(torch.equal, self._counts, self._expected)):
            return None
        if addresses not in self._places and is_aligned(addresses) is not self._grads_aligned:
            return None
        columns = [self._params, parts, *self._states]
        if self._sharded:
            columns = [parts if column is parts else list(map(local, column)) for column in columns]
        if len(self._filled) < len(self._params):  # an empty tensor has no address
            columns = [[column[i] for i in self._filled] for column in columns]
            addresses = tuple(addresses[i] for i in self._filled)
        return Rows(columns, addresses, self._elements, self._sets, self._places, self._tables)

    def _parts(self, grads: Sequence[Any]) -> Sequence[Tensor]:
        """Return the local parts of the gradients. Raises TypeError if one has another class or placement."""
        if not self._sharded:
            if not set(map(type, grads)).issubset(PLAIN):
                raise TypeError("gradients of classes of their own")
            return grads
        if any(grad is None for grad in grads) or [spread(grad) for grad in grads] != self._spread:
            raise TypeError("gradients that are spread otherwise")
        return list(map(local, grads))

    def _addresses_of(self, held: Iterable[Mapping[str, Any]]) -> list[int]:
        """Return the addresses of parameters and their states; a user may replace any, or its memory."""
        tensors = chain(self._params, chain.from_iterable(map(operator.methodcaller("values"), held)))
        return list(map(Tensor.data_ptr, map(local, tensors) if self._sharded else tensors))

    def count(self, counts: Sequence[tuple[float, ...]]) -> None:
        """Set the counters of each set to their new values."""
        for counters, expected, values in zip(
            self._counts, self._expected, zip(*counts, strict=True), strict=True
        ):
            if len(values) == 1:  # fill_ takes a third of the time
                expected.fill_(values[0])
            else:
                expected.copy_(torch.tensor(values, dtype=expected.dtype)[self._index])
            counters.copy_(expected)
        for each, now in zip(self.sets, counts, strict=True):
            each.counts = now


def _side_by_side(counters: Sequence[Tensor]) -> Tensor:
    """Return a vector of tensors of one number each, and make them views of it."""
    vector = torch.stack(list(counters))
    for i, counter in enumerate(counters):
        counter.set_(vector.untyped_storage(), i, (), ())  # type: ignore[call-overload]
    return vector


def _likeness(grads: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return the dtypes and strides of gradients."""
    return [grad.dtype for grad in grads], list(map(Tensor.stride, grads))


def is_aligned(places: Iterable[int]) -> bool:
    return not functools.reduce(operator.or_, places, 0) & 15


@dataclass(frozen=True)
class Update:
    """An update is one prepared step of a batch. multi: what runs it. rows: the tensors. sets: the kernel's
    numbers as of the preparation. counts: the counters' new values. factor: that of clipped gradients. seed:
    the key of the random numbers."""

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
    """An assembly sorts parameters into batches, and keeps the parameters that no kernel updates.

    gathered: the batches as they were filled. batches: the batches, or parts of them, that have a kernel.
    left_over: the parameters that no kernel updates, with their positions and groups.
    """

    def __init__(self) -> None:
        self.gathered: list[Batch] = []
        self.batches: list[Batch] = []
        self.left_over: list[tuple[int, Group, Tensor]] = []
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
        """Add a parameter to its batch. Those that begin at one address go to different batches, in order."""
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
        """Add the members of a batch to `left_over`, as no kernel updates them."""
        self.left_over += [
            (at, group, ready.param) for at, (group, ready) in zip(batch.at, batch.members, strict=True)
        ]


@dataclass(frozen=True)
class Prepared:
    """A prepared step of some parameters has the numbers as of its preparation; nothing is written yet.

    eager: the parameters that take the class's own step.
    """

    updates: Sequence[Update]
    eager: Sequence[Tensor]

    def run(self) -> None:
        for update in self.updates:
            update.run()
