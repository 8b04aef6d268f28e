"""Capture for a GPU that this machine may not have: its tensors are FakeTensors.

PyTorch makes CUDA FakeTensors anywhere, and model code that looks at `x.device` sees a GPU. Autograd is the
obstacle: its C++ engine asks for the streams of a CUDA tensor's device, and ends the process where there is
none. `_without_gpu` shows these tensors to C++ as what they are there, tensors without data ("meta"), which
autograd can differentiate anywhere. Their dispatch keys stay those of CUDA. What C++ decides by the device is
decided in Python: the operators of attention, conversions between devices, autocast.
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch._C import DispatchKey
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental import proxy_tensor
from torch.library import _scoped_library  # type: ignore[attr-defined]
from torch.utils._python_dispatch import TorchDispatchMode

from fusion_compiler.capture.attention_choice import attention
from fusion_compiler.capture.autocast import autocasting, with_kernel
from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ops.decompositions.tensors import on_gpu
from fusion_compiler.ops.own.channel_order import order_of_result

GPU = torch.device("cuda", 0)
_META = torch.device("meta")
_aten = torch.ops.aten
_COMPOSITE = DispatchKey.CompositeImplicitAutograd
_DEVICE: Any = torch.ops.prim.device.default
_AT_DEVICE, _AT_DISPATCH = 6, 10  # positions of `device` and `dispatch_device` in FunctionalTensor.__new__
# Operators with a CUDA kernel that C++ composes of others where there is none.
_WITH_KERNELS: tuple[Any, ...] = (_aten._fused_rms_norm, _aten.silu_backward, _aten.mish_backward)


@contextmanager
def capturing_for(spec: DeviceSpec) -> Generator[None]:
    """Capture graphs of CUDA FakeTensors as a machine with the GPU `spec` would capture them.

    Attention is the operator that PyTorch chooses on that GPU. Changes attributes of PyTorch's classes while
    entered, so no other thread should trace meanwhile.
    """
    attend = functools.partial(attention, spec)
    with ExitStack() as stack:
        if not torch.cuda.is_available():
            stack.enter_context(_without_gpu())
        stack.enter_context(enable_python_dispatcher())  # as AOTAutograd does for a graph of TorchDynamo
        # A recurrent layer lays weights that are new to it out for cuDNN: no FakeTensors.
        stack.enter_context(patch.object(nn.RNNBase, "flatten_parameters", lambda layer: None))
        stack.enter_context(with_kernel(_aten.scaled_dot_product_attention.default, _COMPOSITE, attend))
        yield


def name_device(graph: fx.Graph) -> None:
    """Replace "meta" by the GPU in the arguments of calls, where C++ code wrote it."""
    for node in graph.nodes:
        if node.kwargs.get("device") == _META:
            node.kwargs = {**node.kwargs, "device": GPU}


@contextmanager
def _without_gpu() -> Generator[None]:
    """Let autograd differentiate CUDA FakeTensors on a machine without a GPU."""
    view = _View()
    with (
        _shown_as_meta(view),
        with_kernel(_aten.to.device, _COMPOSITE, _to_device),
        with_kernel(_aten.to.dtype_layout, _COMPOSITE, _to_options),
        with_kernel(_aten.to.other, _COMPOSITE, _to_other),
        autocasting(view.as_gpu),
        patch.object(proxy_tensor, "unset_fake_temporarily", _constants_on_cpu),
        _kernels(),
        patch("torch._C._conv_determine_backend_memory_format", _convolution_order),
        patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False),
        patch("torch.cuda.is_bf16_supported", lambda *_, **__: True),
    ):
        yield


class _OnCpu(TorchDispatchMode):
    """Compute on the CPU what is asked for on the GPU."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(kwargs.get("device"), "type", None) == GPU.type:
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


@contextmanager
def _constants_on_cpu() -> Generator[Any]:
    """Leave FakeTensorMode, as make_fx does to compute what a constant becomes."""
    with unset_fake_temporarily() as mode, _OnCpu():
        yield mode


class _View:
    """Show C++ the CUDA FakeTensors as meta tensors, or as tensors of a GPU while `as_gpu` is entered."""

    gpu = False

    @contextmanager
    def as_gpu(self) -> Generator[None]:
        before, self.gpu = self.gpu, True
        try:
            yield
        finally:
            self.gpu = before

    def device(self, tensor: Tensor) -> torch.device:
        fake: Any = _inner(tensor)
        meta = fake.fake_mode.in_kernel_invocation or (fake.fake_device.type == GPU.type and not self.gpu)
        return _META if meta else fake.fake_device


@contextmanager
def _shown_as_meta(view: _View) -> Generator[None]:
    """Show CUDA FakeTensors to C++ as meta tensors, and make those CUDA FakeTensors that C++ makes there."""
    of_tensor: Any = FakeTensor.__torch_dispatch__.__func__  # type: ignore[attr-defined]
    of_mode: Any = FakeTensorMode.__torch_dispatch__
    make_subclass: Any = Tensor._make_wrapper_subclass

    def tensor_dispatch(
        cls: type, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return view.device(args[0]) if func is _DEVICE else of_tensor(cls, func, types, args, kwargs or {})

    def mode_dispatch(
        self: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE:
            return view.device(args[0])
        kwargs = kwargs or {}
        if kwargs.get("device") == _META:
            kwargs = {**kwargs, "device": GPU}
        return of_mode(self, func, types, args, kwargs)

    def make_wrapper(cls: type, *args: Any, **kwargs: Any) -> Any:
        """Return a wrapper subclass. AOTAutograd's FunctionalTensor has the dispatch keys of the GPU, and
        asks for its device each time; to C++, other subclasses are what their tensors are."""
        if cls is FunctionalTensor and args[_AT_DEVICE] == _META:
            args = (
                *args[:_AT_DEVICE],
                GPU,
                *args[_AT_DEVICE + 1 : _AT_DISPATCH],
                True,
                *args[_AT_DISPATCH + 1 :],
            )
        elif getattr(kwargs.get("device"), "type", None) == GPU.type:
            kwargs["device"] = _META
        return make_subclass(cls, *args, **kwargs)

    is_cuda = property(on_gpu)
    with (
        patch.object(Tensor, "_make_wrapper_subclass", staticmethod(make_wrapper)),
        patch.object(FunctionalTensor, "device", property(lambda tensor: _inner(tensor).device), create=True),
        patch.object(FunctionalTensor, "is_cuda", is_cuda, create=True),
        patch.object(FakeTensor, "__torch_dispatch__", classmethod(tensor_dispatch)),
        patch.object(FakeTensorMode, "__torch_dispatch__", mode_dispatch),
        patch.object(FakeTensor, "is_cuda", is_cuda, create=True),
        patch.object(FakeTensor, "get_device", lambda tensor: tensor.device.index, create=True),
    ):
        yield


def _inner(tensor: Tensor) -> Tensor:
    return torch._from_functional_tensor(tensor.elem) if isinstance(tensor, FunctionalTensor) else tensor


@contextmanager
def _kernels() -> Generator[None]:
    """Let operators that have a kernel on every GPU be operators where PyTorch is built without CUDA."""
    missing = [op for op in _WITH_KERNELS if not op.default.has_kernel_for_dispatch_key(DispatchKey.CUDA)]
    with ExitStack() as stack:
        for op in missing:
            stack.callback(op.default._dispatch_cache.clear)
        library = stack.enter_context(_scoped_library("aten", "IMPL"))
        for op in missing:
            library.impl(op.default, _no_kernel, "CUDA")
            op.default._dispatch_cache.clear()
        yield


def _no_kernel(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("this build of PyTorch has no CUDA kernels")


_order_on_cpu = torch._C._conv_determine_backend_memory_format


def _convolution_order(x: Tensor, weight: Tensor, backend: Any) -> torch.memory_format:
    """Return the order in which cuDNN stores a result, which PyTorch asks C++ for."""
    if not on_gpu(x):
        return _order_on_cpu(x, weight, backend)
    return torch.contiguous_format if x.dtype is torch.float64 else order_of_result(x, weight)


_HOW = ("non_blocking", "copy", "memory_format")  # the last arguments of all forms of Tensor.to


def _to_device(tensor: Tensor, device: torch.device, dtype: torch.dtype, *how: Any, **named: Any) -> Tensor:
    return _to_options(tensor, dtype=dtype, device=device, **dict(zip(_HOW, how, strict=False)), **named)


def _to_other(tensor: Tensor, other: Tensor, *how: Any, **named: Any) -> Tensor:
    return _to_device(tensor, other.device, other.dtype, *how, **named)


def _to_options(
    tensor: Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    """Compute Tensor.to by the device that Python sees."""
    device = tensor.device if device is None else device
    if tensor.device != _META and device.type in (GPU.type, _META.type):  # not within a meta kernel
        device = GPU
    if device == tensor.device and layout in (None, tensor.layout):
        return _aten.to.dtype(tensor, dtype or tensor.dtype, non_blocking, copy, memory_format)
    return _aten._to_copy(
        tensor,
        dtype=dtype,
        layout=layout,
        device=device,
        non_blocking=non_blocking,
        memory_format=memory_format,
    )
