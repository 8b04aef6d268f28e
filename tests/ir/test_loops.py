"""How tiles make reductions, which are over axes that are named by number."""

from __future__ import annotations

import pytest
import sympy
import torch

from fusion_compiler.ir.dims import Dim
from fusion_compiler.ir.loops import COLS, ROWS, TILE, Axis, Reduce, axes_in, kept_axes, reduced_groups

NAMES = {"r": ROWS, "c": COLS}
PARTIAL = TILE
ANY = sympy.Symbol("s0", integer=True, positive=True)


def axes_of(text: str) -> tuple[Axis, ...]:
    """Return the axes of a text such as "r4 c8": a group's first letter and a size each; s is any size."""
    sizes: list[Dim] = [ANY if word[1:] == "s" else int(word[1:]) for word in text.split()]
    return tuple(Axis(f"a{i}", sizes[i], NAMES[word[0]]) for i, word in enumerate(text.split()))


@pytest.mark.parametrize(
    ("axes", "reduced", "over"),
    [
        ("r4 c8", {1}, {COLS}),
        ("r4 c8", {0}, {ROWS}),
        ("r4 c8", {0, 1}, TILE),
        ("r4 c1", {1}, {COLS}),  # axes of one element are axes
        ("r1 c8", {0}, {ROWS}),
        ("r1 c8", {1}, {COLS}),
        ("r1 c8", {0, 1}, TILE),
        ("r4", {}, {COLS}),  # where they are left out, the group that has none is reduced
        ("c4", {}, {ROWS}),
        ("", {}, {COLS}),
        ("c0 c8", {0, 1}, {COLS}),
        ("rs cs c8", {1, 2}, {COLS}),
        ("r4 c8 c16", {2}, PARTIAL),
        ("r4 c8 c2 c16", {2, 3}, PARTIAL),
        ("rs cs c16", {2}, PARTIAL),
        ("r1 c8 c1 c16 c1", {0, 2, 3, 4}, PARTIAL),
        ("c0 c8", {1}, PARTIAL),
        ("r4 c8 c16", {1}, PARTIAL),  # inner columns are kept
        ("r4 c8 c17", {2}, PARTIAL),
        ("r4 c8 cs", {2}, PARTIAL),
        ("r4 r4 c8 c16", {1, 3}, PARTIAL),
        ("r4 r4 c8 c16", {0, 2, 3}, PARTIAL),
        ("r8 r8 c8", {1}, PARTIAL),
    ],
)
def test_what_tiles_are_reduced_over(axes: str, reduced: set[int], over: frozenset[str]) -> None:
    own, reduce = axes_of(axes), Reduce("sum", 0, frozenset(reduced), torch.float32)
    assert reduced_groups(own, reduce) == over
    whole = reduce.axes == axes_in(own, over)
    assert kept_axes(own, reduce) == (frozenset() if whole else axes_in(own, TILE) - reduce.axes)
