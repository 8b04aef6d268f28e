"""Every operator of PyTorch's own test database, compiled: values and gradients beside eager's and float64's.

    python -m tests.opinfo [--errors | --layouts] [--filter REGEX] [--dtype float32 ...] [--samples N]
                           [--seconds 60] [--seed N] [--json FILE] [--resume]

--errors compiles arguments that eager refuses (opinfo_errors.py), --layouts arguments in every layout
(opinfo_layouts.py). Kernels run in Triton's interpreter; a kernel that fails is an error, not a fallback.
Each sample ends as

    right           as close to float64 as eager is, forward and backward; raises as eager does
    wrong           not so, or of another dtype, shape or strides
    error           compiling or running it raised
    fallback        an operator of the table that stayed an ATen call, and why
    not applicable  what `aot_eager` cannot run either, or what has no result to compare, and why
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import json
import random
import re
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._functorch.aot_autograd import aot_function
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import fusion_compiler as fc
from fusion_compiler.errors import FusionWarning, UnsupportedDtypeError
from fusion_compiler.ops.table import spec_of
from tests import opinfo_errors, opinfo_layouts
from tests.exactness import Compiled, not_as_close
from tests.opinfo_layouts import strides
from tests.samples import opinfo_samples

DTYPES = ("float32", "bfloat16", "float16")
TOGETHER = 8  # samples in one graph: most of a compilation's time is not its operators'
MOST_ELEMENTS = 1 << 16  # of a sample: the interpreter is slow
UNDEFINED = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")


@dataclass(frozen=True)
class Outcome:
    kind: str
    detail: str = ""


RIGHT = Outcome("right")


@dataclass(frozen=True)
class Sample:
    """An operator on PyTorch's arguments; tensors are given apart, in the order of the structure."""

    info: Any
    number: int
    structure: Any
    leaves: tuple[Any, ...]
    process: Callable[[Any], Any]  # of results whose gradient is defined only together

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def __call__(self, tensors: Iterator[Tensor]) -> list[Tensor]:
        leaves = [next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.structure)
        outputs = tree_leaves(self.process(self.info.op(*args, **kwargs)))
        return [torch.view_as_real(t) if t.is_complex() else t for t in outputs if isinstance(t, Tensor)]


def samples_of(info: Any, dtype: torch.dtype, most: int) -> list[Sample]:
    samples: list[Sample] = []
    differentiable = info.supports_autograd and dtype in info.backward_dtypes
    for number, sample in enumerate(opinfo_samples(info, dtype, most, differentiable)):
        leaves, structure = tree_flatten(((sample.input, *sample.args), sample.kwargs))
        samples.append(Sample(info, number, structure, tuple(leaves), sample.output_process_fn_grad))
    return samples


# -- running --------------------------------------------------------------------------------------------


def evaluate(
    fn: Callable[..., Sequence[Tensor]],
    samples: Sequence[Sample],
    counts: Sequence[int] | None = None,
    double: bool = False,
) -> list[list[Tensor]]:
    """For each sample its results, of which there are `counts`, and the gradients of what asks for one.

    fn: of all tensors of all samples, as `together` makes it. Arguments are copied.
    """
    torch.manual_seed(0)
    leaves = [[_copy(x, double) for x in s.tensors] for s in samples]
    flat = list(fn(*(x for group in leaves for x in group)))
    results = _split(flat, [len(flat)] if counts is None else counts)
    smooth = [r for r in flat if r.requires_grad and r.is_floating_point()]
    wanted = [
        [x for x in group if x.requires_grad] if any(r.requires_grad for r in outcomes) else []
        for group, outcomes in zip(leaves, results, strict=True)
    ]
    gradients = [x for group in wanted for x in group]
    if smooth:  # cotangents are exact in every dtype
        weights = [((torch.arange(r.numel()) * 5 % 13 - 4) / 8).view(r.shape).to(r.dtype) for r in smooth]
        outcomes = torch.autograd.grad(smooth, gradients, weights, allow_unused=True)
        slopes: Sequence[Tensor | None] = outcomes
        gradients = [torch.zeros_like(x) if g is None else g for x, g in zip(gradients, slopes, strict=True)]
    grouped = _split(gradients, [len(group) for group in wanted])
    return [[r.detach() for r in (*a, *b)] for a, b in zip(results, grouped, strict=True)]


def _split(flat: Sequence[Tensor], counts: Sequence[int]) -> list[list[Tensor]]:
    rest = iter(flat)
    return [list(itertools.islice(rest, count)) for count in counts]


def _copy(x: Tensor, double: bool) -> Tensor:
    copied = copy.deepcopy(x.detach())  # of the storage: strides stay
    if double and x.is_floating_point():
        copied = copied.double()
    return copied.requires_grad_(x.requires_grad)


def together(samples: Sequence[Sample]) -> Callable[..., list[Tensor]]:
    def several(*tensors: Tensor) -> list[Tensor]:
        rest = iter(tensors)
        return [result for sample in samples for result in sample(rest)]

    return several


# -- judging --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """Eager's results for a sample, and the same in float64. count: how many of them are no gradients."""

    eager: list[Tensor]
    truth: list[Tensor]
    count: int
    noise: float
    random: bool


class Draws(TorchDispatchMode):
    """Notices random numbers, of which ours are others than eager's."""

    any = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.any |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def known_of(sample: Sample) -> Expected | Outcome:
    if any(t.layout is not torch.strided or t.is_complex() for t in sample.tensors):
        return Outcome("not applicable", "sparse or complex arguments")
    if sum(t.numel() for t in sample.tensors) > MOST_ELEMENTS:
        return Outcome("not applicable", f"more than {MOST_ELEMENTS} elements")
    fn = together([sample])
    draws = Draws()
    try:
        with draws:
            (eager,) = evaluate(fn, [sample])
        count = len(fn(*(_copy(x, False) for x in sample.tensors)))
    except Exception as error:
        return Outcome("not applicable", f"eager: {_said(error)}")
    if not eager or any(t.layout is not torch.strided for t in eager):
        return Outcome("not applicable", "no tensor comes out, or a sparse one")
    truth = eager
    with contextlib.suppress(Exception):  # of another dtype than the operator takes: then eager is the truth
        (wide,) = evaluate(fn, [sample], double=True)
        truth = wide if [t.shape for t in wide] == [t.shape for t in eager] else eager
    truth = [t.double() if e.is_floating_point() else e for t, e in zip(truth, eager, strict=True)]
    finite = [t.double().abs().nan_to_num(0, 0, 0) for t in (*sample.tensors, *truth) if t.numel()]
    noise = 8 * torch.finfo(torch.float32).eps * max((t.max().item() for t in finite), default=0.0)
    return Expected(eager, truth, count, noise, draws.any)


def compared(ours: Sequence[Tensor], expected: Expected) -> Outcome:
    if len(ours) != len(expected.eager):
        return Outcome("wrong", f"{len(ours)} results and gradients, eager has {len(expected.eager)}")
    for number, (our, their, truth) in enumerate(zip(ours, expected.eager, expected.truth, strict=True)):
        if number < expected.count and strides(our) != strides(their):
            laid = f"has strides {list(our.stride())}, eager's has {list(their.stride())}"
            return Outcome("wrong", f"result {number} of shape {list(our.shape)} {laid}")
        if expected.random:
            mine, eagers = ((t.dtype, tuple(t.shape)) for t in (our, their))
            problem = None if mine == eagers else f"{mine}, eager has {eagers}"
        else:
            problem = not_as_close(our, their, truth, expected.noise)
        if problem is not None:
            what = "gradient" if number >= expected.count else "result"
            return Outcome("wrong", f"{what} {number}: {' '.join(problem.split())[:300]}")
    return RIGHT


def in_aot_eager(sample: Sample, expected: Expected) -> Outcome:
    """Return the outcome of a sample under AOTAutograd without any compiler behind it."""

    def as_it_is(gm: Any, example_inputs: Any) -> Any:
        return make_boxed_func(gm.forward)

    try:
        (results,) = evaluate(aot_function(together([sample]), fw_compiler=as_it_is), [sample])
    except Exception as error:
        return Outcome("error", _said(error))
    return compared(results, expected)


Compile = Callable[[Callable[..., list[Tensor]]], Any]


def judged(
    samples: Sequence[Sample], expected: Sequence[Expected], compile: Compile = Compiled
) -> list[Outcome]:
    """An outcome for each sample, of all in one graph if that goes well."""
    refused = ""
    try:
        compiled = compile(together(samples))
        ours = evaluate(compiled, samples, [k.count for k in expected])
        outcomes = [compared(o, k) for o, k in zip(ours, expected, strict=True)]
        refused = refusals(compiled) if isinstance(compiled, Compiled) else ""
    except UnsupportedDtypeError as error:
        outcomes = [Outcome("not applicable", f"strict: {_said(error)}")]
    except Exception as error:
        outcomes = [Outcome("error", _said(error))]
    if len(samples) > 1 and (refused or any(o != RIGHT for o in outcomes)):
        return [judged([s], [k], compile)[0] for s, k in zip(samples, expected, strict=True)]
    if outcomes[0].kind in ("wrong", "error") and (other := in_aot_eager(samples[0], expected[0])) != RIGHT:
        return [Outcome("not applicable", f"aot_eager: {other.detail}")]
    return [Outcome("fallback", refused) if refused and o == RIGHT else o for o in outcomes]


def refusals(compiled: Compiled) -> str:
    """Return the operators of the table that stayed ATen calls, and why, except those of complex numbers."""
    reasons: set[str] = set()
    for plan in compiled.plans:
        for left in plan.leftovers:
            op = plan.dag.op(left.subject)
            metas = [m for n in (left.subject, *op.inputs) for m in plan.dag.op(n).outputs]
            if spec_of(op.target) is not None and not any(m.dtype.is_complex for m in metas):
                reasons.add(f"{left.target}: {left.reason}")
    return "; ".join(sorted(reasons))


def _said(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


# -- the sweep ------------------------------------------------------------------------------------------


class OutOfTimeError(BaseException):
    """An operator took longer than it may; nothing that handles errors is to handle this."""


@contextmanager
def limit(seconds: float) -> Generator[None]:
    """Ends what is inside after so long, unless that falls into a finalizer, where it is lost."""

    def stop(*_: object) -> None:
        raise OutOfTimeError

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def swept(
    info: Any,
    dtype: torch.dtype,
    most: int,
    seconds: float,
    chosen: Callable[[Any, torch.dtype, int], list[Sample]] = samples_of,
    compile: Compile = Compiled,
) -> list[Outcome]:
    """An outcome for every sample; those that the time did not allow are not applicable.

    chosen(info, dtype, most): returns the samples. compile: what is called instead of the operator.
    """
    if info.name in UNDEFINED or info.name.removeprefix("Tensor.") in UNDEFINED:
        return [Outcome("not applicable", "what it holds is not defined")]
    outcomes: dict[int, Outcome] = {}
    samples: list[Sample] = []
    last = time.monotonic() + seconds
    try:
        with limit(seconds), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", ".*could not be compiled", FusionWarning)
            samples = chosen(info, dtype, most)
            expected = {s.number: known_of(s) for s in samples}
            outcomes = {n: k for n, k in expected.items() if isinstance(k, Outcome)}
            left = [(s, k) for s in samples if isinstance(k := expected[s.number], Expected)]
            for start in range(0, len(left), TOGETHER):
                if time.monotonic() > last:
                    raise OutOfTimeError
                some, theirs = zip(*left[start : start + TOGETHER], strict=True)
                outcomes |= dict(zip((s.number for s in some), judged(some, theirs, compile), strict=True))
    except OutOfTimeError:
        outcomes |= {s.number: Outcome("not applicable", "time") for s in samples if s.number not in outcomes}
    except Exception as error:  # of PyTorch's own samples
        return [Outcome("not applicable", f"samples: {_said(error)}")]
    none = Outcome("not applicable", "time" if samples else "no samples")
    return [outcomes[n] for n in sorted(outcomes)] or [none]


def swept_layouts(
    info: Any, dtype: torch.dtype, most: int, seconds: float, seed: int, drawn_only: bool = False
) -> list[Outcome]:
    """An outcome for at most `most` samples in each layout, compiled as a user's code is."""

    def chosen(info: Any, dtype: torch.dtype, most: int) -> list[Sample]:
        choose = random.Random(f"{info.formatted_name} {seed}")
        return opinfo_layouts.laid_out(
            samples_of(info, dtype, opinfo_layouts.SAMPLES), most, choose, drawn_only
        )

    def compile(fn: Callable[..., list[Tensor]]) -> Any:
        torch._dynamo.reset()
        return fc.compile(fn, backend="interpret")

    reason = opinfo_layouts.EXCEPTIONS.get(info.formatted_name)
    outcomes = swept(info, dtype, most, seconds, chosen, compile)
    return [Outcome("not applicable", reason) if reason and o.kind == "wrong" else o for o in outcomes]


def swept_errors(info: Any, most: int, seconds: float, seed: int) -> list[Outcome]:
    """An outcome for every call that eager refuses: PyTorch's, and at most `most` changed samples."""
    if info.name.removeprefix("Tensor.") in UNDEFINED:
        return [Outcome("not applicable", "what it holds is not defined")]
    choose = random.Random(f"{info.formatted_name} {seed}")
    outcomes: list[Outcome] = []
    try:
        with limit(seconds), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for change, difference in opinfo_errors.differences(info, most, choose):
                text = f"{change}: {difference}"
                outcomes.append(Outcome("wrong", text) if difference else RIGHT)
    except OutOfTimeError:
        outcomes.append(Outcome("not applicable", "time"))
    except Exception as error:  # of PyTorch's own samples
        outcomes.append(Outcome("not applicable", f"samples: {_said(error)}"))
    outcomes = outcomes or [Outcome("not applicable", "eager refuses no call")]
    reason = opinfo_errors.EXCEPTIONS.get(info.formatted_name)
    return [Outcome("not applicable", reason) if reason and o.kind == "wrong" else o for o in outcomes]


def jobs(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], list[Outcome]]]]:
    """The name of each operator and dtype of a sweep, and what sweeps it."""
    for info in op_db:
        if options.errors:
            most = min(options.samples, opinfo_errors.MOST)
            yield info.formatted_name, partial(swept_errors, info, most, options.seconds, options.seed)
            continue
        for name in options.dtype or (DTYPES[:1] if options.layouts else DTYPES):
            dtype = getattr(torch, name)
            if dtype not in info.dtypes:
                continue
            sweep = partial(swept, info, dtype, options.samples, options.seconds)
            if options.layouts:
                most = min(options.samples, opinfo_layouts.MOST)
                sweep = partial(swept_layouts, info, dtype, most, options.seconds, options.seed)
            yield f"{info.formatted_name} {name}", sweep


def summary(records: Mapping[str, list[Outcome]]) -> str:
    """Totals, then every failure, then the reasons of what does not apply."""
    every = [o for group in records.values() for o in group]
    totals = Counter(o.kind for o in every)
    lines = [f"{len(records)} operators and dtypes, {len(every)} samples: " + ", ".join(
        f"{totals[kind]} {kind}" for kind in ("right", "wrong", "error", "fallback", "not applicable")
    )]  # fmt: skip
    for name, group in records.items():
        failed = Counter((o.kind, o.detail) for o in group if o.kind in ("wrong", "error", "fallback"))
        lines += [f"  {name}: {kind} x{count}: {detail}" for (kind, detail), count in failed.items()]
    reasons = Counter(re.sub(r"\d+", "N", o.detail)[:90] for o in every if o.kind == "not applicable")
    lines += ["not applicable:", *(f"  {n:5d} {reason}" for reason, n in reasons.most_common(40))]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    about = str(__doc__).partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m tests.opinfo", description=about)
    parser.add_argument("--filter", default="", help="operators whose names match this regular expression")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--errors", action="store_true", help="arguments that eager refuses")
    mode.add_argument("--layouts", action="store_true", help="arguments in every layout")
    parser.add_argument("--seed", type=int, default=0, help="of what --errors and --layouts draw")
    parser.add_argument("--dtype", nargs="+")
    parser.add_argument("--samples", type=int, default=1 << 30, help="of each operator and dtype, at most")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each operator and dtype")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--resume", action="store_true", help="go on with what the JSON file lacks")
    options = parser.parse_args(arguments)
    records: dict[str, list[Outcome]] = {}
    if options.resume and options.json and options.json.exists():
        stored = json.loads(options.json.read_text(encoding="utf-8"))
        records = {name: [Outcome(**o) for o in group] for name, group in stored.items()}
    started = time.monotonic()
    for name, sweep in jobs(options):
        if name in records or not re.search(options.filter, name):
            continue
        if options.json:  # should it end the process, the next one begins behind it
            _store(options.json, records | {name: [Outcome("error", "it ended the process")]})
        records[name] = sweep()
        counts = Counter(o.kind for o in records[name])
        text = ", ".join(f"{n} {kind}" for kind, n in counts.items())
        print(f"{time.monotonic() - started:7.0f} s  {name}: {text}", flush=True)
        if options.json:
            _store(options.json, records)
    print(summary(records))
    return int(any(o.kind in ("wrong", "error", "fallback") for group in records.values() for o in group))


def _store(path: Path, records: Mapping[str, list[Outcome]]) -> None:
    text = json.dumps({name: [asdict(o) for o in outcomes] for name, outcomes in records.items()}, indent=0)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
