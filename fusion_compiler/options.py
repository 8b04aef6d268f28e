"""The options of compile(): one frozen record, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """What compile() takes besides the model.

    backend: "auto" (Triton on GPUs, each cluster's fx subgraph on CPUs), "interpret" (Triton's
        interpreter, on CPU tensors), "eager" (fx subgraphs everywhere).
    numerics: "float32" inside clusters, or "eager" to round where eager rounds.
    dynamic: None (a second size makes that dimension symbolic), True or False, as torch.compile's.
    verify: run each cluster beside its fx subgraph on the first call and keep an error table.
    strict: raise where a part would otherwise run eager.
    device: a DeviceSpec's name to plan for; None is the tensors' own device.
    tune: time up to four schedules per distinct cluster on the device; off takes the model's first.
    """

    backend: str = "auto"
    numerics: str = "float32"
    dynamic: bool | None = None
    verify: bool = False
    strict: bool = False
    fullgraph: bool = False
    device: str | None = None
    tune: bool = True
