"""Keep plans and kernels' texts on disk: what was decided about a graph, for the next process.

A record holds a plan's clusters, refusals and notes, and the candidate programs of each cluster whose runner
was made for it (`ir/record.py`): data of classes that are listed there, and source text. The graph itself is
not in it: whoever reads it has built it again.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from fusion_compiler.errors import FusionWarning
from fusion_compiler.ir.dag import OpDag
from fusion_compiler.ir.kernel import Program
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ir.plan_data import Setting
from fusion_compiler.ir.record import NotWritable, read_decisions, write_decisions
from fusion_compiler.support.store import Key, Store

Programs = Mapping[str, tuple[Program, ...]]  # by the clusters' names


def read_plan(
    store: Store, key: Key, name: str, dag: OpDag, setting: Setting
) -> tuple[FusionPlan, Programs] | None:
    """Return the stored plan of `dag`, named `name`, with its programs, or None if there is none.

    A damaged record is ignored with one FusionWarning, and written again.
    """
    written = store.get(key)
    if written is None and not store.is_damaged(key):
        return None
    try:
        if written is None:
            raise ValueError("the record is incomplete")
        plan, programs = read_decisions(written, name, dag, setting)
        _check(plan, programs)
    except (KeyError, TypeError, ValueError, AttributeError):
        text = f"a stored plan in {store.folder(key.kind)} is damaged: it is computed again and replaced"
        warnings.warn(text, FusionWarning, stacklevel=2)
        return None
    return plan, programs


def write_plan(store: Store, key: Key, plan: FusionPlan, programs: Programs) -> str | None:
    """Keep a plan. Return why it is not kept, or None."""
    if plan.decision("search") is not None:
        return "the search ended before all was tried, and another may get further"
    try:
        written = write_decisions(plan, programs)
    except NotWritable as reason:
        return f"it holds {reason}"
    store.put(key, {"cluster": plan.name, **written})
    return None


def _check(plan: FusionPlan, programs: Programs) -> None:
    """Raise ValueError if a plan does not belong to its graph."""
    operators = {left.subject for left in plan.leftovers}
    operators = operators.union(*({*c.ops, *c.outputs} for c in plan.clusters))
    unknown = operators.difference(plan.dag.order) | programs.keys() - {c.name for c in plan.clusters}
    if unknown:
        raise ValueError(f"{min(unknown)} is not in the graph")
