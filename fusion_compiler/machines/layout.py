"""Put a model's operators, parameters and activations into the chain that is cut, and cuts back into
stages."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor, nn

from fusion_compiler.machines.cut import Chain, Item, Place, Value
from fusion_compiler.machines.estimate import Times
from fusion_compiler.machines.plan import Crossing, Edge, Stage
from fusion_compiler.machines.workload import Workload, cuttable, is_view, module_path

MOST_GROUPS = 1500  # between which cuts are tried; the least bytes cross the borders that are kept


@dataclass(frozen=True)
class Layout:
    """A layout is a model as a chain for given machines.

    times: of the operators, for each kind of machine. repeated: operators that every stage which reads them
    computes.
    optimizer_bytes: for each element of a trained parameter. borders: positions in `work.order` before which
    it may be cut, from 0 to the end: group g is what is between two of them.
    """

    work: Workload
    times: tuple[Times, ...]
    repeated: frozenset[str]
    optimizer_bytes: float
    borders: tuple[int, ...]

    @classmethod
    def of(
        cls, work: Workload, times: tuple[Times, ...], repeated: frozenset[str], optimizer_bytes: float
    ) -> Layout:
        """Return the layout with all borders, or with the MOST_GROUPS - 1 that the least bytes cross."""
        every = tuple(i for i, may in enumerate(cuttable(work)) if may)
        layout = cls(work, times, repeated, optimizer_bytes, every)
        if len(every) <= MOST_GROUPS + 1:
            return layout
        forward, backward = layout.chain.crossing
        inner = sorted(range(1, len(every) - 1), key=lambda g: forward[g] + backward[g])
        kept = (0, *sorted(inner[: MOST_GROUPS - 1]), len(every) - 1)
        return replace(layout, borders=tuple(every[g] for g in kept))

    @cached_property
    def group(self) -> tuple[int, ...]:
        """Return the group of each operator, and the last group for the results at the end."""
        numbers = [g for g, (i, j) in enumerate(itertools.pairwise(self.borders)) for _ in range(i, j)]
        return (*numbers, numbers[-1])

    @cached_property
    def uses(self) -> Mapping[str, frozenset[int]]:
        """Return the groups that read each value, by its name: those that read it themselves, and those for
        which a repeated operator does."""
        uses: dict[str, frozenset[int]] = {}
        for name in reversed((*self.work.dag.inputs, *self.work.order)):
            groups: set[int] = set()
            for position in self.work.readers(name):
                reader = self.work.order[position] if position < len(self.work.order) else ""
                groups |= uses[reader] if reader in self.repeated else {self.group[position]}
            uses[name] = frozenset(groups)
        return uses

    @cached_property
    def chain(self) -> Chain:
        return Chain(len(self.borders) - 1, len(self.times), self.items(), self.values())

    def items(self) -> tuple[Item, ...]:
        items = []
        for i, name in enumerate(self.work.order):
            uses = self.uses[name] if name in self.repeated else {self.group[i]}
            items.append(Item(tuple(uses), tuple(times[i] for times in self.times)))
            if name in self.work.differentiable and not is_view(self.work.dag.nodes[name].target):
                items.append(Item((self.group[i], *self.uses[name]), saved=self.work.nbytes(name)))
        items += [Item(tuple(self.uses[name]), state=self.state_bytes(name)) for name in self.work.attributes]
        return tuple(items)

    def values(self) -> tuple[Value, ...]:
        values = []
        firsts = {**dict.fromkeys(self.work.inputs, -1), **self.work.position}
        for name, position in firsts.items():
            if name not in self.repeated and self.uses[name]:
                first = self.group[position] if position >= 0 else -1
                size = self.work.nbytes(name)
                values.append(
                    Value(first, max(self.uses[name]), size, size * (name in self.work.differentiable))
                )
        return tuple(values)

    def state_bytes(self, attribute: str) -> float:
        """Return the bytes of a parameter or buffer, its gradient and the optimizer's state."""
        tensor = self.work.tensor(attribute)
        if not isinstance(tensor, Tensor):
            return 0.0
        trained = attribute in self.work.differentiable
        return tensor.nbytes * (1 + trained) + trained * self.optimizer_bytes * tensor.numel()

    def stages(self, places: Sequence[Place], names: Sequence[str], at: Sequence[int]) -> tuple[Stage, ...]:
        """Return the stages between cuts. names: of the machines of the chain."""
        ends = itertools.pairwise((0, *at, self.chain.groups))
        return tuple(
            self.stage(number, place, names[place.machine], i, j)
            for number, (place, (i, j)) in enumerate(zip(places, ends, strict=True))
        )

    def stage(self, number: int, place: Place, machine: str, first: int, last: int) -> Stage:
        inside = set(range(first, last))
        repeated = tuple(sorted(self.repeated_in(first, last), key=self.work.position.__getitem__))
        here = self.work.order[self.borders[first] : self.borders[last]]
        here = tuple(n for n in here if n not in self.repeated or self.uses[n] & inside)
        operators = repeated + here
        read = [n for n in self.work.attributes if self.uses[n] & inside]
        tensors = {n: self.work.tensor(n) for n in read}
        parameters = [n for n in read if isinstance(tensors[n], nn.Parameter)]
        chain = self.chain
        return Stage(
            number=number,
            machine=machine,
            operators=operators,
            repeated=repeated,
            modules=tuple(dict.fromkeys(module_path(self.work.dag.nodes[n]) for n in here)),
            parameters=tuple(self.work.attributes[n] for n in parameters),
            buffers=tuple(
                self.work.attributes[n]
                for n in read
                if n not in parameters and isinstance(tensors[n], Tensor)
            ),
            parameter_bytes=sum(t.nbytes for n in parameters if isinstance(t := tensors[n], Tensor)),
            forward_us=float(chain.us[place.kind][0][first, last]),
            backward_us=float(chain.us[place.kind][1][first, last]),
            memory_bytes=int(chain.state[first, last] + place.in_flight * chain.saved[first, last]),
            in_flight=place.in_flight,
        )

    def repeated_in(self, first: int, last: int) -> set[str]:
        """Return the operators in front of a stage that it computes again."""
        earlier = self.work.order[: self.borders[first]]
        return {n for n in earlier if n in self.repeated and any(first <= g < last for g in self.uses[n])}

    def edges(self, places: Sequence[Place], at: Sequence[int]) -> tuple[Edge, ...]:
        edges = []
        for number, (group, place) in enumerate(zip(at, places[1:], strict=True)):
            tensors = self.crossings(group)
            forward = sum(t.bytes for t in tensors)
            backward = sum(t.bytes for t in tensors if t.differentiable)
            us = [place.link.us(n) if place.link else 0.0 for n in (forward, backward)]
            latency = place.link.latency_us if place.link else 0.0
            edges.append(Edge(number, number + 1, tensors, us[0], us[1], latency))
        return tuple(edges)

    def crossings(self, group: int) -> tuple[Crossing, ...]:
        """Return the tensors that cross a cut before a group."""
        position, names = self.borders[group], []
        for name in (*self.work.inputs, *self.work.order[:position]):
            if name not in self.repeated and self.uses[name] and max(self.uses[name]) >= group:
                names.append(name)
        return tuple(map(self.work.crossing, names))
