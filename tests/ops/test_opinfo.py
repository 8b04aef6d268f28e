"""A sample of each operator that `test_compile_ops` lacks, calls that eager refuses, and arguments in every
layout; `python -m tests.opinfo` takes them all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

from tests.opinfo import Outcome, swept, swept_errors, swept_layouts
from tests.ops import test_compile_ops

REST = [i for i in op_db if i not in test_compile_ops.INFOS and torch.float32 in i.dtypes]


def failures(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [o for o in outcomes if o.kind not in ("right", "not applicable")]


@pytest.mark.sample(30)
@pytest.mark.parametrize("info", REST, ids=lambda info: info.formatted_name)
def test_samples(info: Any) -> None:
    assert not failures(swept(info, torch.float32, 1, 20.0))


@pytest.mark.sample(16)
@pytest.mark.parametrize("info", op_db, ids=lambda info: info.formatted_name)
def test_calls_that_eager_refuses_raise_its_exception(info: Any, pytestconfig: pytest.Config) -> None:
    assert not failures(swept_errors(info, 3, 10.0, pytestconfig.option.sample_seed))


@pytest.mark.sample(12)
@pytest.mark.parametrize(
    "info", [i for i in op_db if torch.float32 in i.dtypes], ids=lambda info: info.formatted_name
)
def test_results_have_eagers_strides_and_values(info: Any, pytestconfig: pytest.Config) -> None:
    """Each tensor of one sample in a layout that is drawn."""
    seed = pytestconfig.option.sample_seed
    assert not failures(swept_layouts(info, torch.float32, 1, 10.0, seed, drawn_only=True))
