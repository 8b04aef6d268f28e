"""Updates within a backward pass: a parameter's as soon as its gradient is there, which is then freed.

    backward    ... grad of head  grad of layer 3      grad of layer 2 ...                    end
    updates                         head, layer 3 |      layer 2 ... |                           the rest |
    step()
    nothing left

Gradients are collected until a launch is worth it (`BUCKET_BYTES`), so that at most so much of them is alive,
and launches are few. What a parameter's last gradient is, autograd knows: it calls the hook once a pass, when
all uses of the parameter have been differentiated. Whoever reads a parameter later in the pass, by a view
that is no use, is autograd's own error, as for any write in place.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fusion_compiler.errors import PartialStepError
from fusion_compiler.optimizer.fused import FusedOptimizer

BUCKET_BYTES = 64 << 20  # of gradients that wait for a launch


class _Pass:
    """One backward pass. Autograd alone holds it, by its callback: it dies with a pass that fails."""


class BackwardUpdates:
    """Takes the updates of `fused` into backward passes, from now on until `remove()`.

    Between two calls of `step()` each parameter is updated once. A second gradient is an OptimizerStepError
    in the backward pass, before anything is made of it. After a pass that ended in an error, the next pass or
    `step()` raises PartialStepError once, which names what was updated and what was not.
    """

    def __init__(self, fused: FusedOptimizer, model: nn.Module) -> None:
        self.fused = fused
        self._hooks: dict[int, RemovableHandle] = {}
        self._groups: dict[int, dict[str, Any]] = {}
        self._pending: dict[int, Tensor] = {}
        self._updated: dict[int, Tensor] = {}
        self._bytes = 0
        self._pass: weakref.ref[_Pass] | None = None  # that has not come to its end
        self._check_alone(model)
        self._hook()

    def _hook(self) -> None:
        """Hooks of all parameters that take gradients and have none yet."""
        for group in self.fused.optimizer.param_groups:
            for param in group["params"]:
                self._groups[id(param)] = group
                if param.requires_grad and id(param) not in self._hooks:
                    self._hooks[id(param)] = param.register_post_accumulate_grad_hook(self._has_gradient)

    def _check_alone(self, model: nn.Module | None = None) -> None:
        """Gradients of other processes come later than the hook."""
        if is_distributed(model):
            self.fused.refuse("its gradients are summed over processes later", 'take when="step", or')

    def remove(self) -> None:
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()

    def finish(self) -> None:
        pass

    def lines(self) -> list[str]:
        return ["updated within backward passes"]

    # -- in a backward pass ------------------------------------------------------------------------

    def _has_gradient(self, param: Tensor) -> None:
        self._check_last_pass()
        if id(param) in self._updated or id(param) in self._pending:
            self._refuse_second(param)
        if self._pass is None:
            self._begin()
        assert param.grad is not None
        self._pending[id(param)] = param
        self._bytes += param.grad.nbytes if param.grad.layout is torch.strided else BUCKET_BYTES
        if self._bytes >= BUCKET_BYTES:
            self._flush()

    def _begin(self) -> None:
        self._check_alone()
        this = _Pass()
        self._pass = weakref.ref(this)
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._end_of(this))

    def _end_of(self, this: _Pass) -> Callable[[], None]:
        def end() -> None:
            assert this is not None
            self._flush()
            self._pass = None

        return end

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
            del self._pending[id(param)]
            if id(param) not in left:
                param.grad = None
                self._updated[id(param)] = param
        self._bytes = 0

    # -- between them ------------------------------------------------------------------------------

    def step(self) -> None:
        """What is left of a step: parameters whose gradients were not made by a backward pass."""
        self._check_last_pass()
        groups: list[dict[str, Any]] = self.fused.optimizer.param_groups
        given = [(group, [p for p in group["params"] if p.grad is not None]) for group in groups]
        for param in (param for _, params in given for param in params):
            if id(param) in self._updated:
                self._refuse_second(param)
        self.fused.update(given)
        for param in (param for _, params in given for param in params):
            param.grad = None
        self._updated.clear()
        self._hook()

    def _refuse_second(self, param: Tensor) -> None:
        self.fused.refuse(
            f"{self.fused.name_of(param)} has a second gradient since step(), and the first one's update",
            'call step() after each backward pass, or for sums over several passes take when="step", or',
        )

    def _check_last_pass(self) -> None:
        """Raises PartialStepError where the last pass ended in an error; after that it is forgotten."""
        if self._pass is None or self._pass() is not None:
            return
        params = [p for g in self.fused.optimizer.param_groups for p in g["params"] if p.requires_grad]
        updated = self._names(self._updated.values())
        waiting = self._names(param for param in params if id(param) not in self._updated)
        self._pass, self._bytes = None, 0
        self._pending.clear()
        self._updated.clear()
        raise PartialStepError(updated=updated, waiting=waiting)

    def _names(self, params: Iterable[Tensor]) -> str:
        return ", ".join(map(self.fused.name_of, params)) or "none"


def is_distributed(model: nn.Module | None) -> bool:
    """Whether gradients may be reduced over processes after they are accumulated."""
    wrapped = model is not None and any(
        isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()
    )
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    return wrapped or (several and torch.distributed.get_world_size() > 1)
