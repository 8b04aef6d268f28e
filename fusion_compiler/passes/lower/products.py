"""Matrix products with few rows, as reductions that read the matrix once for all rows.

    mm(x, w)[i, n]  ->  sum over k of x[i, k] * w[k, n]   for each of the few rows i

Either operand may be the one with few rows (or columns); the other one is called the matrix, and its size
decides the time. Every element of the matrix that a program reads serves all rows. From three rows on, the
space has axes m, k and n (`free_space`). Below, or if each row chooses one of several matrices, the space is
that of the matrix, and each row is a piece of the product (see `IndexSplit`):

    expert_mm(x, w, e)[i, n]  ->  sum over k of x[i, k] * w[e[i], k, n]
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from fusion_compiler.ir.dag import LEAST_SHARING, Op, OpDag, Ref
from fusion_compiler.ir.dims import Dim, product
from fusion_compiler.ops.own.experts import expert_mm
from fusion_compiler.passes.lower.index_splits import IndexSplit, index_split_by, index_splits_below

aten = torch.ops.aten
# Position of the first factor; an added operand precedes it.
PRODUCTS: dict[object, int] = {
    aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1, aten.baddbmm.default: 1,
}  # fmt: skip
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Product:
    """The product of left [.., m, k] and right [.., k, n] as a reduction of a tensor [.., m, k, n].

    few: the dimension with few elements, m or n.
    most: an upper bound of its size, or None if unknown.
    stride: strides of the matrix in the shape [.., m, k, n].
    added, beta, alpha: the result is alpha * product + beta * added.
    chosen: the name of an int64 tensor [m] with the number of each row's matrix in `right`, or None if
        `right` is one matrix.
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
        """Return the dimension of k."""
        return len(self.shape) - 2

    @property
    def rows(self) -> Dim:
        return self.shape[self.few]

    @property
    def shares_matrix(self) -> bool:
        """True if tiles have all rows, which share each element of the matrix."""
        return self.chosen is None and self.most is not None and self.most >= LEAST_SHARING

    @property
    def split(self) -> IndexSplit | None:
        """Return the split of the product into its rows, or None if it has one row or an unbounded number."""
        if self.rows == 1 or self.most is None:
            return None
        runtime_count = None if isinstance(self.rows, int) else self.rows
        return IndexSplit(self.shape, self.few, self.most, runtime_count=runtime_count)

    def cut(self, split: IndexSplit) -> IndexSplit | None:
        """Extend the split by rows with `split`, a split of the result or a part of it; None if it does not
        fit in a row."""
        wide = 2 * self.reduced - self.few  # m and n are on both sides of k
        run = product((split.run, *split.shape[split.dim + 1 :]))
        size, tensor_size = self.shape[wide], product(split.shape)
        if not (isinstance(run, int) and isinstance(size, int) and isinstance(tensor_size, int)) or not run:
            return None
        block = run * split.count
        if size % block or not isinstance(self.rows, int) or tensor_size > size * self.rows:
            return None
        block = None if block == size else block
        if self.split is None:
            return IndexSplit(self.shape, wide, split.count, block)
        return replace(self.split, nested=IndexSplit(self.split.piece, wide, split.count, block))


def product_of(dag: OpDag, op: Op) -> Product | None:
    """Return an op as a product of floating-point matrices, or None if it is not one."""
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
    sizes = ((d, _most(dag, size)) for d, size in ((batch, m), (batch + 2, n)))
    few, most = min(sizes, key=lambda bound: math.inf if bound[1] is None else bound[1])
    stride = (*b.stride[:batch], 0, *b.stride[-2:]) if few == batch else (*a.stride, 0)
    added = names[0] if first else None
    beta, alpha = (op.arguments.get(name, 1) for name in ("beta", "alpha"))
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
    """Return the index splits into the rows of the products among `ops`."""
    products = (product_of(dag, dag.op(name)) for name in ops)
    return tuple(dict.fromkeys(p.split for p in products if p is not None and p.split is not None))


def cuts_of(dag: OpDag, ops: tuple[str, ...], most: int) -> tuple[IndexSplit, ...]:
    """Return index splits that give each program several elements of a product's row that are combined with
    each other.

    Examples are the two halves of a head under rotary embedding, or a gate and the gated value.
    most: an upper bound of the product's rows.
    """
    splits: dict[IndexSplit | None, None] = {}
    for i, name in enumerate(ops):
        product = product_of(dag, dag.op(name))
        if product is not None and has_few_rows(product, most):
            later = (index_split_by(dag, dag.op(n)) for n in ops[i + 1 :])
            splits |= {
                product.cut(c): None for c in (*later, *index_splits_below(dag, name)) if c is not None
            }
    return tuple(split for split in splits if split is not None)


def has_few_rows(product: Product, most: int) -> bool:
    """True if the product is known to have between 1 and `most` rows."""
    return product.most is not None and 0 < product.most <= most


def _most(dag: OpDag, size: Dim) -> int | None:
    return size if isinstance(size, int) else dag.most.get(size)
