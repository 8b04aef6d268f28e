"""The kernels of one optimizer: for the ways that its step goes, and for each combination of dtypes."""

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
from fusion_compiler.optimizer.launch import Backend, MultiTensor
from fusion_compiler.runtime.binding import Gpu

Values = tuple[float, ...]
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
        self._order: dict[Formula, int] = {}  # in which they were found
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
        self, batch: Batch, values: Sequence[Values], clipped: bool
    ) -> tuple[MultiTensor, tuple[int, ...]]:
        """(what updates a batch, which of its formulas goes with each set).

        values: of each set's floats and counters. Raises Refused or KernelError where there is no kernel.
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
        if key not in self.made:
            name = type(self.optimizer).__name__.lower()
            try:
                self.made[key] = MultiTensor(
                    distinct, kind.dtypes, kind.device, backend, name, variant, self._gpus
                )
            except (Refused, FusionError) as error:
                self._failed[key] = error
                raise
        return self.made[key], tuple(map(distinct.index, formulas))

    def _formula(self, group: Mapping[str, Any], structure: Structure, values: Values) -> Formula:
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
            self._order.setdefault(known[-1], len(self._order))
        except Refused as error:
            self._refused[structure] = str(error)
            raise
        return known[-1]
