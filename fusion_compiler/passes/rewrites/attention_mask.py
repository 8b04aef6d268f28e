"""Attention masks that say nothing, or only "causal", are not built.

    sdpa(q, k, v, attn_mask=m)                 ->  sdpa(q, k, v)                   where m is all true
    sdpa(q, k, v, attn_mask=m)                 ->  sdpa(q, k, v, is_causal=True)   where m is j <= i

A mask tensor sends scaled_dot_product_attention to a kernel several times slower. Models build
masks from `arange` and comparisons. Such a mask depends on sizes alone; this pass proves what it
hides, for all sizes (mask_algebra.py) or, where sizes are numbers, by evaluating it. A mask that
depends on data stays.
"""

from __future__ import annotations

import functools
from enum import StrEnum
from typing import Any

import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.node import map_aggregate

from fusion_compiler.capture.graphs import ancestors, arguments, erase_unused, is_pure
from fusion_compiler.ir.decision import Decisions
from fusion_compiler.ir.graph_pass import Pass
from fusion_compiler.passes.rewrites.constants import literal
from fusion_compiler.passes.rewrites.engine import Nodes, Replacement, Replacements
from fusion_compiler.passes.rewrites.mask_algebra import UnprovedError, expression, predicate_of
from fusion_compiler.passes.rewrites.predicate import Bounds, Le0, at

_SDPA = torch.ops.aten.scaled_dot_product_attention.default
RULE = "attention mask"
# At 2^24 elements the int64 steps on the way to a mask take 128 MiB each.
MAX_EVALUATED = 2**24


class Mask(StrEnum):
    ALL_TRUE = "all true"
    CAUSAL = "causal"


def simplify_masks(gm: fx.GraphModule) -> tuple[fx.GraphModule, Decisions]:
    """Drop or replace the masks of `gm` (ATen above autograd) that are proved trivial."""
    verdicts: dict[fx.Node, tuple[Mask | None, str]] = {}  # calls of many layers share a mask

    def look(call: fx.Node, written: set[fx.Node]) -> Replacement | str | None:
        mask = arguments(call)["attn_mask"]
        if mask is None:
            return None
        if mask not in verdicts:
            verdicts[mask] = verdict(mask, written)
        kind, reason = verdicts[mask]
        rows, columns = (expression(arguments(call)[k].meta["val"].shape[-2]) for k in ("query", "key"))
        if kind is Mask.CAUSAL and rows != columns:
            kind, reason = None, "causal, but queries and keys differ in length"
        return reason if kind is None else Replacement(functools.partial(_replaced, call, kind), reason)

    return Replacements(RULE, (_SDPA,), look)(gm)


def shows_every_row(mask: fx.Node, written: set[fx.Node]) -> bool:
    """True if every row of a bool mask is proved to let something through.

    written: nodes that are changed in place.
    """
    built_from = ancestors(mask)
    if _data(built_from) or built_from & written:
        return False
    try:
        coordinates, formula = predicate_of(mask)
    except UnprovedError:
        with unset_fake_temporarily():
            value = _constant(built_from)
            return isinstance(value, dict) and bool(value[mask].any(-1).all())
    sizes = {c: expression(s) for c, s in zip(coordinates, mask.meta["val"].shape, strict=True)}
    *others, last = coordinates
    square = bool(others) and sizes[others[-1]] == sizes[last]
    chosen = (*((others[-1],) if square else ()), sympy.Integer(0), sizes[last] - 1)
    bounds = Bounds({c: sizes[c] for c in others})
    return any(at(formula, {last: column}, bounds) is True for column in chosen)


def _replaced(call: fx.Node, kind: Mask, nodes: Nodes) -> fx.Node:
    node = nodes[call]
    named = arguments(node)
    mask = named["attn_mask"]
    names = [a.name for a in _SDPA._schema.arguments if not a.kwarg_only]
    named["attn_mask"], named["is_causal"] = None, kind is Mask.CAUSAL
    node.args, node.kwargs = tuple(named.pop(name) for name in names), named
    erase_unused(ancestors(mask))
    return node


def verdict(mask: fx.Node, written: set[fx.Node]) -> tuple[Mask | None, str]:
    """Return what a mask is proved to be, or None, and the reason. written: as for `shows_every_row`."""
    built_from = ancestors(mask)
    if data := _data(built_from):
        return None, f"the mask depends on data ({data[0].name})"
    if built_from & written:
        return None, "the mask is built in place"
    try:
        return _by_algebra(mask)
    except UnprovedError as unproved:
        if any(isinstance(s, torch.SymInt) for n in built_from if _is_tensor(n) for s in n.meta["val"].shape):
            return None, f"not proved for all sizes: {unproved}"
    with unset_fake_temporarily():  # a rewrite that is being made calls this in the mode of its graph
        return _by_value(mask, built_from)


def _data(built_from: set[fx.Node]) -> list[fx.Node]:
    """Return the tensors of `built_from` that are no literals."""
    tensors = (n for n in built_from if n.op != "call_function" and _is_tensor(n))
    return sorted(n for n in tensors if literal(n) is None)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _by_algebra(mask: fx.Node) -> tuple[Mask | None, str]:
    coordinates, formula = predicate_of(mask)
    if formula is True:
        return Mask.ALL_TRUE, "all true, proved from its indices"
    if len(coordinates) >= 2 and formula == Le0(coordinates[-1] - coordinates[-2]):
        return Mask.CAUSAL, "causal, proved from its indices"
    return None, f"the mask is neither all true nor causal: {formula}"


def _by_value(mask: fx.Node, built_from: set[fx.Node]) -> tuple[Mask | None, str]:
    """Return the verdict on a mask whose sizes are all known by evaluating it on the CPU."""
    constants = _constant(built_from)
    if isinstance(constants, str):
        return None, constants
    value = constants[mask]
    shown = value if value.dtype is torch.bool else _shown(value)
    if shown is None:
        return None, "the mask adds finite numbers"
    if bool(shown.all()):
        return Mask.ALL_TRUE, "all true, evaluated"
    if shown.dim() >= 2:
        rows, columns = shown.shape[-2:]
        if bool((shown == torch.ones(rows, columns, dtype=torch.bool).tril()).all()):
            return Mask.CAUSAL, "causal, evaluated"
    return None, "the mask is neither all true nor causal"


def _constant(built_from: set[fx.Node]) -> dict[fx.Node, Any] | str:
    """Return the values of nodes that depend on no data, or the reason why they cannot be evaluated."""
    if impure := [n for n in sorted(built_from) if n.op == "call_function" and not is_pure(n)]:
        return f"the mask depends on {impure[0].target}"
    if any(not isinstance(n.meta["val"], torch.Tensor) for n in built_from) or any(
        isinstance(s, torch.SymInt) for n in built_from for s in n.meta["val"].shape
    ):
        return "the mask's size is not known"
    if (size := max(n.meta["val"].numel() for n in built_from)) > MAX_EVALUATED:
        return f"the mask has {size} elements, more than are evaluated, and the algebra cannot tell"
    return _evaluate(sorted(built_from))


def _evaluate(nodes: list[fx.Node]) -> dict[fx.Node, Any]:
    """Return the values of pure nodes in topological order, computed on the CPU whatever device they name."""
    values: dict[fx.Node, Any] = {}

    def here(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return values[argument]
        return torch.device("cpu") if isinstance(argument, torch.device) else argument

    with torch.no_grad():
        for node in nodes:
            if (stored := literal(node)) is not None:
                values[node] = stored.cpu()
                continue
            args, kwargs = map_aggregate((node.args, dict(node.kwargs)), here)  # type: ignore[misc]
            unpinned = {"pin_memory": False} if "pin_memory" in kwargs else {}
            values[node] = node.target(*args, **{**kwargs, **unpinned})  # type: ignore[operator]
    return values


def _shown(mask: torch.Tensor) -> torch.Tensor | None:
    """Return a bool mask of where an additive mask lets attention through, or None if it holds other numbers.

    0 lets it through; -inf and the lowest finite number of a dtype do not. In a row that lets anything
    through, the lowest finite number gives the weight zero, exactly as -inf does; rows that let nothing
    through never are "all true" or "causal".
    """
    lowest = [torch.finfo(t).min for t in (torch.float16, torch.bfloat16, torch.float32, torch.float64)]
    hidden = mask == -torch.inf
    for number in lowest:
        hidden |= mask == number
    shown = mask == 0
    return shown if bool((shown | hidden).all()) else None


ATTENTION_MASK = Pass(
    RULE,
    simplify_masks,
    does="Leave out attention masks that hide nothing, or only what a causal mask hides.",
    when="that is proved, for all sizes or by evaluating the mask",
    gains="a mask tensor selects a kernel several times slower",
)
