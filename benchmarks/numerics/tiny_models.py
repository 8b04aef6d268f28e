"""Every architecture of the installed transformers as a tiny model with random weights, made from its
configuration alone, and something to feed it.

    model, batch = tiny("mistral")
    loss = loss_of(model(**batch))

Sizes shrink by the names that configurations give them. Where a model does not take the smallest ones, larger
recipes are tried, down to nothing but fewer layers.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

Batch = dict[str, Any]
Change = Callable[[int], int]

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 2, 64, 4, 2, 16, 128
MOST_LAYERS = 4  # where they are of different kinds
MOST_PARAMETERS = 40_000_000  # of what is not small
TOKENS, BATCH = 19, 2

# In this order: a model type that has several heads is built with the first.
TASKS: Mapping[str, Any] = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "sequence to sequence": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "image": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "speech": modeling_auto.MODEL_FOR_CTC_MAPPING_NAMES,
    "speech to text": modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    "audio": modeling_auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
}


class CannotBuildError(Exception):
    """No recipe gives a model that runs; the text says what each said."""


@dataclass(frozen=True)
class Architecture:
    """name: the model type. classes: of a model with a head, the first that transformers exports is taken."""

    name: str
    task: str
    classes: tuple[str, ...]


def architectures() -> dict[str, Architecture]:
    """Return the architectures by model type, from transformers' own tables and in their order."""
    by_type: dict[str, Architecture] = {}
    for task, table in TASKS.items():
        for name, classes in table.items():
            listed = (classes,) if isinstance(classes, str) else tuple(classes)
            by_type.setdefault(name, Architecture(name, task, listed))
    return by_type


# -- sizes --------------------------------------------------------------------------------------------


def at_most(size: int) -> Change:
    return lambda old: min(old, size)


def to(size: int) -> Change:
    return lambda old: size if old > 0 else old


# Whole numbers of a configuration, by name: the first expression that matches decides.
WIDTHS: tuple[tuple[str, Change], ...] = (
    (r"(qk_rope|qk_nope|v|swa|cross|index)_head_dim", to(HEAD_DIM)),
    (r"qk_head_dim", to(2 * HEAD_DIM)),
    (r"(kv|q|o)_lora_rank|embedding_rank|lru_width|adapter_rank", at_most(32)),
    (r"(linear_)?(head_dim|attention_head_(dim|size)|d_kv|d_head|dim_head|kv_channels)", to(HEAD_DIM)),
    (r"linear_(key|value)_head_dim", to(HEAD_DIM)),
    (r"linear_num_(key|value)_heads|linear_num_heads", to(HEADS)),
    (r"mamba_(n_heads|num_heads)|n_mamba_heads", to(2 * HEADS)),
    (r"mamba_(d_head|head_dim|headdim)", to(HEAD_DIM)),
    (r"mamba_d_ssm", to(2 * HIDDEN)),
    (r"(mamba_)?(d_state|state_size|ssm_state_size)", at_most(16)),
    (r".*(num_key_value_heads|num_kv_heads|kv_n_heads)", at_most(KV_HEADS)),
    (r"rotary_dim|dim_model_base|query_pre_attn_scalar", at_most(HEAD_DIM)),
    (r".*(attention_heads|n_heads?|num_heads|num_query_groups)", to(HEADS)),
    (r".*(moe|expert).*intermediate_size", to(32)),
    (r".*(intermediate_size(_mlp)?|ffn_dim|d_ff|dim_ff|dff|ffn_hidden_size|d_inner|mlp_dim)", to(96)),
    (r"feed_forward_size", to(96)),
    (r"hidden_size|hidden_dim|d_model|n_embd|embed_dim|emb_dim|embedding_size|embedding_dim|dim", to(HIDDEN)),
    (r"(encoder|decoder|audio|speech|text|pooler|output|out|cross|attention|true)_?hidden_size", to(HIDDEN)),
    (r"word_embed_proj_dim|(input|output)_embedding_size|hidden_size_global", to(HIDDEN)),
)
COUNTS: tuple[tuple[str, Change], ...] = (
    (r"max_source_positions", at_most(64)),
    (r"num_experts|n_routed_experts|num_local_experts|moe_num_experts|zero_expert_num", at_most(4)),
    (r"num_experts_per_tok(en)?|moe_topk|moe_top_k|moe_k", at_most(2)),
    (r"n_group|topk_group|num_expert_group|n_groups|mamba_n_groups|mamba_ngroups", to(1)),
    (r"n_positions|n_ctx|max_seq_len|context_length|.*max_.*position(s|_embeddings)", at_most(128)),
    (r".*sliding_window(_size)?|attention_window(_size)?|local_attention|attention_chunk_size", at_most(8)),
    (r"(mamba_)?chunk_size|local_attention_window_len|index_topk", at_most(8)),
    (r"encoder_hash_byte_group_vocab", at_most(512)),
    (r"num_mel_bins|feature_size|input_feat_per_channel", at_most(80)),
    (r"image_size|crop_size", at_most(64)),
)
VOCABULARIES: tuple[tuple[str, Change], ...] = ((r".*vocab_size(_per_layer_input)?", at_most(VOCABULARY)),)
DEPTHS: tuple[tuple[str, Change], ...] = (
    (r"first_k_dense_replace|num_dense_layers|max_window_layers|moe_layer_start_index", at_most(1)),
    (r"num_kv_shared_layers", to(0)),
    (r"(num_nextn_predict|num_feat_extract|num_adapter|num_residual).*", lambda old: old),
    (r"(attn|expert)_layer_period|_?sliding_window_pattern|layer_group_size|decoder_sparse_step", at_most(2)),
    (r"(attn|expert)_layer_offset", at_most(1)),
    (r".*num_hidden_layers|n_layers?|num_layers|.*(encoder|decoder)_layers|depth", at_most(LAYERS)),
    (r"num_self_attends_per_block|n_layers_per_attn_res_block|global_attn_every_n_layers", at_most(2)),
)
# What some configurations leave open although their models need it.
OPEN: Mapping[str, Any] = {
    "head_dim": HEAD_DIM, "num_key_value_heads": KV_HEADS, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1, "topk_group": 1, "layer_types": ["full_attention"] * LAYERS, "use_cache": False,
}  # fmt: skip
# What no default tells, by model type.
GIVEN: Mapping[str, Mapping[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "head_dim": HEAD_DIM},
    "xmod": {"default_language": "en_XX"},
}
RECIPES: tuple[tuple[tuple[str, Change], ...], ...] = (
    WIDTHS + COUNTS + VOCABULARIES + DEPTHS,
    COUNTS + VOCABULARIES + DEPTHS,
    VOCABULARIES + DEPTHS,
    DEPTHS,
    (),
)


def shrunk(config: Any, rules: Sequence[tuple[str, Change]]) -> dict[str, Any]:
    """Return the fields that a recipe changes in a configuration. Nested configurations become
    dictionaries."""
    fields = {n: v for n, v in vars(config).items() if n not in _NO_SIZES and v is not None}
    changes: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, transformers.PreTrainedConfig):
            changes[name] = {**value.to_dict(), **shrunk(value, rules)}
        elif (size := _size(name, value, rules)) != value:
            changes[name] = size
    changes |= _heads(fields, changes)
    layers: Mapping[str, Any] = config.to_dict().get("per_layer_config") or {}
    each = {int(i): {n: _size(n, v, rules) for n, v in values.items()} for i, values in layers.items()}
    changes |= _layers(fields | ({"per_layer_config": each} if each else {}), changes)
    if any(pattern == r".*vocab_size(_per_layer_input)?" for pattern, _ in rules):
        changes |= _tokens(fields, {**fields, **changes})
    rope = changes.get("rope_parameters", fields.get("rope_parameters"))
    if isinstance(rope, dict) and "mrope_section" in rope:
        changes["rope_parameters"] = _rope(rope, {**fields, **changes})
    return changes


def _size(name: str, value: Any, rules: Sequence[tuple[str, Change]]) -> Any:
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    rule = next((change for pattern, change in rules if re.fullmatch(pattern, name)), None)
    return value if rule is None else rule(value)


_NO_SIZES = frozenset({"id2label", "label2id", "architectures", "transformers_version", "_commit_hash"})


def _heads(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Heads of keys are as many as those of queries where they were, and a state space's fill its width."""
    heads: dict[str, Any] = {}
    for name in changes:
        queries = name.replace("num_key_value_heads", "num_attention_heads")
        if queries != name and fields.get(queries) == fields[name] and queries in changes:
            heads[name] = changes[queries]
    if "num_heads" in changes and "expand" in fields:
        heads["num_heads"] = changes["num_heads"] * fields["expand"]
    return heads


def _layers(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Lists with an entry for each layer: one layer of every kind stays, two at least."""
    names = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
    depth = next((n for n in names if n in changes), None)
    if depth is None:
        return {}
    before = fields[depth]
    lists = {n: v for n, v in fields.items() if isinstance(v, list | tuple) and len(v) == before}
    tables = {n: v for n, v in fields.items() if isinstance(v, dict) and v and {*map(type, v)} == {int}}
    each = [*lists.values(), *([v.get(i) for i in range(before)] for v in tables.values())]
    kinds = {tuple(str(v[i]) for v in each): i for i in reversed(range(before))}
    chosen = sorted(kinds.values())[:MOST_LAYERS]
    chosen = sorted({*chosen, *[i for i in range(before) if i not in chosen][: max(LAYERS - len(chosen), 0)]})
    fewer: dict[str, Any] = {depth: len(chosen)}
    fewer |= {n: type(v)(v[i] for i in chosen) for n, v in lists.items()}
    return fewer | {n: {chosen.index(i): t for i, t in v.items() if i in chosen} for n, v in tables.items()}


def _tokens(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers of special tokens that the smaller vocabulary has, each another one."""
    size = next((v for n, v in after.items() if n.endswith("vocab_size") and isinstance(v, int)), VOCABULARY)
    names = [n for n in before if re.search(r"(token_id|token_index|token_ids|_idx|_index)$", n)]
    ids = [n for n in names if isinstance(before[n], int) and before[n] >= size]
    lists = {n: [min(t, size - 2) for t in before[n]] for n in names if isinstance(before[n], list | tuple)}
    return {n: size - 3 - i for i, n in enumerate(ids)} | lists


def _rope(rope: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Sections of a rotation, which add up to half of the rotated part of a head."""
    heads = fields.get("num_attention_heads", HEADS)
    head = fields.get("head_dim") or fields.get("hidden_size", HIDDEN) // heads
    half = int(head * rope.get("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0))) // 2
    return {**rope, "mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}


# -- models and batches ---------------------------------------------------------------------------------


def tiny(name: str, seed: int = 0) -> tuple[nn.Module, Batch]:
    """The model in eval mode, in which nothing is dropped, and keyword arguments for a call with a gradient.

    Raises CannotBuildError.
    """
    reasons: dict[str, None] = {}
    for rules, filled in [(RECIPES[0], False), *((r, True) for r in RECIPES)]:
        try:
            model = build(architectures()[name], rules, filled, seed)
        except Exception as error:
            reasons[f"build: {_brief(error)}"] = None
            continue
        for batch in batches(model, architectures()[name].task):
            try:
                loss_of(model(**batch)).backward()
            except Exception as error:
                reasons[f"run: {_brief(error)}"] = None
                continue
            if not any(p.grad is not None for p in model.parameters()):
                reasons["run: no parameter has a gradient"] = None
                continue
            model.zero_grad(set_to_none=True)
            return model, batch
    raise CannotBuildError("; ".join(reasons))


def build(
    architecture: Architecture, rules: Sequence[tuple[str, Change]], filled: bool, seed: int
) -> nn.Module:
    """filled: what the configuration leaves open is filled in.

    Raises whatever the configuration or the model raises, CannotBuildError for what is too large.
    """
    config_class: Any = transformers.CONFIG_MAPPING[architecture.name]
    config: Any = config_class()
    left_open = {n: v for n, v in OPEN.items() if filled and getattr(config, n, v) in (None, True)}
    config = config_class(**{**left_open, **shrunk(config, rules), **GIVEN.get(architecture.name, {})})
    model_class = _class_of(architecture)
    if not isinstance(config, model_class.config_class):  # the table names the whole, the model takes a part
        config = next((c for c in vars(config).values() if isinstance(c, model_class.config_class)), config)
    with torch.device("meta"):
        size = sum(p.numel() for p in model_class(copy.deepcopy(config)).parameters())
    if size > MOST_PARAMETERS:
        raise CannotBuildError(f"{size / 1e6:.0f} million parameters")
    torch.manual_seed(seed)
    model: nn.Module = model_class(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # zeros stop gradients, and what is not initialised is no number
            if not parameter.isfinite().all() or not parameter.any():
                parameter.normal_(std=0.02)
    return model


def _class_of(architecture: Architecture) -> Any:
    classes = [f for c in architecture.classes if (f := getattr(transformers, c, None)) is not None]
    if not classes:
        raise CannotBuildError(f"transformers exports no {' or '.join(architecture.classes)}")
    return classes[0]


def batches(model: nn.Module, task: str) -> Iterator[Batch]:
    """Yield batches that the model may accept, the likeliest first, with labels if it takes any."""
    torch.manual_seed(1)
    config: Any = model.config
    text = config.get_text_config()
    vocabulary = min(getattr(text, "vocab_size", None) or VOCABULARY, VOCABULARY)
    tokens = torch.randint(3, vocabulary - 20 if vocabulary > 40 else vocabulary, (BATCH, TOKENS))
    taken = _parameters(model)
    labels = {"labels": tokens.clone()} if "labels" in taken else {}
    if task in ("causal", "masked", "sequence to sequence"):
        yield {"input_ids": tokens, **labels}
        yield {"input_ids": tokens[:, :16], **({"labels": tokens[:, :16].clone()} if labels else {})}
        yield {"input_ids": tokens, "decoder_input_ids": tokens.clone()}
        yield {"input_ids": tokens}
        return
    if task == "image":
        channels = _field(config, "num_channels", 3)
        for size in dict.fromkeys((*_sizes(config), 32, 64, 224)):
            pixels = torch.randn(BATCH, channels, *(size if isinstance(size, Sequence) else (size, size)))
            yield {"pixel_values": pixels, "labels": torch.tensor([0, 1])}
            yield {"pixel_values": pixels}
        return
    spoken = {} if task == "audio" else labels and {"labels": tokens[:, :4].clone()}
    if task == "audio" and "labels" in taken:
        spoken = {"labels": torch.tensor([0, 1])}
    if "input_values" in taken:
        for form in ((4000,), (1, 4000), (1024, 128)):
            yield {"input_values": torch.randn(BATCH, *form), **spoken}
            if "decoder_input_ids" in taken:
                yield {"input_values": torch.randn(BATCH, *form), "decoder_input_ids": tokens}
    if "input_features" in taken:
        bins = [n for f in _FEATURES if (n := _field(config, f, None)) is not None] + [80]
        frames = 2 * _field(config, "max_source_positions", 32)
        for many in dict.fromkeys(bins):
            for form in ((many, frames), (64, many)):
                features = {"input_features": torch.randn(BATCH, *form)}
                yield {**features, **spoken}
                yield {**features, "decoder_input_ids": tokens}
                yield {**features, "attention_mask": torch.ones(BATCH, form[0], dtype=torch.long), **spoken}


_FEATURES = (
    "num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "input_dim", "input_feat_size",
)  # fmt: skip


def _parameters(model: nn.Module) -> frozenset[str]:
    return frozenset(inspect.signature(model.forward).parameters)


def _field(config: Any, name: str, default: Any) -> Any:
    """A field of a configuration or of one of its parts."""
    parts = [c for c in vars(config).values() if isinstance(c, transformers.PreTrainedConfig)]
    return next((v for c in (config, *parts) if (v := getattr(c, name, None)) is not None), default)


def _sizes(config: Any) -> list[Any]:
    size = _field(config, "image_size", None)
    return [] if size is None else [tuple(size) if isinstance(size, list | tuple) else size]


def _brief(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"[:140]


# -- what a call computed -------------------------------------------------------------------------------


def tensors_of(output: Any) -> dict[str, Tensor]:
    """The tensors of an output by the names that it gives them, those of its cache left out."""
    named = output.items() if isinstance(output, Mapping) else enumerate(_listed(output))
    tensors: dict[str, Tensor] = {}
    for name, value in named:
        if isinstance(value, Tensor):
            tensors[str(name)] = value
        elif isinstance(value, list | tuple | Mapping):
            tensors |= {f"{name}.{n}": t for n, t in tensors_of(value).items()}
    return tensors


def _listed(output: Any) -> Sequence[Any]:
    return output if isinstance(output, list | tuple) else (output,)


def loss_of(output: Any) -> Tensor:
    """The model's loss, and beside it a part of every other result, so that each has a gradient."""
    total: Any = 0.0
    for name, tensor in tensors_of(output).items():
        if not tensor.is_floating_point() or not tensor.requires_grad:
            continue
        weights = torch.linspace(-1, 1, tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        finite = tensor.reshape(-1).nan_to_num(0.0, 0.0, 0.0)
        part = tensor if name == "loss" else (finite * weights).sum() / math.sqrt(max(tensor.numel(), 1))
        total = total + part.sum()
    if not isinstance(total, Tensor):
        raise TypeError("no result depends on a parameter")
    return total
