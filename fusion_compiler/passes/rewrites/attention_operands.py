"""Attention reads its queries, keys and values where they are, and multiplies its scores once.

    sdpa(contiguous(q), contiguous(k), contiguous(v))   ->   sdpa(q, k, v)
    sdpa(view(x * c), k, v, scale=s)                    ->   sdpa(view(x), k, v, scale=s * c)
    sdpa(q, k, v, mask of crossed rows)                 ->   sdpa(q, k, v, contiguous(mask))

Kernels of attention take any strides whose rows are contiguous, and write their result in the order of the
queries: what a model makes contiguous before the call, it usually transposes back after it. Where a row is
not contiguous, as in a bias that an embedding gives for each pair of positions (T5's), PyTorch takes none of
these kernels: it multiplies in float32 and stores all scores.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import fx

from fusion_compiler.capture.graphs import arguments, emit, erase_unused, trace_strides
from fusion_compiler.ir.graph_pass import Pass, Refused
from fusion_compiler.passes.rewrites.axes import COPIES, rearrangement
from fusion_compiler.passes.rewrites.constants import constant
from fusion_compiler.passes.rewrites.engine import Nodes, Replacement, Replacements
from fusion_compiler.passes.rewrites.mask_algebra import expression
from fusion_compiler.passes.rewrites.written_attention import no_kernel

_aten = torch.ops.aten
_SDPA = _aten.scaled_dot_product_attention.default
IN_PLACE = "attention operands in place"
SCALE = "scaled scores"
BY_ROWS = "contiguous attention operands"
_ALIGNED = 16  # bytes that kernels of attention load at once


def _in_place(call: fx.Node, written: set[fx.Node]) -> list[Replacement | str]:
    """Drop the copies that only an attention call reads, where no other node sees the difference."""
    edits: list[Replacement | str] = []
    for copy, names in _copies(call).items():
        source = copy.all_input_nodes[0]
        is_written = "the copy keeps it from what is written in place" if {source, copy} & written else ""
        reason = is_written or _unreadable(source.meta["val"])
        drop = Replacement(functools.partial(_drop, call, copy, names), f"{names} read where it is")
        edits.append(f"{names} copied: {reason}" if reason else drop)
    return edits


def _drop(call: fx.Node, copy: fx.Node, names: str, nodes: Nodes) -> fx.Node:
    _exchange(nodes[call], nodes[copy], nodes[copy].all_input_nodes[0], f"{names} copied")
    erase_unused({nodes[copy]})
    return nodes[call]


def _scaled(call: fx.Node, written: set[fx.Node]) -> list[Replacement]:
    """Multiply the scores of an attention call by a number instead of its queries or keys.

    The product's operand is then not rounded once more.
    """
    return [
        Replacement(functools.partial(_scale, call, product, factor), f"its {name} times {factor:g}")
        for name, (product, factor) in _factors(call).items()
    ]


def _scale(call: fx.Node, multiplied: fx.Node, factor: float, nodes: Nodes) -> fx.Node:
    product = nodes[multiplied]
    if product.users:  # queries and keys may be one: each has the factor
        product.replace_all_uses_with(product.all_input_nodes[0])
        erase_unused({product, *product.all_input_nodes})
    named = arguments(nodes[call])
    width = named["query"].meta["val"].shape[-1]
    scale = 1 / math.sqrt(width) if named["scale"] is None else named["scale"]
    nodes[call].kwargs = {**nodes[call].kwargs, "scale": scale * factor}
    return nodes[call]


def _by_rows(call: fx.Node, written: set[fx.Node]) -> list[Replacement]:
    """Copy operands whose rows are not contiguous, if only these keep an attention call from a kernel."""
    return [
        Replacement(functools.partial(_copy, call, operand, names), f"{names} copied row by row")
        for operand, names in _crossed(call).items()
    ]


def _copy(call: fx.Node, operand: fx.Node, names: str, nodes: Nodes) -> fx.Node:
    laid = _contiguous(nodes[call], nodes[operand])
    try:
        _exchange(nodes[call], nodes[operand], laid, f"{names} not copied")
    finally:
        erase_unused({laid, *laid.all_input_nodes})
    return nodes[call]


def _crossed(call: fx.Node) -> dict[fx.Node, str]:
    """Return {operand whose rows are not contiguous: names of the arguments that it is} of a call on a GPU.

    It is empty for a call that no kernel would take with contiguous operands.
    """
    named = arguments(call)
    query, mask = named["query"], named["attn_mask"]
    if query.meta["val"].device.type != "cuda" or query.meta["val"].dim() != 4 or named["enable_gqa"]:
        return {}
    if no_kernel(query, named["value"], mask, named["dropout_p"]):
        return {}
    operands: dict[fx.Node, str] = {}
    for name in ("query", "key", "value", "attn_mask"):
        node = named[name]
        if node is None:
            continue
        value = node.meta["val"]
        if expression(value.stride(-1)) != 1 and expression(value.shape[-1]) != 1:
            operands[node] = f"{operands[node]}, {name}" if node in operands else name
    return operands


def _contiguous(call: fx.Node, operand: fx.Node) -> fx.Node:
    """Return a contiguous copy, which is expanded if the operand is. Calls of attention share one."""
    is_spread = operand.target is _aten.expand.default
    source: Any = operand.args[0] if is_spread else operand
    sizes = operand.args[1:2] if is_spread else ()
    for copy in source.users:
        for laid in copy.users if is_spread else (copy,):
            is_one = copy.target is _aten.contiguous.default and laid.args[1:] == sizes and laid < call
            if is_one and all(user.target is _SDPA for user in laid.users):
                return laid
    copy = emit(call, _aten.contiguous.default, source)
    return emit(call, _aten.expand.default, copy, *sizes) if is_spread else copy


def _copies(call: fx.Node) -> dict[fx.Node, str]:
    """Return {copy that only this call reads: names of the call's arguments that it is}."""
    named = arguments(call)
    copies: dict[fx.Node, str] = {}
    for name in ("query", "key", "value"):
        node = named[name]
        if node.target in COPIES - {_aten.alias.default} and list(node.users) == [call]:
            copies[node] = f"{copies[node]}, {name}" if node in copies else name
    return copies


def _exchange(call: fx.Node, old: fx.Node, new: fx.Node, otherwise: str) -> None:
    """Let a call read `new`, which has other strides than `old`.

    Raises Refused, with the graph as it was and a text that begins with `otherwise`.
    """
    before = call.args, call.kwargs
    call.replace_input_with(old, new)
    try:
        trace_strides(call)
    except Refused as error:
        call.args, call.kwargs = before
        raise Refused(f"{otherwise}: {error}") from error


def _unreadable(value: torch.Tensor) -> str:
    """Return why no fused kernel reads a tensor with its strides, or ""."""
    if value.stride(-1) != 1:
        return "its rows are not contiguous"
    sizes = zip(value.stride()[:-1], value.shape[:-1], strict=True)
    steps = [s for s, size in sizes if size != 1]
    if 0 in steps:
        return "it is spread over several heads"
    places = () if value.device.type == "cpu" else (*steps, value.storage_offset())
    is_odd = any(n * value.itemsize % _ALIGNED for n in places)
    return f"its rows do not begin at multiples of {_ALIGNED} bytes" if is_odd else ""


def _factors(call: fx.Node) -> dict[str, tuple[fx.Node, float]]:
    """Return the products of the query and the key with a positive number that nothing else reads."""
    named = arguments(call)
    if named["scale"] is None and type(named["query"].meta["val"].shape[-1]) is not int:
        return {}
    factors: dict[str, tuple[fx.Node, float]] = {}
    for name in ("query", "key"):
        node, user = named[name], call
        while rearrangement(node) and list(node.users) == [user]:
            node, user = node.all_input_nodes[0], node
        if list(node.users) == [user] and (factor := _factor(node)) is not None:
            factors[name] = (node, factor)
    return factors


def _factor(node: fx.Node) -> float | None:
    """Return the factor of x * c or x / c if it is a positive number, else None."""
    if node.target not in (_aten.mul.Tensor, _aten.div.Tensor, _aten.mul.Scalar, _aten.div.Scalar):
        return None
    source, other = node.args[:2]
    if not isinstance(source, fx.Node):
        return None
    before, after = source.meta.get("val"), node.meta["val"]
    if not isinstance(before, torch.Tensor) or (before.dtype, before.shape) != (after.dtype, after.shape):
        return None
    number = constant(other)
    if number is None or not math.isfinite(number) or number <= 0:
        return None
    return number if node.target in (_aten.mul.Tensor, _aten.mul.Scalar) else 1 / number


SCALED_SCORES = Pass(
    SCALE,
    Replacements(SCALE, (_SDPA,), _scaled),
    does="Multiply the scores of attention by a number, instead of its queries or keys.",
    when="the product has no other reader",
    gains="a kernel and one rounding fewer",
    rounds_as_eager=False,
)


OPERANDS_IN_PLACE = Pass(
    IN_PLACE,
    Replacements(IN_PLACE, (_SDPA,), _in_place),
    does="Let attention read its queries, keys and values where they are.",
    when="a copy makes contiguous what the kernel reads with strides",
    gains="a copy fewer",
)


CONTIGUOUS_OPERANDS = Pass(
    BY_ROWS,
    Replacements(BY_ROWS, (_SDPA,), _by_rows),
    does="Copy operands of attention whose rows are not contiguous.",
    when="nothing else keeps a fused kernel from taking the call",
    gains="PyTorch would multiply in float32 and store all scores",
    rounds_as_eager=False,
)
