"""The architectures of transformers: a handful of tiny ones compiled, and what is made of results.

All of them: python -m benchmarks architectures
"""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch

from benchmarks.numerics import architectures
from benchmarks.numerics.architectures import (
    DIFFERS,
    FAILS,
    OUT,
    SAME,
    Result,
    compare,
    describe,
    examine,
    rows_of,
    step,
    totals,
)
from benchmarks.numerics.tiny_models import Batch, CannotBuildError, tiny


# Of different kinds: fused projections, bottlenecks between norms, hashed attention with breaks in the graph.
@pytest.mark.parametrize("name", ["phi3", "mobilebert", "yoso"])
def test_results_and_gradients_are_as_close_as_eagers(name: str) -> None:
    row = examine(name, "auto")
    assert row["status"] == SAME and row["kernels"] > 20, row


def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: Any, batch: Batch, backend: str) -> tuple[Result, dict[str, Any]]:
        with torch.no_grad():
            model.get_input_embeddings().weight[5:8] *= 1 + 1e-4
        return step(model, model, batch), {"graphs": 0, "kernels": 0}

    monkeypatch.setattr(architectures, "compiled_step", wrong)
    row = examine("gpt2", "auto")
    assert row["status"] == DIFFERS and "of the allowed error" in describe(row)


def result(**values: torch.Tensor) -> Result:
    return Result({n.replace("_", " "): t for n, t in values.items()}, {})


def test_what_counts_as_different() -> None:
    exact = torch.randn(1000, dtype=torch.float64)
    truth = result(y=exact)
    eager = result(y=(exact + 1e-6 * torch.randn(1000)).float())
    worst, name = compare(result(y=(exact + 1e-6 * torch.randn(1000)).float()), eager, truth)
    assert worst < 0.5 and name == "y"
    assert compare(result(y=(exact + 1e-5 * torch.randn(1000)).float()), eager, truth)[0] > 1
    spoilt = eager.tensors["y"].clone()
    spoilt[3] = torch.nan
    assert compare(result(y=spoilt), eager, truth)[0] == torch.inf
    assert compare(result(y=eager.tensors["y"].double()), eager, truth)[0] == torch.inf
    assert compare(result(), eager, truth)[0] == torch.inf
    both = {"y": eager.tensors["y"]}
    assert compare(result(**both, d_w=torch.zeros(3)), eager, truth)[0] < 1, "eager leaves it undefined"
    assert compare(result(**both, d_w=torch.ones(3)), eager, truth)[0] == torch.inf


def test_what_cannot_be_built_says_why() -> None:
    with pytest.raises(CannotBuildError, match="build: "):
        tiny("timm_wrapper")
    assert examine("timm_wrapper", "auto")["status"] == OUT


def row_of(name: str, backend: str, device: str) -> dict[str, Any]:
    while name == "endless":
        pass
    if name == "broken":
        raise RuntimeError("of this reason")
    return {"architecture": name, "status": SAME, "backend": backend, "reason": device}


def test_each_has_a_process_and_a_time_of_its_own() -> None:
    options = argparse.Namespace(device="cpu", backend="auto", budget=1, jobs=2)
    rows = {r["architecture"]: r for r in rows_of(["endless", "broken", "well"], options, row_of)}
    assert rows["well"]["status"] == SAME
    assert rows["broken"]["status"] == FAILS and "of this reason" in rows["broken"]["reason"]
    assert rows["endless"]["status"] == FAILS and "more than 1 s" in rows["endless"]["reason"]
    assert totals(list(rows.values()))[FAILS] == 2
