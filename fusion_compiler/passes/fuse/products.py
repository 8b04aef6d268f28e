"""Matrix products with many rows, fused with the element-wise ops of their results, as options of a plan.

    h = a @ b (a library call); y = gelu(h + bias)   ->   y = gelu(sum over k of a[m, k] * b[k, n] + bias)

The search leaves such products to a library. After it, `options_of` lists the clusters that could take in the
product whose result they read, or two products that share an operand, with the predicted times of both ways.
`passes.fuse.choice` chooses among them, by measurement if the device is present, and `take` puts a chosen
option into the search's result.

A cluster with a reduction that no tile of the product holds (a norm after a residual sum) is split: the ops
before the reduction join the product, and the rest stays a cluster.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from fusion_compiler.ir.dag import Op
from fusion_compiler.ir.walk import reached
from fusion_compiler.ops.own.experts import expert_mm
from fusion_compiler.ops.products import factors_of
from fusion_compiler.ops.schema import HALVES
from fusion_compiler.ops.table import Kind
from fusion_compiler.passes.fuse.candidates import Candidate, Candidates
from fusion_compiler.passes.fuse.cost import contraction_cost
from fusion_compiler.passes.fuse.search import Search
from fusion_compiler.passes.lower.products import product_of
from fusion_compiler.passes.lower.space import Illegal

RULE = "products"
MOST_PRODUCTS = 2  # in one cluster: a gate and the gated value
# Kinds of ops whose results are computed element by element behind a product.
BEHIND = frozenset({Kind.ELEMENTWISE, Kind.RANDOM, Kind.LAYOUT})

Groups = Sequence[Sequence[int]]  # the numbers of the candidates of each launch


@dataclass(frozen=True, eq=False)
class Option:
    """An option is a cluster that takes in the products which another cluster reads.

    calls: the products, by op name. reader: the number of the cluster that reads them. fused: the products
    with all of that cluster, or with a part of it. rest: the other part, or None.
    calls_us, reader_us: the predicted times of the library's products and of the cluster that reads them.
    """

    calls: tuple[str, ...]
    reader: int
    fused: Candidate
    rest: Candidate | None
    calls_us: float
    reader_us: float

    @property
    def us(self) -> float:
        """Return the predicted time of the clusters that take the place of the calls and their reader."""
        return self.fused.cost.us + (self.rest.cost.us if self.rest is not None else 0.0)

    def number(self, search: Search) -> int:
        """Return the number that `fused` gets among the candidates."""
        return search.pool.reads.position[self.calls[-1]]


@dataclass(frozen=True)
class Refusal:
    """A refusal says why a cluster, by the number of its candidate, does not take in a product."""

    call: str
    reader: int
    rule: str
    reason: str


def options_of(search: Search, groups: Groups) -> tuple[tuple[Option, ...], tuple[Refusal, ...]]:
    """Return the options of a finished search, and why other clusters do not take in a product.

    No product or cluster is in two options. The units of an option are joined in `search.reach`, so that any
    of the options may be taken together.
    """
    pool, options, refusals = search.pool, list[Option](), list[Refusal]()
    alone = {numbers[0] for numbers in groups if len(numbers) == 1}
    taken = set[str]()
    for number in sorted(search.candidates):
        candidate = search.candidates[number]
        read = [n for n in pool.ordered(pool.read_by(candidate)) if _is_product(pool, n) and n not in taken]
        refused: dict[str, tuple[str, str]] = {}
        for calls in _sets(search, read, refused):
            if pool.effort.is_spent():
                break
            if number not in alone:
                refused |= dict.fromkeys(calls, (RULE, "the kernel shares its launch with others"))
                continue
            try:
                option = _option(search, number, calls)
            except Illegal as error:
                refused |= dict.fromkeys(calls, (error.rule, error.reason))
                continue
            options.append(option)
            taken.update(calls)
            for call in calls:
                search.reach.join(number, pool.reads.position[call])
            break
        left = {call: why for call, why in refused.items() if call not in taken}
        refusals += [Refusal(call, number, *why) for call, why in left.items()]
    return tuple(options), tuple(refusals)


def take(search: Search, option: Option) -> list[int]:
    """Put an option into the search's candidates. Return the numbers of what takes its reader's place."""
    number = option.number(search)
    search.candidates[number] = option.fused
    if option.rest is None:
        del search.candidates[option.reader]
        return [number]
    search.candidates[option.reader] = option.rest
    return [number, option.reader]


def taken_groups(search: Search, groups: Groups, options: Sequence[Option]) -> list[list[int]]:
    """Take options, and return the launches with them."""
    replaced = {option.reader: take(search, option) for option in options}
    launches = list[list[int]]()
    for numbers in groups:
        fused = replaced.get(numbers[0]) if len(numbers) == 1 else None
        launches += [list(numbers)] if fused is None else [[number] for number in fused]
    return launches


def retaken_groups(search: Search, groups: Groups, ops: Container[str]) -> list[list[int]]:
    """Take the options whose products are among the ops of a plan's clusters, and return the launches."""
    if any(name in ops and _is_product(search.pool, name) for name in search.dag.order):
        options, _ = options_of(search, groups)
        groups = taken_groups(search, groups, [o for o in options if all(call in ops for call in o.calls)])
    return [list(numbers) for numbers in groups]


def refusal_of(pool: Candidates, op: Op) -> str | None:
    """Return why no cluster holds a matrix product with many rows; None if one may."""
    product = product_of(pool.dag, op)
    if product is None or op.target is expert_mm:
        return "it is more than one product of two matrices of one dtype"
    if not all(isinstance(size, int) and size > 0 for size in product.shape):
        return "its sizes are only known at run time"
    dtype = op.outputs[0].dtype
    if dtype is torch.float32 and torch.get_float32_matmul_precision() == "highest":
        return "float32 is multiplied without tensor cores unless torch.set_float32_matmul_precision allows"
    if dtype not in HALVES:
        return f"no schedule multiplies {str(dtype).removeprefix('torch.')} matrices with many rows"
    return None


def _is_product(pool: Candidates, name: str) -> bool:
    """True if an op is a matrix product with many rows that is left to a library."""
    op = pool.dag.op(name)
    return factors_of(op.target) is not None and name not in pool.owned and pool.has_many_rows(op)


def _sets(
    search: Search, read: Sequence[str], refused: dict[str, tuple[str, str]]
) -> Iterator[tuple[str, ...]]:
    """Yield the sets of products that one cluster may take in, the largest first.

    refused: receives the reasons of products that no cluster holds.
    """
    fit = list[str]()
    for name in read:
        reason = refusal_of(search.pool, search.dag.op(name))
        if reason is None:
            fit.append(name)
        else:
            refused[name] = RULE, reason
    for count in range(min(MOST_PRODUCTS, len(fit)), 1, -1):
        for calls in itertools.combinations(fit, count):
            if _share_an_operand(search, calls):
                yield calls
    fit.sort(key=lambda name: -search.dag.op(name).flops)
    yield from ((name,) for name in fit)


def _share_an_operand(search: Search, calls: Sequence[str]) -> bool:
    """True if some products have the same shape and one factor in common."""
    products = [product_of(search.dag, search.dag.op(name)) for name in calls]
    if any(p is None for p in products) or len({p.shape for p in products if p is not None}) > 1:
        return False
    sides = [{search.reads.base(getattr(p, side)) for p in products} for side in ("left", "right")]
    return any(len(side) == 1 for side in sides)


def _option(search: Search, number: int, calls: tuple[str, ...]) -> Option:
    """Return the option of a cluster and the products that it takes in. Raises Illegal."""
    pool, candidate = search.pool, search.candidates[number]
    if not search.reach.convex([number, *(pool.reads.position[call] for call in calls)]):
        raise Illegal("convex", "an op between them needs one and feeds the other")
    calls_us = sum(contraction_cost(pool.dag.op(c), pool.device, pool.hints).us for c in calls)
    us = calls_us, candidate.cost.us
    try:
        fused = pool.candidate(pool.ordered({*calls, *candidate.ops}), candidate.must_store)
        return Option(calls, number, fused, None, *us)
    except Illegal as error:
        behind, again = _behind(pool, candidate, calls)
        if not behind or behind >= {*candidate.ops}:
            raise Illegal(error.rule, error.reason) from None
    undo = pool.recompute(again)
    try:
        fused = pool.candidate(pool.ordered({*calls, *behind}), candidate.must_store & behind)
        rest = {n for name in candidate.ops if name not in behind for n in pool.closure(name)}
        left = pool.candidate(pool.ordered(rest), candidate.must_store - behind)
    finally:
        undo()
    before = _traffic(pool, calls) + sum(pool.bytes(call) for call in calls) + _moved(pool, candidate)
    if (after := _moved(pool, fused) + _moved(pool, left)) >= before:
        both = f"{after / 1e6:.1f} MB, and apart they move {before / 1e6:.1f} MB"
        raise Illegal("traffic", f"fused with a part of the other cluster, it and the rest move {both}")
    return Option(calls, number, fused, left, *us)


def _moved(pool: Candidates, candidate: Candidate) -> int:
    """Return the bytes that a candidate reads and stores."""
    return _traffic(pool, candidate.ops) + sum(pool.bytes(name) for name in candidate.outputs)


def _traffic(pool: Candidates, ops: Sequence[str]) -> int:
    """Return the bytes that some ops read from memory."""
    read = {source for op in ops for source in pool.reads.sources[op]}.difference(ops)
    return sum(pool.bytes(name) for name in read if pool.dag.op(name).outputs)


def _behind(
    pool: Candidates, candidate: Candidate, calls: Sequence[str]
) -> tuple[frozenset[str], frozenset[str]]:
    """Return the ops of a cluster that join the products, and those among them that the rest computes again.

    They are computed element by element from the products, or are results that are so computed from the same
    operands, with all that they need of the cluster. None of that waits for a reduction.
    """
    inside, depends, ready = {*candidate.ops}, set[str](calls), set[str]()
    for name in candidate.ops:
        sources = pool.reads.sources[name]
        if pool.dag.op(name).kind in BEHIND and all(s in ready for s in sources if s in inside):
            ready.add(name)
            if not depends.isdisjoint(sources):
                depends.add(name)
    behind = _with_sources(pool, depends & inside, inside)
    read = {s for name in behind for s in pool.reads.sources[name] if s not in inside} - {*calls}
    for name in candidate.outputs:
        more = _with_sources(pool, {name}, inside if name in ready else ())
        if name in ready and any(s in read for n in more for s in pool.reads.sources[n]):
            behind |= more
    return behind, behind - depends - {*candidate.outputs}


def _with_sources(pool: Candidates, names: Iterable[str], inside: Container[str]) -> frozenset[str]:
    """Return some ops with all that they need of a cluster."""
    return frozenset(reached(names, lambda name: [s for s in pool.reads.sources[name] if s in inside]))
