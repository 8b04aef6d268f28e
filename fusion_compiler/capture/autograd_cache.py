"""Read forward and backward graphs from disk, through AOTAutograd's own cache.

AOTAutograd keeps what it found out about a graph, beside what the compiler makes of the forward and the
backward: an `OutputCode`, which it pickles. Ours (`StoredGraph`) holds the text of a functional ATen graph
(`graph_text`) and nothing that runs: whoever reads it compiles it again, so that no decision about clusters
is ever out of date. An entry is found by a key of our own (`key_of`): PyTorch's has no stack traces, which a
plan shows, nor which attention is allowed, and takes half of Inductor to import. `save_cache_artifacts` and
`load_cache_artifacts` of `torch.compiler` carry these entries as they carry torch.compile's.

Entries are named by the hash of what they hold. One that does not hold that (truncated, a flipped bit) is
removed before PyTorch reads it, and a folder that belongs to another user is left alone.
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn
from torch._functorch import config
from torch._functorch._aot_autograd import autograd_cache, graph_compile
from torch._functorch._aot_autograd.aot_autograd_result import serialize_graph_module
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache, BypassAOTAutogradCache
from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler
from torch._inductor.output_code import OutputCode
from torch._subclasses.fake_tensor import FakeTensor
from torch.package.importer import ObjNotFoundError

from fusion_compiler.capture.graph_text import write
from fusion_compiler.capture.graphs import place_of
from fusion_compiler.errors import FusionWarning
from fusion_compiler.ir.record import NotWritable
from fusion_compiler.runtime.boxed import Boxed
from fusion_compiler.support.store import GRAPH, digest, is_own, read_plain

Read = Callable[[Mapping[str, Any], str], Boxed]  # compiles the graph that a text, with this digest, is of

_reading: ContextVar[Read | None] = ContextVar("reading", default=None)


@dataclass
class StoredGraph(OutputCode):
    """A stored graph is a compiled graph as AOTAutograd calls it: with one list of arguments, which the graph
    empties.

    text: JSON of the graph and of facts about it; "" if it is not kept, for the `reason`.
    """

    text: str
    reason: str = ""
    run: Boxed | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._boxed_call = True  # AOTAutograd looks for it, in its wrappers' copies of the attributes too

    @property
    def digest(self) -> str:
        return digest(self.text) if self.text else ""

    def __call__(self, inputs: Sequence[Any]) -> Any:
        assert self.run is not None
        return self.run(inputs)  # type: ignore[arg-type]  the list is the caller's

    def prepare_for_serialization(self) -> None:
        """Raise BypassAOTAutogradCache for a graph that must not be kept."""
        if not self.text:
            raise BypassAOTAutogradCache(self.reason)
        self.run = None

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        """Compile an entry that was found. Raise BypassAOTAutogradCache outside of `cached`."""
        del example_inputs, constants, graph_kwargs
        read = _reading.get()
        if read is None:
            raise BypassAOTAutogradCache("this graph is read by fusion_compiler alone")
        self.run = read(json.loads(self.text), self.digest)

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        del triton_bundle


def stored(gm: fx.GraphModule, facts: Mapping[str, Any]) -> StoredGraph:
    """Return the text of a graph, which does not run yet. facts: more that the JSON holds."""
    try:
        return StoredGraph(json.dumps({**facts, "graph": write(gm)}))
    except NotWritable as reason:
        return StoredGraph("", str(reason))


def serializable(compiler: Callable[..., StoredGraph]) -> SerializableAOTDispatchCompiler:
    """Return a forward compiler by which AOTAutograd knows that results may be kept."""
    return SerializableAOTDispatchCompiler(StoredGraph, compiler)


def key_of(gm: fx.GraphModule, inputs: Sequence[Any], options: Any) -> str:
    """Return a hash of all that a plan shows and of all on which AOTAutograd's result for a pre-autograd
    graph depends.

    Raises NotWritable if a part of it has no text.
    """
    if torch.compiler.config.force_disable_caches or not config.enable_autograd_cache:
        raise NotWritable("PyTorch's cache of autograd's graphs is off")
    if not all(hasattr(config, name) for name in _SETTINGS):
        raise NotWritable("this version of PyTorch keeps no graphs of other compilers")
    autograd: Any = torch._C._autograd  # type: ignore[attr-defined]
    if autograd._top_saved_tensors_default_hooks(True) is not None:
        raise NotWritable("hooks for saved tensors are set")
    marks = [
        [str(node.meta.get("custom")), "_dynamo_static_input_type" in (node.meta.get("tensor_dict") or {})]
        for node in gm.graph.nodes
    ]
    arguments, graph = about_inputs(inputs), write(gm)
    return GRAPH.key(options=options, state=ambient(), arguments=arguments, marks=marks, graph=graph).digest


def about_inputs(inputs: Sequence[Any]) -> list[Any]:
    """Return the facts of the inputs that AOTAutograd reads and the graph's text lacks. Raise NotWritable."""
    about = [_input(x) for x in inputs]
    storages = [place_of(x) for x in inputs]
    if len(set(storages)) < len(storages):
        raise NotWritable("two of its inputs share memory")
    return about


def _input(value: Any) -> list[Any]:
    if not isinstance(value, torch.Tensor) or type(value) not in (torch.Tensor, nn.Parameter, FakeTensor):
        raise NotWritable(f"an input is a {type(value).__name__}")
    flags = [value.requires_grad, value.is_leaf, value.is_inference(), isinstance(value, nn.Parameter)]
    return [*flags, str(value.dtype), str(value.device), list(value.shape), list(value.stride())]


def ambient() -> list[Any]:
    """Return the state of the process that decides which operators autograd and PyTorch's dispatcher
    record."""
    kinds = torch._C._autocast_supported_devices()
    autocast = [[k, str(torch.get_autocast_dtype(k))] for k in kinds if torch.is_autocast_enabled(k)]
    attention = torch.backends.cuda
    backends = [
        *(attention.flash_sdp_enabled(), attention.mem_efficient_sdp_enabled()),
        *(attention.math_sdp_enabled(), attention.cudnn_sdp_enabled()),
        *(attention.fp16_bf16_reduction_math_sdp_allowed(), list(torch._C._get_sdp_priority_order())),
        *(torch.backends.cudnn.enabled, torch.backends.mkldnn.enabled),  # type: ignore[attr-defined]
    ]
    modes = [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), str(torch.get_default_dtype())]
    modes += [torch.are_deterministic_algorithms_enabled(), torch.is_autocast_cache_enabled()]
    return [modes, autocast, backends, digest(config.save_config()), _gpus()]


@functools.cache
def _gpus() -> list[str]:
    if not torch.cuda.is_available():
        return []
    return [str(torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count())]


# An entry is written when forward and backward are there, with all that they are.
_PREFIX = getattr(autograd_cache, "AOTAUTOGRAD_CACHE_PREFIX", "a")  # PyTorch 2.11 has no name for it
_SETTINGS = {"bundled_autograd_cache": True, "force_non_lazy_backward_lowering": True}


def has_entry(key: str) -> bool:
    """True if autograd's cache has an entry under a key, which may turn out to be damaged when it is read."""
    folder = Path(_folder_of(AOTAutogradCache, f"{_PREFIX}{key}"))
    try:
        return any(folder.iterdir())
    except OSError:
        return False


@contextlib.contextmanager
def cached(key: str, read: Read) -> Generator[None]:
    """Let AOTAutograd look for a graph under `key` and keep what it makes of one, while entered.

    read: compiles a stored graph. A new backward is handed to its compiler at once.
    """

    def named(*_: Any, **__: Any) -> tuple[str, list[str]]:
        return f"{_PREFIX}{key}", []

    before = _reading.set(read)
    folder = patch.object(AOTAutogradCache, "_get_tmp_dir_for_key", classmethod(_whole_folder))
    backward = patch.object(graph_compile, "serialize_graph_module", _serialized)
    try:
        keyed = patch.object(autograd_cache, "autograd_cache_key", named)
        with keyed, config.patch(_SETTINGS), folder, backward:
            yield
    finally:
        _reading.reset(before)


def _serialized(gm: fx.GraphModule) -> Any:
    """Return PyTorch's own copy of a backward, for compiled autograd, or None for one with a loop over
    chunks."""
    try:
        return serialize_graph_module(gm)
    except ObjNotFoundError:
        return None


_folder_of = AOTAutogradCache._get_tmp_dir_for_key.__func__  # type: ignore[attr-defined]
_checking = threading.Lock()


def _whole_folder(cls: type[Any], key: str) -> str:
    """Return the folder of a key's entries, after removing those whose content does not match their name.

    Raises PermissionError if it belongs to another user, because its entries are unpickled.
    """
    folder = Path(_folder_of(cls, key))
    if not folder.exists():
        return str(folder)
    if not is_own(folder):
        raise PermissionError(f"{folder} belongs to another user")
    with _checking:
        for file in folder.iterdir():
            if not file.name.startswith(".") and not _is_whole(file):
                text = f"{file} is damaged: it is removed, and its graph is compiled again"
                warnings.warn(text, FusionWarning, stacklevel=2)
                with contextlib.suppress(OSError):
                    file.unlink()
    return str(folder)


def _is_whole(file: Path) -> bool:
    from torch._inductor.codecache import sha256_hash

    try:
        return sha256_hash(read_plain(file)) == file.name
    except FileNotFoundError:  # another process has removed it
        return True
    except OSError:
        return False
