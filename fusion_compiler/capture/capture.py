"""Capture with a TorchDynamo backend that hands out functional ATen graphs, forward and backward.

    Dynamo graph -> pre-autograd ATen graph -> rewrites -> AOTAutograd -> compile_graph, once per graph

The pre-autograd graph still has `linear` and `scaled_dot_product_attention` whole; what is
rewritten there gets its backward from autograd. Where that graph would not mean the same as
Dynamo's (see pre_autograd.py) it is not made, the rewrites are left out and a note says why.
"""

from __future__ import annotations

import functools
import itertools
import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.exc import SkipFrame, TorchDynamoException
from torch._functorch._aot_autograd import graph_compile
from torch._functorch._aot_autograd.schemas import OutputType, SubclassCreationMeta
from torch._functorch.aot_autograd import make_boxed_func
from torch._guards import TracingContext
from torch._logging._internal import trace_log
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fusion_compiler.capture import autograd_cache, kept_rewrites
from fusion_compiler.capture.aliases import check_aliases, without_inference_gradients
from fusion_compiler.capture.arguments import enter
from fusion_compiler.capture.autograd_cache import StoredGraph, stored
from fusion_compiler.capture.blocks import with_blocks
from fusion_compiler.capture.deferred import deferrable
from fusion_compiler.capture.first_run import has_effects, watched
from fusion_compiler.capture.graph_text import read
from fusion_compiler.capture.guards import add_guards
from fusion_compiler.capture.kept_rewrites import read_rewritten, write_rewritten
from fusion_compiler.capture.memory import show_arguments
from fusion_compiler.capture.partition import merge_equal, partition
from fusion_compiler.capture.pre_autograd import (
    UntraceableError,
    lift_attributes,
    trace_pre_autograd,
    uncompiled,
)
from fusion_compiler.capture.tangents import (
    Backward,
    Missing,
    any_gradients,
    leave_undefined,
    separable,
)
from fusion_compiler.capture.transforms import check_functions
from fusion_compiler.errors import EagerGraphError
from fusion_compiler.ir import record
from fusion_compiler.ir.decision import Decision, Decisions, Outcome
from fusion_compiler.ir.effects import is_impure
from fusion_compiler.ir.graph_info import GraphInfo, Origin, Phase, argument_name, origins_of
from fusion_compiler.ir.graph_pass import Pass
from fusion_compiler.ir.record import NotWritable
from fusion_compiler.ops.decompositions.traced_gradients import traced_gradients
from fusion_compiler.ops.own.sum_rows import COMBINES
from fusion_compiler.runtime.boxed import Boxed, boxed
from fusion_compiler.runtime.retained import is_kept, refuse_double_backward
from fusion_compiler.runtime.stages import Stages
from fusion_compiler.support.store import Store

CompileGraph = Callable[[fx.GraphModule, Sequence[Any], GraphInfo], Callable[..., Any]]
Backend = Callable[..., Callable[..., Any]]  # `Capture.backend`


def raising(name: str, error: Exception) -> None:
    """Raise `error`. As a `give_up`, this lets no graph run uncompiled after an error."""
    del name
    raise error


@dataclass(frozen=True, eq=False)
class Capture:
    """A capture makes the backend for `torch.compile(model, backend=capture.backend)`.

    compile_graph(gm, inputs, info): gm is functional ATen; inputs are FakeTensors, SymInts or
        ints, one per placeholder. It returns a callable that takes one argument per placeholder
        and returns the list of outputs; with the attribute `_boxed_call` set it takes one list
        of arguments, which it empties, so that saved activations are freed at their last use.
    rewrites: run in order on the pre-autograd graph.
    decompositions: makes the table ATen overload -> function for one graph, applied under autograd.
    joint_rewrite: changes the joint graph of forward and backward in place, under autograd, or the only
        graph if there is no backward.
    give_up(name, error): called with an error in any of this. It raises, or the graph `name` runs as it is.
    split: makes forward and backward of a joint graph.
    options: all that decides the result beside the graph, for keys on disk. Without it no graph is kept.
    patterns: returns the text of the user's patterns, which `rewrites` apply. It raises NotWritable if one
        has none: each process then traces the graph above autograd and rewrites it again.
    store: keeps the graphs after the rewrites.
    stages: receives the seconds of "rewrites" and "autograd".
    meanwhile: True while kernels of the last graph are still being compiled, so that more work costs no time.
    after(name, step, graph): called with each graph that a rewrite changed, above autograd.
    """

    compile_graph: CompileGraph
    _: KW_ONLY
    rewrites: Sequence[Pass]
    decompositions: Callable[[], Mapping[Any, Callable[..., Any]]]
    joint_rewrite: Callable[[fx.Graph], Decisions] = lambda graph: ()
    give_up: Callable[[str, Exception], None] = raising
    split: Callable[..., tuple[fx.GraphModule, fx.GraphModule]] = partition
    options: Any = None
    patterns: Callable[[], Any] = lambda: None
    store: Store = field(default_factory=Store)
    stages: Stages = field(default_factory=Stages)
    meanwhile: Callable[[], bool] = lambda: False
    after: Callable[[str, str, fx.GraphModule], None] = lambda name, step, graph: None
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def backend(
        self, gm: fx.GraphModule, inputs: Sequence[Any], *, traced: bool = False
    ) -> Callable[..., Any]:
        """Compile a graph of TorchDynamo's. traced: True if it is in its pre-autograd form already."""
        name = f"graph{next(self._numbers)}"
        gm, held = lift_attributes(gm)
        compilers = _Compilers(self, name)
        if not traced:
            self._check(gm, name)
        try:
            entry = enter(gm, (*held, *inputs))
            with self.stages.of("autograd"), traced_gradients():
                run = entry.around(self._compiled(compilers, name, entry.graph, entry.inputs, traced))
        except TorchDynamoException:  # not an error: Dynamo may start again
            raise
        except Exception as error:
            if traced:
                raise
            self.give_up(name, error)
            run = uncompiled(gm)
        else:
            run = without_inference_gradients(run, gm.graph)
            plain = lambda *args: uncompiled(gm)(*args)  # noqa: E731  copied only if it is needed
            run = watched(run, plain, compilers.may_repeat, functools.partial(self.give_up, name))
        return functools.partial(run, *held) if held else run

    def _check(self, gm: fx.GraphModule, name: str) -> None:
        """Leave a graph to eager if it is not what the user's code computes."""
        add_guards()
        try:
            check_functions(gm)
        except EagerGraphError as error:
            self.give_up(name, error)
            raise SkipFrame(str(error)) from error

    def _compiled(
        self, compilers: _Compilers, name: str, gm: fx.GraphModule, inputs: Sequence[Any], traced: bool
    ) -> Callable[..., Any]:
        key = recorded = None
        if not traced and self.options is not None:
            with suppress(NotWritable):  # it is rewritten in each process
                key = kept_rewrites.key_of(gm, inputs, self.options, self.patterns())
                recorded = read_rewritten(self.store, key)
        if recorded is not None and autograd_cache.has_entry(recorded[0]):
            autograd, notes = recorded
            with suppress(_AbsentError):
                return compilers.compile(gm, inputs, notes, autograd)
        with self.stages.of("rewrites"):
            after = functools.partial(self.after, name)
            rewritten, notes = rewrite(gm, inputs, self.rewrites, traced=traced, after=after)
        try:
            run = compilers.compile(rewritten, inputs, notes)
            if key is not None and compilers.key is not None:
                write_rewritten(self.store, key, compilers.key, notes)
            return run
        except TorchDynamoException:
            raise
        except Exception as error:
            if rewritten is gm or compilers.reached:
                raise
            # What a rewrite yields can lay out its results differently, which a `view` in the
            # model may not accept: Dynamo's own graph is what the user wrote.
            return compilers.compile(gm, inputs, _undone(notes, error))


def _undone(notes: Decisions, error: Exception) -> Decisions:
    reason = f"undone, autograd refused the result: {type(error).__name__}: {error}"
    undone = (replace(n, outcome=Outcome.REFUSED, reason=f"{n.reason}; undone") for n in notes if n.is_done)
    refused = (n for n in notes if not n.is_done)
    return (Decision("pre-autograd", "", Outcome.REFUSED, reason), *undone, *refused)


class _AbsentError(Exception):
    """Autograd's cache lacks a graph, or cannot read it, although it has an entry of it."""


class _Compilers:
    """An object of this class has the compilers that AOTAutograd calls for one Dynamo graph.

    reached: whether compile_graph was called, so that an error may be its own.
    started: whether the compiled forward was called.
    key: under which autograd's graphs are kept on disk; None where they are not.
    """

    _bare: Callable[..., Any] | None  # the graph without AOTAutograd's wrapper, where that does nothing
    _inputs: Sequence[Any] | None  # where it may do nothing

    def __init__(self, capture: Capture, name: str) -> None:
        self._capture, self._name = capture, name
        self._joint_notes: Decisions = ()
        self.reached = self.started = False
        self._has_effects = False
        self.key: str | None = None
        self._expected = False
        self._separable = False
        self._origins: tuple[Origin, ...] = ()
        self._donated: frozenset[int] = frozenset()  # arguments of the backward that it may write over

    def compile(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        notes: Decisions,
        key: str | None = None,
    ) -> Callable[..., Any]:
        """Return `gm` behind AOTAutograd. key: the key of autograd's graphs on disk, which stem from another
        form of `gm`; raise _AbsentError if they are not there after all."""
        self._separable, self._bare, self._joint_notes = False, None, ()
        self._origins = tuple(origins_of(gm.graph).values())
        # Asked here: while a graph is compiled other modes may be set. Dynamo guards both.
        recorded = torch.is_grad_enabled() and any(_wants_gradient(x) for x in inputs)
        self._inputs = None if recorded or torch._C._is_any_autocast_enabled() else inputs
        self._notes = notes
        self._expected = key is not None
        self.key = key = key or self._key(gm, inputs)
        forward = self._stage(Phase.FORWARD)
        if key is not None:
            forward = autograd_cache.serializable(forward)
        split = functools.partial(self._capture.split, rewrite=self._rewrite_joint, note=self._add_note)
        call = aot_autograd(
            fw_compiler=forward,
            bw_compiler=self._stage(Phase.BACKWARD),
            inference_compiler=self._stage(Phase.INFERENCE),
            partition_fn=split,
            keep_inference_input_mutations=True,  # the graph writes into its arguments itself
            decompositions=dict(self._capture.decompositions()),
        )
        kept = autograd_cache.cached(key, self._read) if key is not None else nullcontext()
        kept_effects = patch.object(fx.Node, "is_impure", is_impure)
        with kept, _unprinted(), kept_effects, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Error detected in _CopyBackward")  # which is made good
            once = gm if self._expected else with_blocks(gm)
            try:
                run = call(once, inputs)
            except Exception as error:
                if once is gm or self.reached or isinstance(error, TorchDynamoException):
                    raise
                self._tell(f"each block is traced by itself: {type(error).__name__}: {error}")
                run = call(gm, inputs)
        if self._bare is not None:
            return self._bare
        return leave_undefined(run) if self._separable else run

    def may_repeat(self) -> bool:
        """True if nobody can see that the compiled forward was called."""
        return not (self.started and self._has_effects)

    def _key(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> str | None:
        """Return the key of autograd's graphs on disk, or None, with a note of why they are not kept."""
        if self._capture.options is None:
            return None
        try:
            return autograd_cache.key_of(gm, inputs, self._capture.options)
        except NotWritable as reason:
            self._tell(f"not kept on disk: {reason}")
            return None

    def _tell(self, text: str) -> None:
        note = Decision("autograd", "", Outcome.NOTED, text)
        self._notes = tuple(dict.fromkeys((*self._notes, note)))

    def _rewrite_joint(self, graph: fx.Graph) -> None:
        self._joint_notes = self._capture.joint_rewrite(graph)
        if self._joint_notes and graph.owning_module is not None:
            graph.owning_module.recompile()

    def _add_note(self, note: Decision) -> None:
        self._joint_notes = (*self._joint_notes, note)

    def _stage(self, phase: Phase) -> Callable[..., Any]:
        compiled: list[Callable[..., Any]] = []

        def once(graph: fx.GraphModule, fakes: Sequence[Any]) -> Callable[..., Any]:
            # A backward may be compiled when it is first called, which several threads may do at once.
            with compile_lock:
                if not compiled:
                    compiled.append(self._made(graph, fakes, phase))
                return compiled[0]

        return once

    def _made(self, graph: fx.GraphModule, fakes: Sequence[Any], phase: Phase) -> Callable[..., Any]:
        """Return the callable that AOTAutograd runs for a graph that it has just traced."""
        if self._expected:
            raise _AbsentError
        if phase is not Phase.BACKWARD:
            if (metadata := _metadata()) is not None:
                check_aliases(metadata, graph.graph)
                self._has_effects = metadata.num_mutated_inp_runtime_indices > 0
            self._has_effects |= has_effects(graph.graph)
            show_arguments(graph.graph, _shown())
        if phase is Phase.INFERENCE:
            if any(node.target in COMBINES for node in graph.graph.nodes):  # several may sort alike
                merge_equal(graph.graph)
            self._rewrite_joint(graph.graph)
        info = _info(graph, self._name, phase)
        if phase is Phase.FORWARD:
            self._separable = separable(graph.graph.output_node().args[0][: info.outputs])  # type: ignore[index]
            self._donated = _taken_donations()
        bare = phase is Phase.INFERENCE and self._inputs is not None and _passed_on(self._inputs, fakes)
        if phase is Phase.BACKWARD:
            info = replace(info, donated=_donated(graph, self._donated))
        if self.key is None:
            return self._staged(graph, fakes, info, bare)
        facts = {"phase": phase, "static": info.static_inputs, "outputs": info.outputs, "owned": info.owned}
        facts |= {"donated": info.donated, "bare": bare, "separable": self._separable}
        facts |= {"effects": self._has_effects}
        facts |= {"notes": record.write(self._joint_notes)}
        text = stored(graph, facts) if (reason := _unkept()) is None else StoredGraph("", reason)
        if text.reason:
            self._tell(f"not kept on disk: {text.reason}")
        text.run = self._staged(graph, fakes, replace(info, digest=text.digest), bare)
        return text

    def _read(self, text: Mapping[str, Any], digest: str) -> Boxed:
        """Return the callable that AOTAutograd runs for a graph that was kept on disk."""
        context = TracingContext.try_get()
        assert context is not None and context.fake_mode is not None
        graph = read(text["graph"], context.fake_mode)
        fakes = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
        phase = Phase(text["phase"])
        static, owned, donated = (tuple(text[of]) for of in ("static", "owned", "donated"))
        name = f"{self._name}.{phase}"
        info = GraphInfo(name, phase, static, text["outputs"], owned, donated, from_disk=True, digest=digest)
        self._separable, self._joint_notes = text["separable"], record.read(text["notes"])
        self._has_effects = text["effects"]
        return self._staged(graph, fakes, info, text["bare"])

    def _staged(self, graph: fx.GraphModule, fakes: Sequence[Any], info: GraphInfo, bare: bool) -> Boxed:
        """Compile a graph, and return a boxed function. A backward that may be kept, or depends on which
        gradients arrive, is compiled when it is first called; or at once, if the forward's kernels are being
        compiled meanwhile."""
        self.reached = True
        origins = _named(graph, info.phase, self._origins)
        info = replace(info, origins=origins, rewrites=(*self._notes, *self._joint_notes))
        if info.phase is Phase.BACKWARD and (self._separable or self.key is not None):
            variant = functools.partial(self._variant, fakes, info)
            backward = Backward(graph, variant, several=self._separable)
            if self._capture.meanwhile():
                backward.prepare()
            compiled = backward
        else:
            compiled = self._compiled(graph, fakes, info)
        if info.phase is Phase.BACKWARD:
            run = any_gradients(_boxed_backward(compiled), graph)
            return deferrable(run, graph, functools.partial(self._half, info))
        if bare:
            self.started, self._bare = True, _unboxed(compiled)
        return self._noting(_boxed(compiled))

    def _noting(self, compiled: Boxed) -> Boxed:
        """Return `compiled`, noting that it was called."""

        def call(args: list[Any]) -> Any:
            self.started = True
            return compiled(args)

        return boxed(call)

    def _variant(
        self, fakes: Sequence[Any], info: GraphInfo, graph: fx.GraphModule, missing: Missing, number: int
    ) -> Boxed:
        name = f"{info.name}{number + 1}" if number else info.name
        digest = f"{info.digest} without {missing}" if any(missing) and info.digest else info.digest
        return _boxed(self._compiled(graph, fakes, replace(info, name=name, digest=digest)))

    def _half(self, info: GraphInfo, graph: fx.GraphModule, half: str) -> Boxed:
        """Compile a half of a backward, as a graph of its own: it is recorded with no forward.

        half: its name, and behind a space what it is compiled for.
        """
        nodes = graph.graph.find_nodes(op="placeholder")
        info = replace(
            info,
            name=info.name.replace(".", f"_{half.partition(' ')[0]}.", 1),
            static_inputs=(),
            outputs=len(graph.graph.output_node().args[0]),  # type: ignore[arg-type]
            owned=tuple(node.name for node in nodes if node.name not in info.origins),
            donated=(),  # the other half may read it
            digest=f"{info.digest} {half}" if info.digest else "",
        )
        return _boxed(self._compiled(graph, [node.meta["val"] for node in nodes], info))

    def _compiled(self, graph: fx.GraphModule, fakes: Sequence[Any], info: GraphInfo) -> Callable[..., Any]:
        try:
            return self._capture.compile_graph(graph, fakes, info)
        except Exception as error:
            self._capture.give_up(info.name, error)
            return make_boxed_func(graph.forward)


# What AOTAutograd logs of its graphs, and what it gets where it logs nothing.
_LOGGED = {"_log_inference_graph": None, "_log_joint_graph": None, "_log_fw_bw_graphs": (None, None)}


def _unprinted() -> AbstractContextManager[Any]:
    """Return a context in which AOTAutograd prints its graphs only if somebody reads its logs. It would also
    keep the text beside the graphs on disk."""
    logs = (graph_compile.aot_joint_log, graph_compile.aot_graphs_log)
    if trace_log.handlers or any(log.isEnabledFor(logging.INFO) for log in logs):
        return nullcontext()
    patches: dict[str, Any] = {n: _always(text) for n, text in _LOGGED.items() if hasattr(graph_compile, n)}
    return patch.multiple(graph_compile, **patches) if patches else nullcontext()


def _always(result: Any) -> Callable[..., Any]:
    return lambda *_, **__: result


def _named(graph: fx.GraphModule, phase: Phase, origins: Sequence[Origin]) -> dict[str, Origin]:
    """Return the origins by the placeholders of AOTAutograd's graph, whose arguments are numbered as Dynamo's
    are."""
    names = list(map(argument_name, range(len(origins))))
    if phase is Phase.INFERENCE:
        names = [node.name for node in graph.graph.find_nodes(op="placeholder")]
    return dict(zip(names, origins, strict=False))


def _wants_gradient(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _passed_on(inputs: Sequence[Any], fakes: Sequence[Any]) -> bool:
    """True if AOTAutograd's wrapper passes an inference graph's arguments and results on unchanged.

    inputs: of the Dynamo graph, called where neither autograd nor autocast has a part in what runs.
    fakes: of the graph that is compiled.
    """
    metadata = _metadata()
    if metadata is None or len(inputs) != len(fakes):
        return False
    if any(isinstance(x, torch.Tensor) and is_traceable_wrapper_subclass(x) for x in inputs):
        return False
    return not (
        metadata.num_mutated_inp_runtime_indices
        or metadata.mutated_graph_handled_indices_seen_by_autograd
        or metadata.num_outputs_aliased
        or metadata.num_intermediate_bases
        or metadata.dynamic_outputs
        or metadata.is_rng_op_functionalized
        or metadata.tokens
        or metadata.grad_enabled_mutation is not None
        or any(isinstance(m, SubclassCreationMeta) for m in metadata.subclass_fw_graph_out_meta)
    )


def _boxed(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return a plain function that takes one list. Of other callables AOTAutograd's wrappers lose
    `_boxed_call`."""
    if not isinstance(compiled, Backward) and not getattr(compiled, "_boxed_call", False):
        return make_boxed_func(compiled)

    def call(args: list[Any]) -> Any:
        return compiled(args)

    return boxed(call)


def _boxed_backward(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return a plain function as `_boxed` does, whose results refuse to be differentiated."""
    run = _boxed(compiled)

    def call(args: list[Any]) -> Any:
        if is_kept():
            refuse_double_backward()
        return run(args)

    return boxed(call)


def _unboxed(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes its arguments one by one."""
    if getattr(compiled, "_boxed_call", False):
        return lambda *args: compiled([*args])
    return compiled


def rewrite(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    passes: Sequence[Pass],
    *,
    traced: bool = False,
    after: Callable[[str, fx.GraphModule], None] = lambda name, graph: None,
) -> tuple[fx.GraphModule, Decisions]:
    """Return the pre-autograd form of `gm` (or `gm`, if it is `traced`) after `passes`, or `gm` and a note.

    after: called with the name of each pass that changed the graph, and the graph.
    """
    if not passes:
        return gm, ()
    try:
        graph = gm if traced else trace_pre_autograd(gm, inputs)
    except UntraceableError as reason:
        return gm, (Decision("pre-autograd", "", Outcome.REFUSED, str(reason)),)
    notes: Decisions = ()
    for each in passes:
        before, (graph, more) = graph, each.apply(graph)
        notes += more
        if graph is not before:
            after(each.name, graph)
    return graph, notes


def _metadata() -> Any:
    """Return AOTAutograd's metadata of the graph that it compiles, or None outside of it."""
    context = TracingContext.try_get()
    return None if context is None else context.fw_metadata


def _shown() -> dict[int, int]:
    """Return for each result that AOTAutograd makes again as a view of an argument, by its position, the
    position of that argument. The graph has a forward pass."""
    metadata = _metadata()
    if metadata is None or metadata.tokens:
        return {}
    if any(isinstance(m, SubclassCreationMeta) for m in metadata.subclass_inp_meta):
        return {}
    infos = enumerate(metadata.output_info, metadata.num_mutated_inp_runtime_indices)
    return {i: info.base_idx for i, info in infos if info.output_type is OutputType.alias_of_input}


def _unkept() -> str | None:
    """Return why AOTAutograd's metadata of a graph cannot be read again from disk, or None if it can.

    The sizes of these views are written from memory that was given back (pytorch#185861 mends that).
    """
    metadata = _metadata()
    sequences = [] if metadata is None else [info.view_meta_sequence for info in metadata.output_info]
    views = [type(view).__name__ for steps in sequences if steps is not None for view in steps.sequence]
    lost = next((v for v in views if v in ("_unsafe_view_ViewMeta", "resize__ViewMeta")), None)
    return None if lost is None else f"PyTorch does not keep the sizes of {lost.removesuffix('_ViewMeta')}"


def _info(graph: fx.GraphModule, name: str, phase: Phase) -> GraphInfo:
    metadata = _metadata()
    placeholders = graph.graph.find_nodes(op="placeholder")
    returned = graph.graph.output_node().args[0]
    outputs = len(returned) if isinstance(returned, Sequence) else 1
    owned: tuple[str, ...] = ()
    if metadata is None:
        return GraphInfo(f"{name}.{phase}", phase, (), outputs)
    static = {int(i) for i in metadata.static_input_indices}
    if phase is Phase.BACKWARD:
        # The partitioner keeps the joint graph's names for inputs that it saves.
        names = set(map(argument_name, static))
        static = {i for i, node in enumerate(placeholders) if node.name in names}
        owned = tuple(node.name for node in placeholders if not node.name.startswith("primals_"))
    elif phase is Phase.FORWARD:
        outputs = metadata.num_forward_returns
    return GraphInfo(f"{name}.{phase}", phase, tuple(sorted(static)), outputs, owned)


def _taken_donations() -> frozenset[int]:
    """Take from AOTAutograd, and return, the positions of the backward's arguments that only the graph holds.

    AOTAutograd must forget them, because it would refuse to run through a retained graph again
    (`runtime.retained`).
    """
    metadata = _metadata()
    if metadata is None:
        return frozenset()
    taken, metadata.bw_donated_idxs = metadata.bw_donated_idxs, []
    return frozenset(taken or ())


def _donated(graph: fx.GraphModule, positions: Collection[int]) -> tuple[str, ...]:
    """Return which of the arguments at these positions of a backward graph share memory with no other
    argument."""
    nodes = graph.graph.find_nodes(op="placeholder")
    values = [node.meta.get("val") for node in nodes]
    storages = [v.untyped_storage()._cdata if isinstance(v, torch.Tensor) else None for v in values]
    unshared = (i for i in sorted(positions) if storages[i] is not None and storages.count(storages[i]) == 1)
    return tuple(nodes[i].name for i in unshared)
