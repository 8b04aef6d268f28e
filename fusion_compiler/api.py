"""The public functions: `compile`, and the backend for torch.compile. The pipeline that they start is
`compiler.compiler.Compiler`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar, Unpack, overload

import torch
from torch import fx, nn
from torch.optim import Optimizer

from fusion_compiler.capture.module import (
    CompiledFunction,
    Compiling,
    Plans,
    check_callable,
    compiled_class,
    plain,
    wrap,
)
from fusion_compiler.compiler.compiler import Compiler
from fusion_compiler.errors import (
    InvalidOptionError,
    TorchScriptError,
)
from fusion_compiler.options import Mode, OptionArguments, Options, When
from fusion_compiler.patterns import (
    DEFAULT_PATTERNS,
    Pattern,
)
from fusion_compiler.runtime.builds import prepare

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)
M = TypeVar("M", bound=nn.Module)


class Arguments(OptionArguments, total=False):
    """The keyword arguments of `compile`, for type checkers and editors."""

    patterns: Sequence[Pattern]
    mode: Mode | None
    optimizer: Optimizer | None
    when: When


class Decorator(Protocol):
    """`compile` without a model: a class stays that class, a module its type, a function its signature."""

    @overload
    def __call__(self, model: C) -> C: ...
    @overload
    def __call__(self, model: M) -> M: ...
    @overload
    def __call__(self, model: Callable[P, R]) -> CompiledFunction[P, R]: ...


@overload
def compile(model: None = None, **options: Unpack[Arguments]) -> Decorator: ...
@overload
def compile(model: C, **options: Unpack[Arguments]) -> C: ...
@overload
def compile(model: M, **options: Unpack[Arguments]) -> M: ...
@overload
def compile(model: Callable[P, R], **options: Unpack[Arguments]) -> CompiledFunction[P, R]: ...
def compile(
    model: nn.Module | Callable[..., Any] | None = None,
    *,
    patterns: Sequence[Pattern] = DEFAULT_PATTERNS,
    mode: Mode | None = None,
    optimizer: Optimizer | None = None,
    when: When = "step",
    **options: Unpack[OptionArguments],
) -> Any:
    """Compile a module or function; the result is called, trained and saved like the original.

    model: a module, a function or a class. If the model is compiled already, by this function or
        torch.compile, its original is compiled with these options instead. For a class, a subclass whose
        instances are compiled is returned. Without a model, a decorator with these options is returned.
    patterns: what to recognise and replace; the first match wins (`fusion_compiler.patterns`).
    mode: a name for several options, as in torch.compile (`options.MODES`).
    optimizer, when: an optimizer of the module, which is fused as by `fuse_optimizer(model, optimizer,
        when=when)` with this `backend` and `strict`; `.plan.optimizer` is the result. An optimizer that is
        fused already is fused anew. Copies of the compiled module have no optimizer.
    options: the fields of `Options`, such as `strict=True`; help(fc.Options) describes each.

    The returned module shares the model's parameters, buffers and mode; its `.plan` holds the FusionPlan of
    every graph captured so far. Compilation happens at the first call, and again for inputs that do not fit
    what was compiled.

    Raises NotCallableError, UnknownOptionError, InvalidOptionError, ContradictoryOptionsError,
    InvalidPatternError or RewriteNotEqualError at once, and the errors of `fuse_optimizer`.
    """
    chosen = Options.of(mode=mode, **options)
    recompile = functools.partial(compile, patterns=patterns, mode=mode, **options)
    if model is None:
        return functools.partial(recompile, optimizer=optimizer, when=when)
    model = plain(model)
    check_optimizer(model, optimizer, when)
    if inspect.isclass(model):
        return compiled_class(model, recompile)
    target = check_callable(model)
    if chosen.omit and not isinstance(model, nn.Module):
        expected = "with an nn.Module; a function returns its loss alone"
        raise InvalidOptionError(option="omit", value=chosen.omit, expected=expected)
    compiler = Compiler(chosen, patterns)
    if optimizer is not None and isinstance(model, nn.Module):
        from fusion_compiler.optimizer.fuse import fuse_anew  # where none is fused its modules are not read

        fused = fuse_anew(model, optimizer, when=when, backend=chosen.backend, strict=chosen.strict)
        compiler.plans.optimizer = fused
    if isinstance(model, torch.jit.ScriptModule):
        compiler.warned.fall_back("TorchScript", TorchScriptError(model=type(model).__name__))
        return model
    if chosen.backend == "auto" and torch.cuda.is_available():
        prepare()  # while the model is captured
    compiler.plans.reporter = functools.partial(report, getattr(model, "__name__", type(model).__name__))
    compiling = Compiling(
        compiler.backend(),
        compiler.plans,
        dynamic=chosen.dynamic,
        fullgraph=chosen.fullgraph,
        strict=chosen.strict,
        broke=compiler.broke,
        give_up=compiler.give_up,
        missed=compiler.missed,
        omit=chosen.omit,
        kept=compiler.kept,
    )
    return wrap(target, compiling, recompile)


def check_optimizer(model: object, optimizer: object, when: str) -> None:
    """Raise InvalidOptionError if there is no optimizer to fuse, or no module with the parameters."""
    if optimizer is None and when != "step":
        raise InvalidOptionError(option="when", value=when, expected="together with optimizer=")
    if optimizer is not None and not isinstance(model, nn.Module):
        expected = "with an nn.Module; for a function: fuse_optimizer(the module, optimizer)"
        raise InvalidOptionError(option="optimizer", value=type(optimizer).__name__, expected=expected)


def report(model: str, plans: Plans) -> Any:
    """Return the Report of the graphs of a model, given by its name, that were captured so far."""
    from fusion_compiler.report.explanation import report_of  # pages and questions are loaded when wanted

    return report_of(model, plans)


def dynamo_backend(gm: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """Compile a graph for `torch.compile(model, backend="fusion_compiler")`; options are as in `compile`."""
    settings = {**options.pop("options", {}), **options}
    patterns = settings.pop("patterns", DEFAULT_PATTERNS)
    chosen = Options.of(**settings)
    if chosen.omit:
        expected = "to fusion_compiler.compile(model): torch.compile calls the model itself"
        raise InvalidOptionError(option="omit", value=chosen.omit, expected=expected)
    return Compiler(chosen, patterns).backend()(gm, inputs)
