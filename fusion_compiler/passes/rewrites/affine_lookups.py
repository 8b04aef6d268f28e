"""Lookups by indices that are functions of their coordinates become slices, and so do their gradients.

    x.index_select(3, arange(k))        ->   x[:, :, :, :k]
    x[arange(n - 1, -1, -1)]            ->   x.flip(0)
    weight[arange(n).expand(b, n)]      ->   weight[:n].expand(b, n, -1)
    x[arange(len(x)), chosen]           ->   x.gather(1, chosen[:, None]).squeeze(1)

Each replacement is a copy, as a lookup is. The gradient of a lookup by data adds up rows by their numbers;
that of a slice adds nothing up, and in the last form one element of each row has a gradient.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from fusion_compiler.capture.graphs import ancestors, arguments, emit, size_of
from fusion_compiler.ir.graph_pass import Pass
from fusion_compiler.ir.layout import lookups_of_node
from fusion_compiler.ops.lookups import GATHERS, Lookups
from fusion_compiler.passes.rewrites.engine import Replacement, Replacements
from fusion_compiler.passes.rewrites.mask_algebra import UnprovedError, expression, integers_of

_aten = torch.ops.aten
RULE = "affine lookups"


@dataclass(frozen=True)
class _Progression:
    """An index that is start, start + step, ... along `dims`, the last of which is innermost, and constant
    along its other dimensions."""

    start: int
    step: int
    dims: tuple[int, ...]


def _look(node: fx.Node, written: set[fx.Node]) -> Replacement | None:
    looked, named = lookups_of_node(node), arguments(node)
    assert looked is not None
    is_special = named.get("padding_idx", -1) >= 0 or named.get("scale_grad_by_freq") or named.get("sparse")
    if looked.is_pointwise or is_special:
        return None
    emitter = _part_of(node, looked, written) or _one_of_each(node, looked, written)
    return emitter and Replacement(lambda nodes: emitter(nodes[node]), "no lookup by data")


Emitter = Callable[[fx.Node], fx.Node]


def _part_of(node: fx.Node, looked: Lookups, written: set[fx.Node]) -> Emitter | None:
    """Return the emitter for a lookup by one index that is a progression."""
    shape = arguments(node)[looked.operand].meta["val"].shape
    if len(looked.indices) != 1 or not shape:
        return None
    ((dim, index),) = looked.indices
    progression = _progression(index, shape[dim], written, wraps=looked.wraps)
    return progression and (lambda node: _part(node, dim, progression))


def _one_of_each(node: fx.Node, looked: Lookups, written: set[fx.Node]) -> Emitter | None:
    """Return the emitter for a lookup by two indices, where one counts the rows that the other chooses
    from."""
    indices = dict(looked.indices)
    dims, shape = [*indices], arguments(node)[looked.operand].meta["val"].shape
    if len(dims) != 2 or dims[1] != dims[0] + 1:
        return None
    for count, choice in (dims, dims[::-1]):
        chosen = indices[choice].meta["val"]
        flat = chosen.dim() == indices[count].meta["val"].dim() == 1
        plain = flat and chosen.dtype in (torch.int64, torch.int32)
        all_of = plain and expression(chosen.shape[0]) == expression(shape[count])
        if all_of and _progression(indices[count], shape[count], written) == _Progression(0, 1, (0,)):
            return lambda node: _gathered(node, count, choice)
    return None


def _progression(
    index: fx.Node, size: Any, written: set[fx.Node], *, wraps: bool = False
) -> _Progression | None:
    """Return the progression that an index of a dimension of `size` elements is, or None if it is none or may
    lie outside. wraps: True if negative numbers count from the end."""
    shape = index.meta["val"].shape
    empty = any(isinstance(n, int) and n == 0 for n in shape)
    if not shape or empty or not ancestors(index).isdisjoint(written):
        return None
    try:
        coordinates, element, bounds = integers_of(index)
    except UnprovedError:
        return None
    element, n = sympy.expand(element), expression(size)
    if wraps and bounds.le0(element + 1) is True:
        element = sympy.expand(element + n)
    if bounds.le0(-element) is not True or bounds.le0(element - n + 1) is not True:
        return None
    start = element.subs(dict.fromkeys(coordinates, 0))
    steps = [element.coeff(c) for c in coordinates]
    dims = tuple(d for d, step in enumerate(steps) if step != 0)
    rest = element - start - sum(k * c for k, c in zip(steps, coordinates, strict=True))
    if sympy.expand(rest) != 0 or not start.is_Integer or not all(step.is_Integer for step in steps):
        return None
    step = int(steps[dims[-1]]) if dims else 1
    inner, static = 1, all(isinstance(shape[d], int) for d in dims)
    for d in reversed(dims):
        if steps[d] != step * inner or (not static and len(dims) > 1):
            return None
        inner *= shape[d] if static else 1
    return _Progression(int(start), step, dims) if static or abs(step) == 1 else None


def _part(node: fx.Node, dim: int, p: _Progression) -> fx.Node:
    """Emit the part of a lookup's operand that the index of its dimension `dim` selects, as a new contiguous
    tensor."""
    looked = lookups_of_node(node)
    assert looked is not None
    source, ((_, index),) = arguments(node)[looked.operand], looked.indices
    shape, rank = index.meta["val"].shape, index.meta["val"].dim()
    static = all(isinstance(shape[d], int) for d in p.dims)
    if static:
        count = 1
        for d in p.dims:
            count *= shape[d]
        last = p.start + p.step * (count - 1)
        ends = (p.start, last + 1) if p.step > 0 else (last, p.start + 1)
    else:
        ends = _symbolic_ends(node, index, p)
    part = emit(node, _aten.slice.Tensor, source, dim, *ends, abs(p.step))
    if p.step < 0:
        part = emit(node, _aten.flip.default, part, [dim])
    if len(p.dims) > 1:
        around = range(dim), range(dim + 1, source.meta["val"].dim())
        before, after = ([size_of(node, source, d) for d in dims] for dims in around)
        part = emit(node, _aten.reshape.default, part, [*before, *(shape[d] for d in p.dims), *after])
    elif not p.dims:
        part = emit(node, _aten.squeeze.dim, part, dim)
    same = [d for d in range(rank) if d not in p.dims]
    for d in same:
        part = emit(node, _aten.unsqueeze.default, part, dim + d)
    if any(shape[d] != 1 for d in same):
        sizes: list[Any] = [-1] * part.meta["val"].dim()
        for d in same:
            sizes[dim + d] = size_of(node, index, d)
        part = emit(node, _aten.expand.default, part, sizes)
    return emit(node, _aten.clone.default, part, memory_format=torch.contiguous_format)


def _symbolic_ends(node: fx.Node, index: fx.Node, p: _Progression) -> tuple[Any, Any]:
    """Return the ends of a slice of step 1 or -1 with as many elements as the index has."""
    count = size_of(node, index, p.dims[0])
    if p.step > 0:
        return p.start, emit(node, operator.add, count, p.start)
    return emit(node, operator.sub, p.start + 1, count), p.start + 1


def _gathered(node: fx.Node, count: int, choice: int) -> fx.Node:
    """Gather along dimension `choice` the element that each place along `count` chooses."""
    source, chosen = arguments(node)["self"], arguments(node)["indices"][choice]
    rank = source.meta["val"].dim()
    size = size_of(node, source, choice)
    wide = emit(node, _aten.to.dtype, chosen, torch.int64)
    negative = emit(node, _aten.lt.Scalar, wide, 0)
    place = emit(node, _aten.where.self, negative, emit(node, _aten.add.Tensor, wide, size), wide)
    for d in range(rank):
        if d != count:
            place = emit(node, _aten.unsqueeze.default, place, d)
    sizes = [1 if d == choice else size_of(node, source, d) for d in range(rank)]
    place = emit(node, _aten.expand.default, place, sizes)
    picked = emit(node, _aten.gather.default, source, choice, place)
    return emit(node, _aten.squeeze.dim, picked, choice)


AFFINE_LOOKUPS = Pass(
    RULE,
    Replacements(RULE, tuple(GATHERS), _look),
    does="Replace lookups by affine functions of the coordinates by slices, flips and gathers.",
    when="the index is proved to be such a function",
    gains="their gradients are no scatters",
)
