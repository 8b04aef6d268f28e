"""Find the ATen call of the uncompiled model that a node of a captured graph belongs to.

Tracing notes what it takes apart: below autograd the operator (`original_aten`), and throughout the node
of the model's own graph (`from_node`). An operator that eager computes in one call may be taken apart above
autograd as well (`upsample_nearest2d` becomes an index and a gather): its node decides, and the gradients of
its pieces, told by autograd's numbers, are pieces of its gradient.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

_ABOVE = {"DispatchKey.Autograd", "DispatchKey.CompositeImplicitAutograd"}
_ADD = torch.ops.aten.add.Tensor
_MARK = "fusion_compiler.call"  # of a backward node: the node of the model whose gradient it is a piece of


@dataclass(frozen=True, slots=True)
class EagerCall:
    """The ATen call of the uncompiled model that an op belongs to.

    target: its operator's name. key: tells two calls of one operator apart. backward: made by autograd.
    """

    target: str
    key: str
    backward: bool


def name_of(operator: Any) -> str:
    """Return `add` for aten.add.Tensor, `flex_attention` for the higher-order operator."""
    return str(getattr(operator, "_opname", None) or getattr(operator, "__name__", ""))


def call_of(node: fx.Node) -> EagerCall | None:
    """Return the ATen call that a node belongs to, or None for a node that stems from no ATen call."""
    original = node.meta.get("original_aten")
    if original is None:
        return None
    if is_backward(node):
        target, origin = node.meta.get(_MARK, ("", ""))
        if target:
            return EagerCall(f"{target}_backward", origin, True)
    else:
        target, origin = _model_call(node)
        if target and target != name_of(original):
            return EagerCall(target, origin, False)
    key = f"{node.meta.get('seq_nr')} {origin}"
    alone = str(original) == str(node.target)  # not taken apart; its overload is a copy
    return EagerCall(name_of(original), f"{key} {node.name}" if alone else key, is_backward(node))


def mark_gradients(joint: fx.Graph) -> None:
    """Mark the backward nodes of a joint graph with the operator whose gradient they compute, if it was taken
    apart above autograd. The first node with a number is the one to which autograd gave it."""
    marks: dict[object, tuple[str, str]] = {}
    for node in joint.nodes:
        number, original = node.meta.get("seq_nr"), node.meta.get("original_aten")
        if number is None or original is None:
            continue
        if not is_backward(node):
            target, origin = _model_call(node)
            if _is_floating(node):
                marks.setdefault(number, (target if target != name_of(original) else "", origin))
        elif marks.get(number, ("", ""))[0]:
            node.meta[_MARK] = marks[number]
    _mark_sums(joint)


def _mark_sums(joint: fx.Graph) -> None:
    """Mark the sums that add up gradients along several ways within one operator. Sums that only its
    pieces read are pieces too, as is each sum that adds one of its gradients to another, whatever else
    either holds."""
    sums = [n for n in joint.nodes if n.target is _ADD and is_backward(n) and _MARK not in n.meta]
    for node in reversed(sums):
        marks = {n.meta.get(_MARK) for n in node.users}
        if len(marks) == 1 and None not in marks:
            node.meta[_MARK] = marks.pop()
    held: dict[fx.Node, set[object]] = {}  # for each sum, the operators whose gradients it adds up
    for node in sums:
        operands = [
            held.get(n) or ({n.meta[_MARK]} if _MARK in n.meta else set[object]())
            for n in node.args
            if isinstance(n, fx.Node)
        ]
        held[node] = set[object]().union(*operands)
        if len(operands) == 2 and (twice := operands[0] & operands[1]):
            node.meta.setdefault(_MARK, twice.pop())


def _model_call(node: fx.Node) -> tuple[str, str]:
    """Return (operator, name) of the node of the model from which a forward node comes; the operator is "" if
    it is not taken apart above autograd, or if eager takes it apart as well."""
    origins: list[Any] = list(node.meta.get("from_node") or ())
    return (_one_call(str(origins[0].target)), str(origins[0].name)) if origins else ("", "")


@functools.cache
def _one_call(target: str) -> str:
    """Return the name of an ATen operator that a Python kernel of torch's takes apart above autograd, and
    that eager computes in one call: some form of it has a kernel of its own. Return "" for others."""
    namespace, name, form = (*target.split("."), "", "")[:3]
    packet = getattr(torch.ops.aten, name, None) if namespace == "aten" and name else None
    overload = getattr(packet, form, None)
    if packet is None or overload is None or not _ABOVE & {str(key) for key in overload.py_kernels}:
        return ""
    forms = (getattr(packet, each) for each in packet.overloads() if "out" not in each)
    return "" if all(map(_is_composite, forms)) else name


def _is_composite(form: Any) -> bool:
    dispatch: Any = torch._C
    key = "CompositeImplicitAutograd"
    try:
        return bool(dispatch._dispatch_has_kernel_for_dispatch_key(form.name(), key))
    except RuntimeError:  # a form for TorchScript alone
        return True


def is_backward(node: fx.Node) -> bool:
    """True if autograd made a node of a joint graph."""
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def _is_floating(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()
