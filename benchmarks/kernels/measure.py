"""python -m benchmarks kernels: every memory-bound cluster, forward and forward + backward."""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from benchmarks.harness import timing
from benchmarks.harness.accuracy import InFloat64, error_of, worst_ratio
from benchmarks.harness.contenders import Compile, contenders, liger_functional
from benchmarks.harness.processes import compile_ahead
from benchmarks.harness.record import Record, begin, reason
from benchmarks.harness.tables import cell_of
from benchmarks.harness.timing import Yardstick, budget, copies_for, device_time, yardstick_of
from benchmarks.kernels.bars import cliffs, report, show, summarize
from benchmarks.kernels.case import PHASES, Case, as_tuple, copy_of
from benchmarks.kernels.sizes import ALL_CASES
from fusion_compiler.ir.device import device_spec

Entrants = dict[str, tuple[Compile, Callable[..., object]]]


@dataclass(frozen=True)
class Truth:
    """A case's inputs, its results in float64, and eager's own: outputs, states, gradients."""

    inputs: dict[str, Tensor]
    gradients: tuple[Tensor, ...]  # of the outputs, given
    exact: tuple[Tensor, ...]
    eager: tuple[Tensor, ...]

    def outputs(self) -> tuple[Tensor, ...]:
        return self.eager[: len(self.gradients)]


def run(
    fn: Callable[..., object],
    inputs: Mapping[str, Tensor],
    wrt: Sequence[str],
    gradients: Sequence[Tensor],
    state: Sequence[str] = (),
) -> tuple[Tensor, ...]:
    """Outputs, the inputs that `state` names as they then are, and the gradients of those in `wrt`."""
    if not wrt:
        with torch.no_grad():
            return (*as_tuple(fn(*inputs.values())), *(inputs[n] for n in state))
    outputs = as_tuple(fn(*inputs.values()))
    slopes = torch.autograd.grad(outputs, [inputs[n] for n in wrt], gradients)
    return (*(o.detach() for o in outputs), *(inputs[n] for n in state), *slopes)


def leaves(
    inputs: Mapping[str, Tensor], wrt: Sequence[str], dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Copies (some code writes into its inputs), with their layout, as autograd leaves."""
    return {
        name: copy_of(tensor, dtype if tensor.is_floating_point() else None).requires_grad_(name in wrt)
        for name, tensor in inputs.items()
    }


def gradients_of(case: Case, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Random gradients of the outputs, as a model's next op leaves them and compilers expect: contiguous."""
    with torch.no_grad():
        outputs = as_tuple(case.without_randomness()(*leaves(inputs, ()).values()))
    return tuple(_gradient_like(o) if o.dim() else torch.ones_like(o) for o in outputs)


def _gradient_like(output: Tensor) -> Tensor:
    small = output.is_floating_point() and output.dtype.itemsize == 1  # of which there are no random ones
    drawn = torch.float32 if small else output.dtype
    return torch.randn_like(output, dtype=drawn, memory_format=suggest_memory_format(output)).to(output.dtype)


def truth_of(case: Case, inputs: dict[str, Tensor], wrt: Sequence[str]) -> Truth:
    fn = case.without_randomness()
    gradients = gradients_of(case, inputs)
    wide = [g.double() for g in gradients]
    with InFloat64():
        exact = run(fn, leaves(inputs, wrt, torch.float64), wrt, wide, case.state)
    return Truth(inputs, gradients, exact, run(fn, leaves(inputs, wrt), wrt, gradients, case.state))


def entrants(case: Case, compilers: Mapping[str, Compile], liger: Any = None) -> Entrants:
    """Contender -> (how it compiles, what it compiles). liger: its functional module, or None."""
    entrants: Entrants = {n: (c, case.fn) for n, c in compilers.items()}
    liger_of = case.liger
    if liger_of is not None and liger is not None:
        entrants["liger"] = (lambda fn: fn, lambda *tensors: liger_of(liger)(*tensors))
    return entrants


def measure(
    case: Case,
    compile_: Compile,
    fn: Callable[..., object],
    truth: Truth,
    wrt: Sequence[str],
    repetitions: int,
    copies: int = 1,
) -> dict[str, Any]:
    """One cell: errors of the first call, then the device time of many, with `copies` inputs in turn."""
    torch._dynamo.reset()
    checked = compile_(case.without_randomness() if fn is case.fn else fn)
    gradients = [copy_of(g) for g in truth.gradients]  # some contenders write into them too
    results = run(checked, leaves(truth.inputs, wrt), wrt, gradients, case.state)
    pairs = list(zip(results, truth.eager, truth.exact, strict=False))  # the forward alone has no gradients
    cell: dict[str, Any] = {
        "error_to_eager": worst_ratio(*zip(*pairs, strict=True)),
        "largest_error": max(error_of(r, exact).largest for r, _, exact in pairs),
    }
    del results, pairs
    timed = checked
    if case.random and fn is case.fn:
        torch._dynamo.reset()
        timed = compile_(fn)
    turns = itertools.cycle([leaves(truth.inputs, wrt) for _ in range(copies)])
    device = truth.gradients[0].device
    measured = device_time(lambda: run(timed, next(turns), wrt, gradients), device, repetitions)
    if hasattr(timed, "plan"):
        costs = [cluster.cost.us for plan in timed.plan for cluster in plan.clusters]
        if not any(plan.leftovers for plan in timed.plan):  # nobody predicts what a library's kernel takes
            cell["predicted_us"] = sum(max(0.0, us - pause_us(device)) for us in costs)
    return cell | {
        "us": measured.seconds * 1e6,
        "kernels": measured.kernels,
        "names": [name[:80] for name in measured.names][:6],
    }


@functools.cache
def pause_us(device: torch.device) -> float:
    """Microseconds between two kernels of a stream. The cost of a cluster has one, and device time has none.

    It is the period of launches (`DeviceSpec.launch_us`) less the time of a kernel with one element.
    """
    if device.type != "cuda":
        return 0.0
    element = torch.zeros(1, device=device)
    shortest = device_time(element.zero_, device, repetitions=100).seconds * 1e6
    return max(0.0, device_spec(device).launch_us - shortest)


@dataclass
class Bench:
    """The state that all cases of one run share."""

    options: argparse.Namespace
    record: Record
    yardstick: Yardstick
    liger: Any = None

    def wanted(self, case: Case) -> Iterator[tuple[str, Entrants]]:
        """Phases that the options ask for, with the contenders whose figures are missing."""
        options = self.options
        compilers = contenders(options.autotune, options.backend, options.only)
        for phase in case.phases:
            if not re.search(options.filter, f"{case.name}, {phase}"):
                continue
            row = next((r for r in self.record.rows if (r["case"], r["phase"]) == (case.name, phase)), None)
            missing = {
                name: entrant
                for name, entrant in entrants(case, compilers, self.liger).items()
                if row is None or not self.is_done(cell_of(row, name), name)
            }
            if missing:
                yield phase, missing

    def is_done(self, cell: Mapping[str, Any], name: str) -> bool:
        """Whether a resumed run keeps a cell: also one that took too long."""
        over = timing.OverBudgetError.__name__ in cell.get("failed", "")
        return self.record.keeps(cell, name, "failed" if over else "us")

    def case(self, case: Case, wanted: Sequence[tuple[str, Entrants]]) -> None:
        """Some phases by some contenders; a failure is the cell's reason."""
        failure, truth = None, None
        try:
            inputs = case.inputs(self.options.device, self.options.quick)
            backward = any(phase == PHASES[1] for phase, _ in wanted)
            truth = truth_of(case, inputs, case.differentiate if backward else ())
        except Exception as error:
            failure = reason(error)
        for phase, missing in wanted:
            row = self.record.row(
                {"case": case.name, "phase": phase},
                family=case.family, bar=case.bar_of(phase), neighbour=case.neighbour,
            )  # fmt: skip
            if truth is None:
                row["failed"] = failure
            else:
                row.pop("failed", None)
                self.phase(case, row, truth, missing)
            self.record.write()
            report(row)

    def phase(self, case: Case, row: dict[str, Any], truth: Truth, missing: Entrants) -> None:
        wrt = case.differentiate if row["phase"] == PHASES[1] else ()
        moved = case.forward_bytes(truth.inputs, truth.outputs())
        moved += case.backward_bytes(truth.inputs, truth.outputs()) if wrt else 0
        row["bytes"] = moved
        copy = self.yardstick.seconds(moved)
        copies = copies_for(self.yardstick.device, sum(t.nbytes for t in truth.inputs.values()))
        for name, (compile_, fn) in missing.items():
            try:
                with budget(self.options.budget):
                    cell = measure(case, compile_, fn, truth, wrt, self.options.repetitions, copies)
                cell["fraction"] = copy / (cell["us"] / 1e6)
            except Exception as error:
                cell = {"failed": reason(error)}
            row["cells"][name] = cell | {"commit": self.record.environment["commit"]}
            self.record.write()

    def compile_ahead(self, wanted: Sequence[tuple[Case, Sequence[tuple[str, Entrants]]]]) -> None:
        """Runs ours once on this process's share of the cases; what fails does so again when measured."""
        for case, phases in wanted[self.options.share :: self.options.jobs]:
            with contextlib.suppress(Exception), budget(self.options.budget):
                inputs = case.inputs(self.options.device, self.options.quick)
                gradients = gradients_of(case, inputs)
                for phase, missing in phases:
                    if "ours" not in missing:
                        continue
                    wrt = case.differentiate if phase == PHASES[1] else ()
                    for fn in dict.fromkeys((case.fn, case.without_randomness())):
                        torch._dynamo.reset()
                        run(missing["ours"][0](fn), leaves(inputs, wrt), wrt, gradients)


def main(options: argparse.Namespace, cases: Sequence[Case] = ALL_CASES, name: str = "kernels") -> Record:
    yardstick = yardstick_of(options)
    liger = liger_functional() if re.search(options.only, "liger") else None
    record = begin(name, options, copy_bandwidth=yardstick.bandwidth)
    bench = Bench(options, record, yardstick, liger)
    chosen = ((c, list(bench.wanted(c))) for c in cases if re.search(options.family, c.family))
    wanted = [(case, phases) for case, phases in chosen if phases]
    if options.share is not None:
        record.path = None  # the results are written by the process that measures
        bench.compile_ahead(wanted)
        return record
    if options.jobs and re.search(options.only, "ours"):
        compile_ahead(options.arguments, options.jobs)
    print(f"copy {yardstick.bandwidth / 1e12:.2f} TB/s; fraction = time of a copy of the ideal bytes / time")
    for case, phases in wanted:
        bench.case(case, phases)
        gc.collect()  # compiled functions are in cycles, and hold tensors
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    record.summary = summarize(record.rows)
    record.write()
    print("\n".join(["", show(record.rows), *cliffs(record.rows)]))
    return record
