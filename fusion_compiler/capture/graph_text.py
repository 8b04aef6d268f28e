"""Write captured graphs as JSON and read them back, for autograd's cache of forward and backward graphs.

A graph is written only if JSON can describe it completely: it has static sizes, plain strided tensors,
operators of PyTorch and of this package, and loops over chunks of such graphs. Any other graph is refused
with a reason. The JSON names operators and dtypes, and never contains code.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.amp import autocast_mode
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule
from torch.utils.checkpoint import CheckpointPolicy

from fusion_compiler.ir import record
from fusion_compiler.ir.chunks import Chunked
from fusion_compiler.ir.record import NotWritable
from fusion_compiler.ops.own import depthwise, random, recurrent, running
from fusion_compiler.ops.own.channel_order import to_memory_format
from fusion_compiler.ops.own.convolution_relu import convolution_relu
from fusion_compiler.ops.own.experts import expert_mm
from fusion_compiler.ops.own.few_queries import attend
from fusion_compiler.ops.own.group_norm import group_norm, group_norm_backward
from fusion_compiler.ops.own.max_pool import OPERATORS as MAXIMA
from fusion_compiler.ops.own.permuted_rows import permuted_rows
from fusion_compiler.ops.own.sum_rows import COMBINES

NAMESPACES = ("aten", "prims")  # their operators are the same in every process of one version of PyTorch
_PLAIN = ("partitioner_tag", "stack_trace", "autograd_backward", "is_gradient_acc")
_NUMBERS = ("seq_nr", "ac_graph_id")  # counters of a process; it only matters which nodes have equal ones
_MARKS = "fusion_compiler."  # the prefix of this package's keys in `meta`
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # in the text of a function; it differs from process to process
# Functions that are not operators: for an element of a tuple, and for the ends of regions above autograd.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "getitem": operator.getitem,
    "set_grad_enabled": torch._C._set_grad_enabled,
    "enter_autocast": autocast_mode._enter_autocast,
    "exit_autocast": autocast_mode._exit_autocast,
}
_TYPES: dict[str, type] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}


@dataclass(frozen=True)
class Origin:
    """An origin is the node above autograd that a node comes from: the part of `from_node` that is read."""

    name: str
    target: str


def write(gm: fx.GraphModule) -> dict[str, Any]:
    """Return a graph of functional ATen with FakeTensors as JSON values. Raises NotWritable."""
    return Writer().graph(gm)


def read(text: Mapping[str, Any], mode: FakeTensorMode) -> fx.GraphModule:
    """Return the graph that `write` has written, with FakeTensors of `mode`.

    Raises KeyError, ValueError, TypeError or AttributeError for any other text.
    """
    return _Reader(text, mode).graph()


class Writer:
    """Write the nodes of a graph as JSON values; raise NotWritable for what JSON cannot describe."""

    ops = ("placeholder", "call_function", "output")

    def __init__(self) -> None:
        self._texts: dict[str, int] = {}
        self._storages: dict[int, int] = {}
        self._bytes: list[int] = []
        self._numbers: dict[str, dict[int, int]] = {key: {} for key in _NUMBERS}

    def graph(self, gm: fx.GraphModule) -> dict[str, Any]:
        nodes = [self._node(node) for node in gm.graph.nodes]
        return {"nodes": nodes, "texts": list(self._texts), "storages": self._bytes}

    def _node(self, node: fx.Node) -> dict[str, Any]:
        if node.op not in self.ops:
            raise NotWritable(f"it holds {node.op} {node.target}")
        entry = {"name": node.name, "op": node.op, "target": self.target(node), "meta": self.meta(node)}
        return entry | {"args": self.value(node.args), "kwargs": self.value(dict(node.kwargs))}

    def target(self, node: fx.Node) -> Any:
        if isinstance(node.target, Chunked):
            return _loop(node.target)
        return target_name(node.target) if node.op == "call_function" else str(node.target)

    def meta(self, node: fx.Node) -> dict[str, Any]:
        meta = node.meta
        plain = {k: v for k, v in meta.items() if k in _PLAIN or k.startswith(_MARKS)}
        written = {k: self.value(v) for k, v in plain.items() if v is not None}
        for key in _NUMBERS:
            if meta.get(key) is not None:
                written[key] = self._numbers[key].setdefault(meta[key], len(self._numbers[key]))
        if "val" in meta:
            written["val"] = self.value(meta["val"])
        if isinstance(meta.get("recompute"), CheckpointPolicy):
            written["recompute"] = meta["recompute"].name
        if meta.get("original_aten") is not None:
            written["original_aten"] = target_name(meta["original_aten"])
        if origins := meta.get("from_node"):
            target = _ADDRESS.sub("", str(origins[0].target))
            written["from_node"] = [self.text(origins[0].name), self.text(target)]
        for key in ("nn_module_stack", "fwd_nn_module_stack"):
            if stack := meta.get(key):
                written[key] = self.text("\n".join(path for path, _ in stack.values()))
        return written

    def text(self, text: str) -> int:
        """Return the number of a text; each is written once, as stack traces repeat from layer to layer."""
        return self._texts.setdefault(text, len(self._texts))

    def value(self, value: Any) -> Any:
        """Return a value as JSON: plain ones unchanged, others as a dict of one entry that names the type."""
        if value is None or isinstance(value, bool) or type(value) is int:
            return value
        if isinstance(value, str):
            return {"text": self.text(value)}
        if type(value) is float:
            return {"float": value.hex()}
        if isinstance(value, fx.Node):
            return {"node": value.name}
        if isinstance(value, list):
            return [self.value(v) for v in value]
        if isinstance(value, tuple):
            return {"tuple": [self.value(v) for v in value]}
        if isinstance(value, dict):
            return {"dict": [[self.text(k), self.value(v)] for k, v in value.items()]}
        if isinstance(value, slice):
            return {"slice": [self.value(v) for v in (value.start, value.stop, value.step)]}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if isinstance(value, torch.Tensor):
            return {"tensor": self._tensor(value)}
        for name, kind in _TYPES.items():
            if isinstance(value, kind):
                return {name: str(value).removeprefix("torch.")}
        raise NotWritable(f"it holds a {type(value).__name__}")

    def _tensor(self, value: torch.Tensor) -> list[Any]:
        if type(value) is not FakeTensor or value.layout is not torch.strided:
            raise NotWritable(f"it holds a tensor that is a {type(value).__name__}, {value.layout}")
        if value.is_quantized or value.is_conj() or value.is_neg() or value.requires_grad:
            raise NotWritable("it holds a tensor that is quantized, conjugated, negated or records gradients")
        storage = value.untyped_storage()
        sizes: tuple[Any, ...] = (*value.shape, *value.stride(), value.storage_offset(), storage.nbytes())
        if not all(type(n) is int for n in sizes):
            raise NotWritable("its sizes differ from call to call")
        number = self._storages.setdefault(storage._cdata, len(self._storages))
        if number == len(self._bytes):
            self._bytes.append(storage.nbytes())
        dtype = str(value.dtype).removeprefix("torch.")
        place = [list(value.shape), list(value.stride()), value.storage_offset()]
        return [*place, dtype, str(value.device), number]


class _Reader:
    def __init__(self, text: Mapping[str, Any], mode: FakeTensorMode) -> None:
        self._nodes: list[Any] = text["nodes"]
        self._texts: list[str] = text["texts"]
        self._mode = mode
        self._storages = [torch.UntypedStorage(n, device="meta") for n in text["storages"]]
        self._env: dict[str, fx.Node] = {}
        self._kinds: dict[str, Callable[[Any], Any]] = {
            "text": self._texts.__getitem__,
            "float": float.fromhex,
            "node": self._env.__getitem__,
            "tuple": lambda items: tuple(map(self._value, items)),
            "dict": lambda items: {self._texts[k]: self._value(v) for k, v in items},
            "slice": lambda items: slice(*map(self._value, items)),
            "device": torch.device,
            "tensor": self._tensor,
            **{name: lambda text, kind=kind: _named(text, kind) for name, kind in _TYPES.items()},
        }

    def graph(self) -> fx.GraphModule:
        graph = fx.Graph()
        for node in self._nodes:
            target = self._target(node["target"]) if node["op"] == "call_function" else node["target"]
            args, kwargs = self._value(node["args"]), self._value(node["kwargs"])
            created = graph.create_node(node["op"], target, args, kwargs, node["name"])
            if created.name != node["name"]:
                raise ValueError(f"node {node['name']} is there twice")
            created.meta = self._meta(node["meta"])
            self._env[created.name] = created
        return LazyGraphModule({}, graph)

    def _target(self, written: Any) -> Any:
        if isinstance(written, str):
            return target_of(written)
        bodies = {rows: read(body, self._mode) for rows, body in written["bodies"]}
        fields = dict(zip(_OF_LOOPS, record.read(written["loop"]), strict=True))
        return Chunked(bodies=bodies, **fields)

    def _meta(self, written: Mapping[str, Any]) -> dict[str, Any]:
        meta: dict[str, Any] = {}
        for key, value in written.items():
            if key == "recompute":
                meta[key] = CheckpointPolicy[value]
            elif key == "original_aten":
                meta[key] = target_of(value)
            elif key == "from_node":
                meta[key] = [Origin(self._texts[value[0]], self._texts[value[1]])]
            elif key in ("nn_module_stack", "fwd_nn_module_stack"):
                paths = self._texts[value].split("\n")
                meta[key] = {str(i): (path, "") for i, path in enumerate(paths)}
            else:
                meta[key] = self._value(value)
        return meta

    def _value(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._value(v) for v in value]
        if isinstance(value, dict):
            ((kind, inner),) = value.items()
            return self._kinds[kind](inner)
        return value

    def _tensor(self, written: Any) -> FakeTensor:
        shape, stride, offset, dtype, device, storage = written
        kind = _named(dtype, torch.dtype)
        memory = torch.empty(0, dtype=kind, device="meta")
        memory.set_(self._storages[storage], offset, shape, stride)  # type: ignore[call-overload]
        return FakeTensor(self._mode, memory, torch.device(device))


# This package's operators, whose names determine their results as those of PyTorch's operators do. They are
# compared by name, since nodes hold copies of overloads.
_RUNNING = (running.largest, running.smallest, running.where_largest, running.where_smallest)
_IMAGES = (group_norm, group_norm_backward, *MAXIMA, *depthwise.CALLS)
_CALLS = (expert_mm, permuted_rows, *COMBINES, convolution_relu, to_memory_format, *recurrent.OPERATORS)
_OWN = frozenset(map(str, (random.seed, random.uniform, attend, *_CALLS, *_RUNNING, *_IMAGES)))
_OF_LOOPS = ("name", "rows", "chunk", "inputs", "results", "saved", "unit")


def _loop(loop: Chunked) -> dict[str, Any]:
    """Return a loop over chunks as JSON, before its bodies are compiled."""
    bodies = [[rows, write(body)] for rows, body in loop.bodies.items()]
    return {"loop": record.write(tuple(getattr(loop, f) for f in _OF_LOOPS)), "bodies": bodies}


def _named(name: str, kind: type) -> Any:
    """Return torch.float32 for "float32"."""
    value = getattr(torch, name)
    if not isinstance(value, kind):
        raise ValueError(f"torch.{name} is no {kind.__name__}")
    return value


def target_name(target: Any) -> str:
    """Return the name by which `target_of` finds an operator, such as "aten::add.Tensor".

    Raises NotWritable for a user's operator, whose name does not determine its result.
    """
    if name := next((n for n, function in _FUNCTIONS.items() if function is target), None):
        return name
    if isinstance(target, OpOverload) and (target.namespace in NAMESPACES or str(target) in _OWN):
        return f"{target._schema.name}.{target._overloadname}"
    raise NotWritable(f"what {target} does may change from process to process")


def target_of(name: str) -> Any:
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.rpartition(".")
    target = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    if target_name(target) != name:
        raise ValueError(f"{name} is no operator")
    return target
