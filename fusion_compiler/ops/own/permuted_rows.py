"""Look rows up in an order that has each place once, so that the gradient is a lookup as well.

For a lookup by any index, autograd adds up the gradient in a scatter, since a row may be looked up several
times: on a GPU PyTorch sorts the indices for that, in a dozen launches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusion_compiler.ops.own.define import define


def lookup(source: Tensor, order: Tensor, inverse: Tensor, share: int) -> Tensor:
    """Return [S, ...]: source[order // share], a copy. source: [S / share, ...], order: int64 [S], each of 0
    <= i < S once, inverse: int64 [S], the place of each i in order."""
    return torch.ops.aten.index.Tensor(source, [order if share == 1 else order // share])


def _saved(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, order, inverse, ctx.share = inputs
    ctx.save_for_backward(order, inverse)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    order, inverse = ctx.saved_tensors
    gradient = permuted_rows(grad, inverse, order, 1)
    return gradient if ctx.share == 1 else gradient.unflatten(0, (-1, ctx.share)).sum(1), None, None, None


permuted_rows = define(
    "permuted_rows",
    "(Tensor source, Tensor order, Tensor inverse, int share) -> Tensor",
    lookup,
    gradient=_gradient,
    save=_saved,
)
