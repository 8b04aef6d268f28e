"""Draw a plan as one HTML page without scripts: the predicted step as a timeline, stages, and why."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from fusion_compiler.ir.plan_text import human_bytes
from fusion_compiler.machines.plan import Event, Phase, PipelinePlan
from fusion_compiler.machines.text import ranges, timed

WIDTH, ROW, LEFT = 1200, 34, 110  # pixels
KINDS = {
    Phase.FORWARD: ("forward", "forward"),
    Phase.BACKWARD: ("backward", "backward"),
    Phase.INPUT: ("backward", "gradients of the inputs"),
    Phase.WEIGHT: ("weights", "gradients of the weights"),
}
STYLE = """
:root { color-scheme: light dark; font: 14px system-ui, sans-serif; }
body { max-width: 1240px; margin: 2em auto; padding: 0 1em; }
svg { width: 100%; height: auto; } svg text { font-size: 11px; fill: currentColor; }
.forward { fill: hsl(210 60% 60%); } .backward { fill: hsl(30 70% 58%); }
.weights { fill: hsl(140 40% 55%); } .odd { opacity: 0.75; }
svg .in { fill: #000; text-anchor: middle; } table { border-collapse: collapse; margin: 1em 0; }
td, th { text-align: left; padding: 0.25em 0.8em; border-bottom: 1px solid #8885; vertical-align: top; }
"""


def page(plan: PipelinePlan) -> str:
    """Return the page, as text to be written in UTF-8."""
    title = f"{plan.model} on {len(plan.machines)} machines"
    split = " of the inputs, green: of the weights" if plan.training and plan.schedule.splits_backward else ""
    about = (
        f"{plan.schedule}, {plan.microbatches} microbatches: {timed(plan.step_us)} a step predicted, "
        f"bubble {plan.bubble:.0%}. Blue: forward, orange: backward{split}; numbers are microbatches."
    )
    stages = (
        (f"{s.number}", s.machine, timed(s.forward_us), timed(s.backward_us), human_bytes(s.parameter_bytes),
         human_bytes(s.memory_bytes), ranges(s.modules))
        for s in plan.stages
    )  # fmt: skip
    edges = (
        (f"{e.source} to {e.target}", human_bytes(e.forward_bytes), timed(e.forward_us),
         human_bytes(e.backward_bytes), timed(e.backward_us),
         ", ".join(f"{t.name} {list(t.shape)}" for t in e.tensors))
        for e in plan.edges
    )  # fmt: skip
    why = ((d.rule, d.about, d.reason) for d in plan.decisions)
    return "\n".join([
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>',
        f"<style>{STYLE}</style><h1>{escape(title)}</h1><p>{escape(about)}</p>",
        timeline(plan),
        table(("stage", "machine", "forward", "backward", "parameters", "memory", "modules"), stages),
        table(("between stages", "forward", "takes", "backward", "takes", "tensors"), edges),
        table(("why", "where", ""), why),
        "</html>",
    ])  # fmt: skip


def timeline(plan: PipelinePlan) -> str:
    """Return a row of bars for each machine; a bar's title says what it is."""
    scale = (WIDTH - LEFT) / plan.step_us
    height = ROW * len(plan.machines) + 24
    rows = [
        f'<text x="0" y="{ROW * rank + 20}">{escape(machine.name)}</text>'
        for rank, machine in enumerate(plan.machines)
    ]
    ticks = [
        f'<text x="{LEFT + (WIDTH - LEFT) * i / 8:.0f}" y="{height - 6}">{timed(plan.step_us * i / 8)}</text>'
        for i in range(8)
    ]
    bars = [bar(event, plan.rank(event.stage), len(plan.machines), scale) for event in plan.events]
    label = f"the predicted step of {len(plan.machines)} machines"
    head = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">'
    return "".join([head, *rows, *bars, *ticks, "</svg>"])


def bar(event: Event, rank: int, machines: int, scale: float) -> str:
    x, width = LEFT + event.start_us * scale, (event.end_us - event.start_us) * scale
    kind, name = KINDS[event.phase]
    odd = " odd" if event.stage // machines % 2 else ""
    long = timed(event.end_us - event.start_us)
    text = f"stage {event.stage}, {name} of microbatch {event.microbatch}: {long}"
    number = (
        f'<text class="in" x="{x + width / 2:.1f}" y="{ROW * rank + 19}">{event.microbatch}</text>'
        if width > 14
        else ""
    )
    return (
        f'<g><title>{text} from {timed(event.start_us)}</title><rect class="{kind}{odd}" x="{x:.1f}" '
        f'y="{ROW * rank + 2}" width="{width:.1f}" height="{ROW - 6}" rx="2"/>{number}</g>'
    )


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table; texts stay texts."""
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{cells}</tr>{body}</table>"
