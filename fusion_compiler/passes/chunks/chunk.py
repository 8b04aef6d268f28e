"""Losses of large logits run one chunk of rows after the other, so that the logits are never stored whole.

    logits = mm(h, w)                                     loss, dh, dw = chunked(h, w, labels)
    loss = sum(f(logits, labels)) / count            ->
    dlogits = g(logits, labels, gradient)                 dh * gradient
    dh, dw = mm(dlogits, w.T), mm(h.T, dlogits)           dw * gradient

This is a pass over the joint graph of forward and backward. Where the gradients are proven to be proportional
to that of the loss, they are computed in the forward pass, for a gradient of one; the products are then the
same. Elsewhere backward computes the logits again, one product more: there the gradient differs from row to
row, depends on a result of all rows, or is in float16, where it is scaled before it is rounded so that small
numbers survive.

Hsu et al., "Liger Kernel", 2024, section 3.2; Inductor's auto-chunker.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fusion_compiler.capture.graphs import ancestors, emit, fake_mode
from fusion_compiler.ir.chunks import Added, Chunked, Multiplied, Result, Rows
from fusion_compiler.ir.decision import Decision, Decisions, Outcome
from fusion_compiler.ir.graph_pass import Level, Pass
from fusion_compiler.ops.decompositions.tensors import hinted
from fusion_compiler.passes.chunks.body import chunked
from fusion_compiler.passes.chunks.generated import number_in, of_sizes
from fusion_compiler.passes.chunks.linear import linear
from fusion_compiler.passes.chunks.region import (
    OF_A_MATRIX,
    AnotherError,
    RefusedError,
    Region,
    Survey,
    backward_of,
    dependents,
)
from fusion_compiler.passes.chunks.rows import factors, is_product, shape

aten = torch.ops.aten
RULE = "chunked loss"


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits that say which logits are worth a loop, and how large its chunks are.

    bytes: the least size of logits. width: the least number of times that logits are as wide as the hidden
    states; in narrower ones the sums of the weight's gradient, 8 bytes read and written a chunk for each 2 of
    a weight, move too much. rows: of a chunk, about. A product over `rows` rows takes 2 * rows operations for
    each number that it adds to, 8 bytes read and written: 2048 rows are 512 operations a byte, twice what an
    H200 does while it moves one. columns: of a chunk of the logits' columns, about; the sums over such chunks
    are as wide as the hidden states. alignment: columns of a chunk are a multiple of it, as products over
    other numbers of columns are slow.
    """

    bytes: int = 256 << 20
    width: int = 6
    rows: int = 2048
    columns: int = 16384
    alignment: int = 64

    def are_met(self, rows: int, width: int, dtype: torch.dtype, hidden: float = 0) -> bool:
        """True if logits are worth a loop. hidden: the width of the hidden states."""
        is_large = dtype.is_floating_point and rows * width * dtype.itemsize >= self.bytes
        return is_large and width >= self.width * hidden and rows >= 2 * self.rows

    def chunk(self, rows: int) -> int:
        """Return the rows of a chunk, so that chunks are equal if possible; else the last is smaller."""
        least = math.ceil(rows / self.rows)
        equal = (n for n in range(least, 2 * least) if rows % n == 0)
        return math.ceil(rows / next(equal, least))

    def slice(self, columns: int) -> int:
        """Return the columns of a chunk; the last chunk has the remaining ones."""
        each = math.ceil(columns / math.ceil(columns / self.columns))
        return math.ceil(each / self.alignment) * self.alignment


LIMITS = Limits()


def chunk_losses(graph: fx.Graph) -> Decisions:
    """Cut into chunks, in place, all large logits of a joint or an inference graph that only a loss needs."""
    notes: list[Decision] = []
    gradients = backward_of(graph)
    large = [n for n in graph.nodes if is_product(n) and n not in gradients and _is_large(n)]
    for node in large:
        if not node._erased:
            with contextlib.suppress(_NoLossError):
                notes.append(_chunk(graph, node))
    return tuple(notes)


def _is_large(node: fx.Node) -> bool:
    rows, width, hidden = map(hinted, (*shape(node), shape(factors(node)[0])[1]))
    return LIMITS.are_met(rows, width, node.meta["val"].dtype, hidden)


class _NoLossError(Exception):
    """The product is that of a hidden layer: no loss is computed from it."""


def _chunk(graph: fx.Graph, node: fx.Node) -> Decision:
    sizes: tuple[Any, ...] = shape(node)
    try:
        if not all(isinstance(n, int) for n in (*sizes, *shape(factors(node)[0]))):
            raise RefusedError("its sizes vary from call to call")
        note = Rewriter(graph, node).run()
    except RefusedError as reason:
        if not _has_loss(graph, node):
            raise _NoLossError from reason
        return Decision(RULE, node.name, Outcome.REFUSED, f"{node.name} {sizes} is stored whole: {reason}")
    return Decision(RULE, node.name, Outcome.DONE, note)


def _has_loss(graph: fx.Graph, logits: fx.Node) -> bool:
    """True if the forward pass computes something smaller from logits."""
    values = (n.meta.get("val") for n in dependents(graph, [logits]) - backward_of(graph))
    size = logits.meta["val"].numel()
    return any(isinstance(v, torch.Tensor) and 2 * v.numel() <= size for v in values)


class Rewriter:
    """One region of a graph and the loops that take its place.

    replacements: the node that is read in place of another: a result of a loop, or a copy for a gradient of
    one. columns: True if the loop is over the logits' columns, which are then what names call rows.
    """

    def __init__(
        self, graph: fx.Graph, logits: fx.Node, where: Rows = OF_A_MATRIX, *, columns: bool = False
    ) -> None:
        self.graph, self.logits, self.columns = graph, logits, columns
        self.replacements: dict[fx.Node, fx.Node] = {}
        self.survey = Survey(graph, (logits,), where)

    def run(self) -> str:
        """Rewrite the graph and return a note of it. Raises RefusedError, with the graph as it was."""
        while True:
            try:
                return self._cut()
            except AnotherError as error:
                self.survey = Survey(self.graph, (*self.survey.logits, error.product))

    def _cut(self) -> str:
        survey = self.survey
        backward = [n for n in survey.frontier if n in survey.backward]
        forward = [n for n in survey.frontier if n not in survey.backward]
        if not forward or any(is_product(n) for n in forward):
            raise _NoLossError
        if not backward:
            loop = self.looped(survey.region(forward))
            self._fill()
            self.replace(*loop)
            return self._text(loop[1], "")
        try:
            factor = self._factor(backward)
            loop = self.looped(survey.region(survey.frontier), frozenset(backward))
        except RefusedError as reason:
            again = self.looped(survey.region(backward, saved=True))
            first = self.looped(survey.region(forward, wanted=again[0].inputs))
            self._fill()
            self.replace(*first)
            self.replace(*again)
            return self._text(first[1], f"; computed again in backward: {reason}")
        self._fill()
        self._make_unit(loop[0], factor)
        self.replace(*loop, factor)
        return self._text(loop[1], "; gradients made in the forward pass")

    def _text(self, loop: Chunked, how: str) -> str:
        names = ", ".join(n.name for n in self.survey.logits)
        return f"{names} {shape(self.logits)} in {loop.size}{how}"

    def _factor(self, backward: Sequence[fx.Node]) -> fx.Node:
        """Return the scalar that all gradients of the region are proportional to. Raises RefusedError."""
        if self.logits.meta["val"].dtype is torch.float16:
            raise RefusedError("gradients in float16 are scaled before they are rounded")
        sources = [t for t in self.survey.tangents if not dependents(self.graph, [t]).isdisjoint(backward)]
        if len(sources) != 1:
            raise RefusedError(f"the gradients of {len(sources)} results enter")
        (factor,) = sources
        if shape(factor) != ():
            raise RefusedError("the loss has a gradient for each row")
        if not linear(self.graph, factor).issuperset(backward):
            raise RefusedError("the gradients are not proportional to the loss's")
        return factor

    def _fill(self) -> None:
        """Replace ones_like(x) by full(x's sizes, 1), which reads no x.

        The number of labels, a sum of such ones, can then be computed before the loop.
        """
        for node in filter(of_sizes, list(self.graph.nodes)):
            if node.all_input_nodes:
                with self.graph.inserting_before(node):
                    full = _full(node, number_in(node))
                node.replace_all_uses_with(full)
                self.replacements[node] = full

    def _make_unit(self, region: Region, factor: fx.Node) -> None:
        """Compute the region's inputs that depend on the loss's gradient in the forward pass, for a gradient
        of one."""
        backward, order = self.survey.backward, self.survey.order
        needed = {a for n in region.inputs if n in backward for a in ancestors(n)} & backward
        for node in sorted(needed, key=order.__getitem__):
            with self.graph.inserting_before(region.exits[0]):
                if node is factor:
                    copy = _full(node, 1)
                else:
                    copy = self.graph.node_copy(node, lambda n: self.replacements.get(n, n))
            copy.meta = {**node.meta, **_FORWARD}
            self.replacements[node] = copy

    def looped(self, region: Region, exact: frozenset[fx.Node] = frozenset()) -> tuple[Region, Chunked]:
        """Return a region and the loop that takes its place. exact: the results that are not yet rounded to
        16 bits. Raises RefusedError."""
        for node in region.exits:
            if not node.meta["val"].is_contiguous():
                raise RefusedError(f"{node.name} is not contiguous")
        survey = self.survey
        wide = [n.meta["val"] for n in survey.rows_of if survey.is_wide(n) and n not in survey.backward]
        if self.logits.op == "placeholder":  # for a gradient: the tensors that products read
            read = (n for end in survey.ends for n in end.all_input_nodes if n in survey.rows_of)
            wide = [n.meta["val"] for n in read if survey.is_wide(n)]
        saved = max(value.numel() * value.dtype.itemsize for value in wide)
        size = LIMITS.slice(survey.rows) if self.columns else LIMITS.chunk(survey.rows)
        unit = "columns" if self.columns else "rows"
        return region, chunked(region, self.logits.name, survey.rows, size, saved, exact, unit)

    def replace(self, region: Region, loop: Chunked, factor: fx.Node | None = None) -> None:
        """Put a loop's results in the place of the region's, the gradients among them times `factor`."""
        survey, graph = self.survey, self.graph
        backward = factor is None and all(n in survey.backward for n in region.exits)
        origin = (region.exits if backward else survey.logits)[0].meta
        tag = {} if backward else _FORWARD
        with graph.inserting_before(region.exits[0]):
            inputs = tuple(self.replacements.get(n, n) for n in region.inputs)
            call = graph.create_node("call_function", loop, inputs, {}, loop.__name__)
            values = tuple(_value(n, result) for n, result in zip(region.exits, loop.results, strict=True))
            call.meta = {**origin, **tag, "val": values}
        for position, node in enumerate(region.exits):
            with graph.inserting_before(node):
                item = graph.call_function(operator.getitem, (call, position))
                item.meta = {**node.meta, **tag, "val": values[position]}
                if factor is not None and node in survey.backward:
                    item = _times(item, factor, node)
            node.replace_all_uses_with(item)
            self.replacements[node] = item
        sort(graph)
        graph.eliminate_dead_code()


_FORWARD = {"partitioner_tag": "is_forward"}


def _full(like: fx.Node, number: float | None) -> fx.Node:
    """Emit a tensor like that of a node, filled with a number."""
    value: Any = like.meta["val"]
    options = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
    full = like.graph.call_function(aten.full.default, (list(value.shape), number), options)
    full.meta = dict(like.meta)
    return full


def _value(node: fx.Node, result: Result) -> Any:
    """Return a new FakeTensor of the value that a loop returns for a node."""
    value: Any = node.meta["val"]
    dtype = result.dtype if isinstance(result, Added | Multiplied) else value.dtype
    with fake_mode([value]):
        return torch.empty(value.shape, dtype=dtype, device=value.device)


def _times(value: fx.Node, factor: fx.Node, like: fx.Node) -> fx.Node:
    """Emit value * factor in the dtype of `like`, the node that it replaces."""
    scaled = emit(like, aten.mul.Tensor, value, factor)
    scaled.meta = {**like.meta, **scaled.meta}
    if scaled.meta["val"].dtype != like.meta["val"].dtype:
        scaled = emit(like, aten._to_copy.default, scaled, dtype=like.meta["val"].dtype)
        scaled.meta = {**like.meta, **scaled.meta}
    return scaled


def sort(graph: fx.Graph) -> None:
    """Put every node behind the nodes that it reads, and keep the order otherwise."""
    done: set[fx.Node] = set()
    output = graph.output_node()
    for node in list(graph.nodes):
        stack = [node]
        while stack:
            missing = [n for n in stack[-1].all_input_nodes if n not in done]
            if missing and stack[-1] not in done:
                stack += reversed(missing)
                continue
            first = stack.pop()
            if first not in done and first is not output:
                done.add(first)
                if first.op != "placeholder":
                    output.prepend(first)


CHUNKED_LOSS = Pass(
    RULE,
    chunk_losses,
    does="Compute a loss of large logits in chunks of rows.",
    when="only a loss of the logits is wanted",
    gains="the logits are never stored whole",
    level=Level.JOINT,
)
