"""Figures of rows: ratios, means, the bars that they are held to, and tables of them.

A row has "cells": for each contender its figures by name, or the reason why it "failed".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Row = Mapping[str, Any]
Column = tuple[str, Callable[[Row], str]]  # a header, and the text of a row


class Bar(NamedTuple):
    what: str
    value: float
    met: bool


def at_least(what: str, value: float | None, least: float) -> Iterator[Bar]:
    """The bar that a figure has to reach; none where there is no figure."""
    if value is not None:
        yield Bar(f"{what} >= {least}", value, value >= least)


def at_most(what: str, value: float | None, most: float) -> Iterator[Bar]:
    if value is not None:
        yield Bar(f"{what} <= {most}", value, value <= most)


def counted(bars: Iterable[Bar]) -> str:
    held = [bar.met for bar in bars]
    return f"{sum(held)} of {len(held)} bars met"


def missed(bars: Iterable[Bar]) -> list[str]:
    """A line for each bar that is not met."""
    return [f"{bar.what}: {bar.value:.2f}" for bar in bars if not bar.met]


def verdicts(bars: Iterable[Bar]) -> str:
    """A table of bars, and how many are met."""
    bars = list(bars)
    lines = [[bar.what, f"{bar.value:.2f}", "met" if bar.met else "MISSED"] for bar in bars]
    return table(["bar", "figure", ""], lines) + "\n\n" + counted(bars)


def cell_of(row: Row, name: str) -> Mapping[str, Any]:
    return row["cells"].get(name, {})


def value(row: Row, names: str | Iterable[str], key: str) -> float | None:
    """The figure of a contender, or the least of several."""
    names = (names,) if isinstance(names, str) else names
    return min((cell[key] for name in names if key in (cell := cell_of(row, name))), default=None)


def over(a: float | None, b: float | None) -> float | None:
    """a / b where both are there."""
    return None if a is None or b is None else a / b


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are there; None of nothing."""
    logs = [math.log(v) for v in values if v is not None and v > 0]
    return math.exp(sum(logs) / len(logs)) if logs else None


def means(rows: Sequence[Row], figures: Mapping[str, Callable[[Row], float | None]]) -> dict[str, float]:
    """Return the geometric mean of each figure over the rows that have it, by name. Omit a figure of no
    row."""
    by_name = {name: geometric_mean(map(figure_of, rows)) for name, figure_of in figures.items()}
    return {name: mean for name, mean in by_name.items() if mean is not None}


def figure(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def timed(cell: Mapping[str, Any], form: str = ".2f") -> str:
    """Wall time of a step, and GPU time in parentheses."""
    if "failed" in cell:
        return "failed"
    return f"{cell['step_ms']:{form}} ({cell['gpu_ms']:{form}})" if "step_ms" in cell else "-"


def lines_of(columns: Sequence[Column], rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Header and lines of a table, without the columns in which nothing stands."""
    lines = [[text(row) for _, text in columns] for row in rows]
    kept = [i for i in range(len(columns)) if i == 0 or any(line[i] != "-" for line in lines)]
    return [columns[i][0] for i in kept], [[line[i] for i in kept] for line in lines]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Aligned columns: the first to the left, the others to the right."""
    lines = [list(header), *[list(row) for row in rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]

    def show(line: Sequence[str]) -> str:
        first = line[0].ljust(widths[0])
        return "  ".join([first, *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))])

    return "\n".join([show(lines[0]), "-" * len(show(lines[0])), *map(show, lines[1:])])


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
