"""Reductions as monoids: what there is at the beginning, how elements come to it, and how tiles are folded.

combine   neutral   step           fold
sum       0         s += x         tl.sum(x)
prod      1         s *= x         tl.reduce(x, fm.multiply)
max       -inf      s = max(s, x)  fm.maximum_of(x), which keeps NaN
min       inf       s = min(s, x)  fm.minimum_of(x)
any       False     s |= x         tl.max(x) != 0
all       True      s &= x         tl.min(x) != 0
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fusion_compiler.codegen.expression import literal
from fusion_compiler.ir.loops import Reduce, Scan


@dataclass(frozen=True)
class Monoid:
    """neutral: what changes nothing. step: an element x comes to a state s. fold: x along an axis; k: whether
    that stays. floats: the fold of floating-point numbers, where that is another.
    """

    neutral: float | bool
    step: str
    fold: str
    floats: str | None = None


MONOIDS: dict[str, Monoid] = {
    "sum": Monoid(0, "{s} += {x}", "tl.sum({x}, axis={axis}{k})"),
    "prod": Monoid(1, "{s} *= {x}", "tl.reduce({x}, {axis}, fm.multiply{k})"),
    "max": Monoid(
        float("-inf"),
        "{s} = tl.maximum({s}, {x}{nan})",
        "tl.max({x}, axis={axis}{k})",
        "fm.maximum_of({x}, {axis}, {keep})",
    ),
    "min": Monoid(
        float("inf"),
        "{s} = tl.minimum({s}, {x}{nan})",
        "tl.min({x}, axis={axis}{k})",
        "fm.minimum_of({x}, {axis}, {keep})",
    ),
    "any": Monoid(False, "{s} |= {x}", "tl.max({x}, axis={axis}{k}) != 0"),
    "all": Monoid(True, "{s} &= {x}", "tl.min({x}, axis={axis}{k}) != 0"),
}


# Scans of a tile x along an axis, r: "True" from its end.
SCANS: dict[str, str] = {
    "sum": "tl.cumsum({x}, {axis}{r})",
    "prod": "tl.cumprod({x}, {axis}{r})",
    "max": "tl.associative_scan({x}, {axis}, fm.running_larger{r})",
    "min": "tl.associative_scan({x}, {axis}, fm.running_smaller{r})",
    "logsumexp": "fm.running_logsumexp({x}, {axis}{r})",
}
# What a scan x is behind others that came to c.
CARRIED: dict[str, str] = {
    "sum": "{c} + {x}",
    "prod": "{c} * {x}",
    "max": "fm.running_larger({c}, {x})",
    "min": "fm.running_smaller({c}, {x})",
    "logsumexp": "fm.add_logarithms({c}, {x})",
}
NEUTRAL_OF = {"logsumexp": "max"}  # scans whose neutral element is another monoid's


def is_logical(reduce: Reduce | Scan) -> bool:
    """Whether it is of conditions, which tiles hold as zero and one."""
    return isinstance(_neutral(reduce), bool)


def _neutral(reduce: Reduce | Scan) -> float | bool:
    return MONOIDS[NEUTRAL_OF.get(reduce.combine, reduce.combine)].neutral


def neutral_text(reduce: Reduce | Scan) -> str:
    """What changes nothing, in the dtype in which it is reduced."""
    neutral = _neutral(reduce)
    if is_logical(reduce):
        return str(int(neutral))
    if reduce.dtype.is_floating_point:
        return literal(float(neutral))
    if reduce.combine in ("max", "min"):
        info = torch.iinfo(torch.int32 if reduce.dtype is torch.bool else reduce.dtype)
        return str(info.min if reduce.combine == "max" else info.max)
    return literal(neutral)


def fold_text(reduce: Reduce, tile: str, axis: str, keep: bool, plain: bool = False) -> str:
    """A tile reduced along one dimension. plain: a NaN in it need not be kept."""
    monoid = MONOIDS[reduce.combine]
    special = monoid.floats if reduce.dtype.is_floating_point and not plain else None
    return (special or monoid.fold).format(x=tile, axis=axis, keep=keep, k=", keep_dims=True" if keep else "")


def scan_text(scan: Scan, tile: str, axis: str) -> str:
    """A tile scanned along one dimension."""
    return SCANS[scan.combine].format(x=tile, axis=axis, r=", reverse=True" if scan.reverse else "")


def carried_text(scan: Scan, carried: str, text: str) -> str:
    """A scan of a block that goes on where the one before it ended."""
    return CARRIED[scan.combine].format(c=carried, x=text)


def step_text(reduce: Reduce, state: str, text: str) -> str:
    """The statement that adds a tile, or what it was folded to, to a state."""
    nan = ", propagate_nan=tl.PropagateNan.ALL" if reduce.dtype.is_floating_point else ""
    return MONOIDS[reduce.combine].step.format(s=state, x=text, nan=nan)
