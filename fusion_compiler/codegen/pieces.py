"""Compute nodes of the same form, which read neighbouring elements, as the pieces of one tile.

    a0 = load(x + col);         b0 = a0 * w
    a1 = load(x + 2048 + col);  b1 = a1 * w     ->      a = load(x + piece * 2048 + col);  b = a * w

The rows of a product of few rows are pieces, for example, and the queries of a head of keys. So are the
vectors and the sums of products that tensor units compute (`contractions.py`). Pieces lie along the axis that
their values lack: [rows, pieces] or [pieces, columns]. Pieces that are scalars may lie along either. Nodes
that vary over rows and columns are never pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import sympy
import torch

from fusion_compiler.codegen.carried import Plain
from fusion_compiler.codegen.expression import base_name, convert
from fusion_compiler.codegen.monoids import neutral, step
from fusion_compiler.codegen.row_tiles import RowTiles
from fusion_compiler.codegen.rows import RowEmitter
from fusion_compiler.codegen.tile import Assign, Combine
from fusion_compiler.codegen.tile import Store as StoreStatement
from fusion_compiler.codegen.values import PlacedNest, Tile
from fusion_compiler.ir.dims import Dim, simple, smaller
from fusion_compiler.ir.loops import (
    COLS,
    ROWS,
    Compute,
    Constant,
    Index,
    InRange,
    Load,
    Reduce,
    Store,
    Value,
    exact,
)
from fusion_compiler.ir.syntax import Expression, Var, Variable, every, fm, plus, tl
from fusion_compiler.schedule.contractions import Contraction

Nodes = tuple[int, ...]  # one for each piece


@dataclass(frozen=True)
class Packed(Tile):
    """The tile of several pieces, which lie along dimension `axis`; None if they all are this value."""

    axis: int | None = None

    def lying(self, axis: int) -> Expression:
        """Return the tile with its pieces along an axis."""
        return tl.trans(self.value) if self.axis not in (None, axis) else self.value


def padded(count: int) -> int:
    """Return the number of lanes for `count` pieces; the further lanes repeat the last piece."""
    return 1 << (count - 1).bit_length()


class PieceEmitter(RowEmitter):
    """Emits a nest in which sums are pieces. contracted: the sums that tensor units compute. packed_sums: the
    other sums along the row, each with all of its pieces."""

    def __init__(self, nest: PlacedNest) -> None:
        super().__init__(nest)
        self.contracted: Mapping[int, Contraction] = {}
        self.packed_sums: dict[int, Nodes] = {}
        self.likeness: dict[Nodes, bool] = {}
        self.in_place_of: dict[int, Tile] = {}  # node -> the tile of its pieces, while one is computed

    def contract(self, sums: Nodes) -> Packed:
        """Return the tile of sums that tensor units compute."""
        raise NotImplementedError

    def cached(self, number: int) -> Tile | None:
        return self.in_place_of.get(number) or super().cached(number)

    def operands(self, number: int) -> Iterable[int]:
        """Return the nodes that are computed before a node: none of a piece whose tile is there."""
        sums = self.sums_with(number)
        return () if sums is not None and self.pack_of(sums) is not None else super().operands(number)

    def sums_with(self, number: int) -> Nodes | None:
        """Return the sums whose tile has a node as a piece."""
        contraction = self.contracted.get(number)
        return self.packed_sums.get(number) if contraction is None else contraction.sums

    def tile(self, number: int) -> Tile:
        sums = self.sums_with(number)
        if sums is not None and self.cached(number) is None:
            self.unpack(sums)
        return super().tile(number)

    # -- form of the nodes ---------------------------------------------------------------------------------

    def may_be_pieces(self, nodes: Nodes) -> bool:
        """True if one tile can have some nodes as its pieces."""
        if self.pack_of(nodes) is not None or len(set(nodes)) == 1:
            return True
        if not self.replicated.keys().isdisjoint(nodes):  # separate scalars
            return False
        if nodes not in self.likeness:
            groups = {self.a.groups[n] for n in nodes}
            is_narrow = len(groups) == 1 and not any(map(self.is_full, nodes))
            self.likeness[nodes] = is_narrow and self._same_form(nodes)
        return self.likeness[nodes]

    def _same_form(self, nodes: Nodes) -> bool:
        first, *others = (self.loops.nodes[n] for n in nodes)
        match first:
            case Load():
                rest = [n for n in others if isinstance(n, Load)]
                same = len({(n.buffer, n.dtype, n.within) for n in (first, *rest)}) == 1
                masked = self._groups_within(first.within) <= self._groups(first.index)
                fits = len(rest) == len(others) and same and masked and first.buffer not in self.empty
                return fits and steps_of([n.index for n in (first, *rest)]) is not None
            case Compute():
                rest = [n for n in others if isinstance(n, Compute)]
                return (
                    len(rest) == len(others)
                    and len({_form(n) for n in (first, *rest)}) == 1
                    and all(self.may_be_pieces(t) for t in self._operands(nodes))
                )
            case Reduce():
                rest = [n for n in others if isinstance(n, Reduce)]
                kinds = {(n.combine, n.axes, n.dtype) for n in (first, *rest)}
                if len(rest) != len(others) or len(kinds) != 1:
                    return False
                contraction = self.contracted.get(nodes[0])
                if contraction is not None:
                    return contraction.sums == nodes
                plain = first.combine == "sum" and first.dtype is torch.float32
                plain &= not any(n in self.a.online or n in self.a.moments for n in nodes)
                operands, over = tuple(n.operand for n in (first, *rest)), self.a.reduced_groups(nodes[0])
                along = self.a.groups[operands[0]] == over and len(over) == 1
                return plain and along and self.may_be_pieces(operands)
            case _:
                return False

    def _groups(self, index: Index) -> frozenset[str]:
        """Return the groups of axes over which an index varies within a tile."""
        groups = set[str]()
        for key, _ in index.terms:
            groups |= {self.loops.axes[key].group} if key >= 0 else self.a.groups[~key]
        return frozenset(groups)

    def _groups_within(self, within: int | None) -> frozenset[str]:
        return frozenset() if within is None else self.a.groups[within]

    def _operands(self, nodes: Nodes) -> Iterator[Nodes]:
        """Yield each operand of some nodes of one form, as a tuple with one operand for each piece."""
        computes = (node for node in (self.loops.nodes[n] for n in nodes) if isinstance(node, Compute))
        operands = [[a.node for _, a in node.operands if isinstance(a, Value)] for node in computes]
        yield from zip(*operands, strict=True)

    def sums_in(self, nodes: Nodes) -> Iterator[Nodes]:
        """Yield the sums along the row that some pieces depend on, unless tensor units compute the sums."""
        if len(set(nodes)) == 1 or nodes[0] in self.contracted:
            return
        first = self.loops.nodes[nodes[0]]
        if isinstance(first, Reduce):
            yield nodes
            yield from self.sums_in(tuple(self.reduction(n).operand for n in nodes))
        elif isinstance(first, Compute):
            for operands in self._operands(nodes):
                yield from self.sums_in(operands)

    # -- tiles of pieces -----------------------------------------------------------------------------------

    def pack_of(self, nodes: Nodes) -> Packed | None:
        """Return the tile of some pieces if it is there."""
        tiles = (scope.tiles.get(("pieces", nodes)) for scope in self.scopes[: self.depth + 1])
        return next((tile for tile in tiles if isinstance(tile, Packed)), None)

    def pack(self, nodes: Nodes) -> Packed:
        """Return the tile of some pieces that are `alike`, computed on first use."""
        packed = self.pack_of(nodes)
        if packed is None:
            with self.in_scope(max(map(self.block_of, nodes))):
                packed = self._packed(nodes)
                self.hold(nodes, packed)
        return packed

    def hold(self, nodes: Nodes, packed: Packed) -> None:
        self.scopes[self.depth].tiles["pieces", nodes] = packed

    def _packed(self, nodes: Nodes) -> Packed:
        if len(set(nodes)) == 1:
            tile = self.tile(nodes[0])
            return Packed(tile.value, tile.lanes, tile.is_block)
        first = self.loops.nodes[nodes[0]]
        if isinstance(first, Load):
            return self._loaded(nodes, first)
        if isinstance(first, Reduce):
            return self.contract(nodes) if nodes[0] in self.contracted else self._reduced(nodes, first)
        return self._computed(nodes)

    def _axis(self, nodes: Nodes) -> int:
        return 1 if ROWS in self.a.groups[nodes[0]] else 0

    def piece(self, axis: int, count: int) -> Variable:
        """Return each lane's piece number, which may exceed that of the last piece."""
        lanes = tl.arange(0, padded(count))
        with self.in_scope(0):
            return self.let("piece", lanes[None, :] if axis else lanes[:, None])

    def _place(self, index: Index, steps: Steps, axis: int, count: int) -> Tile:
        """Return the element numbers of some pieces' accesses."""
        lane: Expression = self.piece(axis, count)
        if steps.last != padded(count) - 1:
            lane = tl.minimum(lane, steps.last)
        if not index.terms and index.const == 0:
            return Tile(lane * steps.step, is_block=True)
        rest = self.index(index)
        return Tile(plus(lane * steps.step, rest.value), rest.lanes, True)

    def _loaded(self, nodes: Nodes, first: Load) -> Packed:
        loads = [n for n in (self.loops.nodes[i] for i in nodes) if isinstance(n, Load)]
        steps, axis = steps_of([n.index for n in loads]), self._axis(nodes)
        assert steps is not None
        within = [] if first.within is None else self.condition(first.within)
        if within is None:
            return Packed(tl.full([], 0, first.dtype))
        place = self._place(first.index, steps, axis, len(nodes))
        pointer, mask = self.access(first.buffer, place, self.axes_of(first.index), within)
        value = self.load_at(first, pointer.value, None if mask is None else mask.value)
        value = convert(value, self.dtypes[first.buffer], first.dtype)
        return Packed(self.let(self.called(first.buffer), value), place.lanes, True, axis)

    def _reduced(self, nodes: Nodes, first: Reduce) -> Packed:
        """Return a reduction over the axis along which the pieces do not lie."""
        over = self.a.reduced_groups(nodes[0])
        axis = 1 if ROWS in over else 0
        tile = self.reduced_pieces(nodes, first, axis)
        combined = Combine(first, (tile,), 1 - axis, True, nodes[0] in self.plain_maxima)
        base = f"{'row' if COLS in over else 'col'}_{first.combine}"
        return Packed(self.let(base, combined), is_block=True, axis=axis)

    def reduced_pieces(self, nodes: Nodes, first: Reduce, axis: int) -> Expression:
        """Return the operands of a reduction of pieces, neutral where no element is."""
        operands = tuple(self.reduction(n).operand for n in nodes)
        source = self.loops.nodes[operands[0]].dtype
        tile = convert(self.pack(operands).lying(axis), source, first.dtype)
        mask = self.inside(first.axes)
        return tile if mask is None else tl.where(mask.value, tile, neutral(first))

    def _computed(self, nodes: Nodes) -> Packed:
        """Compute the first node, with tiles of pieces in place of its operands."""
        operands = [t for t in self._operands(nodes) if not isinstance(self.loops.nodes[t[0]], Constant)]
        tiles = [self.pack(t) for t in operands]
        axes = [tile.axis for tile in tiles if tile.axis is not None]
        axis = self._axis(nodes) if self.a.groups[nodes[0]] else axes[0]
        before, in_place_of = self.in_place_of, dict[int, Tile]()
        for t, tile in zip(operands, tiles, strict=True):
            value = tile.lying(axis)
            base = tile.value.base if isinstance(tile.value, Var) else "turned"
            value = value if value is tile.value else self.let(base, value)
            in_place_of[t[0]] = Tile(value, tile.lanes, True)
        node = self.loops.nodes[nodes[0]]
        assert isinstance(node, Compute)
        self.in_place_of = in_place_of
        tile = self.computed(nodes[0], node)
        self.in_place_of = before
        value = tile.value if isinstance(tile.value, Var) else self.let(base_name(node), tile.value)
        return Packed(value, tile.lanes, True, axis)

    def unpack(self, nodes: Nodes) -> None:
        """Assign each piece of a tile to a variable."""
        packed = self.pack(nodes)
        axis = packed.axis
        assert axis is not None

        def cut(tile: Expression, count: int, numbers: Sequence[int]) -> None:
            if not numbers:
                return
            if count == 1:
                self.scopes[self.depth].tiles[self.key(numbers[0])] = Tile(tile, packed.lanes, True)
                return
            base = "pieces" if count > 2 else self.base_of(numbers[0])
            halves = Var(base), Var(base)
            self.add(Assign(halves, fm.halves(tile, axis)))
            cut(halves[0], count // 2, numbers[: count // 2])
            cut(halves[1], count // 2, numbers[count // 2 :])

        with self.in_scope(self.block_of(nodes[0])):
            cut(packed.value, padded(len(nodes)), nodes)

    def base_of(self, number: int) -> str:
        """Return the beginning of the name of a reduction."""
        return f"{'row' if COLS in self.a.reduced_groups(number) else 'col'}_{self.reduction(number).combine}"

    # -- stores --------------------------------------------------------------------------------------------

    def one_by_one(self, stores: Sequence[Store]) -> Sequence[Store]:
        return self.together(stores)[1]

    def store_rows(self, stores: Sequence[Store]) -> None:
        """Emit stores, of pieces together."""
        groups, others = self.together(stores)
        for group in groups:
            self._store(group)
        super().store_rows(others)

    def together(self, stores: Sequence[Store]) -> tuple[list[tuple[Store, ...]], list[Store]]:
        """Return (groups of stores of pieces, each of which becomes one store, the other stores).

        Without contractions there are no groups.
        """
        by_form: dict[object, list[Store]] = {}
        for store in stores:
            groups, within = self._groups(store.index), None if self._counts(store) else store.within
            by_form.setdefault((store.buffer, store.index.terms, within, groups), []).append(store)
        groups_of_pieces: list[tuple[Store, ...]] = []
        others: list[Store] = []
        for same_form in by_form.values():
            if self.contracted and len(same_form) > 1 and self._are_pieces(same_form):
                groups_of_pieces.append(tuple(same_form))
            else:
                others += same_form
        return groups_of_pieces, [s for s in stores if s in others]

    def _counts(self, store: Store) -> bool:
        """True if the condition of a store, if any, depends on nothing but the number of pieces."""
        node = None if store.within is None else self.loops.nodes[store.within]
        return node is None or (isinstance(node, InRange) and not node.index.terms and node.low == 0)

    def _are_pieces(self, stores: Sequence[Store]) -> bool:
        first, values = stores[0], values_of(stores)
        groups = self._groups(first.index)
        within = self._groups_within(first.within) <= groups
        varies = self.a.groups[first.value] <= groups
        steps = steps_of([s.index for s in stores])
        affine = all(k >= 0 for k, _ in first.index.terms)
        several = len(set(values)) == len(values)
        apart = steps is not None and steps.step != 0 and self._exist_up_to_last(stores, steps)
        return apart and affine and within and varies and several and self.may_be_pieces(values)

    def _exist_up_to_last(self, stores: Sequence[Store], steps: Steps) -> bool:
        """True if the conditions of a group's stores say that exactly the pieces up to `steps.last` exist.

        If that number is a constant, all pieces exist, and the stores need the same condition.
        """
        if isinstance(steps.last, int):
            return len({s.within for s in stores}) == 1
        first, *others = (None if s.within is None else self.loops.nodes[s.within] for s in stores)
        expected = [InRange(Index(i, ()), 0, simple(steps.last + 1)) for i in range(1, len(stores))]
        return first is None and others == expected

    def _store(self, stores: Sequence[Store]) -> None:
        """Emit stores of pieces as one."""
        first, count = stores[0], len(stores)
        steps = steps_of([s.index for s in stores])
        packed = self.pack(values_of(stores))
        assert steps is not None and packed.axis is not None
        conditions = [] if first.within is None else self.condition(first.within)
        if conditions is None:
            return
        inside = [self.inside(self.axes_of(first.index)), *conditions]
        mask = every(*(tile.value for tile in inside if tile is not None))
        if steps.last != padded(count) - 1:
            mask = every(mask, self.piece(packed.axis, count) < simple(steps.last + 1))
        place = self._place(first.index, steps, packed.axis, count)
        self.add(StoreStatement(plus(self.pointers[first.buffer], place.value), packed.value, mask))


@dataclass(frozen=True)
class PackedSums(Plain):
    """Sums along the row that are pieces: an accumulator for each lane of all of them."""

    sums: Nodes

    @property
    def numbers(self) -> Nodes:
        return self.sums

    def reads(self, e: RowTiles) -> tuple[int, ...]:
        return ()

    def start(self, e: RowTiles) -> tuple[Var, ...]:
        shape = [padded(len(self.sums)), e.lanes[-1].lanes]
        return (e.state("row_sum", tl.zeros(shape, torch.float32)),)

    def step(self, e: RowTiles, state: Sequence[Var]) -> None:
        assert isinstance(e, PieceEmitter)
        node = e.reduction(self.number)
        e.add(step(node, state[0], e.reduced_pieces(self.sums, node, 0)))

    def results(self, e: RowTiles, state: Sequence[Var]) -> Mapping[int, Expression]:
        assert isinstance(e, PieceEmitter)
        e.hold(self.sums, Packed(state[0], is_block=True, axis=0))
        return {}


def _form(node: Compute) -> object:
    literals = tuple((n, None if isinstance(a, Value) else exact(a)) for n, a in node.operands)
    return node.target, literals, node.dtype, node.bf16, node.reproducible, node.single_producer


def values_of(stores: Sequence[Store]) -> Nodes:
    return tuple(store.value for store in stores)


@dataclass(frozen=True)
class Steps:
    """Accesses lie `step` elements apart; those behind number `last` repeat that one."""

    step: int
    last: Dim


def steps_of(indices: Sequence[Index]) -> Steps | None:
    """Return the steps of accesses that lie equally far apart and are otherwise the same; None for others."""
    if len({i.terms for i in indices}) != 1:
        return None
    offsets = [simple(i.const - indices[0].const) for i in indices]
    step, last = offsets[1], len(indices) - 1
    if not isinstance(step, int):  # an integer times Min(1, last)
        step, least = step.as_coeff_Mul()
        if not step.is_Integer or not isinstance(least, sympy.Min):
            return None
        step, last = int(step), next(a for a in least.args if a != 1 and isinstance(a, sympy.Expr))
    if any(a != simple(step * smaller(i, last)) for i, a in enumerate(offsets)):
        return None
    return Steps(step, last)
