"""A sample of each operator that `test_compile_ops` lacks; `python -m tests.opinfo` takes them all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

from tests.ir import test_compile_ops
from tests.opinfo import swept

REST = [i for i in op_db if i not in test_compile_ops.INFOS and torch.float32 in i.dtypes]


@pytest.mark.sample(60)
@pytest.mark.parametrize("info", REST, ids=lambda info: info.formatted_name)
def test_samples(info: Any) -> None:
    failed = [o for o in swept(info, torch.float32, 1, 20.0) if o.kind not in ("right", "not applicable")]
    assert not failed
