"""ReLU behind a convolution, and a sum between them, are computed before the convolution stores its result.

    relu(conv2d(x, w, b))       ->   convolution_relu(x, w, b)
    relu(conv2d(x, w, b) + z)   ->   convolution_relu(x, w, b, z)

By cuDNN, in 16 bits with channels innermost, and where no gradient is wanted (`ir/convolution_relu.py`).
Measured on an H200 over the convolutions of a ResNet-50 with 128 images: the first takes as long as the
convolution alone, the second less than the convolution and a kernel behind it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from fusion_compiler.capture.graphs import (
    ancestors,
    arguments,
    copied,
    emit,
    wants_gradient,
    written_between,
)
from fusion_compiler.ir.convolution_relu import convolution_relu, is_one_kernel
from fusion_compiler.ir.decision import Decision, Decisions, Outcome
from fusion_compiler.ir.graph_pass import Pass
from fusion_compiler.passes.rewrites.innermost_channels import has_tensor_units

_aten = torch.ops.aten
RULE = "convolution and ReLU"
_RELUS = (_aten.relu.default, _aten.relu_.default)
_SUMS = (_aten.add.Tensor, _aten.add_.Tensor)


@dataclass(frozen=True)
class _Chain:
    """A convolution, what is added to it, if anything, and ReLU."""

    convolution: fx.Node
    sum: fx.Node | None
    addend: fx.Node | None
    relu: fx.Node


def fuse_convolution_relu(gm: fx.GraphModule) -> tuple[fx.GraphModule, Decisions]:
    """Use one operator for convolutions of `gm` (ATen above autograd) and the ReLU behind them."""
    relus = [n for n in gm.graph.nodes if n.target in _RELUS] if is_one_kernel() else []
    chains = [chain for node in relus if (chain := _chain(node)) is not None]
    if torch.is_grad_enabled():
        chains = [c for c in chains if not any(map(wants_gradient, ancestors(c.relu)))]
    if not chains:
        return gm, ()
    new, nodes = copied(gm)
    notes: list[Decision] = []
    for chain in chains:
        reason = _end(chain, nodes)
        notes.append(Decision(RULE, chain.convolution.name, Outcome.of(not reason), reason or "one call"))
    if not any(note.is_done for note in notes):
        return gm, tuple(notes)
    new.recompile()
    return new, tuple(notes)


def _chain(relu: fx.Node) -> _Chain | None:
    source = relu.all_input_nodes[0]
    if _is_taken(source, relu):
        return _Chain(source, None, None, relu)
    if source.target not in _SUMS or {*source.users} != {relu} or arguments(source)["alpha"] != 1:
        return None
    operands = [arguments(source)[name] for name in ("self", "other")]
    for one, other in (operands, reversed(operands)):
        writes_other = source.target is _aten.add_.Tensor and one is not operands[0]
        if isinstance(other, fx.Node) and not writes_other and _is_taken(one, source) and _alike(one, other):
            return _Chain(one, source, other, relu)
    return None


def _is_taken(node: object, user: fx.Node) -> bool:
    """Whether a node is a convolution that cuDNN has such a kernel for, and `user` alone reads it."""
    if not isinstance(node, fx.Node) or node.target is not _aten.conv2d.default or {*node.users} != {user}:
        return False
    named = arguments(node)
    x, weight = (named[name].meta["val"] for name in ("input", "weight"))
    innermost = all(t.is_contiguous(memory_format=torch.channels_last) for t in (x, weight))
    return x.dim() == 4 and has_tensor_units(x) and named["groups"] == 1 and innermost


def _alike(one: fx.Node, other: fx.Node) -> bool:
    a, b = one.meta["val"], other.meta.get("val")
    return isinstance(b, torch.Tensor) and (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def _end(chain: _Chain, nodes: dict[fx.Node, fx.Node]) -> str:
    """Put the call in ReLU's place, in a copied graph. Returns why it is not, or ""."""
    named = arguments(chain.convolution)
    operands = [named["input"], named["weight"], named["bias"], chain.addend]
    if written_between(chain.convolution, chain.relu, operands):
        return "an operand is written before ReLU is computed"
    call = nodes[chain.convolution]
    named = arguments(call)
    addend = None if chain.addend is None else nodes[chain.addend]
    relu = nodes[chain.relu]
    sizes = [named[name] for name in ("stride", "padding", "dilation")]
    with relu.graph.inserting_before(relu):
        made = emit(relu, convolution_relu, named["input"], named["weight"], named["bias"], addend, *sizes)
    if made.meta["val"].stride() != relu.meta["val"].stride():
        relu.graph.erase_node(made)
        return "its result lies in another order"
    relu.replace_all_uses_with(made)
    nodes[chain.relu] = made  # which may be added in its turn
    for node in (relu, *(() if chain.sum is None else (nodes[chain.sum],)), call):
        relu.graph.erase_node(node)
    return ""


CONVOLUTION_RELU = Pass(
    RULE,
    fuse_convolution_relu,
    does="Compute a ReLU, and a sum before it, in the convolution before them.",
    when="inference in 16 bits with channels last, by cuDNN",
    gains="the ReLU takes no time",
    rounds_as_eager=False,
)
