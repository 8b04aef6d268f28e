"""Normalize a loop nest: remove dead nodes, order axes by stride, and merge axes.

Two axes of one group become one if every access moves along the outer axis as it would over `inner size`
steps of the inner one, like the coalescing of TensorIterator. Most clusters end with one axis per group.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from fusion_compiler.ir.dims import Dim, hint, simple
from fusion_compiler.ir.loops import (
    COLS,
    GROUPS,
    INNER,
    RAGGED,
    ROWS,
    Axis,
    Coordinate,
    Index,
    InRange,
    Load,
    LoopNest,
    Node,
    Random,
    Reduce,
    Scan,
    axes_in,
    groups_of,
    operands_of,
    reduced_groups,
    renumber,
    renumber_axes,
    renumber_store,
    store_operands,
    with_operands,
)
from fusion_compiler.passes.lower.algebra import factored_sums, nested_sums, one_hot_sums

NAMES = {ROWS: "row", COLS: "col", INNER: "inner", RAGGED: "turn"}
ORDER = (*GROUPS, INNER, RAGGED)
LEAST_TILE = 16  # elements that a transposing tile needs along an axis to touch whole sectors
LONG_ROW = 8192  # elements of a row from which on a partial last tile wastes little


def simplify(loops: LoopNest, by_memory: bool = False, turned: bool = False) -> LoopNest:
    """Apply algebra, remove dead code, and assign groups, order, merge and name axes, in that order.
    by_memory: choose the contiguous axes as columns even if other axes are reduced and broadcast back.
    turned: then swap rows and columns. Programs share the rows, however many there are."""
    loops = contiguous_cols(remove_dead(one_hot_sums(loops)), by_memory)
    loops = remove_dead(nested_sums(factored_sums(_swapped(loops) if turned else loops)))
    loops, crossing = split_orders(loops)
    loops = order_axes(loops, crossing)
    return name_axes(long_rows(coalesce(loops)))


def renumbered(loops: LoopNest, numbers: dict[int, int], axes: dict[int, int] | None = None) -> LoopNest:
    """Return a nest with the nodes in `numbers` under their new numbers. axes: new numbers of the axes."""
    kept = sorted(numbers, key=numbers.__getitem__)
    stores = tuple(renumber_store(s, numbers, axes) for s in loops.stores)
    nodes = tuple(renumber(loops.nodes[i], numbers, axes) for i in kept)
    names = tuple(loops.names[i] for i in kept)
    return LoopNest(renumber_axes(loops.axes, numbers), nodes, stores, names)


def remove_dead(loops: LoopNest) -> LoopNest:
    live = with_operands(loops, (n for s in loops.stores for n in store_operands(s)))
    if len(live) == len(loops.nodes):
        return loops
    return renumbered(loops, {old: new for new, old in enumerate(sorted(live))})


def accesses(loops: LoopNest) -> list[Index]:
    """Return the indices of all loads and stores."""
    return [n.index for n in loops.nodes if isinstance(n, Load)] + [s.index for s in loops.stores]


def contiguous_cols(loops: LoopNest, by_memory: bool = False) -> LoopNest:
    """Choose the columns: the group that is reduced and broadcast back, else that of most contiguous
    accesses. The groups stay as they are for scans, and for nests with inner axes."""
    fixed = any(a.group == INNER for a in loops.axes)
    if fixed or any(isinstance(n, Scan) for n in loops.nodes):
        return loops
    normalized = set[str]() if by_memory else normalized_groups(loops)
    votes = {ROWS: 0, COLS: 0}
    axes = loops.node_axes
    for index in accesses(loops):
        touched = 1
        for axis in set().union(*({key} if key >= 0 else axes[~key] for key, _ in index.terms)):
            touched *= hint(loops.axes[axis].size)
        for key, coeff in index.terms:
            if key >= 0 and coeff == 1:
                votes[loops.axes[key].group] += touched
    keep = COLS in normalized if normalized else votes[ROWS] <= votes[COLS]
    return loops if keep else _swapped(loops)


def _swapped(loops: LoopNest) -> LoopNest:
    swap = {ROWS: COLS, COLS: ROWS}
    return replace(loops, axes=tuple(replace(a, group=swap.get(a.group, a.group)) for a in loops.axes))


def normalized_groups(loops: LoopNest) -> set[str]:
    """Return the groups over which a value is reduced and then used for every element again."""
    groups = groups_of(loops)
    reduced: list[frozenset[str]] = []
    normalized: set[str] = set()
    for i, node in enumerate(loops.nodes):
        upstream = frozenset[str]().union(*(reduced[o] for o in operands_of(node)))
        normalized |= upstream & groups[i]
        reduced.append(upstream | reduced_groups(loops.axes, node) if isinstance(node, Reduce) else upstream)
    return normalized


def split_orders(loops: LoopNest) -> tuple[LoopNest, Index | None]:
    """Give element-wise work between two memory orders rows along one order and columns along the other.

    Tiles then touch whole sectors on both sides. The second result is the access that is contiguous along the
    rows.
    """
    if not _is_elementwise(loops):
        return loops, None
    stored = _unit_axis(max((s.index for s in loops.stores), key=lambda i: len(i.terms)))
    for node in loops.nodes:
        if stored is None or not isinstance(node, Load):
            continue
        along = _unit_axis(node.index)
        if along is None or along == stored or stored not in dict(node.index.terms):
            continue
        if min(hint(loops.axes[i].size) for i in (along, stored)) >= LEAST_TILE:
            axes = tuple(
                a if a.bounds else replace(a, group=COLS if i == stored else ROWS)
                for i, a in enumerate(loops.axes)
            )
            return replace(loops, axes=axes), node.index
    return loops, None


def long_rows(loops: LoopNest) -> LoopNest:
    """Make the last axis of element-wise work the columns, if rows are long and a load is constant along a
    row. A tile then loads such a value once instead of once per element."""
    ragged = axes_in(loops.axes, (RAGGED,))  # a tile of several rows runs to the end of the longest
    last = len(loops.axes) - len(ragged) - 1
    if last < 1 or not _is_elementwise(loops) or (hint(loops.axes[last].size) < LONG_ROW and not ragged):
        return loops
    outer = frozenset(range(last))
    keys = (frozenset(k for k, _ in n.index.terms) for n in loops.nodes if isinstance(n, Load))
    if not any(k and k <= outer for k in keys):
        return loops
    axes = (*(replace(a, group=ROWS) for a in loops.axes[:last]), *loops.axes[last:])
    return replace(loops, axes=axes)


def _is_elementwise(loops: LoopNest) -> bool:
    """True if a nest has no rows, no scans, and no reductions but over ragged axes."""
    reduces = any(isinstance(n, Scan) or (isinstance(n, Reduce) and n.within is None) for n in loops.nodes)
    return not reduces and not axes_in(loops.axes, (ROWS,))


def _unit_axis(index: Index) -> int | None:
    """Return the axis along which an access is contiguous, or None."""
    return next((key for key, coeff in index.terms if key >= 0 and coeff == 1), None)


def order_axes(loops: LoopNest, crossing: Index | None = None) -> LoopNest:
    """Order axes by decreasing stride of the largest access that moves along the axis.

    crossing: the access that orders the rows, if their memory order is not that of the columns.
    The order of scanned axes stays.
    """
    scanned = {COLS} if any(isinstance(n, Scan) for n in loops.nodes) else frozenset[str]()
    indices, axes = sorted(accesses(loops), key=lambda i: -len(i.terms)), loops.node_axes

    def stride(number: int, lookups: bool) -> int:
        """Return the stride along an axis. lookups: include indices that vary along the axis."""
        for index in [crossing, *indices] if crossing and loops.axes[number].group == ROWS else indices:
            for key, coeff in index.terms:
                if key == number or (lookups and key < 0 and number in axes[~key]):
                    return abs(hint(coeff))
        return 0

    live = {k for i in _all_indices(loops) for k, _ in i.terms if k >= 0}
    reduced = frozenset[int]().union(*(n.axes for n in loops.nodes if isinstance(n, Reduce)))
    idle = axes_in(loops.axes, (INNER, RAGGED)) - reduced - live  # axes of removed reductions
    keep = [i for i, a in enumerate(loops.axes) if i not in idle and (i in live or a.size != 1)]
    free = [i for i in keep if loops.axes[i].group not in scanned]
    steps = dict.fromkeys(keep, (0, 0)) | {i: (-stride(i, True), -stride(i, False)) for i in free}
    order = sorted(keep, key=lambda i: (ORDER.index(loops.axes[i].group), steps[i], i))
    if order == list(range(len(loops.axes))):
        return loops
    index = {old: new for new, old in enumerate(order)}
    numbers = {i: i for i in range(len(loops.nodes))}
    moved = renumbered(loops, numbers, index)
    return replace(moved, axes=tuple(loops.axes[i] for i in order))


def _all_indices(loops: LoopNest) -> list[Index]:
    out = accesses(loops)
    out += [n.index for n in loops.nodes if isinstance(n, Coordinate | InRange | Random)]
    return out


def coalesce(loops: LoopNest) -> LoopNest:
    """Merge neighbouring axes wherever possible."""
    i = 0
    while i + 1 < len(loops.axes):
        outer, inner = loops.axes[i], loops.axes[i + 1]
        separate = any((i in n.axes) != (i + 1 in n.axes) for n in loops.nodes if isinstance(n, Reduce))
        may_merge = outer.group == inner.group and not separate
        if may_merge and all(_merges(x, i, inner.size) for x in _all_indices(loops)):
            loops = _merge(loops, i)
        else:
            i += 1
    return loops


def _merges(index: Index, outer: int, inner_size: Dim) -> bool:
    coeffs = dict(index.terms)
    a, b = coeffs.get(outer, 0), coeffs.get(outer + 1, 0)
    return simple(b * inner_size) == a


def _merge(loops: LoopNest, outer: int) -> LoopNest:
    """Merge axes `outer` and `outer + 1` into one with the number `outer`."""
    a, b = loops.axes[outer], loops.axes[outer + 1]
    bounds = [axis.size if isinstance(axis.size, int) else axis.most for axis in (a, b)]
    most = None if None in bounds else prod(bound for bound in bounds if bound is not None)
    merged_axis = Axis(a.name, simple(a.size * b.size), a.group, most=most)
    axes = (*loops.axes[:outer], merged_axis, *loops.axes[outer + 2 :])

    def merged(index: Index) -> Index:
        terms = [(k - (k > outer), c) for k, c in index.terms if k != outer]
        return Index(index.const, tuple(sorted(terms)))

    def rewrite(node: Node) -> Node:
        if isinstance(node, Reduce):
            return replace(node, axes=frozenset(k - (k > outer) for k in node.axes))
        return (
            replace(node, index=merged(node.index))
            if isinstance(node, Load | Coordinate | InRange | Random)
            else node
        )

    stores = tuple(replace(s, index=merged(s.index)) for s in loops.stores)
    return replace(loops, axes=axes, nodes=tuple(map(rewrite, loops.nodes)), stores=stores)


def name_axes(loops: LoopNest) -> LoopNest:
    """Name the axis row or col if its group has one axis, and row_0, row_1, ... if it has several."""
    counts = {g: sum(a.group == g for a in loops.axes) for g in ORDER}
    seen: dict[str, int] = dict.fromkeys(ORDER, 0)
    axes: list[Axis] = []
    for a in loops.axes:
        base = NAMES[a.group]
        axes.append(replace(a, name=base if counts[a.group] == 1 else f"{base}_{seen[a.group]}"))
        seen[a.group] += 1
    return replace(loops, axes=tuple(axes))
