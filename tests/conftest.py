"""Options, samples of long tests, the gpu marker, and caches of their own, for all tests."""

from __future__ import annotations

import os
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from fusion_compiler.compiler import compiler
from fusion_compiler.errors import WarnOnce
from fusion_compiler.passes.fuse import candidates


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the files in tests/golden")
    parser.addoption("--sweep", action="store_true", help="run every case of the tests marked `sample`")
    parser.addoption("--sample-seed", type=int, help="repeat the sample that a run drew from this seed")


def pytest_configure(config: pytest.Config) -> None:
    """Draw the seed of the samples; workers of pytest-xdist get that of the process that starts them."""
    if config.option.sample_seed is None:
        inherited: dict[str, int] = getattr(config, "workerinput", {})
        config.option.sample_seed = inherited.get("sample_seed", random.SystemRandom().randrange(2**31))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["sample_seed"] = node.config.option.sample_seed


def pytest_report_header(config: pytest.Config) -> str:
    seed = config.option.sample_seed
    return "every case of every test" if config.option.sweep else f"sampled tests: --sample-seed {seed}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests/gpu where there is no device, and draw the cases of tests that are marked `sample`."""
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if Path(__file__).parent / "gpu" in item.path.parents:
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
    if not config.option.sweep:
        skipped = left_out(items, config.option.sample_seed)
        config.hook.pytest_deselected(items=[item for item in items if item in skipped])
        items[:] = [item for item in items if item not in skipped]


def left_out(items: list[pytest.Item], seed: int) -> set[pytest.Item]:
    """Return the cases that a run without --sweep leaves out.

    `sample(count)` keeps that many cases of a test. Tests of one file with the same `group` count as one.
    """
    by_test: dict[str, list[pytest.Item]] = defaultdict(list)
    kept: dict[str, int] = {}
    for item in items:
        marker = item.get_closest_marker("sample")
        if marker is not None:
            group = marker.kwargs.get("group")
            file = item.nodeid.partition("::")[0]
            test = item.nodeid.partition("[")[0] if group is None else f"{file}::{group}"
            by_test[test].append(item)
            kept[test] = marker.args[0]
    skipped: set[pytest.Item] = set()
    for test, cases in by_test.items():
        draw = random.Random(f"{seed} {test}")
        skipped.update(draw.sample(cases, max(0, len(cases) - kept[test])))
    return skipped


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
def fresh_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning that a process sees once is seen by each test that causes it."""
    monkeypatch.setattr(compiler, "of_process", WarnOnce())


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Random inputs, the same in every run; FUSION_SEED=7 draws others."""
    torch.manual_seed(int(os.environ.get("FUSION_SEED", "0")))
