"""Programs exchange the results of the reductions that they share (see `codegen.exchange`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fusion_compiler.codegen.carried import State
from fusion_compiler.codegen.exchange import mailbox, messages_of
from fusion_compiler.codegen.monoids import is_logical, neutral
from fusion_compiler.codegen.placed import Emitter
from fusion_compiler.codegen.row_tiles import RowTiles
from fusion_compiler.codegen.tile import Assign, Boxes, For, Range, Signal, Wait
from fusion_compiler.ir.loops import ROWS, axes_in
from fusion_compiler.ops.syntax import Expression, Name, Var, fm, lift, plus, tl
from fusion_compiler.schedule.placement import Leaf, Place
from fusion_compiler.schedule.shapes import padded


def exchange(
    e: RowTiles, shared: Leaf, states: Sequence[State], values: Sequence[tuple[Var, ...]]
) -> None:
    """Let each program of a block of rows send its states to the others, wait for theirs, and merge all."""
    assert isinstance(shared.extent, int)
    first, rows = _rows(e, shared.extent)
    pairs = list(zip(states, values, strict=True))
    sent = {n: v for state, variables in pairs for n, v in zip(state.numbers, variables, strict=True)}
    theirs, received = messages(e, first, shared.extent, e.element(shared).value, sent, rows)
    if e.keeps:
        _merge_rows(e, pairs, theirs, received)
        return
    for wait in received:
        e.add(wait)
    for state, variables in pairs:
        state.merge(e, variables, [theirs[n] for n in state.numbers])


def messages(
    e: Emitter,
    first: Expression,
    programs: int,
    part: Expression,
    sent: Mapping[int, Var],
    rows: tuple[Expression, ...] = (),
) -> tuple[Mapping[int, Var], list[Wait]]:
    """Let a program send its value of some reductions to the programs with which it shares them. Return the
    variables of all programs' values, by reduction, and the statements that wait for these.

    first: the number of the row, or of the group of programs. rows: see `Boxes`.
    programs, part: how many programs share a reduction, and the number of this one among them.
    """
    parts = Name("parts")
    e.add(Assign((parts,), tl.arange(0, padded(programs))))
    theirs = {n: Var(f"all_{variable.base}") for n, variable in sent.items()}
    received: list[Wait] = []
    for message in messages_of(e.a, list(sent)):
        ours: list[Expression] = [sent[n] for n in message]
        if is_logical(e.reduction(message[0])):
            ours = [sent[message[0]].to(tl.int32)]
        mail = plus(e.pointers[mailbox(message)], first * (programs * programs))
        e.add(Signal(Boxes(plus(mail, parts * programs, part), parts < programs, rows), tuple(ours)))
        neutrals = tuple(lift(neutral(e.reduction(n))) for n in message)
        boxes = Boxes(plus(mail, part * programs, parts), parts < programs, rows)
        received.append(Wait(tuple(theirs[n] for n in message), boxes, ours[0], neutrals))
    return theirs, received


def _rows(e: RowTiles, splits: int) -> tuple[Expression, tuple[Expression, ...]]:
    """Return the first row of the block, and `Boxes.rows`, which is empty for a block of one row."""
    axes = axes_in(e.loops.axes, (ROWS,))
    leaves = e.where.outermost(max(axes)) if axes else []
    lanes = [leaf for leaf in leaves if leaf.place is Place.LANES]
    others = [leaf for leaf in leaves if leaf.place is not Place.LANES]
    tile = e.position("first_row" if lanes else "row", others)
    first = lift(0) if tile is None else tile.value
    if not lanes:
        return first, ()
    apart, size = lanes[0].step, e.a.size(ROWS)
    rows = lift(size) - first if e.inside(axes) is not None else lift(lanes[0].lanes * apart)
    return first, (rows, lift(apart), lift(splits**2))


def _merge_rows(
    e: RowTiles,
    pairs: Sequence[tuple[State, tuple[Var, ...]]],
    theirs: Mapping[int, Var],
    received: Sequence[Wait],
) -> None:
    """Merge row by row: tiles [rows, parts] would need a change of layout, and a barrier for each."""
    messages = [Var("messages") for _ in received]
    for message, wait in zip(messages, received, strict=True):
        e.add(replace(wait, targets=(message,)))
    r, body, outer = Name("r"), e.scopes[e.depth].body, e.scopes[e.depth]
    loop = For(r, Range(lift(0), lift(e.lanes[0].lanes), static=True))
    body.append(loop)
    outer.body, e.in_one_row = loop.body, True
    for message, wait in zip(messages, received, strict=True):
        e.add(Assign(wait.targets, message[r]))
    for state, variables in pairs:
        merged = [Var(f"one_{variable.base}") for variable in variables]
        state.merge(e, merged, [theirs[n] for n in state.numbers])
        for variable, one in zip(variables, merged, strict=True):
            e.add(Assign((variable,), fm.with_row(variable, r, one)))
    outer.body, e.in_one_row = body, False
