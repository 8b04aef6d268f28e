"""Numbers that a graph above autograd holds as tensors."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily

from fusion_compiler.capture.graphs import arguments

_aten = torch.ops.aten
_SAME = {
    "to", "_to_copy", "lift_fresh_copy", "detach", "detach_", "alias", "clone", "contiguous", "expand",
    "view", "reshape", "unsqueeze", "permute", "transpose", "slice", "select", "squeeze",
}  # fmt: skip
_FILLS: dict[str, Any] = {
    **dict.fromkeys(("full", "full_like", "new_full"), "fill_value"),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), 0.0),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), 1.0),
    "scalar_tensor": "s",
}


def base_name(node: fx.Node) -> str:
    """Return an ATen call's name, of the functional form for one in place, or "" for anything else."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return ""
    name = node.target._schema.name.removeprefix("aten::")
    return name.removesuffix("_") if node.target._schema.is_mutable else name


def constant(value: Any) -> float | None:
    """Return the number that all elements of `value` are for all inputs of the graph, or None."""
    numbers = values(value)
    return next(iter(numbers)) if numbers and len(numbers) == 1 else None


def values(value: Any) -> frozenset[float] | None:
    """Return all numbers that elements of `value` may be, or None if they depend on data."""
    if isinstance(value, int | float):
        return frozenset((float(value),))
    tensor = value.meta.get("val") if isinstance(value, fx.Node) else None
    if not isinstance(tensor, torch.Tensor) or tensor.dtype.is_complex:
        return None
    read = _stored if value.op == "get_attr" else _computed
    numbers = None if _written(value) else read(value)
    if numbers is None and tensor.dtype is torch.bool:
        return frozenset((0.0, 1.0))
    if numbers is None or len(numbers) > _MOST:
        return None
    with unset_fake_temporarily():
        return frozenset(float(torch.tensor(v, dtype=torch.float64).to(tensor.dtype).item()) for v in numbers)


def _written(node: fx.Node) -> bool:
    """True if a tensor may be written in place after it was computed."""
    for user in node.users:
        if not isinstance(user.target, OpOverload) or user.target is _aten.detach_.default:
            continue
        if user.target._schema.is_mutable or (user.target.is_view and _written(user)):
            return True
    return False


def literal(node: fx.Node) -> torch.Tensor | None:
    """Return a literal of the model's code, torch.tensor(0.5), as traces store it, or None."""
    if node.op != "get_attr" or any(u.target is not _aten.lift_fresh_copy.default for u in node.users):
        return None
    stored = getattr(node.graph.owning_module, str(node.target), None)
    return stored if type(stored) is torch.Tensor else None


def _stored(node: fx.Node) -> Collection[float] | None:
    stored = literal(node)
    if stored is None or stored.numel() != 1:
        return None
    with unset_fake_temporarily():
        return (float(stored.item()),)


_MOST = 8


def _computed(node: fx.Node) -> Collection[float] | None:
    """Return the numbers of `values` before they are rounded to the node's dtype, or None."""
    name = base_name(node)
    if name in _FILLS:
        fill = _FILLS[name]
        return values(arguments(node)[fill] if isinstance(fill, str) else fill)
    if name in _SAME:
        return values(node.args[0])
    if name in ("tril", "triu"):
        numbers = values(node.args[0])
        return numbers and numbers | {0.0}
    if name not in _POINTWISE:
        return None
    function, names = _POINTWISE[name]
    named, sides = arguments(node), list[frozenset[float]]()
    for operand in names:
        numbers = values(named[operand])
        if numbers is None or named.get("alpha", 1) != 1:
            return None
        sides.append(numbers)
    return {function(*pair) for pair in itertools.product(*sides)} if function else sides[0] | sides[1]


_POINTWISE: dict[str, tuple[Callable[..., float] | None, tuple[str, ...]]] = {
    "where": (None, ("self", "other")),
    "masked_fill": (None, ("self", "value")),
    "add": (operator.add, ("self", "other")),
    "sub": (operator.sub, ("self", "other")),
    "rsub": (lambda a, b: b - a, ("self", "other")),
    "mul": (operator.mul, ("self", "other")),
}
