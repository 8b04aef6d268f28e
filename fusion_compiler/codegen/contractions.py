"""Contractions as products of tiles (`schedule/contractions.py`): of the vectors, one tile; of what comes of it,
one value for each sum.

Tensor units multiply bfloat16. A float32 goes in as the sum of two or three of them, so that what is left out
is less than eager's own roundings; what a matrix holds in fewer bits goes in as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fusion_compiler.codegen.builder import Builder
from fusion_compiler.codegen.tile import Assign
from fusion_compiler.ir.loops import COLS, Compute, Load, operands_of
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


def used(b: Builder) -> dict[int, Contraction]:
    """The contractions that a builder's tiles make, by their sums."""
    if not contracts(b.a, b.s):
        return {}
    return {i: c for c in contractions_of(b.a) if terms_of(b, c) is not None for i in c.sums}


def terms_of(b: Builder, c: Contraction) -> Terms | None:
    """None where too little would be left of a matrix of float32."""
    exact = any(i not in b.rough for i in c.sums)
    held = [_held(b, n) for n in (c.matrix, *c.vectors)]
    matrix = 1 if held[0] in ONE else 2
    if matrix == 2 and exact and held[0] not in TWO:
        return None
    return Terms(matrix, 1 if all(d in ONE for d in held[1:]) else 3 if exact else 2)


def _held(b: Builder, number: int) -> torch.dtype | None:
    """The dtype in which a value lies in memory; None where it is computed."""
    node = b.loops.nodes[number]
    if isinstance(node, Compute) and node.target in CONVERSIONS:
        (source,) = operands_of(node)
        node = b.loops.nodes[source]
    return b.dtypes[node.buffer] if isinstance(node, Load) else None


def build(b: Builder, c: Contraction) -> None:
    """The sums of a contraction whose matrix lies in the tile entirely; its operands are built."""
    matrix, vectors = _matrix(b, c), _vectors(b, c)
    shape = f"[{b.s.block_rows}, {_count(c)}]" if c.along == COLS else f"[{_count(c)}, {b.tile.lanes}]"
    x, y = (matrix, f"tl.trans({vectors})") if c.along == COLS else (f"tl.trans({vectors})", matrix)
    zeros = b.let("zeros", f"tl.zeros({shape}, tl.float32)")
    _multiply(b, c, x, y, (zeros, zeros), names := _states(b))
    total = b.let("products", f"fm.contracted({', '.join(names)})")
    _cut(b, c, total, 1 if c.along == COLS else 0)


@dataclass(frozen=True)
class Contracted:
    """The sums of a contraction along the row, in a pass over its columns: a state as `online_reductions.py`
    has them. Each warp multiplies some columns of a block by itself."""

    contraction: Contraction

    @property
    def numbers(self) -> tuple[int, ...]:
        return self.contraction.sums

    def start(self, b: Builder) -> tuple[str, ...]:
        parts = parts_of(b.s)
        shape = f"[{f'{parts}, ' if parts > 1 else ''}{b.s.block_rows}, {_count(self.contraction)}]"
        names = _states(b)
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
        _cut(b, self.contraction, names[0], 1)

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


def _count(c: Contraction) -> int:
    """Vectors of the tile: a power of two."""
    return 1 << (len(c.vectors) - 1).bit_length()


def _matrix(b: Builder, c: Contraction) -> str:
    """What is computed of masked loads may not be zero where nothing is."""
    value = b.variable(c.matrix)
    mask = None if isinstance(b.loops.nodes[c.matrix], Load) else b.mask(b.a.groups[c.matrix], None)
    return f"tl.where({mask}, {value}, 0.0)" if mask else value


def _vectors(b: Builder, c: Contraction) -> str:
    """[vectors, columns] where the sums are along the columns, else [rows, vectors]."""
    mask = b.mask(frozenset({c.along}), None)
    values = [b.variable(n) for n in c.vectors]
    values = [f"tl.where({mask}, {v}, 0.0)" for v in values] if mask else values
    values += [values[-1]] * (_count(c) - len(values))
    function = "fm.stack" if c.along == COLS else "fm.beside"
    while len(values) > 1:
        values = [f"{function}({x}, {y})" for x, y in zip(values[::2], values[1::2], strict=True)]
    return b.once(("vectors", c.vectors[0]), "vectors", values[0])


def _cut(b: Builder, c: Contraction, total: str, axis: int) -> None:
    """Each sum's own part of the products."""

    def cut(tile: str, count: int, sums: Sequence[int]) -> None:
        if count == 1:
            b.env[sums[0]] = tile
            return
        low = b.variables.new("products" if count > 2 else b.base_of(sums[0]))
        high = b.variables.new("products" if count > 2 else b.base_of(sums[0]))
        b.add(Assign((low, high), f"fm.halves({tile}, {axis})"))
        half = count // 2
        cut(low, half, sums[:half])
        if sums[half:]:
            cut(high, half, sums[half:])

    cut(total, _count(c), c.sums)
