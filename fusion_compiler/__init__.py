"""A graph-level fusion compiler for PyTorch: few, fast Triton kernels, and a plan that says why."""

from fusion_compiler.api import compile
from fusion_compiler.errors import FusionError, FusionWarning
from fusion_compiler.options import Options

__all__ = ["FusionError", "FusionWarning", "Options", "compile"]
