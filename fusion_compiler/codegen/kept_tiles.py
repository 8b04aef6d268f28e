"""Tiles that stay in registers as they were loaded while programs wait for each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property

import torch

from fusion_compiler.codegen.bits import floats_of
from fusion_compiler.codegen.expression import convert
from fusion_compiler.codegen.placed import Emitter
from fusion_compiler.codegen.values import PlacedNest, Tile
from fusion_compiler.ir.loops import (
    Compute,
    Load,
    Node,
    Store,
    operands_of,
    store_operands,
)
from fusion_compiler.ops.syntax import Var, fm
from fusion_compiler.schedule.placed_axes import placed
from fusion_compiler.schedule.placement import Place

KEPT = (torch.float16, torch.bfloat16, torch.float32)  # dtypes of tiles that may stay as they were loaded


class KeptTiles(Emitter):
    """Emits a nest whose programs may wait for each other.

    What was computed from a loaded tile is computed again after the wait, which leaves room for more
    programs.
    kept: by load, its tile in the dtype of the buffer.
    """

    def __init__(self, nest: PlacedNest) -> None:
        super().__init__(nest)
        self.kept: dict[int, Var] = {}

    def is_full(self, number: int) -> bool:
        """True if a node has an element for each one of the tile."""
        return self.depends[number].issuperset(self.lanes)

    def is_kept(self, number: int, node: Load) -> bool:
        """True if a tile stays in registers as it was loaded."""
        leaves = self.where.of_axes(self.where.leaves)
        waits = any(leaf.place is Place.SHARED for leaf in self.where.grid)
        in_tile = waits and self.is_full(number) and not placed(leaves, Place.LOOP)
        return in_tile and self.dtypes[node.buffer] in KEPT and node.buffer not in self.empty

    def emitted(self, number: int) -> Tile:
        node = self.loops.nodes[number]
        if not isinstance(node, Load) or not self.is_kept(number, node):
            return super().emitted(number)
        tile = self.loaded(node, as_held=True)
        self.kept[number] = self.let(f"{self.called(node.buffer)}_loaded", tile.value)
        value = convert(self.kept[number], self.dtypes[node.buffer], node.dtype)
        base = self.called(node.buffer)
        return replace(tile, value=value if isinstance(value, Var) else self.let(base, value, number))

    def compute_again(self, wanted: Sequence[int]) -> None:
        """Forget tiles before `wanted` is computed, so that they are computed from loaded ones again. Tiles
        that it reads and that took special functions are kept."""
        if not self.kept:
            return
        read = {o for n in self.needed_by(wanted) for o in operands_of(self.loops.nodes[n])}
        tiles = self.scopes[self.depth].tiles
        for n, node in enumerate(self.loops.nodes):
            tile = tiles.get(self.key(n))
            if tile is not None and n in self.kept and isinstance(node, Load):
                value = convert(fm.again(self.kept[n]), self.dtypes[node.buffer], node.dtype)
                tiles[self.key(n)] = replace(tile, value=self.state(self.called(node.buffer), value, n))
            elif tile is not None and isinstance(node, Compute) and self.is_full(n):
                if n not in read or n not in self.slow:
                    del tiles[self.key(n)]

    @cached_property
    def slow(self) -> frozenset[int]:
        """Return the tiles that take special functions to compute from loaded values."""
        slow = set[int]()
        for n, node in enumerate(self.loops.nodes):
            if isinstance(node, Compute) and self.is_full(n):
                if node.spec.special > 0 or not slow.isdisjoint(operands_of(node)):
                    slow.add(n)
        return frozenset(slow)

    # -- what is computed before what ------------------------------------------------------------------

    def compute(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.tile(number)

    def needed_by(self, numbers: Iterable[int]) -> set[int]:
        """Return some nodes and all nodes that they are computed from."""
        needed, stack = set[int](), list(numbers)
        while stack:
            number = stack.pop()
            if number not in needed and self.cached(number) is None:
                needed.add(number)
                stack += self.operands(number)
        return needed

    def operands(self, number: int) -> Iterable[int]:
        """Return the nodes that are computed before a node."""
        if number in self.a.invariants:  # a loop over a ragged axis computes the rest
            return self.a.invariants[number]
        floats = floats_of(self.loops, number)
        return self.read_by(self.loops.nodes[number]) if floats is None else floats.operands()

    def read_by(self, access: Node | Store) -> Iterable[int]:
        """Return the nodes that a node or a store reads: of a condition those that are its parts."""
        operands = store_operands(access) if isinstance(access, Store) else operands_of(access)
        if not isinstance(access, Store | Load) or access.within is None:
            return operands
        return (*(n for n in operands if n != access.within), *self.parts(access.within))
