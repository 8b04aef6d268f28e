"""Results on disk and on the terminal."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]


def commit() -> str:
    """BENCH_COMMIT, else git's HEAD (with a + where the tree differs from it), else "unknown"."""
    if named := os.environ.get("BENCH_COMMIT"):
        return named
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
        dirty = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if dirty else "")


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def environment(device: torch.device) -> dict[str, Any]:
    """What a figure depends on besides the code."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"
    packages = ("torch", "triton", "transformers", "liger-kernel")
    return {
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": name,
        "python": platform.python_version(),
        "versions": {p: version(p) for p in packages},
        "command": "python -m benchmarks " + " ".join(sys.argv[1:]),
    }


@dataclass
class Record:
    """A benchmark's results, written after every row: a run that is cut short keeps what it has."""

    benchmark: str
    environment: dict[str, Any]
    path: Path | None
    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    summary: dict[str, Any] = field(default_factory=dict[str, Any])

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.write()

    def resume(self) -> None:
        """Takes over the rows of a run that was cut short, or of another that these results join."""
        if self.path is not None and self.path.exists():
            self.rows = json.loads(self.path.read_text())["rows"]

    def row(self, case: str, phase: str, **fields: Any) -> dict[str, Any]:
        """The row of a case and phase, made where it is new; `fields` are written into it."""
        found = next((r for r in self.rows if (r["case"], r["phase"]) == (case, phase)), None)
        if found is None:
            found = {"case": case, "phase": phase, "cells": {}}
            self.rows.append(found)
        found.update(fields)
        return found

    def write(self) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "benchmark": self.benchmark,
            **self.environment,
            "summary": self.summary,
            "rows": self.rows,
        }
        whole = self.path.with_suffix(".partial")
        whole.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(whole, self.path)


def geometric_mean(values: Iterable[float]) -> float | None:
    """None of nothing."""
    logs = [math.log(v) for v in values if v > 0]
    return math.exp(sum(logs) / len(logs)) if logs else None


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Aligned columns: the first to the left, the others to the right."""
    lines = [list(header), *[list(row) for row in rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]

    def show(line: Sequence[str]) -> str:
        first = line[0].ljust(widths[0])
        return "  ".join([first, *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))])

    return "\n".join([show(lines[0]), "-" * len(show(lines[0])), *map(show, lines[1:])])


def reason(error: BaseException) -> str:
    """One line for a table's cell."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:160]


def figure(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)
