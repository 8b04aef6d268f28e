"""python -m benchmarks siblings: what products of one input would gain as one.

Q, K and V, or gate and up: two or three products by cuBLAS of the same rows against one of all columns, as if
their weights lay behind each other in memory, forward, and backward for the input's gradient (whose sums are
in the products' epilogues) and the weights'. bfloat16, median microseconds. Needs a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

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
REPETITIONS = 20


def cases(rows: int, width: int, widths: tuple[int, ...]) -> dict[str, tuple[Callable[[], object], ...]]:
    """For each of the three directions: (apart, as one)."""

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

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


def main(_: argparse.Namespace) -> None:
    device = torch.device("cuda")
    print(f"{'':34}{'':20}{'apart':>9}{'as one':>9}")
    for name, sizes in SHAPES.items():
        for direction, calls in cases(*sizes).items():
            apart, one = (1e6 * device_time(call, device, REPETITIONS).seconds for call in calls)
            print(f"{name:34}{direction:20}{apart:9.1f}{one:9.1f}")

