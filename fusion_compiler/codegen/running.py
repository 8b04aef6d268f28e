"""Passes over the columns of rows that no tile holds whole: in blocks, and by several programs.

There is one pass for each level of reductions that feed each other. It reads every column once, and each of
its reductions keeps a state (`codegen.online_reductions`); programs that share the row then exchange what
they have.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusion_compiler.codegen.exchange import exchange
from fusion_compiler.codegen.expression import dim_text
from fusion_compiler.codegen.online_reductions import (
    Running,
    complete_after,
    first_of,
    scaled,
    states_of,
    two_by_two,
)
from fusion_compiler.codegen.partial_reductions import partial_results
from fusion_compiler.codegen.printer import Printer
from fusion_compiler.ir.dims import Dim, product, quotient
from fusion_compiler.ir.loops import COLS, Store, operands_of, store_operands
from fusion_compiler.schedule.analysis import Cols, end_lanes, inner_cols, part_cols


def print_passes(p: Printer) -> None:
    """One block of rows: for each level its pass, with the stores that can be made then; row values last."""
    reductions = [i for i in p.a.reductions if i not in p.a.finish]
    stores = list(p.stores_of("main"))
    by_row = [s for s in stores if COLS not in p.index_groups(s.index)]
    full = [s for s in stores if s not in by_row]
    p.print_row_values(o for s in by_row for o in store_operands(s))
    levels = [p.a.level[i] for i in (*reductions, *p.a.segmented)] + [p.a.level[s.value] + 1 for s in full]
    for number in range(max(levels, default=0)):
        mine = complete_after(p.a, number + 1)
        writes = [s for s in full if p.a.level[s.value] == number]
        pieces = [i for i in p.a.segmented if p.a.level[i] == number + 1]
        p.last_pass = number == max(levels) - 1
        if mine or writes or pieces:
            states = two_by_two(p.a, [scaled(p, state) for state in states_of(p.a, mine)])
            names = _read_columns(p, number, states, pieces, writes)
            if p.s.splits > 1 and states:
                exchange(p, states, names)
                if p.kept:
                    p.forget([*(o for s in stores for o in store_operands(s)), *p.accumulated()])
            for state, own in zip(states, names, strict=True):
                state.bind(p, own)
    for store in by_row:
        p.print_nodes(p.need(store_operands(store)))
        p.store(store)


def _read_columns(
    p: Printer, passes: int, states: Sequence[Running], pieces: Sequence[int], stores: Sequence[Store]
) -> list[tuple[str, ...]]:
    """A loop over this program's columns, or the tile where it holds them all; the folded states' names.

    pieces: reductions over segments, of which every block stores its part.
    """
    wanted = [o for i in (*first_of(states), *pieces) for o in operands_of(p.loops.nodes[i])]
    wanted += [o for s in stores for o in store_operands(s)]
    p.print_nodes(i for i in p.need(wanted) if COLS not in p.a.groups[i])
    if p.s.cols is Cols.LOOP:
        return _loop(p, states, wanted, pieces, stores)
    names = [tuple(p.fresh(p.base_of(n)) for n in state.numbers) for state in states]
    p.print_nodes(p.need(wanted))
    partial_results(p, pieces)
    p.accumulate_rows(passes)
    for state, own in zip(states, names, strict=True):
        state.single(p, own)
    for store in stores:
        p.store(store)
    for state, own in zip(states, names, strict=True):
        state.fold(p, own)
    return names


def _loop(
    p: Printer,
    states: Sequence[Running],
    wanted: Sequence[int],
    pieces: Sequence[int],
    stores: Sequence[Store],
) -> list[tuple[str, ...]]:
    """Whole blocks in a loop, without a mask; then what is left of the row, in a tile that is as narrow."""
    inner, lanes = inner_cols(p.a, p.s), end_lanes(p.a, p.s)
    names = [state.start(p) for state in states]

    def block(start: str, inside: bool, ending: bool) -> None:
        p.cols_at(start, inside)
        p.print_nodes(p.need(wanted))
        for state, own in zip(states, names, strict=True):
            (state.end if ending else state.step)(p, own)
        partial_results(p, pieces)
        for store in stores:
            p.store(store)

    with p.scope(_blocks(p, inner)):
        block("start", inside=lanes > 0, ending=False)
    for state, own in zip(states, names, strict=True):
        state.fold(p, own)
    if lanes:
        with p.scope(_end(p, inner, lanes), lanes):
            block(str(inner), inside=False, ending=True)
    return names


def _blocks(p: Printer, inner: Dim) -> str:
    """The header of the loop over this program's columns."""
    size, block, stages = p.a.size(COLS), p.s.block_cols, p.stages()
    if p.s.splits == 1:
        return p.each("start", f"tl.range(0, {dim_text(inner)}, {block}{stages})")
    part = part_cols(p.a, p.s)
    last = f"first_col + {dim_text(part)}"
    if quotient(size, product((part, p.s.splits))) is None:
        last = f"tl.minimum({last}, {dim_text(inner)})"
    return p.each("start", f"tl.range(first_col, {last}, {block}{stages})")


def _end(p: Printer, inner: Dim, lanes: int) -> str:
    """The header of what follows the loop: one of the programs that share a row has it.

    Where no other has the row it is a loop as well, of one turn: its tiles are not the next loop's.
    """
    part = part_cols(p.a, p.s)
    assert isinstance(inner, int) and isinstance(part, int)
    if p.s.splits > 1:
        return f"if part == {inner // part}:"
    return p.each("start", f"tl.range({inner}, {dim_text(p.a.size(COLS))}, {lanes})")
