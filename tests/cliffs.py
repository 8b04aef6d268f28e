"""python -m tests.cliffs --count N --seed S: kernels that are predicted to be far slower than they could be.

Random functions of one tensor of any shape, layout and dtype are planned for an H200, with their sizes known
and with symbols for them. A function is listed if its kernels take LISTED times as long as eager's, or as the
kernels for known sizes. A prediction only says where to look: what is listed has to be timed.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fusion_compiler as fc

LISTED = 2.0
SIZES = (1, 2, 3, 5, 7, 8, 16, 17, 31, 49, 64, 100, 128, 197, 256, 512, 768, 1000, 1024, 4096, 5000)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Function = Callable[[Tensor], object]
Layout = tuple[tuple[int, ...], tuple[int, ...]]  # sizes and strides


def functions(dims: tuple[int, ...], one: int) -> dict[str, Function]:
    """Functions of a tensor by name, over some dimensions or over one."""
    return {
        "sum": lambda x: x.sum(dims),
        "mean": lambda x: x.mean(dims),
        "maximum": lambda x: x.amax(dims),
        "variance": lambda x: x.var(dims),
        "logsumexp": lambda x: torch.logsumexp(x, dims),
        "softmax": lambda x: torch.softmax(x, one),
        "place": lambda x: x.argmax(one),
        "any": lambda x: (x > 0).any(one),
        "product": lambda x: x.prod(one),
        "norm": lambda x: (x - x.mean(dims, keepdim=True)) * x.var(dims, keepdim=True).add(1e-5).rsqrt(),
        "two": lambda x: (x.sum(dims), x.amax(one)),
        "all": lambda x: x.float().pow(2).mean(),
        "running sum": lambda x: x.cumsum(one),
        "gelu": lambda x: torch.nn.functional.gelu(x),
        "transposed": lambda x: x.transpose(0, one).contiguous(),
        "joined": lambda x: torch.cat([x, x * 2], one),
        "rolled": lambda x: x.roll(1, one),
        "added sum": lambda x: x + x.sum(one, keepdim=True),
    }


def draw(random_: random.Random) -> tuple[str, Function, Layout, torch.dtype]:
    """A function by name, and the layout and dtype of its tensor."""
    shape: list[int] = []
    while not 1e5 <= math.prod(shape) <= 2e8:
        shape = [random_.choice(SIZES) for _ in range(random_.randint(1, 5))]
    order = list(range(len(shape)))
    if random_.random() < 0.4:
        random_.shuffle(order)
    strides = [0] * len(shape)
    for step, dim in enumerate(order):
        strides[dim] = math.prod(shape[d] for d in order[step + 1 :])
    count = random_.randint(1, max(1, len(shape) - 1))
    dims = tuple(sorted(random_.sample(range(len(shape)), count)))
    name, function = random_.choice(list(functions(dims, random_.randrange(len(shape))).items()))
    return f"{name} over {dims}", function, (tuple(shape), tuple(strides)), random_.choice(DTYPES)


def predicted(function: Function, layout: Layout, dtype: torch.dtype, static: bool) -> tuple[float, float]:
    """Microseconds of our kernels, and of eager's."""
    torch._dynamo.reset()
    fast = fc.compile(function, backend="eager", device="h200", dynamic=not static)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        fast(torch.empty_strided(*layout, dtype=dtype))
    clusters = [cluster for plan in fast.plan for cluster in plan.clusters]
    return sum(c.cost.us for c in clusters), sum(c.eager_us or 0.0 for c in clusters)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random_, cliffs = random.Random(options.seed), list[tuple[float, str]]()
    for _ in range(options.count):
        name, function, layout, dtype = draw(random_)
        ours, eager = predicted(function, layout, dtype, static=True)
        unknown, _ = predicted(function, layout, dtype, static=False)
        text = f"{name} {dtype} {layout}: {ours:.1f} us, eager {eager:.1f}, of unknown sizes {unknown:.1f}"
        ratio = max(ours / eager, unknown / max(ours, eager)) if eager else 0.0
        if ratio >= LISTED:
            cliffs.append((ratio, text))
    for ratio, text in sorted(cliffs, reverse=True):
        print(f"{ratio:.1f}x  {text}")
    print(f"{options.count} functions, {len(cliffs)} at least {LISTED} times as slow as they could be")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
