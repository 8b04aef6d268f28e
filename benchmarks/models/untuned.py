"""Twenty-one models that no rule or constant of the compiler was fitted to: python -m benchmarks untuned.

They are models as users write them, from transformers, timm and the literature, with default options. The
sizes of each row are those at which it was first measured; `--quick` has small ones.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models.nets import GraphNet
from benchmarks.models.workloads import Built, Workload, from_config, labelled, tokens


def language(name: str, **fixed: Any) -> Any:
    """Return a build of a model of transformers that computes its loss from `input_ids` and `labels`."""

    def build(batch: int, length: int, **config: Any) -> Built:
        # Some of XLNet's parameters are born in float32.
        model = from_config(name, **fixed, **config).to(torch.get_default_dtype())
        return labelled(model, batch, length, first=5)

    return build


def bart(batch: int, length: int, layers: int, heads: int, inner: int, **config: Any) -> Built:
    sides = {
        f"{side}_{key}": value
        for side in ("encoder", "decoder")
        for key, value in (("layers", layers), ("attention_heads", heads), ("ffn_dim", inner))
    }
    build = language("Bart:ForConditionalGeneration", vocabulary=50265, use_cache=False)
    return build(batch, length, **sides, **config)


def clip(batch: int, layers: int) -> Built:
    depth = {"num_hidden_layers": layers}
    inputs = {"input_ids": torch.randint(5, 49000, (batch, 77))}
    model = from_config("CLIP:Model", text_config=depth, vision_config=depth)
    return model, inputs | {"pixel_values": torch.randn(batch, 3, 224, 224), "return_loss": True}


def of_images(name: str) -> Any:
    """Return a build of a model of transformers that takes images."""

    def build(batch: int, side: int, **config: Any) -> Built:
        return from_config(name, **config), {"pixel_values": torch.randn(batch, 3, side, side)}

    return build


def patchtst(batch: int, length: int, layers: int) -> Built:
    model = from_config(
        "PatchTST:ForPrediction", num_input_channels=7, context_length=length, patch_length=16,
        patch_stride=8, prediction_length=96, d_model=128, num_hidden_layers=layers, num_attention_heads=16,
        ffn_dim=256, dropout=0.2, loss="mse",
    )  # fmt: skip
    return model, {"past_values": torch.randn(batch, length, 7), "future_values": torch.randn(batch, 96, 7)}


class Classifier(nn.Module):
    """A timm model with its cross-entropy."""

    def __init__(self, name: str) -> None:
        super().__init__()
        import timm

        self.model = timm.create_model(name, pretrained=False)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        scores = self.model(images)
        return scores if labels is None else F.cross_entropy(scores.float(), labels)


def classifier(name: str, train: bool = True) -> Any:
    def build(batch: int, side: int = 224) -> Built:
        labels = {"labels": torch.randint(1000, (batch,))} if train else {}
        return Classifier(name), {"images": torch.randn(batch, 3, side, side)} | labels

    return build


def _norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))


class SpeedrunBlock(nn.Module):
    """Attention with normalised queries and keys and value embeddings, and squared ReLU."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)
        self.of_values = nn.Parameter(torch.tensor([0.5, 0.5]))
        self.of_embedding = nn.Parameter(torch.tensor([1.0, 0.0]))

    def forward(self, x: Tensor, first: Tensor, values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.of_embedding[0] * x + self.of_embedding[1] * first
        h = _norm(x)
        batch, length, hidden = h.shape
        shape = (batch, length, self.heads, hidden // self.heads)

        def rotate(t: Tensor) -> Tensor:
            a, b = t.chunk(2, -1)
            return torch.cat((a * cos + b * sin, b * cos - a * sin), -1).type_as(t)

        q, k = rotate(_norm(self.q(h).view(shape))), rotate(_norm(self.k(h).view(shape)))
        v = self.of_values[0] * self.v(h).view(shape) + self.of_values[1] * values.view(shape)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.12)
        x = x + self.o(y.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.down(F.relu(self.up(_norm(x))).square())


class SpeedrunGPT(nn.Module):
    """A language model with weightless norms and soft-capped logits."""

    def __init__(self, length: int, hidden: int, heads: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding, self.of_values = nn.Embedding(vocabulary, hidden), nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(SpeedrunBlock(hidden, heads) for _ in range(layers))
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        rates = (1 / 1024) ** torch.linspace(0, 1, hidden // heads // 2)
        angles = torch.outer(torch.arange(length).to(rates.dtype), rates)[None, :, None]
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = first = _norm(self.embedding(ids))
        values = self.of_values(ids)
        for block in self.blocks:
            x = block(x, first, values, self.cos, self.sin)
        scores = 30 * torch.tanh(self.head(_norm(x)).float() / 30)
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def speedrun_gpt(batch: int, length: int, vocabulary: int, **sizes: int) -> Built:
    ids = tokens(vocabulary, batch, length)
    return SpeedrunGPT(length, vocabulary=vocabulary, **sizes), {"ids": ids, "targets": ids.roll(-1, 1)}


class Clicks(nn.Module):
    """DLRM (Naumov et al., 2019): embedding bags, their pairwise interactions, two MLPs."""

    def __init__(self, bags: int, rows: int, width: int) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(bags))
        bottom, top = (13, 512, 256, width), (width + (bags + 1) * bags // 2, 1024, 512, 1)
        self.bottom = nn.Sequential(*(m for i, o in pairwise(bottom) for m in (nn.Linear(i, o), nn.ReLU())))
        self.top = nn.Sequential(*[m for i, o in pairwise(top) for m in (nn.Linear(i, o), nn.ReLU())][:-1])
        self.register_buffer("pairs", torch.tril_indices(bags + 1, bags + 1, -1))

    def forward(self, numbers: Tensor, ids: Tensor, clicked: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        rows = torch.stack([dense, *(bag(ids[:, i]) for i, bag in enumerate(self.bags))], 1)
        products = (rows @ rows.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        scores = self.top(torch.cat((dense, products), 1)).squeeze(1).float()
        return F.binary_cross_entropy_with_logits(scores, clicked.float())


def dlrm(batch: int, bags: int, rows: int, width: int) -> Built:
    inputs = {
        "numbers": torch.randn(batch, 13),
        "ids": torch.randint(rows, (batch, bags, 4)),
        "clicked": torch.randint(2, (batch,)),
    }
    return Clicks(bags, rows, width), inputs


class NodeClassifier(nn.Module):
    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.layers = GraphNet(128, heads, width)
        self.head = nn.Linear(heads * width, 40)

    def forward(self, x: Tensor, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(x, source, target)), labels)


def gat(nodes: int, edges: int, heads: int, width: int) -> Built:
    inputs = {
        "x": torch.randn(nodes, 128),
        "source": torch.randint(nodes, (edges,)),
        "target": torch.randint(nodes, (edges,)).sort().values,
        "labels": torch.randint(40, (nodes,)),
    }
    return NodeClassifier(heads, width), inputs


IMAGES, FEW_IMAGES = {"batch": 64, "side": 224}, {"batch": 2, "side": 32}
SMALL = {"batch": 2, "length": 16, "hidden": 32, "layers": 1, "heads": 2}
DEBERTA_V3: dict[str, Any] = {
    "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 256,
    "norm_rel_ebd": "layer_norm", "share_att_key": True, "position_biased_input": False,
}  # fmt: skip
FLOAT32: dict[str, Any] = {"dtype": torch.float32, "exact": torch.float64}

UNTUNED: tuple[Workload, ...] = (
    Workload(
        "ALBERT 8 layers, train, 32 x 512", language("Albert:ForMaskedLM", vocabulary=30000),
        {"batch": 32, "length": 512, "hidden": 768, "heads": 12, "inner": 3072, "layers": 8},
        SMALL | {"inner": 64, "layers": 2},
    ),
    Workload(
        "XLNet 4 layers, train, 8 x 512", language("XLNet:LMHeadModel", vocabulary=32000),
        {"batch": 8, "length": 512, "hidden": 768, "layers": 4, "heads": 12, "d_inner": 3072},
        SMALL | {"d_inner": 64},
    ),
    Workload(
        "OPT 8 layers, train, 8 x 1024", language("OPT:ForCausalLM", vocabulary=50272, use_cache=False),
        {"batch": 8, "length": 1024, "layers": 8}, SMALL | {"ffn_dim": 64, "word_embed_proj_dim": 32},
    ),
    Workload(
        "Bloom 6 layers, train, 8 x 1024", language("Bloom:ForCausalLM", vocabulary=50304, use_cache=False),
        {"batch": 8, "length": 1024, "hidden": 1024, "layers": 6, "heads": 16}, SMALL,
    ),
    Workload(
        "Qwen3-MoE 4 layers, train, 4 x 1024",
        language("Qwen3Moe:ForCausalLM", vocabulary=64000, use_cache=False),
        {"batch": 4, "length": 1024, "hidden": 1024, "inner": 2816, "moe_intermediate_size": 768,
         "layers": 4, "heads": 16, "kv_heads": 4, "head_dim": 64, "num_experts": 32,
         "num_experts_per_tok": 4},
        SMALL | {"inner": 64, "moe_intermediate_size": 32, "kv_heads": 1, "head_dim": 16, "num_experts": 4,
                 "num_experts_per_tok": 2},
    ),
    Workload(
        "BART 4 + 4 layers, train, 16 x 512", bart,
        {"batch": 16, "length": 512, "d_model": 768, "layers": 4, "heads": 12, "inner": 3072},
        {"batch": 2, "length": 16, "d_model": 32, "layers": 1, "heads": 2, "inner": 64},
    ),
    Workload(
        "Gemma 2 4 layers, train, 4 x 2048", language("Gemma2:ForCausalLM", use_cache=False),
        {"batch": 4, "length": 2048, "hidden": 1024, "inner": 4096, "layers": 4, "heads": 8, "kv_heads": 4,
         "head_dim": 128, "sliding_window": 1024, "vocabulary": 64000},
        SMALL | {"inner": 64, "kv_heads": 1, "head_dim": 16, "sliding_window": 8, "vocabulary": 128},
    ),
    Workload(
        "DeBERTa-v3 4 layers, train, 8 x 512", language("DebertaV2:ForMaskedLM", **DEBERTA_V3),
        {"batch": 8, "length": 512, "hidden": 768, "inner": 3072, "layers": 4, "heads": 12},
        SMALL | {"inner": 64, "vocabulary": 128},
    ),
    Workload(
        "gpt-oss 4 layers, train, 2 x 2048", language("GptOss:ForCausalLM", use_cache=False),
        {"batch": 2, "length": 2048, "hidden": 1024, "inner": 1024, "layers": 4, "heads": 16, "kv_heads": 4,
         "head_dim": 64, "num_local_experts": 8, "num_experts_per_tok": 2, "vocabulary": 64000},
        SMALL | {"inner": 32, "kv_heads": 1, "head_dim": 16, "num_local_experts": 4,
                 "num_experts_per_tok": 2, "vocabulary": 128},
    ),
    Workload("CLIP, train, 256 pairs", clip, {"batch": 256, "layers": 12}, {"batch": 2, "layers": 1}),
    Workload(
        "SegFormer, 16 x 512 x 512", of_images("Segformer:ForSemanticSegmentation"),
        {"batch": 16, "side": 512}, {"batch": 1, "side": 64}, train=False,
    ),
    Workload(
        "DINOv2 8 layers, train, 64 images", of_images("Dinov2:Model"), IMAGES | {"layers": 8},
        {"batch": 1, "side": 28, "layers": 1},
    ),
    Workload(
        "PatchTST, train, 128 series", patchtst, {"batch": 128, "length": 512, "layers": 3},
        {"batch": 2, "length": 64, "layers": 1}, **FLOAT32,
    ),
    Workload(
        "Swin-T, train, 64 images", classifier("swin_tiny_patch4_window7_224"), {"batch": 64}, {"batch": 1}
    ),
    Workload(
        "EfficientNet-B0, train, 128 images", classifier("efficientnet_b0"), IMAGES | {"batch": 128},
        FEW_IMAGES,
    ),
    Workload(
        "ResNeXt-50, 64 images", classifier("resnext50_32x4d", train=False), IMAGES,
        FEW_IMAGES | {"batch": 1}, train=False,
    ),
    Workload("RegNetY-3.2, train, 64 images", classifier("regnety_032"), IMAGES, FEW_IMAGES),
    Workload("MLP-Mixer, train, 64 images", classifier("mixer_b16_224"), {"batch": 64}, {"batch": 1}),
    Workload(
        "speedrun GPT 8 layers, train, 4 x 2048", speedrun_gpt,
        {"batch": 4, "length": 2048, "hidden": 1024, "heads": 8, "layers": 8, "vocabulary": 50304},
        {"batch": 2, "length": 16, "hidden": 32, "heads": 2, "layers": 1, "vocabulary": 128},
    ),
    Workload(
        "DLRM, train, 16384 clicks", dlrm, {"batch": 16384, "bags": 26, "rows": 20000, "width": 64},
        {"batch": 8, "bags": 3, "rows": 20, "width": 8},
    ),
    Workload(
        "GAT 2 layers, train, 1M edges", gat, {"nodes": 100000, "edges": 1000000, "heads": 4, "width": 64},
        {"nodes": 20, "edges": 60, "heads": 2, "width": 4}, **FLOAT32,
    ),
)  # fmt: skip
