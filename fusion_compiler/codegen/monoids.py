"""Reductions as monoids: the neutral element, how a state absorbs an element, and how a tile is folded.

combine   neutral   step           fold
sum       0         s += x         tl.sum(x)
prod      1         s *= x         tl.reduce(x, fm.multiply)
max       -inf      s = max(s, x)  fm.maximum_of(x), which keeps NaN
min       inf       s = min(s, x)  fm.minimum_of(x)
any       False     s |= x         tl.max(x) != 0
all       True      s &= x         tl.min(x) != 0
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fusion_compiler.codegen.tile import Assign, Statement, Update
from fusion_compiler.ir.loops import Reduce, Scan
from fusion_compiler.ops.syntax import PROPAGATE_NAN, Expression, Literal, Name, Var, fm, tl

Function = Callable[..., Expression]


@dataclass(frozen=True)
class Monoid:
    """The neutral element, the step of a state, and the fold of a tile along an axis.

    step: the sign of an augmented assignment, or a function of the state and the element.
    fold: a function of a tile, `axis` and, if the axis stays, `keep_dims`.
    floats: a function of a tile, an axis and whether it stays, which folds floating-point numbers.
    """

    neutral: float | bool
    step: str | Function
    fold: Function
    floats: Function | None = None


MONOIDS: dict[str, Monoid] = {
    "sum": Monoid(0, "+", tl.sum),
    "prod": Monoid(1, "*", lambda x, axis, **keep: tl.reduce(x, axis, fm.multiply, **keep)),
    "max": Monoid(float("-inf"), tl.maximum, tl.max, fm.maximum_of),
    "min": Monoid(float("inf"), tl.minimum, tl.min, fm.minimum_of),
    "any": Monoid(False, "|", lambda x, **along: tl.max(x, **along).ne(0)),
    "all": Monoid(True, "&", lambda x, **along: tl.min(x, **along).ne(0)),
}


# Scans of a tile along an axis; with `reverse` from its end.
SCANS: dict[str, Function] = {
    "sum": tl.cumsum,
    "prod": tl.cumprod,
    "max": lambda x, axis, **reverse: tl.associative_scan(x, axis, fm.running_larger, **reverse),
    "min": lambda x, axis, **reverse: tl.associative_scan(x, axis, fm.running_smaller, **reverse),
    "logsumexp": fm.running_logsumexp,
}
# The combination of a carried state with a block's scan.
CARRIED: dict[str, Function] = {
    "sum": operator.add,
    "prod": operator.mul,
    "max": fm.running_larger,
    "min": fm.running_smaller,
    "logsumexp": fm.add_logarithms,
}
NEUTRAL_OF = {"logsumexp": "max"}  # scans with the neutral element of another monoid


def is_logical(reduce: Reduce | Scan) -> bool:
    """True if conditions are reduced, which tiles represent as zero and one."""
    return isinstance(_neutral(reduce), bool)


def _neutral(reduce: Reduce | Scan) -> float | bool:
    return MONOIDS[NEUTRAL_OF.get(reduce.combine, reduce.combine)].neutral


def neutral(reduce: Reduce | Scan) -> Expression:
    """Return the neutral element in the dtype of the reduction."""
    value = _neutral(reduce)
    if is_logical(reduce):
        return Literal(int(value))
    if reduce.dtype.is_floating_point:
        return Literal(float(value))
    if reduce.combine in ("max", "min"):
        info = torch.iinfo(torch.int32 if reduce.dtype is torch.bool else reduce.dtype)
        return Literal(info.min if reduce.combine == "max" else info.max)
    return Literal(value)


def fold(reduce: Reduce, tile: Expression, axis: int | None, keep: bool, plain: bool = False) -> Expression:
    """Return a tile reduced along one dimension, or all for None. plain: NaN need not be propagated."""
    monoid = MONOIDS[reduce.combine]
    if monoid.floats is not None and reduce.dtype.is_floating_point and not plain:
        return monoid.floats(tile, axis, keep)
    folded = monoid.fold(tile, axis=axis, **({"keep_dims": True} if keep else {}))
    is_widened = reduce.combine in ("max", "min") and reduce.dtype in (torch.int8, torch.uint8, torch.int16)
    return folded.to(reduce.dtype) if is_widened else folded


def scan(node: Scan, tile: Expression, axis: int) -> Expression:
    """Return a tile scanned along one dimension."""
    return SCANS[node.combine](tile, axis, **({"reverse": True} if node.reverse else {}))


def carry(node: Scan, carried: Expression, tile: Expression) -> Expression:
    """Return a scan of a block that continues the previous block's."""
    return CARRIED[node.combine](carried, tile)


def step(reduce: Reduce, state: Var | Name, value: Expression) -> Statement:
    """Return the statement that adds a tile, or its fold, to a state."""
    combine = MONOIDS[reduce.combine].step
    if isinstance(combine, str):
        return Update(state, combine, value)
    nan = {"propagate_nan": PROPAGATE_NAN} if reduce.dtype.is_floating_point else {}
    return Assign((state,), combine(state, value, **nan))
