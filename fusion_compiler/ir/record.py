"""Write decisions as JSON and read them back: the clusters and programs of a graph whose sizes are numbers.

A frozen dataclass is a dict of its class's name and its fields, written once whatever has it, as layers have
the same loop nests and costs; of the classes that are listed here, and of nothing else, so that what is read
names no code. Symbols are those of salts; expressions of them are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from typing import Any, get_args

import sympy
import torch
from torch._ops import OpOverload

from fusion_compiler.ir import chunks, kernel, loops, plan_data
from fusion_compiler.ir.dag import OpDag, Source
from fusion_compiler.ir.decision import Decision, Outcome
from fusion_compiler.ir.plan import FusionPlan

_CLASSES: Mapping[str, type[Any]] = {
    cls.__name__: cls
    for cls in (
        *(*get_args(loops.Node), loops.Axis, loops.Index, loops.Value, loops.Store, loops.LoopNest),
        *(plan_data.Cost, plan_data.Call, plan_data.Cluster),
        *(chunks.Rows, chunks.Joined, chunks.Added, chunks.Multiplied, chunks.Whole),
        *(kernel.Argument, kernel.Kernel, kernel.Buffer, kernel.Program, Source, Decision),
    )
}
_FIELDS = {name: tuple(f.name for f in fields(cls)) for name, cls in _CLASSES.items()}
_ENUMS: Mapping[str, type[Enum]] = {"Role": kernel.Role, "Outcome": Outcome}


class NotWritable(Exception):
    """The error says why something cannot be written down."""


def write(value: Any) -> dict[str, Any]:
    """Return anything that consists of the classes above as what JSON holds. Raise NotWritable."""
    writer = _Writer()
    return {"value": writer.write(value), "values": writer.values}


def read(written: Mapping[str, Any]) -> Any:
    """Return the written object. Raise KeyError, TypeError, ValueError or AttributeError for other data."""
    return _Reader(written["values"]).read(written["value"])


class _Writer:
    """A writer collects objects. values: each object of the classes above once, as it is written. An object
    that holds another one names its number."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._known: dict[str, int] = {}

    def write(self, value: Any) -> Any:
        if isinstance(value, Enum):
            if type(value).__name__ in _ENUMS:
                return {"enum": [type(value).__name__, value.name]}
        elif value is None or type(value) in (bool, int, str):
            return value
        elif type(value) is float:
            return {"float": value.hex()}
        elif isinstance(value, tuple):
            return list(map(self.write, value))  # type: ignore[arg-type]
        elif isinstance(value, frozenset):
            return {"set": sorted(map(self.write, value), key=str)}  # type: ignore[arg-type]
        elif isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        elif isinstance(value, OpOverload):
            return {"op": [value.namespace, value._opname, value._overloadname]}
        elif isinstance(value, sympy.Symbol) and value == sympy.Symbol(value.name, integer=True):
            return {"symbol": value.name}
        elif type(value) is _CLASSES.get(type(value).__name__):
            name = type(value).__name__
            return self._once({name: [self.write(getattr(value, f)) for f in _FIELDS[name]]})
        raise NotWritable(f"{type(value).__name__} {str(value)[:40]}")

    def _once(self, written: dict[str, Any]) -> dict[str, int]:
        """Return the number of a value, which is compared as text, in which 1, 1.0 and True differ."""
        number = self._known.setdefault(json.dumps(written), len(self.values))
        if number == len(self.values):
            self.values.append(written)
        return {"at": number}


class _Reader:
    def __init__(self, written: list[Any]) -> None:
        self.values: list[Any] = []
        for value in written:  # what one consists of comes before it
            self.values.append(self._made(value))

    def _made(self, written: Any) -> Any:
        ((name, inner),) = written.items()
        return _CLASSES[name](**dict(zip(_FIELDS[name], map(self.read, inner), strict=True)))

    def read(self, value: Any) -> Any:
        if isinstance(value, list):
            return tuple(map(self.read, value))  # type: ignore[arg-type]
        if not isinstance(value, dict):
            return value
        ((kind, inner),) = value.items()  # type: ignore[misc]
        if kind == "at":
            if not 0 <= inner < len(self.values):
                raise ValueError(f"value {inner} of {len(self.values)}")
            return self.values[inner]
        if kind == "float":
            return float.fromhex(inner)
        if kind == "set":
            return frozenset(map(self.read, inner))
        if kind == "symbol":
            return sympy.Symbol(inner, integer=True)
        if kind == "enum":
            return _ENUMS[inner[0]][inner[1]]
        if kind == "op":
            item = getattr(getattr(getattr(torch.ops, inner[0]), inner[1]), inner[2])
            if isinstance(item, OpOverload):
                return item
        elif kind == "dtype":
            item = getattr(torch, inner)
            if isinstance(item, torch.dtype):
                return item
        raise ValueError(f"{kind} {inner} cannot be written")


def write_decisions(plan: FusionPlan, programs: Mapping[str, tuple[kernel.Program, ...]]) -> dict[str, Any]:
    """Return a plan and the programs of its clusters, by their names, as what JSON holds. Raise
    NotWritable."""
    return write((plan.clusters, plan.calls, plan.decisions, tuple(programs.items())))


def read_decisions(
    written: Mapping[str, Any], name: str, dag: OpDag, setting: plan_data.Setting
) -> tuple[FusionPlan, dict[str, tuple[kernel.Program, ...]]]:
    """Return the plan of `dag` that was written, and the programs. Raise as `read` does."""
    clusters, calls, decisions, programs = read(written)
    return FusionPlan(name, dag, clusters, setting.device.name, calls, decisions, setting), dict(programs)
