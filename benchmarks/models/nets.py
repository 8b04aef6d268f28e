"""The other nets of the models' table: convolutions, biased attention, experts, a state space, lookups."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models.attentions import evoformer, swin, t5
from benchmarks.models.convolutions import convnext, resnet, resnet_by_channel, resnet_folded, unet_block
from benchmarks.models.workloads import Batch, Built, Workload, from_config, labelled

_RESNET = {"batch": 128, "width": 64, "depth": 6, "side": 224}
_RESNET_QUICK = {"batch": 2, "width": 8, "depth": 1, "side": 32}
_T5 = {"length": 512, "hidden": 1024, "layers": 6, "heads": 16, "vocabulary": 32128}


def mixtral(batch: int, length: int, heads: int, experts: int, **shape: int) -> Built:
    model = from_config(
        "Mixtral:ForCausalLM", positions=length, heads=heads, kv_heads=heads // 2, vocabulary=32000,
        num_local_experts=experts, use_cache=False, **shape,
    )  # fmt: skip
    return labelled(model, batch, length)


class SharedAndRoutedExperts(nn.Module):
    """DeepSeek-V3's feed-forward (Liu et al. 2024): [b, n, c] -> the same.

    Sigmoid scores, a bias that only selects, experts chosen in the best groups, a shared expert. Each expert
    takes `capacity` tokens, those that score highest there: shapes do not depend on data.
    """

    balance: Tensor

    def __init__(self, hidden: int, inner: int, experts: int, chosen: int, groups: int) -> None:
        super().__init__()
        self.experts, self.chosen, self.groups = experts, chosen, groups
        self.router = nn.Linear(hidden, experts, bias=False)
        self.up = nn.Parameter(hidden**-0.5 * torch.randn(experts, hidden, 2 * inner))
        self.down = nn.Parameter(inner**-0.5 * torch.randn(experts, inner, hidden))
        self.shared_up = nn.Linear(hidden, 2 * inner, bias=False)
        self.shared_down = nn.Linear(inner, hidden, bias=False)
        self.register_buffer("balance", torch.zeros(experts))

    def route(self, x: Tensor) -> Tensor:
        """[tokens, experts]: how much of each expert, 0 where it is not chosen."""
        scores = self.router(x).float().sigmoid()
        biased = scores + self.balance
        grouped = biased.unflatten(-1, (self.groups, -1))
        best = grouped.topk(2, -1).values.sum(-1).topk(self.groups // 2, -1).indices
        allowed = torch.zeros_like(grouped[..., 0]).scatter(-1, best, 1.0).bool()
        biased = grouped.masked_fill(~allowed[..., None], 0.0).flatten(-2)
        index = biased.topk(self.chosen, -1).indices
        weight = scores.gather(-1, index)
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
        return torch.zeros_like(scores).scatter(-1, index, weight)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        capacity = max(1, 2 * len(tokens) * self.chosen // self.experts)
        weight, index = self.route(tokens).t().topk(min(capacity, len(tokens)), -1)
        gate, up = torch.bmm(tokens[index], self.up).chunk(2, -1)
        routed = torch.bmm(F.silu(gate) * up, self.down) * weight.unsqueeze(-1).to(x.dtype)
        gate, up = self.shared_up(tokens).chunk(2, -1)
        shared = self.shared_down(F.silu(gate) * up)
        return x + shared.index_add(0, index.flatten(), routed.flatten(0, 1)).view_as(x)


def deepseek(batch: int, length: int, hidden: int, inner: int, experts: int, chosen: int) -> Built:
    model = SharedAndRoutedExperts(hidden, inner, experts, chosen, experts // 4)
    return model, {"x": torch.randn(batch, length, hidden).requires_grad_()}


STATE_SPACE = {"vocabulary": 1024, "use_cache": False}


def mamba_2(batch: int, length: int, hidden: int, state: int, chunk: int, layers: int) -> Built:
    """Chunks run in parallel, with a cumsum over the states between them (Dao and Gu, 2024)."""
    more = {"num_heads": hidden // 32, "head_dim": 64, "n_groups": 1, "chunk_size": chunk, **STATE_SPACE}
    model = from_config("Mamba2:ForCausalLM", hidden=hidden, layers=layers, state_size=state, **more)
    return labelled(model, batch, length)


def mamba(batch: int, length: int, **shape: int) -> Built:
    """A step for each token, each a few operations: transformers' loop where it has no kernels."""
    return labelled(from_config("Mamba:ForCausalLM", state_size=16, **STATE_SPACE, **shape), batch, length)


class GraphAttention(nn.Module):
    """A layer of a graph attention network (Velickovic et al., 2018), its sums over edges by scatters."""

    def __init__(self, features: int, heads: int, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(features, heads * width, bias=False)
        self.score = nn.Parameter(torch.randn(2, heads, width) * 0.1)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        h = self.project(x).unflatten(-1, self.score.shape[1:])
        left, right = (h * self.score[0]).sum(-1), (h * self.score[1]).sum(-1)
        score = F.leaky_relu(left[source] + right[target], 0.2)
        index = target[:, None].expand_as(score)
        top = torch.full_like(left, -1e9).scatter_reduce(0, index, score.detach(), "amax")
        weight = (score - top[target]).exp()
        weight = weight / torch.zeros_like(left).index_add(0, target, weight)[target]
        return F.elu(torch.zeros_like(h).index_add(0, target, h[source] * weight[..., None]).flatten(1))


class GraphNet(nn.Module):
    def __init__(self, features: int, heads: int, width: int) -> None:
        super().__init__()
        self.first = GraphAttention(features, heads, width)
        self.second = GraphAttention(heads * width, heads, width)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        return self.second(self.first(x, source, target), source, target)


def graph_attention(batch: int, edges: int, features: int, heads: int, width: int, hubs: int) -> Built:
    """batch: nodes of one graph. hubs: those that half of all edges lead to."""
    source, target = torch.randint(batch, (2, edges))
    target[::2] %= hubs
    inputs: Batch = {"x": torch.randn(batch, features).requires_grad_(), "source": source, "target": target}
    return GraphNet(features, heads, width), inputs


class ClickThrough(nn.Module):
    """Sums of embeddings and their products with each other (DLRM; Naumov et al., 2019)."""

    def __init__(self, tables: int, rows: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.register_buffer("pairs", torch.tril_indices(tables, tables, -1))
        self.pairs: Tensor
        self.top = nn.Linear(tables * (tables - 1) // 2, 256)

    def forward(self, indices: Tensor) -> Tensor:
        x = torch.stack([table(indices[:, i]) for i, table in enumerate(self.tables)], 1)
        return self.top((x @ x.transpose(1, 2))[:, self.pairs[0], self.pairs[1]])


def click_through(batch: int, tables: int, rows: int, width: int, each: int) -> Built:
    return ClickThrough(tables, rows, width), {"indices": torch.randint(rows, (batch, tables, each))}


NETS: tuple[Workload, ...] = (
    Workload("ResNet-50, train, 128 images", resnet, _RESNET, _RESNET_QUICK),
    Workload("ResNet-50 channel by channel, train, 128 images", resnet_by_channel, _RESNET, _RESNET_QUICK),
    Workload("ResNet-50, folded, 128 images", resnet_folded, _RESNET, _RESNET_QUICK, train=False),
    Workload(
        "ConvNeXt-T, train, 64 images", convnext,
        {"batch": 64, "width": 96, "depth": 9, "side": 224},
        {"batch": 2, "width": 8, "depth": 1, "side": 32},
    ),
    Workload(
        "diffusion U-Net block, train, 8 x 320 x 64 x 64", unet_block,
        {"batch": 8, "channels": 320, "heads": 10, "side": 64},
        {"batch": 2, "channels": 16, "heads": 2, "side": 8},
    ),
    Workload(
        "Swin-T stage, train, 64 x 28 x 28", swin,
        {"batch": 64, "side": 28, "channels": 192, "heads": 6, "window": 7, "layers": 4},
        {"batch": 2, "side": 8, "channels": 16, "heads": 2, "window": 4, "layers": 2},
    ),
    Workload(
        "Evoformer block, train, 128 x 256", evoformer,
        {"batch": 1, "sequences": 128, "length": 256, "channels": 256, "pair": 128, "heads": 8},
        {"batch": 1, "sequences": 3, "length": 8, "channels": 32, "pair": 16, "heads": 4},
    ),
    Workload(
        "T5-large 6 + 6 layers, train, 8 x 512", t5, {"batch": 8, **_T5},
        {"batch": 2, "length": 16, "hidden": 64, "layers": 2, "heads": 4, "vocabulary": 128},
    ),
    Workload(
        "Mixtral 4 layers of 8 experts, train, 2 x 2048", mixtral,
        {"batch": 2, "length": 2048, "hidden": 1024, "inner": 3584, "layers": 4, "heads": 16, "experts": 8},
        {"batch": 2, "length": 16, "hidden": 64, "inner": 96, "layers": 1, "heads": 4, "experts": 4},
    ),
    Workload(
        "DeepSeek-V3's experts, train, 4 x 2048", deepseek,
        {"batch": 4, "length": 2048, "hidden": 2048, "inner": 1024, "experts": 32, "chosen": 4},
        {"batch": 2, "length": 16, "hidden": 32, "inner": 16, "experts": 8, "chosen": 2},
    ),
    Workload(
        "Mamba-2 4 layers, train, 2 x 2048", mamba_2,
        {"batch": 2, "length": 2048, "hidden": 768, "layers": 4, "state": 64, "chunk": 64},
        {"batch": 2, "length": 20, "hidden": 32, "layers": 1, "state": 8, "chunk": 8},
    ),
    Workload(
        "Mamba 2 layers, train, 2 x 64", mamba,
        {"batch": 2, "length": 64, "hidden": 768, "layers": 2},
        {"batch": 2, "length": 8, "hidden": 32, "layers": 1},
    ),
    *(
        Workload(
            f"graph attention 2 layers, train, a million edges, {name}", graph_attention,
            {"batch": 100000, "edges": 1000000, "features": 128, "heads": 4, "width": 64, "hubs": hubs},
            {"batch": 20, "edges": 80, "features": 8, "heads": 2, "width": 8, "hubs": 20},
            dtype=torch.float32, exact=torch.float64,
        )
        for name, hubs in (("evenly", 100000), ("to ten hubs", 10))
    ),
    Workload(
        "DLRM's embeddings, train, 16384", click_through,
        {"batch": 16384, "tables": 26, "rows": 20000, "width": 64, "each": 4},
        {"batch": 32, "tables": 3, "rows": 20, "width": 8, "each": 4},
    ),
)  # fmt: skip
