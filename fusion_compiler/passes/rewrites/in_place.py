"""Write in place what a captured program writes into, such as a decoder's cache of keys and values.

AOTAutograd makes the program functional and lets it end in `copy_(argument, result)`. Where the result is the
argument with something put into it, all of it is copied twice for a few new elements:

    part = slice(cache, 2, 5, 6)                       part = slice(cache, 2, 5, 6)
    cache_1 = slice_scatter(cache, copy(part, new))    cache_1 = put_(cache, part, new)
    attend(cache_1)                               ->   attend(cache_1)
    copy_(cache, cache_1)

A result that becomes an argument as a whole (the running statistics of a batch norm) is put there too:

    copy_(mean, mean_1)                           ->   put_(mean, mean, mean_1)

A write takes the memory of its base where nothing can tell: what reads the base's old value, through
whatever view, can run before it and does from now on, and the base is an argument that the program
overwrites in the end, or a tensor of its own that nobody keeps. `memory_is_free` has the conditions. What
clusters make of a tensor that they make anyway (a slice of zeros) stays as it is. Other results are not
written over dead tensors: the allocator gives a dead tensor's memory to the next result anyway, and at the
peak of the models that were measured nothing is dead (the logits, which the caller keeps, and their
gradient).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from fusion_compiler.capture.graphs import aliases, arguments, emit, erase_unused, nodes_in
from fusion_compiler.capture.memory import has_strides, metadata_of, place, root
from fusion_compiler.ir.dag import dim_of, kind_of
from fusion_compiler.ir.decision import Decisions
from fusion_compiler.ir.graph_pass import Level, Pass, Refused
from fusion_compiler.ir.layout import is_view_node
from fusion_compiler.ir.walk import reached, walk
from fusion_compiler.ops.own.put import put
from fusion_compiler.ops.schema import WRITE_BACK, draws, written
from fusion_compiler.ops.table import Kind, is_always_held, spec_of
from fusion_compiler.ops.views import OVERLAYS
from fusion_compiler.passes.rewrites.engine import Nodes, Site, edited

aten = torch.ops.aten
RULE = "in place"


def write_in_place(gm: fx.GraphModule) -> tuple[fx.GraphModule, Decisions]:
    """Return a copy of a functional graph in which writes have the memory of their bases, or the graph itself
    if it has no writes.

    Its nodes stand in an order in which every reader of a base comes before the write.
    """
    writes = _Writes()
    each = [(n.name, functools.partial(writes.write, n)) for n in gm.graph.nodes if _begins(n)]
    edits = [("", writes.begin), *each, ("", writes.end)] if each else []
    return edited(gm, [Site(RULE, *edit) for edit in edits])


def _begins(node: fx.Node) -> bool:
    return node.target in OVERLAYS or node.target is WRITE_BACK or in_place_form(node) is not None


def in_place_form(node: fx.Node) -> OpOverload | None:
    """Return the operator that writes into its first operand what an operator without a kernel of ours gives,
    such as `scatter_add_` for `scatter_add`, or None."""
    overload = node.target
    if (
        not isinstance(overload, OpOverload)
        or overload.namespace != "aten"
        or kind_of(node) is not Kind.OPAQUE
    ):
        return None
    packet = getattr(aten, f"{overload._opname}_", None)
    form = getattr(packet, overload._overloadname, None)
    if form is None or written(form) != (0,) or draws(overload):
        return None
    same = [a.name for a in form._schema.arguments] == [a.name for a in overload._schema.arguments]
    return form if same else None


class _Write:
    """A write puts `source` where `view` lies in `base`, or where the indices point to in `base`.

    path: the functional nodes that did this; the last is the new value of `region`, which is `base` or a view
    of it. form: the operator in place, where that is not `put_`, with the arguments of the first of `path`.
    """

    path: list[fx.Node]
    view: fx.Node
    source: fx.Node
    indices: object

    def __init__(self, first: fx.Node, latest: Mapping[fx.Node, fx.Node]) -> None:
        named = arguments(first)
        self.path, self.region = [first], named["self"]
        if first.target is WRITE_BACK:
            self.region = latest.get(self.region, self.region)
        self.view = self.region
        self.form, self.indices = in_place_form(first), None
        self.source = named.get("src", named.get("values"))  # type: ignore[assignment]
        if first.target is aten.index_put.default and not named["accumulate"]:
            if not torch.are_deterministic_algorithms_enabled():  # of equal indices the last one counts then
                self.form, self.indices = None, named["indices"]
        elif first.target in OVERLAYS:
            self.view = part_of(first)
            if self.source.target is aten.copy.default and len(self.source.users) == 1:
                self.path.insert(0, self.source)
                self.source = arguments(self.source)["src"]  # `put_` converts and broadcasts as well
        self.base = root(self.region)
        while self.form is None and self._grow():
            pass

    @property
    def result(self) -> fx.Node:
        return self.path[-1]

    @property
    def operands(self) -> list[fx.Node]:
        """Return the written value and its indices, without the base."""
        if self.form is not None:
            return nodes_in((self.path[0].args, self.path[0].kwargs))[1:]
        return nodes_in((self.source, self.indices))

    def _grow(self) -> bool:
        """Extend the write to a larger region, and return True, if the only reader of its result makes that
        of it."""
        if len(self.result.users) != 1:
            return False
        (user,) = self.result.users
        if user.target in OVERLAYS and arguments(user)["src"] is self.result:
            region = arguments(user)["self"]
            if not _is_same(part_of(user), self.region):
                return False
        elif self.region is self.base:
            return False
        elif is_view_node(user) and isinstance(user.target, OpOverload) and has_strides(user):
            with user.graph.inserting_before(user):
                region = emit(user, user.target, self.region, *user.args[1:], **user.kwargs)
        else:
            return False
        self.path.append(user)
        self.region = self.base if _is_same(region, self.base) else region
        return True


class _Writes:
    """The writes of one graph, which are edited in their order."""

    def begin(self, nodes: Nodes) -> str:
        self.graph = next(iter(nodes.values())).graph
        self.before: dict[fx.Node, list[fx.Node]] = {}  # what has to wait for a node, beside its readers
        self.latest: dict[fx.Node, fx.Node] = {}  # what has the memory of a tensor that was written into
        self.copies = {c.args[0]: c for c in self.graph.find_nodes(op="call_function", target=WRITE_BACK)}
        self.seen: set[fx.Node] = set()
        return ""

    def write(self, first: fx.Node, nodes: Nodes) -> str:
        node = nodes[first]
        if node in self.seen:
            return ""
        write = _Write(node, self.latest)
        self.seen.update(write.path)
        if self.says_nothing(write):
            return ""
        home = owner(write.base)
        try:
            readers = self.memory_is_free(write)
        except Refused as reason:
            is_copied = home in self.copies
            raise Refused(f"it is copied to where it belongs, as {reason}" if is_copied else "") from reason
        new = self.latest[home] = self.rewritten(write)
        for reader in readers:
            self.before.setdefault(reader, []).append(new)
        return f"written into {'an argument' if home.op == 'placeholder' else 'a result that dies'}"

    def end(self, nodes: Nodes) -> str:
        for copy in self.graph.find_nodes(op="call_function", target=WRITE_BACK):
            copy.replace_all_uses_with(copy.args[0])  # of views that are returned, which read nothing
        self.in_order()
        return ""

    def says_nothing(self, write: _Write) -> bool:
        """True if nothing has to be written in place: the memory has the result already, and is read instead
        unless the result is returned; or no cluster computes the copied value; or a cluster computes all of
        the base where it computes the rest."""
        target = write.result.target
        if write.form is None and write.indices is None and _is_same(write.source, write.view):
            kept = target is not WRITE_BACK and self.graph.output_node() in _readers(write.result)
            return kept or self.replaced(write, write.region)
        if target is WRITE_BACK:
            return not _is_computed(root(write.source))
        return spec_of(target) is not None and owner(write.base) not in self.copies

    def replaced(self, write: _Write, value: fx.Node) -> bool:
        write.result.replace_all_uses_with(value)
        for node in reversed(write.path):
            self.graph.erase_node(node)
        return True

    def memory_is_free(self, write: _Write) -> list[fx.Node]:
        """Return what reads the base's old value, and can run before the write. Raise Refused if the write
        may not have the base's memory."""
        base, result = write.base, write.result
        if write.region is not base:
            raise Refused("it is written through a view that is also read")
        if base.op != "placeholder" and not (isinstance(base.target, OpOverload) and _has_own_memory(base)):
            raise Refused(f"{base.name} is not a tensor of the graph's own")
        if not has_strides(base) or metadata_of(base) != metadata_of(result) or _repeats(base):
            raise Refused(f"{base.name} has other strides")
        home = owner(base)
        if home in aliases(write.operands):
            raise Refused(f"the written value is itself a view of {home.name}")
        after = self.after(result)
        kept = self.copies.get(home)
        if home.op == "placeholder" and (kept is None or kept not in after):
            raise Refused(f"{home.name} belongs to the caller and must not change")
        output = self.graph.output_node()
        if home.op == "placeholder" and result is not kept and output in _readers(result):
            raise Refused(f"{result.name} is returned beside {home.name}")
        readers = [r for r in _readers(base) if r not in write.path]
        if kept in readers and root(kept.args[1]) is not base:  # type: ignore[union-attr,arg-type]
            readers.remove(kept)
        for reader in readers:
            if written(reader.target) and reader is not kept and root(reader.args[0]) is base:  # type: ignore[arg-type]
                raise Refused(f"{reader.name} has its memory")
            if reader.target is WRITE_BACK:
                raise Refused(f"{base.name} is copied into another argument")
            if reader is output or reader in after:
                raise Refused(f"{reader.name} reads {base.name} afterwards")
            if not _has_own_memory(reader):
                raise Refused(f"{reader.name} may be the same memory")
        return readers

    def after(self, node: fx.Node) -> set[fx.Node]:
        """Return a node and all nodes that run after it."""
        return reached([node], lambda n: (*n.users, *self.before.get(n, ())))

    def rewritten(self, write: _Write) -> fx.Node:
        first, result = write.path[0], write.result
        form, arguments, more = write.form or put, first.args, first.kwargs
        if write.form is None:
            indices: Any = () if write.indices is None else (write.indices,)
            arguments, more = (write.base, write.view, write.source, *indices), {}
        with self.graph.inserting_before(result):
            new = self.graph.create_node("call_function", form, arguments, more, form._opname.rstrip("_"))
        new.meta = dict(first.meta) | {"val": result.meta["val"]}
        self.replaced(write, new)
        return new

    def in_order(self) -> None:
        """Order the nodes as before, as far as waiting for readers allows. Remaining copies come last."""
        erase_unused(set(self.graph.nodes))
        nodes = sorted(self.graph.nodes, key=lambda node: (node.op == "output", node.target is WRITE_BACK))
        number = {node: i for i, node in enumerate(nodes)}
        waits = {node: list(node.all_input_nodes) for node in nodes}
        for reader, writes in self.before.items():
            for write in writes if reader in waits else ():  # and not erased, as nobody needs it
                if write in waits:
                    waits[write].append(reader)
        placed: set[fx.Node] = set()
        last = self.graph._root
        for node in nodes:
            stack = [node]
            while stack:
                missing = [n for n in waits[stack[-1]] if n not in placed]
                if missing:
                    stack.append(min(missing, key=number.__getitem__))
                    continue
                current = stack.pop()
                if current not in placed:
                    placed.add(current)
                    last.append(current)
                    last = current


def _is_computed(node: fx.Node) -> bool:
    """True if a cluster computes a value, and may store it anywhere."""
    return node.op == "call_function" and node.target is not put and is_always_held(node.target)


def owner(node: fx.Node) -> fx.Node:
    """Return the node that had the memory of a value first, before anything was written into it."""
    while node.op == "call_function" and node.target is not WRITE_BACK and written(node.target) == (0,):
        node = root(node.args[0])  # type: ignore[arg-type]
    return node


def part_of(scatter: fx.Node) -> fx.Node:
    """Return the view of its base into which such an operator writes, as a new node."""
    named = arguments(scatter)
    more = [value for name, value in named.items() if name not in ("self", "src")]
    with scatter.graph.inserting_before(scatter):
        return emit(scatter, OVERLAYS[scatter.target], named["self"], *more)  # type: ignore[index]


def _readers(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that read a value, directly or through views."""
    shown = walk(node.users, lambda user: user.users if is_view_node(user) else ())
    readers = (user for user in shown if not is_view_node(user))
    # A call of aten::sym_size reads no element.
    return [r for r in readers if not str(getattr(r.target, "_schema", "")).startswith("aten::sym_")]


def _has_own_memory(node: fx.Node) -> bool:
    """True if a call's result has no memory of its operands, except those that it writes into."""
    schema = getattr(node.target, "_schema", None)
    results = schema.returns if schema is not None else ()
    return bool(written(node.target)) or all(r.alias_info is None for r in results)


def _is_same(a: fx.Node, b: fx.Node) -> bool:
    """True if two values are the same elements of the same memory, in the same order."""
    return root(a) is root(b) and place(a) == place(b)


def _repeats(node: fx.Node) -> bool:
    """True if elements share memory, or may share it."""
    value: torch.Tensor = node.meta["val"]
    return any(
        dim_of(n) == 0 != dim_of(size) - 1 for n, size in zip(value.stride(), value.shape, strict=True)
    )


IN_PLACE_WRITES = Pass(
    RULE,
    write_in_place,
    does="Write parts of a tensor into its own memory.",
    when="every reader of the tensor's old value comes before the write",
    gains="a copy of the tensor fewer",
    level=Level.GRAPH,
)
