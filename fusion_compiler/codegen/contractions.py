"""Contractions on tensor units (`schedule/contractions.py`).

The vectors are one tile, and so are the sums, its pieces (`pieces.py`).

Tensor units multiply bfloat16. A float32 is the sum of two or three of them, so that the error is less than
eager's own roundings. A matrix with fewer bits is used as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from fusion_compiler.codegen import pieces
from fusion_compiler.codegen.builder import Builder, Packed
from fusion_compiler.codegen.nodes import build_nodes
from fusion_compiler.codegen.tile import Assign
from fusion_compiler.ir.loops import COLS, ROWS, Compute, Load, operands_of
from fusion_compiler.ir.syntax import Expression, Operand, Variable, fm, tl
from fusion_compiler.schedule.analysis import rounding_of
from fusion_compiler.schedule.contractions import Contraction, contractions_of, contracts, parts_of
from fusion_compiler.schedule.tile_products import CONVERSIONS, ONE

TWO = (torch.float16, torch.int16)  # what two bfloat16 numbers hold exactly, as one holds `ONE`


@dataclass(frozen=True)
class Terms:
    """Terms count the bfloat16 numbers that represent an element of the matrix, and one of the vectors."""

    matrix: int
    vectors: int

    @property
    def parts(self) -> int:
        """Return the parts of the sums: one per term of the vectors, and at least one for the rest of the
        matrix."""
        return 4 if self.vectors > 2 else max(self.matrix, self.vectors)


def enter(b: Builder) -> None:
    """Register the contracted sums with a builder, and how they and their pieces are built."""
    if not contracts(b.a, b.s):
        return
    suited = [c for c in contractions_of(b.a) if terms_of(b, c) is not None]
    b.contracted = {i: c for c in suited for i in c.sums}
    b.as_loaded = frozenset(i for c in suited for i in _kept_as_loaded(b, c))
    for c in suited:
        b.tiles[c.sums] = lambda c=c: _build(b, c)
        b.made |= dict.fromkeys(c.sums, lambda c=c: _build_and_unpack(b, c.sums))
    if b.a.weighted_columns:
        return
    groups, _ = pieces.together(b, b.stores_of("main"))
    for nodes in (*(c.vectors for c in suited if pieces.alike(b, c.vectors)), *(g.values for g in groups)):
        for sums in pieces.sums_in(b, nodes):
            b.packed_sums |= dict.fromkeys(sums, sums)
    b.made |= {i: lambda sums=sums: _build_and_unpack(b, sums) for i, sums in b.packed_sums.items()}


def terms_of(b: Builder, c: Contraction) -> Terms | None:
    """Return the terms of a contraction, or None if too little of a float32 matrix would be represented."""
    exact = any(i not in b.rough for i in c.sums)
    dtypes = [_stored_dtype(b, n) for n in (c.matrix, *c.vectors)]
    matrix = 1 if dtypes[0] in ONE else 2
    if matrix == 2 and exact and dtypes[0] not in TWO:
        return None
    return Terms(matrix, 1 if all(d in ONE for d in dtypes[1:]) else 3 if exact else 2)


def _stored_dtype(b: Builder, number: int) -> torch.dtype | None:
    """Return the dtype in which a value is stored or to which it is rounded; None if it is computed."""
    node = b.loops.nodes[_source(b, number)]
    if rounding_of(node) == str(torch.bfloat16):
        return torch.bfloat16
    return b.dtypes[node.buffer] if isinstance(node, Load) else None


def _source(b: Builder, number: int) -> int:
    """Return the node whose value this one has in another dtype."""
    node = b.loops.nodes[number]
    if isinstance(node, Compute) and node.target in CONVERSIONS and rounding_of(node) is None:
        (number,) = operands_of(node)
    return number


def _kept_as_loaded(b: Builder, c: Contraction) -> Iterator[int]:
    """Yield the load of a bfloat16 matrix that only the terms of contracted sums read."""
    terms = {b.reduction(i).operand for i, other in b.contracted.items() if other.matrix == c.matrix}
    source = _source(b, c.matrix)
    node = b.loops.nodes[source]
    readers = {i for i, other in enumerate(b.loops.nodes) if {source, c.matrix} & {*operands_of(other)}}
    if isinstance(node, Load) and b.dtypes[node.buffer] is torch.bfloat16 and readers <= terms | {c.matrix}:
        yield source


def _build_and_unpack(b: Builder, sums: tuple[int, ...]) -> None:
    if sums not in b.packs:
        b.tiles[sums]()
    if sums[0] not in b.env:
        pieces.unpack(b, sums)


def _build(b: Builder, c: Contraction) -> None:
    """Build all sums of a contraction whose matrix is in the tile, as one product. The vectors' terms are
    side by side in it, because warps with many rows have few registers for several products."""
    terms = _terms(b, c)
    lanes = b.s.block_rows if c.along == COLS else b.tile.lanes
    zeros = tl.zeros([lanes, pieces.padded(len(c.sums)) * terms.parts], torch.float32)
    products = b.let(
        "products", fm.contract(*_operands(b, c), zeros, terms.matrix, terms.vectors, terms.parts)
    )
    total = products if terms.parts == 1 else fm.contracted(products, terms.parts)
    if c.along == ROWS:
        total = tl.trans(total)
    axis = 1 if c.along == COLS else 0
    b.packs[c.sums] = Packed(products if total is products else b.let("products", total), axis)


@dataclass(frozen=True)
class Contracted:
    """The sums of a contraction along the row, in a pass over its columns: a state of `online_reductions.py`.

    If there are few rows, each warp multiplies some columns of a block. The products of the bfloat16 values
    and of the rests are separate: in a loop it costs more to arrange them side by side.
    """

    contraction: Contraction

    @property
    def numbers(self) -> tuple[int, ...]:
        return self.contraction.sums

    def wanted(self, b: Builder) -> tuple[int, ...]:
        c = self.contraction
        return (c.matrix,) if pieces.alike(b, c.vectors) else (c.matrix, *c.vectors)

    def start(self, b: Builder) -> tuple[Variable, ...]:
        if pieces.alike(b, self.contraction.vectors):
            pieces.prepare(b, self.contraction.vectors)
        split = [parts_of(b.s)] if parts_of(b.s) > 1 else []
        zeros = tl.zeros([*split, b.s.block_rows, pieces.padded(len(self.numbers))], torch.float32)
        bases = ("products",) if _terms(b, self.contraction).parts == 1 else ("products", "rest")
        return tuple(b.let(base, zeros) for base in bases)

    def step(self, b: Builder, names: Sequence[Variable]) -> None:
        terms = _terms(b, self.contraction)
        operands = (*_operands(b, self.contraction), *names)
        split = (parts_of(b.s),) if parts_of(b.s) > 1 else ()
        if terms.parts == 1:
            b.set(names[0], fm.contract(*operands, 1, 1, 1, *split))
        else:
            b.add(Assign(tuple(names), fm.contract_apart(*operands, terms.matrix, terms.vectors, *split)))

    def fold(self, b: Builder, names: Sequence[Variable]) -> None:
        totals = [tl.sum(name, axis=0) if parts_of(b.s) > 1 else name for name in names]
        total = totals[0] if len(names) == 1 else fm.both(*totals)
        if total != names[0]:
            b.set(names[0], total)

    def bind(self, b: Builder, names: Sequence[Variable]) -> None:
        b.packs[self.contraction.sums] = Packed(names[0], 1)

    def single(self, b: Builder, names: Sequence[Variable]) -> None:
        raise TypeError("programs that share a row contract nothing")

    def end(self, b: Builder, names: Sequence[Variable]) -> None:
        raise TypeError("a contraction's rows are whole blocks")

    def merge(self, b: Builder, names: Sequence[Variable], parts: Sequence[Variable]) -> None:
        raise TypeError("programs that share a row contract nothing")


def _terms(b: Builder, c: Contraction) -> Terms:
    terms = terms_of(b, c)
    assert terms is not None
    return terms


def _operands(b: Builder, c: Contraction) -> tuple[Operand, Operand]:
    """Return the matrix and the vectors."""
    matrix, vectors = _matrix(b, c), _vectors(b, c)
    return tl.trans(matrix) if c.along == ROWS else matrix, vectors


def _matrix(b: Builder, c: Contraction) -> Expression:
    """Return the matrix, masked if it is computed from loads: masked loads are zero, values computed from
    them may not be."""
    build_nodes(b, b.need((c.matrix,)))
    value, source = b.variable(c.matrix), b.loops.nodes[_source(b, c.matrix)]
    mask = None if isinstance(source, Load) else b.mask(b.a.groups[c.matrix], None)
    return value if mask is None else tl.where(mask, value, 0.0)


def _vectors(b: Builder, c: Contraction) -> Expression:
    """Return the vectors as [vectors, columns] for sums along the columns, else as [vectors, rows]."""
    mask = b.mask(frozenset({c.along}), None)

    def masked(tile: Expression) -> Expression:
        tile = tile if mask is None else tl.where(mask, tile, 0.0)
        return tile if c.along == COLS else tl.trans(tile)

    if pieces.alike(b, c.vectors):
        return masked(pieces.lying(pieces.pack(b, c.vectors), 0 if c.along == COLS else 1))
    build_nodes(b, b.need(c.vectors))
    values = [masked(b.variable(n)) for n in c.vectors]
    values += [values[-1]] * (pieces.padded(len(values)) - len(values))
    while len(values) > 1:
        values = [fm.stack(x, y) for x, y in zip(values[::2], values[1::2], strict=True)]
    return b.once(("vectors", c.vectors[0]), "vectors", values[0])
