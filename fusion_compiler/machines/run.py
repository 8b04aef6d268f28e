"""Run a plan: each process compiles its stages and trains them by a schedule of
torch.distributed.pipelining."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import schedules
from torch.optim import Optimizer

import fusion_compiler
from fusion_compiler.api import compile
from fusion_compiler.capture.deferred import Deferred
from fusion_compiler.errors import PipelineArgumentError
from fusion_compiler.ir.decision import Decision, Outcome
from fusion_compiler.machines import faults
from fusion_compiler.machines.compression import Compression, Prepare, choose
from fusion_compiler.machines.links import Lanes, Wire
from fusion_compiler.machines.pipeline import Pipeline, unchanged
from fusion_compiler.machines.plan import Crossing, Link, PipelinePlan, Schedule
from fusion_compiler.machines.stage import CompiledStage
from fusion_compiler.runtime.boxed import beside_group


class EagerSchedule1F1B(schedules.Schedule1F1B):
    """1F1B in which a stage begins with twice as many forward passes as stages are behind it, and
    one more."""

    def __init__(self, stage: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(stage, *args, **kwargs)
        # PyTorch subtracts a stage's number from this one, and begins with as many forward passes.
        self._num_stages: int = 2 * stage.num_stages - 1 - stage.stage_index


SINGLE: dict[Schedule, Any] = {  # of one stage for each process
    Schedule.GPIPE: schedules.ScheduleGPipe,
    Schedule.ONE_F_ONE_B: schedules.Schedule1F1B,
    Schedule.EAGER: EagerSchedule1F1B,
}
SEVERAL: dict[Schedule, Any] = {
    Schedule.INTERLEAVED: schedules.ScheduleInterleaved1F1B,
    Schedule.ZERO_BUBBLE: schedules.ScheduleInterleavedZeroBubble,
    Schedule.ZBV: schedules.ScheduleZBVZeroBubble,
}
Loss = Callable[[Any, Any], Tensor]
DEFAULT = Compression()
ROUNDS = 2  # of a GPU's warm-up, and one for each doubling of the microbatches in flight


class PipelineRunner:
    """A process's stages of a plan, ready to train. Every process of the default group makes one.

    plan: from `fc.partition(model, ...)`; the model's own parameters are trained. Process r is the plan's
        machine r, and runs the stages whose `plan.rank` is r.
    loss: of the last stage's result and the target; the mean over microbatches is trained.
    optimizer: called with this process's parameters, such as `lambda p: torch.optim.AdamW(p, lr=1e-3)`.
    compression: how far slow links are compressed; fast ones never are. None for not at all.
    throttle: a link that this process imitates when it sends over Gloo, to try a slow network on one machine.
    seed: of the random numbers of the stages, such as dropout's.
    start_s: how long to wait for the other processes to start.
    patience_s: a process is lost when nothing was heard of it for so long.
    options: of `compile`, for the stages and the codecs. On a CPU without options nothing is compiled.

    Raises StageMissingError, StagesDisagreeError or PipelineArgumentError at once.
    """

    def __init__(
        self,
        plan: Pipeline,
        *,
        loss: Loss,
        optimizer: Callable[[list[nn.Parameter]], Optimizer],
        compression: Compression | None = DEFAULT,
        throttle: Link | None = None,
        seed: int = 0,
        start_s: float = 300.0,
        patience_s: float = 10.0,
        **options: Any,
    ) -> None:
        self.plan: PipelinePlan = plan
        self.loss: Loss = loss
        self.rank: int = dist.get_rank()
        self.world: int = dist.get_world_size()
        self._check()
        nccl = "nccl" in dist.get_backend()
        self.device: torch.device = device_of(plan, nccl)
        compiled = bool(options) or self.device.type == "cuda"
        if plan.schedule.splits_backward:  # a graph would be replayed over what the second half reads
            options.setdefault("cudagraphs", False)
        prepare = preparation(options if compiled else None)
        self.numbers: list[int] = [s.number for s in plan.stages if plan.rank(s.number) == self.rank]
        modules = plan.modules()
        self.modules: dict[int, nn.Module] = {n: modules[n].to(self.device) for n in self.numbers}
        choices = choose(compression, plan)
        self.decisions: tuple[Decision, ...] = tuple(decision for _, decision in choices)
        store, beats = faults.private_stores(self.rank)
        self.store: dist.Store = store
        names = names_of(plan, self.world)
        self._watch: faults.Watch = faults.Watch(beats, self.rank, names, patience_s, self._abort)
        self.digest: str = digest(plan)
        faults.agree(self.store, self.rank, self.world, self._card(compression, seed), start_s)
        feedback = compression is not None and compression.feedback
        self._lanes: Lanes = Lanes(self.device, not nccl, self._watch.check, throttle)
        self._watch.start()
        with self._watch.guard(), beside_group():
            self.stages: list[CompiledStage] = []
            for n, module in self.modules.items():
                wires = [
                    Wire(plan.edges[e], choices[e][0], self.device, prepare, feedback)
                    if 0 <= e < len(plan.edges)
                    else None
                    for e in (n - 1, n)
                ]
                stage = CompiledStage(prepare(module), n, plan, self._lanes, wires, seed, compiled)
                self.stages.append(stage)
            self.parameters: dict[str, Any] = tensors_of(self.modules.values(), "named_parameters")
            self.buffers: dict[str, Any] = tensors_of(self.modules.values(), "named_buffers")
            self.ties: list[tuple[nn.Parameter, Any]] = self._tie()
            self.splits: dict[int, Decision] = {}  # of compiled stages in zero-bubble schedules, by number
            for stage in self.stages:
                self._warm_up(stage)
                if stage.before:
                    stage.before.warm_up(outgoing=False)
                if stage.after:
                    stage.after.warm_up(outgoing=True)
            trained = [p for p in self.parameters.values() if p.requires_grad]
            self.optimizer: Optimizer | None = optimizer(trained) if trained else None
        self.schedule: Any = self._schedule()
        self.steps: int = 0

    def step(self, inputs: Any = (), target: Any = None) -> Tensor | None:
        """Train one step and return the mean loss of the microbatches in the last stage's process, else None.

        inputs: what the model takes, a tensor or a tuple, of all microbatches along dimension 0; only the
            first stage reads them. target: the loss's second argument; only the last stage reads it.

        Raises StageLostError if another process has ended or hangs.
        """
        losses: list[Tensor] = []
        with self._watch.guard(), beside_group():
            self._watch.check()
            if self.optimizer is not None:
                self.optimizer.zero_grad(set_to_none=True)
            for stage in self.stages:
                stage.training_step = self.steps
            last = len(self.plan.stages) - 1 in self.numbers
            self.schedule.step(
                *(self._checked(tuple_of(inputs)) if self.rank == 0 else ()),
                target=target if last else None,
                losses=losses if last else None,
                return_outputs=False,
            )
            self._lanes.finish()
            self._add_up_ties()
            if self.optimizer is not None:
                self.optimizer.step()
        self.steps += 1
        return torch.stack(losses).detach().sum() if losses else None

    def _checked(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the inputs of a step if microbatches of them have the plan's shapes."""
        expected = [(self.plan.microbatches * t.shape[0], *t.shape[1:]) for t in self.stages[0].inputs]
        shapes = [tuple(x.shape) for x in inputs]
        if shapes != expected:
            raise PipelineArgumentError(detail=f"its inputs have shapes {shapes}, not {expected}")
        return inputs

    def save(self, folder: str | Path) -> None:
        """Write this process's stages, optimizer and step: a step is complete when every process wrote it."""
        state = {
            "plan": self.digest,
            "model": {**self.parameters, **self.buffers},
            "optimizer": self.optimizer.state_dict() if self.optimizer else {},
            "lost": {str(s.stage_index): s.before.lost for s in self.stages if s.before},
        }
        faults.save(Path(folder), self.steps, self.rank, state)

    def resume(self, folder: str | Path) -> int:
        """Go on from the last step that every process has written; return its number, 0 for none."""
        steps = faults.saved_steps(Path(folder), self.rank)
        shared = faults.last_shared(self.store, self.rank, self.world, steps)
        if shared == 0:
            return 0
        state = faults.load(Path(folder), shared, self.rank)
        if state["plan"] != self.digest:
            detail = f"the checkpoint {folder} belongs to another plan ({state['card']}, not {self.digest})"
            raise PipelineArgumentError(detail=detail)
        with torch.no_grad():
            for name, tensor in {**self.parameters, **self.buffers}.items():
                tensor.copy_(state["model"][name])
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state["optimizer"])
        for stage in self.stages:
            if stage.before:
                lost = state["lost"][str(stage.stage_index)]
                stage.before.lost = {i: x.to(self.device) for i, x in lost.items()}
        self.steps = shared
        return shared

    def close(self) -> None:
        """End the threads of this process, when the others have come to the same point."""
        self._watch.close()
        self._lanes.close()

    def __str__(self) -> str:
        """Return the edges of this process: how they are compressed, bytes of a microbatch, and why."""
        lines = [f"process {self.rank} of {self.world}: stages {', '.join(map(str, self.numbers))}"]
        lines += [f"  {decision}" for decision in self.splits.values()]
        for stage in self.stages:
            if (wire := stage.after) is not None:
                raw = wire.edge.forward_bytes + wire.edge.backward_bytes
                sent = wire.forward.nbytes + wire.backward.nbytes
                lines.append(f"  {self.decisions[stage.stage_index]}")
                lines.append(
                    f"    {raw} -> {sent} bytes of a microbatch in both directions ({raw / sent:.2f}x)"
                )
        return "\n".join(lines)

    def _check(self) -> None:
        stages, machines = len(self.plan.stages), len(self.plan.machines)
        if not self.plan.training:
            raise PipelineArgumentError(detail="the plan is for inference")
        if stages % self.world or self.world != min(machines, stages):
            detail = f"{stages} stages on {machines} machines do not fit {self.world} processes"
            raise PipelineArgumentError(detail=detail)

    def _schedule(self) -> Any:
        count, order = self.plan.microbatches, self.plan.schedule

        def scaled(output: Any, target: Any) -> Tensor:
            return self.loss(output, target) / count  # a parameter of two stages of a process is scaled once

        if order in SINGLE:
            return SINGLE[order](self.stages[0], count, loss_fn=scaled, scale_grads=False)
        return SEVERAL[order](self.stages, count, loss_fn=scaled, scale_grads=False)

    def _card(self, compression: Compression | None, seed: int) -> faults.Card:
        return {
            "torch": torch.__version__,
            "fusion_compiler": fusion_compiler.__version__,
            "device": self.device.type,
            "processes": self.world,
            "plan": self.digest,
            "compression": repr(compression),
            "seed": seed,
        }

    def _tie(self) -> list[tuple[nn.Parameter, Any]]:
        """Return this process's parameters that others have as well, with their groups; make them equal."""
        groups: dict[tuple[int, ...], Any] = {}
        ties: list[tuple[nn.Parameter, Any]] = []
        for name, ranks in ranks_of(self.plan, "parameters").items():
            if len(ranks) == 1:
                continue
            if ranks not in groups:
                groups[ranks] = dist.new_group(list(ranks))
            if self.rank in ranks:
                parameter, group = self.parameters[name], groups[ranks]
                call = partial(dist.broadcast, src=ranks[0], group=group)
                self._lanes.collective(call, parameter.detach())
                ties.append((parameter, group))
        return [(parameter, group) for parameter, group in ties if parameter.requires_grad]

    def _add_up_ties(self) -> None:
        for parameter, group in self.ties:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self._lanes.collective(partial(dist.all_reduce, group=group), parameter.grad)

    def _warm_up(self, stage: CompiledStage) -> None:
        """Compile a stage while the others do so too, on zeros; buffers and random state stay. On a GPU it
        runs several times, with as many microbatches in flight as a step has, so that most of its CUDA graphs
        are there when the first step begins."""
        is_cuda = self.device.type == "cuda"
        held = self.plan.stages[stage.stage_index].in_flight if is_cuda else 1
        module = self.modules[stage.stage_index]
        with (
            torch.random.fork_rng([self.device] if is_cuda else []),
            unchanged(module) as before,
        ):
            for _ in range(ROUNDS + held.bit_length() if is_cuda else 1):
                passes = [self._forward(stage) for _ in range(held)]
                while passes:
                    self._backward(stage, *passes.pop(0))
                module.zero_grad(set_to_none=True)
            for name, ranks in ranks_of(self.plan, "buffers").items():
                if len(ranks) > 1 and name in before and not torch.equal(self.buffers[name], before[name]):
                    detail = f"processes {ranks} all change the buffer {name}"
                    raise PipelineArgumentError(detail=detail)

    def _forward(self, stage: CompiledStage) -> tuple[list[Tensor], list[Tensor]]:
        """Run a stage on zeros. Return these, and its results with a gradient."""
        inputs = [zeros(tensor, self.device) for tensor in stage.inputs]
        outputs = tuple_of(stage.submod(*inputs))
        return inputs, [y for y in outputs if isinstance(y, Tensor) and y.requires_grad]

    def _backward(self, stage: CompiledStage, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Run the backward pass of a stage on zeros, in its two halves if the schedule has these."""
        gradients = [torch.zeros_like(y) for y in outputs]
        if not self.plan.schedule.splits_backward or stage.is_first:
            torch.autograd.backward(outputs, gradients)
            return
        values = {"stage_output": outputs, "output_grads": gradients, "input_values": inputs}
        _, rest = stage.backward_maybe_with_nosync("input", values)
        if isinstance(rest, Deferred):
            self.splits[stage.stage_index] = self._split(stage, rest)
        stage.backward_maybe_with_nosync("weight", {"param_groups": rest})

    def _split(self, stage: CompiledStage, rest: Deferred) -> Decision:
        """Return whether the gradients of a stage's weights are computed later than those of its inputs."""
        outcome, reason = Outcome.REFUSED, "; ".join(rest.refusals)
        if not reason and rest.steps:
            outcome, reason = Outcome.DONE, "two graphs"
        elif not reason and any(p.requires_grad for p in stage.submod.parameters()):
            reason = "its backward pass is not compiled"
        elif not reason:
            reason = "it has no weights"
        return Decision("split backward", f"stage {stage.stage_index}", outcome, reason)

    def _abort(self) -> None:
        """End the operations of NCCL that wait for a lost process."""
        if not self._lanes.gloo and dist.group.WORLD is not None:
            dist.group.WORLD.abort()


def device_of(plan: PipelinePlan, nccl: bool) -> torch.device:
    """Return where this process's stages run: on its current GPU with NCCL, else where the model is."""
    if nccl:
        return torch.device("cuda", torch.cuda.current_device())
    return next((p.device for p in plan.graph.parameters()), torch.device("cpu"))


def preparation(options: Mapping[str, Any] | None) -> Prepare:
    """Return what compiles stages and codecs with these options; for None it leaves them as they are."""
    return (lambda function: function) if options is None else partial(compile, **options)


def digest(plan: PipelinePlan) -> str:
    """Return a hash of what the processes have to agree on: all of a plan but its predicted times."""
    stages = [(s.number, s.operators, s.parameters, s.buffers) for s in plan.stages]
    edges = [(e.source, e.target, e.tensors) for e in plan.edges]
    shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in plan.graph.named_parameters()]
    text = repr((stages, edges, shapes, plan.microbatches, plan.schedule, plan.graph.code))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def names_of(plan: PipelinePlan, world: int) -> list[str]:
    """Return the name of each process in messages."""
    names: list[str] = []
    for rank in range(world):
        numbers = ", ".join(str(s.number) for s in plan.stages if plan.rank(s.number) == rank)
        names.append(f"stage {numbers} (process {rank}, machine {plan.machines[rank].name})")
    return names


def ranks_of(plan: PipelinePlan, kind: Literal["parameters", "buffers"]) -> dict[str, tuple[int, ...]]:
    """Return for each parameter or buffer the processes whose stages have it, in an order that all share."""
    ranks: dict[str, set[int]] = {}
    for stage in plan.stages:
        for name in getattr(stage, kind):
            ranks.setdefault(name, set()).add(plan.rank(stage.number))
    return {name: tuple(sorted(ranks[name])) for name in sorted(ranks)}


def tensors_of(modules: Iterable[nn.Module], kind: str) -> dict[str, Any]:
    """Return the tensors of several modules by name."""
    return {name: tensor for module in modules for name, tensor in getattr(module, kind)()}


def tuple_of(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def zeros(tensor: Crossing, device: torch.device) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device, requires_grad=tensor.differentiable)
