"""Find which ops of a graph write into memory that exists, and whose memory a value is in."""

from __future__ import annotations

from collections.abc import Mapping

from torch._ops import OpOverload

from fusion_compiler.ir.dag import Op, OpDag, Ref, TensorMeta
from fusion_compiler.ir.dims import Dim
from fusion_compiler.ir.effects import is_impure
from fusion_compiler.ir.layout import is_view, lookups_of
from fusion_compiler.ops.own.put import put
from fusion_compiler.ops.schema import WRITE_BACK, written
from fusion_compiler.ops.views import indexed


def base_of(dag: OpDag, name: str) -> str | None:
    """Return the tensor into which an op writes its result, or None for an op whose result has memory of its
    own.

    `copy_` into an argument does not count, because it ends what a graph does with it.
    """
    op = dag.op(name)
    writes = written(op.target) == (0,) and len(op.outputs) == 1
    return op.first if writes and op.target is not WRITE_BACK else None


def root(dag: OpDag, name: str) -> str:
    """Return the tensor that a chain of views shows."""
    while is_view(dag.op(name)):
        name = dag.op(name).first
    return name


def memory(dag: OpDag, name: str) -> str:
    """Return the tensor whose memory holds a value, through writes and views, those that stay calls too."""
    while (base := base_of(dag, name := root(dag, name)) or _viewed(dag.op(name))) is not None:
        name = base
    return name


def _viewed(op: Op) -> str | None:
    """Return the operand whose memory the result of a call shows, or None."""
    return op.first if isinstance(op.target, OpOverload) and op.target.is_view else None


def bases(dag: OpDag) -> Mapping[str, str]:
    """Return {op: tensor that had the memory before} of every op that writes into memory of another."""
    pairs = ((name, base_of(dag, name)) for name in dag.order)
    return {name: base for name, base in pairs if base is not None}


def waits(dag: OpDag) -> Mapping[str, tuple[str, ...]]:
    """Return the ops that must run before an op though it does not read them.

    An op that writes into memory of another waits for those that read what was there; a call that draws
    random numbers or has an effect waits for the one before it, as in the captured program.
    """
    readers: dict[str, list[str]] = {base: [] for base in bases(dag).values()}
    waiting: dict[str, tuple[str, ...]] = {}
    previous: str | None = None
    for name in dag.order:
        if (base := base_of(dag, name)) is not None:
            waiting[name] = tuple(readers[base])
        elif (node := dag.nodes[name]).op == "call_function" and is_impure(node):
            waiting[name] = () if previous is None else (previous,)
            previous = name
        operands = () if is_view(dag.op(name)) else dag.op(name).inputs
        for source in {root(dag, operand) for operand in operands} & readers.keys():
            readers[source].append(name)
    return waiting


def stored_shape(dag: OpDag, op: Op) -> tuple[Dim, ...]:
    """Return the shape of what an op stores: of its result, or of what `put_` puts into that."""
    if op.target is not put:
        return op.outputs[0].shape
    shape, lookups = meta_of(dag, op.arguments["view"]).shape, lookups_of(dag, op)
    assert lookups is not None
    if not lookups.indices:
        return shape
    used = [dim for dim, _ in lookups.indices]
    start, common = indexed(used, [meta_of(dag, index).shape for _, index in lookups.indices])
    sizes = [size for i, size in enumerate(shape) if i not in used]
    return (*sizes[:start], *common, *sizes[start:])


def meta_of(dag: OpDag, argument: object) -> TensorMeta:
    """Return the TensorMeta of an argument that is a tensor."""
    assert isinstance(argument, Ref)
    return dag.op(argument.name).outputs[0]
