"""Results that are views of arguments: where PyTorch would make them wrongly, known when a graph is compiled.

AOTAutograd makes such a result again after each call, from the argument.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.schemas import OutputType
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type

from fusion_compiler.errors import SubclassViewError

_VIEWS = (
    OutputType.alias_of_input,
    OutputType.alias_of_intermediate,
    OutputType.alias_of_intermediate_save_as_output,
    OutputType.alias_of_intermediate_base_is_user_output,
)


def check_aliases(metadata: Any, graph: fx.Graph) -> None:
    """Change in `metadata`, AOTAutograd's of `graph`, how views of arguments are made where that would fail.

    If arguments share memory and one of them is written, AOTAutograd joins them into one that holds all of it,
    but makes a result from that as if it were the argument (pytorch#198095). Without the recorded steps it
    takes the sizes, strides and offset that the graph gives the result.

    Raises SubclassViewError for a view of a wrapper subclass, of whose offset AOTAutograd knows nothing.
    """
    joined = any(_is_joined(node) for node in graph.find_nodes(op="placeholder"))
    for position, info in enumerate(metadata.output_info):
        if info.output_type not in _VIEWS:
            continue
        if is_traceable_wrapper_subclass_type(info.raw_type):
            raise SubclassViewError(subclass=info.raw_type.__name__)
        if joined and info.view_meta_sequence is not None:
            metadata.output_info[position] = replace(info, view_meta_sequence=None)


def _is_joined(argument: fx.Node) -> bool:
    return type(argument.meta.get("desc")).__name__ == "SyntheticBaseAOTInput"
