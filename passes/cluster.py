"""Group ops into clusters: best predicted gain first, re-scored as clusters grow.

Every fusible op starts as a cluster of its own. A merge is legal when no path leaves the pair and comes
back (kept as bit sets), when the union lowers to one tile program, and when that obeys the laws; it is
worth it when the cost model predicts that the union is faster than the two. Ops that cost less to compute
again than to read (constants, index arithmetic, widening casts) are part of every cluster that reads them.
"""

from __future__ import annotations

import heapq
import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy
import torch

from fusion_compiler.dag import Op, OpDag
from fusion_compiler.device import DeviceSpec
from fusion_compiler.dims import Dim, hint, numel, product
from fusion_compiler.loops import ROWS, Load, LoopNest, Reduce
from fusion_compiler.ops import Kind, spec_of
from fusion_compiler.passes import layout
from fusion_compiler.passes.cost import BufferInfo, cost_of
from fusion_compiler.passes.legality import first_refusal
from fusion_compiler.passes.lower import Illegal, lower
from fusion_compiler.passes.match import Match
from fusion_compiler.passes.memo import Memo
from fusion_compiler.passes.recompute import recompute
from fusion_compiler.passes.simplify import simplify
from fusion_compiler.patterns import USER_NAMESPACE, ClusterHint
from fusion_compiler.plan import Cluster, Cost, FusionPlan, Leftover, Rejected
from fusion_compiler.schema import short_name

FUSIBLE = frozenset({Kind.ELEMENTWISE, Kind.REDUCTION, Kind.NORMALIZATION, Kind.RANDOM, Kind.LAYOUT})
REASONS = {Kind.CONTRACTION: "library call"}
SEEDS: dict[object, str] = {
    torch.ops.fusion_compiler.seed.default: "draws the seed from PyTorch's generator, once a graph"
}
MOST_BESIDE = 4  # clusters in one launch
SMALL_US = 40.0  # a longer kernel gains nothing from a shared launch
L2_SHARE = 0.25  # of L2 that a tensor may fill and still be there when the next kernel reads it


@dataclass(frozen=True)
class Part:
    """A cluster while the search runs. ops in topological order, outputs among them.

    kept: ops that others compute again but that this part alone has to store.
    """

    ops: tuple[str, ...]
    kept: frozenset[str]
    outputs: tuple[str, ...]
    loops: LoopNest
    cost: Cost
    unfused_us: float


class Reads:
    """Who reads whom once views are looked through."""

    def __init__(self, dag: OpDag) -> None:
        self.dag = dag
        self.position = {name: i for i, name in enumerate(dag.order)}
        self.sources: dict[str, tuple[str, ...]] = {}
        self.users: dict[str, list[str]] = {name: [] for name in dag.order}
        for name in dag.order:
            sources = tuple(dict.fromkeys(self.base(i) for i in dag.op(name).inputs))
            self.sources[name] = sources
            if not layout.is_view(dag.op(name)):
                for source in sources:
                    self.users[source].append(name)
        self.returned = frozenset(self.base(o) for o in dag.outputs)

    def base(self, name: str) -> str:
        """The op whose result a chain of views shows."""
        while layout.is_view(self.dag.op(name)):
            name = self.dag.op(name).inputs[0]
        return name

class Search:
    """One graph's clustering on one device."""

    def __init__(
        self,
        dag: OpDag,
        device: DeviceSpec,
        hints: Mapping[sympy.Symbol, int],
        rounded: bool,
        matches: Sequence[Match] = (),
    ) -> None:
        self.dag, self.device, self.hints, self.rounded = dag, device, hints, rounded
        self.matches = matches
        self.reads = Reads(dag)
        self.infos: dict[str, BufferInfo] = {}
        self.rejections: dict[tuple[str, str], Rejected] = {}
        self.leftovers: list[Leftover] = []
        self.memo: dict[tuple[tuple[str, ...], frozenset[str]], Part | Illegal] = {}
        self.priced = Memo(dag, self.price)
        self.again = frozenset(n for n in dag.order if self.fusible(dag.op(n)) and self.cheap(dag.op(n)))
        self.parts: dict[int, Part] = {}
        self.owner: dict[str, int] = {}
        self.start()

    # -- single ops --------------------------------------------------------------------------------

    def fusible(self, op: Op) -> bool:
        return (
            op.kind in FUSIBLE
            and not layout.is_view(op)
            and len(op.outputs) == 1
            and spec_of(op.target) is not None
        )

    def cheap(self, op: Op) -> bool:
        """Whether computing it again costs no more than reading it: one tensor at most, not wider."""
        if op.kind is Kind.REDUCTION or op.kind is Kind.RANDOM:
            return False
        spec = spec_of(op.target)
        tensors = [m for i in op.inputs for m in self.dag.op(i).outputs]
        if spec is None or spec.special > 0 or spec.flops > 2 or len(tensors) > 1:
            return False
        out = op.outputs[0]
        return all(
            m.dtype.itemsize <= out.dtype.itemsize and numel(m.shape) <= numel(out.shape) for m in tensors
        )

    def info(self, name: str) -> BufferInfo:
        found = self.infos.get(name)
        if found is None:
            op = self.dag.op(name)
            meta = op.outputs[0]
            count = self.count(meta.shape)
            made_here = op.target not in ("placeholder", "get_attr")
            near = made_here and count * meta.dtype.itemsize < L2_SHARE * self.device.l2_bytes
            found = self.infos[name] = BufferInfo(product(meta.shape), meta.dtype.itemsize, near)
        return found

    def count(self, shape: tuple[Dim, ...]) -> int:
        return hint(product(shape), self.hints)

    def part(self, ops: tuple[str, ...], kept: frozenset[str] = frozenset()) -> Part:
        """Lower, check and price a set of ops. Raises Illegal."""
        known = self.memo.get((ops, kept))
        if known is None:
            try:
                known = self._part(ops, kept)
            except Illegal as error:
                known = error
            self.memo[ops, kept] = known
        if isinstance(known, Illegal):
            raise known
        return known

    def _part(self, ops: tuple[str, ...], kept: frozenset[str]) -> Part:
        inside = set(ops)
        outputs = tuple(
            n for n in ops if n in kept or (n not in self.again and self.escapes(n, inside, kept))
        )
        if not outputs:
            raise Illegal("dead", "nothing reads it")
        loops, cost = self.priced(ops, outputs)
        return Part(ops, kept, outputs, loops, cost, cost.us)

    def price(self, ops: tuple[str, ...], outputs: tuple[str, ...]) -> tuple[LoopNest, Cost]:
        """The tile program of a set of ops, and what it takes. Raises Illegal."""
        loops = simplify(lower(self.dag, ops, outputs, round_like_eager=self.rounded))
        refusal = first_refusal(loops, self.device)
        if refusal is not None:
            raise Illegal(*refusal)
        buffers = {n.buffer: self.info(n.buffer) for n in loops.nodes if isinstance(n, Load)}
        buffers |= {s.buffer: self.info(s.buffer) for s in loops.stores}
        return loops, cost_of(loops, self.device, buffers, self.hints)

    def escapes(self, name: str, inside: set[str], kept: frozenset[str]) -> bool:
        """Whether anything outside reads a value, or computes again what reads it."""
        return name in self.reads.returned or any(
            user not in inside or (user in self.again and self.elsewhere(user, inside, kept))
            for user in self.reads.users[name]
        )

    def elsewhere(self, name: str, inside: set[str], kept: frozenset[str]) -> bool:
        """Whether a part other than this one computes `name` (again)."""
        if self.must_exist(name) and name not in kept:
            return True
        return any(
            user in self.owned
            and (user not in inside or (user in self.again and self.elsewhere(user, inside, kept)))
            for user in self.reads.users[name]
        )

    def must_exist(self, name: str) -> bool:
        """Whether something that cannot compute it again reads a value."""
        return name in self.reads.returned or any(u not in self.owned for u in self.reads.users[name])

    def closure(self, name: str) -> tuple[str, ...]:
        """An op with all that is computed again for it, in topological order."""
        found, stack = {name}, [name]
        while stack:
            for source in self.reads.sources[stack.pop()]:
                if source in self.again and source not in found:
                    found.add(source)
                    stack.append(source)
        return tuple(sorted(found, key=self.reads.position.__getitem__))

    def start(self) -> None:
        """One part for every op that needs a result in memory."""
        order = [n for n in self.dag.order if n not in self.dag.inputs and not layout.is_view(self.dag.op(n))]
        self.owned = {n for n in order if self.fusible(self.dag.op(n))}
        devices = {n: m.device for n in order for m in self.dag.op(n).outputs[:1]}
        for name in list(order):
            op = self.dag.op(name)
            if name not in self.owned and op.target is not operator.getitem and op.outputs:
                reason = "a kernel of the user's" if _is_users(op) else "no row in the operator table"
                self.leave(op, REASONS.get(op.kind) or SEEDS.get(op.target, reason))
        for name in order:
            reason = self.foreign(self.dag.op(name), devices) if name in self.owned else None
            if reason is not None:
                self.give_up(name, reason)
        while not self.build_parts(order):  # an op that is given up needs its operands to exist
            self.memo.clear()
        for number in self.parts:
            self.owner[self.dag.order[number]] = number

    def build_parts(self, order: list[str]) -> bool:
        """Lower every op that needs a result in memory; False if some could not be."""
        self.parts, complete = {}, True
        for name in order:
            if name not in self.owned or (name in self.again and not self.must_exist(name)):
                continue
            kept = frozenset({name}) & self.again
            try:
                self.parts[self.reads.position[name]] = self.part(self.closure(name), kept)
            except Illegal as error:
                complete = complete and error.rule == "dead"
                others = set(self.closure(name)) - {name}
                if (
                    others and error.rule != "dead"
                ):  # what it would compute again, it reads from memory instead
                    self.again -= others
                    continue
                self.give_up(name, "" if error.rule == "dead" else f"{error.rule}: {error.reason}")
        return complete

    def give_up(self, name: str, reason: str) -> None:
        """An op stays an ATen call, or goes with no reason if nothing reads it."""
        self.owned.discard(name)
        self.again -= {name}
        if reason:
            self.leave(self.dag.op(name), reason)

    def foreign(self, op: Op, devices: Mapping[str, str]) -> str | None:
        """A tensor on another device than the graph's."""
        tensors = [m.device for i in op.inputs for m in self.dag.op(i).outputs]
        if any(d != op.outputs[0].device for d in tensors):
            return "reads a tensor on another device"
        main = max(set(devices.values()), key=list(devices.values()).count)
        return (
            None if op.outputs[0].device == main else f"runs on {op.outputs[0].device}, the graph on {main}"
        )

    def leave(self, op: Op, reason: str) -> None:
        self.leftovers.append(Leftover(op.name, str(op.target), str(op.kind), reason, op.source))

    # -- convexity ----------------------------------------------------------------------------------

    def build_reach(self) -> None:
        """Descendants and ancestors of every unit, as bit sets over unit numbers."""
        unit = dict(self.owner)
        for name in self.dag.order:
            if name not in unit and not layout.is_view(self.dag.op(name)) and name not in self.again:
                unit[name] = self.reads.position[name]
        self.unit = unit
        self.below: dict[int, int] = {}
        self.above: dict[int, int] = {}
        for name in self.dag.order:
            number = unit.get(name)
            if number is None:
                continue
            above = 0
            for source in self.unit_sources(number):
                above |= self.above[source] | (1 << source)
            self.above[number] = above
            self.below[number] = 0
        for number in sorted(self.above, reverse=True):
            for source in self.unit_sources(number):
                self.below[source] |= self.below[number] | (1 << number)

    def unit_sources(self, number: int) -> set[int]:
        """Units that a unit reads."""
        part = self.parts.get(number)
        names = part.ops if part else (self.dag.order[number],)
        inside = set(names)
        out: set[int] = set()
        for name in names:
            for source in self.reads.sources[name]:
                if source not in inside and source in self.unit and self.unit[source] != number:
                    out.add(self.unit[source])
        return out

    def convex(self, a: int, b: int) -> bool:
        """No unit lies on a path between them."""
        between = (self.below[a] & self.above[b]) | (self.below[b] & self.above[a])
        return not between & ~((1 << a) | (1 << b))

    def join_reach(self, kept: int, gone: int) -> None:
        """`gone` becomes part of `kept`: everything above either is above both, likewise below."""
        pair = (1 << kept) | (1 << gone)
        above = (self.above[kept] | self.above[gone]) & ~pair
        below = (self.below[kept] | self.below[gone]) & ~pair
        del self.above[gone], self.below[gone]
        self.above[kept], self.below[kept] = above, below
        bit = 1 << kept
        for numbers, reach, more in ((above, self.below, below | bit), (below, self.above, above | bit)):
            for number in _bits(numbers):  # nothing else had either of the two in its reach
                reach[number] = (reach[number] & ~pair) | more

    # -- the search ----------------------------------------------------------------------------------

    def run(self) -> None:
        """Merge until nothing gains."""
        self.build_reach()
        self.version = dict.fromkeys(self.parts, 0)
        self.heap: list[tuple[float, int, int, int, int]] = []
        for match in self.matches:
            if isinstance(match.pattern, ClusterHint) and match.pattern.fuse:
                self.try_hint(match)
        for number in self.parts:
            for other, saved in self.neighbours(number).items():
                if number < other:
                    self.push(number, other, saved)
        self.merge_all()
        while recompute(self):
            self.merge_all()

    def merge_all(self) -> None:
        while self.heap:
            _, a, b, va, vb = heapq.heappop(self.heap)
            if self.version.get(a) == va and self.version.get(b) == vb:
                self.try_merge(a, b)

    def push(self, a: int, b: int, saved: int) -> None:
        heapq.heappush(self.heap, (-float(saved), a, b, self.version[a], self.version[b]))

    def neighbours(self, number: int) -> dict[int, int]:
        """Parts that share a tensor with this one, and the bytes that one pass over both would not move."""
        part = self.parts[number]
        inside = set(part.ops)
        found: dict[int, int] = {}
        for name in dict.fromkeys(s for op in part.ops for s in self.reads.sources[op] if s not in inside):
            if not self.dag.op(name).outputs:
                continue
            size = self.bytes(name)
            owner = self.owner.get(name)
            if owner is not None and owner != number and owner in self.parts:
                found[owner] = found.get(owner, 0) + 2 * size
            for user in self.readers(name):
                if user != number:
                    found[user] = found.get(user, 0) + size
        for name in part.outputs:
            for user in self.readers(name):
                if user != number:
                    found[user] = found.get(user, 0) + 2 * self.bytes(name)
        return found

    def readers(self, name: str) -> set[int]:
        """Parts that read a tensor, directly or through what they compute again."""
        out: set[int] = set()
        stack = [name]
        while stack:
            for user in self.reads.users[stack.pop()]:
                if user in self.again:
                    stack.append(user)
                if user in self.owner:
                    out.add(self.owner[user])
        return out

    def bytes(self, name: str) -> int:
        info = self.info(name)
        return hint(info.numel, self.hints) * info.itemsize

    def held(self, ops: Sequence[str]) -> list[Match]:
        """The patterns that a set of ops holds whole, views aside."""
        inside = set(ops)
        return [
            m for m in self.matches if all(n in inside or not self.fusible(self.dag.op(n)) for n in m.ops)
        ]

    def try_hint(self, match: Match) -> None:
        """One cluster of all that a hint names, where that is legal and faster than its ops alone."""
        numbers = sorted({self.owner[n] for n in match.ops if n in self.owner})
        if len(numbers) < 2:
            return
        parts = [self.parts[n] for n in numbers]
        names = tuple(sorted({o for p in parts for o in p.ops}, key=self.reads.position.__getitem__))
        pair = (match.name, self.label(parts[-1]))
        mask = sum(1 << n for n in numbers)
        above, below = 0, 0
        for n in numbers:
            above, below = above | self.above[n], below | self.below[n]
        if above & below & ~mask:
            self.rejections[pair] = Rejected(*pair, "convex", "an op outside needs one and feeds another")
            return
        try:
            union = self.part(names, frozenset[str]().union(*(p.kept for p in parts)))
        except Illegal as error:
            self.rejections[pair] = Rejected(*pair, error.rule, error.reason)
            return
        apart = sum(p.cost.us for p in parts)
        if union.cost.us >= apart:
            reason = f"together {union.cost.us:.1f} us, apart {apart:.1f} us"
            self.rejections[pair] = Rejected(*pair, "cost", reason, apart - union.cost.us)
            return
        unfused = sum(p.unfused_us for p in parts)
        for gone in numbers[1:]:
            self.join(numbers[0], gone)
        self.parts[numbers[0]] = replace(union, unfused_us=unfused)

    def join(self, kept: int, gone: int) -> None:
        """All that belonged to the part `gone` belongs to `kept`."""
        part = self.parts.pop(gone)
        del self.version[gone]
        for owners in (self.owner, self.unit):
            owners.update({name: kept for name in part.ops if owners.get(name) == gone})
        self.join_reach(kept, gone)
        self.version[kept] += 1

    def try_merge(self, a: int, b: int) -> None:
        first, second = self.parts[a], self.parts[b]
        names = tuple(sorted({*first.ops, *second.ops}, key=self.reads.position.__getitem__))
        pair = (self.label(first), self.label(second))
        if not self.convex(a, b):
            self.rejections[pair] = Rejected(
                *pair, "convex", "an op between them needs one and feeds the other"
            )
            return
        try:
            union = self.part(names, first.kept | second.kept)
        except Illegal as error:
            if error.rule == "dead":
                return
            self.rejections[pair] = Rejected(*pair, error.rule, error.reason, self.bound(first, second))
            return
        gain = first.cost.us + second.cost.us - union.cost.us
        if gain <= 0:
            reason = f"together {union.cost.us:.1f} us, apart {first.cost.us:.1f} + {second.cost.us:.1f} us"
            self.rejections[pair] = Rejected(*pair, "cost", reason, gain)
            return
        kept, gone = min(a, b), max(a, b)
        self.join(kept, gone)
        self.parts[kept] = replace(union, unfused_us=first.unfused_us + second.unfused_us)
        for other, saved in self.neighbours(kept).items():
            self.push(min(kept, other), max(kept, other), saved)

    def run_beside(self) -> list[list[Part]]:
        """Independent clusters that are siblings share a launch: it costs what a small kernel costs."""
        groups: list[list[int]] = []
        for number in sorted(self.parts):
            home = next((g for g in groups if self.siblings(g, number)), None)
            if home is None:
                groups.append([number])
            else:
                home.append(number)
                self.join_reach(home[0], number)
        return [[self.parts[n] for n in g] for g in groups]

    def siblings(self, group: list[int], number: int) -> bool:
        """Whether a part may run beside a group: relatives, no path either way, no sums over rows."""
        first, part = group[0], self.parts[number]
        mask = 1 << number
        if (self.below[first] | self.above[first]) & mask or len(group) >= MOST_BESIDE:
            return False
        members = [self.parts[n] for n in group]
        if any(_sums_rows(p.loops) or p.cost.us > SMALL_US for p in (part, *members)):
            return False
        if (not any(a.group == ROWS for a in part.loops.axes)) != (
            not any(a.group == ROWS for a in members[0].loops.axes)
        ):
            return False
        return any(self.related(part, other) for other in members)

    def related(self, a: Part, b: Part) -> bool:
        """They share a source, a reader, or the source of the library calls that they read."""
        mine, theirs = self.read_by(a), self.read_by(b)
        if mine & theirs:
            return True
        readers = {u for n in a.outputs for u in self.reads.users[n]}
        if readers & {u for n in b.outputs for u in self.reads.users[n]}:
            return True
        return bool(self.behind(mine) & self.behind(theirs))

    def behind(self, names: set[str]) -> set[str]:
        """Sources of the library calls among some tensors: the projections of one input are siblings."""
        calls = [n for n in names if self.dag.op(n).kind is Kind.CONTRACTION]
        return {s for n in calls for s in self.reads.sources[n]}

    def bound(self, a: Part, b: Part) -> float:
        """What a merge could save at most: the tensors between them and one launch."""
        shared = (set(a.outputs) | set(self.read_by(a))) & (set(b.outputs) | set(self.read_by(b)))
        moved = sum(self.bytes(n) for n in shared if self.dag.op(n).outputs)
        return moved / self.device.copy_bandwidth * 1e6 + self.device.launch_us

    def read_by(self, part: Part) -> set[str]:
        return {s for op in part.ops for s in self.reads.sources[op] if s not in part.ops}

    def label(self, part: Part) -> str:
        return part.outputs[-1]


def _is_users(op: Op) -> bool:
    return getattr(op.target, "namespace", "") == USER_NAMESPACE


def _bits(mask: int) -> Iterator[int]:
    """Positions of the bits that are set."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def cluster_name(dag: OpDag, ops: tuple[str, ...], matches: Sequence[Match] = (), limit: int = 6) -> str:
    """What the kernel does: the patterns that it holds whole, the names of its other ops."""
    skip = {"cast", "clone", "_to_copy", "full", "scalar_tensor", "where", "uniform"}
    first = {next(n for n in ops if n in set(m.ops)): m.name for m in matches}
    covered = {n for m in matches for n in m.ops} - first.keys()
    names = [first.get(n) or short_name(dag.op(n).target).strip("_") for n in ops if n not in covered]
    names = [n for n in names if n not in skip] or names
    short: list[str] = []
    for name in names:
        if not short or short[-1] != name:
            short.append(name)
    shown = short if len(short) <= limit else [*short[: limit - 1], "etc"]
    return "_".join(shown)


def plan(
    name: str,
    dag: OpDag,
    device: DeviceSpec,
    hints: Mapping[sympy.Symbol, int],
    *,
    numerics: str = "float32",
    matches: Sequence[Match] = (),
) -> FusionPlan:
    """Decide what is fused in one graph. Pure: the plan is all that comes out.

    hints: sizes that symbols had. matches: where patterns were found.
    """
    search = Search(dag, device, hints, numerics == "eager", matches)
    search.run()
    taken = set(dag.order)
    clusters: list[Cluster] = []
    for parts in search.run_beside():
        ops = tuple(sorted({n for p in parts for n in p.ops}, key=search.reads.position.__getitem__))
        held = search.held(ops)
        unique = base = cluster_name(dag, ops, held)
        for i in itertools.count(2):
            if unique not in taken:
                break
            unique = f"{base}_{i}"
        taken.add(unique)
        pattern = ", ".join(dict.fromkeys(m.name for m in held)) or None
        clusters.append(replace(_cluster(unique, ops, parts, device), pattern=pattern))
    final = {n: c.name for c in clusters for n in c.ops}
    rejections = _current(search, final)
    return FusionPlan(name, dag, tuple(clusters), tuple(search.leftovers), rejections, device.name)


def _cluster(name: str, ops: tuple[str, ...], parts: list[Part], device: DeviceSpec) -> Cluster:
    nests = tuple(p.loops for p in parts)
    inputs = tuple(dict.fromkeys(n.buffer for loops in nests for n in loops.nodes if isinstance(n, Load)))
    cost = parts[0].cost
    for part in parts[1:]:
        more = part.cost
        us = cost.us + more.us - device.launch_us
        total = (
            cost.bytes_read + more.bytes_read,
            cost.bytes_written + more.bytes_written,
            cost.flops + more.flops,
        )
        cost = Cost(us, *total, cost.bound)
    outputs = tuple(n for p in parts for n in p.outputs)
    unfused = sum(p.unfused_us for p in parts)
    return Cluster(name, ops, inputs, outputs, nests[0], cost, unfused, beside=nests[1:])


def _sums_rows(loops: LoopNest) -> bool:
    return any(isinstance(n, Reduce) and ROWS in n.over for n in loops.nodes)


def _current(search: Search, final: Mapping[str, str]) -> tuple[Rejected, ...]:
    """Refusals between clusters that are still apart, by cluster name, the last word on each pair."""
    out: dict[tuple[str, str], Rejected] = {}
    for (a, b), rejected in search.rejections.items():
        pair = (final.get(a, a), final.get(b, b))
        if pair[0] != pair[1]:
            out[pair] = replace(rejected, a=pair[0], b=pair[1])
    return tuple(sorted(out.values(), key=lambda r: -r.saving_us))
