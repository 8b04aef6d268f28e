"""Launch a whole graph at once: it is recorded on the device at the second call, and replayed from then on.

This module decides which graphs may be recorded, and says why others may not. The first call of a graph runs
without a recording: kernels are tuned in it.

Where the user asks for recordings they are PyTorch's (torch._inductor.cudagraph_trees, what
torch.compile(mode="reduce-overhead") uses), with one pool for all. Results lie in it: the next step's may
take their place. PyTorch raises where an overwritten one is read; what is to be kept longer is cloned.

Where a graph is recorded unasked (`Terms`) they are those of `recording`, which cost the host less: no result
that somebody holds is overwritten, and whatever a CUDA graph does not foresee runs as without: a graph that
the user records, a profile, another stream. A forward that is called again before its backward, as a
pipeline's stages are, has a CUDA graph for each of these calls (`pairs.Lane`). How much memory they may keep
is `Options.graph_memory` (`graph_pool`).

Inference whose sizes differ from call to call, or that writes into memory which may be elsewhere the next
time (a cache of keys and values that `generate` makes for each prompt), is recorded in each form that comes
twice; unasked those of whose sizes that pays.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import BuiltinFunctionType
from typing import Any

import sympy
import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from fusion_compiler.ir.decision import Decision, Outcome
from fusion_compiler.ir.dims import Hints
from fusion_compiler.ir.graph_info import GraphInfo, Phase
from fusion_compiler.ir.layout import is_view_node
from fusion_compiler.ops.schema import CONTROL_FLOW, WRITE_BACK, draws, written
from fusion_compiler.runtime.binding import unkept_scratch
from fusion_compiler.runtime.boxed import Boxed, after_one, boxed, paused, unless
from fusion_compiler.runtime.graph_pool import Pool, retried
from fusion_compiler.runtime.pairs import (
    MOST_FORMS,
    UNASKED,
    Note,
    Pair,
    Terms,
    keeping,
    not_replayed,
    replayed,
)
from fusion_compiler.runtime.recording import ALIGNED, Calls, Recorder
from fusion_compiler.runtime.retained import is_kept

RECORDED = "recorded"
FORMS = "once for each of the sizes and places of its arguments that come twice"
FORWARD_IS_NOT = "its forward is not recorded"

# Of a graph, its arguments, positions of those that it writes into, and the index of its device: see
# `graph_tuning.GraphTuning`.
Tuning = Callable[[Boxed, Sequence[Any], Sequence[int], int], None]


@dataclass(frozen=True)
class Form:
    """A form has the positions of arguments that differ between calls of one graph: a recording is of one
    form.

    sizes: numbers, from which all symbolic sizes follow. written: tensors that are written into, whose
    addresses may change.
    """

    sizes: tuple[int, ...] = ()
    written: tuple[int, ...] = ()

    def of(self, arguments: Sequence[Any]) -> tuple[int, ...]:
        """Return the form of a call: its sizes, then its addresses."""
        sizes = [arguments[i] for i in self.sizes]
        return (*sizes, *(arguments[i].data_ptr() for i in self.written))

    def is_aligned(self, values: tuple[int, ...]) -> bool:
        """True if calls of a form can be recorded: PyTorch's recordings would write into an aligned copy."""
        return not any(address % ALIGNED for address in values[len(self.sizes) :])


def form_of(gm: fx.GraphModule, static_inputs: Sequence[int]) -> Form:
    """Return the form of a graph's calls. static_inputs: positions of the arguments whose addresses stay the
    same."""
    from torch._dynamo.backends.cudagraphs import find_input_mutations

    inputs = gm.graph.find_nodes(op="placeholder")
    sizes = tuple(i for i, n in enumerate(inputs) if isinstance(n.meta.get("val"), torch.SymInt | int))
    return Form(sizes, tuple(sorted(find_input_mutations(gm.graph) - set(static_inputs))))


def refusal(gm: fx.GraphModule, form: Form, phase: Phase) -> str | None:
    """Return why calls of a captured graph cannot be recorded, or None if they can.

    gm: functional ATen but for writes into arguments, annotated with FakeTensors.
    """
    from torch._inductor.utils import is_cudagraph_unsafe_fx_node
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    inputs = gm.graph.find_nodes(op="placeholder")
    if not _sized(inputs, form) or (form.sizes and phase is not Phase.INFERENCE):
        return "its sizes differ from call to call; compile with dynamic=False to record one graph for each"
    shown = _shown(gm.graph.output_node().all_input_nodes) if form.sizes else None
    if shown is not None:  # of known sizes AOTAutograd knows the place without looking at the result
        return f"its result {shown.name} is a view of an argument or another result; a copy loses its place"
    values = _values(gm)
    tensors = [(n, value) for n, value in values if isinstance(value, torch.Tensor)]
    other = next((f"{n.name} is on {t.device}" for n, t in tensors if t.device.type != "cuda"), None)
    if other is not None:
        return f"{other}: what the host computes is not recorded"
    if len(devices := sorted({str(t.device) for _, t in tensors})) != 1:
        return f"it is on {' and '.join(devices) or 'no device'}"
    chosen = next((n for n in gm.graph.nodes if n.target in CONTROL_FLOW), None)
    if chosen is not None:
        return f"data decides what {chosen.name} runs"
    unsized = (n for n, value in values if value is not None and free_unbacked_symbols(value))
    unsafe = next(filter(is_cudagraph_unsafe_fx_node, gm.graph.nodes), None) or next(unsized, None)
    if unsafe is not None:
        return f"{unsafe.name} ({unsafe.target}) waits for the device, or its result's size depends on data"
    if form.written and phase is not Phase.INFERENCE:
        names = ", ".join(inputs[i].name for i in form.written)
        return (
            f"it writes into {names}, whose address may change; what is written into must be a buffer "
            "of the module, or marked by torch._dynamo.mark_static_address"
        )
    return None


def _collective(gm: fx.GraphModule) -> str | None:
    """Return why a graph in which other processes take part is not recorded unasked; None for any other."""
    targets = (n.target for n in gm.graph.nodes if isinstance(n.target, OpOverload))
    reason = (f"other processes take part in {t}" for t in targets if "c10d" in t.namespace)
    return next(reason, None)


def _shown(results: Sequence[fx.Node]) -> fx.Node | None:
    """Return a result that is a view of an argument, or of memory that another result shows as well, or
    None."""
    roots = {node: _root(node) for node in results}
    several = Counter(roots.values())
    views = (node for node in results if is_view_node(node))
    return next((n for n in views if roots[n].op == "placeholder" or several[roots[n]] > 1), None)


def _root(node: fx.Node) -> fx.Node:
    """Return the node that has the memory which a result shows; the argument, if it has been written into."""
    while is_view_node(node) or node.target is WRITE_BACK:
        node = node.args[0]  # type: ignore[assignment]
    return node


def repeatable(gm: fx.GraphModule) -> tuple[int, ...] | None:
    """Return the positions of arguments that a graph writes into, if a call can be repeated after these have
    been put back; None if it may leave something else, as when it draws random numbers."""
    places = {node: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    positions: set[int] = set()
    for node in gm.graph.nodes:
        if node.op != "call_function" or isinstance(node.target, BuiltinFunctionType):
            continue
        if not isinstance(node.target, OpOverload) or draws(node.target):
            return None
        into = tree_leaves([node.args[i] for i in written(node.target) if i < len(node.args)])
        positions |= {places[root] for root in map(_root, into) if root in places}
    return tuple(sorted(positions))


def _sized(inputs: Sequence[fx.Node], form: Form) -> bool:
    """True if all sizes of a graph's arguments are numbers, or follow from those that are arguments as
    well."""
    from torch.fx.experimental.symbolic_shapes import free_symbols

    defined: set[sympy.Symbol] = set()
    needed: set[sympy.Symbol] = set()
    for i, node in enumerate(inputs):
        value = node.meta.get("val")
        if i in form.sizes:
            defined |= {value.node.expr} if isinstance(value, torch.SymInt) else set()
        elif not isinstance(value, torch.Tensor):
            return False
        else:
            needed |= free_symbols([*value.shape, *value.stride(), value.storage_offset()])
    return needed <= defined


def _values(gm: fx.GraphModule) -> list[tuple[fx.Node, Any]]:
    """Return each value of a graph with its node; a node with several values appears once for each."""
    return [(n, value) for n in gm.graph.nodes for value in tree_leaves(n.meta.get("val"))]


TermsOf = Callable[[Hints | None], Terms]  # at some sizes; None: those of its capture


class Recordings:
    """An object of this class knows which graphs of one compile() are recorded: a backward only if its
    forward is.

    limit: `Options.graph_memory`, for those that are recorded unasked.
    """

    def __init__(self, limit: float | int = 0.125) -> None:
        self._limit = limit
        self._forwards: dict[str, int] = {}  # graph -> index of its device
        self._pairs: dict[str, Pair] = {}
        self._pools: dict[int, list[Pool]] = {}  # by the index of the device, one for each lane

    def wrap(
        self,
        run: Boxed,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        info: GraphInfo,
        terms: TermsOf | None = None,
        tuning: Tuning | None = None,
        note: Note = lambda decision: None,
    ) -> tuple[Boxed, Decision]:
        """Return `run`, called in CUDA graphs or as it is, and what was decided.

        run: takes its arguments as one list. terms: of a graph that is recorded unasked. tuning: of
        inference, before it is first recorded. note: called with another decision where calls change it or
        show what is kept. The outcome is FORCED if the user asked for the
        recording, whose results the next call overwrites.
        """
        graph = info.name.partition(".")[0]
        form = form_of(gm, info.static_inputs)
        reason = refusal(gm, form, info.phase)
        if reason is None and terms is not None:
            reason = _collective(gm)
        predicted = None
        if reason is None and terms is not None and not form.sizes:  # each size is judged by itself
            predicted = terms(None)
            reason = predicted.refusal if info.phase is Phase.INFERENCE else None
        if terms is not None and info.phase is not Phase.BACKWARD and not _writes(gm):
            run = retried(run)
        if reason is None and info.phase is Phase.INFERENCE:
            return self._inference(run, gm, inputs, info, form, terms, tuning, note)
        if terms is not None:
            return self._unasked(run, gm, info, reason or predicted, note)
        asked = replayed(RECORDED, Outcome.FORCED)
        if info.phase is not Phase.BACKWARD:
            if reason is not None:
                return run, not_replayed(reason)
            index = self._forwards[graph] = _device_index(gm)
            return after_one(run, recorded(run, gm, inputs, info, index)), asked
        if graph not in self._forwards:
            return run, not_replayed(FORWARD_IS_NOT)
        index = self._forwards[graph]
        plain = _beside_recordings(run, index)
        if reason is not None:
            return plain, not_replayed(reason)
        return after_one(plain, _if_last(plain, recorded(run, gm, inputs, info, index))), asked

    def _pool(self, gm: fx.GraphModule, lane: int = 0) -> Pool:
        index = _device_index(gm)
        pools = self._pools.setdefault(index, [])
        while len(pools) <= lane:
            pools.append(Pool(index, self._limit, pools))
        return pools[lane]

    def _unasked(
        self, run: Boxed, gm: fx.GraphModule, info: GraphInfo, terms: Terms | str | None, note: Note
    ) -> tuple[Boxed, Decision]:
        """Return `run`, recorded or as it is, and that decision. terms: or the reason why the graph is not
        recorded."""
        graph = info.name.partition(".")[0]
        pair = self._pairs.get(graph)
        if info.phase is Phase.BACKWARD:
            if pair is None:
                return run, not_replayed(FORWARD_IS_NOT)
            return pair.backward(run, info.static_inputs, terms, note)
        if not isinstance(terms, Terms):
            return run, not_replayed(terms or "")
        if (reason := self._pool(gm).refusal(terms.peak)) is not None:
            return run, not_replayed(reason)
        pair = self._pairs[graph] = Pair(run, functools.partial(self._pool, gm), terms, info, note)
        return pair.forward, pair.decision

    def _inference(
        self,
        run: Boxed,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        info: GraphInfo,
        form: Form,
        terms: TermsOf | None,
        tuning: Tuning | None,
        note: Note,
    ) -> tuple[Boxed, Decision]:
        """Return `run` in CUDA graphs, whose results the next call overwrites if that was asked for, and
        that decision."""
        index, static = _device_index(gm), (*info.static_inputs, *form.written)
        text = RECORDED if terms is None else UNASKED
        if form != Form():
            text = f"{text}; {FORMS}"
        pays: Callable[[tuple[int, ...]], bool] | None = None
        if terms is None:
            later = recorded(run, gm, inputs, replace(info, static_inputs=static), index)
        else:
            pool = self._pool(gm)
            needed = 0
            if not form.sizes:
                needed = terms(None).peak
                if (reason := pool.refusal(needed)) is not None:
                    return run, not_replayed(reason)
            else:
                pays = _pays(terms, pool, gm, form)
                if (reason := terms(None).refusal) is not None:
                    text = f"{text}, but with the sizes that it was captured with: {reason}"

            def report(reason: str | None, kept: int) -> None:
                note(keeping(text, kept) if reason is None else not_replayed(reason))

            calls = Calls(lambda _: static, None, MOST_FORMS, lambda: needed, report=report)
            later = Recorder(run, pool, calls)
        if tuning is not None and (places := repeatable(gm)) is not None:
            later = after_one(_tuned(run, later, tuning, places, index), later)
        if terms is not None:
            later = unless(paused, run, later)
        decision = replayed(text, Outcome.FORCED if terms is None else Outcome.DONE)
        if form == Form():
            return after_one(run, later), decision
        return _when_known(run, later, form, pays), decision


def _writes(gm: fx.GraphModule) -> bool:
    """True if a graph writes into its arguments."""
    from torch._dynamo.backends.cudagraphs import find_input_mutations

    return bool(find_input_mutations(gm.graph))


def _tuned(run: Boxed, later: Boxed, tuning: Tuning, written: Sequence[int], index: int) -> Boxed:
    """Return `later`, which records, with the schedules that are fastest in `run`."""

    def call(arguments: list[Any]) -> Any:
        tuning(run, arguments, written, index)
        return later(arguments)

    return call


def _pays(terms: TermsOf, pool: Pool, gm: fx.GraphModule, form: Form) -> Callable[[tuple[int, ...]], bool]:
    """Return the function that says whether calls with such numbers as sizes are recorded unasked."""
    nodes = gm.graph.find_nodes(op="placeholder")
    values = [nodes[i].meta["val"] for i in form.sizes]
    symbols = [v.node.expr if isinstance(v, torch.SymInt) else None for v in values]

    def pays(sizes: tuple[int, ...]) -> bool:
        at = {s: n for s, n in zip(symbols, sizes, strict=True) if isinstance(s, sympy.Symbol)}
        predicted = terms(at)
        return predicted.refusal is None and pool.refusal(predicted.peak) is None

    return pays


def _if_last(plain: Boxed, later: Boxed) -> Boxed:
    """Return `later`, a recorded backward, which is `plain` if another backward is to follow: what was saved
    died while it was recorded, and its memory was used again, as each replay does."""

    def call(arguments: list[Any]) -> Any:
        return (plain if is_kept() else later)(arguments)

    return call


def _device_index(gm: fx.GraphModule) -> int:
    device = next(t.device for _, t in _values(gm) if isinstance(t, torch.Tensor))
    return int(device.index or 0)  # FakeTensors have one


def recorded(run: Boxed, gm: fx.GraphModule, inputs: Sequence[Any], info: GraphInfo, index: int) -> Boxed:
    """Return `run` behind PyTorch's recordings for device `index`."""
    from torch._dynamo.backends.cudagraphs import find_input_mutations, get_stack_traces
    from torch._inductor.cudagraph_trees import cudagraphify_impl
    from torch._inductor.cudagraph_utils import get_placeholder_info

    def model(arguments: list[Any]) -> list[Any]:
        # Memory that is kept from call to call must not come from the recordings' pool.
        with unkept_scratch():
            return list(run(arguments))

    return cudagraphify_impl(
        model,
        [0 if isinstance(value, torch.SymInt) else value for value in inputs],  # of numbers, where they are
        info.static_inputs,
        device_index=index,
        is_backward=info.phase is Phase.BACKWARD,
        is_inference=info.phase is Phase.INFERENCE,
        stack_traces=get_stack_traces(gm),
        placeholders=tuple(get_placeholder_info(gm.graph)),
        mutated_input_idxs=tuple(sorted(find_input_mutations(gm.graph))),
    )  # type: ignore[return-value]


def _when_known(
    plain: Boxed, later: Boxed, form: Form, pays: Callable[[tuple[int, ...]], bool] | None = None
) -> Boxed:
    """Return a function that calls `later` for a form that came before, and else `plain`: to record takes as
    long as many calls.

    pays: whether those with some sizes are recorded at all; asked when they come again. None: they are.
    """
    asked = functools.lru_cache(maxsize=4 * MOST_FORMS)(pays or (lambda sizes: True))
    repeated: set[tuple[int, ...]] = set()
    once: dict[tuple[int, ...], None] = {}

    def call(arguments: list[Any]) -> Any:
        key = form.of(arguments)
        if key in repeated:
            return later(arguments)
        if key in once and len(repeated) < MOST_FORMS and asked(key[: len(form.sizes)]):
            del once[key]
            repeated.add(key)
            return later(arguments)
        if form.is_aligned(key):
            once[key] = None
            if len(once) > MOST_FORMS:
                del once[next(iter(once))]
        return plain(arguments)

    return boxed(call)


def _beside_recordings(run: Boxed, index: int) -> Boxed:
    """Return an unrecorded backward of a recorded forward, which reports to the forward's recordings that it
    runs."""
    from torch._inductor.cudagraph_trees import get_manager

    def call(arguments: list[Any]) -> Any:
        manager: Any = get_manager(index, create_if_none_exists=False)
        if manager is not None:
            manager.set_to_running_backward()
        return run(arguments)

    return boxed(call)
