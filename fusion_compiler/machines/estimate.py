"""Estimate what each operator takes on a machine, forward and backward: by the cost model's roofline from its
arithmetic and bytes, or by running it.

FusionLLM (arXiv 2410.12707) takes flops / (lambda * peak) with a measured lambda; here a CPU's rates are
measured, and a GPU's are those of its row in `ir/device.py`.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from fusion_compiler.ir.dag import Op
from fusion_compiler.ir.device import DeviceSpec, device_spec
from fusion_compiler.machines.workload import Workload, base_of, is_view, mutated
from fusion_compiler.ops.schema import short_name
from fusion_compiler.ops.table import Kind
from fusion_compiler.passes.fuse.cost import EAGER_SHARE, GEMM_SHARE, contraction_cost, eager_cost
from fusion_compiler.runtime.pairs import between_us, mark

Times = tuple[tuple[float, float], ...]  # forward and backward microseconds of each operator
GATHERS = ("embedding", "index_select", "gather", "index")
REPETITIONS = 5
ROWS = 64  # of the shorter product that measures a CPU
WAIT_CYCLES = 2_000_000  # of a GPU: about a millisecond
# The time of attention's backward pass over that of its forward pass. It has 2.5 times the products, and its
# kernels are slower: 2.5 to 3.3 measured on two CPUs, 3.4 to 4.0 on an H200.
ATTENTION_BACKWARD = 3.3


def estimate(work: Workload, device: DeviceSpec) -> Times:
    """Return the roofline's microseconds of each operator, in order."""
    times = []
    for op in map(work.dag.op, work.order):
        us, backward = forward_us(work, op, device), 0.0
        if op.name in work.differentiable:
            backward = backward_us(work, op, us, device) + sums_us(work, op, device)
        times.append((us, backward))
    return tuple(times)


def forward_us(work: Workload, op: Op, device: DeviceSpec) -> float:
    if is_view(op.target) or not op.outputs:
        return 0.0
    if op.kind is Kind.CONTRACTION:
        return contraction_cost(op, device).us
    written = work.nbytes(op.name)
    read = max(0, op.bytes - written)
    if short_name(op.target) in GATHERS:
        read = min(read, written)  # of a table, the rows that are taken
    return element_us(read, written, op.flops, device)


def backward_us(work: Workload, op: Op, us: float, device: DeviceSpec) -> float:
    """Return the time of an operator's gradients: a product for each operand that has one, and a sum for a
    bias; else a pass that reads the gradient and what was saved and writes the operands' gradients."""
    if is_view(op.target):
        return 0.0
    operands = [name for name in op.inputs if name in work.differentiable]
    if op.kind is Kind.CONTRACTION:
        if "attention" in short_name(op.target):
            return ATTENTION_BACKWARD * us
        matrices = [n for n in operands if any(len(m.shape) > 1 for m in work.dag.op(n).outputs)]
        biases = [work.nbytes(n) for n in operands if n not in matrices]
        sums = [element_us(work.nbytes(op.name), nbytes, 0, device) for nbytes in biases]
        return us * len(matrices) + sum(sums)
    gradients = sum(map(work.nbytes, operands))
    read = work.nbytes(op.name)
    if short_name(op.target) not in ("add", "sub", *GATHERS):
        read += gradients
    return element_us(read, gradients, 2 * op.flops, device)


def sums_us(work: Workload, op: Op, device: DeviceSpec) -> float:
    """Return the time in which gradients of an operator's operands are added to those that are there."""
    nbytes = sum(map(work.nbytes, work.accumulated(op.name)))
    return element_us(2 * nbytes, nbytes, 0, device) if nbytes else 0.0


def element_us(read: int, written: int, flops: int, device: DeviceSpec) -> float:
    return eager_cost(
        bytes_read=read, bytes_near=0, bytes_written=written, flops=flops, reduces=False, device=device
    ).us


def spec_of(device: DeviceSpec | str) -> DeviceSpec:
    """Return a machine's row of hardware numbers; that of "cpu" is measured on this machine."""
    if isinstance(device, DeviceSpec):
        return device
    return this_cpu(torch.get_num_threads()) if device == "cpu" else device_spec(device)


@functools.cache
def this_cpu(threads: int) -> DeviceSpec:
    """Measure this process's CPU with so many threads, in about a tenth of a second: the bandwidth of a copy,
    the flops of a product in float32, and the time that each operator takes at least."""
    with torch.no_grad():
        a, big, small = torch.randn(512, 512), torch.randn(1 << 23), torch.randn(16)
        into, few = torch.empty_like(big), a[:ROWS]
        copied = 2 * big.nbytes / median_us(lambda: into.copy_(big)) * 1e6
        long, short = median_us(lambda: a @ a), median_us(lambda: few @ a)
        row_us = max(long - short, long / 2) / (len(a) - ROWS)  # without what each call takes
        flops = 2 * 512**2 / row_us * 1e6
        call = max(short - ROWS * row_us, median_us(lambda: small + small))
    return DeviceSpec(
        name=f"cpu of {threads} threads",
        patterns=(),
        target="cpu_0",
        sms=1,
        clock=flops / 2 / GEMM_SHARE,
        fp32_lanes=1,
        fp64_lanes=1,
        copy_bandwidth=copied / EAGER_SHARE,
        l2_bytes=0,
        l2_bandwidth=copied,
        tensor_flops=flops / GEMM_SHARE,
        launch_us=call,
        floor_us=call,
        dram_latency_us=0.0,
    )


class Clock:
    """A clock that tells when a device has come to a point of its work. The host runs on meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self.device: torch.device = device
        self.is_cuda: bool = device.type == "cuda"

    def mark(self) -> Any:
        """Return a mark behind the work that the device has been given."""
        if not self.is_cuda:
            return time.perf_counter()
        with torch.cuda.device(self.device):
            return mark(torch.cuda.current_device())

    def us(self, begin: Any, end: Any) -> float:
        """Return the microseconds between two marks, when the device has come to the second one."""
        if not self.is_cuda:
            return 1e6 * (end - begin)
        return between_us((begin, end))

    def wait(self) -> None:
        """Keep a GPU busy for a while, so that the host gets ahead of it and does not hold it up."""
        if self.is_cuda:
            with torch.cuda.device(self.device):
                torch.cuda._sleep(WAIT_CYCLES)


def median_us(call: Callable[[], object]) -> float:
    """Return the median time of a call on the CPU, after one that does not count."""
    return timed_passes(call, Clock(torch.device("cpu")), training=False)[0]


def timed_passes(
    call: Callable[[], Any],
    clock: Clock,
    training: bool,
    inputs: Sequence[Tensor] = (),
    ahead: bool = False,
) -> tuple[float, float, list[Tensor]]:
    """Return the median time of a call and of the backward pass from its results, in microseconds, and the
    tensors among these. The first repetition does not count.

    One repetition follows the other at once, as the microbatches of a step do: where the host takes longer
    than the GPU, its time counts. inputs: tensors that each repetition gets without a gradient; those of
    parameters add up. ahead: let the host get ahead of the GPU each time.
    """
    marks: list[tuple[Any, ...]] = []
    results: list[Tensor] = []
    for _ in range(REPETITIONS + 1):
        for tensor in inputs:
            tensor.grad = None
        values, results = None, []  # a CUDA graph is not replayed over what is held
        if ahead:
            clock.wait()
        begin = clock.mark()
        with torch.set_grad_enabled(training):
            values = call()
        end = clock.mark()
        results = [t for t in pytree.tree_leaves(values) if isinstance(t, Tensor)]
        roots = [t for t in results if t.requires_grad]
        gradients = [torch.randn_like(t) for t in roots]
        back = clock.mark()
        if roots:
            torch.autograd.backward(roots, gradients)
        marks.append((begin, end, back, clock.mark()))
    forward, backward = (
        statistics.median([clock.us(each[i], each[i + 1]) for each in marks[1:]]) for i in (0, 2)
    )
    return forward, backward if any(t.requires_grad for t in results) else 0.0, results


def measure(work: Workload, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device) -> Times:
    """Run a model on these arguments, and return the time of each operator, forward and backward. Of
    operators with equal arguments one is timed. On a GPU the host's time does not count."""
    interpreter = Measuring(work, device)
    interpreter.run(*pytree.tree_leaves((args, dict(kwargs))), enable_io_processing=False)
    return tuple(interpreter.times[name] for name in work.order)


class Measuring(fx.Interpreter):
    """Run the graph of a workload without gradients, and time each operator apart on the values that it gets.
    The model and its arguments stay as they are. times: by the operators' names."""

    def __init__(self, work: Workload, device: torch.device) -> None:
        super().__init__(work.graph)
        self.work, self.clock = work, Clock(device)
        self.written = {base_of(operand).name for node in work.graph.graph.nodes for operand in mutated(node)}
        self.times: dict[str, tuple[float, float]] = {}
        self.equal: dict[Hashable, tuple[float, float]] = {}  # by `signature`

    def run_node(self, n: fx.Node) -> Any:
        if n.name in self.work.position:
            key = signature(self.work, n)
            if key not in self.equal:
                self.equal[key] = (0.0, 0.0) if is_view(n.target) else self.timed(n)
            self.times[n.name] = self.equal[key]
        with torch.no_grad():
            value = super().run_node(n)
        # Buffers are copied as well: batch_norm writes into them, and its schema does not say so.
        is_read = isinstance(value, nn.Parameter) and n.name not in self.written
        if n.op in ("placeholder", "get_attr") and not is_read:
            return pytree.tree_map_only(Tensor, Tensor.clone, value)
        return value

    def timed(self, node: fx.Node) -> tuple[float, float]:
        """Return the time of an operator, forward and backward."""
        differentiable, added = self.work.differentiable, self.work.accumulated(node.name)
        fresh: list[Tensor] = []

        def operand(n: fx.Node) -> Any:
            def leaf(value: Tensor) -> Tensor:
                has_gradient = n.name in differentiable and value.is_floating_point()
                value = value.detach().requires_grad_(has_gradient)
                if n.name not in added:
                    fresh.append(value)
                return value

            return pytree.tree_map_only(Tensor, leaf, self.env[n])

        args: Any = map_arg(node.args, operand)
        kwargs: Any = map_arg(node.kwargs, operand)
        target: Any = node.target

        def call() -> Any:
            return target(*args, **kwargs)

        def call_on_copies() -> Any:
            copies = pytree.tree_map_only(Tensor, Tensor.clone, (args, kwargs))
            return target(*copies[0], **copies[1])

        run = call_on_copies if mutated(node) else call
        return timed_passes(run, self.clock, node.name in differentiable, fresh, ahead=True)[:2]


def signature(work: Workload, node: fx.Node) -> Hashable:
    """Return what an operator's time depends on: its target, numbers, shapes, strides, dtypes, gradients."""
    added = work.accumulated(node.name)

    def plain(arg: object) -> Hashable:
        if not isinstance(arg, fx.Node):
            return repr(arg)
        leaves = pytree.tree_leaves(value_of(work, arg))
        metas = [(t.shape, t.stride(), t.dtype) if isinstance(t, Tensor) else arg.name for t in leaves]
        return repr(metas), arg.name in work.differentiable, arg.name in added

    return str(node.target), tuple(map(plain, pytree.tree_leaves((node.args, node.kwargs))))


def value_of(work: Workload, node: fx.Node) -> Any:
    return work.tensor(node.name) if node.op == "get_attr" else node.meta.get("val")
