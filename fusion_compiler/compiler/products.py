"""Measure products with many rows in one kernel against a library's product and a kernel, while planning.

Both ways run with random tensors of the graph's shapes, once for each shape on a device. The outcome is kept
on disk beside the schedules that were chosen, and the plan of each graph holds the choice. So everything
behind the planner (the order of steps, memory, CUDA graphs, background compilation) sees one way alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from fusion_compiler.compiler.runners import Runners, Target
from fusion_compiler.errors import FusionError, WarnOnce, first_line
from fusion_compiler.ir.canonical import canonical, salts_of
from fusion_compiler.ir.dag import OpDag
from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.graph_pass import Level
from fusion_compiler.ir.layout import is_view
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ir.plan_data import Cluster
from fusion_compiler.ir.views import random_like
from fusion_compiler.options import Options
from fusion_compiler.passes.fuse.choice import MEASURED, PRODUCTS, Times, Ways, with_products
from fusion_compiler.pipeline import passes_at
from fusion_compiler.runtime.binding import Gpu
from fusion_compiler.runtime.debug import Debug
from fusion_compiler.runtime.launch import Runner, compile_all, tuning_key
from fusion_compiler.runtime.stages import Stages
from fusion_compiler.stitch.stitch import symbols_of
from fusion_compiler.support.store import TUNING, Key, Store

Tensors = dict[str, Any]  # by the names of ops


class Products:
    """The object puts products into clusters of the plans of one compile()."""

    def __init__(self, options: Options, store: Store, stages: Stages, debug: Debug) -> None:
        self.options, self.store, self.stages, self.debug = options, store, stages, debug
        enabled = passes_at(Level.PLAN, options.numerics, options.disable)
        self.enabled = PRODUCTS in enabled

    def placed(self, plan: FusionPlan, device: DeviceSpec, backend: str) -> FusionPlan:
        """Return a plan with products in clusters where that is faster, or the plan itself where the pass is
        off. backend: as `Target.backend`; only "triton" measures."""
        mode = self.options.products
        if not self.enabled or (mode == "auto" and device.name not in MEASURED):
            return plan
        if mode == "always":
            return with_products(plan, lambda _, ways: [replace(w.predicted, forced=True) for w in ways])
        if backend != "triton":
            return with_products(plan)
        return with_products(plan, functools.partial(self.measured, Target("cuda", device, backend)))

    def measured(self, target: Target, dag: OpDag, ways: Sequence[Ways]) -> list[Times]:
        """Return the times of each of the ways, measured on the device or read from disk."""
        self.stages.enter("measure products")
        strict = replace(self.options, strict=True)  # what fails is no way, and its fallback is not measured
        alone = Runners(strict, self.store, Stages(), self.debug, WarnOnce(strict=True))
        once = {_form(dag, way): way for way in ways}
        runners = {form: _runners(alone, target, dag, way) for form, way in once.items()}
        ready = [r for each in runners.values() if not isinstance(each, str) for r in each.values()]
        compile_all(dict.fromkeys(ready))
        times = {form: self._times(dag, way, runners[form]) for form, way in once.items()}
        self.stages.enter("plan")
        return [times[_form(dag, way)] for way in ways]

    def _times(self, dag: OpDag, way: Ways, runners: Mapping[str, Runner] | str) -> Times:
        """Return the times of one way, which are kept on disk. runners: or why there are none."""
        if isinstance(runners, str):
            return replace(way.predicted, failed=runners)
        try:
            gpu = next(iter(runners.values())).gpu()
            key = _key(dag, way, runners, gpu)
            us = _recorded(self.store.get(key))
            if us is None:
                us = _measure(dag, way, runners, gpu)
                self.store.put(key, {"cluster": way.fused[0].name, "us": us})
            return Times(*us, device=gpu.name)
        except torch.OutOfMemoryError:
            return replace(way.predicted, failed="the device has too little memory")
        except (FusionError, ValueError) as error:
            return replace(way.predicted, failed=first_line(error))


def _form(dag: OpDag, way: Ways) -> object:
    """Return a key that is equal for ways that run the same kernels and library calls."""
    clusters = (way.reader, *way.fused)
    return tuple(canonical(c, dag) for c in clusters), _text_of_calls(dag, way)


def _text_of_calls(dag: OpDag, way: Ways) -> str:
    """Return a text of the library's calls, with the layouts of their operands."""
    ops = [dag.op(call) for call in way.calls]
    return repr([(str(op.target), [dag.op(i).outputs for i in op.inputs], op.outputs) for op in ops])


def _runners(alone: Runners, target: Target, dag: OpDag, way: Ways) -> dict[str, Runner] | str:
    """Return the runners of the clusters of both ways by name, or why there are none."""
    clusters = {c.name: c for c in (way.reader, *way.fused)}
    if any(symbols_of(cluster, dag) for cluster in clusters.values()):
        return "sizes are only known at run time"
    plan = FusionPlan("products", dag, tuple(clusters.values()), target.device.name)
    try:
        runners, _ = alone.of_plan(plan, target)
    except FusionError as error:
        return first_line(error)
    return runners


def _key(dag: OpDag, way: Ways, runners: Mapping[str, Runner], gpu: Gpu) -> Key:
    """Return the key of a choice: all kernels of both ways, and the library's calls."""
    kernels = [tuning_key(runners[c.name].candidates, gpu.name).digest for c in (way.reader, *way.fused)]
    return TUNING.key(kernels=repr([_text_of_calls(dag, way), *kernels]), device=gpu.name)


def _recorded(record: object) -> list[float] | None:
    """Return the microseconds that a record has: the first three fields of `Times`."""
    us = record.get("us") if isinstance(record, dict) else None
    is_whole = isinstance(us, list) and len(us) == 3 and all(isinstance(t, int | float) for t in us)
    return us if is_whole else None


def _measure(dag: OpDag, way: Ways, runners: Mapping[str, Runner], gpu: Gpu) -> list[float]:
    """Return the microseconds of both ways, which run with random tensors: the first three fields of
    `Times`."""
    kind = dag.op(way.calls[0]).outputs[0].device.split(":")[0]
    with _disable_current_modes(), torch.no_grad(), torch.autocast(kind, enabled=False):
        trial = _Trial(dag, runners)
        calls = functools.partial(trial.run, way.calls, ())
        both = functools.partial(trial.run, way.calls, (way.reader,))
        fused = functools.partial(trial.run, (), way.fused)
        for ready in (both, fused):
            ready()  # schedules are chosen, and operands made
        us, both_us, calls_us = gpu.times([fused, both, calls])
    return [us, calls_us, both_us - calls_us]


class _Trial:
    """A trial runs calls and clusters of a graph with random tensors in the place of what they read."""

    def __init__(self, dag: OpDag, runners: Mapping[str, Runner]) -> None:
        self.dag, self.runners = dag, runners
        self.nodes = {node.name: node for node in dag.module.graph.nodes}
        self.operands: Tensors = {}

    def run(self, calls: Sequence[str], clusters: Sequence[Cluster]) -> None:
        results: Tensors = {}
        for name in calls:
            results[name] = self.apply(self.nodes[name], results)
        for cluster in clusters:
            arguments = [self.value(name, results) for name in cluster.inputs]
            outputs = self.runners[cluster.name](*arguments, *salts_of(cluster))
            results |= zip(cluster.outputs, outputs, strict=True)

    def apply(self, node: fx.Node, results: Tensors) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self.value(n.name, results))
        target: Callable[..., Any] = node.target  # type: ignore[assignment]
        return target(*args, **kwargs)

    def value(self, name: str, results: Tensors) -> Any:
        """Return a result, a view of one, or an operand that stands for all else."""
        if name in results:
            return results[name]
        if name in self.operands:
            return self.operands[name]
        node = self.nodes[name]
        if not is_view(self.dag.op(name)):
            if not isinstance(node.meta["val"], torch.Tensor):
                raise ValueError(f"{name} is not a tensor")
            self.operands[name] = random_like(node.meta["val"])
            return self.operands[name]
        is_operand = self.root(name) not in results
        value = self.apply(node, results)
        if is_operand:
            self.operands[name] = value
        return value

    def root(self, name: str) -> str:
        while is_view(self.dag.op(name)):
            name = self.dag.op(name).first
        return name
