"""`explain`, which makes the plans of compile() from FakeTensors, on any machine.

Nothing is computed: parameters and arguments are replaced by tensors without data on the GPU that is planned
for (capture/target.py), the model by a copy of its structure. A model that torch.fx traces whole
(capture/symbolic_trace.py) does not need TorchDynamo; any other is captured as compile() captures it, which
takes longer, and the explanation says why. If the model does something that TorchDynamo cannot capture
though it depends on no data (it writes a log), compile() makes two graphs where the explanation has one.
"""

from __future__ import annotations

import copy
import inspect
import logging
import re
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch._dynamo.exc import TorchRuntimeError
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fusion_compiler.capture.attention_choice import cudnn_version
from fusion_compiler.capture.fakes import FakesOnly
from fusion_compiler.capture.module import Compiling, Plans, check_callable, plain, wrap
from fusion_compiler.capture.pre_autograd import UntraceableError
from fusion_compiler.capture.symbolic_trace import symbolic_trace
from fusion_compiler.capture.target import GPU, capturing_for, name_device
from fusion_compiler.compiler.compiler import Compiler
from fusion_compiler.errors import ArgumentMismatchError, FusionError, NotCallableError
from fusion_compiler.ir.device import device_spec
from fusion_compiler.ir.graph_info import GraphInfo
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ir.plan_text import library_calls
from fusion_compiler.ops.decompositions.tensors import on_gpu
from fusion_compiler.options import Options
from fusion_compiler.patterns import DEFAULT_PATTERNS, Pattern
from fusion_compiler.report.report import Report


def explain(
    model: nn.Module | Callable[..., Any],
    *args: Any,
    device: str = "h200",
    patterns: Sequence[Pattern] = DEFAULT_PATTERNS,
    disable: Collection[str] = (),
    **kwargs: Any,
) -> Report:
    """Plan `model(*args, **kwargs)`, and its backward pass if it has one, without running anything.

    args, kwargs: as the model takes them; tensors on any device, also FakeTensors: only shapes, strides and
        dtypes count. If none is on a GPU, the plan is that of model and arguments moved to `device`.
        The backward pass starts from the scalars among the results (a loss), or from all results if none is
        a scalar.
    device: the DeviceSpec to plan for.
    disable: passes to leave out, as in `compile`.

    Raises NotCallableError, UnsupportedDeviceError, InvalidOptionError for a device that this machine does
    not have, InvalidPatternError, RewriteNotEqualError, and ArgumentMismatchError if the model does not take
    these arguments.
    """
    if inspect.isclass(model):
        raise NotCallableError(got=model.__name__)
    check_callable(model)
    options = Options.of(backend="eager", device=device, disable=disable)
    spec = device_spec(device)
    _check_signature(model, args, kwargs)
    # As compile() is lazy, it sees the fakes; a capture that is under way elsewhere must not.
    with quiet_fakes(), unset_fake_temporarily(), tracing(None), capturing_for(spec):
        places = _Places(_tensors_of(model, args, kwargs))
        first, second = (places.kept, places.moved) if places.on_gpu else (places.moved, places.on_cpu)
        try:
            return _report(model, args, kwargs, _Fakes(first), options, patterns)
        except ArgumentMismatchError as error:
            with suppress(ArgumentMismatchError):
                report = _report(model, args, kwargs, _Fakes(second), options, patterns)
                where = "the GPU" if places.on_gpu else "the CPU"
                return replace(
                    report, assumed=f"with all tensors on {where}, as else: {error.fields['detail']}"
                )
            raise


def _report(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    faked: _Fakes,
    options: Options,
    patterns: Sequence[Pattern],
) -> Report:
    device = str(options.device)
    with faked.everywhere(), faked.mode:
        copied = faked.model(model)
        fake_args, fake_kwargs = faked.values(args), faked.values(kwargs)
        try:
            compiler = _Planner(options, patterns, asked=True)
            plans = _plans_of_trace(copied, fake_args, fake_kwargs, compiler, faked.mode)
            return Report(_name(model), device, plans, assumed=_assumed(plans))
        except UntraceableError as error:
            reason = str(error)
        compiler = _Planner(options, patterns, asked=True)  # its graphs are numbered from 0
        fast = wrap(copied, Compiling(compiler.backend(), compiler.plans), recompile=plain)
        incomplete = ""
        try:
            _backward(fast(*fake_args, **fake_kwargs))
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            incomplete = f"what follows depends on data ({error.func})"
        except (TorchRuntimeError, TypeError, RuntimeError, IndexError) as error:
            raise ArgumentMismatchError(model=_name(model), detail=_reason(error)) from error
    plans = tuple(compiler.plans)
    breaks, assumed = compiler.plans.breaks, _assumed(plans)
    return Report(_name(model), device, plans, incomplete, reason, breaks=breaks, assumed=assumed)


def _assumed(plans: tuple[FusionPlan, ...]) -> str:
    """Name the libraries that the plans depend on and that this build of PyTorch does not have."""
    calls = (call.target for plan in plans for call in library_calls(plan))
    if cudnn_version() is None and any("cudnn_attention" in target for target in calls):
        return "with cuDNN 9.15.1 or later, which computes attention"
    return ""


def report_of(model: str, plans: Plans) -> Report:
    """Return the report of what was compiled so far. model: its name."""
    device = plans[0].device if plans else "nothing yet"
    return Report(model, device, tuple(plans), breaks=plans.breaks)


class _Planner(Compiler):
    """This Compiler takes graphs that are captured for a GPU."""

    def graph(self, gm: fx.GraphModule, inputs: Sequence[Any], info: GraphInfo) -> Callable[..., Any]:
        name_device(gm.graph)
        return super().graph(gm, inputs, info)


def _tensors_of(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors of a module, and those among the arguments."""
    module = plain(model)
    state = [*module.parameters(), *module.buffers()] if isinstance(module, nn.Module) else []
    return [*state, *(x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor))]


@contextmanager
def quiet_fakes() -> Generator[None]:
    """Hide the traceback that torch logs if an operator refuses FakeTensors; an error says the same."""
    log = logging.getLogger("torch._subclasses.fake_tensor")

    def others(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("failed while attempting to run meta")

    log.addFilter(others)
    try:
        yield
    finally:
        log.removeFilter(others)


def _plans_of_trace(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    compiler: Compiler,
    mode: FakeTensorMode,
) -> tuple[FusionPlan, ...]:
    """Return the plans of a model that torch.fx traces whole. Raises UntraceableError for others."""
    graph, inputs = symbolic_trace(model, args, kwargs, mode)
    try:
        with unset_fake_temporarily(), tracing(TracingContext(mode)):
            run = compiler.backend()(graph, inputs, traced=True)
        _backward(run(*inputs))
    except FusionError:
        raise
    except Exception as error:  # AOTAutograd may take in parts what it refuses as one graph
        raise UntraceableError(f"{type(error).__name__}: {_reason(error)}") from error
    return tuple(compiler.plans)


def _name(model: object) -> str:
    return getattr(model, "__name__", type(model).__name__)


def _reason(error: Exception) -> str:
    """Return the message of the operator that failed, without the explanations that Dynamo adds."""
    inner = re.search(r"got (\w+\(.*\))$", str(error), re.MULTILINE)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return inner[1] if inner else lines[0] if lines else type(error).__name__


def _check_signature(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    function = model.forward if isinstance(model, nn.Module) else model
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin: the call itself will tell
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ArgumentMismatchError(model=_name(model), detail=error) from error


class _Places:
    """A `_Places` chooses the device of each tensor that the model reaches; each method is one choice.

    tensors: those of the module and of the arguments.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.on_gpu = any(map(on_gpu, tensors))
        self._named = {id(tensor): tensor for tensor in tensors}

    def kept(self, tensor: Tensor) -> torch.device:
        """Return the tensor's own device; the GPU for a meta tensor."""
        return GPU if tensor.is_meta else tensor.device

    def moved(self, tensor: Tensor) -> torch.device:
        """Return the GPU, but the CPU for a single number there that is none of `tensors`.

        Module.to() leaves such a number, and so an optimizer's step count is on the CPU.
        """
        number = tensor.dim() == 0 and id(tensor) not in self._named
        return torch.device("cpu") if number and tensor.device.type == "cpu" else GPU

    def on_cpu(self, tensor: Tensor) -> torch.device:
        return torch.device("cpu")


class _Fakes(TorchFunctionMode):
    """Make one FakeTensor for each tensor, on the device that `place` returns; as a mode, also in copies."""

    def __init__(self, place: Callable[[Tensor], torch.device]) -> None:
        super().__init__()
        self.mode, self._place = FakesOnly(), place
        # id -> (original, fake); the original is kept so that no other tensor gets its id
        self._fake_of: dict[int, tuple[Tensor, Tensor]] = {}

    @contextmanager
    def everywhere(self) -> Generator[None]:
        """Give this object's FakeTensors to all code that asks for the FakeTensor of a tensor."""
        original = FakeTensorMode.from_tensor

        def from_tensor(mode: FakeTensorMode, tensor: Tensor, **options: Any) -> FakeTensor:
            strided = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
            return original(mode, self.tensor(tensor) if strided else tensor, **options)

        with patch.object(FakeTensorMode, "from_tensor", from_tensor):
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.tensor(args[0]) if func is Tensor.__deepcopy__ else func(*args, **(kwargs or {}))

    def model(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """Return a copy of a module, or of the object behind a method or a callable, with fake tensors; tied
        ones stay tied. A function, and an object that cannot be copied, is returned itself."""
        model = plain(model)
        tensors = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
        try:
            with self:
                return copy.deepcopy(model, {id(t): self.tensor(t) for t in tensors})
        except Exception:  # the object's own code may raise anything
            if isinstance(model, nn.Module):
                raise
            return model

    def values(self, values: Any) -> Any:
        return pytree.tree_map_only(Tensor, self.tensor, values)

    def tensor(self, tensor: Tensor) -> Tensor:
        """Return a fake tensor of the same shape, strides, dtype and gradient flag."""
        if id(tensor) not in self._fake_of:
            with torch.no_grad(), self.mode:
                fake: Tensor = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._place(tensor)
                )
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, tensor.requires_grad)
            elif tensor.is_floating_point():
                fake.requires_grad_(tensor.requires_grad)
            if tensor.is_leaf and tensor.grad is not None:  # optimizers read it
                fake.grad = self.tensor(tensor.grad)
            self._fake_of[id(tensor)] = (tensor, fake)
        return self._fake_of[id(tensor)][1]


def starts_of(results: Any) -> list[Tensor]:
    """Return the results from which a backward pass starts: the scalars (losses), or all if none is one."""
    live = [r for r in pytree.tree_leaves(results) if isinstance(r, Tensor) and r.requires_grad]
    return [r for r in live if r.dim() == 0] or live


def _backward(results: Any) -> None:
    """Plan the backward pass."""
    if starts := starts_of(results):
        torch.autograd.backward(starts, [torch.ones_like(r) for r in starts])
