"""Rewrite a model under a condition: a scale after a product becomes part of the weight if that is less work.

    python -m examples.folded_scale

`compile` compares both sides of the rewrite, and their gradients, before it uses the rewrite. `where=` is
the condition: the weight is smaller than the result of the product. `domain=` promises that no scale is
infinite: a sum times infinity is infinite, but a sum of terms times infinity may be NaN.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusion_compiler as fc
from examples.helpers import relative_error
from fusion_compiler.patterns import MatchedTensor


def scaled_linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Multiply [batch, length, features] by [out, features], then scale by [out]."""
    return F.linear(x, weight) * scale


def folded(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return F.linear(x, weight * scale.unsqueeze(-1))


def pays(x: MatchedTensor, weight: MatchedTensor, scale: MatchedTensor) -> bool:
    """True if weight and scale are parameters, and the weight has fewer rows than the activations."""
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
    """Scale by a mean instead: the shapes are right, the values are not."""
    return F.linear(x, weight) * scale.mean()


if __name__ == "__main__":
    main()
