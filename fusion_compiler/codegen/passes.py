"""Passes over a tile program, block by block.

joined                  compute two independent sums with one reduction
stored_late             store a result that reuses an input's memory after the input's loads
stored_early            store a value where it is rounded to its stored form
checked_late            check indices at the end
launched_dependently    load constants before the program waits for earlier kernels
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
from fusion_compiler.ops.syntax import Expression, Literal, Name, Var, Variable, fm, tl


def joined(body: list[Statement]) -> None:
    """Rewrite a = sum(x); b = sum(y)  ->  a, b = sums(x, y), which takes one barrier."""
    for block in blocks(body):
        i = 0
        while i < len(block):
            if (first := _sum(block[i])) is not None and (j := _partner(block, i, first)) is not None:
                left, right = block[i], block[j]
                assert (
                    isinstance(left, Assign)
                    and isinstance(right, Assign)
                    and isinstance(right.value, Combine)
                )
                between = sorted(n for n in with_operands(block, (j,)) if i < n < j)
                joint = replace(first, tiles=(*first.tiles, *right.value.tiles), join_key=None)
                front = [
                    *(block[n] for n in between),
                    Assign((*left.targets, *right.targets), joint, left.node),
                ]
                rest = [s for n, s in enumerate(block[i + 1 :], i + 1) if n != j and n not in between]
                block[i:] = [*front, *rest]
                i += len(between)
            i += 1


def _sum(statement: Statement) -> Combine | None:
    value = statement.value if isinstance(statement, Assign) else None
    return value if isinstance(value, Combine) and value.join_key is not None else None


def _partner(block: list[Statement], i: int, first: Combine) -> int | None:
    """Return the position of the next sum that may join the one at `i`. It must not depend on it."""
    for j in range(i + 1, len(block)):
        other = _sum(block[j])
        if other is None or (other.join_key, other.axis) != (first.join_key, first.axis):
            continue
        between = [n for n in with_operands(block, (j,)) if i <= n < j]
        if i not in between and all(isinstance(block[n], Assign) for n in between):
            return j
    return None


def stored_early(body: list[Statement], roundings: Mapping[int, int]) -> None:
    """Rewrite r = round(x); ...; store(x)  ->  r = round(x); store(x); ...

    One value stays live instead of two. roundings: maps each node that rounds to the node it rounds.
    """
    for block in blocks(body):
        moved: set[int] = set()
        result: list[Statement] = []
        for i, statement in enumerate(block):
            if i in moved:
                continue
            result.append(statement)
            value = (
                roundings.get(statement.node) if isinstance(statement, Assign) and statement.node else None
            )
            for j in range(i + 1, len(block)) if value is not None else ():
                store = block[j]
                if isinstance(store, Store) and store.node == value and j not in moved:
                    needed = [n for n in sorted(with_operands(block, (j,))) if n > i and n not in moved]
                    moved.update(needed)
                    result += [block[n] for n in needed]
        block[:] = result


def stored_late(body: list[Statement], aliases: Mapping[Name, Name]) -> None:
    """Rewrite store(y, f(x)); b = load(a)  ->  b = load(a); store(y, f(x)), where y reuses the memory of a.

    aliases: maps a pointer to a result to the pointer to loaded values in the same memory. Each block is
        rewritten alone: another block is another part of the tensors, or a pass that does not read them again
        (`ir.overwrite`).
    """
    for block in blocks(body) if aliases else ():
        for result, source in aliases.items():
            last = max((i for i, s in enumerate(block) if source in reads(s)), default=-1)
            plain = [(i, s) for i, s in enumerate(block[: max(last, 0)]) if not isinstance(s, For | If)]
            store_positions = [i for i, s in plain if result in reads(s)]
            stores = [block[i] for i in store_positions]
            defined = {name for i in range(last + 1) if i not in store_positions for name in writes(block[i])}
            assignments = Counter(name for i in range(last + 1) for name in _assigned(block[i]))
            if any(assignments[name] > 1 for s in stores for name in reads(s) & defined):
                raise ValueError(f"{result} is overwritten before {source} is loaded")
            others = [s for i, s in enumerate(block[: last + 1]) if i not in store_positions]
            block[: last + 1] = [*others, *stores]


def checked_late(body: list[Statement]) -> None:
    """Rewrite check(i)  ->  wrong = none; for ...: wrong = last_wrong(wrong, i); ...; check(wrong)

    The program fails at its end, so that nothing waits for the check. A wrong index in a loop is kept until
    then. Several indices with the same error share a check: an error is a call, after which no register is
    live.
    """
    _merge_checks(body)
    late: list[Check] = []
    for position, statement in reversed(list(enumerate(body))):
        if isinstance(statement, For | If):
            deferred = _defer_checks(statement)
            body[position:position] = [start for start, _ in deferred]
            late = [check for _, check in deferred] + late
        elif isinstance(statement, Check):
            del body[position]
            late.insert(0, statement)
    body += dict.fromkeys(late)


def _merge_checks(body: list[Statement]) -> None:
    """Rewrite check(i); ...; check(j)  ->  wrong = i; ...; wrong = last_wrong(wrong, j); check(wrong)"""
    places_of: dict[Check, list[tuple[int, Check]]] = {}
    for position, check in enumerate(body):
        if isinstance(check, Check):
            key = replace(check, index=check.zero, mask=None)
            places_of.setdefault(key, []).append((position, check))
    ends: dict[int, Check] = {}
    for check, places in places_of.items():
        wrong = Var("wrong")
        for position, one in places if len(places) > 1 else ():
            is_first = position == places[0][0]
            value = one.zero + _masked_index(one) if is_first else _last_wrong(wrong, one)
            body[position] = Assign((wrong,), value)
            ends[places[-1][0]] = replace(check, index=wrong)
    for position in sorted(ends, reverse=True):
        body.insert(position + 1, ends[position])


def _defer_checks(block: For | If) -> list[tuple[Assign, Check]]:
    """Return, for each check in a block, the initial assignment of its wrong index and the check at the
    end."""
    deferred: list[tuple[Assign, Check]] = []
    for inner in blocks([block]):
        for position, check in enumerate(inner):
            if isinstance(check, Check):
                wrong = Var("wrong")
                inner[position] = Assign((wrong,), _last_wrong(wrong, check))
                deferred.append((Assign((wrong,), check.zero), replace(check, index=wrong, mask=None)))
    return deferred


def _last_wrong(wrong: Var, check: Check) -> Expression:
    """Return the index of a check if it is wrong, else the previous wrong index."""
    return fm.last_wrong(wrong, _masked_index(check), check.low, check.high)


def _masked_index(check: Check) -> Expression:
    """Return the index of a check, or 0 outside of its mask."""
    return check.index if check.mask is None else tl.where(check.mask, check.index, 0)


def launched_dependently(
    body: list[Statement],
    constants: frozenset[Variable],
    pointers: frozenset[Variable],
    turns: int = 0,
) -> list[Statement]:
    """Rewrite x = load(in); w = load(weight)  ->  w = load(weight); wait_for_kernels(); x = load(in)

    The program may run while earlier kernels still run. Returns the statements.
    constants: pointers to memory that no kernel or call of the graph writes, at fixed addresses.
    pointers: all pointers of the program.
    turns: peel so many iterations of a loop (`Placement.early`), so that they also load constants early.

    Programs let the next kernel start at once, so programs of several successive kernels may be on the
    device. Before they wait, they load constants and do nothing else with memory. A wait ends when the
    previous kernel has ended. Each of its programs has waited for the kernel before it, so all earlier
    kernels are complete after the wait. Therefore all other memory that the program reads is complete, and
    nobody still reads memory that it writes. The first kernel of such a sequence is launched normally
    (`passes.fuse.dependent`): it begins when all previous work is complete, so that later kernels cannot load
    a constant too early either.

    The wait precedes any loop. Software pipelining moves loads of the first iterations out of a loop, and
    would move them past a wait in it. A loop of one iteration does not count.
    """
    body = [inner for i, statement in enumerate(body) for inner in _inlined(statement, body[i + 1 :])]
    body = [inner for statement in body for inner in _peel(statement, constants, turns)]
    assigned = Counter(name for statement in body for name in _assigned(statement))

    def is_ready(statement: Statement) -> bool:
        """True if memory order allows the statement to run before the wait."""
        plain = isinstance(statement, Assign) and isinstance(statement.value, Expression)
        once = all(assigned[name] == 1 for name in writes(statement))
        return plain and once and reads(statement) & pointers <= constants

    def loads(statement: Statement) -> bool:
        return not reads(statement).isdisjoint(pointers)

    first_blocked = next((i for i, statement in enumerate(body) if not is_ready(statement)), len(body))
    early = set(range(first_blocked))
    for i in range(first_blocked, len(body)):
        if loads(body[i]) and is_ready(body[i]):
            needed = with_operands(body, (i,)) - {i}
            if all(is_ready(body[n]) and not loads(body[n]) for n in needed):
                early |= needed | {i}
    prologue = [body[i] for i in sorted(early)]
    return [*prologue, Do(fm.wait_for_kernels()), *(s for i, s in enumerate(body) if i not in early)]


def _inlined(statement: Statement, after: Sequence[Statement]) -> list[Statement]:
    """Rewrite for start in tl.range(0, 2048, 2048): ...  ->  start = 0; ...

    The loop stays if a loop over the rest of the row follows, whose tiles have the same names and other
    sizes.
    """
    if any(isinstance(s, For) and not set(_assigned(s)).isdisjoint(_assigned(statement)) for s in after):
        return [statement]
    if isinstance(statement, For) and (turns := statement.values.turns()):
        end, step = turns
        if 0 < end <= step:
            is_read = any(statement.variable in reads(inner) for inner in statement.body)
            first = [Assign((statement.variable,), Literal(0))] if is_read else []
            return [*first, *statement.body]
    return [statement]


def _peel(statement: Statement, constants: frozenset[Variable], turns: int) -> list[Statement]:
    """Rewrite for start in tl.range(0, 2048, 512): ...  ->  ...; ...; for start in tl.range(1024, 2048, 512)

    Peel some iterations of a loop that loads constants. Variables local to an iteration get new names.
    """
    bounds = statement.values.turns() if isinstance(statement, For) else None
    if not turns or bounds is None or not isinstance(statement, For):
        return [statement]
    end, step = bounds
    turns = min(turns, end // step)
    has_blocks = any(isinstance(inner, For | If | Wait) for inner in statement.body)
    if has_blocks or not any(reads(inner) & constants for inner in statement.body):
        return [statement]
    result: list[Statement] = []
    local_names = _locals(statement.body)
    for turn in range(turns):
        is_last = (turn + 1) * step >= end  # its values may be read after the loop
        names: dict[Variable, Expression] = {name: Var(name.base) for name in local_names if not is_last}
        names[statement.variable] = Literal(turn * step)
        result += [renamed(inner, names) for inner in statement.body]
    if turns * step < end:
        rest = replace(statement.values, start=Literal(turns * step))
        result.append(replace(statement, values=rest))
    return result


def _locals(body: Sequence[Statement]) -> list[Variable]:
    """Return the variables that every iteration of a loop assigns before it reads them."""
    assigned_first: dict[Variable, bool] = {}
    for statement in body:
        for name in reads(statement):
            assigned_first.setdefault(name, False)
        for name in _assigned(statement):
            assigned_first.setdefault(name, True)
    return [name for name, is_local in assigned_first.items() if is_local]


def _assigned(statement: Statement) -> list[Variable]:
    """Return the variables of every assignment in a statement, as often as they are assigned."""
    if not isinstance(statement, For | If):
        return [*writes(statement)]
    variable = [statement.variable] if isinstance(statement, For) else []
    return [*variable, *(name for body in bodies(statement) for inner in body for name in _assigned(inner))]
