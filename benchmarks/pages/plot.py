"""A figure as SVG text: panels of lines over a logarithmic axis. Needs nothing but the numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log2

WIDTH, HEIGHT = 480, 260  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 42, 20, 30, 34
HIGHEST = 1.1  # of the vertical axis, which begins at 0
STYLE = (
    "text{font:11px sans-serif;fill:#333}.title{font-size:13px;font-weight:bold}"
    "path{fill:none;stroke-width:1.8}.rule{stroke:#ddd;stroke-width:1}"
)


@dataclass(frozen=True)
class Line:
    """points: (x, y) in order; a missing y breaks the line. dashed: of a peer."""

    label: str
    colour: str
    points: Sequence[tuple[float, float | None]]
    dashed: bool = False


def svg(panels: Mapping[str, Sequence[Line]], across: int = 2) -> str:
    """Panels by title, `across` in a row, all with the same horizontal axis (powers of two)."""
    xs = [x for lines in panels.values() for line in lines for x, _ in line.points]
    low, high = (log2(min(xs)), log2(max(xs))) if xs else (0.0, 1.0)
    parts: list[str] = []
    for i, (title, lines) in enumerate(panels.items()):
        place = f"translate({i % across * WIDTH},{i // across * HEIGHT})"
        parts.append(f'<g transform="{place}">{_panel(title, lines, low, high)}</g>')
    rows = -(-len(panels) // across)
    size = f'width="{across * WIDTH}" height="{rows * HEIGHT}"'
    body = "\n".join(parts)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {across * WIDTH} {rows * HEIGHT}">'
    return f'{head}\n<style>{STYLE}</style>\n<rect width="100%" height="100%" fill="#fff"/>\n{body}\n</svg>\n'


def _panel(title: str, lines: Sequence[Line], low: float, high: float) -> str:
    def x_of(value: float) -> float:
        return LEFT + (log2(value) - low) / max(high - low, 1e-9) * (WIDTH - LEFT - RIGHT)

    def y_of(value: float) -> float:
        return HEIGHT - BOTTOM - min(value, HIGHEST) / HIGHEST * (HEIGHT - TOP - BOTTOM)

    parts = [f'<text class="title" x="{LEFT}" y="16">{title}</text>']
    for tick in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        parts.append(f'<path class="rule" d="M{LEFT} {y_of(tick):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y_of(tick) + 4:.1f}" text-anchor="end">{tick:.1f}</text>')
    for power in range(int(-(-low // 2) * 2), int(high) + 1, 2):
        x = f'x="{x_of(2**power):.1f}" y="{HEIGHT - BOTTOM + 15}"'
        parts.append(f'<text {x} text-anchor="middle">{_short(2**power)}</text>')
    for line in lines:
        dashes = ' stroke-dasharray="4 3"' if line.dashed else ""
        path = _path([(x_of(x), None if y is None else y_of(y)) for x, y in line.points])
        parts.append(f'<path stroke="{line.colour}"{dashes} d="{path}"/>')
    for i, line in enumerate(lines):
        x = LEFT + 8 + i * (WIDTH - LEFT - RIGHT) // max(1, len(lines))
        parts.append(f'<text x="{x}" y="{HEIGHT - 5}" style="fill:{line.colour}">{line.label}</text>')
    return "".join(parts)


def _path(points: Sequence[tuple[float, float | None]]) -> str:
    text, pen = "", "M"
    for x, y in points:
        if y is None:
            pen = "M"
            continue
        text += f"{pen}{x:.1f} {y:.1f}"
        pen = "L"
    return text


def _short(n: int) -> str:
    return f"{n // 1024}K" if n >= 1024 else str(n)
