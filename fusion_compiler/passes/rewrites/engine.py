"""The frame of all rewrites: find, check, copy the graph, replace, trace strides again, note.

A rewrite is `Rules`, code before and after, or `Replacements`, a function of one node that returns its
replacement. Rewrites of users (`user.py`) are found and replaced in the same frame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fusion_compiler.capture.graphs import (
    aliases,
    ancestors,
    between,
    copied,
    emit,
    fake_mode,
    is_pure,
    is_trained,
    mutated_nodes,
    trace_strides,
    written_arguments,
)
from fusion_compiler.ir.dag import Ref, dim_of, step_of
from fusion_compiler.ir.decision import Decision, Decisions, Outcome
from fusion_compiler.ir.graph_pass import Refused
from fusion_compiler.ops.schema import runs_no_kernel
from fusion_compiler.passes.patterns.match import Match, match_all
from fusion_compiler.passes.patterns.recorded import Recorded, recorded, region, roots_of
from fusion_compiler.passes.patterns.trace import Traced
from fusion_compiler.patterns import Rewrite, Where

aten = torch.ops.aten
Nodes = dict[fx.Node, fx.Node]  # node of the original -> node of the copy


@dataclass(frozen=True)
class Site:
    """A place in a graph that a rewrite looked at.

    rule: as in a Decision. node: its subject, or several that are changed together. edit: changes the copy of
        the graph and returns the text of the note, "" for no note, or raises Refused and leaves the copy as
        it was; a string is the reason why nothing is to be done.
    """

    rule: str
    node: str | tuple[str, ...]
    edit: Callable[[Nodes], str] | str


def decided(sites: Iterable[Site], nodes: Nodes) -> Decisions:
    """Make all edits in a copy of a graph, and return the decision about each."""
    notes: list[Decision] = []
    for site in sites:
        try:
            applied, text = (False, site.edit) if isinstance(site.edit, str) else (True, site.edit(nodes))
        except Refused as refused:
            applied, text = False, str(refused)
        subjects = (site.node,) if isinstance(site.node, str) else site.node
        notes += (Decision(site.rule, subject, Outcome.of(applied), text) for subject in subjects)
    return tuple(notes)


def edited(gm: fx.GraphModule, sites: Sequence[Site]) -> tuple[fx.GraphModule, Decisions]:
    """Return a copy of `gm` with all edits, or `gm` itself if there are none, and the decision about each."""
    is_left = all(isinstance(site.edit, str) for site in sites)
    new, nodes = (gm, {}) if is_left else copied(gm)
    notes = decided(sites, nodes)
    is_changed = any(note.is_done for note in notes)
    if is_changed:
        new.recompile()
    return new if is_changed else gm, tuple(notes)


@dataclass(frozen=True)
class Replacement:
    """A replacement of one node.

    make: called with {node: its copy} at the place of the copy; emits the replacement and returns it, or
        changes the copy and returns that. Raises Refused. note: the text of the note. ops: other nodes that
        are not needed any more, in-place ones too. of: the node that is replaced, if it is not the one that
        was looked at.
    """

    make: Callable[[Nodes], fx.Node]
    note: str
    ops: tuple[fx.Node, ...] = ()
    of: fx.Node | None = None

    def replace(self, looked_at: fx.Node, nodes: Nodes) -> str:
        """Put the result in its place. Raises Refused."""
        root = looked_at if self.of is None else self.of
        node = nodes[root]
        before = node.prev
        try:
            with node.graph.inserting_before(node), fake_mode([node.meta.get("val")]):
                result = self.make(nodes)
                if result is node:
                    return self.note
            node.replace_all_uses_with(result)
            like = node.meta["val"]
            if steps(result.meta["val"]) != steps(like) and not _lay_out(result, like):
                result.replace_all_uses_with(node)
                raise Refused("its result has other strides")
        except Refused:
            while node.prev is not before:
                node.graph.erase_node(node.prev)
            raise
        nodes[root] = result
        _erase(node, {nodes[op] for op in self.ops})
        return self.note


def steps(value: torch.Tensor) -> list[Any]:
    """Return the strides of the dimensions of more than one element."""
    return [step_of(t) for n, t in zip(value.shape, value.stride(), strict=True) if dim_of(n) != 1]


def _lay_out(result: fx.Node, like: torch.Tensor) -> bool:
    """Let the readers of a new node take it with its strides, or copy it in the order of `like`, eager's
    value, if they would see the difference. Return False if that order is not contiguous."""
    lying, result.meta["val"] = result.meta["val"], like
    try:
        trace_strides(result)
    except Refused:
        result.meta["val"] = lying
        if not like.is_contiguous():
            return False
        with result.graph.inserting_after(result):
            ordered = emit(result, aten.contiguous.default, result)
        result.replace_all_uses_with(ordered, delete_user_cb=lambda user: user is not ordered)
    return True


def _erase(node: fx.Node, ops: Iterable[fx.Node]) -> None:
    """Erase a node, and the pure calls and nodes of `ops` that then have no reader."""
    ops, erased = {*ops}, {node}
    pending = [*node.all_input_nodes, *ops]
    node.graph.erase_node(node)
    while pending:
        read = pending.pop()
        if not read.users and read not in erased and (read in ops or is_pure(read)):
            pending += read.all_input_nodes
            erased.add(read)
            read.graph.erase_node(read)
            if read.op == "get_attr" and not read.graph.find_nodes(op="get_attr", target=read.target):
                delattr(read.graph.owning_module, str(read.target))


Verdict = Replacement | str | None
_ONE = (Replacement, str, type(None))


@dataclass(frozen=True)
class Replacements:
    """A rewrite of single nodes.

    look: called with a node that calls one of `targets`, and all nodes that are written in place. Returns its
        replacement, the reason why it is left, or several of them; None if the rewrite is not about it.
        It may also raise Refused with the reason.
    """

    name: str
    targets: tuple[Any, ...]
    look: Callable[[fx.Node, set[fx.Node]], Verdict | Sequence[Replacement | str]]

    def __call__(self, gm: fx.GraphModule) -> tuple[fx.GraphModule, Decisions]:
        calls = [gm.graph.find_nodes(op="call_function", target=t) for t in self.targets]
        roots = calls[0] if len(calls) == 1 else sorted(node for nodes in calls for node in nodes)
        if not roots:
            return gm, ()
        written = mutated_nodes(gm.graph.nodes)
        each = ((node, verdict) for node in roots for verdict in self._verdicts(node, written))
        return edited(gm, [site for n, v in each if (site := _site(self.name, n, v))])

    def _verdicts(self, node: fx.Node, written: set[fx.Node]) -> Sequence[Verdict]:
        try:
            verdicts = self.look(node, written)
        except Refused as reason:
            return [str(reason)]
        return [verdicts] if isinstance(verdicts, _ONE) else verdicts


def _site(name: str, root: fx.Node, verdict: Verdict) -> Site | None:
    if isinstance(verdict, Replacement):
        return Site(name, root.name, lambda nodes: verdict.replace(root, nodes))
    return None if verdict is None else Site(name, root.name, verdict)


def _always(*values: Any) -> bool:
    return True


@dataclass(frozen=True, eq=False)
class Rule(Rewrite):
    """`code(*arguments)` becomes `after(*arguments)`.

    Both call ATen operators, by overloads, on parameters that stand for tensors, numbers, lists and None
    alike, and `code` fixes which literals have to stand in the model. example: arguments of a call in which
    the two are equal, the first of `examples`, from which tests draw others.

    where: called with the result of `code` and the arguments. True if the two are equal, False if this is no
        match, or the reason why a match is left. pays: the same, for conditions that do not change results.
    considers: called with the node of the result, before anything is matched; False if this is no match.
    note: the text of the note, or a function of result and arguments that returns it.
    """

    pays: Where = _always
    considers: Callable[[fx.Node], bool] = _always
    note: str | Callable[..., str] = "replaced"
    examples: tuple[tuple[Any, ...], ...] = ()

    def __post_init__(self) -> None:
        """Allow any example."""

    def verdict(self, result: Any, *arguments: Any) -> bool | str:
        """Return the answer of `where`, or that of `pays` if it is True."""
        said = True if self.where is None else self.where(result, *arguments)
        return self.pays(result, *arguments) if said is True else said


def rule(
    before: Callable[..., Any],
    after: Callable[..., Any],
    *examples: tuple[Any, ...],
    where: Where | None = None,
    pays: Where = _always,
    considers: Callable[[fx.Node], bool] = _always,
    note: str | Callable[..., str] = "replaced",
) -> Rule:
    """Return the rule that replaces `before` by `after`. See Rule."""
    name = getattr(before, "__name__", "rule")
    more: Any = {"pays": pays, "considers": considers, "note": note, "examples": examples}
    return Rule(name, before, examples[0], where, after, **more)


@dataclass(frozen=True)
class Rules:
    """A rewrite that is code before and code after, in one or several forms: the first that fits is taken.

    inference: True if it does not apply to nodes whose gradient is wanted.
    """

    name: str
    rules: tuple[Rule, ...]
    inference: bool = False

    def __call__(self, gm: fx.GraphModule) -> tuple[fx.GraphModule, Decisions]:
        patterns: list[Traced] = []
        roots: dict[fx.Node, int] = {}
        for rule in self.rules:
            traced = recorded(rule)
            nodes = [n for n in roots_of(traced, gm.graph) if rule.considers(n)]
            patterns += [traced] if nodes else []
            roots |= {node: max(traced.depth, roots.get(node, 0)) for node in nodes}
        if not patterns:
            return gm, ()
        dag = region(gm, roots)
        sites: dict[fx.Node, Site] = {}

        def accepts(match: Match) -> bool:
            verdict = self._verdict(match, dag.nodes)
            if verdict is not None:
                sites[dag.nodes[match.root]] = verdict
            return verdict is not None

        match_all(patterns, dag, accepts=accepts)
        return edited(gm, [sites[node] for node in sorted(sites)])

    def _verdict(self, match: Match, nodes: Mapping[str, fx.Node]) -> Site | None:
        root, ops = nodes[match.root], [nodes[op] for op in match.ops]
        operands = [nodes[v.name] if isinstance(v, Ref) else _as_lists(v) for v in match.inputs]
        if not _is_apart(root, ops, operands):
            return None
        if self.inference and is_trained(ancestors(root)):
            return None
        rule: Rule = match.pattern  # type: ignore[assignment]
        values = [v.meta["val"] if isinstance(v, fx.Node) else v for v in (root, *operands)]
        said = rule.verdict(*values)
        if said is not True:
            return Site(self.name, root.name, said) if said else None
        if _is_overwritten(ops, operands):
            return Site(self.name, root.name, "an operand is written in place before the result is computed")

        def make(copies: Nodes) -> fx.Node:
            like = copies[root]
            values = (Recorded(copies[v], like) if isinstance(v, fx.Node) else v for v in operands)
            return rule.after(*values).node

        note = rule.note if isinstance(rule.note, str) else rule.note(*values)
        return _site(self.name, root, Replacement(make, note, tuple(ops)))


def _as_lists(value: Any) -> Any:
    return [_as_lists(v) for v in value] if isinstance(value, tuple) else value


def _is_apart(root: fx.Node, ops: Sequence[fx.Node], operands: Sequence[Any]) -> bool:
    """True if no other node reads a result between the matched ops, nor memory of others that these write."""
    if any(not {*op.users} <= {*ops} for op in ops if op is not root):
        return False
    for op in ops:
        for into in written_arguments(op):
            is_outside = into in operands
            is_computed = into.op == "call_function" and not runs_no_kernel(into.target)
            if is_outside and not (is_computed and {*into.users} <= {*ops}):
                return False
    return True


def _is_overwritten(ops: Sequence[fx.Node], operands: Sequence[Any]) -> bool:
    """True if another call writes an operand between the matched ops."""
    others = between(min(ops), max(ops), ops)
    return bool(others) and not aliases(list(operands)).isdisjoint(mutated_nodes(others))
