"""Compression of what crosses a link: which codec each edge of a plan gets, and the codecs.

A codec works on blocks of 256 numbers. It keeps all of them or the largest of each block, and stores them in
16, 8 or 4 bits. A bitmask says which ones are kept. The gradient is sent at the places that the forward pass
kept: what was not sent has no gradient, so the gradient is that of the compressed model, and needs no mask of
its own.

Adaptive ratios follow FusionLLM (arXiv 2410.12707): each link is compressed in proportion to its share of the
slowest link's time. Convergence under top-k at these edges is studied in arXiv 2401.07788.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fusion_compiler.errors import InvalidOptionError
from fusion_compiler.ir.decision import Decision, Outcome
from fusion_compiler.machines.plan import PipelinePlan

BLOCK = 256
HALVINGS = 12  # of the interval that holds the smallest magnitude which is kept
Bits = int
Part = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True)
class Codec:
    """A codec stores `keep` numbers of each block of 256, in `bits` bits each: bfloat16 in 16 bits, or
    integers with one bfloat16 scale for all of a block (8 bits) or for each 32 numbers (4 bits)."""

    keep: int = BLOCK
    bits: Bits = 8

    @property
    def sparse(self) -> bool:
        return self.keep < BLOCK

    @property
    def bits_per_number(self) -> float:
        """Return the bits that are sent for each number of the tensor, with scale and mask."""
        return self.keep * self.bits / BLOCK + 16 * self.scales / BLOCK + self.sparse

    @property
    def scales(self) -> int:
        """Return the number of scales of a block. Fifteen levels need a scale that fits fewer numbers."""
        return {16: 0, 8: 1, 4: BLOCK // 32}[self.bits]

    def __str__(self) -> str:
        kept = f"top {self.keep} of {BLOCK}, " if self.sparse else ""
        return kept + ("bfloat16" if self.bits == 16 else f"{self.bits} bits")


# The codecs of the default choice, by rising loss. Below a tenth, top-k is known to damage training.
CODECS = (Codec(bits=16), Codec(bits=8), Codec(bits=4), Codec(keep=64), Codec(keep=26))


@dataclass(frozen=True)
class Compression:
    """Say how far slow links are compressed.

    ratio: of the slowest link, against the tensors' own dtypes; the first of `CODECS` that reaches a link's
        ratio is taken. The gradient is never stored in fewer than 8 bits.
    keep: instead of a ratio, the share of numbers that the slowest link keeps (top-k).
    bits: of a kept number, with `keep`: 16, 8 or 4.
    feedback: add what a gradient lost to the gradient of the next microbatch.
    """

    ratio: float = 5.0
    keep: float | None = None
    bits: Bits = 8
    feedback: bool = False

    def __post_init__(self) -> None:
        if self.keep is not None and not 0 < self.keep <= 1:
            raise InvalidOptionError(option="keep", value=self.keep, expected="a share from 0 to 1")
        if self.bits not in (16, 8, 4) or (self.bits == 4 and self.keep not in (None, 1)):
            raise InvalidOptionError(
                option="bits", value=self.bits, expected="16, 8, or 4 with keep=1 or None"
            )
        if self.ratio < 1:
            raise InvalidOptionError(option="ratio", value=self.ratio, expected="a number of at least 1")

    def codec(self, share: float, dtype: torch.dtype) -> Codec | None:
        """Return the codec of a link that takes `share` of the slowest link's time, or None for none."""
        if self.keep is not None:
            return Codec(min(BLOCK, max(1, round(BLOCK * self.keep / share))), self.bits)
        source = 8 * dtype.itemsize
        enough = (c for c in CODECS if source >= 0.98 * self.ratio * share * c.bits_per_number)
        return None if self.ratio * share < 1.2 else next(enough, CODECS[-1])


def choose(compression: Compression | None, plan: PipelinePlan) -> tuple[tuple[Codec | None, Decision], ...]:
    """Return the codec of each edge of a plan, or None where it is sent as it is, and the reason.

    A link that takes less time than the slowest stage is hidden behind it, and nothing is compressed there.
    """
    slowest = max((edge.us for edge in plan.edges), default=0.0)
    compute = max(stage.us for stage in plan.stages)
    choices: list[tuple[Codec | None, Decision]] = []
    for edge in plan.edges:
        floating = [t.dtype for t in edge.tensors if t.differentiable]
        codec, reason = None, "compression is off"
        if compression is not None and not floating:
            reason = "nothing that has a gradient crosses it"
        elif compression is not None and edge.us <= compute:
            reason = f"the link takes {edge.us:.0f} us and the slowest stage {compute:.0f} us"
        elif compression is not None:
            share = edge.us / slowest
            codec = compression.codec(share, floating[0])
            reason = f"the link takes {share:.0%} of the slowest link's time, and more than any stage"
        subject = f"stage {edge.source} to {edge.target}"
        text = f"{codec}: {reason}" if codec else reason
        choices.append((codec, Decision("link compression", subject, Outcome.of(codec is not None), text)))
    return tuple(choices)


def blocks_of(x: Tensor) -> Tensor:
    """Return a tensor's numbers as float32 [blocks, 256]; the last block is padded with zeros."""
    flat = x.reshape(-1).float()
    return F.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)


def select(x: Tensor, keep: int) -> Tensor:
    """Return the mask of `keep` numbers of each block, the largest magnitudes, by bisection of the threshold.

    Bisection only counts, so it is one kernel that reads the block once; sorting is not. Magnitudes that the
    last interval does not tell apart, a 4096th of the block's largest, are taken in their order. NaN counts
    as largest.
    """
    size = torch.where(x == x, x.abs(), torch.inf)
    low = torch.zeros_like(size[:, :1])
    high = size.amax(-1, keepdim=True) * 1.001 + 1e-38
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        enough = (size >= middle).sum(-1, keepdim=True) >= keep
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    surely = size >= high
    rest = (size >= low) & ~surely
    room = keep - surely.sum(-1, keepdim=True)
    return surely | (rest & (rest.cumsum(-1) <= room))


def compact(x: Tensor, mask: Tensor, keep: int) -> Tensor:
    """Return the masked numbers of each block in their order, [blocks, keep]; exactly `keep` are masked."""
    place = torch.where(mask, mask.cumsum(-1) - 1, keep)
    return x.new_zeros(x.shape[0], keep + 1).scatter(1, place, x)[:, :keep]


def spread(values: Tensor, mask: Tensor) -> Tensor:
    """Return [blocks, 256] with `values` at the masked places and zeros elsewhere."""
    place = (mask.cumsum(-1) - 1).clamp_min(0)
    return torch.where(mask, values.gather(1, place), 0.0)


def pack_mask(mask: Tensor) -> Tensor:
    """Return a mask [blocks, 256] as bytes [blocks, 32]."""
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], device=mask.device)
    return (mask.view(-1, BLOCK // 8, 8) * weights).sum(-1).to(torch.uint8)


def unpack_mask(packed: Tensor) -> Tensor:
    shifts = torch.arange(8, device=packed.device)
    return ((packed.int().unsqueeze(-1) >> shifts) & 1).bool().view(-1, BLOCK)


def quantise(x: Tensor, codec: Codec) -> tuple[Tensor, ...]:
    """Return numbers [blocks, n] in few bits: (bfloat16,), or (integers, scales [blocks, scales])."""
    if codec.bits == 16:
        return (x.bfloat16(),)
    most = 2 ** (codec.bits - 1) - 1
    parts = x.view(x.shape[0], codec.scales, -1)
    scales = (parts.abs().amax(-1, keepdim=True) / most).bfloat16()
    wide = scales.float()
    integers = torch.where(wide == 0, 0.0, parts / wide).round().clamp(-most, most).to(torch.int8)
    if codec.bits == 8:
        return integers.view(x.shape), scales.squeeze(-1)
    pairs = (integers + 8).to(torch.uint8).view(x.shape[0], -1, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4), scales.squeeze(-1)


def dequantise(stored: Sequence[Tensor], codec: Codec) -> Tensor:
    """Return the float32 numbers [blocks, n] of what `quantise` has stored."""
    if codec.bits == 16:
        return stored[0].float()
    integers, scales = stored
    if codec.bits == 4:
        integers = torch.stack((integers & 15, integers >> 4), -1).flatten(1).float() - 8
    parts = integers.float().view(len(integers), codec.scales, -1)
    return (parts * scales.float().unsqueeze(-1)).flatten(1)


Prepare = Callable[[Any], Any]  # takes a function or a module and returns its replacement, as `compile` does


class Coder:
    """Encode and decode a tensor of one shape, by functions that this compiler can compile. Without a codec,
    a tensor is sent as it is.

    prepare: makes what is called for each of these functions, as `compile` does. A sparse codec needs the
        packed mask, which `select` returns.
    """

    encode: Callable[..., tuple[Tensor, ...]]
    decode: Callable[..., Tensor]

    def __init__(
        self, codec: Codec | None, shape: Sequence[int], dtype: torch.dtype, prepare: Prepare
    ) -> None:
        self.shape, self.dtype = torch.Size(shape), dtype
        # dtype and shape of what `encode` returns, and of what `select` returns
        self.parts: list[Part] = [(dtype, tuple(shape))]
        self.mask: list[Part] = []
        if codec is None:
            self.encode, self.decode = (lambda x: (x,)), (lambda stored: stored[0])
            return
        self.codec = codec
        blocks = -(-self.shape.numel() // BLOCK)
        numbers = {16: torch.bfloat16, 8: torch.int8, 4: torch.uint8}[codec.bits]
        scales = [(torch.bfloat16, (blocks, codec.scales))] if codec.scales else []
        self.parts = [(numbers, (blocks, codec.keep // (2 if codec.bits == 4 else 1))), *scales]
        self.mask = [(torch.uint8, (blocks, BLOCK // 8))] if codec.sparse else []
        self.select = prepare(self._select)
        self.encode = prepare(self._encode)
        self.decode = prepare(self._decode)
        self.lost = prepare(self._lost)

    def _select(self, x: Tensor) -> Tensor:
        return pack_mask(select(blocks_of(x), self.codec.keep))

    def _encode(self, x: Tensor, *mask: Tensor) -> tuple[Tensor, ...]:
        x = blocks_of(x)
        for packed in mask:
            x = compact(x, unpack_mask(packed), self.codec.keep)
        return quantise(x, self.codec)

    def _decode(self, stored: tuple[Tensor, ...], *mask: Tensor) -> Tensor:
        x = dequantise(stored, self.codec)
        for packed in mask:
            x = spread(x, unpack_mask(packed))
        return self._shaped(x)

    def _lost(self, x: Tensor, stored: tuple[Tensor, ...], *mask: Tensor) -> Tensor:
        """Return x minus the decoded `stored`, and zero for masked elements, which have no gradient."""
        lost = x - self._decode(stored, *mask)
        for packed in mask:
            lost = torch.where(self._shaped(unpack_mask(packed)) != 0, lost, 0)
        return lost

    def _shaped(self, blocks: Tensor) -> Tensor:
        return blocks.view(-1)[: self.shape.numel()].view(self.shape).to(self.dtype)
