"""Define what an emitter keeps: values of the tile program, its open blocks, and the nest.

The emitters (`codegen.placed` and those that extend it) share these classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from fusion_compiler.codegen.tile import Statement, Value
from fusion_compiler.ops.syntax import Expression, Name, Var
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.placed_axes import NOWHERE
from fusion_compiler.schedule.placement import Leaf, Placement


@dataclass(frozen=True)
class Tile:
    """A value of the tile program. lanes: the leaves whose elements it has side by side. is_block: it has
    dimensions, be it of one element each; otherwise it is a scalar."""

    value: Expression
    lanes: frozenset[Leaf] = NOWHERE
    is_block: bool = False


@dataclass
class Scope:
    """An open block. loop: the leaf whose loop it is, None for the program. variables: by the expression that
    was assigned to them. tiles: by the node and the elements of unrolled axes."""

    body: list[Statement]
    loop: Leaf | None = None
    variables: dict[Value, Var] = field(default_factory=dict[Value, Var])
    tiles: dict[object, Tile] = field(default_factory=dict[object, Tile])


@dataclass(frozen=True)
class PlacedNest:
    """A loop nest under a placement. pointers, dtypes: of the buffers, by name. empty: buffers without
    elements. load_options: keyword arguments of every load."""

    analysis: Analysis
    placement: Placement
    pointers: Mapping[str, Name]
    dtypes: Mapping[str, torch.dtype]
    empty: frozenset[str] = frozenset()
    load_options: Mapping[str, Expression] = field(default_factory=dict[str, Expression])
