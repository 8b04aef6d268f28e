"""The user's rewrites and kernels, in the graph above autograd, so that autograd derives gradients.

before(x, w)   ->   after(x, w)     in the widest dtype of the matched ops, where they convert dtypes
code(x, w)     ->   one operator that calls the user's function
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx

from fusion_compiler.capture.graphs import (
    ORIGIN,
    ancestors,
    between,
    emit,
    erase_unused,
    mutated_nodes,
    refuse_effects,
)
from fusion_compiler.errors import PatternConflictError
from fusion_compiler.ir.dag import OpDag, build
from fusion_compiler.ir.decision import Decisions
from fusion_compiler.ir.graph_info import origins_of
from fusion_compiler.ir.graph_pass import Pass, Refused
from fusion_compiler.passes.patterns.indexed import is_cast_or_alias, quantizes
from fusion_compiler.passes.patterns.match import Match, find, match_all
from fusion_compiler.passes.patterns.notes import notes_of_rules, places
from fusion_compiler.passes.patterns.trace import traced_above_autograd
from fusion_compiler.passes.rewrites.engine import Nodes, Site, edited
from fusion_compiler.passes.rewrites.user_operator import Check, operator_of
from fusion_compiler.patterns import Pattern, Rewrite, UserKernel

aten = torch.ops.aten


def replace_patterns(patterns: Sequence[Pattern], check: Check | None = None) -> Pass | None:
    """Return the pass that applies the rewrites and kernels of `patterns`, or None if there are none.

    check: the function that verifies kernels at their first calls.
    """
    chosen = tuple(p for p in patterns if isinstance(p, Rewrite | UserKernel))
    if not chosen:
        return None
    does = "Replace what the patterns of `compile(..., patterns=...)` match."
    return Pass("patterns", functools.partial(_apply, chosen, check), does, when="a pattern matches")


def check_reachable(patterns: Sequence[Pattern]) -> None:
    """Raise PatternConflictError if two patterns claim the same op, since the later one never applies."""
    chosen = [p for p in patterns if isinstance(p, Rewrite | UserKernel)]
    for i, later in enumerate(chosen):
        dag = traced_above_autograd(later).dag
        for match in find([traced_above_autograd(p) for p in chosen[:i] if p.where is None], dag, exact=True):
            if traced_above_autograd(later).root in match.outputs:
                op = str(dag.op(match.root).target)
                raise PatternConflictError(first=match.pattern.name, second=later.name, op=op)


def _apply(
    patterns: tuple[Rewrite | UserKernel, ...], check: Check | None, gm: fx.GraphModule
) -> tuple[fx.GraphModule, Decisions]:
    dag = build(gm)
    traced = [traced_above_autograd(p) for p in patterns]
    matching = match_all(traced, dag, exact=True, origins=origins_of(gm.graph), watched=patterns)
    others = notes_of_rules(traced, matching, patterns)
    edits = (functools.partial(_replace, match, dag, check) for match in matching.matches)
    sites = [Site(match.name, match.root, edit) for match, edit in zip(matching.matches, edits, strict=True)]
    new, notes = edited(gm, sites)
    if new is not gm:
        new.graph.lint()
    return new, (*notes, *others)


def _replace(match: Match, dag: OpDag, check: Check | None, nodes: Nodes) -> str:
    """Replace a match in the copy of a graph, and return a note of it. Raises Refused."""
    ops, outputs = ([nodes[dag.nodes[n]] for n in names] for names in (match.ops, match.outputs))
    inputs = [nodes[dag.nodes[i]] if isinstance(i, str) else i for i in match.inputs]
    tensors = [g for g in inputs if isinstance(g, fx.Node)]
    is_new = [not _shows(o, tensors) for o in outputs]
    kept = [o for o, is_replaced in zip(outputs, is_new, strict=True) if not is_replaced]
    graph = outputs[0].graph
    place = _place({*ops}, outputs, kept, tensors, graph)
    arguments = [_number(g, e) for g, e in zip(inputs, match.pattern.example, strict=True)]
    with graph.inserting_before(place):
        if isinstance(match.pattern, Rewrite):
            results = _insert_code(match, match.pattern, dag, arguments, outputs)
        else:
            assert isinstance(match.pattern, UserKernel)
            results = _insert_call(match.pattern, arguments, outputs, check)
    for name, old, result, is_replaced in zip(match.outputs, outputs, results, is_new, strict=True):
        if is_replaced:
            old.replace_all_uses_with(result)
            nodes[dag.nodes[name]] = result  # a later match may read it
    erase_unused(set[fx.Node]().union(*(ancestors(o) for o in outputs)))
    promise = match.pattern.promise if isinstance(match.pattern, Rewrite) else ""
    done = f"{len(match.ops)} ops replaced, {places([match.root], dag)}"
    return f"{done}, equal {promise}" if promise else done


def _shows(output: fx.Node, inputs: Sequence[fx.Node]) -> bool:
    """True if a result is an argument or a view of one: it stays as it is, and shares its memory."""
    while output not in inputs:
        views = isinstance(output.target, OpOverload) and output.target.is_view
        if not views or not output.all_input_nodes:
            return False
        output = output.all_input_nodes[0]
    return True


def _number(value: Any, example: Any) -> Any:
    """Return a float parameter's value: the example's if the match left it open, integers as floats."""
    if isinstance(example, float):
        return example if value is None else float(value)
    return value


def _place(
    ops: set[fx.Node], outputs: list[fx.Node], kept: list[fx.Node], inputs: list[fx.Node], graph: fx.Graph
) -> fx.Node:
    """Return the node before which the replacement goes. Raises Refused if it has no place.

    kept: the outputs that are not replaced.
    """
    written = mutated_nodes(graph.nodes)
    if written & (ops | set(inputs)):
        raise Refused("its tensors are changed in place")
    for op in ops.difference(outputs):
        if leaks := _readers(op) - ops:
            raise Refused(f"{op.name} is read by {min(leaks).name} too: make it an output of the pattern")
    replaced = [o for o in outputs if o not in kept]
    outside = [user for o in replaced for user in o.users if user not in ops and not _feeds(user, ops)]
    if not outside:
        raise Refused("nothing reads it")
    place = min(outside)
    if any(i >= place for i in inputs):
        raise Refused(f"{place.name} reads one of its results before its inputs are computed")
    refuse_effects(between(min(ops), place, ()), "its ops")
    return place


def _is_between(node: fx.Node) -> bool:
    """True for a cast or alias that matching looks through."""
    if not is_cast_or_alias(node.target):
        return False
    return not quantizes(*(n.meta["val"].dtype for n in (node.all_input_nodes[0], node)))


def _readers(node: fx.Node) -> set[fx.Node]:
    """Return the nodes that read a value, through casts."""
    readers: set[fx.Node] = set()
    for user in node.users:
        readers |= _readers(user) if _is_between(user) and user.users else {user}
    return readers


def _feeds(node: fx.Node, ops: set[fx.Node]) -> bool:
    """True for a cast between the matched ops."""
    return _is_between(node) and bool(node.users) and _readers(node) <= ops


def _insert_code(
    match: Match, rule: Rewrite, dag: OpDag, arguments: list[Any], outputs: list[fx.Node]
) -> list[fx.Node]:
    """Emit `after` on the matched tensors, traced on their FakeTensors, at the graph's insertion point."""
    tensors = [a for a in arguments if isinstance(a, fx.Node)]
    wide = _widest(match, dag) if match.casts else None
    wanted = [o.meta["val"] for o in outputs]

    def run(*values: torch.Tensor) -> list[torch.Tensor]:
        supply = iter(values)
        filled = [_as(next(supply), wide) if isinstance(a, fx.Node) else a for a in arguments]
        results = rule.after(*filled)
        listed = list(results) if isinstance(results, tuple | list) else [results]
        rounded[:] = [r.dtype for r in listed]
        return [
            _as(r, w.dtype if wide or _rounds(r.dtype, w.dtype) else None)
            for r, w in zip(listed, wanted, strict=True)
        ]

    rounded: list[torch.dtype] = []
    fakes = [t.meta["val"] for t in tensors]
    mode = detect_fake_mode(fakes)
    try:
        with mode:  # type: ignore[union-attr]
            traced = make_fx(run, pre_dispatch=True)(*(f.detach() for f in fakes))
    except Exception as error:
        raise Refused(f"its replacement failed: {type(error).__name__}: {error}") from error
    if traced.graph.find_nodes(op="get_attr"):
        raise Refused("its replacement holds a tensor of its own")
    copies: dict[fx.Node, fx.Node] = dict(
        zip(traced.graph.find_nodes(op="placeholder"), tensors, strict=True)
    )
    results = traced.graph.output_node().args[0]
    for output, dtype in zip(outputs, rounded, strict=True):
        _check_rounding(output, dtype)
    _check_metas([r.meta["val"] for r in results], wanted)  # type: ignore[union-attr]
    graph, like = outputs[0].graph, outputs[0]
    for node in traced.graph.nodes:
        if node.op == "call_function":
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta = {**_origin(like), "val": node.meta.get("val")}
    return [copies[r] for r in results]  # type: ignore[union-attr]


def _origin(node: fx.Node) -> dict[str, Any]:
    return {k: v for k, v in node.meta.items() if k in ORIGIN}


def _as(value: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return value.to(dtype) if dtype is not None and value.is_floating_point() else value


def _widest(match: Match, dag: OpDag) -> torch.dtype:
    dtypes = [m.dtype for n in match.ops for m in dag.op(n).outputs if m.dtype.is_floating_point]
    return functools.reduce(torch.promote_types, dtypes)


def _rounds(dtype: torch.dtype, wanted: torch.dtype) -> bool:
    """True if a float of `wanted` loses digits as `dtype`."""
    floats = dtype.is_floating_point and wanted.is_floating_point
    return floats and torch.promote_types(dtype, wanted) != dtype


def _check_rounding(output: fx.Node, dtype: torch.dtype) -> None:
    """Raise Refused if a replacement rounds a result to `dtype`, and a reader of the result does not."""
    matched = output.meta["val"].dtype
    if not _rounds(dtype, matched):
        return
    for user in output.users:
        if not is_cast_or_alias(user.target) or user.meta["val"].dtype != dtype:
            raise Refused(f"it would be rounded to {dtype}, and {user.name} reads it as {matched}")


def _check_metas(values: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    for i, (ours, theirs) in enumerate(zip(values, wanted, strict=True)):
        if tuple(ours.shape) != tuple(theirs.shape) or ours.dtype != theirs.dtype:
            shapes = f"{ours.dtype} {tuple(ours.shape)}, not {theirs.dtype} {tuple(theirs.shape)}"
            raise Refused(f"output {i} of its replacement is {shapes}")


def _insert_call(
    kernel: UserKernel, arguments: list[Any], outputs: list[fx.Node], check: Check | None
) -> list[fx.Node]:
    """Emit one call of the kernel's operator, and return its results in the dtypes of the matched ones."""
    target, like = operator_of(kernel, check), outputs[0]
    try:
        call = emit(like, target, *arguments)
    except Exception as error:
        raise Refused(f"{kernel.name} does not take these arguments: {error}") from error
    values = call.meta["val"]
    results = [call]
    if isinstance(values, tuple | list):
        results = [like.graph.call_function(operator.getitem, (call, i)) for i in range(len(values))]
        for item, value in zip(results, values, strict=True):
            item.meta = {**_origin(like), "val": value}
    for i, output in enumerate(outputs):
        _check_rounding(output, results[i].meta["val"].dtype)
        if results[i].meta["val"].dtype != output.meta["val"].dtype:
            results[i] = emit(like, aten._to_copy.default, results[i], dtype=output.meta["val"].dtype)
    _check_metas([r.meta["val"] for r in results], [o.meta["val"] for o in outputs])
    return results
