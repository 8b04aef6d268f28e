"""Small models from transformers, built from configurations with random weights: nothing is downloaded.

    model, batch = small("llama")
    loss = model(**batch).loss

Two layers, hidden sizes of 32 to 64, float32 on the CPU. Inputs are drawn afresh from `seed`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

Batch = dict[str, torch.Tensor]
VOCABULARY = 97

_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "use_cache": False,
}
_ENCODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


def _tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length))


def _language(model: nn.Module, batch: int, length: int) -> tuple[nn.Module, Batch]:
    """A model that predicts tokens, with the tokens as labels."""
    tokens = _tokens(batch, length)
    return model, {"input_ids": tokens, "labels": tokens.clone()}


def _llama(batch: int, length: int) -> tuple[nn.Module, Batch]:
    config = transformers.LlamaConfig(**_DECODER)
    return _language(transformers.LlamaForCausalLM(config), batch, length)


def _mistral(batch: int, length: int) -> tuple[nn.Module, Batch]:
    config = transformers.MistralConfig(**_DECODER, sliding_window=8)
    return _language(transformers.MistralForCausalLM(config), batch, length)


def _mixtral(batch: int, length: int) -> tuple[nn.Module, Batch]:
    config = transformers.MixtralConfig(**_DECODER, num_local_experts=4, num_experts_per_tok=2)
    return _language(transformers.MixtralForCausalLM(config), batch, length)


def _gpt2(batch: int, length: int) -> tuple[nn.Module, Batch]:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=128, n_embd=64, n_layer=2, n_head=4, use_cache=False,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model: Any = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # by default it is none, of which a log tells, which breaks the graph
    return _language(model, batch, length)


def _bert(batch: int, length: int) -> tuple[nn.Module, Batch]:
    return _language(transformers.BertForMaskedLM(transformers.BertConfig(**_ENCODER)), batch, length)


def _roberta(batch: int, length: int) -> tuple[nn.Module, Batch]:
    return _language(transformers.RobertaForMaskedLM(transformers.RobertaConfig(**_ENCODER)), batch, length)


def _vit(batch: int, length: int) -> tuple[nn.Module, Batch]:
    del length
    config = transformers.ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=112,
        image_size=32, patch_size=8, num_labels=7,
        hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
    )  # fmt: skip
    pixels = torch.randn(batch, 3, 32, 32)
    return transformers.ViTForImageClassification(config), {
        "pixel_values": pixels,
        "labels": torch.randint(0, 7, (batch,)),
    }


def _whisper(batch: int, length: int) -> tuple[nn.Module, Batch]:
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=16, d_model=64, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=112, decoder_ffn_dim=112,
        max_source_positions=24, max_target_positions=128, use_cache=False, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        dropout=0.1, attention_dropout=0.1, activation_dropout=0.1,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config), {
        "input_features": torch.randn(batch, 16, 48),
        "labels": _tokens(batch, length),
    }


def _t5(batch: int, length: int, feed_forward: str = "gated-gelu") -> tuple[nn.Module, Batch]:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=112, num_layers=2, num_heads=4, use_cache=False,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, feed_forward_proj=feed_forward,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config), {
        "input_ids": _tokens(batch, length),
        "labels": _tokens(batch, length),
    }


def _t5_relu(batch: int, length: int) -> tuple[nn.Module, Batch]:
    """Version 1.0's: a ReLU's gradient jumps with a rounding error."""
    return _t5(batch, length, "relu")


_FACTORIES: dict[str, Callable[[int, int], tuple[nn.Module, Batch]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "gpt2": _gpt2,
    "bert": _bert,
    "roberta": _roberta,
    "vit": _vit,
    "whisper": _whisper,
    "t5": _t5,
    "t5_relu": _t5_relu,
}
VARIANTS = ("t5_relu",)  # of a model that is among NAMES
NAMES = tuple(name for name in _FACTORIES if name not in VARIANTS)


def without_dropout(model: nn.Module) -> nn.Module:
    """Set every dropout probability of `model` to 0, in its modules and in its configuration."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("dropout" in name or name == "layerdrop"):
                setattr(module, name, 0.0)
    config: Any = model.config
    for name, value in list(vars(config).items()):
        if isinstance(value, float) and ("drop" in name):
            setattr(config, name, 0.0)
    return model


def exact(model: nn.Module) -> nn.Module:
    """A copy in float64: what results are measured against."""
    wide: Any = copy.deepcopy(model).double()
    if hasattr(wide.config, "num_local_experts"):
        wide.config._experts_implementation = "batched_mm"  # the grouped product takes no float64
    return wide


def small(
    name: str, *, dropout: bool = True, batch: int = 2, length: int = 19, seed: int | None = None
) -> tuple[nn.Module, Batch]:
    """A small `name` in train mode, and keyword arguments for one call that yields `.loss`.

    dropout: leave the configuration's default probabilities; False sets all of them to 0.
    batch, length: examples, and tokens per example (images and audio have a fixed size).
    seed: of the weights and the inputs; None draws from the global generator as it stands.
    """
    if seed is not None:
        torch.manual_seed(seed)
    model, inputs = _FACTORIES[name](batch, length)
    model = model if dropout else without_dropout(model)
    return model.train(), inputs
