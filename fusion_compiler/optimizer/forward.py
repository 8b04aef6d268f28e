"""Updates before the next use: `step()` notes due updates, and a parameter is updated when it is next read.

    backward    all gradients | clip | step(): due, with the numbers of now | zero_grad()
    next forward                                               embedding, layer 0 | layers 1, 2 | ...
    updates                                                embedding, layer 0     layers 1, 2     ...

Between `step()` and its update a parameter holds its old value, so that every read of it has to be noticed.
Python reads a module's parameters out of its dictionary, which is replaced by one that updates a parameter
before it returns it (as DeepSpeed's ZeRO-3 gathers parameters). Code that TorchDynamo compiled reads
parameters from C++: there every module's pre-forward hook checks whether an update is due, which is a guard
of the compiled code. Checkpoints are read through the same dictionaries and by the optimizer's own hooks.
Code that holds a parameter itself and reads it is not noticed; code that writes it is, by its version.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.utils._python_dispatch import _disable_current_modes

from fusion_compiler.capture.module import CompiledModule
from fusion_compiler.ir.plan_text import count
from fusion_compiler.optimizer.backward import BUCKET_BYTES
from fusion_compiler.optimizer.batch import Group, Update
from fusion_compiler.optimizer.fused import FusedOptimizer, Timing
from fusion_compiler.optimizer.ready import PLAIN


@dataclass(frozen=True, eq=False)
class _Bucket:
    """A bucket holds parameters that are updated together, when the first of them is read.

    params: the parameters, by identity. versions: those of all tensors of the updates when `step` was called.
    """

    params: tuple[int, ...]
    updates: list[Update]
    versions: list[list[int]]

    def is_as_it_was(self) -> bool:
        return _versions(self.updates) == self.versions


class ForwardUpdates(Timing):
    """Put off the updates of `fused` until the model's parameters are read, from now on until `remove()`.

    pending: whether any update is due.
    """

    def __init__(self, fused: FusedOptimizer, model: nn.Module) -> None:
        super().__init__(fused)
        self.pending = False
        self._due: dict[int, _Bucket] = {}
        self._order = {id(param): i for i, param in enumerate(model.parameters())}
        self._modules = list(model.modules())
        self._undo: list[Callable[[], Any]] = []
        self._finish: Callable[[], None] = torch.compiler.disable(self._run_all)  # type: ignore[assignment]
        self._watch()

    def lines(self) -> list[str]:
        """Return text that says how many updates are due."""
        due = count(len(self._due), "parameter") if self._due else "nothing"
        return [f"updated when next read; {due} due now"]

    # -- reads of parameters ------------------------------------------------------------------------

    def _watch(self) -> None:
        for module in self._modules:
            if module._parameters:
                module.__dict__["_parameters"] = _Parameters(module._parameters, self)
            self._undo.append(module.register_forward_pre_hook(_Entry(self)).remove)
        optimizer = self.fused.optimizer
        for hook in (optimizer.register_state_dict_pre_hook, optimizer.register_load_state_dict_pre_hook):
            self._undo.append(hook(lambda *_: self.finish()).remove)
        original = type(optimizer).zero_grad

        def zero_grad(_: Any, set_to_none: bool = True) -> None:
            if not set_to_none:  # the call writes gradients that due updates still need
                self.finish()
            original(optimizer, set_to_none)

        optimizer.zero_grad = MethodType(zero_grad, optimizer)
        self._undo.append(lambda: optimizer.__dict__.pop("zero_grad", None))

    def remove(self) -> None:
        self.finish()
        for undo in self._undo:
            undo()
        self._undo.clear()
        for module in self._modules:
            if isinstance(module._parameters, _Parameters):
                module.__dict__["_parameters"] = dict(module._parameters)

    # -- due updates --------------------------------------------------------------------------------

    def step(self) -> None:
        """Prepare the updates of all parameters that have gradients, with the present hyper-parameters.

        A parameter is updated at once if no kernel updates it, if it belongs to none of the model's modules,
        or if it is a DTensor, which FSDP reads in other ways.
        """
        self.finish()
        pairs = [(g, p) for g in self.fused.groups for p in g["params"] if p.grad is not None]
        due = sorted(
            (pair for pair in pairs if self._is_read(pair[1])), key=lambda pair: self._order[id(pair[1])]
        )
        now = [pair for pair in pairs if not self._is_read(pair[1])]
        at_once = self.fused.prepare([(group, [param]) for group, param in now])
        eager = list(at_once.eager)
        buckets: list[_Bucket] = []
        for together in _buckets(due):
            prepared = self.fused.prepare([(group, [param]) for group, param in together])
            eager += prepared.eager
            updates = list(prepared.updates)
            params = tuple(id(ready.param) for update in updates for _, ready in update.batch.members)
            buckets.append(_Bucket(params, updates, _versions(updates)))
        self.fused.take_own_step(eager)
        at_once.run()
        self._due = {param: bucket for bucket in buckets for param in bucket.params}
        self.pending = bool(self._due)

    def _is_read(self, param: Tensor) -> bool:
        return id(param) in self._order and type(param) in PLAIN

    def used(self, param: Any) -> Any:
        """Return a parameter that is about to be read, after its update if that is due."""
        if self.pending:
            bucket = self._due.get(id(param))
            if bucket is not None and TracingContext.try_get() is None:  # Dynamo reads it later, if at all
                self._run([bucket])
        return param

    def finish(self) -> None:
        """Run all due updates."""
        if self.pending:
            self._finish()

    def _run_all(self) -> None:
        if TracingContext.try_get() is None:
            self._run(list(dict.fromkeys(self._due.values())))

    def _run(self, buckets: Iterable[_Bucket]) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self.fused.refuse("updates are due while a CUDA graph is captured", "call finish() before, or")
        with _disable_current_modes(), torch.inference_mode(False):
            for bucket in buckets:
                try:
                    if not bucket.is_as_it_was():
                        self._refuse_changed(bucket)
                    while bucket.updates:  # an update runs once, whatever fails after it
                        bucket.updates[0].run()
                        del bucket.updates[0]
                finally:
                    for param in bucket.params:
                        del self._due[param]
                    self.pending = bool(self._due)

    def _refuse_changed(self, bucket: _Bucket) -> None:
        names: list[str] = []
        for update, new, old in zip(bucket.updates, _versions(bucket.updates), bucket.versions, strict=True):
            params = update.rows.columns[0]
            size = len(params)
            changed = [params[i] for i in range(size) if new[i::size] != old[i::size]]
            names += map(self.fused.name_of, changed)
        self.fused.refuse(
            f"parameter, gradient or state of {', '.join(names)} was written after step() and before the "
            "update that it put off; that is dropped, with those that were to be made with it",
            'call finish() of what fuse_optimizer returned before writing them, or take when="step", or',
        )


class _Parameters(dict[str, Any]):
    """This dictionary of a module's parameters updates each before it is read, or all before an iteration."""

    def __init__(self, parameters: dict[str, Any], updates: ForwardUpdates) -> None:
        super().__init__(parameters)
        self._updates = updates

    def __getitem__(self, name: str) -> Any:
        return self._updates.used(super().__getitem__(name))

    def get(self, name: str, default: Any = None) -> Any:
        return self._updates.used(super().get(name, default))

    def items(self) -> Any:
        self._updates.finish()
        return super().items()

    def values(self) -> Any:
        self._updates.finish()
        return super().values()

    def pop(self, *args: Any) -> Any:
        self._updates.finish()
        return super().pop(*args)

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(self.copy(), memo)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return dict, (self.copy(),)


class _Entry:
    """This pre-forward hook runs due updates before compiled code, whose reads of parameters are not seen.

    `pending` is a guard of code that TorchDynamo compiles: if updates are due, its graph breaks here.
    A copy of the module has a hook that does nothing.
    """

    def __init__(self, updates: ForwardUpdates) -> None:
        self.updates = updates

    def __call__(self, module: nn.Module, args: Any) -> None:
        if self.updates.pending and (
            torch.compiler.is_dynamo_compiling() or isinstance(module, CompiledModule)
        ):
            self.updates.finish()

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (_nothing,)


def _nothing(*_: Any) -> None:
    pass


def _buckets(pairs: Sequence[tuple[Group, Tensor]]) -> Iterable[list[tuple[Group, Tensor]]]:
    """Split parameters into runs of about `BUCKET_BYTES`, or one run if two begin at one address."""
    places = [param.data_ptr() for _, param in pairs if param.numel()]
    one = len(set(places)) < len(places)
    bucket: list[tuple[Group, Tensor]] = []
    size = 0
    for pair in pairs:
        bucket.append(pair)
        size += pair[1].nbytes
        if size >= BUCKET_BYTES and not one:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def _versions(updates: Iterable[Update]) -> list[list[int]]:
    """Return the versions of each update's tensors."""
    return [[tensor._version for column in update.rows.columns for tensor in column] for update in updates]
