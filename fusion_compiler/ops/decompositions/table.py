"""Write composite operators in rows of the operator table, for AOTAutograd.

Start: PyTorch's core ATen decompositions, less the operators that have a row of their own and
the contractions, which stay whole. The functions here replace those that are missing there, that
would sum 16-bit floats in 16 bits, or that scatter, that cancel, or that lose a NaN. The rules: 16-bit
floats are widened to float32 once at the entry and narrowed once at the exit; variances are of centred
values; 1 - sigmoid(x) is sigmoid(-x), of which digits are left where x is large; of a choice between
formulas NaN takes the one that computes with it; what eager makes contiguous is contiguous here, and
channels-last what is that in eager, as a traced view may rely on it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._decomp import _core_aten_decompositions_post_autograd, get_decompositions
from torch._ops import OpOverload

from fusion_compiler.ops.decompositions import eager, elementwise, images, lookups, norms, reductions
from fusion_compiler.ops.decompositions.few_queries import in_chunks
from fusion_compiler.ops.decompositions.random import RandomOperators, native_dropout_backward
from fusion_compiler.ops.decompositions.traced_gradients import INTERPOLATIONS
from fusion_compiler.ops.own import few_queries, max_pool, permuted_rows
from fusion_compiler.ops.table import Kind, spec_of

aten = torch.ops.aten

# Contractions and scatters that core ATen would take apart. They stay library calls.
_WHOLE = (
    aten.baddbmm.default,
    aten.scaled_dot_product_attention.default,
    aten._scaled_dot_product_attention_math.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten.select_scatter.default,  # PyTorch's gives the dtype of both, eager that of the first
)

# Right as they are in PyTorch, and not part of its core table. They call var_mean and friends,
# which are then taken from this table.
_BORROWED = (
    aten.native_batch_norm,
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_functional,
    aten._native_batch_norm_legit_no_training,
    aten._batch_norm_with_update_functional,
    aten._batch_norm_no_update,
    aten.batch_norm_backward,
    aten.addmv,
    aten.dist,
    *(target for target in INTERPOLATIONS if target._overloadname == "default"),
    aten.rrelu_with_noise_backward,
)


def decomposition_table() -> dict[OpOverload, Callable[..., Any]]:
    """Return ATen overload -> its decomposition, for the `decompositions` argument of AOTAutograd.

    Each capture needs a new table: every random operator that is traced with a table gets another salt, so
    that two dropouts differ even where a later pass merges their seeds.
    """
    return _shared() | RandomOperators().table()


@functools.cache
def _shared() -> dict[OpOverload, Callable[..., Any]]:
    """Return the part that all tables share. Composite operators come apart above it, without a table."""
    table: dict[Any, Callable[..., Any]] = dict(_core_aten_decompositions_post_autograd())
    table.update(get_decompositions(_BORROWED))
    unchanged = (*_WHOLE, *eager.WHOLE)
    for target in list(table):
        spec = spec_of(target)
        if target in unchanged or (spec is not None and spec.kind is not Kind.LAYOUT):
            del table[target]
    for ours in _TABLES:
        table |= {target: _for_real(function) for target, function in ours.items()}
    table |= {aten._neg_view.default: torch.neg}  # a lazily negated tensor's memory has other values
    table |= {target: eager.in_order(table[target]) for target in eager.ELEMENTWISE}
    table |= {target: eager.dense_on_cpu(table[target]) for target in eager.BATCH_NORMS}
    return {target: eager.unless_refused(target, function) for target, function in table.items()}


def _for_real(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which leaves complex tensors whole because no kernel holds them."""

    def decomposition(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(arg, Tensor) and arg.is_complex() for arg in args):
            return NotImplemented
        return function(*args, **kwargs)

    return decomposition


_TABLES: tuple[Mapping[OpOverload, Callable[..., Any]], ...] = (
    reductions.TABLE,
    lookups.TABLE,
    norms.TABLE,
    elementwise.TABLE,
    {few_queries.attend: in_chunks, permuted_rows.permuted_rows: permuted_rows.lookup},
    {aten.native_dropout_backward.default: native_dropout_backward},
    images.TABLE,
    max_pool.FORMULAS,
    eager.TABLE,
)
