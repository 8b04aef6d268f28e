"""Models that generate one token at a time, after a prompt that is in their cache."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models.workloads import (
    SPECIAL,
    Built,
    Decoder,
    Workload,
    decoding,
    from_config,
    gpt2_model,
    llama_decode,
    llama_model,
    t5_model,
    tokens,
)


class LongContext(Decoder):
    """Keys and values of the context are random: nobody computes them from a prompt."""

    def __init__(self, model: nn.Module, prompt: Tensor, length: int, context: int) -> None:
        super().__init__(model, prompt, length)
        self.context = context

    def prepare(self) -> None:
        super().prepare()
        for layer in self.cache.layers:
            layer.keys.normal_()
            layer.values.normal_()
        self.rewind()


def long_context(batch: int, context: int, length: int, **shape: int) -> Built:
    prompt = tokens(shape["vocabulary"], batch, 8)
    decoder = LongContext(llama_model(length, **shape), prompt, length, context)
    return decoder, {"input_ids": tokens(shape["vocabulary"], batch, 1)}


class Int8Linear(nn.Module):
    """As weight-only quantisation is written: a weight of int8 or float8, a scale for each of its rows."""

    weight: Tensor
    scale: Tensor

    def __init__(self, of: nn.Linear, dtype: torch.dtype = torch.int8) -> None:
        super().__init__()
        weight = torch.randint(-127, 128, of.weight.shape, dtype=torch.int8)
        self.register_buffer("weight", weight.to(dtype))
        scale = torch.rand(of.weight.shape[0]) / (64 * of.weight.shape[1] ** 0.5)
        self.register_buffer("scale", scale.to(of.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype)) * self.scale


class Int4Linear(nn.Module):
    """Two weights of four bits in a byte, a scale for each GROUP of a row's."""

    GROUP = 128

    weight: Tensor
    scale: Tensor

    def __init__(self, of: nn.Linear) -> None:
        super().__init__()
        rows, width = of.weight.shape
        self.group = min(self.GROUP, width)
        self.register_buffer("weight", torch.randint(0, 256, (rows, width // 2), dtype=torch.uint8))
        scale = torch.rand(rows, width // self.group) / (4 * width**0.5)
        self.register_buffer("scale", scale.to(of.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        unpacked = torch.stack((self.weight & 15, self.weight >> 4), -1).flatten(1).to(x.dtype) - 8
        return F.linear(x, (unpacked.unflatten(1, (-1, self.group)) * self.scale[..., None]).flatten(1))


def quantised(kind: int, batch: int, context: int, length: int, **shape: int) -> Built:
    """kind: 0 for int8, 1 for float8, 2 for int4; the head is of the embedding, and stays as it is."""
    decoder, inputs = llama_decode(context, length, batch, **shape)
    float8 = functools.partial(Int8Linear, dtype=torch.float8_e4m3fn)
    linear = (Int8Linear, float8, Int4Linear)[kind]
    for module in list(decoder.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name != "lm_head":
                setattr(module, name, linear(child))
    return decoder, inputs


def causal(name: str, **fixed: Any) -> Any:
    """Return a build of a causal model of transformers."""

    def build(batch: int, context: int, length: int, **shape: int) -> Built:
        model = from_config(f"{name}:ForCausalLM", positions=length, **SPECIAL, **fixed, **shape)
        return decoding(model, batch, context, length, shape["vocabulary"])

    return build


def gpt2(batch: int, context: int, length: int, **shape: int) -> Built:
    shape = {name: shape[name] for name in ("hidden", "layers", "heads", "vocabulary")}
    return decoding(gpt2_model(length, **shape), batch, context, length, shape["vocabulary"])


class T5Decoder(Decoder):
    """The decoder's step, beside an encoder's results that are there."""

    encoded: Tensor

    def __init__(self, model: nn.Module, prompt: Tensor, length: int, encoded: Tensor) -> None:
        super().__init__(model, prompt, length)
        self.register_buffer("encoded", encoded, persistent=False)

    def prepare(self) -> None:
        from transformers import EncoderDecoderCache, StaticCache

        config: Any = self.model.config
        beside = StaticCache(config=config, max_cache_len=self.encoded.shape[1])
        self.cache = EncoderDecoderCache(StaticCache(config=config, max_cache_len=self.length), beside)
        with torch.no_grad():
            self.called(self.prompt)

    def called(self, input_ids: Tensor) -> Any:
        return self.model(
            decoder_input_ids=input_ids, encoder_outputs=(self.encoded,), past_key_values=self.cache,
            use_cache=True,
        )  # fmt: skip

    def own_layers(self) -> list[Any]:
        return self.cache.self_attention_cache.layers

    def token_bytes(self) -> int:
        """Return the bytes that a token reads: from the encoder only the keys and values of its results."""
        encoder = {id(p) for p in self.model.get_submodule("encoder").parameters()}
        kept = {id(p) for p in self.model.get_submodule("decoder").parameters()}
        unread = sum(p.nbytes for p in self.model.parameters() if id(p) in encoder - kept)
        beside = sum(x.keys.nbytes + x.values.nbytes for x in self.cache.cross_attention_cache.layers)
        return super().token_bytes() - unread + beside


def t5(
    batch: int, context: int, length: int, hidden: int, layers: int, heads: int, vocabulary: int,
    encoded: int, **_: int,
) -> Built:  # fmt: skip
    model = t5_model(hidden, heads, layers=layers, vocabulary=vocabulary)
    states = torch.randn(batch, encoded, hidden)
    decoder = T5Decoder(model, tokens(vocabulary, batch, context), length, states)
    return decoder, {"input_ids": tokens(vocabulary, batch, 1)}


ROOM = {"context": 1024, "length": 1536}
LLAMA_1B = {"layers": 16, "hidden": 2048, "inner": 8192, "heads": 32, "kv_heads": 8, "vocabulary": 128256}
LLAMA_8B = {"hidden": 4096, "inner": 14336, "heads": 32, "kv_heads": 8, "vocabulary": 128256}
MEDIUM = {"hidden": 1024, "layers": 24, "heads": 16}
QUICK = {
    "batch": 1, "context": 8, "length": 32, "hidden": 64, "inner": 128, "layers": 2, "heads": 4,
    "kv_heads": 2, "vocabulary": 128,
}  # fmt: skip


def _row(name: str, build: Any, sizes: dict[str, int], **quick: int) -> Workload:
    return Workload(f"{name}, one token", build, {"batch": 1, **ROOM, **sizes}, QUICK | quick, train=False)


DECODERS: tuple[Workload, ...] = (
    *(_row(f"Llama-1B, batch {n}", llama_decode, {**LLAMA_1B, "batch": n}, batch=n) for n in (1, 2, 4, 8)),
    _row("Llama-8B 8 layers", llama_decode, {**LLAMA_8B, "layers": 8}),
    _row(
        "Qwen3-1.7B 16 layers", causal("Qwen3", tie_word_embeddings=True),
        {**LLAMA_1B, "inner": 6144, "heads": 16, "head_dim": 128, "vocabulary": 151936}, head_dim=16,
    ),
    _row("Mixtral 4 layers", causal("Mixtral"), {**LLAMA_8B, "vocabulary": 32000, "layers": 4}),
    _row("GPT-2 medium", gpt2, {**MEDIUM, "vocabulary": 50257}),
    _row(
        "T5-large decoder", t5,
        {**MEDIUM, "vocabulary": 32128, "encoded": 512, "context": 128, "length": 640}, encoded=8,
    ),
    _row("Llama-1B int8", quantised, {**LLAMA_1B, "kind": 0}, kind=0),
    _row("Llama-1B float8", quantised, {**LLAMA_1B, "kind": 1}, kind=1),
    _row("Llama-1B int4", quantised, {**LLAMA_1B, "kind": 2}, kind=2),
    *(
        _row(
            f"Llama-8B 2 layers, {n // 1024}K keys", long_context,
            {**LLAMA_8B, "layers": 2, "vocabulary": 32000, "context": n, "length": n + 512},
        )
        for n in (32768, 131072)
    ),
)  # fmt: skip
