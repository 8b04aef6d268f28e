"""Contractions on tensor units (`schedule/contractions.py`).

The vectors are one tile, and so are the sums, its pieces (`pieces.py`).

Tensor units multiply bfloat16. A float32 is the sum of two or three of them, so that the error is less than
eager's own roundings. A matrix with fewer bits is used as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from fusion_compiler.codegen.carried import State
from fusion_compiler.codegen.pieces import Packed, PackedSums, PieceEmitter, padded, values_of
from fusion_compiler.codegen.row_tiles import RowTiles
from fusion_compiler.codegen.tile import Assign
from fusion_compiler.codegen.values import PlacedNest, Tile
from fusion_compiler.ir.loops import COLS, ROWS, Load, operands_of
from fusion_compiler.ir.syntax import Expression, Var, fm, tl
from fusion_compiler.schedule.contractions import Contraction, column_parts, contractions_of
from fusion_compiler.schedule.tile_products import Terms, held, source

TWO = (torch.float16, torch.int16)  # what two bfloat16 numbers hold exactly


class ContractingEmitter(PieceEmitter):
    """Emits a nest with contractions under a placement whose tiles suit tensor units."""

    def __init__(self, nest: PlacedNest) -> None:
        super().__init__(nest)
        suited = [c for c in contractions_of(self.a) if self.terms_of(c) is not None]
        self.contracted = {i: c for c in suited for i in c.sums}
        self.as_loaded = frozenset(i for c in suited for i in self._kept_as_loaded(c))
        if self.a.weighted_columns:
            return
        groups, _ = self.together([s for s in self.loops.stores if s.value not in self.a.finish])
        vectors = (c.vectors for c in suited if self.may_be_pieces(c.vectors))
        for nodes in (*vectors, *map(values_of, groups)):
            for sums in self.sums_in(nodes):
                self.packed_sums |= dict.fromkeys(sums, sums)

    def states(self, reductions: Sequence[int]) -> list[State]:
        of_tiles: dict[int, State] = {c.sums[0]: Contracted(c) for c in self.contracted.values()}
        of_tiles |= {sums[0]: PackedSums(sums[0], sums) for sums in self.packed_sums.values()}
        inner = self.contracted.keys() | self.packed_sums.keys()
        states = super().states([n for n in reductions if n not in inner])
        states += [of_tiles[n] for n in reductions if n in of_tiles]
        return sorted(states, key=lambda state: reductions.index(state.numbers[0]))

    def operands(self, number: int) -> Iterable[int]:
        contraction = self.contracted.get(number)
        if contraction is None or self.pack_of(contraction.sums) is not None:
            return super().operands(number)
        return contraction.matrix, *contraction.vectors

    def accumulated(self) -> list[int]:
        """Return what sums over rows are computed of: for products the matrices."""
        sums = self.a.across_rows
        matrices = {self.contracted[n].matrix for n in sums if n in self.contracted}
        return [*sorted(matrices), *(self.reduction(n).operand for n in sums if n not in self.contracted)]

    def emitted(self, number: int) -> Tile:
        node = self.loops.nodes[number]
        if isinstance(node, Load) and number in self.as_loaded:
            return self.loaded_as_held(node)
        return super().emitted(number)

    def terms_of(self, c: Contraction) -> Terms | None:
        """Return the terms of a contraction, or None if too little of a float32 matrix would be
        represented."""
        is_exact = any(i not in self.fp16 for i in c.sums)
        matrix, *vectors = (held(self.loops, self.dtypes, n) for n in (c.matrix, *c.vectors))
        terms = Terms.of(matrix, vectors, is_exact)
        return None if terms.matrix == 2 and is_exact and matrix not in TWO else terms

    def _kept_as_loaded(self, c: Contraction) -> Iterator[int]:
        """Yield the load of a bfloat16 matrix that only the terms of contracted sums read."""
        same = (i for i, other in self.contracted.items() if other.matrix == c.matrix)
        terms = {self.reduction(i).operand for i in same}
        loaded = source(self.loops, c.matrix)
        node = self.loops.nodes[loaded]
        readers = {i for i, n in enumerate(self.loops.nodes) if {loaded, c.matrix} & {*operands_of(n)}}
        is_narrow = isinstance(node, Load) and self.dtypes[node.buffer] is torch.bfloat16
        if is_narrow and readers <= terms | {c.matrix}:
            yield loaded

    def contract(self, sums: tuple[int, ...]) -> Packed:
        """Return all sums of a contraction whose matrix is in the tile, as one product. The vectors' terms
        are side by side in it, because warps with many rows have few registers for several products."""
        c = self.contracted[sums[0]]
        terms = self.known_terms(c)
        rows = self.lanes[0 if c.along == COLS else -1].lanes
        zeros = tl.zeros([rows, padded(len(sums)) * terms.parts], torch.float32)
        counts = terms.matrix, terms.vectors, terms.parts
        total: Expression = self.let("products", fm.contract(*self.factors(c), zeros, *counts))
        if terms.parts > 1:
            total = fm.contracted(total, terms.parts)
        if c.along == ROWS:
            total = tl.trans(total)
        total = total if isinstance(total, Var) else self.let("products", total)
        return Packed(total, self.lanes_of(sums[0]), True, 1 if c.along == COLS else 0)

    def known_terms(self, c: Contraction) -> Terms:
        terms = self.terms_of(c)
        assert terms is not None
        return terms

    def factors(self, c: Contraction) -> tuple[Expression, Expression]:
        """Return the matrix and the vectors of a contraction."""
        matrix, vectors = self._matrix(c), self._vectors(c)
        return tl.trans(matrix) if c.along == ROWS else matrix, vectors

    def _matrix(self, c: Contraction) -> Expression:
        """Return the matrix, masked if it is computed from loads: masked loads are zero, values computed from
        them may not be."""
        value, axes = self.tile(c.matrix).value, self.node_axes[c.matrix]
        is_load = isinstance(self.loops.nodes[source(self.loops, c.matrix)], Load)
        mask = None if is_load else self.inside(axes)
        return value if mask is None else tl.where(mask.value, value, 0.0)

    def _vectors(self, c: Contraction) -> Expression:
        """Return the vectors as [vectors, columns] for sums along the columns, else as [vectors, rows]."""
        mask, is_along_cols = self.inside(self.reduction(c.sums[0]).axes), c.along == COLS

        def masked(tile: Expression) -> Expression:
            tile = tile if mask is None else tl.where(mask.value, tile, 0.0)
            return tile if is_along_cols else tl.trans(tile)

        if self.may_be_pieces(c.vectors):
            return masked(self.pack(c.vectors).lying(0 if is_along_cols else 1))
        values = [masked(self.tile(n).value) for n in c.vectors]
        values += [values[-1]] * (padded(len(values)) - len(values))
        while len(values) > 1:
            values = [fm.stack(x, y) for x, y in zip(values[::2], values[1::2], strict=True)]
        return self.let("vectors", values[0])


@dataclass(frozen=True)
class Contracted:
    """The sums of a contraction along the row, in a pass over its columns: a state of `carried.py`.

    If there are few rows, each warp multiplies some columns of a block. The products of the bfloat16 values
    and of the rests are separate: in a loop it costs more to arrange them side by side.
    """

    contraction: Contraction

    @property
    def numbers(self) -> tuple[int, ...]:
        return self.contraction.sums

    def reads(self, e: RowTiles) -> tuple[int, ...]:
        c = self.contraction
        return (c.matrix,) if _emitter(e).may_be_pieces(c.vectors) else (c.matrix, *c.vectors)

    def start(self, e: RowTiles) -> tuple[Var, ...]:
        zeros = tl.zeros([*self._split(e), e.lanes[0].lanes, padded(len(self.numbers))], torch.float32)
        has_rest = _emitter(e).known_terms(self.contraction).parts > 1
        return tuple(e.state(base, zeros) for base in ("products", "rest")[: 1 + has_rest])

    def step(self, e: RowTiles, state: Sequence[Var]) -> None:
        terms, split = _emitter(e).known_terms(self.contraction), self._split(e)
        operands = (*_emitter(e).factors(self.contraction), *state)
        if terms.parts == 1:
            e.add(Assign((state[0],), fm.contract(*operands, 1, 1, 1, *split)))
        else:
            e.add(Assign(tuple(state), fm.contract_apart(*operands, terms.matrix, terms.vectors, *split)))

    def fold(self, e: RowTiles, state: Sequence[Var]) -> None:
        totals = [tl.sum(name, axis=0) if self._split(e) else name for name in state]
        total = totals[0] if len(state) == 1 else fm.both(*totals)
        if total is not state[0]:
            e.add(Assign((state[0],), total))

    def results(self, e: RowTiles, state: Sequence[Var]) -> Mapping[int, Expression]:
        lanes = e.lanes_of(self.numbers[0])
        _emitter(e).hold(self.contraction.sums, Packed(state[0], lanes, True, 1))
        return {}

    def single(self, e: RowTiles) -> tuple[Var, ...]:
        raise TypeError("programs that share a row contract nothing")

    def end(self, e: RowTiles, state: Sequence[Var]) -> None:
        raise TypeError("a contraction's rows are whole blocks")

    def merge(self, e: RowTiles, state: Sequence[Var], parts: Sequence[Expression]) -> None:
        raise TypeError("programs that share a row contract nothing")

    def _split(self, e: RowTiles) -> list[int]:
        parts = column_parts(e.lanes[0].lanes, e.lanes[-1].lanes, e.placement.num_warps)
        return [parts] if parts > 1 else []


def _emitter(e: RowTiles) -> ContractingEmitter:
    assert isinstance(e, ContractingEmitter)
    return e
