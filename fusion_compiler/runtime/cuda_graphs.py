"""Launching a whole graph at once: recorded on the device at the second call, replayed from the third.

Recording, the memory pool that all recordings share, copies of inputs whose address changes, the state of
random numbers and the pairing of forward and backward are PyTorch's own (torch._inductor.cudagraph_trees,
what torch.compile(mode="reduce-overhead") uses). What stands here is which graphs may be recorded, and why
others may not. The first call of a graph runs as without recordings: kernels are tuned in it.

Results lie in the recordings' memory: the next step's may take their place. PyTorch raises where an
overwritten one is read; what is to be kept longer is cloned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fusion_compiler.ir.graph_info import GraphInfo, Phase
from fusion_compiler.runtime.binding import unkept_scratch

RECORDED = "recorded"
FORWARD_IS_NOT = "its forward is not recorded"

Boxed = Callable[[list[Any]], Any]


def refusal(gm: fx.GraphModule, static_inputs: Sequence[int]) -> str | None:
    """Why calls of a captured graph cannot be recorded; None where they can.

    gm: functional ATen but for writes into arguments, annotated with FakeTensors.
    static_inputs: positions of the arguments whose addresses stay the same.
    """
    from torch._dynamo.backends.cudagraphs import find_input_mutations
    from torch._inductor.utils import get_first_incompatible_cudagraph_node

    inputs = gm.graph.find_nodes(op="placeholder")
    if any(not isinstance(node.meta.get("val"), torch.Tensor) or _symbolic(node) for node in inputs):
        return "its sizes differ from call to call; compile with dynamic=False to record one graph for each"
    tensors = [(n.name, t) for n in gm.graph.nodes for t in _tensors(n.meta.get("val"))]
    other = next((f"{name} is on {t.device}" for name, t in tensors if t.device.type != "cuda"), None)
    if other is not None:
        return f"{other}: what the host computes is not recorded"
    if len(devices := sorted({str(t.device) for _, t in tensors})) != 1:
        return f"it is on {' and '.join(devices) or 'no device'}"
    unsafe = get_first_incompatible_cudagraph_node(gm)
    if unsafe is not None:
        return f"{unsafe.name} ({unsafe.target}) waits for the device, or its result's size depends on data"
    moving = sorted(find_input_mutations(gm.graph) - set(static_inputs))
    if moving:
        names = ", ".join(inputs[i].name for i in moving)
        return (
            f"it writes into {names}, whose address may change; what is written into must be a buffer "
            "of the module, or marked by torch._dynamo.mark_static_address"
        )
    return None


def _symbolic(node: fx.Node) -> bool:
    value = node.meta["val"]
    numbers: list[Any] = [*value.shape, *value.stride(), value.storage_offset()]
    return not all(isinstance(n, int) for n in numbers)


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


class Recordings:
    """Which graphs of one compile() are recorded: a backward only where its forward is."""

    def __init__(self) -> None:
        self._forwards: dict[str, int] = {}  # graph -> index of its device

    def wrap(
        self, run: Boxed, gm: fx.GraphModule, inputs: Sequence[Any], info: GraphInfo
    ) -> tuple[Boxed, str]:
        """`run` to be called in recordings, or as it is, and a note of what was decided.

        run: takes its arguments as one list. The note is RECORDED, FORWARD_IS_NOT or another reason.
        """
        graph = info.name.partition(".")[0]
        reason = refusal(gm, info.static_inputs)
        if info.phase is not Phase.BACKWARD:
            if reason is not None:
                return run, reason
            index = self._forwards[graph] = _device_index(gm)
            return _after_one(run, recorded(run, gm, inputs, info, index)), RECORDED
        if graph not in self._forwards:
            return run, FORWARD_IS_NOT
        index = self._forwards[graph]
        plain = _beside_recordings(run, index)
        if reason is not None:
            return plain, reason
        return _after_one(plain, recorded(run, gm, inputs, info, index)), RECORDED


def _device_index(gm: fx.GraphModule) -> int:
    device = next(t.device for n in gm.graph.nodes for t in _tensors(n.meta.get("val")))
    return int(device.index or 0)  # FakeTensors have one


def recorded(run: Boxed, gm: fx.GraphModule, inputs: Sequence[Any], info: GraphInfo, index: int) -> Boxed:
    """`run` behind PyTorch's recordings for device `index`."""
    from torch._dynamo.backends.cudagraphs import find_input_mutations, get_stack_traces
    from torch._inductor.cudagraph_trees import cudagraphify_impl
    from torch._inductor.cudagraph_utils import get_placeholder_info

    def model(arguments: list[Any]) -> list[Any]:
        # Memory that is kept from call to call must not come from the recordings' pool.
        with unkept_scratch():
            return list(run(arguments))

    return cudagraphify_impl(
        model,
        list(inputs),
        info.static_inputs,
        device_index=index,
        is_backward=info.phase is Phase.BACKWARD,
        is_inference=info.phase is Phase.INFERENCE,
        stack_traces=get_stack_traces(gm),
        placeholders=tuple(get_placeholder_info(gm.graph)),
        mutated_input_idxs=tuple(sorted(find_input_mutations(gm.graph))),
    )  # type: ignore[return-value]


def _after_one(first: Boxed, later: Boxed) -> Boxed:
    """Calls `first` once, then always `later`."""
    current = first

    def call(arguments: list[Any]) -> Any:
        nonlocal current
        called, current = current, later
        return called(arguments)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _beside_recordings(run: Boxed, index: int) -> Boxed:
    """A backward that is not recorded, of a forward that is: its recordings are told that it runs."""
    from torch._inductor.cudagraph_trees import get_manager

    def call(arguments: list[Any]) -> Any:
        manager: Any = get_manager(index, create_if_none_exists=False)
        if manager is not None:
            manager.set_to_running_backward()
        return run(arguments)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
