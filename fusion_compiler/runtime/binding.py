"""Generate one Python function per program and device that does nothing but what each call must do.

Shapes, strides, grids and the kernels' entries are known when a program is built: they are written into the
function's text or bound to its names. A call takes the addresses of the inputs, allocates the outputs, and
launches. For a program of one kernel with two inputs and one output of fixed shape (and no first test where
there is one device):

    def launch(x0, x1):
        if current_device() != 0 or x0.get_device() != 0:
            return elsewhere(x0, x1)
        p0 = x0.data_ptr()
        p1 = x1.data_ptr()
        if (p0 | p1) & 15:
            return variant(False, False)(x0, x1)
        stream = current_stream(0)
        y0 = empty((64, 4096), (4096, 1), bfloat16)
        run0(64, 1, 1, stream, function0, packed0, None, None, None, p0, p1, y0.data_ptr())
        return (y0,)
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import linecache
import math
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

import sympy
import torch
from torch.utils._sympy.printers import PythonPrinter

from fusion_compiler.ir.kernel import Buffer, Dim, Kernel, Program, Role
from fusion_compiler.ir.views import reinterpreted
from fusion_compiler.runtime.builds import Build

# Launch limits of CUDA and HIP, per axis of the grid.
GRID_LIMITS = (2**31 - 1, 65535, 65535)
INT32_MAX = 2**31 - 1

Launcher = Callable[..., tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Entry:
    """An entry is a kernel on a device, ready to launch: CompiledKernel.run and what it takes each time.

    owner: keeps the loaded code alive. direct: what `run` itself calls, and with which arguments,
    where that is known: constants, `Varying` ones, and tuples of them.
    apart: of a kernel that is launched cooperatively, how it is launched otherwise. resident: so many of its
    programs the device holds at a time, where that is known. behind: of one that starts while the kernel
    before it runs, how it starts when that has ended.
    """

    run: Callable[..., None]
    function: object
    packed: object
    owner: object = None
    direct: tuple[Callable[..., None], tuple[object, ...]] | None = None
    apart: Entry | None = None
    resident: int | None = None
    behind: Entry | None = None


@dataclass(frozen=True)
class Varying:
    """An object of this class stands for an argument that differs from launch to launch: "x", "y", "z"
    (grid), "stream" or "0", "1", ..."""

    name: str


def direct_call(
    run: Any, function: object, packed: object, count: int
) -> tuple[Callable[..., None], tuple[object, ...]] | None:
    """Return the function that a Triton launcher calls for a kernel of `count` parameters, and its arguments.
    Return None if the launcher does more than pass the kernel's arguments on.

    A launcher is a Python object that sorts its arguments and allocates scratch before it calls a C function,
    `run.launch`; asking it what it would pass on works for any version of Triton.
    """
    calls: list[tuple[object, ...]] = []
    grid = [Varying(axis) for axis in "xyz"]
    arguments = [Varying(str(i)) for i in range(count)]
    try:
        launch = run.launch
        probe = copy.copy(run)
        probe.launch = lambda *sent: calls.append(sent)
        probe(*grid, Varying("stream"), function, packed, None, None, None, *arguments)
    except Exception:  # it computes with the grid: it needs scratch of its own
        return None
    passed = [v for v in _flat(calls) if isinstance(v, Varying)]
    if len(calls) != 1 or sorted(v.name for v in passed) != sorted(
        v.name for v in (*grid, Varying("stream"), *arguments)
    ):
        return None
    return launch, calls[0]


def _flat(value: object) -> Iterable[object]:
    if isinstance(value, tuple | list):
        for item in value:
            yield from _flat(item)
    else:
        yield value


class Gpu(Protocol):
    """A Gpu has what launching needs of one device; `cuda.CudaGpu` is the real one.

    alone: the process sees no other device, so that no call can be another's.
    turn: held while programs that wait for each other are launched. follow: called with the stream before
        such a launch, so that it comes after those on other streams. room: bytes that may be allocated
        without a new peak.
    """

    index: int
    alone: bool
    name: str
    target: tuple[str, int | str, int]
    turn: threading.Lock

    def current_device(self) -> int: ...
    def current_stream(self, index: int, /) -> int: ...
    def empty(self, shape: Any, stride: Any, dtype: torch.dtype, /) -> torch.Tensor: ...
    def active(self) -> AbstractContextManager[None]: ...
    def is_capturing(self) -> bool: ...
    def follow(self, stream: int, /) -> None: ...
    def load(self, build: Build) -> Entry: ...
    def times(self, calls: Sequence[Callable[[], object]]) -> list[float]: ...
    def room(self) -> int: ...


@dataclass(frozen=True)
class Variant:
    """A variant says which builds of a program's kernels are used: see `target.build_of`."""

    loose: frozenset[str] = frozenset()
    wide: bool = False


def misaligned(alignment: int, /, **values: int) -> frozenset[str]:
    """Return the names of addresses and sizes that are no multiples of `alignment`."""
    return frozenset(name for name, value in values.items() if value % alignment)


# -- expressions ----------------------------------------------------------------------------------


class _ExactPrinter(PythonPrinter):
    """Print sizes as Python text that computes in integers: the base class divides in floating point."""

    def _ratio(self, expression: sympy.Expr) -> tuple[str, str]:
        numerator, denominator = sympy.fraction(sympy.together(expression))
        return f"({self.doprint(numerator)})", f"({self.doprint(denominator)})"

    def _print_floor(self, expr: sympy.Expr) -> str:
        numerator, denominator = self._ratio(expr.args[0])  # type: ignore[arg-type]
        return f"({numerator} // {denominator})"

    def _print_ceiling(self, expr: sympy.Expr) -> str:
        numerator, denominator = self._ratio(expr.args[0])  # type: ignore[arg-type]
        return f"(-(-{numerator} // {denominator}))"

    def _print_Rational(self, expr: sympy.Rational) -> str:  # noqa: N802
        return f"Fraction({expr.p}, {expr.q})"


# What the texts of sizes call.
FUNCTIONS: dict[str, Any] = {"Fraction": Fraction, "math": math, "torch": torch}


def dim_source(dim: Dim, sizes: Sequence[sympy.Symbol]) -> str:
    """Return Python text for a size, in terms of n0, n1, ... for `sizes`; it computes in integers
    throughout."""
    if isinstance(dim, int):
        return str(dim)
    names = {symbol: sympy.Symbol(f"n{i}", integer=True, positive=True) for i, symbol in enumerate(sizes)}
    unknown = dim.free_symbols - set(sizes)
    if unknown:
        raise ValueError(f"{dim} depends on {unknown}, which are not sizes of the program")
    text = _ExactPrinter().doprint(dim.xreplace(names))
    return f"int({text})" if "Fraction" in text else text


def _tuple_source(dims: Iterable[Dim], sizes: Sequence[sympy.Symbol]) -> str:
    return "(" + "".join(f"{dim_source(dim, sizes)}, " for dim in dims) + ")"


def evaluate(dims: Iterable[Dim], program: Program, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the values of `dims` for the values `sizes` of the symbols that a call passes to the program."""
    names = FUNCTIONS | {f"n{i}": value for i, value in enumerate(sizes)}
    for i, (_, size) in enumerate(program.derived, len(program.sizes)):
        names[f"n{i}"] = eval(dim_source(size, program.sizes), dict(names))
    return tuple(eval(_tuple_source(dims, program.symbols), names))


# -- scratch ----------------------------------------------------------------------------------------


class _PerThread(threading.local):
    """Each thread has, for each stream, the tensors and how many elements were allocated."""

    def __init__(self) -> None:
        self.by_stream: dict[int, tuple[tuple[int, ...], tuple[torch.Tensor, ...]]] = {}


class _Unkept(threading.local):
    cleared: dict[int, torch.Tensor] | None = None  # for each stream, what launches within share


_unkept = _Unkept()
KEPT_BYTES = 1 << 20  # of one kernel's, from launch to launch
SHARED_BYTES = 1 << 16  # of counters of any kernel; mailboxes of many rows are more


@contextmanager
def unkept_scratch() -> Generator[None]:
    """Let launches in this thread keep no scratch for later ones, while entered."""
    before, _unkept.cleared = _unkept.cleared, {}
    try:
        yield
    finally:
        _unkept.cleared = before


class ZeroedScratch:
    """Allocate buffers that kernels find zero and leave zero, so that none is cleared before a launch.

    They are kept for each stream, because launches on one stream follow each other, and for each thread,
    because two threads may alternate launches of a program's kernels on one stream. Large buffers, such as
    the mailboxes of thousands of rows, are not kept: they are cleared in a hundredth of such a kernel's time.
    While a CUDA graph is captured, buffers are allocated, and cleared by the graph, which may later be
    replayed beside other work. Within `unkept_scratch` this happens once for all launches on a stream, since
    each leaves the buffers zero for the next. This holds for kernels that start while others end, too: they
    touch scratch behind their wait.
    """

    def __init__(self, gpu: Gpu, buffers: Sequence[Buffer]) -> None:
        self._gpu = gpu
        self._dtypes = [buffer.dtype for buffer in buffers]
        self._kept = _PerThread()

    def __call__(self, stream: int, elements: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        """Return tensors of at least so many elements each, all zero when the stream comes to them."""
        if _unkept.cleared is not None:
            return self._shared(_unkept.cleared, stream, elements)
        if self._gpu.is_capturing():
            return self._allocate(elements)
        kept = self._kept.by_stream.get(stream)
        if kept is None or any(have < need for have, need in zip(kept[0], elements, strict=True)):
            tensors = self._allocate(elements)
            if sum(tensor.nbytes for tensor in tensors) > KEPT_BYTES:
                return tensors
            kept = self._kept.by_stream[stream] = (elements, tensors)
        return kept[1]

    def _shared(
        self, cleared: dict[int, torch.Tensor], stream: int, elements: tuple[int, ...]
    ) -> tuple[torch.Tensor, ...]:
        sizes = [count * dtype.itemsize for count, dtype in zip(elements, self._dtypes, strict=True)]
        ends = list(itertools.accumulate(-(-size // 16) * 16 for size in sizes))  # all begin aligned
        if ends[-1] > SHARED_BYTES:
            return self._allocate(elements)
        if stream not in cleared:
            cleared[stream] = self._gpu.empty((SHARED_BYTES,), (1,), torch.uint8).zero_()
        starts, memory = [0, *ends], cleared[stream]
        parts = zip(starts, sizes, self._dtypes, strict=False)
        return tuple(memory[start : start + size].view(dtype) for start, size, dtype in parts)

    def _allocate(self, elements: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        pairs = zip(elements, self._dtypes, strict=True)
        return tuple(self._gpu.empty((count,), (1,), dtype).zero_() for count, dtype in pairs)


# -- the function ---------------------------------------------------------------------------------


class _Text:
    """A text has the lines of a function and the values of its names."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: dict[str, Any] = dict(FUNCTIONS)

    def add(self, line: str) -> None:
        self.lines.append("    " + line)

    def bind(self, name: str, value: object) -> str:
        self.names[name] = value
        return name


def bind(
    program: Program,
    variant: Variant,
    entries: Sequence[Entry],
    gpu: Gpu,
    others: Callable[[frozenset[str], bool], Launcher],
    elsewhere: Launcher,
    too_large: Launcher,
) -> Launcher:
    """Return the function that runs `program` on `gpu`: inputs, then sizes, to the tuple of outputs.

    entries: the program's kernels, built for `variant`. others: gives the function of another
    variant. elsewhere: takes calls whose first input or whose thread is on another device.
    too_large: takes calls whose grid the hardware cannot launch.
    """
    text = _Text()
    inputs = [f"x{i}" for i in range(len(program.inputs))]
    parameters = ", ".join([*inputs, *(f"n{i}" for i in range(len(program.sizes)))])
    if not gpu.alone:
        device = f" or x0.get_device() != {gpu.index}" if inputs else ""
        text.bind("elsewhere", elsewhere)
        text.bind("current_device", gpu.current_device)
        text.add(f"if current_device() != {gpu.index}{device}:")
        text.add(f"    return elsewhere({parameters})")
    for i, (_, size) in enumerate(program.derived, len(program.sizes)):
        text.add(f"n{i} = {dim_source(size, program.sizes)}")
    _write_variants(text, program, variant, parameters, others)
    grids = _write_grids(text, program, parameters, too_large)
    _write_buffers(text, program, gpu)
    for i, (kernel, entry) in enumerate(zip(program.kernels, entries, strict=True)):
        _write_launch(text, i, kernel, entry, grids[i], gpu)
    text.add("return (" + "".join(f"y{i}, " for i in range(len(program.outputs))) + ")")
    source = "\n".join([f"def launch({parameters}):", *text.lines, ""])
    names = " ".join(kernel.name for kernel in program.kernels)
    file = f"<fusion_compiler launch of {names} {hashlib.sha256(source.encode()).hexdigest()[:12]}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), text.names)
    return text.names["launch"]


def _write_variants(
    text: _Text,
    program: Program,
    variant: Variant,
    parameters: str,
    others: Callable[[frozenset[str], bool], Launcher],
) -> None:
    """Write the lines that take the addresses of the inputs and pass calls on to other variants if they need
    other builds."""
    arguments = [argument for kernel in program.kernels for argument in kernel.arguments]
    text.bind("variant", others)
    narrow = sorted({a.position for a in arguments if a.role is Role.SIZE and a.dtype == torch.int32})
    if narrow and not variant.wide:
        text.add(f"if {' or '.join(f'n{i} > {INT32_MAX}' for i in narrow)}:")
        text.add(f"    return variant({text.bind('loose', variant.loose)}, True)({parameters})")
    used = sorted({a.position for a in arguments if a.role is Role.INPUT})
    for i in used:
        text.add(f"p{i} = x{i}.data_ptr()")
    claimed = sorted({a.launch_name for a in arguments if a.launch_name and a.aligned})
    relied_on = [name for name in claimed if name not in variant.loose]
    if relied_on:
        text.bind("misaligned", misaligned)
        loose = f"misaligned({program.alignment}, {', '.join(f'{name}={name}' for name in claimed)})"
        text.add(f"if ({' | '.join(relied_on)}) & {program.alignment - 1}:")
        text.add(f"    return variant({loose}, {variant.wide})({parameters})")


def _write_grids(
    text: _Text, program: Program, parameters: str, too_large: Launcher
) -> list[tuple[str, str, str]]:
    """Write the lines that compute every grid before anything is launched. Return three texts for each
    kernel."""
    text.bind("too_large", too_large)
    grids: list[tuple[str, str, str]] = []
    for i, kernel in enumerate(program.kernels):
        extents: list[str] = []
        for axis, dim in enumerate((*kernel.grid, 1, 1)[:3]):
            source = dim_source(dim, program.symbols)
            if not isinstance(dim, int):
                text.add(f"g{i}{axis} = {source}")
                source = f"g{i}{axis}"
            if not isinstance(dim, int) or dim > GRID_LIMITS[axis]:
                text.add(f"if {source} > {GRID_LIMITS[axis]}:")
                text.add(f"    return too_large({parameters})")
            extents.append(source)
        grids.append((extents[0], extents[1], extents[2]))
    return grids


def _write_buffers(text: _Text, program: Program, gpu: Gpu) -> None:
    """Write the lines that allocate outputs y0, y1, ..., unless they are written into inputs, and scratch s0,
    s1, ..."""
    text.bind("empty", gpu.empty)
    text.add(f"stream = {text.bind('current_stream', gpu.current_stream)}({gpu.index})")
    zeroed = [i for i, buffer in enumerate(program.scratch) if buffer.zeroed]
    plain = [(f"s{i}", b) for i, b in enumerate(program.scratch) if not b.zeroed]
    for name, buffer in [*((f"y{i}", b) for i, b in enumerate(program.outputs)), *plain]:
        shape = _tuple_source(buffer.shape, program.symbols)
        stride = _tuple_source(buffer.stride, program.symbols)
        if (position := program.overwritten_input(buffer)) is not None:
            overwritten = program.inputs[position]
            if (overwritten.shape, overwritten.stride) == (buffer.shape, buffer.stride):
                text.add(f"{name} = x{position}")
            else:
                text.bind("reinterpreted", reinterpreted)
                text.add(f"{name} = reinterpreted(x{position}, {shape}, {stride}, 0)")
            continue
        dtype = text.bind(str(buffer.dtype).removeprefix("torch."), buffer.dtype)
        text.add(f"{name} = empty({shape}, {stride}, {dtype})")
    if zeroed:
        buffers = [program.scratch[i] for i in zeroed]
        text.bind("zeroed_scratch", ZeroedScratch(gpu, buffers))
        elements = _tuple_source([math.prod(buffer.shape) for buffer in buffers], program.symbols)
        text.add(f"{''.join(f's{i}, ' for i in zeroed)}= zeroed_scratch(stream, {elements})")


def _write_launch(
    text: _Text, number: int, kernel: Kernel, entry: Entry, grid: tuple[str, str, str], gpu: Gpu
) -> None:
    """Write the lines that launch one kernel, unless an extent of its grid is zero."""
    values = {
        Role.INPUT: "p{}",
        Role.OUTPUT: "y{}.data_ptr()",
        Role.SCRATCH: "s{}.data_ptr()",
        Role.SIZE: "n{}",
    }
    arguments = [values[a.role].format(a.position) for a in kernel.arguments]
    text.names[f"owner{number}"] = entry.owner
    if "0" in grid:
        return
    unknown = [extent for extent in grid if not extent.isdigit()]
    here = f"if {' and '.join(unknown)}: " if unknown else ""
    if entry.apart is None:
        text.add(here + _call(text, str(number), entry, grid, arguments))
        return
    programs = " * ".join(grid)
    if unknown:
        text.add(f"if {programs}:")
    text.bind("turn", gpu.turn)
    text.bind("follow", gpu.follow)
    indent = "    " if unknown else ""
    text.add(f"{indent}with turn:")
    text.add(f"{indent}    follow(stream)")
    if unknown:
        text.add(f"        if {programs} <= {entry.resident or 0}:")
        text.add(f"            {_call(text, str(number), entry, grid, arguments)}")
        text.add("        else:")
        text.add(f"            {_call(text, f'{number}_apart', entry.apart, grid, arguments)}")
    else:
        fits = math.prod(map(int, grid)) <= (entry.resident or 0)
        text.add(f"    {_call(text, str(number), entry if fits else entry.apart, grid, arguments)}")


def _call(
    text: _Text, number: str, entry: Entry, grid: tuple[str, str, str], arguments: Sequence[str]
) -> str:
    """Return the text of a launch."""
    if entry.direct is not None:
        texts = dict(zip("xyz", grid, strict=True)) | {"stream": "stream"}
        texts |= {str(i): argument for i, argument in enumerate(arguments)}
        launch, layout = entry.direct
        return f"{text.bind(f'run{number}', launch)}({_passed(text, number, layout, texts)})"
    run = text.bind(f"run{number}", entry.run)
    function = text.bind(f"function{number}", entry.function)
    packed = text.bind(f"packed{number}", entry.packed)
    return f"{run}({', '.join([*grid, 'stream', function, packed, 'None', 'None', 'None', *arguments])})"


def _passed(text: _Text, number: str, layout: Iterable[object], texts: Mapping[str, str]) -> str:
    """Return the arguments of a direct call as text."""
    parts: list[str] = []
    for value in layout:
        if isinstance(value, Varying):
            parts.append(texts[value.name])
        elif isinstance(value, tuple | list) and any(isinstance(v, Varying) for v in _flat(value)):
            parts.append(f"({_passed(text, number, value, texts)},)")
        elif value is None or isinstance(value, bool | int):
            parts.append(repr(value))
        else:
            parts.append(text.bind(f"fixed{number}_{len(text.names)}", value))
    return ", ".join(parts)
