"""Attention reads its queries, keys and values where they are, and multiplies its scores once.

    sdpa(contiguous(q), contiguous(k), contiguous(v))   ->   sdpa(q, k, v)
    sdpa(view(x * c), k, v, scale=s)                    ->   sdpa(view(x), k, v, scale=s * c)
    sdpa(q, k, v, mask of crossed rows)                 ->   sdpa(q, k, v, contiguous(mask))

Kernels of attention take any strides whose rows are contiguous, and write their result in the order of the
queries: what a model makes contiguous before the call, it usually transposes back after it. Where a row is
not contiguous, as in a bias that an embedding gives for each pair of positions (T5's), PyTorch takes none of
them: it multiplies in float32 and stores all scores.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from fusion_compiler.capture.graphs import (
    arguments,
    copied,
    emit,
    erase_unused,
    mutated_nodes,
    refuse_strides,
    trace_strides,
)
from fusion_compiler.ir.decision import Decision, Decisions, Outcome
from fusion_compiler.ir.graph_pass import Pass, Refused
from fusion_compiler.passes.rewrites.axes import COPIES, PERMUTATIONS, RESHAPES
from fusion_compiler.passes.rewrites.constants import constant
from fusion_compiler.passes.rewrites.mask_algebra import expression
from fusion_compiler.passes.rewrites.written_attention import no_kernel

_aten = torch.ops.aten
_SDPA = _aten.scaled_dot_product_attention.default
IN_PLACE = "attention operands in place"
SCALE = "scaled scores"
BY_ROWS = "contiguous attention operands"
_ALIGNED = 16  # bytes that kernels of attention load at once


def read_in_place(gm: fx.GraphModule) -> tuple[fx.GraphModule, Decisions]:
    """Drop the copies that attention calls of `gm` (ATen above autograd) read, where nobody else sees it."""
    if not any(_copies(call) for call in gm.graph.find_nodes(op="call_function", target=_SDPA)):
        return gm, ()
    new, _ = copied(gm)
    written = mutated_nodes(new.graph.nodes)
    notes: list[Decision] = []
    for call in new.graph.find_nodes(op="call_function", target=_SDPA):
        for copy, names in _copies(call).items():
            try:
                _drop(call, copy, written)
                notes.append(Decision(IN_PLACE, call.name, Outcome.DONE, f"{names} read where it is"))
            except Refused as reason:
                notes.append(Decision(IN_PLACE, call.name, Outcome.REFUSED, f"{names} copied: {reason}"))
    if not any(note.is_done for note in notes):
        return gm, tuple(notes)
    new.recompile()
    return new, tuple(notes)


def scale_scores(gm: fx.GraphModule) -> tuple[fx.GraphModule, Decisions]:
    """Multiply the scores of attention calls of `gm` instead of their queries or keys by a number.

    The product's operand is then not rounded once more.
    """
    if not any(_factors(call) for call in gm.graph.find_nodes(op="call_function", target=_SDPA)):
        return gm, ()
    new, _ = copied(gm)
    notes: list[Decision] = []
    for call in new.graph.find_nodes(op="call_function", target=_SDPA):
        for name, (product, factor) in _factors(call).items():
            if product.users:  # queries and keys may be one: each has the factor
                product.replace_all_uses_with(product.all_input_nodes[0])
                erase_unused({product, *product.all_input_nodes})
            _multiply(call, factor)
            notes.append(Decision(SCALE, call.name, Outcome.DONE, f"its {name} times {factor:g}"))
    new.recompile()
    return new, tuple(notes)


def make_operands_contiguous(gm: fx.GraphModule) -> tuple[fx.GraphModule, Decisions]:
    """Copy what attention calls of `gm` read across the grain, where that alone keeps them from a kernel."""
    if not any(_crossed(call) for call in gm.graph.find_nodes(op="call_function", target=_SDPA)):
        return gm, ()
    new, _ = copied(gm)
    laid: dict[fx.Node, fx.Node] = {}
    notes: list[Decision] = []
    for call in new.graph.find_nodes(op="call_function", target=_SDPA):
        for operand, names in _crossed(call).items():
            if operand not in laid:
                with new.graph.inserting_before(call):
                    laid[operand] = _by_rows(call, operand)
            try:
                _exchange(call, operand, laid[operand])
                notes.append(Decision(BY_ROWS, call.name, Outcome.DONE, f"{names} copied row by row"))
            except Refused as reason:
                notes.append(Decision(BY_ROWS, call.name, Outcome.REFUSED, f"{names} not copied: {reason}"))
    if not any(note.is_done for note in notes):
        return gm, tuple(notes)
    erase_unused(set(laid.values()))
    new.recompile()
    return new, tuple(notes)


def _crossed(call: fx.Node) -> dict[fx.Node, str]:
    """Operands whose rows are not contiguous, with the names of the arguments that they are, of a call on a
    GPU that PyTorch has a kernel for but for them."""
    named = arguments(call)
    query, mask = named["query"], named["attn_mask"]
    if query.meta["val"].device.type != "cuda" or query.meta["val"].dim() != 4 or named["enable_gqa"]:
        return {}
    if no_kernel(query, named["value"], mask, named["dropout_p"]):
        return {}
    found: dict[fx.Node, str] = {}
    for name in ("query", "key", "value", "attn_mask"):
        node = named[name]
        if node is None:
            continue
        value = node.meta["val"]
        if expression(value.stride(-1)) != 1 and expression(value.shape[-1]) != 1:
            found[node] = f"{found[node]}, {name}" if node in found else name
    return found


def _by_rows(call: fx.Node, operand: fx.Node) -> fx.Node:
    """A contiguous copy, which is spread where the operand is."""
    if operand.target is not _aten.expand.default:
        return emit(call, _aten.contiguous.default, operand)
    source, sizes = operand.args[:2]
    return emit(call, _aten.expand.default, emit(call, _aten.contiguous.default, source), sizes)


def _copies(call: fx.Node) -> dict[fx.Node, str]:
    """Copies that this call alone reads, with the names of its arguments that they are."""
    named = arguments(call)
    found: dict[fx.Node, str] = {}
    for name in ("query", "key", "value"):
        node = named[name]
        if node.target in COPIES - {_aten.alias.default} and list(node.users) == [call]:
            found[node] = f"{found[node]}, {name}" if node in found else name
    return found


def _drop(call: fx.Node, copy: fx.Node, written: set[fx.Node]) -> None:
    """Raises Refused, with the graph as it was."""
    source = copy.all_input_nodes[0]
    if {source, copy} & written:
        raise Refused("the copy keeps it from what is written in place")
    _refuse_strides(source.meta["val"])
    _exchange(call, copy, source)
    erase_unused({copy})


def _exchange(call: fx.Node, old: fx.Node, new: fx.Node) -> None:
    """Have a call read an operand that lies in another way. Raises Refused, with the graph as it was."""
    before = call.args, call.kwargs
    call.replace_input_with(old, new)
    try:
        trace_strides(call, refuse_strides)
    except (Refused, RuntimeError, ValueError) as error:
        call.args, call.kwargs = before
        raise Refused(str(error)) from error


def _refuse_strides(value: torch.Tensor) -> None:
    """Raises Refused for a tensor that no fused kernel reads as it lies."""
    if value.stride(-1) != 1:
        raise Refused("its rows are not contiguous")
    sizes = zip(value.stride()[:-1], value.shape[:-1], strict=True)
    steps = [s for s, size in sizes if size != 1]
    if 0 in steps:
        raise Refused("it is spread over several heads")
    if value.device.type != "cpu" and any(
        n * value.itemsize % _ALIGNED for n in (*steps, value.storage_offset())
    ):
        raise Refused(f"its rows do not begin at multiples of {_ALIGNED} bytes")


def _factors(call: fx.Node) -> dict[str, tuple[fx.Node, float]]:
    """The products of the query and the key with a positive number that nothing else reads."""
    named = arguments(call)
    if named["scale"] is None and type(named["query"].meta["val"].shape[-1]) is not int:
        return {}
    found: dict[str, tuple[fx.Node, float]] = {}
    for name in ("query", "key"):
        node, user = named[name], call
        while node.target in RESHAPES | PERMUTATIONS | COPIES and list(node.users) == [user]:
            node, user = node.all_input_nodes[0], node
        if list(node.users) == [user] and (factor := _factor(node)) is not None:
            found[name] = (node, factor)
    return found


def _factor(node: fx.Node) -> float | None:
    """c of x * c or x / c."""
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


def _multiply(call: fx.Node, factor: float) -> None:
    named = arguments(call)
    width = named["query"].meta["val"].shape[-1]
    scale = 1 / math.sqrt(width) if named["scale"] is None else named["scale"]
    call.kwargs = {**call.kwargs, "scale": scale * factor}


SCALED_SCORES = Pass(
    SCALE,
    scale_scores,
    does="Multiply the scores of attention by a number, instead of its queries or keys.",
    when="the product has no other reader",
    gains="a kernel and one rounding fewer",
    rounds_as_eager=False,
)


OPERANDS_IN_PLACE = Pass(
    IN_PLACE,
    read_in_place,
    does="Let attention read its queries, keys and values where they are.",
    when="a copy makes contiguous what the kernel reads with strides",
    gains="a copy fewer",
)


CONTIGUOUS_OPERANDS = Pass(
    BY_ROWS,
    make_operands_contiguous,
    does="Copy operands of attention whose rows are not contiguous.",
    when="nothing else keeps a fused kernel from taking the call",
    gains="PyTorch would multiply in float32 and store all scores",
    rounds_as_eager=False,
)
