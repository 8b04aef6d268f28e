"""Parameters that one launch updates, step after step: what is the same at each is found out once."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor

from fusion_compiler.optimizer.formula import Refused
from fusion_compiler.optimizer.launch import MultiTensor, Rows
from fusion_compiler.optimizer.ready import PLAIN, Kind, Numbers, Ready, local, spread

Group = dict[str, Any]
NO_STATE: dict[str, Any] = {}


class Batch:
    """Parameters of one kind and the same numbers, whose counters say the same and whose memory is apart.

    values: of the floats of their groups. counts: what the counters say. aligned: whether every tensor begins
    at a multiple of 16 bytes. multi: what updated them last. What is looked at in each step stands in
    columns: the same tensor of all members.
    """

    def __init__(
        self, kind: Kind, values: tuple[float, ...], counts: tuple[float, ...], aligned: bool
    ) -> None:
        self.kind, self.values, self.counts, self.aligned = kind, values, counts, aligned
        self.members: list[tuple[Group, Ready]] = []
        self.multi: MultiTensor | None = None

    def close(self) -> None:
        """Called when it has all of its members."""
        ready = [ready for _, ready in self.members]
        self._groups = {id(group): group for group, _ in self.members}
        self._params = [one.param for one in ready]
        self._held = [one.held for one in ready]
        self._kept = self._identities()
        self._states = [list(column) for column in zip(*(one.states for one in ready), strict=True)]
        self._counters = [list(column) for column in zip(*(one.counters for one in ready), strict=True)]
        self._sharded = any(type(param) not in PLAIN for param in self._params)
        self._spread = [spread(param) for param in self._params]
        sizes = [local(param).numel() for param in self._params]
        self._filled = [i for i, size in enumerate(sizes) if size]
        self._elements = tuple(size for size in sizes if size)
        columns = self._columns()
        self._like = None if columns is None else _likeness(columns)
        self._note_versions()

    @property
    def group(self) -> Group:
        return self.members[0][0]

    def has(self, numbers: Mapping[int, Numbers | Refused]) -> bool:
        """Whether its groups' numbers are the same still, one group's as another's; takes the new values."""
        structure = self.kind.structure
        now = [numbers.get(key) for key in self._groups]
        first = now[0]
        if not isinstance(first, Numbers) or any(n != first for n in now[1:]):
            return False
        if (first.paths, first.constants) != (structure.floats, structure.constants):
            return False
        self.values = first.values
        return True

    def rows(self, state: Mapping[Tensor, Mapping[str, Any]]) -> Rows | None:
        """The tensors as they are now; None where anything of them has changed but values."""
        if not all(map(operator.is_, map(state.get, self._params, repeat(NO_STATE)), self._held)):
            return None
        if self._identities() != self._kept:
            return None
        columns = self._columns()
        if columns is None or _likeness(columns) != self._like or self._versions_now() != self._versions:
            return None
        if len(self._filled) < len(self._params):  # an empty one has no address
            columns = [[column[i] for i in self._filled] for column in columns]
        starts, *places = [list(map(Tensor.data_ptr, column)) for column in columns]
        places = list(chain(starts, *places))
        if len(set(starts)) < len(starts) or _aligned(places) is not self.aligned:
            return None
        return Rows(columns, tuple(places), self._elements)

    def _columns(self) -> list[list[Tensor]] | None:
        """Parameters, gradients and states, what of them lies on this process; None without all gradients."""
        grads: list[Any] = [param.grad for param in self._params]
        if not self._sharded:
            plain = set(map(type, grads)) == {Tensor} and {g.layout for g in grads} == {torch.strided}
            return [self._params, grads, *self._states] if plain else None
        if any(grad is None for grad in grads) or [spread(grad) for grad in grads] != self._spread:
            return None
        return [list(map(local, column)) for column in (self._params, grads, *self._states)]

    def count(self, counts: tuple[float, ...]) -> None:
        """Gives the counters their new values."""
        for column, value in zip(self._counters, counts, strict=True):
            new = torch.tensor(value, dtype=column[0].dtype)
            torch._foreach_copy_(column, [new] * len(column))
        self.counts = counts
        self._note_versions()

    def _identities(self) -> list[int]:
        return list(map(id, chain.from_iterable([held.values() for held in self._held])))

    def _versions_now(self) -> list[list[int]]:
        return [[counter._version for counter in column] for column in self._counters]

    def _note_versions(self) -> None:
        self._versions = self._versions_now()


def _likeness(columns: Sequence[list[Tensor]]) -> tuple[Any, ...]:
    """What of parameters, gradients and states is not their values."""
    dtypes = [[tensor.dtype for tensor in column] for column in columns]
    strides = [list(map(Tensor.stride, column)) for column in columns[:2]]
    return dtypes, strides, [param.device for param in columns[0]]


def _aligned(places: Iterable[int]) -> bool:
    return not functools.reduce(operator.or_, places, 0) & 15


@dataclass(frozen=True)
class Update:
    """One step of a batch, prepared: what updates it, the tensors, the kernel's numbers as they were then,
    the counters' new values, and the key of its random numbers."""

    batch: Batch
    multi: MultiTensor
    rows: Rows
    numbers: tuple[float, ...]
    counts: tuple[float, ...]
    seed: int

    def run(self) -> None:
        self.multi.run(self.rows, self.numbers, self.seed)
        self.batch.count(self.counts)


class Assembly:
    """Parameters sorted into batches, and those that no kernel updates."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.own: list[tuple[Group, Tensor]] = []
        self._open: dict[tuple[Any, ...], Batch] = {}
        self._turns: dict[int, int] = {}

    def add(self, group: Group, ready: Ready, kind: Kind, values: tuple[float, ...]) -> None:
        """Parameters that begin at one address are in several batches, one after the other."""
        assert ready.param.grad is not None
        tensors = map(local, (ready.param, ready.param.grad, *ready.states))
        places = [tensor.data_ptr() for tensor in tensors]
        turn = self._turns.get(places[0], 0) if places[0] else 0
        self._turns[places[0]] = turn + 1
        counts = tuple(counter.item() for counter in ready.counters)
        aligned = _aligned(places)
        key = (id(kind), values, counts, aligned, turn)
        if key not in self._open:
            self._open[key] = Batch(kind, values, counts, aligned)
            self.batches.append(self._open[key])
        self._open[key].members.append((group, ready))

    def leave(self, batch: Batch) -> None:
        """No kernel updates these."""
        self.batches.remove(batch)
        self.own += [(group, ready.param) for group, ready in batch.members]


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
