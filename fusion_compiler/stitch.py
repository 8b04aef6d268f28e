"""Put kernels in the place of clusters: a new fx graph of runner calls, views and library calls."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.graph import CodeGen

from fusion_compiler.dag import OpDag
from fusion_compiler.plan import Cluster, FusionPlan

aten = torch.ops.aten


def stitch(plan: FusionPlan, runners: Mapping[str, Callable[..., Any]]) -> fx.GraphModule:
    """The graph of `plan.dag` with each cluster replaced by one call of its runner.

    runners: cluster name -> callable(*inputs, *sizes) -> tuple of outputs, in the cluster's order.
    Sizes are the symbols that the cluster's shapes use, sorted by name.
    """
    return _Stitcher(plan, runners).run()


class _Stitcher:
    def __init__(self, plan: FusionPlan, runners: Mapping[str, Callable[..., Any]]) -> None:
        self.plan, self.runners = plan, runners
        self.source = plan.dag.module
        self.nodes = {n.name: n for n in self.source.graph.nodes}
        self.graph = fx.Graph()
        self.env: dict[str, fx.Node] = {}
        self.symbols: dict[sympy.Symbol, fx.Node] = {}
        self.made = {name: c for c in plan.clusters for name in c.outputs}

    def run(self) -> fx.GraphModule:
        for node in self.source.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.copy(node)
        output = self.source.graph.output_node()
        wanted = [n.name for n in self.source.graph.nodes if self.must_run(n)]
        for name in [*wanted, *(n.name for n in output.all_input_nodes)]:
            self.require(name)
        self.graph.node_copy(output, lambda n: self.env[n.name])
        self.graph.set_codegen(BoxedCodeGen())
        return fx.GraphModule(self.source, self.graph)

    def must_run(self, node: fx.Node) -> bool:
        """Calls that change something, whoever reads them."""
        return node.op == "call_function" and node.is_impure()

    def require(self, name: str) -> None:
        """Make a value available, its operands first; iterative, for graphs of any depth."""
        stack, opened = [name], set[str]()
        while stack:
            top = stack[-1]
            if top in self.env:
                stack.pop()
                continue
            missing = [n for n in self.operands(top) if n not in self.env]
            if missing:
                unit = self.made[top].name if top in self.made else top
                if unit in opened:
                    raise RuntimeError(f"the plan of {self.plan.name} has a cycle through {unit}")
                opened.add(unit)
                stack.extend(reversed(missing))
                continue
            stack.pop()
            if top in self.made:
                self.call(self.made[top])
            else:
                self.copy(self.nodes[top])

    def operands(self, name: str) -> list[str]:
        if name in self.made:
            return list(self.made[name].inputs)
        return [n.name for n in self.nodes[name].all_input_nodes]

    def copy(self, node: fx.Node) -> None:
        new = self.graph.node_copy(node, lambda n: self.env[n.name])
        self.env[node.name] = new
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and isinstance(value.node.expr, sympy.Symbol):
            self.symbols.setdefault(value.node.expr, new)

    def call(self, cluster: Cluster) -> None:
        arguments: list[Any] = [self.env[name] for name in cluster.inputs]
        arguments += [self.size(symbol) for symbol in symbols_of(cluster, self.plan.dag)]
        call = self.graph.call_function(self.runners[cluster.name], tuple(arguments))
        for position, name in enumerate(cluster.outputs):
            item = self.graph.call_function(operator.getitem, (call, position))
            item.meta = dict(self.nodes[name].meta)
            self.env[name] = item

    def size(self, symbol: sympy.Symbol) -> fx.Node:
        """The node that holds a symbol: a placeholder, or a dimension of a tensor that has it."""
        if symbol not in self.symbols:
            for name in self.plan.dag.inputs:
                meta = self.plan.dag.op(name).outputs
                if meta and symbol in meta[0].shape:
                    where = (self.env[name], meta[0].shape.index(symbol))
                    self.symbols[symbol] = self.graph.call_function(aten.sym_size.int, where)
                    break
            else:
                raise LookupError(f"size {symbol} is no dimension of an input")
        return self.symbols[symbol]


def symbols_of(cluster: Cluster, dag: OpDag) -> tuple[sympy.Symbol, ...]:
    """The sizes that a cluster's kernel takes as arguments, sorted by name."""
    found: set[sympy.Symbol] = set()
    dims = [a.size for loops in cluster.nests for a in loops.axes]
    for name in (*cluster.inputs, *cluster.outputs):
        meta = dag.op(name).outputs[0]
        dims += [*meta.shape, *meta.stride]
    for dim in dims:
        if not isinstance(dim, int):
            found |= dim.free_symbols  # type: ignore[arg-type]
    return tuple(sorted(found, key=lambda s: s.name))


def subgraph(cluster: Cluster, dag: OpDag) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The cluster's ops as an fx module: callable(*inputs, *sizes) -> outputs in the plan's strides."""
    nodes = {n.name: n for n in dag.module.graph.nodes}
    graph = fx.Graph()
    env = {name: graph.placeholder(name) for name in cluster.inputs}
    symbols = {s: graph.placeholder(s.name) for s in symbols_of(cluster, dag)}

    def visit(name: str) -> fx.Node:
        stack = [name]
        while stack:
            node = nodes[stack[-1]]
            if node.name in env:
                stack.pop()
                continue
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt | int) and not isinstance(value, bool):
                env[node.name] = _size_node(graph, value, symbols)
                continue
            missing = [n.name for n in node.all_input_nodes if n.name not in env]
            if missing:
                stack.extend(missing)
            else:
                env[node.name] = graph.node_copy(node, lambda n: env[n.name])
        return env[name]

    graph.output(tuple(visit(name) for name in cluster.outputs))
    return fx.GraphModule(dag.module, graph)


def _size_node(graph: fx.Graph, value: torch.SymInt | int, symbols: Mapping[sympy.Symbol, fx.Node]) -> Any:
    if isinstance(value, int):
        return value
    expr = value.node.expr
    if isinstance(expr, sympy.Symbol):
        return symbols[expr]
    order = sorted(expr.free_symbols, key=lambda s: s.name)
    function = sympy.lambdify(order, expr)
    return graph.call_function(_evaluate, (function, *(symbols[s] for s in order)))


def _evaluate(function: Callable[..., Any], *sizes: int) -> int:
    return int(function(*sizes))


class BoxedCodeGen(CodeGen):
    """Takes its arguments as one list and empties it, so that each is freed at its last use."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_: Any) -> str:
        names = [v.split(":")[0].split("=")[0].strip() for v in free_vars if v != "self"]
        unpack = f"\n    {', '.join(names)}, = args_list" if names else ""
        return f"def forward(self, args_list){maybe_return_annotation}:{unpack}\n    args_list.clear()"
