"""Gradients of large stored logits are computed one chunk after the other in backward.

    g = f(logits, labels, loss's gradient)
    dx = mm(g, w)                                ->    dx, dw = chunked(logits, labels, gradient, w, x)
    dw = mm(g.T, x)

Chunks are of columns where possible: the loss's reductions of whole rows are saved, each chunk computes its
rows of dw, and only dx, as narrow as the hidden states, is summed over the chunks.

Logits that are returned beside their loss have to be stored, and their gradient, as large, is at the peak of
a training step. Only products and sums over the rows read it, so that it is never needed as one tensor. The
region is the same as that of a loss (`region.py`), but begins at the stored logits. This is a pass over a
backward graph, where it is known which results have a gradient.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from fusion_compiler.capture.graphs import copied
from fusion_compiler.ir.chunks import Chunked, Rows, wide
from fusion_compiler.ir.decision import Decision, Decisions, Outcome
from fusion_compiler.ir.graph_pass import Level, Pass
from fusion_compiler.passes.chunks import chunk
from fusion_compiler.passes.chunks.one_hot import sum_one_hot
from fusion_compiler.passes.chunks.region import AnotherError, RefusedError, dependents
from fusion_compiler.passes.chunks.rows import Over, factors, is_product, shape

RULE = "chunked gradient"
ALIGNED = 8  # the number of columns is a multiple of it: products over other lengths are slow


def chunk_gradients(graph: fx.Graph) -> Decisions:
    """Split the gradients of all large logits that are arguments of a backward graph into chunks, in
    place."""
    notes: list[Decision] = []
    sum_one_hot(graph)
    for node in large_logits(graph):
        try:
            notes += _chunk(graph, node)
        except (RefusedError, AnotherError) as reason:
            text = f"the gradient of {node.name} {shape(node)} is stored whole: {reason}"
            notes.append(Decision(RULE, node.name, Outcome.REFUSED, text))
    return tuple(notes)


def large_logits(graph: fx.Graph) -> list[fx.Node]:
    """Return the arguments of a backward graph that may be logits worth a loop."""
    return [node for node in graph.find_nodes(op="placeholder") if _may_be_logits(graph, node)]


def _may_be_logits(graph: fx.Graph, node: fx.Node) -> bool:
    """True if an argument is large and of matrix shape, wider than the hidden states by as much as chunked
    logits are, and has a gradient: a tensor as large, computed from it, is multiplied by a narrow one."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or node.name.startswith("tangents"):
        return False
    sizes: tuple[Any, ...] = tuple(value.shape)
    if not all(isinstance(n, int) for n in sizes):
        return False
    size = math.prod(sizes[:-1]), sizes[-1], value.dtype
    return chunk.LIMITS.are_met(*size) and chunk.LIMITS.are_met(*size, _narrowest(graph, node))


def _narrowest(graph: fx.Graph, logits: fx.Node) -> float:
    """Return the least width of the matrices that are multiplied by a tensor as large as the logits and
    computed from them, infinity if there are none."""
    least = math.prod(shape(logits)) // 2
    after = dependents(graph, [logits])
    widths: list[int] = []
    for node in after:
        if is_product(node):
            wide = [n for n in factors(node) if n in after and math.prod(shape(n)) > least]
            others = [n for n in factors(node) if n not in wide]
            widths += [math.prod(shape(n)) // shape(factors(node)[0])[1] for n in others if wide]
    return min(widths, default=math.inf)


def _chunk(graph: fx.Graph, logits: fx.Node) -> Decisions:
    rank = len(shape(logits))
    text = f"the gradient of {logits.name} {shape(logits)} in "
    try:
        if shape(logits)[-1] % ALIGNED:
            raise RefusedError(f"{shape(logits)[-1]} is no multiple of {ALIGNED}")
        loop = _cut(chunk.Rewriter(graph, logits, Rows(rank - 1, rank), columns=True))
        how = ""
    except (RefusedError, AnotherError) as reason:
        how = f"; not of columns: {reason}"
        try:
            loop = _cut(chunk.Rewriter(graph, logits, Rows(0, rank - 1)))
        except (RefusedError, AnotherError) as other:
            raise RefusedError(f"{other}{how}") from other
    if loop is None:
        return ()
    return (Decision(RULE, logits.name, Outcome.DONE, f"{text}{loop.size}{how}"),)


def _cut(rewriter: chunk.Rewriter) -> Chunked | None:
    """Put a loop in the gradient's place and return it, or None if nothing as large is computed.

    Raises RefusedError and AnotherError, with the graph as it was.
    """
    survey, logits = rewriter.survey, rewriter.logits
    if not any(survey.is_wide(n) for n in survey.rows_of if n is not logits):
        return None
    region, loop = rewriter.looped(survey.region(survey.frontier))
    stored = [n.name for n in region.inputs if n.op != "placeholder" and survey.is_wide(n)]
    if stored:  # the gradient of a hidden layer: another tensor of its size is stored anyway
        raise RefusedError(f"{stored[0]}, as large, is stored")
    sums = sum(_wide_bytes(n) for n in region.exits if isinstance(region.nodes[n], Over))
    if 3 * (sums + loop.saved // loop.count) > 2 * loop.saved:
        raise RefusedError(f"sums over its chunks would take {sums / 1e9:.2f} of {loop.saved / 1e9:.2f} GB")
    rewriter.replace(region, loop)
    return loop


def _wide_bytes(node: fx.Node) -> int:
    """Return the bytes of a sum over chunks, which is kept in float32."""
    value = node.meta["val"]
    return value.numel() * wide(value.dtype).itemsize


def with_chunked_gradients(gm: fx.GraphModule) -> tuple[fx.GraphModule, Decisions]:
    """Return (a copy of a backward graph that computes gradients of large logits in chunks, notes).

    Return the graph itself if it has no such logits.
    """
    if not large_logits(gm.graph):
        return gm, ()
    copy, _ = copied(gm)
    notes = chunk_gradients(copy.graph)
    if not any(note.is_done for note in notes):
        return gm, notes
    copy.recompile()
    return copy, notes


CHUNKED_GRADIENT = Pass(
    RULE,
    with_chunked_gradients,
    does="Compute the gradient of large saved logits in chunks of columns.",
    when="a backward graph is given logits whose gradient only products and sums read",
    gains="the gradient of all logits is never stored",
    level=Level.BACKWARD,
)
