"""`when="auto"`: each parameter is updated within the backward pass or by `step()`, and this module says why.

The first two steps update in `step()` and are watched. A parameter stays with `step()` if its gradient is a
sum over passes or is written between its pass and `step()` (a clipped norm), or if its group's numbers change
in between; all parameters stay if a GradScaler is in use or processes sum gradients. An update of the others
in the pass saves no traffic, as the gradients of a launch do not stay in the L2. It frees all gradients but
one launch's, and costs the launches; if all gradients together are less than one launch's, it is not worth
that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fusion_compiler.ir.plan_text import count, human_bytes
from fusion_compiler.optimizer.backward import BUCKET_BYTES, BackwardUpdates, is_distributed, scales_losses
from fusion_compiler.optimizer.batch import Group
from fusion_compiler.optimizer.fused import FusedOptimizer, Timing
from fusion_compiler.optimizer.ready import numbers_of
from fusion_compiler.options import When

STEPS = 2  # the steps that are watched; the first is the class's own, which shows no launch


@dataclass(frozen=True)
class Choice:
    when: When
    reason: str


@dataclass
class _Watched:
    """A `_Watched` records a parameter's gradients since the last step. passes: how many there were. version,
    numbers: the last gradient's version, and its group's numbers at that time."""

    passes: int = 0
    version: int = 0
    numbers: Any = None


class ChosenUpdates(Timing):
    """Choose when each parameter is updated, after `STEPS` watched steps.

    choices: parameter -> when it is updated, and why; empty before that.
    """

    def __init__(self, fused: FusedOptimizer, model: nn.Module) -> None:
        super().__init__(fused)
        self.model = model
        self.choices: dict[str, Choice] = {}
        self._objections: dict[int, str] = {}
        self._bytes: dict[int, int] = {}  # the size of each gradient
        self._left = STEPS
        self._timing = Timing(fused)
        self._watched: dict[int, _Watched] = {}
        self._handles: list[RemovableHandle] = []
        for group, param in self._params():
            if param.requires_grad:
                self._handles.append(param.register_post_accumulate_grad_hook(self._watch(group)))

    def _params(self) -> Iterator[tuple[Group, Tensor]]:
        return ((group, param) for group in self.fused.groups for param in group["params"])

    def lines(self) -> list[str]:
        if not self.choices:
            return ["when: not yet chosen, two steps are watched first"]
        alike: dict[Choice, list[str]] = {}
        for name, choice in self.choices.items():
            alike.setdefault(choice, []).append(name)
        return [f"{c.when}: {_listed(names)}: {c.reason}" for c, names in alike.items()]

    def finish(self) -> None:
        self._timing.finish()

    def remove(self) -> None:
        self._timing.remove()
        self._unwatch()

    def _unwatch(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # -- what happens to gradients -------------------------------------------------------------------

    def _watch(self, group: Group) -> Any:
        def seen(param: Tensor) -> None:
            if param.grad is None:  # autograd is done with it and has computed no gradient
                return
            watched = self._watched.setdefault(id(param), _Watched())
            watched.passes += 1
            watched.version, watched.numbers = param.grad._version, numbers_of(group)

        return seen

    def step(self) -> None:
        if self._left:
            for group, param in self._params():
                if param.grad is not None and (objection := self._objection(group, param)):
                    self._objections[id(param)] = objection
            self._watched.clear()
        self._timing.step()
        if self._left:
            self._left -= 1
            if not self._left:
                self._choose()

    def _objection(self, group: Group, param: Tensor) -> str:
        """Return the reason why a gradient is needed after its pass, or "" if it is not."""
        grad, watched = param.grad, self._watched.get(id(param))
        assert grad is not None
        self._bytes[id(param)] = grad.nbytes
        if watched is None:
            return "no backward pass makes its gradient"
        if watched.passes > 1:
            return f"its gradient is a sum over {watched.passes} passes"
        if self.fused.clip is not None:
            return "its gradient is clipped by clip_grad_norm_"
        if grad._version != watched.version:
            return "its gradient is written between the pass and step(), as clipping does"
        if numbers_of(group) != watched.numbers:
            return "its group's numbers change between the pass and step()"
        return ""

    # -- the choice ----------------------------------------------------------------------------------

    def _choose(self) -> None:
        self._unwatch()
        free = {key: size for key, size in self._bytes.items() if key not in self._objections}
        total = sum(free.values())
        launches = -(-total // BUCKET_BYTES)
        reason = "its gradient is summed over processes" if is_distributed(self.model) else ""
        reason = reason or ("a GradScaler is in use" if scales_losses() else "")
        chosen: set[int] = set()
        for param in (param for _, param in self._params() if param.requires_grad):
            name = self.fused.name_of(param)
            if reason:
                choice = Choice("step", reason)
            elif id(param) not in self._bytes:
                choice = Choice("step", "it has had no gradient")
            elif id(param) in self._objections:
                choice = Choice("step", self._objections[id(param)])
            elif name in self.fused.unfused:
                choice = Choice("step", "no kernel updates it")
            elif launches < 2:
                choice = Choice(
                    "step", f"all gradients are {human_bytes(total)}: they take one launch anyway"
                )
            else:
                freed = f"of {human_bytes(total)} of gradients {human_bytes(BUCKET_BYTES)} live at a time"
                choice = Choice("backward", f"{freed}, for {launches} launches")
                chosen.add(id(param))
            self.choices[name] = choice
        if chosen:
            self._timing = BackwardUpdates(self.fused, self.model, chosen)


def _listed(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} and {count(len(names) - 1, 'other')}"
