"""The ops of a graph as the search sees them: which of them kernels can hold, and what a set of them costs.

Every fusible op starts as a candidate of its own. Ops that cost less to compute again than to read
(constants, index arithmetic, widening casts) belong to every candidate that reads them.
"""

from __future__ import annotations

import contextlib
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import sympy

from fusion_compiler.ir import layout
from fusion_compiler.ir.dag import FEW_ROWS, LEAST_SHARING, Op, OpDag
from fusion_compiler.ir.decision import DELIBERATE_CALL, EAGER_OP, LIBRARY_CALL, Decision, Outcome
from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.dims import Dim, hint, numel, product
from fusion_compiler.ir.loops import COLS, Load, LoopNest, is_only_stored_in_place
from fusion_compiler.ir.plan_data import Cost
from fusion_compiler.ir.walk import reached, walk
from fusion_compiler.ir.writes import bases, waits
from fusion_compiler.ops.own import depthwise
from fusion_compiler.ops.table import Kind, spec_of
from fusion_compiler.passes.fuse.cost import contraction_cost, cost_of, tokens_of
from fusion_compiler.passes.fuse.legality import first_refusal
from fusion_compiler.passes.fuse.library import library_call
from fusion_compiler.passes.fuse.memo import Memo
from fusion_compiler.passes.fuse.movement import L2_SHARE
from fusion_compiler.passes.lower.effort import Effort
from fusion_compiler.passes.lower.index_splits import IndexSplit, index_splits_of
from fusion_compiler.passes.lower.lower import lower
from fusion_compiler.passes.lower.products import cuts_of, has_few_rows, product_of, splits_of
from fusion_compiler.passes.lower.simplify import normalized_groups, simplify
from fusion_compiler.passes.lower.space import Illegal
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.matrices import Matrices
from fusion_compiler.schedule.products import Products
from fusion_compiler.schedule.work import BufferInfo

FUSIBLE = frozenset({
    Kind.ELEMENTWISE, Kind.REDUCTION, Kind.WINDOWS, Kind.SCAN, Kind.NORMALIZATION, Kind.RANDOM, Kind.LAYOUT,
})  # fmt: skip
# Kernels that choose among the pieces of a concatenation at every element reach this share of the speed that
# is predicted for them: measured on an H200, 0.67 to 0.85.
CHOOSING = 0.85
# A program computes several results of a product of at most so many rows. Products of more rows run on tensor
# units, by tiles of sixteen rows of the matrix: a small matrix has too few of them to keep a device busy.
MOST_ROWS_CUT = LEAST_SHARING - 1
LIBRARY_MARGIN = 0.9  # the share of a library's time that a product's cluster may take: both are predicted
WINDOWS_MARGIN = 1.0  # the same for a depthwise convolution, with which other operators of the cluster fuse


@dataclass(frozen=True)
class Candidate:
    """A candidate is a cluster while the search runs. ops: in topological order, outputs among them.

    must_store: ops that others compute again but that this candidate alone has to store.
    """

    ops: tuple[str, ...]
    must_store: frozenset[str]
    outputs: tuple[str, ...]
    loops: LoopNest
    cost: Cost


class Reads:
    """Reads say which op reads which once views are looked through."""

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
        """Return the op whose result a chain of views shows."""
        while layout.is_view(self.dag.op(name)):
            name = self.dag.op(name).first
        return name


class Candidates:
    """The pool makes candidates from the ops of one graph on one device.

    owned: ops that kernels compute. again: the owned ops that every reader computes for itself.
    first: the candidate of each op that needs a result in memory, by its position in the graph.
    leftovers: ops that stay ATen calls. bases: op that writes into memory -> the op whose memory it is.
    waits: op that writes into memory -> the ops that run before it. once: the ops that compute or read a
    base: no reader computes them for itself, as the base may have been overwritten by then.
    """

    def __init__(
        self, dag: OpDag, device: DeviceSpec, hints: Mapping[sympy.Symbol, int], rounded: bool
    ) -> None:
        self.dag, self.device, self.hints, self.rounded = dag, device, hints, rounded
        self.reads = Reads(dag)
        self.effort = Effort(len(dag.order))
        self.infos: dict[str, BufferInfo] = {}
        self.leftovers: list[Decision] = []
        self.memo: dict[tuple[tuple[str, ...], frozenset[str]], Candidate | Illegal] = {}
        self.priced = Memo(dag, self.price, self.settled)
        self.bases, self.waits = bases(dag), waits(dag)
        overwritten = frozenset(self.bases.values())
        self.once = overwritten | {n for n in dag.order if not overwritten.isdisjoint(self.reads.sources[n])}
        cheap = (n for n in dag.order if self.fusible(dag.op(n)) and self.cheap(dag.op(n)))
        self.again = frozenset(cheap) - self.once
        self.first: dict[int, Candidate] = {}
        self.start()

    def fusible(self, op: Op) -> bool:
        if op.kind is Kind.CONTRACTION:
            return not self.rounded and (op.target in depthwise.CALLS or self.streams(op))
        return (
            op.kind in FUSIBLE
            and not layout.is_view(op)
            and len(op.outputs) == 1
            and spec_of(op.target) is not None
        )

    def streams(self, op: Op) -> bool:
        """True if an op is a product of few rows, which takes as long as its matrix is read."""
        product = product_of(self.dag, op)
        return product is not None and has_few_rows(product, FEW_ROWS)

    def shares_matrix(self, op: Op) -> bool:
        """True if an op multiplies several rows by one matrix, which a tile has once for all of them."""
        product = product_of(self.dag, op) if op.kind is Kind.CONTRACTION else None
        return product is not None and product.shares_matrix

    def has_many_rows(self, op: Op) -> bool:
        """True if an op is a product of two matrices with many rows, which is bound by arithmetic."""
        return op.kind is Kind.CONTRACTION and op.target not in depthwise.CALLS and not self.streams(op)

    def cheap(self, op: Op) -> bool:
        """True if computing an op again costs no more than reading its result: it reads one tensor at most,
        which is not wider than the result, or it draws random numbers, which take half the time in which
        memory delivers their four bytes."""
        if op.kind is Kind.RANDOM:
            return True
        if op.kind in (Kind.REDUCTION, Kind.WINDOWS, Kind.SCAN, Kind.CONTRACTION):
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
        info = self.infos.get(name)
        if info is None:
            op = self.dag.op(name)
            meta = op.outputs[0]
            count = self.count(meta.shape)
            computed_here = op.target not in ("placeholder", "get_attr") and name not in self.bases
            near = computed_here and count * meta.dtype.itemsize < L2_SHARE * self.device.l2_bytes
            info = self.infos[name] = BufferInfo(product(meta.shape), meta.dtype.itemsize, near)
        return info

    def count(self, shape: tuple[Dim, ...]) -> int:
        return hint(product(shape), self.hints)

    def candidate(self, ops: tuple[str, ...], must_store: frozenset[str] = frozenset()) -> Candidate:
        """Lower, check and price a set of ops. Raises Illegal."""
        result = self.memo.get((ops, must_store))
        if result is None:
            try:
                result = self._candidate(ops, must_store)
            except Illegal as error:  # a new exception: the traceback of this one keeps much alive
                result = Illegal(error.rule, error.reason)
            self.memo[ops, must_store] = result
        if isinstance(result, Illegal):
            raise Illegal(result.rule, result.reason)
        return result

    def _candidate(self, ops: tuple[str, ...], must_store: frozenset[str]) -> Candidate:
        inside = set(ops)
        outputs = tuple(
            n for n in ops if n in must_store or (n not in self.again and self.escapes(n, inside, must_store))
        )
        if not outputs:
            raise Illegal("dead", "nothing reads it")
        loops, cost = self.priced(ops, outputs)
        return Candidate(ops, must_store, outputs, loops, cost)

    def price(self, ops: tuple[str, ...], outputs: tuple[str, ...]) -> tuple[LoopNest, Cost]:
        """Return the fastest loop nest of a set of ops and its cost. Raises Illegal."""
        if any(self.has_many_rows(self.dag.op(name)) for name in ops):
            try:
                return self.form(ops, outputs, None, in_tile=True)
            except LookupError as error:
                raise Illegal("schedule", str(error)) from None
        splits = (*index_splits_of(self.dag, ops, outputs), *splits_of(self.dag, ops))
        if any(self.shares_matrix(self.dag.op(name)) for name in ops):
            with contextlib.suppress(Illegal):
                return self.form(ops, outputs, None, in_tile=True)
        try:
            return self.fastest(ops, outputs, splits, in_tile=False)
        except Illegal as error:  # the ops do not fit into rows that are computed one by one
            for cut in cuts_of(self.dag, ops, MOST_ROWS_CUT):
                with contextlib.suppress(Illegal):
                    return self.form(ops, outputs, cut, in_tile=False)
            with contextlib.suppress(Illegal):
                return self.form(ops, outputs, None, in_tile=True)
            raise Illegal(error.rule, error.reason) from None

    def fastest(
        self, ops: tuple[str, ...], outputs: tuple[str, ...], splits: Iterable[IndexSplit], in_tile: bool
    ) -> tuple[LoopNest, Cost]:
        """Return the fastest loop nest of a set of ops, split into pieces or not. Raises Illegal."""
        forms: list[tuple[float, tuple[LoopNest, Cost]]] = []
        for split in splits:
            with contextlib.suppress(Illegal):
                split_form = self.form(ops, outputs, split, in_tile)
                forms.append((split_form[1].us, split_form))
        try:
            unsplit = self.form(ops, outputs, None, in_tile)
            forms.append((unsplit[1].us / CHOOSING, unsplit))
        except Illegal:  # if every form is refused, this refusal is reported
            if not forms:
                raise
        return min(forms, key=lambda form: form[0])[1]

    def form(
        self,
        ops: tuple[str, ...],
        outputs: tuple[str, ...],
        split: IndexSplit | None,
        in_tile: bool,
    ) -> tuple[LoopNest, Cost]:
        """Return one loop nest of a set of ops, checked and priced. Raises Illegal."""
        self.refuse_reading(ops)
        stored = frozenset(n for n in ops if n in outputs or self.settled(n))
        lowered = lower(
            self.dag,
            ops,
            outputs,
            index_split=split,
            in_tile=in_tile,
            stored=stored,
            like_eager=self.rounded,
            effort=self.effort,
        )
        loops = simplify(lowered)
        if in_tile and any(self.shares_matrix(self.dag.op(name)) for name in ops):
            if Products.of(loops, self.hints) is None and Matrices.of(loops) is None:
                raise Illegal("space", "no tile of the matrix has all operands and readers of its product")
        analysis = Analysis(loops)
        best = self.checked(analysis, ops)
        product = any(self.dag.op(n).kind is Kind.CONTRACTION for n in ops)
        if product and analysis.tall:  # a norm before the product has transposed its matrix
            with contextlib.suppress(Illegal):
                along = self.checked(Analysis(simplify(lowered, by_memory=True)), ops)
                best = min(best, along, key=lambda form: form[1].us)
        is_unknown = analysis.reads_rows and not isinstance(analysis.size(COLS), int)
        if is_unknown and COLS not in normalized_groups(loops):  # no programs share such a row
            with contextlib.suppress(Illegal):
                shared = self.checked(Analysis(simplify(lowered, turned=True)), ops)
                best = min(best, shared, key=lambda form: form[1].us)
        return best

    def checked(self, analysis: Analysis, ops: tuple[str, ...]) -> tuple[LoopNest, Cost]:
        """Return a loop nest with its cost. Raises Illegal."""
        loops = analysis.loops
        self.refuse_race(loops, ops)
        refusal = first_refusal(analysis, self.device)
        if refusal is not None:
            raise Illegal(*refusal)
        buffers = {n.buffer: self.info(n.buffer) for n in loops.nodes if isinstance(n, Load)}
        buffers |= {s.buffer: self.info(s.buffer) for s in loops.stores}
        return loops, cost_of(loops, self.device, buffers, self.hints, analysis)

    def refuse_reading(self, ops: tuple[str, ...]) -> None:
        """Raise Illegal if a kernel would compute the memory that it writes into, or read what it has
        written: its programs run in any order."""
        inside = set(ops)
        for name in inside & self.bases.keys():
            if self.bases[name] in inside:
                raise Illegal("in place", f"{name} is written into {self.bases[name]}, which must exist")
            if not inside.isdisjoint(self.reads.users[name]):
                raise Illegal("in place", f"{name} is read by the op that writes it")

    def refuse_race(self, loops: LoopNest, ops: tuple[str, ...]) -> None:
        """Raise Illegal if a kernel would read the memory that it writes into, unless the result of each
        element is stored in the place of that element."""
        into = {self.bases[name]: name for name in ops if name in self.bases}
        for number, load in enumerate(loops.nodes if into else ()):
            if isinstance(load, Load) and (base := self.reads.base(load.buffer)) in into:
                if load.buffer != base or not is_only_stored_in_place(loops, number, into[base]):
                    raise Illegal("in place", f"{base} is read, and {into[base]} writes into it")

    def escapes(self, name: str, inside: set[str], must_store: frozenset[str]) -> bool:
        """True if an op outside reads a value, or computes an op again that reads it."""
        return (
            name in self.reads.returned
            or name in self.bases
            or any(
                user not in inside or (user in self.again and self.elsewhere(user, inside, must_store))
                for user in self.reads.users[name]
            )
        )

    def elsewhere(self, name: str, inside: set[str], must_store: frozenset[str]) -> bool:
        """True if a candidate other than this one computes `name` (again)."""

        def users(op: str) -> list[str]:
            return [user for user in self.reads.users[op] if user in self.owned]

        ops = walk([name], lambda op: [user for user in users(op) if user in self.again])
        return any(
            (self.must_exist(op) and op not in must_store) or not inside.issuperset(users(op)) for op in ops
        )

    def must_exist(self, name: str) -> bool:
        """True if a value is read by something that cannot compute it again."""
        return name in self.reads.returned or any(u not in self.owned for u in self.reads.users[name])

    def replaces_its_operand(self, name: str) -> bool:
        """True if an op's operand, as large as its result, would be kept in memory for this op alone."""
        sources = self.reads.sources[name]
        return all(
            o in self.owned
            and not self.must_exist(o)
            and set(self.reads.users[o]) == {name}
            and self.bytes(o) == self.bytes(name)
            for o in sources
        ) and bool(sources)

    def settled(self, name: str) -> bool:
        """True if a candidate that computes a value also stores it, so that all of them round it."""
        return name in self.again and self.must_exist(name)

    def closure(self, name: str) -> tuple[str, ...]:
        """Return an op with all ops that are computed again for it, in topological order."""
        sources = self.reads.sources
        return self.ordered(reached([name], lambda op: [s for s in sources[op] if s in self.again]))

    def union(self, candidates: Iterable[Candidate]) -> Candidate:
        """Return one candidate of all ops of some candidates. Raises Illegal."""
        candidates = tuple(candidates)
        names = {name for candidate in candidates for name in candidate.ops}
        return self.candidate(
            self.ordered(names), frozenset[str]().union(*(p.must_store for p in candidates))
        )

    def ordered(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return ops in topological order."""
        return tuple(sorted(names, key=self.reads.position.__getitem__))

    def bytes(self, name: str) -> int:
        info = self.info(name)
        return hint(info.numel, self.hints) * info.itemsize

    def read_by(self, candidate: Candidate) -> set[str]:
        return {s for op in candidate.ops for s in self.reads.sources[op] if s not in candidate.ops}

    def readers_of(self, candidate: Candidate) -> set[str]:
        return {user for name in candidate.outputs for user in self.reads.users[name]}

    def recompute(self, chain: frozenset[str]) -> Callable[[], None]:
        """Let every reader of some ops compute them itself. Return a function that undoes this."""
        before = self.again, self.memo

        def undo() -> None:
            self.again, self.memo = before

        self.again, self.memo = self.again | chain, {}
        return undo

    # -- the candidates that the search starts with ---------------------------------------------------------

    def start(self) -> None:
        """Build one candidate for every op that needs a result in memory."""
        order = [n for n in self.dag.order if n not in self.dag.inputs and not layout.is_view(self.dag.op(n))]
        self.owned = {n for n in order if self.fusible(self.dag.op(n))}
        devices = {n: m.device for n in order for m in self.dag.op(n).outputs[:1]}
        for name in list(order):
            op = self.dag.op(name)
            if name not in self.owned and op.target is not operator.getitem and op.outputs:
                self.leave(op, self.call_reason(op))
        counts = Counter(devices.values())
        main = max(counts, key=counts.__getitem__, default="")
        for name in order:
            reason = self.unfit(self.dag.op(name), main) if name in self.owned else None
            if reason is not None:
                self.give_up(name, reason)
        self.again -= {n for n in self.again if self.must_exist(n) and self.replaces_its_operand(n)}
        while not self.build_candidates(order):  # an op that is given up needs its operands to exist
            self.memo.clear()

    def call_reason(self, op: Op) -> str:
        """Return why no kernel computes an op."""
        reason = library_call(op) or "no row in the operator table"
        if tokens_of(op, self.hints) <= FEW_ROWS and not self.rounded:
            unknown = (size for size in op.outputs[0].shape[-2:] if not isinstance(size, int))
            if any(self.count((size,)) <= FEW_ROWS for size in unknown):
                return f"{reason}: it has few rows, but how many is only known at run time"
        return reason

    def build_candidates(self, order: list[str]) -> bool:
        """Lower every op that needs a result in memory. Return False if some op could not be lowered."""
        self.first, complete = {}, True
        for name in order:
            if name not in self.owned or (name in self.again and not self.must_exist(name)):
                continue
            must_store = frozenset({name}) & self.again
            try:
                candidate = self.candidate(self.closure(name), must_store)
                self.first[self.reads.position[name]] = self.worth_it(name, candidate)
            except Illegal as error:
                complete = complete and error.rule == "dead"
                others = set(self.closure(name)) - {name}
                if others and error.rule != "dead":
                    self.again -= others  # the op reads these from memory instead of computing them again
                    continue
                self.give_up(name, "" if error.rule == "dead" else f"{error.rule}: {error.reason}")
        return complete

    def worth_it(self, name: str, candidate: Candidate) -> Candidate:
        """Return a candidate; one with a product or a convolution has to be faster than a library. Raises
        Illegal."""
        op = self.dag.op(name)
        if op.kind is Kind.CONTRACTION:
            ours, library = candidate.cost.us, contraction_cost(op, self.device, self.hints).us
            margin = WINDOWS_MARGIN if op.target in depthwise.CALLS else LIBRARY_MARGIN
            if ours > margin * library:
                raise Illegal("library", f"it takes {library:.1f} us, a cluster {ours:.1f} us")
        return candidate

    def give_up(self, name: str, reason: str) -> None:
        """Leave an op as an ATen call for this reason; drop it if the reason is "", as nothing reads it."""
        self.owned.discard(name)
        self.again -= {name}
        if reason:
            self.leave(self.dag.op(name), reason)

    def unfit(self, op: Op, main: str) -> str | None:
        """Return why no kernel can hold an op: a tensor is on another device than the graph, or its result
        cannot be written in any order. None if a kernel can."""
        out = op.outputs[0]
        span = 1 + sum((size - 1) * stride for size, stride in zip(out.shape, out.stride, strict=True))
        if 0 < hint(span, self.hints) < hint(self.info(op.name).numel, self.hints):
            return "elements of its result share memory, in which the last one written stays"
        tensors = [m.device for i in op.inputs for m in self.dag.op(i).outputs]
        if any(d != op.outputs[0].device for d in tensors):
            return "reads a tensor on another device"
        return (
            None if op.outputs[0].device == main else f"runs on {op.outputs[0].device}, the graph on {main}"
        )

    def leave(self, op: Op, reason: str) -> None:
        deliberate = library_call(op) is not None
        rule = LIBRARY_CALL if op.kind is Kind.CONTRACTION else DELIBERATE_CALL if deliberate else EAGER_OP
        call = Decision(rule, op.name, Outcome.REFUSED, reason, target=str(op.target), source=op.source)
        self.leftovers.append(call)
