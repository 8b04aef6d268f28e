"""The result of `fc.partition`: a plan that prints, draws itself, and makes the modules of its stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import fx

from fusion_compiler.machines.page import page
from fusion_compiler.machines.plan import PipelinePlan
from fusion_compiler.machines.rehearsal import Prepare, rehearse
from fusion_compiler.machines.split import split, stage_modules
from fusion_compiler.machines.text import text_of


class Pipeline(PipelinePlan):
    """A pipeline is a plan with the model that it cuts."""

    def __str__(self) -> str:
        return text_of(self)

    def html(self, path: str | Path) -> None:
        """Write the plan as one page that opens offline, with the predicted step as a timeline."""
        Path(path).write_text(page(self), encoding="utf-8")

    def rehearsed(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
        *,
        prepare: Prepare = lambda m: m,
    ) -> Pipeline:
        """Return this plan with the times of its stages measured on this machine, divided by the machines'
        `speed`, and the step that follows from them.

        args, kwargs: of one microbatch, on the model's device. prepare: makes of a stage's module what runs,
        as `fc.compile` does. Raises MachinesError if the model is on the meta device.
        """
        return rehearse(self, args, kwargs or {}, prepare)

    def modules(self) -> tuple[fx.GraphModule, ...]:
        """Return a module for each stage, with the model's own parameters under their own names. The first
        takes the model's arguments, every other the tensors of the edge before it, in their order."""
        return stage_modules(self)

    @property
    def split_policy(self) -> Callable[[fx.GraphModule], fx.GraphModule]:
        """Return what `torch.distributed.pipelining.pipeline` takes as its `split_policy`; it raises
        OtherGraphError for another graph. That function gives each stage a copy of a tied weight."""
        return lambda traced: split(self, traced)
