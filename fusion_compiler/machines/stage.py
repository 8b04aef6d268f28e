"""A stage of a plan as torch.distributed.pipelining runs it."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input
from torch.distributed.pipelining.stage import _PipelineStageBase

from fusion_compiler.capture.deferred import Deferred, deferring
from fusion_compiler.machines.links import Lanes, Wire
from fusion_compiler.machines.plan import Crossing, PipelinePlan


class CompiledStage(_PipelineStageBase):
    """A stage whose messages are those of `Wire`: one buffer per microbatch and direction.

    PyTorch's `PipelineStage` would first exchange pickled shapes, or infer which tensors have gradients from
    their dtypes; the plan has both. Random numbers of a microbatch depend on the seed, the step, the
    microbatch and the stage alone: not on the schedule, or on where training went on.

    compiled: `module` is compiled; zero-bubble schedules then run both halves of its backward as graphs of
        their own. Else PyTorch splits autograd's graph.
    """

    def __init__(
        self,
        module: nn.Module,
        number: int,
        plan: PipelinePlan,
        lanes: Lanes,
        wires: Sequence[Wire | None],
        seed: int,
        compiled: bool,
    ) -> None:
        super().__init__(module, number, len(plan.stages), lanes.device)
        self.inputs = plan.edges[number - 1].tensors if number else first_inputs(plan)
        self.before, self.after = wires
        self.lanes, self.seed, self.training_step = lanes, seed, 0
        self.compiled = compiled
        self.microbatches = plan.microbatches
        self.messages: dict[tuple[str, int], tuple[Tensor, dist.P2POp]] = {}
        self.arrivals: dict[tuple[str, int], tuple[Tensor | None, ...]] = {}  # from a stage of this process
        self._runtime_validate = False
        self._stage_meta: Any = SimpleNamespace(inputs=self.inputs)

    def _prepare_forward_infra(self, num_microbatches: int, *_: Any, **__: Any) -> None:
        self.args_recv_info = dict.fromkeys(range(num_microbatches), ())

    def _prepare_backward_infra(self, num_microbatches: int, *_: Any, **__: Any) -> None:
        self.chunks = num_microbatches

    def _create_grad_recv_info(self, act_send_info: Any) -> tuple[Any, ...]:
        return ()

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []

    def _validate_fwd_input(self, *_: Any) -> None:
        """Do nothing: `PipelineRunner.step` has checked what the first stage gets."""

    def _validate_fwd_outputs(self, *_: Any) -> None:
        pass

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        seed = seed_of(self.seed, self.training_step, fwd_chunk_id, self.stage_index)
        with seeded(seed, self.device):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._receive("forward", fwd_chunk_id, self.before, self.stage_index - 1)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        wire = self.after if self.has_backward else None
        return self._receive("backward", bwd_chunk_id, wire, self.stage_index + 1)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.after is None:
            return []
        outputs, _ = self.fwd_cache[fwd_chunk_id]
        return self._send("forward", self.after.pack_forward(fwd_chunk_id, outputs), self.stage_index + 1)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.before is None or not self.has_backward:
            return []
        gradients = self.bwd_cache.pop(bwd_chunk_id)
        buffer = self.before.pack_backward(bwd_chunk_id, gradients)
        return self._send("backward", buffer, self.stage_index - 1)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Take what the stage before returned, if that is of the same process: nothing is sent."""
        outputs = (prev_stage_outputs,) if isinstance(prev_stage_outputs, Tensor) else prev_stage_outputs
        self.arrivals["forward", mb_index] = tuple(
            x.detach().requires_grad_(t.differentiable) for x, t in zip(outputs, self.inputs, strict=True)
        )

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        self.arrivals["backward", mb_index] = next_stage_bwd_outputs

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor | None, ...]:
        if ("forward", fwd_chunk_id) in self.arrivals:
            return self.arrivals.pop(("forward", fwd_chunk_id))
        assert self.before is not None
        return self.before.unpack_forward(fwd_chunk_id, self._arrived("forward", fwd_chunk_id))

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor | None, ...]:
        if ("backward", bwd_chunk_id) in self.arrivals:
            return self.arrivals.pop(("backward", bwd_chunk_id))
        assert self.after is not None
        return self.after.unpack_backward(bwd_chunk_id, self._arrived("backward", bwd_chunk_id))

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], Any]:
        """Run a part of the backward pass of a microbatch: "full", "input" or "weight".

        For "input", return the gradients of the stage's inputs and what "weight" needs, and release the rest.
        """
        if backward_type == "weight" and isinstance(rest := bwd_kwargs["param_groups"], Deferred):
            rest.run()
            return (), None
        if backward_type != "input":
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        outputs, gradients, inputs = (
            bwd_kwargs.pop(name) for name in ("stage_output", "output_grads", "input_values")
        )
        bwd_kwargs.update(stage_output=(), output_grads=None, input_values=())
        starts: list[Tensor] = []
        arrived: list[Tensor] = []
        for i, y in enumerate(outputs):
            gradient = torch.ones_like(y) if gradients is None else gradients[i]
            if y.requires_grad and gradient is not None:
                starts.append(y)
                arrived.append(gradient)
        leaves = [x for x in inputs if x.requires_grad]
        if self.compiled:
            with deferring() as rest:
                torch.autograd.backward(starts, arrived)
        else:
            # PyTorch detaches in place what it starts from, which a view does not allow.
            starts = [y.clone() if y._is_view() else y for y in starts]
            _, rest = stage_backward_input(starts, arrived, leaves, self.submod.parameters())
        computed = tuple(x.grad for x in inputs)
        for leaf in leaves:
            leaf.grad = None
        return computed, rest

    def _receive(self, way: str, microbatch: int, wire: Wire | None, peer: int) -> list[dist.P2POp]:
        if wire is None:
            return []
        if (way, microbatch) not in self.messages:
            nbytes = (wire.forward if way == "forward" else wire.backward).nbytes
            rank, tag = self.stage_index_to_group_rank[peer], tag_of(way, self.stage_index)
            # over Gloo, all messages of a step are received while the stage computes
            for m in range(microbatch, self.microbatches) if self.lanes.gloo else (microbatch,):
                self.messages[way, m] = self.lanes.receive(nbytes, rank, self.group, tag)
        return [self.messages[way, microbatch][1]]

    def _arrived(self, way: str, microbatch: int) -> Tensor:
        buffer, _ = self.messages.pop((way, microbatch))
        return buffer.to(self.device, non_blocking=True)

    def _send(self, way: str, buffer: Tensor, peer: int) -> list[dist.P2POp]:
        rank = self.stage_index_to_group_rank[peer]
        return [self.lanes.send(buffer, rank, self.group, tag_of(way, peer))]


def tag_of(way: str, target: int) -> int:
    """Return the tag of the messages to a stage in one direction: two processes may share several stages."""
    return 2 * target + (way == "backward")


def seed_of(seed: int, step: int, microbatch: int, stage: int) -> int:
    """Return the seed of a microbatch in a stage: a hash, so that no two of them are related."""
    text = f"{seed} {step} {microbatch} {stage}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])


@contextmanager
def seeded(seed: int, device: torch.device) -> Generator[None]:
    """Give the generators of the CPU and of a GPU a seed; their states come back at the end."""
    generators = [torch.default_generator]  # `torch.manual_seed` takes 0.2 to 1 ms: it asks for all devices
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index])
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def first_inputs(plan: PipelinePlan) -> tuple[Crossing, ...]:
    """Return the model's inputs, of one microbatch."""
    inputs = plan.graph.graph.find_nodes(op="placeholder")
    values = [(node.name, node.meta["val"]) for node in inputs]
    return tuple(Crossing(name, tuple(v.shape), v.dtype, False) for name, v in values)
