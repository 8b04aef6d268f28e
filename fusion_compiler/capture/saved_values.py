"""Choose the values that a forward saves for its backward, within a budget for the memory in use at once.

PyTorch's partitioner (`activation_memory_budget`) solves a knapsack of saved bytes and flop, in which
memory-bound operators are free. But recomputed values use memory, too: if a forward saves nothing, backward
recomputes the whole forward, whose values are then in memory at the same time. Here the budget is for the
bytes in use at the peak, and recomputation is priced in time. Calls that may run only once are always saved.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any, Literal
from unittest.mock import patch

from torch import fx
from torch._functorch import partitioners
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import flop_registry

from fusion_compiler.ir.decision import Decision, Outcome
from fusion_compiler.ir.device import GEMM_SHARE, DeviceSpec
from fusion_compiler.ir.effects import has_effect, is_random
from fusion_compiler.ir.plan_text import human_bytes
from fusion_compiler.ops.own import max_pool

Budget = float | int | Literal["fast"]
Choose = Callable[..., list[fx.Node]]
Note = Callable[[Decision], None]
STEPS = (0.85, 0.7, 0.55, 0.4, 0.3, 0.2, 0.1, 0.05, 0.0)  # values of the partitioner's budget to try


def within(budget: Budget, choose: Choose, note: Note) -> Choose:
    """Return `choose`, the partitioner's choice of saved values, restricted to a budget.

    budget: "fast" for the unrestricted choice; an int for the bytes in use at the peak of the backward pass;
        a float for a fraction of the unrestricted choice's peak. If no choice keeps the budget, the one with
        the lowest peak is taken.
    note: receives the outcome.
    """
    choose = _with_results_of_single_runs(choose)
    if budget == "fast":
        return choose

    def chosen(joint: fx.Graph, info: Any, memory_budget: float = 1) -> list[fx.Node]:
        # Each choice begins with the same cuts.
        with patch.object(partitioners, "solve_min_cut", _once(partitioners.solve_min_cut)):
            saved = choose(joint, info, memory_budget)
            fast = lowest = peak(joint, info, saved)
            most = budget * fast if isinstance(budget, float) else budget
            for fraction in STEPS:
                if lowest <= most:
                    break
                candidate = choose(joint, info, fraction)
                if (needed := peak(joint, info, candidate)) < lowest:
                    lowest, saved = needed, candidate
        note(Decision("memory budget", "", Outcome.of(lowest <= most), _described(most, lowest, fast)))
        return saved

    return chosen


def mark_single_runs(joint: fx.Graph) -> None:
    """Mark the calls of a joint graph that may neither be removed nor repeated, in place.

    No option recomputes such calls, activation checkpointing included: random numbers would differ when drawn
    again, and an effect would happen twice. A call with an effect also stays in the forward or backward.
    """
    for node in joint.nodes:
        effect = has_effect(node)
        if effect or is_random(node):
            for result in (node, *_tensors(node)):
                result.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        if effect and not str(node.meta.get("partitioner_tag")).startswith("must"):
            backward = node.meta.get("partitioner_tag") == "is_backward"
            node.meta["partitioner_tag"] = f"must_be_in_{'backward' if backward else 'forward'}"


def _with_results_of_single_runs(choose: Choose) -> Choose:
    """Return `choose`, extended by the results of marked calls that backward would otherwise run again.

    PyTorch's choice ignores the marks if it saves inputs alone, and if a marked call returns a tuple.
    """

    def chosen(joint: fx.Graph, info: Any, memory_budget: float = 1) -> list[fx.Node]:
        _find_places_in_forward(joint, info)
        saved = [n for node in choose(joint, info, memory_budget) for n in _tensors(node)]
        again = (n for n in _run(joint, info, {*saved, *info.inputs}) if info.is_required_fw(n))
        missing = [n for node in again if _is_single_run(node) for n in _tensors(node)]
        return list(dict.fromkeys((*saved, *missing)))

    return chosen


def _find_places_in_forward(joint: fx.Graph, info: Any) -> None:
    """Make forward compute the positions of maxima, since PyTorch's choice recomputes any other node.

    Backward then reads a byte for each window. To find the position again, it would read the whole window.
    """
    for node in joint.find_nodes(op="call_function", target=max_pool.places):
        (image,) = node.all_input_nodes
        if info.is_required_fw(image) and not info.is_required_bw(node):
            info._required_fw_nodes.add(node)
            info.fw_order[node] = info.fw_order[image]


def _is_single_run(node: fx.Node) -> bool:
    return has_effect(node) or is_random(node)


def _tensors(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that can be saved for a node: the node, or the entries taken from a tuple."""
    if not isinstance(node.meta.get("val"), tuple | list):
        yield node
        return
    for user in node.users:
        if user.target is operator.getitem:
            yield from _tensors(user)


def _described(most: float, lowest: int, fast: int) -> str:
    kept = "at the peak of backward" if lowest <= most else "is the least that was found"
    reached, allowed, faster = map(human_bytes, (lowest, int(most), fast))
    return f"{reached} {kept}, {allowed} allowed, {faster} where time alone counts"


def _once(solve: Callable[..., Any]) -> Callable[..., Any]:
    solutions: dict[str, Any] = {}

    @functools.wraps(solve)
    def solved(joint: fx.Graph, info: Any, options: Any, dont_ban: Collection[fx.Node] = ()) -> Any:
        key = f"{options} {[n.name for n in dont_ban]}"
        if key not in solutions:
            solutions[key] = solve(joint, info, options, dont_ban)
        return solutions[key]

    return solved


def peak(joint: fx.Graph, info: Any, saved: Collection[fx.Node]) -> int:
    """Return the most bytes in use at once while backward runs, without arguments of the forward.

    Recomputed values are computed where they are first read. Values inside a cluster are not stored.
    """
    ops, available = partitioners.get_default_op_list(), {*saved, *info.inputs}
    order = list(_run(joint, info, available))
    at = {node: i for i, node in enumerate(order)}
    stored = {n for n in order if not _on_the_way(n, ops, at)}

    @functools.cache
    def sources(node: fx.Node) -> frozenset[fx.Node]:
        """Return the stored values that a reader of `node` reads."""
        if node in available or node in stored or node not in at:
            return frozenset((node,))
        return frozenset().union(*map(sources, node.all_input_nodes))

    reads = {node: frozenset().union(*map(sources, node.all_input_nodes)) for node in order if node in stored}
    last = {read: at[node] for node in order if node in stored for read in reads[node]}
    freed: Counter[int] = Counter()
    for node in {*stored, *saved} - {*info.inputs}:
        if not any(user.op == "output" for user in node.users):
            # One kernel recomputes a product's operand, and its gradient, from the same values.
            beside = reads.get(node, ()) if ops.is_fusible(node) else ()
            freed[max(last.get(n, at.get(n, 0)) for n in (node, *beside))] += _bytes(node)
    now = most = bytes_saved(saved, info)
    for i, node in enumerate(order):
        now += _bytes(node) if node in stored else 0
        most = max(most, now)
        now -= freed[i]
    return most


def _run(joint: fx.Graph, info: Any, available: Collection[fx.Node]) -> Iterator[fx.Node]:
    """Yield the nodes that backward runs, in order."""
    done = {*available}
    for wanted in joint.nodes:
        if wanted not in info.required_bw_nodes or wanted.op != "call_function":
            continue
        waiting = [wanted]
        while waiting:
            node = waiting[-1]
            missing = [n for n in node.all_input_nodes if n not in done and n.op == "call_function"]
            if missing and node not in done:
                waiting += reversed(missing)
                continue
            waiting.pop()
            if node not in done:
                done.add(node)
                yield node


def _on_the_way(node: fx.Node, ops: partitioners.OpTypes, at: Collection[fx.Node]) -> bool:
    """True if `node` need not be stored: it is a view, or only operators that fuse compute and read it."""
    if ops.is_view(node):
        return True
    readers = [user for user in node.users if user in at]
    return ops.is_fusible(node) and all(_reads_on_the_way(u, ops, at) for u in readers) and bool(readers)


def _reads_on_the_way(user: fx.Node, ops: partitioners.OpTypes, at: Collection[fx.Node]) -> bool:
    if ops.is_view(user):
        return all(_reads_on_the_way(u, ops, at) for u in user.users if u in at)
    return ops.is_fusible(user)


def bytes_saved(saved: Collection[fx.Node], info: Any) -> int:
    """Return the bytes of saved values that are no arguments of the forward."""
    arguments = set(info.inputs)
    return sum(_bytes(node) for node in saved if node not in arguments)


def seconds(device: DeviceSpec) -> Callable[[fx.Node], float]:
    """Return a function that prices a node in seconds: the longer of arithmetic and memory traffic."""

    def price(node: fx.Node) -> float:
        moved = _bytes(node) + sum(_bytes(operand) for operand in node.all_input_nodes)
        return max(_flop(node) / (GEMM_SHARE * device.tensor_flops), moved / device.copy_bandwidth)

    return price


def _flop(node: fx.Node) -> int:
    count = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if count is None:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return int(count(*args, **kwargs, out_val=node.meta["val"]))


def _bytes(node: fx.Node) -> int:
    return int(partitioners._size_of(node)) if "val" in node.meta else 0
