"""How much a forward saves for its backward: a budget, and the time that recomputing takes to keep it.

PyTorch's partitioner solves a knapsack (`activation_memory_budget`) whose fraction it may miss, and it prices
what is recomputed in flop, of which whatever memory bounds has none. Here the bytes that are saved in the end
count, and time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import fx
from torch._functorch import partitioners
from torch.utils.flop_counter import flop_registry

from fusion_compiler.ir.device import DeviceSpec

Budget = float | int | Literal["fast"]
Choose = Callable[..., list[fx.Node]]
GEMM_SHARE = 0.74  # of the tensor units' rate, as in the cost model
TRIES = 6  # halvings of the partitioner's own fraction


def within(budget: Budget, choose: Choose) -> Choose:
    """`choose`, the partitioner's choice of saved values, made to keep a budget.

    budget: "fast" for its choice as it is; a fraction of the bytes that this saves; or bytes.
    """
    if budget == "fast":
        return choose

    def chosen(joint: fx.Graph, info: Any, memory_budget: float = 1) -> list[fx.Node]:
        saved = choose(joint, info, memory_budget)
        fast = bytes_saved(saved, info)
        most = budget * fast if isinstance(budget, float) else budget
        if fast <= most:
            return saved
        saved = choose(joint, info, 0)  # the arguments alone, which are there anyway
        low, high = 0.0, memory_budget
        for _ in range(TRIES):
            middle = (low + high) / 2
            found = choose(joint, info, middle)
            if bytes_saved(found, info) <= most:
                low, saved = middle, found
            else:
                high = middle
        return saved

    return chosen


def bytes_saved(saved: list[fx.Node], info: Any) -> int:
    """Bytes of saved values that are no arguments of the forward."""
    arguments = set(info.inputs)
    return sum(_bytes(node) for node in saved if node not in arguments)


def seconds(device: DeviceSpec) -> Callable[[fx.Node], float]:
    """Prices a node, in seconds: the longer of its arithmetic in the tensor units and its bytes."""

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
