"""Define `fusion_compiler::put_`, which writes into memory that exists.

Functionalization makes of `cache[:, :, at] = new` an operator that copies the cache. `put_` is what was
written: `source` is stored where a view of `self` lies, or where indices point to in that view. Its result
is `self`, so that who reads what was written comes after it. It is one operator for slices, selected
elements, positions that are data, and any of these within a view of a larger cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusion_compiler.ops.own.define import define


def _put(
    self: torch.Tensor,
    view: torch.Tensor,
    source: torch.Tensor,
    indices: Sequence[torch.Tensor | None] | None = None,
) -> torch.Tensor:
    """Store `source` where `view`, which shows memory of `self`, lies, or where the indices point to in it;
    return `self`. `source` is broadcast."""
    if indices is None:
        view.copy_(source)
    else:
        torch.ops.aten.index_put_.default(view, indices, source)
    return self


put = define(
    "put_",
    "(Tensor(a!) self, Tensor view, Tensor source, Tensor?[]? indices=None) -> Tensor(a!)",
    _put,
    lambda self, *_, **__: self,
)
