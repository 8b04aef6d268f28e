"""`generate()` as transformers has it: which graphs it takes, in which the cache is written in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import fusion_compiler as fc
from fusion_compiler.ir.writes import base_of
from tests.capture.test_in_place import copies


def llama() -> Any:
    """A model that repeats itself late: greedy tokens of random weights soon do."""
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(8 if p.dim() > 1 else 1)
    return model


def generated(model: Any, prompt: Tensor, count: int, cache: str, **options: Any) -> Tensor:
    options |= {"cache_implementation": "static"} if cache == "static" else {}
    lengths = {"min_new_tokens": count, "max_new_tokens": count}
    return model.generate(prompt, do_sample=False, pad_token_id=0, **lengths, **options)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("cache", "backend", "count", "graphs"),
    [
        ("static", "eager", 200, [2, 2, 4, 4]),
        ("static", "interpret", 24, [2, 2, 4, 4]),
        ("dynamic", "eager", 200, [3, 3, 4, 4]),
    ],
)
def test_tokens_are_eagers_and_graphs_are_few(
    cache: str, backend: str, count: int, graphs: list[int]
) -> None:
    """static: the prompt and a token; both again, with symbols, for a cache of another length."""
    model = llama()
    fast = fc.compile(model, backend=backend, device="h200")
    seen: list[int] = []
    for length in (9, 9, 13, 5):
        prompt = torch.randint(3, 120, (2, length))
        want = generated(model, prompt, count, cache)
        assert torch.equal(generated(fast, prompt, count, cache), want)
        assert want.shape == (2, length + count) and len(want[0].unique()) > 8
        seen.append(len(fast.plan))
    assert seen == graphs
    if cache == "static":
        for plan in fast.plan:
            assert not copies(plan)
            written = [n for n in plan.dag.order if base_of(plan.dag, n) is not None]
            assert len(written) == 6, "keys, values and the length, of two layers"
            assert set(written) <= {n for c in plan.clusters for n in c.outputs}
            with_rope = [c for c in plan.clusters if set(written) & set(c.outputs) and "neg" in str(c.ops)]
            assert with_rope, "rotated keys go straight into the cache"


def test_no_graph_is_compiled_after_the_second_token(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    fast = fc.compile(model, backend="eager")
    calls: list[int] = []
    original = type(fast).forward

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        calls.append(len(fast.plan))
        return result

    monkeypatch.setattr(type(fast), "forward", counted)
    generated(fast, torch.randint(3, 120, (1, 6)), 40, "static")
    assert calls == [1, *[2] * 39]
