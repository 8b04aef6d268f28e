"""Compile the graphs within a graph: bodies of loops over chunks of rows, and branches of control flow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from fusion_compiler.capture.graphs import copied, form_of
from fusion_compiler.ir.chunks import Chunked
from fusion_compiler.ir.graph_info import GraphInfo, Phase
from fusion_compiler.passes.chunks.body import examples
from fusion_compiler.passes.fuse.step_time import StepTime
from fusion_compiler.stitch.higher_order import compiled_graph, inner_graphs

CompileGraph = Callable[[fx.GraphModule, Any, GraphInfo], Callable[..., Any]]
Predicted = tuple[int, StepTime]  # for a chunk's body: the bytes that it uses at once, and its time


def with_chunks(
    gm: fx.GraphModule, info: GraphInfo, compile_graph: CompileGraph, predicted: Mapping[str, Predicted]
) -> fx.GraphModule:
    """Return `gm` with compiled bodies of its loops over chunks of rows; `gm` itself if it has none.

    A body's plan is named for the graph, the logits and the rows. A smaller last chunk has its own body.
    Nests of several layers that compute the same share a plan, which is named for the first of them.
    predicted: receives an entry for each body when `compile_graph` compiles it.
    """
    loops = [node for node in gm.graph.nodes if isinstance(node.target, Chunked)]
    if not loops:
        return gm
    copy, nodes = copied(gm)
    alike: dict[object, Chunked] = {}
    for node in loops:
        loop: Chunked = node.target
        form = loop.name if loop.unit else tuple(map(form_of, loop.bodies.values()))
        if (other := alike.get(form)) is not None:
            nodes[node].target = replace(other, name=loop.name, saved=loop.saved)
            continue
        names = {rows: f"{loop.name}.{rows}_{loop.unit}" if loop.unit else loop.name for rows in loop.bodies}
        infos = {rows: inner_info(name, info, one_nest=not loop.unit) for rows, name in names.items()}
        runs = {rows: compile_graph(body, examples(body), infos[rows]) for rows, body in loop.bodies.items()}
        bodies = {rows: predicted[each.name] for rows, each in infos.items()}
        nodes[node].target = alike[form] = replace(
            loop,
            runs=runs,
            peak=max(peak for peak, _ in bodies.values()),
            host_us=sum(bodies[rows][1].host_us for rows in loop.sizes),
            gpu_us=sum(bodies[rows][1].gpu_us for rows in loop.sizes),
        )
    copy.recompile()
    return copy


def with_inner_graphs(gm: fx.GraphModule, info: GraphInfo, compile_graph: CompileGraph) -> fx.GraphModule:
    """Return `gm` with compiled branches and loop bodies of its control flow; `gm` itself if it has none.

    The plan of each is named for the graph and the branch.
    """
    inner = inner_graphs(gm)
    if not inner:
        return gm
    copy, _ = copied(gm)
    for name, graph in inner.items():
        about = inner_info(name, info)
        setattr(copy, name, compiled_graph(graph, lambda g, i=about: compile_graph(g, examples(g), i)))
    copy.recompile()
    return copy


def inner_info(name: str, info: GraphInfo, *, one_nest: bool = False) -> GraphInfo:
    """Return the description of a graph within the graph that `info` describes."""
    digest = f"{info.digest} {name}" if info.digest else ""
    return GraphInfo(
        f"{info.name}.{name}", Phase.CHUNK, (), 0,
        from_disk=info.from_disk, digest=digest, one_nest=one_nest,
    )  # fmt: skip
