"""python -m benchmarks siblings: what products of one input would gain as one.

Q, K and V, or gate and up: two or three products by cuBLAS of the same rows against one of all columns, as if
their weights lay behind each other in memory, forward, and backward for the input's gradient (whose sums are
in the products' epilogues) and the weights'. bfloat16, median microseconds. With --quick it tries itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.harness.tables import figure, table
from benchmarks.harness.timing import device_time

SHAPES = {  # rows, width of the input, widths of the products
    "ViT-B q, k, v, 64 images": (12608, 768, (768, 768, 768)),
    "Whisper-small q, k, v, 8 x 1500": (12000, 768, (768, 768, 768)),
    "BERT-large q, k, v, 16 x 512": (8192, 1024, (1024, 1024, 1024)),
    "Llama-1B q, k, v, 4 x 2048": (8192, 2048, (2048, 512, 512)),
    "Llama-1B gate, up, 4 x 2048": (8192, 2048, (8192, 8192)),
    "Llama-1B q, k, v, 1 x 1024": (1024, 2048, (2048, 512, 512)),
    "Llama-1B gate, up, 1 x 1024": (1024, 2048, (8192, 8192)),
}

def cases(
    device: torch.device, rows: int, width: int, widths: tuple[int, ...]
) -> dict[str, tuple[Callable[[], object], ...]]:
    """For each of the three directions: (apart, as one)."""

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    x, weights = random(rows, width), random(sum(widths), width)
    grads = random(rows, sum(widths))
    each = weights.split(widths)
    own = [grad.contiguous() for grad in grads.split(widths, 1)]

    def input_gradient() -> Tensor:
        total = own[0] @ each[0]
        for grad, weight in zip(own[1:], each[1:], strict=True):
            total.addmm_(grad, weight)
        return total

    return {
        "forward": (lambda: [x @ w.t() for w in each], lambda: x @ weights.t()),
        "input's gradient": (input_gradient, lambda: grads @ weights),
        "weights' gradients": (lambda: [g.t() @ x for g in own], lambda: grads.t() @ x),
    }


def main(options: argparse.Namespace) -> None:
    device, smaller = torch.device(options.device), 64 if options.quick else 1
    lines: list[list[str]] = []
    for name, (rows, width, widths) in SHAPES.items():
        sizes = rows // smaller, width // smaller, tuple(w // smaller for w in widths)
        for direction, calls in cases(device, *sizes).items():
            times = (1e6 * device_time(call, device, options.repetitions).seconds for call in calls)
            lines.append([f"{name}, {direction}", *(figure(us, ".1f") for us in times)])
    print(table(["microseconds", "apart", "as one"], lines))

