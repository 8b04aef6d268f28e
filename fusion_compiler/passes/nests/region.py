"""The scores of an attention in a graph, and everything that is computed from them element by element.

    bmm(q, k^T) [b, i, j]          a product whose result is larger than both factors: scores
     |- scale, cap, bias, mask     of the size of the scores: never stored
     |- amax, sum over j           row statistics, which later scores of the region read again
     |- bmm(p, v) over j           exits: what the rest of the graph reads
     `- bmm(dS^T, q) over i, sum over b

A region is the same in a forward graph, in a backward graph and in the joint graph of both: a value of the
size of the scores never leaves it. Which axis of the scores an exit is summed over follows from the layouts
of the values (`passes/rewrites/axes.py`), however products fold, permute or spread their dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from fusion_compiler.capture.graphs import arguments
from fusion_compiler.ir.dims import Dim as Size
from fusion_compiler.ir.dims import product
from fusion_compiler.ir.graph_pass import Refused
from fusion_compiler.ir.layout import is_view_node
from fusion_compiler.ir.loops import MOST_FEATURES
from fusion_compiler.ir.walk import reached
from fusion_compiler.ops.decompositions.tensors import hinted
from fusion_compiler.ops.dims import reduced_dims
from fusion_compiler.ops.lookups import looks_up
from fusion_compiler.ops.products import factors_of
from fusion_compiler.ops.schema import HALVES
from fusion_compiler.ops.table import Kind, spec_of
from fusion_compiler.passes.rewrites.axes import Axes, Dim, Layout, rearrangement, shape_of
from fusion_compiler.passes.rewrites.masked_attention import LEAST_GAIN

_aten = torch.ops.aten
PRODUCTS = (_aten.bmm.default, _aten.baddbmm.default)
FORWARD, BACKWARD = "is_forward", "is_backward"


@dataclass(frozen=True)
class Exit:
    """A value that is computed from scores and is smaller: a sum or a maximum over some axes, or a product.
    Or scores that are stored: the gradient of a bias.

    over: the axes of the scores that it is reduced over. product: True for a product. backward: True if
    autograd computes it from the gradients of the graph's results.
    """

    node: fx.Node
    over: frozenset[int]
    product: bool
    backward: bool


@dataclass(frozen=True)
class Region:
    """The scores of one or several products, connected by element-wise operators.

    products: the products whose results are scores. scores: all values of that size, products among them.
    exits: the reductions of scores, in the order of the graph. bridges: small values between a row statistic
    and the scores that read it.
    """

    products: tuple[fx.Node, ...]
    scores: frozenset[fx.Node]
    exits: tuple[Exit, ...]
    bridges: frozenset[fx.Node]

    @property
    def statistics(self) -> frozenset[fx.Node]:
        """Return the exits that scores of the region read again, such as the largest score of a row."""
        readers, exits = self.scores | self.bridges, {e.node for e in self.exits} - self.scores
        return frozenset(n for n in exits if not readers.isdisjoint(n.users))


def regions(graph: fx.Graph) -> list[Region | tuple[fx.Node, str]]:
    """Return the regions of a graph; in the place of one that is none, its first product and the reason."""
    products = [n for t in PRODUCTS for n in graph.find_nodes(op="call_function", target=t) if is_scores(n)]
    order = {node: number for number, node in enumerate(graph.nodes)} if products else {}
    pending, results = sorted(products, key=order.__getitem__), list[Region | tuple[fx.Node, str]]()
    below = _below(pending, order)

    def beside(node: fx.Node) -> list[fx.Node]:
        near = (n for n in (*node.all_input_nodes, *node.users) if n in below)
        return [n for n in near if elements(n) == elements(node)]

    while pending:
        first = pending[0]
        inside = reached([first], beside)
        seeds = inside.intersection(pending)
        pending = [p for p in pending if p not in seeds]
        try:
            region = _region(sorted(seeds, key=order.__getitem__), inside, order)
            if region is not None:
                results.append(region)
        except Refused as reason:
            results.append((first, str(reason)))
    return results


def is_scores(node: fx.Node) -> bool:
    """True if a batched product's result is much larger than both of its factors, which are narrow. On a GPU
    both have 16 bits: libraries multiply float32 faster than a nest."""
    factors = factors_of(node.target)
    assert factors is not None
    named = arguments(node)
    left, right = named[factors.left], named[factors.right]
    value: torch.Tensor = left.meta["val"]
    narrow = hinted(value.shape[-1]) <= MOST_FEATURES
    takes = value.dtype in HALVES or (value.is_floating_point() and value.device.type == "cpu")
    same = value.dtype == right.meta["val"].dtype
    return narrow and takes and same and count(node) >= LEAST_GAIN * (count(left) + count(right))


def elements(node: fx.Node) -> Size:
    """Return the number of elements of a node's value; 0 for what is no tensor."""
    value = node.meta.get("val")
    return product(_size(s) for s in value.shape) if isinstance(value, torch.Tensor) else 0


def count(node: fx.Node) -> int:
    """Return the number of elements in the captured call; 0 for what is no tensor."""
    value = node.meta.get("val")
    return math.prod(map(hinted, value.shape)) if isinstance(value, torch.Tensor) else 0


def _size(size: int | torch.SymInt) -> Size:
    return size if isinstance(size, int) else size.node.expr


def is_pointwise(node: fx.Node) -> bool:
    """True for an operator that a loop nest computes element by element, and for views and copies."""
    if node.op != "call_function":
        return False
    spec = spec_of(node.target)
    return is_view_node(node) or (
        spec is not None and spec.kind in (Kind.ELEMENTWISE, Kind.RANDOM, Kind.LAYOUT)
    )


def is_reduction(node: fx.Node) -> bool:
    spec = spec_of(node.target) if node.op == "call_function" else None
    return spec is not None and spec.kind is Kind.REDUCTION


def _below(products: Sequence[fx.Node], order: Mapping[fx.Node, int]) -> dict[fx.Node, frozenset[fx.Node]]:
    """Return the values of the size of scores that are computed from products, each with these products.

    A gradient that is accumulated from several attentions is left out: it does not connect them. So is the
    result of a lookup in scores: a nest would compute a product again at each index, without tensor cores.
    """

    def readers(node: fx.Node) -> list[fx.Node]:
        same = (n for n in node.users if elements(n) == elements(node) and is_pointwise(n))
        return [n for n in same if not looks_up(n.target)]

    below = {node: frozenset({node}) for node in products}
    for node in sorted(reached(products, readers) - below.keys(), key=order.__getitem__):
        parts = [below[n] for n in node.all_input_nodes if n in below]
        is_gradient = node.target is _aten.add.Tensor and node.meta.get("partitioner_tag") == BACKWARD
        if parts and not (is_gradient and len(parts) == 2 and parts[0].isdisjoint(parts[1])):
            below[node] = frozenset().union(*parts)
    return below


def _region(products: Sequence[fx.Node], scores: set[fx.Node], order: dict[fx.Node, int]) -> Region | None:
    """Return the region of some scores; None if no product reads them. Raises Refused."""
    ends = sorted({u for n in scores for u in n.users if u not in scores}, key=order.__getitem__)
    if not any(n.target in PRODUCTS for n in ends):
        return None
    stored = _stored(ends, scores)
    ends = [n for n in ends if is_reduction(n) or n.target in PRODUCTS]
    layouts = _Layouts(sorted(scores, key=order.__getitem__), set(products))
    exits = tuple(
        Exit(n, layouts.over(n), n.target in PRODUCTS, n.meta.get("partitioner_tag") == BACKWARD)
        for n in ends
    )
    exits += tuple(Exit(n, frozenset(), False, True) for n in stored)
    wide = [e.node for e in exits if e.product and hinted(e.node.meta["val"].shape[-1]) > MOST_FEATURES]
    wide = [n for n in wide if hinted(n.meta["val"].shape[-2]) > MOST_FEATURES]
    if wide:
        raise Refused(f"{wide[0].name} has rows of more than {MOST_FEATURES} features")
    statistics = [e.node for e in exits if not e.product and e.node not in stored]
    bridges = _bridges(statistics, scores)
    return Region(tuple(products), frozenset(scores), exits, frozenset(bridges))


def _stored(ends: Iterable[fx.Node], scores: set[fx.Node]) -> list[fx.Node]:
    """Return the gradients of scores that others read, such as that of a bias which is as large as the
    scores: a nest stores each. Raises Refused if other scores would have to be stored."""
    stored = dict[fx.Node, None]()
    for node in ends:
        for read in node.all_input_nodes:
            if read not in scores or is_reduction(node) or node.target in PRODUCTS:
                continue
            if read.meta.get("partitioner_tag") != BACKWARD:
                raise Refused(f"{node.name} also reads {read.name}, which would have to be stored")
            stored[read] = None
    return list(stored)


def _bridges(statistics: Iterable[fx.Node], scores: set[fx.Node]) -> set[fx.Node]:
    """Return the small values on the way from row statistics to scores that read them."""
    def readers(node: fx.Node) -> list[fx.Node]:
        return [n for n in node.users if n not in scores and is_pointwise(n)]

    after = reached([n for s in statistics for n in readers(s)], readers)
    before = [n for s in scores for n in s.all_input_nodes if n in after]
    return reached(before, lambda node: [n for n in node.all_input_nodes if n in after])


class _Layouts:
    """The axes of all scores of a region. Tensors that an element-wise operator combines share their axes."""

    def __init__(self, scores: Sequence[fx.Node], products: set[fx.Node]) -> None:
        self.axes, self.same = Axes(), dict[int, int]()
        self.of: dict[fx.Node, Layout] = {}
        for node in scores:
            self.of[node] = self._layout(node, node in products)

    def _layout(self, node: fx.Node, is_product: bool) -> Layout:
        if is_product:
            return tuple(self.axes.new(size) for size in shape_of(node))
        sources = [n for n in node.all_input_nodes if n in self.of]
        first, *others = sources
        if rearrangement(node) is not None and not others:
            moved = self.axes.through(node, self.of[first])
            assert moved is not None
            return moved
        for source in sources:
            if [s for s in shape_of(source) if s != 1] != [s for s in shape_of(node) if s != 1]:
                raise Refused(f"{node.name} has scores of another shape")
        one, *rest = ([d for d in self.of[s] if self.axes.now(d)] for s in sources)
        for dims in rest:
            self._join(one, dims)
        live = iter(one)
        return tuple(() if size == 1 else next(live) for size in shape_of(node))

    def _join(self, one: Sequence[Dim], other: Sequence[Dim]) -> None:
        for a, b in zip(one, other, strict=True):
            a, b = self.axes.now(a), self.axes.now(b)
            if len(a) == len(b):
                for x, y in zip(a, b, strict=True):
                    self.same[self.find(x)] = self.find(y)

    def find(self, axis: int) -> int:
        while axis in self.same and self.same[axis] != axis:
            axis = self.same[axis]
        return axis

    def over(self, node: fx.Node) -> frozenset[int]:
        """Return the axes that an exit is reduced over. Raises Refused if it multiplies scores by scores."""
        sources = [n for n in node.all_input_nodes if n in self.of]
        named = arguments(node)
        layout = self.of[sources[0]]
        factors = factors_of(node.target)
        if factors is None:
            dims = reduced_dims(named, len(layout))
        else:
            sides = [i for i, n in enumerate((factors.left, factors.right)) if named[n] in self.of]
            if len(sides) != 1 or len(sources) != 1:
                raise Refused(f"{node.name} multiplies scores by scores")
            dims = (len(layout) - 1 - sides[0],)
        return frozenset(self.find(a) for d in dims for a in self.axes.now(layout[d]))
