"""The passes in one list: each can be left out, printed, and its graph shown."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fusion_compiler as fc
from fusion_compiler.__main__ import main
from fusion_compiler.errors import InvalidOptionError
from fusion_compiler.pipeline import NAMES, PASSES

ROOT = Path(__file__).parent.parent


def pooled(x: Tensor) -> Tensor:
    return torch.nn.functional.adaptive_avg_pool2d(x, 1).relu()


def test_names_are_distinct_and_sentences_are_sentences() -> None:
    assert len({*NAMES}) == len(NAMES)
    assert all(re.fullmatch(r"[A-Z].+\.", each.does) for each in PASSES)


def test_every_rewrite_that_ends_a_module_is_in_the_list() -> None:
    modules = (ROOT / "fusion_compiler" / "passes").rglob("*.py")
    values = {name for file in modules for name in re.findall(r"^([A-Z_]+) = Pass\(", file.read_text(), re.M)}
    assert len(values) == len(PASSES) and values


@pytest.mark.parametrize("disable", ["max-pool lowering", ("max-pool lowerings",)])
def test_a_name_that_is_no_pass_is_an_error(disable: object) -> None:
    with pytest.raises(InvalidOptionError, match="disable") as caught:
        fc.compile(pooled, disable=disable)
    assert "names of passes" in str(caught.value) or "'max-pool lowering'" in str(caught.value)


def test_the_command_line_prints_every_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["passes"]) == 0
    text = capsys.readouterr().out
    assert all(f"{each.name}  ({each.level})" in text and each.does in text for each in PASSES)
    assert main(["passes", "--json", "-"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == [*NAMES]


def test_a_graph_is_shown_after_the_pass_that_changed_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FUSION_DUMP", str(tmp_path))
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path / "cache"))
    fc.compile(pooled, backend="eager")(torch.randn(2, 3, 5, 5))
    (file,) = tmp_path.rglob("graph-global_average_pool.py")
    assert "mean" in file.read_text()
    assert not [*tmp_path.rglob("graph-fused_attention.py")]
