"""python -m benchmarks row-ranges: feed-forward layers for a number of rows that is only known at run time.

Eight layers of a Llama-1B shape (norm, gate and up, down, residual), bfloat16, no gradients. `any number`
is `fusion_compiler.compile(model)` after calls of other numbers of rows, so that a plan of a range serves the
call; `this number` is the same with `dynamic=False`; torch.compile, with its CUDA graphs, is called like the
first. Wall time of a call in a run of sixty-four, median: kernels that start while others run have no time of
their own. Each graph is compiled before it is timed. With --quick it tries itself.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusion_compiler as fc
from benchmarks.harness.tables import figure, over, table
from benchmarks.harness.timing import wall_time
from benchmarks.models.measure import A_RUN

ROWS = (3, 4, 6, 8, 12, 16, 24)
FIRST = (10, 11)  # rows of the calls before: a second number makes the dimension symbolic
WARM, REPETITIONS = 4, 15


class Layer(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden)
        self.gate, self.up = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def measured(compiled: Any, device: torch.device, hidden: int, *, each_anew: bool) -> dict[int, float]:
    """Microseconds by the number of rows. each_anew: TorchDynamo forgets what it has before every number."""
    times: dict[int, float] = {}
    torch._dynamo.reset()
    for rows in (*FIRST, *ROWS):
        if each_anew:
            torch._dynamo.reset()
        x = torch.randn(rows, 1, hidden, device=device, dtype=torch.bfloat16)
        with torch.no_grad():
            for _ in range(WARM):
                compiled(x)
            times[rows] = 1e6 * wall_time(lambda x=x: compiled(x), device, REPETITIONS, A_RUN)
    return times


def main(options: argparse.Namespace) -> None:
    quick: bool = options.quick
    device, backend = torch.device("cpu" if quick else "cuda"), "eager" if quick else "auto"
    hidden, inner, layers = (32, 64, 2) if quick else (2048, 8192, 8)
    model = nn.Sequential(*(Layer(hidden, inner) for _ in range(layers))).to(device, torch.bfloat16)
    contenders: dict[str, Any] = {
        "any number": fc.compile(model, backend=backend),
        "this number": fc.compile(model, backend=backend, dynamic=False),
        "torch.compile": torch.compile(model, mode="reduce-overhead"),
        "eager": model,
    }
    times = {
        name: measured(f, device, hidden, each_anew=name == "this number")
        for name, f in contenders.items()
        if re.search(options.only, name)
    }
    lines: list[list[str]] = []
    for rows in ROWS:
        ratio = over(*(times.get(f"{which} number", {}).get(rows) for which in ("this", "any")))
        lines.append([str(rows), *(f"{us[rows]:.1f}" for us in times.values()), figure(ratio)])
    print(table(["rows", *(f"{name} us" for name in times), "this / any"], lines))
    print(f"plans of any number: {len(list(contenders['any number'].plan))}")

