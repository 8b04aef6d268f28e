"""Contractions as products of tiles (`schedule/contractions.py`).

The vectors are one tile, and so are the sums, its pieces (`pieces.py`).

Tensor units multiply bfloat16. A float32 goes in as the sum of two or three of them, so that what is left out
is less than eager's own roundings; what a matrix holds in fewer bits goes in as it is.
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

aten, prims = torch.ops.aten, torch.ops.prims
CONVERSIONS = (aten._to_copy.default, prims.convert_element_type.default)
# What bfloat16 holds in one number, and in two.
ONE = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.bool)
TWO = (torch.float16, torch.int16)


@dataclass(frozen=True)
class Terms:
    """How many numbers of bfloat16 an element of the matrix is, and one of the vectors."""

    matrix: int
    vectors: int

    @property
    def parts(self) -> int:
        """Of the sums: for each of the vectors' terms, and one at least for what is left of the matrix."""
        return 4 if self.vectors > 2 else max(self.matrix, self.vectors)


def enter(b: Builder) -> None:
    """Tells a builder which sums its tiles contract, and how these and their pieces are made."""
    if not contracts(b.a, b.s):
        return
    found = [c for c in contractions_of(b.a) if terms_of(b, c) is not None]
    b.contracted = {i: c for c in found for i in c.sums}
    b.as_loaded = frozenset(i for c in found for i in _taken_as_loaded(b, c))
    for c in found:
        b.tiles[c.sums] = lambda c=c: _build(b, c)
        b.made |= dict.fromkeys(c.sums, lambda c=c: _by_themselves(b, c.sums))
    if b.a.weighted_columns:
        return
    groups, _ = pieces.together(b, b.stores_of("main"))
    for nodes in (*(c.vectors for c in found if pieces.alike(b, c.vectors)), *(g.values for g in groups)):
        for sums in pieces.sums_in(b, nodes):
            b.packed_sums |= dict.fromkeys(sums, sums)
    b.made |= {i: lambda sums=sums: _by_themselves(b, sums) for i, sums in b.packed_sums.items()}


def terms_of(b: Builder, c: Contraction) -> Terms | None:
    """None where too little would be left of a matrix of float32."""
    exact = any(i not in b.rough for i in c.sums)
    held = [_held(b, n) for n in (c.matrix, *c.vectors)]
    matrix = 1 if held[0] in ONE else 2
    if matrix == 2 and exact and held[0] not in TWO:
        return None
    return Terms(matrix, 1 if all(d in ONE for d in held[1:]) else 3 if exact else 2)


def _held(b: Builder, number: int) -> torch.dtype | None:
    """The dtype in which a value lies in memory, or is rounded to; None where it is computed."""
    node = b.loops.nodes[_source(b, number)]
    if rounding_of(node) == str(torch.bfloat16):
        return torch.bfloat16
    return b.dtypes[node.buffer] if isinstance(node, Load) else None


def _source(b: Builder, number: int) -> int:
    """The node whose number this one is, in another dtype."""
    node = b.loops.nodes[number]
    if isinstance(node, Compute) and node.target in CONVERSIONS and rounding_of(node) is None:
        (number,) = operands_of(node)
    return number


def _taken_as_loaded(b: Builder, c: Contraction) -> Iterator[int]:
    """The load of a matrix of bfloat16 that nothing reads but the terms of contracted sums."""
    terms = {b.reduction(i).operand for i, other in b.contracted.items() if other.matrix == c.matrix}
    source = _source(b, c.matrix)
    node = b.loops.nodes[source]
    readers = {i for i, other in enumerate(b.loops.nodes) if {source, c.matrix} & {*operands_of(other)}}
    if isinstance(node, Load) and b.dtypes[node.buffer] is torch.bfloat16 and readers <= terms | {c.matrix}:
        yield source


def _by_themselves(b: Builder, sums: tuple[int, ...]) -> None:
    if sums not in b.packs:
        b.tiles[sums]()
    if sums[0] not in b.env:
        pieces.unpack(b, sums)


def _build(b: Builder, c: Contraction) -> None:
    """All sums of a contraction whose matrix lies in the tile: one product, with the vectors' terms side by
    side in it, as warps that hold many rows have few registers for several."""
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
    """The sums of a contraction along the row, in a pass over its columns: a state as `online_reductions.py`
    has them. Of few rows each warp multiplies some columns of a block by itself. What bfloat16 holds and what
    that leaves are products of their own: in a loop it costs more to lay them side by side."""

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
        given = (*_operands(b, self.contraction), *names)
        split = (parts_of(b.s),) if parts_of(b.s) > 1 else ()
        if terms.parts == 1:
            b.set(names[0], fm.contract(*given, 1, 1, 1, *split))
        else:
            b.add(Assign(tuple(names), fm.contract_apart(*given, terms.matrix, terms.vectors, *split)))

    def fold(self, b: Builder, names: Sequence[Variable]) -> None:
        whole = [tl.sum(name, axis=0) if parts_of(b.s) > 1 else name for name in names]
        total = whole[0] if len(names) == 1 else fm.both(*whole)
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
    found = terms_of(b, c)
    assert found is not None
    return found


def _operands(b: Builder, c: Contraction) -> tuple[Operand, Operand]:
    """The matrix and the vectors."""
    matrix, vectors = _matrix(b, c), _vectors(b, c)
    return tl.trans(matrix) if c.along == ROWS else matrix, vectors


def _matrix(b: Builder, c: Contraction) -> Expression:
    """What is computed of masked loads may not be zero where nothing is, as they are themselves."""
    build_nodes(b, b.need((c.matrix,)))
    value, source = b.variable(c.matrix), b.loops.nodes[_source(b, c.matrix)]
    mask = None if isinstance(source, Load) else b.mask(b.a.groups[c.matrix], None)
    return value if mask is None else tl.where(mask, value, 0.0)


def _vectors(b: Builder, c: Contraction) -> Expression:
    """[vectors, columns] where the sums are along the columns, else [vectors, rows]."""
    mask = b.mask(frozenset({c.along}), None)

    def lain(tile: Expression) -> Expression:
        tile = tile if mask is None else tl.where(mask, tile, 0.0)
        return tile if c.along == COLS else tl.trans(tile)

    if pieces.alike(b, c.vectors):
        return lain(pieces.lying(pieces.pack(b, c.vectors), 0 if c.along == COLS else 1))
    build_nodes(b, b.need(c.vectors))
    values = [lain(b.variable(n)) for n in c.vectors]
    values += [values[-1]] * (pieces.padded(len(values)) - len(values))
    while len(values) > 1:
        values = [fm.stack(x, y) for x, y in zip(values[::2], values[1::2], strict=True)]
    return b.once(("vectors", c.vectors[0]), "vectors", values[0])
