"""Correct results that AOTAutograd would compute wrongly, which the graph shows when it is compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch._aot_autograd.descriptors import (
    SubclassGetAttrAOTInput,
    SyntheticBaseAOTInput,
    ViewBaseAOTInput,
)
from torch._functorch._aot_autograd.schemas import OutputType

from fusion_compiler.errors import SubclassViewError


def check_aliases(metadata: Any, graph: fx.Graph) -> None:
    """Change how views of arguments are made, in `metadata`, AOTAutograd's of `graph`, where that would fail.

    AOTAutograd makes such a result again after each call, from the argument. If arguments share memory and
    one of them is written, it joins them into one that holds all of it, and makes the result from that as if
    it were the argument (pytorch#198095). Without the recorded steps it takes the sizes, strides and offset
    that the graph gives the result.

    Raises SubclassViewError for a view of a part of a wrapper subclass: AOTAutograd makes it from the
    wrapper, and a wrapper need not know its part's offset.
    """
    arguments = [node.meta.get("desc") for node in graph.find_nodes(op="placeholder")]
    joined = any(isinstance(desc, SyntheticBaseAOTInput | ViewBaseAOTInput) for desc in arguments)
    for position, info in enumerate(metadata.output_info):
        if info.output_type is not OutputType.alias_of_input:
            continue
        desc = arguments[info.base_idx]
        if isinstance(desc, SubclassGetAttrAOTInput):
            raise SubclassViewError(argument=desc.base.expr())
        if joined and info.view_meta_sequence is not None:
            metadata.output_info[position] = replace(info, view_meta_sequence=None)


def without_inference_gradients(run: Callable[..., Any], graph: fx.Graph) -> Callable[..., Any]:
    """Return `run`, the compiled `graph`, such that in inference mode no new tensor has a gradient.

    TorchDynamo compiles there as under `no_grad()`, and AOTAutograd makes a backward for a graph that
    enables gradients.
    """
    switches = graph.find_nodes(op="call_function", target=torch._C._set_grad_enabled)
    if torch.is_grad_enabled() or not any(node.args[0] is True for node in switches):
        return run

    def call(*args: Any) -> Any:
        results = run(*args)
        if not torch.is_inference_mode_enabled():
            return results
        return [r.detach() if isinstance(r, Tensor) and r.is_inference() else r for r in results]

    return call
