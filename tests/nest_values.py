"""An evaluator of loop nests, node by node, on tensors that have a dimension for each axis.

Floats are float64: tests compare what a nest says, and not how a kernel rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fusion_compiler.ir.loops import (
    Checked,
    Compute,
    Constant,
    Coordinate,
    Index,
    InRange,
    Load,
    LoopNest,
    Node,
    Reduce,
    Value,
)

_COMBINES: dict[str, Any] = {
    "sum": torch.sum, "max": torch.amax, "min": torch.amin, "any": torch.any, "all": torch.all,
}  # fmt: skip


def stored(loops: LoopNest, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the results of a nest by name, as the tensors of `outputs` lie in memory.

    Fails if an element is not stored once, or if something is loaded from outside of a tensor.
    """
    values = node_values(loops, inputs)
    results: dict[str, Tensor] = {}
    for name, like in outputs.items():
        memory = torch.zeros(_span(like), dtype=like.dtype)
        times = torch.zeros(_span(like), dtype=torch.int64)
        for store in loops.stores:
            if store.buffer != name:
                continue
            place, value = torch.broadcast_tensors(_index(loops, store.index, values), values[store.value])
            where = torch.ones((), dtype=torch.bool) if store.within is None else values[store.within]
            where = where.expand(place.shape)
            memory[place[where]] = value[where].to(like.dtype)
            times.scatter_add_(0, place[where], torch.ones_like(place[where]))
        results[name] = memory.as_strided(like.shape, like.stride())
        assert (times.as_strided(like.shape, like.stride()) == 1).all(), f"{name} is not stored once"
    return results


def node_values(loops: LoopNest, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the value of each node; its size is 1 along the axes that it does not vary over."""
    values: list[Tensor] = []
    for node in loops.nodes:
        values.append(_value(loops, node, values, inputs))
    return values


def _value(loops: LoopNest, node: Node, values: list[Tensor], inputs: Mapping[str, Tensor]) -> Tensor:
    match node:
        case Load():
            return _loaded(node, inputs[node.buffer], _index(loops, node.index, values), values)
        case Coordinate():
            return _index(loops, node.index, values)
        case Constant():
            return torch.full([1] * len(loops.axes), node.value, dtype=_wide(node.dtype))
        case InRange():
            index = _index(loops, node.index, values)
            return (index >= node.low) & (index < node.high)
        case Checked():
            return values[node.operand]
        case Compute():
            return _computed(node, values)
        case Reduce():
            sizes = [int(a.size) if k in node.axes else -1 for k, a in enumerate(loops.axes)]
            return _COMBINES[node.combine](values[node.operand].expand(sizes), sorted(node.axes), True)
        case _:
            raise NotImplementedError(type(node))


def _loaded(node: Load, tensor: Tensor, place: Tensor, values: list[Tensor]) -> Tensor:
    count = _span(tensor)
    inside = (place >= 0) & (place < count)
    if node.within is None:
        assert inside.all(), f"{node.buffer} is read outside of its memory"
    else:
        wanted, inside = torch.broadcast_tensors(values[node.within], inside)
        assert inside[wanted].all(), f"{node.buffer} is read outside of its memory"
    memory = tensor.as_strided((count,), (1,), 0).to(_wide(node.dtype))
    loaded = memory[place.clamp(0, max(count - 1, 0))]
    return loaded if node.within is None else torch.where(values[node.within], loaded, 0).to(loaded.dtype)


def _computed(node: Compute, values: list[Tensor]) -> Tensor:
    operands: dict[str, Any] = {n: values[a.node] if isinstance(a, Value) else a for n, a in node.operands}
    if node.target is torch.ops.aten._to_copy.default:
        rounding = str(operands.get("rounding", "")).removeprefix("torch.")
        value = operands["self"].to(getattr(torch, rounding)) if rounding else operands["self"]
        return value.to(_wide(node.dtype))
    names = [argument.name for argument in node.target._schema.arguments]
    numbers = {n: _number(v) for n, v in operands.items() if n in names}
    # Any overload of an operator stands for all of them: PyTorch chooses the one that takes the operands.
    return node.target.overloadpacket(**numbers).to(_wide(node.dtype))


def _number(value: Any) -> Any:
    return value if isinstance(value, Tensor | bool | int | float) or value is None else None


def _index(loops: LoopNest, index: Index, values: list[Tensor]) -> Tensor:
    total = torch.full([1] * len(loops.axes), int(index.const), dtype=torch.int64)
    for key, step in index.terms:
        if key >= 0:
            shape = [int(a.size) if k == key else 1 for k, a in enumerate(loops.axes)]
            total = total + int(step) * torch.arange(int(loops.axes[key].size)).view(shape)
        else:
            total = total + int(step) * values[~key].to(torch.int64)
    return total


def _span(tensor: Tensor) -> int:
    """Return how many elements of memory lie from a tensor's first to its last."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((n - 1) * s for n, s in sizes) if tensor.numel() else 0


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else dtype
