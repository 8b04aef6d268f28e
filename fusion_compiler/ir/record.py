"""Decisions as JSON and back: the clusters and programs of a graph whose sizes are numbers.

A frozen dataclass is a dict of its class's name and its fields; of the classes that are listed here, and of
nothing else, so that what is read names no code. Symbols are those of salts; expressions of them are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from typing import Any, get_args

import sympy
import torch
from torch._ops import OpOverload

from fusion_compiler.ir import chunks, kernel, loops, plan_data
from fusion_compiler.ir.dag import OpDag, Source
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ir.rewrite_note import RewriteNote

_CLASSES: Mapping[str, type[Any]] = {
    cls.__name__: cls
    for cls in (
        *(*get_args(loops.Node), loops.Axis, loops.Index, loops.Value, loops.Store, loops.LoopNest),
        *(plan_data.Rejected, plan_data.Leftover, plan_data.Cost, plan_data.Call, plan_data.Cluster),
        *(chunks.Rows, chunks.Joined, chunks.Added, chunks.Multiplied),
        *(kernel.Argument, kernel.Kernel, kernel.Buffer, kernel.Program, Source, RewriteNote),
    )
}
_FIELDS = {name: tuple(f.name for f in fields(cls)) for name, cls in _CLASSES.items()}
_ENUMS: Mapping[str, type[Enum]] = {"Role": kernel.Role}


class NotWritable(Exception):
    """Why something cannot be written down."""


def write(value: Any) -> Any:
    """Anything that consists of the classes above, as what JSON holds. Raises NotWritable."""
    if isinstance(value, Enum):
        if type(value).__name__ in _ENUMS:
            return {"enum": [type(value).__name__, value.name]}
    elif value is None or type(value) in (bool, int, str):
        return value
    elif type(value) is float:
        return {"float": value.hex()}
    elif isinstance(value, tuple):
        return [write(v) for v in value]  # type: ignore[misc]
    elif isinstance(value, frozenset):
        return {"set": sorted((write(v) for v in value), key=str)}  # type: ignore[misc]
    elif isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    elif isinstance(value, OpOverload):
        return {"op": [value.namespace, value._opname, value._overloadname]}
    elif isinstance(value, sympy.Symbol) and value == sympy.Symbol(value.name, integer=True):
        return {"symbol": value.name}
    elif type(value) is _CLASSES.get(type(value).__name__):
        name = type(value).__name__
        return {name: [write(getattr(value, f)) for f in _FIELDS[name]]}
    raise NotWritable(f"{type(value).__name__} {str(value)[:40]}")


def read(value: Any) -> Any:
    """What was written. Raises KeyError, TypeError, ValueError or AttributeError for anything else."""
    if isinstance(value, list):
        return tuple(map(read, value))  # type: ignore[arg-type]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()  # type: ignore[misc]
    if kind in _CLASSES:
        return _CLASSES[kind](**dict(zip(_FIELDS[kind], map(read, inner), strict=True)))
    if kind == "float":
        return float.fromhex(inner)
    if kind == "set":
        return frozenset(map(read, inner))
    if kind == "symbol":
        return sympy.Symbol(inner, integer=True)
    if kind == "enum":
        return _ENUMS[inner[0]][inner[1]]
    if kind == "op":
        found = getattr(getattr(getattr(torch.ops, inner[0]), inner[1]), inner[2])
        if isinstance(found, OpOverload):
            return found
    elif kind == "dtype":
        found = getattr(torch, inner)
        if isinstance(found, torch.dtype):
            return found
    raise ValueError(f"{kind} {inner} is nothing that is written")


_DECIDED = ("clusters", "leftovers", "rejections", "calls")  # of a plan, beside what it was made of


def write_decisions(plan: FusionPlan, programs: Mapping[str, tuple[kernel.Program, ...]]) -> dict[str, Any]:
    """A plan and the programs of its clusters, by their names, as what JSON holds. Raises NotWritable."""
    made = {field: write(getattr(plan, field)) for field in _DECIDED}
    emitted = {name: write(candidates) for name, candidates in programs.items()}
    return {**made, "notes": dict(plan.notes), "programs": emitted}


def read_decisions(
    written: Mapping[str, Any], name: str, dag: OpDag, setting: plan_data.Setting
) -> tuple[FusionPlan, dict[str, tuple[kernel.Program, ...]]]:
    """The plan of `dag` that was written, and the programs. Raises as `read` does."""
    clusters, leftovers, rejections, calls = (read(written[field]) for field in _DECIDED)
    device, notes = setting.device.name, dict(written["notes"])
    plan = FusionPlan(name, dag, clusters, leftovers, rejections, device, calls, notes, setting)
    return plan, {cluster: read(found) for cluster, found in written["programs"].items()}
