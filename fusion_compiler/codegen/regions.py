"""Build one block of rows: at once if a tile holds them, else in passes over their columns.

Each level of reductions that depend on each other takes one pass, which reads every column once. Each of its
reductions keeps a state (`online_reductions.py`). Programs that share the row then exchange their states.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusion_compiler.codegen.accesses import store_all, store_one
from fusion_compiler.codegen.axis_map import col_end, col_loop, cols_at
from fusion_compiler.codegen.builder import Builder
from fusion_compiler.codegen.exchange import exchange
from fusion_compiler.codegen.names import own
from fusion_compiler.codegen.nodes import build_nodes, build_row_values
from fusion_compiler.codegen.online_reductions import Running, complete_after, scaled, states_of
from fusion_compiler.codegen.partial_reductions import partial_results
from fusion_compiler.codegen.rematerialize import rematerialize
from fusion_compiler.codegen.sums_over_rows import Sums
from fusion_compiler.ir.loops import COLS, ROWS, Load, Store, operands_of, store_operands
from fusion_compiler.ir.syntax import Expression, Var, Variable, lift
from fusion_compiler.schedule.analysis import end_lanes, inner_cols
from fusion_compiler.schedule.schedule import Cols


def whole_block(b: Builder) -> None:
    """Build everything for one block of rows that is entirely in the tile, including stores."""
    partial_results(b, b.a.segmented)
    stores = list(b.stores_of("main"))
    every = [o for s in b.stores_of("main") for o in store_operands(s)]
    build_nodes(b, _matrices(b, [*every, *b.accumulated()]))
    roots = [*(o for s in stores for o in store_operands(s)), *b.accumulated()]
    build_row_values(b, roots)
    build_nodes(b, _pairs_last(b, b.need(roots)))
    build_nodes(b, b.need(roots))  # values of a mean that was corrected since
    store_all(b, stores)


def _matrices(b: Builder, roots: Sequence[int]) -> list[int]:
    """Return the loads of matrices, which earlier reductions would delay; all loads if reductions are
    replicated."""
    tile_groups, nodes = frozenset({ROWS, COLS}), b.loops.nodes
    if not b.a.weighted and not b.a.products:
        return []
    loads = (n for n in b.need(roots) if isinstance(nodes[n], Load) and not operands_of(nodes[n]))
    return [n for n in loads if b.ahead or b.a.groups[n] == tile_groups]


def _pairs_last(b: Builder, numbers: list[int]) -> list[int]:
    """Return nodes in an order in which single loads come first. Triton computes in the layout of the last
    load. The other loads are narrower and go through shared memory."""
    if not b.a.pairs:
        return numbers
    pairs = {n for pair in b.a.pairs.items() for n in pair}
    nodes = b.loops.nodes
    single = [
        n for n in numbers if isinstance(nodes[n], Load) and n not in pairs and not operands_of(nodes[n])
    ]
    return [*single, *(n for n in numbers if n not in single)]


def passes_over_columns(b: Builder, sums: Sums) -> None:
    """Build one block of rows: one pass per level, with the stores that it completes, then the row values."""
    reductions = [i for i in b.a.reductions if i not in b.a.finish]
    stores = list(b.stores_of("main"))
    full = [s for s in stores if COLS in b.index_groups(s.index)]
    by_row = [s for s in stores if s not in full]
    build_row_values(b, (o for s in by_row for o in store_operands(s)))
    levels = [b.a.level[i] for i in (*reductions, *b.a.segmented)] + [b.a.level[s.value] + 1 for s in full]
    for number in range(max(levels, default=0)):
        complete = complete_after(b.a, number + 1)
        writes = [s for s in full if b.a.level[s.value] == number]
        partial = [i for i in b.a.segmented if b.a.level[i] == number + 1]
        b.set_last_pass(number == max(levels) - 1)
        if complete or writes or partial:
            states = [scaled(b, state) for state in states_of(b.a, complete, b.contracted, b.packed_sums)]
            names = _read_columns(b, number, states, partial, writes, sums)
            if b.s.splits > 1 and states:
                exchange(b, states, names)
                if b.kept:
                    rematerialize(b, [*(o for s in stores for o in store_operands(s)), *b.accumulated()])
            for state, variables in zip(states, names, strict=True):
                state.bind(b, variables)
    for store in by_row:
        build_nodes(b, b.need(store_operands(store)))
        store_one(b, store)


def _read_columns(
    b: Builder,
    level: int,
    states: Sequence[Running],
    partial: Sequence[int],
    stores: Sequence[Store],
    sums: Sums,
) -> list[tuple[Variable, ...]]:
    """Build a loop over this program's columns, or the whole tile, and return the names of the folded states.
    partial: reductions over segments, of which every block stores its part."""
    needed = [o for state in states for o in state.wanted(b)]
    needed += [o for i in partial for o in operands_of(b.loops.nodes[i])]
    needed += [o for s in stores for o in store_operands(s)]
    build_nodes(b, (i for i in b.need(needed) if COLS not in b.a.groups[i]))
    if b.s.cols is Cols.LOOP:
        return _loop(b, states, needed, partial, stores)
    names: list[tuple[Variable, ...]] = [tuple(Var(b.base_of(n)) for n in s.numbers) for s in states]
    build_nodes(b, b.need(needed))
    partial_results(b, partial)
    sums.add_block(b, level)
    for state, variables in zip(states, names, strict=True):
        state.single(b, variables)
    for store in stores:
        store_one(b, store)
    for state, variables in zip(states, names, strict=True):
        state.fold(b, variables)
    return names


def _loop(
    b: Builder,
    states: Sequence[Running],
    needed: Sequence[int],
    partial: Sequence[int],
    stores: Sequence[Store],
) -> list[tuple[Variable, ...]]:
    """Build a loop over whole blocks without masks, then the rest of the row in a tile as narrow as it
    allows."""
    inner, lanes = inner_cols(b.a, b.s), end_lanes(b.a, b.s)
    names = [state.start(b) for state in states]

    def block(start: Expression, inside: bool, ending: bool) -> None:
        cols_at(b, start, inside)
        build_nodes(b, b.need(needed))
        for state, variables in zip(states, names, strict=True):
            (state.end if ending else state.step)(b, variables)
        partial_results(b, partial)
        for store in stores:
            store_one(b, store)

    with b.inside(col_loop(b, inner)):
        block(own("start"), inside=lanes > 0, ending=False)
    for state, variables in zip(states, names, strict=True):
        state.fold(b, variables)
    if lanes:
        with b.inside(col_end(b, inner, lanes), lanes):
            block(lift(inner), inside=False, ending=True)
    return names
