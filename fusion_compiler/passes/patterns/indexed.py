"""An operator DAG as matching reads it: ops by operator, casts looked through, arguments by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch._ops import OpOverload

from fusion_compiler.ir.dag import Op, OpDag
from fusion_compiler.ir.dims import Dim

CASTS = frozenset({"_to_copy", "to", "convert_element_type"})
# These arguments do not matter: dtypes and devices, and the shapes of results, which are compared as shapes.
UNCOMPARED = frozenset({
    "device", "layout", "pin_memory", "memory_format", "dtype", "non_blocking", "copy", "size", "shape",
    "salt",
})  # fmt: skip
DIMENSIONS = frozenset({"dim", "dims", "dim0", "dim1"})


class Indexed:
    """An index holds the facts about a DAG's ops that matching needs again and again.

    op: records by name. bare: the op behind casts and aliases. key: the operator's name without its
    overload. at: ops by that name, in order. reads: the names of the operators that compute an op's operands.
    strict: casts and aliases are ops like any other, and all arguments are compared.
    """

    def __init__(self, dag: OpDag, *, strict: bool = False) -> None:
        self.dag, self.strict = dag, strict
        self.op = {name: dag.op(name) for name in dag.order}
        self.bare: dict[str, str] = {}
        self.key: dict[str, str] = {}
        self.at: dict[str, list[str]] = {}
        self.reads: dict[str, frozenset[str]] = {}
        for name, op in self.op.items():
            behind = not strict and op.inputs and looked_through(op, dag)
            self.bare[name] = self.bare[op.first] if behind else name
            self.key[name] = str(getattr(op.target, "_opname", op.target)) if strict else key_of(op)
            self.at.setdefault(self.key[name], []).append(name)
            self.reads[name] = frozenset(self.key[self.bare[i]] for i in op.inputs)
        self._arguments: dict[str, dict[str, object]] = {}

    def arguments(self, name: str) -> dict[str, object]:
        """Return `arguments_of` an op."""
        named = self._arguments.get(name)
        if named is None:
            uncompared = frozenset[str]() if self.strict else UNCOMPARED
            named = self._arguments[name] = arguments_of(self.op[name], self.dag, uncompared)
        return named


def bare(dag: OpDag, name: str) -> str:
    """Return the op behind casts and aliases."""
    op = dag.op(name)
    while op.inputs and looked_through(op, dag):
        op = dag.op(op.first)
    return op.name


def looked_through(op: Op, dag: OpDag) -> bool:
    """True if the result of an op is its operand, but for the rounding of a float."""
    if not is_cast_or_alias(op.target) or not op.inputs or op.rounds:
        return False
    before, after = dag.op(op.first).outputs, op.outputs
    return not (before and after and quantizes(before[0].dtype, after[0].dtype))


def quantizes(before: torch.dtype, after: torch.dtype) -> bool:
    """True if a cast is part of the maths: it turns floats into integers or floats of eight bits."""
    narrow = not after.is_floating_point or after.itemsize == 1
    return before.is_floating_point and before.itemsize > 1 and narrow and not after.is_complex


def is_cast_or_alias(target: object) -> bool:
    return isinstance(target, OpOverload) and (
        target._opname in CASTS or target._opname in ("alias", "detach")
    )


def key_of(op: Op) -> str:
    """Return the operator's name, with the dtype if it is a cast."""
    if not isinstance(op.target, OpOverload):
        return str(op.target)
    name = op.target._opname
    return f"{name}[{op.outputs[0].dtype}]" if name in CASTS and op.outputs else name


def computes(op: Op, dag: OpDag) -> bool:
    """True if an op has to be matched."""
    return isinstance(op.target, OpOverload) and bool(op.outputs) and not looked_through(op, dag)


def arguments_of(op: Op, dag: OpDag, uncompared: Collection[str] = UNCOMPARED) -> dict[str, object]:
    """Return arguments by schema name, defaults filled in, dimensions from the end, without those that
    matching does not compare."""
    target = op.target
    assert isinstance(target, OpOverload)
    keywords = dict(op.kwargs)
    shape = dag.op(op.first).outputs[0].shape if op.inputs and dag.op(op.first).outputs else ()
    rank = len(shape) + (target._opname == "unsqueeze")
    named: dict[str, object] = {}
    for position, argument in enumerate(target._schema.arguments):
        if argument.name in uncompared:
            continue
        value = (
            op.args[position]
            if position < len(op.args)
            else keywords.get(argument.name, argument.default_value)
        )
        if argument.name in DIMENSIONS and value is not None:
            value = _from_end(value, rank)
        named[argument.name] = value
    if target._opname == "slice" and "size" in uncompared:
        named |= _slice_bounds(named, shape)
    return named


def _from_end(dims: object, rank: int) -> object:
    if isinstance(dims, tuple | list):
        return tuple(_from_end(d, rank) for d in dims)
    return dims - rank if isinstance(dims, int) and dims >= 0 else dims


def _slice_bounds(named: Mapping[str, object], shape: tuple[Dim, ...]) -> dict[str, object]:
    """Return start and end as sizes: an end that is left out, or lies beyond the size, is the size itself."""
    size = shape[named["dim"]]  # type: ignore[index]
    start, end = named["start"], named["end"]
    if end is None or (isinstance(end, int) and (end >= 2**62 or (isinstance(size, int) and end > size))):
        end = size
    return {"start": 0 if start is None else start, "end": end}
