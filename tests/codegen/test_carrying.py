"""Reductions that read reductions over the same axis, made in one loop, in Triton's interpreter and beside
float64."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from fusion_compiler.codegen import assemble
from fusion_compiler.ir.kernel import Program
from fusion_compiler.runtime.launch import interpret
from fusion_compiler.schedule.placement import Placement
from fusion_compiler.schedule.verifier import refusal
from tests.exactness import not_as_close, wide
from tests.schedule import attention_nests as nests
from tests.schedule.attention_nests import Chain, Variant

KEYS = 56
SIZES = (2, 2, 40, 32, KEYS, 16)
VARIANTS = {
    "softmax": nests.scaled(0.25),
    "soft-capped and causal": nests.soft_capped_causal(0.25, 5.0),
    "ALiBi": nests.causal(nests.alibi(0.25)),
    "bias": nests.biased(0.25),
    "window": nests.window(nests.scaled(0.25), 9),
    "padding": nests.padded(nests.scaled(0.25)),
    "sinks": nests.with_sink(nests.window(nests.scaled(0.25), 9)),
    "sinks beside padding": nests.with_sink(nests.padded(nests.scaled(0.25))),
}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def placement(rows: int, keys: int, on_tensor_cores: bool = True) -> Placement:
    units = "unit(t, TENSOR_CORE); unit(o, TENSOR_CORE); " if on_tensor_cores else ""
    return Placement.parse(
        f"split(i, {rows}); split(j, {keys}); place(b, GRID); place(h, GRID); place(i.o, GRID); "
        "place(j.o, LOOP); place(i.i, LANES); place(j.i, LANES); place(d, LANES); place(e, LANES); "
        f"{units}combine(l, CARRIED); combine(o, CARRIED); 4 warps"
    )


def built(nest: Chain, place: Placement) -> Program:
    loops = nest.nest()
    assert refusal(loops, place) is None
    return assemble.build(assemble.Nests((loops,), nest.memory()), (place,), "attention", "")


def drawn(nest: Chain, scale: float = 2.0) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, (shape, dtype) in nest.tensors.items():
        if dtype.is_floating_point:
            tensors[name] = (torch.randn(shape) * scale).to(dtype)
        else:
            tensors[name] = torch.tensor([0, *(random.randint(1, KEYS) for _ in shape[1:] or (1,))])
    return tensors


def compare(variant: Variant, nest: Chain, place: Placement, tensors: dict[str, Tensor]) -> None:
    program = built(nest, place)
    ours = interpret(program, [tensors[buffer.name] for buffer in program.inputs], [])
    inputs = {name: tensors[name] for name in ("q", "k", "v", *variant.inputs)}
    eager, truth = nests.plain(variant, **inputs), nests.plain(variant, **wide(inputs))
    for one, theirs, exact in zip(ours, eager, truth, strict=True):
        assert not (wrong := not_as_close(one, theirs.to(one.dtype), exact)), wrong


@pytest.mark.sample(16)
@pytest.mark.parametrize("on_tensor_cores", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_attention_is_as_close_to_float64_as_eager(
    name: str, dtype: torch.dtype, on_tensor_cores: bool
) -> None:
    nest = nests.attention(VARIANTS[name], dtype, *SIZES)
    compare(VARIANTS[name], nest, placement(16, 16, on_tensor_cores), drawn(nest))


@pytest.mark.sample(6)
@pytest.mark.parametrize("keys", [1, 16, 31, 32, 48])
@pytest.mark.parametrize("queries", [1, 16, 17])
def test_lengths_that_are_no_multiple_of_a_block(queries: int, keys: int) -> None:
    variant = nests.padded(nests.scaled(0.25))
    nest = nests.attention(variant, torch.float32, 2, 2, queries, 16, keys, 16)
    compare(variant, nest, placement(16, 16), drawn(nest) | {"length": torch.tensor([0, keys])})


@pytest.mark.parametrize("on_tensor_cores", [True, False])
def test_large_and_infinite_scores(on_tensor_cores: bool) -> None:
    """A score of +inf makes its row NaN, as eager does; one of -inf has no weight."""
    variant = nests.biased(1.0)
    nest = nests.attention(variant, torch.float32, *SIZES)
    tensors = drawn(nest, 40.0)
    tensors["bias"][0, 3, 5] = math.inf
    tensors["bias"][0, 4, 50] = math.inf
    tensors["bias"][0, 5, :] = -math.inf
    tensors["bias"][1, 6, :55] = -math.inf
    tensors["bias"][1, 7, 20] = math.nan
    tensors["bias"][1, 8, :] = torch.linspace(-3e38, 3e38, KEYS)
    compare(variant, nest, placement(16, 16, on_tensor_cores), tensors)


def test_scores_that_grow_from_block_to_block() -> None:
    """Each block rescales all that was added up before it."""
    variant = nests.alibi(0.01)
    nest = nests.attention(variant, torch.float32, *SIZES)
    for slope in (0.01, 1.0, 30.0):
        tensors = drawn(nest) | {"slope": torch.tensor([slope, -slope])}
        compare(variant, nest, placement(16, 16), tensors)


def test_the_loop_is_read_once() -> None:
    nest = nests.attention(nests.soft_capped_causal(0.25, 5.0), torch.bfloat16, *SIZES)
    (kernel,) = built(nest, placement(16, 16)).kernels
    assert kernel.source.count("tl.range") == kernel.source.count("tl.trans") == 1
    assert kernel.source.count("tl.dot") == 2
