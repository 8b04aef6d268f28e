"""Mixtures of experts and state-space models; all but one are transformers' own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models.workloads import Built, from_config, labelled


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
