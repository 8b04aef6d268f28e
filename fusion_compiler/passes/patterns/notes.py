"""Notes of a plan on the user's patterns: where they matched, what came closest, who won an overlap."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from torch import Tensor

from fusion_compiler.ir.dag import OpDag
from fusion_compiler.ir.decision import Decision, Decisions, noted
from fusion_compiler.passes.patterns.match import Lost, Match, MatchResult
from fusion_compiler.passes.patterns.nearest import closest, place
from fusion_compiler.passes.patterns.trace import Traced
from fusion_compiler.patterns import USER_NAMESPACE, Pattern

MOST_PLACES = 3


def not_found(
    patterns: Sequence[Traced], result: MatchResult, watched: Collection[Pattern], *, exact: bool = False
) -> list[tuple[str, str]]:
    """Return (name, why there is no match) for each watched pattern that has none."""
    matched = {(m.pattern, m.name) for m in (*result.matches, *(x.match for x in result.lost))}
    notes: list[tuple[str, str]] = []
    for traced in patterns:
        if traced.pattern not in watched or (traced.pattern, traced.name) in matched:
            continue
        refused = [m for m in result.declined if (m.pattern, m.name) == (traced.pattern, traced.name)]
        why = _declined(refused, result.graph.dag) if refused else closest(traced, result.graph, exact=exact)
        notes.append((traced.name, f"never matched: {why}"))
    return notes


def _declined(matches: Sequence[Match], dag: OpDag) -> str:
    where = places([m.root for m in matches], dag)
    first = matches[0]
    asked = zip(first.inputs, first.pattern.example, strict=False)  # a gradient has one argument more
    if any(value is None and isinstance(example, Tensor) for value, example in asked):
        return f"where= asks about an argument that the gradient does not need, {where}"
    times = f"{len(matches)} match{'es' if len(matches) > 1 else ''}"
    reason = f": {first.refused}" if first.refused else ""
    return f"where= said no to {times}, {where}{reason}"


def places(names: Sequence[str], dag: OpDag) -> str:
    """Return the source lines of ops, each once: "at model.py:12, model.py:30 and 4 more"."""
    lines = list(dict.fromkeys(place(dag, n) for n in names))
    more = f" and {len(lines) - MOST_PLACES} more" if len(lines) > MOST_PLACES else ""
    return f"at {', '.join(lines[:MOST_PLACES])}{more}"


def overlaps(result: MatchResult, watched: Collection[Pattern]) -> list[tuple[str, str]]:
    """Return (name, who won) for each pair of patterns that overlap, under the name of the user's pattern
    that lost, or of the one that won if a built-in pattern lost."""
    notes: dict[tuple[str, str, bool], list[Lost]] = {}
    for x in result.lost:
        is_loser = x.match.pattern in watched
        notes.setdefault((x.match.name, x.winner.name, is_loser), []).append(x)
    texts: list[tuple[str, str]] = []
    for (loser, winner, is_loser), each in notes.items():
        op, where = each[0].op, places([x.op for x in each], result.graph.dag)
        times = f" {len(each)} times" if len(each) > 1 else ""
        name, verb = (
            (loser, f"lost op {op} to {winner}") if is_loser else (winner, f"took op {op} from {loser}")
        )
        texts.append((name, f"{verb}{times}, {where}: {winner} comes first in patterns"))
    return texts


def notes_of_hints(
    patterns: Sequence[Traced], result: MatchResult, watched: Collection[Pattern], *, backward: bool
) -> Decisions:
    """Return the outcomes of the user's hints in one graph, empty if there are none.

    backward: the graph is a backward one, in which only the gradients of patterns are expected.
    """
    hints = [t for t in patterns if t.pattern in watched]
    if not hints:
        return ()
    notes: list[Decision] = []
    dag = result.graph.dag
    matched = Counter(m.name for m in result.matches if m.pattern in watched)
    for name, times in matched.items():
        count = "once" if times == 1 else f"{times} times"
        where = places([m.root for m in result.matches if m.name == name], dag)
        notes.append(noted(name, f"matched {count}, {where}"))
    notes += [noted(name, text) for name, text in overlaps(result, watched)]
    expected = [t for t in hints if t.saved or not backward]
    notes += [noted(name, text + _after_kernels(dag)) for name, text in not_found(expected, result, watched)]
    return tuple(notes)


def _after_kernels(dag: OpDag) -> str:
    """Return a note on user kernels in the graph, whose ops are gone for hints; "" if there are none."""
    targets = [str(dag.op(n).target) for n in dag.order]
    names = {t.split(".")[1].rpartition("_")[0] for t in targets if t.startswith(USER_NAMESPACE)}
    return f" (kernels go first: {', '.join(sorted(names))} took ops above autograd)" if names else ""


def notes_of_rules(
    patterns: Sequence[Traced], result: MatchResult, watched: Collection[Pattern]
) -> tuple[Decision, ...]:
    """Return the outcomes of rewrites and kernels without a match; each match has its own note."""
    rows = [
        *overlaps(result, watched),
        *not_found(patterns, result, watched, exact=True),
    ]
    return tuple(noted(name, text) for name, text in rows)
