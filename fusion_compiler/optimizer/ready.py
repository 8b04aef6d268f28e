"""Parameters that kernels can update: their dense tensors, their counters and their groups' numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._prims_common import is_non_overlapping_and_dense_or_false

from fusion_compiler.optimizer.formula import GRAD, PARAM, Path, Refused, Structure, floats_of

PLAIN = (nn.Parameter, Tensor)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Numbers:
    """A `Numbers` holds a group's present hyper-parameters: values of floats, at `paths`, and constants."""

    values: tuple[float, ...]
    paths: tuple[Path, ...]
    constants: tuple[tuple[Path, Any], ...]


@dataclass(frozen=True)
class Kind:
    """Parameters of one kind share a kernel. structure: the one to trace. dtypes, device: of the tensors."""

    structure: Structure
    dtypes: tuple[torch.dtype, ...]
    device: torch.device


@dataclass(frozen=True, eq=False)
class Ready:
    """A `Ready` is a parameter that a kernel can update.

    held: its state. states: the state's tensors of the parameter's shape, in the order of the structure.
    counters: the state's tensors of one number.
    """

    param: Tensor
    held: Mapping[str, Any]
    states: tuple[Tensor, ...]
    counters: tuple[Tensor, ...]


def numbers_of(group: Mapping[str, Any]) -> Numbers | Refused:
    """Return a group's hyper-parameters, or the reason why no kernel takes them."""
    for flag in ("capturable", "differentiable"):
        if group.get(flag):
            return Refused(f"{flag}=True: numbers are computed on the host")
    try:
        floats, constants = floats_of(group)
        hash(constants)
    except Refused as error:
        return error
    except TypeError as error:
        return Refused(f"a hyper-parameter is no number: {error}")
    return Numbers(tuple(v for _, v in floats), tuple(p for p, _ in floats), constants)


def ready_of(param: Tensor, state: dict[str, Any], numbers: Numbers) -> tuple[Ready, Kind]:
    """Return a parameter that has a gradient, and its kind. Raises Refused if no kernel takes its tensors."""
    assert param.grad is not None
    states, counters = _sorted_state(param, state)
    named = {PARAM: param, GRAD: param.grad, **states}
    _check_spread(named)
    tensors = tuple(map(local, named.values()))
    _check_layout(tuple(named), tensors)
    dtypes = tuple(tensor.dtype for tensor in tensors)
    structure = Structure(
        tuple(states),
        tuple((name, counter.dtype) for name, counter in counters.items()),
        numbers.paths,
        numbers.constants,
        torch.float64 if torch.float64 in dtypes else torch.float32,
    )
    ready = Ready(param, state, tuple(states.values()), tuple(counters.values()))
    return ready, Kind(structure, dtypes, tensors[0].device)


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a DTensor; return any other tensor itself."""
    return tensor if type(tensor) in PLAIN else tensor.to_local()  # type: ignore[operator]


def spread(tensor: Tensor) -> tuple[Any, ...]:
    """Return the device mesh and the placements of a DTensor, or two Nones."""
    return (getattr(tensor, "device_mesh", None), getattr(tensor, "placements", None))


def _sorted_state(param: Tensor, state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return (tensors of the parameter's shape, counters), by name. A counter on a device is moved to the
    host."""
    if param.dim() == 0:
        raise Refused("it has no dimension, as its counters have none")
    states: dict[str, Tensor] = {}
    counters: dict[str, Tensor] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise Refused(f"its state {name} is {value!r}, no tensor")
        if value.dim() == 0 and value.dtype in (torch.float32, torch.float64):
            if value.device.type != "cpu":
                value = state[name] = value.cpu()
            counters[name] = value
        elif value.shape == param.shape and value.device == param.device:
            states[name] = value
        else:
            raise Refused(f"its state {name} is {value.dtype} {list(value.shape)} on {value.device}")
    return states, counters


def _check_spread(named: Mapping[str, Tensor]) -> None:
    """Raise Refused for tensors of other classes, and for DTensors placed otherwise than the parameter."""
    param = named[PARAM]
    if all(type(tensor) in PLAIN for tensor in named.values()):
        return
    if not hasattr(param, "placements"):
        raise Refused(f"it is a {type(param).__name__}")
    for name, tensor in named.items():
        if spread(tensor) != spread(param):
            raise Refused(
                f"its {name} is a {type(tensor).__name__} of {spread(tensor)[1]}, it {spread(param)[1]}"
            )
    if any(placement.is_partial() for placement in spread(param)[1]):
        raise Refused("its values are sums over processes")


def _check_layout(names: Sequence[str], tensors: Sequence[Tensor]) -> None:
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.dtype not in FLOATS:
            raise Refused(f"its {name} is {tensor.dtype}")
        if type(tensor) not in PLAIN:
            raise Refused(f"its {name} is a {type(tensor).__name__}")
    if all(tensor.is_contiguous() for tensor in tensors):
        return
    param = tensors[0]
    if not is_non_overlapping_and_dense_or_false(param):
        raise Refused("its elements do not lie side by side")
    for name, tensor in zip(names, tensors, strict=True):
        if _order(tensor) != _order(param):
            raise Refused(f"its {name} has the strides {tensor.stride()}, it has {param.stride()}")


def _order(tensor: Tensor) -> list[int]:
    """Return the strides of the axes with several elements; those of other axes mean nothing."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
