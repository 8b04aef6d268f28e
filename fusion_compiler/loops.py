"""The tile program: one cluster over one iteration space, before a schedule is chosen.

    LoopNest := axes, nodes, stores
    axis     := name, size, group            group is "rows" or "cols"
    index    := const + sum(coeff * axis) + sum(coeff * value)
    node     := Load(buffer, index, within) | Coordinate(index) | Constant(value)
              | InRange(index, low, high) | Random(seed, index, salt)
              | Compute(target, operands) | Reduce(combine, operand, over)
    store    := buffer, index, value, within

Nodes are in SSA order and name each other by position. Every node has a dtype: that in which
it is computed (float32 for all floats but float64). A node's `groups` are the axis groups it
varies over; a tile holds it as [ROWS, COLS], [ROWS, 1], [1, COLS] or [1, 1].
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy
import torch
from torch._ops import OpOverload

Dim = int | sympy.Expr
ROWS, COLS = "rows", "cols"


@dataclass(frozen=True, slots=True)
class Axis:
    name: str
    size: Dim
    group: str


@dataclass(frozen=True, slots=True)
class Index:
    """An affine element index. Keys of terms: axis number, or ~node for an indirect one."""

    const: Dim
    terms: tuple[tuple[int, Dim], ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Element `index` of `buffer` where node `within` (a bool, or None for everywhere) holds, else 0."""

    buffer: str
    index: Index
    within: int | None
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Coordinate:
    """The index itself as an integer value (arange, iota)."""

    index: Index
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Constant:
    value: bool | int | float
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class InRange:
    """low <= index < high; the side of a concatenation, the inside of a padding."""

    index: Index
    low: Dim
    high: Dim
    dtype: torch.dtype = torch.bool


@dataclass(frozen=True, slots=True)
class Random:
    """Uniform float32 in [0, 1): lane index % 4 of Philox(seed, index // 4), stream `salt`."""

    seed: int
    index: Index
    salt: int
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class Compute:
    """`target` applied to operands: (schema name, node number or Python scalar)."""

    target: OpOverload
    operands: tuple[tuple[str, object], ...]  # ("self", Ref(3)), ("alpha", 2)
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Ref:
    node: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """Combine `operand` over whole axis groups."""

    combine: str
    operand: int
    over: frozenset[str]
    dtype: torch.dtype


Node = Load | Coordinate | Constant | InRange | Random | Compute | Reduce


@dataclass(frozen=True, slots=True)
class Store:
    buffer: str
    index: Index
    value: int
    within: int | None = None


@dataclass(frozen=True)
class LoopNest:
    axes: tuple[Axis, ...]
    nodes: tuple[Node, ...]
    stores: tuple[Store, ...]
    names: tuple[str, ...]  # of the values, for printing: one per node
