"""The step of an optimizer's class, traced as an element-wise graph of one parameter's update.

No optimizer's algorithm is written here: its class's `step` runs once on FakeTensors, with one parameter, as
`torch.optim`'s single-tensor form does for each. Its float hyper-parameters and its counters (`step`) are
SymFloats there, so that every computation on them is recorded, and every branch that depends on them becomes
a guard:

    step of AdamW  ->  numbers    s0 = 1 - lr * weight_decay, s1 = 1 - beta1, ...    Python, double precision
                       body       param * s0, lerp(exp_avg, grad, s1), ...           ATen, element-wise
                       guards     weight_decay != 0, ...

Numbers are computed on the host at every step, as torch.optim does, and are arguments of the kernel: a
scheduler that changes `lr` changes no kernel.
"""

from __future__ import annotations

import ctypes
import functools
import math
import operator
import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, handle_sym_dispatch, make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.optim import Optimizer
from torch.utils._sympy.printers import PythonPrinter

from fusion_compiler.capture.graphs import nodes_in
from fusion_compiler.ir.walk import reached
from fusion_compiler.ops.decompositions.table import decomposition_table
from fusion_compiler.ops.schema import WRITE_BACK
from fusion_compiler.ops.table import Kind, spec_of

aten = torch.ops.aten
PARAM, GRAD = "param", "grad"
SHAPE = (64,)  # stands for any parameter's shape
# These choose which of PyTorch's implementations runs, and do not change the result.
FLAGS = ("foreach", "fused", "capturable", "differentiable")
OF_PYTORCH = ("_opt_called", "_step_count", "_zero_grad_profile_name", "_step_supports_amp_scaling")
HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")

Path = tuple[Any, ...]  # of a hyper-parameter in its group: ("betas", 0)


class Refused(Exception):
    """No kernel carries out an update; the message says why."""


@dataclass(frozen=True)
class Structure:
    """A structure is all that a formula is specialised to, except the values of numbers.

    states: names of the parameter's state tensors, all of its shape. counters: names and dtypes of its state
    tensors of one number. floats: the hyper-parameters that are numbers of any value. constants: the others.
    dtype: the dtype of the computation. shape, attributes: those of the parameter and of the optimizer, where
    the step may look at them.
    """

    states: tuple[str, ...]
    counters: tuple[tuple[str, torch.dtype], ...]
    floats: tuple[Path, ...]
    constants: tuple[tuple[Path, Any], ...]
    dtype: torch.dtype
    shape: tuple[int, ...] = SHAPE
    attributes: tuple[tuple[str, Any], ...] = ()

    @property
    def tensors(self) -> tuple[str, ...]:
        return (PARAM, GRAD, *self.states)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the floats and the counters, such as "lr", "betas[0]" and "step"."""
        floats = (path[0] + "".join(f"[{step}]" for step in path[1:]) for path in self.floats)
        return (*floats, *(name for name, _ in self.counters))


@dataclass(frozen=True, eq=False)
class Formula:
    """A formula computes one parameter's update.

    body: takes the tensors of the structure and then its numbers, and returns the new values of the tensors
    `updated` (positions); functional, element-wise, in the structure's dtype. meanings: the body's numbers as
    text. numbers: takes the floats of the structure and its counters, and returns (the body's numbers, the
    counters' new values), in double precision. holds: takes the same, and returns True if the step takes the
    same branches with them. guards: these conditions as text, for people. text: the whole formula as text;
    formulas of parameters of several shapes are one if their texts are equal.
    """

    structure: Structure
    body: fx.GraphModule
    updated: tuple[int, ...]
    meanings: tuple[str, ...]
    numbers: Callable[..., tuple[tuple[float, ...], tuple[float, ...]]]
    holds: Callable[..., bool]
    guards: tuple[str, ...]
    text: str


def own_step(optimizer: Optimizer) -> Callable[[Any], Any]:
    """Return the step of the optimizer's class, without the hooks that PyTorch puts around it."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def attributes_of(optimizer: Optimizer) -> tuple[tuple[str, Any], ...]:
    """Return the numbers, flags and names that an optimizer of a user's class keeps as attributes."""
    plain = ((n, v) for n, v in optimizer.__dict__.items() if isinstance(v, bool | int | float | str | None))
    return tuple((name, value) for name, value in plain if name not in OF_PYTORCH)


def floats_of(
    group: Mapping[str, Any],
) -> tuple[tuple[tuple[Path, float], ...], tuple[tuple[Path, Any], ...]]:
    """Return a group's hyper-parameters, (floats, all others), by path. A tensor of one number is its value.

    Raises Refused for a tensor that is not on the CPU, whose value the host would have to wait for.
    """
    floats: list[tuple[Path, float]] = []
    others: list[tuple[Path, Any]] = []
    for name, value in sorted(group.items()):  # groups differ in the order of their keys
        if name == "params" or name in FLAGS:
            continue
        for path, leaf in _leaves((name,), value):
            if isinstance(leaf, Tensor) and leaf.numel() == 1:
                if leaf.device.type != "cpu":
                    raise Refused(f"{name} is a tensor on {leaf.device}; keep it on the CPU, or as a float")
                leaf = float(leaf)
            if isinstance(leaf, float):
                floats.append((path, leaf))
            else:
                others.append((path, leaf))
    return tuple(floats), tuple(others)


def _leaves(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, tuple | list):
        for i, item in enumerate(value):
            yield from _leaves((*path, i), item)
    else:
        yield path, value


def trace(
    optimizer: Optimizer, group: Mapping[str, Any], structure: Structure, values: tuple[float, ...]
) -> Formula:
    """Trace the formula of one parameter in `group`. values: those of the floats, then the counters, now.

    Raises Refused with the reason if the step is not element-wise, or reads or changes what it may not.
    """
    env = _RoundingEnv()
    fakes = FakeTensorMode(shape_env=env)
    with fakes:
        tensors = [
            torch.empty(structure.shape, dtype=structure.dtype, device="cpu") for _ in structure.tensors
        ]
    symbols = [_symbol(env, f"n{i}", value) for i, value in enumerate(values)]
    names = {str(s.node.expr): f"n{i}" for i, s in enumerate(symbols)}  # before a guard makes one a constant
    run = functools.partial(_run, optimizer, group, structure)
    try:
        function = torch.func.functionalize(run, remove="mutations_and_views")
        gm = make_fx(function, decomposition_table=decomposition_table())(*tensors, *symbols)
    except Refused:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise Refused(f"its step cannot be traced: {type(error).__name__}: {lines[0]}") from error
    conditions = [_guard_text(guard.expr, names, env.rounded) for guard in env.guards]
    readable = dict(zip(names, structure.names, strict=True))
    guards = tuple(_shortened(_guard_text(guard.expr, readable, env.rounded)) for guard in env.guards)
    body, numbers, updated, meanings = _split(gm, structure, fakes)
    holds = _function(f"lambda {', '.join(names.values())}: {' and '.join(conditions) or 'True'}")
    text = "\n".join([body.code, numbers.code, *conditions, str(updated)])
    return Formula(
        structure, body, updated, meanings, numbers.forward, functools.partial(_holds, holds), guards, text
    )


def _holds(guards: Callable[..., bool], *values: float) -> bool:
    try:
        return guards(*values)
    except (ArithmeticError, TypeError, ValueError):  # for example the root of a negative number
        return False


def _symbol(env: ShapeEnv, name: str, value: float) -> Any:
    source = ConstantSource(name)
    symbol = env.create_unspecified_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    return env.create_symfloatnode(symbol, hint=value, source=source)


def _guard_text(expr: Any, names: Mapping[str, str], rounded: Mapping[Any, Any]) -> str:
    while rounded_symbols := [s for s in expr.free_symbols if s in rounded]:
        expr = expr.xreplace({s: rounded[s] for s in rounded_symbols})
    renamed = expr.xreplace({s: sympy.Symbol(names[str(s)]) for s in expr.free_symbols})
    return f"({PythonPrinter().doprint(renamed)})"


def _shortened(text: str) -> str:
    """Drop trailing zeros of decimals: 1.0000000000000000 -> 1.0."""
    return re.sub(r"(\.\d+?)0+\b", r"\1", text)


def _function(text: str) -> Callable[..., Any]:
    return eval(text, {"math": math})


# -- the step, run once ----------------------------------------------------------------------------


def single(value: Any) -> Any:
    """Round a number to float32. While a step is traced, return a new SymFloat, which no algebra sees
    through, and record a call of this function in the graph."""
    if isinstance(value, torch.SymFloat):
        return handle_sym_dispatch(single, (value,), {}) if get_proxy_mode() is not None else _fresh(value)
    return ctypes.c_float(value).value


def _fresh(value: torch.SymFloat) -> Any:
    env = value.node.shape_env
    symbol = _symbol(env, f"single{len(env.var_to_sources)}", single(value.node.hint))
    env.rounded[symbol.node.expr] = value.node.expr
    return symbol


class _RoundingEnv(ShapeEnv):
    """This ShapeEnv remembers roundings. rounded: symbol of a float32 number -> the unrounded expression."""

    def __init__(self) -> None:
        super().__init__()
        self.rounded: dict[Any, Any] = {}


class _Counter:
    """A `_Counter` replaces a state tensor of one number, which the step changes in place, by a SymFloat."""

    def __init__(self, value: Any, dtype: torch.dtype) -> None:
        self.value = value
        self.rounded = single if dtype == torch.float32 else lambda value: value

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  torch.optim asks for a tensor
        return Tensor

    def item(self) -> Any:
        return self.value

    def __iadd__(self, other: Any) -> _Counter:
        self.value = self.rounded(self.value + self.rounded(_value(other)))
        return self

    def __imul__(self, other: Any) -> _Counter:
        self.value = self.rounded(self.value * self.rounded(_value(other)))
        return self

    add_, mul_ = __iadd__, __imul__


def _value(other: Any) -> Any:
    return other.value if type(other) is _Counter else other


def _operation(function: Callable[..., Any], reflected: bool) -> Callable[..., Any]:
    def operation(self: _Counter, other: Any) -> Any:
        pair = (self.value, _value(other))
        return function(*(reversed(pair) if reflected else pair))

    return operation


for _name in ("add", "sub", "mul", "truediv", "pow", "mod", "floordiv", "lt", "le", "gt", "ge", "eq", "ne"):
    setattr(_Counter, f"__{_name}__", _operation(getattr(operator, _name), reflected=False))
    if _name not in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(_Counter, f"__r{_name}__", _operation(getattr(operator, _name), reflected=True))


def _run(optimizer: Optimizer, group: Mapping[str, Any], structure: Structure, *inputs: Any) -> list[Any]:
    """Run the step of a copy of the optimizer that has one parameter; return its counters' new values."""
    tensors = dict(zip(structure.tensors, inputs, strict=False))
    numbers = inputs[len(tensors) :]
    floats, counts = numbers[: len(structure.floats)], numbers[len(structure.floats) :]
    param = tensors[PARAM]
    param.grad = tensors[GRAD]
    counters = {n: _Counter(v, d) for (n, d), v in zip(structure.counters, counts, strict=True)}
    state = {**{name: tensors[name] for name in structure.states}, **counters}
    leaves = dict(structure.constants) | dict(zip(structure.floats, floats, strict=True))
    options = {n: v if n in FLAGS else _filled((n,), v, leaves) for n, v in group.items() if n != "params"}
    options |= {flag: False for flag in FLAGS if flag in group}
    shadow: Any = object.__new__(type(optimizer))
    shadow.__dict__.update(optimizer.__dict__)
    shadow.__dict__.pop("step", None)
    shadow.state = defaultdict(dict, {param: dict(state)})
    shadow.param_groups = [{**options, "params": [param]}]
    shadow.defaults = {**optimizer.defaults, **{f: False for f in FLAGS if f in optimizer.defaults}}
    shadow.__dict__.update({name: OrderedDict() for name in HOOKS})
    before = dict(shadow.__dict__)
    with torch.no_grad():
        own_step(optimizer)(shadow)
    _check_unchanged(shadow, before, options, param, state)
    return [counter.value for counter in counters.values()]


def _filled(path: Path, value: Any, leaves: Mapping[Path, Any]) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_filled((*path, i), item, leaves) for i, item in enumerate(value))
    return leaves[path]


def _check_unchanged(
    shadow: Any,
    before: Mapping[str, Any],
    options: Mapping[str, Any],
    param: Tensor,
    state: Mapping[str, Any],
) -> None:
    """Raise Refused if the step leaves behind anything but new values of the tensors."""
    after = shadow.__dict__
    if changed := [n for n in after if n not in before or after[n] is not before[n]]:
        raise Refused(f"its step changes its attribute {changed[0]}")
    (group,) = shadow.param_groups
    before_it = {**options, "params": group.get("params")}
    if changed := [n for n in {*group, *before_it} if group.get(n) is not before_it.get(n)]:
        raise Refused(f"its step changes {changed[0]} of the parameter's group")
    kept = shadow.state[param]
    if changed := [n for n in {*kept, *state} if kept.get(n) is not state.get(n)]:
        raise Refused(f"its step replaces the state {changed[0]} instead of writing into it")
    if len(shadow.state) > 1:
        raise Refused("its step keeps state for something that is no parameter")


# -- numbers and tensors apart ---------------------------------------------------------------------


def _split(
    gm: fx.GraphModule, structure: Structure, fakes: FakeTensorMode
) -> tuple[fx.GraphModule, fx.GraphModule, tuple[int, ...], tuple[str, ...]]:
    """Return (body, numbers, updated, meanings) of a `Formula`."""
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    tensors, inputs = placeholders[: len(structure.tensors)], placeholders[len(structure.tensors) :]
    written = {n.args[0]: n.args[1] for n in gm.graph.nodes if n.target is WRITE_BACK}
    written = {t: v for t, v in written.items() if t is not v}
    if tensors[0] not in written:
        raise Refused("its step does not change the parameter")
    order = [tensor for tensor in tensors if tensor in written]
    live = reached(nodes_in([written[tensor] for tensor in order]), lambda node: node.all_input_nodes)
    nodes = [n for n in gm.graph.nodes if n in live and not _is_number(n) and n.op != "placeholder"]
    for node in nodes:
        _check_elementwise(node, structure)
    boundary = list(dict.fromkeys(a for n in nodes for a in n.all_input_nodes if _is_number(a)))
    body = _body(tensors, nodes, boundary, [written[t] for t in order], structure, fakes)
    output: Any = gm.graph.output_node().args[0]
    numbers = _numbers(inputs, gm, boundary, list(output))
    named = dict(zip(inputs, structure.names, strict=True))
    meanings = tuple(_meaning(node, named) for node in boundary)
    return body, numbers, tuple(tensors.index(t) for t in order), meanings


SYMBOLS: dict[Any, str] = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/", operator.pow: "**",
}  # fmt: skip


def _meaning(node: Any, named: Mapping[fx.Node, str]) -> str:
    """Return a number as text, in the names of hyper-parameters and counters."""
    if not isinstance(node, fx.Node):
        return repr(node)
    if node in named:
        return named[node]
    operands = [_meaning(argument, named) for argument in node.args]
    if node.target is single:  # a counter's own rounding
        return operands[0]
    inner = [f"({text})" if " " in text else text for text in operands]
    if node.target is operator.neg:
        return f"-{inner[0]}"
    symbol = SYMBOLS.get(node.target)
    if symbol is not None:
        return f" {symbol} ".join(inner)
    return f"{getattr(node.target, '__name__', node.target)}({', '.join(operands)})"


def _is_number(node: fx.Node) -> bool:
    return not isinstance(node.meta.get("val"), Tensor)


def _check_elementwise(node: fx.Node, structure: Structure) -> None:
    spec = spec_of(node.target)
    value = node.meta["val"]
    if node.op != "call_function" or spec is None or spec.kind is not Kind.ELEMENTWISE or spec.expr is None:
        raise Refused(f"{node.target} is no element-wise operator of the table")
    if tuple(value.shape) != structure.shape:
        raise Refused(f"{node.name} has the shape {list(value.shape)}, its parameter {list(structure.shape)}")


def _body(
    tensors: list[fx.Node],
    nodes: list[fx.Node],
    boundary: list[fx.Node],
    results: list[fx.Node],
    structure: Structure,
    fakes: FakeTensorMode,
) -> fx.GraphModule:
    """Return the body of a `Formula`. Its tensors are vectors, whatever the parameter's shape, as the update
    of each element depends on that element alone."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}

    def vector(node: fx.Node) -> Tensor:
        with fakes:
            return torch.empty(SHAPE, dtype=node.meta["val"].dtype)

    for node, name in zip(tensors, structure.tensors, strict=True):
        env[node] = graph.placeholder(name)
        env[node].meta["val"] = vector(node)
    for i, node in enumerate(boundary):
        env[node] = graph.placeholder(f"number_{i}")
        with fakes:
            env[node].meta["val"] = torch.empty((), dtype=structure.dtype)
    for node in nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
        env[node].meta["val"] = vector(node)
    outputs: list[fx.Node] = []
    for result in results:  # each output has to be an operator's, and of one tensor alone
        copied = env[result]
        if copied.op == "placeholder" or copied in outputs:
            copied = graph.call_function(aten.clone.default, (copied,))
            copied.meta["val"] = vector(result)
        outputs.append(copied)
    graph.output(tuple(outputs))
    return fx.GraphModule(torch.nn.Module(), graph)


def _numbers(
    inputs: list[fx.Node], gm: fx.GraphModule, boundary: list[fx.Node], counters: list[Any]
) -> fx.GraphModule:
    """Return the function that computes the numbers, from the nodes of the graph that they depend on."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {node: graph.placeholder(f"n{i}") for i, node in enumerate(inputs)}
    live = reached(nodes_in([*boundary, *counters]), lambda node: node.all_input_nodes)
    for node in gm.graph.nodes:
        if node not in live or node in env:
            continue
        if not all(a in env for a in node.all_input_nodes):
            raise Refused(f"{node.target} makes a number of a tensor's values")
        env[node] = graph.node_copy(node, env.__getitem__)

    def copied(value: Any) -> Any:
        return env[value] if isinstance(value, fx.Node) else value

    graph.output((tuple(map(copied, boundary)), tuple(map(copied, counters))))
    return fx.GraphModule(torch.nn.Module(), graph)
