"""The options of compile(): one frozen record, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, TypedDict, get_args

import torch

from fusion_compiler.errors import (
    ContradictoryOptionsError,
    InvalidOptionError,
    UnknownOptionError,
    closest,
)
from fusion_compiler.ir.device import device_spec

Backend = Literal["auto", "interpret", "eager"]
BACKENDS: tuple[str, ...] = get_args(Backend)
When = Literal["step", "backward", "forward", "auto"]  # when an optimizer's parameters are updated
Numerics = Literal["float32", "eager"]
NUMERICS: tuple[str, ...] = get_args(Numerics)
Products = Literal["auto", "measured", "always"]
PRODUCTS: tuple[str, ...] = get_args(Products)
Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
# Names of torch.compile for sets of these options.
MODES: dict[str | None, dict[str, object]] = {
    None: {},
    "default": {},
    "reduce-overhead": {"cudagraphs": True},
    "max-autotune": {"cudagraphs": True, "tune": "all"},
    "max-autotune-no-cudagraphs": {"cudagraphs": False, "tune": "all"},
}
Rounding = Literal["nearest", "stochastic"]  # how an optimizer's update rounds bfloat16 parameters
A_FEW, ALL = 4, 1000  # numbers of schedules of a cluster; no kind of schedules has as many as ALL


@dataclass(frozen=True)
class Options:
    """Options are the arguments of compile() besides the model.

    backend: "auto" (Triton on GPUs, each cluster's fx subgraph on CPUs), "interpret" (Triton's
        interpreter, on CPU tensors), "eager" (fx subgraphs everywhere).
    numerics: "float32" inside clusters, or "eager" to round where eager rounds.
    dynamic: None (a second size makes that dimension symbolic), True or False, as torch.compile's.
    verify: run each kernel beside its cluster's fx subgraph on the first call and keep an error table; if
        no kernels run, a warning says so.
    strict: raise if a part would otherwise run eager: a graph break, an operator that no kernel computes
        (library calls aside: passes/fuse/library.py), numbers or a device that no kernel takes, a failed
        kernel.
    fullgraph: a graph break is an error, as torch.compile's.
    device: a DeviceSpec's name to plan for; None is the tensors' own device.
    tune: True times, on the device, the four schedules per distinct cluster that look best, and up to twelve
        more of products that start while other kernels run; schedules that come close are timed again within
        a recorded graph of inference. Clusters with less than half a per cent of their graph's time are not
        timed. "all" times every schedule in the schedule space, of every cluster. False takes the cost
        model's first.
    cudagraphs: record graphs as CUDA graphs at their second call, inference in each of its sizes, and replay
        them later.
        "auto": those whose launches can take longer than the launched kernels; the caller owns the results;
        True: all, and results are overwritten by the next step's (see runtime/cuda_graphs.py).
    graph_memory: the most that CUDA graphs keep between calls with cudagraphs="auto": a share, from 0.0 to
        1.0, of the device memory that is free when they are recorded, or a number of bytes.
    dependent_launch: start kernels of one graph while those before them end, so that they load weights
        meanwhile: "auto" in inference if they are short, True in all inference, on NVIDIA from sm_90 on.
    memory: a limit for the peak of a backward pass, arguments aside: "fast" for the use that costs almost no
        time, a fraction of that (0.0 to 1.0), or bytes. Fewer values are saved then, and others computed
        again, until an estimate is within the limit; if none is, the least is taken, and the plan says so.
    products: matrix products with many rows in one kernel with the ops after them: "auto" where that was
        measured to be faster, on devices with measurements; "measured" on any device;
        "always" wherever it is possible. Without a GPU predictions decide.
    progress: show on a terminal what a compilation that takes longer than a second is doing.
    disable: names of passes to leave out, as `fusion-compiler passes` lists them.
    omit: names of fields of a module's result that are None in training, beside its `loss`, such as
        ("logits",): then a loss of large logits runs in chunks, also within a Trainer (docs/losses.md).

    Raises InvalidOptionError or UnsupportedDeviceError for a value out of range.
    """

    backend: Backend = "auto"
    numerics: Numerics = "float32"
    dynamic: bool | None = None
    verify: bool = False
    strict: bool = False
    fullgraph: bool = False
    device: str | None = None
    tune: bool | Literal["all"] = True
    cudagraphs: bool | Literal["auto"] = "auto"
    graph_memory: float | int = 0.125
    dependent_launch: bool | Literal["auto"] = "auto"
    memory: float | int | Literal["fast"] = "fast"
    products: Products = "auto"
    progress: bool = True
    disable: tuple[str, ...] = ()
    omit: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for option, allowed in (("backend", BACKENDS), ("numerics", NUMERICS), ("products", PRODUCTS)):
            value = getattr(self, option)
            if value not in allowed:
                raise InvalidOptionError(option=option, value=value, expected="one of " + ", ".join(allowed))
        for option in ("cudagraphs", "dependent_launch"):
            value = getattr(self, option)
            if value not in (True, False, "auto"):
                raise InvalidOptionError(option=option, value=value, expected='True, False or "auto"')
        for option in ("verify", "strict", "fullgraph", "progress"):
            value = getattr(self, option)
            if not isinstance(value, bool):
                raise InvalidOptionError(option=option, value=value, expected="True or False")
        if self.tune not in (True, False, "all"):
            raise InvalidOptionError(option="tune", value=self.tune, expected='True, False or "all"')
        if self.dynamic not in (None, True, False):
            raise InvalidOptionError(option="dynamic", value=self.dynamic, expected="None, True or False")
        if not _is_share(self.graph_memory):
            expected = "a share of the free memory from 0.0 to 1.0, or a number of bytes"
            raise InvalidOptionError(option="graph_memory", value=self.graph_memory, expected=expected)
        if not _is_budget(self.memory):
            expected = '"fast", a fraction from 0.0 to 1.0, or a number of bytes above 1'
            raise InvalidOptionError(option="memory", value=self.memory, expected=expected)
        for option, names in (("disable", "passes"), ("omit", "fields of the model's result")):
            value = getattr(self, option)
            if isinstance(value, str):
                raise InvalidOptionError(option=option, value=value, expected=f"a tuple of names of {names}")
            object.__setattr__(self, option, tuple(value))
        if self.device is not None:
            _check_device(self.device)

    @property
    def schedules(self) -> int:
        """Return how many schedules of a cluster are emitted."""
        return ALL if self.tune == "all" else A_FEW

    @classmethod
    def of(cls, *, mode: str | None = None, **options: object) -> Options:
        """Return options from keyword arguments; mode: one of MODES, which sets several of them at once.

        Raises UnknownOptionError for a name that is no option, InvalidOptionError for `options`, which only
        torch.compile takes, and ContradictoryOptionsError if an option differs from the mode's.
        """
        if mode not in MODES:
            expected = "one of " + ", ".join(name for name in MODES if name)
            raise InvalidOptionError(option="mode", value=mode, expected=expected)
        for option, value in MODES[mode].items():
            if options.setdefault(option, value) != value:
                raise ContradictoryOptionsError(
                    mode=mode, option=option, means=value, given=options[option]
                )
        names = [*(field.name for field in fields(cls)), "mode"]
        if "options" in options:
            expected = "as keyword arguments: compile(model, **options)"
            raise InvalidOptionError(option="options", value=options["options"], expected=expected)
        for option in options:
            if option not in names:
                raise UnknownOptionError(
                    option=option, suggestion=closest(option, names), known=", ".join(names)
                )
        return cls(**options)  # pyright: ignore[reportArgumentType]  __post_init__ checks the values


class OptionArguments(TypedDict, total=False):
    """The fields of `Options` as keyword arguments, for type checkers and editors."""

    backend: Backend
    numerics: Numerics
    dynamic: bool | None
    verify: bool
    strict: bool
    fullgraph: bool
    device: str | None
    tune: bool | Literal["all"]
    cudagraphs: bool | Literal["auto"]
    graph_memory: float | int
    dependent_launch: bool | Literal["auto"]
    memory: float | int | Literal["fast"]
    products: Products
    progress: bool
    disable: tuple[str, ...]
    omit: tuple[str, ...]


def _check_device(device: str) -> None:
    """Raise UnsupportedDeviceError for an unknown name, and InvalidOptionError for a CPU or an absent GPU."""
    kind, _, index = str(device).partition(":")
    if kind in ("cpu", "meta") or (kind == "cuda" and int(index or 0) >= torch.cuda.device_count()):
        reason = f"this machine has no device {device}" if kind == "cuda" else "kernels are made for GPUs"
        expected = f"the name of the GPU to plan for, such as 'h200': {reason}"
        raise InvalidOptionError(option="device", value=str(device), expected=expected)
    device_spec(device)


def _is_budget(value: object) -> bool:
    if isinstance(value, float):
        return 0.0 <= value <= 1.0
    return value == "fast" or (isinstance(value, int) and value > 1)


def _is_share(value: object) -> bool:
    if isinstance(value, float):
        return 0.0 <= value <= 1.0
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
