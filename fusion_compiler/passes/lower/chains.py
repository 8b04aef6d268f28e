"""Lower a chain of products and reductions, such as attention, to one loop nest.

    s[b, i, j] = sum over d of q[b, i, d] * k[b, j, d]
    o[b, i, e] = sum over j of exp(s[b, i, j] - m[b, i]) * v[b, j, e]

The space begins with the axes of the largest result, and each reduction has axes of its own: a reduced axis
is a bound variable, which may have any name that the result does not have. It takes the name of an axis along
which its operand is computed already, so that the scores of a row are one value for its maximum, its sum and
its product with the values; else it gets a new axis. So the result is right by construction, and whether
reductions share a loop is seen from their axes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from fusion_compiler.ir import layout
from fusion_compiler.ir.dag import Op, OpDag
from fusion_compiler.ir.dims import Dim, numel, strides_of
from fusion_compiler.ir.index import ZERO, NeedsSplit, NotExpressible, axis, flatten
from fusion_compiler.ir.loops import COLS, INNER, Index, LoopNest, Reduce, Store
from fusion_compiler.ops.table import Kind
from fusion_compiler.passes.lower.lower import Lowering, attempts, reduced_coords
from fusion_compiler.passes.lower.products import product_of
from fusion_compiler.passes.lower.rounding import Rounding
from fusion_compiler.passes.lower.simplify import simplify
from fusion_compiler.passes.lower.space import Coords, Illegal, Space, is_reduction, reduced_by
from fusion_compiler.passes.lower.uneven_widths import in_powers_of_two
from fusion_compiler.schedule.chains import Chain


def lower_chain(dag: OpDag) -> LoopNest:
    """Lower all ops of a graph to one loop nest that stores its results. Raises Illegal."""
    ops = tuple(n for n in dag.order if n not in dag.inputs and not layout.is_view(dag.op(n)))
    outputs = tuple(n for n in ops if n in dag.outputs)
    if unfit := next((n for n in dag.outputs if n not in ops), None):
        raise Illegal("operator", f"{unfit} is a view of an input or a result of the nest")
    anchor = max(outputs, key=lambda n: (_is_product(dag, n), numel(dag.op(n).outputs[0].shape)))
    shape = dag.op(anchor).outputs[0].shape
    space = Space(tuple((s,) for s in shape), tuple(COLS for _ in shape), is_free=True)
    ordered = (anchor, *(n for n in outputs if n != anchor))
    loops = attempts(lambda space: _Chain(dag, ops, ordered, space, Rounding(frozenset(outputs))), space)
    loops = simplify(loops)
    chain = Chain.of(loops)
    return loops if chain is None else in_powers_of_two(loops, chain.features)


def _is_product(dag: OpDag, name: str) -> bool:
    """True if a result is a product, perhaps in another dtype."""
    op = dag.op(name)
    while op.kind is not Kind.CONTRACTION and len(op.inputs) == 1 and not is_reduction(op):
        op = dag.op(op.first)
    return op.kind is Kind.CONTRACTION


class _Chain(Lowering):
    """A lowering whose reductions add axes to the space.

    dependent: whether a value depends on a reduction of the nest, by name. around: the coordinates of the
    values whose operands are computed now, the innermost last: a row statistic is reduced along the axis
    along which its readers lie.
    """

    dependent: dict[str, bool]
    around: list[Coords]

    def run(self) -> LoopNest:
        stores: list[Store] = []
        self.dependent, self.around = {}, []
        for position, name in enumerate(self.outputs):
            coords = self.space.identity() if position == 0 else self.place(name)
            if coords is None:
                raise Illegal("space", f"{name} has no place beside {self.outputs[0]}")
            stores.append(self.store(name, coords))
        reduced = frozenset[int]().union(*(n.axes for n in self.nodes if isinstance(n, Reduce)))
        axes = (replace(a, group=INNER if k in reduced else COLS) for k, a in enumerate(self.axes))
        stores.sort(key=lambda store: self.ops.index(store.buffer))
        return LoopNest(tuple(axes), tuple(self.nodes), tuple(stores), tuple(self.names))

    def is_window(self, coords: Coords) -> bool:
        return False

    def place(self, name: str) -> Coords | None:
        """Return where a value lies that was computed before, or is computed from such ones element by
        element. A product lies where its factor that is computed lies, and along an axis of the other one."""
        if name in self.coords_of:
            return self.coords_of[name]
        op = self.dag.op(name)
        product = product_of(self.dag, op) if op.kind is Kind.CONTRACTION else None
        if product is None and is_reduction(op):
            at = self.place_of_operand(op.first)
            return None if at is None else reduced_coords(op, at, reduced_by(self.dag, op).dims)
        if product is None:
            shape = op.outputs[0].shape
            same = (i for i in op.inputs if self.dag.op(i).outputs[0].shape == shape and self.depends(i))
            return next((at for i in same if (at := self.place_of_operand(i)) is not None), None)
        *_, m, _, n = product.shape
        left, right = product.left, product.right
        if (at := self.place_of_operand(left)) is not None and self.depends(left):
            *batch, row, inner = at
            col = self.axis_of(n, _keys(at), lambda c: self.is_computed(right, (*batch, inner, c)))
            return (*batch, row, col)
        if (at := self.place_of_operand(right)) is not None and self.depends(right):
            *batch, inner, col = at
            row = self.axis_of(m, _keys(at), lambda c: self.is_computed(left, (*batch, c, inner)))
            return (*batch, row, col)
        return None

    def reduce(self, op: Op, coords: Coords, within: int | None) -> int:
        reduced = reduced_by(self.dag, op)
        has_all = not reduced.is_product and len(op.outputs[0].shape) == len(reduced.shape)
        kept = tuple(coords[d] for d in reduced.kept) if has_all else coords
        at = dict(zip(reduced.kept, kept, strict=True)) | dict.fromkeys(reduced.dims, ZERO)
        bound: list[Index] = []
        for d in reduced.dims:

            def fits(index: Index, d: int = d) -> bool:
                return self.has_operand(op, tuple(index if e == d else at[e] for e in sorted(at)))

            near = [c[d] for c in reversed(self.around) if has_all and len(c) == len(at) and c[d].terms]
            at[d] = self.axis_of(reduced.shape[d], _keys((*kept, *bound)), fits, near)
            bound.append(at[d])
        place = tuple(at[d] for d in sorted(at))
        if product := product_of(self.dag, op):
            *batch, m, k, n = place
            for factor, where in ((product.left, (*batch, m, k)), (product.right, (*batch, k, n))):
                if not self.depends(factor):  # the scores then find the axes of what multiplies them
                    self.value(factor, where, within)
        position = flatten(tuple(bound), strides_of(tuple(reduced.shape[d] for d in reduced.dims)))
        return self.combine(op, place, frozenset(_keys(bound)), position)

    def compute(self, op: Op, coords: Coords, within: int | None) -> int:
        self.around.append(coords)
        node = super().compute(op, coords, within)
        self.around.pop()
        return node

    def has_operand(self, op: Op, coords: Coords) -> bool:
        """True if an operand of a reduction is computed already at these coordinates of its terms."""
        product = product_of(self.dag, op)
        if product is None:
            return self.is_computed(op.first, coords)
        *batch, m, k, n = coords
        left, right = (*batch, m, k), (*batch, k, n)
        return self.is_computed(product.left, left) or self.is_computed(product.right, right)

    def axis_of(
        self, size: Dim, taken: Collection[int], fits: Callable[[Index], bool], near: Sequence[Index] = ()
    ) -> Index:
        """Return an axis of some size that is none of `taken`: one that fits, one of `near`, or a new one."""
        if size == 1:
            return ZERO
        same = [axis(k) for k, a in enumerate(self.axes) if k not in taken and a.size == size]
        ways = (*(c for c in same if fits(c)), *(c for c in near if c in same))
        return ways[0] if ways else axis(self.add_inner_axis(size))

    def is_computed(self, name: str, coords: Coords) -> bool:
        """True if a value, or one that it is computed from element by element, is computed or loaded already
        at some coordinates, perhaps by another view."""
        op = self.dag.op(name)
        if not op.outputs:
            return False
        shape = op.outputs[0].shape
        coords = tuple(ZERO if s == 1 else c for s, c in zip(shape, coords, strict=True))
        if (name, coords, None) in self.memo:
            return True
        try:
            if layout.is_view(op) and name not in self.inside:
                return self.is_computed(*layout.pull(self.dag, op, coords, self.extents))
        except (NotExpressible, NeedsSplit):
            return False
        if name not in self.inside or is_reduction(op):
            return False
        same = (i for i in op.inputs if self.dag.op(i).outputs and self.dag.op(i).outputs[0].shape == shape)
        return any(self.is_computed(i, coords) for i in same)

    def depends(self, name: str) -> bool:
        """True if a reduction of the nest is needed to compute a value."""
        if name not in self.dependent:
            op = self.dag.op(name)
            self.dependent[name] = name in self.inside and is_reduction(op)
            self.dependent[name] |= any(self.depends(i) for i in op.inputs)
        return self.dependent[name]


def _keys(coords: Iterable[Index]) -> set[int]:
    return {k for index in coords for k, _ in index.terms}
