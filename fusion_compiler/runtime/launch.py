"""Run a cluster: pick among its programs, compile, tune, launch, and fall back.

A `Runner` stands for every cluster of one structure. Its first call decides (from the record of an
earlier process, or by timing the candidates) and leaves behind a function that only launches (see
`binding`); every later call goes straight there.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from fusion_compiler.errors import (
    FusionError,
    HardwareExceededError,
    KernelError,
    MissingTritonError,
    WarnOnce,
    first_line,
)
from fusion_compiler.ir.dims import product
from fusion_compiler.ir.kernel import Buffer, Kernel, Program, Role
from fusion_compiler.ir.views import restrided
from fusion_compiler.runtime.background import BackgroundBuilds
from fusion_compiler.runtime.binding import GRID_LIMITS, Entry, Gpu, Launcher, Variant, bind, evaluate
from fusion_compiler.runtime.builds import Build, compile_builds
from fusion_compiler.runtime.cuda import gpu_of, make_cache_writable
from fusion_compiler.runtime.preserved import preserved
from fusion_compiler.runtime.progress import Progress
from fusion_compiler.runtime.stages import Stages
from fusion_compiler.runtime.target import build_of
from fusion_compiler.support.store import TUNING, Key, Store

Backend = Literal["triton", "interpret", "eager"]
_log = logging.getLogger("fusion_compiler.runtime")

# A later candidate is taken only where it beats every earlier one by more than timing noise.
NOISE = 0.02
# Programs start in the order of their numbers, and those that wait for each other have consecutive ones: of
# each launch at most one such group waits for programs that have not started. The device must hold the groups
# of so many launches, or waiting programs could fill it.
LAUNCHES_AT_ONCE = 4
# Candidates within this factor of the fastest are timed again inside a graph, and at most so many.
CLOSE, MOST_RIVALS = 2.0, 20
MOST_VARIANTS = 4  # of a program's kernels that differ in which inputs are aligned


def find_gpu(device: torch.device | None) -> Gpu:
    """Return the CUDA device `device`, or the current one for None.

    Raises ValueError for another kind of device, MissingTritonError, and what Triton raises when it
    has no driver for the device.
    """
    if device is not None and device.type != "cuda":
        raise ValueError(f"its inputs are on {device}, but Triton's kernels need a CUDA device")
    try:
        importlib.import_module("triton")
    except ImportError as error:
        raise MissingTritonError(detail=error) from error
    index: int | None = None if device is None else device.index  # torch.device("cuda") has none
    return gpu_of(torch.cuda.current_device() if index is None else index)


@dataclass(frozen=True)
class Choice:
    """A choice is what timing chose among the candidates.

    us: of each alone; None of one that cannot be launched. in_graph: what stands around it was timed as well.
    behind: its kernels do not start before the ones in front of them have ended, although they could.
    """

    candidate: int
    us: tuple[float | None, ...]
    in_graph: bool = False
    behind: bool = False


class Runner:
    """A runner computes one cluster: `runner(*inputs, *sizes)` returns the tuple of its outputs.

    candidates: programs that compute the same, best predicted first; at least one.
    fallback: takes the same arguments and returns the same outputs, by ATen.
    name: of the cluster, for messages.
    backend: "triton" compiles and launches; "interpret" runs candidate `schedule` in Triton's
        interpreter, on CPU tensors; "eager" calls the fallback.
    strict: a failure raises KernelError; otherwise one FusionWarning says what failed, and from
        then on the fallback computes the cluster.
    tune: several candidates are timed on the first call, with its arguments; otherwise the first
        that compiles is taken. store: keeps the outcome between processes.
    gpus: finds the GPU of the inputs' device, or of `home` if there are no inputs.
    home: the device of the outputs.
    stages: counts the seconds that kernels take to be loaded and timed.

    While a CUDA graph is captured nothing is timed: the first candidate is taken. Out of memory
    while timing does the same; out of memory while launching raises, as in eager.
    """

    def __init__(
        self,
        candidates: tuple[Program, ...],
        fallback: Launcher,
        *,
        name: str,
        backend: Backend = "triton",
        strict: bool = False,
        tune: bool = True,
        store: Store | None = None,
        schedule: int = 0,
        gpus: Callable[[torch.device | None], Gpu] = find_gpu,
        home: torch.device | None = None,
        stages: Stages | None = None,
    ) -> None:
        if not candidates and backend != "eager":
            raise ValueError(f"cluster {name} has no program")
        self.__name__ = self.__qualname__ = name  # how the stitched graph's code calls it
        self.candidates = candidates
        self.fallback = fallback
        self.name = name
        self.backend: Backend = backend
        self.strict = strict
        self.tune = tune
        self.store = store
        self.schedule = schedule
        self._gpus = gpus
        self._home = home
        self._stages = stages or Stages()
        self._warned = WarnOnce(strict)
        self._lock = threading.RLock()
        self._launchers: dict[int, Launcher] = {}
        self._choices: dict[int, tuple[Gpu, Choice]] = {}  # by the index of the device
        self._links: list[Callable[[Launcher], None]] = []
        self.background: BackgroundBuilds | None = None  # what compiles its kernels
        self._entry: Launcher = {
            "triton": self._dispatch,
            "interpret": self._interpret,
            "eager": fallback,
        }[backend]

    def __call__(self, *arguments: torch.Tensor | int) -> tuple[torch.Tensor, ...]:
        return self._entry(*arguments)

    def gpu(self) -> Gpu:
        """Return the GPU of the device `home`. Raises KernelError if it cannot be launched on."""
        return self._gpu_of(())

    def link(self, replace: Callable[[Launcher], None]) -> None:
        """Pass to `replace` the function to call in the runner's place: now, and whenever it changes."""
        self._links.append(replace)
        replace(self._entry)

    def _enter(self, function: Launcher) -> None:
        """Let later calls go straight to `function`."""
        self._entry = function
        for replace in self._links:
            replace(function)

    # -- deciding ----------------------------------------------------------------------------------

    def _dispatch(self, *arguments: torch.Tensor | int) -> tuple[torch.Tensor, ...]:
        """Call the function of the arguments' device, which is built on its first call."""
        try:
            gpu = self._gpu_of(arguments)
            launcher = self._launchers.get(gpu.index)
            if launcher is None:
                with self._lock:
                    launcher = self._launchers.get(gpu.index) or self._timed_decision(gpu, arguments)
                    self._launchers[gpu.index] = launcher
                    if self._entry == self._dispatch:  # later devices come back through `elsewhere`
                        self._enter(launcher)
        except FusionError as error:
            return self._give_up(error, arguments)
        with gpu.active():
            return launcher(*arguments)

    def _gpu_of(self, arguments: Sequence[torch.Tensor | int]) -> Gpu:
        devices = sorted({str(a.device) for a in arguments if isinstance(a, torch.Tensor)})
        if len(devices) > 1:
            detail = f"its inputs are on {' and '.join(devices)}; they must be on one device"
            raise self._error("launch", detail)
        return gpu_for(self._gpus, torch.device(devices[0]) if devices else self._home, self.name)

    def _timed_decision(self, gpu: Gpu, arguments: Sequence[torch.Tensor | int]) -> Launcher:
        if self.background is not None:
            begin = time.perf_counter()
            self.background.wait()
            self._stages.add("kernels", time.perf_counter() - begin)
        start = time.perf_counter()
        try:
            return self._decide(gpu, arguments)
        finally:
            self._stages.add("load and tune", time.perf_counter() - start)

    def _decide(self, gpu: Gpu, arguments: Sequence[torch.Tensor | int]) -> Launcher:
        """Return the function of the best candidate on `gpu`. Raise KernelError when none can be launched."""
        rivals = self.candidates[:1] if gpu.is_capturing() or not self.tune else self.candidates
        if len(rivals) > 1:
            choice = self._recorded(gpu) or self._fastest(gpu, arguments)
            chosen = choice.candidate
            order = [chosen, *(i for i in range(len(self.candidates)) if i != chosen)]
        else:
            choice = None
            order = list(range(len(self.candidates)))
        reasons: list[str] = []
        for i in order:
            try:
                selected = choice if choice is not None and i == choice.candidate else None
                behind = selected is not None and selected.behind
                launcher = _Bound(self, self.candidates[i], gpu, behind=behind).variant()
                if selected is not None:
                    self._choices[gpu.index] = gpu, selected
                return launcher
            except KernelError as error:
                if len(order) == 1:
                    raise
                reasons.append(f"\n  {self.candidates[i].schedule or f'candidate {i}'}: {_brief(error)}")
        raise self._error("compile", "".join(reasons))

    def _recorded(self, gpu: Gpu) -> Choice | None:
        """Return the choice of an earlier process, or None."""
        record = self.store.get(tuning_key(self.candidates, gpu.name)) if self.store is not None else None
        if not isinstance(record, dict):
            return None
        chosen, us = record.get("candidate"), record.get("us")
        if not (isinstance(chosen, int) and 0 <= chosen < len(self.candidates)):
            return None
        us = tuple(us) if isinstance(us, list) else ()
        return Choice(chosen, us, bool(record.get("in_graph")), bool(record.get("behind")))

    def _keep(self, gpu: Gpu, choice: Choice) -> Choice:
        best, timed = choice.us[choice.candidate], sum(us is not None for us in choice.us)
        schedule = self.candidates[choice.candidate].schedule
        _log.info("%s: %s is the fastest of %d schedules, %s us", self.name, schedule, timed, best)
        if self.store is not None:
            key = tuning_key(self.candidates, gpu.name)
            self.store.put(key, {"cluster": self.name, **dataclasses.asdict(choice)})
        return choice

    def _fastest(self, gpu: Gpu, arguments: Sequence[torch.Tensor | int]) -> Choice:
        """Compile all candidates at once, time those that can be launched, and keep and return the
        outcome."""
        if self.background is None:
            compile_builds(b for program in self.candidates for b in program_builds(program, gpu.target))
        launchers: dict[int, Launcher] = {}
        for i, program in enumerate(self.candidates):
            try:
                launchers[i] = _Bound(self, program, gpu).variant()
            except KernelError:
                continue  # `_decide` reports it, if no other can be launched
        if len(launchers) < 2:
            return Choice(next(iter(launchers), 0), ())
        updated = frozenset[int]().union(*(self.candidates[i].updated for i in launchers))
        try:
            overwritten = [a for i, a in enumerate(arguments) if i in updated and isinstance(a, torch.Tensor)]
            with preserved(overwritten, gpu.room()):
                times = gpu.times([functools.partial(run, *arguments) for run in launchers.values()])
        except torch.OutOfMemoryError:
            return Choice(next(iter(launchers)), ())
        bar = min(times) * (1 + NOISE)
        us = dict(zip(launchers, times, strict=True))
        chosen = next(i for i, time in us.items() if time <= bar)
        return self._keep(gpu, Choice(chosen, tuple(us.get(i) for i in range(len(self.candidates)))))

    def rivals(self, index: int) -> tuple[int, ...]:
        """Return the candidate that device `index` launches, and others that may be faster among other
        kernels; nothing if there is no choice, or it was settled within a graph."""
        _, choice = self._choices.get(index, (None, None))
        if choice is None or choice.in_graph or self._entry is not self._launchers.get(index):
            return ()
        us = {i: time for i, time in enumerate(choice.us) if time is not None and i != choice.candidate}
        close = [i for i in us if us[i] <= CLOSE * min(t for t in choice.us if t is not None)]
        close.sort(key=us.__getitem__)
        return (choice.candidate, *close[: MOST_RIVALS - 1]) if close else ()

    def rival_builds(self, index: int) -> list[Build]:
        programs = [self.candidates[i] for i in self.rivals(index)]
        return [b for p in programs for b in program_builds(p, self._choices[index][0].target)]

    def starts_early(self, candidate: int) -> bool:
        """True if a candidate's kernels may start while the ones before them run."""
        return any(kernel.dependent for kernel in self.candidates[candidate].kernels)

    def loads_early(self, candidate: int) -> bool:
        return self.candidates[candidate].early

    def take(self, candidate: int, index: int, *, behind: bool = False) -> None:
        """Launch one of the rivals from now on. Raise KernelError if it cannot be launched. behind: as in
        `Choice`."""
        gpu, _ = self._choices[index]
        bound = _Bound(self, self.candidates[candidate], gpu, behind=behind)
        launcher = self._launchers[index] = bound.variant()
        self._enter(launcher)

    def settle(self, candidate: int, index: int, *, behind: bool = False) -> None:
        """Keep the outcome of trials within a graph: there are no rivals any more."""
        gpu, choice = self._choices[index]
        settled = Choice(candidate, choice.us, in_graph=True, behind=behind)
        self._choices[index] = gpu, self._keep(gpu, settled)

    def for_any_address(self, program: Program) -> Program:
        """Return `program`, or in its place one that makes no assumption about the addresses of its
        inputs."""
        return next(p for p in (program, *self.candidates) if not p.word)

    # -- failing -----------------------------------------------------------------------------------

    def _error(self, action: str, detail: object) -> KernelError:
        return KernelError(kernel=self.name, action=action, detail=detail)

    def _give_up(
        self, error: FusionError, arguments: Sequence[torch.Tensor | int]
    ) -> tuple[torch.Tensor, ...]:
        """Compute by the fallback, and from now on without another warning."""
        if self.strict:
            raise error
        self._enter(self.fallback)
        self._warned.warn(self.name, f"cluster {self.name} runs eager: {error}")
        return self.fallback(*arguments)

    def _too_large(self, *arguments: torch.Tensor | int) -> tuple[torch.Tensor, ...]:
        """Compute one call by the fallback: other sizes may fit."""
        sizes = [argument for argument in arguments if isinstance(argument, int)]
        error = self._error("launch", f"the sizes {sizes} need a grid beyond {GRID_LIMITS}")
        if self.strict:
            raise error
        self._warned.warn("too large", f"cluster {self.name} runs eager at these sizes: {error}")
        return self.fallback(*arguments)

    # -- interpreting ------------------------------------------------------------------------------

    def _interpret(self, *arguments: torch.Tensor | int) -> tuple[torch.Tensor, ...]:
        program = self.candidates[self.schedule]
        tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
        sizes = [a for a in arguments if isinstance(a, int)]
        if any(tensor.data_ptr() % program.alignment for tensor in tensors):
            program = self.for_any_address(program)
        try:
            if wrong := {str(tensor.device) for tensor in tensors} - {"cpu"}:
                raise self._error("run in the interpreter", f"its inputs are on {sorted(wrong)}, not on cpu")
            return interpret(program, tensors, sizes)
        except KernelError as error:
            return self._give_up(error, arguments)
        except ImportError as error:
            return self._give_up(MissingTritonError(detail=error), arguments)


def _brief(error: KernelError) -> str:
    """Return the reason in a line: Triton's messages quote the kernel between their first and last lines."""
    if "detail" not in error.fields:
        return first_line(error)
    lines = [line.strip() for line in str(error.fields["detail"]).splitlines() if line.strip()]
    return " ... ".join(dict.fromkeys((lines[0], lines[-1]))) if lines else type(error).__name__


class _Bound:
    """A program on a device has the launch functions of its variants, each built when first needed."""

    def __init__(self, runner: Runner, program: Program, gpu: Gpu, *, behind: bool = False) -> None:
        self._runner = runner
        self._program = program
        self._gpu = gpu
        self._behind = behind
        self._variants: dict[Variant, Launcher] = {}
        self._launch_names = frozenset(
            a.launch_name for k in program.kernels for a in k.arguments if a.launch_name
        )

    def variant(self, loose: frozenset[str] = frozenset(), wide: bool = False) -> Launcher:
        """Return the launch function of a variant. Raise KernelError when a kernel does not compile or needs
        more than the device has."""
        wanted = Variant(loose, wide)
        launcher = self._variants.get(wanted)
        if launcher is None:
            program = self._runner.for_any_address(self._program) if loose else self._program
            builds = program_builds(program, self._gpu.target, wanted)
            entries = [self._load(b, k) for b, k in zip(builds, program.kernels, strict=True)]
            launcher = self._variants[wanted] = bind(
                program,
                wanted,
                entries,
                self._gpu,
                self._late_variant,
                self._runner._dispatch,
                self._runner._too_large,
            )
        return launcher

    def _late_variant(self, loose: frozenset[str], wide: bool) -> Launcher:
        """Return a variant that a later call needs. When it cannot be built, the fallback takes that call.

        If calls differ in what is aligned, those after the first few rely on nothing.
        """
        if len(self._variants) >= MOST_VARIANTS and Variant(loose, wide) not in self._variants:
            loose = self._launch_names
        try:
            return self.variant(loose, wide)
        except KernelError as error:
            failure = error
        return lambda *arguments: self._runner._give_up(failure, arguments)

    def _load(self, build: Build, kernel: Kernel) -> Entry:
        together, entry = kernel.together, loaded(self._gpu, build)
        needed = together if together == 1 or _fits(kernel, entry) else LAUNCHES_AT_ONCE * together
        if entry.resident is not None and entry.resident < needed:
            fields = {"resource": "programs at a time", "needed": needed, "available": entry.resident}
            raise HardwareExceededError(kernel=build.name, device=self._gpu.name, **fields)
        return entry.behind if self._behind and entry.behind is not None else entry


def gpu_for(
    gpus: Callable[[torch.device | None], Gpu], device: torch.device | None, kernel: str
) -> Gpu:
    """Return the GPU that `gpus` finds. Raise KernelError if it cannot be launched on."""
    try:
        return gpus(device)
    except FusionError:
        raise
    except Exception as error:  # no driver, a device that cannot be launched on
        raise KernelError(kernel=kernel, action="launch", detail=error) from error


def loaded(gpu: Gpu, build: Build) -> Entry:
    """Return a build, ready to launch. Raise KernelError if it does not compile or needs more than the GPU
    has."""
    try:
        return gpu.load(build)
    except Exception as error:
        limit = getattr(error, "limit", None)  # Triton's OutOfResources
        if limit is not None:
            fields = {"resource": getattr(error, "name", ""), "needed": getattr(error, "required", "")}
            fields |= {"available": limit, "device": gpu.name}
            raise HardwareExceededError(kernel=build.name, **fields) from error
        detail = f"{type(error).__name__}: {error}"
        raise KernelError(kernel=build.name, action="compile", detail=detail) from error


def _fits(kernel: Kernel, entry: Entry) -> bool:
    """True if all programs of every launch are on the device at the same time."""
    programs = product(kernel.grid)
    return isinstance(programs, int) and entry.resident is not None and programs <= entry.resident


def program_builds(
    program: Program, target: tuple[str, int | str, int], variant: Variant | None = None
) -> list[Build]:
    """Return the builds of a program's kernels, in order."""
    variant = variant or Variant()
    return [build_of(kernel, target, variant.loose, variant.wide) for kernel in program.kernels]


def tuning_key(candidates: Iterable[Program], device: str) -> Key:
    """Return the key of a tuning record: everything on which its outcome depends."""
    kernels = [
        (
            *(kernel.source, kernel.grid, kernel.num_warps, kernel.num_stages, kernel.registers),
            *(kernel.fp_fusion, kernel.dependent, kernel.arguments),
        )
        for program in candidates
        for kernel in program.kernels
    ]
    return TUNING.key(kernels=repr(kernels), device=device)


def compile_all(
    runners: Iterable[Runner], device: torch.device | None = None, progress: Progress | None = None
) -> bool:
    """Begin to compile the kernels of many clusters in parallel, ahead of their first calls, which wait.

    Equal kernels are compiled once, and if an earlier process has tuned a cluster, its winner alone. device:
    by default the current CUDA device. progress: shows how many kernels are done, and of how many, while a
    call waits. Kernels that do not compile are reported by the runners that need them, when they are called.
    Returns whether there is anything to compile.
    """
    builds: list[Build] = []
    asked: list[Runner] = []
    for runner in runners:
        if runner.backend != "triton" or runner.background is not None:
            continue
        try:
            gpu = runner._gpus(device)
        except Exception:  # no Triton or no driver: each runner says so when it is called
            continue
        programs = runner.candidates if runner.tune else runner.candidates[:1]
        recorded = runner._recorded(gpu) if len(programs) > 1 else None
        if recorded is not None:
            programs = (runner.candidates[recorded.candidate],)
        builds += [build for program in programs for build in program_builds(program, gpu.target)]
        asked.append(runner)
    if not asked:
        return False
    make_cache_writable()
    background = BackgroundBuilds(builds, progress or Progress(enabled=False))
    for runner in asked:
        runner.background = background
    return background.is_needed


def interpret(
    program: Program, inputs: Sequence[torch.Tensor], sizes: Sequence[int] = ()
) -> tuple[torch.Tensor, ...]:
    """Run a program on CPU tensors in Triton's interpreter, and return its outputs.

    Raises KernelError when a kernel fails, or leaves behind scratch that it should leave zero.
    """
    from fusion_compiler.runtime.interpreter import run_kernel

    def allocate(buffer: Buffer) -> torch.Tensor:
        shape, stride = (evaluate(dims, program, sizes) for dims in (buffer.shape, buffer.stride))
        empty = torch.empty_strided(shape, stride, dtype=buffer.dtype)
        return empty.zero_() if buffer.zeroed else empty

    def shown(tensor: torch.Tensor, buffer: Buffer) -> torch.Tensor:
        form = [evaluate(dims, program, sizes) for dims in (buffer.shape, buffer.stride)]
        return tensor if form == [tensor.shape, tensor.stride()] else restrided(tensor, form[0], form[1], 0)

    places = [(program.overwritten_input(buffer), buffer) for buffer in program.outputs]
    outputs = [allocate(b) if position is None else shown(inputs[position], b) for position, b in places]
    scratch = [allocate(buffer) for buffer in program.scratch]
    sizes = evaluate(program.symbols, program, sizes)
    values = {Role.INPUT: inputs, Role.OUTPUT: outputs, Role.SCRATCH: scratch, Role.SIZE: sizes}
    for kernel in program.kernels:
        arguments = [values[argument.role][argument.position] for argument in kernel.arguments]
        run_kernel(kernel, arguments, evaluate(kernel.grid, program, sizes))
    for tensor, buffer in zip(scratch, program.scratch, strict=True):
        if buffer.zeroed and tensor.count_nonzero():
            detail = f"scratch {buffer.name} is not zero at the end"
            raise KernelError(kernel=program.kernels[-1].name, action="clear its scratch", detail=detail)
    return tuple(outputs)
