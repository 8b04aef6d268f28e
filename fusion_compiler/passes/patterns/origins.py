"""Origins of a graph's tensors, which a pattern's `where=` gets beside shapes and dtypes."""

from __future__ import annotations

import traceback
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from fusion_compiler.errors import PredicateError
from fusion_compiler.ir.dag import OpDag, Source
from fusion_compiler.ir.graph_info import Origins
from fusion_compiler.ir.sources import is_library
from fusion_compiler.ir.walk import walk
from fusion_compiler.passes.patterns.indexed import bare, key_of
from fusion_compiler.patterns import MatchedTensor, Pattern

Verdict = bool | str


def is_wanted(pattern: Pattern, inputs: tuple[Any, ...], dag: OpDag, o: Origins) -> Verdict:
    """Return the verdict of the pattern's `where=`, or True without one. A string is a reason to refuse.

    inputs: an op or a number for each argument. The answer is no if a gradient needs none of an
    argument's values, or if the predicate asks about a size that only data decides.

    Raises PredicateError if the predicate raises.
    """
    if pattern.where is None:
        return True
    arguments: list[Any] = []
    for value, example in zip(inputs, pattern.example, strict=False):
        if value is None:
            if isinstance(example, Tensor):
                return False
            value = example
        arguments.append(_described(value, dag, o) if isinstance(value, str) else value)
    try:
        verdict = pattern.where(*arguments)
        return verdict if isinstance(verdict, str) else bool(verdict)
    except GuardOnDataDependentSymNode:
        return False
    except Exception as error:
        raise PredicateError(
            _line_of(error), pattern=pattern.name, detail=f"{type(error).__name__}: {error}"
        ) from error


def _described(name: str, dag: OpDag, origins: Origins) -> MatchedTensor:
    value: torch.Tensor = dag.nodes[name].meta["val"]
    behind = bare(dag, name)
    computed = dag.op(behind).target != "placeholder" or behind not in origins
    kind = "computed" if computed else origins[behind].kind
    stride = tuple(value.stride()) if value.layout is torch.strided else ()
    live = value.dtype.is_floating_point and _requires_grad(name, dag, origins)
    return MatchedTensor(tuple(value.shape), stride, value.dtype, str(value.device), kind, live)


def _requires_grad(name: str, dag: OpDag, origins: Origins) -> bool:
    behind = walk([name], lambda n: () if key_of(dag.op(n)) == "detach" else dag.op(n).inputs)
    return any(n in origins and origins[n].requires_grad for n in behind)


def _line_of(error: Exception) -> Source | None:
    """Return the innermost line of the user's code that raised; None if there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not is_library(frame.filename):
            return Source("", frame.filename, frame.lineno or 0, (frame.line or "").strip())
    return None
