"""Find equal stretches of a pre-autograd graph that follow each other, as the layers of a model do.

They are found by what they compute, whatever the modules are called: operators, constants, shapes, strides
and dtypes repeat with some period, and values go the same ways.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from fusion_compiler.capture.graphs import place_of
from fusion_compiler.ops.schema import written

FEWEST = 5
TRACED = 3  # of them: the first, and the last two
PERIODS = 8  # that are tried
FEW_ELEMENTS = 16  # of constants that are compared; of others each is its own
TRIED = 4  # places where the first block may begin, those first between which the fewest values go


@dataclass(frozen=True)
class Repeat:
    """A repeat consists of equal blocks. blocks: the nodes of each. inputs: what each reads from elsewhere,
    in one order for all. outputs: the positions in a block of what others read."""

    blocks: tuple[tuple[fx.Node, ...], ...]
    inputs: tuple[tuple[fx.Node, ...], ...]
    outputs: tuple[int, ...]


def repeats(graph: fx.Graph) -> list[Repeat]:
    """Return the repeats in the order of the graph; none if sizes are symbolic."""
    if any(_is_symbolic(node.meta.get("val")) for node in graph.find_nodes(op="placeholder")):
        return []
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    numbers: dict[str, int] = {}
    numbered = cache(lambda operand: numbers.setdefault(_operand(operand), len(numbers)))
    return _within(nodes, [_key(node, numbered) for node in nodes])


def _within(nodes: Sequence[fx.Node], keys: Sequence[str | None]) -> list[Repeat]:
    stretch = max(((p, *_longest(keys, p)) for p in _periods(keys)), key=_saved, default=None)
    if stretch is None or _saved(stretch) <= 0:
        return []
    period, start, length = stretch
    firsts = [f for f in range(start, start + period) if len(_begins(stretch, f)) >= FEWEST]
    firsts.sort(key=lambda first: len(_read_outside(nodes[first : first + period])))
    possible = (_repeat([nodes[k : k + period] for k in _begins(stretch, first)]) for first in firsts[:TRIED])
    best = next((m for m in possible if m is not None), None)
    end = start + length + period
    between = [] if best is None else [best]
    return [*_within(nodes[:start], keys[:start]), *between, *_within(nodes[end:], keys[end:])]


def _begins(stretch: tuple[int, int, int], first: int) -> range:
    """Return where the blocks begin, if the first begins at a place."""
    period, start, length = stretch
    return range(first, start + length + 1, period)


def _saved(stretch: tuple[int, int, int]) -> int:
    """Return how many nodes of the blocks need no trace; 0 if the blocks are too few."""
    period, start, _ = stretch
    count = len(_begins(stretch, start))
    return (count - TRACED) * period if count >= FEWEST else 0


def _periods(keys: Sequence[str | None]) -> list[int]:
    """Return the most frequent distances between equal calls, the most frequent one first."""
    places: dict[str, list[int]] = {}
    for i, key in enumerate(keys):
        if key is not None:
            places.setdefault(key, []).append(i)
    distances = Counter[int]()
    for equal in places.values():
        if len(equal) >= FEWEST:
            for step in (1, 2, 3, 4):
                distances.update({b - a for a, b in zip(equal, equal[step:], strict=False)})
    return [d for d, _ in distances.most_common(PERIODS)]


def _longest(keys: Sequence[str | None], period: int) -> tuple[int, int]:
    """Return (start, length) of the longest stretch that equals what follows a period later."""
    best, start = (0, 0), 0
    for i in range(len(keys) - period + 1):
        if i + period < len(keys) and keys[i] is not None and keys[i] == keys[i + period]:
            continue
        best = max(best, (start, i - start), key=operator.itemgetter(1))
        start = i + 1
    return best


def _repeat(blocks: Sequence[Sequence[fx.Node]]) -> Repeat | None:
    """Return the blocks up to the first that is connected in another way; None if these are too few, or a
    result shares memory."""
    inputs: list[tuple[fx.Node, ...]] = []
    for nodes in blocks:
        read = _connected(blocks[0], nodes)
        if read is None:
            break
        inputs.append(read)
    blocks = blocks[: len(inputs)]
    if len(blocks) < FEWEST:
        return None
    outputs = {i for nodes in blocks for i in _read_outside(nodes)}
    for nodes, read in zip(blocks, inputs, strict=True):
        if not all(isinstance(nodes[i].meta.get("val"), torch.Tensor) for i in outputs):
            return None
        places = [place for i in outputs for place in _places(nodes[i])]
        if len(set(places)) < len(places) or {*places} & {p for n in read for p in _places(n)}:
            return None
    return Repeat(tuple(map(tuple, blocks)), tuple(inputs), tuple(sorted(outputs)))


def _read_outside(nodes: Sequence[fx.Node]) -> list[int]:
    """Return the positions of the nodes that others read."""
    inside = {*nodes}
    return [i for i, node in enumerate(nodes) if not inside.issuperset(node.users)]


def _connected(first: Sequence[fx.Node], nodes: Sequence[fx.Node]) -> tuple[fx.Node, ...] | None:
    """Return what `nodes` read from elsewhere, in the order of the first block, or None if values go other
    ways."""
    first_position = {node: i for i, node in enumerate(first)}
    position = {node: i for i, node in enumerate(nodes)}
    read: dict[fx.Node, fx.Node] = {}
    for a, b in zip(first, nodes, strict=True):
        for x, y in zip(_operands(a), _operands(b), strict=True):
            inside = x in first_position or x.op == "get_attr"  # constants are in the keys
            if first_position.get(x) != position.get(y) or (not inside and read.setdefault(x, y) is not y):
                return None
    return tuple(read.values())


def _operands(node: fx.Node) -> list[fx.Node]:
    """Return the operands in order, each as often as it is read."""
    return [a for a in tree_leaves((node.args, node.kwargs)) if isinstance(a, fx.Node)]


def _key(node: fx.Node, numbered: Callable[[fx.Node], int]) -> str | None:
    """Return a text that equal calls share, or None for a call that no block may hold. Operands that look
    alike are one number, because a list of thousands may have as many readers."""
    is_operator = isinstance(node.target, OpOverload) and not written(node.target)
    if not is_operator and node.target is not operator.getitem:
        return None
    args, kwargs = map_arg((node.args, dict(node.kwargs)), numbered)
    return f"{node.target} {args!r} {kwargs!r} {look(node.meta.get('val'))} {node.meta.get('recompute')}"


def constant(node: fx.Node) -> Any:
    """Return the tensor that a node names."""
    return operator.attrgetter(str(node.target))(node.graph.owning_module)


def _operand(node: fx.Node) -> str:
    if node.op != "get_attr":
        return look(node.meta.get("val"))
    value = constant(node)
    small = type(value) is torch.Tensor and value.numel() <= FEW_ELEMENTS and value.device.type == "cpu"
    return f"{value.tolist()!r} {look(value)}" if small else f"constant {id(value)}"


def look(value: Any) -> str:
    """Return a text of all properties of a value without autograd on which a trace depends."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.storage_offset()} {value.device}"
    return str([look(v) for v in value]) if isinstance(value, tuple | list) else repr(value)


def _places(node: fx.Node) -> list[int]:
    values = [v for v in tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)]
    return list(map(place_of, values))


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return any(isinstance(n, torch.SymInt) for n in (*value.shape, *value.stride()))
    return value is not None  # a size
