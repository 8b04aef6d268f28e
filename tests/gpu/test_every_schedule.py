"""Every schedule of every cluster of whole models, at their own widths with two layers, on the device."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.models.workloads import Workload
from tests.codegen.test_every_schedule import EACH, check

LAYERS = 2  # as many as have all kinds of clusters


@pytest.mark.filterwarnings("ignore::fusion_compiler.FusionWarning")  # clusters run by ATen
@EACH
def test_every_schedule_is_right(workload: Workload) -> None:
    sizes = {n: min(v, LAYERS) if n == "layers" else v for n, v in workload.sizes.items()}
    check(dataclasses.replace(workload, sizes=sizes), "cuda", False, "triton")
