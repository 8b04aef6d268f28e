"""The laws of a loop nest: small functions that return None, or the reason why no kernel computes it.

`lower` has settled that the ops share one iteration space. The laws say whether one launch can run it:
what waits for a sum over all rows can run only at the end, and what is kept per column must fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.dims import Dim, hint, not_above, simple
from fusion_compiler.ir.loops import (
    COLS,
    INNER,
    ROWS,
    TILE,
    Compute,
    Index,
    Load,
    LoopNest,
    Node,
    Random,
    Reduce,
    Scan,
    Value,
    is_applied,
    kept_axes,
    operands_of,
    store_operands,
    with_operands,
    with_readers,
)
from fusion_compiler.ops.arithmetic import DIV
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.products import sums_of_products
from fusion_compiler.schedule.space import refusal

MOST_OPS = 96
MOST_ALIKE = 4  # a product of several rows may have so many times MOST_OPS, which compilers can still take
MOST_BUFFERS = 24

Law = Callable[[Analysis], str | None]


def size(a: Analysis) -> str | None:
    """Refuse a kernel that is too large for people to read and for compilers to schedule."""
    loops = a.loops
    buffers = {n.buffer for n in loops.nodes if isinstance(n, Load)} | {s.buffer for s in loops.stores}
    # People read the operations of one row of a product, or of one of few elements beside a row, once.
    alike = 0 if a.inner else len(sums_of_products(loops))
    most = MOST_OPS * max(1, min(alike or _beside_a_row(a), MOST_ALIKE))
    if len(loops.nodes) > most:
        return f"{len(loops.nodes)} operations are more than {most}"
    return f"{len(buffers)} tensors are more than {MOST_BUFFERS}" if len(buffers) > MOST_BUFFERS else None


def _beside_a_row(a: Analysis) -> int:
    """Return the largest number of elements that a tensor has for a row, side by side in memory, if all of
    them are loaded or stored one by one for each row; 0 in nests without rows."""
    over = frozenset[str]().union(*(a.reduced_groups(i) for i in a.reductions))
    if not over <= {COLS} or not (over or a.rows):
        return 0
    elements: dict[tuple[str, tuple[tuple[int, Dim], ...]], set[Dim]] = {}
    for x in (*(n for n in a.loops.nodes if isinstance(n, Load)), *a.loops.stores):
        if all(k >= 0 and k not in a.cols for k, _ in x.index.terms):
            elements.setdefault((x.buffer, x.index.terms), set()).add(x.index.const)
    rows = ((offsets, [step for _, step in terms]) for (_, terms), offsets in elements.items())
    widths = (len(e) for e, steps in rows if e == {*range(len(e))} and all(s % len(e) == 0 for s in steps))
    return max(widths, default=0)


def grid_wide(a: Analysis) -> str | None:
    """Allow only stores after a sum over all rows: a program that went on would wait for every other. The
    stores may need no other reduction: the programs that add up the rows have a block of columns each."""
    loops, groups, late = a.loops, a.groups, a.after_rows
    if a.products is not None:  # placements have a verifier of their own
        return None
    for i in sorted(late):
        waits = any(o in late for o in operands_of(loops.nodes[i]))
        if waits and (isinstance(loops.nodes[i], Reduce | Scan) or ROWS in groups[i]):
            return f"{loops.names[i]} needs a reduction over all rows before it is complete"
    stores = [s for s in loops.stores if s.value in late]
    for store in stores:
        if any(k >= 0 and loops.axes[k].group == ROWS for k, _ in store.index.terms):
            return f"{store.buffer} repeats a reduction over all rows in each of them"
    needed = with_operands(loops, (o for s in stores for o in store_operands(s)), a.across_rows)
    for i in sorted(needed.difference(a.across_rows)):
        if isinstance(loops.nodes[i], Reduce | Scan):
            return f"{loops.names[i]} is not known where a reduction over all rows is complete"
    return None


def product_rows(a: Analysis) -> str | None:
    """Refuse a sum over the results of products: the next product computes it from a few kilobytes while it
    waits for its matrix, but here the last program would compute it while nothing else runs."""
    sums = {} if a.inner or a.stores_rows or not a.reads_rows else sums_of_products(a.loops)
    if any(ROWS not in a.reduced_groups(n) for n in sums) and a.across_rows:
        return f"{a.loops.names[a.across_rows[0]]} would wait for all rows of a product"
    return None


def groups(a: Analysis) -> str | None:
    """Require that each reduction of a nest of rows and columns is over all rows, all columns, or both. In
    nests with inner axes, each reduction may be over any of these."""
    for i in a.reductions:
        node = a.loops.nodes[i]
        if isinstance(node, Reduce) and kept_axes(a.loops.axes, node):
            return f"{a.loops.names[i]} reduces a part of the axes that others reduce"
    return None


def known_places(a: Analysis) -> str | None:
    """Return why the place of a store is not known when its value is stored. A place may wait for no
    reduction."""
    loops = a.loops
    late = with_readers(loops, (n for n, node in enumerate(loops.nodes) if isinstance(node, Reduce | Scan)))
    for store in loops.stores:
        _, *place = store_operands(store)
        if not late.isdisjoint(place):
            return f"{store.buffer} is written where a reduction says"
    return None


def fills(a: Analysis) -> str | None:
    """Require that every result is computed once, not once in every program.

    A program that reduces along rows holds whole rows, and stores a row's value once; a program of a
    matrix stores the values of that matrix. If only inner axes are reduced, every element of the space is one
    element of every result.
    """
    loops, groups = a.loops, a.groups
    along_row = bool(a.scans) or any(a.reduced_groups(i) == frozenset({COLS}) for i in a.reductions)
    present = {axis.group for axis in loops.axes} & (TILE - {COLS} if along_row else TILE)
    reduced: list[frozenset[str]] = []
    for i, node in enumerate(loops.nodes):
        over = frozenset[str]().union(*(reduced[o] for o in operands_of(node)))
        reduced.append(over | a.reduced_groups(i) & TILE if isinstance(node, Reduce) else over)
    live = {i for i, axis in enumerate(loops.axes) if axis.size != 1 and axis.group in TILE}
    empty = {i for i, axis in enumerate(loops.axes) if axis.size == 0}
    perhaps_empty = {
        i for i, axis in enumerate(loops.axes) if axis.size == 0 or not isinstance(axis.size, int)
    }
    behind = loops.node_axes
    for store in loops.stores:
        along = frozenset[int]().union(*({k} if k >= 0 else behind[~k] for k, _ in store.index.terms))
        if along & empty:
            continue
        if {loops.axes[k].group for k in along} & {loops.axes[k].group for k in perhaps_empty - along}:
            return f"{store.buffer} has elements where the space has none, or may have none"
        if not any(reduced) and live - along:
            return f"{store.buffer} would be computed again for every element that it is broadcast to"
        moves = {loops.axes[k].group for k in along} | groups[store.value]
        if present - moves - reduced[store.value]:
            return (
                f"{store.buffer} would be computed again for every {'row' if ROWS not in moves else 'column'}"
            )
    return None


def windows(a: Analysis) -> str | None:
    """Refuse operations that need whole rows beside reductions over inner axes, and expensive operations on
    elements that overlapping windows read: each window computes them."""
    loops, inner = a.loops, a.inner
    if not inner:
        return None
    from_data, once = list[bool](), list[frozenset[frozenset[int]]]()
    for i, (node, axes) in enumerate(zip(loops.nodes, loops.node_axes, strict=True)):
        if isinstance(node, Scan) or (isinstance(node, Reduce) and INNER not in a.reduced_groups(i)):
            return f"{loops.names[i]} needs whole rows, which sums over inner axes do not have"
        if a.windows is None:
            continue
        once.append(frozenset[frozenset[int]]().union(*(once[o] for o in operands_of(node))))
        if isinstance(node, Load) and _is_apart(loops, node.index):
            once[i] |= {axes}
        again = axes & inner and not any(axes <= moved for moved in once[i])
        if (axes & inner and isinstance(node, Reduce | Random)) or (again and _is_expensive(node, from_data)):
            return f"{loops.names[i]} would be computed again for each window that reads it"
        from_data.append(isinstance(node, Load | Random) or any(from_data[o] for o in operands_of(node)))
    return None


def _is_apart(loops: LoopNest, index: Index) -> bool:
    """True if an index has another value for each point of its axes, as the index of disjoint windows has."""
    reach: Dim = 0
    steps = sorted((hint(step), key, step) for key, step in index.terms)
    for first, key, step in steps:
        if key < 0 or first <= 0 or not not_above(reach + 1, step):
            return False
        reach = simple(reach + (loops.axes[key].size - 1) * step)
    return True


def _is_expensive(node: Node, from_data: Sequence[bool]) -> bool:
    """True if a node is a function of floats that special units compute. A division by a number is a product,
    and one by the size of a window, which depends on coordinates alone, is shared by neighbours.

    from_data: whether each earlier node depends on loaded or random elements.
    """
    if not isinstance(node, Compute) or not node.dtype.is_floating_point:
        return False
    by = dict(node.operands).get("other")
    cheap_divisor = not from_data[by.node] if isinstance(by, Value) else isinstance(by, int | float)
    return node.spec.special > 0 and not (is_applied(node, DIV) and cheap_divisor)


LAWS: tuple[tuple[str, Law], ...] = (
    ("size", size),
    ("windows", windows),
    ("grid", grid_wide),
    ("in place", known_places),
    ("grid", product_rows),
    ("groups", groups),
    ("fill", fills),
)


def first_refusal(a: Analysis, device: DeviceSpec) -> tuple[str, str] | None:
    """Return (rule, reason) of the first law that the loop nest breaks, or of the device's registers, which
    have no room for what is kept until the end; None if the nest breaks none."""
    for rule, law in LAWS:
        if (reason := law(a)) is not None:
            return rule, reason
    reason = refusal(a, device)
    return None if reason is None else ("registers", reason)
