"""Plans and kernels' texts from disk: equal to those that are made, and never another graph's."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fusion_compiler import api
from fusion_compiler.errors import FusionWarning
from fusion_compiler.ir import record
from fusion_compiler.ir.decision import noted
from fusion_compiler.ir.loops import Constant
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.passes.chunks import chunk
from fusion_compiler.runtime.cache import PLANS
from fusion_compiler.runtime.kept_plans import KeptPlans, Programs
from tests import models
from tests.capture.test_autograd_cache import Block, captured, compiled, first_and_second, step, text_of
from tests.passes import test_chunked_loss


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path))


def planned(model: Any) -> list[bool]:
    """Of each graph, whether its plan came from disk."""
    return ["planned from disk" in p.notes["seconds"] for p in model.plan]


def records() -> list[Path]:
    return sorted((Path(os.environ["FUSION_CACHE_DIR"]) / PLANS).glob("*.json"))


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", models.NAMES)
def test_every_model_is_read_as_it_was_written(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans and programs of kernels that are never launched: the same, part by part."""
    checked: list[str] = []

    def put(self: KeptPlans, key: str, plan: FusionPlan, programs: Programs) -> None:
        text = json.dumps(record.write_decisions(plan, programs))
        assert plan.setting is not None
        again, read = record.read_decisions(json.loads(text), plan.name, plan.dag, plan.setting)
        assert again == plan and read == dict(programs) and str(again) == str(plan)
        checked.append(plan.name)

    monkeypatch.setattr(KeptPlans, "put", put)
    model, batch = models.small(name, dropout=False)
    done = compiled(model)
    done(**batch)["loss"].backward()
    left = [p.name for p in done.plan if "not kept on disk" in p.notes.get("autograd", "")]
    assert {*checked, *left} == {p.name for p in done.plan}


def test_a_second_compilation_plans_and_emits_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Block(), torch.randn(5, 16)
    torch._dynamo.reset()
    first = api.compile(model, backend="interpret", device="h200")
    truth = step(first, x)

    def again(*_: Any, **__: Any) -> Any:
        raise AssertionError("made again")

    monkeypatch.setattr(api, "plan_clusters", again)
    monkeypatch.setattr(api, "emit", again)
    torch._dynamo.reset()
    second = api.compile(model, backend="interpret", device="h200")
    for a, b, eager in zip(step(second, x), truth, step(model, x), strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, eager)
    assert not any(planned(first)) and all(planned(second)) and text_of(second) == text_of(first)


def test_what_decides_about_a_plan_is_in_its_key() -> None:
    model, x = Block(), torch.randn(5, 16)
    step(compiled(model), x)
    for options in ({"numerics": "eager"}, {"memory": 0.5}, {"tune": False}, {"cudagraphs": False}):
        other = compiled(model, **options)
        step(other, x)
        assert not any(planned(other)), options
    again = compiled(model)
    step(again, torch.randn(6, 16))  # another size
    assert not any(planned(again))


@pytest.mark.parametrize("damage", ["truncated", "flipped", "another class", "another graph"])
def test_damaged_records_are_made_again(damage: str) -> None:
    model, x = Block(), torch.randn(5, 16)
    truth = step(compiled(model), x)
    for file in records():
        spoil(file, damage)
    again = compiled(model)
    with pytest.warns(FusionWarning, match="damaged and is made anew"):
        assert all(map(torch.equal, step(again, x), truth))
    assert captured(again) == {"from disk"} and not any(planned(again))
    last = compiled(model)
    assert all(map(torch.equal, step(last, x), truth)) and all(planned(last))


def spoil(file: Path, damage: str) -> None:
    """Whole records too: a checksum tells what happened by accident, and no more."""
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-30])
        return
    if damage == "flipped":
        text = bytearray(file.read_bytes())
        text[len(text) // 2] ^= 1
        file.write_bytes(bytes(text))
        return
    kept = KeptPlans()._cache
    ((key, value),) = ((k, v) for k, v in kept.list().items() if kept._file(k) == file)
    text = json.dumps(value)
    old, new = '{"Cluster"', '{"Path"'
    if damage == "another graph":
        cluster = next(made["Cluster"] for made in value["values"] if "Cluster" in made)
        old = json.dumps(cluster[1])
        new = json.dumps(["gone"])
    assert old in text
    kept.put(key, json.loads(text.replace(old, new)))


def test_a_value_is_written_once_and_is_what_it_was() -> None:
    """1, 1.0 and True are equal in Python and no values of each other here."""
    made = [Constant(value, torch.float32) for value in (1, 1.0, True, 0.0, -0.0)]
    written = json.loads(json.dumps(record.write((*made, *made, (made[0],)))))
    again = record.read(written)
    assert len(written["values"]) == 5
    assert [repr(v) for v in again] == [repr(v) for v in (*made, *made, (made[0],))]
    for wrong in ({"at": 5}, {"at": -1}, {"at": "0"}):
        with pytest.raises((ValueError, TypeError)):
            record.read({**written, "value": [wrong]})
    later = {"Constant": [{"at": 1}, {"dtype": "float32"}]}  # made of what comes behind it
    with pytest.raises(ValueError, match="value 1 of 0"):
        record.read({"value": {"at": 0}, "values": [later, later]})


def test_what_cannot_be_written_is_told() -> None:
    model, x = Block(), torch.randn(5, 16)
    step(done := compiled(model), x)
    plan = next(iter(done.plan))
    ended = plan.decided(noted("search", "ended"))
    assert "search ended" in str(KeptPlans().put("a", ended, {}))
    strange = replace(plan, leftovers=(object(),))  # type: ignore[arg-type]
    assert KeptPlans().put("b", strange, {}) == "it holds object " + str(strange.leftovers[0])[:40]


def test_a_folder_of_another_users_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Block(), torch.randn(5, 16)
    step(done := compiled(model), x)
    plan, before = next(iter(done.plan)), records()
    owner = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: owner)
    assert before and "another user" in str(KeptPlans().put("c", plan, {})) and records() == before
    key = json.loads(before[0].read_text())["key"]
    assert plan.setting is not None
    assert KeptPlans().get(key, plan.name, plan.dag, plan.setting) is None


def test_numbers_are_those_of_eager() -> None:
    first, second = first_and_second(Block().double(), torch.randn(3, 16, dtype=torch.float64))
    assert not any(planned(first)) and all(planned(second))


@pytest.mark.parametrize(
    "loss", [test_chunked_loss.mean, test_chunked_loss.each, test_chunked_loss.preferred]
)
def test_loops_over_chunks_are_kept(loss: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, backward, and what runs for one chunk: nothing is traced, planned or printed again."""
    small = chunk.Limits(bytes=0, width=6, rows=4, columns=30, alignment=8)
    monkeypatch.setattr(chunk, "LIMITS", small)
    x, w, t = test_chunked_loss.inputs(torch.float32)

    def run() -> tuple[Any, list[torch.Tensor]]:
        torch._dynamo.reset()
        fast = api.compile(loss, backend="interpret", device="h200")
        return fast, test_chunked_loss.results(fast, x, w, t)

    first, truth = run()

    def again(*_: Any, **__: Any) -> Any:
        raise AssertionError("made again")

    for stage in ("plan_clusters", "emit", "partition"):
        monkeypatch.setattr(api, stage, again)
    second, found = run()
    loops = [
        o.target for p in second.plan for n in p.dag.order if "chunks_of" in str((o := p.dag.op(n)).target)
    ]
    assert loops and any(p.name.endswith("_rows") for p in second.plan)
    assert captured(second) == {"from disk"} and all(planned(second)) and text_of(second) == text_of(first)
    for a, b, eager in zip(found, truth, test_chunked_loss.results(loss, x, w, t), strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, eager)


def test_another_number_in_a_loop_over_chunks_is_another_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    small = chunk.Limits(bytes=0, width=6, rows=4, columns=30, alignment=8)
    monkeypatch.setattr(chunk, "LIMITS", small)
    x, w, t = test_chunked_loss.inputs(torch.float32)
    for number in (2.0, 3.0, 2.0):

        def scaled(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor, number: float = number) -> torch.Tensor:
            return F.cross_entropy(test_chunked_loss.logits_of(x, w) * number, t.flatten())

        fast = compiled(scaled)
        ours = test_chunked_loss.results(fast, x, w, t)
        for a, b in zip(ours, test_chunked_loss.results(scaled, x, w, t), strict=True):
            torch.testing.assert_close(a, b)
    assert captured(fast) == {"from disk"}
