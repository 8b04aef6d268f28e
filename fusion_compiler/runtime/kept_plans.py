"""Keep plans and kernels' texts on disk: what was decided about a graph, for the next process.

A record holds a plan's clusters, refusals and notes, and the candidate programs of each cluster whose runner
was made for it (`ir/record.py`): data of classes that are listed there, and source text. The graph itself is
not in it: whoever reads it has built it again.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fusion_compiler.errors import FusionWarning
from fusion_compiler.ir.dag import OpDag
from fusion_compiler.ir.kernel import Program
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ir.plan_data import Setting
from fusion_compiler.ir.record import NotWritable, read_decisions, write_decisions
from fusion_compiler.runtime.cache import PLANS, Cache, is_own

Programs = Mapping[str, tuple[Program, ...]]  # by the clusters' names


def key_of(about: Sequence[Any], setting: Setting) -> str:
    """Return the key of a graph's decisions. about: all that they depend on beside the setting, with a digest
    of the graph and of the compiler's source; the `repr` must tell different values apart."""
    parts = [*about, setting.device, setting.numerics]
    return f"plan {hashlib.sha256(repr(parts).encode()).hexdigest()} on {setting.device.name}"


class KeptPlans:
    """Plans are kept by key. path: as for `Cache`.

    Kernels' texts run, so a folder of another user's is left alone. A damaged record is ignored with one
    FusionWarning, and written again.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self._cache = Cache(path, folder=PLANS)

    def get(self, key: str, name: str, dag: OpDag, setting: Setting) -> tuple[FusionPlan, Programs] | None:
        """Return the stored plan of `dag`, named `name`, with its programs, or None if there is none."""
        if not is_own(self._cache.path):
            return None
        written = self._cache.get(key)
        if written is None and not self._cache.is_damaged(key):
            return None
        try:
            if written is None:
                raise ValueError(f"no whole record of {key}")
            plan, programs = read_decisions(written, name, dag, setting)
            _check(plan, programs)
        except (KeyError, TypeError, ValueError, AttributeError):
            text = f"a plan in {self._cache.path} is damaged and is made anew"
            warnings.warn(text, FusionWarning, stacklevel=2)
            return None
        return plan, programs

    def put(self, key: str, plan: FusionPlan, programs: Programs) -> str | None:
        """Keep a plan. Return why it is not kept, or None."""
        if plan.decision("search") is not None:
            return "the search ended before all was tried, and another may get further"
        if not is_own(self._cache.path):
            return "the folder belongs to another user"
        try:
            written = write_decisions(plan, programs)
        except NotWritable as reason:
            return f"it holds {reason}"
        self._cache.put(key, {"cluster": plan.name, **written})
        return None


def _check(plan: FusionPlan, programs: Programs) -> None:
    """Raise KeyError or ValueError if a plan does not belong to its graph."""
    operators = plan.dag.order
    _subset((name for c in plan.clusters for name in (*c.ops, *c.outputs)), operators)
    _subset((left.op for left in plan.leftovers), operators)
    _subset(programs, [c.name for c in plan.clusters])


def _subset(names: Iterable[str], allowed: Iterable[str]) -> None:
    if unknown := set(names) - set(allowed):
        raise ValueError(f"{min(unknown)} is not in the graph")
