"""Make what compile() returns: a drop-in for the module or function, with its plans.

A compiled module is an instance of a subclass of the model's own class that *shares the model's
__dict__*: parameters, buffers, hooks, mode and every attribute are the same objects under the
same names, whichever of the two is changed. Only `forward` differs, and `plan` is added.
"""

from __future__ import annotations

import copy
import functools
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar, overload

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule, innermost_fn
from torch._dynamo.exc import (
    BackendCompilerFailed,
    FailOnRecompileLimitHit,
    TorchRuntimeError,
    Unsupported,
    UserError,
)
from torch._dynamo.utils import counters, graph_break_reasons

from fusion_compiler.capture.capture import Backend, raising
from fusion_compiler.capture.dynamo import dynamo_compiled
from fusion_compiler.capture.entries import compiled_methods, other_methods, watched
from fusion_compiler.capture.omitted import kept_of, omitting
from fusion_compiler.errors import ExportedProgramError, FusionError, NotCallableError
from fusion_compiler.ir.breaks import GraphBreak, breaks_since, distinct, of_error
from fusion_compiler.ir.decision import Decision
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ir.plan_text import breaks_text
from fusion_compiler.runtime.collection import rare_collections
from fusion_compiler.runtime.stages import Stages
from fusion_compiler.runtime.verify import Verification


class Plans(Sequence[FusionPlan]):
    """The object has the plans of all graphs captured so far, in order of their compilation; str() joins
    them.

    verification: the error table that verify=True fills. breaks: the places at which graphs end early, and
    the functions that no graph holds. called: whether the model has been. optimizer: what became of the one
    that it was compiled with. seconds: of each stage up to now, without TorchDynamo's.
    reporter: makes a `report.Report` of the plans.
    """

    def __init__(self, stages: Stages | None = None) -> None:
        self._stages = stages or Stages()
        self._plans: list[FusionPlan] = []
        self._left: list[str] = []
        self.verification: Verification = Verification()
        self.breaks: tuple[GraphBreak, ...] = ()
        self.called = False
        self.optimizer: Any = None
        self.reporter: Callable[[Plans], Any] | None = None

    def report(self) -> Any:
        """Return the Report of all graphs captured so far. Nothing is planned again unless a question needs
        the search (`passes.fuse.why`)."""
        assert self.reporter is not None, "compile() sets it"
        return self.reporter(self)

    def why(self, a: str, b: str) -> Any:
        """Return why two ops are one kernel or are not, in each graph that has both (`Report.why`)."""
        return self.report().why(a, b)

    def record(self, plan: FusionPlan) -> None:
        """Add the plan of a graph that has just been compiled."""
        self._plans.append(plan)

    def decide(self, name: str, decision: Decision) -> None:
        """Put a later decision about a graph into its plan."""
        self._plans = [p.decided(decision) if p.name == name else p for p in self._plans]

    @property
    def seconds(self) -> dict[str, float]:
        return self._stages.seconds

    def broke(self, breaks: Sequence[GraphBreak]) -> None:
        """Add the graph breaks of a call. Each recompilation finds the same place again."""
        self.breaks = distinct((*self.breaks, *breaks))

    def leave(self, name: str, reason: str) -> None:
        """Note that a graph runs eager."""
        self._left.append(f"graph {name} runs eager: {reason}")

    @overload
    def __getitem__(self, index: int) -> FusionPlan: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[FusionPlan]: ...
    def __getitem__(self, index: int | slice) -> FusionPlan | Sequence[FusionPlan]:
        return self._plans[index]

    def __len__(self) -> int:
        return len(self._plans)

    def __iter__(self) -> Iterator[FusionPlan]:
        return iter(tuple(self._plans))

    def __repr__(self) -> str:
        return f"<Plans: {', '.join(map(repr, self._plans)) or 'none yet'}>"

    def _repr_html_(self) -> str | None:
        """Return the page of the report, as a notebook shows it, or None if there is no plan yet."""
        return self.report()._repr_html_() if self._plans else None

    def __str__(self) -> str:
        table = [f"verified\n{self.verification}"] if self.verification.rows else []
        broken = [breaks_text(self.breaks)] if self.breaks else []
        plans = [*self._none(), *(str(p) for p in self._plans)]
        fused = [] if self.optimizer is None else [str(self.optimizer)]
        return "\n\n".join([*plans, *self._left, *broken, *table, *fused])

    def _none(self) -> list[str]:
        """Return why there is no plan."""
        if self._plans or self._left:
            return []
        if not self.called:
            return ["no graph has been captured yet: call it once"]
        reason = "" if self.breaks else ": TorchDynamo is off, or found nothing that computes on tensors"
        return [f"no graph was captured when it was called{reason}"]


# Rebuilds a compiled object from the plain one: copies and unpickled modules are compiled anew.
Recompile = Callable[[Any], Any]


class CompiledModule(nn.Module):
    """A compiled module has these methods and fields beside its own class; see _compiled_module."""

    _fusion_model: nn.Module  # the plain model; both have one __dict__
    _fusion_plans: Plans
    _fusion_recompile: Recompile

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        del protocol
        return _rebuild, (self._fusion_recompile, self._fusion_model)

    def __copy__(self) -> Any:
        return self._fusion_recompile(copy.copy(self._fusion_model))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._fusion_recompile(copy.deepcopy(self._fusion_model, memo))


P = ParamSpec("P")
R = TypeVar("R", covariant=True)


class CompiledFunction(Generic[P, R]):
    """A compiled function is called like the function, and has its name, signature and docstring."""

    def __init__(
        self, function: Callable[P, R], run: Callable[P, R], plans: Plans, recompile: Recompile
    ) -> None:
        functools.update_wrapper(self, function)
        self._function, self._run, self._plans, self._recompile = function, run, plans, recompile

    @property
    def plan(self) -> Plans:
        return self._plans

    @property
    def verification(self) -> Verification:
        return self._plans.verification

    def report(self) -> Any:
        """Return the Report of all graphs captured so far, as `explain` returns it."""
        return plan_of(self).report()

    def why(self, a: str, b: str) -> Any:
        """Return why two ops are one kernel or are not, in each graph that has both.

        a, b: an op or a cluster by name, a place ("model.py:12"), a module's path, or a piece of source.
        Raises UnknownOpError for a name that no graph has.
        """
        return plan_of(self).why(a, b)

    def __repr__(self) -> str:
        return f"<compiled {self._function!r}>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._run(*args, **kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._recompile, self._function)


def wrap(target: nn.Module | Callable[..., Any], compiling: Compiling, recompile: Recompile) -> Any:
    """Return `target` compiled: a module of the same class, or a CompiledFunction.

    recompile: makes a compiled object of a plain one, for deepcopy and pickle (it is pickled too).
    """
    if isinstance(target, nn.Module):
        return _compiled_module(target, compiling, recompile)
    return CompiledFunction(target, compiling.compiled(target), compiling.plans, recompile)


@dataclass(frozen=True)
class Compiling:
    """The settings and callbacks with which all functions of one compiled object are compiled.

    plans: filled by the backend; it becomes `.plan`.
    dynamic, fullgraph: as torch.compile's. strict: fullgraph, with an error of our own.
    broke: called with the graph breaks of a call that compiled something; without it `plans` keeps them.
    give_up(name, error): called if a call ran eager because TorchDynamo could not capture it. It may raise.
    missed(model, method): called with a method that is not compiled, whose result gets a gradient before
        the compiled module is called.
    omit: fields of a module's result that are None in training (`omitted.omitting`). kept(reason):
        called if a result does not have them.
    """

    backend: Backend
    plans: Plans
    dynamic: bool | None = None
    fullgraph: bool = False
    strict: bool = False
    broke: Callable[[Sequence[GraphBreak]], None] | None = None
    give_up: Callable[[str, Exception], None] = raising
    missed: Callable[[str, str], None] = lambda model, method: None
    omit: tuple[str, ...] = ()
    kept: Callable[[str], None] = lambda reason: None

    @property
    def is_full(self) -> bool:
        """True if an error is raised where TorchDynamo would break the graph."""
        return self.fullgraph or self.strict

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` compiled. A call that TorchDynamo fails to capture runs eager."""
        failures, plans = 0, self.plans
        # A frame of its own: Dynamo counts recompilations per code object, and many models
        # share one outermost function (a decorator's).
        run = dynamo_compiled(
            _own_frame(function), self.backend, dynamic=self.dynamic, fullgraph=self.is_full
        )
        broke = self.broke or plans.broke

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal failures
            if torch.compiler.is_dynamo_compiling():  # another compilation traces through this call
                return run(*args, **kwargs)
            if failures and failures >= torch._dynamo.config.recompile_limit:  # reading the limit takes 1 us
                return function(*args, **kwargs)
            rarely = None if plans.called else rare_collections()
            if rarely is not None:  # it compiles
                rarely.__enter__()
            plans.called = True
            frames, before, began = counters["frames"].get("total"), len(graph_break_reasons), time.time_ns()
            try:
                return run(*args, **kwargs)
            except Exception as error:
                fault = self._uncaptured(error)
            finally:
                if rarely is not None:
                    rarely.__exit__(None, None, None)
                if counters["frames"].get("total") != frames:  # something was compiled
                    broke(breaks_since(before, began, getattr(function, "__qualname__", "the model")))
            results = function(*args, **kwargs)  # if this raises as well, the error is the user's
            failures += 1
            self.give_up(f"the call of {getattr(function, '__qualname__', 'the model')}", fault)
            return results

        return call

    def _uncaptured(self, error: Exception) -> Exception:
        """Return the error for which a call was not captured and runs eager. Raise any other error."""
        match error:
            case BackendCompilerFailed(inner_exception=FusionError() as inner):
                raise inner from inner.__cause__  # without Dynamo's wrapping: it names the place itself
            case Unsupported() | UserError() | FailOnRecompileLimitHit() if self.strict:
                raise of_error(error).error from None
            case BackendCompilerFailed() | Unsupported() | UserError() | FailOnRecompileLimitHit():
                raise error
            case _ if self.is_full or not _is_uncaptured(error):
                raise _operator_error(error) from None
            case _:
                return _operator_error(error)


def plain(target: Any) -> Any:
    """Return what `target` was made of, if compile() or torch.compile() made it, or else `target` itself."""
    while True:
        if isinstance(target, CompiledModule):
            inner: Any = target._fusion_model
        elif isinstance(target, CompiledFunction):
            inner = target._function
        elif isinstance(target, OptimizedModule):
            inner = target._orig_mod
        else:
            inner = innermost_fn(target)
        if inner is target:
            return target
        target = inner


def check_callable(model: Any) -> Any:
    """Return a model. Raise NotCallableError, or ExportedProgramError, if it cannot be called."""
    if isinstance(model, torch.export.ExportedProgram):
        raise ExportedProgramError
    if not callable(model):
        raise NotCallableError(got=type(model).__name__)
    return model


def compiled_class(cls: type, recompile: Recompile) -> type:
    """Return a subclass of `cls` by the same name whose instances are compiled: a module's forward, another's
    __call__. Raise NotCallableError for a class without such a method."""
    name = "forward" if issubclass(cls, nn.Module) else "__call__"
    method = next((vars(c)[name] for c in cls.__mro__ if name in vars(c)), None)
    if method is None:
        raise NotCallableError(got=cls.__name__)
    body = {n: getattr(cls, n) for n in ("__module__", "__qualname__", "__doc__")} | {name: recompile(method)}
    return types.new_class(cls.__name__, (cls,), {}, lambda space: space.update(body))


def plan_of(compiled: object) -> Plans:
    """Return the plans of a compiled module or function, also of a module that has a `plan` of its own."""
    return compiled.plan if isinstance(compiled, CompiledFunction) else compiled._fusion_plans  # type: ignore[attr-defined]


def _compiled_forward(compiling: Compiling, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a module's forward, compiled without the results that are to be left out."""
    if not (omit := compiling.omit):
        return compiling.compiled(forward)
    run = compiling.compiled(omitting(forward, omit))

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = run(self, *args, **kwargs)
        if self.training and torch.is_grad_enabled() and (reason := kept_of(result, omit)):
            compiling.kept(reason)
        return result

    return functools.update_wrapper(call, forward)


def _compiled_module(model: nn.Module, compiling: Compiling, recompile: Recompile) -> nn.Module:
    original, plans = type(model), compiling.plans

    def compiled_method(method: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # A replica that another library made has tensors of its own. Others compile no identities.
            uses_self = torch.compiler.is_dynamo_compiling() or self.__dict__ is not model.__dict__
            return run(self if uses_self else model, *args, **kwargs)

        return call

    @functools.cache
    def forward_of(forward: Callable[..., Any] | None) -> Callable[..., Any]:
        called = original.forward if forward is None else lambda _, *args, **kwargs: forward(*args, **kwargs)
        return compiled_method(original.forward, _compiled_forward(compiling, called))

    # An instance's forward, as other libraries set it, goes before the class's: the present one.
    present = property(
        lambda self: types.MethodType(forward_of(vars(self).get("forward")), self),
        lambda self, value: vars(self).update(forward=value),
        lambda self: vars(self).pop("forward", None),
    )
    report = functools.partial(compiling.missed, original.__name__)
    methods = {name: watched(f, lambda: plans.called, report) for name, f in other_methods(original)}
    for name in compiled_methods(model):
        methods[name] = compiled_method(getattr(original, name), compiling.compiled(getattr(original, name)))
    body: dict[str, Any] = {
        **methods,
        **_added(model, plans),
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "forward": present if "forward" in vars(model) else forward_of(None),
        "_fusion_model": model,
        "_fusion_plans": plans,
        "_fusion_recompile": staticmethod(recompile),
    }
    cls = types.new_class(original.__name__, (CompiledModule, original), {}, lambda space: space.update(body))
    fast: nn.Module = object.__new__(cls)
    fast.__dict__ = model.__dict__
    return fast


def _added(model: nn.Module, plans: Plans) -> dict[str, Any]:
    """Return the attributes that a compiled module has besides its model's, where these have other names."""
    attributes: dict[str, Any] = {
        "plan": property(lambda self: plans, doc=Plans.__doc__),
        "report": CompiledFunction.report,  # it answers from the plans of either
        "why": CompiledFunction.why,
        "verification": property(lambda self: plans.verification, doc=Verification.__doc__),
    }
    added = {name: value for name, value in attributes.items() if not hasattr(model, name)}
    if hasattr(model, "get_compiled_call"):
        # transformers' generate() would hand the call to Inductor where its cache is static.
        added["get_compiled_call"] = lambda self, config: self.__call__
    return added


def _own_frame(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` behind a code object that nothing else has."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    name = getattr(function, "__name__", "call")
    framed = types.FunctionType(
        call.__code__.replace(co_name=name), call.__globals__, name, call.__defaults__, call.__closure__
    )
    # Without its attributes: torch.compile keeps what it knows of a function in them.
    return functools.update_wrapper(framed, function, updated=()) if hasattr(function, "__name__") else framed


def _is_uncaptured(error: Exception) -> bool:
    """True if TorchDynamo raised `error` while it captured the outermost frame of a call: nothing has run."""
    stack = getattr(error, "real_stack", None)
    if not stack or not hasattr(error, "compile_id"):
        return False
    return stack[0].filename == __file__ and not stack[0].name.startswith("torch_dynamo_resume")


def _operator_error(error: Exception) -> Exception:
    """Return the error that an operator raised for FakeTensors, which TorchDynamo wraps, or `error`."""
    wrapped = error.__context__ if isinstance(error, TorchRuntimeError) else None
    while wrapped is not None and wrapped.__cause__ is None:  # one more since PyTorch 2.15
        wrapped = wrapped.__context__
    return wrapped.__cause__ if wrapped is not None and isinstance(wrapped.__cause__, Exception) else error


def _rebuild(recompile: Recompile, plain: Any) -> Any:
    return recompile(plain)
