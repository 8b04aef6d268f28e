"""The graph of one chunk: the nodes of a region with fewer rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from fusion_compiler.capture.graphs import fake_mode
from fusion_compiler.ir.chunks import Added, Chunked, Joined, Multiplied, Result, Rows, flattened, wide
from fusion_compiler.ops.schema import sizes_argument
from fusion_compiler.passes.chunks.generated import counted
from fusion_compiler.passes.chunks.region import Region
from fusion_compiler.passes.chunks.rows import Over, Place, factors, shape

aten = torch.ops.aten


def chunked(
    region: Region,
    name: str,
    rows: int,
    chunk: int,
    saved: int,
    exact: frozenset[fx.Node] = frozenset(),
    unit: str = "rows",
) -> Chunked:
    """Return the loop over a region's rows, `chunk` at a time; its inputs are those of the region, in order.

    exact: sums and products over the rows that are returned in float32, as they were added up.
    """
    sizes = {min(chunk, rows), rows % chunk} - {0}
    bodies = {size: _Body(region, size, exact) for size in sorted(sizes, reverse=True)}
    results = next(iter(bodies.values())).results
    modules = {size: body.module for size, body in bodies.items()}
    return Chunked(name, rows, chunk, tuple(region.inputs.values()), results, modules, saved, unit)


class _Body:
    def __init__(self, region: Region, size: int, exact: frozenset[fx.Node]) -> None:
        self.region, self.size, self.exact = region, size, exact
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.returned: dict[fx.Node, int] = {}
        self.mode = fake_mode([n.meta["val"] for n in region.inputs])
        for node, rows in region.inputs.items():
            self.env[node] = self._input(node, rows)
        for node, place in {**dict.fromkeys(region.constants), **region.nodes}.items():
            if place is not Over.PRODUCT:
                self.env[node] = self._copy(node, place)
        self.results = tuple(self._result(node) for node in region.exits)
        self.graph.output(tuple(self.env[n] for n in self.returned))
        self.module = fx.GraphModule({}, self.graph)

    def _input(self, node: fx.Node, rows: Rows | None) -> fx.Node:
        part = self.graph.placeholder(node.name)
        value = node.meta["val"]
        if rows is not None:
            with self.mode:
                value = flattened(value, rows).narrow(rows.stop - 1, 0, self.size)
        part.meta = {**node.meta, "val": value}
        numbers = counted(node)
        return part if rows is None or numbers is None else self._counted(part, rows.stop - 1, numbers[1])

    def _counted(self, part: fx.Node, dim: int, step: int) -> fx.Node:
        """Compute a chunk of i, i + step, ... from its first element, so that no other is read."""
        value = part.meta["val"]
        like = {"dtype": value.dtype, "device": value.device, "requires_grad": False}
        first = self._call(part, aten.slice.Tensor, part, dim, 0, 1)
        steps = self._call(part, torch.ops.prims.iota.default, self.size, start=0, step=step, **like)
        shown = self._call(part, aten.view.default, steps, list(value.shape))
        return self._call(part, aten.add.Tensor, shown, first)

    def _copy(self, node: fx.Node, place: Place | None) -> fx.Node:
        arguments: list[Any] = list(map_arg(node.args, lambda n: self.env[n]))
        options = dict(map_arg(node.kwargs, lambda n: self.env[n]))
        sizes = sizes_argument(node.target)
        if isinstance(place, Rows) and sizes is not None:
            arguments[sizes] = place.counting(self.size, shape(node))
        elif place is Over.SUM and node.meta["val"].is_floating_point():
            options["dtype"] = wide(node.meta["val"].dtype)
        if node.target in (aten.view.default, aten._unsafe_view.default):
            return self._view(node, *arguments)
        return self._call(node, node.target, *arguments, **options)

    def _view(self, node: fx.Node, source: fx.Node, sizes: list[int]) -> fx.Node:
        """View a chunk, which may be a part of a larger tensor, in other sizes, or copy it if needed."""
        try:
            return self._call(node, aten.view.default, source, sizes)
        except (RuntimeError, ValueError):
            source = self._call(node, aten.clone.default, source, memory_format=torch.contiguous_format)
            return self._call(node, aten.view.default, source, sizes)

    def _call(self, like: fx.Node, target: Any, *arguments: Any, **options: Any) -> fx.Node:
        values = map_arg((arguments, options), lambda n: n.meta["val"])
        with self.mode, torch.no_grad():
            value = target(*values[0], **values[1])
        call = self.graph.create_node("call_function", target, arguments, options, like.name)
        call.meta = {**like.meta, "val": value}
        return call

    def _result(self, node: fx.Node) -> Result:
        place, value = self.region.nodes[node], node.meta["val"]
        dtype = wide(value.dtype) if node in self.exact else value.dtype
        if place is Over.PRODUCT:
            left, right = (self._returns(n) for n in factors(node))
            return Multiplied(left, right, dtype)
        source = self._returns(node)
        return Joined(source, place, shape(node)) if isinstance(place, Rows) else Added(source, dtype)

    def _returns(self, node: fx.Node) -> int:
        return self.returned.setdefault(node, len(self.returned))


def examples(body: fx.GraphModule) -> Sequence[Any]:
    """Return the arguments of a body as FakeTensors."""
    return [node.meta["val"] for node in body.graph.find_nodes(op="placeholder")]
