"""Say of every matrix product which of its arguments are the factors, and which tensor is added to them."""

from __future__ import annotations

from dataclasses import dataclass

from torch._ops import OpOverload


@dataclass(frozen=True)
class Factors:
    """A product is left @ right, and `added` is added to it; each is the name of an argument in the schema.

    rank: the dimensions of both factors and of the result, where nothing is broadcast: left [.., m, k], right
    [.., k, n]. None for a product that is more than that, as the comment at its row says.
    """

    left: str
    right: str
    added: str | None = None
    rank: int | None = None


_BY_NAME = {
    "mm": Factors("self", "mat2", rank=2),
    "addmm": Factors("mat1", "mat2", "self", rank=2),
    "bmm": Factors("self", "mat2", rank=3),
    "baddbmm": Factors("batch1", "batch2", "self", rank=3),
    "_addmm_activation": Factors("mat1", "mat2", "self"),  # and then ReLU or GELU
    "matmul": Factors("self", "other"),  # factors of any rank, vectors too
    "linear": Factors("input", "weight", "bias"),  # the weight is [n, k]
    "expert_mm": Factors("rows", "matrices"),  # each row chooses one of the matrices
}


def factors_of(target: object) -> Factors | None:
    """Return the factors of a matrix product, whichever its overload; None for every other callable."""
    return _BY_NAME.get(target._opname) if isinstance(target, OpOverload) else None
