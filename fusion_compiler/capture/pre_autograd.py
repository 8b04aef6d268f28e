"""Trace Dynamo's graph as an ATen graph above autograd: composite operators such as linear, dropout and
scaled_dot_product_attention are single nodes, and autocast and grad-mode regions are nodes too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext
from torch._higher_order_ops.wrap import uid as checkpoint_ids
from torch._ops import HigherOrderOperator
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.amp import autocast_mode
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    make_fx,
    track_tensor_tree,
)
from torch.fx.experimental.symbolic_shapes import PropagateUnbackedSymInts
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from fusion_compiler.capture.fakes import fake_of
from fusion_compiler.capture.graphs import copied, eager, keep_sources
from fusion_compiler.capture.transforms import AUTOGRAD_FUNCTION

_CHECKPOINT: Any = torch.ops.higher_order.tag_activation_checkpoint
# Methods that change a tensor's place in autograd without an operator that could be traced.
AUTOGRAD_METHODS = ("requires_grad_", "retain_grad", "register_hook", "set_", "resize_", "backward")


class UntraceableError(Exception):
    """The error says why a graph has no equal pre-autograd form."""


def lift_attributes(gm: fx.GraphModule) -> tuple[fx.GraphModule, tuple[torch.Tensor, ...]]:
    """Return `gm` with a placeholder, before all others, for each tensor that Dynamo made an attribute of it,
    and those tensors.

    An optimizer's states are such attributes. A trace has a FakeTensor for a placeholder, but would compute
    with an attribute itself; and what is written into it must be seen in that very tensor.
    """
    sources: dict[str, Any] = getattr(gm, "_param_name_to_source", {})
    if not any(node.target in sources for node in gm.graph.find_nodes(op="get_attr")):
        return gm, ()
    lifted, _ = copied(gm)
    first = next(iter(lifted.graph.nodes))
    held: dict[str, fx.Node] = {}
    for node in lifted.graph.find_nodes(op="get_attr"):
        name = node.target
        if name not in sources:
            continue
        if name not in held:
            with lifted.graph.inserting_before(first):
                held[name] = lifted.graph.placeholder(name)
            held[name].meta = {**node.meta, "tensor_dict": {"_dynamo_static_input_type": "unguarded"}}
            held[name]._dynamo_source = sources[name]  # type: ignore[attr-defined]
        node.replace_all_uses_with(held[name])
        lifted.graph.erase_node(node)
    for name in held:
        delattr(lifted, name)
    lifted.recompile()
    return lifted, tuple(getattr(gm, name) for name in held)


def trace_pre_autograd(gm: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    """Return `gm`, a graph as Dynamo makes it, traced again as ATen overloads on FakeTensors.

    inputs: the backend's example inputs (tensors, SymInts). Must run inside the backend call:
    FakeTensors are those of its own fake mode, so that AOTAutograd sees the same symbols.
    Placeholders keep their order and Dynamo's annotations; nodes keep nn_module_stack,
    stack_trace and the marks of activation checkpointing. Raises UntraceableError.
    """
    context = TracingContext.try_get()
    mode = context.fake_mode if context else None
    if context is None or mode is None:
        raise UntraceableError("it runs outside of TorchDynamo: there is no fake mode to trace with")
    _check_nodes(gm)
    _check_inputs(inputs)
    if any(True for tensors in (gm.parameters(), gm.buffers()) for _ in tensors):
        raise UntraceableError("it holds a module with tensors of its own")
    fakes = [_fake(x, mode, context) for x in inputs]
    entered: list[autocast_mode.autocast] = []
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()), mode, fx_traceback.preserve_node_meta():
            traced = make_fx(_Run(gm, entered).run, pre_dispatch=True)(*fakes)
    except Exception as error:  # whatever it is, Dynamo's own graph is still there
        raise UntraceableError(f"tracing it failed: {type(error).__name__}: {error}") from error
    finally:
        for region in reversed(entered):
            region.__exit__(None, None, None)
    check_constants(traced)
    _keep_annotations(gm, traced)
    return traced


class _Run(PropagateUnbackedSymInts):
    """Interpret Dynamo's graph, with what a trace alone would lose.

    Autocast regions are entered, not only recorded, so that the traced values have the dtypes
    that they will have. Checkpointed regions are inlined, their nodes marked for recomputation.
    `contiguous` is recorded even where the traced tensor happens to be contiguous: after a
    rewrite it may not be.
    """

    def __init__(self, gm: fx.GraphModule, entered: list[autocast_mode.autocast]) -> None:
        super().__init__(gm)
        self._entered = entered  # regions that are still open

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is _CHECKPOINT:
            _, body_kwargs = _CHECKPOINT.divide_kwargs(kwargs)
            return _Run(_marked(args[0]), self._entered).run(*args[1:], *body_kwargs.values())
        if target is AUTOGRAD_FUNCTION:
            return _one_node(target, args, kwargs)
        if target is autocast_mode._enter_autocast:
            region = autocast_mode.autocast(*args, **kwargs)
            region.__enter__()
            self._entered.append(region)
            return region
        if target is autocast_mode._exit_autocast:
            self._entered.remove(args[0])
            args[0].__exit__(None, None, None)
            return None
        return super().call_function(target, args, kwargs)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target == "contiguous":
            return torch.ops.aten.contiguous.default(*args, **kwargs)
        return super().call_method(target, args, kwargs)


def _one_node(target: Any, args: Any, kwargs: Any) -> Any:
    """Record a custom autograd Function as the one node that it is in Dynamo's graph."""
    mode = get_proxy_mode()
    assert mode is not None
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    versions = [t._version for t in tensors]
    # A mode of torch functions, beside that of proxies, would record the body's switches of the grad mode.
    with disable_proxy_modes_tracing(), torch._C.DisableTorchFunction():
        results = target(*args, **kwargs)
    if versions != [t._version for t in tensors]:
        raise UntraceableError("a custom autograd Function changes its arguments")
    root: Any = mode.tracer.root
    for body in args:
        if isinstance(body, fx.GraphModule):
            root.register_module(f"body_{len(root._modules)}", body)
    unwrap: Any = mode.tracer.unwrap_proxy
    proxies, named = tree_map(unwrap, (args, kwargs))
    proxy = mode.tracer.create_proxy("call_function", target, proxies, named)
    return track_tensor_tree(results, proxy, constant=None, tracer=mode.tracer)


def _marked(body: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a checkpointed region whose nodes the partitioner prefers to recompute."""
    body, _ = copied(body)
    region = next(checkpoint_ids)
    for node in body.graph.nodes:
        if node.op in ("call_function", "call_method"):
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
            node.meta["ac_graph_id"] = region
    return body


def uncompiled(gm: fx.GraphModule) -> Callable[..., Any]:
    """Return a graph that Dynamo captured as a function that runs without being compiled.

    Where a checkpointed region runs again in backward, it draws the random numbers of the forward. Dynamo's
    operator for such regions leaves that to the compiler, and would draw others.
    """
    if not any(node.target is _CHECKPOINT for node in gm.graph.nodes):
        return eager(gm)
    run, _ = copied(gm)
    for node in run.graph.find_nodes(op="call_function", target=_CHECKPOINT):
        node.target = _checkpointed
    run.recompile()
    return eager(run)


def _checkpointed(body: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    asked, body_kwargs = _CHECKPOINT.divide_kwargs(kwargs)
    if (contexts := body.meta.get("_checkpoint_context_fn")) is not None:
        asked["context_fn"] = contexts
    asked |= {"use_reentrant": False, "preserve_rng_state": True}
    return checkpoint(uncompiled(body), *args, **asked, **body_kwargs)


def _check_nodes(gm: fx.GraphModule) -> None:
    for node in gm.graph.nodes:
        if node.target is _CHECKPOINT:
            body = getattr(gm, node.args[0].target)
            if "_checkpoint_context_fn" in body.meta:
                raise UntraceableError("it holds a selectively checkpointed region")
            _check_nodes(body)
        elif isinstance(node.target, HigherOrderOperator) and node.target is not AUTOGRAD_FUNCTION:
            raise UntraceableError(f"it holds the higher-order operator {node.target}")
        if node.target is torch.autograd.grad:
            raise UntraceableError("it calls torch.autograd.grad")
        if getattr(node.target, "__module__", "").startswith("torch._functorch"):
            raise UntraceableError("it holds a function transform (vmap, grad or jvp)")
        if node.op == "call_method" and node.target in AUTOGRAD_METHODS:
            raise UntraceableError(f"it calls Tensor.{node.target}")
        if node.meta.get("unbacked_bindings"):
            raise UntraceableError(f"the size of {node.name} depends on data")


def check_constants(traced: fx.GraphModule) -> None:
    """Raise UntraceableError for a tensor that the trace lost sight of, whose value may change between calls.
    Literals of the model's code are no such tensors: they are copied at each use."""
    for node in traced.graph.find_nodes(op="get_attr"):
        if isinstance(getattr(traced, str(node.target)), fx.GraphModule):
            continue  # a body of a custom autograd Function
        if any(user.target is not torch.ops.aten.lift_fresh_copy.default for user in node.users):
            raise UntraceableError(f"the trace lost sight of a tensor ({node.target})")


def _check_inputs(inputs: Sequence[Any]) -> None:
    for x in inputs:
        if isinstance(x, torch.Tensor) and is_traceable_wrapper_subclass(x):
            raise UntraceableError(f"an input is a {type(x).__name__}")
        if not isinstance(x, torch.Tensor | torch.SymInt):
            raise UntraceableError(f"an input is a {type(x).__name__}, not a tensor")


def _fake(x: Any, mode: FakeTensorMode, context: TracingContext) -> Any:
    """Return the FakeTensor that AOTAutograd will make of `x`, behind a fresh handle without autograd: what
    the trace does to metadata must not reach AOTAutograd's own copy."""
    if not isinstance(x, torch.Tensor):
        return x
    fake = x if isinstance(x, FakeTensor) and x.fake_mode is mode else fake_of(x, mode, context)
    handle: Any = fake.detach()
    handle.item_memo = fake.item_memo  # a Python float that Dynamo passes as a tensor stays that float
    return handle


def _keep_annotations(gm: fx.GraphModule, traced: fx.GraphModule) -> None:
    traced.meta.update(gm.meta)
    placeholders = [graph.find_nodes(op="placeholder") for graph in (gm.graph, traced.graph)]
    pairs = list(zip(*placeholders, strict=True))
    for before, after in pairs:
        after.meta = {**before.meta, **after.meta}
    keep_sources(gm, traced, pairs)
