"""Capture for a GPU that this machine may not have: its tensors are FakeTensors.

PyTorch makes CUDA FakeTensors anywhere, and model code that looks at `x.device` sees a GPU. Autograd is the
obstacle: its C++ engine asks for the streams of a CUDA tensor's device, and ends the process where there is
none. `without_gpu` shows these tensors to C++ as what they are there, tensors without data ("meta"), which
autograd can differentiate anywhere. Their dispatch keys stay those of CUDA, so autocast works.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor

from fusion_compiler.capture.attention_choice import attention_of
from fusion_compiler.ir.device import DeviceSpec

GPU = torch.device("cuda", 0)
_META = torch.device("meta")
_AT_DEVICE, _AT_DISPATCH = 6, 10  # positions of `device` and `dispatch_device` in FunctionalTensor.__new__
_DEVICE: Any = torch.ops.prim.device.default


@contextmanager
def capturing_for(spec: DeviceSpec) -> Generator[None]:
    """Capture graphs of CUDA FakeTensors as a machine with the GPU `spec` would capture them.

    Attention is the operator that PyTorch chooses on that GPU. Changes attributes of PyTorch's classes while
    entered, so no other thread should trace meanwhile.
    """
    with ExitStack() as stack:
        if not torch.cuda.is_available():
            stack.enter_context(without_gpu())
        stack.enter_context(enable_python_dispatcher())  # as AOTAutograd does for a graph of TorchDynamo
        stack.enter_context(attention_of(spec))
        yield


@contextmanager
def without_gpu() -> Generator[None]:
    """Let autograd differentiate CUDA FakeTensors on a machine without a GPU."""
    of_tensor: Any = FakeTensor.__torch_dispatch__.__func__  # type: ignore[attr-defined]
    of_mode: Any = FakeTensorMode.__torch_dispatch__

    def tensor_dispatch(
        cls: type, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _seen_by_cpp(args[0]) if func is _DEVICE else of_tensor(cls, func, types, args, kwargs or {})

    def mode_dispatch(
        self: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE:
            return _seen_by_cpp(args[0])
        kwargs = kwargs or {}
        if kwargs.get("device") == _META:  # C++ code makes a tensor on the device of another
            kwargs = {**kwargs, "device": GPU}
        return of_mode(self, func, types, args, kwargs)

    make_subclass: Any = Tensor._make_wrapper_subclass

    def make_wrapper(cls: type, *args: Any, **kwargs: Any) -> Any:
        """AOTAutograd's FunctionalTensor has the dispatch keys of the GPU, and asks for its device each time;
        other subclasses are what their tensors are to C++."""
        if cls is FunctionalTensor and args[_AT_DEVICE] == _META:
            args = (*args[:_AT_DEVICE], GPU, *args[_AT_DEVICE + 1 : _AT_DISPATCH], True, *args[_AT_DISPATCH + 1 :])
        elif getattr(kwargs.get("device"), "type", None) == GPU.type:
            kwargs["device"] = _META
        return make_subclass(cls, *args, **kwargs)

    is_cuda = property(lambda tensor: tensor.device.type == GPU.type)
    with (
        patch.object(Tensor, "_make_wrapper_subclass", staticmethod(make_wrapper)),
        patch.object(FunctionalTensor, "device", property(lambda tensor: _inner(tensor).device), create=True),
        patch.object(FunctionalTensor, "is_cuda", is_cuda, create=True),
        patch.object(FakeTensor, "__torch_dispatch__", classmethod(tensor_dispatch)),
        patch.object(FakeTensorMode, "__torch_dispatch__", mode_dispatch),
        patch.object(FakeTensor, "is_cuda", is_cuda, create=True),
        patch.object(FakeTensor, "get_device", lambda tensor: tensor.device.index, create=True),
        patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False),
        patch("torch.cuda.is_bf16_supported", lambda *_, **__: True),
    ):
        yield


def _inner(tensor: Tensor) -> Tensor:
    return torch._from_functional_tensor(tensor.elem) if isinstance(tensor, FunctionalTensor) else tensor


def _seen_by_cpp(tensor: Tensor) -> torch.device:
    fake: Any = _inner(tensor)
    in_kernel = fake.fake_mode.in_kernel_invocation
    return _META if in_kernel or fake.fake_device.type == GPU.type else fake.fake_device


def name_device(graph: fx.Graph) -> None:
    """Replace "meta" by the GPU in the arguments of calls, where C++ code wrote it (see `without_gpu`)."""
    for node in graph.nodes:
        if node.kwargs.get("device") == _META:
            node.kwargs = {**node.kwargs, "device": GPU}


def on_gpu(tensor: Tensor) -> bool:
    return tensor.device.type == GPU.type
