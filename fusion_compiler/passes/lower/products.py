"""Products of few rows as reductions: each row's sums over k are one pass over the matrix.

    mm(x, w)[i, n]  ->  sum over k of x[i, k] * w[k, n]   for each of the few rows i

Of either operand there may be few rows (or columns); the other one is the matrix, whose elements are all that
counts. Over the space of the matrix every row is a piece of the product, so that what a program reads of the
matrix serves all of them. Where each row chooses its own of several matrices, a program reads the same part
of each that is chosen:

    expert_mm(x, w, e)[i, n]  ->  sum over k of x[i, k] * w[e[i], k, n]
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from fusion_compiler.ir.dag import Op, OpDag, Ref
from fusion_compiler.ir.dims import Dim, product
from fusion_compiler.ir.experts import expert_mm
from fusion_compiler.passes.lower.index_splits import IndexSplit, index_split_by, index_splits_below

aten = torch.ops.aten
# Position of the first operand; before it comes what is added.
PRODUCTS: dict[object, int] = {
    aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1, aten.baddbmm.default: 1,
}  # fmt: skip
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Product:
    """left [.., m, k] times right [.., k, n] as a reduction of [.., m, k, n].

    few: the dimension with few elements, m or n. most: of them, at most; None where that is not known.
    stride: of the matrix, in that shape. The result is alpha times the product and beta times what is added.
    chosen: which of the matrices of `right` a row is multiplied by, int64 [m]; None where `right` is the one
    matrix.
    """

    left: str
    right: str
    shape: tuple[Dim, ...]
    stride: tuple[Dim, ...]
    few: int
    most: int | None
    added: str | None = None
    beta: float = 1
    alpha: float = 1
    chosen: str | None = None

    @property
    def reduced(self) -> int:
        """The dimension of k."""
        return len(self.shape) - 2

    @property
    def rows(self) -> Dim:
        return self.shape[self.few]

    @property
    def split(self) -> IndexSplit | None:
        """The pieces of the product; None where there is one."""
        if self.rows == 1 or self.most is None:
            return None
        there = None if isinstance(self.rows, int) else self.rows
        return IndexSplit(self.shape, self.few, self.most, there=there)

    def cut(self, split: IndexSplit) -> IndexSplit | None:
        """The pieces in which a split of its results, or of some of them, falls, and those for the rows; None
        where a row has none."""
        wide = 2 * self.reduced - self.few  # m and n are on both sides of k
        run = product((split.run, *split.shape[split.dim + 1 :]))
        size, whole = self.shape[wide], product(split.shape)
        if not (isinstance(run, int) and isinstance(size, int) and isinstance(whole, int)) or not run:
            return None
        block = run * split.count
        if size % block or not isinstance(self.rows, int) or whole > size * self.rows:
            return None
        block = None if block == size else block
        if self.split is None:
            return IndexSplit(self.shape, wide, split.count, block)
        return replace(self.split, then=IndexSplit(self.split.piece, wide, split.count, block))


def product_of(dag: OpDag, op: Op) -> Product | None:
    """An op as a product of floats; None for any other."""
    if op.target is expert_mm:
        return _of_experts(dag, op)
    first = PRODUCTS.get(op.target)
    if first is None:
        return None
    names = [arg.name for arg in op.args[: first + 2] if isinstance(arg, Ref)]
    left, right = names[-2:]
    a, b = (dag.op(name).outputs[0] for name in (left, right))
    if op.outputs[0].dtype not in FLOATS or {a.dtype, b.dtype} != {op.outputs[0].dtype}:
        return None
    batch = len(a.shape) - 2
    m, k, n = *a.shape[-2:], b.shape[-1]
    known = ((d, _most(dag, size)) for d, size in ((batch, m), (batch + 2, n)))
    few, most = min(known, key=lambda own: math.inf if own[1] is None else own[1])
    stride = (*b.stride[:batch], 0, *b.stride[-2:]) if few == batch else (*a.stride, 0)
    added = names[0] if first else None
    given = dict(op.kwargs)
    beta, alpha = given.get("beta", 1), given.get("alpha", 1)
    if not (isinstance(beta, int | float) and isinstance(alpha, int | float)):
        return None
    return Product(left, right, (*a.shape[:batch], m, k, n), stride, few, most, added, beta, alpha)


def _of_experts(dag: OpDag, op: Op) -> Product | None:
    rows, matrices, expert = (arg.name for arg in op.args if isinstance(arg, Ref))
    (m, k), meta = dag.op(rows).outputs[0].shape, dag.op(matrices).outputs[0]
    if meta.dtype not in FLOATS:
        return None
    shape, stride = (m, k, meta.shape[-1]), (0, *meta.stride[1:])
    return Product(rows, matrices, shape, stride, 0, _most(dag, m), chosen=expert)


def splits_of(dag: OpDag, ops: tuple[str, ...]) -> tuple[IndexSplit, ...]:
    """The index splits by which the products among some ops are made, for each of their rows."""
    products = (product_of(dag, dag.op(name)) for name in ops)
    return tuple(dict.fromkeys(p.split for p in products if p is not None and p.split is not None))


def cuts_of(dag: OpDag, ops: tuple[str, ...], most: int) -> tuple[IndexSplit, ...]:
    """Index splits that give each program several elements of a row of a product, which are computed with:
    halves of a head that are turned, a gate and what it gates. most: rows that the product has."""
    found: dict[IndexSplit | None, None] = {}
    for i, name in enumerate(ops):
        made = product_of(dag, dag.op(name))
        if made is not None and has_few_rows(made, most):
            later = (index_split_by(dag, dag.op(n)) for n in ops[i + 1 :])
            found |= {made.cut(c): None for c in (*later, *index_splits_below(dag, name)) if c is not None}
    return tuple(split for split in found if split is not None)


def has_few_rows(product: Product, most: int) -> bool:
    """Whether its matrix is read for no more than `most` rows, as far as that is known."""
    return product.most is not None and 0 < product.most <= most


def _most(dag: OpDag, size: Dim) -> int | None:
    return size if isinstance(size, int) else dag.most.get(size)
