"""The kernels of one optimizer, for the branches that its step takes and for each combination of dtypes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch.optim import Optimizer

from fusion_compiler.errors import FusionError
from fusion_compiler.optimizer.batch import Batch
from fusion_compiler.optimizer.formula import Formula, Refused, Structure, trace
from fusion_compiler.optimizer.kernel import Variant
from fusion_compiler.optimizer.launch import MultiTensor
from fusion_compiler.runtime.binding import Gpu
from fusion_compiler.runtime.launch import Backend

Values = tuple[float, ...]
MOST_FORMULAS = 8  # of one structure; a step with more branches has fixed a number in each formula


class Kernels:
    """Find the kernels that update parameters, traced and compiled when they are first needed.

    launchers: the MultiTensors built so far.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        backend: str,
        rounding: str,
        gpus: Callable[[torch.device | None], Gpu],
    ) -> None:
        self.optimizer, self.backend, self.rounding = optimizer, backend, rounding
        self.launchers: dict[tuple[Any, ...], MultiTensor] = {}
        self._gpus = gpus
        self._formulas: dict[Structure, list[Formula]] = {}
        self._order: dict[Formula, int] = {}  # in which they were traced
        self._refused: dict[Structure, str] = {}
        self._alike: dict[tuple[Structure, str], Formula] = {}
        self._failed: dict[tuple[Any, ...], Exception] = {}

    def backend_for(self, device: torch.device) -> Backend:
        """Return the backend for a device. Raises Refused if only the class's own step runs there."""
        if self.backend != "auto":
            return cast(Backend, self.backend)
        if device.type != "cuda":
            raise Refused(f"it is on {device}, and kernels run on GPUs (or with backend='interpret')")
        if torch.cuda.is_current_stream_capturing():
            raise Refused("a CUDA graph is captured, which would keep the numbers of this step")
        return "triton"

    def find(
        self, batch: Batch, values: Sequence[Values], clipped: bool
    ) -> tuple[MultiTensor, tuple[int, ...]]:
        """Return (the MultiTensor that updates a batch, the position of each set's formula in it).

        values: those of each set's floats and counters. Raises Refused or KernelError if there is no kernel.
        """
        kind = batch.kind
        backend = self.backend_for(kind.device)
        asked = zip(batch.asked(), values, strict=True)
        formulas = [self._formula(group, structure, v) for (group, structure), v in asked]
        distinct = tuple(sorted(set(formulas), key=self._order.__getitem__))
        stochastic = (
            self.rounding == "stochastic"
            and kind.dtypes[0] is torch.bfloat16
            and kind.structure.dtype is torch.float32
        )
        variant = Variant(batch.aligned, len(values) > 1, clipped, stochastic)
        key = (distinct, kind.dtypes, kind.device, variant)
        if key in self._failed:
            raise self._failed[key]
        if key not in self.launchers:
            name = type(self.optimizer).__name__.lower()
            try:
                self.launchers[key] = MultiTensor(
                    distinct, kind.dtypes, kind.device, backend, name, variant, self._gpus
                )
            except (Refused, FusionError) as error:
                self._failed[key] = error
                raise
        return self.launchers[key], tuple(map(distinct.index, formulas))

    def _formula(self, group: Mapping[str, Any], structure: Structure, values: Values) -> Formula:
        if structure in self._refused:
            raise Refused(self._refused[structure])
        formulas = self._formulas.setdefault(structure, [])
        for formula in formulas:
            if formula.holds(*values):
                return formula
        try:
            if len(formulas) >= MOST_FORMULAS:
                raise Refused(
                    f"its step took {len(formulas)} different branches, by {formulas[-1].guards}; a number "
                    "that it passes to math.sqrt and the like is a constant of the kernel: use x ** 0.5"
                )
            traced = trace(self.optimizer, group, structure, values)
            alike = replace(structure, shape=(), attributes=())
            formulas.append(self._alike.setdefault((alike, traced.text), traced))
            self._order.setdefault(formulas[-1], len(self._order))
        except Refused as error:
            self._refused[structure] = str(error)
            raise
        return formulas[-1]
