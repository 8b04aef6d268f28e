"""Numbers that a graph above autograd holds as tensors."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily

from fusion_compiler.capture.graphs import arguments

_aten = torch.ops.aten
_SAME = {
    "to", "_to_copy", "lift_fresh_copy", "detach", "detach_", "alias", "clone", "contiguous", "expand",
    "view", "reshape", "unsqueeze",
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
    if isinstance(value, int | float):
        return float(value)
    if (
        not isinstance(value, fx.Node)
        or not isinstance(value.meta.get("val"), torch.Tensor)
        or _written(value)
    ):
        return None
    number = _stored(value) if value.op == "get_attr" else _filled(value)
    dtype = value.meta["val"].dtype
    if number is None or dtype.is_complex:
        return None
    with unset_fake_temporarily():
        return float(torch.tensor(number, dtype=dtype).item())


def _written(node: fx.Node) -> bool:
    """True if a tensor may be written in place after it was computed."""
    for user in node.users:
        if not isinstance(user.target, OpOverload) or user.target is _aten.detach_.default:
            continue
        if user.target._schema.is_mutable or (user.target.is_view and _written(user)):
            return True
    return False


def _filled(node: fx.Node) -> float | None:
    name = base_name(node)
    if name in _FILLS:
        fill = _FILLS[name]
        return constant(arguments(node)[fill]) if isinstance(fill, str) else fill
    return constant(node.args[0]) if name in _SAME else None


def _stored(node: fx.Node) -> float | None:
    """Return the number of a literal of the model's code, torch.tensor(0.5), as traces store it, or None."""
    if any(user.target is not _aten.lift_fresh_copy.default for user in node.users):
        return None
    literal = getattr(node.graph.owning_module, str(node.target), None)
    if type(literal) is not torch.Tensor or literal.numel() != 1:
        return None
    with unset_fake_temporarily():
        return float(literal.item())


def values(node: fx.Node) -> frozenset[float] | None:
    """Return all numbers that elements of `node` may be, or None if they depend on data."""
    if (number := constant(node)) is not None:
        return frozenset((number,))
    numbers = None if _written(node) else _chosen(node)
    if numbers is None or len(numbers) > _MOST:
        return None
    dtype = node.meta["val"].dtype
    with unset_fake_temporarily():
        return frozenset(float(torch.tensor(v, dtype=torch.float64).to(dtype).item()) for v in numbers)


_MOST = 8


def _chosen(node: fx.Node) -> set[float] | None:
    """Return the numbers of `values` before they are rounded to the node's dtype, or None."""
    name = base_name(node)
    if name in _SAME or name in ("permute", "transpose", "slice", "select", "squeeze"):
        return _bool_or(node.args[0])
    if name in ("tril", "triu"):
        numbers = _bool_or(node.args[0])
        return numbers and numbers | {0.0}
    if name not in _POINTWISE:
        return None
    function, names = _POINTWISE[name]
    named = arguments(node)
    if named.get("alpha", 1) != 1:
        return None
    sides = [_bool_or(named[n]) for n in names]
    if any(side is None for side in sides):
        return None
    return {function(*pair) for pair in itertools.product(*sides)} if function else set().union(*sides)  # type: ignore[arg-type]


def _bool_or(value: Any) -> set[float] | None:
    if not isinstance(value, fx.Node):
        return {float(value)} if isinstance(value, int | float) else None
    if value.meta["val"].dtype is torch.bool:
        return {0.0, 1.0}
    numbers = values(value)
    return None if numbers is None else set(numbers)


_POINTWISE: dict[str, tuple[Callable[..., float] | None, tuple[str, ...]]] = {
    "where": (None, ("self", "other")),
    "masked_fill": (None, ("self", "value")),
    "add": (operator.add, ("self", "other")),
    "sub": (operator.sub, ("self", "other")),
    "rsub": (lambda a, b: b - a, ("self", "other")),
    "mul": (operator.mul, ("self", "other")),
}
