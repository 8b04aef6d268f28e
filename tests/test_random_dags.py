"""Programs put together at random, compiled, in the interpreter: as close to float64 as eager.

FUSION_RANDOM_DAGS=5000 draws that many, at random; without it the same few are drawn in every run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from hypothesis import HealthCheck, given, settings
from torch import Tensor

from tests.dags import NAMES, WIDE, Dag, dags
from tests.exactness import Compiled, not_as_close, rounding_noise, wide

LONG = int(os.environ.get("FUSION_RANDOM_DAGS", "0"))


def profile(examples: int) -> settings:
    return settings(
        max_examples=LONG or examples,
        derandomize=not LONG,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def check(dag: Dag, results: Sequence[Tensor], inputs: list[Tensor]) -> None:
    truth = dag.values(WIDE, *wide(inputs))
    eager = dag.values(NAMES, *inputs)
    for number, ours in zip(dag.outputs, results, strict=True):
        behind = dag.behind(number)
        noise = rounding_noise((eager[i] for i in behind), (truth[i] for i in behind))
        problem = not_as_close(ours, eager[number], truth[number], noise)
        assert problem is None, f"v{number}: {problem}"


@given(dags())
@profile(150)
def test_values(dag: Dag) -> None:
    inputs = dag.tensors()
    compiled = Compiled(dag)
    check(dag, compiled(*inputs), inputs)
