"""Results on disk: rows of cells, with the command, commit and device that made them."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.processes import ROOT


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

    def row(self, key: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
        """The row that has what `key` says, made where it is new; `fields` are written into it."""
        row = next((r for r in self.rows if key.items() <= {n: r.get(n) for n in key}.items()), None)
        if row is None:
            row = {**key, "cells": {}}
            self.rows.append(row)
        row.update(fields)
        return row

    def keeps(self, cell: Mapping[str, Any], contender: str, figure: str) -> bool:
        """True if a resumed run keeps a cell: one with the figure, and ours only of this commit."""
        ours = contender.startswith("ours")
        return figure in cell and (not ours or cell.get("commit") == self.environment["commit"])

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


def begin(benchmark: str, options: argparse.Namespace, **facts: Any) -> Record:
    """A record with what its figures depend on; with --resume it has the rows of its file."""
    record = Record(benchmark, environment(torch.device(options.device)) | facts, options.json)
    if options.resume:
        record.resume()
    return record


def reason(error: BaseException) -> str:
    """One line for a table's cell."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:160]
