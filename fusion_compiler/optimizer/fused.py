"""`fuse_optimizer`: an optimizer whose step is one launch for all of its parameters.

The optimizer stays torch.optim's own: its groups, its state under its names, its checkpoints and its
schedulers. A parameter's first step is the class's own as well, which makes its state; what it does from then
on is read from it (`formula.py`). Whatever no kernel can update takes the class's own step, with the reason.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.optim import Optimizer

from fusion_compiler.errors import (
    FusionError,
    NotAnOptimizerError,
    OptimizerStepError,
    WarnOnce,
)
from fusion_compiler.ir.kernel import Kernel
from fusion_compiler.optimizer.formula import (
    GRAD,
    PARAM,
    Formula,
    Path,
    Refused,
    Structure,
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
    """A group's hyper-parameters as they are now."""

    floats: tuple[tuple[Path, float], ...]
    constants: tuple[tuple[Path, Any], ...]


@dataclass(frozen=True)
class Ready:
    """A parameter that a kernel updates: what is traced for it, its tensors and its counters."""

    structure: Structure
    item: Item
    counters: tuple[Tensor, ...]
    dtypes: tuple[torch.dtype, ...]
    aligned: bool


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
        backend: Literal["auto", "interpret", "eager"] = "auto",
        strict: bool = False,
        gpus: Callable[[torch.device | None], Gpu] = find_gpu,
    ) -> None:
        self.optimizer, self.names, self.strict = optimizer, names, strict
        self.backend: Literal["auto", "interpret", "eager"] = backend
        self.own: dict[str, str] = {}
        self._gpus = gpus
        self._warned = WarnOnce(strict)
        self._begun: set[int] = set()
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
        lines = [f"{kind}: {len(self._multi)} kernels for {len(self._begun)} parameters"]
        lines += [f"  {multi}" for multi in self._multi.values()]
        lines += [f"  {name}: {kind}'s own step: {why}" for name, why in self.own.items()]
        return "\n".join(lines)

    def name_of(self, param: Tensor) -> str:
        return self.names.get(id(param), f"a parameter of shape {list(param.shape)}")

    # -- in the place of the optimizer's step ------------------------------------------------------

    def install(self) -> None:
        """Takes the place of the optimizer's `step`, within the hooks and the scheduler's count around it."""
        optimizer, own = self.optimizer, self.optimizer.__dict__
        needed = inspect.signature(own_step(optimizer)).parameters.get("closure")
        if needed is not None and needed.default is inspect.Parameter.empty:
            self.refuse("it needs a closure", "train it without fuse_optimizer:")
        if isinstance(getattr(optimizer.step, "fused_by", None), FusedOptimizer):
            self.refuse("it is fused already", "call remove() of what fuse_optimizer returned first, or")
        hooked: Any = Optimizer.profile_hook_step(self._step)
        hooked.fused_by = self
        if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
            hooked._wrapped_by_lr_sched = True
        self._before = {name: own[name] for name in REPLACED if name in own}
        optimizer.step = MethodType(hooked, optimizer)
        own["_step_supports_amp_scaling"] = False  # a GradScaler then unscales gradients before the step

    def remove(self) -> None:
        """Gives the optimizer its own step back."""
        for name in REPLACED:
            self.optimizer.__dict__.pop(name, None)
        self.optimizer.__dict__.update(self._before)

    def _step(self, optimizer: Any, closure: Callable[[], Any] | None = None) -> None:
        if closure is not None:
            self.refuse(
                "a closure is given, which computes gradients again", "call loss.backward() before step(), or"
            )
        optimizer._opt_called = True  # which learning-rate schedulers ask for
        self.update((group, param) for group in optimizer.param_groups for param in group["params"])

    # -- a step ------------------------------------------------------------------------------------

    @torch.no_grad()
    def update(self, chosen: Iterable[tuple[dict[str, Any], Tensor]]) -> None:
        """One step of parameters that have gradients, each with its group.

        Everything is prepared before anything is written. Raises OptimizerStepError for gradients that are
        sparse or complex, before that.
        """
        chosen = [(group, param) for group, param in chosen if param.grad is not None]
        for _, param in chosen:
            self._check(param)
        found = {id(group): _numbers_of(group) for group, _ in chosen}
        own: list[Tensor] = []
        batches: dict[tuple[Any, ...], list[Ready]] = {}
        launches: dict[tuple[Any, ...], tuple[MultiTensor, tuple[float, ...], tuple[float, ...]]] = {}
        for group, param in chosen:
            try:
                numbers = found[id(group)]
                if isinstance(numbers, str):
                    raise Refused(numbers)
                ready = self._ready(param, numbers)
                values = (*(v for _, v in numbers.floats), *(c.item() for c in ready.counters))
                key = (ready.structure, ready.dtypes, param.device, ready.aligned, values)
                if key not in launches:
                    launches[key] = self._prepared(group, ready, param.device, values)
                batches.setdefault(key, []).append(ready)
            except _First:
                own.append(param)
            except (Refused, FusionError) as error:
                self._fall_back(param, error)
                own.append(param)
        self._take_own_step(own)
        for key, items in batches.items():
            multi, numbers, counts = launches[key]
            multi.run([ready.item for ready in items], numbers)
            for ready in items:
                for counter, value in zip(ready.counters, counts, strict=True):
                    counter.fill_(value)

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
            return self.backend
        if device.type != "cuda":
            raise Refused(f"it is on {device}, and kernels run on GPUs (or with backend='interpret')")
        if torch.cuda.is_current_stream_capturing():
            raise Refused("a CUDA graph is captured, which would keep the numbers of this step")
        return "triton"

    def _ready(self, param: Tensor, numbers: Numbers) -> Ready:
        """Raises _First where the step is the parameter's first, and Refused where no kernel updates it."""
        state = self.optimizer.state.get(param) or {}
        if id(param) not in self._begun:
            self._begun.add(id(param))
            if not state:
                raise _First
        self.backend_for(param.device)
        assert param.grad is not None
        states, counters = _sorted_state(param, state)
        tensors = (param, param.grad, *states.values())
        _check_layout(param, (PARAM, GRAD, *states), tensors)
        dtypes = tuple(tensor.dtype for tensor in tensors)
        structure = Structure(
            tuple(states),
            tuple((name, counter.dtype) for name, counter in counters.items()),
            tuple(path for path, _ in numbers.floats),
            numbers.constants,
            torch.float64 if torch.float64 in dtypes else torch.float32,
        )
        if not type(self.optimizer).__module__.startswith("torch.optim."):  # another's may look at it
            structure = replace(structure, shape=tuple(param.shape))
        aligned = all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
        return Ready(structure, Item(tensors, param.numel()), tuple(counters.values()), dtypes, aligned)

    def _prepared(
        self, group: Mapping[str, Any], ready: Ready, device: torch.device, values: tuple[float, ...]
    ) -> tuple[MultiTensor, tuple[float, ...], tuple[float, ...]]:
        """(what updates such a parameter, the formula's numbers, the counters' new values)."""
        formula = self._formula(group, ready.structure, values)
        key = (formula, ready.dtypes, device, ready.aligned)
        if key in self._failed:
            raise self._failed[key]
        if key not in self._multi:
            backend, name = self.backend_for(device), type(self.optimizer).__name__.lower()
            try:
                self._multi[key] = MultiTensor(
                    formula, ready.dtypes, device, backend, name, ready.aligned, self._gpus
                )
            except (Refused, FusionError) as error:
                self._failed[key] = error
                raise
        return self._multi[key], *formula.numbers(*values)

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
            known.append(self._alike.setdefault((replace(structure, shape=()), made.text), made))
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
        finally:
            for group, (all_of_them, fused) in zip(groups, before, strict=True):
                group["params"] = all_of_them
                if "fused" in group:
                    group["fused"] = fused


class _First(Exception):
    """A parameter's first step."""


def _numbers_of(group: Mapping[str, Any]) -> Numbers | str:
    """A group's hyper-parameters, or why no kernel takes them."""
    for flag in ("capturable", "differentiable"):
        if group.get(flag):
            return f"{flag}=True: numbers are computed on the host"
    try:
        numbers = Numbers(*floats_of(group))
        hash(numbers)
    except Refused as error:
        return str(error)
    except TypeError as error:
        return f"a hyper-parameter is no number: {error}"
    return numbers


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


def fuse_optimizer(
    model: nn.Module,
    optimizer: Any,
    *,
    backend: Literal["auto", "interpret", "eager"] = "auto",
    strict: bool = False,
) -> FusedOptimizer:
    """Makes `optimizer.step()` one launch of a generated kernel for all parameters, whatever their sizes.

    model: names its parameters in what is said of them. Compiled or not.
    optimizer: any of an element-wise step: SGD, Adam, AdamW, Adagrad, RMSprop, Adadelta, NAdam, RAdam and
        Adamax of torch.optim, or a class of the user's own (Lion). It stays the user's: groups, state under
        torch's names, `state_dict`, `load_state_dict`, hooks and schedulers are what they were, and a
        checkpoint of either kind goes on as the other. `foreach`, `fused` change nothing.
    backend: "auto" (Triton on GPUs, the class's own step for parameters on a CPU), "interpret" (Triton's
        interpreter, on CPU tensors), "eager" (the traced step by ATen's operators, anywhere).
    strict: raise where a parameter would otherwise take the class's own step.

    There is one kernel for each way that the step goes and each combination of dtypes, and a launch for each
    distinct set of numbers: the learning rate and all else that changes are its arguments. Tensors of 16 bits
    are computed with in float32 and rounded once. A parameter's first step is the class's own, as it makes
    the state.

    Returns what prints as the kernels and the parameters that none updates, with the reason; its `remove()`
    undoes it. Raises NotAnOptimizerError, and OptimizerStepError for an optimizer that needs a closure
    (LBFGS) or is fused already; `optimizer.step()` raises OptimizerStepError for a closure and for gradients
    that are sparse or complex.
    """
    if not isinstance(optimizer, Optimizer):
        raise NotAnOptimizerError(got=type(optimizer).__name__)
    names = {id(param): name for name, param in model.named_parameters()}
    fused = FusedOptimizer(optimizer, names, backend=backend, strict=strict)
    fused.install()
    return fused
