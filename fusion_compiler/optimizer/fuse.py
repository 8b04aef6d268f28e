"""`fuse_optimizer`, the only function of this folder that a user calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from torch import nn
from torch.optim import Optimizer

from fusion_compiler.errors import InvalidOptionError, NotAnOptimizerError, OptimizerStepError
from fusion_compiler.optimizer.backward import BackwardUpdates
from fusion_compiler.optimizer.choice import ChosenUpdates
from fusion_compiler.optimizer.forward import ForwardUpdates
from fusion_compiler.optimizer.fused import FusedOptimizer, Timing, fused_by
from fusion_compiler.options import BACKENDS, Rounding, When

TIMINGS: dict[str, Callable[[FusedOptimizer, nn.Module], Timing]] = {
    "backward": BackwardUpdates,
    "forward": ForwardUpdates,
    "auto": ChosenUpdates,
}


def fuse_optimizer(
    model: nn.Module,
    optimizer: Any,
    *,
    when: When = "step",
    backend: str = "auto",
    strict: bool = False,
    rounding: Rounding = "nearest",
) -> FusedOptimizer:
    """Make `optimizer.step()` one launch of a generated kernel for all parameters, whatever their sizes.

    model: its parameters' names appear in messages. Compiled or not.
    optimizer: any with an element-wise step: SGD, Adam, AdamW, Adagrad, RMSprop, Adadelta, NAdam, RAdam and
        Adamax of torch.optim, or a class of the user's (Lion). It stays the user's: groups, state under
        torch's names, `state_dict`, `load_state_dict`, hooks and schedulers are unchanged, and either kind
        loads a checkpoint of the other. `foreach` and `fused` have no effect.
    when: "step", or "backward": a parameter is updated as soon as a backward pass has its gradient, which is
        freed at once; `step()` updates the rest. This is for one backward pass a step, and takes the learning
        rate of that moment. Clipping by a norm over all gradients, a GradScaler, sums over several passes and
        gradients of other processes need all gradients before any update: take "step", or "forward": `step()`
        notes the due updates with the hyper-parameters of that moment, and a parameter is updated just before
        it is next read; docs/optimizer.md says when `finish()` is needed. "auto": two steps are watched; then
        each parameter is updated in the backward pass or by `step()`, and the result prints the reason.
    backend: "auto" (Triton on GPUs, the class's own step for parameters on a CPU), "interpret" (Triton's
        interpreter, on CPU tensors), "eager" (the traced step by ATen's operators, anywhere).
    strict: raise an error if a parameter would otherwise take the class's own step.
    rounding: how parameters in bfloat16 are rounded: "nearest", or "stochastic": up or down at random, with a
        probability given by the distance to each neighbour, so that updates smaller than half a digit are not
        lost but happen now and then. The random numbers are Philox's; PyTorch's CPU generator gives the key
        of each launch.

    There is one launch for each combination of dtypes: the learning rate and all else that changes are its
    arguments, or a table where groups differ in them. Tensors of 16 bits are computed with in float32 and
    rounded once. A parameter's first step is the class's own, as it creates the state.

    Returns an object that prints the kernels, and the parameters that no kernel updates with the reason; its
    `clip_grad_norm_` clips without writing gradients, its `remove()` undoes the fusion. Raises
    NotAnOptimizerError, InvalidOptionError, and OptimizerStepError for another model's optimizer and for one
    that needs a closure (LBFGS) or is fused already; `optimizer.step()` raises OptimizerStepError for a
    closure and for gradients that are sparse or complex.
    """
    _check(optimizer, when, backend, rounding)
    names = {id(param): name for name, param in model.named_parameters()}
    if not any(id(param) in names for group in optimizer.param_groups for param in group["params"]):
        todo = "pass the module whose parameters() the optimizer was given"
        detail = f"none of its parameters belongs to this {type(model).__name__}"
        raise OptimizerStepError(optimizer=type(optimizer).__name__, detail=detail, todo=todo)
    fused = FusedOptimizer(optimizer, names, backend=backend, strict=strict, rounding=rounding)
    fused.install()
    if when != "step":
        _set_timing(fused, TIMINGS[when], model)
    return fused


def _set_timing(fused: FusedOptimizer, timing: Callable[..., Timing], model: nn.Module) -> None:
    """Let a timing decide when parameters are updated. If it refuses the model, undo the fusion."""
    try:
        fused.timing = timing(fused, model)
    except OptimizerStepError:
        fused.remove()
        raise


def fuse_anew(
    model: nn.Module, optimizer: Any, *, when: When, backend: str = "auto", strict: bool = False
) -> FusedOptimizer:
    """Call `fuse_optimizer` after undoing an earlier fusion of the optimizer, if there is one."""
    _check(optimizer, when, backend)
    if (before := fused_by(optimizer)) is not None:
        before.remove()
    return fuse_optimizer(model, optimizer, when=when, backend=backend, strict=strict)


def _check(optimizer: Any, when: str, backend: str, rounding: str = "nearest") -> None:
    if when not in get_args(When):
        raise InvalidOptionError(option="when", value=when, expected="one of " + ", ".join(get_args(When)))
    if backend not in BACKENDS:
        raise InvalidOptionError(option="backend", value=backend, expected="one of " + ", ".join(BACKENDS))
    if not isinstance(optimizer, Optimizer):
        raise NotAnOptimizerError(got=type(optimizer).__name__)
    if rounding not in get_args(Rounding):
        raise InvalidOptionError(option="rounding", value=rounding, expected='"nearest" or "stochastic"')
