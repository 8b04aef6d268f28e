"""`fuse_optimizer`: an optimizer whose step is one launch for all of its parameters.

The optimizer stays torch.optim's own: its groups, its state under its names, its checkpoints and its
schedulers. A parameter's first step is the class's own as well, which makes its state; what it does from then
on is read from it (`formula.py`). Whatever no kernel can update takes the class's own step, with the reason.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, NoReturn, Protocol, cast

import torch
from torch import Tensor, nn
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.optim import Optimizer

from fusion_compiler.errors import (
    FusionError,
    OptimizerStepError,
    WarnOnce,
)
from fusion_compiler.ir.kernel import Kernel
from fusion_compiler.ir.plan_text import count
from fusion_compiler.optimizer.formula import (
    GRAD,
    PARAM,
    Formula,
    Path,
    Refused,
    Structure,
    attributes_of,
    floats_of,
    own_step,
    trace,
)
from fusion_compiler.optimizer.launch import Backend, Item, MultiTensor
from fusion_compiler.runtime.binding import Gpu
from fusion_compiler.runtime.launch import find_gpu

MOST_FORMULAS = 8  # ways that one structure's step may go; more are a number that the step made its own
REPLACED = ("step", "_step_supports_amp_scaling")  # attributes of the optimizer
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Numbers:
    """A group's hyper-parameters as they are now: the values of the floats, at `paths`, and the others."""

    values: tuple[float, ...]
    paths: tuple[Path, ...]
    constants: tuple[tuple[Path, Any], ...]


@dataclass(frozen=True, eq=False)
class Ready:
    """A parameter that a kernel updates: what is traced for it, its tensors and its counters.

    kind: what is the same for all parameters of one launch but the numbers. state: its state's tensors, in
    the order of the state. like: what of the parameter and its gradient has to be the same at the next step.
    """

    kind: Kind
    tensors: tuple[Tensor, ...]  # of the parameter and its state; gradients come and go
    counters: tuple[Tensor, ...]
    elements: int
    state: tuple[Tensor, ...]
    paths: tuple[Path, ...]
    constants: tuple[tuple[Path, Any], ...]
    like: tuple[Any, ...]

    def item(self) -> Item:
        param, *states = self.tensors
        grad = param.grad
        assert grad is not None
        return Item((param, grad, *states), self.elements)


@dataclass(frozen=True)
class Kind:
    """structure: what is traced. dtypes: of the tensors. device: of all of them."""

    structure: Structure
    dtypes: tuple[torch.dtype, ...]
    device: torch.device


@dataclass(frozen=True)
class Launch:
    """What updates some parameters, the formula's numbers and the counters' new values."""

    multi: MultiTensor
    numbers: tuple[float, ...]
    counts: tuple[float, ...]


class Timing(Protocol):
    """When parameters are updated. step: what is done when the optimizer's is called."""

    def step(self) -> None: ...
    def remove(self) -> None: ...


class AtStep:
    """All of them when `step` is called, as PyTorch does."""

    def __init__(self, fused: FusedOptimizer) -> None:
        self.fused = fused

    def step(self) -> None:
        groups: list[dict[str, Any]] = self.fused.optimizer.param_groups
        self.fused.update((group, param) for group in groups for param in group["params"])

    def remove(self) -> None:
        pass


class FusedOptimizer:
    """What became of an optimizer: prints as its kernels, and which parameters take the class's own step, and
    why.

    optimizer: the user's. names: of the parameters, by identity. own: parameter -> why its last step was the
    class's own. kernels: those made so far.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        names: Mapping[int, str],
        *,
        backend: str = "auto",
        strict: bool = False,
        gpus: Callable[[torch.device | None], Gpu] = find_gpu,
    ) -> None:
        self.optimizer, self.names, self.strict = optimizer, names, strict
        self.backend = backend
        self.own: dict[str, str] = {}
        self.timing: Timing = AtStep(self)
        self._gpus = gpus
        self._warned = WarnOnce(strict)
        self._without_state: set[int] = set()  # parameters that have taken a step and have no state
        self._ready_ones: dict[int, Ready] = {}
        self._kinds: dict[Kind, Kind] = {}
        self._formulas: dict[Structure, list[Formula]] = {}
        self._refused: dict[Structure, str] = {}
        self._alike: dict[tuple[Structure, str], Formula] = {}
        self._multi: dict[tuple[Any, ...], MultiTensor] = {}
        self._failed: dict[tuple[Any, ...], Exception] = {}

    # -- what is asked of it -----------------------------------------------------------------------

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(multi.kernel for multi in self._multi.values() if multi.kernel is not None)

    def __str__(self) -> str:
        kind = type(self.optimizer).__name__
        updated = count(len(self._ready_ones), "parameter")
        lines = [f"{kind}: {count(len(self._multi), 'kernel')} for {updated}"]
        lines += [f"  {multi}" for multi in self._multi.values()]
        lines += [f"  {name}: {kind}'s own step: {why}" for name, why in self.own.items()]
        return "\n".join(lines)

    @property
    def is_pytorchs(self) -> bool:
        """Whether the step is one of torch.optim's: each parameter's by itself, whatever its shape."""
        return type(self.optimizer).__module__.startswith("torch.optim.")

    def name_of(self, param: Tensor) -> str:
        return self.names.get(id(param), f"a parameter of shape {list(param.shape)}")

    # -- in the place of the optimizer's step ------------------------------------------------------

    def install(self) -> None:
        """Takes the place of the optimizer's `step`, within the hooks and the scheduler's count around it."""
        optimizer, own = self.optimizer, self.optimizer.__dict__
        needed = inspect.signature(own_step(optimizer)).parameters.get("closure")
        if needed is not None and needed.default is inspect.Parameter.empty:
            self.refuse("it needs a closure", "train it without fuse_optimizer:")
        if fused_by(optimizer) is not None:
            self.refuse("it is fused already", "call remove() of what fuse_optimizer returned first, or")
        hooked: Any = Optimizer.profile_hook_step(torch.compiler.disable(self._step))
        hooked.fused_by = self
        if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
            hooked._wrapped_by_lr_sched = True
        self._before = {name: own[name] for name in REPLACED if name in own}
        optimizer.step = MethodType(hooked, optimizer)
        self._loading = optimizer.register_load_state_dict_pre_hook(lambda *_: self._ready_ones.clear())
        own["_step_supports_amp_scaling"] = False  # a GradScaler then unscales gradients before the step

    def remove(self) -> None:
        """Gives the optimizer its own step back."""
        self.timing.remove()
        self._loading.remove()
        for name in REPLACED:
            self.optimizer.__dict__.pop(name, None)
        self.optimizer.__dict__.update(self._before)

    def _step(self, optimizer: Any, closure: Callable[[], Any] | None = None) -> None:
        if closure is not None:
            self.refuse(
                "a closure is given, which computes gradients again", "call loss.backward() before step(), or"
            )
        optimizer._opt_called = True  # which learning-rate schedulers ask for
        self.timing.step()

    # -- a step ------------------------------------------------------------------------------------

    @torch.no_grad()
    def update(
        self, chosen: Iterable[tuple[dict[str, Any], Tensor]], leave_own: bool = False
    ) -> list[Tensor]:
        """One step of parameters that have gradients, each with its group.

        Everything is prepared before anything is written. leave_own: those that no kernel updates are left as
        they are, and returned. Raises OptimizerStepError for gradients that are sparse or complex, before
        anything is written.
        """
        chosen = [(group, param) for group, param in chosen if param.grad is not None]
        for _, param in chosen:
            self._check(param)
        found = {id(group): group for group, _ in chosen}
        numbers = {key: _numbers_of(group) for key, group in found.items()}
        own: list[Tensor] = []
        launches: dict[tuple[Any, ...], Launch] = {}
        batches: dict[tuple[Any, ...], list[tuple[Ready, Item]]] = {}
        for group, param in chosen:
            try:
                now = numbers[id(group)]
                if isinstance(now, Refused):
                    raise now
                ready = self._ready(param, now)
                item = ready.item()
                values = (*now.values, *(counter.item() for counter in ready.counters))
                key = (id(ready.kind), item.aligned, values)
                if key not in launches:
                    launches[key] = self._prepared(group, ready.kind, item.aligned, values)
                batches.setdefault(key, []).append((ready, item))
            except _First:
                own.append(param)
            except (Refused, FusionError) as error:
                self._fall_back(param, error)
                own.append(param)
        if not leave_own:
            self._take_own_step(own)
        for key, pairs in batches.items():
            launches[key].multi.run([item for _, item in pairs], launches[key].numbers)
            for ready, _ in pairs:
                for counter, value in zip(ready.counters, launches[key].counts, strict=True):
                    counter.fill_(value)
        return own if leave_own else []

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
        """A parameter takes the class's own step from now on, which is said once for each reason."""
        kind, reason = type(self.optimizer).__name__, str(error)
        name = self.name_of(param)
        self._ready_ones.pop(id(param), None)
        if self.own.get(name) == reason:
            return
        self.own[name] = reason
        told = OptimizerStepError(optimizer=kind, detail=f"{name}: {reason}", todo="leave it, or change that")
        if self.strict:
            raise told from error
        self._warned.warn(reason, f"{told}\n  it takes {kind}'s own step")

    def backend_for(self, device: torch.device) -> Backend:
        """What updates parameters on a device. Raises Refused where nothing but the class's own step does."""
        if self.backend != "auto":
            return cast(Backend, self.backend)
        if device.type != "cuda":
            raise Refused(f"it is on {device}, and kernels run on GPUs (or with backend='interpret')")
        if torch.cuda.is_current_stream_capturing():
            raise Refused("a CUDA graph is captured, which would keep the numbers of this step")
        return "triton"

    def _ready(self, param: Tensor, numbers: Numbers) -> Ready:
        """Raises _First where the step is the parameter's first, and Refused where no kernel updates it."""
        state = self.optimizer.state.get(param) or {}
        self._check_begun(param, bool(state))
        self.backend_for(param.device)
        known = self._ready_ones.get(id(param))
        if known is None or not _fits(known, param, state, numbers):
            known = self._ready_ones[id(param)] = self._made_ready(param, state, numbers)
            self.own.pop(self.name_of(param), None)
        return known

    def _check_begun(self, param: Tensor, has_state: bool) -> None:
        """Raises _First unless the parameter has a state, or has taken a step that left none."""
        if has_state:
            self._without_state.discard(id(param))
        elif id(param) not in self._without_state:
            raise _First

    def _made_ready(self, param: Tensor, state: dict[str, Any], numbers: Numbers) -> Ready:
        assert param.grad is not None
        states, counters = _sorted_state(param, state)
        tensors = (param, param.grad, *states.values())
        _check_layout(param, (PARAM, GRAD, *states), tensors)
        dtypes = tuple(tensor.dtype for tensor in tensors)
        structure = Structure(
            tuple(states),
            tuple((name, counter.dtype) for name, counter in counters.items()),
            numbers.paths,
            numbers.constants,
            torch.float64 if torch.float64 in dtypes else torch.float32,
        )
        if not self.is_pytorchs:  # another's may look at these
            structure = replace(structure, shape=tuple(param.shape), attributes=attributes_of(self.optimizer))
        kind = Kind(structure, dtypes, param.device)
        return Ready(
            self._kinds.setdefault(kind, kind),
            (param, *states.values()),
            tuple(counters.values()),
            param.numel(),
            tuple(state.values()),
            numbers.paths,
            numbers.constants,
            _likeness(param, state),
        )

    def _prepared(
        self, group: Mapping[str, Any], kind: Kind, aligned: bool, values: tuple[float, ...]
    ) -> Launch:
        formula = self._formula(group, kind.structure, values)
        key = (formula, kind.dtypes, kind.device, aligned)
        if key in self._failed:
            raise self._failed[key]
        if key not in self._multi:
            backend, name = self.backend_for(kind.device), type(self.optimizer).__name__.lower()
            try:
                self._multi[key] = MultiTensor(
                    formula, kind.dtypes, kind.device, backend, name, aligned, self._gpus
                )
            except (Refused, FusionError) as error:
                self._failed[key] = error
                raise
        return Launch(self._multi[key], *formula.numbers(*values))

    def _formula(self, group: Mapping[str, Any], structure: Structure, values: tuple[float, ...]) -> Formula:
        if structure in self._refused:
            raise Refused(self._refused[structure])
        known = self._formulas.setdefault(structure, [])
        for formula in known:
            if formula.holds(*values):
                return formula
        try:
            if len(known) >= MOST_FORMULAS:
                raise Refused(
                    f"its step has gone {len(known)} different ways, by {known[-1].guards}; a number that it "
                    "hands to math.sqrt or the like is fixed in the kernel: x ** 0.5 is not"
                )
            made = trace(self.optimizer, group, structure, values)
            alike = replace(structure, shape=(), attributes=())
            known.append(self._alike.setdefault((alike, made.text), made))
        except Refused as error:
            self._refused[structure] = str(error)
            raise
        return known[-1]

    def _take_own_step(self, params: Sequence[Tensor]) -> None:
        """The class's own step of some parameters."""
        if not params:
            return
        chosen = {id(param) for param in params}
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        before = [(group["params"], group.get("fused")) for group in groups]
        try:
            for group in groups:
                group["params"] = [p for p in group["params"] if id(p) in chosen]
                if group.get("fused"):  # whose counters are on the device
                    group["fused"] = False
            own_step(self.optimizer)(self.optimizer)
            self._without_state |= {id(param) for param in params if not self.optimizer.state.get(param)}
        finally:
            for group, (all_of_them, fused) in zip(groups, before, strict=True):
                group["params"] = all_of_them
                if "fused" in group:
                    group["fused"] = fused


def fused_by(optimizer: Optimizer) -> FusedOptimizer | None:
    """What an optimizer is fused by at present."""
    return getattr(optimizer.step, "fused_by", None)


class _First(Exception):
    """A parameter's first step."""


def _numbers_of(group: Mapping[str, Any]) -> Numbers | Refused:
    """A group's hyper-parameters, or why no kernel takes them."""
    for flag in ("capturable", "differentiable"):
        if group.get(flag):
            return Refused(f"{flag}=True: numbers are computed on the host")
    try:
        floats, constants = floats_of(group)
        hash(constants)
    except Refused as error:
        return error
    except TypeError as error:
        return Refused(f"a hyper-parameter is no number: {error}")
    return Numbers(tuple(v for _, v in floats), tuple(p for p, _ in floats), constants)


def _fits(known: Ready, param: Tensor, state: Mapping[str, Any], numbers: Numbers) -> bool:
    """Whether nothing has changed since a parameter was made ready but values."""
    return (
        len(state) == len(known.state)
        and all(map(operator.is_, state.values(), known.state))
        and known.paths == numbers.paths
        and known.constants == numbers.constants
        and known.like == _likeness(param, state)
        and not known.kind.structure.attributes
    )


def _likeness(param: Tensor, state: Mapping[str, Any]) -> tuple[Any, ...]:
    grad = param.grad
    assert grad is not None
    dtypes = (value.dtype for value in state.values() if isinstance(value, Tensor))
    return (param.dtype, param.device, param.stride(), type(grad), grad.dtype, grad.stride(), *dtypes)


def _sorted_state(param: Tensor, state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(tensors of the parameter's shape, counters), by name. A counter on a device comes to the host."""
    if type(param) not in (nn.Parameter, Tensor):
        raise Refused(f"it is a {type(param).__name__}")
    if param.dim() == 0:
        raise Refused("it has no dimension, as its counters have none")
    states: dict[str, Tensor] = {}
    counters: dict[str, Tensor] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise Refused(f"its state {name} is {value!r}, no tensor")
        if value.dim() == 0 and value.dtype in (torch.float32, torch.float64):
            if value.device.type != "cpu":
                value = state[name] = value.cpu()
            counters[name] = value
        elif value.shape == param.shape and value.device == param.device:
            states[name] = value
        else:
            raise Refused(f"its state {name} is {value.dtype} {list(value.shape)} on {value.device}")
    return states, counters


def _check_layout(param: Tensor, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.dtype not in FLOATS:
            raise Refused(f"its {name} is {tensor.dtype}")
        if type(tensor) not in (nn.Parameter, Tensor):
            raise Refused(f"its {name} is a {type(tensor).__name__}")
    if all(tensor.is_contiguous() for tensor in tensors):
        return
    if not is_non_overlapping_and_dense_or_false(param):
        raise Refused("its elements do not lie side by side")
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.stride() != param.stride():
            raise Refused(f"its {name} has the strides {tensor.stride()}, it has {param.stride()}")
