"""Contractions as products of tiles (`schedule/contractions.py`).

The vectors are one tile, and so are the sums, its pieces (`pieces.py`).

Tensor units multiply bfloat16. A float32 goes in as the sum of two or three of them, so that what is left out
is less than eager's own roundings; what a matrix holds in fewer bits goes in as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fusion_compiler.codegen import pieces
from fusion_compiler.codegen.builder import Builder, Packed
from fusion_compiler.codegen.nodes import build_nodes
from fusion_compiler.codegen.tile import Assign
from fusion_compiler.ir.loops import COLS, Compute, Load, operands_of
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


def enter(b: Builder) -> None:
    """Tells a builder which sums its tiles contract, and how these and their pieces are made."""
    if not contracts(b.a, b.s):
        return
    found = [c for c in contractions_of(b.a) if terms_of(b, c) is not None]
    b.contracted = {i: c for c in found for i in c.sums}
    for c in found:
        b.tiles[c.sums] = lambda c=c: _build(b, c)
        b.made |= dict.fromkeys(c.sums, lambda c=c: _by_themselves(b, c.sums))
    if b.a.matrices or b.a.weighted_columns:
        return
    for c in found:
        if pieces.alike(b, c.vectors):
            for sums in pieces.sums_in(b, c.vectors):
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
    node = b.loops.nodes[number]
    if isinstance(node, Compute) and node.target in CONVERSIONS and rounding_of(node) is None:
        (source,) = operands_of(node)
        node = b.loops.nodes[source]
    if rounding_of(node) == str(torch.bfloat16):
        return torch.bfloat16
    return b.dtypes[node.buffer] if isinstance(node, Load) else None


def _by_themselves(b: Builder, sums: tuple[int, ...]) -> None:
    if sums not in b.packs:
        b.tiles[sums]()
    if sums[0] not in b.env:
        pieces.unpack(b, sums)


def _build(b: Builder, c: Contraction) -> None:
    """All sums of a contraction whose matrix lies in the tile."""
    matrix, vectors = _matrix(b, c), _vectors(b, c)
    count = pieces.padded(len(c.sums))
    shape = f"[{b.s.block_rows}, {count}]" if c.along == COLS else f"[{count}, {b.tile.lanes}]"
    x, y = (matrix, f"tl.trans({vectors})") if c.along == COLS else (f"tl.trans({vectors})", matrix)
    zeros = b.let("zeros", f"tl.zeros({shape}, tl.float32)")
    names = _states(b)
    _multiply(b, c, x, y, (zeros, zeros), names)
    total = b.let("products", f"fm.contracted({', '.join(names)})")
    b.packs[c.sums] = Packed(total, 1 if c.along == COLS else 0)


@dataclass(frozen=True)
class Contracted:
    """The sums of a contraction along the row, in a pass over its columns: a state as `online_reductions.py`
    has them. Each warp multiplies some columns of a block by itself."""

    contraction: Contraction

    @property
    def numbers(self) -> tuple[int, ...]:
        return self.contraction.sums

    def wanted(self, b: Builder) -> tuple[int, ...]:
        c = self.contraction
        return (c.matrix,) if pieces.alike(b, c.vectors) else (c.matrix, *c.vectors)

    def start(self, b: Builder) -> tuple[str, ...]:
        if pieces.alike(b, self.contraction.vectors):
            pieces.prepare(b, self.contraction.vectors)
        parts, names = parts_of(b.s), _states(b)
        count = pieces.padded(len(self.numbers))
        shape = f"[{f'{parts}, ' if parts > 1 else ''}{b.s.block_rows}, {count}]"
        for name in names:
            b.set(name, f"tl.zeros({shape}, tl.float32)")
        return names

    def step(self, b: Builder, names: Sequence[str]) -> None:
        c, parts = self.contraction, parts_of(b.s)
        x, y = _matrix(b, c), _vectors(b, c)
        if parts > 1:
            x, y = f"fm.in_parts({x}, {parts})", f"tl.permute(fm.in_parts({y}, {parts}), (0, 2, 1))"
        else:
            y = f"tl.trans({y})"
        _multiply(b, c, x, y, names, names)

    def fold(self, b: Builder, names: Sequence[str]) -> None:
        for name in names if parts_of(b.s) > 1 else ():
            b.set(name, f"tl.sum({name}, axis=0)")
        b.set(names[0], f"fm.contracted({', '.join(names)})")

    def bind(self, b: Builder, names: Sequence[str]) -> None:
        b.packs[self.contraction.sums] = Packed(names[0], 1)

    def single(self, b: Builder, names: Sequence[str]) -> None:
        raise TypeError("programs that share a row contract nothing")

    def end(self, b: Builder, names: Sequence[str]) -> None:
        raise TypeError("a contraction's rows are whole blocks")

    def merge(self, b: Builder, names: Sequence[str], parts: Sequence[str]) -> None:
        raise TypeError("programs that share a row contract nothing")


def _states(b: Builder) -> tuple[str, str]:
    return b.variables.new("products"), b.variables.new("rest")


def _multiply(
    b: Builder, c: Contraction, x: str, y: str, before: Sequence[str], after: Sequence[str]
) -> None:
    terms = terms_of(b, c)
    assert terms is not None
    counts = (terms.matrix, terms.vectors) if c.along == COLS else (terms.vectors, terms.matrix)
    value = f"fm.contract({x}, {y}, {', '.join(before)}, {counts[0]}, {counts[1]})"
    b.add(Assign(tuple(after), value))


def _matrix(b: Builder, c: Contraction) -> str:
    """What is computed of masked loads may not be zero where nothing is."""
    build_nodes(b, b.need((c.matrix,)))
    value = b.variable(c.matrix)
    mask = None if isinstance(b.loops.nodes[c.matrix], Load) else b.mask(b.a.groups[c.matrix], None)
    return f"tl.where({mask}, {value}, 0.0)" if mask else value


def _vectors(b: Builder, c: Contraction) -> str:
    """[vectors, columns] where the sums are along the columns, else [rows, vectors]."""
    mask = b.mask(frozenset({c.along}), None)
    if pieces.alike(b, c.vectors):
        tile = pieces.lying(pieces.pack(b, c.vectors), 0 if c.along == COLS else 1)
        return f"tl.where({mask}, {tile}, 0.0)" if mask else tile
    build_nodes(b, b.need(c.vectors))
    values = [b.variable(n) for n in c.vectors]
    values = [f"tl.where({mask}, {v}, 0.0)" for v in values] if mask else values
    values += [values[-1]] * (pieces.padded(len(values)) - len(values))
    function = "fm.stack" if c.along == COLS else "fm.beside"
    while len(values) > 1:
        values = [f"{function}({x}, {y})" for x, y in zip(values[::2], values[1::2], strict=True)]
    return b.once(("vectors", c.vectors[0]), "vectors", values[0])
