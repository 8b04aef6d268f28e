"""transformers, Accelerate and PEFT take a compiled model where they take the model: docs/hugging-face.md."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.generation.configuration_utils import CompileConfig

import fusion_compiler as fc
from tests import ROOT

PAGE = ROOT / "docs" / "hugging-face.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
# Packages that the tests' environment does without.
NEEDS = {"Trainer(": "accelerate", "Accelerator(": "accelerate", "peft": "peft"}

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip


def llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


def hybrid() -> Any:
    """A layer with a sliding window, and one without."""
    sizes = {**SIZES, "num_hidden_layers": 2, "head_dim": 8, "sliding_window": 4}
    return Gemma2ForCausalLM(Gemma2Config(**sizes)).eval()


def encoder_decoder() -> Any:
    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).eval()


def tokens(model: Any, length: int, **options: Any) -> torch.Tensor:
    prompt = torch.arange(1, 2 * length + 1, device=model.device).view(2, length)
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0, **options}
    return model.generate(prompt, **options)


@pytest.mark.filterwarnings("ignore:the graph is on cpu")
@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning", "ignore:'pin_memory':UserWarning")
@pytest.mark.parametrize("number", range(1, len(BLOCKS)))
def test_the_page(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for word, package in NEEDS.items():
        if word in BLOCKS[number]:
            pytest.importorskip(package, reason=f"this block of the page is about {package}")
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    for block in (BLOCKS[0], BLOCKS[number]):
        exec(compile(block, str(PAGE), "exec"), scope)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (llama, {}),
        (llama, {"cache_implementation": "static"}),
        (llama, {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}),
        (hybrid, {}),
        (hybrid, {"cache_implementation": "static"}),
        (encoder_decoder, {}),
        pytest.param(llama, {"cache_implementation": "offloaded"}, marks=pytest.mark.gpu),
        pytest.param(llama, {"cache_implementation": "offloaded_static"}, marks=pytest.mark.gpu),
    ],
    ids=lambda value: value.get("cache_implementation", "dynamic") if isinstance(value, dict) else None,
)
def test_generate_with_every_cache(make: Any, options: dict[str, Any]) -> None:
    """offloaded: transformers makes a CUDA stream for it."""
    gpu = "offloaded" in options.get("cache_implementation", "")
    model = make().to("cuda" if gpu else "cpu")
    lengths = (6, 4) if make is llama else (6,)
    want = [tokens(model, length, **options) for length in lengths]
    fast = fc.compile(model, backend="auto" if gpu else "eager")
    for length, each in zip(lengths, want, strict=True):
        assert torch.equal(tokens(fast, length, **options), each)
    assert any(plan.clusters for plan in fast.plan)


def test_generate_leaves_the_compiled_call_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a static cache, transformers compiles the call by Inductor, on GPUs or if the configuration says
    so."""
    everywhere = CompileConfig()
    everywhere._compile_all_devices = True  # type: ignore[assignment]
    calls: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: calls.append(args) or args[0])
    fast = fc.compile(nn.Sequential(llama())[0], backend="eager")
    calls.clear()
    tokens(fast, 4, cache_implementation="static", compile_config=everywhere)
    assert not calls


@pytest.mark.parametrize("first", ["compile", "wrap"])
def test_a_forward_wrapped_as_accelerate_does_it(first: str) -> None:
    """prepare() with mixed precision sets a forward on the model, unwrap_model() another."""

    def wrap(model: Any) -> Any:
        model._original_forward = model.forward
        mixed = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward.__func__)
        model.forward = MethodType(mixed, model)
        return model

    def unwrap(model: Any) -> Any:
        model.forward = MethodType(model.__dict__.pop("_original_forward").__func__, model)
        return model

    def compiled(model: Any) -> Any:
        return fc.compile(model, backend="eager")

    plain = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU())
    twin = wrap(copy.deepcopy(plain))
    fast = wrap(compiled(plain)) if first == "compile" else compiled(wrap(plain))
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(4, 8)
        got, want = fast(x), twin(x)
        assert got.dtype is want.dtype is dtype
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
        if dtype is torch.bfloat16:
            unwrap(fast), unwrap(twin)
    assert [plan.name for plan in fast.plan if "forward" in plan.name] == ["graph0.forward", "graph1.forward"]
