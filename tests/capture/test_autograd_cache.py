"""Autograd's graphs from disk: the same plans and numbers as when they are traced, and never another's."""

from __future__ import annotations

import concurrent.futures
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fusion_compiler as fc
from fusion_compiler.capture import autograd_cache, graph_text
from fusion_compiler.compiler import compiler
from fusion_compiler.errors import FusionWarning
from fusion_compiler.passes.rewrites import innermost_channels
from fusion_compiler.support import store
from tests import ROOT, models

KNOWN = models.NAMES


class Block(nn.Module):
    """A norm, a product and what is kept of both for backward."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.product = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(self.product(self.norm(x)))


def compiled(model: Any, **options: Any) -> Any:
    """As a new process compiles it."""
    torch._dynamo.reset()
    return fc.compile(model, backend="eager", device="h200", **options)


def step(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """The result, and the gradients of its weighted sum."""
    x = x.clone().requires_grad_()
    weights = list(model.parameters()) if isinstance(model, nn.Module) else []
    result = model(x)
    loss = (result * torch.linspace(-1, 1, result.numel(), dtype=x.dtype).view_as(result)).sum()
    return [result.detach(), *torch.autograd.grad(loss, [x, *weights])]


def captured(model: Any) -> set[str]:
    """ "from disk", "anew" or both."""
    return {p.notes["seconds"].split(",")[0].removeprefix("captured ") for p in model.plan}


def first_and_second(model: Any, x: torch.Tensor, **options: Any) -> tuple[Any, Any]:
    """`model` compiled twice; both have to be as right as eager, and equal to the bit."""
    models: list[Any] = []
    results: list[list[torch.Tensor]] = []
    for _ in range(2):
        models.append(compiled(model, **options))
        results.append(step(models[-1], x))
    for a, b, eager in zip(*results, step(model, x), strict=True):
        torch.testing.assert_close(a, eager)
        assert torch.equal(a, b)
    return models[0], models[1]


def text_of(model: Any) -> str:
    lines = str(model.plan).splitlines()
    return "\n".join(line for line in lines if not line.startswith("seconds: "))


def entries() -> list[Path]:
    return [f for f in Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("aotautograd/*/*") if f.is_file()]


def test_a_graph_is_found_again_forward_and_backward() -> None:
    first, second = first_and_second(Block().double(), torch.randn(5, 16, dtype=torch.float64))
    assert captured(first) == {"anew"} and captured(second) == {"from disk"}
    assert text_of(first) == text_of(second) and len(second.plan) == 2
    assert len(entries()) == 1


def test_what_is_found_is_not_traced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Block(), torch.randn(5, 16)
    truth = step(compiled(model), x)

    def split(*_: Any, **__: Any) -> Any:
        raise AssertionError("partitioned again")

    monkeypatch.setattr(compiler, "partition", split)
    again = compiled(model)
    assert all(map(torch.equal, step(again, x), truth)) and captured(again) == {"from disk"}


def test_other_numbers_of_another_process(tmp_path: Path) -> None:
    """A second process with other weights and inputs: its own results, by the first one's graphs."""
    script = """
import sys, json, torch, fusion_compiler as fc
from tests.models import small, exact
model, batch = small("bert", dropout=False, seed=int(sys.argv[1]))
truth = exact(model)
truth(**batch).loss.backward()
def worst(m):
    pairs = zip(m.parameters(), truth.parameters(), strict=True)
    return max((a.grad - b.grad).abs().max().item() for a, b in pairs if b.grad is not None)
model(**batch).loss.backward()
eager = worst(model)
model.zero_grad(set_to_none=True)
ours = fc.compile(model, backend="eager", device="h200")
ours(**batch).loss.backward()
print(json.dumps([str(ours.plan), eager, worst(model)]))
"""
    environ = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}

    def run(seed: int) -> tuple[str, float, float]:
        command = [sys.executable, "-c", script, str(seed)]
        done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, check=True)
        return tuple(json.loads(done.stdout.splitlines()[-1]))

    with concurrent.futures.ThreadPoolExecutor(2) as pool:  # who writes at the same time
        (first, *_), (other, *_) = pool.map(run, (1, 2))
    second, eager, ours = run(3)
    plans = [[t for t in p.splitlines() if not t.startswith("seconds")] for p in (first, other, second)]
    assert plans[0] == plans[1] == plans[2]
    assert "captured anew" in first + other, "one of them, if the other began late"
    assert second.count("captured from disk") == 2
    assert ours <= 2 * eager + 1e-9


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", KNOWN)
def test_written_and_read_graphs_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[dict[str, Any]] = []
    write = graph_text.write

    def seen(gm: Any) -> dict[str, Any]:
        text = write(gm)
        if torch._guards.TracingContext.try_get() is not None:
            mode = torch._guards.TracingContext.get().fake_mode
            assert mode is not None
            assert write(graph_text.read(json.loads(json.dumps(text)), mode)) == text
            written.append(text)
        return text

    monkeypatch.setattr(autograd_cache, "write", seen)
    model, batch = models.small(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FusionWarning)
        ours = compiled(model)
        ours(**batch).loss.backward()
    refused = [p.notes["autograd"] for p in ours.plan if "autograd" in p.notes]
    assert written or refused


def literal(number: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: (x * number).sin()


def test_another_number_in_the_code_is_another_graph() -> None:
    x = torch.randn(7)
    for number in (2.0, 3.0, -0.0, 0.0, float("inf"), 2.0):
        model = compiled(literal(number))
        torch.testing.assert_close(model(x), torch.sin(x * number), equal_nan=True)
    assert captured(model) == {"from disk"} and len(entries()) == 5


def test_a_tensor_in_the_code_is_not_kept() -> None:
    x = torch.randn(3)
    for number in (2.0, 3.0):
        model = compiled(lambda x, n=number: (x * torch.tensor([n, 1.0, n])).sin())
        torch.testing.assert_close(model(x), torch.sin(x * torch.tensor([number, 1.0, number])))
        assert "it holds get_attr" in model.plan[0].notes["autograd"] and not entries()


@torch.library.custom_op("fusion_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@scaled.register_fake
def _scaled_fake(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_an_operator_of_the_users_is_not_kept() -> None:
    model = compiled(lambda x: scaled(x.sin()) + 1)
    x = torch.randn(4)
    torch.testing.assert_close(model(x), 2 * x.sin() + 1)
    assert "fusion_tests.scaled" in model.plan[0].notes["autograd"] and not entries()


def test_symbolic_sizes_are_not_kept() -> None:
    model = compiled(lambda x: x.sin() + 1, dynamic=True)
    x = torch.randn(4, 6)
    torch.testing.assert_close(model(x), x.sin() + 1)
    assert "autograd" in model.plan[0].notes and not entries()


def test_views_whose_sizes_pytorch_loses_are_not_kept() -> None:
    """A batched product with one matrix returns two views of its result."""

    def parts(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        product = a @ b
        return product.permute(1, 2, 0), product[..., ::2]

    a, b = torch.randn(17, 7, 5, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    for _ in range(2):
        model = compiled(parts)
        torch.testing.assert_close(model(a, b), parts(a, b))
    assert "sizes of _unsafe_view" in model.plan[0].notes["autograd"] and not entries()


def test_inputs_that_share_memory_are_not_kept() -> None:
    x = torch.randn(8)
    model = compiled(lambda a, b: a.sin() + b)
    torch.testing.assert_close(model(x[:4], x[4:]), x[:4].sin() + x[4:])
    assert "share memory" in model.plan[0].notes["autograd"] and not entries()


@pytest.mark.parametrize("change", ["option", "source", "dtype", "grad", "attention"])
def test_what_decides_is_part_of_the_key(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Block().double(), torch.randn(5, 16, dtype=torch.float64)
    step(compiled(model), x)
    options: dict[str, Any] = {}
    if change == "option":
        options = {"numerics": "eager"}
    if change == "source":
        monkeypatch.setattr(store, "source_digest", lambda: "another")
    if change == "dtype":
        model, x = model.float(), x.float()
    if change == "attention":
        monkeypatch.setattr(torch.backends.cuda, "flash_sdp_enabled", lambda: False)
    if change == "grad":
        model.norm.requires_grad_(False)
    other = compiled(model, **options)
    torch.testing.assert_close(other(x), model(x))
    assert captured(other) == {"anew"} and len(entries()) == 2


@pytest.mark.parametrize("damage", ["flip", "truncate", "replace"])
def test_a_damaged_entry_is_made_anew(damage: str) -> None:
    model, x = Block().double(), torch.randn(5, 16, dtype=torch.float64)
    step(compiled(model), x)
    (file,) = entries()
    held = bytearray(file.read_bytes())
    if damage == "flip":
        held[len(held) // 2] ^= 1
    file.write_bytes({"flip": held, "truncate": held[:100], "replace": b"cos\nsystem\n(S'true'\ntR."}[damage])
    with pytest.warns(FusionWarning, match="is damaged"):
        second = compiled(model)
        results = step(second, x)
    for a, b in zip(results, step(model, x), strict=True):
        torch.testing.assert_close(a, b)
    assert captured(second) == {"anew"}
    third = compiled(model)
    step(third, x)
    assert captured(third) == {"from disk"}


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    model, x = Block(), torch.randn(5, 16)
    step(compiled(model), x)
    (file,) = entries()
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.warns(FusionWarning, match="is damaged"):
        second = compiled(model)
        step(second, x)
    assert captured(second) == {"anew"} and (tmp_path / "elsewhere").exists()


def test_an_inference_graph_is_found_again() -> None:
    model, x = Block().double(), torch.randn(5, 16, dtype=torch.float64)
    for expected in ("anew", "from disk"):
        again = compiled(model)
        with torch.no_grad():
            torch.testing.assert_close(again(x), model(x))
        assert captured(again) == {expected}


def test_operators_of_our_own_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(innermost_channels, "has_tensor_units", lambda x: True)
    monkeypatch.setattr(innermost_channels, "_pays", lambda *_: True)
    x = torch.randn(2, 8, 5, 5)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 1))
    for expected in ("anew", "from disk"):
        again = compiled(net)
        torch.testing.assert_close(step(again, x), step(net, x))
        assert captured(again) == {expected}
        assert again.plan[0].notes["channels last"].startswith("done")


def test_a_gradient_that_nobody_sends_is_left_out_of_a_graph_from_disk() -> None:
    def two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sin(), x.exp()

    x = torch.randn(6, dtype=torch.float64)
    for expected in ("anew", "from disk"):
        model = compiled(two)
        leaf = x.clone().requires_grad_()
        model(leaf)[0].sum().backward()
        torch.testing.assert_close(leaf.grad, x.cos())
        assert captured(model) == {expected}
        leaf = x.clone().requires_grad_()
        sum(r.sum() for r in model(leaf)).backward()  # type: ignore[union-attr]
        torch.testing.assert_close(leaf.grad, x.cos() + x.exp())


def test_buffers_are_written_by_a_graph_from_disk() -> None:
    x = torch.randn(9, 4, dtype=torch.float64)
    for expected in ("anew", "from disk"):
        torch.manual_seed(0)
        plain, model = nn.BatchNorm1d(4).double(), nn.BatchNorm1d(4).double()
        again = compiled(model)
        for _ in range(3):
            torch.testing.assert_close(step(again, x), step(plain, x))
        torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()))
        assert captured(again) == {expected}


def test_the_cache_travels_with_the_artifacts_of_torch(tmp_path: Path, monkeypatch: Any) -> None:
    model, x = Block(), torch.randn(5, 16)
    torch.compiler._cache.CacheArtifactManager.clear()
    truth = step(compiled(model), x)
    saved = torch.compiler.save_cache_artifacts()
    assert saved is not None
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert not entries()
    torch.compiler.load_cache_artifacts(saved[0])
    again = compiled(model)
    assert all(map(torch.equal, step(again, x), truth)) and captured(again) == {"from disk"}


def test_pytorchs_switch_turns_it_off() -> None:
    with torch._functorch.config.patch(enable_autograd_cache=False):
        first, second = first_and_second(Block(), torch.randn(5, 16))
    assert captured(first) == captured(second) == {"anew"} and not entries()
    assert "is off" in first.plan[0].notes["autograd"]
