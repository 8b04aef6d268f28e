"""Products whose number of rows is only known at run time, on the device: a plan for each range of rows."""

from __future__ import annotations

import copy

import pytest
import torch

import fusion_compiler as fc
from fusion_compiler.passes.rewrites import row_ranges
from tests.exactness import not_as_close
from tests.passes.test_row_ranges import Mlp


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_number_of_rows(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_ranges, "LEAST", 0)
    model = Mlp(2048, dtype, inner=4096).cuda()
    wide = copy.deepcopy(model).double()
    fast = fc.compile(model, strict=True)
    for rows in (3, *torch.randperm(20).add(1).tolist(), 3):
        x = torch.randn(rows, 1, 2048, device="cuda", dtype=dtype)
        with torch.no_grad():
            ours, eager, exact = fast(x), model(x), wide(x.double())
        assert (reason := not_as_close(ours, eager, exact)) is None, f"{rows} rows: {reason}"
    plans = list(fast.plan)
    few = [plan for plan in plans if "more than" not in plan.notes.get("row ranges", "")]
    assert len(plans) == len(few) + 1 and len(few) <= 5
    reasons = {left.reason for plan in few for left in plan.leftovers if left.rule == "library call"}
    assert all("library: it takes" in reason for reason in reasons), reasons
    assert "phase" in few[1].notes
