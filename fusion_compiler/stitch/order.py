"""Order kernels and library calls, which decides how much memory is in use at once.

The order of the captured program is eager's own. Other candidates run whatever frees at least as much as it
allocates as soon as it can run (a weight's gradient right after the gradient of the layer's result, say), or
run nothing before its first reader is due (what a backward computes again). The candidate with the lowest
peak is taken.

A result takes the memory of an operand that nobody reads any more if its cluster may write there.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fusion_compiler.ir.calls import name_of
from fusion_compiler.ir.chunks import Chunked
from fusion_compiler.ir.dag import Op, OpDag, Ref, nbytes
from fusion_compiler.ir.dims import Hints, numel
from fusion_compiler.ir.effects import is_impure
from fusion_compiler.ir.layout import is_view
from fusion_compiler.ir.overwrite import may_lie_over
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ir.plan_text import human_bytes
from fusion_compiler.ir.walk import reached
from fusion_compiler.ir.writes import base_of, memory, root
from fusion_compiler.ops.schema import written

COLUMNS, SHOWN = 40, 4  # of a memory curve, and tensors named at its peak
LEAST_PLACED = 1 << 20  # bytes of a result that is written over something: of less nothing is gained
BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Step:
    """A step is a launch of a cluster or a library call.

    reads, makes: tensors that own memory. bytes: of `makes`. beside: further bytes, in use while it runs.
    """

    name: str
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    bytes: tuple[int, ...]
    beside: int = 0


@dataclass(frozen=True)
class Order:
    """An order has the steps as they run, and the predicted bytes in use.

    curve: during each step, what the steps make and the owned inputs, each until its last reader is done or,
    if the graph returns it, to the end. alive: what is in use at the peak, the largest first. reuses: results
    that are written over an operand that nobody reads any more, each with that and its bytes. allocated: most
    bytes in use at once of what the steps make, without inputs.
    """

    steps: tuple[Step, ...]
    curve: tuple[int, ...]
    alive: tuple[tuple[str, int], ...]
    allocated: int
    reuses: Mapping[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])

    @property
    def peak(self) -> int:
        return max(self.curve)

    def __str__(self) -> str:
        """Return "▂▄█▃ 5.68 GB in step 3 of 4, mm: logits 2.10 GB, ..."."""
        at = self.curve.index(self.peak)
        most = ", ".join(f"{name} {_size(size)}" for name, size in self.alive[:SHOWN])
        step = f"{self.steps[at].name}, step {at + 1} of {len(self.steps)}" if self.steps else "no step"
        over = f"; {_size(sum(size for _, size in self.reuses.values()))} written over what died"
        return f"{sparkline(self.curve)} {_size(self.peak)} in {step}: {most}{over if self.reuses else ''}"

    def taken(self, inputs: Sequence[str]) -> tuple[int, ...]:
        """Return the positions of the inputs that results are written over."""
        over = {operand for operand, _ in self.reuses.values()}
        return tuple(i for i, name in enumerate(inputs) if name in over)

    def placed(self, plan: FusionPlan) -> FusionPlan:
        """Return the plan with clusters that write where the order says."""
        if not self.reuses:
            return plan
        clusters = tuple(
            replace(c, reuses=tuple((n, self.reuses[n][0]) for n in c.outputs if n in self.reuses))
            for c in plan.clusters
        )
        return replace(plan, clusters=clusters)


def ordered(
    plan: FusionPlan, owned: Iterable[str] = (), hints: Hints | None = None, donated: Container[str] = ()
) -> Order:
    """Return the steps that the outputs of `plan.dag` need, and the steps with effects, in order.

    owned: inputs that are freed at their last use because the caller gives them up. hints: sizes for which
    bytes are counted; by default those that the plan was made for. donated: inputs that may be written over.
    Raises RuntimeError if clusters and calls read each other in a circle.
    """
    hints = plan.setting.hints if hints is None and plan.setting is not None else hints
    calls = (node for node in plan.dag.module.graph.nodes if node.op == "call_function")
    changing = {node.name for node in calls if is_impure(node)}
    steps = _steps(plan, hints)
    impure = {step.name for step in steps if step.name in changing or not changing.isdisjoint(step.makes)}
    steps = _needed(plan, steps, impure)
    read = {name for step in steps for name in step.reads}
    held = {name: nbytes(plan.dag.op(name).outputs, hints) for name in owned if name in read}
    returned = frozenset(memory(plan.dag, name) for name in plan.dag.outputs)
    kinds = itertools.product((False, True), repeat=2)
    waits = _waits(plan, steps, impure)
    steps = [replace(step, reads=_memories(plan.dag, step.reads)) for step in steps]
    orders = [_order(plan, steps, waits, held, returned, late, eager) for late, eager in kinds]
    best = min(orders, key=lambda order: max(curve(order, held, returned)))
    simulated = _Memory(best, held, returned, _Places(plan, frozenset(n for n in held if n not in donated)))
    during = tuple(map(simulated.run, best)) or (sum(held.values()),)
    alive = _alive(best, held, returned, during.index(max(during)), simulated.reuses)
    reuses = {result: (operand, simulated.size[result]) for result, operand in simulated.reuses.items()}
    return Order(best, during, alive, max(curve(best, {}, returned)), reuses)


def _memories(dag: OpDag, names: Iterable[str]) -> tuple[str, ...]:
    """Return the tensors whose memory is held while these names are read."""
    return tuple(dict.fromkeys(memory(dag, name) for name in names))


def curve(steps: Sequence[Step], held: Mapping[str, int], returned: frozenset[str]) -> tuple[int, ...]:
    """Return the bytes in use during each of `steps`, in this order; what is held if there are none."""
    memory = _Memory(steps, held, returned)
    return tuple(map(memory.run, steps)) or (sum(held.values()),)


def sparkline(values: Sequence[int]) -> str:
    """Return the shape of a curve in at most COLUMNS characters, each the largest of the values that it
    stands for."""
    each = -(-len(values) // COLUMNS)
    shown = [max(values[i : i + each]) for i in range(0, len(values), each)]
    return "".join(BARS[min(len(BARS) - 1, len(BARS) * v // max(1, max(shown)))] for v in shown)


def _size(size: int) -> str:
    if size < 50_000:  # less than a tenth of a megabyte
        return human_bytes(size)
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _alive(
    steps: Sequence[Step],
    held: Mapping[str, int],
    returned: frozenset[str],
    at: int,
    reuses: Container[str],
) -> tuple[tuple[str, int], ...]:
    """Return the values in use during step `at`, with their bytes: computed by then, and read then or later,
    or returned."""
    later = {name for step in steps[at:] for name in (*step.reads, *step.makes)} | returned
    sizes = dict(held)
    for step in steps[: at + 1]:
        sizes.update(zip(step.makes, step.bytes, strict=True))
    placed = {name for name in steps[at].makes if name in reuses} if steps else ()
    kept = ((name, size) for name, size in sizes.items() if size and name in later and name not in placed)
    return tuple(sorted(kept, key=lambda item: -item[1]))


def _overwritten(plan: FusionPlan, name: str) -> set[str]:
    """Return the tensors that first had the memory into which a call writes."""
    op = plan.dag.op(name)
    operands = [op.args[i] for i in written(op.target) if i < len(op.args)]
    return {memory(plan.dag, operand.name) for operand in operands if isinstance(operand, Ref)}


def _steps(plan: FusionPlan, hints: Hints | None) -> list[Step]:
    """Return all steps that could run, in program order: a cluster stands where the last of its outputs
    does."""
    dag = plan.dag
    position = {name: i for i, name in enumerate(dag.order)}
    makers = {name: cluster for cluster in plan.clusters for name in cluster.outputs}
    last = {max(c.outputs, key=position.__getitem__): c for c in plan.clusters}
    steps: list[Step] = []
    for name in dag.order:
        op = dag.op(name)
        if name in last:
            makes, reads, name = makers[name].outputs, makers[name].inputs, makers[name].name
        elif name in makers or name in dag.inputs or is_view(op) or op.target is operator.getitem:
            continue
        else:
            makes, reads = tuple(_results(dag, name)), op.inputs
        owners = {n for n in makes if len(dag.op(n).outputs) == 1 and memory(dag, n) == n}
        sizes = tuple(nbytes(dag.op(n).outputs, hints) if n in owners else 0 for n in makes)
        reads = tuple(dict.fromkeys(root(dag, i) for i in reads))
        steps.append(Step(name, reads, makes, sizes, _beside(op, hints) if name in makes else 0))
    return steps


def _beside(op: Op, hints: Hints | None) -> int:
    if not isinstance(op.target, Chunked):
        return 0
    return op.target.beside([(numel(meta.shape, hints), meta.dtype) for meta in op.outputs])


def _results(dag: OpDag, name: str) -> list[str]:
    """Return the results of a step: itself, and the parts that are taken out of it."""
    names = [name]
    for result in names:
        names += [
            n
            for n in dag.consumers(result)
            if dag.op(n).target is operator.getitem and not is_view(dag.op(n))
        ]
    return names


def _needed(plan: FusionPlan, steps: Sequence[Step], impure: Container[str]) -> list[Step]:
    """Return the steps that an output or a change needs."""
    wanted = {root(plan.dag, name) for name in plan.dag.outputs}
    makers = {name: step for step in steps for name in step.makes}
    starts = [makers[n] for n in wanted if n in makers] + [c for c in steps if c.name in impure]
    needed = reached(starts, lambda step: [makers[n] for n in step.reads if n in makers])
    return [step for step in steps if step in needed]


class _Places:
    """The object decides which results may be written over which operands. spared: tensors that must not be
    written over."""

    def __init__(self, plan: FusionPlan, spared: frozenset[str]) -> None:
        self.dag, self.spared = plan.dag, spared
        self.clusters = {cluster.name: cluster for cluster in plan.clusters}

    def may(self, step: Step, result: str, operand: str) -> bool:
        cluster = self.clusters.get(step.name)
        if cluster is None or operand in self.spared:
            return False
        metas = [self.dag.op(name).outputs[0] for name in (result, operand)]
        alone = [name for name in cluster.inputs if memory(self.dag, name) == operand] == [operand]
        alike = metas[0].dtype == metas[1].dtype and metas[0].device == metas[1].device
        return alone and alike and may_lie_over(cluster.nests, result, operand)


class _Memory:
    """The object counts the bytes in use while steps run one after the other."""

    def __init__(
        self,
        steps: Sequence[Step],
        held: Mapping[str, int],
        returned: frozenset[str],
        places: _Places | None = None,
    ) -> None:
        self.size = dict(held) | {n: b for step in steps for n, b in zip(step.makes, step.bytes, strict=True)}
        self.readers = dict.fromkeys(self.size, 0)
        for step in steps:
            for name in step.reads:
                if name in self.readers:
                    self.readers[name] += 1
        self.returned, self.places = returned, places
        self.used = sum(held.values())
        self.reuses: dict[str, str] = {}  # results, and what they are written over

    def change(self, step: Step) -> int:
        """Return by how many bytes the step changes the memory in use."""
        return sum(step.bytes) - sum(self.freed(step))

    def freed(self, step: Step) -> Iterable[int]:
        """Yield the bytes of operands that no later step reads, and of results that no step reads."""
        for name in step.reads:
            if self.readers.get(name) == 1 and name not in self.returned:
                yield self.size[name]
        for name in step.makes:
            if not self.readers[name] and name not in self.returned:
                yield self.size[name]

    def placed(self, step: Step) -> Mapping[str, str]:
        """Return the results that the step writes over operands that nobody reads after it."""
        placed: dict[str, str] = {}
        if self.places is None:
            return placed
        dying = [n for n in step.reads if self.readers.get(n) == 1 and n not in self.returned]
        for result, size in zip(step.makes, step.bytes, strict=True):
            for operand in dying if size >= LEAST_PLACED else ():
                if self.size[operand] == size and self.places.may(step, result, operand):
                    placed[result] = operand
                    dying.remove(operand)
                    break
        return placed

    def run(self, step: Step) -> int:
        """Run the step, and return the bytes in use during it."""
        placed = self.placed(step)
        during = self.used + sum(step.bytes) + step.beside - sum(map(self.size.__getitem__, placed))
        self.reuses |= placed
        self.used += self.change(step)
        for name in step.reads:
            if name in self.readers:
                self.readers[name] -= 1
        return during


def _waits(plan: FusionPlan, steps: Sequence[Step], impure: Container[str]) -> list[set[int]]:
    """Return, for each step, the numbers of those that have to run before it."""
    makers = {name: i for i, step in enumerate(steps) for name in step.makes}
    waits = [{makers[name] for name in step.reads if name in makers} for step in steps]
    dag = plan.dag
    into = [{base_of(dag, name) for name in step.makes} - {None} for step in steps]
    changing = [i for i, step in enumerate(steps) if step.name in impure and not into[i]]
    over = {i: _overwritten(plan, steps[i].name) for i in changing}
    for i, bases in enumerate(into):  # who reads what a base was comes first, who reads the result later
        for j, step in enumerate(steps) if bases else ():
            if j != i and not (bases - over.get(j, set())).isdisjoint(step.reads):
                waits[i].add(j)
    # Assertions may run in any order. What one of them waits for may be in a cluster that reads a later draw.
    asserting = {n.name for n in dag.nodes.values() if name_of(n.target) == "_assert_async"}
    sequential = [i for i in changing if steps[i].name not in asserting]
    for before, after in itertools.pairwise(sequential):
        waits[after].add(before)
    for i, names in over.items():
        for name in names:
            for j, step in enumerate(steps):
                if j != i and any(memory(dag, read) == name for read in step.reads):
                    waits[max(i, j)].add(min(i, j))
    return waits


def _order(
    plan: FusionPlan,
    steps: Sequence[Step],
    waits: Sequence[set[int]],
    held: Mapping[str, int],
    returned: frozenset[str],
    late: bool,
    eager: bool,
) -> tuple[Step, ...]:
    """Return the steps in program order as far as operands allow. late: each step in the place of the first
    that needs it. eager: first all steps that leave no more memory in use."""
    memory = _Memory(steps, held, returned)
    followers: list[list[int]] = [[] for _ in steps]
    for i, before in enumerate(waits):
        for j in before:
            followers[j].append(i)
    due = list(range(len(steps)))
    for i in reversed(due if late else ()):
        due[i] = min((due[j] for j in followers[i]), default=i)
    missing = [len(before) for before in waits]
    ready = [i for i, count in enumerate(missing) if not count]
    order: list[Step] = []
    while ready:
        ready.sort(key=lambda i: (due[i], i))
        frees = (i for i in ready if memory.change(steps[i]) <= 0) if eager else ()
        chosen = next(iter(frees), ready[0])
        ready.remove(chosen)
        memory.run(steps[chosen])
        order.append(steps[chosen])
        for i in followers[chosen]:
            missing[i] -= 1
            if not missing[i]:
                ready.append(i)
    if len(order) < len(steps):
        stuck = next(step.name for i, step in enumerate(steps) if missing[i])
        raise RuntimeError(f"the plan of {plan.name} has a cycle through {stuck}")
    return tuple(order)
