"""The kernels of one optimizer: one for each way that its step goes and each combination of dtypes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch.optim import Optimizer

from fusion_compiler.errors import FusionError
from fusion_compiler.optimizer.formula import Formula, Refused, Structure, trace
from fusion_compiler.optimizer.launch import Backend, MultiTensor
from fusion_compiler.optimizer.ready import Kind
from fusion_compiler.runtime.binding import Gpu

MOST_FORMULAS = 8  # ways that one structure's step may go; more are a number that the step made its own


class Kernels:
    """find(...) gives what updates parameters of a kind, traced and compiled when it is first needed."""

    def __init__(
        self,
        optimizer: Optimizer,
        backend: str,
        rounding: str,
        gpus: Callable[[torch.device | None], Gpu],
    ) -> None:
        self.optimizer, self.backend, self.rounding = optimizer, backend, rounding
        self.made: dict[tuple[Any, ...], MultiTensor] = {}
        self._gpus = gpus
        self._formulas: dict[Structure, list[Formula]] = {}
        self._refused: dict[Structure, str] = {}
        self._alike: dict[tuple[Structure, str], Formula] = {}
        self._failed: dict[tuple[Any, ...], Exception] = {}

    def backend_for(self, device: torch.device) -> Backend:
        """What updates parameters on a device. Raises Refused where nothing but the class's own step does."""
        if self.backend != "auto":
            return cast(Backend, self.backend)
        if device.type != "cuda":
            raise Refused(f"it is on {device}, and kernels run on GPUs (or with backend='interpret')")
        if torch.cuda.is_current_stream_capturing():
            raise Refused("a CUDA graph is captured, which would keep the numbers of this step")
        return "triton"

    def find(
        self, group: Mapping[str, Any], kind: Kind, aligned: bool, values: tuple[float, ...]
    ) -> MultiTensor:
        """values: of the floats and the counters. Raises Refused or KernelError where there is no kernel."""
        backend = self.backend_for(kind.device)
        formula = self._formula(group, kind.structure, values)
        key = (formula, kind.dtypes, kind.device, aligned)
        if key in self._failed:
            raise self._failed[key]
        if key not in self.made:
            name = type(self.optimizer).__name__.lower()
            try:
                self.made[key] = MultiTensor(
                    formula,
                    kind.dtypes,
                    kind.device,
                    backend,
                    name,
                    aligned,
                    self.rounding == "stochastic",
                    self._gpus,
                )
            except (Refused, FusionError) as error:
                self._failed[key] = error
                raise
        return self.made[key]

    def _formula(self, group: Mapping[str, Any], structure: Structure, values: tuple[float, ...]) -> Formula:
        if structure in self._refused:
            raise Refused(self._refused[structure])
        known = self._formulas.setdefault(structure, [])
        for formula in known:
            if formula.holds(*values):
                return formula
        try:
            if len(known) >= MOST_FORMULAS:
                raise Refused(
                    f"its step has gone {len(known)} different ways, by {known[-1].guards}; a number that it "
                    "hands to math.sqrt or the like is fixed in the kernel: x ** 0.5 is not"
                )
            made = trace(self.optimizer, group, structure, values)
            alike = replace(structure, shape=(), attributes=())
            known.append(self._alike.setdefault((alike, made.text), made))
        except Refused as error:
            self._refused[structure] = str(error)
            raise
        return known[-1]
