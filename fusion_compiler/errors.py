"""Every error and warning of the compiler; each says what happened, where, and what to do next.

An error is a class with a message template; raising one fills the template in. `where` is the user's source
line if the compiler can tell it. Each class lists the fields that its template takes.
"""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable
from typing import ClassVar, Protocol, runtime_checkable

GENERATED = "torch.fx graph"  # stands for the file of code that torch.fx printed, which no file holds


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or the name of its class if it has no text."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def is_generated(file: str) -> bool:
    """True if a file is the name that torch.fx gives to the code of a graph."""
    return file.startswith("<eval_with_key>")


@runtime_checkable
class Located(Protocol):
    """A `Located` object is a place in the user's model (dag.Source is one)."""

    @property
    def module(self) -> str: ...
    @property
    def file(self) -> str: ...
    @property
    def line(self) -> int: ...
    @property
    def code(self) -> str: ...


def describe(where: object) -> str:
    """Return a place as one line, `file:line: code  (in module)`; return anything else as str() does."""
    if not isinstance(where, Located):
        return str(where)
    text = f"{where.file}:{where.line}"
    if where.code:
        text += f": {where.code.strip()}"
    return f"{text}  (in {where.module})" if where.module else text


class FusionError(Exception):
    """Every error derives from this class. Subclasses set `template` (fields in braces) and `next_step`."""

    template: ClassVar[str] = "{detail}"
    next_step: ClassVar[str] = ""

    def __init__(self, where: object = None, **fields: object) -> None:
        self.where = where
        self.fields = fields
        text = self.template.format(**fields)
        if where is not None:
            text += f"\n  at {describe(where)}"
        if self.next_step:
            text += f"\n  what to do: {self.next_step.format(**fields)}"
        super().__init__(text)

    def __reduce__(self) -> tuple[object, ...]:
        # The default would call the class with the finished text as `where`; errors cross
        # process boundaries when kernels compile in parallel.
        return _rebuild, (type(self), self.where, self.fields)


def _rebuild(cls: type[FusionError], where: object, fields: dict[str, object]) -> FusionError:
    return cls(where, **fields)


class NotCallableError(FusionError, TypeError):
    """compile() got no model. Fields: got (a type's name)."""

    template = "compile() takes an nn.Module or a function, not {got}"
    next_step = "pass the model itself, not its output, class or state_dict"


class ExportedProgramError(NotCallableError):
    """compile() got an exported program, which cannot be called itself."""

    template = "compile() takes an nn.Module or a function, not an ExportedProgram"
    next_step = "compile its module: compile(program.module())"


class TorchScriptError(FusionError, TypeError):
    """The model is scripted or traced code. Fields: model (a type's name)."""

    template = "a {model} has no Python code to capture"
    next_step = "compile the nn.Module that it was scripted or traced from"


class ArgumentMismatchError(FusionError, TypeError):
    """Example arguments do not fit the model. Fields: model, detail."""

    template = "the example arguments do not fit {model}: {detail}"
    next_step = "pass the arguments with which the model itself would be called"


class NotExportableError(FusionError, RuntimeError):
    """torch.export cannot take a model as one graph. Fields: model, detail."""

    template = "torch.export cannot export {model} as one graph: {detail}"
    next_step = "change the code that torch.export refuses, or use PyTorch's PipelineStage by hand"


class MachinesError(FusionError, ValueError):
    """Machines, links or cuts do not fit each other or the model. Fields: detail, todo."""

    template = "{detail}"
    next_step = "{todo}"


class OtherGraphError(FusionError, ValueError):
    """A plan is used for a graph that it was not made from. Fields: node."""

    template = "the plan belongs to another graph: {node} differs or is missing"
    next_step = "export the same model with arguments of the same shapes, or call fc.partition again"


class UnknownOptionError(FusionError, TypeError):
    """An option does not exist. Fields: option, suggestion (from `closest`), known."""

    template = "unknown option {option!r}{suggestion}"
    next_step = "the options are {known}"


class InvalidOptionError(FusionError, ValueError):
    """An option has an invalid value. Fields: option, value, expected."""

    template = "option {option}={value!r} is not valid"
    next_step = "give {option} {expected}"


class ContradictoryOptionsError(FusionError, ValueError):
    """An option differs from the mode's. Fields: mode, option, means (the mode's value), given."""

    template = "mode={mode!r} sets {option}={means!r}, but {option}={given!r} is passed as well"
    next_step = "leave out {option}, or the mode; docstring and README say what each mode means"


class InvalidPatternError(FusionError, TypeError):
    """A pattern has the wrong form. Fields: pattern, detail."""

    template = "pattern {pattern} has the wrong form: {detail}"
    next_step = "write it as the torch code that it matches; docs/patterns.md shows each sort"


class PredicateError(InvalidPatternError):
    """A `where=` raises. Fields: pattern, detail."""

    template = "the where= of pattern {pattern} raises {detail}"
    next_step = (
        "accept one value per argument of the pattern (for a tensor an object with shape, stride, dtype, "
        "device, origin and requires_grad; for a number the number), and return True or False"
    )


class RewriteNotEqualError(FusionError, ValueError):
    """A rewrite's two sides differ. Fields: pattern, what (output or gradient), counterexample, error."""

    template = (
        "the replacement of pattern {pattern} does not equal the pattern: {what} differs by {error}\n"
        "  counterexample: {counterexample}"
    )
    next_step = (
        "correct the replacement, or narrow the pattern; if the model never has such numbers, pass "
        "domain='finite' or domain=(low, high)"
    )


class PatternConflictError(FusionError, ValueError):
    """Two patterns claim one op with the same precedence. Fields: first, second, op."""

    template = "patterns {first} and {second} both claim op {op}"
    next_step = "remove one of them, or order them in one tuple: the first wins"


class UnknownOpError(FusionError, LookupError):
    """A name is in no plan. Fields: name, suggestion (from `closest`)."""

    template = "no op, cluster, module or source line is called {name!r}{suggestion}"
    next_step = "name an op or a cluster as the report prints it, a module, or a place such as model.py:12"


class MissingPackageError(FusionError, ImportError):
    """A package is not installed. Fields: package, what (needs it)."""

    template = "{what} needs the package {package}, which is not installed"
    next_step = "pip install {package}"


class UnsupportedDeviceError(FusionError, ValueError):
    """A device has no kernels. Fields: device, known."""

    template = "device {device!r} has no kernels"
    next_step = "use CUDA, ROCm or CPU tensors, or plan for one of {known}"


class UnsupportedDtypeError(FusionError, TypeError):
    """A dtype has no kernels. Fields: op, dtype."""

    template = "no kernel supports {dtype} (op {op})"
    next_step = "cast to a real floating-point, integer or bool dtype; strict=False runs this part eager"


class GraphBreakError(FusionError, RuntimeError):
    """TorchDynamo cannot capture some code. Fields: reason, todo."""

    template = "TorchDynamo breaks the graph: {reason}"
    next_step = "{todo}"


class EagerOperatorError(FusionError, RuntimeError):
    """No kernel computes an operator. Fields: op, reason, others (how many there are, "" for none)."""

    template = "{op} would run eager: {reason}{others}"
    next_step = (
        "use another operator, or supply a kernel with fc.user_kernel (docs/patterns.md); "
        "strict=False runs the operator eager, and the plan lists it"
    )


class EagerDeviceError(FusionError, RuntimeError):
    """No kernel runs on a graph's device. Fields: device."""

    template = "the graph is on {device}: its clusters run as ATen ops, one by one"
    next_step = "move the model to a GPU, or run the kernels here with backend='interpret'"


class EagerMethodError(FusionError, RuntimeError):
    """A method of a compiled module trains it without a compiled graph. Fields: model, method."""

    template = "{model}.{method}() is not compiled: only {model}.forward() is, which was never called"
    next_step = (
        "call the module that compile() returned, or compile this method: "
        "model.{method} = compile(model.{method})"
    )


class OmittedFieldError(FusionError, ValueError):
    """A module's result does not have the fields that are to be left out. Fields: omit, reason."""

    template = "omit={omit!r} leaves nothing out: {reason}"
    next_step = "name fields of a dict or a dataclass that also has a loss (return_dict=True returns one)"


class MissingTritonError(FusionError, ImportError):
    """Triton cannot be imported. Fields: detail."""

    template = "Triton cannot be imported: {detail}"
    next_step = "pip install 'triton>=3.6', or compile(..., backend='eager')"


class CacheError(FusionError, OSError):
    """The cache on disk cannot be used. Fields: path, detail."""

    template = "the cache at {path} cannot be used: {detail}"
    next_step = "set FUSION_CACHE_DIR to a writable directory"


class ReportSchemaError(FusionError, ValueError):
    """A report has another version's schema. Fields: got, known."""

    template = "the report has schema {got}, but this page shows schema {known}"
    next_step = "create the report again with fc.explain(...), or open it with the version that created it"


class DoubleBackwardError(FusionError, RuntimeError):
    """Compiled code returned gradients to the caller, who then differentiated them."""

    template = "gradients that compiled code computed cannot be differentiated again"
    next_step = (
        "take the inner gradient inside the function that is compiled, by torch.func.grad(f)(x) or "
        "torch.autograd.grad(y, x, create_graph=True), and compile that function instead of the model in it"
    )


class LostRecordError(FusionError, RuntimeError):
    """A recurrent layer's saved state was replaced before its backward pass. Fields: layer."""

    template = (
        "the dropout masks of {layer} were lost between forward and backward: its saved tensors were replaced"
    )
    next_step = (
        "run the model without torch.autograd.graph.save_on_cpu and saved_tensors_hooks, or with dropout=0"
    )


class StageLostError(FusionError, RuntimeError):
    """A process of a pipeline has ended or hangs. Fields: stage (its name), reason."""

    template = "the pipeline has lost {stage}: {reason}"
    next_step = "start all processes again; runner.resume(folder) continues from the last checkpoint"


class StageMissingError(FusionError, RuntimeError):
    """A process of a pipeline does not come to the start. Fields: rank, seconds."""

    template = "process {rank} of the pipeline did not start within {seconds} s"
    next_step = "read the error of that process, or pass a longer start_s="


class StagesDisagreeError(FusionError, ValueError):
    """Two processes would run different pipelines. Fields: what, first, second (ranks), one, two (values)."""

    template = "processes {first} and {second} disagree about {what}: {one} and {two}"
    next_step = "run the same script, with the same versions and the same plan, in every process"


class PipelineArgumentError(FusionError, ValueError):
    """The arguments of a pipeline do not fit its plan or its processes. Fields: detail."""

    template = "the pipeline cannot run: {detail}"
    next_step = "compare the call with examples/machines.py, a script that runs"


class KernelError(FusionError, RuntimeError):
    """A kernel fails to compile or to launch. Fields: kernel, action ("compile", "launch"), detail."""

    template = "kernel {kernel} failed to {action}: {detail}"
    next_step = "report it with the source from FUSION_DUMP=dir; strict=False runs this part eager"


class IndexRangeError(FusionError, IndexError, RuntimeError):
    """An index that is data is out of range. Eager raises an IndexError or a RuntimeError.

    Fields: what (an op and its place), value, low, high.
    """

    template = "{what}: index {value} is not in [{low}, {high})"
    next_step = "correct the tensor of indices; eager execution raises as well"


class UserKernelError(KernelError):
    """A user's kernel computes something other than its pattern. Fields: kernel, detail."""

    template = "the user's kernel {kernel} does not compute what its pattern does: {detail}"
    next_step = "correct run= or backward= of the pattern, or exclude such arguments with where="


class HardwareExceededError(KernelError):
    """A kernel exceeds a limit of the device. Fields: kernel, resource, needed, available, device."""

    template = "kernel {kernel} needs {needed} of {resource}, but {device} has {available}"
    next_step = "report it with the source from FUSION_DUMP=dir; strict=False runs this part eager"


class InternalError(FusionError, RuntimeError):
    """The compiler has a fault. Fields: graph, detail, place (in the compiler)."""

    template = "{graph} could not be compiled: {detail}  ({place})"
    next_step = "report it, with the traceback that strict=True shows"


class EagerGraphError(FusionError, RuntimeError):
    """A graph cannot be compiled and runs eager; the reasons are subclasses. Fields: detail."""

    next_step = "strict=False runs it eager"


class ArgumentKindError(EagerGraphError):
    """Kernels cannot read an argument's values from its memory. Fields: argument, kind (of argument)."""

    template = "a graph is not compiled: {argument} {kind}"
    next_step = (
        "pass plain tensors (x.clone(), x.resolve_neg()), or put the transform inside the compiled function"
    )


class SubclassViewError(EagerGraphError):
    """A result is a view of an argument of a wrapper subclass. Fields: argument."""

    template = "a graph is not compiled: it returns a view of {argument}, a tensor subclass"
    next_step = "return a copy (x.clone()), or take the view outside of the compiled function"


class LostBackwardError(EagerGraphError):
    """TorchDynamo loses the backward of a custom autograd.Function. Fields: function, what, instead."""

    template = "TorchDynamo would lose the backward of {function}, which {what}"
    next_step = "{instead}"


class NotCompiledError(FusionError, TypeError):
    """An object is not the result of compile(). Fields: got (a type's name)."""

    template = "profile() takes the result of compile(), not {got}"
    next_step = "fast = fusion_compiler.compile(model), then profile(fast, *args)"


class NothingToProfileError(FusionError, RuntimeError):
    """No compiled graph ran in a step. Fields: model."""

    template = "no compiled graph of {model} ran in the step that was profiled"
    next_step = "print(compiled.plan) says why no graph was captured"


class ReplayedGraphError(FusionError, RuntimeError):
    """A CUDA graph launches kernels together. Fields: launch (the call that started it)."""

    template = "the step runs as a CUDA graph ({launch}): its kernels cannot be told apart"
    next_step = "compile the model without cudagraphs=True, and profile it outside of CUDA graphs of your own"


class NotAnOptimizerError(FusionError, TypeError):
    """fuse_optimizer() got no optimizer. Fields: got (a type's name)."""

    template = "fuse_optimizer() takes a torch.optim.Optimizer, not {got}"
    next_step = "fusion_compiler.fuse_optimizer(model, torch.optim.AdamW(model.parameters()))"


class OptimizerStepError(FusionError, RuntimeError):
    """A step cannot be fused as requested. Fields: optimizer (a type's name), detail, todo."""

    template = "the step of {optimizer} cannot be fused: {detail}"
    next_step = "{todo}"


class PartialStepError(FusionError, RuntimeError):
    """A backward pass that updates parameters ended in an error. Fields: updated, waiting (names)."""

    template = (
        "a backward pass ended in an error after it had updated some parameters: {updated}\n"
        "  it has not updated these: {waiting}"
    )
    next_step = (
        "load the last checkpoint, or call zero_grad() and continue: the updates stay, and the next backward "
        "pass begins a new step"
    )


class TargetError(FusionError, ValueError):
    """A FILE:callable does not name a function that returns a model and arguments. Fields: target, detail."""

    template = "{target} cannot be used: {detail}"
    next_step = (
        "give FILE.py:function or package.module:function, a function without arguments that returns "
        "(model, args) or (model, args, kwargs)"
    )


class UserCodeError(FusionError, RuntimeError):
    """The user's own code failed. Fields: what, detail, todo."""

    template = "{what} failed: {detail}"
    next_step = "{todo}; FUSION_DEBUG=1 shows the whole traceback"


class OutputError(FusionError, OSError):
    """A file cannot be written. Fields: path, detail."""

    template = "{path} cannot be written: {detail}"
    next_step = "name a file in a folder that exists and may be written to"


class FusionWarning(UserWarning):
    """Code runs eager that could have been fused; the text has the place, the reason and the next step."""


def closest(name: str, names: Iterable[str]) -> str:
    """Return the question "did you mean 'x'?" about the most similar of `names`, or ""."""
    match = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {match[0]!r}?" if match else ""


_MACHINERY = frozenset({"fusion_compiler", "torch", "contextlib", "functools", "threading", "concurrent"})


def user_frame() -> tuple[str, int]:
    """Return (file, line) of the innermost frame outside the compiler, PyTorch and the code of fx graphs."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_globals.get("__name__", "")
        if name.partition(".")[0] not in _MACHINERY and not is_generated(frame.f_code.co_filename):
            break
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


class WarnOnce:
    """Warn once for each key. Every compilation owns one; `of_process` is shared by all of them.

    strict: `fall_back` raises instead of warning.
    """

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self._seen: dict[str, object] = {}

    def warn(self, key: str, message: str, where: object = None) -> bool:
        """Warn unless `key` was warned of before; return True if it warned.

        The warning is shown at the user's line: that of `where` if it has one, else that of the
        innermost caller outside the compiler and PyTorch.
        """
        token = object()
        if self._seen.setdefault(key, token) is not token:  # one atomic step: kernels compile in threads
            return False
        if isinstance(where, Located) and where.file != GENERATED:
            file, line = where.file, where.line
        else:
            file, line = user_frame()
        try:
            warnings.warn_explicit(message, FusionWarning, file, line)
        except FusionWarning:  # a filter makes it an error, which every model raises
            self._seen.pop(key, None)
            raise
        return True

    def fall_back(self, key: str, error: FusionError) -> None:
        """Warn once that a part runs eager because of `error`, or raise it if strict."""
        if self.strict:
            raise error
        self.warn(key, f"{error}\n  this part runs eager", error.where)


of_process = WarnOnce()  # for warnings about the machine, whatever model is compiled
