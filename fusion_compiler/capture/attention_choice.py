"""Choose the operator that scaled_dot_product_attention becomes on a GPU, without the GPU.

PyTorch chooses among its kernels in C++, by the GPU that runs the process. `backend_of` makes the same choice
from a DeviceSpec. It follows `select_sdp_backend` in aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, as
`attention` follows `scaled_dot_product_attention` in ../attention.cpp. tests/gpu/test_explain.py compares
both with what PyTorch does on the device.
"""

from __future__ import annotations

import functools
import math
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import DispatchKey
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.torch_version import TorchVersion

from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ops.schema import HALVES

_aten = torch.ops.aten
_SDPA: Any = _aten.scaled_dot_product_attention.default
_CUDNN = 91500  # cuDNN is preferred from the version after this one
_NO_DROPOUT = range(91101, 91400)  # versions of cuDNN
# PyTorch 2.12 and later keep cuDNN from probabilities of dropout that it would round to sixteenths.
DROPOUT_IN_SIXTEENTHS = TorchVersion(torch.__version__) >= TorchVersion("2.12")
_LEAST = -65504.0  # for masked scores in cuDNN, which has no -inf


@dataclass(frozen=True)
class Call:
    """A call has the arguments of scaled_dot_product_attention that decide which kernel runs."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    dropout: float = 0.0
    causal: bool = False
    grouped: bool = False

    @property
    def differentiated(self) -> bool:
        wanted = self.query.requires_grad or self.key.requires_grad or self.value.requires_grad
        return wanted and torch.is_grad_enabled()


def cudnn_version() -> int | None:
    """Return the version of PyTorch's cuDNN, e.g. 91900, or None for a build of PyTorch without it."""
    return torch.backends.cudnn.version() if torch.version.cuda else None


def attention(
    spec: DeviceSpec,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute scaled_dot_product_attention as on the GPU `spec`; PyTorch handles tensors on a CPU."""
    call = Call(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    backend = SDPBackend.MATH if query.device.type == "cpu" else backend_of(call, spec)
    if backend is SDPBackend.CUDNN_ATTENTION:
        mask = _added(attn_mask, query.dtype, _LEAST)
        return _aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, call.differentiated, dropout_p, is_causal, False, scale=scale
        )[0]
    if backend is SDPBackend.FLASH_ATTENTION:
        size = query.shape[-1]
        padded = (F.pad(x, (0, -size % 8)) if size % 8 else x for x in (query, key, value))
        scale = 1 / math.sqrt(size) if scale is None else scale
        result = _aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)[
            0
        ]
        return result[..., :size] if size % 8 else result
    if backend is SDPBackend.EFFICIENT_ATTENTION:
        mask = _aligned(_added(attn_mask, query.dtype, -math.inf), query, key)
        return _aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, call.differentiated, dropout_p, is_causal, scale=scale
        )[0]
    composite = functools.partial(_SDPA._op_dk, DispatchKey.CompositeImplicitAutograd)
    arguments = (query, key, value, attn_mask, dropout_p, is_causal)
    if query.device.type == "cpu":
        return composite(*arguments, scale=scale, enable_gqa=enable_gqa)
    with sdpa_kernel([SDPBackend.MATH]):  # where there is a GPU, PyTorch would choose by it
        return composite(*arguments, scale=scale, enable_gqa=enable_gqa)


def backend_of(call: Call, spec: DeviceSpec) -> SDPBackend:
    """Return the kernel that PyTorch chooses for `call` on the GPU `spec`."""
    usable = {
        SDPBackend.CUDNN_ATTENTION: _cudnn,
        SDPBackend.FLASH_ATTENTION: _flash,
        SDPBackend.EFFICIENT_ATTENTION: _efficient,
    }
    order = [*usable]
    if not _prefers_cudnn(spec):
        order = [*order[1:], order[0]]
    return next((b for b in order if _dense(call) and usable[b](call, spec)), SDPBackend.MATH)


def _capability(spec: DeviceSpec) -> tuple[int, int]:
    """Return (9, 0) for "sm_90", and (0, 0) for a GPU that is not NVIDIA's."""
    return divmod(spec.capability, 10)


def _prefers_cudnn(spec: DeviceSpec) -> bool:
    """True if cuDNN comes before the flash kernel. PyTorch's own wheels have a cuDNN that is new enough."""
    if os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1" or spec.target.startswith("gfx"):
        return False
    major, minor = _capability(spec)
    version = cudnn_version()
    old_cuda = torch.version.cuda is not None and int(torch.version.cuda.split(".")[0]) < 13
    return (
        major in (9, 10) and (version is None or version > _CUDNN) and not (old_cuda and minor not in (0, 3))
    )


def _dense(call: Call) -> bool:
    """True if every fused kernel takes tensors of these sizes."""
    q, k, v = call.query, call.key, call.value
    if not (q.dim() == k.dim() == v.dim() == 4 and q.shape[0] == k.shape[0] == v.shape[0]):
        return False
    if q.shape[-2] == 0 or k.shape[-2] == 0 or not q.dtype == k.dtype == v.dtype:
        return False
    return call.mask is None or call.mask.stride(-1) == 1


def _heads(call: Call, *, values_may_differ: bool = False) -> bool:
    """True if there are as many key and value heads as query heads, or a divisor of them in grouped calls."""
    q, k, v = (x.shape[1] for x in (call.query, call.key, call.value))
    if not call.grouped:
        return q == k == v
    return (k == v or values_may_differ) and q % k == 0 and q % v == 0


def _rows_contiguous(call: Call) -> bool:
    return all(x.stride(-1) == 1 for x in (call.query, call.key, call.value))


def _cudnn(call: Call, spec: DeviceSpec) -> bool:
    version, (major, minor) = cudnn_version() or _CUDNN + 1, _capability(spec)
    if not torch.backends.cuda.cudnn_sdp_enabled() or major < 8 or call.query.dtype not in HALVES:
        return False
    if call.dropout and version in _NO_DROPOUT:
        return False
    if DROPOUT_IN_SIXTEENTHS and not (call.dropout * 16).is_integer():
        return False
    if (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    ):
        return False
    sizes, value = (call.query.shape[-1], call.value.shape[-1]), call.value
    if max(sizes) > _most_of_cudnn(sizes, version, (major, minor)) or sizes[0] % 8 or sizes[1] % 8:
        return False
    if call.key.shape[-2] == 1 or (call.dropout and call.query.shape[-2] == 1) or value.shape[0] > 65535:
        return False
    return _heads(call, values_may_differ=True) and _rows_contiguous(call) and _mask_of_cudnn(call)


def _most_of_cudnn(sizes: tuple[int, int], version: int, capability: tuple[int, int]) -> int:
    """Return the most elements of a head for which cuDNN is asked. PyTorch 2.12 asks it for fewer on a
    Hopper than 2.11 did."""
    is_hopper, is_blackwell = capability == (9, 0), capability[0] == 10
    if is_hopper and TorchVersion(torch.__version__) < TorchVersion("2.12") and version >= 91000:
        return 256
    return 192 if (is_hopper or is_blackwell) and sizes == (192, 128) else 128


def _mask_of_cudnn(call: Call) -> bool:
    mask = call.mask
    if mask is None:
        return True
    batch, heads, rows, columns = (*call.query.shape[:3], call.key.shape[2])
    if mask.requires_grad or mask.shape[-2] not in (rows, 1) or mask.shape[-1] not in (columns, 1):
        return False
    wide = mask.dim() == 4 and mask.shape[0] in (batch, 1) and mask.shape[1] in (heads, 1)
    return mask.dim() == 2 or wide


def _flash(call: Call, spec: DeviceSpec) -> bool:
    q, k, v = call.query, call.key, call.value
    capability, size = _capability(spec), q.shape[-1]
    amd = spec.target.startswith("gfx")
    if not torch.backends.cuda.flash_sdp_enabled() or call.mask is not None or q.dtype not in HALVES:
        return False
    if not (size == k.shape[-1] == v.shape[-1]) or size > (512 if amd else 256):
        return False
    if not amd and capability < (8, 0):
        return False
    if call.differentiated and ((8, 6) <= capability <= (8, 9) or capability >= (12, 0)):
        if not (size <= 192 or (not call.dropout and size > 224)):
            return False
    square = not call.causal or q.shape[-2] == k.shape[-2]
    return square and _heads(call) and (_rows_contiguous(call) or size == 1)


def _efficient(call: Call, spec: DeviceSpec) -> bool:
    q, k, v = call.query, call.key, call.value
    half, sizes = q.dtype in HALVES, (q.shape[-1], v.shape[-1])
    if not torch.backends.cuda.mem_efficient_sdp_enabled() or not (half or q.dtype is torch.float32):
        return False
    step = 8 if half else 4
    if q.shape[-1] != k.shape[-1] or any(size % step or not size for size in sizes):
        return False
    grouped = call.grouped and q.shape[1] != k.shape[1]
    return not grouped and _heads(call) and _rows_contiguous(call)


def _added(mask: Tensor | None, dtype: torch.dtype, least: float) -> Tensor | None:
    """Return a boolean mask as numbers to add to scores, and any other mask unchanged."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(least, dtype=dtype, device=mask.device))


def _aligned(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Return a mask for every query head, whose rows begin where the memory-efficient kernel can load
    them."""
    if mask is None:
        return None
    steps = mask.stride()
    if any(step % 8 for step in steps[:-1]) or steps[-1] != 1:
        columns = mask.shape[-1]
        mask = F.pad(mask, (0, 8 - columns % 8))[..., :columns]
    return mask.expand(*query.shape[:3], key.shape[2])
