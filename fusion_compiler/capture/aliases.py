"""Results that are views of arguments: where PyTorch would make them wrongly, known when a graph is compiled.

AOTAutograd makes such a result again after each call, from the argument.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx
from torch._functorch._aot_autograd.descriptors import (
    SubclassGetAttrAOTInput,
    SyntheticBaseAOTInput,
    ViewBaseAOTInput,
)
from torch._functorch._aot_autograd.schemas import OutputType

from fusion_compiler.errors import SubclassViewError

def check_aliases(metadata: Any, graph: fx.Graph) -> None:
    """Change in `metadata`, AOTAutograd's of `graph`, how views of arguments are made where that would fail.

    If arguments share memory and one of them is written, AOTAutograd joins them into one that holds all of it,
    but makes a result from that as if it were the argument (pytorch#198095). Without the recorded steps it
    takes the sizes, strides and offset that the graph gives the result.

    Raises SubclassViewError for a view of a part of a wrapper subclass: AOTAutograd makes it from the wrapper,
    which need not know its part's offset.
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
