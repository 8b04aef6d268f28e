"""`fuse_optimizer`: an optimizer whose step is one launch for all of its parameters.

The optimizer stays torch.optim's own: its groups, its state under its names, its checkpoints and its
schedulers. A parameter's first step is the class's own as well, as it creates the state; the later steps are
kernels of the formula that is traced from the class's step (`formula.py`). A parameter that no kernel can
update takes the class's own step, and the reason is kept.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from types import MethodType
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from fusion_compiler.errors import FusionError, OptimizerStepError, WarnOnce
from fusion_compiler.ir.kernel import Kernel
from fusion_compiler.ir.plan_text import count
from fusion_compiler.optimizer.batch import NO_STATE, Assembly, Batch, Group, Prepared, Update
from fusion_compiler.optimizer.clip import Clip
from fusion_compiler.optimizer.formula import SHAPE, Refused, attributes_of, own_step
from fusion_compiler.optimizer.kernels import Kernels
from fusion_compiler.optimizer.ready import Kind, Numbers, Ready, numbers_of, ready_of
from fusion_compiler.runtime.binding import Gpu
from fusion_compiler.runtime.launch import find_gpu

MOST_ASSEMBLIES = 256  # sets of parameters that are remembered: all parameters, or those of a pass's launches
PART_BYTES = 1 << 24  # the size of parameters that take their first step together
REPLACED = ("step", "_step_supports_amp_scaling")  # attributes of the optimizer that are replaced

Chosen: TypeAlias = "Sequence[tuple[Group, Sequence[Tensor]]]"


class Timing:
    """A timing decides when parameters are updated: when `step` is called, as by PyTorch, or as a subclass
    does it."""

    def __init__(self, fused: FusedOptimizer) -> None:
        self.fused = fused

    def step(self) -> None:
        """Run when the optimizer's `step` is called."""
        self.fused.update([(group, group["params"]) for group in self.fused.groups])

    def finish(self) -> None:
        """Run the updates that were put off."""

    def lines(self) -> list[str]:
        """Return a description for people."""
        return []

    def remove(self) -> None:
        """Undo what the timing has changed in the model."""


class FusedOptimizer:
    """A fused optimizer prints its kernels, and the parameters that take the class's own step, with the
    reason.

    optimizer: the user's. names: the parameters' names, by identity. unfused: for each parameter whose last
    step was the class's own, the reason. kernels: the programs generated so far.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        names: Mapping[int, str],
        *,
        backend: str = "auto",
        strict: bool = False,
        rounding: str = "nearest",
        gpus: Callable[[torch.device | None], Gpu] = find_gpu,
    ) -> None:
        self.optimizer: Optimizer = optimizer
        self.names: Mapping[int, str] = names
        self.strict: bool = strict
        self.unfused: dict[str, str] = {}
        self.timing: Timing = Timing(self)
        self._kernels = Kernels(optimizer, backend, rounding, gpus)
        self._warned = WarnOnce(strict)
        self._without_state: set[int] = set()  # parameters that have taken a step and have no state
        self._updated: set[int] = set()  # parameters that a kernel updates
        self._assemblies: dict[tuple[int, ...], Assembly] = {}
        self._kinds: dict[Kind, Kind] = {}
        self._numbers: dict[int, tuple[list[str], list[Any], Numbers | Refused]] = {}
        self.clip: Clip | None = None  # of the present gradients, until a step uses them
        self._clipping: Clip | None = None  # of the step that is running

    # -- queries -----------------------------------------------------------------------------------

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(multi.kernel for multi in self._kernels.launchers.values() if multi.kernel is not None)

    def __str__(self) -> str:
        kind = type(self.optimizer).__name__
        updated = count(len(self._updated), "parameter")
        lines = [f"{kind}: {count(len(self._kernels.launchers), 'kernel')} for {updated}"]
        lines += [f"  {multi}" for multi in self._kernels.launchers.values()]
        lines += [f"  {line}" for line in self.timing.lines()]
        lines += [f"  {name}: {kind}'s own step: {why}" for name, why in self.unfused.items()]
        return "\n".join(lines)

    @property
    def groups(self) -> list[Group]:
        """Return the optimizer's groups, which `load_state_dict` replaces by new ones."""
        return self.optimizer.param_groups

    @property
    def is_pytorchs(self) -> bool:
        """Return True if the step is one of torch.optim's, which treat each parameter by itself, whatever its
        shape."""
        return type(self.optimizer).__module__.startswith("torch.optim.")

    def name_of(self, param: Tensor) -> str:
        return self.names.get(id(param), f"a parameter of shape {list(param.shape)}")

    # -- in the place of the optimizer's step ------------------------------------------------------

    def install(self) -> None:
        """Replace the optimizer's `step`, within the hooks and the scheduler's count around it."""
        optimizer, attributes = self.optimizer, self.optimizer.__dict__
        needed = inspect.signature(own_step(optimizer)).parameters.get("closure")
        if needed is not None and needed.default is inspect.Parameter.empty:
            self.refuse("it needs a closure", "train it without fuse_optimizer:")
        if fused_by(optimizer) is not None:
            self.refuse("it is fused already", "call remove() of what fuse_optimizer returned first, or")
        hooked: Any = Optimizer.profile_hook_step(torch.compiler.disable(self._step))
        hooked.fused_by = self
        if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
            hooked._wrapped_by_lr_sched = True
        self._before = {name: attributes[name] for name in REPLACED if name in attributes}
        optimizer.step = MethodType(hooked, optimizer)
        self._loading = optimizer.register_load_state_dict_pre_hook(lambda *_: self._forget())
        # A GradScaler then unscales gradients before the step.
        attributes["_step_supports_amp_scaling"] = False

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Clip all gradients of the optimizer, as `torch.nn.utils.clip_grad_norm_` does, without writing
        them: the next `step()` multiplies them by the factor, in the precision that it computes in.

        Returns the norm before clipping. Until `step()` gradients keep their values; if one is written in
        between, `step()` raises OptimizerStepError, and if gradients are dropped, the factor is dropped with
        them. If a parameter takes the class's own step, its gradient is written then. Raises RuntimeError for
        a norm that is not finite if `error_if_nonfinite`, and OptimizerStepError if a backward pass has
        updated already.
        """
        if (before := self._clip_of_now()) is not None:  # the second norm is that of clipped gradients
            before.write(self._params())
        options: dict[str, Any] = {"norm_type": norm_type, "error_if_nonfinite": error_if_nonfinite}
        with torch.no_grad():
            self.clip = Clip(self._params(), float(max_norm), **options, foreach=foreach)
        return self.clip.norm

    def finish(self) -> None:
        """Run the updates that `when="forward"` put off. Call this before reading or writing a parameter or a
        state that is held outside of the model."""
        self.timing.finish()

    def remove(self) -> None:
        """Give the optimizer its own step back."""
        self.timing.remove()
        self._loading.remove()
        for name in REPLACED:
            self.optimizer.__dict__.pop(name, None)
        self.optimizer.__dict__.update(self._before)

    def _forget(self) -> None:
        """Forget groups and states that are about to be replaced."""
        self._assemblies.clear()
        self._numbers.clear()

    def _step(self, optimizer: Any, closure: Callable[[], Any] | None = None) -> None:
        if closure is not None:
            self.refuse(
                "a closure is given, which computes gradients again", "call loss.backward() before step(), or"
            )
        optimizer._opt_called = True  # learning-rate schedulers check this
        self._clipping = self._clip_of_now()
        try:
            self.timing.step()
            self.clip = None
        finally:
            self._clipping = None

    def _clip_of_now(self) -> Clip | None:
        """Return the `Clip` of the last call of `clip_grad_norm_`, or None if its gradients are gone."""
        if self.clip is not None and self.clip.is_of(self._params(), self._refuse_written):
            return self.clip
        self.clip = None
        return None

    def _refuse_written(self, param: Tensor) -> NoReturn:
        self.clip = None
        self.refuse(
            f"the gradient of {self.name_of(param)} was written or made between clip_grad_norm_ and step(), "
            "which is left to multiply it",
            "call step() right after it, or take torch.nn.utils.clip_grad_norm_, or",
        )

    def _params(self) -> list[Tensor]:
        return [param for group in self.groups for param in group["params"]]

    # -- a step ------------------------------------------------------------------------------------

    def update(self, chosen: Chosen) -> None:
        """Update the chosen parameters that have gradients.

        Everything is prepared before anything is written. Raises OptimizerStepError for gradients that are
        sparse or complex, before anything is written.
        """
        prepared = self.prepare(chosen)
        self.take_own_step(prepared.eager)
        prepared.run()

    @torch.no_grad()
    def prepare(self, chosen: Chosen) -> Prepared:
        """Prepare what `update` then runs; raise what it raises."""
        params = list(chain.from_iterable([params for _, params in chosen]))
        grads: list[Any] = [param.grad for param in params]
        if type(None) in map(type, grads):
            chosen = [(group, [p for p in params if p.grad is not None]) for group, params in chosen]
            params = list(chain.from_iterable([params for _, params in chosen]))
            grads = [grad for grad in grads if grad is not None]
        groups = {id(group): group for group, _ in chosen}  # which may be given with one parameter each
        numbers = {key: self._numbers_of(group) for key, group in groups.items()}
        key = (*chain.from_iterable([(id(g), len(p)) for g, p in chosen]), *map(id, params))
        assembly = self._assemblies.pop(key, None)
        updates = None if assembly is None else self._next_updates(assembly, numbers, grads)
        if assembly is None or updates is None:
            each = [(at, g, p) for at, (g, p) in enumerate((g, p) for g, ps in chosen for p in ps)]
            assembly, updates, begun = self._assembled(each, numbers, grads)
            left_over = assembly.left_over
        else:  # the reason why no kernel updates a parameter may have gone
            now, more, begun = self._assembled(assembly.left_over, numbers, grads)
            updates, left_over = updates + more, now.left_over
        if begun and len(left_over) == len(assembly.left_over):
            self._assemblies[key] = assembly
            if len(self._assemblies) > MOST_ASSEMBLIES:
                del self._assemblies[next(iter(self._assemblies))]
        return Prepared(updates, [param for _, _, param in left_over])

    def _next_updates(
        self, assembly: Assembly, numbers: Mapping[int, Numbers | Refused], grads: Sequence[Tensor]
    ) -> list[Update] | None:
        """Return the next step of an assembly, or None if anything but values has changed."""
        attributes = () if self.is_pytorchs else attributes_of(self.optimizer)
        updates: list[Update] = []
        for batch in assembly.batches:
            if not batch.has(numbers) or batch.kind.structure.attributes != attributes:
                return None
            try:
                updates.append(self._next(batch, grads))
            except (Refused, FusionError):
                return None
        return updates

    def _assembled(
        self,
        each: Sequence[tuple[int, Group, Tensor]],
        numbers: Mapping[int, Numbers | Refused],
        grads: Sequence[Tensor],
    ) -> tuple[Assembly, list[Update], bool]:
        """Return (the assembly of parameters, its next step, whether all have taken a step before), from a
        look at each parameter."""
        for _, _, param in each:
            self._check(param)
        assembly, begun = Assembly(), True
        for at, group, param in each:
            try:
                now = numbers[id(group)]
                if isinstance(now, Refused):
                    raise now
                shape = SHAPE if self.is_pytorchs else tuple(param.shape)
                assembly.add(at, group, *self._ready(param, now), shape, now.values)
            except _First:
                assembly.left_over.append((at, group, param))
                begun = False
            except Refused as error:
                self._fall_back(param, error)
                assembly.left_over.append((at, group, param))
        updates: list[Update] = []
        for batch in assembly.gathered:
            updates += self._first_updates(batch, assembly, grads)
        return assembly, updates, begun

    def _first_updates(self, batch: Batch, assembly: Assembly, grads: Sequence[Tensor]) -> list[Update]:
        """Return the first step of a batch, or of its sets one by one if no kernel takes all of them."""
        params = [ready.param for _, ready in batch.members]
        batch.close()
        try:
            update = self._next(batch, grads)
        except (Refused, FusionError) as error:
            if len(batch.sets) > 1:
                return [u for part in batch.split() for u in self._first_updates(part, assembly, grads)]
            for param in params:
                self._fall_back(param, error)
            assembly.leave(batch)
            return []
        assembly.batches.append(batch)
        self._updated |= set(map(id, params))
        for param in params:
            self.unfused.pop(self.name_of(param), None)
        return [update]

    def _next(self, batch: Batch, grads: Sequence[Tensor]) -> Update:
        """Return the next step of a batch.

        Raises Refused if anything but values has changed, and what `Kernels.find` raises.
        """
        rows = batch.rows(self.optimizer.state, [grads[at] for at in batch.at])
        if rows is None:
            raise Refused("it has changed since the step began")
        values, multi = batch.values(), batch.multi
        self._kernels.backend_for(batch.kind.device)
        factor = None if self._clipping is None else self._clipping.factor
        if (
            multi is None
            or multi.variant.clipped is (factor is None)
            or not all(multi.formulas[way].holds(*v) for way, v in zip(batch.ways, values, strict=True))
        ):
            multi, batch.ways = self._kernels.find(batch, values, factor is not None)
            batch.multi = multi
        # The seed comes from the generator that torch.manual_seed seeds.
        seed = int(torch.empty((), dtype=torch.int64).random_()) if multi.variant.stochastic else 0
        pairs = [multi.formulas[way].numbers(*v) for way, v in zip(batch.ways, values, strict=True)]
        sets = [(way, numbers) for way, (numbers, _) in zip(batch.ways, pairs, strict=True)]
        return Update(batch, multi, rows, sets, [counts for _, counts in pairs], factor, seed)

    def _numbers_of(self, group: Group) -> Numbers | Refused:
        """Return a group's hyper-parameters, computed once for the same objects if these cannot change."""
        names, values = list(group), list(group.values())
        cached = self._numbers.get(id(group))
        if cached and cached[0] == names and all(map(operator.is_, cached[1], values)):
            return cached[2]
        numbers = numbers_of(group)
        if all(name == "params" or _is_fixed(value) for name, value in group.items()):
            self._numbers[id(group)] = names, values, numbers
        return numbers

    def _check(self, param: Tensor) -> None:
        grad = param.grad
        assert grad is not None
        if grad.is_sparse or grad.layout is not torch.strided:
            self.refuse(
                f"the gradient of {self.name_of(param)} is sparse", "make it dense (sparse=False), or"
            )
        if param.is_complex():
            self.refuse(f"{self.name_of(param)} is complex", "view it as real, or")

    def refuse(self, detail: str, todo: str) -> NoReturn:
        kind = type(self.optimizer).__name__
        raise OptimizerStepError(optimizer=kind, detail=detail, todo=f"{todo} leave this optimizer as it is")

    def _fall_back(self, param: Tensor, error: Exception) -> None:
        """Let a parameter take the class's own step from now on, and warn once for each reason."""
        kind, reason = type(self.optimizer).__name__, str(error)
        name = self.name_of(param)
        self._updated.discard(id(param))
        if self.unfused.get(name) == reason:
            return
        self.unfused[name] = reason
        failure = OptimizerStepError(
            optimizer=kind, detail=f"{name}: {reason}", todo="remove that cause, or keep the class's own step"
        )
        if self.strict:
            raise failure from error
        self._warned.warn(reason, f"{failure}\n  it takes {kind}'s own step")

    def _ready(self, param: Tensor, numbers: Numbers) -> tuple[Ready, Kind]:
        """Return a parameter that a kernel can update, and its kind.

        Raises _First if the step is the parameter's first, and Refused if no kernel updates it.
        """
        state = self.optimizer.state.get(param, NO_STATE)
        if state:
            self._without_state.discard(id(param))
        elif id(param) not in self._without_state:
            raise _First
        self._kernels.backend_for(param.device)
        ready, kind = ready_of(param, state, numbers)
        if not self.is_pytorchs:  # a step of another class may look at these
            attributes = attributes_of(self.optimizer)
            kind = replace(kind, structure=replace(kind.structure, attributes=attributes))
        return ready, self._kinds.setdefault(kind, kind)

    @torch.no_grad()
    def take_own_step(self, params: Sequence[Tensor]) -> None:
        """Take the class's own step for some parameters, a few at a time if it creates their state: foreach
        implementations allocate as much again as all parameters that they are given."""
        if params and self._clipping is not None:
            self._clipping.write(params)
        fresh = [p for p in params if not self.optimizer.state.get(p) and id(p) not in self._without_state]
        several = self.is_pytorchs and len(fresh) > 1  # another class may count its steps
        first = set(map(id, fresh)) if several else set[int]()
        for part in parts_of(fresh, PART_BYTES) if several else ():
            self._take_own_step(part)
        self._take_own_step([param for param in params if id(param) not in first])

    def _take_own_step(self, params: Sequence[Tensor]) -> None:
        if not params:
            return
        chosen = {id(param) for param in params}
        before = [(group["params"], group.get("fused")) for group in self.groups]
        try:
            for group in self.groups:
                group["params"] = [p for p in group["params"] if id(p) in chosen]
                if group.get("fused"):  # its counters are on the device; None lets PyTorch choose foreach
                    group["fused"] = None
            own_step(self.optimizer)(self.optimizer)
            self._without_state |= {id(param) for param in params if not self.optimizer.state.get(param)}
        finally:
            for group, (all_of_them, fused) in zip(self.groups, before, strict=True):
                group["params"] = all_of_them
                if "fused" in group:
                    group["fused"] = fused


def parts_of(params: Sequence[Tensor], size: int) -> list[list[Tensor]]:
    """Return the parameters in parts of at most `size` bytes, or one parameter; the largest come first, when
    the others have no state yet."""
    parts: list[list[Tensor]] = []
    room = 0
    for param in sorted(params, key=lambda param: -param.nbytes):
        if not parts or param.nbytes > room:
            parts.append([])
            room = size
        parts[-1].append(param)
        room -= param.nbytes
    return parts


def fused_by(optimizer: Optimizer) -> FusedOptimizer | None:
    """Return the FusedOptimizer that an optimizer is fused by at present, or None."""
    return getattr(optimizer.step, "fused_by", None)


class _First(Exception):
    """The step is a parameter's first."""


def _is_fixed(value: Any) -> bool:
    """Return True if an object can never change its value."""
    if isinstance(value, tuple):
        return all(map(_is_fixed, value))
    return isinstance(value, bool | int | float | str | None)
