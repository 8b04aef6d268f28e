"""Put kernels in the place of clusters: a new fx graph of runner calls, views and library calls."""

from __future__ import annotations

import functools
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import sympy
import torch
from torch import fx
from torch._ops import OpOverload

from fusion_compiler.errors import IndexRangeError
from fusion_compiler.ir import loops
from fusion_compiler.ir.canonical import salts_of
from fusion_compiler.ir.dag import OpDag, size_hints
from fusion_compiler.ir.dims import hint
from fusion_compiler.ir.graph_info import argument_name
from fusion_compiler.ir.layout import is_view
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ir.plan_data import Cluster
from fusion_compiler.ir.views import laid, restrided, strides_of
from fusion_compiler.ir.writes import base_of, memory, root
from fusion_compiler.ops.own import depthwise
from fusion_compiler.ops.table import Kind, spec_of
from fusion_compiler.stitch.graph_source import GraphSource, quick
from fusion_compiler.stitch.higher_order import LOWERED, lowered
from fusion_compiler.stitch.order import Order, Step

aten = torch.ops.aten


def stitch(
    plan: FusionPlan,
    runners: Mapping[str, Callable[..., Any]],
    order: Order,
    *,
    view: Callable[..., torch.Tensor] = restrided,
    ranges: Callable[[], Mapping[str, str]] | None = None,
    hooks: Mapping[int, Callable[..., Any]] | None = None,
) -> fx.GraphModule:
    """Return the graph of `plan.dag` with each cluster replaced by one call of its runner, in an order.

    runners: cluster name -> callable(*inputs, *sizes, *salts) -> tuple of outputs, in the cluster's order.
    Sizes are the symbols that the cluster's shapes use, sorted by name.
    view: callable(tensor, shape, strides, elements further) -> another view of the tensor's memory.
    ranges: gives cluster or op name -> text of the range that a profiler shows for it.
    hooks: position of a result -> callable(result) -> what is returned in its place. It is called as soon as
        the result exists and the argument of that position (`argument_name`), which it may write, was last
        read.

    The module's `forward` takes its arguments as one list, which it empties. If a runner has a `link`, its
    function is called directly as soon as it is known.
    """
    stitcher = _Stitcher(plan, runners, order, view, hooks or {})
    module = stitcher.run(ranges)
    for runner in dict.fromkeys([*runners.values(), *stitcher.as_planned]):
        if isinstance(runner, Linked):
            runner.link(functools.partial(_relink, weakref.ref(module), runner))
    return module


@runtime_checkable
class Linked(Protocol):
    """A linked callable hands out the function to call in its place, now or once it is known."""

    def link(self, replace: Callable[[Callable[..., Any]], None], /) -> None: ...
    def __call__(self, *arguments: Any) -> Any: ...


def _relink(module: weakref.ref[fx.GraphModule], runner: object, function: Callable[..., Any]) -> None:
    """Make the generated code call `function` where it is written to call `runner`."""
    target = module()
    if target is None:
        return
    bound: dict[str, Any] = type(target).forward.__globals__
    for name, value in target.graph._codegen.bound.items():  # type: ignore[attr-defined]
        if value is runner:
            bound[name] = function


class AsPlanned:
    """An ATen call returns results in the strides that the plan has for them.

    Kernels and views go by the strides that PyTorch says beforehand, which are wrong for some (of transforms
    along inner dimensions before PyTorch 2.13, of a user's own operators). So the first call compares: from
    then on the operator is called directly, or its results are copied.
    """

    def __init__(self, target: Any, strides: Sequence[tuple[int, ...] | None]) -> None:
        self.target, self._strides = target, strides
        self.__name__ = getattr(target, "_opname", None) or str(getattr(target, "__name__", "call"))
        self._replace: Callable[[Callable[..., Any]], None] | None = None

    def link(self, replace: Callable[[Callable[..., Any]], None], /) -> None:
        self._replace = replace

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        output = self.target(*arguments, **more)
        results = output if isinstance(output, tuple | list) else (output,)
        planned = [laid(r, s) for r, s in zip(results, self._strides, strict=True)]
        if all(a is b for a, b in zip(planned, results, strict=True)):
            if self._replace is not None:
                self._replace(self.target)
            return output
        return type(output)(planned) if isinstance(output, tuple | list) else planned[0]


class _Stitcher:
    def __init__(
        self,
        plan: FusionPlan,
        runners: Mapping[str, Callable[..., Any]],
        order: Order,
        view: Callable[..., torch.Tensor],
        hooks: Mapping[int, Callable[..., Any]],
    ) -> None:
        self.plan, self.runners, self.order, self.view_function = plan, runners, order, view
        self.hooks = hooks
        self.passed: dict[str, fx.Node] = {}  # results with hooks, and what is returned for them
        self.source = plan.dag.module
        self.nodes = {n.name: n for n in self.source.graph.nodes}
        self.graph = fx.Graph()
        self.env: dict[str, fx.Node] = {}
        self.views: dict[tuple[object, ...], fx.Node] = {}
        self.symbols: dict[sympy.Symbol, fx.Node] = {}
        self.clusters = {c.name: c for c in plan.clusters}
        self.units: dict[str, fx.Node] = {}  # what runs as one: its call
        self.as_planned: list[AsPlanned] = []

    def run(self, ranges: Callable[[], Mapping[str, str]] | None) -> fx.GraphModule:
        for node in self.source.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.copy(node)
        due = self.due()
        for number, step in enumerate(self.order.steps):
            if step.name in self.clusters:
                self.call(self.clusters[step.name])
            else:
                self.library(step)
                if base_of(self.plan.dag, step.name) is None:
                    self.look(self.env[step.name])
            for name, give in due.get(number, ()):
                self.passed[name] = self.graph.call_function(give, (self.value(name),))
        self.returned()
        calls_of_units = {unit: node.name for unit, node in self.units.items()}

        def of_nodes() -> Mapping[str, str]:
            texts = ranges() if ranges is not None else {}
            return {node: texts[unit] for unit, node in calls_of_units.items() if unit in texts}

        self.graph.set_codegen(GraphSource(of_nodes if ranges is not None else None))
        return fx.GraphModule(self.source, self.graph)

    def value(self, name: str) -> fx.Node:
        """Return the node that holds a tensor. A chain of views becomes one, created where it is first
        read."""
        if name in self.env:
            return self.env[name]
        node = self.nodes[name]
        base = root(self.plan.dag, name)
        place = _place(node, self.nodes[base])
        if place is None:
            for operand in node.all_input_nodes:
                self.value(operand.name)
            self.copy(node)
            return self.env[name]
        self.env[name] = self.view(base, place, node)
        return self.env[name]

    def view(self, base: str, place: Place, node: fx.Node) -> fx.Node:
        if place == _place(self.nodes[base], self.nodes[base]):
            return self.env[base]
        if (base, place) not in self.views:
            view = self.graph.call_function(self.view_function, (self.env[base], *place))
            view.meta = dict(node.meta)
            self.views[base, place] = view
        return self.views[base, place]

    def due(self) -> Mapping[int, list[tuple[str, Callable[..., Any]]]]:
        """Return {step: [(result, hook)]} of the hooks to call after each step. A result whose memory another
        result of the graph shows has none."""
        dag, due = self.plan.dag, dict[int, list[tuple[str, Callable[..., Any]]]]()
        last: dict[str, int] = {}
        for number, step in enumerate(self.order.steps):
            last |= dict.fromkeys([*step.makes, *step.reads], number)
        results: Any = self.source.graph.output_node().args[0]
        memories = Counter(memory(dag, node.name) for node in results if isinstance(node, fx.Node))
        for position, give in self.hooks.items():
            node = results[position]
            if not isinstance(node, fx.Node):
                continue
            storage = memory(dag, node.name)
            if storage in last and storage not in dag.inputs and memories[storage] == 1:
                number = max(last[storage], last.get(argument_name(position), 0))
                due.setdefault(number, []).append((node.name, give))
        return due

    def returned(self) -> None:
        """Write the output. What the program returns as separate tensors stays separate."""
        output = self.source.graph.output_node()
        seen: set[fx.Node] = set()

        def result(node: fx.Node) -> fx.Node:
            if node.name in self.passed:
                return self.passed[node.name]
            value = self.value(node.name)
            base = root(self.plan.dag, node.name)
            is_input = value is self.env[base] and base in self.plan.dag.inputs
            if node.name != base and (value in seen or is_input):
                place = _place(node, self.nodes[base])
                if place is not None:
                    value = self.graph.call_function(self.view_function, (self.env[base], *place))
                    value.meta = dict(node.meta)
            seen.add(value)
            return value

        # Own results first: a view that is equal to one must not take its place.
        order = sorted(output.all_input_nodes, key=lambda n: n.name != root(self.plan.dag, n.name))
        results = {node: result(node) for node in order}
        self.graph.node_copy(output, lambda n: results[n])

    def library(self, step: Step) -> None:
        for operand in self.nodes[step.name].all_input_nodes:
            self.value(operand.name)
        for name in step.makes:
            self.copy(self.nodes[name])
        self.units[step.name] = self.env[step.name]

    def look(self, call: fx.Node) -> None:
        """Compare the results of an operator with the plan's strides when it first runs, unless it is a
        product."""
        value = call.meta.get("val")
        strides = [strides_of(v) for v in (value if isinstance(value, tuple | list) else (value,))]
        is_looked_at = isinstance(call.target, OpOverload) or call.target in depthwise.CALLS.values()
        if is_looked_at and any(s is not None for s in strides):
            call.target = AsPlanned(call.target, strides)
            self.as_planned.append(call.target)

    def copy(self, node: fx.Node) -> None:
        new = self.lowered(node) or self.graph.node_copy(node, lambda n: self.env[n.name])
        if node.op == "call_function":
            new.target = quick(new.target)
        self.env[node.name] = new
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and isinstance(value.node.expr, sympy.Symbol):
            self.symbols.setdefault(value.node.expr, new)

    def lowered(self, node: fx.Node) -> fx.Node | None:
        """Return the call of a higher-order operator by Inductor's kernel, or None if it has none."""
        if node.target not in LOWERED or node.all_input_nodes[0].meta["val"].device.type == "cpu":
            return None
        compiled, operands = lowered(node, self.source)
        new = self.graph.call_function(compiled, tuple(self.env[n.name] for n in operands))
        new.meta = dict(node.meta)
        return new

    def call(self, cluster: Cluster) -> None:
        arguments: list[Any] = [self.value(name) for name in cluster.inputs]
        arguments += [self.size(symbol) for symbol in symbols_of(cluster, self.plan.dag)]
        arguments += salts_of(cluster)
        call = self.graph.call_function(self.runners[cluster.name], tuple(arguments))
        call.meta = {"val": tuple(self.nodes[name].meta["val"] for name in cluster.outputs)}
        self.units[cluster.name] = call
        for position, name in enumerate(cluster.outputs):
            item = self.graph.call_function(operator.getitem, (call, position))
            item.meta = dict(self.nodes[name].meta)
            self.env[name] = item

    def size(self, symbol: sympy.Symbol) -> fx.Node:
        """Return the node that holds a symbol: a placeholder, or a dimension of a tensor that has it."""
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


Place = tuple[tuple[int, ...], tuple[int, ...], int]


def _place(node: fx.Node, base: fx.Node) -> Place | None:
    """Return shape, strides and offset by which a view reads the memory of `base`; None if not constant."""
    view, source = node.meta.get("val"), base.meta.get("val")
    if not isinstance(view, torch.Tensor) or not isinstance(source, torch.Tensor):
        return None
    if view.layout is not torch.strided or view.untyped_storage()._cdata != source.untyped_storage()._cdata:
        return None
    offset = view.storage_offset() - source.storage_offset()
    numbers = (*view.shape, *view.stride(), offset, *source.shape, *source.stride())
    if view.dtype != source.dtype or not all(isinstance(n, int) for n in numbers):
        return None
    return tuple(view.shape), view.stride(), int(offset)


def symbols_of(cluster: Cluster, dag: OpDag) -> tuple[sympy.Symbol, ...]:
    """Return the sizes that a cluster's kernel takes as arguments, sorted by name."""
    metas = [dag.op(name).outputs[0] for name in (*cluster.inputs, *cluster.outputs)]
    return loops.symbols_of(cluster.nests, [(*meta.shape, *meta.stride) for meta in metas])


def subgraph(cluster: Cluster, dag: OpDag) -> fx.GraphModule:
    """Return the cluster as an fx module: callable(*inputs, *sizes, *salts) -> outputs in the plan's strides.

    It is a function of the arguments of the cluster's kernel alone. If the ops reach a tensor of which the
    kernel reads no element (`zeros_like(x)` asks for x's shape alone), or memory that nothing was written to,
    zeros of its shape and strides stand there: as values they are valid, as indices in range.

    On a CPU a sum of float32 values, and whatever element-wise operators make of it, is float64 until it is
    stored. PyTorch computes its own norms and variances so there. The operators into which they were taken
    apart would round one by one, and a mean that is rounded to float32 spoils the variance of large numbers.
    """
    return fx.GraphModule(dag.module, _Subgraph(cluster, dag).graph)


Key = tuple[str, bool]  # an op of a subgraph, and whether a float32 value of it is not to be rounded


class _Subgraph:
    def __init__(self, cluster: Cluster, dag: OpDag) -> None:
        self.dag, self.inside, self.inputs = dag, frozenset(cluster.ops), frozenset(cluster.inputs)
        self.nodes = {n.name: n for n in dag.module.graph.nodes}
        self.graph = fx.Graph()
        self.env: dict[Key, Any] = {(name, False): self.graph.placeholder(name) for name in cluster.inputs}
        self.wide: set[fx.Node] = set()  # values that are float64 here and float32 in the graph
        self.symbols: dict[Any, Any] = {s: self.graph.placeholder(s.name) for s in symbols_of(cluster, dag)}
        self.salts = {salt: self.graph.placeholder(f"salt{i}") for i, salt in enumerate(salts_of(cluster))}
        self.graph.output(tuple(self.narrow(self.value((name, False))) for name in cluster.outputs))

    def value(self, wanted: Key) -> fx.Node:
        stack = [wanted]
        while stack:
            key = stack[-1]
            node = self.nodes[key[0]]
            value: Any = node.meta.get("val")
            if key in self.env:
                stack.pop()
            elif isinstance(value, torch.SymInt | int) and not isinstance(value, bool):
                self.env[key] = self.size(value)
            elif not self.computes(node):
                self.env[key] = self.zeros(value)
            elif missing := [k for n in node.all_input_nodes if (k := self.operand(key, n)) not in self.env]:
                stack.extend(missing)
            else:
                self.env[key] = self.copy(key)
        return self.env[wanted]

    def computes(self, node: fx.Node) -> bool:
        """True if a value that is no input comes from ops of the cluster, and they determine it."""
        if node.name in self.inside:
            return "::empty" not in node.target._schema.name  # type: ignore[union-attr]
        return is_view(self.dag.op(node.name))

    def operand(self, key: Key, node: fx.Node) -> Key:
        """Return the form in which an op reads an operand. Terms of a sum are not rounded, reproducible or
        not."""
        computed = node.op == "call_function" and node.name not in self.inputs and self.computes(node)
        two_forms = computed and self.dag.op(node.name).reproducible and self.sums(node.name) is None
        return node.name, two_forms and self.reads_wide(key)

    def sums(self, name: str) -> bool | None:
        """True if an op is a sum; None if it is no reduction."""
        spec = spec_of(self.dag.op(name).target)
        return spec.combine == "sum" if spec is not None and spec.kind is Kind.REDUCTION else None

    def reads_wide(self, key: Key) -> bool:
        """True if an op takes operands that are float64 in the place of float32."""
        name, exact = key
        op, spec = self.dag.op(name), spec_of(self.dag.op(name).target)
        if self.sums(name) is not None:
            return True
        elementwise = is_view(op) or (spec is not None and spec.kind is Kind.ELEMENTWISE)
        return elementwise and (exact or not op.reproducible)

    def copy(self, key: Key) -> fx.Node:
        op, node = self.dag.op(key[0]), self.nodes[key[0]]
        operands = {n: self.env[self.operand(key, n)] for n in node.all_input_nodes}
        takes_wide = self.reads_wide(key) and not self.wide.isdisjoint(operands.values())
        form = self.widened if takes_wide else self.narrow
        read = {n: form(value, n) for n, value in operands.items()}
        copy = self.graph.node_copy(node, read.__getitem__)
        if op.outputs and op.outputs[0].dtype is torch.float32:
            sums = bool(self.sums(key[0])) and op.outputs[0].device == "cpu"
            if sums:
                copy.kwargs = {**copy.kwargs, "dtype": torch.float64}
            self.wide |= {copy} if sums or takes_wide else set()
        if node.target is torch.ops.fusion_compiler.uniform.default:
            salt: Any = node.args[2]
            copy.args = (*copy.args[:2], self.salts.get(salt, salt))
        if node.target is torch.ops.aten.gather.default:
            copy.target = _gather
        return copy

    def narrow(self, value: fx.Node, of: fx.Node | None = None) -> fx.Node:
        """Return a value in the dtype that it has in the graph."""
        return self.converted(value, torch.float32) if value in self.wide else value

    def widened(self, value: fx.Node, of: fx.Node) -> fx.Node:
        """Return the value of a node of the graph as an operand beside a float64 one."""
        metas = self.dag.op(of.name).outputs
        single = bool(metas) and metas[0].dtype is torch.float32
        return self.converted(value, torch.float64) if single and value not in self.wide else value

    def converted(self, value: fx.Node, dtype: torch.dtype) -> fx.Node:
        return self.graph.call_function(aten._to_copy.default, (value,), {"dtype": dtype})

    def zeros(self, value: Any) -> fx.Node:
        form = [tuple(map(self.size, dims)) for dims in (value.shape, value.stride())]
        return self.graph.call_function(_zeros, (*form, value.dtype, value.device))

    def size(self, value: torch.SymInt | int) -> Any:
        if isinstance(value, int):
            return value
        expr = value.node.expr
        if isinstance(expr, sympy.Symbol):
            return self.symbol(expr)
        order = tuple(sorted(expr.free_symbols, key=str))
        return self.graph.call_function(_Size(expr, order), tuple(map(self.symbol, order)))

    def symbol(self, symbol: Any) -> Any:
        """Return the argument for a size. No result depends on a size that is no argument: it keeps its value
        from when the graph was captured, so that whatever the program asked of it holds."""
        return self.symbols[symbol] if symbol in self.symbols else hint(symbol, self.captured)

    @functools.cached_property
    def captured(self) -> Mapping[sympy.Symbol, int]:
        return size_hints([self.nodes[name].meta.get("val") for name in self.dag.inputs])


def _gather(x: torch.Tensor, dim: int, index: torch.Tensor, *, sparse_grad: bool = False) -> torch.Tensor:
    """Gather as ATen does. For an index outside it raises an error that is an IndexError as well, as
    operators do that are decomposed into a gather."""
    try:
        return torch.gather(x, dim, index, sparse_grad=sparse_grad)
    except RuntimeError as error:
        if type(error) is not RuntimeError or not x.is_cpu:
            raise
        size = x.shape[dim] if x.dim() else 1
        outside = index[(index < 0) | (index >= size)]
        if not outside.numel():
            raise
        raise IndexRangeError(what="gather", value=outside[0].item(), low=0, high=size) from None


def _zeros(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_()


class _Size:
    """A size is a function of symbols. It is an object, since a graph's text cannot hold an argument that is
    a function."""

    __name__ = __qualname__ = "size"

    def __init__(self, expr: sympy.Expr, order: tuple[sympy.Symbol, ...]) -> None:
        self._expr, self._order = expr, order

    def __call__(self, *sizes: int) -> int:
        return hint(self._expr, dict(zip(self._order, sizes, strict=True)))
