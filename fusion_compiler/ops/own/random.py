"""Compute random numbers as functions of (seed, element): the same in eager, in a kernel and in backward.

`fusion_compiler::seed` is the one impure operator: it draws a 64-bit key from PyTorch's default
generator of a device. `fusion_compiler::uniform` is pure, so that a dropout mask is computed
again in backward instead of being stored, and any kernel can make any part of it. The generator
is Philox4x32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): of the rounds that
pass all of TestU01's BigCrush the fewest, as in FlashAttention. PyTorch's ten keep a margin that softmax with
dropout pays for: its integer products take longer than its memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fusion_compiler.ops.own.define import define

# The seed keeps PyTorch's RNG tag so that no pass shares, drops or repeats a draw.
seed = define(
    "seed",
    "(Device device) -> Tensor",
    lambda device: torch.empty(1, dtype=torch.int64, device=device).random_(),
    lambda device: torch.empty(1, dtype=torch.int64, device=device),
    tags=(torch.Tag.nondeterministic_seeded,),
)

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def _uniform(seed: torch.Tensor, shape: Sequence[int], salt: int) -> torch.Tensor:
    """Return uniform float32 numbers: element i of the contiguous result is lane i % 4 of counter (i // 4,
    salt)."""
    size = math.prod(shape)
    counter = torch.arange((size + 3) // 4, dtype=torch.int64, device=seed.device)
    words = philox(seed, counter, salt)
    # The upper 24 bits, exact in float32: comparing with p is comparing the word with a whole number.
    upper = torch.stack(words, dim=-1).flatten()[:size] >> 8
    return (upper.to(torch.float32) * 2**-24).reshape(tuple(shape))


uniform = define(
    "uniform",
    "(Tensor seed, SymInt[] shape, int salt) -> Tensor",
    _uniform,
    lambda seed, shape, salt: torch.empty(tuple(shape), dtype=torch.float32, device=seed.device),
)


def philox(seed: torch.Tensor, counter: torch.Tensor, salt: int) -> tuple[torch.Tensor, ...]:
    """Compute Philox4x32-7 of the 128-bit counters (counter, salt), in int64 arithmetic.

    seed: int64[1]. counter: int64, any shape, not negative. salt: in [0, 2^32).
    Returns four int64 tensors of counter's shape with values in [0, 2^32).
    """
    c0, c1 = counter & _WORD, (counter >> 32) & _WORD
    c2, c3 = torch.full_like(counter, salt), torch.zeros_like(counter)
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(7):
        # The products wrap modulo 2^64; both of their 32-bit halves are still right.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((second >> 32) & _WORD) ^ c1 ^ k0,
            second & _WORD,
            ((first >> 32) & _WORD) ^ c3 ^ k1,
            first & _WORD,
        )
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def merge_seeds(gm: fx.GraphModule) -> fx.GraphModule:
    """Leave one seed per device in the graph; numbers of different seeds get different salts instead.

    To be run in place on the whole (joint forward and backward) graph before it is partitioned:
    the salts of forward and backward must agree. Numbers that shared a seed and a salt still do.
    The numbers are marked to be made again in backward; the seed is saved, as all that is drawn.
    """
    first: dict[torch.device, fx.Node] = {}
    salts: dict[tuple[object, object], int] = {}
    for node in gm.graph.nodes:
        if node.target is uniform and isinstance(node.args[0], fx.Node) and node.args[0].target is seed:
            salt = salts.setdefault((node.args[0], node.args[2]), len(salts))
            node.args = (*node.args[:2], salt)
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    for node in [node for node in gm.graph.nodes if node.target is seed]:
        kept = first.setdefault(torch.device(cast(torch.device, node.args[0])), node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            gm.graph.erase_node(node)
    gm.recompile()
    return gm
