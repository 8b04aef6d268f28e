"""Which activations are saved for backward: AOTAutograd's min-cut, told what our clusters recompute.

A value is recomputed in backward where that needs fewer saved bytes and only work that a
cluster does on the way: element-wise ops, casts, constants, and random numbers from a saved seed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch._functorch import partitioners
from torch.utils._ordered_set import OrderedSet

from fusion_compiler.random import merge_seeds

_aten = torch.ops.aten


def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph into forward and backward; see torch._functorch.partitioners."""
    merge_seeds(joint)
    default = partitioners.get_default_op_list
    with patch.object(partitioners, "get_default_op_list", functools.cache(lambda: _extended(default()))):
        return partitioners.min_cut_rematerialization_partition(joint, inputs, **options)


def _extended(ops: partitioners.OpTypes) -> partitioners.OpTypes:
    more = OrderedSet[Callable[..., Any]](
        [
            torch.ops.prims.iota,
            _aten.full_like,
            _aten.zeros_like,
            _aten.ones_like,
            _aten.scalar_tensor,
            torch.ops.fusion_compiler.uniform,
        ]
    )
    return replace(ops, fusible_ops=ops.fusible_ops | more, recomputable_ops=ops.recomputable_ops | more)
