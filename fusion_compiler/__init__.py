"""A graph-level fusion compiler for PyTorch: few, fast Triton kernels, and a plan that says why.

The public names are imported on first use: the compile server reads kernels that import
`fusion_compiler.codegen.math`, and should not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusion_compiler.api import compile
    from fusion_compiler.errors import FusionError, FusionWarning
    from fusion_compiler.machines.compression import Compression
    from fusion_compiler.machines.partition import partition
    from fusion_compiler.machines.pipeline import Pipeline
    from fusion_compiler.machines.plan import Link, Machine
    from fusion_compiler.machines.run import PipelineRunner
    from fusion_compiler.optimizer.fuse import fuse_optimizer
    from fusion_compiler.optimizer.fused import FusedOptimizer
    from fusion_compiler.options import Options
    from fusion_compiler.patterns import DEFAULT_PATTERNS, cluster_hint, rewrite, user_kernel
    from fusion_compiler.report.explanation import explain
    from fusion_compiler.report.profiling import Profile, profile
    from fusion_compiler.report.report import Report

__version__ = "0.1.0"
_HOMES = {
    "compile": "api",
    "FusionError": "errors",
    "FusionWarning": "errors",
    "FusedOptimizer": "optimizer.fused",
    "fuse_optimizer": "optimizer.fuse",
    "Link": "machines.plan",
    "Machine": "machines.plan",
    "Pipeline": "machines.pipeline",
    "partition": "machines.partition",
    "Compression": "machines.compression",
    "PipelineRunner": "machines.run",
    "Options": "options",
    "DEFAULT_PATTERNS": "patterns",
    "cluster_hint": "patterns",
    "explain": "report.explanation",
    "Profile": "report.profiling",
    "profile": "report.profiling",
    "Report": "report.report",
    "rewrite": "patterns",
    "user_kernel": "patterns",
}
__all__ = [
    "DEFAULT_PATTERNS",
    "Compression",
    "FusedOptimizer",
    "FusionError",
    "FusionWarning",
    "Link",
    "Machine",
    "Options",
    "Pipeline",
    "PipelineRunner",
    "Profile",
    "Report",
    "cluster_hint",
    "compile",
    "explain",
    "fuse_optimizer",
    "partition",
    "profile",
    "rewrite",
    "user_kernel",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
