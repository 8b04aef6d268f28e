"""Print a plan: stages, what crosses between them, the predicted step as a timeline, and why."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence

from fusion_compiler.ir.plan_text import aligned, human_bytes
from fusion_compiler.machines.plan import Edge, Phase, PipelinePlan, Stage

WIDTH = 96  # of the timeline, in characters
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
MARKS = {Phase.FORWARD: "-", Phase.BACKWARD: "=", Phase.INPUT: "=", Phase.WEIGHT: "~"}


def text_of(plan: PipelinePlan) -> str:
    """Return the plan as lines of text."""
    title = (
        f"{plan.model} on {len(plan.machines)} machines: {plan.schedule}, {plan.microbatches} microbatches, "
        f"{timed(plan.step_us)} a step predicted, bubble {plan.bubble:.0%}"
    )
    edges = (*map(edge_text, plan.edges), "")
    stages = itertools.chain.from_iterable(zip(stage_rows(plan.stages), edges, strict=True))
    why = [f"  {d.rule}: {d.about + ': ' if d.about else ''}{d.reason}" for d in plan.decisions]
    return "\n".join([title, "", *stages, *timeline(plan), "", *(["why"] if why else []), *why])


def stage_rows(stages: Sequence[Stage]) -> list[str]:
    rows = [
        (
            f"stage {s.number}",
            s.machine,
            f"{timed(s.forward_us)} forward",
            f"{timed(s.backward_us)} backward",
            f"{human_bytes(s.parameter_bytes)} of parameters",
            f"{human_bytes(s.memory_bytes)} of memory",
            ranges(s.modules),
        )
        for s in stages
    ]
    return aligned(rows, left=(0, 1, 6))


def edge_text(edge: Edge) -> str:
    names = ", ".join(f"{t.name} {list(t.shape)}" for t in edge.tensors[:3])
    more = f" and {len(edge.tensors) - 3} more" if len(edge.tensors) > 3 else ""
    back = (
        f", {human_bytes(edge.backward_bytes)} back in {timed(edge.backward_us)}"
        if edge.backward_bytes
        else ""
    )
    return f"   | {human_bytes(edge.forward_bytes)} in {timed(edge.forward_us)}{back}: {names}{more}"


def ranges(modules: Iterable[str]) -> str:
    """Return modules by the layers that they belong to: "embed, blocks.0-3, blocks.4.attention"."""
    names = list(dict.fromkeys(m for m in modules if m))
    pieces = [m for m in names if not any(other.startswith(f"{m}.") for other in names)]
    layers: dict[str, list[str]] = {}
    for module in pieces:
        match = re.match(r"(.*?\b\d+)(?:\.|$)", module)
        layers.setdefault(match[1] if match else module, []).append(module)
    texts: list[str] = []
    for layer in layers:
        name, _, number = layer.rpartition(".")
        previous = re.fullmatch(rf"{re.escape(name)}\.(\d+)(?:-(\d+))?", texts[-1]) if texts else None
        last = int(previous[2] or previous[1]) if previous else -2
        if number.isdigit() and last + 1 == int(number):
            texts[-1] = f"{name}.{previous[1] if previous else ''}-{number}"
        elif not any(layer.startswith(text + ".") for text in texts):
            texts.append(layer)
    return ", ".join(texts)


def timeline(plan: PipelinePlan, width: int = WIDTH) -> list[str]:
    """Return a line for each machine. A column is an equal share of the step, and shows what runs in its
    middle: the number of the microbatch where a phase begins, "-" in its forward pass, "=" in its backward
    pass, and "~" where that computes the gradients of weights alone."""
    longest = max(len(m.name) for m in plan.machines)
    rows = [[" "] * width for _ in plan.machines]
    for event in plan.events:
        start, end = (math.ceil(us * width / plan.step_us - 0.5) for us in (event.start_us, event.end_us))
        mark = MARKS[event.phase]
        drawn = (DIGITS[event.microbatch % len(DIGITS)] + mark * width)[: end - start]
        rows[plan.rank(event.stage)][start:end] = drawn
    scale = f"{' ' * longest} |{timed(plan.step_us).rjust(width, '.')}|"
    lines = [f"{m.name.ljust(longest)} |{''.join(row)}|" for m, row in zip(plan.machines, rows, strict=True)]
    split = " of the inputs, 0~~: of the weights" if plan.training and plan.schedule.splits_backward else ""
    return ["", f"{scale}  0--: forward of microbatch 0, 0==: backward{split}", *lines]


def timed(us: float) -> str:
    """Return microseconds as "12 us", "3.4 ms" or "1.20 s"."""
    size = abs(us)
    return f"{us:.0f} us" if size < 1e3 else f"{us / 1e3:.1f} ms" if size < 1e6 else f"{us / 1e6:.2f} s"
