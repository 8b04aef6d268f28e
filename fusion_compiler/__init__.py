"""A graph-level fusion compiler for PyTorch: few, fast Triton kernels, and a plan that says why.

The public names are imported on first use: the compile server reads kernels that import
`fusion_compiler.codegen.math`, and should not wait for torch.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path
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
_GROUP, _BACKEND = "torch_dynamo_backends", "fusion_compiler.api:dynamo_backend"
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


class _Distribution(importlib.metadata.Distribution):
    """The package where it is imported from a folder and not installed: its backend for torch.compile."""

    def read_text(self, filename: str) -> str | None:
        texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: fusion-compiler\nVersion: {__version__}\n",
            "entry_points.txt": f"[{_GROUP}]\n{__name__} = {_BACKEND}\n",
        }
        return texts.get(filename)

    def locate_file(self, path: Any) -> Any:
        return Path(__path__[0]).parent / path


class _Finder(importlib.metadata.DistributionFinder):
    """It comes after the others, so that the metadata of an installed package come first."""

    def find_spec(self, *_: Any) -> None:
        """Return None: no module is found here."""

    def find_distributions(self, context: Any = None) -> Iterator[_Distribution]:
        if getattr(context, "name", None) in (None, "fusion-compiler", "fusion_compiler"):
            yield _Distribution()


def _register() -> None:
    """Let torch.compile find the backend by its name, without importing torch."""
    sys.meta_path.append(_Finder())
    registry: Any = sys.modules.get("torch._dynamo.backends.registry")
    if registry is not None:  # it may have looked for entry points already
        registry._BACKENDS.setdefault(__name__, importlib.metadata.EntryPoint(__name__, _BACKEND, _GROUP))


_register()
