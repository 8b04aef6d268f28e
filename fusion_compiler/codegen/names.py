"""Names in a kernel: those that every kernel has, and those that no variable may have."""

from __future__ import annotations

import builtins
import keyword
from typing import Literal, get_args

from fusion_compiler.ir.syntax import Name

HEADER = """import triton
import triton.language as tl
from triton.language.extra import libdevice

from fusion_compiler.codegen import math as fm


"""
# Variables that are not values of a loop nest. `Builder.define` accepts no others, so the list is complete.
Own = Literal[
    "batch", "row", "first_row", "row_inside", "col", "first_col", "col_inside", "start", "r", "program",
    "group", "part", "parts", "block",
    "x", "new_max", "shift", "tops", "off", "counts", "block_mean", "block_squares",
    "top", "left", "move", "apart",
]  # fmt: skip


def own(name: Own) -> Name:
    """Return the variable with this name, which is the same in every kernel."""
    return Name(name)


# Imports of HEADER and Python's keywords; a kernel with such a name would hide them.
GLOBAL = frozenset((*keyword.kwlist, "triton", "tl", "libdevice", "fm"))
TAKEN = GLOBAL | frozenset(dir(builtins))  # forbidden for variables
RESERVED: frozenset[str] = TAKEN | frozenset(get_args(Own))
