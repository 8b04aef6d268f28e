"""The options of compile(): one frozen record, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass, fields

from fusion_compiler.device import device_spec
from fusion_compiler.errors import InvalidOptionError, UnknownOptionError, closest

BACKENDS = ("auto", "interpret", "eager")
NUMERICS = ("float32", "eager")


@dataclass(frozen=True)
class Options:
    """What compile() takes besides the model.

    backend: "auto" (Triton on GPUs, each cluster's fx subgraph on CPUs), "interpret" (Triton's
        interpreter, on CPU tensors), "eager" (fx subgraphs everywhere).
    numerics: "float32" inside clusters, or "eager" to round where eager rounds.
    dynamic: None (a second size makes that dimension symbolic), True or False, as torch.compile's.
    verify: run each cluster beside its fx subgraph on the first call and keep an error table.
    strict: raise where a part would otherwise run eager: a graph break, an operator that no kernel computes
        (but for library calls, see passes/library.py), numbers or a device that none takes, a failed kernel.
    fullgraph: a graph break is an error, as torch.compile's.
    device: a DeviceSpec's name to plan for; None is the tensors' own device.
    tune: time up to four schedules per distinct cluster on the device; off takes the model's first.
    cudagraphs: record each graph of static sizes as a CUDA graph at its second call and replay it later;
        its results are overwritten by the next step's (see cuda_graphs.py).
    progress: show on a terminal what a compilation that takes longer than a second is doing.

    Raises InvalidOptionError or UnsupportedDeviceError for a value out of range.
    """

    backend: str = "auto"
    numerics: str = "float32"
    dynamic: bool | None = None
    verify: bool = False
    strict: bool = False
    fullgraph: bool = False
    device: str | None = None
    tune: bool = True
    cudagraphs: bool = False
    progress: bool = True

    def __post_init__(self) -> None:
        for option, allowed in (("backend", BACKENDS), ("numerics", NUMERICS)):
            value = getattr(self, option)
            if value not in allowed:
                raise InvalidOptionError(option=option, value=value, expected="one of " + ", ".join(allowed))
        for option in ("verify", "strict", "fullgraph", "tune", "cudagraphs", "progress"):
            value = getattr(self, option)
            if not isinstance(value, bool):
                raise InvalidOptionError(option=option, value=value, expected="True or False")
        if self.dynamic not in (None, True, False):
            raise InvalidOptionError(option="dynamic", value=self.dynamic, expected="None, True or False")
        if self.device is not None:
            device_spec(self.device)

    @classmethod
    def of(cls, **options: object) -> Options:
        """Options from keyword arguments. Raises UnknownOptionError for a name that is none of them."""
        known = [field.name for field in fields(cls)]
        for option in options:
            if option not in known:
                raise UnknownOptionError(
                    option=option, suggestion=closest(option, known), known=", ".join(known)
                )
        return cls(**options)  # pyright: ignore[reportArgumentType]  __post_init__ checks the values
