"""Attention that PyTorch has no call for becomes one loop nest forward, and a few backward.

How is it represented? An operator of our own above autograd would have to carry a program of its scores, and
derive the gradient of that. Autograd has done so already in the joint graph of forward and backward, whatever
the scores are: soft-capped, biased, masked, dropped, two softmaxes, a sigmoid. So the region of the scores is
read from the joint graph (`region.py`), and each of its nests becomes one call of a graph of plain ATen
(`body.py`), as a loop over chunks does. That graph is the reference, runs on any device, has the sizes of the
call as arguments, and is kept on disk like others; the partitioner sees a call, of which results, and never
scores, are saved. The planner makes one kernel of a nest (`passes/lower/chains.py`).

Row sums of the gradient need no nest where they are

    sum over j of p[i, j] * (do @ v^T)[i, j]   =   sum over e of do[i, e] * o[i, e]    with o = p @ v

which is used for 16-bit results. In float32 its rounding would be the largest error of a gradient: the terms
p * (do @ v^T) no longer cancel exactly with their sum.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from fusion_compiler.capture.graphs import arguments, emit, form_of
from fusion_compiler.ir.chunks import Chunked, Whole
from fusion_compiler.ir.dag import build
from fusion_compiler.ir.decision import Decision, Decisions, Outcome
from fusion_compiler.ir.graph_pass import Level, Pass, Refused
from fusion_compiler.ir.layout import is_view_node
from fusion_compiler.ir.sources import source_of
from fusion_compiler.ir.walk import reached
from fusion_compiler.ops.schema import HALVES, is_cast
from fusion_compiler.passes.chunks.chunk import sort
from fusion_compiler.passes.lower.chains import lower_chain
from fusion_compiler.passes.lower.space import Illegal
from fusion_compiler.passes.nests.arithmetic import hoist, is_positive, rows_of, simplify
from fusion_compiler.passes.nests.body import Nest, nests_of
from fusion_compiler.passes.nests.copies import read_copy, sizes
from fusion_compiler.passes.nests.region import BACKWARD, FORWARD, PRODUCTS, Region, count, is_scores, regions
from fusion_compiler.schedule.chains import Chain

_aten = torch.ops.aten
RULE = "general attention"
_COPIES = (_aten.alias.default, _aten.clone.default, _aten.detach.default)


def make_nests(graph: fx.Graph) -> Decisions:
    """Replace, in place, the scores of all attentions in a joint graph by calls of one nest each."""
    products = (node for t in PRODUCTS for node in graph.find_nodes(op="call_function", target=t))
    if not any(map(is_scores, products)):
        return ()
    for node in graph.find_nodes(op="call_function", target=_aten.sum.dim_IntList):
        _sum_result(node)
    split_sums(graph)
    graph.eliminate_dead_code()
    notes, checked = list[Decision](), set[object]()
    for region in regions(graph):
        if not isinstance(region, Region):
            notes.append(Decision(RULE, region[0].name, Outcome.REFUSED, region[1]))
            continue
        subject = region.products[0].name
        try:
            notes.append(Decision(RULE, subject, Outcome.DONE, _replace(graph, region, checked)))
        except Refused as reason:
            notes.append(Decision(RULE, subject, Outcome.REFUSED, str(reason)))
    return tuple(notes)


def _replace(graph: fx.Graph, region: Region, checked: set[object]) -> str:
    """Put the calls of a region's nests in its place, and return the note. Raises Refused.

    checked: the forms of nests that are known to be chains; receives those of this region.
    """
    order = {node: number for number, node in enumerate(graph.nodes)}
    try:
        calls = _calls(region, order, checked)
    except Refused:  # an index of what is computed again may have no form in a nest
        calls = _calls(region, order, checked, recompute=False)
    saved = max(_bytes(n) for n in region.scores)
    items, emitted = dict[fx.Node, fx.Node](), dict[str, fx.Node]()
    for number, call in enumerate(calls):
        name = f"nest_{region.products[0].name}" + (f"_{number}" if number else "")
        call.emit(graph, name, saved, items, emitted)
    sort(graph)
    graph.eliminate_dead_code()
    backward = sum(call.nest.exits[0].backward for call in calls)
    gradients = f" and {backward} backward" if backward else ""
    return f"{len(calls) - backward} nest forward{gradients}, {saved / 1e9:.3f} GB never stored"


def _calls(
    region: Region, order: dict[fx.Node, int], checked: set[object], recompute: bool = True
) -> list[_Call]:
    """Return the calls of a region's nests. Raises Refused if one is no chain of products."""
    nests = nests_of(region, order, recompute)
    for nest in nests:
        _check_order(nest, order)
    calls = [_Call.of(nest, region) for nest in nests]
    for call in calls:
        if (form := form_of(call.body)) not in checked:
            _check_chain(call.nest, call.body)
            checked.add(form)
    return calls


def _bytes(node: fx.Node) -> int:
    return count(node) * node.meta["val"].dtype.itemsize


def _check_chain(nest: Nest, body: fx.GraphModule) -> None:
    """Raise Refused if a nest is no chain of products that one kernel computes."""
    try:
        loops = lower_chain(build(body, source_of))
    except Illegal as error:
        raise Refused(f"{nest.results[0].name} is no loop nest: {error}") from None
    if Chain.of(loops) is None:
        raise Refused(f"{nest.results[0].name} is no chain of products over one axis")


def _check_order(nest: Nest, order: dict[fx.Node, int]) -> None:
    """Raise Refused if something that a nest reads is computed from its results."""
    ends = {e.node for e in nest.exits}
    first = min(order[n] for n in ends)
    late = [n for n in nest.inputs if order[n] > first]
    after = reached(late, lambda n: [i for i in n.all_input_nodes if order[i] >= first]) & ends
    if after:
        raise Refused(f"{min(after).name} feeds an input of the same nest")


@dataclass(frozen=True)
class _Call:
    """A call of a nest.

    before: a graph of the nest's inputs, whose results are values of rows. body: what the nest computes.
    inputs: of `body`, of the region's graph; None stands for a result of `before`, and these are the last.
    """

    nest: Nest
    before: fx.Graph
    body: fx.GraphModule
    inputs: tuple[fx.Node | None, ...]

    @classmethod
    def of(cls, nest: Nest, region: Region) -> _Call:
        body, before = nest.graph(), fx.Graph()
        graph = body.graph
        inputs = dict(zip(graph.find_nodes(op="placeholder"), nest.inputs, strict=True))
        if any(getattr(n.meta["val"], "dtype", None) in HALVES for n in nest.inputs):
            statistics = {mine for mine, node in inputs.items() if node in region.statistics}
            simplify(graph, statistics, {mine for mine in statistics if is_positive(inputs[mine])})
            before = hoist(graph, rows_of(graph, statistics))
            body.recompile()
        return cls(nest, before, body, tuple(map(inputs.get, graph.find_nodes(op="placeholder"))))

    def emit(
        self,
        graph: fx.Graph,
        name: str,
        saved: int,
        items: dict[fx.Node, fx.Node],
        emitted: dict[str, fx.Node],
    ) -> None:
        """Emit the call, and put its results in the place of the exits.

        saved: bytes of scores. items: by exit of the region, the result that stands in its place; receives
        those of this nest. emitted: what is computed before the nests of the region, by its text.
        """
        nest, first = self.nest, self.nest.results[0]
        tag = {"partitioner_tag": BACKWARD if nest.exits[0].backward else FORWARD}
        tag = tag if any("partitioner_tag" in e.node.meta for e in nest.exits) else {}
        with graph.inserting_before(first):
            rows = iter(self._rows(graph, tag, items, emitted))
            inputs = tuple(next(rows) if n is None else items.get(n, n) for n in self.inputs)
            results = tuple(map(Whole, range(len(nest.results))))
            target = Chunked(name, 1, 1, (None,) * len(inputs), results, {1: self.body}, saved, unit="")
            call = graph.create_node("call_function", target, inputs, {}, name)
            call.meta = {**first.meta, **tag, "val": tuple(n.meta["val"] for n in nest.results)}
        for position, node in enumerate(nest.results):
            with graph.inserting_before(node):
                item = graph.call_function(operator.getitem, (call, position))
            item.meta = {**node.meta, **tag}
            items[node] = item
            node.replace_all_uses_with(item)
        for path in filter(None, nest.paths):
            for reader in [u for u in path[0].all_input_nodes[0].users if u is not path[0]]:
                read_copy(path, items[path[-1]], reader)

    def _rows(
        self,
        graph: fx.Graph,
        tag: Mapping[str, str],
        items: Mapping[fx.Node, fx.Node],
        emitted: dict[str, fx.Node],
    ) -> tuple[fx.Node, ...]:
        """Emit what is computed before the nest and not yet emitted, and return its results."""
        values = dict(zip(self.before.find_nodes(op="placeholder"), self.nest.inputs, strict=False))
        copies = {mine: items.get(node, node) for mine, node in values.items()}
        for node in self.before.nodes:
            if node.op == "call_function":
                operands = map_arg((node.args, dict(node.kwargs)), copies.__getitem__)
                text = f"{node.target}{operands}"
                if text not in emitted:
                    emitted[text] = graph.node_copy(node, copies.__getitem__)
                    emitted[text].meta.update(tag)
                copies[node] = emitted[text]
        results = next((n.args[0] for n in self.before.find_nodes(op="output")), ())
        return tuple(copies[n] for n in results)  # type: ignore[index, union-attr]


# -- row sums of gradients ------------------------------------------------------------------------------


def split_sums(graph: fx.Graph) -> None:
    """Let sums of scores over several dimensions, in place, sum rows before all else: a nest has row sums."""
    scores = {n for region in regions(graph) if isinstance(region, Region) for n in region.scores}
    for node in graph.find_nodes(op="call_function", target=_aten.sum.dim_IntList):
        named = arguments(node)
        rank = len(named["self"].meta["val"].shape)
        dims = sorted(d % rank for d in named["dim"])
        if named["self"] in scores and len(dims) > 1 and named.get("dtype") is None:
            with graph.inserting_before(node):
                rows = emit(node, _aten.sum.dim_IntList, named["self"], dims[-1:], True)
            rows.meta = {**node.meta, **rows.meta}
            node.args = (rows, *node.args[1:])


def _sum_result(node: fx.Node) -> None:
    """Compute a row sum of p * (do @ v^T) as that of do * (p @ v), in place."""
    named = arguments(node)
    term, rank = named["self"], len(named["self"].meta["val"].shape)
    if (
        not isinstance(term, fx.Node)
        or term.target is not _aten.mul.Tensor
        or [d % rank for d in named["dim"]] != [rank - 1]
    ):
        return
    one, other = _both(term)
    for gradient, weights in ((one, other), (other, one)):
        for product, factors in _linear(gradient):
            for result in _products_of(weights, factors):
                if _emit_sum(node, product, result):
                    return


def _both(node: fx.Node) -> tuple[Any, Any]:
    """Return the operands of a call of two."""
    return node.args[0], node.args[1]


def _linear(node: Any) -> Iterable[tuple[fx.Node, tuple[fx.Node, ...]]]:
    """Yield the products that a value is, times some factors, through views and casts. Each product comes
    once: a graph in which values are multiplied again and again has too many ways to it."""
    pending: list[tuple[Any, tuple[fx.Node, ...]]] = [(node, ())]
    seen = set[fx.Node]()
    while pending:
        current, factors = pending.pop()
        if not isinstance(current, fx.Node) or current in seen:
            continue
        seen.add(current)
        if current.target is _aten.bmm.default:
            yield current, factors
        elif _is_copy(current):
            pending.append((current.all_input_nodes[0], factors))
        elif current.target is _aten.mul.Tensor:
            one, other = _both(current)
            if isinstance(one, fx.Node) and isinstance(other, fx.Node):
                pending += [(one, (*factors, other)), (other, (*factors, one))]


def _products_of(node: Any, factors: tuple[fx.Node, ...]) -> Iterable[fx.Node]:
    """Yield the products with a value times the factors on the left, through views and casts."""
    while isinstance(node, fx.Node) and _is_copy(node):
        node = node.all_input_nodes[0]
    pending = [(node, factors)] if isinstance(node, fx.Node) else []
    while pending:
        current, left = pending.pop()
        for user in current.users:
            if user.target is _aten.bmm.default and user.args[0] is current and not left:
                yield user
            elif _is_copy(user) and not _is_backward(user):
                pending.append((user, left))
            elif user.target is _aten.mul.Tensor and not _is_backward(user):
                other = next((a for a in user.args if a is not current), None)
                if other in left:
                    pending.append((user, tuple(n for n in left if n is not other)))


def _is_backward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") == BACKWARD


def _is_copy(node: fx.Node) -> bool:
    return node.op == "call_function" and (
        node.target in _COPIES or is_cast(node.target) or (is_view_node(node) and bool(node.all_input_nodes))
    )


def _emit_sum(node: fx.Node, product: fx.Node, result: fx.Node) -> bool:
    """Emit the sum of do * o in the place of a row sum; return False if they are not of the same values."""
    (gradient, values), (_, read) = _both(product), _both(result)
    rows, features = result.meta["val"].shape[1:]
    if result.meta["val"].dtype not in HALVES:
        return False
    same = _stored(values) is _stored(read) and gradient.meta["val"].shape == result.meta["val"].shape
    transposed = product.meta["val"].shape[1] == rows and values.meta["val"].shape[1] == features
    if not (same and transposed and _is_transposed(values, read)):
        return False
    value = node.meta["val"]
    shape = sizes(node.graph, value.shape)
    if shape is None:
        return False
    with node.graph.inserting_before(node):
        wide = [emit(node, _aten._to_copy.default, n, dtype=value.dtype) for n in (gradient, result)]
        total = emit(node, _aten.sum.dim_IntList, emit(node, _aten.mul.Tensor, *wide), [2])
        total = emit(node, _aten.view.default, total, shape)
    for new in (*wide, total, *total.all_input_nodes, *total.all_input_nodes[0].all_input_nodes):
        new.meta = {**node.meta, **new.meta}
    node.replace_all_uses_with(total)
    return True


def _stored(node: Any) -> Any:
    while isinstance(node, fx.Node) and is_view_node(node):
        node = node.all_input_nodes[0]
    return node


def _is_transposed(one: Any, other: Any) -> bool:
    """True if one factor is the other with its last two dimensions exchanged."""
    a, b = one.meta["val"], other.meta["val"]
    return tuple(a.shape) == (b.shape[0], b.shape[2], b.shape[1]) and (
        a.stride() == (b.stride(0), b.stride(2), b.stride(1)) and a.storage_offset() == b.storage_offset()
    )


GENERAL_ATTENTION = Pass(
    RULE,
    make_nests,
    does="Compute attention that PyTorch has no call for as one nest forward and a few backward.",
    when="scores are computed element by element between two batched products, of 16-bit dtypes on a GPU",
    gains="the scores are never stored",
    rounds_as_eager=False,
    level=Level.JOINT,
)
