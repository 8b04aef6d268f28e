"""python -m benchmarks.row_ranges: feed-forward layers for a number of rows that is only known at run time.

Eight layers of a Llama-1B shape (norm, gate and up, down, residual), bfloat16, no gradients. `any number`
is `fusion_compiler.compile(model)` after calls of other numbers of rows, so that a plan of a range serves the
call; `this number` is the same with `dynamic=False`; torch.compile is called like the first. Device time of a
call, median; each graph is compiled before it is timed. With --quick it tries itself.

    python -m benchmarks.row_ranges [--quick]
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusion_compiler as fc
from benchmarks.record import table
from benchmarks.timing import GpuTime, device_time

ROWS = (3, 4, 6, 8, 12, 16, 24)
FIRST = (10, 11)  # rows of the calls before: a second number makes the dimension symbolic
REPETITIONS = 30


class Layer(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden)
        self.gate, self.up = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def measured(compiled: Any, device: torch.device, hidden: int, *, each_anew: bool) -> dict[int, GpuTime]:
    """By the number of rows. each_anew: TorchDynamo forgets what it has before every number."""
    times: dict[int, GpuTime] = {}
    torch._dynamo.reset()
    for rows in (*FIRST, *ROWS):
        if each_anew:
            torch._dynamo.reset()
        x = torch.randn(rows, 1, hidden, device=device, dtype=torch.bfloat16)
        with torch.no_grad():
            times[rows] = device_time(lambda x=x: compiled(x), device, REPETITIONS)
    return times


def main(quick: bool) -> None:
    device, backend = torch.device("cpu" if quick else "cuda"), "eager" if quick else "auto"
    hidden, inner, layers = (32, 64, 2) if quick else (2048, 8192, 8)
    model = nn.Sequential(*(Layer(hidden, inner) for _ in range(layers))).to(device, torch.bfloat16)
    given = {
        "any number": fc.compile(model, backend=backend),
        "this number": fc.compile(model, backend=backend, dynamic=False),
        "torch.compile": torch.compile(model),
        "eager": model,
    }
    times = {
        name: measured(f, device, hidden, each_anew=name == "this number") for name, f in given.items()
    }
    lines: list[list[str]] = []
    for rows in ROWS:
        own = [found[rows] for found in times.values()]
        ratio = own[1].seconds / own[0].seconds
        lines.append([str(rows), *(f"{1e6 * t.seconds:.1f} ({t.kernels})" for t in own), f"{ratio:.2f}"])
    print(table(["rows", *(f"{name} us (kernels)" for name in given), "this / any"], lines))
    print(f"plans of any number: {len(list(given['any number'].plan))}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    main(parser.parse_args().quick)
