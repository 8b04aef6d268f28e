"""Horizontal fusion: independent clusters that are related share one launch.

Two small kernels take a launch each. One kernel that has the programs of both takes little more time than the
longer of them. It is the last step of clustering: nothing is merged after it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import sympy

from fusion_compiler.ir.dag import OpDag
from fusion_compiler.ir.dims import hint, product
from fusion_compiler.ir.loops import COLS, INNER, ROWS, LoopNest, Reduce, Scan, axes_in, reduced_groups
from fusion_compiler.ir.plan_data import Setting
from fusion_compiler.ops.table import Kind
from fusion_compiler.passes.fuse.candidates import Candidate, Candidates
from fusion_compiler.passes.fuse.recompute import merge_and_recompute
from fusion_compiler.passes.fuse.search import Search
from fusion_compiler.schedule.products import Products

MOST = 4  # clusters in one launch
MOST_READY = 16  # clusters in one launch that wait for nothing
READY_BYTES = 1 << 16  # bytes that such a cluster may move
STYLES = frozenset({ROWS, COLS, INNER})  # groups of axes whose reductions decide what a program holds
SMALL_US = 40.0  # a longer kernel gains nothing from a shared launch


def launches(search: Search) -> list[list[int]]:
    """Return the candidates of a finished search by number, one list for each launch."""
    groups: list[list[int]] = []
    alike: dict[tuple[frozenset[str], int], list[list[int]]] = {}  # groups of small clusters with room
    for number in sorted(search.candidates):
        candidate = search.candidates[number]
        alone = candidate.cost.us > SMALL_US or _fills_tiles(candidate.loops, search.pool.hints)
        near = [] if alone else alike.setdefault(style(candidate.loops, search.pool.hints), [])
        home = next((g for g in near if _fits(search, g, number)), None)
        if home is None:
            groups.append([number])
            near.append(groups[-1])
            continue
        home.append(number)
        search.reach.join(home[0], number)
        if len(home) == (MOST_READY if _is_ready(search, candidate) else MOST):
            near.remove(home)
    return groups


def solve(dag: OpDag, setting: Setting) -> tuple[Search, list[list[int]]]:
    """Return the finished search, and the candidates' numbers of each cluster of the plan, in its order."""
    pool = Candidates(dag, setting.device, setting.hints, rounded=setting.numerics == "eager")
    search = Search(pool, setting.matches)
    merge_and_recompute(search)
    return search, launches(search)


def _fills_tiles(loops: LoopNest, hints: Mapping[sympy.Symbol, int]) -> bool:
    """True if programs have tiles of windows or of several axes; those of products of few rows are small."""
    return bool(axes_in(loops.axes, (INNER,))) and Products.of(loops, hints) is None


def _fits(search: Search, group: Sequence[int], number: int) -> bool:
    """True if a candidate may join a launch of its style: it is related to one in it, and no path leads
    either way."""
    if search.reach.path(group[0], number):
        return False
    return any(_related(search, search.candidates[number], search.candidates[other]) for other in group)


def style(loops: LoopNest, hints: Mapping[sympy.Symbol, int]) -> tuple[frozenset[str], int]:
    """Return the axes and the width that decide how many warps a program has, and what each of them keeps.

    A launch has one number of warps, and the registers of its hungriest candidate for all. Programs that
    reduce nothing, or only over rows, hold tiles of a size that codegen chooses; those that reduce
    along rows hold whole rows, so these have to be as wide as each other, up to a factor of two.
    """
    reductions = (n for n in loops.nodes if isinstance(n, Reduce))
    over = STYLES.intersection(g for n in reductions for g in reduced_groups(loops.axes, n))
    if any(isinstance(n, Scan) for n in loops.nodes):
        over |= {COLS}
    wide = (a.size for a in loops.axes if a.group in over and a.group != ROWS)
    width = hint(product(wide), hints)
    return over, max(0, width - 1).bit_length()


def _is_ready(search: Search, candidate: Candidate) -> bool:
    """True if a candidate is small and reads arguments of the graph alone, like batch norm counters."""
    cost = candidate.cost
    small = cost.moved <= READY_BYTES
    return small and search.pool.read_by(candidate) <= frozenset(search.dag.inputs)


def _related(search: Search, a: Candidate, b: Candidate) -> bool:
    """True if two candidates have a source or a reader in common, directly or through library calls, or are
    both ready when the graph begins."""
    if _is_ready(search, a) and _is_ready(search, b):
        return True
    for around in (search.pool.read_by, search.pool.readers_of):
        mine, theirs = around(a), around(b)
        if mine & theirs or _behind(search, mine) & _behind(search, theirs):
            return True
    return False


def _behind(search: Search, names: set[str]) -> set[str]:
    """Return the sources of the library calls among some ops: the projections of one input are siblings, and
    so are the results of one call, such as attention's three gradients."""
    ops = [search.dag.op(n) for n in names]
    parts = {op.first for op in ops if op.target is operator.getitem}
    return parts | {s for op in ops if op.kind is Kind.CONTRACTION for s in search.reads.sources[op.name]}
