"""Updates within a backward pass: a parameter's as soon as its gradient is there, which is then freed.

    backward    ... grad of head  grad of layer 3      grad of layer 2 ...                    end
    updates                         head, layer 3 |      layer 2 ... |                           the rest |
    step()
    nothing left

Gradients are collected until a launch is worth it (`BUCKET_BYTES`), so that at most so much of them is alive,
and launches are few. A compiled backward hands them on as it makes them (`runtime/gradients.py`). What a
parameter's last gradient is, autograd knows: it calls the hook once a pass, when all uses of the parameter
have been differentiated. Whoever reads a parameter later in the pass, by a view that is no use, is autograd's
own error, as for any write in place.

Where a gradient was, a `_Spent` stands until `step()`: whoever takes it for one, as a norm over all gradients
or a GradScaler does, gets an error instead of a norm of nothing.
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
from fusion_compiler.optimizer.fused import FusedOptimizer
from fusion_compiler.runtime import gradients

BUCKET_BYTES = 100_000_000  # of gradients that wait for a launch


class _Spent(Tensor):
    """In the place of a gradient that is freed: of its shape, without memory; every use of it is an error."""

    _refuse: Callable[[bool], NoReturn]  # takes whether another gradient is added to it
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: Any, param: Tensor, refuse: Callable[[bool], NoReturn]) -> _Spent:
        made = Tensor._make_wrapper_subclass(cls, param.shape, dtype=param.dtype, device=param.device)  # type: ignore[attr-defined]
        made._refuse = refuse
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        spent = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        spent._refuse(func in (torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor))


class _Pass:
    """One backward pass. Autograd alone holds it, by its callback: it dies with a pass that fails."""


class BackwardUpdates:
    """Takes the updates of `fused` into backward passes, from now on until `remove()`.

    Between two calls of `step()` each parameter is updated once. A second gradient is an OptimizerStepError
    in the backward pass, before anything is made of it. After a pass that ended in an error, the next pass or
    `step()` raises PartialStepError once, which names what was updated and what was not.

    chosen: the parameters, by identity, where these are not all; the others are left to `step()`.
    """

    def __init__(self, fused: FusedOptimizer, model: nn.Module, chosen: Container[int] | None = None) -> None:
        self.fused, self.chosen = fused, chosen
        self._spent: dict[int, _Spent] = {}
        self._hooks: dict[int, RemovableHandle] = {}
        self._groups: dict[int, Group] = {}
        self._pending: dict[int, Tensor] = {}
        self._updated: dict[int, Tensor] = {}
        self._taken: dict[int, object] = {}  # from the middle of a compiled backward, and as they were then
        self._bytes = 0
        self._first_pass = True
        self._pass: weakref.ref[_Pass] | None = None  # that has not come to its end
        self._check_alone(model)
        self._hook()

    def _hook(self) -> None:
        """Hooks of all parameters that take gradients and have none yet.

        A parameter keeps its hook where no garbage collection looks: the hook must not keep the parameter.
        """
        own = weakref.WeakMethod(self._accumulated)

        def accumulated(param: Tensor) -> None:
            if (method := own()) is not None:
                method(param)

        for group in self.fused.groups:
            for param in group["params"]:
                wanted = self.chosen is None or id(param) in self.chosen
                if param.requires_grad and wanted and id(param) not in self._hooks:
                    self._hooks[id(param)] = param.register_post_accumulate_grad_hook(accumulated)
                    gradients.take(param, self._takes)

    def _check_alone(self, model: nn.Module | None = None) -> None:
        """Gradients of other processes come later than the hook."""
        if is_distributed(model):
            self.fused.refuse("its gradients are summed over processes later", 'take when="step", or')

    def remove(self) -> None:
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        for group in self.fused.groups:
            for param in group["params"]:
                gradients.leave(param)

    def finish(self) -> None:
        pass

    def lines(self) -> list[str]:
        return ["updated within backward passes"]

    # -- in a backward pass ------------------------------------------------------------------------

    def _takes(self, param: Tensor, grad: Tensor) -> bool:
        """A gradient from the middle of a compiled backward: as if autograd had accumulated it."""
        if id(param) not in self._hooks or not (param.grad is None or type(param.grad) is _Spent):
            return False
        state = _state_of(grad)
        if type(param.grad) is not _Spent:
            param.grad = grad
        self._has_gradient(param)
        self._taken[id(param)] = state
        return True

    def _accumulated(self, param: Tensor) -> None:
        """Autograd is done with a parameter, whether a gradient came or none."""
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
        if id(param) not in self._groups:  # the optimizer has it no more
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
        """Updates what is pending, and frees its gradients.

        Of a class of the user's own, which may count in a group or in itself, the own step is left to `step`.
        """
        params = list(self._pending.values())
        prepared = self.fused.prepare([(self._groups[id(param)], [param]) for param in params])
        left: set[int] = set()
        if self.fused.is_pytorchs:
            self.fused.take_own_step(prepared.own)
        else:
            left = set(map(id, prepared.own))
        prepared.run()
        for param in params:
            if id(param) not in left:
                param.grad = self._spent_of(param)
                self._updated[id(param)] = param
        self._pending.clear()
        self._bytes = 0

    # -- between them ------------------------------------------------------------------------------

    def step(self) -> None:
        """What is left of a step: parameters whose gradients were not made by a backward pass."""
        self._check_last_pass()
        given = [(g, [p for p in g["params"] if type(p.grad) is not _Spent]) for g in self.fused.groups]
        hooked = [p for _, params in given for p in params if id(p) in self._hooks and p.grad is not None]
        for param in hooked:
            if id(param) in self._updated:
                self._refuse_second(param)
        self.fused.update(given)
        for param in (*hooked, *self._updated.values()):
            param.grad = None
        self._updated.clear()
        self._hook()

    def _spent_of(self, param: Tensor) -> _Spent:
        made = self._spent.get(id(param))
        if made is None or (made.shape, made.dtype, made.device) != (param.shape, param.dtype, param.device):
            made = self._spent[id(param)] = _Spent(
                param, functools.partial(self._refuse_use, weakref.ref(param))
            )
        return made

    def _refuse_use(self, param: weakref.ref[Tensor], added: bool) -> NoReturn:
        known = param()
        assert known is not None
        if added:
            self._check_last_pass()
            self._refuse_second(known)
        self.fused.refuse(
            f"the gradient of {self.fused.name_of(known)} is wanted, and the backward pass has updated the "
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
        """Raises PartialStepError where the last pass ended in an error; after that it is forgotten."""
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
    """What another gradient that is added changes."""
    return None if grad is None else (grad.data_ptr(), grad._version)


def is_distributed(model: nn.Module | None) -> bool:
    """Whether gradients may be reduced over processes after they are accumulated."""
    wrapped = model is not None and any(
        isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()
    )
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    return wrapped or (several and torch.distributed.get_world_size() > 1)


def scales_losses() -> bool:
    """Whether a GradScaler has scaled a loss in this process. It is the optimizer's own that counts, which
    nothing tells before its `step`: by then a backward pass has updated with scaled gradients."""

    def found() -> bool:
        scalers = (each for each in gc.get_objects() if issubclass(type(each), torch.amp.GradScaler))
        return any(scaler.is_enabled() and scaler._scale is not None for scaler in scalers)

    return found() and (gc.collect() >= 0 and found())  # one that nobody has any more does not count
