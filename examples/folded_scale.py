"""A rewrite: a scale behind a product becomes part of the weight, where that is less work.

    python -m examples.folded_scale

compile() compares the two sides, gradients too, before it uses them; `where=` says where it pays: the weight
is smaller than the product's result. The same rule without `where=` applies everywhere. An infinite scale
times a sum is infinite, and times each of its terms NaN: `domain=` says that there is none.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusion_compiler as fc
from examples.swiglu_fp8 import relative_error
from fusion_compiler.patterns import MatchedTensor


def scaled_linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """[batch, length, features], [out, features], [out] -> [batch, length, out]."""
    return F.linear(x, weight) * scale


def folded(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return F.linear(x, weight * scale.unsqueeze(-1))


def pays(x: MatchedTensor, weight: MatchedTensor, scale: MatchedTensor) -> bool:
    """Parameters alone: fewer rows of weight than of activations."""
    held = weight.origin == scale.origin == "parameter"
    return held and weight.shape[1] < x.shape[0] * x.shape[1]


PATTERN = fc.rewrite(
    scaled_linear,
    folded,
    torch.ones(2, 3, 10), torch.ones(5, 10), torch.ones(5),
    where=pays,
    domain={"scale": "finite"},
)  # fmt: skip


class Scaled(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features, features) / features**0.5)
        self.scale = nn.Parameter(torch.rand(features) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(F.linear(x, self.weight) * self.scale)


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Scaled(64).to(device)
    backend = "auto" if device == "cuda" else "interpret"
    fast = fc.compile(model, patterns=(PATTERN, *fc.DEFAULT_PATTERNS), backend=backend)
    for length in (128, 8):  # many rows, then too few: sizes that `where=` asks about are compiled again
        x = torch.randn(2, length, 64, device=device)
        exact = model.double()(x.double())
        model.float()
        y = fast(x)
        print(f"{2 * length} rows: scaled_linear: {fast.plan[-1].notes['scaled_linear']}")
        print(f"  relative error against float64 {relative_error(y, exact):.1e}")
    try:
        fc.compile(model, patterns=(fc.rewrite(scaled_linear, wrongly_folded, *PATTERN.example),))
    except fc.errors.RewriteNotEqualError as error:
        print(f"\na scale on the wrong side is refused:\n{error}")


def wrongly_folded(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """On the rows of activations' side of the weight: the sizes fit where it is square."""
    return F.linear(x, weight) * scale.mean()


if __name__ == "__main__":
    main()
