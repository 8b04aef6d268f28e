"""Names in a kernel: those that every kernel has, and those that no variable may have."""

from __future__ import annotations

import builtins
import keyword

HEADER = """import triton
import triton.language as tl
from triton.language.extra import libdevice

from fusion_compiler.codegen import math as fm


"""
# Imports of HEADER and Python's keywords; a kernel with such a name would hide them.
GLOBAL = frozenset((*keyword.kwlist, "triton", "tl", "libdevice", "fm"))
TAKEN = GLOBAL | frozenset(dir(builtins))  # forbidden for variables
