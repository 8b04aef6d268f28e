"""Rewrites of a tile program, from block to block.

joined                  two sums that do not wait for each other are one reduction
stored_late             a result that lies over what is loaded is stored behind those loads
stored_early            a value that is used on as it is stored is stored where it is rounded
checked_late            indices are looked at when all else is done
launched_dependently    what nobody writes is loaded before the program waits for earlier kernels
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fusion_compiler.codegen.tile import (
    Assign,
    Check,
    Combine,
    Do,
    For,
    If,
    Statement,
    Store,
    Wait,
    blocks,
    bodies,
    reads,
    renamed,
    with_operands,
    writes,
)
from fusion_compiler.ir.syntax import Expression, Literal, Name, Var, Variable, fm, tl


def joined(body: list[Statement]) -> None:
    """a = sum(x); b = sum(y)  ->  a, b = sums(x, y)    the threads of a program wait for each other once."""
    for block in blocks(body):
        i = 0
        while i < len(block):
            if (first := _sum(block[i])) is not None and (j := _partner(block, i, first)) is not None:
                one, other = block[i], block[j]
                assert (
                    isinstance(one, Assign) and isinstance(other, Assign) and isinstance(other.value, Combine)
                )
                before = sorted(n for n in with_operands(block, (j,)) if i < n < j)
                both = replace(first, tiles=(*first.tiles, *other.value.tiles), alike=None)
                moved = [*(block[n] for n in before), Assign((*one.targets, *other.targets), both, one.node)]
                rest = [s for n, s in enumerate(block[i + 1 :], i + 1) if n != j and n not in before]
                block[i:] = [*moved, *rest]
                i += len(before)
            i += 1


def _sum(statement: Statement) -> Combine | None:
    value = statement.value if isinstance(statement, Assign) else None
    return value if isinstance(value, Combine) and value.alike is not None else None


def _partner(block: list[Statement], i: int, first: Combine) -> int | None:
    """Return the position of the next sum that may join the one at `i`, on which it must not depend."""
    for j in range(i + 1, len(block)):
        other = _sum(block[j])
        if other is None or other.alike != first.alike:
            continue
        between = [n for n in with_operands(block, (j,)) if i <= n < j]
        if i not in between and all(isinstance(block[n], Assign) for n in between):
            return j
    return None


def stored_early(body: list[Statement], roundings: Mapping[int, int]) -> None:
    """r = round(x); ...; store(x)  ->  r = round(x); store(x); ...    it is held once then and not twice.

    roundings: of the nodes that round, which they do.
    """
    for block in blocks(body):
        moved: set[int] = set()
        found: list[Statement] = []
        for i, statement in enumerate(block):
            if i in moved:
                continue
            found.append(statement)
            value = (
                roundings.get(statement.node) if isinstance(statement, Assign) and statement.node else None
            )
            for j in range(i + 1, len(block)) if value is not None else ():
                store = block[j]
                if isinstance(store, Store) and store.node == value and j not in moved:
                    needed = [n for n in sorted(with_operands(block, (j,))) if n > i and n not in moved]
                    moved.update(needed)
                    found += [block[n] for n in needed]
        block[:] = found


def stored_late(body: list[Statement], over: Mapping[Name, Name]) -> None:
    """store(y, f(x)); b = load(a)  ->  b = load(a); store(y, f(x))    where y lies over a.

    over: pointers to results, each with that to what is loaded from the same memory. In each block: another
    is another part of the tensors, or a pass that reads nothing more of them (`ir.overwrite`).
    """
    for block in blocks(body) if over else ():
        for result, given in over.items():
            last = max((i for i, s in enumerate(block) if given in reads(s)), default=-1)
            plain = [(i, s) for i, s in enumerate(block[: max(last, 0)]) if not isinstance(s, For | If)]
            early = [i for i, s in plain if result in reads(s)]
            late = [block[i] for i in early]
            made = {name for i in range(last + 1) if i not in early for name in writes(block[i])}
            again = Counter(name for i in range(last + 1) for name in _assigned(block[i]))
            if any(again[name] > 1 for s in late for name in reads(s) & made):
                raise ValueError(f"what is stored in {result} does not last until {given} is loaded")
            kept = [s for i, s in enumerate(block[: last + 1]) if i not in early]
            block[: last + 1] = [*kept, *late]


def checked_late(body: list[Statement]) -> None:
    """check(i)  ->  wrong = none; for ...: wrong = last_wrong(wrong, i); ...; check(wrong)

    The program ends in an error when all else is done, so that nothing waits for it; what is wrong in a loop
    is kept until then. So is what is wrong of several indices with the same error: an error is a call, behind
    which nothing stays in registers.
    """
    _kept_together(body)
    late: list[Check] = []
    for position, statement in reversed(list(enumerate(body))):
        if isinstance(statement, For | If):
            kept = _kept(statement)
            body[position:position] = [start for start, _ in kept]
            late = [check for _, check in kept] + late
        elif isinstance(statement, Check):
            del body[position]
            late.insert(0, statement)
    body += dict.fromkeys(late)


def _kept_together(body: list[Statement]) -> None:
    """check(i); ...; check(j)  ->  wrong = i; ...; wrong = last_wrong(wrong, j); check(wrong)"""
    alike: dict[Check, list[tuple[int, Check]]] = {}
    for position, check in enumerate(body):
        if isinstance(check, Check):
            same = replace(check, index=check.zero, mask=None)
            alike.setdefault(same, []).append((position, check))
    ends: dict[int, Check] = {}
    for check, places in alike.items():
        wrong = Var("wrong")
        for position, one in places if len(places) > 1 else ():
            is_first = position == places[0][0]
            value = one.zero + _seen(one) if is_first else _last_wrong(wrong, one)
            body[position] = Assign((wrong,), value)
            ends[places[-1][0]] = replace(check, index=wrong)
    for position in sorted(ends, reverse=True):
        body.insert(position + 1, ends[position])


def _kept(block: For | If) -> list[tuple[Assign, Check]]:
    """Return, for each check in a block, how what it keeps starts and what is checked in the end."""
    found: list[tuple[Assign, Check]] = []
    for inner in blocks([block]):
        for position, check in enumerate(inner):
            if isinstance(check, Check):
                wrong = Var("wrong")
                inner[position] = Assign((wrong,), _last_wrong(wrong, check))
                found.append((Assign((wrong,), check.zero), replace(check, index=wrong, mask=None)))
    return found


def _last_wrong(wrong: Var, check: Check) -> Expression:
    """Return the index of a check where it is wrong, else what was wrong before."""
    return fm.last_wrong(wrong, _seen(check), check.low, check.high)


def _seen(check: Check) -> Expression:
    """Return the index of a check, 0 outside of its mask."""
    return check.index if check.mask is None else tl.where(check.mask, check.index, 0)


def launched_dependently(
    body: list[Statement],
    constants: frozenset[Variable],
    pointers: frozenset[Variable],
    turns: int = 0,
) -> list[Statement]:
    """x = load(in); w = load(weight); ...  ->  w = load(weight); wait_for_kernels(); x = load(in); ...

    Of a program that may be on the device while kernels before it still run. constants: those of its
    pointers to what no kernel or call of the graph writes, at addresses that stay. turns: so many of a loop
    are taken out of it (`Schedule.early`), whose constants are loaded so as well. Returns the statements.

    Programs let the next kernel start at once, so that programs of several kernels in a row may be on the
    device, and load from constants before they wait; they do nothing else with memory. A wait ends when the
    kernel before has ended, of which each program had waited for the one before it: behind it all earlier
    kernels are done. So whatever else they read is complete, and whatever they write nobody reads any more.
    A kernel that starts such a row is launched plainly (`passes.fuse.dependent`): it begins when all before
    it is done, whoever launched that, so that later ones cannot load a constant too early either.

    The wait stands before any loop: software pipelining takes the first turns' loads out of one, and would
    take them past a wait in it. A loop of one turn is none.
    """
    body = [inner for i, statement in enumerate(body) for inner in _opened(statement, body[i + 1 :])]
    body = [inner for statement in body for inner in _ahead(statement, constants, turns)]
    assigned = Counter(name for statement in body for name in _assigned(statement))

    def is_ready(statement: Statement) -> bool:
        """Whether it may run before the wait, as far as memory goes."""
        plain = isinstance(statement, Assign) and isinstance(statement.value, Expression)
        once = all(assigned[name] == 1 for name in writes(statement))
        return plain and once and reads(statement) & pointers <= constants

    def loads(statement: Statement) -> bool:
        return not reads(statement).isdisjoint(pointers)

    here = next((i for i, statement in enumerate(body) if not is_ready(statement)), len(body))
    early = set(range(here))
    for i in range(here, len(body)):
        if loads(body[i]) and is_ready(body[i]):
            needed = with_operands(body, (i,)) - {i}
            if all(is_ready(body[n]) and not loads(body[n]) for n in needed):
                early |= needed | {i}
    before = [body[i] for i in sorted(early)]
    return [*before, Do(fm.wait_for_kernels()), *(s for i, s in enumerate(body) if i not in early)]


def _opened(statement: Statement, after: Sequence[Statement]) -> list[Statement]:
    """for start in tl.range(0, 2048, 2048): ...  ->  start = 0; ...

    Not where a loop over the rest of the row follows, whose tiles have the same names and other sizes.
    """
    if any(isinstance(s, For) and not set(_assigned(s)).isdisjoint(_assigned(statement)) for s in after):
        return [statement]
    if isinstance(statement, For) and (turns := statement.values.turns()):
        end, step = turns
        if 0 < end <= step:
            return [Assign((statement.variable,), Literal(0)), *statement.body]
    return [statement]


def _ahead(statement: Statement, constants: frozenset[Variable], turns: int) -> list[Statement]:
    """for start in tl.range(0, 2048, 512): ...  ->  ...; ...; for start in tl.range(1024, 2048, 512): ...

    Of a loop that loads constants, some turns. What a turn makes for itself has names of its own.
    """
    counted = statement.values.turns() if isinstance(statement, For) else None
    if not turns or counted is None or not isinstance(statement, For):
        return [statement]
    end, step = counted
    turns = min(turns, end // step)
    blocks_in_it = any(isinstance(inner, For | If | Wait) for inner in statement.body)
    if blocks_in_it or not any(reads(inner) & constants for inner in statement.body):
        return [statement]
    found: list[Statement] = []
    own = _own(statement.body)
    for turn in range(turns):
        is_last = (turn + 1) * step >= end  # whose values may be read behind the loop
        names: dict[Variable, Expression] = {name: Var(name.base) for name in own if not is_last}
        names[statement.variable] = Literal(turn * step)
        found += [renamed(inner, names) for inner in statement.body]
    if turns * step < end:
        left = replace(statement.values, start=Literal(turns * step))
        found.append(replace(statement, values=left))
    return found


def _own(body: Sequence[Statement]) -> list[Variable]:
    """Return the variables that every iteration of a loop assigns before it reads them."""
    found: dict[Variable, bool] = {}
    for statement in body:
        for name in reads(statement):
            found.setdefault(name, False)
        for name in _assigned(statement):
            found.setdefault(name, True)
    return [name for name, is_own in found.items() if is_own]


def _assigned(statement: Statement) -> list[Variable]:
    """Return the variables of every assignment in a statement, each as often as it is assigned."""
    if not isinstance(statement, For | If):
        return [*writes(statement)]
    own = [statement.variable] if isinstance(statement, For) else []
    return [*own, *(name for body in bodies(statement) for inner in body for name in _assigned(inner))]
