"""python -m benchmarks generation: transformers' own `generate` with a static cache, by tokens a second.

A token's time is what more tokens take, so that the prompt is not in it: the median, over rounds, of the
difference between two lengths over the difference of these. `eager` and `transformers` are the model as it
is, without and with the torch.compile that `generate` applies by itself where a cache is static; `ours` is
`fusion_compiler.compile(model)`, and `step` a call of such a model beside a cache, in a run that nobody
waits for. Greedy, bfloat16, weights of a Llama-1B shape, a prompt of 1024. Needs a GPU; with --quick it tries
itself. --only matches these names.
"""

from __future__ import annotations

import argparse
import functools
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import fusion_compiler as fc
from benchmarks.decoding.decoders import LLAMA_1B, QUICK
from benchmarks.harness.timing import synchronize, wall_time
from benchmarks.models.measure import A_RUN
from benchmarks.models.workloads import Decoder, llama_model, tokens

FEW, MANY = 16, 144  # tokens of the two lengths
ROUNDS = 5
PROMPT = 1024


def seconds_of_a_token(model: Any, prompt: torch.Tensor, **options: Any) -> float:
    """Return the seconds for one of the tokens between FEW and MANY, after calls that compile and record."""

    def generated(count: int) -> float:
        synchronize(prompt.device)
        start = time.perf_counter()
        model.generate(
            prompt, min_new_tokens=count, max_new_tokens=count, do_sample=False, pad_token_id=0,
            cache_implementation="static", **options,
        )  # fmt: skip
        synchronize(prompt.device)
        return time.perf_counter() - start

    # One cache serves both lengths: transformers keeps the longest that it made.
    for count in (MANY, FEW, MANY, FEW):
        generated(count)
    rounds = [(generated(MANY) - generated(FEW)) / (MANY - FEW) for _ in range(ROUNDS)]
    return statistics.median(rounds)


def seconds_of_a_step(model: Any, fast: Any, prompt: torch.Tensor) -> float:
    length = prompt.shape[1] + MANY
    decoder = Decoder(model, prompt, length)
    decoder.prepare()
    token, calls = prompt[:, -1:], 0

    def step() -> None:
        nonlocal calls
        calls += 1
        if calls % MANY == 0:
            decoder.rewind()
        with torch.no_grad():
            fast(input_ids=token, past_key_values=decoder.cache, use_cache=True)

    for _ in range(FEW):
        step()
    return wall_time(step, prompt.device, 4 * ROUNDS, A_RUN)


def seconds_of_the_loop(model: Any, prompt: torch.Tensor) -> float:
    """Return the seconds of one token without the model: its call only returns logits of the first token's
    size."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    original = type(model).forward
    ready = torch.randn(1, 1, model.config.vocab_size, device=prompt.device, dtype=model.dtype)

    @functools.wraps(original)  # generate looks at its signature
    def forward(*_: Any, past_key_values: Any = None, **__: Any) -> Any:
        return CausalLMOutputWithPast(logits=ready, past_key_values=past_key_values)

    model.forward = forward
    try:
        return seconds_of_a_token(model, prompt, disable_compile=True)
    finally:
        del model.forward


def main(options: argparse.Namespace) -> None:
    quick = options.quick
    device = torch.device("cpu" if quick else "cuda")
    shape = {name: QUICK[name] for name in LLAMA_1B} if quick else LLAMA_1B
    context = QUICK["context"] if quick else PROMPT
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = llama_model(context + MANY, **shape).eval()
        prompt = tokens(shape["vocabulary"], 1, context)
    backend = "eager" if quick else "auto"
    measures: dict[str, Callable[[], float]] = {
        "ours": lambda: seconds_of_a_token(fc.compile(model, backend=backend), prompt),
        "step": lambda: seconds_of_a_step(model, fc.compile(model, backend=backend), prompt),
        "loop": lambda: seconds_of_the_loop(model, prompt),
        "eager": lambda: seconds_of_a_token(model, prompt, disable_compile=True),
        "transformers": lambda: seconds_of_a_token(model, prompt),
    }
    for name in (name for name in measures if re.search(options.only, name)):
        torch._dynamo.reset()  # a length that another one had would make this one a symbol
        seconds = measures[name]()
        print(f"{name:14}{1e3 * seconds:8.3f} ms a token{1 / seconds:8.0f} tokens a second", flush=True)
