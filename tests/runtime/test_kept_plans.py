"""Plans and kernels' texts from disk: equal to those that are made, and never another graph's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fusion_compiler import api
from fusion_compiler.compiler import compiler, planning, runners
from fusion_compiler.errors import FusionWarning
from fusion_compiler.ir import record
from fusion_compiler.ir.decision import noted
from fusion_compiler.ir.loops import Constant
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.passes.chunks import chunk
from fusion_compiler.patterns import DEFAULT_PATTERNS, cluster_hint
from fusion_compiler.runtime.kept_plans import Programs, write_plan
from fusion_compiler.support.store import PLAN, Key, Store
from tests import ROOT, models
from tests.capture.test_autograd_cache import Block, captured, compiled, first_and_second, step, text_of
from tests.passes import test_chunked_loss


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path))


def planned(model: Any) -> list[bool]:
    """Return for each graph whether its plan came from disk."""
    return ["planned from disk" in p.notes["seconds"] for p in model.plan]


def records() -> list[Path]:
    return Store().files(PLAN)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", models.NAMES)
def test_every_model_is_read_as_it_was_written(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans and programs of kernels that are never launched: the same, part by part."""
    checked: list[str] = []

    def put(store: Store, key: Key, plan: FusionPlan, programs: Programs) -> None:
        text = json.dumps(record.write_decisions(plan, programs))
        assert plan.setting is not None
        again, read = record.read_decisions(json.loads(text), plan.name, plan.dag, plan.setting)
        assert again == plan and read == dict(programs) and str(again) == str(plan)
        checked.append(plan.name)

    monkeypatch.setattr(planning, "write_plan", put)
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

    monkeypatch.setattr(planning, "plan_clusters", again)
    monkeypatch.setattr(runners, "emit", again)
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


PROCESS = """
import sys, json, torch, fusion_compiler as fc
from torch.nn import functional as F
from fusion_compiler.compiler import planning, runners
from fusion_compiler.capture import capture
from fusion_compiler.patterns import DEFAULT_PATTERNS

SLOPE = float(sys.argv[2])

def before(x):
    return torch.log(1 + torch.exp(x)) * SLOPE

def after(x):
    return F.softplus(x) * SLOPE

def bounded(limit):
    return lambda x: x.shape[-1] <= limit

def forbidden(*args, **kwargs):
    raise AssertionError("planned again")

if sys.argv[1] == "second":
    planning.plan_clusters = planning.match_all = runners.emit = capture.trace_pre_autograd = forbidden

rule = fc.rewrite(before, after, torch.randn(3, 4), domain="finite", where=bounded(64))
hint = fc.cluster_hint(lambda x: torch.tanh(x).square(), torch.randn(3, 4), name="squared", backward=True)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
call = lambda x: before(torch.tanh(model(x)).square())
x = torch.randn(5, 8, requires_grad=True)
patterns = (rule, hint, *DEFAULT_PATTERNS)
fast = fc.compile(call, backend="interpret", device="h200", strict=True, patterns=patterns)
ours, = torch.autograd.grad(fast(x).sum(), x)
truth, = torch.autograd.grad(call(x).sum(), x)
torch.testing.assert_close(ours, truth)
text = [line for line in str(fast.plan).splitlines() if not line.startswith("seconds: ")]
print(json.dumps([["planned from disk" in p.notes["seconds"] for p in fast.plan], text]))
"""


def in_a_process(turn: str, slope: str = "2.0") -> tuple[list[bool], list[str]]:
    command = [sys.executable, "-W", "ignore", "-c", PROCESS, turn, slope]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return tuple(json.loads(done.stdout.splitlines()[-1]))


def test_a_second_process_plans_nothing_with_a_rewrite_and_a_hint_of_the_users() -> None:
    first, text = in_a_process("first")
    assert first == [False, False]
    assert any("squared" in line for line in text) and any("ops replaced" in line for line in text)
    assert in_a_process("second") == ([True, True], text)
    assert in_a_process("other", "3.0")[0] == [False, False], "a global that a rule reads is in the key"


def hinted(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def test_other_patterns_are_other_plans() -> None:
    x, example = torch.randn(5, 16), torch.randn(3, 4)
    named = cluster_hint(hinted, example, name="mine")
    every = (DEFAULT_PATTERNS, (), (named,), (named, *DEFAULT_PATTERNS), (*DEFAULT_PATTERNS, named))
    seen: list[str] = []
    for patterns in every:
        assert not any(planned(run(hinted, x, patterns))), patterns
    for patterns in every:
        again = run(hinted, x, patterns)
        assert all(planned(again))
        seen.append(text_of(again))
    assert "mine" in seen[2] and "mine" not in seen[1] and len(set(seen)) >= 4


def run(function: Any, x: torch.Tensor, patterns: Any) -> Any:
    fast = compiled(function, patterns=patterns)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), function(x))
    return fast


def test_a_pattern_that_reads_what_changes_is_not_kept() -> None:
    """The plan would be found by a process in which the pattern does something else."""
    x, asked = torch.randn(5, 16), list[int]()

    def where(x: Any) -> bool:
        asked.append(x.shape[-1])
        return len(asked) < 2

    counting = cluster_hint(hinted, torch.randn(3, 4), name="mine", where=where)
    first = run(hinted, x, (counting,))
    assert asked == [16] and not any(planned(first))
    other = run(hinted, torch.randn(5, 32), (counting,))
    reason = "not kept: pattern mine reads a value that has changed since the first call"
    assert other.plan[0].notes["plan on disk"] == reason and not any(planned(other))


@pytest.mark.parametrize("damage", ["truncated", "flipped", "another class", "another graph"])
def test_damaged_records_are_made_again(damage: str) -> None:
    model, x = Block(), torch.randn(5, 16)
    truth = step(compiled(model), x)
    for file in records():
        spoil(file, damage)
    again = compiled(model)
    with pytest.warns(FusionWarning, match="damaged: it is computed again and replaced"):
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
    key = Key(PLAN, file.stem, {})
    value = Store().get(key)
    text = json.dumps(value)
    old, new = '{"Cluster"', '{"Path"'
    if damage == "another graph":
        cluster = next(entry["Cluster"] for entry in value["values"] if "Cluster" in entry)
        old = json.dumps(cluster[1])
        new = json.dumps(["gone"])
    assert old in text
    Store().put(key, json.loads(text.replace(old, new)))


def test_a_value_is_written_once_and_is_what_it_was() -> None:
    """1, 1.0 and True are equal in Python and no values of each other here."""
    constants = [Constant(value, torch.float32) for value in (1, 1.0, True, 0.0, -0.0)]
    written = json.loads(json.dumps(record.write((*constants, *constants, (constants[0],)))))
    again = record.read(written)
    assert len(written["values"]) == 5
    assert [repr(v) for v in again] == [repr(v) for v in (*constants, *constants, (constants[0],))]
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
    key = Key(PLAN, "a" * 64, {})
    assert "search ended" in str(write_plan(Store(), key, ended, {}))
    strange = replace(plan, calls=(object(),))  # type: ignore[arg-type]
    assert write_plan(Store(), key, strange, {}) == "it holds object " + str(strange.calls[0])[:40]


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

    for module, stage in ((planning, "plan_clusters"), (runners, "emit"), (compiler, "partition")):
        monkeypatch.setattr(module, stage, again)
    second, repeated = run()
    loops = [
        o.target for p in second.plan for n in p.dag.order if "chunks_of" in str((o := p.dag.op(n)).target)
    ]
    assert loops and any(p.name.endswith("_rows") for p in second.plan)
    assert captured(second) == {"from disk"} and all(planned(second)) and text_of(second) == text_of(first)
    for a, b, eager in zip(repeated, truth, test_chunked_loss.results(loss, x, w, t), strict=True):
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
