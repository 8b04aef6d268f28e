"""Patterns as operator DAGs: their code is traced on sizes that stand for any."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx
from torch._guards import tracing
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fusion_compiler.errors import InvalidPatternError
from fusion_compiler.ir.dag import OpDag, build
from fusion_compiler.ops.decompositions.table import decomposition_table
from fusion_compiler.passes.patterns.indexed import Indexed, bare, computes
from fusion_compiler.patterns import ClusterHint, Pattern

WILDCARD = 0.73105857863  # floats among a pattern's arguments are traced as this plus their position


@dataclass(frozen=True)
class Traced:
    """Traced holds a pattern as an operator DAG.

    tensors: parameter position -> placeholder. numbers: float of the trace -> parameter position.
    recorded: whether the code was recorded without an example (`recorded.py`): its ops have no shapes, and
        its parameters stand for tensors, numbers, lists and None alike.
    """

    name: str
    pattern: Pattern
    dag: OpDag
    tensors: Mapping[int, str]
    numbers: Mapping[float, int]
    saved: bool  # whether inputs of the graph may stand for values that the pattern computes
    recorded: bool = False

    @functools.cached_property
    def indexed(self) -> Indexed:
        return Indexed(self.dag, strict=self.recorded)

    @functools.cached_property
    def root(self) -> str:
        """Return the first output that is computed: matching starts at it."""
        inputs = set(self.dag.inputs)
        return next(b for b in (self.indexed.bare[o] for o in self.dag.outputs) if b not in inputs)

    @functools.cached_property
    def depth(self) -> int:
        """Return the largest number of ops that follow each other, after a parameter."""
        depths: dict[str, int] = {}
        for name in self.dag.order:
            depths[name] = 1 + max((depths[read] for read in self.dag.op(name).inputs), default=-1)
        return max(depths.values())

    @functools.cached_property
    def operators(self) -> frozenset[str]:
        if self.recorded:
            return frozenset(self.indexed.key[n] for n in self.dag.order if n not in self.dag.inputs)
        return frozenset(self.indexed.key[n] for n, op in self.indexed.op.items() if computes(op, self.dag))


@contextlib.contextmanager
def apart() -> Generator[None]:
    """Suspend the capture that may be under way: patterns are traced, and run, when they are first needed."""
    with (
        unset_fake_temporarily(),
        tracing(None),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.device("cpu"),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
    ):
        yield


@functools.cache
def _table() -> Mapping[Any, Callable[..., Any]]:
    return decomposition_table()


@functools.cache
def traced_hint(pattern: ClusterHint) -> Traced:
    """Trace a hint with our decompositions. Raises InvalidPatternError."""
    with apart():
        return trace(pattern, pattern.code, pattern.name, _table())


@functools.cache
def traced_gradient(pattern: ClusterHint) -> Traced:
    """Trace the gradient of a hint to its first tensor. Raises InvalidPatternError."""

    def gradient(*arguments: Any) -> torch.Tensor:
        *inputs, tangent = arguments
        first = inputs[0].detach().requires_grad_()
        return torch.autograd.grad(pattern.code(first, *inputs[1:]), first, tangent)[0]

    with apart():
        example = (*pattern.example, torch.ones_like(pattern.code(*pattern.example)))
        return trace(pattern, gradient, f"{pattern.name}_backward", _table(), example, saved=True)


@functools.cache
def traced_above_autograd(pattern: Pattern) -> Traced:
    """Trace a rewrite or user's kernel as ATen above autograd; composite operators stay whole.

    Raises InvalidPatternError.
    """
    with apart():
        traced = trace(pattern, pattern.code, pattern.name, None)
    if any(op.target == "get_attr" for op in traced.indexed.op.values()):
        detail = "its code holds a tensor of its own: make it an argument, or a Python number"
        raise InvalidPatternError(pattern=pattern.name, detail=detail)
    return traced


def check_numbers(pattern: Pattern) -> None:
    """Raise InvalidPatternError if the code computes with one of its floats in Python: the result would be a
    constant of the pattern."""
    tensors = [v for v in pattern.example if isinstance(v, torch.Tensor)]
    floats = [i for i, v in enumerate(pattern.example) if isinstance(v, float)]

    def constants(base: float) -> list[object]:
        """Return the floats of the code's trace, the open ones by their positions."""

        def run(*values: torch.Tensor) -> Any:
            supply = iter(values)
            tensor_or = (next(supply) if isinstance(v, torch.Tensor) else v for v in pattern.example)
            return pattern.code(*(base + i if i in floats else v for i, v in enumerate(tensor_or)))

        nodes = _traced(run, tensors, {}, None).graph.nodes
        leaves = (v for n in nodes for v in pytree.tree_leaves((n.args, n.kwargs)))
        open_ones = {base + i: f"argument {i}" for i in floats}
        return [open_ones.get(v, v) for v in leaves if isinstance(v, float)]

    if not floats:
        return
    with apart():
        first, second = constants(WILDCARD), constants(WILDCARD + 0.0137)
    if first != second:
        detail = "it computes with a float argument in Python: pass the computed number as an argument"
        raise InvalidPatternError(pattern=pattern.name, detail=detail)


def trace(
    pattern: Pattern,
    code: Callable[..., Any],
    name: str,
    table: Mapping[Any, Any] | None,
    example: tuple[Any, ...] | None = None,
    *,
    saved: bool = False,
) -> Traced:
    """Trace `code` on sizes that stand for any, or on those of the example if the code takes no others.

    table: decompositions; None for ATen above autograd.

    Raises InvalidPatternError if the code cannot be traced.
    """
    example = pattern.example if example is None else example
    tensors = [i for i, v in enumerate(example) if isinstance(v, torch.Tensor)]
    fixed = [WILDCARD + i if isinstance(v, float) else v for i, v in enumerate(example)]

    def run(*values: torch.Tensor) -> Any:
        arguments = list(fixed)
        for position, value in zip(tensors, values, strict=True):
            arguments[position] = value
        return code(*arguments)

    sizes = sorted({s for i in tensors for s in example[i].shape if s > 1})
    large = {size: 12 * prime for size, prime in zip(sizes, _PRIMES, strict=False)}
    try:
        try:
            gm, symbols = _traced(run, [example[i] for i in tensors], large, table), large
        except RuntimeError:  # the code has a view to literal sizes, for instance
            gm, symbols = _traced(run, [example[i] for i in tensors], {}, table), {}
    except Exception as error:
        raise InvalidPatternError(pattern=name, detail=f"{type(error).__name__}: {error}") from error
    dag = _symbolic(build(gm), {value: sympy.Symbol(f"n{size}", positive=True, integer=True)
                                for size, value in symbols.items()})  # fmt: skip
    # Each result counts, also if it is returned twice.
    returned = pytree.tree_leaves(gm.graph.output_node().args)
    dag = replace(dag, outputs=tuple(n.name for n in returned if isinstance(n, fx.Node)))
    if not dag.outputs or all(bare(dag, o) in dag.inputs for o in dag.outputs):
        raise InvalidPatternError(pattern=name, detail="its code computes nothing from its arguments")
    places = [n.name for n in gm.graph.find_nodes(op="placeholder")]
    numbers = {WILDCARD + i: i for i, v in enumerate(example) if isinstance(v, float)}
    return Traced(name, pattern, dag, dict(zip(tensors, places, strict=True)), numbers, saved)


# A size is traced as twelve times a prime: halves, thirds and quarters of it are recognised as such.
_PRIMES = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049, 1051, 1061, 1063, 1069)


def _traced(
    run: Callable[..., Any],
    values: Sequence[torch.Tensor],
    sizes: Mapping[int, int],
    table: Mapping[Any, Any] | None,
) -> fx.GraphModule:
    """Trace with the table's decompositions, or, without a table, above autograd with composite operators
    whole."""
    with FakeTensorMode():
        shapes = [[sizes.get(s, s) for s in v.shape] for v in values]
        fakes = [torch.empty(s, dtype=v.dtype, device="cpu") for s, v in zip(shapes, values, strict=True)]
        gm = make_fx(run, pre_dispatch=True)(*fakes) if table is None else _recorded(run, fakes, table)
    gm.graph.eliminate_dead_code()
    return gm


def _recorded(
    run: Callable[..., Any], fakes: Sequence[torch.Tensor], table: Mapping[Any, Any]
) -> fx.GraphModule:
    """Return the graph of make_fx(run, table)(*fakes), aliases aside, in a third of the time: no proxies."""
    recorder = _Recorder(table)
    for fake in fakes:
        recorder.bind(fake, recorder.graph.placeholder(f"arg{len(recorder.nodes)}_1"))
    with recorder:
        results = run(*fakes)
    recorder.graph.output(recorder.named(results))
    with _use_lazy_graph_module(True):  # nobody runs it
        return _make_graph_module(torch.nn.Module(), recorder.graph)


class _Recorder(TorchDispatchMode):
    """A recorder writes down every operator that is dispatched, or what its decomposition dispatches."""

    def __init__(self, table: Mapping[Any, Any]) -> None:
        super().__init__()
        self.table = table
        self.graph = fx.Graph()
        # Tensors are kept beside their nodes, so that no other tensor gets the same id.
        self.nodes: dict[int, tuple[torch.Tensor, fx.Node]] = {}

    def bind(self, value: torch.Tensor, node: fx.Node) -> None:
        self.nodes[id(value)] = (value, node)
        node.meta["val"] = value

    def named(self, values: Any) -> Any:
        """Return values with each tensor replaced by its node; a tensor without a node becomes a constant."""
        return pytree.tree_map_only(torch.Tensor, self._node, values)

    def _node(self, value: torch.Tensor) -> fx.Node:
        if id(value) not in self.nodes:
            name = f"_tensor_constant{len(self.nodes)}"
            self.bind(value, self.graph.create_node("get_attr", name, name=name))
        return self.nodes[id(value)][1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # FakeTensors are asked for prim.device
            return func(*args, **kwargs)
        with self:
            simpler = self.table[func](*args, **kwargs) if func in self.table else NotImplemented
            if simpler is NotImplemented:
                simpler = func.decompose(*args, **kwargs)
        if simpler is not NotImplemented:
            return simpler
        names, keywords = self.named((args, kwargs))
        result: Any = func(*args, **kwargs)
        node = self.graph.create_node("call_function", func, names, keywords, name=func._opname)
        if isinstance(result, torch.Tensor):
            self.bind(result, node)
            return result
        node.meta["val"] = result
        items: list[Any] = list(result) if isinstance(result, tuple | list) else []
        for i, item in enumerate(items):
            if isinstance(item, torch.Tensor):
                self.bind(item, self.graph.call_function(operator.getitem, (node, i)))
        return result


def _symbolic(dag: OpDag, symbols: Mapping[int, sympy.Symbol]) -> OpDag:
    """Return a DAG with symbols for the sizes that stand for any."""

    def of(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(of(v) for v in value)
        if (
            not isinstance(value, int)
            or isinstance(value, bool)
            or abs(value) < 3 * min(symbols, default=0) // 12
        ):
            return value
        for size, symbol in symbols.items():
            if value % (size // 12) == 0:
                return sympy.expand(symbol * sympy.Rational(value, size))
        return value

    graph = dag.graph.copy()
    for name in dag.order:
        op = dag.op(name)
        metas = tuple(replace(m, shape=of(m.shape), stride=of(m.stride)) for m in op.outputs)
        graph.nodes[name]["op"] = replace(op, args=of(op.args), outputs=metas)
    return replace(dag, graph=graph)
