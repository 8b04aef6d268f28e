"""Tile programs in which one loop makes reductions that read each other (`schedule.carried`).

    for first_j in tl.range(0, 4096, 64):
        s = ...                                            a block of scores
        new_max = tl.maximum(max, tl.max(s, axis=1, keep_dims=True))
        p = tl.exp(s - new_max)                            nodes see the maximum so far
        ratio = tl.exp(max - new_max)
        sum = sum * ratio + tl.sum(p, axis=1, keep_dims=True)
        acc = tl.dot(p, v, acc * ratio)
        max = new_max

A tile has the dimensions of the reduction for which it is computed: those of the reduction's operand. The
result is reshaped for its readers. A product of two tiles (`unit(r, TENSOR_CORE)`) has operands of two
dimensions, which tensor cores read as they lie in memory.

While all elements of a row have been -inf, zero stands for its maximum: exp(-inf - 0) is zero, and the
exponential of -inf - -inf would be NaN. Rows that are -inf to the end become NaN behind the loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch

from fusion_compiler.codegen import monoids
from fusion_compiler.codegen.carried import BlockValues
from fusion_compiler.codegen.chains import Goal
from fusion_compiler.codegen.expression import convert
from fusion_compiler.codegen.live_loops import (
    Span,
    SpanEmitter,
    around_seen,
    behind_guards,
    least_of_loop,
    least_of_rows,
    read_end,
    read_range,
    spans_of,
    waits,
)
from fusion_compiler.codegen.second_stages import Partial
from fusion_compiler.codegen.tile import Assign, Combine
from fusion_compiler.codegen.values import PlacedNest, Tile
from fusion_compiler.ir.loops import (
    Compute,
    Constant,
    Coordinate,
    Load,
    LoopNest,
    Node,
    Reduce,
    Store,
    is_applied,
    operands_of,
    source_of,
    with_readers,
)
from fusion_compiler.ops.arithmetic import ADD, AND, CAST, DIV, EXP, EXP2, MUL, SUB
from fusion_compiler.ops.syntax import PROPAGATE_NAN, Expression, Literal, Var, lift, tl
from fusion_compiler.schedule.carried import PEAKS, Carried, plain_peaks, rescaled, step_of
from fusion_compiler.schedule.live_blocks import Bounds, Live, live_of
from fusion_compiler.schedule.placement import Leaf
from fusion_compiler.schedule.shared_reductions import SharedReductions
from fusion_compiler.schedule.tile_products import products_of


@dataclass(frozen=True)
class Running:
    """A maximum or minimum of the elements that a loop has read: without the block that is open, and with it.

    lanes: the dimensions of the tiles. depth: of the loop's block.
    """

    before: Tile
    now: Tile
    lanes: tuple[Leaf, ...]
    depth: int


class CarryingEmitter(SpanEmitter):
    """Emits a nest in which some reductions are carried.

    bases: the maxima and minima that they read. waits: the bases that each node depends on. running: the open
    loop's bases. dots: the products of two tiles.
    used: by node, the dimensions in which a tile of it was emitted, and is reshaped for others.
    plain, rescaled: the sums that others read as they were before a block, and these, with their dimensions.
    holding: the values that conditions have in the part of a loop that is emitted.
    narrow: nodes that are only compared or become floating point; as positions they need no 64 bits.
    scores: nodes that only maxima and exponentials of differences read.
    """

    def __init__(self, nest: PlacedNest, sharing: SharedReductions, carried: Mapping[int, Carried]) -> None:
        super().__init__(nest, sharing)
        self.carried = carried
        # A term's errors, 2^-22 of it and 2^-24 of the exponent that makes it small, are those of additions.
        self.fp16 |= {n for of in carried.values() for n in of.powers}
        self.dots = products_of(self.loops, self.placement, self.where)
        self.bases = frozenset(n for of in carried.values() for n in of.reads)
        late = {n: with_readers(self.loops, (n,)) for n in self.bases}
        self.waits = [{n for n in self.bases if number in late[n]} for number in range(len(self.loops.nodes))]
        self.running: dict[int, Running] = {}
        self.plain = {of.plain for of in carried.values()}
        self.rescaled: dict[int, tuple[Tile, tuple[Leaf, ...]]] = {}
        self.used: dict[int, dict[tuple[Leaf, ...], None]] = {}
        readers = [(node, o) for node in self.loops.nodes for o in operands_of(node)]
        others = {o for node, o in readers if not _takes_any_integer(node)}
        self.narrow = frozenset() if self.wide else {o for _, o in readers} - others
        self.scores = _scores(self.loops)
        self.holding: Mapping[int, bool] = {}
        self.plain_maxima = plain_peaks(self.loops, carried)

    # -- dimensions --------------------------------------------------------------------------------------

    def among(self, leaves: Iterable[Leaf]) -> tuple[Leaf, ...]:
        leaves = frozenset(leaves)
        return tuple(leaf for leaf in self.all_lanes if leaf in leaves)

    def lanes_of(self, number: int) -> tuple[Leaf, ...]:
        """Return the dimensions of a reduction: those of its operand, or of the product that it is."""
        if number in self.dots:
            return self.among((self.dots[number].rows, self.dots[number].few))
        node = self.reduction(number)
        return self.among(self.depends[node.operand] | self.where.reduced_by(node))

    def fitted(self, tile: Tile, lanes: tuple[Leaf, ...]) -> Tile:
        """Return a tile of some dimensions, reshaped to the dimensions that are emitted now."""
        before, now = ([leaf.lanes if leaf in tile.lanes else 1 for leaf in of] for of in (lanes, self.lanes))
        if not tile.is_block or before == now:
            return tile
        return replace(tile, value=tl.reshape(tile.value, now))

    def cached(self, number: int) -> Tile | None:
        tile = super().cached(number)
        for lanes in () if tile is not None else self.used.get(number, ()):
            with self.dimensions(lanes):
                tile = super().cached(number)
            if tile is not None:
                return self.fitted(tile, lanes)
        return tile

    def keep(self, number: int, tile: Tile) -> None:
        """Let a reduction be read in the open block. It has the dimensions that are emitted now."""
        self.used.setdefault(number, {})[self.lanes] = None
        self.scopes[self.depth].tiles[self.key(number)] = tile

    def emitted(self, number: int) -> Tile:
        node = self.loops.nodes[number]
        if number in self.narrow and isinstance(node, Coordinate):
            return self.index(node.index)
        if (operand := self.unmasked(number)) is not None:
            return self.tile(operand)
        tile = super().emitted(number)
        if len(tile.lanes) > 1:
            self.used.setdefault(number, {})[self.lanes] = None
        return tile

    def unmasked(self, number: int) -> int | None:
        """Return the operand that a node is in the part of the loop that is emitted: what a mask of zeros is
        added to, or the rest of a conjunction. Zero may lose its sign by that, which neither a maximum nor an
        exponential shows."""
        node = self.loops.nodes[number]
        if is_applied(node, AND):
            left = [o for o in operands_of(node) if self.literal(o) is not True]
            return left[0] if len(left) == 1 and len(operands_of(node)) == 2 else None
        if not is_applied(node, ADD) or len(operands_of(node)) != 2 or number not in self.scores:
            return None
        masks = {o for o in operands_of(node) if self.adds_zero(o)}
        others = [o for o in operands_of(node) if o not in masks]
        return others[0] if masks and others and self.loops.nodes[others[0]].dtype == node.dtype else None

    def adds_zero(self, number: int) -> bool:
        node = self.loops.nodes[number]
        chosen = self.chosen(node) if isinstance(node, Compute) and self.holding else None
        of = None if chosen is None else self.loops.nodes[chosen]
        return isinstance(of, Constant) and of.value == 0

    def block_of(self, number: int) -> int:
        depths = (self.running[n].depth for n in self.waits[number] if n in self.running)
        return max(super().block_of(number), *depths, 0)

    def load_first(self) -> None:
        """Load nothing before the products: each loads its factors in the dimensions in which it needs
        them."""

    # -- loops ---------------------------------------------------------------------------------------------

    def spans(self, loop: Leaf, numbers: Sequence[int], goals: Sequence[Goal]) -> Iterator[None]:
        has_others = len(goals) != len(numbers)  # which need all of the loop
        live = Live({}) if has_others else self.live(loop, numbers)
        spans, seen, visited = ([], {}, None) if has_others else self.read_spans(loop, live.bounds)
        values = {n: value for n, (value, of_part) in live.bounds.items() if of_part}
        for span in spans or [None]:
            self.span = None if span is None else (loop, span)
            self.holding = values if span is not None and span.is_full else {}
            self.holding = {**self.holding, **(seen if span is not None and span.is_seen else {})}
            yield
        self.span, self.holding = None, {}
        if visited is not None and live.guards:
            self.span = loop, behind_guards(self, loop, visited, self.least_of(loop, live.guards))
            yield
            self.span = None

    def read_spans(
        self, loop: Leaf, bounds: Bounds
    ) -> tuple[list[Span], Mapping[int, bool], Span | None]:
        """Return the parts of a loop, without what lies before or behind all that masks in memory show; the
        conditions of these masks in the part without any; and all parts as one."""
        spans = spans_of(self, loop, [bound for _, of_part in bounds.values() for bound in of_part])
        read = {n: value for n, (value, of_part) in bounds.items() if not of_part}
        last, seen = read_end(self, loop, read), read_range(self, loop, spans, read)
        ends = [] if last is None else [last]
        if seen is not None or ends:
            spans = spans or [Span(lift(0), lift(self.where.axes[loop.axis].size), False)]
        if not spans:
            return [], {}, None
        start, ends = (None, ends) if seen is None else (seen.start, [seen.end, *ends])
        visited = Span(spans[0].start, spans[-1].end, False).within(start, *ends)
        if seen is None:
            return [span.within(None, *ends) for span in spans], {}, visited
        return around_seen(self, loop, spans, seen, visited, ends[1:]), seen.conditions, visited

    def live(self, loop: Leaf, numbers: Sequence[int]) -> Live:
        """Return the conditions that hold for every term that changes any of some reductions."""
        common, lowest, guards = None, set[int](), set[int]()
        for number in numbers:
            node = self.reduction(number)
            neutral = 0 if node.combine == "sum" else PEAKS.get(node.combine, math.nan)
            live = live_of(self.loops, node.operand, neutral)
            lowest, guards = lowest | live.lowest, guards | live.guards
            guards |= {number} if live.lowest and neutral else set()
            bounds = live.bounds
            common = bounds if common is None else {n: b for n, b in common.items() if bounds.get(n) == b}
        bounds = common or {}
        if all(self.is_guard(loop, guard, numbers) for guard in guards):
            return Live(bounds, frozenset(lowest), frozenset(guards if lowest & bounds.keys() else ()))
        return Live({n: of_part for n, of_part in bounds.items() if n not in lowest})

    def is_guard(self, loop: Leaf, number: int, numbers: Sequence[int]) -> bool:
        """True of a maximum that the loop carries, and of a value of rows or of the loop's elements that is
        known before."""
        if number in self.bases:
            return number in numbers
        return not waits(self, number) and len(self.depends[number] & frozenset(self.all_lanes)) == 1

    def least_of(self, loop: Leaf, guards: Iterable[int]) -> list[Expression]:
        """Emit the smallest number of each guard in the program."""
        of_loop = frozenset(self.where.leaves[loop.axis])
        running = [n for n in sorted(guards) if n in self.bases]
        moving = [n for n in sorted(guards) if n not in running and not of_loop.isdisjoint(self.depends[n])]
        values = [self.let("least", tl.min(self.sums[n].value)) for n in running]
        values += [least_of_rows(self, n) for n in sorted(guards) if n not in running and n not in moving]
        return values + ([least_of_loop(self, loop, moving)] if moving else [])

    def literal(self, number: int) -> float | bool | None:
        return self.holding[number] if number in self.holding else super().literal(number)

    # -- reductions ----------------------------------------------------------------------------------------

    def in_turn(self, number: int) -> tuple[Leaf, ...]:
        if number not in self.bases and number not in self.carried:
            return ()
        return self.among(self.where.reduced_by(self.reduction(number)))

    def reduced(self, number: int, node: Reduce) -> Tile:
        lanes = self.lanes_of(number)
        with self.dimensions(lanes):
            if number in self.dots:
                tile = Tile(self.let("product", self.dot(number), number), frozenset(lanes), True)
            else:
                tile = super().reduced(number, node)
            self.keep(number, tile)
        return self.fitted(tile, lanes)

    def begin(self, number: int) -> None:
        with self.dimensions(self.lanes_of(number)):
            super().begin(number)

    def started(self, number: int) -> Tile:
        if number not in self.dots:
            return super().started(number)
        lanes = frozenset(self.lanes)
        return Tile(self.state("acc", tl.zeros(self.shape(lanes), torch.float32)), lanes, True)

    def add_terms(self, number: int, node: Reduce, state: Tile) -> None:
        variable = cast(Var, state.value)
        with self.dimensions(self.lanes_of(number)):
            if number in self.bases:
                self.run_on(number, node, state)
            elif number in self.dots:
                self.add(Assign((variable,), self.dot(number, self.before(number, variable))))
            elif number not in self.carried:
                super().add_terms(number, node, state)
            elif (term := self.term(number, node)) is not None:
                before = self.before(number, variable)
                self.add(Assign((variable,), before + self.now(number, node, term).value))

    def run_on(self, number: int, node: Reduce, state: Tile) -> None:
        """Let nodes of the open block see a maximum of all that was read so far."""
        term = self.term(number, node)
        assert term is not None
        block, step = self.now(number, node, term), monoids.MONOIDS[node.combine].step
        assert not isinstance(step, str)
        nan = {} if number in self.plain_maxima else {"propagate_nan": PROPAGATE_NAN}
        value = self.let(f"new_{node.combine}", step(state.value, block.value, **nan))
        now = replace(block, value=value)
        self.running[number] = Running(state, now, self.lanes, self.depth)
        self.keep(number, replace(now, value=self.let("shift", BlockValues(self).finite(number, value))))

    def now(self, number: int, node: Reduce, term: Tile) -> Tile:
        """Return a block's terms, reduced."""
        several = len(self.lanes) > 1
        for leaf in reversed(self.in_turn(number)):
            axis, is_plain = self.lanes.index(leaf), number in self.plain_maxima
            value = self.let(f"block_{node.combine}", Combine(node, (term.value,), axis, several, is_plain))
            term = Tile(value, term.lanes - {leaf}, several)
        return term

    def turn(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if number in self.running:
                running = self.running.pop(number)
                self.add(Assign((cast(Var, running.before.value),), running.now.value))

    def end(self, number: int) -> None:
        lanes, of = self.lanes_of(number), self.carried.get(number)
        if of is None and number not in self.bases and number not in self.dots:
            with self.dimensions(lanes):
                super().end(number)
                self.used.setdefault(number, {})[self.lanes] = None
            return
        with self.dimensions(lanes):
            tile, is_part = self.sums.pop(number), number in self.sharing.partial
            for base in of.reads if of is not None and of.empty and not is_part else ():
                is_empty = self.tile(base).value.eq(lift(PEAKS[self.reduction(base).combine]))
                value = tl.where(is_empty, lift(math.nan), tile.value)
                tile = replace(tile, value=self.let(cast(Var, tile.value).base, value))
            self.keep(number, tile)

    # -- rescaling -----------------------------------------------------------------------------------------

    def before(self, number: int, total: Expression) -> Expression:
        """Return the sum up to the open block, rescaled from the maxima before that block to the current
        ones."""
        of = self.carried.get(number)
        if of is None:
            return total
        plain = None if of.plain is None else self.fitted(*self.rescaled[of.plain]).value
        value = rescaled(of, total, plain, self.step, BlockValues(self))
        if number in self.plain and value is not total:
            value = self.let("rescaled", value)
            self.rescaled[number] = replace(self.sums[number], value=value), self.lanes
        return value

    def step(self, number: int) -> Expression | None:
        """Return how a factor of terms changes with the open block (`schedule.carried.step_of`)."""
        bases = sorted(self.waits[number] & self.running.keys())
        if not bases:
            return None
        first = self.running[bases[0]]
        with self.dimensions(first.lanes):
            before = {n: self.fitted(self.running[n].before, self.running[n].lanes).value for n in bases}
            now = {n: self.tile(n).value for n in bases}
            values = BlockValues(self, self.reduction(bases[0]).axes)
            value = step_of(self.loops, number, before, now, values)
            assert value is not None
            value = self.let("ratio" if is_applied(self.loops.nodes[number], EXP) else "growth", value)
        return self.fitted(replace(first.now, value=value), first.lanes).value

    # -- products ------------------------------------------------------------------------------------------

    def dot(self, number: int, total: Expression | None = None) -> Expression:
        """Return a product of two tiles, added to `total`."""
        of = self.dots[number]
        sides = sorted(((of.rows, of.matrix), (of.few, of.vectors)), key=lambda side: side[0].order)
        held = [self.held(factor) for _, factor in sides]
        dtype = next((dtype for dtype in held if dtype is not None), torch.float32)
        if any(other not in (None, dtype) for other in held):
            dtype = torch.float32
        (rows, left), (cols, right) = sides
        first = self.factor(left, rows, of.terms, dtype)
        second = self.factor(right, cols, of.terms, dtype)
        operands = self.turned(first, (rows, of.terms)), self.turned(second, (of.terms, cols))
        exact = {"input_precision": Literal("ieee")} if dtype is torch.float32 else {}
        return tl.dot(*operands, *([] if total is None else [total]), **exact)

    def held(self, number: int) -> torch.dtype | None:
        """Return the dtype of 16 bits in which a factor lies in memory; None of others."""
        node = self.loops.nodes[source_of(self.loops.nodes, number)]
        dtype = self.dtypes[node.buffer] if isinstance(node, Load) else None
        return dtype if dtype in (torch.float16, torch.bfloat16) else None

    def turned(self, value: Expression, lanes: tuple[Leaf, Leaf]) -> Expression:
        """Return a tile whose dimensions have the order of `lanes`."""
        return value if self.among(lanes) == lanes else tl.trans(value)

    def factor(self, number: int, side: Leaf, terms: Leaf, dtype: torch.dtype) -> Expression:
        """Return a factor's tile, zero where no term is."""
        lanes = self.among((side, terms))
        with self.dimensions(lanes):
            if self.held(number) is not None:
                load = self.loops.nodes[source_of(self.loops.nodes, number)]
                assert isinstance(load, Load)
                with self.in_scope(self.block_of(number)):
                    tile = self.loaded_as_held(load)
                value = convert(tile.value, self.dtypes[load.buffer], dtype)
            else:
                tile, axis = self.tile(number), terms.axis
                mask = None if self.is_zero_outside(number, axis) else self.inside(frozenset({axis}))
                value = tile.value
                if mask is not None:
                    value = self.let("inside", tl.where(mask.value, value, 0.0))
                value = convert(value, self.loops.nodes[number].dtype, dtype)
            if tile.lanes != frozenset(lanes):
                value = tl.broadcast_to(value, self.shape(frozenset(lanes)))
        return value

    # -- stores --------------------------------------------------------------------------------------------

    def store(self, store: Store) -> None:
        with self.dimensions(self.among(self.where.of_store(store))):
            super().store(store)

    def store_partial(self, number: int, of: Partial) -> None:
        with self.dimensions(self.among(self.where.of_axes(of.axes))):
            super().store_partial(number, of)


def _takes_any_integer(node: Node) -> bool:
    """True if a node reads integers of 32 and of 64 bits alike: it compares them, or converts them to a
    floating-point dtype."""
    if any(is_applied(node, target) for target in (CAST, ADD, SUB, MUL, DIV)):
        return node.dtype.is_floating_point
    return isinstance(node, Compute) and node.spec.compare is not None


def _scores(loops: LoopNest) -> frozenset[int]:
    """Return the nodes that only maxima, minima and exponentials read, perhaps behind differences and
    products with numbers."""
    readers, scores = dict[int, list[int]](), set[int]()
    for reader, node in enumerate(loops.nodes):
        for operand in operands_of(node):
            readers.setdefault(operand, []).append(reader)

    def hides_sign(reader: int, operand: int) -> bool:
        node = loops.nodes[reader]
        if isinstance(node, Reduce):
            return node.combine in PEAKS
        is_product = is_applied(node, MUL) and operands_of(node) == (operand,)
        is_linear = is_product or (is_applied(node, SUB) and operands_of(node)[0] == operand)
        return is_applied(node, EXP) or is_applied(node, EXP2) or (is_linear and reader in scores)

    for operand in sorted(readers, reverse=True):
        if all(hides_sign(reader, operand) for reader in readers[operand]):
            scores.add(operand)
    return frozenset(scores)
