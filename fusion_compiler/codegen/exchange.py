"""Programs that share rows tell each other what they reduced, by letters (`math.send`, `math.receive`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from fusion_compiler.codegen.expression import dim_text
from fusion_compiler.codegen.online_reductions import Running, complete_after, reduction, states_of
from fusion_compiler.codegen.printer import Printer
from fusion_compiler.ir.loops import ROWS
from fusion_compiler.schedule.analysis import Analysis, accumulator_dtype


def mailbox(letter: tuple[int, ...]) -> str:
    """The scratch through which the programs of a row exchange the values of these reductions."""
    return f"mail_{letter[0]}"


def letters(a: Analysis) -> Iterator[tuple[int, ...]]:
    """The reductions whose values go into one letter each, of all passes."""
    for level in range(1, max((a.level[i] for i in a.reductions), default=0) + 1):
        yield from _letters(a, states_of(a, complete_after(a, level)))


def _letters(a: Analysis, states: Sequence[Running]) -> list[tuple[int, ...]]:
    """Two float32 values in one, any other value alone."""
    numbers = [n for state in states for n in state.numbers]
    floats = [n for n in numbers if accumulator_dtype(reduction(a, n)) is torch.float32]
    pairs = [tuple(floats[i : i + 2]) for i in range(0, len(floats), 2)]
    return pairs + [(n,) for n in numbers if n not in floats]


def exchange(p: Printer, states: Sequence[Running], names: Sequence[Sequence[str]]) -> None:
    """Every program of a block of rows sends its values to the others, waits for theirs, and merges all."""
    splits = p.s.splits
    p.define("parts", f"tl.arange(0, {1 << (splits - 1).bit_length()})")
    numbers = [
        (n, name)
        for s, own in zip(states, names, strict=True)
        for n, name in zip(s.numbers, own, strict=True)
    ]
    sent = dict(numbers)
    theirs = {number: p.fresh(f"all_{p.base_of(number)}") for number in sent}
    received: list[tuple[str, str]] = []
    for letter in _letters(p.a, states):
        kind, values = "_pair" if len(letter) == 2 else "", [sent[n] for n in letter]
        if reduction(p.a, letter[0]).combine in ("any", "all"):
            values = [f"{sent[letter[0]]}.to(tl.int32)"]
        neutral = ", ".join(p.neutral(reduction(p.a, n)) for n in letter)
        mail = f"{p.pointers[mailbox(letter)]} + {'row' if p.flat else 'first_row'} * {splits * splits}"
        lanes, rows = f"part, parts, {splits}", _rows_left(p)
        p.line(f"fm.send{kind}({mail}, {', '.join(values)}, {lanes}{rows})")
        take = f"fm.receive{kind}({mail}, {values[0]}, {lanes}, {neutral}{rows})"
        received.append((", ".join(theirs[n] for n in letter), take))
    if p.flat:
        for found, take in received:
            p.line(f"{found} = {take}")
        for state, own in zip(states, names, strict=True):
            state.merge(p, own, [theirs[number] for number in state.numbers])
    else:
        _merge_rows(p, states, names, theirs, received)


def _rows_left(p: Printer) -> str:
    """The last arguments for several rows: how many there are from the first on, and how far apart."""
    if p.flat:
        return ""
    apart = p.s.rows_apart
    rows = f"{dim_text(p.a.size(ROWS))} - first_row" if p.row_mask else str(p.s.block_rows * apart)
    return f", {rows}{f', {apart}' if apart > 1 else ''}"


def _merge_rows(
    p: Printer,
    states: Sequence[Running],
    names: Sequence[Sequence[str]],
    theirs: Mapping[int, str],
    received: Sequence[tuple[str, str]],
) -> None:
    """Row by row: tiles over the rows and the parts would be laid out anew, and waited for each time."""
    letters = [p.fresh("letters") for _ in received]
    for name, (_, take) in zip(letters, received, strict=True):
        p.line(f"{name} = {take}")
    with p.scope(p.each("r", f"tl.static_range({p.s.block_rows})")), p.one_row():
        for name, (found, _) in zip(letters, received, strict=True):
            p.line(f"{found} = {name}[r]")
        for state, own in zip(states, names, strict=True):
            merged = [p.fresh(f"one_{name}") for name in own]
            state.merge(p, merged, [theirs[number] for number in state.numbers])
            for name, one in zip(own, merged, strict=True):
                p.line(f"{name} = fm.with_row({name}, r, {one})")
