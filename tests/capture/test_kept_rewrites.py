"""Graphs that are neither traced above autograd nor rewritten again: all that decides it, and no mix-ups."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fusion_compiler.capture import capture, kept_rewrites
from fusion_compiler.ir.record import NotWritable
from fusion_compiler.patterns import DEFAULT_PATTERNS, Rewrite
from fusion_compiler.support import store
from fusion_compiler.support.store import REWRITE, Key, Store
from tests import models
from tests.capture.test_autograd_cache import Block, captured, compiled, entries, scaled, step, text_of


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path))


def records() -> list[Path]:
    return Store().files(REWRITE)


def no_trace(*_: Any, **__: Any) -> Any:
    raise AssertionError("traced again")


def key(function: Callable[..., Any], *inputs: Any, options: str = "", **settings: Any) -> str:
    """The key of the first graph of a call, or why there is none."""
    digests: list[str] = []

    def backend(gm: Any, inputs_: Any) -> Any:
        try:
            digests.append(kept_rewrites.key_of(gm, inputs_, options).digest)
        except NotWritable as reason:
            digests.append(f"none: {reason}")
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, **{"dynamic": False, **settings})(*inputs)
    return digests[0]


def test_a_graph_that_was_rewritten_is_not_traced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Block(), torch.randn(5, 16)
    truth = step(first := compiled(model), x)
    assert captured(first) == {"anew"} and len(records()) == 1
    monkeypatch.setattr(capture, "trace_pre_autograd", no_trace)
    again = step(second := compiled(model), x)
    assert captured(second) == {"from disk"} and text_of(second) == text_of(first)
    assert all(map(torch.equal, again, truth))
    assert "rewrites" not in second.plan.seconds


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_models_are_the_same_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = models.small(name, dropout=False)

    def one(fast: Any) -> list[torch.Tensor]:
        model.zero_grad()
        loss = fast(**batch).loss
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    truth, first = one(fast := compiled(model)), text_of(fast)
    monkeypatch.setattr(capture, "trace_pre_autograd", no_trace)
    again = one(fast := compiled(model))
    assert all(map(torch.equal, truth, again)) and text_of(fast) == first
    torch.testing.assert_close(again, one(model))


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", models.NAMES)
def test_keys_of_models_are_the_same_each_time(name: str) -> None:
    model, batch = models.small(name)
    keys = {key(lambda: model(**batch)) for _ in range(2)}
    assert len(keys) == 1


def mixed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x @ w, (4,)).softmax(-1).view(-1) * 2.0


def test_all_that_a_trace_depends_on_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    keys = [key(mixed, x, w)]
    assert key(mixed, x + 1, w.clone()) == keys[0]  # other numbers in the tensors

    def add(function: Callable[..., Any] = mixed, *inputs: Any, **settings: Any) -> None:
        keys.append(key(function, *(inputs or (x, w)), **settings))

    add(options="other")
    add(mixed, torch.randn(8, 4), w)
    add(mixed, x.double(), w.double())
    add(mixed, x.t(), w)
    add(mixed, x.clone().requires_grad_(), w)
    add(mixed, x, nn.Parameter(w))
    add(mixed, nn.Parameter(x), w)
    add(lambda x, w: F.layer_norm(x @ w, (4,)).softmax(-1).view(-1) * 3.0)
    add(lambda x, w: F.layer_norm(x @ w, (4,)).softmax(0).view(-1) * 2.0)
    add(lambda x, w: F.layer_norm(x @ w, (4,)).softmax(-1).reshape(-1) * 2.0)
    add(lambda x, w: F.layer_norm(w @ x, (4,)).softmax(-1).view(-1) * 2.0)
    add(lambda x, w: F.rms_norm(x @ w, (4,)).softmax(-1).view(-1) * 2.0)
    with torch.no_grad():
        add()
    with torch.autocast("cpu", torch.bfloat16):
        add()
    with torch.autocast("cpu", torch.float16):
        add()
    with _undone(torch.use_deterministic_algorithms, True, False):
        add()
    with _undone(torch.set_default_dtype, torch.float64, torch.float32):
        add()
    with monkeypatch.context() as patch:
        patch.setattr(kept_rewrites.opt_einsum, "strategy", "greedy")
        add()
    with monkeypatch.context() as patch:
        patch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
        add()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        add()
    with monkeypatch.context() as patch:
        patch.setattr(store, "source_digest", lambda: "another")
        add()
    with torch._functorch.config.patch(activation_memory_budget=0.25):
        add()
    assert not any("none" in k for k in keys)
    assert not [(keys.index(k), i) for i, k in enumerate(keys) if keys.index(k) < i]


@contextlib.contextmanager
def _undone(setting: Callable[[Any], Any], value: Any, before: Any) -> Any:
    setting(value)
    try:
        yield
    finally:
        setting(before)


@torch._dynamo.allow_in_graph
def opaque(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


def test_what_cannot_be_told_has_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 4)
    assert "none: what" in key(lambda x: scaled(x), x)
    assert "none: what" in key(lambda x: opaque(x), x)
    assert "an input is a SymInt" in key(lambda x: x.sin(), x, dynamic=True)
    assert "share memory" in key(lambda a, b: a + b, x[:2], x[2:])
    assert "none: it holds get_attr" in key(lambda x: torch.utils.checkpoint.checkpoint(torch.sin, x), x)
    softmax = F.softmax
    monkeypatch.setattr(F, "softmax", lambda *a, **k: softmax(*a, **k) * 2)
    assert "torch.nn.functional.softmax is not PyTorch's own" in key(lambda x: x.cos(), x)


def test_a_function_mode_has_no_key() -> None:
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    gm = torch.fx.symbolic_trace(lambda x: x.sin())
    with Mode(), pytest.raises(NotWritable, match="mode"):
        kept_rewrites.key_of(gm, [torch.randn(3)], "")


def wide(x: torch.Tensor) -> torch.Tensor:
    return torch.log(1 + torch.exp(x))


def test_a_rule_of_the_users_is_matched_once_for_each_value_that_it_holds() -> None:
    x = torch.randn(6)
    for number, record_count in ((1.0, 1), (2.0, 2), (1.0, 2)):

        def soft(x: torch.Tensor, number: float = number) -> torch.Tensor:
            return F.softplus(x) * number / number

        rule = Rewrite("soft", wide, (torch.randn(6),), after=soft, domain="finite")
        before = len(records())
        fast = compiled(wide, patterns=(rule, *DEFAULT_PATTERNS))
        torch.testing.assert_close(fast(x), wide(x))
        assert len(records()) == record_count and "ops replaced" in fast.plan[0].notes["soft"]
        assert ("rewrites" in fast.plan.seconds) == (len(records()) > before)


def test_a_rule_that_holds_a_tensor_is_matched_each_time() -> None:
    x, one = torch.randn(6), torch.ones(1)

    def where(x: Any) -> bool:
        return bool(one > 0) and x.shape[0] == 6

    rule = Rewrite("soft", wide, (torch.randn(6),), where, after=F.softplus, domain="finite")
    for _ in range(2):
        fast = compiled(wide, patterns=(rule, *DEFAULT_PATTERNS))
        torch.testing.assert_close(fast(x), wide(x))
        assert "rewrites" in fast.plan.seconds and not records()
        reason = "not kept: pattern soft has no stable hash: it reads a Tensor"
        assert fast.plan[0].notes["plan on disk"] == reason


@pytest.mark.parametrize(
    "damage", ["truncated", "another form", "no such graph", "entry gone", "entry damaged"]
)
@pytest.mark.filterwarnings("ignore:.*is damaged")
def test_a_damaged_record_costs_a_trace_and_no_result(damage: str) -> None:
    model, x = Block(), torch.randn(5, 16)
    truth = step(compiled(model), x)
    (file,), (entry,) = records(), entries()
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-20])
    if damage == "entry gone":
        entry.unlink()
    if damage == "entry damaged":
        entry.write_bytes(entry.read_bytes()[:-20])
    if damage in ("another form", "no such graph"):
        form = {"autograd": "none" if damage == "no such graph" else 3, "notes": 5}
        Store().put(Key(REWRITE, file.stem, {}), form)
    again = compiled(model)
    assert all(map(torch.equal, step(again, x), truth)) and "rewrites" in again.plan.seconds
    last = compiled(model)
    assert all(map(torch.equal, step(last, x), truth)) and "rewrites" not in last.plan.seconds
