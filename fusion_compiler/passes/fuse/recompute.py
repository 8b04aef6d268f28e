"""Compute a tensor again for each reader rather than keep it in memory.

    a = cluster(x) storing v and w; b = cluster(v)   ->   a = cluster(x) storing w; b = cluster(x)

This is worth it if reading the operands of a few element-wise ops costs less than writing v and reading it:
the gradients of a group norm's weight are sums over other axes than its input gradient, and both read
what an activation's backward makes.

Products of few rows read kilobytes beside their matrices: each product computes these kilobytes again.

    a = norm(x); q = a @ w; k = a @ v   ->   q = norm(x) @ w; k = norm(x) @ v
"""

from __future__ import annotations

from fusion_compiler.ops.own import depthwise
from fusion_compiler.ops.own.sum_rows import COMBINES
from fusion_compiler.ops.table import Kind, spec_of
from fusion_compiler.passes.fuse.candidates import Candidate
from fusion_compiler.passes.fuse.search import Search
from fusion_compiler.passes.lower.space import Illegal

LEAST_BYTES = 1 << 20  # smaller tensors stay in L2
VECTOR_BYTES = 1 << 16  # vectors of channels have no more
MOST_OPS = 24  # in the chain that is computed again


def merge_and_recompute(search: Search) -> None:
    """Run a search, and go on with it as long as computing something again pays."""
    search.run()
    while recompute(search):
        search.merge_all()


def recompute(search: Search) -> bool:
    """Try to compute again what each cluster stores for others, all of it and one by one. True if it paid."""
    changed = False
    for number in sorted(search.candidates):
        if search.pool.effort.is_spent():
            return False
        if _absorb(search, number):
            changed = True
            continue
        candidate = search.candidates[number]
        large = [n for n in candidate.outputs if search.pool.bytes(n) >= LEAST_BYTES]
        chains = [c for n in large if (c := _chain(search, n, candidate)) is not None]
        together = [frozenset[str]().union(*chains)] if len(chains) > 1 else []
        changed = any(_try(search, chain, number) for chain in (*together, *chains)) or changed
    return changed


def _absorb(search: Search, number: int) -> bool:
    """Let products compute all of a small cluster that they alone read, if that is legal and faster."""
    candidate, pool = search.candidates[number], search.pool
    readers = sorted({n for op in candidate.outputs for n in search.readers(op)} - {number})
    chain = frozenset(candidate.ops)
    small = all(pool.bytes(op) < LEAST_BYTES for op in candidate.outputs)
    products = all(_is_product(search, search.candidates[n]) for n in readers)
    if not (readers and small and products) or _is_product(search, candidate):
        return False
    if candidate.must_store or any(pool.must_exist(op) for op in candidate.outputs):
        return False
    before = candidate.cost.us + sum(search.candidates[n].cost.us for n in readers)
    undo = pool.recompute(chain)
    try:
        merged = {n: _with_closure(search, search.candidates[n]) for n in readers}
    except Illegal:
        undo()
        return False
    if before <= sum(c.cost.us for c in merged.values()):
        undo()
        return False
    search.drop(number)
    _settle(search, merged, chain)
    return True


def _is_product(search: Search, candidate: Candidate) -> bool:
    ops = map(search.dag.op, candidate.ops)
    return any(op.kind is Kind.CONTRACTION and op.target not in depthwise.CALLS for op in ops)


def _settle(search: Search, candidates: dict[int, Candidate], chain: frozenset[str]) -> None:
    """Replace candidates by those that compute a chain of ops themselves."""
    for n, candidate in candidates.items():
        search.candidates[n] = candidate
        search.version[n] += 1
    for op in chain:
        search.owner.pop(op, None)
    for n in candidates:
        for other, saved in search.neighbours(n).items():
            search.push(min(n, other), max(n, other), saved)


def _try(search: Search, chain: frozenset[str], number: int) -> bool:
    """Let the readers of a chain of ops compute it themselves, if that is legal and faster.

    A cluster that would store nothing then is dropped.
    """
    readers = sorted({n for op in chain for n in search.readers(op)} - {number})
    if not readers or not chain or any(search.reach.leads(n, number) for n in readers):
        return False
    undo = search.pool.recompute(chain)
    ops = search.candidates[number].ops
    before = sum(search.candidates[n].cost.us for n in (number, *readers))
    try:
        candidates = {n: _with_closure(search, search.candidates[n]) for n in readers}
        rest = _remaining(search, number)
    except Illegal:
        undo()
        return False
    if before <= _cost(search, [*candidates.values()]) + (rest.cost.us if rest is not None else 0):
        undo()
        return False
    if rest is None:
        search.drop(number)
        _settle(search, candidates, chain.union(ops))
    else:
        _settle(search, {number: rest, **candidates}, chain)
    return True


def _remaining(search: Search, number: int) -> Candidate | None:
    """Return a cluster without the ops that its readers recompute, or None if it stores nothing else."""
    try:
        return _with_closure(search, search.candidates[number])
    except Illegal as error:
        if error.rule == "dead":
            return None
        raise


def _cost(search: Search, readers: list[Candidate]) -> float:
    """Return the time that the readers take, as one cluster if that is legal and faster."""
    apart = sum(r.cost.us for r in readers)
    if len(readers) == 1:
        return apart
    try:
        union = search.pool.union(readers)
    except Illegal:
        return apart
    return min(apart, union.cost.us)


def _with_closure(search: Search, candidate: Candidate) -> Candidate:
    """Return a candidate that also computes the ops of the chain that it reads."""
    ops = {n for op in candidate.ops for n in search.pool.closure(op)} | set(candidate.ops)
    return search.pool.candidate(search.pool.ordered(ops), candidate.must_store)


def _chain(search: Search, name: str, owner: Candidate) -> frozenset[str] | None:
    """Return the element-wise ops and lookups that compute `name` in its owner; None if one must be stored.

    Readers compute cheap ops (`Candidates.again`) anyway. Vectors that these read, such as the rounded
    statistics of a norm, join the chain: the owner computes them in every row and cannot store them.
    """
    inside, pool = set(owner.ops), search.pool
    chain: set[str] = set()
    seen: set[str] = set()
    stack = [(name, False)]
    while stack:
        op, behind_cheap = stack.pop()
        if op in seen or op not in inside:
            continue
        seen.add(op)
        if op in pool.again:
            stack.extend((source, True) for source in search.reads.sources[op])
            continue
        spec = spec_of(search.dag.op(op).target)
        if spec is None or spec.kind is not Kind.ELEMENTWISE or spec.target in COMBINES:
            if op == name:
                return None
            continue
        stored = op in owner.must_store or op in pool.once or pool.must_exist(op)
        if behind_cheap and (stored or pool.bytes(op) > VECTOR_BYTES):
            continue
        if stored or len(chain) >= MOST_OPS:
            return None
        chain.add(op)
        stack.extend((source, behind_cheap) for source in search.reads.sources[op])
    return frozenset(chain)
