"""Convolutions in 16 bits read and write channels last where that makes a net faster.

    conv2d(x, w)   ->   conv2d(to_memory_format(x, channels_last), to_memory_format(w, channels_last))

cuDNN's kernels for tensor units and for depthwise convolutions want channels last: given channels first, it
copies the operands and the result of each convolution, or PyTorch takes slower kernels of its own. The order
is decided for a net as a whole, by the times in `ops/convolution_times.py`. Element-wise operators, norms and
pooling hand the order of their operands on, so that only a net's first image, its weights and its results are
copied. A pass of a convolution that is slower with channels last runs with channels first, between copies
(`ops/decompositions/images.py`), and groups that are slow in both orders are padded (`padded_groups.py`).
Sequences, for which PyTorch has no such order, become images of one row.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from fusion_compiler.capture.graphs import (
    aliases,
    arguments,
    emit,
    is_trained,
    mutated_nodes,
    refuse_strides,
    replaced_by,
    stored_in_order,
    trace_again,
)
from fusion_compiler.errors import first_line
from fusion_compiler.ir.decision import Decisions
from fusion_compiler.ir.graph_pass import Pass, Refused
from fusion_compiler.ir.walk import reached
from fusion_compiler.ops.convolution_times import (
    COPY,
    PASSES,
    Convolution,
    convolution_of,
    padded_us,
    padding_refusal,
    shortest,
)
from fusion_compiler.ops.own.channel_order import dimensions_in_memory, to_memory_format
from fusion_compiler.ops.own.group_norm import group_norm
from fusion_compiler.passes.rewrites.engine import Nodes, Site, edited, steps
from fusion_compiler.passes.rewrites.padded_groups import RULE as PADDED_GROUPS
from fusion_compiler.passes.rewrites.padded_groups import convolve_padded

_aten = torch.ops.aten
RULE = "channels last"
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_TARGETS: dict[object, OpOverload] = {
    _aten.conv1d.default: _aten.conv2d.default,
    _aten.conv2d.default: _aten.conv2d.default,
    _aten.conv3d.default: _aten.conv3d.default,
}
_VIEWS = {_aten.view.default, _aten._unsafe_view.default}
FEWEST = 8  # channels: fewer fill no tensor unit


def use_channels_last(gm: fx.GraphModule) -> tuple[fx.GraphModule, Decisions]:
    """Put channels last in the convolutions of `gm` (ATen above autograd) if the whole graph gets faster."""
    convolutions = [node for node in gm.graph.nodes if _is_in_16_bits(node)]
    chosen = [node for node in convolutions if _can_turn(node)]
    trains = is_trained(gm.graph.nodes)
    passes = PASSES if trains else PASSES[:1]
    shapes = {node: shape for node in chosen if (shape := _shape(node)) is not None}
    refusals = {n: padding_refusal(shape, passes) for n, shape in shapes.items() if shape.padded is not None}
    padded = {node: shapes[node] for node, refusal in refusals.items() if not refusal}
    kept = [Site(PADDED_GROUPS, node.name, refusal) for node, refusal in refusals.items() if refusal]
    saved = sum(_saved_us(node, shape, node in padded, passes) for node, shape in shapes.items())
    if not _pays(gm.graph, chosen, saved, trains):
        return edited(gm, kept)
    turned: list[fx.Node] = []

    def turn(nodes: Nodes) -> str:
        orders = {nodes[n]: torch.contiguous_format for n in convolutions if n.meta["val"].dim() > 3}
        orders |= {nodes[n]: _FORMATS[max(n.meta["val"].dim(), 4)] for n in chosen}
        _turn_all(orders, [nodes[n] for n in chosen], {nodes[n]: shape for n, shape in padded.items()})
        turned.extend(chosen)
        return "its channels are innermost"

    def note(shape: Convolution) -> str:
        if not turned:
            raise Refused("")  # for the reason that the note on all convolutions has
        assert shape.padded is not None
        return f"groups of {_text(shape.widths)} channels padded to {_text(shape.padded.widths)}"

    pads = [Site(PADDED_GROUPS, n.name, lambda _, shape=shape: note(shape)) for n, shape in padded.items()]
    return edited(gm, [Site(RULE, tuple(node.name for node in chosen), turn), *pads, *kept])


def _text(widths: tuple[int, int]) -> str:
    return " and ".join(map(str, dict.fromkeys(widths)))


def _turn_all(
    orders: dict[fx.Node, torch.memory_format],
    chosen: Sequence[fx.Node],
    padded: Mapping[fx.Node, Convolution],
) -> None:
    """Put channels last in the chosen convolutions of a graph, and trace what is computed from them again.

    orders: the order in which each convolution is to read its operands. Raises Refused.
    """
    graph = chosen[0].graph
    try:
        images = _convert_inputs(graph, orders)
        behind = _behind(graph, {*images, *chosen})
        _copy_views(behind)
        _restore_results(graph, _lay_out([n for n in behind if n not in images], orders, padded))
    except (RuntimeError, ValueError) as error:
        raise Refused(first_line(error)) from error


def _shape(node: fx.Node) -> Convolution | None:
    named = arguments(node)
    x, weight = (named[name].meta["val"].shape for name in ("input", "weight"))
    return convolution_of(x, weight, named["stride"], named["dilation"], named["groups"])


def _is_in_16_bits(node: fx.Node) -> bool:
    return node.target in _TARGETS and has_tensor_units(arguments(node)["input"].meta["val"])


def _can_turn(node: fx.Node) -> bool:
    """True for images, and for sequences and volumes in one group: in several, channels last is slower."""
    named = arguments(node)
    x, weight = named["input"].meta["val"], named["weight"].meta["val"]
    static = x.dim() == weight.dim() and all(isinstance(n, int) for n in (*x.shape[1:], *weight.shape))
    return static and (named["groups"] == 1 or node.target is _aten.conv2d.default)


def has_tensor_units(x: torch.Tensor) -> bool:
    return x.device.type == "cuda" and x.dtype in (torch.float16, torch.bfloat16)


def _pays(graph: fx.Graph, convolutions: Sequence[fx.Node], saved: float, trains: bool) -> bool:
    """True if channels last saves more time in the convolutions than copies at the graph's ends take."""
    turned = [node for node in convolutions if node.meta["val"].dim() == 4]
    ends = {n for c in turned if (n := c.all_input_nodes[0]).op == "placeholder" and not _is_last(n)}
    ends |= {*graph.output_node().all_input_nodes} & {*_behind(graph, turned)}
    copies = sum(_copy_us(node) for node in ends) * (2 if trains else 1)
    return saved > copies or any(map(_gains, convolutions))


def _saved_us(node: fx.Node, shape: Convolution, padded: bool, passes: Sequence[str]) -> float:
    last = _is_last(node.all_input_nodes[0])
    before = sum(shortest(shape, name, last) for name in passes)
    return before - sum(padded_us(shape, name) if padded else shortest(shape, name, True) for name in passes)


def _copy_us(node: fx.Node) -> float:
    value = node.meta["val"]
    image = isinstance(value, torch.Tensor) and value.dim() == 4
    sizes = [n if isinstance(n, int) else 1 for n in value.shape] if image else [0]
    return 1e6 * 2 * 2 * torch.Size(sizes).numel() / COPY


def _is_last(node: fx.Node) -> bool:
    return node.meta["val"].stride(1) == 1


def _gains(node: fx.Node) -> bool:
    """True if a convolution in one group fills tensor units, whose kernels are faster with channels last."""
    named = arguments(node)
    weight = named["weight"].meta["val"]
    wide = named["groups"] == 1 and min(weight.shape[:2]) >= FEWEST and max(weight.shape[2:]) > 1
    return wide and not _is_last(node.all_input_nodes[0])


def _behind(graph: fx.Graph, sources: Collection[fx.Node]) -> list[fx.Node]:
    """Return `sources` and all nodes that are computed from them, in order."""
    dependent = reached(sources, lambda node: node.users)
    return [node for node in graph.nodes if node in dependent]


def _convert_inputs(graph: fx.Graph, orders: dict[fx.Node, torch.memory_format]) -> set[fx.Node]:
    """Convert each image that is an input of the graph once, for all that reads it; return the copies.

    An input that is written or viewed keeps its other readers, and convolutions copy it for themselves.
    """
    written = mutated_nodes(graph.nodes)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    copies: dict[fx.Node, fx.Node] = {}
    for convolution, order in orders.items():
        x = convolution.all_input_nodes[0]
        if x.op != "placeholder" or x in copies or x in written or x.meta["val"].dim() < 4:
            continue
        if any(user.op == "output" or x in aliases(user) for user in x.users):
            continue
        with graph.inserting_before(first):
            copies[x] = copy = _in_order(x, x, order)
        if copy is not x:
            x.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)
    return {copy for x, copy in copies.items() if copy is not x}


def _lay_out(
    behind: Sequence[fx.Node],
    orders: Mapping[fx.Node, torch.memory_format],
    padded: Mapping[fx.Node, Convolution],
) -> dict[fx.Node, Any]:
    """Give each convolution its operands in its order, those of `padded` with padded groups, and trace the
    nodes behind it again.

    Returns the values that the nodes had before. Raises Refused where another operator would see the strides.
    """
    values: dict[fx.Node, Any] = {}
    for node in behind:
        value = node.meta.get("val")
        if node in orders:
            node = _turn(node, orders[node], padded.get(node))
        elif node.target is _aten.group_norm.default:
            node = _keep_order(node)
        elif node.target is _aten.mean.dim:
            node = _average(node)
        elif node.op == "call_function":
            refuse_strides(node)
            trace_again(node)
        values[node] = value
    return values


def _turn(node: fx.Node, order: torch.memory_format, padded: Convolution | None) -> fx.Node:
    """Replace a convolution by one whose operands lie in `order`, its groups padded if `padded` is its shape;
    return the node that has the result's shape."""
    named = arguments(node)
    x, weight, bias = named["input"], named["weight"], named["bias"]
    geometry = [list(named[n]) for n in ("stride", "padding", "dilation")]
    with node.graph.inserting_before(node):
        if one_row := weight.meta["val"].dim() == 3:
            x, weight = (emit(node, _aten.unsqueeze.default, n, 2) for n in (x, weight))
            geometry = [[fill, *sizes] for fill, sizes in zip((1, 0, 1), geometry, strict=True)]
        x, weight = (_in_order(node, operand, order) for operand in (x, weight))
        if padded is not None:
            result = convolve_padded(node, x, weight, padded)
        else:
            result = emit(node, _TARGETS[node.target], x, weight, bias, *geometry, named["groups"])
        if one_row:
            result = emit(node, _aten.squeeze.dim, result, 2)
    return replaced_by(node, result)


def _in_order(node: fx.Node, operand: fx.Node, order: torch.memory_format) -> fx.Node:
    if operand.meta["val"].is_contiguous(memory_format=order):
        return operand
    return emit(node, to_memory_format, operand, order)


def _keep_order(node: fx.Node) -> fx.Node:
    """Replace a norm of groups by one that keeps the order of its input; return its result's node."""
    named = arguments(node)
    with node.graph.inserting_before(node):
        norm = emit(node, group_norm, *(named[n] for n in ("input", "weight", "bias", "num_groups", "eps")))
        return replaced_by(node, emit(node, operator.getitem, norm, 0))


def _average(node: fx.Node) -> fx.Node:
    """Replace a mean over pixels by one of a view that has the image's dimensions as they lie in memory.

    Its gradient, an image of equal pixels, then lies as the image does. Returns the result's node.
    """
    named = arguments(node)
    x, keepdim = named["self"], named["keepdim"]
    order = dimensions_in_memory(x.meta["val"])
    dims = [d % len(order) for d in named["dim"] or order]
    kept = [d for d in order if d not in dims]
    if order == sorted(order) or kept != sorted(kept):
        trace_again(node)
        return node
    with node.graph.inserting_before(node):
        turned = emit(node, _aten.permute.default, x, order)
        dims = [order.index(d) for d in dims]
        mean = emit(node, _aten.mean.dim, turned, dims, keepdim, dtype=named["dtype"])
        if keepdim:
            mean = emit(node, _aten.permute.default, mean, [order.index(d) for d in range(len(order))])
        return replaced_by(node, mean)


def _copy_views(behind: Sequence[fx.Node]) -> None:
    """Turn views into reshapes, which may copy, except for views whose memory is written later."""
    written = mutated_nodes(behind)
    for i, node in enumerate(behind):
        if node.target not in _VIEWS:
            continue
        shown = aliases(node)
        if shown.isdisjoint(written) or shown.isdisjoint(mutated_nodes(behind[i + 1 :])):
            node.target = _aten.reshape.default


def _restore_results(graph: fx.Graph, values: dict[fx.Node, Any]) -> None:
    """Give the results the strides of `values`. Raises Refused if one is a part of a larger tensor."""
    output = graph.output_node()
    for node in set(output.all_input_nodes) & values.keys():
        value = values[node]
        if not isinstance(value, torch.Tensor) or value.dim() < 3:
            continue
        with graph.inserting_before(output):
            back = stored_in_order(node, node, value)
        if steps(back.meta["val"]) != steps(value):
            raise Refused(f"{node.name} is a part of a larger tensor")
        output.replace_input_with(node, back)


CHANNELS_LAST = Pass(
    RULE,
    use_channels_last,
    does="Compute 16-bit convolutions with channels last.",
    when="the table of convolution times says that the net becomes faster",
)
