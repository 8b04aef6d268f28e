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
    """An ATen call's name, that of the functional form for one in place; "" for anything else."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return ""
    name = node.target._schema.name.removeprefix("aten::")
    return name.removesuffix("_") if node.target._schema.is_mutable else name


def constant(value: Any) -> float | None:
    """The number that all elements of `value` are, whatever the graph's inputs; None where none is known."""
    if isinstance(value, int | float):
        return float(value)
    if (
        not isinstance(value, fx.Node)
        or not isinstance(value.meta.get("val"), torch.Tensor)
        or _written(value)
    ):
        return None
    found = _stored(value) if value.op == "get_attr" else _made(value)
    dtype = value.meta["val"].dtype
    if found is None or dtype.is_complex:
        return None
    with unset_fake_temporarily():
        return float(torch.tensor(found, dtype=dtype).item())


def _written(node: fx.Node) -> bool:
    """Whether anything may change a tensor after it was made."""
    for user in node.users:
        if not isinstance(user.target, OpOverload) or user.target is _aten.detach_.default:
            continue
        if user.target._schema.is_mutable or (user.target.is_view and _written(user)):
            return True
    return False


def _made(node: fx.Node) -> float | None:
    name = base_name(node)
    if name in _FILLS:
        given = _FILLS[name]
        return constant(arguments(node)[given]) if isinstance(given, str) else given
    return constant(node.args[0]) if name in _SAME else None


def _stored(node: fx.Node) -> float | None:
    """A literal of the model's code (torch.tensor(0.5)), as the trace stores it."""
    if any(user.target is not _aten.lift_fresh_copy.default for user in node.users):
        return None
    literal = getattr(node.graph.owning_module, str(node.target), None)
    if type(literal) is not torch.Tensor or literal.numel() != 1:
        return None
    with unset_fake_temporarily():
        return float(literal.item())


def values(node: fx.Node) -> frozenset[float] | None:
    """All numbers that elements of `node` may be; None where they depend on data."""
    if (number := constant(node)) is not None:
        return frozenset((number,))
    found = None if _written(node) else _chosen(node)
    if found is None or len(found) > _MOST:
        return None
    dtype = node.meta["val"].dtype
    with unset_fake_temporarily():
        return frozenset(float(torch.tensor(v, dtype=torch.float64).to(dtype).item()) for v in found)


_MOST = 8


def _chosen(node: fx.Node) -> set[float] | None:
    """Before they are rounded to the node's dtype."""
    name = base_name(node)
    if name in _SAME or name in ("permute", "transpose", "slice", "select", "squeeze"):
        return _bool_or(node.args[0])
    if name in ("tril", "triu"):
        given = _bool_or(node.args[0])
        return given and given | {0.0}
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
    found = values(value)
    return None if found is None else set(found)


_POINTWISE: dict[str, tuple[Callable[..., float] | None, tuple[str, ...]]] = {
    "where": (None, ("self", "other")),
    "masked_fill": (None, ("self", "value")),
    "add": (operator.add, ("self", "other")),
    "sub": (operator.sub, ("self", "other")),
    "rsub": (lambda a, b: b - a, ("self", "other")),
    "mul": (operator.mul, ("self", "other")),
}
