"""Nothing falls back silently: the ops of every model that no cluster holds are golden, with the reasons.

Forward and backward of the models in tests/models.py, in train mode with their dropout. Library calls and
views are not listed. An op that appears here is a regression, or needs a reason that a reviewer takes.
"""

from __future__ import annotations

from collections import Counter

import pytest

import fusion_compiler as fc
from fusion_compiler.report import eager_ops
from tests.golden_cases import DEVICE, FOLDER
from tests.models import NAMES, small

# What no tile program computes: scattered writes, a scan, a sort, a draw from PyTorch's own generator.
NOT_A_TILE_PROGRAM = {
    "aten.embedding_dense_backward.default",
    "aten.index_put.default",
    "aten.scatter.src",
    "aten.cumsum.default",
    "aten.topk.default",
    "fusion_compiler.seed.default",
}


def eager_text(name: str) -> str:
    """One line an op that stays eager: how often, its target, the graph and the reason."""
    model, batch = small(name)
    fast = fc.compile(model, backend="eager", device=DEVICE)
    fast(**batch).loss.backward()
    found = Counter(
        f"{plan.name}: {left.target}: {left.reason}" for plan in fast.plan for left in eager_ops(plan)
    )
    return "".join(f"{line} x{number}\n" for line, number in sorted(found.items()))


@pytest.mark.parametrize("name", NAMES)
def test_eager_ops_are_the_golden_ones_and_none_that_a_kernel_could_hold(
    name: str, request: pytest.FixtureRequest
) -> None:
    file = FOLDER / f"{name}.eager.txt"
    now = eager_text(name)
    if request.config.getoption("--update-golden"):
        file.write_text(now, encoding="utf-8")
    assert now == file.read_text(encoding="utf-8")
    assert {line.split(": ")[1] for line in now.splitlines()} <= NOT_A_TILE_PROGRAM
