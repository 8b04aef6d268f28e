"""What all tests share: the gpu marker, and a caches' home of their own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from fusion_compiler.passes.fuse import candidates


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the files in tests/golden")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything under tests/gpu needs a device; without one it is skipped, and says so."""
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if Path(__file__).parent / "gpu" in item.path.parents:
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)


@pytest.fixture(scope="session", autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test reads what an earlier run left on disk, and none writes to the user's cache."""
    os.environ.setdefault("FUSION_CACHE_DIR", str(tmp_path_factory.mktemp("fusion-cache")))


@pytest.fixture(autouse=True)
def own_graphs(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd's graphs are kept, and found again within one test alone."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("graphs")))


@pytest.fixture
def small_matrices(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Clusters of matrices that are too small to be worth one."""
    monkeypatch.setattr(candidates, "LIBRARY_MARGIN", float("inf"))
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    """Dynamo keeps compiled code per function object; tests must not see each other's."""
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Random inputs, the same in every run; FUSION_SEED=7 draws others."""
    torch.manual_seed(int(os.environ.get("FUSION_SEED", "0")))
