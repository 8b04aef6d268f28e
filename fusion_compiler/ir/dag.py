"""Read an fx graph as the operator DAG: a networkx.DiGraph of frozen Op records."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import networkx as nx
import sympy
import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._sympy.functions import Max

from fusion_compiler.ir.calls import EagerCall, call_of, name_of
from fusion_compiler.ir.dims import Dim, Hints, hint, numel, simple
from fusion_compiler.ir.reproducible import reproducible_values
from fusion_compiler.ops.eager_checks import refuses_node
from fusion_compiler.ops.own import depthwise
from fusion_compiler.ops.own.experts import expert_mm
from fusion_compiler.ops.own.recurrent import LAYERS
from fusion_compiler.ops.products import factors_of
from fusion_compiler.ops.schema import HALVES, bound, written
from fusion_compiler.ops.table import FEW_ROWS, Kind, spec_of


@dataclass(frozen=True, slots=True)
class Source:
    """A source says where an op comes from in the user's model."""

    module: str  # "model.layers.0.mlp"
    file: str
    line: int
    code: str  # the line itself


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """The object has shape and strides in elements: integers, or sympy expressions of the graph's symbols."""

    shape: tuple[Dim, ...]
    stride: tuple[Dim, ...]
    dtype: torch.dtype
    device: str


@dataclass(frozen=True, slots=True)
class Ref:
    """A Ref is an argument that is another op's result."""

    name: str


@dataclass(frozen=True)
class Op:
    """An op is one operator of the graph.

    inputs: the names of the ops that it reads, in the order of the arguments. An op that two arguments name
    is listed once, so a position says nothing about an argument, and a Collection has none: see `operand`.
    args, kwargs: as in the fx node, with Ref(name) for tensors. outputs: one per result. flops, bytes: what
    it computes, and what it reads and writes when it runs alone. reproducible: its value is one number
    wherever it is computed or held, because a discontinuous operation depends on it. rounds: its value is
    rounded to its dtype even where it is not stored: see `round_trips`. window: the elements of the
    window of a convolution that is not depthwise; 0 for other ops.
    """

    name: str
    target: object
    kind: Kind
    inputs: Collection[str]
    outputs: tuple[TensorMeta, ...]
    args: tuple[object, ...]
    kwargs: tuple[tuple[str, object], ...]
    flops: int
    bytes: int
    source: Source | None
    call: EagerCall | None = None
    reproducible: bool = False
    rounds: bool = False
    window: int = 0

    @property
    def first(self) -> str:
        """Return the first op that it reads: the operand of a view, a cast or another operator of one
        tensor."""
        return next(iter(self.inputs))

    @cached_property
    def arguments(self) -> Mapping[str, Any]:
        """Return the arguments of an ATen call by the names of its schema, with defaults filled in."""
        assert isinstance(self.target, OpOverload)
        return bound(self.target, self.args, dict(self.kwargs))

    def operand(self, argument: str) -> str:
        """Return the name of the op that is the argument of this name in the schema of an ATen call."""
        named = self.arguments[argument]
        assert isinstance(named, Ref)
        return named.name


@dataclass(frozen=True)
class OpDag:
    """An OpDag has the operators of one fx graph. graph: nodes are op names with attribute `op`; edges
    producer -> consumer.

    inputs: names of placeholders and attributes; outputs: names of what the graph returns. most: upper bounds
    of those sizes of products that are only known at run time but are few.
    """

    graph: nx.DiGraph[str]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    module: fx.GraphModule
    most: Mapping[Dim, int] = field(default_factory=dict[Dim, int])

    @cached_property
    def nodes(self) -> dict[str, fx.Node]:
        """Return the fx nodes, by name."""
        return {node.name: node for node in self.module.graph.nodes}

    @cached_property
    def _ops(self) -> dict[str, Op]:
        return {name: held["op"] for name, held in self.graph.nodes.items()}

    def op(self, name: str) -> Op:
        return self._ops[name]

    @cached_property
    def order(self) -> tuple[str, ...]:
        """Return the names in execution order."""
        return tuple(self.graph.nodes)

    def consumers(self, name: str) -> tuple[str, ...]:
        return tuple(self.graph.successors(name))


# Rows of a product that share a tile of its matrix: one or two take no longer than the matrix is read.
LEAST_SHARING = 3
# Rows of the products that one plan is made for, at most, where their number is only known at run time.
ROW_RANGES = (4, 8, FEW_ROWS)

CONVOLUTIONS = ("convolution", "conv1d", "conv2d", "conv3d", "conv_transpose")  # how their names begin

# Library calls, where their arithmetic is worth more than any fusion around them.
CONTRACTIONS = frozenset({
    "mm", "bmm", "addmm", "baddbmm", "linear", "convolution", "convolution_backward", "convolution_relu",
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "matmul",
    "_addmm_activation", "_scaled_mm", "_grouped_mm", "expert_mm", "einsum", *LAYERS,
})  # fmt: skip


def kind_of(node: fx.Node) -> Kind:
    """Return the class of an fx node: from the operator table, else contraction by name, else opaque."""
    if node.target is operator.getitem:
        parent = node.args[0]
        return (
            kind_of(parent) if isinstance(parent, fx.Node) and kind_of(parent) is Kind.LAYOUT else Kind.OPAQUE
        )
    spec = spec_of(node.target)
    if refuses_node(node):
        return Kind.OPAQUE
    if spec is not None:
        return spec.kind
    name = name_of(node.target)
    if name in CONTRACTIONS or "attention" in name:
        return Kind.CONTRACTION
    return Kind.OPAQUE


def dim_of(size: int | torch.SymInt) -> Dim:
    """Return an integer as it is, and a SymInt as its sympy expression, or as an integer if it is constant:
    also as 1 if a guard says so, by which an operator may have broadcast."""
    if isinstance(size, int):
        return size
    expr = sympy.expand(size.node.expr)
    if size.node.hint == 1 and not expr.is_Symbol and statically_known_true(size == 1):
        return 1
    return int(expr) if expr.is_Integer else expr


def most_of(size: int | torch.SymInt) -> int | None:
    """Return the least of ROW_RANGES within which guards keep a size; None if there is none, the size may be
    zero, or it is known."""
    if isinstance(size, int) or not statically_known_true(size >= 1):
        return None
    return next((most for most in ROW_RANGES if statically_known_true(size <= most)), None)


def step_of(stride: int | torch.SymInt) -> Dim:
    """Return a stride like a size. Max(1, n) is n: where n is 0 the tensor is empty and no stride counts."""
    dim = dim_of(stride)
    if isinstance(dim, int) or not dim.has(Max):
        return dim
    expr = dim.replace(
        lambda e: isinstance(e, Max) and len(e.args) == 2 and sympy.Integer(1) in e.args,
        lambda e: next(a for a in e.args if a != 1),
    )
    return simple(expr)  # type: ignore[arg-type]


def metas_of(value: object) -> tuple[TensorMeta, ...]:
    """Return the TensorMeta of every tensor in an fx node's `val`; none for symbolic integers and None."""
    if isinstance(value, torch.Tensor):
        shape = tuple(map(dim_of, value.shape))
        strided = value.layout is torch.strided
        stride = tuple(map(step_of, value.stride())) if strided else ()
        return (TensorMeta(shape, stride, value.dtype, str(value.device)),)
    if isinstance(value, list | tuple):
        return tuple(m for v in value for m in metas_of(v))
    return ()


def argument_of(arg: object) -> object:
    """Return an fx argument with nodes as Ref, symbolic integers as Dim, containers as tuples."""
    if isinstance(arg, fx.Node):
        value = arg.meta.get("val")
        return dim_of(value) if isinstance(value, int | torch.SymInt) else Ref(arg.name)
    if isinstance(arg, list | tuple):
        return tuple(argument_of(a) for a in arg)
    if isinstance(arg, slice):
        return (argument_of(arg.start), argument_of(arg.stop), argument_of(arg.step))
    return arg


def _work(node: fx.Node, outputs: Sequence[TensorMeta], inputs: Sequence[TensorMeta], hints: Hints) -> int:
    """Return the arithmetic of one op: table rows by element, matrix products by their inner dimension.

    inputs: what the op reads, each tensor once.
    """

    def numel_of(meta: TensorMeta) -> int:
        return numel(meta.shape, hints)

    spec = spec_of(node.target)
    out = sum(map(numel_of, outputs))
    if spec is not None and spec.kind not in (Kind.CONTRACTION, Kind.WINDOWS):
        return spec.flops * (max([out, *map(numel_of, inputs)]) if spec.combine else out)
    name = name_of(node.target)
    named = bound(node.target, node.args, node.kwargs) if isinstance(node.target, OpOverload) else {}
    operands = [a for a in node.args if isinstance(a, fx.Node)]

    def meta(argument: str, position: int = 0) -> TensorMeta:
        """Return the tensor of an argument by its name, or by its position if the operator has no schema."""
        return metas_of(named.get(argument, operands[position]).meta["val"])[0]

    if spec is not None and spec.kind is Kind.WINDOWS:
        count = numel_of(meta("grad_output")) if "grad_output" in named else out
        kernel = named["kernel_size" if "kernel_size" in named else "kernel"]
        sizes = [dim_of(k.meta["val"]) if isinstance(k, fx.Node) else k for k in kernel]
        return spec.flops * count * numel(sizes * (2 // len(sizes)), hints)
    if spec is not None:  # a depthwise convolution, or a gradient of one
        positions = meta("gradient") if "gradient" in named else outputs[0]
        weight = meta("weight") if "weight" in named else outputs[0]
        return spec.flops * numel_of(positions) * numel(weight.shape[2:], hints)
    backward = "backward" in name
    factors = factors_of(node.target)
    if factors is not None:
        return 2 * out * hint(meta(factors.left).shape[-1], hints)
    if "attention" in name and len(operands) >= 3:
        products = 10 if backward else 4  # two products forward, five in the backward pass
        return products * numel_of(meta("query")) * hint(meta("key", 1).shape[-2], hints)
    if name in LAYERS:  # each step's products with all weights; twice that for their gradients
        x, *others = (metas_of(operand.meta["val"])[0] for operand in named["operands"])
        steps = prod(hint(size, hints) for size in x.shape[:-1])
        weights = sum(numel_of(other) for other in others if len(other.shape) == 2)
        return 2 * steps * weights * (2 if backward else 1)
    if name.startswith(CONVOLUTIONS) and "weight" in named:
        positions = meta("grad_output") if backward else outputs[0]
        if _is_transposed(node, named):
            positions = meta("input")
        return 2 * numel_of(positions) * numel(meta("weight").shape[1:], hints) * (2 if backward else 1)
    return 0


def _is_transposed(node: fx.Node, named: Mapping[str, Any]) -> bool:
    """Return whether a convolution is transposed. named: its arguments."""
    return named.get("transposed", "transpose" in name_of(node.target))


def _window(node: fx.Node, hints: Hints) -> int:
    """Return `Op.window` of a node."""
    if not isinstance(node.target, OpOverload) or not name_of(node.target).startswith(CONVOLUTIONS):
        return 0
    named = bound(node.target, node.args, node.kwargs)
    x, weight = (named[name].meta["val"] for name in ("input", "weight"))
    if depthwise.is_depthwise(x, weight, _is_transposed(node, named), named.get("groups", 1)):
        return 0
    return numel(metas_of(weight)[0].shape[2:], hints)


def nbytes(metas: Iterable[TensorMeta], hints: Hints | None = None) -> int:
    """Return the bytes of tensors. An estimated size, such as the length that a convolution leaves, counts as
    zero if it comes out negative."""
    return sum(max(0, numel(m.shape, hints)) * m.dtype.itemsize for m in metas)


def _moved(
    node: fx.Node, outputs: Sequence[TensorMeta], reads: Mapping[fx.Node, Sequence[TensorMeta]], hints: Hints
) -> int:
    """Return the bytes that an op reads and writes when it runs alone; if rows choose matrices, one matrix a
    row."""
    into = [node.args[i] for i in written(node.target) if i < len(node.args)]
    outputs = () if written(node.target) else outputs
    moved = sum(nbytes(metas, hints) for metas in (outputs, *(m for n, m in reads.items() if n not in into)))
    if node.target is expert_mm:
        (rows,), (matrices,) = (reads[n] for n in node.args[:2])  # type: ignore[index]
        few, many = hint(rows.shape[0], hints), hint(matrices.shape[0], hints)
        moved -= max(0, many - few) * nbytes([matrices], hints) // many
    return moved


# Operators that convert, as a user's code, Dynamo's graph and ATen name them.
CONVERSIONS = frozenset({
    "to", "_to_copy", "type", "type_as", "half", "float", "double", "bfloat16", "convert_element_type",
})  # fmt: skip


def round_trips(graph: fx.Graph) -> frozenset[fx.Node]:
    """Return conversions to 16 bits that are written in the model's code and undone there, as in
    x.half().float(): nobody writes both but to round. Conversions of autocast, of decompositions and of
    gradients say only in which dtype a result is wanted."""
    rounded: set[fx.Node] = set()
    for node in graph.nodes:
        if _is_written(node):
            source = node.all_input_nodes[0]
            while kind_of(source) is Kind.LAYOUT or getattr(source.target, "_opname", "") == "clone":
                source = source.all_input_nodes[0]
            if _is_written(source) and source.meta["val"].dtype in HALVES:
                rounded.add(source)
    return frozenset(rounded)


def _is_written(node: fx.Node) -> bool:
    """True if a node is a conversion between float dtypes that the model's code asks for."""
    original, origins = node.meta.get("original_aten"), node.meta.get("from_node")
    names = [getattr(node.target, "_opname", ""), getattr(original, "_opname", "_to_copy")]
    if origins:
        names.append(str(origins[0].target).removeprefix("aten.").partition(".")[0])
    backward = node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")
    if backward or not CONVERSIONS.issuperset(names):
        return False
    values = (node.meta.get("val"), node.all_input_nodes[0].meta.get("val"))
    dtypes = [v.dtype for v in values if isinstance(v, torch.Tensor) and v.is_floating_point()]
    return len(set(dtypes)) == 2


def build(gm: fx.GraphModule, source_of: Callable[[fx.Node], Source | None] = lambda node: None) -> OpDag:
    """Read an fx graph of functional ATen ops, annotated with FakeTensors, as an OpDag."""
    graph: nx.DiGraph[str] = nx.DiGraph()
    inputs: list[str] = []
    outputs: tuple[str, ...] = ()
    hints = size_hints([node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")])
    reproducible = reproducible_values(gm.graph)
    rounded = round_trips(gm.graph)
    results: dict[fx.Node, tuple[TensorMeta, ...]] = {}
    sizes: dict[Dim, int | torch.SymInt] = {}  # of products
    for node in gm.graph.nodes:
        if node.op == "output":
            outputs = tuple(n.name for n in node.all_input_nodes)
            continue
        metas = results[node] = metas_of(node.meta.get("val"))
        reads = {n: results[n] for n in node.all_input_nodes}
        flat = [m for r in reads.values() for m in r]
        is_input = node.op in ("placeholder", "get_attr")
        if is_input:
            inputs.append(node.name)
        op = Op(
            name=node.name,
            target=node.op if is_input else node.target,
            kind=Kind.OPAQUE if is_input else kind_of(node),
            inputs=tuple(n.name for n in node.all_input_nodes),
            outputs=metas,
            args=tuple(argument_of(a) for a in node.args),
            kwargs=tuple((k, argument_of(v)) for k, v in node.kwargs.items()),
            flops=0 if is_input else _work(node, metas, flat, hints),
            bytes=0 if is_input else _moved(node, metas, reads, hints),
            source=None if is_input else source_of(node),
            call=None if is_input else call_of(node),
            reproducible=node in reproducible,
            rounds=node in rounded,
            window=_window(node, hints),
        )
        if op.kind is Kind.CONTRACTION and isinstance(value := node.meta.get("val"), torch.Tensor):
            sizes |= {dim_of(n): n for n in value.shape[-2:]}
        graph.add_node(node.name, op=op)
        graph.add_edges_from((name, node.name) for name in op.inputs)
    most = {dim: few for dim, size in sizes.items() if (few := most_of(size)) is not None}
    return OpDag(graph, tuple(inputs), outputs, gm, most)


def size_hints(inputs: Sequence[Any]) -> Hints:
    """Return the sizes that symbols had when the graph was captured."""
    hints: dict[sympy.Symbol, int] = {}
    for value in inputs:
        dims: Sequence[Any] = value.shape if isinstance(value, torch.Tensor) else (value,)
        for dim in dims:
            if isinstance(dim, torch.SymInt) and isinstance(dim.node.expr, sympy.Symbol):
                hint = dim.node.hint  # None where data decides; a ragged dimension's is no number either
                hints[dim.node.expr] = hint if isinstance(hint, int) else 64
    return hints
