"""Print a fusion plan for people (`format_plan`) and for programs (`plan_json`). Both are deterministic."""

from __future__ import annotations

import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import TextIO

import networkx as nx

from fusion_compiler.ir.breaks import GraphBreak
from fusion_compiler.ir.dag import Op, OpDag, Source
from fusion_compiler.ir.decision import LIBRARY_CALL, Decision, Decisions
from fusion_compiler.ir.dims import hint
from fusion_compiler.ir.loops import GROUPS, INNER, TILE, axes_in
from fusion_compiler.ir.plan_data import Cluster, PlanData
from fusion_compiler.ops.schema import runs_no_kernel, short_name

SCHEMA = 2
WIDTH = 110
TOP = 5  # refusals that level 1 shows


@dataclass(frozen=True)
class Totals:
    """The totals describe one plan in numbers. Bytes and microseconds are those of the fused ops: as eager's
    calls, and fused.

    fused_calls: the ATen calls of eager that the kernels replace.
    """

    ops: int
    fused_ops: int
    fused_calls: int
    kernels: int
    distinct_kernels: int
    library_calls: int
    eager_ops: int
    bytes_before: int
    bytes_after: int
    us_before: float
    us_after: float


def signature(dag: OpDag, cluster: Cluster) -> tuple[object, ...]:
    """Return a key that is equal for clusters with the same work in another layer: targets, sizes and
    prediction."""
    targets = tuple(str(dag.op(name).target) for name in cluster.ops)
    axes = tuple((str(axis.size), axis.group) for axis in cluster.loops.axes)
    return targets, axes, cluster.cost, len(cluster.loops.nodes), cluster.pattern


def totals(plan: PlanData) -> Totals:
    fused = [plan.dag.op(name) for cluster in plan.clusters for name in cluster.ops]
    inputs = set(plan.dag.inputs)
    calls = [call for cluster in plan.clusters for call in cluster.eager]
    return Totals(
        ops=sum(name not in inputs for name in plan.dag.graph.nodes),
        fused_ops=len(fused),
        fused_calls=len(calls),
        kernels=len(plan.clusters),
        distinct_kernels=len({signature(plan.dag, cluster) for cluster in plan.clusters}),
        library_calls=len(library_calls(plan)),
        eager_ops=len(eager_ops(plan)),
        bytes_before=sum(c.cost.moved for c in calls),
        bytes_after=sum(c.cost.moved for c in plan.clusters),
        us_before=sum(call.cost.us for call in calls),
        us_after=sum(cluster.cost.us for cluster in plan.clusters),
    )


def library_calls(plan: PlanData) -> Decisions:
    """Return the products, convolutions and attention that stay ATen calls."""
    return tuple(left for left in plan.leftovers if left.rule == LIBRARY_CALL)


def eager_ops(plan: PlanData) -> Decisions:
    """Return the other ops that stay ATen calls; views and tuple elements launch nothing."""
    return tuple(
        left
        for left in plan.leftovers
        if left.rule != LIBRARY_CALL and not runs_no_kernel(plan.dag.op(left.subject).target)
    )


def _units(plan: PlanData) -> nx.DiGraph[str]:
    """Return the graph of what runs as one: clusters, and the ops that no cluster stores, with edges from
    what is read to its reader."""
    made_by = {name: cluster.name for cluster in plan.clusters for name in cluster.outputs}
    units: nx.DiGraph[str] = nx.DiGraph()
    for name in plan.dag.graph.nodes:
        if name not in made_by:
            units.add_edges_from((made_by.get(i, i), name) for i in plan.dag.op(name).inputs)
    for cluster in plan.clusters:
        units.add_node(cluster.name)
        units.add_edges_from((made_by.get(i, i), cluster.name) for i in cluster.inputs)
    return units


def cycle_of(plan: PlanData) -> tuple[str, ...]:
    """Return clusters and ops that wait for each other in a ring; none for every plan that can run."""
    units = _units(plan)
    if nx.is_directed_acyclic_graph(units):  # in linear time; the search for a ring takes the square of that
        return ()
    return tuple(edge[0] for edge in nx.find_cycle(units))


def execution_order(plan: PlanData) -> list[Cluster]:
    """Return the clusters in an order in which they can run: by their last op, inputs first. Raise
    networkx.NetworkXUnfeasible if `cycle_of` is not empty."""
    position = {name: i for i, name in enumerate(plan.dag.graph.nodes)}
    last = {cluster.name: max(position[name] for name in cluster.ops) for cluster in plan.clusters}
    clusters = {cluster.name: cluster for cluster in plan.clusters}

    def key(unit: str) -> int:
        return last.get(unit, position.get(unit, 0))

    order = nx.lexicographical_topological_sort(_units(plan), key=key)
    return [clusters[unit] for unit in order if unit in clusters]


def iteration_space(cluster: Cluster) -> str:
    """Return "16384 rows x 4096", "512 tiles of 8 x 64 x 128", or "4096 elements of 9 terms", which is
    without terms if nothing is reduced. For loop nests that share a launch it is the first's, with the number
    of others."""
    more = f", +{len(cluster.horizontal)}" if cluster.horizontal else ""
    rows, cols = (prod(a.size for a in cluster.loops.axes if a.group == group) for group in GROUPS)
    groups = {axis.group for axis in cluster.loops.axes}
    if INNER in groups:
        inner = axes_in(cluster.loops.axes, (INNER,))
        stored = {key for store in cluster.loops.stores for key, _ in store.index.terms}
        if inner & stored:
            sizes = " x ".join(str(cluster.loops.axes[k].size) for k in sorted(inner))
            return f"{cols} tiles of {sizes}{more}"
        return f"{cols} elements of {prod(cluster.loops.axes[k].size for k in inner)} terms{more}"
    return (f"{rows} rows x {cols}" if groups >= TILE else f"{rows * cols} elements") + more


def format_plan(plan: PlanData, level: int = 1) -> str:
    """Return the plan as text, at most 110 columns wide.

    level 1: totals, one entry per distinct cluster in execution order (clusters that repeat in other layers
    are folded, with how often they run), library calls, what stayed eager and why, the refusals that would
    have saved most, and what passes decided. level 2 and above: every refusal, and the lines of each cluster.
    """
    t = totals(plan)
    gain = f" ({t.us_before / t.us_after:.1f}x)" if t.us_after else ""
    repeated = f" ({t.distinct_kernels} distinct)" if t.distinct_kernels < t.kernels else ""
    lines = [
        f"plan {plan.name} for {plan.device}",
        f"  {count(t.ops, 'op')}: {t.fused_ops} in {count(t.kernels, 'kernel')}{repeated}, "
        f"{count(t.library_calls, 'library call')}, {t.eager_ops} eager",
        f"  {count(t.fused_calls, 'call')} of eager fused: {human_bytes(t.bytes_before)} -> "
        f"{human_bytes(t.bytes_after)} moved, {t.us_before:.1f} -> {t.us_after:.1f} us predicted{gain}",
    ]
    ring = cycle_of(plan)
    if ring:
        lines += wrapped("  CANNOT RUN: ", " -> ".join((*ring, ring[0])))
    lines += _clusters(plan, plan.clusters if ring else execution_order(plan), with_places=level >= 2)
    lines += _calls(plan, "library calls", library_calls(plan))
    lines += _calls(plan, "stayed eager", eager_ops(plan))
    lines += _refusals(plan.refusals, everything=level >= 2)
    if plan.notes:
        lines += ["", *(line for key, text in plan.notes.items() for line in wrapped(f"{key}: ", text))]
    return "\n".join(lines)


def _clusters(plan: PlanData, clusters: Sequence[Cluster], *, with_places: bool) -> list[str]:
    """Return a table row and a line of ops for each distinct cluster, and one of the user's lines if they
    are wanted."""
    groups: dict[tuple[object, ...], list[Cluster]] = {}
    for cluster in clusters:
        groups.setdefault(signature(plan.dag, cluster), []).append(cluster)
    if not groups:
        return []
    head = ("kernel", "runs", "ops", "iteration space", "moves", "us", "eager", "bound")
    rows: list[tuple[str, ...]] = [head]
    below = [""]
    for same in groups.values():
        first = same[0]
        cost = first.cost
        rows.append((
            shortened(first.name, 30),
            f"x{len(same)}" if len(same) > 1 else "",
            str(len(first.ops)),
            shortened(iteration_space(first), 24),
            human_bytes(cost.moved),
            f"{cost.us:.1f}",
            f"{first.eager_us:.1f}",
            cost.bound,
        ))  # fmt: skip
        names = [name for cluster in same for name in cluster.ops]
        below.append(_below(plan.dag, first, modules_of(plan.dag, names)))
        if with_places and (places := _places(plan.dag, first)):
            below[-1] += f"\n        at {fitting(places, WIDTH - 11)}"
    table = aligned(rows, left=(0, 3, 7))
    both = [line for pair in zip(table, below, strict=True) for line in pair if line]
    return ["", *(f"  {line}" for line in both)]


def _below(dag: OpDag, cluster: Cluster, where: Sequence[str]) -> str:
    """Return the ops in short form, repeats counted, then the modules from which they come."""
    ops = [dag.op(name) for name in cluster.ops]
    counts = Counter(short_name(op.target) for op in ops if not runs_no_kernel(op.target))
    pattern = f"[{shortened(cluster.pattern, 30)}] " if cluster.pattern else ""
    modules = f"  @ {fitting(where, 50)}" if where else ""
    names = [name if number == 1 else f"{name} x{number}" for name, number in counts.items()]
    return f"    {pattern}{fitting(names, WIDTH - 6 - len(pattern) - len(modules))}{modules}"


def _places(dag: OpDag, cluster: Cluster) -> list[str]:
    """Return the user's lines from which a cluster's ops were traced, in the order of the ops."""
    sources = (dag.op(name).source for name in cluster.ops)
    return list(dict.fromkeys(f"{Path(s.file).name}:{s.line}" for s in sources if s and s.file))


def modules_of(dag: OpDag, names: Iterable[str]) -> list[str]:
    """Return the user's modules behind some ops, layer numbers that differ as *: "layers.*.mlp"."""
    paths = {op.source.module: None for op in map(dag.op, names) if op.source and op.source.module}
    by_form: dict[str, list[str]] = {}
    for module in paths:
        by_form.setdefault(re.sub(r"\b\d+\b", "*", module), []).append(module)
    return [form if len(modules) > 1 else modules[0] for form, modules in by_form.items()]


def _calls(plan: PlanData, title: str, leftovers: Decisions) -> list[str]:
    """Return an entry for each operator and reason: how often, why, what one kernel with a neighbour would
    save, and where an op that is no library call comes from first."""
    best: dict[str, Decision] = {}
    for refused in reversed(plan.refusals):  # those that would save most are written last
        best |= dict.fromkeys((refused.subject, refused.other), refused)
    groups: dict[tuple[str, str], list[Decision]] = {}
    for left in leftovers:
        groups.setdefault((left.target, left.reason), []).append(left)
    lines = ["", title] if groups else []
    for same in groups.values():
        first, is_library = same[0], same[0].rule == LIBRARY_CALL
        name = short_name(plan.dag.op(first.subject).target) if is_library else first.target
        times = f" x{len(same)}" if len(same) > 1 else ""
        texts = [first.reason] if first.reason != first.rule else []
        pairs = (best[left.subject] for left in same if left.subject in best)
        refused = max(pairs, key=lambda pair: pair.saving, default=None)
        if refused is not None and refused.saving > 0:
            both = f"{refused.subject} and {refused.other}"
            texts.append(f"one kernel of {both} would save at most {refused.saving:.1f} us")
        lines += wrapped(f"  {name}{times}: ", "; ".join(texts)) if texts else [f"  {name}{times}"]
        if first.source and not is_library:
            lines.append(f"      at {shortened(place(first.source), WIDTH - 9)}")
    return lines


def breaks_text(breaks: Sequence[GraphBreak]) -> str:
    """Return the places that no graph holds, one entry each."""
    lines = ["graph breaks: what stands there is in no plan, and its tensor operations run eager"]
    for one in breaks:
        lines += [f"  {shortened(place(one.source), WIDTH - 3)}"] if one.source else []
        lines += wrapped("      " if one.source else "  ", one.text)
    return "\n".join(lines)


def alike(refusals: Iterable[Decision]) -> list[list[Decisions]]:
    """Group refusals that differ only in the numbers within their names, and these again: two that share a
    unit are in different groups. They are alternatives, and their savings do not add up."""
    forms: dict[tuple[str, ...], list[tuple[set[str], list[Decision]]]] = {}
    for r in refusals:
        key = tuple(re.sub(r"_\d+\b", "", text) for text in (r.subject, r.other, r.rule, r.reason))
        alternatives = forms.setdefault(key, [])
        for units, same in alternatives:
            if units.isdisjoint((r.subject, r.other)):
                units.update((r.subject, r.other))
                same.append(r)
                break
        else:
            alternatives.append(({r.subject, r.other}, [r]))
    return [[tuple(same) for _, same in alternatives] for alternatives in forms.values()]


def _refusals(refusals: Decisions, everything: bool) -> list[str]:
    """Return the refusals that cost most, or all of them. Refusals that differ only in layer numbers are one
    entry, with their sum; so are refusals that have one reason and cost nothing. A bound of nothing is left
    out."""
    if everything:
        groups = [[same] for alternatives in alike(refusals) for same in alternatives]
    else:
        groups = alike(r for r in refusals if r.saving > 0)
        free: dict[tuple[str, str], list[Decision]] = {}
        for refused in refusals:
            if refused.saving <= 0 and not refused.at_most:
                free.setdefault((refused.rule, refused.reason), []).append(refused)
        groups += [[tuple(same)] for same in free.values()]
    ranked = sorted(groups, key=lambda alternatives: -_sum(alternatives[0]))
    shown = ranked if everything else ranked[:TOP]
    if not shown:
        return []
    part = "" if len(shown) == len(ranked) else f" ({len(shown)} of {len(ranked)}; FUSION_DEBUG=2 shows all)"
    lines = ["", f"not fused, by what one kernel would save{part}"]
    for same, *others in shown:
        first, times = same[0], f" x{len(same)}" if len(same) > 1 else ""
        bound = "at most" if first.at_most else ""
        instead = f" (or {count(sum(map(len, others)), 'pair')} like it)" if others else ""
        lead = f"  {bound:7} {_sum(same):>6.1f} us  {first.about}{times}{instead}: "
        lines += wrapped(lead, f"{first.rule}: {first.reason}")
    return lines


def _sum(same: Decisions) -> float:
    return sum(r.saving for r in same)


def place(source: Source) -> str:
    """Return "model.py:12: y = f(x)  (in layers.0.mlp)": the file without its folders."""
    text = f"{Path(source.file).name}:{source.line}: {source.code.strip()}"
    return f"{text}  (in {source.module})" if source.module else text


def aligned(rows: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """Return columns of equal width; those in `left` start at the left, the others end at the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def wrapped(lead: str, text: str) -> list[str]:
    """Return `lead` and text over as many lines as it takes, the later ones indented."""
    indent = len(lead) - len(lead.lstrip()) + 4
    return textwrap.wrap(lead + text, WIDTH, subsequent_indent=" " * indent, drop_whitespace=True)


def shortened(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def fitting(items: Sequence[str], width: int) -> str:
    """Return as many items as fit, separated by commas, then how many more there are."""
    text = ""
    for shown, item in enumerate(items):
        longer = f"{text}, {item}" if text else item
        rest = len(items) - shown - 1
        if len(longer) + (len(f", +{rest}") if rest else 0) > width:
            return f"{text}, +{rest + 1}" if text else shortened(item, width)
        text = longer
    return text


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def human_bytes(number: int) -> str:
    """Return decimal units, four digits: "100.7 MB"."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}" if number < 1000 * size else f"{number / size:.0f} {unit}"
    return f"{number} B"


def source_json(source: Source | None) -> dict[str, object] | None:
    """Return {module, file, line, code}, or None if the source is not known."""
    if source is None:
        return None
    return {"module": source.module, "file": source.file, "line": source.line, "code": source.code.strip()}


def plan_json(plan: PlanData) -> dict[str, object]:
    """Return the plan as plain data for json.dumps.

    schema: 2, raised when a key changes its meaning or goes. graph, device: strings.
    totals: the fields of `Totals`; bytes and microseconds (us_*) cover the fused ops only.
    cycle: `cycle_of`, empty for a plan that can run.
    clusters: in execution order, each {name, pattern or null, repeats (number of clusters that are the same
        work, itself included), ops: [{name, target, kind, source}], inputs, outputs, axes: [{name, size,
        group, estimate}], cost: {us, bytes_read, bytes_written, flops, bound}, eager_us}; size is text
        where it is symbolic, estimate the number that was planned for.
    library_calls: {short name: count}. eager: [{op, target, kind, reason, source}].
    rejections: [{a, b, rule, reason, saving_us}], those first that would save most.
    decisions: [{rule, subject, outcome, reason, us}], with those about pairs and calls. notes: {rule: text},
        those about the whole graph as text. A source is null or {module, file, line, code}.
    """
    ring = cycle_of(plan)
    clusters = plan.clusters if ring else execution_order(plan)
    repeats = Counter(signature(plan.dag, cluster) for cluster in plan.clusters)
    calls = library_calls(plan)

    def op(left: Decision) -> Op:
        return plan.dag.op(left.subject)

    return {
        "schema": SCHEMA,
        "graph": plan.name,
        "device": plan.device,
        "totals": asdict(totals(plan)),
        "cycle": list(ring),
        "clusters": [_cluster_json(plan.dag, c, repeats[signature(plan.dag, c)]) for c in clusters],
        "library_calls": dict(sorted(Counter(short_name(op(left).target) for left in calls).items())),
        "eager": [
            {
                "op": left.subject, "target": left.target, "kind": str(op(left).kind),
                "reason": left.reason, "source": source_json(left.source),
            }
            for left in eager_ops(plan)
        ],
        "rejections": [
            {"a": r.subject, "b": r.other, "rule": r.rule, "reason": r.reason, "saving_us": r.saving}
            for r in plan.refusals
        ],
        "decisions": list(map(decision_json, plan.decisions)),
        "notes": plan.notes,
    }  # fmt: skip


def decision_json(decision: Decision) -> dict[str, object]:
    """Return {rule, subject, outcome, reason, us}; the subject of a pair is "a + b"."""
    d = decision
    return {"rule": d.rule, "subject": d.about, "outcome": d.outcome, "reason": d.reason, "us": d.us}


def _cluster_json(dag: OpDag, cluster: Cluster, repeats: int) -> dict[str, object]:
    ops = [dag.op(name) for name in cluster.ops]
    return {
        "name": cluster.name,
        "pattern": cluster.pattern,
        "repeats": repeats,
        "ops": [
            {"name": o.name, "target": str(o.target), "kind": str(o.kind), "source": source_json(o.source)}
            for o in ops
        ],
        "inputs": list(cluster.inputs),
        "outputs": list(cluster.outputs),
        "axes": [
            {
                "name": axis.name, "size": axis.size if isinstance(axis.size, int) else str(axis.size),
                "group": axis.group, "estimate": hint(axis.size),
            }
            for axis in cluster.loops.axes
        ],
        "cost": asdict(cluster.cost),
        "eager_us": cluster.eager_us,
    }  # fmt: skip


def print_plan(plan: PlanData, level: int = 1, file: TextIO | None = None) -> None:
    """Print the plan; at a terminal with colours if rich is installed, the same text either way."""
    show(format_plan(plan, level), file)


def show(text: str, file: TextIO | None = None) -> None:
    """Print text; with colours at a terminal if rich is installed."""
    out: TextIO = sys.stdout if file is None else file
    if out.isatty():
        try:
            from rich.console import Console
        except ImportError:
            pass
        else:
            Console(file=out, markup=False, soft_wrap=True).print(text)
            return
    print(text, file=out)
