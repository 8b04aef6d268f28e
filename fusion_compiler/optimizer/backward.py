"""Updates within a backward pass: each parameter is updated, and its gradient freed, once that is complete.

    backward    ... grad of head  grad of layer 3      grad of layer 2 ...                    end
    updates                         head, layer 3 |      layer 2 ... |                           the rest |
    step()
    nothing left

Gradients are collected until a launch is worth it (`BUCKET_BYTES`), so that at most so much of them is alive,
and launches are few. A compiled backward hands them on as it computes them (`runtime/gradients.py`). Autograd
decides which gradient of a parameter is its last: it calls the hook once a pass, when all uses of the
parameter have been differentiated. If code reads a parameter later in the pass, through a view that is not
one of these uses, autograd raises its own error, as for any write in place.

A `_Spent` replaces a freed gradient until `step()`: code that uses it as a gradient, such as a norm over all
gradients or a GradScaler, gets an error instead of a norm of nothing.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Container, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from fusion_compiler.errors import PartialStepError
from fusion_compiler.optimizer.batch import Group
from fusion_compiler.optimizer.fused import FusedOptimizer, Timing
from fusion_compiler.runtime import gradients

BUCKET_BYTES = 100_000_000  # of gradients that wait for a launch


class _Spent(Tensor):
    """A `_Spent` replaces a freed gradient: it has the shape but no memory, and every use of it raises."""

    _refuse: Callable[[bool], NoReturn]  # its argument says whether another gradient is added
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: Any, param: Tensor, refuse: Callable[[bool], NoReturn]) -> _Spent:
        spent = Tensor._make_wrapper_subclass(cls, param.shape, dtype=param.dtype, device=param.device)  # type: ignore[attr-defined]
        spent._refuse = refuse
        return spent

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        spent = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        spent._refuse(func in (torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor))


class _Pass:
    """A `_Pass` is a backward pass. Only autograd's callback holds it, so that it dies if the pass fails."""


class BackwardUpdates(Timing):
    """Move the updates of `fused` into backward passes, from now on until `remove()`.

    Between two calls of `step()` each parameter is updated once. A second gradient raises OptimizerStepError
    in the backward pass, before it is used. After a pass that ended in an error, the next pass or `step()`
    raises PartialStepError once, which names the parameters that were updated and those that were not.

    chosen: the parameters, by identity, if these are not all; the others are left to `step()`.
    """

    def __init__(self, fused: FusedOptimizer, model: nn.Module, chosen: Container[int] | None = None) -> None:
        super().__init__(fused)
        self.chosen = chosen
        self._spent: dict[int, _Spent] = {}
        self._hooks: dict[int, RemovableHandle] = {}
        self._groups: dict[int, Group] = {}
        self._pending: dict[int, Tensor] = {}
        self._updated: dict[int, Tensor] = {}
        self._taken: dict[int, object] = {}  # states of gradients from the middle of a compiled backward
        self._bytes = 0
        self._first_pass = True
        self._pass: weakref.ref[_Pass] | None = None  # the pass that has not ended
        self._check_alone(model)
        self._hook()

    def _hook(self) -> None:
        """Register hooks on all parameters that require gradients and have no hook yet.

        A parameter holds its hook where the garbage collector cannot see it: the hook must not hold this
        object, which holds the parameter.
        """
        weak_method = weakref.WeakMethod(self._accumulated)

        def accumulated(param: Tensor) -> None:
            if (method := weak_method()) is not None:
                method(param)

        for group in self.fused.groups:
            for param in group["params"]:
                wanted = self.chosen is None or id(param) in self.chosen
                if param.requires_grad and wanted and id(param) not in self._hooks:
                    self._hooks[id(param)] = param.register_post_accumulate_grad_hook(accumulated)
                    gradients.take(param, self._takes)

    def _check_alone(self, model: nn.Module | None = None) -> None:
        """Refuse gradients that are summed over processes, as the sums come later than the hook."""
        if is_distributed(model):
            self.fused.refuse("its gradients are summed over processes later", 'take when="step", or')

    def remove(self) -> None:
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        for group in self.fused.groups:
            for param in group["params"]:
                gradients.leave(param)

    def lines(self) -> list[str]:
        return ["updated within backward passes"]

    # -- in a backward pass ------------------------------------------------------------------------

    def _takes(self, param: Tensor, grad: Tensor) -> bool:
        """Take a gradient from the middle of a compiled backward as if autograd had accumulated it."""
        if id(param) not in self._hooks or not (param.grad is None or type(param.grad) is _Spent):
            return False
        state = _state_of(grad)
        if type(param.grad) is not _Spent:
            param.grad = grad
        self._has_gradient(param)
        self._taken[id(param)] = state
        return True

    def _accumulated(self, param: Tensor) -> None:
        """Handle the end of autograd's work on a parameter, whether it has a gradient or not."""
        taken = self._taken.pop(id(param), None)
        if param.grad is None:
            return
        if taken is None or not (type(param.grad) is _Spent or _state_of(param.grad) == taken):
            self._has_gradient(param)

    def _has_gradient(self, param: Tensor) -> None:
        self._check_last_pass()
        if id(param) in self._updated or id(param) in self._pending:
            self._refuse_second(param)
        if self._pass is None:
            self._begin()
        if id(param) not in self._groups:  # it was removed from the optimizer
            return
        assert param.grad is not None
        self._pending[id(param)] = param
        self._bytes += param.grad.nbytes if param.grad.layout is torch.strided else BUCKET_BYTES
        if self._bytes >= BUCKET_BYTES:
            self._flush()

    def _begin(self) -> None:
        self._check_alone()
        if self._first_pass and scales_losses():
            self.fused.refuse("a GradScaler scales its gradients", 'take when="step" or "forward", or')
        self._first_pass = False
        self._taken.clear()
        self._groups = {id(param): group for group in self.fused.groups for param in group["params"]}
        this = _Pass()
        self._pass = weakref.ref(this)
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(functools.partial(self._end, this))

    def _end(self, _: _Pass) -> None:
        self._flush()
        self._pass = None

    def _flush(self) -> None:
        """Update the pending parameters and free their gradients.

        The class's own step is left to `step` for a class of the user's, which may count its steps in a group
        or in itself.
        """
        params = list(self._pending.values())
        prepared = self.fused.prepare([(self._groups[id(param)], [param]) for param in params])
        left: set[int] = set()
        if self.fused.is_pytorchs:
            self.fused.take_own_step(prepared.eager)
        else:
            left = set(map(id, prepared.eager))
        prepared.run()
        for param in params:
            if id(param) not in left:
                param.grad = self._spent_of(param)
                self._updated[id(param)] = param
        self._pending.clear()
        self._bytes = 0

    # -- between them ------------------------------------------------------------------------------

    def step(self) -> None:
        """Finish a step: update the parameters whose gradients were not computed by a backward pass."""
        self._check_last_pass()
        remaining = [(g, [p for p in g["params"] if type(p.grad) is not _Spent]) for g in self.fused.groups]
        hooked = [p for _, params in remaining for p in params if id(p) in self._hooks and p.grad is not None]
        for param in hooked:
            if id(param) in self._updated:
                self._refuse_second(param)
        self.fused.update(remaining)
        for param in (*hooked, *self._updated.values()):
            param.grad = None
        self._updated.clear()
        self._hook()

    def _spent_of(self, param: Tensor) -> _Spent:
        spent = self._spent.get(id(param))
        if spent is None or (spent.shape, spent.dtype, spent.device) != (
            param.shape,
            param.dtype,
            param.device,
        ):
            spent = self._spent[id(param)] = _Spent(
                param, functools.partial(self._refuse_use, weakref.ref(param))
            )
        return spent

    def _refuse_use(self, reference: weakref.ref[Tensor], added: bool) -> NoReturn:
        param = reference()
        assert param is not None
        if added:
            self._check_last_pass()
            self._refuse_second(param)
        self.fused.refuse(
            f"the gradient of {self.fused.name_of(param)} is wanted, and the backward pass has updated the "
            "parameter and freed it",
            'for a norm over all gradients or a GradScaler take when="step" or "forward", or',
        )

    def _refuse_second(self, param: Tensor) -> NoReturn:
        self.fused.refuse(
            f"{self.fused.name_of(param)} has a second gradient since step(), and the first one's update",
            'call step() after each backward pass, or for sums over several passes take when="step" or '
            '"forward", or',
        )

    def _check_last_pass(self) -> None:
        """Raise PartialStepError if the last pass ended in an error; that pass is then forgotten."""
        if self._pass is None or self._pass() is not None:
            return
        params = [p for g in self.fused.groups for p in g["params"] if p.requires_grad]
        updated = self._names(self._updated.values())
        waiting = self._names(param for param in params if id(param) not in self._updated)
        self._pass, self._bytes = None, 0
        for param in self._updated.values():
            param.grad = None
        self._pending.clear()
        self._updated.clear()
        raise PartialStepError(updated=updated, waiting=waiting)

    def _names(self, params: Iterable[Tensor]) -> str:
        return ", ".join(map(self.fused.name_of, params)) or "none"


def _state_of(grad: Tensor | None) -> object:
    """Return the address and version of a gradient, which change when another gradient is added to it."""
    return None if grad is None else (grad.data_ptr(), grad._version)


def is_distributed(model: nn.Module | None) -> bool:
    """Return True if gradients may be reduced over processes after they are accumulated."""
    wrapped = model is not None and any(
        isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()
    )
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    return wrapped or (several and torch.distributed.get_world_size() > 1)


def scales_losses() -> bool:
    """Return True if a GradScaler has scaled a loss in this process.

    Only the optimizer's scaler matters, but nothing identifies it before its `step`, and by then a backward
    pass has updated with scaled gradients.
    """

    def any_scaled() -> bool:
        scalers = (each for each in gc.get_objects() if issubclass(type(each), torch.amp.GradScaler))
        return any(scaler.is_enabled() and scaler._scale is not None for scaler in scalers)

    return any_scaled() and (gc.collect() >= 0 and any_scaled())  # garbage does not count
