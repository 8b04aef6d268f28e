"""Whole models: random weights from configurations, bf16 unless said, nothing downloaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from examples.encoder_layer import EncoderLayer

Batch = dict[str, Any]
Built = tuple[nn.Module, Batch]  # a model, and the keyword arguments of a call
Build = Callable[..., Built]


@dataclass(frozen=True)
class Workload:
    """One row of the models' table.

    build: sizes -> (module in float32 on the default device, its keyword arguments).
    train: forward, backward; else forward without gradients.
    """

    name: str
    build: Build
    sizes: Mapping[str, int]
    quick: Mapping[str, int]
    train: bool = True
    dtype: torch.dtype = torch.bfloat16
    exact: torch.dtype = torch.float32  # of the truth; float64 where it fits the device

    def make(
        self,
        device: torch.device | str,
        quick: bool = False,
        dtype: torch.dtype | None = None,
        weights: Mapping[str, Tensor] | None = None,
        seed: int = 0,
    ) -> Built:
        """The module and a batch; the same ones for each `seed`, or with the `weights` that are given."""
        torch.manual_seed(seed)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype or self.dtype)  # of new weights: no float32 copy of a large model
        try:
            with torch.device(device):
                model, batch = self.build(**(self.quick if quick else self.sizes))
                model.to(device=device).train(self.train)
                if weights is not None:
                    model.load_state_dict(weights)
                if isinstance(model, Decoder):
                    model.prepare()
        finally:
            torch.set_default_dtype(before)
        return model, batch


def step(model: nn.Module, batch: Batch, train: bool, gradient: Tensor | None = None) -> Any:
    """One inference, or one forward and backward; gradients stay in the parameters.

    gradient: of the main result, for a model that computes no loss (shape and dtype of its result).
    """
    if not train:
        with torch.no_grad():
            return model(**batch)
    output = model(**batch)
    if gradient is None:
        output.loss.backward()
    else:
        result_of(output).backward(gradient)
    return output


def gradient_for(model: nn.Module, batch: Batch) -> Tensor | None:
    """Random where the model has no loss of its own, else None."""
    with torch.no_grad():
        output = model(**batch)
    return None if getattr(output, "loss", None) is not None else torch.randn_like(result_of(output))


def result_of(output: Any) -> Tensor:
    """The main tensor of a model's output."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "last_hidden_state"):
        if getattr(output, name, None) is not None:
            return getattr(output, name)
    return output[0]


def tokens(vocabulary: int, batch: int, length: int) -> Tensor:
    return torch.randint(vocabulary, (batch, length))


# Configurations of transformers have other names for these sizes.
FIELDS = {
    "hidden": "hidden_size", "inner": "intermediate_size", "layers": "num_hidden_layers",
    "heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "vocabulary": "vocab_size",
    "positions": "max_position_embeddings",
}  # fmt: skip
SPECIAL = {"bos_token_id": 0, "eos_token_id": 0}


def from_config(name: str, **fields: Any) -> nn.Module:
    """Return a model of transformers with random weights; `name` is its family, ":" and the model's rest.

    Fields have the names of `FIELDS` or the configuration's own.
    """
    import transformers

    family, _, rest = name.partition(":")
    config = getattr(transformers, f"{family}Config")
    usual = {FIELDS.get(field, field): value for field, value in fields.items()}
    renamed = {config.attribute_map.get(field, field): value for field, value in usual.items()}
    return getattr(transformers, f"{family}{rest}")(config(**renamed))


def labelled(model: nn.Module, batch: int, length: int, *, first: int = 0) -> Built:
    """Return a language model with tokens, from `first` on, that are its labels as well."""
    config: Any = model.config
    ids = torch.randint(first, config.vocab_size, (batch, length))
    return model, {"input_ids": ids, "labels": ids}


def bert(batch: int, length: int, hidden: int, **shape: int) -> Built:
    model = from_config("Bert:ForMaskedLM", hidden=hidden, inner=4 * hidden, positions=length, **shape)
    return labelled(model, batch, length)


def gpt2_model(length: int, **shape: Any) -> nn.Module:
    return from_config("GPT2:LMHeadModel", positions=length, **SPECIAL, **shape)


def gpt2(batch: int, length: int, **shape: int) -> Built:
    model: Any = gpt2_model(length, use_cache=False, **shape)
    model.loss_type = "ForCausalLM"  # its class name hides it, and the warning would break the graph
    return labelled(model, batch, length)


def t5_model(hidden: int, heads: int, **more: Any) -> nn.Module:
    widths = {"hidden": hidden, "heads": heads, "d_kv": hidden // heads, "d_ff": 4 * hidden}
    return from_config("T5:ForConditionalGeneration", **widths, **more)


def llama_model(length: int, **shape: Any) -> nn.Module:
    tied = {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}
    return from_config("Llama:ForCausalLM", positions=length, **tied, **SPECIAL, **shape)


def llama_prefill(batch: int, length: int, **shape: int) -> Built:
    ids = tokens(shape["vocabulary"], batch, length)
    return llama_model(length, **shape), {"input_ids": ids, "use_cache": False}


def llama_train(batch: int, length: int, **shape: int) -> Built:
    model, inputs = llama_prefill(batch, length, **shape)
    return model, inputs | {"labels": inputs["input_ids"]}


class Decoder(nn.Module):
    """One token after `context` others, whose keys and values lie in a static cache of `length`.

    Every call moves on by one token, as decoding does: length - context calls are possible before it is
    rewound.
    """

    prompt: Tensor

    def __init__(self, model: nn.Module, prompt: Tensor, length: int) -> None:
        super().__init__()
        self.model = model
        self.length, self.context = length, prompt.shape[1]
        self.cache: Any = None
        self.register_buffer("prompt", prompt, persistent=False)

    def prepare(self) -> None:
        """Fills the cache with the prompt's keys and values under the weights of now."""
        from transformers import StaticCache

        self.cache = StaticCache(config=self.model.config, max_cache_len=self.length)
        with torch.no_grad():
            self.model(input_ids=self.prompt, past_key_values=self.cache, use_cache=True)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.called(input_ids).logits

    def called(self, input_ids: Tensor) -> Any:
        return self.model(input_ids=input_ids, past_key_values=self.cache, use_cache=True)

    def own_layers(self) -> list[Any]:
        return self.cache.layers

    def rewind(self) -> None:
        """Back to the end of the context: what is written next is over what was written since."""
        for layer in self.own_layers():
            layer.cumulative_length.fill_(self.context)

    def token_bytes(self) -> int:
        """Return the bytes that one call reads: weights (only the chosen experts, only the rows of embeddings
        that are looked up), and the keys and values of the context."""
        batch, config = self.prompt.shape[0], self.model.config
        heads = {id(m.weight) for m in self.model.modules() if isinstance(m, nn.Linear)}
        rows = {id(m.weight): m.weight for m in self.model.modules() if isinstance(m, nn.Embedding)}
        total = 0
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            part = 1.0
            if id(tensor) in rows and id(tensor) not in heads:
                part = min(1.0, batch / tensor.shape[0])
            elif tensor.dim() == 3:  # of experts
                part = min(1.0, batch * config.num_experts_per_tok / tensor.shape[0])
            total += int(part * tensor.nbytes)
        kept = (x for layer in self.own_layers() for x in (layer.keys, layer.values))
        return total + sum(x.nbytes * self.context // self.length for x in kept)


def decoding(model: nn.Module, batch: int, context: int, length: int, vocabulary: int) -> Built:
    decoder = Decoder(model, tokens(vocabulary, batch, context), length)
    return decoder, {"input_ids": tokens(vocabulary, batch, 1)}


def llama_decode(context: int, length: int, batch: int = 1, **shape: int) -> Built:
    return decoding(llama_model(length, **shape), batch, context, length, shape["vocabulary"])


def vit(batch: int, hidden: int, side: int, **shape: int) -> Built:
    shape |= {"inner": 4 * hidden, "image_size": side, "patch_size": 16, "num_labels": 1000}
    model = from_config("ViT:ForImageClassification", hidden=hidden, **shape)
    return model, {"pixel_values": torch.randn(batch, 3, side, side)}


def whisper(batch: int, hidden: int, layers: int, heads: int, frames: int) -> Built:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = WhisperConfig(
        d_model=hidden, encoder_layers=layers, encoder_attention_heads=heads, encoder_ffn_dim=4 * hidden,
        max_source_positions=frames // 2, num_mel_bins=80,
    )  # fmt: skip
    return WhisperEncoder(config), {"input_features": torch.randn(batch, 80, frames)}


def encoder_layer(batch: int, length: int, hidden: int, heads: int) -> Built:
    layer = EncoderLayer(hidden, heads, 4 * hidden)
    return layer, {"x": torch.randn(batch, length, hidden).requires_grad_()}


LLAMA = {"hidden": 2048, "inner": 8192, "heads": 32, "kv_heads": 8, "vocabulary": 128256}
LLAMA_QUICK = {"hidden": 64, "inner": 128, "heads": 4, "kv_heads": 2, "vocabulary": 128, "layers": 2}
QUICK = {"batch": 2, "length": 16, "hidden": 64, "layers": 2, "heads": 4, "vocabulary": 131}

WORKLOADS: tuple[Workload, ...] = (
    Workload(
        "BERT-large 12 layers, train, 16 x 512", bert,
        {"batch": 16, "length": 512, "hidden": 1024, "layers": 12, "heads": 16, "vocabulary": 30522},
        QUICK,
    ),
    Workload(
        "GPT-2 medium 12 layers, train, 8 x 1024", gpt2,
        {"batch": 8, "length": 1024, "hidden": 1024, "layers": 12, "heads": 16, "vocabulary": 50257},
        QUICK,
    ),
    Workload(
        "Llama 8 layers of the 1B shape, prefill, 4 x 2048", llama_prefill,
        {"batch": 4, "length": 2048, "layers": 8, **LLAMA}, {"batch": 2, "length": 16, **LLAMA_QUICK},
        train=False,
    ),
    Workload(
        "Llama 8 layers of the 1B shape, train, 4 x 2048", llama_train,
        {"batch": 4, "length": 2048, "layers": 8, **LLAMA}, {"batch": 2, "length": 16, **LLAMA_QUICK},
    ),
    Workload(
        "ViT-B/16, inference, 64 images", vit,
        {"batch": 64, "hidden": 768, "layers": 12, "heads": 12, "side": 224},
        {"batch": 2, "hidden": 64, "layers": 2, "heads": 4, "side": 32}, train=False,
    ),
    Workload(
        "Whisper-small encoder, inference, 8 x 30 s", whisper,
        {"batch": 8, "hidden": 768, "layers": 12, "heads": 12, "frames": 3000},
        {"batch": 2, "hidden": 64, "layers": 2, "heads": 4, "frames": 64}, train=False,
    ),
    Workload(
        "BERT-large encoder layer written out, fp16, train, 8 x 512", encoder_layer,
        {"batch": 8, "length": 512, "hidden": 1024, "heads": 16},
        {"batch": 2, "length": 16, "hidden": 64, "heads": 4},
        dtype=torch.float16, exact=torch.float64,
    ),
    Workload(
        "Llama-1B shape, one-token decode, batch 1", llama_decode,
        {"context": 128, "length": 1024, "layers": 16, **LLAMA}, {"context": 8, "length": 32, **LLAMA_QUICK},
        train=False,
    ),
)  # fmt: skip
