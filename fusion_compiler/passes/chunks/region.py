"""The region of a graph that may run one chunk of rows after the other: the logits, and all that reads them.

    mm                  wide: more than half as large as the logits
    |- float, max, exp, sum, log, gather ...        row by row
    |- the same backward, from the loss's gradient  row by row
    |- sums over all rows                           each chunk adds its share
    `- products with the weight (row by row), with the hidden states (over the rows)

The proof is that every reader of a wide tensor works row by row, or is a sum or a product over the rows. It
is read from the graph alone, whatever the loss is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from fusion_compiler.ir.chunks import Rows
from fusion_compiler.passes.chunks.generated import chain, is_generated, of_sizes
from fusion_compiler.passes.chunks.rows import (
    NotByRowsError,
    Over,
    Place,
    is_product,
    operands,
    result,
    shape,
)

OF_A_MATRIX = Rows(0, 1)


class RefusedError(Exception):
    """The logits have to be stored whole; the message is the reason."""


class AnotherError(Exception):
    """Further logits of the same rows belong to the region."""

    def __init__(self, product: fx.Node) -> None:
        super().__init__(product.name)
        self.product = product


@dataclass(frozen=True)
class Region:
    """A part of a graph that runs in chunks.

    nodes: where each has the rows, in the graph's order. inputs: the other nodes that these read, with their
    rows, or None for a tensor that is read whole. exits: the nodes that others read. constants: nodes that
    each chunk computes for itself, from no input.
    """

    nodes: dict[fx.Node, Place]
    inputs: dict[fx.Node, Rows | None]
    exits: tuple[fx.Node, ...]
    constants: tuple[fx.Node, ...] = ()


def dependents(graph: fx.Graph, sources: Iterable[fx.Node]) -> set[fx.Node]:
    """Return `sources` and every node whose value depends on them."""
    dependent = set(sources)
    for node in graph.nodes:
        if not of_sizes(node) and not dependent.isdisjoint(node.all_input_nodes):
            dependent.add(node)
    return dependent


def tangents(graph: fx.Graph) -> list[fx.Node]:
    """Return the gradients that the backward half of a joint graph starts from."""
    return [n for n in graph.find_nodes(op="placeholder") if n.name.startswith("tangents")]


def backward_of(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that depend on the gradients from which the backward half of a joint graph starts."""
    return dependents(graph, tangents(graph))


class Survey:
    """A graph as seen from some logits: where their rows are in all that is computed from them.

    logits: products (rows, vocabulary) of matrices, or stored ones, which have the rows in `where`; all have
    the same rows. rows_of: where a node has the rows, for the nodes that have them. ends: products and sums
    of these, where a region may end.
    """

    def __init__(self, graph: fx.Graph, logits: tuple[fx.Node, ...], where: Rows = OF_A_MATRIX) -> None:
        self.graph, self.logits = graph, logits
        self.rows = math.prod(where.of(shape(logits[0])))
        self.least = min(math.prod(shape(node)) for node in logits) // 2
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.tangents = tangents(graph)
        self.backward = backward_of(graph)
        self.after = dependents(graph, logits)
        self.rows_of: dict[fx.Node, Rows] = {}
        self.ends: dict[fx.Node, Place] = {}
        for node in graph.nodes:
            if node in logits:
                self.rows_of[node] = where
            elif node in self.after:
                self._place(node)

    def _place(self, node: fx.Node) -> None:
        reads = {n: self.rows_of[n] for n in node.all_input_nodes if n in self.rows_of}
        if not reads:
            return
        try:
            if node.op == "output":
                raise NotByRowsError("it is returned")
            place = result(node, reads)
        except NotByRowsError as error:
            self._check(node, reads, error)
            return
        if isinstance(place, Over) or is_product(node):
            self.ends[node] = place
        else:
            self.rows_of[node] = place

    def _check(self, node: fx.Node, reads: Iterable[fx.Node], error: NotByRowsError) -> None:
        """Raise RefusedError if a node that does not work by rows reads a wide tensor.

        It may read small ones, which are stored whole.
        """
        wide = [n for n in reads if self.is_wide(n)]
        if not wide:
            return
        if node.op == "output":
            raise RefusedError(f"the model returns it ({wide[0].name}), where a loss alone would do without")
        if any(n in self.tangents for n in node.all_input_nodes):
            raise RefusedError("the logits are returned, and may have a gradient of their own")
        raise RefusedError(f"{_named(node)} reads {wide[0].name}: {error}") from error

    def needs(self, node: fx.Node, place: Place) -> dict[fx.Node, Rows | None]:
        """Return where each operand of a node has the rows. Raises NotByRowsError."""
        if place is Over.SUM:
            return {n: self.rows_of[n] for n in node.all_input_nodes}
        return operands(node, place)

    def is_wide(self, node: fx.Node) -> bool:
        value = node.meta.get("val")
        return isinstance(value, torch.Tensor) and math.prod(shape(node)) > self.least

    def is_made_of_wide(self, node: fx.Node, rows: Rows) -> bool:
        """True if a node that does not depend on the logits is computed, row by row, from something as large
        as they are: the class numbers that labels are compared with, or the logits of a teacher."""
        stack, seen = [(node, rows)], {node}
        while stack:
            node, rows = stack.pop()
            if node.op != "call_function":
                continue
            if self.is_wide(node):
                return True
            if is_product(node):
                continue
            needed = _operands(node, rows) or {}
            stack += [(n, r) for n, r in needed.items() if r is not None and n not in seen]
            seen |= set(needed)
        return False

    @cached_property
    def frontier(self) -> tuple[fx.Node, ...]:
        """Return the nodes that read a wide tensor and are small, products or sums.

        Nothing else that is computed from wide tensors is needed.
        """
        places = {**self.rows_of, **self.ends}
        return tuple(
            node
            for node in sorted(places, key=self.order.__getitem__)
            if (node in self.ends or not self.is_wide(node))
            and any(n in self.rows_of and self.is_wide(n) for n in node.all_input_nodes)
        )

    def region(
        self, frontier: Iterable[fx.Node], *, saved: bool = False, wanted: Iterable[fx.Node] = ()
    ) -> Region:
        """Return the region of a part of the frontier and of what it is computed from, back to the logits'
        operands.

        saved: small tensors of the forward pass are stored, and not computed again. wanted: nodes that
        another region reads. Raises RefusedError, AnotherError.
        """
        return _Grown(self, frontier, saved).region(frozenset(wanted))


class _Grown:
    """A region grown from its nodes back to its inputs."""

    def __init__(self, survey: Survey, start: Iterable[fx.Node], saved: bool) -> None:
        self.survey, self.saved = survey, saved
        self.nodes: dict[fx.Node, Place] = {}
        self.inputs: dict[fx.Node, Rows | None] = {}
        for node in start:
            self.add(node, survey.rows_of[node] if node in survey.rows_of else survey.ends[node])

    def add(self, node: fx.Node, place: Place) -> None:
        pending = [(node, place)]
        while pending:
            node, place = pending.pop()
            if node in self.nodes:
                if self.nodes[node] != place:
                    raise RefusedError(f"the rows of {_named(node)} are read in two ways")
                continue
            self.nodes[node] = place
            try:
                needed = self.survey.needs(node, place)
            except NotByRowsError as error:
                raise RefusedError(f"{_named(node)}: {error}") from error
            for operand, rows in needed.items():
                if rows is not None and self.inside(operand, rows):
                    pending.append((operand, rows))
                else:
                    self.read(operand, rows)

    def inside(self, node: fx.Node, rows: Rows) -> bool:
        """True if an operand is computed in the region, and not stored."""
        survey = self.survey
        if node in survey.rows_of:
            if survey.rows_of[node] != rows:
                raise RefusedError(f"the rows of {_named(node)} are read in two ways")
            if node.op == "placeholder":
                return False
            return survey.is_wide(node) or not self.saved or node in survey.backward
        if node in survey.after and not self.saved:
            return False
        if survey.is_wide(node) and is_product(node) and rows == Rows(0, 1):
            if node not in survey.backward:
                raise AnotherError(node)
            return False
        return survey.is_made_of_wide(node, rows) and _operands(node, rows) is not None

    def read(self, node: fx.Node, rows: Rows | None) -> None:
        has_rows = node in self.survey.rows_of
        if rows is None and has_rows:
            raise RefusedError(f"all rows read {_named(node)}, which depends on them")
        if node in self.survey.after and not has_rows and not self.saved:
            raise RefusedError(f"{_named(node)} depends on all rows, and each row's gradient on it")
        if self.inputs.setdefault(node, rows) != rows:
            raise RefusedError(f"{_named(node)} is read both row by row and as a whole")

    def region(self, wanted: frozenset[fx.Node]) -> Region:
        order = self.survey.order
        nodes = {n: self.nodes[n] for n in sorted(self.nodes, key=order.__getitem__)}
        generated = [n for n, rows in self.inputs.items() if rows is None and is_generated(n)]
        constants = sorted({c for n in generated for c in chain(n)}, key=order.__getitem__)
        inputs = {n: rows for n, rows in self.inputs.items() if n not in generated}
        exits = tuple(n for n in nodes if self.leaves(n, wanted))
        return Region(nodes, inputs, exits, tuple(constants))

    def leaves(self, node: fx.Node, wanted: frozenset[fx.Node]) -> bool:
        """True if a node is read outside the region.

        Never true of wide nodes, whose readers are all in a region, nor of nodes that do not depend on the
        logits, which stay in the graph.
        """
        if node not in self.survey.after or (node in self.survey.rows_of and self.survey.is_wide(node)):
            return False
        return node in wanted or any(user not in self.nodes for user in node.users)


def _operands(node: fx.Node, rows: Rows) -> dict[fx.Node, Rows | None] | None:
    """Return where the operands of a node have the rows, or None if it does not work by rows."""
    try:
        return operands(node, rows)
    except NotByRowsError:
        return None


def _named(node: fx.Node) -> str:
    return f"{node.name} ({getattr(node.target, '__name__', node.target)})"
