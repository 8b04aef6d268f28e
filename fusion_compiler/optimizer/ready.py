"""What a kernel needs of a parameter to update it: tensors side by side, counters, its group's numbers."""

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
    """A group's hyper-parameters as they are now: the values of the floats, at `paths`, and the others."""

    values: tuple[float, ...]
    paths: tuple[Path, ...]
    constants: tuple[tuple[Path, Any], ...]


@dataclass(frozen=True)
class Kind:
    """structure: what is traced. dtypes: of the tensors. device: of all of them."""

    structure: Structure
    dtypes: tuple[torch.dtype, ...]
    device: torch.device


@dataclass(frozen=True, eq=False)
class Ready:
    """A parameter that a kernel updates.

    held: its state. states: the tensors of its shape there, in the order of the structure; counters: those of
    one number.
    """

    param: Tensor
    held: Mapping[str, Any]
    states: tuple[Tensor, ...]
    counters: tuple[Tensor, ...]


def numbers_of(group: Mapping[str, Any]) -> Numbers | Refused:
    """A group's hyper-parameters, or why no kernel takes them."""
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
    """Of a parameter with a gradient. Raises Refused where no kernel can take its tensors."""
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
    """This process's part of a DTensor; any other tensor itself."""
    return tensor if type(tensor) in PLAIN else tensor.to_local()  # type: ignore[operator]


def spread(tensor: Tensor) -> tuple[Any, ...]:
    """How a DTensor lies on which processes."""
    return (getattr(tensor, "device_mesh", None), getattr(tensor, "placements", None))


def _sorted_state(param: Tensor, state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(tensors of the parameter's shape, counters), by name. A counter on a device comes to the host."""
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
    """Raises Refused for tensors of other classes, and for DTensors whose elements lie on other processes."""
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
    """Strides; where there is one element along an axis, its stride says nothing."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
