"""Compute nodes of the same form, which read neighbouring elements, as the pieces of one tile.

    a0 = load(x + col);         b0 = a0 * w
    a1 = load(x + 2048 + col);  b1 = a1 * w     ->      a = load(x + piece * 2048 + col);  b = a * w

The rows of a product of few rows are pieces, for example, and the queries of a head of keys. So are the
vectors and the sums of products that tensor units compute (`contractions.py`). Pieces lie along the axis that
their values lack: [rows, pieces] or [pieces, columns]. Pieces that are scalars may lie along either. Nodes
that vary over rows and columns are never pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import sympy
import torch

from fusion_compiler.codegen.accesses import as_dtype
from fusion_compiler.codegen.builder import Builder, Packed
from fusion_compiler.codegen.expression import convert
from fusion_compiler.codegen.monoids import neutral
from fusion_compiler.codegen.nodes import build_nodes, value_of
from fusion_compiler.codegen.tile import Assign
from fusion_compiler.codegen.tile import Store as StoreStatement
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
    store_operands,
)
from fusion_compiler.ir.syntax import Expression, Var, Variable, every, fm, plus, tl

Nodes = tuple[int, ...]  # one for each piece
FOLDED = ("sum", "max", "min")


def padded(count: int) -> int:
    """Return the number of lanes for `count` pieces; the further lanes repeat the last piece."""
    return 1 << (count - 1).bit_length()


# -- form of the nodes -----------------------------------------------------------------------------------


def alike(b: Builder, nodes: Nodes) -> bool:
    """True if one tile can have some nodes as its pieces."""
    if nodes in b.packs or len(set(nodes)) == 1:
        return True
    if not b.ahead.isdisjoint(nodes):  # separate scalars
        return False
    if nodes in b.likeness:
        return b.likeness[nodes]
    groups = {b.a.groups[n] for n in nodes}
    both = groups & {frozenset({ROWS, COLS})}
    b.likeness[nodes] = result = len(groups) == 1 and not both and _same_form(b, nodes)
    return result


def _same_form(b: Builder, nodes: Nodes) -> bool:
    first, *others = (b.loops.nodes[n] for n in nodes)
    match first:
        case Load():
            rest = [n for n in others if isinstance(n, Load)]
            same = len({(n.buffer, n.dtype, n.within) for n in (first, *rest)}) == 1
            masked = b.within_groups(first.within) <= b.index_groups(first.index)
            fits = len(rest) == len(others) and same and masked and first.buffer not in b.empty
            return fits and steps_of([n.index for n in (first, *rest)]) is not None
        case Compute():
            rest = [n for n in others if isinstance(n, Compute)]
            return (
                len(rest) == len(others)
                and len({_form(n) for n in (first, *rest)}) == 1
                and all(alike(b, t) for t in _operands(b, nodes))
            )
        case Reduce():
            rest = [n for n in others if isinstance(n, Reduce)]
            kinds = {(n.combine, n.axes, n.dtype) for n in (first, *rest)}
            if len(rest) != len(others) or len(kinds) != 1:
                return False
            contraction = b.contracted.get(nodes[0])
            if contraction is not None:
                return contraction.sums == nodes
            plain = first.combine in FOLDED and first.dtype is torch.float32
            plain &= not any(n in b.a.online or n in b.a.moments for n in nodes)
            operands, over = tuple(n.operand for n in (first, *rest)), b.a.over(nodes[0])
            along = b.a.groups[operands[0]] == over and len(over) == 1
            return plain and along and first.combine == "sum" and alike(b, operands)
        case _:
            return False


def _form(node: Compute) -> object:
    literals = tuple((n, None if isinstance(a, Value) else exact(a)) for n, a in node.operands)
    return node.target, literals, node.dtype, node.coarse, node.pinned, node.single_producer


def _operands(b: Builder, nodes: Nodes) -> Iterator[Nodes]:
    """Yield each operand of some nodes of one form, as a tuple with one operand for each piece."""
    operands = [[a.node for _, a in _compute(b, n).operands if isinstance(a, Value)] for n in nodes]
    yield from zip(*operands, strict=True)


def _compute(b: Builder, number: int) -> Compute:
    node = b.loops.nodes[number]
    assert isinstance(node, Compute)
    return node


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


def sums_in(b: Builder, nodes: Nodes) -> Iterator[Nodes]:
    """Yield the sums along the row that some pieces depend on, unless tensor units compute the sums."""
    if len(set(nodes)) == 1 or nodes[0] in b.contracted:
        return
    first = b.loops.nodes[nodes[0]]
    if isinstance(first, Reduce):
        yield nodes
        yield from sums_in(b, tuple(b.reduction(n).operand for n in nodes))
    elif isinstance(first, Compute):
        for operands in _operands(b, nodes):
            yield from sums_in(b, operands)


# -- tiles of pieces --------------------------------------------------------------------------------------


def pack(b: Builder, nodes: Nodes) -> Packed:
    """Return the tile of some pieces that are `alike`; build it on first use."""
    packed = b.packs.get(nodes)
    if packed is None:
        packed = _shared(b, nodes[0]) if len(set(nodes)) == 1 else _built(b, nodes)
        b.packs[nodes] = packed
    return packed


def lying(packed: Packed, axis: int) -> Expression:
    """Return a tile with its pieces along an axis."""
    other = packed.axis not in (None, axis)
    return tl.trans(packed.variable) if other else packed.variable


def prepare(b: Builder, nodes: Nodes) -> None:
    """Build what some pieces need and does not vary along the columns, before a loop over columns."""
    if len(set(nodes)) > 1:
        piece(b, _axis(b, nodes), len(nodes))
    if COLS not in b.a.groups[nodes[0]]:
        pack(b, nodes)
    elif len(set(nodes)) > 1 and isinstance(b.loops.nodes[nodes[0]], Compute):
        for operands in _operands(b, nodes):
            prepare(b, operands)


def _shared(b: Builder, number: int) -> Packed:
    build_nodes(b, b.need((number,)))
    return Packed(b.variable(number), None)


def _built(b: Builder, nodes: Nodes) -> Packed:
    first = b.loops.nodes[nodes[0]]
    match first:
        case Load():
            return _loaded(b, nodes, first)
        case Reduce() if nodes[0] in b.contracted:
            b.tiles[nodes]()
            return b.packs[nodes]
        case Reduce():
            return _reduced(b, nodes, first)
        case _:
            return _computed(b, nodes)


def _axis(b: Builder, nodes: Nodes) -> int:
    return 1 if ROWS in b.a.groups[nodes[0]] else 0


def piece(b: Builder, axis: int, count: int) -> Variable:
    """Return each lane's piece number, which may exceed that of the last piece."""
    lanes = tl.arange(0, padded(count))
    return b.once(("piece", 2 * count + axis), "piece", lanes[None, :] if axis else lanes[:, None])


def _address(b: Builder, buffer: str, index: Index, steps: Steps, axis: int, count: int) -> Expression:
    lane: Expression = piece(b, axis, count)
    if steps.last != padded(count) - 1:
        lane = tl.minimum(lane, steps.last)
    rest = None if not index.terms and index.const == 0 else b.index(index)
    return plus(b.pointers[buffer], lane * steps.step, rest)


def _loaded(b: Builder, nodes: Nodes, first: Load) -> Packed:
    loads = [n for n in (b.loops.nodes[i] for i in nodes) if isinstance(n, Load)]
    steps, axis = steps_of([n.index for n in loads]), _axis(b, nodes)
    assert steps is not None
    if first.within is not None:
        build_nodes(b, b.need((first.within,)))
    build_nodes(b, b.need([~k for k, _ in first.index.terms if k < 0]))
    pointer = _address(b, first.buffer, first.index, steps, axis, len(nodes))
    mask = b.mask(b.index_groups(first.index), first.within)
    value = as_dtype(b, first, b.loaded(first, pointer, mask), first.dtype)
    return Packed(b.let(b.called(first.buffer), value), axis)


def _reduced(b: Builder, nodes: Nodes, first: Reduce) -> Packed:
    """Build a reduction over the axis along which the pieces do not lie."""
    over = b.a.over(nodes[0])
    axis = 1 if ROWS in over else 0
    operands = tuple(b.reduction(n).operand for n in nodes)
    tile = convert(lying(pack(b, operands), axis), b.loops.nodes[operands[0]].dtype, first.dtype)
    if (mask := b.mask(over, None)) is not None:
        tile = tl.where(mask, tile, neutral(first))
    return Packed(b.let(b.base_of(nodes[0]), b.folded(nodes[0], tile, 1 - axis, True)), axis)


def _computed(b: Builder, nodes: Nodes) -> Packed:
    """Compute the first node, with tiles of pieces in place of its operands."""
    operands = list(_operands(b, nodes))
    operands = [t for t in operands if not isinstance(b.loops.nodes[t[0]], Constant)]
    tiles = [pack(b, t) for t in operands]
    groups = b.a.groups[nodes[0]]
    axes = [t.axis for t in tiles if t.axis is not None]
    axis = _axis(b, nodes) if groups else axes[0]
    before = dict(b.env)
    for t, tile in zip(operands, tiles, strict=True):
        value = lying(tile, axis)
        b.env[t[0]] = value if isinstance(value, Var) else b.let(tile.variable.base, value)
        b.env.pop(~t[0], None)
    value, base = value_of(b, nodes[0])
    b.env = before
    if isinstance(value, Var):  # an unchanged operand
        return Packed(value, axis)
    return Packed(b.let(base, value), axis)


def unpack(b: Builder, nodes: Nodes) -> None:
    """Assign each piece of a tile to a variable."""
    packed = b.packs[nodes]
    assert packed.axis is not None
    axis = packed.axis

    def cut(tile: Variable, count: int, numbers: Sequence[int]) -> None:
        if not numbers:
            return
        if count == 1:
            b.env[numbers[0]] = tile
            return
        base = "pieces" if count > 2 else b.base_of(numbers[0])
        halves = Var(base), Var(base)
        b.add(Assign(halves, fm.halves(tile, axis)))
        cut(halves[0], count // 2, numbers[: count // 2])
        cut(halves[1], count // 2, numbers[count // 2 :])

    cut(packed.variable, padded(len(nodes)), nodes)


# -- stores -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stores:
    """Stores of pieces become one store of a tile."""

    stores: tuple[Store, ...]

    @property
    def values(self) -> Nodes:
        return tuple(s.value for s in self.stores)


def together(b: Builder, stores: Sequence[Store]) -> tuple[list[Stores], list[Store]]:
    """Return (groups of stores that become one store each, the other stores).

    Without contractions there are no groups.
    """
    by_form: dict[object, list[Store]] = {}
    for store in stores:
        groups, within = b.index_groups(store.index), None if _depends_on_count(b, store) else store.within
        by_form.setdefault((store.buffer, store.index.terms, within, groups), []).append(store)
    groups_of_pieces: list[Stores] = []
    others: list[Store] = []
    for same_form in by_form.values():
        group = Stores(tuple(same_form))
        if b.contracted and len(same_form) > 1 and _are_pieces(b, group):
            groups_of_pieces.append(group)
        else:
            others += same_form
    return groups_of_pieces, [s for s in stores if s in others]


def _depends_on_count(b: Builder, store: Store) -> bool:
    """True if the condition of a store, if any, depends on nothing but the number of pieces."""
    node = None if store.within is None else b.loops.nodes[store.within]
    return node is None or (isinstance(node, InRange) and not node.index.terms and node.low == 0)


def _are_pieces(b: Builder, group: Stores) -> bool:
    first, values = group.stores[0], group.values
    within = b.within_groups(first.within) <= b.index_groups(first.index)
    varies = b.a.groups[first.value] <= b.index_groups(first.index)
    steps = steps_of([s.index for s in group.stores])
    affine = all(k >= 0 for k, _ in first.index.terms)
    several = len(set(values)) == len(values)
    apart = steps is not None and steps.step != 0 and _exist_up_to_last(b, group, steps)
    return apart and affine and within and varies and several and alike(b, values)


def _exist_up_to_last(b: Builder, group: Stores, steps: Steps) -> bool:
    """True if the conditions of a group's stores say that exactly the pieces up to `steps.last` exist.

    If that number is a constant, all pieces exist, and the stores need the same condition.
    """
    if isinstance(steps.last, int):
        return len({s.within for s in group.stores}) == 1
    first, *others = (None if s.within is None else b.loops.nodes[s.within] for s in group.stores)
    expected = [InRange(Index(i, ()), 0, simple(steps.last + 1)) for i in range(1, len(group.stores))]
    return first is None and others == expected


def store(b: Builder, group: Stores) -> None:
    first, count = group.stores[0], len(group.stores)
    steps = steps_of([s.index for s in group.stores])
    packed = pack(b, group.values)
    assert steps is not None and packed.axis is not None
    build_nodes(b, b.need([o for o in store_operands(first) if o != first.value]))
    groups = b.index_groups(first.index)
    mask = b.by_one(groups, b.mask(groups, first.within))
    if steps.last != padded(count) - 1:
        mask = every(mask, piece(b, packed.axis, count) < simple(steps.last + 1))
    pointer = _address(b, first.buffer, first.index, steps, packed.axis, count)
    b.add(StoreStatement(pointer, packed.variable, mask))
